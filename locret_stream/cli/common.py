"""What every verb shares: one-line errors, Ctrl-C, consoles, text from files and stdin. Knows no model."""

from __future__ import annotations

import asyncio
import codecs
import errno
import functools
import io
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from locret_stream.errors import ConfigError, InputError, InvalidText, LocretError, SourceError

if TYPE_CHECKING:
    from locret_stream.context import Memory
    from locret_stream.runtime import Runtime

# Options that several verbs have.
Model = Annotated[str, typer.Option(help=(
    'A folder of a causal language model or of an adapter, a GGUF file, a hub id, or "bundled".'))]
Heads = Annotated[Path | None, typer.Option(help="Folder of retaining heads, where the model brings none.")]
Policy = Annotated[str, typer.Option(help="What decides which units stay.")]
Units = Annotated[str | None, typer.Option(show_default="768 for the bundled model, else 6000", help=(
    "Units kept per KV head (mean over the layers), or a size such as 512MiB."))]
Chunk = Annotated[int | None, typer.Option(min=1, show_default="256 for the bundled model, else 1024", help=(
    "Tokens read between two evictions."))]
Device = Annotated[str | None, typer.Option(show_default="cuda where there is one", help=(
    'Where to run; "auto" spreads a model over all devices.'))]
Dtype = Annotated[str, typer.Option(help="Of the weights, such as bfloat16.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, progress on stderr.")]

DEFAULT_STORE = "~/.local/share/locret"
StoreUrl = Annotated[str, typer.Option("--store", envvar="LOCRET_STORE", help=(
    "Where sessions are kept: a folder, or a URL such as s3://bucket/memories."))]
Key = Annotated[str | None, typer.Option(envvar="LOCRET_KEY", help=(
    "64 hexadecimal digits under which sessions are encrypted; better given by the variable."))]

MISTAKE, INTERRUPTED = 2, 130
STOPPED = {"SIGTERM": 143, "SIGHUP": 129}  # what `kill`, service managers and closed terminals send, and exit statuses
PIECE_BYTES = 1 << 16
DIGITS = 1_000  # of a number; of more than 4,300 Python makes none

# Nothing printed is markup: file names, questions and answers are data.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


class OneLineGroup(TyperGroup):
    """Every mistake of the user ends in one line on stderr and exit status 2, never in a traceback."""

    def main(self, args: list[str] | None = None, prog_name: str | None = None, standalone_mode: bool = True,
             **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        for stream in (sys.stdout, sys.stderr):  # what their encoding lacks is written out, rather than lost at the end
            if not writes_everything(stream) and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
            if code == INTERRUPTED:  # before or after a verb's own `interruptible`
                print("\nInterrupted.", file=sys.stderr)
        except typer.TyperException as error:
            if not error.format_message():  # help was asked for by giving nothing
                raise SystemExit(0) from None
            fail(error.format_message(), error.exit_code)
        except LocretError as error:
            fail(explain(error))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent
            raise SystemExit(1) from None
        except OSError as error:
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG):
                raise
            if error.filename is None:  # of stdout or stderr: of files the store and the readers tell themselves
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            fail(f"{error.filename or 'the output cannot be written'}: {error.strerror or error}")
        except typer.Abort:
            fail("aborted", 1)
        if standalone_mode:
            raise SystemExit(code if isinstance(code, int) else 0)
        return code


def writes_everything(stream: Any) -> bool:
    """Whether its encoding has every character of a text."""
    try:
        "\U0010fffd".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def explain(error: BaseException) -> str:
    """The message that helps: of a failing source its own reason, if that was a mistake one can name."""
    if isinstance(error, SourceError) and isinstance(error.__cause__, (LocretError, OSError)):
        cause = error.__cause__
        return f"{cause.filename}: {cause.strerror}" if isinstance(cause, OSError) and cause.filename else str(cause)
    return str(error)


