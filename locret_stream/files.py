"""Atomic, fsynced replacement of files, and an exclusive lock on a folder. Knows nothing of what the files hold."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from locret_stream.errors import ConfigError

TEMPORARY = ".tmp"


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` atomically by what `write` puts into a temporary file beside it. The file is durable on return.

    Raises:
        OSError: it names `path`. The file there is as it was before, or the new one already where only the last step
            failed: the folder was not synced.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=TEMPORARY)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            flush(temporary)
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush(path.parent)
    except SafetensorError as error:  # safetensors raises it for every error of the file system
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, os.strerror(errno.ENOSPC) if full else str(error),
                      str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable by fsync."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone_in(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock `folder` exclusively for the length of the block, against every other caller of this function. The block is
    told whether it has the lock; `wait`: until others have done.

    The kernel keeps the lock on the folder itself, so a killed process leaves nothing behind. On a file system without
    locks on folders (some network ones), and where `folder` does not exist, the block runs without a lock.

    Raises:
        ConfigError: another process, or another call in this one, has the lock, and it was not to be waited for.
    """
    import fcntl

    if not folder.is_dir():
        yield False
        return
    handle, locked = os.open(folder, os.O_RDONLY), False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except BlockingIOError:
            raise ConfigError(f"{folder}: another run trains, tunes or divides there; expected one at a time: wait for "
                              "it, or name another folder") from None
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield locked
    finally:
        os.close(handle)
