"""LocretChatModel: LangChain's chat model over a memory to which only new messages are fed."""

from __future__ import annotations

import asyncio
import os
import queue
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, SecretStr, model_validator

import locret_stream
from langchain_locret.calls import (
    SAMPLING,
    check_timeout,
    expect_ended,
    expect_taken,
    request_of,
    run_turn,
    sampling_of,
    tool_choice_of,
    with_thread,
)
from langchain_locret.json_mode import structured
from langchain_locret.messages import WARNINGS, read
from langchain_locret.profile import check_heads, check_key, check_policy, may_show_tools
from langchain_locret.runtimes import BOUNDARIES, Settings, SharedRuntime, is_recall, is_store
from langchain_locret.thread_methods import ThreadMethods
from langchain_locret.warned import LateWarning, RebuildWarning, ToolsWarning
from locret_stream import ConfigError, __version__
from locret_stream.config import check_shared, check_store_bits, check_tier
from locret_stream.conversation.messages import Message
from locret_stream.conversation.request import TOOLS_LEFT_OUT, Delivery, OnChange, OnMismatch, Save
from locret_stream.conversation.tool_prompt import ToolPrompt
from locret_stream.host_tier import host_tier

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.threads import Threads

_END = object()
_taken_by_caller: ContextVar[Delivery | None] = ContextVar("taken by ainvoke", default=None)
_OF_THE_RUNTIME = ("heads", "policy", "budget", "chunk_size", "max_live", "device", "dtype", "chat_template", "store",
                   "key", "boundaries", "recalls", "store_bits", "exact", "by_head")
_WARNINGS = {"late": LateWarning, "rebuild": RebuildWarning, "tools": ToolsWarning, "held": ToolsWarning}
_FOR_SERVERS = {"api_key", "base_url", "max_retries"}


