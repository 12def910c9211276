"""The log of a session: every accepted token id and event, on disk. Memory holds none of it but the newest few.

Between two snapshots ids wait in a spool, a temporary file without a name that a crash takes with it. A snapshot seals
them in a *part*, an immutable container like a page; small parts grow together, so there are few. A part says which one
comes before it and how the frame stood at its end: a chain can be read without any manifest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from locret_stream.errors import SnapshotCorrupt
from locret_stream.snapshot.format import LogPart, LogRef, expect, pack, tensors

PART_IDS = 16 << 20  # the most ids of one part: 64 MiB


class Spool:
    """Ids accepted since the last snapshot; position `start` on. One thread at a time."""

    def __init__(self, start: int):
        self.start = self.end = start
        self._file = tempfile.TemporaryFile(prefix="locret-log-")

    def append(self, ids: Iterable[int], at: int | None = None) -> None:
        """Ids of the stream from position `at` on (None: where the last ones ended); what was there is forgotten."""
        at = self.end if at is None else at
        assert self.start <= at <= self.end, "the log has a gap"
        data = np.fromiter(ids, dtype="<i4")
        self._file.seek(4 * (at - self.start))
        self._file.truncate()
        self._file.write(data.tobytes())
        self._file.flush()
        self.end = at + len(data)

    def read(self, end: int) -> np.ndarray:
        """Ids start .. end-1, int32."""
        assert self.start <= end <= self.end
        self._file.seek(0)
        data = self._file.read(4 * (end - self.start))
        self._file.seek(0, 2)
        return np.frombuffer(data, dtype="<i4")

    def drop(self, end: int) -> None:
        """Forget ids before `end`: a part holds them now."""
        rest = self.read(self.end)[end - self.start:]
        self._file.seek(0)
        self._file.truncate()
        self._file.write(rest.tobytes())
        self.start = end

    def close(self) -> None:
        """Delete the spool."""
        self._file.close()


def absorbed(refs: Sequence[LogRef], count: int) -> int:
    """How many of the last parts a new part of `count` ids takes in, so that parts stay few: those not larger."""
    taken = 0
    while taken < len(refs):
        before = refs[-1 - taken]
        size = before.end - before.start
        if size > count or size + count > PART_IDS:
            break
        count, taken = count + size, taken + 1
    return taken


def write_part(body: LogPart, ids: np.ndarray, pending: np.ndarray) -> list[bytes]:
    """The container of ids from position `body.start` on."""
    return pack(body, {"ids": {"ids": torch.from_numpy(ids.astype(np.int32)),
                               "pending": torch.from_numpy(pending.astype(np.int32))}})


def read_part(body: LogPart, sections: dict[str, memoryview], what: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a verified part, and those that were pending, int32.

    Raises:
        SnapshotCorrupt: not what its header says.
    """
    if set(sections) != {"ids"} or body.end < body.start:
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}; expected ids")
    found = tensors(sections["ids"], what)
    pending = found.get("pending")
    expect(found, {"ids": (torch.int32, (body.end - body.start,)),
                   "pending": (torch.int32, (0 if pending is None or not pending.dim() else len(pending),))}, what)
    return found["ids"].numpy(), pending.numpy()
