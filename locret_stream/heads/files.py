"""Files that are replaced whole or not at all, and then lie on the disk. Knows nothing of what is in them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

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
