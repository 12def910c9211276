"""A context's part in snapshots: what is saved beside the units, saving while others go on, restoring, rebuilding.

While a save runs, its own context commits nothing; the engine's thread is borrowed for one layer of one page at a time,
so other contexts wait for no more than a copy of that.

Between the resources 4 and 5 of `context.swapping` a save takes the session's lock in the store. Whoever holds that
lock asks for nothing but steps of the engine's thread, which never waits for a lock, and for a thread of its own: the
few storing threads may wait for the lock in any number, and it is given back all the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from locret_stream.context.cancelling import to_the_end
from locret_stream.context.session_state import SessionState
from locret_stream.errors import (
    ContextBusy,
    ContextClosed,
    SnapshotError,
)
from locret_stream.snapshot import Frame, Save, Snapshot

if TYPE_CHECKING:
    from locret_stream.context.services import Services

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def storing(services: Services, work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking file work on one of the services's storing threads, to its end even when the caller is cancelled."""
    return await _on(services.storing, work, *arguments)


async def _on(threads: Executor, work: Callable[..., T], *arguments: Any) -> T:
    try:
        future = threads.submit(work, *arguments)
    except RuntimeError as error:  # they were shut down
        raise ContextClosed("the runtime was closed meanwhile; expected a call inside `async with Runtime...`"
                            ) from error
    return await to_the_end(asyncio.wrap_future(future))


async def save(session: SessionState) -> Snapshot:
    """Save the session as of this call: everything accepted, the frame, and buffered text. Durable on return.

    A cancelled save still runs to its end first. It needs no slot: a session that is swapped out is saved from the
    store.

    Raises:
        ContextBusy: a `turn()` is open, which may still be undone. SnapshotCorrupt: the session waits in the store, and
            is damaged there. StaleOwner, StoreError. Nothing was acknowledged; the session is intact.
    """
    return await to_the_end(_save(session))


async def _save(session: SessionState) -> Snapshot:
    services, engine, state = session.services, session.services.engine, session.state
    async with session.frozen():
        expect_no_turn(session, "snapshot")
        branch, stored = session.branch, await stored_units(session) if session.swapped_out else None

        def step(work: Callable[[], T]) -> Awaitable[T]:
            return session.submitted(lambda: services.worker.submit(id(state), work))

        position, frame, held, note = state.position, frame_of(session), buffered_of(session), session.note
        seen = told(session)
        moment = await step(lambda: engine.moment(state, position, stored))
        moment = dataclasses.replace(moment, frame=frame, note=note, state={**moment.state, "held": held})
        identity = await storing(services, lambda: services.identity)  # the first time it hashes all weights
        save = Save(branch, moment, identity, services.geometry)
        own = ThreadPoolExecutor(1, thread_name_prefix="locret-save")
        try:
            await _on(own, save.__enter__)
            try:
                for start, end in save.plan.write:
                    layers = []
                    for layer in range(engine.shape.layers):
                        layers.append(await step(lambda layer=layer, start=start, end=end: engine.units_between(
                            state, layer, start, end, stored)))
                    await _on(own, save.page, start, end, layers)
                done = await _on(own, save.finish, services.library, moment.seen)
            finally:
                await _on(own, save.__exit__)
        finally:
            own.shutdown(wait=False)
    session.saved_at = seen
    return done


def expect_no_turn(session: SessionState, what: str) -> None:
    """Looked at once `frozen` was entered: a turn may have begun while that waited.

    Raises:
        ContextBusy.
    """
    if session.turn is not None:
        raise ContextBusy(f"{what}() was called inside a turn(), which may still be undone; expected it after the turn")


async def prune(session: SessionState) -> None:
    """Delete snapshots that no longer stay, and those that swap-outs wrote."""
    try:
        before, store = session.swap_generations, session.services.store
        there = await storing(session.services, store.prune, session.branch, before, session.keep)
        session.swap_generations -= before - there
    except SnapshotError as error:  # the newest snapshot is durable all the same
        _log.warning("%r was saved, but older snapshots could not be cleared away: %s", session.branch.name, error)


def unsaved(session: SessionState) -> bool:
    """Whether anything was accepted or buffered since the last save, or since the session began."""
    return session.saved_at != told(session)


def told(session: SessionState) -> tuple[object, ...]:
    state = session.state  # `seen` too: a chunk that was pending when it was saved may be committed since
    return (state.position, state.seen, buffered_of(session).numpy().tobytes(), frame_of(session), session.note,
            state.focus, state.next_focus)


def frame_of(session: SessionState) -> Frame:
    """The session's frame as it is stored."""
    frame, held = session.frame, session.segmenter.state
    return Frame(turn=frame.turn, has_content=frame.has_content, first=frame.first, raw=session.raw,
                 trusted=session.trusted, left_by_break=session.left_by_break or session.busy == "feed",
                 text=held.text, tail=held.tail, system=session.system)


def buffered_of(session: SessionState) -> Tensor:
    """Cut segments and token ids that were pulled and not accepted, as bytes [n] u8 of msgpack."""
    segments = [*([list(session.ids)] if session.ids else []), *session.segments]
    return torch.from_numpy(np.frombuffer(msgspec.msgpack.encode(segments), dtype=np.uint8).copy())


async def stored_units(session: SessionState) -> dict[str, Tensor]:
    """The units of a session that is swapped out, from the store; call it inside `frozen`.

    Raises:
        StaleOwner, SnapshotCorrupt, StoreError: they cannot be read.
    """
    services = session.services
    restored = await storing(services, lambda: session.branch.load_swapped_out(
        services.identity, services.geometry, services.engine.budgets))
    return {name: tensor for name, tensor in restored.tensors.items() if name != "held"}
