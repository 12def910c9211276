"""Text from files, pipes and the terminal. Knows no model."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from locret_stream.charsets import Decoder
from locret_stream.errors import InputError

PIECE_BYTES = 1 << 16


def check_readable(path: Path) -> None:
    """Check, before a model is loaded, that a file can be read.

    A pipe is not opened: closing it again would take the only reader from the process that writes to it.

    Raises:
        InputError: it is a folder. OSError: it cannot be read.
    """
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise InputError(f"{path} is a folder; expected text files")
    if stat.S_ISREG(kind):
        with path.open("rb"):
            pass
    elif not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def file_text(path: Path, decoder: Decoder | None = None) -> Iterator[str]:
    """The text of a file in pieces, ending in a newline, so that the next file starts on a new line.

    Args:
        decoder: of this file alone; None: UTF-8, strictly.

    Raises:
        InvalidText: it is not text in that encoding.
    """
    decoder = decoder or Decoder(name=str(path))
    last = "\n"
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            if text := decoder.push(data):
                yield (last := text)
    if text := decoder.end():
        yield (last := text)
    if not last.endswith("\n"):
        yield "\n"


async def path_text(path: Path, decoder: Decoder) -> AsyncIterator[str]:
    """As `file_text`, inside an event loop: it awaits the data of a pipe, so that signals end the wait for a process
    that has yet to write."""
    file, last = _open_pipe(path), "\n"
    if file is None:
        for piece in file_text(path, decoder):
            yield piece
        return
    with file:
        async for piece in Reader(str(path), file, decoder).pieces():
            yield (last := piece)
    if not last.endswith("\n"):
        yield "\n"


def _open_pipe(path: Path) -> io.FileIO | None:
    """A pipe or a device, opened without blocking where no process writes to it yet; None for a file."""
    if path.is_file():
        return None
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def stdin_is_terminal() -> bool:
    """Whether a person types; False also where there is no stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


class Reader:
    """Text from a pipe or a terminal as it arrives, without a thread, which could block after a task is cancelled."""

    def __init__(self, name: str = "stdin", file: io.BufferedReader | io.FileIO | None = None,
                 decoder: Decoder | None = None):
        self.name, self._decoder = name, decoder or Decoder(name=name)
        self._file = file or sys.stdin.buffer
        self._rest, self._ended = "", False

    async def pieces(self) -> AsyncIterator[str]:
        """Decoded text until the end of the file."""
        while not self._ended:
            if text := await self._text():
                yield text

    async def line(self) -> str | None:
        """The next line without its newline, None at the end."""
        while "\n" not in self._rest and not self._ended:
            self._rest += await self._text()
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition("\n")
        return line.rstrip("\r")

    async def _text(self) -> str:
        data = await self._bytes()
        self._ended = not data
        return self._decoder.end() if self._ended else self._decoder.push(data)

    async def _bytes(self) -> bytes:
        try:
            number = self._file.fileno()
        except (OSError, AttributeError):  # a file object of a test, without a file descriptor
            return self._file.read()
        loop = asyncio.get_running_loop()
        if not stat.S_ISREG(os.fstat(number).st_mode):
            ready = asyncio.Event()
            try:
                loop.add_reader(number, ready.set)
            except NotImplementedError:  # this event loop cannot watch files
                return await asyncio.to_thread(os.read, number, PIECE_BYTES)
            except PermissionError:  # such as /dev/null, which is always ready
                return os.read(number, PIECE_BYTES)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(number)
        return os.read(number, PIECE_BYTES)
