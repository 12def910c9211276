"""A folder as the place of a store: writes are durable, and no link below the root is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from locret_stream.errors import SnapshotCorrupt, SnapshotNotFound, StoreError
from locret_stream.snapshot.files import TEMPORARY, Busy, Exists
from locret_stream.snapshot.format import Buffer

LOCK = "lock"
READ_BYTES = 16 << 20
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, something below a file, a socket
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # what file systems without hard links say
NO_FULL_FLUSH = (errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Posix:
    """The system calls that change a disk, one method each, so that a test can record them and let them fail."""

    write = staticmethod(os.write)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def fsync(self, handle: int) -> None:
        _flush(handle)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(handle)
        finally:
            os.close(handle)


def _flush(handle: int) -> None:
    """Bring what was written to the disk itself. On macOS fsync leaves it in the drive's cache, and another call
    empties that, where the file system knows it; any other failure of it stands, as of fsync."""
    import fcntl
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(handle, full)
            return
        except OSError as error:
            if error.errno not in NO_FULL_FLUSH:
                raise
    os.fsync(handle)


class LocalFiles:
    """A folder on a POSIX file system: tmp + fsync + rename (or link) + fsync of the folder; 0600 and 0700."""

    locks = True

    def __init__(self, root: str | Path, posix: Posix | None = None):
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        if os.path.exists(self.root) and not os.path.isdir(self.root):
            raise StoreError(f"{self.root} is no folder; expected one, or nothing yet")
        self.url, self.posix = self.root, posix or Posix()
        self._durable: set[tuple[str, int]] = set()  # folders (path, inode) whose entry this object made durable

    def read(self, path: str, most: int) -> memoryview:
        with self._opened(path) as (handle, size):
            name = self._path(path)
            if size > most:
                raise SnapshotCorrupt(f"{name} has {size} bytes; expected at most {most}")
            # numpy neither zeroes its memory first nor maps it in small pages, which halves the time of a large read.
            try:
                data, at = np.empty(size, np.uint8).data, 0
            except MemoryError:
                raise SnapshotCorrupt(f"{name} has {size} bytes, more than there is memory") from None
            while at < len(data):
                count = os.readv(handle, [data[at:at + READ_BYTES]])
                if not count:
                    raise SnapshotCorrupt(f"{name} became shorter while it was read")
                at += count
        return data

    def head(self, path: str, count: int) -> bytes:
        with self._opened(path) as (handle, _):
            return os.pread(handle, count, 0)

    def looking(self, folder: str) -> LocalFiles:
        return self

    def version(self, path: str) -> str:
        return ""

    def write(self, path: str, parts: Iterable[Buffer], *, exclusive: bool = False) -> None:
        posix, target = self.posix, self._checked(path)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, f"{TEMPORARY}{os.path.basename(target)}-{secrets.token_hex(8)}")
        with self._reported(path):
            self._make_folder(path.rpartition("/")[0])
            handle = posix.create(temporary)
            try:
                try:
                    for part in parts:
                        view = memoryview(part)
                        while len(view):
                            view = view[posix.write(handle, view):]
                    posix.fsync(handle)  # never tried again after an error: the kernel may have dropped the pages
                finally:
                    posix.close(handle)
                if exclusive:
                    try:
                        posix.link(temporary, target)
                    except FileExistsError:
                        raise Exists(path) from None
                    except OSError as error:
                        if error.errno not in NO_LINKS:
                            raise
                        raise StoreError(f"{target}: {error.strerror or error}: there are no hard links there, by which"
                                         " a file is created only if there is none, so nothing can be saved; expected "
                                         "a folder on another file system, or an object store") from error
                    posix.unlink(temporary)
                else:
                    posix.rename(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    posix.unlink(temporary)
                raise
            posix.sync_folder(folder)

    def sync_folder(self, folder: str) -> None:
        with self._reported(folder):
            self._make_folder(folder)
            self.posix.sync_folder(self._path(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        sizes = {}
        for entry in self._entries(folder):
            # Another process may have deleted the file since the folder was read.
            with self._reported(folder), contextlib.suppress(FileNotFoundError):
                if not entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def folders(self, folder: str) -> list[str]:
        return [entry.name for entry in self._entries(folder) if entry.is_dir(follow_symlinks=False)]

    def delete(self, path: str) -> None:
        target = self._checked(path)
        with self._reported(path):
            with contextlib.suppress(FileNotFoundError):
                self.posix.unlink(target)
            # Also where the file did not exist: whoever deleted it may have died before the sync.
            with contextlib.suppress(FileNotFoundError):
                self.posix.sync_folder(os.path.dirname(target))

    def unfinished(self, folder: str) -> dict[str, str]:
        return {entry.name: entry.name.removeprefix(TEMPORARY).rpartition("-")[0] for entry in self._entries(folder)
                if entry.name.startswith(TEMPORARY)}

    def sweep(self, folder: str, older_s: float) -> list[str]:
        inside = f"{folder}/" if folder else ""
        old = [entry.name for entry in self._entries(folder) if entry.name.startswith(TEMPORARY)
               and (older_s <= 0 or self.age_s(inside + entry.name) >= older_s)]
        for name in old:
            self.delete(inside + name)
        return old

    def age_s(self, path: str) -> float:
        try:
            return time.time() - os.lstat(self._path(path)).st_mtime
        except OSError:
            return 0.0

    def remove_folder(self, folder: str) -> None:
        name = self._checked(folder)
        with self._reported(folder):
            # The lock is deleted last: without it another process could begin in a folder that is being removed.
            for entry in sorted(self._entries(folder), key=lambda entry: entry.name == LOCK):
                if entry.is_dir(follow_symlinks=False):
                    self.remove_folder(f"{folder}/{entry.name}")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        self.posix.unlink(entry.path)
            self._rmdir(name)

    def remove_empty_folder(self, folder: str) -> None:
        name = self._checked(folder)
        if not os.path.isdir(name) or any(entry.name != LOCK for entry in self._entries(folder)):
            return
        with contextlib.suppress(Busy), self.lock(folder, shared=False, wait=False), self._reported(folder):
            self.posix.unlink(os.path.join(name, LOCK))
            self._rmdir(name)

    @contextlib.contextmanager
    def lock(self, folder: str, *, shared: bool, wait: bool = True) -> Iterator[bool]:
        import fcntl
        with self._reported(folder):
            handle = self._locked(folder, shared, wait)
        process = os.getpid()
        try:
            yield True
        finally:
            # A process that was forked meanwhile has the handle too, so that closing it here does not release the lock;
            # but the forked process must not release the lock of its parent.
            if os.getpid() == process:
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _rmdir(self, name: str) -> None:
        """Remove an emptied folder; it stays if another process writes into it meanwhile."""
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
        """The handle of the folder's lock file, locked. Raises Busy."""
        import fcntl
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        name = self._checked(f"{folder}/{LOCK}")
        while True:
            self._make_folder(folder)
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
            os.close(handle)  # the file was removed while this waited for its lock, which nobody else would meet

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Open a plain file for reading: its handle and its size."""
        name = self._checked(path)
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
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise SnapshotCorrupt(f"{name} is not a plain file; it is not read")
                yield handle, status.st_size
            finally:
                os.close(handle)

    def _path(self, path: str) -> str:
        assert path and not path.startswith("/") and ".." not in path.split("/"), "paths are chosen by the store"
        return os.path.join(self.root, path)

    def _checked(self, path: str) -> str:
        """The absolute path of a file. Raises SnapshotCorrupt if a folder between the root and it is a link."""
        whole, at = self._path(path), self.root
        for part in path.split("/")[:-1]:
            at = os.path.join(at, part)
            if os.path.islink(at):
                raise SnapshotCorrupt(f"{at} is a link; it is not followed. Expected a folder that this store made")
        return whole

    def _make_folder(self, folder: str) -> None:
        """Make a folder, and those between it and the root, each durable in the one above.

        One that exists is made durable too: whoever made it may have died before that.
        """
        self._make_root(self.root)
        at = self.root
        for part in folder.split("/"):
            above, at = at, os.path.join(at, part)
            made = False
            try:
                status = os.lstat(at)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self.posix.mkdir(at)
                status, made = os.lstat(at), True
            if not stat.S_ISDIR(status.st_mode):
                raise StoreError(f"{at} is not a folder; expected one, or nothing")
            if made or (at, status.st_ino) not in self._durable:
                self.posix.sync_folder(above)
                self._durable.add((at, status.st_ino))

    def _make_root(self, folder: str) -> None:
        if os.path.isdir(folder):
            if folder == self.root and (folder, 0) not in self._durable:
                with contextlib.suppress(PermissionError):  # the folder above is the user's
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
        name = self._checked(f"{folder}/x").rpartition("/")[0] if folder else self.root
        with self._reported(folder or "store", "expected a folder that may be read"):
            try:
                with os.scandir(name) as entries:
                    return sorted(entries, key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @contextlib.contextmanager
    def _reported(self, path: str, hint: str = "nothing was acknowledged. Check that the folder may be written and the "
                                               "disk has room") -> Iterator[None]:
        """Turn system errors into StoreError, with the path and what to do."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"{os.path.join(self.root, path)}: {error.strerror or error}; {hint}") from error
