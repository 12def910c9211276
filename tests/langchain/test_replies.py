"""A model's text becomes content, reasoning, tool calls or invalid tool calls, however it is cut into pieces."""

from __future__ import annotations

import json
import time
from functools import reduce
from operator import add

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.messages.utils import message_chunk_to_message

from langchain_locret.messages import read
from langchain_locret.replies import chunk_of
from locret_stream import ConfigError
from locret_stream.conversation.parts import Call, Part
from locret_stream.conversation.replies import Reply, marks_among, response_template
from tests.langchain.support import PROMPT, tokenizer

THINKING = {"start_anchor": PROMPT, "fields": {
    "content": {"content_args": {"strip": False}}, "thinking": {"open": "<think>", "close": "</think>"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
                   "transform": {"type": "function", "function": "{content}"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the <b>shed</b> 🙂"}}\n</tool_call>'


def parsed(text: str, *, cuts: tuple[int, ...] = (), prefix: str = PROMPT, template: dict = THINKING) -> AIMessage:
    """The message that LangChain adds up; the one that the memory is bound to reads the same."""
    reply, at, whole = Reply(template, prefix, []), 0, AIMessageChunk(content="")
    for cut in (*sorted(cuts), len(text)):
        whole = reduce(add, map(chunk_of, reply.feed(text[at:cut])), whole)
        at = max(at, cut)
    message = message_chunk_to_message(reduce(add, map(chunk_of, reply.finish()), whole))
    assert read([message])[0].digest == reply.message.digest
    return message


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 200)).map(tuple))
def test_any_cut_gives_the_same_message(cuts: tuple[int, ...]):
    text = f"<think>Where was it?</think>\n\nLet me look.\n{CALL}\n{CALL.replace('look', 'find')}"
    message = parsed(text, cuts=tuple(cut for cut in cuts if cut < len(text)))
    assert message.content == "Let me look."
    assert message.additional_kwargs["reasoning_content"] == "Where was it?"
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("look", {"at": "the <b>shed</b> 🙂"}), ("find", {"at": "the <b>shed</b> 🙂"})]
    assert len({call["id"] for call in message.tool_calls}) == 2 and not message.invalid_tool_calls


@pytest.mark.parametrize("inside", [
    '{"name": "look", "arguments": {"at": ', "junk", "", '{"name": "look"}', '{"arguments": {}}', "[]", '"look"', "17",
    '{"name": 3, "arguments": {}}', '{"name": "look", "arguments": [1]}', '{"name": "", "arguments": {}}', "null",
    '{"name": "look", "arguments": {"at": "x"}', '{"name": "look", "arguments": "not json"}'])
@pytest.mark.parametrize("closed", [True, False])
def test_a_malformed_call_is_an_invalid_one_that_says_what_was_written(inside: str, closed: bool):
    """So is one that breaks off, which a lenient parser would complete; the text after it is parsed as usual."""
    text = f"Well.<tool_call>{inside}" + (f"</tool_call>{CALL}" if closed else "")
    message = parsed(text)
    assert message.content == "Well."
    assert [call["name"] for call in message.tool_calls] == (["look"] if closed else [])
    if closed or inside:
        assert len(message.invalid_tool_calls) == 1
        assert message.invalid_tool_calls[0]["args"].startswith("<tool_call>")
        assert "".join(inside.split()) in "".join(message.invalid_tool_calls[0]["args"].split())


def test_calls_of_one_reply_are_numbered_one_by_one():
    """LangChain merges the chunks of a call by the call's number."""
    reply = Reply(THINKING, PROMPT, [])
    parts = [*reply.feed(CALL + "<tool_call>[]</tool_call>" + CALL.replace("look", "find")), *reply.finish()]
    chunks = list(map(chunk_of, parts))
    assert [call["index"] for chunk in chunks for call in chunk.tool_call_chunks] == [0, 1, 2]


def test_what_a_malformed_call_says_is_kept_as_it_was_written():
    message = parsed('<tool_call>{"name": "", "arguments": {"wörd": "🙂"}}</tool_call>')
    assert '{"wörd": "🙂"}' in message.invalid_tool_calls[0]["args"]


