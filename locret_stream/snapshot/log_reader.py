"""Reading the whole log of a branch, to feed a session again: by the manifest of its newest snapshot, or, if that one
cannot be read, part by part from the newest one back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from locret_stream.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound, SnapshotTooNew
from locret_stream.snapshot.format import Frame, LogPart, LogRef, Manifest, tensors
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.log import Part, Refocus, read_part
from locret_stream.snapshot.session_folder import MANIFEST_LIMIT, SessionFolder

_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredLog:
    """A log that was read through and is intact.

    Args:
        name: of the branch. refs: its parts in order, from position 0 on without gaps.
        pending: [n], the ids behind them. focuses: those given among the pending ids.
        held: bytes [n] u8 of what was buffered. frame: the state of the conversation's frame.
        highest, digest: generation and digest of the newest snapshot at the time of reading; the digest is "" if the
            log does not end with that snapshot, or it could not be read.
    """

    session_folder: SessionFolder
    name: str
    refs: tuple[LogRef, ...]
    pending: np.ndarray
    held: np.ndarray
    focuses: tuple[Refocus, ...]
    frame: Frame
    highest: int
    digest: str

    def pieces(self) -> Iterator[tuple[np.ndarray, tuple[Refocus, ...]]]:
        """All ids, part by part, the pending ones last; with each part the focuses that were given from its first id to
        behind its last one. A part is read when it is asked for.

        Raises:
            SnapshotCorrupt, StoreError: a part was changed or removed meanwhile.
        """
        yield from read_log(self.session_folder, self.name, self.refs)
        yield self.pending, self.focuses


def read_log(session_folder: SessionFolder, name: str, refs: Sequence[LogRef]
             ) -> Iterator[tuple[np.ndarray, tuple[Refocus, ...]]]:
    """The ids of log parts, in order, and the focuses up to the last id of each.

    Raises:
        SnapshotCorrupt: a part is missing, damaged, or does not follow the one before. SnapshotTooNew, StoreError.
    """
    at = 0
    for ref in refs:
        what = f"log part {ref.name} of {name!r}"
        body, sections = session_folder.read_named("log", ref, what)
        if (body.start, body.end) != (ref.start, ref.end) or ref.start != at:
            raise SnapshotCorrupt(f"{what}: ids {body.start} to {body.end}; expected {at} to {ref.end}")
        part = read_part(body, sections, what)
        yield part.ids, tuple(event for event in part.focuses if event.position <= ref.end)
        at = ref.end


def read_stored_log(session_folder: SessionFolder, name: str, identity: Identity, generation: int | None = None
                    ) -> StoredLog:
    """The log of a branch; as `Branch.read_stored_log`."""
    session_folder.key.refresh()
    generations, highest = session_folder.generations(name)
    if not generations:
        raise SnapshotCorrupt(f"{name!r} has no snapshot in {session_folder.files.url}, so no log")
    number = generations[-1] if generation is None else generation
    try:
        manifest, sections, digest = session_folder.read_manifest(name, number)
    except (SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew):
        if number != generations[-1]:
            raise SnapshotCorrupt(f"snapshot {number} of {name!r} cannot be read, nor where its log ends") from None
        refs, body, last = _parts_without_manifest(session_folder, name, number)
        _expect_tokenizer(body.tokenizer, identity, name)
        focuses = tuple(event for event in last.focuses if event.position > body.end)
        stored_log = StoredLog(session_folder, name, refs, last.pending, last.buffered, focuses, body.frame, highest,
                               digest="")
    else:
        _expect_tokenizer(manifest.identity.tokenizer, identity, name)
        stored_log = _log_of_manifest(session_folder, manifest, sections, highest, digest if number == highest else "")
    for _ in read_log(session_folder, name, stored_log.refs):  # damage is raised now, not after hours of feeding
        pass
    return stored_log


def _log_of_manifest(session_folder: SessionFolder, manifest: Manifest, sections: dict[str, memoryview], highest: int,
                     digest: str) -> StoredLog:
    name = manifest.branch
    if manifest.log is None:
        raise SnapshotCorrupt(f"{name!r} was stored without a log")
    state = tensors(sections["state"], name) if "state" in sections else {}
    what = f"snapshot {manifest.generation} of {name!r}"
    pending, buffered = pending_ids(state, what), state.get("held", torch.zeros(0, dtype=torch.uint8))
    focus = state.get("next_focus", torch.zeros(0, dtype=torch.int64))
    if (buffered.dtype, buffered.dim(), focus.dtype, focus.dim()) != (torch.uint8, 1, torch.int64, 1):
        raise SnapshotCorrupt(f"{what}: its state holds strange buffered bytes, or a strange focus")
    focuses = (Refocus(int(focus[0]), tuple(focus[1:].tolist())),) if len(focus) else ()
    return StoredLog(session_folder, name, manifest.log, pending, buffered.numpy(), focuses, manifest.frame, highest,
                     digest)


def pending_ids(state: Mapping[str, Tensor], what: str) -> np.ndarray:
    """The pending ids [n] in a snapshot's state, which follow the log. Raises SnapshotCorrupt if they cannot be ids."""
    ids = state.get("pending")
    if ids is None or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or (
            len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31):
        raise SnapshotCorrupt(f"{what}: its state holds no pending ids, or strange ones")
    return ids.numpy()


