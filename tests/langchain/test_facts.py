"""Facts of LangGraph's Store are put into messages, each once, and the memory goes on."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore

from langchain_locret import LocretChatModel
from langchain_locret.middleware import FactsMiddleware
from locret_stream import ConfigError
from tests.langchain.support import held, receipt, rendered, thread

T = thread("t")


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_fact_is_told_once_and_again_when_it_changes_or_goes(chat: LocretChatModel, how: str):
    store = InMemoryStore()
    agent = create_agent(chat, [], checkpointer=InMemorySaver(), store=store, system_prompt="Be brief.",
                         middleware=[FactsMiddleware(("facts", "alice"))])

    async def ask(said: str) -> Any:
        given: Any = {"messages": [HumanMessage(said)]}
        return (await agent.ainvoke(given, T) if how == "async" else agent.invoke(given, T))["messages"]

    store.put(("facts", "alice"), "city", {"is": "Oslo"})
    store.put(("facts", "bob"), "city", {"is": "Rome"})
    told = "Facts that hold from now on:\n- city: {\"is\": \"Oslo\"}"
    assert [one.text for one in await ask("one")] == [told, "one", "You said: one"]
    messages = await ask("two")
    assert len(messages) == 5 and receipt(messages[-1])["source"] == "live"
    store.put(("facts", "alice"), "city", {"is": "Bonn"})
    messages = await ask("three")
    assert messages[-3].text == "Facts that hold from now on:\n- city: {\"is\": \"Bonn\"}"
    store.delete(("facts", "alice"), "city")
    messages = await ask("four")
    assert messages[-3].text == "These hold no more:\n- city: {\"is\": \"Bonn\"}" and messages[-2].text == "four"
    assert receipt(messages[-1])["source"] == "live" and "late" not in receipt(messages[-1])
    assert held(chat, "t").endswith(rendered(messages)) and "Rome" not in held(chat, "t")


def test_an_agent_without_a_store_or_a_namespace_is_refused(chat: LocretChatModel):
    agent = create_agent(chat, [], middleware=[FactsMiddleware(lambda runtime: ("facts",))])
    with pytest.raises(ConfigError, match="no store"):
        agent.invoke({"messages": [HumanMessage("one")]}, T)
    for namespace in ("facts", ()):
        with pytest.raises(ConfigError, match="a tuple of names"):
            FactsMiddleware(namespace)


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_fact_beyond_the_most_that_are_told_at_once_is_not_told_as_gone(chat: LocretChatModel, how: str):
    store = InMemoryStore()
    agent = create_agent(chat, [], checkpointer=InMemorySaver(), store=store,
                         middleware=[FactsMiddleware(("facts",), most=2)])

    async def ask(said: str) -> str:
        given: Any = {"messages": [HumanMessage(said)]}
        return (await agent.ainvoke(given, T) if how == "async" else agent.invoke(given, T))["messages"][-3].text

    for key in "abc":
        store.put(("facts",), key, {"is": key})
    assert await ask("one") == 'Facts that hold from now on:\n- a: {"is": "a"}\n- b: {"is": "b"}'
    store.delete(("facts",), "a")
    store.put(("facts",), "a", {"is": "a"})  # the newest now, and so the third
    assert await ask("two") == 'Facts that hold from now on:\n- c: {"is": "c"}'
    store.delete(("facts",), "a")
    assert await ask("three") == 'These hold no more:\n- a: {"is": "a"}'


def test_a_fact_of_any_value_is_told(chat: LocretChatModel):
    store = InMemoryStore()
    store.put(("facts",), "since", {"at": datetime(2026, 1, 2)})
    agent = create_agent(chat, [], store=store, middleware=[FactsMiddleware(("facts",))])
    assert "2026-01-02" in agent.invoke({"messages": [HumanMessage("one")]}, T)["messages"][0].text
