"""A block that can be undone: where it began, and a copy of the units from its first commit on."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future

from locret_stream.context.session import Session
from locret_stream.errors import ContextBusy, ContextClosed


class Turn:
    """One block over a session. `begin`, then either `back` and `settle`, or nothing; `end` in any case.

    Attributes:
        session: the one it began in. past: after `back`, the one at the mark, which takes its place.
    """

    def __init__(self, session: Session):
        self.session, self.past = session, session
        self._backup: Session | None = None
        self._copying = asyncio.Lock()  # several calls of the context may come to their first commit at once

    async def begin(self) -> None:
        """Raises:
            ContextBusy: a feed or generation is running, or another turn is open.
        """
        session = self.session
        while True:
            session.check_open()
            if session.busy is not None or session.turn is not None:
                raise ContextBusy(f"turn() was called while {session.busy or 'another turn'} is running in this "
                                  "context; expected it to be finished first")
            if not session.is_frozen:
                break
            await session.until_free()
        self._mark = session.mark()
        session.turn = self

    async def keep_copy(self) -> None:
        """Before the first commit: until then the engine itself can take everything back."""
        async with self._copying:
            if self._backup is None:
                await self._copy()

    async def _copy(self) -> None:
        session, services = self.session, self.session.services
        await session.resident()  # and it stays in its slot: a session with an open turn is not swapped out
        slot = await services.acquire_slot(scratch=True)
        try:
            copy = await session.fork(slot)
        except BaseException:
            services.release_slot(slot, scratch=True)
            raise
        if session.turn is self:
            self._backup, session.holds_scratch = copy, True
        else:  # the block ended meanwhile, in another task
            services.release_slot(slot, scratch=True)

    @property
    def undoable(self) -> bool:
        """Whether there is anything to go back in."""
        return not self.session.closed

    def back(self) -> Session:
        """The session as it was when the block began; it stays busy until `settle` has run."""
        self.session.turn = None
        self.past = self.session.back_at(self._mark, self._backup)
        assert self.past.state.seen == self._mark.seen
        self.past.undoing = Future()
        self.past.claim("undo", self)
        return self.past

    async def settle(self, settled: Future[None]) -> None:
        """Wait for the steps that ran for the block, then let the engine forget what they left."""
        past = self.past
        if self._backup is not None:  # its slot is this context's now, and the other one is spare
            self._backup.state = self.session.state
        try:
            with contextlib.suppress(ContextClosed):  # closed meanwhile
                await asyncio.wrap_future(settled)
                # Undoing waits for no slot: what is pending is in none.
                await past.submitted(lambda: past.services.worker.submit(id(past.state), self._take_back))
        finally:
            past.undoing.set_result(None)
            past.release(self)

    def _take_back(self) -> None:
        state = self.past.state
        self.past.services.engine.truncate(state, self._mark.pending)
        state.next_focus, state.next_focus_at = self._mark.next_focus, self._mark.next_focus_at

    def end(self) -> None:
        """Give the slot back."""
        self.session.turn, self.session.holds_scratch = None, False
        if self._backup is not None:
            self.session.services.release_slot(self._backup.state.store.slot, scratch=True)
        self.session.notify_idle()