def _parts_without_manifest(session_folder: SessionFolder, name: str, newest: int
                            ) -> tuple[tuple[LogRef, ...], LogPart, Part]:
    """All parts of a branch up to the part of its newest snapshot, and of that last part its header and its content.

    Raises:
        SnapshotCorrupt: the last part cannot be determined, as when several parts of that generation exist (a save that
            failed leaves one) or a part cannot be read, which may be the last one; or there is a gap before it.
    """
    files = session_folder.files.sizes(f"{session_folder.folder}/log")
    sizes = {file: size for file, size in files.items() if _NAME.fullmatch(file)}
    bodies: dict[str, LogPart] = {}
    for file, size in sizes.items():
        with suppress(SnapshotCorrupt, SnapshotTooNew):
            body, sections = session_folder.read_named("log", LogRef(file, 0, 0, min(size, MANIFEST_LIMIT)), file)
            read_part(body, sections, file)
            bodies[file] = body
    candidates = [file for file, body in bodies.items() if (body.branch, body.generation) == (name, newest)]
    delete = f"`snapshots delete --generation {newest}` goes back to the snapshot before"
    if not candidates:  # an older part would lose the last tokens silently
        raise SnapshotCorrupt(f"neither snapshot {newest} of {name!r} nor its log part can be read; {delete}")
    last, *others = candidates
    damaged = sorted(sizes.keys() - bodies.keys())
    if others or damaged:
        raise SnapshotCorrupt(f"of {name!r} {', '.join(['log part ' + last, *others, *damaged])} may be the newest log "
                              f"part, and nothing that can be read tells which; {delete}")
    refs: list[LogRef] = []
    file, at = last, bodies[last].end
    while file:
        part = bodies.pop(file, None)  # each part once: damaged parts without ids could lead in a circle
        if part is None or part.end != at:
            raise SnapshotCorrupt(f"the log of {name!r} has a gap before position {at}")
        refs.append(LogRef(file, part.start, part.end, sizes[file]))
        at, file = part.start, part.before
    if at:
        raise SnapshotCorrupt(f"the log of {name!r} begins at position {at}")
    body, sections = session_folder.read_named("log", refs[0], last)
    return tuple(reversed(refs)), body, read_part(body, sections, last)


def _expect_tokenizer(found: str, identity: Identity, name: str) -> None:
    if found != identity.tokenizer:
        raise SnapshotMismatch(f"the log of {name!r} holds ids of another tokenizer: found {found}, expected "
                               f"{identity.tokenizer}", field="tokenizer", found=found, expected=identity.tokenizer)
