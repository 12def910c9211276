"""Sessions begun, restored from the store, rebuilt from their log, forked, moved to another name, and rewound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import torch

from locret_stream.context import recalling
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.saving import expect_no_turn, fingerprint, store_of, stored_units, storing, storing_on
from locret_stream.context.session import Session
from locret_stream.context.session_state import REWOUND
from locret_stream.context.sources import BufferedText, Segment
from locret_stream.context.tokenizing import encode_text
from locret_stream.errors import ConfigError, ContextBusy, InputError, SnapshotCorrupt, SnapshotError, SnapshotMismatch
from locret_stream.snapshot import Branch, Frame, Restored, Snapshot
from locret_stream.snapshot.identity import digest_text
from locret_stream.text import FrameState
from locret_stream.text.segmenter import SegmenterState

if TYPE_CHECKING:
    from locret_stream.context.services import Services
    from locret_stream.snapshot.log import StoredLog

_log = logging.getLogger(__name__)
_SEGMENTS, _NO_SEGMENTS = msgspec.msgpack.Decoder(list[Segment]), msgspec.msgpack.encode([])


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The options of `Runtime.open`, which says what each of them does; and whether the session is `stored`."""

    stored: bool = False
    system: str | None = None
    raw: bool | None = None
    trusted: bool = False
    on_mismatch: Literal["raise", "rebuild"] = "raise"
    at: int | None = None
    focus: str | None = None


async def open_session(services: Services, name: str, opening: Opening, slot: int) -> tuple[Session, bool]:
    """The session in that slot, and whether it goes on from a stored one.

    Raises:
        SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, SnapshotNotFound, StoreError, ConfigError: nothing is open.
    """
    branch = None
    if opening.stored:
        store = store_of(services)
        branch = await storing(services, store.branch, name)
        if opening.at != 0 and (opening.at or await storing(services, store.has, name)):
            try:
                session = await resume(services, branch, slot, opening.at, rebuild=opening.on_mismatch == "rebuild")
                _check_begun_so(session, name, opening)
                if opening.focus is not None:
                    await session.focus(await focus_ids(services, opening.focus))
            except BaseException:
                branch.close()
                raise
            return session, True
    return await begin(services, branch, slot, opening.system, raw=opening.raw, trusted=opening.trusted,
                       focus=opening.focus), False


def _check_begun_so(session: Session, name: str, opening: Opening) -> None:
    """Raises ConfigError for another system text, or another kind of frame, than the session was begun with."""
    if opening.system is not None and digest_text(opening.system) != session.system:
        raise ConfigError(f"session {name!r} was begun with {'another' if session.system else 'no'} system text, which "
                          "is in its memory; expected the same one or none, or a new name")
    if opening.raw is not None and opening.raw != session.raw:
        raise ConfigError(f"session {name!r} was begun with raw={session.raw}; expected the same, or a new name")


async def begin(services: Services, branch: Branch | None, slot: int, system: str | None, *, raw: bool | None,
                trusted: bool, focus: str | None = None, over: Session | None = None) -> Session:
    """A session from nothing. Until something is fed it counts as saved, and leaves nothing behind.

    Args:
        over: the session that has the slot until now. If the system text or the focus cannot be read, it is marked
            broken, as its units are overwritten.
    """
    raw = services.frames.raw if raw is None else raw
    if raw and system is not None:
        raise ConfigError("a raw context has no frame, so no place for a system message; expected none: feed it")
    ids, frame = ([], FrameState()) if raw else services.frames.begin(system, trusted=trusted)
    state = services.engine.open(slot)
    if branch is not None:
        branch.begin()
    session = Session(services, state, frame, raw=raw, trusted=trusted, branch=branch,
                      system="" if system is None else digest_text(system))
    recalling.begin(session)
    try:
        if focus is not None:
            await session.focus(await focus_ids(services, focus))
        await session.take(ids)
    except BaseException:
        if over is not None:
            over.state.broken = True
        session.close_branch()
        raise
    session.mark_saved(fingerprint(session))
    return session


async def focus_ids(services: Services, text: str | None) -> list[int]:
    """Token ids of a focus: [] for None and for nothing but spaces. Raises InputError if it is not text."""
    if text is not None and not isinstance(text, str):
        raise InputError(f"the focus is a {type(text).__name__}; expected text, or None for none")
    return await encode_text(services, text) if text is not None and text.strip() else []


async def resume(services: Services, branch: Branch, slot: int, generation: int | None = None, *,
                 rebuild: bool) -> Session:
    """The stored session, as it was saved. With `rebuild` it is fed again from its log if its snapshot is damaged, or
    was made by another model, policy, budget or grid."""
    try:
        session = await restore(services, branch, slot, generation)
        await session.commit()  # a reply may have completed a chunk that waits for the next call
        return session
    except (SnapshotMismatch, SnapshotCorrupt) as error:
        if not rebuild:
            raise _extended(error, 'on_mismatch="rebuild" (--on-mismatch rebuild) feeds its log again') from None
        return await _rebuild(services, branch, slot, error, generation)


