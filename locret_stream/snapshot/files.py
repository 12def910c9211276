"""Where containers are kept: a durable folder, or anything that fsspec reaches. Knows bytes and relative paths.

One interface, two makes. `write` returns once the file would survive a power cut, and a file is there whole or not at
all. A path is made of names that this library chose (hexadecimal, a few letters): session names never become paths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from locret_stream.errors import SnapshotCorrupt, SnapshotNotFound, StoreError

TEMPORARY = ".tmp-"
READ_BYTES = 16 << 20


class Exists(Exception):
    """An exclusive write found the file there already; inside the room only."""


class Files(Protocol):
    """What the store needs of a place. Paths are relative, with "/"."""

    url: str

    def read(self, path: str, most: int) -> bytearray:
        """The whole file, of at most `most` bytes.

        Raises:
            SnapshotNotFound: there is none. SnapshotCorrupt: larger, or not a plain file. StoreError.
        """
        ...

    def write(self, path: str, parts: Iterable[bytes], *, exclusive: bool = False) -> None:
        """The parts one after another as one file, durable on return; an existing one is replaced whole.

        Raises:
            Exists: `exclusive`, and there is one. StoreError: it failed; the file is as it was before.
        """
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

    def sweep(self, folder: str, older_s: float) -> list[str]:
        """Remove temporary files in a folder that are older; returns their names."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since the file was written; 0 where that cannot be told."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with whatever is left in it."""
        ...

    def lock(self, folder: str, *, shared: bool) -> contextlib.AbstractContextManager[bool]:
        """Hold off other processes for the length of a block; gives whether the place can do that at all."""
        ...


class Posix:
    """The system calls that change a disk, one method each, so that a test can record and cut them."""

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class LocalFiles:
    """A folder on a POSIX file system: tmp + fsync + rename (or link) + fsync of the folder; 0600 and 0700."""

    def __init__(self, root: str | Path, posix: Posix | None = None):
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self.url, self.posix = self.root, posix or Posix()

    def read(self, path: str, most: int) -> bytearray:
        name = self._path(path)
        with self._reported(path):
            try:
                handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                raise SnapshotNotFound(f"no {path} in {self.root}") from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise SnapshotCorrupt(f"{name} is a link or no plain file; it is not read") from None
                raise
            with os.fdopen(handle, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SnapshotCorrupt(f"{name} is not a plain file; it is not read")
                if found.st_size > most:
                    raise SnapshotCorrupt(f"{name} has {found.st_size} bytes; expected at most {most}")
                data = bytearray(found.st_size)
                view, at = memoryview(data), 0
                while at < len(data):
                    count = file.readinto(view[at:at + READ_BYTES])
                    if not count:
                        raise SnapshotCorrupt(f"{name} became shorter while it was read")
                    at += count
        return data

    def write(self, path: str, parts: Iterable[bytes], *, exclusive: bool = False) -> None:
        posix, target = self.posix, self._path(path)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
        with self._reported(path):
            self._make(folder)
            handle = posix.create(temporary)
            try:
                try:
                    for part in parts:
                        view = memoryview(part)
                        while len(view):
                            view = view[posix.write(handle, view):]
                    posix.fsync(handle)  # failed once, it is never tried again: the kernel may have dropped the pages
                finally:
                    posix.close(handle)
                if exclusive:
                    try:
                        posix.link(temporary, target)
                    except FileExistsError:
                        raise Exists(path) from None
                    posix.unlink(temporary)
                else:
                    posix.rename(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    posix.unlink(temporary)
                raise
            posix.sync_folder(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in self._entries(folder)
                if not entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False)}

    def folders(self, folder: str) -> list[str]:
        return sorted(entry.name for entry in self._entries(folder) if entry.is_dir(follow_symlinks=False))

    def delete(self, path: str) -> None:
        target = self._path(path)
        with self._reported(path), contextlib.suppress(FileNotFoundError):
            self.posix.unlink(target)
            self.posix.sync_folder(os.path.dirname(target))

    def sweep(self, folder: str, older_s: float) -> list[str]:
        old = [entry.name for entry in self._entries(folder) if entry.name.startswith(TEMPORARY)
               and self.age_s(f"{folder}/{entry.name}") >= older_s]
        for name in old:
            self.delete(f"{folder}/{name}")
        return old

    def age_s(self, path: str) -> float:
        import time
        try:
            return time.time() - os.lstat(self._path(path)).st_mtime
        except OSError:
            return 0.0

    def remove_folder(self, folder: str) -> None:
        name = self._path(folder)
        with self._reported(folder):
            for entry in list(self._entries(folder)):
                if entry.is_dir(follow_symlinks=False):
                    self.remove_folder(f"{folder}/{entry.name}")
                else:
                    self.posix.unlink(entry.path)
            with contextlib.suppress(FileNotFoundError):
                self.posix.sync_folder(name)
                self.posix.rmdir(name)
                self.posix.sync_folder(os.path.dirname(name))

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool) -> Iterator[bool]:
        import fcntl
        with self._reported(folder):
            self._make(self._path(folder))
            handle = os.open(self._path(f"{folder}/lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield True
        finally:
            os.close(handle)

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return os.path.join(self.root, path)

    def _make(self, folder: str) -> None:
        """Make a folder and those above it, each durable in the one above."""
        if os.path.isdir(folder) and not (os.path.islink(folder) and folder != self.root):
            return
        if os.path.lexists(folder):
            raise StoreError(f"{folder} is not a folder; expected one, or nothing")
        above = os.path.dirname(folder)
        self._make(above)
        with contextlib.suppress(FileExistsError):
            self.posix.mkdir(folder)
        self.posix.sync_folder(above)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        name = self._path(folder) if folder else self.root
        if folder and os.path.islink(name):
            raise SnapshotCorrupt(f"{name} is a link; it is not followed")
        with self._reported(folder or "store"):
            try:
                with os.scandir(name) as found:
                    return sorted(found, key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @contextlib.contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        """System errors as StoreError, with the path and what to do."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"{os.path.join(self.root, path)}: {error.strerror or error}; nothing was acknowledged. "
                             "Check that the folder may be written and the disk has room") from error


