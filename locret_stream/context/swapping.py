"""Swapping: an idle session is saved and gives its slot to others (swap out); on its next use it gets one (swap in).

Resources are taken in this order, and whoever has a later one never waits for an earlier one, so that no interleaving
of calls can stall:

1. the session, for one operation (`Session.claim`: nobody waits for it, ContextBusy is raised),
2. a live slot: opening a context, and any step of a session that is swapped out,
3. a scratch slot: `ask` and a reply with recall, which need no live one, and an open turn, whose session stays in its
   slot,
4. the session's units, unchanged for a while (`Session.frozen`): saving, forking, rewinding, swapping,
5. the engine's thread and the storing threads, for one bounded step.

So no caller waits for a slot inside `frozen`: a session that is swapped out is saved and forked from the store.
A task of the caller may still have a slot (an open context without a name, a turn) while it waits for another: that
wait ends with NoSlot at the runtime's deadline.
"""

from __future__ import annotations

import asyncio
import logging

from torch import Tensor

from locret_stream.context import saving
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.session_state import SessionState
from locret_stream.errors import ContextBusy, ContextClosed, LocretError, NoSlot

_log = logging.getLogger(__name__)


def expect_scratch(session: SessionState, instead: str) -> None:
    """Raises NoSlot at once, and says what is expected `instead`, where the session itself holds the only scratch slot:
    waiting for it would be in vain."""
    holder = ("the open turn() of this context holds the only scratch slot since its first commit"
              if session.turn is not None and session.turn.holds_scratch else
              "a reply with recall of this context holds the only scratch slot until it ends"
              if session.replies_on_copy else "")
    if holder and session.services.scratch == 1:
        raise NoSlot(f"{holder}; expected {instead}, or Runtime(..., scratch=2)")


async def make_resident(session: SessionState) -> None:
    """Have the session in a slot: the one it has, unless it had its turn and others wait for one. Raises NoSlot, and
    where its snapshot cannot be read as `saving.stored_units`; it stays swapped out then."""
    if session.between_steps and session.branch is not None:
        with session.services.slots.yield_slot(session.came_at) as wanted:
            if wanted:
                try:
                    await swap_out(session, midway=True)
                except LocretError as error:  # the operation of this session goes on all the same
                    session.prolong_slot()
                    _log.warning("%r could not be swapped out and keeps its slot: %s", session.branch.name, error)
    while session.swapped_out:
        await _swap_in(session)


async def swap_out(session: SessionState, *, midway: bool = False) -> bool:
    """Save a session and release its slot; `midway`: also between two steps of an operation. False: it was used
    meanwhile, and keeps its slot. Raises StaleOwner, StoreError: it could not be saved, and keeps its slot."""
    def may() -> bool:
        return session.between_steps and (midway or session.busy is None)

    if not may():
        return False
    if saving.unsaved(session) or session.stored_branch.base is None:  # nothing was fed: there is no snapshot yet
        try:
            await to_the_end(_save_for_swap(session))
        except (ContextBusy, ContextClosed):  # used, or closed, meanwhile
            return False
    if not may() or saving.unsaved(session):
        return False
    session.lose_slot()
    return True


async def _save_for_swap(session: SessionState) -> None:
    """Write a snapshot to swap in from, and delete the earlier ones that were written for that."""
    session.add_swap_generation((await saving.save(session)).generation)
    await saving.prune(session)


async def _swap_in(session: SessionState) -> None:
    while session.swapping_in.is_closed:
        await session.swapping_in.wait()
    if not session.swapped_out:
        return
    services, engine = session.services, session.services.engine
    with session.swapping_in.closed_for():
        slot = await services.slots.acquire(scratch=False)
        loaded = False

        def load(units: dict[str, Tensor]) -> None:
            nonlocal loaded
            engine.swap_in(session.state, units, slot)
            loaded = True

        try:
            async with session.frozen():
                units = await saving.stored_units(session)
                session.check_open()
                await to_the_end(asyncio.wrap_future(services.worker.submit(id(session.state), lambda: load(units))))
        finally:  # cancelled meanwhile, it is in the slot all the same
            if loaded and not session.closed:
                session.got_slot()
            else:
                if loaded:  # a turn was undone meanwhile: the state goes on in another session, which has no slot
                    engine.swap_out(session.state)
                services.slots.release(slot, scratch=False)
