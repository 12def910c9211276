"""A service whose memories are elsewhere: what a request means is read here, and done by the replica that holds its
session. A replica that dies is survived wherever that can be done without doing anything twice. Nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from locret_serve.memory import Place, Read
from locret_serve.replicas import ReplicaDied, Replicas, died
from locret_serve.sent import Sent
from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.request import Request
from locret_stream.errors import SnapshotNotFound
from locret_stream.serving import names, responses
from locret_stream.serving.any_service import AnyService
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError
from locret_stream.serving.limits import Limits
from locret_stream.serving.metrics import merged
from locret_stream.serving.uploads import Incoming

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.items import Item

GIVE_UP_S = 60.0  # after the first death: how long another replica is looked for
OWN_TRIES = 4  # how often an answer is begun again because a replica that was given up saved it, too
SIGNS = 3  # of life of a stream whose sender is slow, in the time that a replica waits for the sender
LOOK_AGAIN_S = 1.0
MOVED = ("shutting_down", "starting")  # refusals of a replica that another one answers in its place


class RemoteService(AnyService):
    """The sessions of all replicas, for `serving.app`.

    The marks of answers and the names of sessions that nobody named are made here, so that they are the same whichever
    replica does the work. How many requests may wait is each replica's to say.

    Args:
        model: the name that requests may give. limits: those of the replicas.
        name: of this front, in the figures.
    """

    def __init__(self, replicas: Replicas, *, model: str, limits: Limits | None = None, name: str = "front"):
        super().__init__(model=model, limits=limits)
        self.replicas, self.name, self._up = replicas, name, False
        self._starting: asyncio.Task[None] | None = None

    # -- its life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns at once; `ready` once a replica answers."""
        self._starting = asyncio.create_task(self._until_up())

    async def _until_up(self) -> None:
        while not self._up:
            with contextlib.suppress(ReplicaDied):
                self._up = await self.replicas.call(None, "ready") is True
            if not self._up:
                await asyncio.sleep(LOOK_AGAIN_S)

    @property
    def ready(self) -> bool:
        return self._up and not self.draining

    async def aclose(self) -> None:
        """The memories stay where they are."""
        await self.drain()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})

    # -- answers ----------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> AsyncGenerator[Part | End]:
        """The parts of an answer and its end. Where the replica dies, another one begins the same turn anew; what was
        sent already is compared and left out: the seed of a sampled answer was chosen before (`_sampling`).

        Raises:
            ApiError 503: no replica could end it, or another one answers differently. Otherwise what a replica refuses.
        """
        sent, patience = Sent(), _Patience(request.timeout_s)
        ended = False  # what follows the end tells the replica that it was taken
        with self.admitted("turn"):
            while True:
                asked = replace(request, timeout_s=patience.left_s())
                try:
                    bundles = self.replicas.stream(request.thread, "answer", asked, patience.tries > 0)
                    async with aclosing(bundles):
                        async for bundle in bundles:
                            if isinstance(bundle, ApiError):
                                raise _Moved if patience.own(bundle) else _as_given(bundle)
                            for part in bundle:
                                if (new := sent.new_of(part)) is not None:
                                    yield new
                                ended = ended or isinstance(part, End)
                    if ended:
                        return
                    raise ReplicaDied("the stream of an answer ended before the answer")
                except (ReplicaDied, _Moved):
                    if ended:  # the answer is whole, and durable
                        return
                    await patience.wait()
                    sent.begin_again()

    async def tell(self, thread: str, items: list[Json]) -> list[Item]:
        request = Request(responses.read_messages(items, field="items"), thread=thread, mark=names.new_mark(),
                          timeout_s=self.limits.timeout_s)
        with self.admitted("tell"):
            return await self._do(thread, "tell", request, again=True)

    # -- what a replica does as a whole -------------------------------------------------------------------------

    async def _do(self, key: str | None, verb: str, *arguments: Any, again: bool | None = None) -> Any:
        """What a replica's method returns. If the replica dies, another one is asked.

        Args:
            again: the method's last argument is whether it is asked again. None: asking twice does no harm, or what it
                did is found.

        Raises:
            ApiError.
        """
        patience = _Patience(None)
        while True:
            try:
                tried = () if again is None else (patience.tries > 0,)
                found = await self.replicas.call(key, verb, *arguments, *tried)
                if isinstance(found, ApiError):
                    raise _Moved if found.code in MOVED else found
                return found
            except (ReplicaDied, _Moved):
                await patience.wait()

    async def create(self, thread: str) -> bool:
        return await self._do(thread, "call", "create", thread)

    async def items(self, thread: str, session: str, limit: int, after: str, newest_first: bool) -> Json:
        return await self._do(thread, "call", "items", thread, session, limit, after, newest_first)

    async def item(self, thread: str, session: str, item_id: str) -> Json:
        return await self._do(thread, "call", "item", thread, session, item_id)

    async def drop_item(self, thread: str, item_id: str) -> None:
        await self._do(thread, "call", "drop_item", thread, item_id)

    async def sessions(self, tenant: str) -> list[Json]:
        return await self._do(None, "call", "sessions", tenant)

    async def session(self, thread: str, session: str) -> Json:
        return await self._do(thread, "call", "session", thread, session)

    async def memory(self, thread: str, session: str) -> Json:
        return await self._do(thread, "call", "memory", thread, session)

    async def map(self, thread: str, start: int, end: int | None, columns: int) -> Json:
        return await self._do(thread, "call", "map", thread, start, end, columns)

    async def text(self, thread: str, session: str, start: int, end: int | None, column: int | None = None) -> Json:
        return await self._do(thread, "call", "text", thread, session, start, end, column)

    async def search(self, thread: str, words: str, limit: int) -> Json:
        return await self._do(thread, "call", "search", thread, words, limit)

    async def ask(self, thread: str, body: Mapping[str, Any]) -> Json:
        return await self._do(thread, "call", "ask", thread, dict(body))

    async def focus(self, thread: str, session: str, body: Mapping[str, Any]) -> Json:
        return await self._do(thread, "call", "focus", thread, session, dict(body))

    async def rewind(self, thread: str, session: str, to: Any) -> Json:
        return await self._do(thread, "call", "rewind", thread, session, to)

    async def snapshot(self, thread: str, session: str) -> Json:
        return await self._do(thread, "call", "snapshot", thread, session)

    async def fork(self, thread: str, new: str) -> None:
        """Not asked for twice: a fork that was made stands in the way of the next one.

        Raises:
            ApiError 503: the replica died.
        """
        try:
            found = await self.replicas.call(thread, "call", "fork", thread, new)
        except ReplicaDied:
            raise died("the replica died that was asked for a fork, which may be there or not; expected a look at the "
                       "new session") from None
        if isinstance(found, ApiError):
            raise found

    async def forget(self, thread: str, session: str) -> None:
        patience = _Patience(None)
        while True:
            try:
                found = await self.replicas.call(thread, "call", "forget", thread, session)
            except ReplicaDied:
                await patience.wait()
                continue
            if isinstance(found, ApiError) and not (patience.tries and found.code == "session_not_found"):
                raise found
            return

    # -- streams ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def upload(self, thread: str, *, label: str, focus: str | None, upload_id: str | None, offset: int,
                     charset: Mapping[str, str] | None = None) -> AsyncIterator[Incoming]:
        """A stream that is handed on piece by piece. It lies in the replica's memory alone: if that dies, the stream is
        to begin again (409 `upload_lost`), and nothing of it stays."""
        with self.admitted("ingest"):
            place = Place(thread, label, focus, upload_id or f"front/{secrets.token_hex(16)}", charset)
            stream = _Pieces(self, place, offset)
            await stream.push(b"")
            alive = asyncio.create_task(stream.keep_alive())
            try:
                yield stream
            finally:
                alive.cancel()
                await asyncio.wait({alive})
                if upload_id is None and stream.message is None:
                    await asyncio.shield(stream.leave())

    async def upload_state(self, thread: str, upload_id: str) -> Json | None:
        return await self._do(thread, "call", "upload_state", thread, upload_id)

    # -- figures ----------------------------------------------------------------------------------------------

    async def metrics_text(self) -> bytes:
        """The counters of all replicas, and those of this front, each with its name as the label `replica`."""
        texts = dict(await self.replicas.everywhere("metrics"))
        return merged(texts | {self.name: self.metrics.text()})


