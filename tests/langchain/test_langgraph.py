"""Agents and graphs: tool loops, checkpointers, time travel, one snapshot per run, threads that are deleted."""

from __future__ import annotations

import json
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from langchain_locret import LateWarning, LocretChatModel, StateLost
from langchain_locret.middleware import LocretMiddleware, forget_with
from locret_stream import ConfigError, Store
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread

T = thread("t")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def chat(script: Script, tmp_path: Path) -> Iterator[LocretChatModel]:
    with model(Store(tmp_path / "store", keep_last=64)) as chat:
        yield chat


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: Any, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemorySaver()
    else:
        with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as found:
            yield found


def sources(messages: list[BaseMessage]) -> list[str]:
    return [receipt(message)["source"] for message in messages if isinstance(message, AIMessage)]


def test_a_tool_loop_goes_on_from_memory_and_time_travel_from_snapshots(chat: LocretChatModel, saver: Any):
    agent = create_agent(chat, tools=[add], checkpointer=saver, system_prompt="Be exact.")
    for text in ("first question " * 10, "second"):
        state = agent.invoke({"messages": [HumanMessage(text)]}, T)
    messages = state["messages"]
    assert sources(messages) == ["new", "live", "live", "live"] and len(messages) == 8
    assert [message.content for message in messages if message.type == "tool"] == ["6", "6"]
    past = next(found for found in agent.get_state_history(T) if not found.next and len(found.values["messages"]) == 4)
    fork = agent.invoke({"messages": [HumanMessage("alternative")]}, past.config)["messages"]
    assert sources(fork) == ["new", "live", "snapshot", "live"] and len(fork) == 8
    assert receipt(fork[5])["fed"] < 20
    assert "second" not in held(chat, "t")[-600:].partition("alternative")[2] and "alternative" in held(chat, "t")
    # the other branch goes on, too
    tip = next(found for found in agent.get_state_history(T) if len(found.values["messages"]) == 8
               and found.values["messages"][4].content == "second")
    more = agent.invoke({"messages": [HumanMessage("third")]}, tip.config)["messages"]
    assert sources(more)[-2:] == ["snapshot", "live"] and "alternative" not in held(chat, "t")


def test_replaying_a_checkpoint_answers_from_the_prompt(chat: LocretChatModel, saver: Any):
    agent = create_agent(chat, tools=[], checkpointer=saver)
    agent.invoke({"messages": [HumanMessage("one " * 100)]}, T)
    before = next(found for found in agent.get_state_history(T) if found.next == ("model",))
    again = agent.invoke(None, before.config)["messages"]
    assert sources(again) == ["snapshot"] and receipt(again[-1])["fed"] < 5


def test_only_receipts_enter_checkpoints(chat: LocretChatModel, tmp_path: Path):
    def size(said: str) -> int:
        path = tmp_path / f"{said}.sqlite"
        with SqliteSaver.from_conn_string(str(path)) as saver:
            agent = create_agent(chat, tools=[add], checkpointer=saver)
            state = agent.invoke({"messages": [HumanMessage("hello")]}, thread(said))
            for message in state["messages"]:
                assert len(json.dumps(message.response_metadata.get("locret", {}))) < 300
            stub = chat.ingest("word " * 10_000, thread_id=said) if said == "much" else HumanMessage("word")
            agent.invoke({"messages": [stub]}, thread(said))
        return path.stat().st_size

    assert size("much") < size("little") + 4096 * 2
    assert sum(row.bytes for row in chat.shared.runtime.store.info("langchain/much")) > 500_000


def snapshots(chat: LocretChatModel) -> int:
    return len(chat.shared.runtime.store.info("langchain/t"))


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_the_middleware_makes_one_snapshot_per_run(chat: LocretChatModel, how: str, tmp_path: Path):
    agent = create_agent(chat, tools=[add], checkpointer=InMemorySaver(), middleware=[LocretMiddleware(chat)])
    history: list[BaseMessage] = []
    for number in range(1, 4):
        said = {"messages": [HumanMessage(f"question {number}")]}
        history = (await agent.ainvoke(said, T) if how == "async" else agent.invoke(said, T))["messages"]
        assert snapshots(chat) == number
    assert sources(history) == ["new", *["live"] * 5]
    chat.close()
    with model(tmp_path / "store") as again:
        answer = again.bind_tools([add]).invoke([*history, HumanMessage("and now?")], T)
        assert receipt(answer)["source"] == "snapshot" and receipt(answer)["fed"] < 20


