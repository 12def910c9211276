"""The whole log of a branch, read to feed a session again: through its newest manifest, or, if that cannot be read,
part by part from the newest one back."""

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
    """A log that was read through and is sound.

    Args:
        refs: its parts in order, without gaps from position 0 on. pending: ids behind them. held: bytes [n] u8 of what
            was pulled and not accepted. focuses: those among the pending ids.
        highest, digest: of the newest snapshot as it was when this was read.
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
        """All ids, part by part, the pending ones last, and the focuses given from the first of them to behind the last
        one; each part is read when it is asked for.

        Raises:
            SnapshotCorrupt, StoreError: a part was changed or removed meanwhile.
        """
        yield from read_log(self.session_folder, self.name, self.refs)
        yield self.pending, self.focuses


def read_log(session_folder: SessionFolder, name: str, refs: Sequence[LogRef]
             ) -> Iterator[tuple[np.ndarray, tuple[Refocus, ...]]]:
    """The ids of log parts, in order, and the focuses up to the last one of each.

    Raises:
        SnapshotCorrupt: a part that is missing, damaged, or does not follow the one before.
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
    """Everything that was accepted by a snapshot of a branch, the newest unless a number is given.

    Raises:
        SnapshotCorrupt: there is no whole log. SnapshotMismatch: its ids are of another tokenizer. StoreError.
    """
    session_folder.refresh()
    found, highest = session_folder.generations(name)
    if not found:
        raise SnapshotCorrupt(f"{name!r} has no snapshot in {session_folder.files.url}, so no log")
    number = found[-1] if generation is None else generation
    try:
        manifest, sections, digest = session_folder.read_manifest(name, number)
    except (SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew):
        if number != found[-1]:
            raise SnapshotCorrupt(f"snapshot {number} of {name!r} cannot be read, nor where its log ends") from None
        refs, body, last = _parts(session_folder, name, found[-1])
        _expect_tokenizer(body.tokenizer, identity, name)
        chain = StoredLog(session_folder, name, refs, last.pending, last.held,
                      tuple(event for event in last.focuses if event.position > body.end), body.frame, highest, "")
    else:
        _expect_tokenizer(manifest.identity.tokenizer, identity, name)
        chain = _of_manifest(session_folder, manifest, sections, highest, digest if number == highest else "")
    for _ in read_log(session_folder, name, chain.refs):  # better now than after hours of feeding
        pass
    return chain


def _of_manifest(session_folder: SessionFolder, manifest: Manifest, sections: dict[str, memoryview], highest: int,
                 digest: str) -> StoredLog:
    name = manifest.branch
    if manifest.log is None:
        raise SnapshotCorrupt(f"{name!r} was stored without a log")
    state = tensors(sections["state"], name) if "state" in sections else {}
    what = f"snapshot {manifest.generation} of {name!r}"
    pending, held = pending_ids(state, what), state.get("held", torch.zeros(0, dtype=torch.uint8))
    focus = state.get("next_focus", torch.zeros(0, dtype=torch.int64))
    if any(tensor.dtype != kind or tensor.dim() != 1 for tensor, kind in ((held, torch.uint8), (focus, torch.int64))):
        raise SnapshotCorrupt(f"{what}: its state holds strange bytes that were pulled, or a strange focus")
    focuses = (Refocus(int(focus[0]), tuple(focus[1:].tolist())),) if len(focus) else ()
    return StoredLog(session_folder, name, manifest.log, pending, held.numpy(), focuses, manifest.frame, highest,
                     digest)


def pending_ids(state: Mapping[str, Tensor], what: str) -> np.ndarray:
    """The ids [n] that a snapshot's state holds behind the log.

    Raises:
        SnapshotCorrupt: it holds none, or what no token id is.
    """
    ids = state.get("pending")
    if ids is None or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or (
            len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31):
        raise SnapshotCorrupt(f"{what}: its state holds no pending ids, or strange ones")
    return ids.numpy()


def _parts(session_folder: SessionFolder, name: str, newest: int) -> tuple[tuple[LogRef, ...], LogPart, Part]:
    """The parts from the newest snapshot's own back to position 0; of that one header and content.

    One that cannot be read might be just that one, beside another of a save that failed: then there is no telling.
    """
    files = session_folder.files.sizes(f"{session_folder.folder}/log")
    sizes = {file: size for file, size in files.items() if _NAME.fullmatch(file)}
    bodies: dict[str, LogPart] = {}
    for file, size in sizes.items():
        with suppress(SnapshotCorrupt, SnapshotTooNew):
            body, sections = session_folder.read_named("log", LogRef(file, 0, 0, min(size, MANIFEST_LIMIT)), file)
            read_part(body, sections, file)
            bodies[file] = body
    own = {file: body.generation for file, body in bodies.items() if body.branch == name and body.generation <= newest}
    delete = f"`snapshots delete --generation {newest}` goes back to the snapshot before"
    if not own or max(own.values()) < newest:  # never lose the last tokens unsaid
        raise SnapshotCorrupt(f"neither snapshot {newest} of {name!r} nor its log part can be read; {delete}")
    last, *others = [file for file in own if own[file] == newest]
    damaged = sorted(sizes.keys() - bodies.keys())
    if others or damaged:
        raise SnapshotCorrupt(f"of {name!r} {', '.join(['log part ' + last, *others, *damaged])} may be the newest log "
                              f"part, and nothing that can be read tells which; {delete}")
    refs: list[LogRef] = []
    file, at = last, bodies[last].end
    while file:
        part = bodies.pop(file, None)  # each once: parts without ids could go in a circle
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
