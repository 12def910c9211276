"""Swapping: an idle session is saved and gives its slot to others (swap out); on its next use it gets one (swap in).

Resources are taken in this order, and whoever holds a later one never waits for an earlier one, so that no interleaving
of calls can stall:

1. the session, for one operation (`Session.claim`: nobody waits for it, ContextBusy is raised),
2. a live slot: opening a context, and any step of a session that is swapped out,
3. a scratch slot: `ask`, which needs no live one, and an open turn, whose session stays in its slot,
4. the session's units, unchanged for a while (`Session.frozen`): saving, forking, rewinding, swapping,
5. the engine's thread and the storing threads, for one bounded step.

So no caller waits for a slot inside `frozen`: a session that is swapped out is saved and forked from the store.
A task of yours may still hold a slot (an open context without a name, a turn) while it waits for another: that wait
ends with NoSlot at the runtime's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future

from torch import Tensor

from locret_stream.context import saving
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.session_state import SessionState
from locret_stream.errors import ContextBusy, ContextClosed, LocretError

_log = logging.getLogger(__name__)


async def make_resident(session: SessionState) -> None:
    """See to it that the session is in a slot: the one it has, unless others have waited for one long enough.

    Raises:
        NoSlot: none came free. StaleOwner, SnapshotCorrupt, StoreError: its snapshot cannot be read; it stays swapped
            out.
    """
    if session.between_steps and session.branch is not None:
        with session.services.yield_slot(session.came_at) as wanted:
            if wanted:
                try:
                    await swap_out(session, midway=True)
                except LocretError as error:  # the operation of this session goes on all the same
                    session.came_at = time.monotonic()
                    _log.warning("%r could not be swapped out and keeps its slot: %s", session.branch.name, error)
    while session.swapped_out:
        await _swap_in(session)


async def swap_out(session: SessionState, *, midway: bool = False) -> bool:
    """Save a session and release its slot. False: it was used meanwhile, and keeps its slot.

    Args:
        midway: also between two steps of an operation.

    Raises:
        StaleOwner, StoreError: it could not be saved, and keeps its slot.
    """
    def may() -> bool:
        return session.between_steps and (midway or session.busy is None)

    if not may():
        return False
    if saving.unsaved(session) or session.branch.base is None:  # told nothing: no snapshot to come back from yet
        try:
            await to_the_end(_save_for_swap(session))
        except (ContextBusy, ContextClosed):  # used, or closed, meanwhile
            return False
    if not may() or saving.unsaved(session):
        return False
    session.lose_slot()
    return True


async def _save_for_swap(session: SessionState) -> None:
    """A snapshot that holds its place in the store, instead of those before that did."""
    session.swap_generations |= {(await saving.save(session)).generation}
    await saving.prune(session)


async def _swap_in(session: SessionState) -> None:
    while session.swapping_in is not None:
        await asyncio.shield(asyncio.wrap_future(session.swapping_in))
    if not session.swapped_out:
        return
    session.swapping_in = gate = Future()
    try:
        slot = await session.services.acquire_slot(scratch=False)
        in_it = False

        def put_back(units: dict[str, Tensor]) -> None:
            nonlocal in_it
            session.services.engine.swap_in(session.state, units, slot)
            in_it = True

        try:
            async with session.frozen():
                units = await saving.stored_units(session)
                session.check_open()
                await to_the_end(asyncio.wrap_future(session.services.worker.submit(
                    id(session.state), lambda: put_back(units))))
        finally:  # cancelled meanwhile, it is in the slot all the same
            if in_it and not session.closed:
                session.got_slot()
            else:
                if in_it:  # a turn was undone meanwhile: the state goes on in another session, which has no slot
                    session.services.engine.swap_out(session.state)
                session.services.release_slot(slot, scratch=False)
    finally:
        session.swapping_in = None
        gate.set_result(None)
