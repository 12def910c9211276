"""`/v1/sessions/<session>/ingest`: a stream of any length goes into a memory, read only as fast as it is taken in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from locret_stream.charsets import Charset
from locret_stream.errors import ConfigError
from locret_stream.serving.any_service import AnyService
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError
from locret_stream.serving.limits import Limits
from locret_stream.serving.streams import HEADERS, Pen, json_response, refusal_of, write_events
from locret_stream.serving.uploads import Incoming

TELL_EVERY_S = 0.5  # between two events of progress
_PIECE = 1 << 16  # bytes that are read by the memory at once


async def ingest(service: AnyService, thread: str, request: Request, offset: int) -> Response:
    """Take in the body. With `Accept: text/event-stream` the response is its progress, and begins at once.

    The query may have `label`, `focus`, `errors` and `encoding` (of `Charset`), `upload` (an id, under which a stream
    that broke off goes on) and `offset`.
    """
    query = request.query_params
    options: dict[str, Any] = {"label": query.get("label", "upload"), "focus": query.get("focus"),
                               "upload_id": query.get("upload"), "offset": offset,
                               "charset": {name: query[name] for name in ("encoding", "errors") if name in query}}
    for name, value in options["charset"].items():  # before anything of it is read
        try:
            Charset(**{name: value})
        except ConfigError as error:
            raise ApiError(400, str(error), param=name) from None
    if (size := options["upload_id"]) is not None and not 0 < len(size) <= 100:
        raise ApiError(400, "upload is no id of 1 to 100 characters", param="upload")
    if "text/event-stream" in request.headers.get("accept", ""):
        return _Progress(service, thread, request, options)
    began = time.perf_counter()
    async with service.upload(thread, **options) as upload:
        async for piece in pieces(request, service.limits):
            await take_in(service, upload, piece)
        request.state.read = True
        await upload.finish()
        return json_response(result_of(upload, time.perf_counter() - began))


async def ingest_state(service: AnyService, thread: str, request: Request) -> Response:
    """How many bytes of an upload were read, and whether it is finished. Raises ApiError 404."""
    state = await service.upload_state(thread, request.query_params.get("upload", ""))
    if state is None:
        raise ApiError(404, "there is no such upload (any more); expected it to begin again, at offset 0",
                       code="upload_not_found")
    return json_response({"object": "ingest", **state})


async def pieces(request: Request, limits: Limits) -> AsyncGenerator[bytes]:
    """The body as it comes. The time that the memory takes to read it does not count.

    Raises:
        ApiError 408: its sender died without a word, or sends hardly anything. It ends as one that broke off.
    """
    body = aiter(request.stream())
    left_s, came = limits.upload_idle_s, 0
    while True:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(left_s):
                piece = await anext(body, None)
        except TimeoutError:
            raise ApiError(408, f"{came} bytes came while {limits.upload_idle_s:g} s were waited for them; expected at "
                           f"least {limits.upload_least_bytes}. An upload with an id goes on at the offset that GET "
                           "tells, any other begins again", code="upload_stalled") from None
        if piece is None:
            return
        left_s, came = max(left_s - (time.perf_counter() - began), 0), came + len(piece)
        if came >= limits.upload_least_bytes:
            left_s, came = limits.upload_idle_s, 0
        yield piece


async def take_in(service: AnyService, upload: Incoming, piece: bytes) -> None:
    """Raises ApiError 409: the upload is finished, and this is none of it."""
    if piece and upload.message is not None:
        raise ApiError(409, f"the upload of this id is finished, at {upload.offset} bytes, and what came now was not "
                       "read; expected another id for another stream", kind="conflict", code="upload_done",
                       param="upload")
    for at in range(0, len(piece), _PIECE):
        part = piece[at:at + _PIECE]
        await upload.push(part)
        service.metrics.ingested.inc(len(part))


def result_of(upload: Incoming, seconds: float) -> Json:
    assert upload.message is not None
    return {"object": "ingest", "offset": upload.offset, "characters": upload.characters, "seconds": seconds,
            "message": {"role": "user", "content": upload.message.content}, **upload.receipt}


class _Progress(Response):
    """The body is read while events tell how far it is: both at once, so that this is no handler's return value."""

    def __init__(self, service: AnyService, thread: str, request: Request, options: dict[str, Any]):
        super().__init__(headers=HEADERS | {"connection": "close"})  # of a body that is not read to its end
        self._service, self._thread, self._request, self._options = service, thread, request, options

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await write_events(send, self.raw_headers, self._write)

    async def _write(self, pen: Pen) -> None:
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    await pen.write(_line(event))
        except ClientDisconnect:
            return
        except Exception as error:
            await pen.write(_line(refusal_of(self._request, error).body["error"] | {"type": "error"}))
        await pen.write(b"", more=False)

    async def _events(self) -> AsyncGenerator[Json]:
        began = told = time.perf_counter()
        async with self._service.upload(self._thread, **self._options) as upload:
            yield {"type": "ingest.started", "offset": upload.offset}
            async for piece in pieces(self._request, self._service.limits):
                await take_in(self._service, upload, piece)
                if time.perf_counter() - told >= TELL_EVERY_S:
                    told = time.perf_counter()
                    yield {"type": "ingest.progress", "offset": upload.offset, "characters": upload.characters,
                           "seconds": told - began}
            await upload.finish()
            yield {"type": "ingest.completed", **result_of(upload, time.perf_counter() - began)}


def _line(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
