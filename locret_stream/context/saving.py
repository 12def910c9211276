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

from locret_stream.context.session import Segment, Session, to_the_end
from locret_stream.errors import (
    ConfigError,
    ContextBusy,
    ContextClosed,
    InputError,
    LocretError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
)
from locret_stream.snapshot import Branch, Frame, Restored, Save, Snapshot
from locret_stream.snapshot.identity import digest_text
from locret_stream.text import FrameState, Segmenter
from locret_stream.text.segmenter import Held

if TYPE_CHECKING:
    from locret_stream.context.host import Host
    from locret_stream.snapshot.chain import Chain

_log = logging.getLogger(__name__)
T = TypeVar("T")
_HELD, _NOTHING = msgspec.msgpack.Decoder(list[Segment]), msgspec.msgpack.encode([])


async def storing(host: Host, work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking file work on one of the host's storing threads, to its end even when the caller is cancelled."""
    return await _on(host.storing, work, *arguments)


async def _on(threads: Executor, work: Callable[..., T], *arguments: Any) -> T:
    try:
        future = threads.submit(work, *arguments)
    except RuntimeError as error:  # they were shut down
        raise ContextClosed("the runtime was closed meanwhile; expected a call inside `async with Runtime...`"
                            ) from error
    return await to_the_end(asyncio.wrap_future(future))


async def save(session: Session) -> Snapshot:
    """Save the session as of this call: everything accepted, the frame, and what is held. Durable on return.

    Cancelled, it still runs to its end first. It waits for no slot: what was put away is saved out of the store.

    Raises:
        ContextBusy: a `turn()` is open, which may still be undone. SnapshotCorrupt: the session waits in the store, and
            is damaged there. StaleOwner, StoreError. Nothing was acknowledged; the session is intact.
    """
    return await to_the_end(_save(session))


async def _save(session: Session) -> Snapshot:
    host, engine, state = session.host, session.host.engine, session.state
    async with session.still():
        _expect_no_turn(session, "snapshot")
        branch, stored = session.branch, await host.stored_units(session) if session.away else None

        def step(work: Callable[[], T]) -> Awaitable[T]:
            return session.submitted(lambda: host.worker.submit(id(state), work))

        position, frame, held, note = state.position, frame_of(session), held_of(session), session.note
        told = _told(session)
        moment = await step(lambda: engine.moment(state, position, stored))
        moment = dataclasses.replace(moment, frame=frame, note=note, state={**moment.state, "held": held})
        identity = await storing(host, lambda: host.identity)  # the first time it hashes all weights
        save = Save(branch, moment, identity, host.geometry)
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
                done = await _on(own, save.finish, host.library, moment.seen)
            finally:
                await _on(own, save.__exit__)
        finally:
            own.shutdown(wait=False)
    session.saved_at = told
    return done


def _expect_no_turn(session: Session, what: str) -> None:
    """Looked at once `still` was entered: a turn may have begun while that waited.

    Raises:
        ContextBusy.
    """
    if session.before_commit is not None:
        raise ContextBusy(f"{what}() was called inside a turn(), which may still be undone; expected it after the turn")


async def prune(session: Session, parked: int) -> None:
    """Clear away older snapshots than are to stay, and that of number `parked`, which only held the session's place."""
    try:
        await storing(session.host, session.host.store.prune, session.branch, parked, session.keep)
    except SnapshotError as error:  # the newest snapshot is durable all the same
        _log.warning("%r was saved, but older snapshots could not be cleared away: %s", session.branch.name, error)


def unsaved(session: Session) -> bool:
    """Whether anything was accepted or held since the last save, or since it was begun."""
    return session.saved_at != _told(session)


def _told(session: Session) -> tuple[object, ...]:
    state = session.state  # `seen` too: a chunk that was pending when it was saved may be committed since
    return (state.position, state.seen, held_of(session).numpy().tobytes(), frame_of(session), session.note,
            state.focus, state.next_focus)


def frame_of(session: Session) -> Frame:
    """The session's frame as it is stored."""
    frame, held = session.frame, session.segmenter.held
    return Frame(turn=frame.turn, has_content=frame.has_content, first=frame.first, raw=session.raw,
                 trusted=session.trusted, left_by_break=session.left_by_break or session.busy == "feed",
                 text=held.text, tail=held.tail, system=session.system)


def held_of(session: Session) -> Tensor:
    """Cut segments and token ids that were pulled and not accepted, as bytes [n] u8 of msgpack."""
    segments = [*([list(session.ids)] if session.ids else []), *session.segments]
    return torch.from_numpy(np.frombuffer(msgspec.msgpack.encode(segments), dtype=np.uint8).copy())


async def begin(host: Host, branch: Branch | None, slot: int, system: str | None, *, raw: bool | None,
                trusted: bool, focus: str | None = None, over: Session | None = None) -> Session:
    """A session from nothing; as long as it is told nothing it counts as saved, and leaves nothing behind.

    `over` is the session that has the slot until now: lost, and told so, if the system text or focus cannot be read.
    """
    raw = host.frames.raw if raw is None else raw
    if raw and system is not None:
        raise ConfigError("a raw context has no frame, so no place for a system message; expected none: feed it")
    ids, frame = ([], FrameState()) if raw else host.frames.begin(system, trusted=trusted)
    session = Session(host, host.engine.open(slot), frame, raw=raw, trusted=trusted)
    session.system = "" if system is None else digest_text(system)
    if branch is not None:
        branch.begin()
        session.branch = branch
    try:
        if focus is not None:
            await session.focus(focus_ids(host, focus))
        await session.take(ids)
    except BaseException:
        if over is not None:
            over.state.broken = True
        session.close_branch()
        raise
    session.saved_at = _told(session)
    return session


def focus_ids(host: Host, text: str | None) -> list[int]:
    """Token ids of a focus; None or nothing but spaces is none.

    Raises:
        InputError: not text.
    """
    if text is not None and not isinstance(text, str):
        raise InputError(f"the focus is a {type(text).__name__}; expected text, or None for none")
    return host.codec.encode_text(text) if text is not None and text.strip() else []


async def resume(host: Host, branch: Branch, slot: int, generation: int | None = None, *, rebuild: bool) -> Session:
    """The stored session, as it was; with `rebuild` out of its log where that cannot be."""
    try:
        session = await restore(host, branch, slot, generation)
        await session.commit()  # a reply may have completed a chunk that waits for the next call
        return session
    except (SnapshotMismatch, SnapshotCorrupt) as error:
        if not rebuild:
            raise _saying(error, 'on_mismatch="rebuild" (--on-mismatch rebuild) feeds its log again') from None
        return await _rebuild(host, branch, slot, error, generation)


async def fork(origin: Session, slot: int, name: str | None) -> Session:
    """A copy of a session in another slot; of a stored one, with a name, it is stored too, as a branch."""
    if name is None:
        return await origin.fork(slot)
    async with origin.still():  # its log and pages are copied too
        session = await origin.copy(slot)

        def fork_branch() -> None:
            session.branch = origin.branch.fork(name, session.state.seen)

        try:
            await storing(origin.host, fork_branch)
        except BaseException:  # also cancelled, after it was made
            session.close_branch()
            raise
    return session


async def move(session: Session, name: str) -> None:
    """Let a stored session go on under a new name, where nothing is saved yet.

    Raises:
        ConfigError: the store has something of that name. ContextBusy: a `turn()` is open.
    """
    async with session.still():
        _expect_no_turn(session, "save_as")
        old = session.branch
        session.branch = await storing(session.host, old.fork, name, session.state.seen)
        session.saved_at = None
        old.close()


async def restore(host: Host, branch: Branch, slot: int, generation: int | None = None) -> Session:
    """The session of a snapshot in a slot of its own.

    Raises:
        SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: the slot is as it was.
    """
    restored = await storing(host, lambda: branch.load(host.identity, host.geometry, host.engine.budgets, generation))
    return await revive(host, branch, restored, slot)


async def revive(host: Host, branch: Branch, restored: Restored, slot: int) -> Session:
    """A session out of a verified snapshot. Everything is checked before the slot is written."""
    what = f"snapshot {restored.manifest.generation} of {restored.manifest.branch!r}"
    tensors = dict(restored.tensors)
    held, frame = tensors.pop("held", None), restored.manifest.frame
    if held is None or held.dtype != torch.uint8 or held.dim() != 1:
        raise SnapshotCorrupt(f"{what}: no held text in its state")
    seen = tensors.get("seen")
    if seen is None or seen.dtype != torch.int64 or seen.dim() or int(seen) != restored.manifest.seen:
        raise SnapshotCorrupt(f"{what}: its state is not that of position {restored.manifest.seen}")
    turn, segmenter, segments = _unfinished(host, frame, held.numpy(), what)
    pending = tensors.get("pending")
    tokens = restored.manifest.seen + (0 if pending is None else pending.numel())
    if tokens != restored.manifest.tokens:
        raise SnapshotCorrupt(f"{what}: {tokens} tokens; expected {restored.manifest.tokens}")
    try:
        loading = host.worker.submit(("restore", slot), lambda: host.engine.load(tensors, slot))
        state = await to_the_end(asyncio.wrap_future(loading))
    except SnapshotCorrupt as error:
        raise SnapshotCorrupt(f"{what}: {error}") from error
    session = Session(host, state, turn, raw=frame.raw, trusted=frame.trusted)
    session.segmenter, session.left_by_break = segmenter, frame.left_by_break
    session.segments.extend(segments)
    session.branch, session.system, session.note = branch, frame.system, restored.manifest.note
    session.saved_at = _told(session)
    return session


def _unfinished(host: Host, frame: Frame, held: np.ndarray, what: str
                 ) -> tuple[FrameState, Segmenter, list[Segment]]:
    """The open frame, and the text and segments that were held, as a session has them.

    Raises:
        SnapshotCorrupt: they cannot be.
    """
    try:
        segments = [host.codec.validate_ids(segment) if isinstance(segment, list) else segment
                    for segment in _HELD.decode(held.tobytes() or _NOTHING)]
        segmenter = Segmenter(Held(frame.text, frame.tail))
        turn = msgspec.convert({"turn": frame.turn, "has_content": frame.has_content, "first": frame.first}, FrameState)
    except (msgspec.MsgspecError, InputError) as error:
        raise SnapshotCorrupt(f"{what}: its frame or held text cannot be: {error}") from error
    return turn, segmenter, segments


async def _rebuild(host: Host, branch: Branch, slot: int, why: LocretError, generation: int | None) -> Session:
    """The session that the stored log, up to that snapshot, gives when it is fed again: for another model, policy,
    budget or grid.

    Raises:
        SnapshotMismatch, SnapshotCorrupt: `why`, where there is no sound log, or its ids are of another tokenizer.
    """
    try:
        found = await storing(host, lambda: branch.read_chain(host.identity, generation))
        session = await feed_log(host, found, slot, branch)
    except (SnapshotCorrupt, SnapshotMismatch, ConfigError) as error:
        raise _saying(why, f"it cannot be rebuilt: {error}") from error
    session.rebuilt = str(why)
    return session


async def feed_log(host: Host, found: Chain, slot: int, branch: Branch | None = None) -> Session:
    """A session that was fed everything of a stored log; with `branch` it is that one's, and logged anew.

    Raises:
        SnapshotCorrupt: ids that the model does not have, or a frame that cannot be; a part was removed meanwhile.
        ConfigError: there is no room for its focus. StoreError.
    """
    frame, segmenter, segments = _unfinished(host, found.frame, found.held, f"the log of {found.name!r}")
    session = Session(host, host.engine.open(slot), FrameState(), raw=found.frame.raw, trusted=found.frame.trusted)
    session.branch, session.system = branch, found.frame.system
    if branch is not None:
        await storing(host, branch.begin_anew)
    pieces = found.pieces()
    while (piece := await storing(host, next, pieces, None)) is not None:
        ids, focuses = piece
        if any(len(part) and not 0 <= min(part) <= max(part) < host.engine.shape.vocab
               for part in (ids, *(event.ids for event in focuses))):
            raise SnapshotCorrupt("its log holds ids that the model does not have")
        first = session.state.position
        for event in focuses:
            await _take(session, ids[session.state.position - first:event.position - first])
            await session.focus(list(event.ids))
        await _take(session, ids[session.state.position - first:])
    session.frame, session.segmenter, session.left_by_break = frame, segmenter, found.frame.left_by_break
    session.segments.extend(segments)
    return session


async def _take(session: Session, ids: np.ndarray) -> None:
    """Feed ids of a log, a chunk at a time."""
    for start in range(0, len(ids), session.host.engine.chunk_size):
        await session.take(ids[start:start + session.host.engine.chunk_size].tolist())


def _saying(error: SnapshotCorrupt | SnapshotMismatch, more: str) -> SnapshotCorrupt | SnapshotMismatch:
    """The same error with more to say."""
    fields = {name: getattr(error, name) for name in ("field", "found", "expected")} if isinstance(
        error, SnapshotMismatch) else {}
    return type(error)(f"{error}; {more}", **fields)


def check_system(session: Session, name: str, system: str | None, raw: bool | None) -> None:
    """Refuse to go on with another system text, or in another kind of frame, than the session was begun with.

    Raises:
        ConfigError.
    """
    if system is not None and digest_text(system) != session.system:
        raise ConfigError(f"session {name!r} was begun with {'another' if session.system else 'no'} system text, which "
                          "is in its memory; expected the same one or none, or a new name")
    if raw is not None and raw != session.raw:
        raise ConfigError(f"session {name!r} was begun with raw={session.raw}; expected the same, or a new name")

