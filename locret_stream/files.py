"""Files that are replaced whole or not at all, and then lie on the disk, in folders that one run at a time writes.

Knows nothing of what is in them.
"""

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
    """Let `write` write a temporary file beside `path`, flush it to the disk, and put it in place.

    Raises:
        OSError: naming `path`; what was there before is there still.
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
    except SafetensorError as error:  # its word for whatever the file system says
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, os.strerror(errno.ENOSPC) if full else str(error),
                      str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Let what was written to a file, or renamed in a folder, be on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """For the block the only one, of those who ask here, that changes what lies in `folder`.

    The lock is the kernel's, on the folder itself: nothing is left behind by who is killed. A file system that knows no
    locks on folders (some network ones) gives none. Where there is no folder, the block is to say so.

    Raises:
        ConfigError: another process, or another call in this one, is at work there.
    """
    import fcntl

    if not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another run trains, tunes or divides there; expected one at a time: wait for "
                              "it, or name another folder") from None
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield
    finally:
        os.close(handle)
