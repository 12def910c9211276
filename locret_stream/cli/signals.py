"""How Ctrl-C and other signals end a verb: a summary on stderr, and the exit status of the signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from locret_stream.cli.errors import INTERRUPTED, STOPPED
from locret_stream.cli.output import describe

if TYPE_CHECKING:
    from locret_stream.context import Memory


class Summary:
    """What a verb has done so far, in words; printed when a signal ends the verb."""

    def __init__(self, text: object = "nothing was fed yet") -> None:
        self._text = text
        self._memory: Callable[[], Memory] | None = None

    @contextmanager
    def watching(self, memory: Callable[[], Memory]) -> Iterator[None]:
        """Summarise the memory that the callable returns: inside as it is now, afterwards as it was at the end."""
        self._memory = memory
        try:
            yield
        finally:
            self._text, self._memory = describe(memory()), None

    def __str__(self) -> str:
        return describe(self._memory()) if self._memory else str(self._text)


@contextmanager
def interruptible(summary: Summary) -> Iterator[None]:
    """Ctrl-C inside prints the summary and ends the verb with status 130; so do the signals of `STOPPED`, each with its
    own status. Slow imports belong inside."""
    status = INTERRUPTED
    # Where SIGINT is ignored, as behind a shell's `&`, asyncio, which ends its tasks in order for that signal, does not
    # listen to it. So it is held back instead, and whoever listens is told of the other signals.
    unheard = {signal.SIGINT} if _is_unheard(signal.SIGINT) else set()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = STOPPED[signal.Signals(number).name]
        listener = signal.getsignal(signal.SIGINT)
        if not unheard and listener is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
        elif callable(listener):
            listener(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in STOPPED if hasattr(signal, name)]
    held = signal.pthread_sigmask(signal.SIG_BLOCK, unheard) if unheard else set()
    before = {number: signal.signal(number, signal.default_int_handler) for number in unheard} | {
        number: signal.signal(number, stop) for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN}  # nohup ignores SIGHUP, which then stays ignored
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be closed
            print(f"\n{'Interrupted' if status == INTERRUPTED else 'Terminated'}: {summary}.", file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if unheard:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _is_unheard(number: signal.Signals) -> bool:
    """Whether a signal is ignored, or held back, as a process that such a one starts finds it. Windows holds none."""
    return hasattr(signal, "pthread_sigmask") and (
        signal.getsignal(number) is signal.SIG_IGN or number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
