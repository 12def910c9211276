"""The log of a session: every accepted token id and every focus, on disk. Memory keeps none of it but the newest few.

Between two snapshots ids wait in a *spool*, a temporary file without a name, which a crash deletes. A snapshot writes
them as a *part*, an immutable container like a page; small parts are merged, so that there are few. Every snapshot has
a part of its own, with no ids if none were committed since. It says which part comes before it, which ids were pending,
what was buffered, and the state of the frame: everything that was accepted until the last save can be read even if its
manifest cannot: by its parts from the newest one back.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from locret_stream.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound, SnapshotTooNew
from locret_stream.snapshot.encryption import Scrambler
from locret_stream.snapshot.format import Buffer, Frame, LogPart, LogRef, Manifest, expect, pack, tensors
from locret_stream.snapshot.identity import Expected, Identity, expected_of
from locret_stream.snapshot.session_folder import MANIFEST_LIMIT, SessionFolder

PART_IDS = 16 << 20  # parts are not merged beyond so many ids: 64 MiB
TAKEN_SHARE = 1.5  # a new part is merged with those before it of up to so many times its ids
_NAME = re.compile(r"[0-9a-f]{32}")


class Spool:
    """The ids that were committed since the last snapshot, positions `start` to `end` - 1. For one thread at a time.

    A write that fails (OSError) leaves the ids before it, and the next write takes its place.

    Args:
        start: position of the first id.
        hidden: whether the session is encrypted: the file is then useless without the memory of this process.
    """

    def __init__(self, start: int, *, hidden: bool = False):
        self.start = self.end = start
        self._hidden = hidden
        self._begin(start)

    def _begin(self, origin: int) -> None:
        self._origin = origin  # position of the first id in the file
        self._written = origin  # the position behind the last id that was ever written to the file
        self._file = tempfile.TemporaryFile(prefix="locret-log-", buffering=0)
        self._scrambler = Scrambler() if self._hidden else None

    def append(self, ids: Iterable[int], at: int | None = None) -> None:
        """Write ids from position `at` on (None: from `end` on). They replace all ids from there on."""
        at = self.end if at is None else at
        assert self.start <= at <= self.end, "the log has a gap"
        data = np.fromiter(ids, dtype="<i4").tobytes()
        if self._scrambler is not None:
            if at < self._written:
                self._rewrite(at)
            data = self._scrambler.at(4 * (at - self._origin), data)
        self.end, done, self._written = at, 0, at + len(data) // 4
        self._file.seek(4 * (at - self._origin))
        while done < len(data):
            done += self._file.write(data[done:])
        self.end = at + len(data) // 4

    def _rewrite(self, end: int) -> None:
        """Copy the ids before `end` into a new file under a new key, as no offset may be encrypted twice under one key.
        The old file stays until the new one is complete."""
        fresh = Spool(self.start, hidden=True)
        try:
            fresh.append(self.read(end))
        except BaseException:
            fresh.close()
            raise
        self._file.close()
        vars(self).update(vars(fresh))

    def read(self, end: int) -> np.ndarray:
        """Ids start .. end-1, [n] int32. Raises OSError if the file lost some of them."""
        assert self.start <= end <= self.end
        offset = 4 * (self.start - self._origin)
        self._file.seek(offset)
        ids = np.fromfile(self._file, dtype="<i4", count=end - self.start)
        if len(ids) < end - self.start:
            raise OSError(errno.EIO, f"a temporary file holds {len(ids)} of {end - self.start} ids")
        return ids if self._scrambler is None else np.frombuffer(self._scrambler.at(offset, ids.tobytes()), dtype="<i4")

    def drop(self, end: int) -> None:
        """Drop the ids before `end`, which a log part has now. The file is emptied once no id is left."""
        assert self.start <= end <= self.end
        self.start = end
        if end == self.end:
            self._origin = self._written = end
            self._scrambler = Scrambler() if self._hidden else None
            with contextlib.suppress(OSError):  # later ids overwrite what stays
                self._file.truncate(0)

    def close(self) -> None:
        """Delete the spool."""
        self._file.close()


def absorbed(refs: Sequence[LogRef], count: int) -> int:
    """How many of the last parts a new part of `count` ids is merged with: those without ids, and those that are not
    much larger. So sizes fall geometrically from part to part, and parts are few."""
    merged = 0
    while merged < len(refs):
        before = refs[-1 - merged]
        size = before.end - before.start
        if size and (size > TAKEN_SHARE * count or size + count > PART_IDS):
            break
        count, merged = count + size, merged + 1
    return merged


class Refocus(NamedTuple):
    """An event of the log: when `position` tokens were accepted, `ids` became the focus."""

    position: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The content of a log part.

    Args:
        ids: [n] int32, committed. pending: [n] int32, the ids behind them.
        buffered: bytes [n] u8 of what was pulled and not accepted yet (`context.saving`).
        focuses: those given behind the part's first id (of the first part: from position 0 on), ascending; those behind
            its last committed id are in the next part too.
    """

    ids: np.ndarray
    pending: np.ndarray
    buffered: np.ndarray
    focuses: tuple[Refocus, ...] = ()


