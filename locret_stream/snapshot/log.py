"""The log of a session: every accepted token id and every focus, on disk. Memory holds none of it but the newest few.

Between two snapshots ids wait in a spool, a temporary file without a name that a crash takes with it. A snapshot seals
them in a *part*, an immutable container like a page; small parts grow together, so there are few. Every snapshot has a
part of its own, of no ids if none were committed since. It says which part comes before it, what was pending and held,
and how the frame stood: all that was accepted until the last save can be read even if its manifest cannot.
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

PART_IDS = 16 << 20  # parts do not grow together beyond so many ids: 64 MiB
TAKEN_SHARE = 1.5  # a new part takes in those before it of up to so many times its ids


class Spool:
    """Ids accepted since the last snapshot; position `start` on. One thread at a time.

    A write that fails (OSError) leaves what came before it, and the next one takes its place.

    Args:
        hidden: of an encrypted session: the file is of no use without this process's memory.
    """

    def __init__(self, start: int, *, hidden: bool = False):
        self.start = self.end = start
        self._hidden = hidden
        self._begin(start)

    def _begin(self, origin: int) -> None:
        self._origin = self._written = origin  # position of the file's first id; behind the last one ever written to it
        self._file = tempfile.TemporaryFile(prefix="locret-log-", buffering=0)
        self._scrambler = Scrambler() if self._hidden else None

    def append(self, ids: Iterable[int], at: int | None = None) -> None:
        """Ids of the stream from position `at` on (None: where the last ones ended); what was there is forgotten."""
        at = self.end if at is None else at
        assert self.start <= at <= self.end, "the log has a gap"
        data = np.fromiter(ids, dtype="<i4").tobytes()
        if self._scrambler is not None:
            if at < self._written:
                self._begin_again(at)
            data = self._scrambler.at(4 * (at - self._origin), data)
        self.end, done, self._written = at, 0, at + len(data) // 4
        self._file.seek(4 * (at - self._origin))
        while done < len(data):
            done += self._file.write(data[done:])
        self.end = at + len(data) // 4

    def _begin_again(self, end: int) -> None:
        """The ids before `end` in a file and under a key of their own: no place is written twice under one. The old
        file stays until the new one stands."""
        fresh = Spool(self.start, hidden=True)
        try:
            fresh.append(self.read(end))
        except BaseException:
            fresh.close()
            raise
        self._file.close()
        vars(self).update(vars(fresh))

    def read(self, end: int) -> np.ndarray:
        """Ids start .. end-1, int32. Raises OSError: the file lost some of them."""
        assert self.start <= end <= self.end
        offset = 4 * (self.start - self._origin)
        self._file.seek(offset)
        ids = np.fromfile(self._file, dtype="<i4", count=end - self.start)
        if len(ids) < end - self.start:
            raise OSError(errno.EIO, f"a temporary file holds {len(ids)} of {end - self.start} ids")
        return ids if self._scrambler is None else np.frombuffer(self._scrambler.at(offset, ids.tobytes()), dtype="<i4")

    def drop(self, end: int) -> None:
        """Forget ids before `end`: a part holds them now. Their room is given back once nothing is left."""
        assert self.start <= end <= self.end
        self.start = end
        if end == self.end:
            self._origin = self._written = end
            self._scrambler = Scrambler() if self._hidden else None
            with contextlib.suppress(OSError):  # what stays is written over, and the log goes on
                self._file.truncate(0)

    def close(self) -> None:
        """Delete the spool."""
        self._file.close()


def absorbed(refs: Sequence[LogRef], count: int) -> int:
    """How many of the last parts a new part of `count` ids takes in: always those without ids; so sizes fall
    geometrically, and parts are few."""
    taken = 0
    while taken < len(refs):
        before = refs[-1 - taken]
        size = before.end - before.start
        if size and (size > TAKEN_SHARE * count or size + count > PART_IDS):
            break
        count, taken = count + size, taken + 1
    return taken


class Refocus(NamedTuple):
    """An event of the log: when `position` tokens were accepted, `ids` became what stands in front of the stream."""

    position: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a log part holds: committed ids and the pending ones behind them, int32, and `held`, bytes [n] u8 of what
    was pulled and not accepted (`context.saving`). focuses: those given behind its first id (of the first part: from
    position 0 on), ascending; those behind its last committed id are in the next part again."""

    ids: np.ndarray
    pending: np.ndarray
    held: np.ndarray
    focuses: tuple[Refocus, ...] = ()


def write_part(body: LogPart, part: Part) -> list[Buffer]:
    """The container of a part whose ids begin at position `body.start`."""
    assert body.start + len(part.ids) == body.end and bool(body.start) == bool(body.before)
    found = {"ids": torch.from_numpy(part.ids.astype(np.int32)),
             "pending": torch.from_numpy(part.pending.astype(np.int32)),
             "held": torch.from_numpy(part.held.astype(np.uint8))}
    if part.focuses:
        found["focuses"] = torch.tensor([number for event in part.focuses
                                         for number in (event.position, len(event.ids), *event.ids)])
    return pack(body, {"ids": found})


def read_part(body: LogPart, sections: dict[str, memoryview], what: str) -> Part:
    """What a verified part holds.

    Raises:
        SnapshotCorrupt: not what its header says.
    """
    if set(sections) != {"ids"} or body.end < body.start or bool(body.start) != bool(body.before):
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}, ids {body.start} to {body.end} behind part "
                              f"{body.before or 'none'}; expected section ids, a part before others than 0")
    found = {"held": torch.zeros(0, dtype=torch.uint8), "focuses": torch.zeros(0, dtype=torch.int64),
             **tensors(sections["ids"], what)}  # the first ones had neither
    lengths = {name: len(found[name]) if name in found and found[name].dim() else 0
               for name in ("pending", "held", "focuses")}
    expect(found, {"ids": (torch.int32, (body.end - body.start,)), "pending": (torch.int32, (lengths["pending"],)),
                   "held": (torch.uint8, (lengths["held"],)), "focuses": (torch.int64, (lengths["focuses"],))}, what)
    end = body.end + lengths["pending"]
    return Part(found["ids"].numpy(), found["pending"].numpy(), found["held"].numpy(),
                tuple(_focuses(found["focuses"].tolist(), body.start, end, what)))


def _focuses(numbers: list[int], start: int, end: int, what: str) -> Iterator[Refocus]:
    """Raises SnapshotCorrupt: not events of positions start .. end, ascending."""
    at, before = 0, start
    while at < len(numbers):
        position, count = (numbers[at:at + 2] + [-1])[:2]
        at += 2 + max(count, 0)
        if not before <= position <= end or not 0 <= count or at > len(numbers):
            raise SnapshotCorrupt(f"{what}: a focus of {count} ids at position {position}; expected events in order "
                                  f"inside {start} to {end}")
        before = position
        yield Refocus(position, tuple(numbers[at - count:at]))