class LocretChatModel(ThreadMethods, BaseChatModel):
    """A local chat model that remembers threads of any length in a fixed amount of memory.

        model = LocretChatModel(model="bundled", store="~/.local/share/locret")
        config = {"configurable": {"thread_id": "alice"}}
        model.invoke([HumanMessage("the password of the vault is 4182 .")], config)

    Give every call the whole history, as LangChain does: messages that the memory already holds are not read again. The
    memory used holds the messages given, or a longer history that provably ends with them; another system text or other
    tools stand behind it, and with append=True it holds whatever the thread was told. The receipt,
    `response_metadata["locret"]`, says which (`source`, `reused`, `fed`); an absorbed stream that cannot be reached
    raises StateLost. Without a `thread_id` (or `session_id`) in the config nothing is stored.

    Model objects of the same settings share one runtime: its weights, its slots and its threads. Weights are loaded on
    first use; `close()` frees them.

    Args:
        model: "bundled", "smollm2", a hub id, a folder, or a GGUF file.
        heads, policy, budget, chunk_size, max_live, device, dtype, chat_template: of `locret_stream.Runtime`.
        store: where threads are kept: a folder, a URL that fsspec knows, or a `locret_stream.Store`. None: in a
            temporary folder, encrypted if the `encryption` extra is installed, until the process ends.
        key: 32 bytes as 64 hexadecimal digits, under which new threads are encrypted, for a store that is a folder or
            URL. None: the environment variable LOCRET_KEY, if it is set.
        boundaries: snapshots that a thread keeps; a history that goes back further is read again.
        on_change: "late": if the system text or the tools of a thread change, they are read as a late message, behind
            what the memory holds. "reread": all messages are read again, and what the memory held beyond them is lost.
        on_mismatch: a thread stored under another model, policy or budget is read again: "reread" from the messages
            given, "rebuild" from its log of tokens, streams and trimmed messages included.
        save: "turn": every turn is durable before its last chunk; "run": `save_thread` makes it durable.
        focus: what the memory will be asked about, read ahead of the stream (`StreamingContext.focus`); "" ends a
            focus, None leaves a thread's own. A call may have another one: `bind(focus=...)`.
        recalls: whether what a thread has read is searched by the words of the last message, and what is found is read
            again for the answer, whether it was evicted or not; a `Recall` says how much. The receipt's `recalled` has
            it. A call may do without: `bind(recall=False)`.
        store_bits: of a channel of the K and V that are kept, of `locret_stream.Runtime`: 16, 8, 4, or two numbers;
            with `exact` also 2 and 1.
        exact: "host" keeps exact units in the host's memory, too, beside codes of `store_bits` 8, 4, 2 or 1, and
            fetches those that a token attends to most; a `HostTier` says how many.
        by_head: whether the KV heads of a layer share its units, of `locret_stream.Runtime`.
        runtime: one of your own in place of all these; it needs a store to keep threads.
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop: of a reply. Without a temperature
            the likeliest token is taken.
        timeout: seconds that a call may take, waiting for its turn included.
        template_options: variables of the chat template (`enable_thinking`, ...); `locret-stream inspect --template`
            names them. A call may have others, and `reasoning_effort`: `bind(reasoning_effort="none")`. Those that
            change what the memory holds have to be the same from a thread's first call on.
        response_template: as of transformers' ResponseParser, for a tokenizer without one.
        tool_prompt: "template": the chat template shows the tools; a ToolsWarning says if it cannot. "auto": if it
            cannot, a system text does, in a form that most models know, and calls are parsed in that form.
    """

    model: str = Field(default="bundled", alias="model_name")
    heads: Any = Field(default=None, repr=False)
    policy: str | None = None
    budget: int | str | None = None
    chunk_size: int | None = None
    max_live: int | None = None
    device: str | None = None
    dtype: str = "auto"
    chat_template: str = Field(default="auto", repr=False)
    store: Any = None
    key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    boundaries: int = BOUNDARIES
    save: Save = "turn"
    on_change: OnChange = "late"
    on_mismatch: OnMismatch = "reread"
    focus: str | None = None
    recalls: Any = None
    store_bits: Any = None
    exact: Any = None
    by_head: bool = False
    runtime: Any = Field(default=None, exclude=True, repr=False)
    max_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    streaming: bool = False
    template_options: dict[str, Any] | None = None
    response_template: dict[str, Any] | None = Field(default=None, repr=False)
    tool_prompt: ToolPrompt = "template"
    shared: Any = Field(default=None, exclude=True, repr=False)  # the SharedRuntime of these settings; made here

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, protected_namespaces=(),
                              extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_for_servers(cls, values: Any) -> Any:
        """LangChain's standard parameters for models behind a server mean nothing here; misspelt ones are refused."""
        return {name: value for name, value in values.items() if name not in _FOR_SERVERS} if isinstance(
            values, dict) else values

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Check the settings, and share the runtime of these. Raises ConfigError, UnknownPolicy."""
        if self.runtime is not None and not isinstance(self.runtime, locret_stream.Runtime):
            raise ConfigError(f"runtime is a {type(self.runtime).__name__}; expected a locret_stream.Runtime")
        whole = "a Runtime" if self.runtime is not None else "a Store" if is_store(self.store) else ""
        beside = {"a Runtime": _OF_THE_RUNTIME, "a Store": ("key", "boundaries"), "": ()}[whole]
        for name in beside:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(f"{name} was given beside {whole}, which has its own; expected one of the two")
        store = self.store
        if isinstance(store, (str, Path)) and "://" not in str(store):
            store = str(Path(store).expanduser().resolve())  # one folder is one store, however its path is written
        key = None if self.key is None else self.key.get_secret_value()
        if key is None and isinstance(self.store, (str, Path)):
            key = os.environ.get("LOCRET_KEY") or None
        check_key(key)
        check_policy(self.policy)
        check_heads(self.model, self.heads, self.policy)
        if self.store is not None and not isinstance(self.store, (str, Path)) and not is_store(self.store):
            raise ConfigError(f"store is a {type(self.store).__name__}; expected a folder, a URL or a Store")
        check_timeout(self.timeout)
        if self.recalls not in (True, False, None) and not is_recall(self.recalls):
            raise ConfigError(f"recalls is {self.recalls!r}; expected True, False or Recall(tokens=...)")
        bits = None if self.store_bits is None else check_store_bits(self.store_bits)
        tier = host_tier(self.exact)
        check_tier(tier, bits or (16, 16))
        check_shared(self.by_head, tier)
        sampling_of(self, {})
        options = {name: getattr(self, name) for name in
                   ("heads", "policy", "budget", "chunk_size", "max_live", "device", "dtype")}
        options |= {"template": self.chat_template, "recall": self.recalls,
                    "store_bits": bits if bits != (16, 16) else None, "exact": tier, "by_head": self.by_head or None}
        settings = Settings(
            model=self.model, options=tuple((name, value) for name, value in options.items() if value is not None),
            store=store, key=key,
            boundaries=self.boundaries, runtime=self.runtime, replies=self.response_template,
            template_options=self.template_options, tool_prompt=self.tool_prompt)
        if self.shared is None or self.shared.settings.identity() != settings.identity():
            self.__dict__["shared"] = SharedRuntime.of(settings)
        self._add_version("locret-stream", __version__)

    def __getstate__(self) -> dict[Any, Any]:
        if self.runtime is not None or is_store(self.store):
            raise ConfigError("a model over a Runtime or Store object cannot be pickled; expected one made of names: "
                              "model=..., store=<folder or URL>")
        return super().__getstate__()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other settings, which are checked; it shares the runtime if settings of the runtime agree."""
        copied = super().model_copy(update=update)
        if update:
            copied._check()
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy of the settings; it shares the runtime."""
        return self.model_copy()

    # -- identity ---------------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "locret-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", "policy", "budget", "chunk_size", "max_tokens", *SAMPLING, "stop", "template_options")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """A model holds weights and memory: make another one of the same settings instead."""
        return False

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop or None, **kwargs)
        return {**params, "ls_provider": "locret"}

    def _resolve_model_profile(self) -> ModelProfile:
        tools = self.tool_prompt == "auto" or may_show_tools(self.model, self.chat_template, self.runtime)
        # No max_input_tokens: middleware would trim or summarise messages that the memory holds anyway.
        return {"text_inputs": True, "text_outputs": True, "image_inputs": False, "audio_inputs": False,
                "video_inputs": False, "pdf_inputs": False, "tool_calling": tools, "tool_choice": tools,
                "structured_output": False, "temperature": True, "open_weights": True,
                "max_output_tokens": self.max_tokens}

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text as data: control tokens in it are encoded as the characters that spell them."""
        return self.shared.runtime.codec.encode_text(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage],
                                     tools: Sequence[dict[str, Any] | type | Callable | Any] | None = None) -> int:
        """The number of tokens of these messages in the chat template, without the generation prompt. Messages that the
        template refuses as a conversation (a part of one, as trimming counts it) are counted each behind a question."""
        said, shown = read(messages), tuple(convert_to_openai_tool(tool) for tool in tools or ())

        def one_by_one(threads: Threads) -> int:
            question = Message("user", "?")
            alone = threads.template.count([question])
            return sum(threads.template.count([message]) if message.role in ("user", "system") else
                       threads.template.count([question, message]) - alone for message in said)

        def count(threads: Threads) -> int:
            speaks_first = said[0].role in ("user", "system") if said else True
            if not shown and not speaks_first and not threads.template.traits.follows("start", "assistant"):
                return one_by_one(threads)
            return threads.template.count(said, shown)

        return self.shared.loop.call(lambda threads: asyncio.to_thread(count, threads))

    # -- calling ----------------------------------------------------------------------------------------------

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return super().invoke(_as_prompt(input), config, **with_thread(config, kwargs))

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None,
                      **kwargs: Any) -> AIMessage:
        delivery = Delivery(self)
        before = _taken_by_caller.set(delivery)
        try:
            answer = await super().ainvoke(_as_prompt(input), config, **with_thread(config, kwargs))
            if delivery.turn is not None:  # None: the answer came from LangChain's cache
                expect_taken(delivery)
                await delivery.wait_until_free()
            return answer
        finally:
            delivery.leave()
            _taken_by_caller.reset(before)

    def stream(self, input: LanguageModelInput, config: RunnableConfig | None = None,
               **kwargs: Any) -> Iterator[AIMessageChunk]:
        yield from super().stream(_as_prompt(input), config, **with_thread(config, kwargs))

    async def astream(self, input: LanguageModelInput, config: RunnableConfig | None = None,
                      **kwargs: Any) -> AsyncIterator[AIMessageChunk]:
        async for chunk in super().astream(_as_prompt(input), config, **with_thread(config, kwargs)):
            yield chunk

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        delivery = Delivery()
        request = request_of(self, messages, stop, kwargs, delivery, self.shared.seen)
        chunks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        delivery.turn = turn = self.shared.loop.submit(lambda threads: run_turn(threads, request, chunks.put))
        turn.add_done_callback(lambda _: chunks.put(_END))
        try:
            while (chunk := chunks.get()) is not _END:
                out = self._chunk(chunk, run_manager)
                if chunk.chunk_position == "last":
                    expect_taken(delivery)
                    wait([turn])
                yield out
            expect_ended(turn)
        finally:
            delivery.leave()
            turn.cancel()

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        outer = _taken_by_caller.get()
        if outer is not None and (outer.caller is not self or outer.turn is not None):  # a call within that call
            outer = None
        delivery, loop = outer or Delivery(), asyncio.get_running_loop()
        request = request_of(self, messages, stop, kwargs, delivery, self.shared.seen)
        chunks: asyncio.Queue[Any] = asyncio.Queue()

        def put(chunk: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        delivery.turn = turn = self.shared.loop.submit(lambda threads: run_turn(threads, request, put))
        whole = False
        turn.add_done_callback(lambda _: put(_END))
        try:
            while (chunk := await chunks.get()) is not _END:
                out = self._chunk(chunk, None)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(out.text, chunk=out)
                if chunk.chunk_position == "last":
                    whole = True
                    if outer is None:
                        expect_taken(delivery)
                        await delivery.wait_until_free()
                    yield out
                    return
                yield out
            expect_ended(turn)
        finally:
            if not (outer and whole):  # else `ainvoke` takes the answer, or leaves the call
                delivery.leave()
                turn.cancel()

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _chunk(self, message: AIMessageChunk, run_manager: CallbackManagerForLLMRun | None) -> ChatGenerationChunk:
        info = None
        if message.chunk_position == "last":
            for kind, text in message.response_metadata.pop(WARNINGS).items():
                warnings.warn(text, _WARNINGS[kind], stacklevel=2)
            message.response_metadata |= {"model_name": self.model, "model_provider": "locret"}
            info = {"finish_reason": message.response_metadata["finish_reason"], "model_name": self.model}
        chunk = ChatGenerationChunk(message=message, generation_info=info)
        if run_manager is not None:
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        return chunk

    # -- tools ------------------------------------------------------------------------------------------------

    def bind_tools(self, tools: Sequence[dict[str, Any] | type | Callable | Any], *,
                   tool_choice: str | dict[str, Any] | bool | None = None,
                   **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Args:
            tool_choice: a tool's name, "any"/"required"/True for any tool: the reply is a call whose arguments fit the
                tool's JSON schema, whatever the model; "auto" or None for the model's choice, "none" to show it no
                tools.

        Raises:
            ConfigError: no tool of that name is given.
        """
        shown = [convert_to_openai_tool(tool) for tool in tools]
        tool_choice_of(tool_choice, shown)
        if shown and self.profile is not None and not self.profile.get("tool_calling", True):
            warnings.warn(TOOLS_LEFT_OUT, ToolsWarning, stacklevel=2)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=shown, **kwargs)

    def with_structured_output(self, schema: dict[str, Any] | type, *, include_raw: bool = False,
                               method: str = "function_calling", strict: bool | None = None,
                               **kwargs: Any) -> Runnable[LanguageModelInput, Any]:
        """The model, with replies that a schema describes.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema with a title.
            include_raw: give {"raw": the message, "parsed": ..., "parsing_error": None or the error}; do not raise.
            method: "function_calling": a forced tool call, which fits the schema (see `bind_tools`). "json_mode",
                "json_schema": the schema stands in the system text, and the reply is parsed as JSON. Neither these nor
                `strict` constrain what the model writes.

        Raises (when the model is called):
            OutputParserException: the reply is not what the schema describes.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method not in ("json_mode", "json_schema"):
            raise ConfigError(f"method is {method!r}; expected 'function_calling', 'json_mode' or 'json_schema'")
        if kwargs:
            raise ConfigError(f"unknown option {min(kwargs)!r}; expected schema, include_raw, method or strict")
        return structured(self, schema, include_raw=include_raw)

    def __enter__(self) -> LocretChatModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Save all threads and free weights and memory, for every model of these settings. Used again, they load again.
        """
        self.shared.close()

    async def aclose(self) -> None:
        """As `close`."""
        await asyncio.to_thread(self.shared.close)


def _as_prompt(input: LanguageModelInput) -> LanguageModelInput:
    """A list of messages as the prompt that LangChain makes of it, without converting and checking every message."""
    if isinstance(input, list) and all(issubclass(kind, BaseMessage) for kind in {*map(type, input)}):
        return ChatPromptValue.model_construct(messages=input)
    return input