def write_part(body: LogPart, part: Part) -> list[Buffer]:
    """The container of a part whose ids begin at position `body.start`."""
    assert body.start + len(part.ids) == body.end and bool(body.start) == bool(body.before)
    section = {"ids": torch.from_numpy(part.ids.astype(np.int32)),
               "pending": torch.from_numpy(part.pending.astype(np.int32)),
               "held": torch.from_numpy(part.buffered.astype(np.uint8))}
    if part.focuses:
        section["focuses"] = torch.tensor([number for event in part.focuses
                                           for number in (event.position, len(event.ids), *event.ids)])
    return pack(body, {"ids": section})


def read_part(body: LogPart, sections: dict[str, memoryview], what: str) -> Part:
    """The content of a verified part. Raises SnapshotCorrupt if it is not what its header says."""
    if set(sections) != {"ids"} or body.end < body.start or bool(body.start) != bool(body.before):
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}, ids {body.start} to {body.end} behind part "
                              f"{body.before or 'none'}; expected section ids, a part before others than 0")
    section = {"held": torch.zeros(0, dtype=torch.uint8), "focuses": torch.zeros(0, dtype=torch.int64),
               **tensors(sections["ids"], what)}  # parts of the first library versions had neither
    lengths = {name: len(section[name]) if name in section and section[name].dim() else 0
               for name in ("pending", "held", "focuses")}
    expect(section, {"ids": (torch.int32, (body.end - body.start,)), "pending": (torch.int32, (lengths["pending"],)),
                     "held": (torch.uint8, (lengths["held"],)), "focuses": (torch.int64, (lengths["focuses"],))}, what)
    end = body.end + lengths["pending"]
    return Part(section["ids"].numpy(), section["pending"].numpy(), section["held"].numpy(),
                tuple(_focuses(section["focuses"].tolist(), body.start, end, what)))


def _focuses(numbers: list[int], start: int, end: int, what: str) -> Iterator[Refocus]:
    """The events that `write_part` spelled as numbers. Raises SnapshotCorrupt unless they ascend from start to end."""
    at, before = 0, start
    while at < len(numbers):
        position, count = (numbers[at:at + 2] + [-1])[:2]
        at += 2 + max(count, 0)
        if not before <= position <= end or not 0 <= count or at > len(numbers):
            raise SnapshotCorrupt(f"{what}: a focus of {count} ids at position {position}; expected events in order "
                                  f"inside {start} to {end}")
        before = position
        yield Refocus(position, tuple(numbers[at - count:at]))


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
        behind its last one. A part is read when it is asked for. Raises as `read_log`."""
        yield from read_log(self.session_folder, self.name, self.refs)
        yield self.pending, self.focuses


def read_log(session_folder: SessionFolder, name: str, refs: Sequence[LogRef], at: int = 0
             ) -> Iterator[tuple[np.ndarray, tuple[Refocus, ...]]]:
    """The ids of log parts, in order, and the focuses up to the last id of each.

    Args:
        at: where the first of them begins.

    Raises:
        SnapshotCorrupt: a part is missing, damaged, or does not follow the one before. SnapshotTooNew, StoreError.
    """
    for ref in refs:
        what = f"log part {ref.name} of {name!r}"
        body, sections = session_folder.read_named("log", ref, what)
        if (body.start, body.end) != (ref.start, ref.end) or ref.start != at:
            raise SnapshotCorrupt(f"{what}: ids {body.start} to {body.end}; expected {at} to {ref.end}")
        part = read_part(body, sections, what)
        yield part.ids, tuple(event for event in part.focuses if event.position <= ref.end)
        at = ref.end


def read_stored_log(session_folder: SessionFolder, name: str, identity: Identity | Expected,
                    generation: int | None = None) -> StoredLog:
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
        with contextlib.suppress(SnapshotCorrupt, SnapshotTooNew):
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


def _expect_tokenizer(found: str, identity: Identity | Expected, name: str) -> None:
    expected = expected_of(identity)
    if not expected.is_same("tokenizer", found):
        wanted = expected.identity.tokenizer
        raise SnapshotMismatch(f"the log of {name!r} holds ids of another tokenizer: found {found}, expected {wanted}",
                               field="tokenizer", found=found, expected=wanted)
