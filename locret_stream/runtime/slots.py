"""Slots handed out in the order of asking, and how fast feeds may commit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from asyncio_throttle import Throttler

from locret_stream.errors import ContextClosed, NoSlot

LOOK_AGAIN_S = 1.0  # how long after a failed swap-out the next one is tried
CLOSED = "this runtime is not running; expected a call inside `async with Runtime...`"


class _Request:
    """A call that waits for a slot. `nudged` is done when it should try again to make a slot come free.

    Args:
        loop: id of the event loop in which it waits.
    """

    def __init__(self, loop: int):
        self.loop = loop
        self.slot: Future[int] = Future()
        self.nudged: Future[None] = Future()


class Slots:
    """Slots of one kind. Calls wait on concurrent futures, so they may belong to several event loops.

    A finaliser may give a slot back: on any thread, and inside any of these methods, as the garbage collector runs it.
    So the lock lets its own thread in again, and no future is used under it: futures have locks, and run callbacks.
    """

    def __init__(self, free: Iterable[int]):
        self._free, self._waiting, self._lock = deque(free), deque[_Request](), threading.RLock()
        self.size, self._closed = len(self._free), False

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def dismiss(self) -> None:
        """Let calls that wait for a slot, and those that come later, raise ContextClosed: the runtime closes."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request.slot.set_running_or_notify_cancel():
                request.slot.set_exception(ContextClosed(CLOSED))

    def give_back(self, slot: int) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free.append(slot)
                    return
                future = self._waiting.popleft().slot
            if future.set_running_or_notify_cancel():
                future.set_result(slot)
                return

    def nudge(self) -> None:
        """Let the first call that waits try again to make a slot come free: the first of this event loop, or, where
        none of it waits, of any. Any thread may call this."""
        if not self._waiting:
            return
        try:
            loop: int | None = id(asyncio.get_running_loop())
        except RuntimeError:
            loop = None
        with self._lock:
            waiting = sorted(self._waiting, key=lambda request: request.loop != loop)
        for request in waiting:
            with contextlib.suppress(InvalidStateError):  # it was nudged already
                request.nudged.set_result(None)
                return

    async def acquire(self, timeout_s: float, what: str, make_room: Callable[[], Awaitable[bool]] | None = None,
                      why_none: Callable[[], str] = str) -> int:
        """A slot.

        Args:
            what: the kind of slot, for messages.
            make_room: makes one come free, and returns whether it did; called at first and at every nudge.
            why_none: what else to tell where none came free.

        Raises:
            NoSlot: none came free in time. ContextClosed: the runtime closes.
        """
        request = _Request(id(asyncio.get_running_loop()))  # here, so that no slot comes free between look and wait
        with self._lock:
            if self._closed:
                raise ContextClosed(CLOSED)
            if self._free:
                return self._free.popleft()
            self._waiting.append(request)
        deadline = time.monotonic() + timeout_s
        slot = asyncio.wrap_future(request.slot)
        try:
            while not slot.done():
                if make_room is not None and await make_room():
                    await asyncio.sleep(0)  # the slot that came free may be for this call
                    continue
                left = deadline - time.monotonic()
                if left <= 0 and not request.slot.done():
                    raise NoSlot(f"no {what} slot of {self.size} came free within {timeout_s:g} s; expected a context "
                                 f"to be closed, or a Runtime with more of them{why_none()}")
                either: set[asyncio.Future[Any]] = {slot, asyncio.wrap_future(request.nudged)}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED,
                                   timeout=min(max(left, 0.0), LOOK_AGAIN_S))
                if request.nudged.done():
                    request.nudged = Future()
            return slot.result()
        except BaseException:
            self._withdraw(request)
            slot.cancel()  # nobody awaits it, so asyncio must not log an error that it may still be given
            raise

    def _withdraw(self, request: _Request) -> None:
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                return
        if not request.slot.cancel() and request.slot.exception() is None:  # the slot was given at the last moment
            self.give_back(request.slot.result())


def throttler(rate: float) -> Throttler:
    """A throttler to `rate` chunks per second. It counts whole calls, so a rate that is no whole number is one chunk
    per 1 / rate seconds."""
    if rate >= 1 and rate == int(rate):
        return Throttler(int(rate), period=1.0)
    return Throttler(1, period=1.0 / rate)
