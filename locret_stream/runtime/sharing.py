"""The slots of a runtime among its open contexts: who gets one, and whose is taken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator

from locret_stream.context.services import OpenContext
from locret_stream.errors import ContextBusy
from locret_stream.runtime.slots import LOOK_AGAIN_S, Slots
from locret_stream.worker import expect_own

_log = logging.getLogger(__name__)
OTHER_LOOP_S = 10.0  # how long a swap-out may take that another event loop does
TURN_S = 2.0  # how long a session that is used all the time keeps its slot while others wait for one


class SlotSharing:
    """Live and scratch slots, and the contexts that are open. Several event loops may use it.

    Args:
        live, scratch: how many slots of each kind. timeout_s: how long a call waits for one.
    """

    def __init__(self, live: int, scratch: int, timeout_s: float):
        self.live, self.scratch = Slots(range(live)), Slots(range(live, live + scratch))
        self._timeout_s, self._process = timeout_s, os.getpid()
        self._lock = threading.Lock()  # of what follows: contexts of other event loops come and go on other threads
        self._contexts: weakref.WeakSet[OpenContext] = weakref.WeakSet()
        # Why a context keeps its slot that was to be swapped out, and until when that is not tried again.
        self._kept: weakref.WeakKeyDictionary[OpenContext, str] = weakref.WeakKeyDictionary()
        self._not_before: weakref.WeakKeyDictionary[OpenContext, float] = weakref.WeakKeyDictionary()
        self._yielding = 0

    def dismiss(self) -> None:
        """Let every call that waits for a slot, or comes for one later, raise ContextClosed."""
        self.live.dismiss()
        self.scratch.dismiss()

    async def acquire(self, *, scratch: bool) -> int:
        """A free slot, waiting in order until the deadline.

        Raises:
            NoSlot, ContextClosed.
        """
        expect_own(self._process)
        if scratch:
            return await self.scratch.acquire(self._timeout_s, "scratch (for ask and turn)")
        return await self.live.acquire(self._timeout_s, "live", self._make_room, self._why_kept)

    def release(self, slot: int, *, scratch: bool) -> None:
        (self.scratch if scratch else self.live).give_back(slot)

    @contextlib.asynccontextmanager
    async def scratch_slot(self) -> AsyncIterator[int]:
        """A scratch slot for the length of a block."""
        slot = await self.acquire(scratch=True)
        try:
            yield slot
        finally:
            self.release(slot, scratch=True)

    @property
    def has_room(self) -> bool:
        """Whether a live slot is free, and nobody waits for one."""
        return self.live.free > 0

    async def _make_room(self) -> bool:
        """Swap out the context that was idle longest, or close it if it is disposable. False: none was idle.

        A context of another event loop is swapped out there, if that loop runs. Those that could not be swapped out
        come last, as trying it may take long."""
        now = time.monotonic()
        contexts = [context for context in self.contexts() if now >= self._not_before.get(context, 0.0)]
        idle = [(context in self._kept, False, since, context) for context in contexts
                if (since := context.idle_since) is not None]
        # After these, contexts at work that wait themselves, for a slow source or for their caller.
        resting = [(context in self._kept, True, since, context) for context in contexts
                   if (since := context.resting_since) is not None and now - since >= TURN_S]
        for _, midway, _, context in sorted([*idle, *resting], key=lambda each: each[:3]):
            try:
                if await self._swap_out(context, midway):
                    self._kept.pop(context, None)
                    return True
            except Exception as error:  # of any kind: whoever waits for a slot has nothing to do with it
                if context.closed:  # meanwhile, and its slot came free
                    continue
                self._not_before[context] = time.monotonic() + LOOK_AGAIN_S
                self._kept[context] = str(error) or type(error).__name__
                _log.warning("%r could not be swapped out and keeps its slot: %s", context.name, error)
        return False

    async def _swap_out(self, context: OpenContext, midway: bool) -> bool:
        """As the context does it, in its event loop. Raises as that, and TimeoutError."""
        loop = context.loop
        if loop is None or loop is asyncio.get_running_loop():
            return await context.swap_out(midway=midway)
        if not loop.is_running():
            raise TimeoutError("its event loop does not run")
        swapping = context.swap_out(midway=midway)
        try:
            future = asyncio.run_coroutine_threadsafe(swapping, loop)
        except RuntimeError:  # it was closed at this moment
            swapping.close()
            raise TimeoutError("its event loop does not run") from None
        # Nothing is held meanwhile, so the other loop may wait for this one too. Cancelled, or given up, a save that
        # has begun there runs to its end, and its context keeps its slot.
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait([waiting], timeout=min(OTHER_LOOP_S, self._timeout_s))
            if waiting.done() and not waiting.cancelled():
                return waiting.result()
        finally:
            waiting.cancel()
        raise TimeoutError("its event loop did not get to it in time")

    def _why_kept(self) -> str:
        """What to tell those for whom no slot came free: who keeps one that could not be swapped out, and why."""
        kept = {context.name: self._kept[context] for context in self.contexts() if context in self._kept
                and (context.idle_since is not None or context.resting_since is not None)}
        told = [f"{name!r} cannot be swapped out and keeps its slot: {why}" for name, why in [*kept.items()][:3]]
        return "".join(f". {each}" for each in told) + (f". So do {len(kept) - 3} more" if len(kept) > 3 else "")

    def session_idle(self) -> None:
        """A session is idle now, so that a call that waits may take its slot."""
        self.live.nudge()

    @contextlib.contextmanager
    def yield_slot(self, since: float) -> Iterator[bool]:
        """For the length of a block: whether a session that got its slot at `since` (`time.monotonic`) is to give it up
        now, as others wait and it had its turn. At most as many do so at once as wait."""
        wanted = self.live.waiting > self._yielding and time.monotonic() - since >= TURN_S
        with self._lock:
            self._yielding += wanted
        try:
            yield wanted
        finally:
            with self._lock:
                self._yielding -= wanted

    def contexts(self) -> list[OpenContext]:
        """Those that are open now."""
        with self._lock:
            return [*self._contexts]

    def adopt(self, context: OpenContext) -> None:
        """Count a context as open. Raises ContextBusy for a stored session that is open already."""
        with self._lock:
            taken = context.stored and any(other.stored and other.name == context.name for other in self._contexts)
            if not taken:
                self._contexts.add(context)
        if taken:
            raise ContextBusy(f"session {context.name!r} is open already in this runtime; expected one owner at a time")

    def drop(self, context: OpenContext) -> None:
        """Count it no more."""
        with self._lock:
            self._contexts.discard(context)
