"""An object store as one listing showed a folder of it: there every look is a request of its own.

Sessions ask many small questions of a folder: which generations are there, whether files have their full length,
whether there is a key. Between a few of them nothing needs to be newer than the first answer, so one listing answers
all (`SessionFolder.looking`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from locret_stream.errors import SnapshotCorrupt, SnapshotNotFound
from locret_stream.snapshot.files import TEMPORARY, Files
from locret_stream.snapshot.format import Buffer

SMALL = 8192  # bytes: what was read up to this size is kept as long as the listing, records and aliases above all


class Listable(Files, Protocol):
    """A place that says with one request what a folder there holds."""

    def everything_in(self, folder: str) -> Iterable[tuple[str, int, str]]:
        """Path, size and version of every file in a folder, in those below it too."""
        ...


class Listed:
    """Files of a place, of which those in one folder are looked up in a listing of the moment when this was made.

    What is read is read from the place, and small files once. What is written or deleted by this object shows in it.

    Args:
        place: whose files they are.
        read: contents of small files elsewhere, by path, which need not be read.
    """

    locks = False

    def __init__(self, place: Listable, folder: str, read: Mapping[str, bytes] | None = None):
        self._place, self._folder, self.url = place, folder, place.url
        self._sizes = dict[str, int]()
        self._versions = dict[str, str]()
        for path, size, version in place.everything_in(folder):
            self._sizes[path], self._versions[path] = size, version
        self._read: dict[str, bytes | None] = {**(read or {})}  # None: there is no such file
        self._written = dict[str, bytes]()

    def _lists(self, path: str) -> bool:
        assert ".." not in path.split("/"), "paths are chosen by the store"
        return path == self._folder or path.startswith(f"{self._folder}/")

    def looking(self, folder: str) -> Files:
        return Listed(self._place, folder, self._written)

    def read(self, path: str, most: int) -> memoryview:
        size = self._sizes.get(path) if self._lists(path) else None
        if self._lists(path) and size is None:
            if any(other.startswith(f"{path}/") for other in self._sizes):
                raise SnapshotCorrupt(f"{self.url}/{path} is a folder; it is not read")
            raise SnapshotNotFound(f"no {path} in {self.url}")
        if size is not None and size > most:
            raise SnapshotCorrupt(f"{self.url}/{path} has {size} bytes; expected at most {most}")
        if most > SMALL:
            return self._place.read(path, most)
        if path not in self._read:
            try:
                self._read[path] = bytes(self._place.read(path, most))
            except SnapshotNotFound:
                self._read[path] = None
        data = self._read[path]
        if data is None:
            raise SnapshotNotFound(f"no {path} in {self.url}")
        return memoryview(bytearray(data))

    def head(self, path: str, count: int) -> bytes:
        if self._lists(path) and path not in self._sizes:
            raise SnapshotNotFound(f"no {path} in {self.url}")
        return self._place.head(path, count)

    def version(self, path: str) -> str:
        return self._versions.get(path, "") if self._lists(path) else self._place.version(path)

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        data = b"".join(parts)
        self._read.pop(path, None)
        self._place.write(path, [data], exclusive=exclusive)
        if self._lists(path):
            self._sizes[path] = len(data)
            self._versions.pop(path, None)
        elif len(data) <= SMALL:
            self._read[path] = self._written[path] = data

    def delete(self, path: str) -> None:
        self._place.delete(path)
        for known in (self._sizes, self._versions, self._read, self._written):
            known.pop(path, None)

    def sizes(self, folder: str) -> dict[str, int]:
        if not self._lists(folder):
            return self._place.sizes(folder)
        inside = {path.removeprefix(f"{folder}/"): size for path, size in sorted(self._sizes.items())
                  if path.startswith(f"{folder}/")}
        return {name: size for name, size in inside.items() if "/" not in name and not name.startswith(TEMPORARY)}

    def folders(self, folder: str) -> list[str]:
        if not self._lists(folder):
            return self._place.folders(folder)
        inside = [path.removeprefix(f"{folder}/") for path in self._sizes if path.startswith(f"{folder}/")]
        return sorted({path.partition("/")[0] for path in inside if "/" in path})

    def sync_folder(self, folder: str) -> None:
        self._place.sync_folder(folder)

    def unfinished(self, folder: str) -> dict[str, str]:
        return self._place.unfinished(folder)

    def sweep(self, folder: str, older_s: float) -> list[str]:
        return self._place.sweep(folder, older_s)

    def age_s(self, path: str) -> float:
        return self._place.age_s(path)

    def remove_folder(self, folder: str) -> None:
        self._place.remove_folder(folder)
        for path in [path for path in self._sizes if path.startswith(f"{folder}/")]:
            del self._sizes[path]

    def remove_empty_folder(self, folder: str) -> None:
        self._place.remove_empty_folder(folder)

    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> contextlib.AbstractContextManager[bool]:
        return self._place.lock(folder, shared=shared, wait=wait)