def test_a_call_whose_arguments_are_a_string_of_json_is_read():
    message = parsed('<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}</tool_call>')
    assert message.tool_calls[0]["args"] == {"at": 1}


@pytest.mark.parametrize("inside", ['{"name": "look", "arguments": {"at": "x\\ud83d"}}', "[" * 20_000, '{"a":' * 4000,
                                    '{"name": "look", "arguments": {"at": "' + "long " * 4000])
def test_what_cannot_be_text_or_is_too_deep_is_no_call(inside: str):
    """Half of a surrogate pair cannot be encoded when the message is read again. A long reply is parsed fast."""
    began = time.perf_counter()
    message = parsed(f"<tool_call>{inside}</tool_call>ok")
    assert time.perf_counter() - began < 8
    assert not message.tool_calls and len(message.invalid_tool_calls) == 1 and message.content == "ok"


def test_the_id_that_a_model_writes_is_kept():
    call = CALL.replace('{"name"', '{"id": "abcdefgh1", "name"')
    message = parsed(call + call)
    assert message.tool_calls[0]["id"] == "abcdefgh1" != message.tool_calls[1]["id"]
    assert parsed(CALL.replace('{"name"', '{"id": "<|im_end|>", "name"')).tool_calls[0]["id"].startswith("call_")


def test_a_call_that_the_prompt_began_is_whole():
    begun = '<tool_call>\n{"name": "look", "arguments": '
    message = parsed('{"at": "x"}}\n</tool_call>', prefix=PROMPT + begun)
    assert message.tool_calls[0]["name"] == "look" and message.tool_calls[0]["args"] == {"at": "x"}
    broken = parsed('{"at": ', prefix=PROMPT + begun)
    assert not broken.tool_calls and json.dumps("look") in broken.invalid_tool_calls[0]["args"]


def test_without_calls_everything_is_content_as_it_is():
    plain = {"start_anchor": PROMPT, "fields": {"content": {"content_args": {"strip": False}}}}
    for text in ("  two  spaces ", "a\n\nb", "<tool_call>", "</think>", "🙂"):
        assert parsed(text, template=plain).content == text.strip("\n")


def test_the_template_of_a_reply_is_the_given_one_the_tokenizers_or_what_its_chat_template_shows():
    known = tokenizer()
    assert response_template(known, THINKING, PROMPT) is THINKING
    assert "tool_calls:<tool_call>" in response_template(known, None, PROMPT)["fields"]

    class Other:
        chat_template = known.chat_template + "<seed:think>"
        response_template = THINKING

    def opened(mark: str) -> bool:
        fields = response_template(Other, None, PROMPT)["fields"].values()
        return any(mark in field.get("open_pattern", "") for field in fields)

    assert response_template(Other, None, PROMPT) is THINKING
    assert response_template(Other, None, PROMPT, "{{ messages }}") is not THINKING
    Other.response_template = None
    assert opened("<seed:think>") and opened("<tool_call>")
    Other.chat_template = "{{ messages }}"
    assert not opened("<seed:think>") and not opened("<tool_call>")
    for broken in ({}, {"fields": {}}, {"start_anchor": "x", "fields": {"content": {"content": "nonsense"}}}, [1]):
        with pytest.raises(ConfigError, match="response template cannot be used"):
            response_template(known, broken or {"fields": 3}, PROMPT)


def test_special_tokens_are_shown_only_where_they_tell_the_parts_apart():
    assert marks_among(THINKING, ["<think>", "<|im_end|>", ""]) == {"<think>"}


@pytest.mark.parametrize("written", ['{"name": "look", "parameters": {"at": "sh', ' {"name"', "{}", '"a', '"a"', "[1",
                                     "x" * 2000])
def test_a_call_that_was_cut_off_is_none_whatever_its_form(written: str):
    """LangChain completes the beginning of an object; a call of the name "" would be run."""
    message = message_chunk_to_message(chunk_of(Part(calls=(Call(None, written, "i", 0),))))
    assert not message.tool_calls and len(message.invalid_tool_calls) == 1
    assert read([HumanMessage("?"), message])[1].content == written
