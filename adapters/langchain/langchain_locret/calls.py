"""What a call of the model says beside its messages, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_locret.runtimes import CLOSED
from langchain_locret.seen import Seen
from locret_stream import ConfigError, ContextClosed, InputError, Sampling
from locret_stream.conversation.request import Delivery, OnChange, OnMismatch, Request, Save

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.threads import Threads

T = TypeVar("T")
_IDS = ("session_id", "thread_id")  # of a thread, in a config
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_OPTIONS = {*SAMPLING, "thread_id", "tools", "tool_choice", "stop", "save", "timeout", "max_tokens", "stream_usage",
            "strict", "focus", "recall", "append", "parallel_tool_calls", "template_options", "reasoning_effort"}


class Defaults(Protocol):
    """The model's settings for what a call leaves out; `SAMPLING` too."""

    save: Save
    on_change: OnChange
    on_mismatch: OnMismatch
    focus: str | None
    timeout: float | None
    max_tokens: int
    stop: list[str] | None


def request_of(defaults: Defaults, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any],
               delivery: Delivery, seen: Seen) -> Request:
    """The request of one call, its options before the model's settings; `seen` knows what was given before.

    Raises:
        InputError, ConfigError: messages or options that the model cannot be asked with.
    """
    if not messages:
        raise InputError("there are no messages; expected at least one")
    options = with_thread(None, options)
    unknown = sorted(name for name in set(options) - _OPTIONS if not name.startswith(("ls_", "_")))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; expected some of {', '.join(sorted(_OPTIONS))}")
    tools = () if options.get("tool_choice") == "none" else tuple(
        convert_to_openai_tool(tool) for tool in options.get("tools") or ())
    choice, save = tool_choice_of(options.get("tool_choice"), tools), options.get("save", defaults.save)
    if save not in get_args(Save):
        raise ConfigError(f"save is {save!r}; expected 'turn' or 'run'")
    focus, append = options.get("focus", defaults.focus), options.get("append") or False
    recall = options.get("recall")
    if recall is not None and not isinstance(recall, bool):
        raise ConfigError(f"recall is {recall!r}; expected True or False, or None for what the model was made with")
    timeout_s = options.get("timeout", defaults.timeout)
    check_timeout(timeout_s)
    if append and options.get("thread_id") is None:
        raise InputError("append=True without a thread_id; expected the thread that the messages go on from")
    if append not in (True, False):
        raise ConfigError(f"append is {append!r}; expected True or False")
    template_options, think = options.get("template_options") or {}, options.get("reasoning_effort")
    if not isinstance(template_options, dict):
        raise ConfigError(f"template_options is {template_options!r}; expected variables of the chat template by name")
    if think is not None and not isinstance(think, (bool, str)):
        raise ConfigError(f"reasoning_effort is {think!r}; expected True or False, or a word such as 'low' or 'none'")
    thread = options.get("thread_id")
    return Request(said=seen.history(thread, messages), thread=thread, tools=tools, choice=choice,
                   sampling=sampling_of(defaults, {**options, "stop": stop or options.get("stop")}),
                   save=save, on_change=defaults.on_change, on_mismatch=defaults.on_mismatch,
                   timeout_s=timeout_s, focus=focus, recall=recall, append=append, options=template_options,
                   think=think, delivery=delivery)


def sampling_of(defaults: Defaults, options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Sampling` for one reply, the call's options before the model's settings. Raises ConfigError."""
    sampling = {name: getattr(defaults, name) if options.get(name) is None else options[name] for name in SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    sampling["max_new_tokens"] = options.get("max_tokens") or defaults.max_tokens
    stop = options.get("stop") or defaults.stop or ()
    sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    Sampling(**sampling)
    return sampling


def check_timeout(seconds: Any) -> None:
    """Raises ConfigError."""
    if seconds is not None and (not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0):
        raise ConfigError(f"timeout is {seconds!r}; expected seconds above 0")


async def run_turn(threads: Threads, request: Request, emit: Callable[[AIMessageChunk], None]) -> None:
    """`turns.turn` with LangChain's chunks. It loads torch, so it is imported here."""
    from langchain_locret.replies import chunk_of
    from locret_stream.conversation.turns import turn
    await turn(threads, request, lambda part: emit(chunk_of(part)))


def expect_ended(turn: Future[None]) -> None:
    """Raises what the turn raised; ContextClosed if closing the model ended it."""
    try:
        turn.result()
    except CancelledError:
        raise ContextClosed(CLOSED) from None


def expect_taken(delivery: Delivery) -> None:
    """Take the end of an answer. Raises ContextClosed if the model was closed before."""
    if not delivery.take():
        raise ContextClosed(CLOSED)


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop and OS thread of its own, as this thread may run a loop; wait. Ctrl-C cancels the work."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name="locret-ingest", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(_stop_when_idle, loop))
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _stop_when_idle(loop: asyncio.AbstractEventLoop) -> None:
    """Stop a loop once its tasks are done, so that a cancelled one releases what it has first."""
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        loop.stop()
    for task in tasks:
        task.add_done_callback(lambda _: loop.call_soon(_stop_when_idle, loop))


def with_thread(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options with `thread_id` and `append` of the config: no RunnableConfig reaches `_stream`, but LangGraph's
    context variable does.

    An explicit None means no thread, also for a call from inside a thread. `append` of the surrounding graph holds only
    for the graph's own thread.
    """
    configurable = ensure_config(config).get("configurable") or {}
    named = (config or {}).get("configurable") or {}
    if "thread_id" in kwargs:  # LangChain hands the graph's config down, so that it may name another thread
        of = next((str(named[name]) for name in _IDS if named.get(name) is not None), None)
        configurable = named if of is None or of == str(kwargs["thread_id"]) else {}
    if "append" in configurable:
        kwargs = {"append": configurable["append"], **kwargs}
    if "thread_id" in kwargs:
        return {**kwargs, "thread_id": None if kwargs["thread_id"] is None else str(kwargs["thread_id"])}
    ids = [configurable[name] for name in _IDS if name in configurable]
    thread = next((thread_id for thread_id in ids if thread_id is not None), None)
    return {**kwargs, "thread_id": None if thread is None else str(thread)} if ids else kwargs


def tool_choice_of(choice: Any, tools: Sequence[dict[str, Any]]) -> str:
    """A tool's name, "any", or "" for the model's own choice.

    Raises:
        ConfigError: no such tool is bound.
    """
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name", choice)
    if choice in (None, False, "auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools]
    if choice in (True, "any", "required") and names:
        return names[0] if len(names) == 1 else "any"
    if choice not in names:
        if not names:
            raise ConfigError(f"tool_choice is {choice!r} and no tools are bound; expected bind_tools([...]) first")
        raise ConfigError(f"tool_choice is {choice!r}; expected one of the tools {names}, 'any', 'auto' or 'none'")
    return choice