class _Moved(Exception):
    """The replica refused because it ends or begins; it did nothing."""


def _as_given(refused: ApiError) -> Exception:
    """The error of a refused answer, as the library's own where `AnyService` looks for that."""
    if refused.code in MOVED:
        return _Moved()
    return SnapshotNotFound(str(refused)) if refused.code == "not_found" else refused


class _Patience:
    """How long to look for another replica."""

    def __init__(self, timeout_s: float | None):
        self.tries, self._timeout_s, self._began = 0, timeout_s, time.monotonic()
        self._first: float | None = None

    def left_s(self) -> float | None:
        """Seconds that are left of the request's own time."""
        return None if self._timeout_s is None else max(self._timeout_s - (time.monotonic() - self._began), 0.001)

    def own(self, refused: ApiError) -> bool:
        """Whether another owner that saved the session may be the replica that was given up: cut off, it went on."""
        return refused.code == "stale_owner" and 0 < self.tries < OWN_TRIES

    async def wait(self) -> None:
        """Raises ApiError 503: it was long enough."""
        now = time.monotonic()
        self._first = self._first or now
        if now - self._first > GIVE_UP_S:
            raise died(f"the replica died that had this request, and no other one took it on within {GIVE_UP_S:.0f} s; "
                       "expected the request again")
        await asyncio.sleep(min(0.05 * 2 ** self.tries, 1.0))
        self.tries += 1


class _Pieces:
    """A stream that a replica reads, as `Incoming`."""

    def __init__(self, service: RemoteService, place: Place, offset: int):
        self._service, self._place = service, place
        self._read = Read(offset, 0, None, {})
        self._lock = asyncio.Lock()

    @property
    def offset(self) -> int:
        return self._read.offset

    @property
    def characters(self) -> int:
        return self._read.characters

    @property
    def message(self) -> Message | None:
        return self._read.message

    @property
    def receipt(self) -> Json:
        return self._read.receipt

    async def push(self, piece: bytes) -> None:
        await self._step(piece, False)

    async def finish(self) -> Message:
        if self._read.message is None:
            await self._step(b"", True)
        return cast(Message, self._read.message)

    async def _step(self, piece: bytes, last: bool) -> None:
        async with self._lock:
            self._read = Read(*await self._service._do(
                self._place.thread, "piece", self._place, self._read.offset, piece, last))

    async def keep_alive(self) -> None:
        """A replica gives up a stream of which nothing comes."""
        with contextlib.suppress(ApiError):  # told by the next piece
            while True:
                await asyncio.sleep(self._service.limits.upload_resume_s / SIGNS)
                await self.push(b"")

    async def leave(self) -> None:
        async with self._lock:
            with contextlib.suppress(ReplicaDied):  # then nothing of it is left
                await self._service.replicas.call(self._place.thread, "leave", self._place, self._read.offset)
