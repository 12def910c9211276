"""Where containers are kept: a durable folder, or an object store that fsspec reaches. Knows bytes and relative paths.

One interface, two makes. `write` returns once the file would survive a power cut, and a file is there whole or not at
all. A path is made of names that this library chose (hexadecimal, a few letters): session names never become paths.
Below the root no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from locret_stream.errors import LocretError, SnapshotCorrupt, SnapshotNotFound, StoreError
from locret_stream.snapshot.format import Buffer

TEMPORARY = ".tmp-"
LOCK = "lock"
READ_BYTES = 16 << 20
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, something below a file, a socket


class Exists(Exception):
    """An exclusive write found the file there already; inside the room only."""


class Busy(Exception):
    """A lock that somebody holds, and one was not to wait; inside the room only."""


class Files(Protocol):
    """What the store needs of a place. Paths are relative, with "/"."""

    url: str

    def read(self, path: str, most: int) -> memoryview:
        """The whole file, of at most `most` bytes, in memory that belongs to nobody else and may be written to.

        Raises:
            SnapshotNotFound: there is none. SnapshotCorrupt: larger, or not a plain file. StoreError.
        """
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
        self._durable: set[tuple[str, int]] = set()  # folders (path, inode) whose place above was synced from here

    def read(self, path: str, most: int) -> memoryview:
        name = self._plain(path)
        with self._reported(path, "expected a file that may be read"):
            try:
                handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                raise SnapshotNotFound(f"no {path} in {self.root}") from None
            except OSError as error:
                if error.errno in NO_FILE:
                    raise SnapshotCorrupt(f"{name} is a link or no plain file; it is not read") from None
                raise
            try:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise SnapshotCorrupt(f"{name} is not a plain file; it is not read")
                if found.st_size > most:
                    raise SnapshotCorrupt(f"{name} has {found.st_size} bytes; expected at most {most}")
                # numpy's memory is neither zeroed first nor mapped in small pages: half of the time of a large read.
                try:
                    data, at = memoryview(np.empty(found.st_size, np.uint8)), 0
                except MemoryError:
                    raise SnapshotCorrupt(f"{name} has {found.st_size} bytes, more than there is memory") from None
                while at < len(data):
                    count = os.readv(handle, [data[at:at + READ_BYTES]])
                    if not count:
                        raise SnapshotCorrupt(f"{name} became shorter while it was read")
                    at += count
            finally:
                os.close(handle)
        return data

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        posix, target = self.posix, self._plain(path)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
        with self._reported(path):
            self._make(path.rpartition("/")[0])
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

    def settle(self, folder: str) -> None:
        with self._reported(folder):
            self._make(folder)
            self.posix.sync_folder(self._path(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for entry in self._entries(folder):
            # Another process may have deleted it since the folder was read.
            with self._reported(folder), contextlib.suppress(FileNotFoundError):
                if not entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def folders(self, folder: str) -> list[str]:
        return [entry.name for entry in self._entries(folder) if entry.is_dir(follow_symlinks=False)]

    def delete(self, path: str) -> None:
        target = self._plain(path)
        with self._reported(path):
            with contextlib.suppress(FileNotFoundError):
                self.posix.unlink(target)
            with contextlib.suppress(FileNotFoundError):  # also what was gone: whoever deleted it may have died
                self.posix.sync_folder(os.path.dirname(target))

    def sweep(self, folder: str, older_s: float) -> list[str]:
        old = [entry.name for entry in self._entries(folder) if entry.name.startswith(TEMPORARY)
               and (older_s <= 0 or self.age_s(f"{folder}/{entry.name}") >= older_s)]
        for name in old:
            self.delete(f"{folder}/{name}")
        return old

    def age_s(self, path: str) -> float:
        try:
            return time.time() - os.lstat(self._path(path)).st_mtime
        except OSError:
            return 0.0

    def remove_folder(self, folder: str) -> None:
        name = self._plain(folder)
        with self._reported(folder):
            # The lock goes last: without it another process could begin in a folder that is on its way out.
            for entry in sorted(self._entries(folder), key=lambda entry: entry.name == LOCK):
                if entry.is_dir(follow_symlinks=False):
                    self.remove_folder(f"{folder}/{entry.name}")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        self.posix.unlink(entry.path)
            self._rmdir(name)

    def drop_folder(self, folder: str) -> None:
        name = self._plain(folder)
        if not os.path.isdir(name) or any(entry.name != LOCK for entry in self._entries(folder)):
            return
        with contextlib.suppress(Busy), self.lock(folder, shared=False, wait=False), self._reported(folder):
            self.posix.unlink(os.path.join(name, LOCK))
            self._rmdir(name)

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> Iterator[bool]:
        with self._reported(folder):
            handle = self._locked(folder, shared, wait)
        try:
            yield True
        finally:
            os.close(handle)

    def _rmdir(self, name: str) -> None:
        """Remove an emptied folder; it stays if somebody begins anew in it."""
        try:
            self.posix.sync_folder(name)
            self.posix.rmdir(name)
            self.posix.sync_folder(os.path.dirname(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _locked(self, folder: str, shared: bool, wait: bool) -> int:
        import fcntl
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        name = self._plain(f"{folder}/{LOCK}")
        while True:
            self._make(folder)
            try:
                handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:  # the folder was removed in this moment
                continue
            try:
                fcntl.flock(handle, kind)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.lstat(name)):
                        return handle
            except BlockingIOError:
                os.close(handle)
                raise Busy(folder) from None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # removed while this waited for it: a lock that nobody else would see

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return os.path.join(self.root, path)

    def _plain(self, path: str) -> str:
        """The whole path of a file, after a look at every folder on the way to it.

        Raises:
            SnapshotCorrupt: one is a link.
        """
        whole = self._path(path)
        at = self.root
        for part in path.split("/")[:-1]:
            at = os.path.join(at, part)
            if os.path.islink(at):
                raise SnapshotCorrupt(f"{at} is a link; it is not followed. Expected a folder that this store made")
        return whole

    def _make(self, folder: str) -> None:
        """Make a folder, and those between it and the root, each durable in the one above.

        That also holds for one that is there already: whoever made it may have died before it was durable.
        """
        self._make_root(self.root)
        at = self.root
        for part in folder.split("/"):
            above, at = at, os.path.join(at, part)
            made = False
            try:
                found = os.lstat(at)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self.posix.mkdir(at)
                found, made = os.lstat(at), True
            if not stat.S_ISDIR(found.st_mode):
                raise StoreError(f"{at} is not a folder; expected one, or nothing")
            if made or (at, found.st_ino) not in self._durable:
                self.posix.sync_folder(above)
                self._durable.add((at, found.st_ino))

    def _make_root(self, folder: str) -> None:
        if os.path.isdir(folder):
            if folder == self.root and (folder, 0) not in self._durable:
                with contextlib.suppress(PermissionError):  # of the folder above, which is the user's
                    self.posix.sync_folder(os.path.dirname(folder))
                self._durable.add((folder, 0))
            return
        above = os.path.dirname(folder)
        self._make_root(above)
        with contextlib.suppress(FileExistsError):
            self.posix.mkdir(folder)
        self.posix.sync_folder(above)
        self._durable.add((folder, 0))

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        name = self._plain(f"{folder}/x").rpartition("/")[0] if folder else self.root
        with self._reported(folder or "store", "expected a folder that may be read"):
            try:
                with os.scandir(name) as found:
                    return sorted(found, key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @contextlib.contextmanager
    def _reported(self, path: str, hint: str = "nothing was acknowledged. Check that the folder may be written and the "
                                               "disk has room") -> Iterator[None]:
        """System errors as StoreError, with the path and what to do."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"{os.path.join(self.root, path)}: {error.strerror or error}; {hint}") from error


