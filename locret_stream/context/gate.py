"""A gate that one task closes for a while and others wait at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future


class Gate:
    """Open until `close`, or for the length of a block: until `closed_for` ends. One task closes it at a time."""

    def __init__(self) -> None:
        self._opened: Future[None] | None = None  # pending while the gate is closed

    @property
    def is_closed(self) -> bool:
        return self._opened is not None and not self._opened.done()

    def close(self) -> None:
        self._opened = Future()

    def open(self) -> None:
        """Open it and wake all that wait. Nothing happens if it is open."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    @contextlib.contextmanager
    def closed_for(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self.open()

    async def wait(self) -> None:
        """Wait until it is open. It may be closed again by the time the caller runs on: look again."""
        if self._opened is not None:
            await asyncio.shield(asyncio.wrap_future(self._opened))