def test_without_the_middleware_every_turn_is_durable(chat: LocretChatModel):
    create_agent(chat, tools=[add], checkpointer=InMemorySaver()).invoke({"messages": [HumanMessage("question")]}, T)
    assert snapshots(chat) == 4  # a prompt and an answer, twice


def test_a_deleted_thread_is_forgotten(chat: LocretChatModel, saver: Any, tmp_path: Path):
    agent = create_agent(chat, tools=[], checkpointer=forget_with(saver, chat))
    for name in ("t", "u"):
        agent.invoke({"messages": [HumanMessage("a secret")]}, thread(name))
    saver.delete_thread("t")
    assert [row.name for row in chat.shared.runtime.store.list()] == ["langchain/u"]
    assert not agent.get_state(T).values
    answer = agent.invoke({"messages": [HumanMessage("hello")]}, T)["messages"][-1]
    assert receipt(answer)["source"] == "new" and "why" not in receipt(answer) and "secret" not in held(chat, "t")


async def test_an_async_sqlite_checkpointer_forgets_too(chat: LocretChatModel, tmp_path: Path):
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "async.sqlite")) as saver:
        agent = create_agent(chat, tools=[add], checkpointer=forget_with(saver, chat),
                             middleware=[LocretMiddleware(chat)])
        state = await agent.ainvoke({"messages": [HumanMessage("a secret")]}, T)
        assert sources(state["messages"]) == ["new", "live"]
        await saver.adelete_thread("t")
        assert chat.shared.runtime.store.list() == []


def test_streaming_modes_give_every_token_once(chat: LocretChatModel):
    agent = create_agent(chat, tools=[], checkpointer=InMemorySaver())
    chunks = [chunk for chunk, _ in agent.stream({"messages": [HumanMessage("hi there")]}, T, stream_mode="messages")]
    assert "".join(chunk.text for chunk in chunks) == "You said: hi there" and len(chunks) > 3
    assert sum(isinstance(chunk, AIMessageChunk) and bool(chunk.usage_metadata) for chunk in chunks) == 1


