"""Who gets a slot next, and how fast feeds may commit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

from asyncio_throttle import Throttler

from locret_stream.errors import ContextClosed, NoSlot

CLOSED = "this runtime is not running; expected a call inside `async with Runtime...`"


class Slots:
    """Slots handed out in the order of asking. Waiters are concurrent futures, so any event loop may wait."""

    def __init__(self, free: list[int]):
        self._free, self._waiting, self._lock = deque(free), deque[Future[int]](), threading.Lock()
        self.size = len(free)

    @property
    def free(self) -> int:
        return len(self._free)

    def dismiss(self) -> None:
        """Who waits for a slot is told that the runtime closes."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ContextClosed(CLOSED))

    def request(self) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if self._free:
                future.set_result(self._free.popleft())
            else:
                self._waiting.append(future)
        return future

    def give_back(self, slot: int) -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(slot)
                    return
            self._free.append(slot)

    async def acquire(self, timeout_s: float, what: str) -> int:
        future = self.request()
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not future.cancel() and future.exception() is None:  # it came in the very last moment
                self.give_back(future.result())
            if isinstance(error, asyncio.CancelledError):
                raise
            raise NoSlot(f"no {what} slot of {self.size} came free within {timeout_s:g} s; expected a context to be "
                         f"closed, or a Runtime with more of them") from None


def throttler(rate: float) -> Throttler:
    """`rate` chunks per second; rates below 1 are one chunk per longer period, as the throttler counts whole calls."""
    if rate >= 1 and rate == int(rate):
        return Throttler(int(rate), period=1.0)
    return Throttler(1, period=1.0 / rate)
