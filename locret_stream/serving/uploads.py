"""Streams that clients send in pieces. One that breaks off may go on for a while, if its sender gave it an id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from locret_stream.charsets import Charset, Decoder
from locret_stream.conversation.messages import Message, check_label
from locret_stream.conversation.request import Request, current_task, within
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.absorbing import Absorption
    from locret_stream.conversation.threads import Threads

MOST_DONE = 256  # uploads whose end is known, so that a sender that missed it may ask again


class Incoming(Protocol):
    """A stream that is taken in, here (`Upload`) or on another machine."""

    @property
    def offset(self) -> int: ...
    @property
    def characters(self) -> int: ...
    @property
    def message(self) -> Message | None: ...
    @property
    def receipt(self) -> Json: ...
    async def push(self, piece: bytes) -> None: ...
    async def finish(self) -> Message: ...


class Upload:
    """One stream: `push` each piece, then `finish`.

    Args:
        charset: of all its pieces.

    Attributes:
        offset: bytes that the memory has read, the pieces of a character that is not whole yet included.
        message: what stands for the stream in a history; None until it is durable.
    """

    def __init__(self, absorption: Absorption, charset: Charset):
        self._absorption, self._decoder = absorption, Decoder(charset, option="?{}={}")
        self.offset, self.message = 0, None  # type: tuple[int, Message | None]
        self.in_use = self._torn = False  # torn: a piece was cut off, and the memory may have read a part of it
        self._begun = False
        self.ended_by: ApiError | None = None  # why its request was ended: its session was forgotten, or all ends
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def characters(self) -> int:
        return self._absorption.characters

    @property
    def charset(self) -> Charset:
        return self._decoder.charset

    @property
    def receipt(self) -> Json:
        """What is to be said of its bytes (`Decoder.receipt`)."""
        return self._decoder.receipt

    async def begin(self, threads: Threads) -> None:
        """Wait for its session. Raises as a turn."""
        await self._absorption.begin(threads)
        self._begun = True

    async def push(self, piece: bytes) -> None:
        """Take in a piece; it returns when the memory has read it. Raises InvalidText; otherwise as a feed."""
        self._torn = True
        if text := self._decoder.push(piece):
            await self._absorption.push(text)
        self.offset += len(piece)
        self._torn = False

    async def finish(self) -> Message:
        """The stand-in of the stream, which is stored now.

        Raises:
            InvalidText: it ends inside a character. EmptySource, StaleOwner. ApiError 503: it cannot be stored.
        """
        if self.message is None:
            if text := self._decoder.end():  # an error leaves it as it was: its sender may have the rest
                self._torn = True
                await self._absorption.push(text)
            message = await self._absorption.finish()
            if not self._absorption.saved:
                raise ApiError(503, "the stream could not be stored, so it is undone; the server's log tells why",
                               kind="server_error", code="store_unavailable", retry_s=5)
            self._absorption.take()
            self.message = message
        return self.message

    @property
    def may_go_on(self) -> bool:
        """Whether its sender may come back."""
        return self._begun and not self._torn and not self.lost and self.message is None

    @property
    def lost(self) -> bool:
        """Whether it was undone."""
        return self._absorption.ended and self.message is None

    async def release(self) -> None:
        """Free its session: what is not finished is undone. Idempotent."""
        self.hold()
        await self._absorption.abort()

    def hold(self) -> None:
        """Its sender is back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wait_for_sender(self, seconds: float) -> None:
        """Undo it after a while, unless its sender comes back."""
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            self.task = loop.create_task(self.release())

        self._timer = loop.call_later(seconds, give_up)


