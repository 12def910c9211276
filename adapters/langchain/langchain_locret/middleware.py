"""LangGraph: one durable snapshot per agent run, facts of its Store as messages, and memory that is deleted with its
thread. Needs the `agents` extra."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired, Protocol, TypeVar

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime as GraphRuntime

from langchain_locret.calls import with_thread
from langchain_locret.chat_model import LocretChatModel
from locret_stream import ConfigError


class _Checkpointer(Protocol):
    delete_thread: Callable[[str], None]
    adelete_thread: Callable[[str], Awaitable[None]]


S = TypeVar("S", bound=_Checkpointer)


class LocretMiddleware(AgentMiddleware):
    """For `create_agent(..., middleware=[LocretMiddleware(model)])`: the thread is made durable once at the end of each
    run of the agent, not at every step of it.

    A run that is cut short loses no messages: the checkpointer has them, and they are read again.
    """

    def __init__(self, model: LocretChatModel):
        super().__init__()
        if not isinstance(model, LocretChatModel):
            raise ConfigError(f"model is a {type(model).__name__}; expected the agent's LocretChatModel")
        self.model = model

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Call the model without a snapshot, which the end of the run makes."""
        return handler(self._later(request))

    async def awrap_model_call(self, request: ModelRequest,
                               handler: Callable[[ModelRequest], Awaitable[ModelResponse]]) -> ModelResponse:
        """As `wrap_model_call`."""
        return await handler(self._later(request))

    def after_agent(self, state: AgentState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """Make the thread durable."""
        if (thread := _thread()) is not None:
            self.model.save_thread(thread)
        return None

    async def aafter_agent(self, state: AgentState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """As `after_agent`."""
        if (thread := _thread()) is not None:
            await self.model.asave_thread(thread)
        return None

    def _later(self, request: ModelRequest) -> ModelRequest:
        if not isinstance(request.model, LocretChatModel) or request.model.shared is not self.model.shared:
            return request  # such as a fallback model, which nobody would save at the end of the run
        return request.override(model_settings={**request.model_settings, "save": "run"})


class FactsState(AgentState):
    """The facts that the thread was told already: each one's text, by its namespace and key in the Store."""

    locret_facts: NotRequired[Annotated[dict[str, str], PrivateStateAttr]]


class FactsMiddleware(AgentMiddleware[FactsState]):
    """For `create_agent(..., middleware=[FactsMiddleware(("facts", "alice"))], store=store)`: a message ahead of the
    question says each fact of LangGraph's Store once, and again when it changes or is deleted.

    In the system prompt all facts would be read again whenever one changes.

    Args:
        namespace: of the facts in the Store, namespaces below it included; or a function that gives it for a run.
        most: the number of facts at most, in the Store's order.
    """

    state_schema = FactsState

    def __init__(self, namespace: tuple[str, ...] | Callable[[GraphRuntime], tuple[str, ...]], *, most: int = 100):
        super().__init__()
        if not callable(namespace) and not (isinstance(namespace, tuple) and namespace):
            raise ConfigError(f"namespace is {namespace!r}; expected a tuple of names, or a function of the runtime")
        self.namespace, self.most = namespace, most

    def before_agent(self, state: FactsState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """Add a message with the facts that are new. Raises ConfigError: the agent has no store."""
        store = _store(runtime)
        items = store.search(self._where(runtime), limit=self.most)
        others = [store.get(*where) for where in _not_among(items, state)]
        return _update(state, [*items, *(item for item in others if item is not None)])

    async def abefore_agent(self, state: FactsState, runtime: GraphRuntime) -> dict[str, Any] | None:
        """As `before_agent`."""
        store = _store(runtime)
        items = await store.asearch(self._where(runtime), limit=self.most)
        others = [await store.aget(*where) for where in _not_among(items, state)]
        return _update(state, [*items, *(item for item in others if item is not None)])

    def _where(self, runtime: GraphRuntime) -> tuple[str, ...]:
        return self.namespace(runtime) if callable(self.namespace) else self.namespace


def _store(runtime: GraphRuntime) -> Any:
    if runtime.store is None:
        raise ConfigError("the agent has no store; expected create_agent(..., store=<a LangGraph Store>)")
    return runtime.store


def _name(item: Any) -> str:
    return json.dumps([*item.namespace, item.key], ensure_ascii=False)


def _not_among(items: list[Any], state: FactsState) -> list[tuple[tuple[str, ...], str]]:
    """Namespace and key of the facts that the thread was told and that are not among the items: deleted, or beyond the
    most that are searched."""
    names = {_name(item) for item in items}
    missing = [json.loads(name) for name in state.get("locret_facts") or {} if name not in names]
    return [(tuple(namespace), key) for *namespace, key in missing]


def _update(state: FactsState, items: list[Any]) -> dict[str, Any] | None:
    """The state's update: a message with the facts that changed, ahead of the newest message of the user. None if none
    did."""
    before = state.get("locret_facts") or {}
    now = {_name(item): f"- {item.key}: {json.dumps(item.value, ensure_ascii=False, default=str)}" for item in items}
    new = [text for key, text in now.items() if before.get(key) != text]
    deleted = [text for key, text in before.items() if key not in now]
    if not new and not deleted:
        return None
    parts = [("Facts that hold from now on:", new), ("These hold no more:", deleted)]
    fact = HumanMessage("\n".join(line for title, lines in parts if lines for line in (title, *lines)))
    last = state["messages"][-1] if state["messages"] else None
    if not isinstance(last, HumanMessage):
        return {"messages": [fact], "locret_facts": now}
    whole = [*state["messages"][:-1], fact, last]
    return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *whole], "locret_facts": now}


def _thread() -> str | None:
    return with_thread(None, {}).get("thread_id")


def forget_with(checkpointer: S, model: LocretChatModel) -> S:
    """Let `delete_thread` and `adelete_thread` of this checkpointer delete the thread's memory, too; returns it."""
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
