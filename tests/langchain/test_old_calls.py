"""Calls in a history that this model did not write: in OpenAI's old form, and such as no model should write."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, HumanMessage, ToolMessage

from langchain_locret import LocretChatModel
from langchain_locret.messages import read
from locret_stream.conversation.messages import Message
from tests.langchain.support import held, receipt, thread


def called(name: str, arguments: Any, content: str = "") -> AIMessage:
    return AIMessage(content, additional_kwargs={"function_call": {"name": name, "arguments": arguments}})


def test_the_old_form_is_a_call_and_its_result():
    assert read([HumanMessage("hi"), called("look", '{"at": "shed"}'), FunctionMessage("a hen", name="look")]) == [
        Message("user", "hi"), Message("assistant", "", calls=(("look", {"at": "shed"}, ""),)),
        Message("tool", "a hen", answers=0, name="look")]
    for nothing in ("", "null", " ", "{}", None, {}):
        assert read([called("look", nothing)])[0].calls == (("look", {}, ""),)
    assert read([called("look", "{}"), FunctionMessage("x", name="other")])[1].answers == -1
    assert read([AIMessage("x", additional_kwargs={"function_call": None})]) == [Message("assistant", "x")]


@pytest.mark.parametrize("written", ['{"at": "Ro', "[1, 2]", "Rome"])
def test_a_call_that_cannot_be_read_keeps_its_name_and_what_was_written(written: str):
    text = f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    broken = AIMessage("Well.", invalid_tool_calls=[{"name": "look", "args": written, "id": "b", "error": None}])
    said = read([broken, ToolMessage("no JSON", tool_call_id="b")])
    assert said == [Message("assistant", f"Well.\n{text}"), Message("tool", "no JSON", call_id="b")]
    assert read([called("look", written), FunctionMessage("no JSON", name="look")]) == [
        Message("assistant", text), Message("tool", "no JSON", name="look")]
    own = AIMessage("Well.", invalid_tool_calls=[{"name": None, "args": written, "id": "b", "error": None}])
    assert read([own])[0].content == f"Well.{written}", "all that this model wrote of it, at its place"


def test_such_histories_are_answered_and_noticed_when_they_change(chat: LocretChatModel):
    history: list[BaseMessage] = [HumanMessage("hi"), called("look", '{"at": "shed"}'), FunctionMessage("a hen",
                                                                                                        name="look")]
    history.append(chat.invoke(history, thread("a")))
    assert '"arguments": {"at": "shed"}' in held(chat, "a")
    more = chat.invoke([*history, HumanMessage("and?")], thread("a"))
    assert receipt(more)["source"] == "live"
    other = [history[0], called("look", '{"at": "barn"}'), *history[2:]]
    assert receipt(chat.invoke([*other, HumanMessage("and?")], thread("a")))["fed"] > receipt(more)["fed"]
    assert '"arguments": {"at": "barn"}' in held(chat, "a")
    first, second = ([history[0], called("look", f'{{"at": "{at}"}}'), HumanMessage("so?")] for at in ("shed", "barn"))
    assert chat.invoke([*first, chat.invoke(first, thread("b")), HumanMessage("and?")], thread("b"))
    chat.invoke([*second, HumanMessage("and?")], thread("b"))
    assert '"at": "barn"' in held(chat, "b") and '"at": "shed"' not in held(chat, "b")
    assert read([ChatMessage("a hen", role="developer")])[0].role == "developer"