class Uploads:
    """The streams of one server that are under way, or ended lately.

    Args:
        resume_s: as `Limits.upload_resume_s`.
    """

    def __init__(self, resume_s: float) -> None:
        self.resume_s = resume_s
        self._open: dict[tuple[str, str], Upload] = {}  # by thread and id
        self._running: dict[Upload, tuple[asyncio.Task[None] | None, str]] = {}

    def state(self, thread: str, upload_id: str) -> Json | None:
        """Bytes that were read of an upload, and whether it is finished; None for an unknown one."""
        upload = self._open.get((thread, upload_id))
        return None if upload is None or upload.lost else {
            "offset": upload.offset, "done": upload.message is not None, **upload.receipt}

    @contextlib.asynccontextmanager
    async def open(self, threads: Threads, request: Request, label: str, upload_id: str | None, offset: int,
                   timeout_s: float, charset: Mapping[str, str] | None = None) -> AsyncIterator[Upload]:
        """An upload for the length of a block. Left by an error, one with an id waits for its sender; any other is
        undone.

        Args:
            offset: bytes that the sender knows to be read: 0 begins. timeout_s: how long it waits for its session: who
                sends is not seen to leave meanwhile. charset: fields of `Charset` that the sender gives; one that goes
                on has those with which it began.

        Raises:
            ApiError 409: the upload is in use, unknown, has read another number of bytes, or began with another
                charset; or its session was forgotten meanwhile; 503: the server shuts down. InputError: the label.
                ConfigError: the charset. TimeoutError.
        """
        from locret_stream.conversation.absorbing import Absorption

        assert request.thread is not None
        key = (request.thread, upload_id or "")
        known = self._open.get(key) if upload_id is not None else None
        if known is not None and known.lost and not known.in_use:
            known = None
        asked = Charset(**charset or {})
        upload = known or Upload(Absorption(request, check_label(label)), asked)
        for name in charset or {}:
            if getattr(asked, name) != (began := getattr(upload.charset, name)):
                raise ApiError(409, f"found {name}={getattr(asked, name)} of an upload that began with {began}; "
                               f"expected the same with each of its pieces, or none", kind="conflict",
                               code="wrong_charset", param=name)
        if known is None and offset:
            raise ApiError(409, f"found offset {offset} of an upload that is not known here (any more); expected 0: "
                           "nothing of it is kept", kind="conflict", code="upload_lost")
        if known is not None and (known.in_use or known.offset != offset):
            raise ApiError(409, f"found offset {offset}; expected {known.offset}" if not known.in_use else
                           "this upload is being sent already", kind="conflict",
                           code="upload_busy" if known.in_use else "wrong_offset", param="offset",
                           retry_s=1 if known.in_use else None)
        upload.in_use = True
        upload.hold()
        self._running[upload] = asyncio.current_task(), request.thread
        if upload_id is not None:  # before it begins, so that it does not begin twice
            self._remember(key, upload)
        try:
            if known is None:
                async with within(timeout_s, f"the session was not free within {timeout_s} s, so nothing was read; "
                                  "expected another try once it is free"):
                    await upload.begin(threads)
            yield upload
        except BaseException as error:
            if upload_id is not None and upload.may_go_on and upload.ended_by is None:
                upload.wait_for_sender(self.resume_s)
            else:
                await upload.release()
            if upload.ended_by is not None and isinstance(error, asyncio.CancelledError):
                current_task().uncancel()
                raise upload.ended_by from None
            raise
        else:
            await upload.release()
        finally:
            upload.in_use = False
            del self._running[upload]

    def _remember(self, key: tuple[str, str], upload: Upload) -> None:
        self._open[key] = upload
        for old in [old for old, other in self._open.items() if other._absorption.ended and not other.in_use
                    ][:-MOST_DONE]:
            del self._open[old]

    async def abort(self, chosen: Callable[[str], bool] | None = None) -> None:
        """Undo the uploads to threads that are chosen by their names, or all, and end the requests that send them."""
        for upload, (task, name) in list(self._running.items()):
            if task is not None and (chosen is None or chosen(name)) and upload.ended_by is None:
                upload.ended_by = ApiError(
                    503, "the server shuts down; the stream is undone. Expected it to begin again, later",
                    kind="server_error", code="shutting_down", retry_s=2) if chosen is None else ApiError(
                    409, "the session was forgotten meanwhile, and the stream with it", kind="conflict",
                    code="session_forgotten")
                task.cancel()
        for (name, _), upload in list(self._open.items()):
            if chosen is None or chosen(name):
                await upload.release()
                if self._open.get((name, _)) is upload:
                    del self._open[name, _]
