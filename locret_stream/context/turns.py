"""A block that can be undone: the place where it began, and a copy of the units from its first commit on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from locret_stream.context.cancelling import to_the_end
from locret_stream.context.session import Session
from locret_stream.engine import EngineState
from locret_stream.errors import ContextBusy, ContextClosed


class Turn:
    """One block over a session: `begin`, then `undo` or nothing, and `end` in any case.

    Args:
        session: in which it begins.
        replace: is called when it is undone, with the session that takes the place of that one.
    """

    def __init__(self, session: Session, replace: Callable[[Session], None]):
        self.session, self._replace = session, replace
        self._backup: EngineState | None = None
        self._copying = asyncio.Lock()  # several calls of the context may come to their first commit at once

    async def begin(self) -> None:
        """Raises:
            ContextBusy: a feed or generation is running, or another turn is open.
        """
        session = self.session
        while True:
            session.expect_not_closing()
            if session.busy is not None or session.turn is not None:
                raise ContextBusy(f"turn() was called while {session.busy or 'another turn'} is running in this "
                                  "context; expected it to be finished first")
            if not session.is_frozen:
                break
            await session.until_free()
        self._mark = session.mark()
        session.begin_turn(self)

    @property
    def holds_scratch(self) -> bool:
        """Whether it has a scratch slot, for the copy to go back to."""
        return self._backup is not None

    async def keep_copy(self) -> None:
        """Make that copy. Called before the first commit: until then the engine itself can take everything back."""
        session, slots = self.session, self.session.services.slots
        async with self._copying:
            if self._backup is not None or session.turn is not self:
                return
            await session.resident()  # and it stays in its slot: a session with an open turn is not swapped out
            slot = await slots.acquire(scratch=True)
            try:
                copy = await session.fork(slot)
            except BaseException:
                slots.release(slot, scratch=True)
                raise
            if session.turn is self:
                self._backup = copy.state
            else:  # the block ended meanwhile, in another task
                slots.release(slot, scratch=True)

    async def undo(self) -> None:
        """Go back to where the block began. Runs to its end even when it is cancelled. Nothing happens if the session
        has ended."""
        if self.session.closed:
            return
        settled = self.session.barrier()
        past = self.session.back_at(self._mark, self._backup, self)
        assert past.state.seen == self._mark.seen
        self._replace(past)
        if self._backup is not None:  # its slot is this context's now, and the other one is spare
            self._backup = self.session.state
        await to_the_end(self._settle(past, settled))

    async def _settle(self, past: Session, settled: Future[None]) -> None:
        """Wait for the steps that ran for the block, then let the engine forget what they left."""

        def take_back() -> None:
            past.services.engine.truncate(past.state, self._mark.pending)
            past.state.next_focus, past.state.next_focus_at = self._mark.next_focus, self._mark.next_focus_at
            if past.branch is not None:  # again: a focus that was queued has noted itself meanwhile
                past.branch.focuses = [*self._mark.focuses]

        try:
            with contextlib.suppress(ContextClosed):  # closed meanwhile
                await asyncio.wrap_future(settled)
                # Undoing waits for no slot: what is pending is in none.
                await past.submitted(lambda: past.services.worker.submit(id(past.state), take_back))
        finally:
            past.end_undo(self)

    def end(self) -> None:
        """Give the scratch slot back."""
        if self._backup is not None:
            self.session.services.slots.release(self._backup.store.slot, scratch=True)
            self._backup = None
        self.session.end_turn()