def fail(message: str, code: int = MISTAKE) -> NoReturn:
    """Say it in one line on stderr and exit."""
    print("locret-stream:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)


class Held:
    """What a verb holds at any moment, in words: the last thing said after Ctrl-C."""

    def __init__(self, note: str = "nothing was fed yet") -> None:
        self.note, self._read = note, None

    @contextmanager
    def watching(self, read: Callable[[], Memory]) -> Iterator[None]:
        """While open, `read` tells what is held; its last word stays when the context is closed."""
        self._read = read
        try:
            yield
        finally:
            self.note, self._read = describe(read()), None

    def __str__(self) -> str:
        return describe(self._read()) if self._read else self.note


@contextmanager
def interruptible(held: Held) -> Iterator[None]:
    """Ctrl-C inside ends the verb with a summary and its own exit status; so do the signals of `STOPPED`. Imports of
    what is slow belong inside."""
    status = INTERRUPTED

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = STOPPED[signal.Signals(number).name]
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it; asyncio then awaits none
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    numbers = [getattr(signal, name) for name in STOPPED if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers
              if signal.getsignal(number) is not signal.SIG_IGN}  # as nohup has it
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print(f"\n{'Interrupted' if status == INTERRUPTED else 'Terminated'}: {held}.", file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_runtime(model: str, heads: Path | None, policy: str, budget: str | int | None, chunk_size: int | None,
                 **options: Any) -> Runtime:
    """A running runtime for one context, to be closed with `aclosing`; what is None keeps the runtime's own default.

    Call it outside of an event loop: Ctrl-C then interrupts imports and loading at once.
    """
    _about_to_load(model)
    from locret_stream.runtime import Runtime

    if isinstance(budget, str) and budget.strip().isdecimal():
        if len(budget) > DIGITS:
            raise ConfigError(f"budget is a number of {len(budget):,} digits; expected units per KV head, or a size "
                              "such as '512MiB'")
        budget = int(budget)
    given = {"heads": heads, "budget": budget, "chunk_size": chunk_size, **options}
    runtime = Runtime.from_pretrained(model, policy=policy, max_live=1,
                                      **{name: value for name, value in given.items() if value is not None})
    runtime.start()
    return runtime


def beside(runtime: Runtime, policy: str) -> Runtime:
    """A second running one on a thread of its own: `Runtime.beside`, started. The two share the cores."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    second = runtime.beside(policy, own_thread=True)
    second.start()
    return second


def load(model: str, **options: Any) -> tuple[Any, Any]:
    """The model and its tokenizer alone; `options` are "device" and "dtype"."""
    _about_to_load(model)
    from locret_stream.runtime import Runtime

    return Runtime.from_pretrained(model, policy="random", **options).load()


def _about_to_load(model: str) -> None:
    for name in ("torchao", "torch.utils._pytree"):  # which speak of themselves wherever torchao is installed
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if model != "bundled" and not Path(model).exists() and model.count("/") < 2:
        err.print(f"{model} is no folder here: asking the Hugging Face hub.", soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """One object, one line, on stdout."""
    print(json.dumps(value, ensure_ascii=not writes_everything(sys.stdout)), flush=True)


# -- words for numbers --------------------------------------------------------------------------------------------


def in_bytes(count: float) -> str:
    """A size as people read it: 6.1 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def mean(values: Any) -> float:
    """Mean over layers of a per-layer list, or the number itself."""
    values = [values] if isinstance(values, (int, float)) else list(values)
    return sum(values) / len(values)


def describe(memory: Memory) -> str:
    """What a context holds, in one sentence."""
    waiting = f", a focus of {memory.focus:,} tokens among them," if memory.focus else ""
    waiting += f" and the newest {memory.pending:,} tokens" if memory.pending else ""
    rest = f"; {memory.buffered:,} ids and characters more were pulled and are read next" if memory.buffered else ""
    return (f"{memory.tokens:,} tokens read, {mean(memory.units):,.0f} units per KV head (mean over layers){waiting} "
            f"held in {in_bytes(memory.bytes_resident)}; a full cache would need {in_bytes(memory.bytes_full_cache)}"
            f"{rest}")


# -- text from files and stdin ------------------------------------------------------------------------------------


def check_readable(path: Path) -> None:
    """Fail early, before a model is loaded, where a file cannot be read.

    A pipe is not opened: whoever writes to it would lose its only reader when it is closed again.
    """
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise InputError(f"{path} is a folder; expected text files")
    if stat.S_ISREG(kind):
        with path.open("rb"):
            pass
    elif not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def file_text(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in pieces, ending in a newline, so that the next file starts on a line of its own."""
    decode = _strict_utf8(str(path))
    last = "\n"
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            if text := decode(data):
                yield (last := text)
    if text := decode(b"", final=True):
        yield (last := text)
    if not last.endswith("\n"):
        yield "\n"


async def path_text(path: Path) -> AsyncIterator[str]:
    """As `file_text`, inside an event loop: a pipe that nobody writes to yet, or whose writer pauses, is awaited, so
    that signals end that too."""
    file, last = _opened_at_once(path), "\n"
    if file is None:
        for piece in file_text(path):
            yield piece
        return
    with file:
        async for piece in Reader(str(path), file).pieces():
            yield (last := piece)
    if not last.endswith("\n"):
        yield "\n"


def _opened_at_once(path: Path) -> io.FileIO | None:
    """A pipe or a device, whether somebody writes to it or not; None for a file."""
    if path.is_file():
        return None
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _strict_utf8(name: str) -> Callable[..., str]:
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0

    def decode(data: bytes, final: bool = False) -> str:
        nonlocal read
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise InvalidText(f"{name}: byte {read - held + error.start} is not UTF-8; expected UTF-8 text") from None
        read += len(data)
        return text

    return decode


def stdin_is_terminal() -> bool:
    """Whether somebody types; False also where there is no stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


class Reader:
    """Text from a pipe or terminal as it comes, without a thread: nothing is left blocking when a task is cancelled."""

    def __init__(self, name: str = "stdin", file: io.BufferedReader | io.FileIO | None = None):
        self.name, self._decode = name, _strict_utf8(name)
        self._file = file or sys.stdin.buffer
        self._rest, self._ended = "", False

    async def pieces(self) -> AsyncIterator[str]:
        """Decoded text until the end of the file."""
        while not self._ended:
            if text := await self._text():
                yield text

    async def line(self) -> str | None:
        """The next line without its newline, None at the end."""
        while "\n" not in self._rest and not self._ended:
            self._rest += await self._text()
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition("\n")
        return line.rstrip("\r")

    async def _text(self) -> str:
        data = await self._bytes()
        self._ended = not data
        return self._decode(data, final=self._ended)

    async def _bytes(self) -> bytes:
        try:
            number = self._file.fileno()
        except (OSError, AttributeError):  # not a real file: a test's
            return self._file.read()
        loop = asyncio.get_running_loop()
        if not stat.S_ISREG(os.fstat(number).st_mode):
            ready = loop.create_future()
            try:
                loop.add_reader(number, functools.partial(_resolve, ready))
            except NotImplementedError:  # no such loop here; the thread below is the second best
                return await asyncio.to_thread(os.read, number, PIECE_BYTES)
            except PermissionError:  # always ready, such as /dev/null
                return os.read(number, PIECE_BYTES)
            try:
                await ready
            finally:
                loop.remove_reader(number)
        return os.read(number, PIECE_BYTES)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
