"""Responses that end with their client: server-sent events, and plain ones that a client may leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError, api_error

T = TypeVar("T")
SEND_S = 60.0  # seconds in which a reader must take what was written; one that does not counts as having left
PING_S = 10.0  # between two signs of life while nothing comes: many proxies close what is silent for longer
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(request: Request, error: BaseException, *, unread: bool = False) -> Response:
    """The refusal, or failure, as OpenAI's API writes it; counted as by `refusal_of`.

    Args:
        unread: the body was not read to its end, so that nothing can follow on the connection.
    """
    refused = refusal_of(request, error)
    headers = {} if refused.retry_s is None else {"retry-after": str(refused.retry_s)}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    if unread:
        headers["connection"] = "close"
    return json_response(refused.body, refused.status, headers)


def refusal_of(request: Request, error: BaseException) -> ApiError:
    """What a request is told of an error, as a status or in mid-stream. The metrics count it, and what nobody expected
    goes to the log."""
    refused, metrics = api_error(error), request.app.state.service.metrics
    metrics.refused.labels(str(refused.status)).inc()
    if refused.code == "internal_error":
        _log.error("a request failed", exc_info=error)
    return refused


async def gone(receive: Receive) -> None:
    """Returns once the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled once the client has left. Raises ClientDisconnect then."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class Pen:
    """Writes to a client. One timer watches it: a timer for each event would cost as much as the event."""

    def __init__(self, send: Send):
        self._send, self._now = send, asyncio.get_running_loop().time
        self._since, self._writing = self._now(), False  # since when it writes, or does not

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._since, self._writing = self._now(), True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._since, self._writing = self._now(), False

    async def watch(self) -> None:
        """Write a sign of life when nothing came for `PING_S`; returns once the client took nothing for `SEND_S`."""
        with contextlib.suppress(TimeoutError):
            while True:
                left = self._since + (SEND_S if self._writing else PING_S) - self._now()
                if left > 0:
                    await asyncio.sleep(min(left, PING_S, SEND_S))
                elif self._writing:
                    break
                else:
                    async with asyncio.timeout(SEND_S):
                        await self.write(b": waiting\n\n")
        _log.warning("a reader took nothing for %.0f s: what it asked for is undone", SEND_S)


async def write_events(send: Send, headers: list[tuple[bytes, bytes]],
                       writing: Callable[[Pen], Coroutine[Any, Any, None]], *until: Coroutine[Any, Any, None]) -> None:
    """A response whose body `writing` writes. It is cancelled once one of `until` returns, or the client takes nothing.
    """
    await send({"type": "http.response.start", "status": 200, "headers": [
        pair for pair in headers if pair[0] != b"content-length"]})
    pen = Pen(send)
    body, *others = (asyncio.ensure_future(each) for each in (writing(pen), pen.watch(), *until))
    try:
        await asyncio.wait({body, *others}, return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            body.result()
    finally:
        for task in (body, *others):
            task.cancel()
        await asyncio.wait({body, *others})


class EventStream(Response):
    """Events of a stream, as they come.

    Args:
        events: closed whatever happens, as soon as the client leaves.
        first: the first event, which may still be coming: meanwhile a comment says that there is life.
        named: each event has its `type` as its name (Responses), and there is no end mark.
        failed: the event of an error in mid-stream.
    """

    def __init__(self, events: AsyncGenerator[Json], first: asyncio.Task[Json], *, named: bool,
                 failed: Callable[[Exception], Json]):
        super().__init__(headers=HEADERS)
        self._events, self._first, self._named, self._failed = events, first, named, failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await write_events(send, self.raw_headers, self._write, gone(receive))
        finally:
            await close(self._events, self._first)

    async def _write(self, pen: Pen) -> None:
        try:
            await pen.write(self._line(await self._first))
            async for event in self._events:
                await pen.write(self._line(event))
            await pen.write(b"" if self._named else b"data: [DONE]\n\n", more=False)
        except Exception as error:
            await pen.write(self._line(self._failed(error)), more=False)

    def _line(self, event: Json) -> bytes:
        name = b"event: " + event["type"].encode() + b"\n" if self._named else b""
        return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


async def close(events: AsyncGenerator[Json], coming: asyncio.Task[Json]) -> None:
    """Close a generator whose next event may be under way."""
    if not coming.done():
        coming.cancel()
        await asyncio.wait({coming})
    with contextlib.suppress(Exception, asyncio.CancelledError):
        if coming.done() and not coming.cancelled():
            coming.exception()  # looked at, so that nobody warns of it
    await events.aclose()


async def stream(request: Request, events: AsyncGenerator[Json], *, named: bool,
                 failed: Callable[[ApiError], Json]) -> Response:
    """The stream of events; what fails before the first one raises, if that is within `PING_S`."""
    first: asyncio.Task[Json] = asyncio.ensure_future(anext(events))
    left = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({first, left}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not first.done():
            raise ClientDisconnect
        if first.done():
            first.result()  # raises
    except BaseException:
        await close(events, first)
        raise
    finally:
        left.cancel()
    return EventStream(events, first, named=named, failed=lambda error: failed(refusal_of(request, error)))
