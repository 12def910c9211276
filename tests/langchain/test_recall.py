"""The text that a thread was told can be read again, word for word, even if its memory keeps none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver

from langchain_locret import LocretChatModel
from langchain_locret.middleware import LocretMiddleware
from locret_stream import ConfigError, InputError, Store, StoreError
from locret_stream.context import StreamingContext
from tests.langchain.support import Script, held, memory, model, receipt, thread

A = thread("a")
FACT = "Note that the door code of falcon is 48213.\n"
LOG = "".join(f"line {number} of the log\n" for number in range(100))


@pytest.mark.parametrize("save", ["turn", "run"])
def test_what_was_evicted_is_found_again(script: Script, tmp_path: Path, save: str):
    with model(Store(tmp_path), budget=96, save=save) as chat:
        stub = chat.ingest(LOG[:600] + FACT + LOG[600:], thread_id="a")
        chat.invoke([stub, HumanMessage("what?")], A)
        chat.invoke([SystemMessage("Harmful?"), HumanMessage("no")], A)  # on the side: not what the thread is about
        [found] = chat.recall("a", "code of Falcon", limit=1)
        assert FACT in found.text and found.share < 0.5
        [again] = chat.recall("a", start=found.start, end=found.end)
        assert again == found
        assert chat.recall("a", "heron") == [] and chat.recall("elsewhere", "falcon") == []
        for wrong in ({}, {"words": "x", "limit": 0}):
            with pytest.raises(InputError):
                chat.recall("a", **wrong)
    with model(Store(tmp_path), budget=96) as chat:  # in another process, of a thread that is not at hand
        assert FACT in chat.recall("a", "falcon")[0].text


def test_the_text_of_memory_is_what_it_holds(script: Script, tmp_path: Path):
    with model(Store(tmp_path), budget=96) as chat:
        chat.invoke([chat.ingest(LOG, thread_id="a"), HumanMessage("what?")], A)
        found = chat.memory_text("a")
        units = chat.thread_memory("a").units[0] + chat.thread_memory("a").pending
        assert sum(one.end - one.start for one in found) in (units, chat.thread_memory("a").units[0])
        assert found[0].text.startswith("<|im_start|>") and found[-1].text.endswith("<|im_end|>\n")
        assert "line 50 of" not in "".join(one.text for one in found) and "line 99" in found[-1].text
        assert found[-1].text in held(chat, "a") and memory(chat, "a") is not None
        assert chat.memory_text("elsewhere") == []


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_an_agent_recalls_its_own_thread(script: Script, tmp_path: Path, how: str):
    call = '<tool_call>\n{"name": "recall", "arguments": {"words": "falcon"}}\n</tool_call>'
    script.say = lambda shown: "Found." if "in memory]" in shown[-900:] else call
    with model(Store(tmp_path), budget=96, chunk_size=64) as chat:
        agent = create_agent(chat, tools=[chat.recall_tool()], checkpointer=InMemorySaver(),
                             middleware=[LocretMiddleware(chat)])
        stub = await chat.aingest(FACT + LOG, thread_id="a", tools=[chat.recall_tool()])
        given: Any = {"messages": [stub, HumanMessage("What is the door code?")]}
        state = await agent.ainvoke(given, A) if how == "async" else agent.invoke(given, A)
        result = state["messages"][-2]
        assert result.type == "tool" and FACT in result.content and state["messages"][-1].text == "Found."
        assert receipt(state["messages"][-1])["source"] == "live"
        assert "no thread_id" in chat.recall_tool().invoke({"words": "falcon"})


def test_the_tool_says_what_it_takes():
    tool = LocretChatModel(model="x").recall_tool()
    assert tool.name == "recall" and set(tool.args) == {"words", "start", "end"}


def test_what_has_no_log_is_not_taken_for_nothing_told(script: Script, tmp_path: Path, monkeypatch):
    with model(None) as chat:
        chat.invoke("The code is 48213.", A)
        for look in (lambda: chat.recall("a", "code"), lambda: chat.memory_text("a")):
            with pytest.raises(ConfigError, match="no store"):
                look()
    with model(Store(tmp_path)) as chat:
        async def full(ctx: StreamingContext) -> None:
            raise StoreError("injected: the disk is full")

        monkeypatch.setattr(StreamingContext, "snapshot", full)
        chat.invoke("The code is 48213.", A)
        with pytest.raises(StoreError, match="cannot be saved"):
            chat.recall("a", "code")


def test_a_call_of_the_tool_that_asks_for_nothing_does_not_end_the_run(script: Script, tmp_path: Path):
    call = '<tool_call>\n{"name": "recall", "arguments": {}}\n</tool_call>'
    script.say = lambda shown: "I see." if "neither words nor positions" in shown[-400:] else call
    with model(Store(tmp_path)) as chat:
        said = create_agent(chat, tools=[chat.recall_tool()]).invoke({"messages": [HumanMessage("hello")]}, A)
        assert said["messages"][-1].text == "I see."
