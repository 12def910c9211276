"""Where containers are kept: the interface that a folder (`local`) and an object store (`remote`) implement.

`write` returns once the file would survive a power cut, and a file exists whole or not at all. A path is made of names
that this library chose (hexadecimal, a few letters): session names never become paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

from locret_stream.snapshot.format import Buffer

TEMPORARY = ".tmp-"


class Exists(Exception):
    """An exclusive write met a file of its name; `snapshot` handles this itself."""


class Busy(Exception):
    """Another owner has the lock, and the caller did not want to wait; `snapshot` handles this itself."""


class Files(Protocol):
    """A place for files. Paths are relative, with "/"."""

    url: str
    locks: bool  # whether `lock` really locks

    def read(self, path: str, most: int) -> memoryview:
        """The whole file, of at most `most` bytes, in memory of its own that may be written to.

        Raises:
            SnapshotNotFound: there is no such file. SnapshotCorrupt: it is larger, or not a plain file. StoreError.
        """
        ...

    def head(self, path: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all of a shorter one. Raises as `read`."""
        ...

    def looking(self, folder: str) -> Files:
        """These files, for a few looks at a folder that may all be of this moment: where every look is a request, one
        listing answers them. Elsewhere the files themselves. Small files elsewhere that were written by what another
        call gave, and not since, are known to what it gives."""
        ...

    def version(self, path: str) -> str:
        """What is another text after every write of other bytes to a file, without reading it; "" where the place, or
        the listing, does not say."""
        ...

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        """Write the parts one after another as one file, durable on return; an existing file is replaced atomically.

        Raises:
            Exists: `exclusive`, and the file exists. StoreError: the write failed. The file is then as it was before,
                or whole and new where only the last step failed: the folder was not synced, or the answer got lost.
        """
        ...

    def sync_folder(self, folder: str) -> None:
        """Make the files directly in a folder durable, whoever wrote them: a writer may have died before that."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files directly in a folder, temporary ones left out; {} if there is no such folder."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, durably, if it exists."""
        ...

    def unfinished(self, folder: str) -> dict[str, str]:
        """Names of the temporary files in a folder, each with the name of the file that it was to become."""
        ...

    def sweep(self, folder: str, older_s: float) -> list[str]:
        """Delete the temporary files in a folder that are at least so many seconds old; returns their names."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since the file was written; 0 where the place cannot say."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it."""
        ...

    def remove_empty_folder(self, folder: str) -> None:
        """Remove a folder if nothing is in it but a lock that is free."""
        ...

    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> contextlib.AbstractContextManager[bool]:
        """Lock a folder for the length of a block, against other threads and processes. The block gets whether the
        place has locks at all. Raises Busy if another owner has the lock and `wait` is false."""
        ...
