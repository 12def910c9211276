"""An object store as the place of a store: `s3://…`, `memory://…`, whatever fsspec reaches and creates atomically."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from locret_stream.errors import LocretError, SnapshotCorrupt, SnapshotNotFound, StoreError
from locret_stream.snapshot.files import TEMPORARY, Exists, Files
from locret_stream.snapshot.format import Buffer
from locret_stream.snapshot.listed import Listed


class RemoteFiles:
    """An object store that fsspec reaches. It acknowledges a whole object or none, so `write` is one request.

    All fencing of owners rests on one thing: that it refuses, in one step, to create a file that exists. What fsspec
    does where a place has no way to that (look, then write) lets two owners pass; this is known at once. Whether the
    place heeds what it is told is tried before the first exclusive write, as some servers do not.

    Raises:
        StoreError: there is no such place, or it cannot refuse to create a file that exists.
    """

    locks = False

    def __init__(self, url: str, **options: Any):
        import fsspec.asyn
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except Exception as error:  # a third party's constructor raises anything
            raise StoreError(f"store {url!r}: {error}; expected a folder, or a URL that fsspec knows") from error
        self.url, self.root = url, root.rstrip("/")
        self._refuses = False  # whether it was seen to refuse
        inner = self.fs
        while isinstance(deeper := getattr(inner, "fs", None), fsspec.AbstractFileSystem):
            inner = deeper
        create = getattr(type(inner), "_pipe_file" if inner.async_impl else "pipe_file")
        if create in (fsspec.AbstractFileSystem.pipe_file, fsspec.asyn.AsyncFileSystem._pipe_file):
            raise self._unfenced()

    def _unfenced(self) -> StoreError:
        return StoreError(f"store {self.url!r}: this place cannot create a file only if there is none, in one step, so "
                          "two owners could overwrite each other; expected a folder, or an object store that can")

    def _expect_refusal(self) -> None:
        """Try once to create a file that exists. A file that a crash leaves of this is no session, and does no harm."""
        if self._refuses:
            return
        probe = self._path(f"probe-{secrets.token_hex(8)}")
        self.fs.makedirs(self.root, exist_ok=True)
        try:
            for _ in range(2):
                self.fs.pipe_file(probe, b"", mode="create")
        except FileExistsError:  # perhaps already the first time, where a layer below asked twice
            self._refuses = True
        finally:
            with contextlib.suppress(Exception):  # of any kind: what is stored does not depend on it
                self.fs.rm_file(probe)
        if not self._refuses:
            raise self._unfenced()

    def read(self, path: str, most: int) -> memoryview:
        data = self._read(path, most + 1)
        if len(data) > most:
            with self._reported(path):
                size = self.fs.info(self._path(path))["size"]
            raise SnapshotCorrupt(f"{self.url}/{path} has {size} bytes; expected at most {most}")
        return memoryview(bytearray(data))

    def head(self, path: str, count: int) -> bytes:
        return self._read(path, count)

    def _read(self, path: str, most: int) -> bytes:
        """A file's first `most` bytes: one request, where there is such a file and anything in it."""
        with self._reported(path):
            try:
                return bytes(self.fs.cat_file(self._path(path), start=0, end=most))
            except Exception as error:  # an empty file has no range, and a folder cannot be read
                if not self._size_of_unread(path, error):
                    return b""
                if not isinstance(error, FileNotFoundError):
                    raise
                return bytes(self.fs.cat_file(self._path(path), start=0, end=most))  # it was written at this moment

    def _size_of_unread(self, path: str, error: Exception) -> int:
        """Bytes of a file that could not be read. Raises SnapshotNotFound: there is none; SnapshotCorrupt: it is a
        folder; `error`, where the place does not say."""
        try:
            self.fs.invalidate_cache()  # a cached listing shows nothing of other owners
            entry = self.fs.info(self._path(path))
        except FileNotFoundError:
            raise SnapshotNotFound(f"no {path} in {self.url}") from None
        except Exception:
            raise error from None
        if entry["type"] != "file":
            raise SnapshotCorrupt(f"{self.url}/{path} is a folder; it is not read")
        size: int = entry["size"]
        return size

    def looking(self, folder: str) -> Files:
        return Listed(self, folder)

    def everything_in(self, folder: str) -> list[tuple[str, int, str]]:
        """Path, size and version of every file in a folder and in those inside it: one request for a thousand files."""
        with self._reported(folder):
            self.fs.invalidate_cache()
            try:
                entries = self.fs.find(self._path(folder), detail=True).values()
            except (FileNotFoundError, NotADirectoryError):
                return []
        place = self._path(folder)
        start = place.strip("/") + "/"
        found = ((entry["name"].strip("/"), entry) for entry in entries if entry["type"] == "file")
        return [(f"{folder}/{name.removeprefix(start)}", entry["size"], _version(entry)) for name, entry in found
                if name.startswith(start)]

    def version(self, path: str) -> str:
        return ""

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        with self._reported(path):
            target = self._path(path)
            if exclusive:
                self._expect_refusal()
            data, mode = b"".join(parts), "create" if exclusive else "overwrite"
            try:
                try:
                    self.fs.pipe_file(target, data, mode=mode)
                except FileNotFoundError:  # a place of real folders; asking an object store for one is a request more
                    self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self.fs.pipe_file(target, data, mode=mode)
            except FileExistsError:
                if not exclusive:
                    raise
                raise Exists(path) from None

    def sync_folder(self, folder: str) -> None:
        pass  # an object that is seen was acknowledged

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: entry["size"] for name, entry in self._entries(folder)
                if entry["type"] == "file" and not name.startswith(TEMPORARY)}

    def folders(self, folder: str) -> list[str]:
        return [name for name, entry in self._entries(folder) if entry["type"] == "directory"]

    def delete(self, path: str) -> None:
        with self._reported(path), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(path))

    def unfinished(self, folder: str) -> dict[str, str]:
        return {}  # an object that was not acknowledged does not exist

    def sweep(self, folder: str, older_s: float) -> list[str]:
        return []

    def age_s(self, path: str) -> float:
        import datetime
        try:
            changed = self.fs.modified(self._path(path))
            return (datetime.datetime.now(changed.tzinfo) - changed).total_seconds()
        except Exception:  # places without times raise many kinds of errors
            return 0.0

    def remove_folder(self, folder: str) -> None:
        with self._reported(folder), contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            self.fs.rm(self._path(folder), recursive=True)

    def remove_empty_folder(self, folder: str) -> None:
        pass  # a folder exists as long as something is in it

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> Iterator[bool]:
        yield False  # object stores have no locks: young files are never collected instead

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return f"{self.root}/{path}"

    def _entries(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Names in a folder, sorted, with what fsspec says about each."""
        with self._reported(folder or "store"):
            self.fs.invalidate_cache()
            place = self._path(folder) if folder else self.root
            try:
                entries = self.fs.ls(place, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # An object store lists the marker of a folder, or a file of that name, as if it were inside.
        return sorted(((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries
                       if entry["name"].strip("/") != place.strip("/")), key=lambda item: item[0])

    @contextlib.contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        """Turn whatever a third party raises into StoreError: botocore's and aiohttp's errors are no OSErrors."""
        try:
            yield
        except (LocretError, Exists, AssertionError):
            raise
        except Exception as error:
            raise StoreError(f"{self.url}/{path}: {error or type(error).__name__}; nothing was acknowledged") from error


def _version(entry: dict[str, Any]) -> str:
    """What an object store says of an object that is another text after every write: S3's, Azure's and Google's."""
    return str(entry.get("ETag") or entry.get("etag") or "")
