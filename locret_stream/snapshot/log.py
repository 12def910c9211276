"""The log of a session: every accepted token id and every focus, on disk. Memory keeps none of it but the newest few.

Between two snapshots ids wait in a *spool*, a temporary file without a name, which a crash deletes. A snapshot writes
them as a *part*, an immutable container like a page; small parts are merged, so that there are few. Every snapshot has
a part of its own, with no ids if none were committed since. It says which part comes before it, which ids were pending,
what was buffered, and the state of the frame: everything that was accepted until the last save can be read even if its
manifest cannot.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from locret_stream.errors import SnapshotCorrupt
from locret_stream.snapshot.encryption import Scrambler
from locret_stream.snapshot.format import Buffer, LogPart, LogRef, expect, pack, tensors

PART_IDS = 16 << 20  # parts are not merged beyond so many ids: 64 MiB
TAKEN_SHARE = 1.5  # a new part is merged with those before it of up to so many times its ids


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
