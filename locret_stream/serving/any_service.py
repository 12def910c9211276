"""What the routes ask of a service, wherever its memories are, and what of it is the same for all: which requests are
let in, and what they mean. Nothing here knows a runtime."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.request import Request
from locret_stream.errors import SnapshotNotFound
from locret_stream.serving import chat, names, responses
from locret_stream.serving.bodies import Json
from locret_stream.serving.errors import ApiError
from locret_stream.serving.limits import Limits
from locret_stream.serving.metrics import Metrics
from locret_stream.serving.thinking import read_thinking
from locret_stream.serving.uploads import Incoming

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.items import Item

DRAINING = "the server is shutting down; the session is as it was before. Expected a later try, or another server"


class AnyService(ABC):
    """Sessions behind the routes: of one runtime (`Service`), or elsewhere. They are named by their threads.

    Args:
        model: the name that requests may give, and that answers bear.

    Attributes:
        draining: nothing more is taken in. served: requests that were let in and ended.
    """

    def __init__(self, *, model: str, limits: Limits | None = None):
        self.model, self.limits, self.metrics = model, limits or Limits(), Metrics()
        self.draining, self.served = False, 0
        self._running, self._idle = 0, asyncio.Event()
        self._idle.set()

    # -- its life ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve; before `ready`, requests may be refused."""

    @property
    @abstractmethod
    def ready(self) -> bool: ...

    async def drain(self) -> None:
        """Take in nothing more."""
        self.draining = True

    @abstractmethod
    async def aclose(self) -> None:
        """Drain, and free everything. Idempotent."""

    async def until_idle(self) -> None:
        """Returns when no request runs or waits."""
        await self._idle.wait()

    def _expect_place(self) -> None:
        """Raises ApiError 429: no more requests may run or wait."""
        return

    @contextmanager
    def admitted(self, kind: str) -> Iterator[None]:
        """A place among the requests that run or wait. Raises ApiError 503: it shuts down; 429: they are too many."""
        if self.draining:
            raise ApiError(503, DRAINING, kind="server_error", code="shutting_down", retry_s=2)
        self._expect_place()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            self.served += 1
            if not self._running:
                self._idle.set()

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return self._running

    @abstractmethod
    async def metrics_text(self) -> bytes:
        """What was counted, as Prometheus reads it."""

    # -- answers ----------------------------------------------------------------------------------------------

    @abstractmethod
    def answer(self, request: Request) -> AsyncGenerator[Part | End]:
        """The parts of an answer and its end."""

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

    # -- conversations, sessions and streams, as `Sessions` and `Service` say ----------------------------------

    @abstractmethod
    async def create(self, thread: str) -> bool: ...
    @abstractmethod
    async def tell(self, thread: str, items: list[Json]) -> list[Item]: ...
    @abstractmethod
    async def items(self, thread: str, session: str, limit: int, after: str, newest_first: bool) -> Json: ...
    @abstractmethod
    async def item(self, thread: str, session: str, item_id: str) -> Json: ...
    @abstractmethod
    async def drop_item(self, thread: str, item_id: str) -> None: ...
    @abstractmethod
    async def sessions(self, tenant: str) -> list[Json]: ...
    @abstractmethod
    async def session(self, thread: str, session: str) -> Json: ...
    @abstractmethod
    async def memory(self, thread: str, session: str) -> Json: ...
    @abstractmethod
    async def map(self, thread: str, start: int, end: int | None, columns: int) -> Json: ...
    @abstractmethod
    async def text(self, thread: str, session: str, start: int, end: int | None, column: int | None = None
                   ) -> Json: ...
    @abstractmethod
    async def search(self, thread: str, words: str, limit: int) -> Json: ...
    @abstractmethod
    async def ask(self, thread: str, body: Mapping[str, Any]) -> Json: ...
    @abstractmethod
    async def fork(self, thread: str, new: str) -> None: ...
    @abstractmethod
    async def focus(self, thread: str, session: str, body: Mapping[str, Any]) -> Json: ...
    @abstractmethod
    async def rewind(self, thread: str, session: str, to: Any) -> Json: ...
    @abstractmethod
    async def snapshot(self, thread: str, session: str) -> Json: ...
    @abstractmethod
    async def forget(self, thread: str, session: str) -> None: ...
    @abstractmethod
    def upload(self, thread: str, *, label: str, focus: str | None, upload_id: str | None, offset: int,
               charset: Mapping[str, str] | None = None) -> AbstractAsyncContextManager[Incoming]: ...
    @abstractmethod
    async def upload_state(self, thread: str, upload_id: str) -> Json | None: ...