class RemoteFiles:
    """Anything fsspec reaches: an object store acknowledges a whole object or none, so `write` is one request."""

    def __init__(self, url: str, **options: Any):
        import fsspec
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {url!r}: {error}; expected a folder, or a URL that fsspec knows") from error
        self.url, self.root = url, self.root.rstrip("/")

    def read(self, path: str, most: int) -> bytearray:
        with self._reported(path):
            try:
                size = self.fs.info(self._path(path))["size"]
                if size > most:
                    raise SnapshotCorrupt(f"{self.url}/{path} has {size} bytes; expected at most {most}")
                return bytearray(self.fs.cat_file(self._path(path)))
            except FileNotFoundError:
                raise SnapshotNotFound(f"no {path} in {self.url}") from None
            except IsADirectoryError:
                raise SnapshotCorrupt(f"{self.url}/{path} is a folder; it is not read") from None

    def write(self, path: str, parts: Iterable[bytes], *, exclusive: bool = False) -> None:
        with self._reported(path):
            target = self._path(path)
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self.fs.pipe_file(target, b"".join(parts), mode="create" if exclusive else "overwrite")
            except FileExistsError:
                raise Exists(path) from None

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: entry["size"] for name, entry in self._entries(folder) if entry["type"] == "file"}

    def folders(self, folder: str) -> list[str]:
        return sorted(name for name, entry in self._entries(folder) if entry["type"] == "directory")

    def delete(self, path: str) -> None:
        with self._reported(path), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(path))
            self.fs.invalidate_cache()

    def sweep(self, folder: str, older_s: float) -> list[str]:
        return []  # an object that was not acknowledged is not there

    def age_s(self, path: str) -> float:
        import datetime
        try:
            changed = self.fs.modified(self._path(path))
        except (NotImplementedError, OSError):
            return 0.0
        now = datetime.datetime.now(changed.tzinfo)
        return (now - changed).total_seconds()

    def remove_folder(self, folder: str) -> None:
        with self._reported(folder), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._path(folder), recursive=True)
            self.fs.invalidate_cache()

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool) -> Iterator[bool]:
        yield False  # there is none: what is young is never collected instead

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return f"{self.root}/{path}"

    def _entries(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        with self._reported(folder or "store"):
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self._path(folder) if folder else self.root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in found]

    @contextlib.contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, TimeoutError) as error:
            raise StoreError(f"{self.url}/{path}: {error}; nothing was acknowledged") from error


def open_files(url: str | Path) -> Files:
    """The folder or place that a user named: a path, `file://…`, or another URL that fsspec knows."""
    text = os.fspath(url)
    if "://" not in text:
        return LocalFiles(text)
    if text.startswith("file://"):
        return LocalFiles(text.removeprefix("file://"))
    return RemoteFiles(text)