class RemoteFiles:
    """An object store that fsspec reaches: it acknowledges a whole object or none, so `write` is one request.

    Raises:
        StoreError: no such place, or one that cannot refuse to create a file that is there, in one step. All fencing
            of owners rests on that; fsspec's stand-in for it (look, then write) lets two owners pass.
    """

    def __init__(self, url: str, **options: Any):
        import fsspec.asyn
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except Exception as error:  # whatever a third party's constructor raises
            raise StoreError(f"store {url!r}: {error}; expected a folder, or a URL that fsspec knows") from error
        self.url, self.root = url, root.rstrip("/")
        inner = self.fs
        while isinstance(deeper := getattr(inner, "fs", None), fsspec.AbstractFileSystem):
            inner = deeper
        own = getattr(type(inner), "_pipe_file" if inner.async_impl else "pipe_file")
        if own in (fsspec.AbstractFileSystem.pipe_file, fsspec.asyn.AsyncFileSystem._pipe_file):
            raise StoreError(f"store {url!r}: this place cannot create a file only if there is none, in one step, so "
                             "two owners could overwrite each other; expected a folder, or an object store")

    def read(self, path: str, most: int) -> memoryview:
        with self._reported(path):
            try:
                self.fs.invalidate_cache()  # a listing that was kept knows nothing of other owners
                found = self.fs.info(self._path(path))
                if found["type"] != "file":
                    raise SnapshotCorrupt(f"{self.url}/{path} is a folder; it is not read")
                if found["size"] > most:
                    raise SnapshotCorrupt(f"{self.url}/{path} has {found['size']} bytes; expected at most {most}")
                return memoryview(bytearray(self.fs.cat_file(self._path(path))))
            except FileNotFoundError:
                raise SnapshotNotFound(f"no {path} in {self.url}") from None

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        with self._reported(path):
            target = self._path(path)
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self.fs.pipe_file(target, b"".join(parts), mode="create" if exclusive else "overwrite")
            except FileExistsError:
                if not exclusive:
                    raise
                raise Exists(path) from None

    def settle(self, folder: str) -> None:
        pass  # what is seen was acknowledged

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: entry["size"] for name, entry in self._entries(folder)
                if entry["type"] == "file" and not name.startswith(TEMPORARY)}

    def folders(self, folder: str) -> list[str]:
        return [name for name, entry in self._entries(folder) if entry["type"] == "directory"]

    def delete(self, path: str) -> None:
        with self._reported(path), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(path))

    def sweep(self, folder: str, older_s: float) -> list[str]:
        return []  # an object that was not acknowledged is not there

    def age_s(self, path: str) -> float:
        import datetime
        try:
            changed = self.fs.modified(self._path(path))
            return (datetime.datetime.now(changed.tzinfo) - changed).total_seconds()
        except Exception:  # a place that cannot tell says so in many ways
            return 0.0

    def remove_folder(self, folder: str) -> None:
        with self._reported(folder), contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            self.fs.rm(self._path(folder), recursive=True)

    def drop_folder(self, folder: str) -> None:
        pass  # a folder is there as long as something is in it

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> Iterator[bool]:
        yield False  # there is none: what is young is never collected instead

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return f"{self.root}/{path}"

    def _entries(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Names in a folder, sorted, with what the place says about each."""
        with self._reported(folder or "store"):
            self.fs.invalidate_cache()
            place = self._path(folder) if folder else self.root
            try:
                found = self.fs.ls(place, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # An object store lists the marker of a folder, or a file of that name, as if it were inside.
        return sorted(((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in found
                       if entry["name"].strip("/") != place.strip("/")), key=lambda item: item[0])

    @contextlib.contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        """Whatever a third party raises as StoreError: botocore's and aiohttp's errors are no OSErrors."""
        try:
            yield
        except (LocretError, Exists, AssertionError):
            raise
        except Exception as error:
            raise StoreError(f"{self.url}/{path}: {error or type(error).__name__}; nothing was acknowledged") from error


def open_files(url: str | Path) -> Files:
    """The folder or place that a user named: a path, `file://…`, or the URL of an object store that fsspec knows."""
    text = os.fspath(url)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return LocalFiles(text.removeprefix(scheme))
    return RemoteFiles(text) if "://" in text else LocalFiles(text)