async def fork(origin: Session, slot: int, name: str | None) -> Session:
    """A copy of a session in another slot. With a name it is a branch of a stored session, and stored too."""
    if name is None:
        if origin.branch is not None and origin.branch.keeps_log:
            try:
                await recalling.complete(origin)  # the copy has no log to make its index of
            except SnapshotError as error:
                _log.warning("a fork of %r has no index for recall: %s", origin.branch.name, error)
        session = await origin.fork(slot)
        if origin.index is not None:
            try:
                await storing_on(origin.services.recalling, recalling.fork, origin.index, session)
            except BaseException:  # also cancelled, after it was made
                session.close_index()
                raise
        return session
    async with origin.frozen():  # its log and pages are copied too
        session = await origin.copy(slot, await stored_units(origin) if origin.swapped_out else None)

        def fork_branch() -> None:
            session.bind(origin.stored_branch.fork(name, session.state.seen))
            recalling.fork(origin.index, session)

        try:
            await storing(origin.services, fork_branch)
        except BaseException:  # also cancelled, after it was made
            session.close_branch()
            raise
    return session


async def move(session: Session, name: str) -> None:
    """Let a stored session go on under a new name, where nothing is saved yet. Raises as `StreamingContext.save_as`."""
    async with session.frozen():
        expect_no_turn(session, "save_as")
        await asyncio.wrap_future(session.barrier())  # a commit that runs already is in the old log behind it
        old = session.stored_branch
        session.bind(await storing(session.services, old.fork, name, session.state.seen))
        session.mark_saved(None)
        session.drop_swap_generations(session.swap_generations)  # they are numbers of the old name
        old.close()


async def restore(services: Services, branch: Branch, slot: int, generation: int | None = None) -> Session:
    """The session of a snapshot in a slot of its own. Raises as `Branch.load`; the slot is as it was then."""
    restored = await storing(services, lambda: branch.load(services.accepted, services.geometry,
                                                           services.engine.layout.most, generation))
    return await revive(services, branch, restored, slot)


async def revive(services: Services, branch: Branch, restored: Restored, slot: int) -> Session:
    """A session out of a verified snapshot. Everything is checked before the slot is written."""
    manifest = restored.manifest
    what = f"snapshot {manifest.generation} of {manifest.branch!r}"
    tensors = dict(restored.tensors)
    packed = tensors.pop("held", None)
    if packed is None or packed.dtype != torch.uint8 or packed.dim() != 1:
        raise SnapshotCorrupt(f"{what}: its state has no buffered text")
    seen = tensors.get("seen")
    if seen is None or seen.dtype != torch.int64 or seen.dim() or int(seen) != manifest.seen:
        raise SnapshotCorrupt(f"{what}: its state is not that of position {manifest.seen}")
    frame, buffered = _unfinished(services, manifest.frame, packed.numpy(), what)
    pending = tensors.get("pending")
    tokens = manifest.seen + (0 if pending is None else pending.numel())
    if tokens != manifest.tokens:
        raise SnapshotCorrupt(f"{what}: {tokens} tokens; expected {manifest.tokens}")
    try:
        loading = services.worker.submit(("restore", slot), lambda: services.engine.load(tensors, slot))
        state = await to_the_end(asyncio.wrap_future(loading))
    except SnapshotCorrupt as error:
        raise SnapshotCorrupt(f"{what}: {error}") from error
    session = Session(services, state, frame, raw=manifest.frame.raw, trusted=manifest.frame.trusted,
                      buffered=buffered, branch=branch, system=manifest.frame.system, note=manifest.note)
    recalling.begin(session)
    session.mark_saved(fingerprint(session))
    return session


def _unfinished(services: Services, frame: Frame, packed: np.ndarray, what: str) -> tuple[FrameState, BufferedText]:
    """The open frame, and the text that was buffered in it, as `BufferedText.packed` gives it, [bytes] u8. Raises
    SnapshotCorrupt if no session can have them."""
    try:
        segments = [services.codec.validate_ids(segment) if isinstance(segment, list) else segment
                    for segment in _SEGMENTS.decode(packed.tobytes() or _NO_SEGMENTS)]
        buffered = BufferedText(SegmenterState(frame.text, frame.tail), segments, left_by_break=frame.left_by_break)
        state = msgspec.convert({"turn": frame.turn, "has_content": frame.has_content, "first": frame.first},
                                FrameState)
    except (msgspec.MsgspecError, UnicodeDecodeError, InputError) as error:
        raise SnapshotCorrupt(f"{what}: no session can have its frame or buffered text: {error}") from error
    return state, buffered


