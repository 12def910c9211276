"""The memories of one runtime, as the routes ask for them: nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.request import Delivery, Request
from locret_stream.errors import ConfigError, ContextClosed
from locret_stream.serving.any_service import DRAINING
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError
from locret_stream.serving.expiry import DAY_S, keep_expiring
from locret_stream.serving.limits import Limits
from locret_stream.serving.sessions import Sessions
from locret_stream.serving.uploads import Incoming, Uploads

if TYPE_CHECKING:  # these load torch
    from locret_stream.conversation.threads import Threads
    from locret_stream.runtime import Runtime

BUSY_RETRY_S = 1


class Service(Sessions):
    """The sessions of one runtime, on one event loop; `start` and `aclose` it. Sessions are named by their threads.

    Args:
        runtime: started or not; it needs a store, which is given a `max_bytes` unless it has one.
        model: the name that requests may give, and that answers bear.
        tool_prompt: as of `conversation.render.ChatTemplate`.
        response_template: as of transformers' ResponseParser; None: the tokenizer's own, or what the template shows.
    """

    def __init__(self, runtime: Runtime, *, model: str, limits: Limits | None = None, tool_prompt: Any = "auto",
                 response_template: Json | None = None):
        if runtime.store is None:
            raise ConfigError("a server keeps its sessions in a store, and the runtime has none; expected "
                              "Runtime(..., store=<a folder or URL>)")
        super().__init__(model=model, limits=limits)
        self.runtime, self.uploads = runtime, Uploads(self.limits.upload_resume_s)
        self._response_template, self._tool_prompt = response_template, tool_prompt
        self._threads: Threads | None = None
        self._expiring: asyncio.Task[None] | None = None
        self.expires = True  # of several servers over one store one is enough to look for what has expired

    # -- its life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, unless it is. Raises as `Runtime.start`."""
        if not self.runtime.running:
            await self.runtime.__aenter__()
        try:
            from locret_stream.conversation.render import ChatTemplate
            from locret_stream.conversation.threads import Threads, bound_threads
            bound_threads(self.runtime)
            template = await asyncio.to_thread(ChatTemplate, self.runtime.tokenizer, self.runtime.codec,
                                               self.runtime.frames, tool_prompt=self._tool_prompt)
            self._threads = Threads(self.runtime, template, self._response_template, salt=[None, template.key])
            if self.expires:
                self._expiring = asyncio.create_task(keep_expiring(self._threads, self.limits.unnamed_days * DAY_S))
        except BaseException:
            await self.runtime.aclose()
            raise

    @property
    def ready(self) -> bool:
        return self._threads is not None and not self.draining

    @property
    def threads(self) -> Threads:
        if self._threads is None:
            raise ApiError(503, "the model is not loaded yet", kind="server_error", code="starting", retry_s=2)
        return self._threads

    async def drain(self) -> None:
        """Take in nothing more: uploads are undone, and turns run to their end."""
        await super().drain()
        await self.uploads.abort()

    async def aclose(self) -> None:
        """Save what rests at a boundary, undo the rest, and free everything. Idempotent."""
        await self.drain()
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.wait({self._expiring})
        threads, self._threads = self._threads, None
        if threads is not None:
            try:
                await threads.close()
            finally:
                await self.runtime.aclose()

    def _expect_place(self) -> None:
        most = self.runtime.max_live + self.limits.max_waiting
        if self._running >= most:
            raise ApiError(429, f"{self._running} requests run or wait; expected fewer than {most}: try again after "
                           "Retry-After", kind="rate_limit_error", code="queue_full", retry_s=BUSY_RETRY_S)

    @contextmanager
    def admitted(self, kind: str) -> Iterator[None]:
        """A place among those that run or wait. Raises ApiError 429: they are too many; 503: it shuts down."""
        with super().admitted(kind), self.metrics.running.track_inprogress():
            self.metrics.requests.labels(kind).inc()
            yield

    # -- answers ----------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> AsyncGenerator[Part | End]:
        """The parts of an answer and its end. It counts as taken once the caller asks for what follows its end; closed
        before, the turn is undone.

        Raises:
            ApiError 409, 503: an answer that is named by its mark could not be stored. Otherwise as a turn.
        """
        from locret_stream.conversation.turns import turn

        delivery, parts = Delivery(), asyncio.Queue[Part | End | None]()
        with self.admitted("turn"):
            began, first, left = time.perf_counter(), True, False
            task = asyncio.create_task(turn(self.threads, replace(request, delivery=delivery), parts.put_nowait))
            task.add_done_callback(lambda _: parts.put_nowait(None))
            try:
                while (part := await parts.get()) is not None:
                    if first:
                        first = False
                        self.metrics.first_s.observe(time.perf_counter() - began)
                    if isinstance(part, End):
                        self._expect_stored(request, part)
                    yield part
                    if isinstance(part, End):
                        delivery.take()
                        self.metrics.ended(part)
                await task
            except GeneratorExit:
                left = True
                raise
            except asyncio.CancelledError:
                if task.cancelled():  # by the runtime's end, and not by the caller
                    raise ContextClosed(DRAINING) from None
                left = True
                raise
            finally:
                delivery.leave()
                if left and not delivery.taken:
                    self.metrics.cancelled.inc()
                if not task.done():
                    if not delivery.taken:
                        task.cancel()
                    await asyncio.wait([task])

    @staticmethod
    def _expect_stored(request: Request, end: End) -> None:
        if not request.mark or request.thread is None or end.receipt["saved"]:
            return
        if end.receipt.get("stale"):
            raise ApiError(409, "another server saved this session meanwhile, so the answer could not be kept; the "
                           "session is as the other one left it. Expected the request again", kind="conflict",
                           code="stale_owner", retry_s=0)
        raise ApiError(503, "the answer could not be stored, so it is undone; the server's log tells why",
                       kind="server_error", code="store_unavailable", retry_s=5)

    # -- streams ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def upload(self, thread: str, *, label: str, focus: str | None, upload_id: str | None, offset: int,
                     charset: Mapping[str, str] | None = None) -> AsyncIterator[Incoming]:
        """A stream that is taken in piece by piece. Raises as `Uploads.open`."""
        with self.admitted("ingest"):
            request = Request([], thread=thread, focus=focus)
            async with self.uploads.open(self.threads, request, label, upload_id, offset, self.limits.timeout_s,
                                         charset) as upload:
                yield upload

    async def upload_state(self, thread: str, upload_id: str) -> Json | None:
        """As `Uploads.state`."""
        return self.uploads.state(thread, upload_id)

    # -- figures ----------------------------------------------------------------------------------------------

    async def metrics_text(self) -> bytes:
        """What was counted, as Prometheus reads it."""
        if self.ready:
            self.metrics.live.set(self.runtime.max_live - self.runtime.slots.live.free)
        return self.metrics.text()

    @property
    def load(self) -> int:
        """Requests that run or wait for a slot, and streams that are taken in."""
        return super().load + (0 if self._threads is None else len(self._threads.absorbing))
