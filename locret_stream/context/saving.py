"""Saving a session: what is stored beside its units, and how a save runs while others go on.

While a save runs, its own context commits nothing; the engine's thread is borrowed for one layer of one page at a time,
so other contexts wait for no more than a copy of that.

Between the resources 4 and 5 of `context.swapping` a save takes the session's lock in the store. Whoever has that lock
waits for nothing but steps of the engine's thread, which never wait for a lock, and for a thread of its own. So the
lock is given back although all storing threads may be waiting for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from locret_stream.context.cancelling import to_the_end
from locret_stream.context.session_state import SessionState
from locret_stream.errors import ContextBusy, ContextClosed, SnapshotError
from locret_stream.snapshot import Frame, Save, Snapshot, Store

if TYPE_CHECKING:
    from locret_stream.context.services import Services

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def storing(services: Services, work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking file work on one of the runtime's storing threads, to its end even when the caller is cancelled."""
    return await storing_on(services.storing, work, *arguments)


async def storing_on(threads: Executor, work: Callable[..., T], *arguments: Any) -> T:
    """As `storing`, on threads of another kind."""
    try:
        future = threads.submit(work, *arguments)
    except RuntimeError as error:  # they were shut down
        raise ContextClosed("the runtime was closed meanwhile; expected a call inside `async with Runtime...`"
                            ) from error
    return await to_the_end(asyncio.wrap_future(future))


def store_of(services: Services) -> Store:
    """The store of a runtime in which a session is stored."""
    assert services.store is not None
    return services.store


async def save(session: SessionState) -> Snapshot:
    """Save the session as of this call: everything accepted, the frame, and buffered text. Durable on return.

    A cancelled save still runs to its end first. It needs no slot: a session that is swapped out is saved from the
    store.

    Raises:
        ContextBusy: a `turn()` is open. SnapshotCorrupt: the session is swapped out, and its units are damaged in the
            store. StaleOwner, StoreError. Nothing was acknowledged; the session is intact.
    """
    return await to_the_end(_save(session))


async def _save(session: SessionState) -> Snapshot:
    services, engine, state = session.services, session.services.engine, session.state
    async with session.frozen():
        expect_no_turn(session, "snapshot")
        stored = await stored_units(session) if session.swapped_out else None

        def step(work: Callable[[], T]) -> Awaitable[T]:
            return session.submitted(lambda: services.worker.submit(id(state), work))

        position, frame, buffered = state.position, frame_of(session), buffered_of(session)
        note = session.note_at(position)
        saved = fingerprint(session)
        moment = await step(lambda: engine.moment(state, position, stored))
        moment = dataclasses.replace(moment, frame=frame, note=note, state={**moment.state, "held": buffered})
        identity = await storing(services, lambda: services.identity)  # the first time it hashes all weights
        save = Save(session.stored_branch, moment, identity, services.geometry)
        thread = ThreadPoolExecutor(1, thread_name_prefix="locret-save")
        try:
            await storing_on(thread, save.__enter__)
            try:
                for start, end in save.plan.write:
                    layers = [await step(partial(engine.units_between, state, layer, start, end, stored))
                              for layer in range(engine.shape.layers)]
                    await storing_on(thread, save.page, start, end, layers)
                snapshot = await storing_on(thread, save.finish, services.library, moment.seen)
            finally:
                await storing_on(thread, save.__exit__)
        finally:
            thread.shutdown(wait=False)
    session.mark_saved(saved)
    return snapshot


def expect_no_turn(session: SessionState, what: str) -> None:
    """Raises ContextBusy inside a turn. Called inside `frozen`: a turn may have begun while that waited."""
    if session.turn is not None:
        raise ContextBusy(f"{what}() was called inside a turn(), which may still be undone; expected it after the turn")


async def prune(session: SessionState) -> None:
    """Delete snapshots that need not stay, those that swap-outs wrote included."""
    branch, generations = session.stored_branch, session.swap_generations
    try:
        stored = await storing(session.services, store_of(session.services).prune, branch, generations, session.keep)
        session.drop_swap_generations(generations - stored)
    except SnapshotError as error:  # the newest snapshot is durable all the same
        _log.warning("%r was saved, but older snapshots could not be cleared away: %s", branch.name, error)


def unsaved(session: SessionState) -> bool:
    """Whether anything was accepted or buffered since the last save, or since the session began."""
    return session.saved_at != fingerprint(session)


def fingerprint(session: SessionState) -> tuple[object, ...]:
    """What two moments of a session have in common if nothing was accepted, buffered or committed between them."""
    state = session.state  # `seen` too: a chunk that was pending when it was saved may be committed since
    return (state.position, state.seen, session.buffered.packed(), frame_of(session), session.note, state.focus,
            state.next_focus)


def frame_of(session: SessionState) -> Frame:
    """The session's frame as it is stored."""
    frame, buffered = session.frame, session.buffered
    return Frame(turn=frame.turn, has_content=frame.has_content, first=frame.first, raw=session.raw,
                 trusted=session.trusted, left_by_break=buffered.left_by_break or session.busy == "feed",
                 text=buffered.segmenter.state.text, tail=buffered.segmenter.state.tail, system=session.system)


def buffered_of(session: SessionState) -> Tensor:
    """Segments and token ids that were pulled and not accepted: [bytes] u8, as `BufferedText.packed` gives them."""
    return torch.from_numpy(np.frombuffer(session.buffered.packed(), dtype=np.uint8).copy())


async def stored_units(session: SessionState) -> dict[str, Tensor]:
    """The units of a session that is swapped out, from the store; call it inside `frozen`. Raises as
    `Branch.load_swapped_out`."""
    services = session.services
    restored = await storing(services, lambda: session.stored_branch.load_swapped_out(
        services.accepted, services.geometry, services.engine.layout.most))
    return {name: tensor for name, tensor in restored.tensors.items() if name != "held"}
