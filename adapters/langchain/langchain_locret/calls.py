"""What a call of the model says beside its messages, and how it ends."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_locret.home import CLOSED
from langchain_locret.threads import Threads
from locret_stream import ConfigError, ContextClosed, InvalidText
from locret_stream.context import Memory


def expect_ended(turn: Future[None]) -> None:
    """Raises what the turn raised; ContextClosed if it was the model's closing that ended it."""
    try:
        turn.result()
    except CancelledError:
        raise ContextClosed(CLOSED) from None


def look(thread_id: str) -> Callable[[Threads], Any]:
    """What a thread holds, to be asked on its home's loop."""
    async def found(threads: Threads) -> Memory | None:
        return threads.memory(str(thread_id))

    return found


def with_thread(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The thread as an argument: a RunnableConfig does not reach `_stream`, but LangGraph's context variable does."""
    if kwargs.get("thread_id") is not None:
        return {**kwargs, "thread_id": str(kwargs["thread_id"])}
    known = ensure_config(config).get("configurable") or {}
    found = next((known[name] for name in ("session_id", "thread_id") if known.get(name) is not None), None)
    return kwargs if found is None else {**kwargs, "thread_id": str(found)}


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
        raise ConfigError(f"tool_choice is {choice!r}; expected one of the tools {names}, 'any', 'auto' or 'none'")
    return choice


def read_text(decoder: codecs.IncrementalDecoder, piece: bytes, *, final: bool = False) -> str:
    """Bytes of a stream as text. Raises InvalidText."""
    try:
        return decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        raise InvalidText(f"the source gave bytes that are not UTF-8: {error}; expected text") from error
