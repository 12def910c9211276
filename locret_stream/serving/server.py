"""The process around the app: it listens, says where, and ends without cutting an answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from locret_stream.serving.any_service import AnyService

HEADERS_S = 30.0  # seconds that a request may take to name what it wants


class _Protocol(H11Protocol):
    """uvicorn's, which closes a connection on which a request takes too long to begin. h11 is the strictest parser that
    it has."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @property
    def _between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """A request that has begun to come has a while, however often a byte of it comes."""
        if not self._between and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._between and self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _too_slow(self) -> None:
        self._timer = None
        if self._between:
            self.transport.close()


class Server(uvicorn.Server):
    """A server that drains on SIGTERM and Ctrl-C: it still answers `/health`, takes in nothing more, and ends when the
    answers under way are whole. A second signal ends it at once.

    Args:
        port: 0 for any that is free.
        grace_s: the most seconds that draining takes.
        listening: called with the port, once requests are answered.
    """

    def __init__(self, app: Starlette, service: AnyService, *, host: str, port: int, grace_s: float,
                 listening: Callable[[int], None]):
        super().__init__(uvicorn.Config(
            app, host=host, port=port, http=_Protocol, ws="none", lifespan="on", log_level="warning",
            access_log=False, server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=2))
        self._service, self._grace_s, self._listening = service, grace_s, listening
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._listening(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM, on the main thread."""
        if self._loop is None or self._draining is not None or not self.started:
            super().handle_exit(sig, frame)
            return
        self._loop.call_soon_threadsafe(self._drain, sig)

    def _drain(self, sig: int) -> None:
        if self._draining is None:
            self._captured_signals.append(sig)  # so that the process ends as that signal ends one
            self._draining = asyncio.ensure_future(self._until_idle())

    async def _until_idle(self) -> None:
        await self._service.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._service.until_idle()
        self.should_exit = True


def leave_loaded_alone() -> None:
    """For a process that only serves, once it is ready: what was loaded stays, and is left out of all later garbage
    collections. A full one would take a third of a second otherwise, in which no token is written."""
    gc.collect()
    gc.freeze()