async def _rebuild(services: Services, branch: Branch, slot: int, why: SnapshotCorrupt | SnapshotMismatch,
                   generation: int | None) -> Session:
    """The session that the stored log, up to that snapshot, gives when it is fed again. Raises `why` where there is no
    sound log, or its ids are of another tokenizer."""
    try:
        log = await storing(services, lambda: branch.read_stored_log(services.accepted, generation))
        return await feed_log(services, log, slot, branch, rebuilt=str(why))
    except (SnapshotCorrupt, SnapshotMismatch, ConfigError) as error:
        raise _extended(why, f"it cannot be rebuilt: {error}") from error


async def feed_log(services: Services, log: StoredLog, slot: int, branch: Branch | None = None, *, rebuilt: str = ""
                   ) -> Session:
    """A session that was fed everything in a stored log. With `branch` it is stored there, and logged anew.

    Raises:
        SnapshotCorrupt: the model has no such ids, or no session has such a frame; a part of it was deleted meanwhile.
        ConfigError: there is no room for its focus. StoreError.
    """
    frame, buffered = _unfinished(services, log.frame, log.held, f"the log of {log.name!r}")
    session = Session(services, services.engine.open(slot), FrameState(), raw=log.frame.raw, trusted=log.frame.trusted,
                      branch=branch, system=log.frame.system, rebuilt=rebuilt)
    if branch is not None:
        await storing(services, branch.begin_anew)
        recalling.begin(session)
    pieces = log.pieces()
    while (piece := await storing(services, next, pieces, None)) is not None:
        ids, focuses = piece
        if any(len(part) and not 0 <= np.min(part) <= np.max(part) < services.engine.shape.vocab
               for part in (ids, *(event.ids for event in focuses))):
            raise SnapshotCorrupt("its log holds ids that the model does not have")
        first = session.state.position
        for event in focuses:
            await _take(session, ids[session.state.position - first:event.position - first])
            await session.focus(list(event.ids))
        await _take(session, ids[session.state.position - first:])
    session.end_of_log(frame, buffered)
    return session


async def _take(session: Session, ids: np.ndarray) -> None:
    """Feed ids of a log, a chunk at a time."""
    for start in range(0, len(ids), session.services.engine.chunk_size):
        await session.take(ids[start:start + session.services.engine.chunk_size].tolist())


def _extended(error: SnapshotCorrupt | SnapshotMismatch, more: str) -> SnapshotCorrupt | SnapshotMismatch:
    """The same error with more to say."""
    if isinstance(error, SnapshotMismatch):
        return type(error)(f"{error}; {more}", field=error.field, found=error.found, expected=error.expected)
    return type(error)(f"{error}; {more}")


def generation_of(snapshot: object, name: str) -> int:
    """The number of a snapshot of session `name`, given as such or as the snapshot itself; 0 is the beginning. Raises
    ConfigError if it is neither."""
    number = snapshot.generation if isinstance(snapshot, Snapshot) and snapshot.name == name else snapshot
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(f"rewind() was given {number!r}; expected the number of a snapshot of {name!r}, or what "
                          "snapshot() returned")
    return number


@contextlib.asynccontextmanager
async def snapshot_of(session: Session, name: str, number: int) -> AsyncIterator[tuple[Branch, Restored | None]]:
    """For the length of a block, in which the session is frozen in its slot: a branch to go on in, and the verified
    snapshot of that number, None for 0. The block closes the branch unless it ends the session.

    Raises:
        SnapshotNotFound, SnapshotCorrupt, SnapshotMismatch, StoreError. StaleOwner: another owner saved meanwhile.
        ContextBusy: the session was saved under another name meanwhile.
    """
    services = session.services
    async with session.frozen_in_slot():  # nor is it saved: the new branch knows the newest snapshot
        old = session.stored_branch
        if old.name != name:
            raise ContextBusy(f"rewind() was called while save_as({old.name!r}) ran, and {number} is the number of a "
                              f"snapshot of {name!r}; expected the number of a snapshot of {old.name!r}")
        branch = await storing(services, store_of(services).branch, name)
        branch.session_folder.needs = old.session_folder.needs  # manifests never change, and reading them takes long
        try:
            await storing(services, old.expect_newest)
            yield branch, None if number == 0 else await storing(services, lambda: branch.load(
                services.accepted, services.geometry, services.engine.layout.most, number))
        finally:
            if session.closed != REWOUND:
                branch.close()


async def overwrite(session: Session, branch: Branch, restored: Restored | None, opening: Opening) -> Session:
    """The restored session, None for one from nothing, in the slot of this one, which ends once nothing can fail any
    more. Forks, questions and receipts that come meanwhile are refused: they would read a mixture."""
    slot = session.state.store.slot
    async with session.overwritten():
        if restored is None:
            past = await begin(session.services, branch, slot, opening.system if session.system else None,
                               raw=session.raw, trusted=session.trusted, focus=opening.focus, over=session)
        else:
            try:
                past = await revive(session.services, branch, restored, slot)
            except SnapshotCorrupt:  # it was refused before anything was written
                raise
            except BaseException:
                session.state.broken = True
                raise
        session.check_open()  # it may have been closed while this one was read
        session.end(REWOUND)
    session.close_branch()
    past.succeed(session)
    return past
