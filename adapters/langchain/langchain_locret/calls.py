"""What a call of the model says beside its messages, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_locret.runtimes import CLOSED
from locret_stream import ConfigError, ContextClosed

if TYPE_CHECKING:
    from langchain_core.messages import AIMessageChunk

    from langchain_locret.thread import Delivery, Request
    from langchain_locret.threads import Threads

T = TypeVar("T")


async def run_turn(threads: Threads, request: Request, emit: Callable[[AIMessageChunk], None]) -> None:
    """`turns.turn`, which is imported where it runs: it loads torch."""
    from langchain_locret.turns import turn
    await turn(threads, request, emit)


def expect_ended(turn: Future[None]) -> None:
    """Raises what the turn raised; ContextClosed if it was the model's closing that ended it."""
    try:
        turn.result()
    except CancelledError:
        raise ContextClosed(CLOSED) from None


def expect_taken(delivery: Delivery) -> None:
    """Take the end of an answer. Raises ContextClosed: the model was closed before."""
    if not delivery.take():
        raise ContextClosed(CLOSED)


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop of its own and wait; there may be another one in this thread. Ctrl-C cancels it."""
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
    """Stop a loop once its tasks are done: one that was cancelled lets go of what it has first."""
    left = asyncio.all_tasks(loop)
    if not left:
        loop.stop()
    for task in left:
        task.add_done_callback(lambda _: loop.call_soon(_stop_when_idle, loop))


def with_thread(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The thread as an argument: a RunnableConfig does not reach `_stream`, but LangGraph's context variable does.

    None, said in so many words, is nobody: whoever calls from inside a thread is then taken out of it.
    """
    known = ensure_config(config).get("configurable") or {}
    if "append" in known:
        kwargs = {"append": known["append"], **kwargs}
    if "thread_id" in kwargs:
        return {**kwargs, "thread_id": None if kwargs["thread_id"] is None else str(kwargs["thread_id"])}
    found = [known[name] for name in ("session_id", "thread_id") if name in known]
    given = next((one for one in found if one is not None), None)
    return {**kwargs, "thread_id": None if given is None else str(given)} if found else kwargs


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
