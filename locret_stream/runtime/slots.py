"""Who gets a slot next, and how fast feeds may commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from asyncio_throttle import Throttler

from locret_stream.errors import ContextClosed, NoSlot

LOOK_AGAIN_S = 1.0  # after a context could not be swapped out, it is tried again
CLOSED = "this runtime is not running; expected a call inside `async with Runtime...`"


class _Request:
    """Somebody who waits. `nudged` is done when it is worth another look whether room can be made."""

    def __init__(self, loop: int):
        self.loop = loop
        self.slot: Future[int] = Future()
        self.nudged: Future[None] = Future()


class Slots:
    """Slots handed out in the order of asking. Waiters are concurrent futures, so any event loop may wait."""

    def __init__(self, free: list[int]):
        self._free, self._waiting, self._lock = deque(free), deque[_Request](), threading.Lock()
        self.size, self._closed = len(free), False

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def dismiss(self) -> None:
        """Who waits for a slot, or comes for one later, is told that the runtime closes."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request.slot.set_running_or_notify_cancel():
                request.slot.set_exception(ContextClosed(CLOSED))

    def give_back(self, slot: int) -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft().slot
                if future.set_running_or_notify_cancel():
                    future.set_result(slot)
                    return
            self._free.append(slot)

    def nudge(self) -> None:
        """Let the first that waits, of this event loop if there is one, try to make room. Any thread may call it."""
        if not self._waiting:
            return
        try:
            loop = id(asyncio.get_running_loop())
        except RuntimeError:
            loop = None
        with self._lock:
            asleep = [request for request in self._waiting if not request.nudged.done()]
            for request in [r for r in asleep if r.loop == loop][:1] or (asleep if loop is None else [])[:1]:
                request.nudged.set_result(None)

    async def acquire(self, timeout_s: float, what: str, make_room: Callable[[], Awaitable[bool]] | None = None) -> int:
        """A slot.

        Args:
            make_room: makes one come free, and says whether it did; tried at first and at every nudge.

        Raises:
            NoSlot: none came free in time. ContextClosed: the runtime closes.
        """
        with self._lock:
            if self._closed:
                raise ContextClosed(CLOSED)
            if self._free:
                return self._free.popleft()
            request = _Request(id(asyncio.get_running_loop()))
            self._waiting.append(request)
        deadline = time.monotonic() + timeout_s
        slot = asyncio.wrap_future(request.slot)
        try:
            while not slot.done():
                if make_room is not None and await make_room():
                    await asyncio.sleep(0)  # what came free may be this one's
                    continue
                left = deadline - time.monotonic()
                if left <= 0 and not request.slot.done():
                    raise NoSlot(f"no {what} slot of {self.size} came free within {timeout_s:g} s; expected a context "
                                 "to be closed, or a Runtime with more of them")
                nudged = asyncio.wrap_future(request.nudged)
                await asyncio.wait([slot, nudged], return_when=asyncio.FIRST_COMPLETED,
                                   timeout=min(max(left, 0.0), LOOK_AGAIN_S))
                if request.nudged.done():
                    request.nudged = Future()
            return slot.result()
        except BaseException:
            self._withdraw(request)
            slot.cancel()  # nobody awaits it: an error it may still be given is no one's to hear
            raise

    def _withdraw(self, request: _Request) -> None:
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                return
        if request.slot.exception() is None:  # it came in the very last moment
            self.give_back(request.slot.result())


def throttler(rate: float) -> Throttler:
    """`rate` chunks per second; rates below 1 are one chunk per longer period, as the throttler counts whole calls."""
    if rate >= 1 and rate == int(rate):
        return Throttler(int(rate), period=1.0)
    return Throttler(1, period=1.0 / rate)