async def test_events_name_the_model_and_its_tokens(chat: LocretChatModel):
    agent = create_agent(chat, tools=[], checkpointer=InMemorySaver())
    events = [event async for event in agent.astream_events({"messages": [HumanMessage("hi there")]}, T, version="v2")]
    text = "".join(event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream")
    assert text == "You said: hi there"
    end = next(event for event in events if event["event"] == "on_chat_model_end")
    assert end["data"]["output"].usage_metadata["output_tokens"] > 3


def test_a_plain_graph_finds_its_thread_by_itself(chat: LocretChatModel, saver: Any):
    class State(TypedDict):
        messages: Annotated[list, add_messages]

    graph = StateGraph(State).add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    app = graph.add_edge(START, "model").compile(checkpointer=saver)
    for text in ("one", "two"):
        state = app.invoke({"messages": [HumanMessage(text)]}, T)
    assert sources(state["messages"]) == ["new", "live"] and held(chat, "t") == rendered(state["messages"])
    assert [row.name for row in chat.shared.runtime.store.list()] == ["langchain/t"]


def test_summarised_history_goes_on_with_all_that_is_remembered(chat: LocretChatModel):
    """LangChain's summarising middleware replaces old messages; the memory still holds these."""
    summarise = SummarizationMiddleware(FakeListChatModel(responses=["They counted."]), trigger=("messages", 6),
                                        keep=("messages", 3))
    agent = create_agent(chat, tools=[], checkpointer=InMemorySaver(), middleware=[summarise])
    for number in range(6):
        state = agent.invoke({"messages": [HumanMessage(f"number {number} of them")]}, T)
        assert receipt(state["messages"][-1])["source"] == ("live" if number else "new")
    assert len(state["messages"]) < 8
    for number in range(6):
        assert f"user\nnumber {number} of them" in held(chat, "t")
    assert "They counted" not in held(chat, "t")


def test_a_restart_in_the_middle_of_a_run_goes_on(script: Script, tmp_path: Path):
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as saver:
        with model(tmp_path / "store") as chat:
            agent = create_agent(chat, tools=[add], checkpointer=saver, interrupt_before=["tools"])
            agent.invoke({"messages": [HumanMessage("add them")]}, T)
        with model(tmp_path / "store") as chat:
            agent = create_agent(chat, tools=[add], checkpointer=saver, interrupt_before=["tools"])
            state = agent.invoke(None, T)
            assert sources(state["messages"]) == ["new", "snapshot"] and state["messages"][-1].text == "Done."


async def test_a_stream_goes_into_an_agents_thread(chat: LocretChatModel):
    agent = create_agent(chat, tools=[add], checkpointer=InMemorySaver(), system_prompt="You watch.")
    await agent.ainvoke({"messages": [HumanMessage("hello")]}, T)
    stub = await chat.aingest("a line of the log\n" * 50, thread_id="t", label="log")
    state = await agent.ainvoke({"messages": [stub, HumanMessage("what is new?")]}, T)
    assert sources(state["messages"]) == ["new", "live", "live", "live"]
    assert held(chat, "t").count("a line of the log") == 50
    fresh = create_agent(chat, tools=[add], checkpointer=InMemorySaver(), system_prompt="Another prompt.")
    with pytest.warns(LateWarning, match="the system prompt of thread 't' changed"):
        state = await fresh.ainvoke({"messages": [stub, HumanMessage("what is new?")]}, T)
    assert sources(state["messages"])[0] == "snapshot" and held(chat, "t").count("a line of the log") == 50
    fresh = create_agent(chat.model_copy(update={"on_change": "reread"}), tools=[add], checkpointer=InMemorySaver(),
                         system_prompt="A third prompt.")
    with pytest.raises(StateLost):
        await fresh.ainvoke({"messages": [stub, HumanMessage("what is new?")]}, T)


def test_a_model_can_be_pickled_by_its_settings_and_over_objects_not(tmp_path: Path, script: Script):
    chat = LocretChatModel(model="bundled", store=str(tmp_path), temperature=0.5)
    twin = pickle.loads(pickle.dumps(chat))
    assert twin.shared is chat.shared and twin.temperature == 0.5
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(LocretChatModel(model="x", runtime=runtime(tmp_path)))


def test_a_fallback_model_saves_its_own_turns(chat: LocretChatModel, tmp_path: Path):
    """The middleware saves its own model's thread alone, at the end of the run."""
    seen: list[dict[str, Any]] = []
    with model(tmp_path / "other") as other:
        for each in (other, chat):
            request = types.SimpleNamespace(model=each, model_settings={},
                                            override=lambda **more: types.SimpleNamespace(**more))
            LocretMiddleware(chat).wrap_model_call(request, lambda given: seen.append(given.model_settings))
    assert seen == [{}, {"save": "run"}]


class _Said(TypedDict):
    messages: Annotated[list[BaseMessage], add_messages]


def test_append_of_a_graph_holds_for_its_own_thread_alone(chat: LocretChatModel):
    first = chat.invoke("one", thread("bob"))
    aside, asides = [HumanMessage("an aside")], []

    def node(state: _Said) -> dict[str, Any]:
        asides.extend(chat.invoke(aside, thread("b2")) for _ in range(2))
        asides.append(chat.invoke(aside, {"configurable": {"thread_id": None}}))
        asides.append(chat.bind(thread_id="b3").invoke(aside))
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(_Said).add_node("node", node).add_edge(START, "node").compile()
    last = graph.invoke({"messages": [HumanMessage("two")]}, thread("bob", append=True))["messages"][-1]
    assert receipt(last)["appended"] == 1
    assert held(chat, "bob") == rendered([HumanMessage("one"), first, HumanMessage("two"), last])
    assert not any("appended" in receipt(answer) for answer in asides)
    assert held(chat, "b2") == rendered([*aside, asides[1]])
