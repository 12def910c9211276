"""One replica: a `Service`, whose sessions are those that are sent here. Nothing here knows HTTP or Ray.

Every method gives what it was asked for, or the refusal as a value (`ApiError`). Nothing but the store is shared with
other replicas: that a session is saved by one of them alone is the store's doing (`StaleOwner`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.request import Request
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError, api_error
from locret_stream.serving.service import Service
from locret_stream.serving.uploads import Upload

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.items import Item

_log = logging.getLogger(__name__)
BUNDLE_S = 0.03  # between two bundles of one answer: each message between processes costs as much as a token
VERBS = frozenset({"create", "sessions", "session", "memory", "map", "text", "search", "ask", "fork", "focus",
                   "rewind", "snapshot", "forget", "upload_state", "items", "item", "drop_item"})


class Place(NamedTuple):
    """Which stream a piece belongs to.

    Attributes:
        thread: whose memory reads it. label, focus, charset: as of `Service.upload`.
        upload_id: under which its pieces find each other.
    """

    thread: str
    label: str
    focus: str | None
    upload_id: str
    charset: Mapping[str, str] | None = None


class Read(NamedTuple):
    """How far a stream was read: bytes, characters, the message that stands for it once it is durable, and what is to
    be said of its bytes."""

    offset: int
    characters: int
    message: Message | None
    receipt: Json


class _More(Exception):
    """A piece was read and others follow."""


class Memory:
    """The service of one replica, as others call it.

    Args:
        service: started, and closed, by whoever made it.
        name: of the replica; receipts of answers bear it as "replica".
        bundle_s: how long parts of an answer wait for others that travel with them; 0: each travels alone.
    """

    def __init__(self, service: Service, name: str, *, bundle_s: float = BUNDLE_S):
        self.service, self.name, self.bundle_s = service, name, bundle_s

    async def answer(self, request: Request, again: bool) -> AsyncGenerator[list[Part | End] | ApiError]:
        """The parts of an answer and its end, in bundles, or the refusal. The answer counts as taken when its end was
        given out.

        Args:
            again: another replica began it before, and may have made it durable; its mark tells.
        """
        try:
            if again and request.append:  # what is not appended moves nothing, and is written again
                await self._take_back(request)
            async with (aclosing(self.service.answer(request)) as parts,
                        aclosing(bundles(parts, self.bundle_s)) as bundled):
                async for bundle in bundled:
                    if isinstance(end := bundle[-1], End):
                        bundle[-1] = replace(end, receipt=end.receipt | {"replica": self.name})
                    yield bundle
        except Exception as error:
            yield _refusal(error)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """A method of the service, by its name."""
        assert verb in VERBS, verb
        try:
            return await getattr(self.service, verb)(*arguments)
        except Exception as error:
            return _refusal(error)

    async def tell(self, request: Request, again: bool) -> list[Item] | ApiError:
        """As `Service.tell`, with the request's own mark."""
        from locret_stream.conversation.telling import tell
        try:
            if again:
                await self._take_back(request)  # a message is told once
            with self.service.admitted("tell"):
                return await tell(self.service.threads, request)
        except Exception as error:
            return _refusal(error)

    async def _take_back(self, request: Request) -> None:
        """Undo what a replica that died had made durable of this request."""
        from locret_stream.conversation.standing import take_back
        if request.mark and request.thread is not None:
            await take_back(self.service.threads, request.thread, request.mark)

    # -- streams ----------------------------------------------------------------------------------------------

    async def piece(self, place: Place, offset: int, piece: bytes, last: bool) -> Read | ApiError:
        """Read a piece of a stream. Between two pieces the stream waits for its sender (`Limits.upload_resume_s`).

        Args:
            offset: bytes that were read before; 0 begins. last: make it durable.
        """
        read: Read | None = None
        try:
            with self.service.admitted("ingest") if not (offset or piece or last) else nullcontext():
                async with self._open(place, offset) as upload:
                    if piece and upload.message is None:
                        await upload.push(piece)
                    if last:
                        await upload.finish()
                    read = Read(upload.offset, upload.characters, upload.message, upload.receipt)
                    if upload.message is None:
                        raise _More
        except _More:
            assert read is not None
        except Exception as error:
            return _refusal(error)
        assert read is not None
        return read

    async def leave(self, place: Place, offset: int) -> ApiError | None:
        """Undo a stream that its sender left."""
        left = ApiError(499, "its sender left")
        try:
            async with self._open(place, offset) as upload:
                upload.ended_by = left
                raise left
        except ApiError as error:
            return None if error is left or error.code == "upload_lost" else error
        except Exception as error:
            return _refusal(error)

    def _open(self, place: Place, offset: int) -> AbstractAsyncContextManager[Upload]:
        return self.service.uploads.open(self.service.threads, Request([], thread=place.thread, focus=place.focus),
                                         place.label, place.upload_id, offset, self.service.limits.timeout_s,
                                         place.charset)

    # -- figures ----------------------------------------------------------------------------------------------

    async def metrics(self) -> tuple[str, bytes]:
        return self.name, await self.service.metrics_text()

    async def load(self) -> dict[str, float]:
        """Requests that run or wait, and slots."""
        return {"load": float(self.service.load), "slots": float(self.service.runtime.max_live)}

    async def ready(self) -> bool:
        return self.service.ready


async def bundles(parts: AsyncGenerator[Part | End], bundle_s: float) -> AsyncGenerator[list[Part | End]]:
    """The parts in lists: the first one at once, those that follow at most so late, the end always as the last of one.
    What follows the end is asked for when the list with it was taken. Closing it cancels the parts."""
    bundle, due = list[Part | End](), 0.0
    asked: asyncio.Future[Part | End | None] | None = None
    try:
        while True:
            waiting = asked = asked or asyncio.ensure_future(anext(parts, None))
            await asyncio.wait({waiting}, timeout=max(due - time.monotonic(), 0) if bundle else None)
            over = waiting.done() and (waiting.exception() is not None or waiting.result() is None)
            if waiting.done() and not over:
                bundle.append(cast(Part | End, waiting.result()))
                asked = None
            if bundle and (over or isinstance(bundle[-1], End) or time.monotonic() >= due):
                yield bundle
                bundle, due = [], time.monotonic() + bundle_s
            if over:
                waiting.result()  # raises what ended them
                return
    finally:
        if asked is not None:
            asked.cancel()
            await asyncio.wait({asked})


def _refusal(error: Exception) -> ApiError:
    refused = api_error(error)
    if refused.code == "internal_error":
        _log.error("a request failed", exc_info=error)
    return refused
