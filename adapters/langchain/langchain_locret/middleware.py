"""LangGraph: one durable snapshot per agent run, and memory that goes with its thread. Needs the `agents` extra."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langgraph.runtime import Runtime as GraphRuntime

from langchain_locret.calls import with_thread
from langchain_locret.chat_model import LocretChatModel
from locret_stream import ConfigError

S = TypeVar("S")


class LocretMiddleware(AgentMiddleware):
    """For `create_agent(..., middleware=[LocretMiddleware(model)])`: the thread is made durable once at the end of each
    run of the agent, not at every step of it.

    A run that is cut short loses no messages: those are the checkpointer's. What memory had of the run is read again.
    """

    def __init__(self, model: LocretChatModel):
        super().__init__()
        if not isinstance(model, LocretChatModel):
            raise ConfigError(f"model is a {type(model).__name__}; expected the agent's LocretChatModel")
        self.model = model

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Leaves the snapshot to the end of the run."""
        return handler(self._later(request))

    async def awrap_model_call(self, request: ModelRequest,
                               handler: Callable[[ModelRequest], Awaitable[ModelResponse]]) -> ModelResponse:
        """As `wrap_model_call`."""
        return await handler(self._later(request))

    def after_agent(self, state: AgentState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """Makes the thread durable."""
        if (thread := _thread()) is not None:
            self.model.save_thread(thread)

    async def aafter_agent(self, state: AgentState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """As `after_agent`."""
        if (thread := _thread()) is not None:
            await self.model.asave_thread(thread)

    def _later(self, request: ModelRequest) -> ModelRequest:
        if not isinstance(request.model, LocretChatModel):  # a fallback, say
            return request
        return request.override(model_settings={**request.model_settings, "save": "run"})


def _thread() -> str | None:
    return with_thread(None, {}).get("thread_id")


def forget_with(checkpointer: S, model: LocretChatModel) -> S:
    """Let `delete_thread` and `adelete_thread` of this checkpointer forget the thread's memory too; returns it."""
    delete, adelete = checkpointer.delete_thread, checkpointer.adelete_thread

    @functools.wraps(delete)
    def delete_thread(thread_id: str) -> None:
        model.forget_thread(thread_id)
        delete(thread_id)

    @functools.wraps(adelete)
    async def adelete_thread(thread_id: str) -> None:
        await model.aforget_thread(thread_id)
        await adelete(thread_id)

    checkpointer.delete_thread, checkpointer.adelete_thread = delete_thread, adelete_thread
    return checkpointer
