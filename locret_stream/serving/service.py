"""What requests mean for the memories of one runtime: nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.request import Delivery, Request
from locret_stream.errors import ConfigError, ContextClosed, SnapshotNotFound
from locret_stream.serving import chat, names, responses
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError
from locret_stream.serving.expiry import DAY_S, keep_expiring
from locret_stream.serving.limits import Limits
from locret_stream.serving.metrics import Metrics
from locret_stream.serving.sessions import Sessions
from locret_stream.serving.thinking import read_thinking
from locret_stream.serving.uploads import Incoming, Uploads

if TYPE_CHECKING:  # these load torch
    from locret_stream.conversation.threads import Threads
    from locret_stream.runtime import Runtime

BUSY_RETRY_S = 1
DRAINING = "the server is shutting down; the session is as it was before. Expected a later try, or another server"


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
        self.runtime, self.model, self.limits = runtime, model, limits or Limits()
        self.metrics, self.uploads = Metrics(), Uploads(self.limits.upload_resume_s)
        self.draining, self.served = False, 0  # requests that were let in and ended
        self._response_template, self._tool_prompt, self._running, self._idle = (
            response_template, tool_prompt, 0, asyncio.Event())
        self._idle.set()
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

    async def until_idle(self) -> None:
        """Returns when no request runs or waits."""
        await self._idle.wait()

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
        self.draining = True
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

    @contextmanager
    def admitted(self, kind: str) -> Iterator[None]:
        """A place among those that run or wait. Raises ApiError 429: they are too many; 503: it shuts down."""
        if self.draining:
            raise ApiError(503, DRAINING, kind="server_error", code="shutting_down", retry_s=2)
        most = self.runtime.max_live + self.limits.max_waiting
        if self._running >= most:
            raise ApiError(429, f"{self._running} requests run or wait; expected fewer than {most}: try again after "
                           "Retry-After", kind="rate_limit_error", code="queue_full", retry_s=BUSY_RETRY_S)
        self._running += 1
        self._idle.clear()
        self.metrics.requests.labels(kind).inc()
        self.metrics.running.inc()
        try:
            yield
        finally:
            self._running -= 1
            self.served += 1
            if not self._running:
                self._idle.set()
            self.metrics.running.dec()

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

    def _request(self, body: chat.ChatBody | responses.ResponsesBody, said: list[Message], schema: Json | None,
                 thinking: Json, **fields: Any) -> Request:
        tools = chat.read_tools(body.tools or ())
        choice, told = chat.read_choice(body.tool_choice, tools)
        sampling = self._sampling(body)
        if schema is not None:
            if body.stop:
                raise ApiError(400, "stop is given beside a JSON schema, which an answer cut by it would not fit; "
                               "expected one of the two", param="stop")
            sampling["schema"] = json.dumps(schema, ensure_ascii=False)
        timeout_s = self._timeout(body)
        return Request(said, unthinking=True, tools=tools if told else (), choice=choice, timeout_s=timeout_s,
                       focus=body.focus, recall=body.recall, sampling=sampling, **thinking, **fields)

    def _timeout(self, body: chat.Sampled) -> float:
        timeout_s = self.limits.timeout_s if body.timeout is None else body.timeout
        if not 0 < timeout_s <= self.limits.timeout_s:
            raise ApiError(400, f"timeout is {timeout_s}; expected more than 0 and at most {self.limits.timeout_s}",
                           param="timeout")
        return timeout_s

    def _sampling(self, body: chat.Sampled) -> Json:
        sampling = body.sampling(min(self.limits.usual_tokens, self.limits.max_tokens), self.limits.max_tokens)
        if body.temperature:  # the noise of an answer is that of its seed
            sampling.setdefault("seed", secrets.randbits(31))
        from locret_stream.config import Sampling
        Sampling(**sampling)  # raises
        return sampling

    def check_model(self, body: Mapping[str, Any]) -> None:
        """Raises ApiError 404: the body names another model."""
        if body.get("model") not in (None, "", self.model):
            raise ApiError(404, f"the model {body['model']!r:.80} is not served here; expected {self.model!r}, or none",
                           code="model_not_found", param="model")

    def chat(self, body: Mapping[str, Any], thread: str | None, tenant: str) -> AsyncGenerator[Json]:
        """Chunks of a chat completion.

        Args:
            thread: None: nobody's memory, of which nothing is stored. tenant: whose such memories it may go on from.
        """
        self.check_model(body)
        given, unused = chat.read_chat(body)
        unused += given.without_effect()
        if body.get("store") is False and thread is not None:  # a session that is named is kept
            unused.append("store")
        schema = chat.read_format(given.response_format, "response_format")
        request = self._request(given, chat.read_messages(given.messages), schema, read_thinking(body), thread=thread,
                                realm=tenant)
        usage = not given.stream or bool((given.stream_options or {}).get("include_usage"))
        return chat.chunks(self.answer(request), self.model, unused, usage=usage)

    def respond(self, body: Mapping[str, Any], session: str | None, tenant: str
                ) -> tuple[responses.Response, AsyncGenerator[Json]]:
        """A response, and the events of its stream.

        Args:
            session: that the request names beside `previous_response_id` and `conversation`.
            tenant: ahead of the names of sessions in those of threads.
        """
        self.check_model(body)
        given, unused = responses.read_responses(body)
        unused += given.without_effect()
        conversation = responses.conversation_id(given.conversation)
        behind, stored = b"", given.store is not False
        if given.previous_response_id is not None:
            session, behind = names.parse_response_id(given.previous_response_id)
            if not session:  # it was not stored
                raise names.no_response(given.previous_response_id)
        elif conversation is not None:
            session = names.check_session(conversation)
        elif session is None and stored:
            session = names.new_session()
        if not stored and (behind or conversation):
            raise ApiError(400, "store is false beside previous_response_id or conversation; expected store=true: what "
                           "follows a stored memory is stored with it", param="store")
        mark = names.new_mark()
        said = responses.read_messages(given.input or "", given.instructions)
        schema = chat.read_format((given.text or {}).get("format"), "text.format")
        thread = tenant + session if session and stored else None
        request = self._request(given, said, schema, read_thinking(body), thread=thread, behind=behind,
                                append=conversation is not None,
                                realm=tenant, mark=mark if stored else b"")
        response = responses.Response(names.response_id(session or "" if stored else "", mark), body, self.model,
                                      conversation, unused)

        async def parts() -> AsyncGenerator[Part | End]:
            async with contextlib.aclosing(self.answer(request)) as answer:
                try:
                    async for part in answer:
                        yield part
                except SnapshotNotFound:
                    if behind:
                        raise names.no_response(given.previous_response_id) from None
                    raise

        return response, response.events(parts())

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
        return self._running + (0 if self._threads is None else len(self._threads.absorbing))
