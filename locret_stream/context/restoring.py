"""Sessions made, restored from the store, rebuilt from their log, forked and moved to another name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from locret_stream.context.cancelling import to_the_end
from locret_stream.context.saving import expect_no_turn, stored_units, storing, told
from locret_stream.context.session import Session
from locret_stream.context.session_state import Segment
from locret_stream.errors import (
    ConfigError,
    InputError,
    LocretError,
    SnapshotCorrupt,
    SnapshotMismatch,
)
from locret_stream.snapshot import Branch, Frame, Restored
from locret_stream.snapshot.identity import digest_text
from locret_stream.text import FrameState, Segmenter
from locret_stream.text.segmenter import SegmenterState

if TYPE_CHECKING:
    from locret_stream.context.services import Services
    from locret_stream.snapshot.log_reader import StoredLog

_BUFFERED, _NOTHING = msgspec.msgpack.Decoder(list[Segment]), msgspec.msgpack.encode([])


async def begin(services: Services, branch: Branch | None, slot: int, system: str | None, *, raw: bool | None,
                trusted: bool, focus: str | None = None, over: Session | None = None) -> Session:
    """A session from nothing; as long as it is told nothing it counts as saved, and leaves nothing behind.

    `over` is the session that has the slot until now: lost, and told so, if the system text or focus cannot be read.
    """
    raw = services.frames.raw if raw is None else raw
    if raw and system is not None:
        raise ConfigError("a raw context has no frame, so no place for a system message; expected none: feed it")
    ids, frame = ([], FrameState()) if raw else services.frames.begin(system, trusted=trusted)
    session = Session(services, services.engine.open(slot), frame, raw=raw, trusted=trusted)
    session.system = "" if system is None else digest_text(system)
    if branch is not None:
        branch.begin()
        session.branch = branch
    try:
        if focus is not None:
            await session.focus(focus_ids(services, focus))
        await session.take(ids)
    except BaseException:
        if over is not None:
            over.state.broken = True
        session.close_branch()
        raise
    session.saved_at = told(session)
    return session


def focus_ids(services: Services, text: str | None) -> list[int]:
    """Token ids of a focus; None or nothing but spaces is none.

    Raises:
        InputError: not text.
    """
    if text is not None and not isinstance(text, str):
        raise InputError(f"the focus is a {type(text).__name__}; expected text, or None for none")
    return services.codec.encode_text(text) if text is not None and text.strip() else []


async def resume(services: Services, branch: Branch, slot: int, generation: int | None = None, *,
                 rebuild: bool) -> Session:
    """The stored session, as it was; with `rebuild` out of its log where that cannot be."""
    try:
        session = await restore(services, branch, slot, generation)
        await session.commit()  # a reply may have completed a chunk that waits for the next call
        return session
    except (SnapshotMismatch, SnapshotCorrupt) as error:
        if not rebuild:
            raise _saying(error, 'on_mismatch="rebuild" (--on-mismatch rebuild) feeds its log again') from None
        return await _rebuild(services, branch, slot, error, generation)


async def fork(origin: Session, slot: int, name: str | None) -> Session:
    """A copy of a session in another slot; of a stored one, with a name, it is stored too, as a branch."""
    if name is None:
        return await origin.fork(slot)
    async with origin.frozen():  # its log and pages are copied too
        session = await origin.copy(slot, await stored_units(origin) if origin.swapped_out else None)

        def fork_branch() -> None:
            session.branch = origin.branch.fork(name, session.state.seen)

        try:
            await storing(origin.services, fork_branch)
        except BaseException:  # also cancelled, after it was made
            session.close_branch()
            raise
    return session


async def move(session: Session, name: str) -> None:
    """Let a stored session go on under a new name, where nothing is saved yet.

    Raises:
        ConfigError: the store has something of that name. ContextBusy: a `turn()` is open.
    """
    async with session.frozen():
        expect_no_turn(session, "save_as")
        old = session.branch
        session.branch = await storing(session.services, old.fork, name, session.state.seen)
        session.saved_at = None
        old.close()


async def restore(services: Services, branch: Branch, slot: int, generation: int | None = None) -> Session:
    """The session of a snapshot in a slot of its own.

    Raises:
        SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: the slot is as it was.
    """
    restored = await storing(services, lambda: branch.load(services.identity, services.geometry,
                                                           services.engine.budgets, generation))
    return await revive(services, branch, restored, slot)


async def revive(services: Services, branch: Branch, restored: Restored, slot: int) -> Session:
    """A session out of a verified snapshot. Everything is checked before the slot is written."""
    what = f"snapshot {restored.manifest.generation} of {restored.manifest.branch!r}"
    tensors = dict(restored.tensors)
    held, frame = tensors.pop("held", None), restored.manifest.frame
    if held is None or held.dtype != torch.uint8 or held.dim() != 1:
        raise SnapshotCorrupt(f"{what}: no held text in its state")
    seen = tensors.get("seen")
    if seen is None or seen.dtype != torch.int64 or seen.dim() or int(seen) != restored.manifest.seen:
        raise SnapshotCorrupt(f"{what}: its state is not that of position {restored.manifest.seen}")
    turn, segmenter, segments = _unfinished(services, frame, held.numpy(), what)
    pending = tensors.get("pending")
    tokens = restored.manifest.seen + (0 if pending is None else pending.numel())
    if tokens != restored.manifest.tokens:
        raise SnapshotCorrupt(f"{what}: {tokens} tokens; expected {restored.manifest.tokens}")
    try:
        loading = services.worker.submit(("restore", slot), lambda: services.engine.load(tensors, slot))
        state = await to_the_end(asyncio.wrap_future(loading))
    except SnapshotCorrupt as error:
        raise SnapshotCorrupt(f"{what}: {error}") from error
    session = Session(services, state, turn, raw=frame.raw, trusted=frame.trusted)
    session.segmenter, session.left_by_break = segmenter, frame.left_by_break
    session.segments.extend(segments)
    session.branch, session.system, session.note = branch, frame.system, restored.manifest.note
    session.saved_at = told(session)
    return session


def _unfinished(services: Services, frame: Frame, held: np.ndarray, what: str
                 ) -> tuple[FrameState, Segmenter, list[Segment]]:
    """The open frame, and the text and segments that were held, as a session has them.

    Raises:
        SnapshotCorrupt: they cannot be.
    """
    try:
        segments = [services.codec.validate_ids(segment) if isinstance(segment, list) else segment
                    for segment in _BUFFERED.decode(held.tobytes() or _NOTHING)]
        segmenter = Segmenter(SegmenterState(frame.text, frame.tail))
        turn = msgspec.convert({"turn": frame.turn, "has_content": frame.has_content, "first": frame.first}, FrameState)
    except (msgspec.MsgspecError, InputError) as error:
        raise SnapshotCorrupt(f"{what}: its frame or held text cannot be: {error}") from error
    return turn, segmenter, segments


async def _rebuild(services: Services, branch: Branch, slot: int, why: LocretError, generation: int | None) -> Session:
    """The session that the stored log, up to that snapshot, gives when it is fed again: for another model, policy,
    budget or grid.

    Raises:
        SnapshotMismatch, SnapshotCorrupt: `why`, where there is no sound log, or its ids are of another tokenizer.
    """
    try:
        found = await storing(services, lambda: branch.read_stored_log(services.identity, generation))
        session = await feed_log(services, found, slot, branch)
    except (SnapshotCorrupt, SnapshotMismatch, ConfigError) as error:
        raise _saying(why, f"it cannot be rebuilt: {error}") from error
    session.rebuilt = str(why)
    return session


async def feed_log(services: Services, found: StoredLog, slot: int, branch: Branch | None = None) -> Session:
    """A session that was fed everything of a stored log; with `branch` it is that one's, and logged anew.

    Raises:
        SnapshotCorrupt: ids that the model does not have, or a frame that cannot be; a part was removed meanwhile.
        ConfigError: there is no room for its focus. StoreError.
    """
    frame, segmenter, segments = _unfinished(services, found.frame, found.held, f"the log of {found.name!r}")
    session = Session(services, services.engine.open(slot), FrameState(), raw=found.frame.raw,
                      trusted=found.frame.trusted)
    session.branch, session.system = branch, found.frame.system
    if branch is not None:
        await storing(services, branch.begin_anew)
    pieces = found.pieces()
    while (piece := await storing(services, next, pieces, None)) is not None:
        ids, focuses = piece
        if any(len(part) and not 0 <= min(part) <= max(part) < services.engine.shape.vocab
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
    for start in range(0, len(ids), session.services.engine.chunk_size):
        await session.take(ids[start:start + session.services.engine.chunk_size].tolist())


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

