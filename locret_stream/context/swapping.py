"""Who has a slot: a session that rests may lose its slot to others, waits in the store, and gets one when it is used.

Resources are taken in this order, and whoever holds a later one never waits for an earlier one, so that no interleaving
of calls can stall:

1. the session, for one operation (`Session.claim`: nobody waits for it, ContextBusy is raised),
2. a live slot: opening a context, and any step of a session that was put away,
3. a scratch slot: `ask`, which needs no live one, and an open turn, whose session stays in its slot,
4. the session's units, to stay as they are (`Session.still`): saving, forking, rewinding, coming and going,
5. the engine's thread and the storing threads, for one bounded step.

So nobody waits for a slot inside `still`: what was put away is saved and forked out of the store, not out of a slot.
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
from locret_stream.context.session import Session, to_the_end
from locret_stream.errors import ContextBusy, ContextClosed, LocretError

_log = logging.getLogger(__name__)


async def make_resident(session: Session) -> None:
    """See to it that the session is in a slot: the one it has, unless others have waited for one long enough.

    Raises:
        NoSlot: none came free. StaleOwner, SnapshotCorrupt, StoreError: its snapshot is not there; it stays away.
    """
    if session.between_steps and session.branch is not None:
        with session.host.yield_slot(session.came_at) as wanted:
            if wanted:
                try:
                    await put_away(session, midway=True)
                except LocretError as error:  # that others wait is no reason to fail what this one does
                    session.came_at = time.monotonic()
                    _log.warning("%r could not be put away and keeps its slot: %s", session.branch.name, error)
    while session.away:
        await _bring_back(session)


async def put_away(session: Session, *, midway: bool = False) -> bool:
    """Save a session and give its slot to others; False if it was used meanwhile, and keeps it.

    Args:
        midway: between two steps of an operation, too.

    Raises:
        StaleOwner, StoreError: it could not be saved, and keeps its slot.
    """
    def may() -> bool:
        return session.between_steps and (midway or session.busy is None)

    if not may():
        return False
    if saving.unsaved(session) or session.branch.base is None:  # told nothing: no snapshot to come back from yet
        try:
            await to_the_end(_park(session))
        except (ContextBusy, ContextClosed):  # used, or closed, meanwhile
            return False
    if not may() or saving.unsaved(session):
        return False
    slot = session.host.engine.put_away(session.state)
    session.away = True
    session.host.release_slot(slot, scratch=False)
    return True


async def _park(session: Session) -> None:
    """A snapshot that holds its place in the store, instead of the one before that did."""
    before = session.parked
    session.parked = (await saving.save(session)).generation
    await saving.prune(session, before)


async def _bring_back(session: Session) -> None:
    while session.returning is not None:
        await asyncio.shield(asyncio.wrap_future(session.returning))
    if not session.away:
        return
    session.returning = gate = Future()
    try:
        slot = await session.host.acquire_slot(scratch=False)
        in_it = False

        def put_back(units: dict[str, Tensor]) -> None:
            nonlocal in_it
            session.host.engine.bring_back(session.state, units, slot)
            in_it = True

        try:
            async with session.still():
                units = await stored_units(session)
                session.check_open()
                await to_the_end(asyncio.wrap_future(session.host.worker.submit(
                    id(session.state), lambda: put_back(units))))
        finally:  # cancelled meanwhile, it is in the slot all the same
            if in_it and not session.closed:
                session.away = False
                session.came_at = session.used_at = time.monotonic()
                session.rested()
            else:
                if in_it:  # a turn was undone meanwhile: the state goes on in another session, which has no slot
                    session.host.engine.put_away(session.state)
                session.host.release_slot(slot, scratch=False)
    finally:
        session.returning = None
        gate.set_result(None)


async def stored_units(session: Session) -> dict[str, Tensor]:
    """What a session that was put away has in the store; for who is in `still`.

    Raises:
        StaleOwner, SnapshotCorrupt, StoreError: it is not there.
    """
    host = session.host
    restored = await saving.storing(host, lambda: session.branch.reload(host.identity, host.geometry,
                                                                        host.engine.budgets))
    return {name: tensor for name, tensor in restored.tensors.items() if name != "held"}
