"""Where containers are kept: the interface of a place, and its two makes, a folder and an object store.

`write` returns once the file would survive a power cut, and a file is there whole or not at all. A path is made of
names that this library chose (hexadecimal, a few letters): session names never become paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

from locret_stream.snapshot.format import Buffer

TEMPORARY = ".tmp-"


class Exists(Exception):
    """An exclusive write found the file there already; inside the room only."""


class Busy(Exception):
    """A lock that somebody holds, and one was not to wait; inside the room only."""


class Files(Protocol):
    """What the store needs of a place. Paths are relative, with "/"."""

    url: str
    locks: bool  # whether `lock` holds anybody off

    def read(self, path: str, most: int) -> memoryview:
        """The whole file, of at most `most` bytes, in memory that belongs to nobody else and may be written to.

        Raises:
            SnapshotNotFound: there is none. SnapshotCorrupt: larger, or not a plain file. StoreError.
        """
        ...

    def head(self, path: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all of a shorter one. Raises as `read`."""
        ...

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        """The parts one after another as one file, durable on return; an existing one is replaced whole.

        Raises:
            Exists: `exclusive`, and there is one. StoreError: it failed; the file is as it was before, or whole and new
                where only the last step failed: that it is there was not made durable, or the answer got lost.
        """
        ...

    def settle(self, folder: str) -> None:
        """Make the files directly in a folder durable, whoever wrote them: one that died may have left that undone."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files directly in a folder, temporary ones left out; {} if there is no such folder."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file, durably; nothing if it is not there."""
        ...

    def unfinished(self, folder: str) -> dict[str, str]:
        """Names of the temporary files in a folder, each with the name of the file that it was to become."""
        ...

    def sweep(self, folder: str, older_s: float) -> list[str]:
        """Remove temporary files in a folder that are older; returns their names."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since the file was written; 0 where that cannot be told."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with whatever is left in it."""
        ...

    def drop_folder(self, folder: str) -> None:
        """Remove a folder if there is nothing in it (but a lock that nobody holds)."""
        ...

    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> contextlib.AbstractContextManager[bool]:
        """Hold off others, threads or processes, for the length of a block; gives whether the place can do that at all.

        Raises:
            Busy: not with `wait`, and others hold it.
        """
        ...
