"""Every form in which LangChain gives an answer comes back as the same message."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.utils import message_chunk_to_message, trim_messages
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from transformers import LlamaConfig, LlamaForCausalLM

from langchain_locret.calls import tool_choice_of
from locret_stream import ConfigError, Runtime
from tests.langchain.support import (
    PROMPT,
    Script,
    held,
    memory,
    model,
    receipt,
    rendered,
    runtime,
    thread,
    tiny_model,
    tokenizer,
)
from tests.tiny_tokenizers import trained, wrap

THINKING = {"start_anchor": PROMPT, "fields": {
    "content": {"content_args": {"strip": False}}, "thinking": {"open": "<think>", "close": "</think>"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
                   "transform": {"type": "function", "function": "{content}"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the shed"}}\n</tool_call>'


def look(at: str) -> str:
    """Look a thing up."""
    return at


def asked(chat: Any, history: list[Any], how: str) -> AIMessage:
    if how == "invoke":
        return chat.invoke(history, thread("a"))
    whole: AIMessageChunk | None = None
    for chunk in chat.stream(history, thread("a")):
        whole = chunk if whole is None else whole + chunk
    return whole if how == "chunk" else message_chunk_to_message(whole)


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("how", ["invoke", "stream", "chunk"])
@pytest.mark.thorough(but=2)
def test_reasoning_and_calls_come_back_as_they_were(script: Script, tmp_path: Path, version: str, how: str):
    with model(tmp_path, response_template=THINKING, output_version=version) as chat:
        tools = chat.bind_tools([look])
        script.say = lambda shown: "It is there." if "tool\n" in shown[-60:] else (
            f"<think>Where was it?</think>\n\nLet me look.\n{CALL}")
        history: list[Any] = [HumanMessage("Where is the hen?")]
        history.append(asked(tools, history, how))
        assert history[-1].text == "Let me look." and history[-1].tool_calls[0]["args"] == {"at": "the shed"}
        reasoning = [block["reasoning"] for block in history[-1].content_blocks if block["type"] == "reasoning"]
        assert "".join(reasoning) == "Where was it?"
        history.append(ToolMessage("Behind the rake.", tool_call_id=history[-1].tool_calls[0]["id"]))
        history.append(asked(tools, history, how))
        assert history[-1].text == "It is there." and receipt(history[-1])["source"] == "live"
        assert "<think>Where was it?</think>" in held(chat, "a")
        chunks = list(tools.stream([*history, HumanMessage("Thanks.")], thread("a")))
        assert receipt(chunks[-1])["source"] == "live"


def test_an_invalid_call_comes_back_as_it_was(script: Script, tmp_path: Path):
    with model(tmp_path) as chat:
        tools = chat.bind_tools([look])
        script.say = lambda _: 'Well.<tool_call>\n{"name": "look", "argu'
        history: list[Any] = [HumanMessage("Where is the hen?")]
        history.append(tools.invoke(history, thread("a")))
        assert history[-1].invalid_tool_calls and not history[-1].tool_calls
        script.say = lambda _: "ok"
        more = tools.invoke([*history, HumanMessage("Again.")], thread("a"))
        assert receipt(more)["source"] == "live"


class Place(BaseModel):
    """Where a thing is."""

    at: str
    floor: int


@pytest.mark.parametrize("include_raw", [False, True])
def test_structured_output_is_a_forced_call(script: Script, tmp_path: Path, include_raw: bool):
    with model(tmp_path) as chat:
        script.say = lambda _: CALL.replace("look", "Place").replace('"the shed"', '"shed", "floor": 2')
        result = chat.with_structured_output(Place, include_raw=include_raw).invoke("Where?", thread("a"))
        assert (result["parsed"] if include_raw else result) == Place(at="shed", floor=2)


def test_langchains_own_cache_gives_an_answer_that_a_thread_can_go_on_from(script: Script, tmp_path: Path):
    with model(tmp_path, cache=InMemoryCache()) as chat:
        history: list[Any] = [HumanMessage("one")]
        first, again = (chat.invoke(history, thread("a")) for _ in range(2))
        sampled = script.sampled
        assert chat.invoke(history, thread("b")).text == first.text == again.text and script.sampled >= sampled
        more = chat.invoke([*history, again, HumanMessage("two")], thread("a"))
        assert receipt(more)["source"] in ("live", "snapshot")
        assert held(chat, "a") == rendered([*history, again, HumanMessage("two"), more])
        elsewhere = chat.invoke([*history, again, HumanMessage("three")], thread("b"))
        assert held(chat, "b") == rendered([*history, again, HumanMessage("three"), elsewhere])


def test_tokens_are_counted_as_the_template_writes_messages(script: Script, tmp_path: Path):
    from tests.langchain.support import tokenizer
    with model(tmp_path) as chat:
        messages = [HumanMessage("one two three"), AIMessage("four"), HumanMessage("five")]
        count = chat.get_num_tokens_from_messages(messages)
        assert count == len(tokenizer().encode(rendered(messages), add_special_tokens=False))
        assert chat.get_num_tokens_from_messages(messages, tools=[look]) > count + 20
        said = chat.invoke(messages, thread("a"))
        assert said.usage_metadata["input_tokens"] == count + len(
            tokenizer().encode(PROMPT, add_special_tokens=False))
        assert chat.get_num_tokens("<|im_end|>") > 1


def test_a_chat_template_of_ones_own_is_the_one_by_which_replies_are_read(script: Script, tmp_path: Path):
    """The tokenizer's response template has no calls; the given one has."""
    known = copy.deepcopy(tokenizer())
    shown, known.chat_template = known.chat_template, "{% for message in messages %}{{ message.content }}{% endfor %}"
    own = Runtime(tiny_model(), known, store=tmp_path, template=shown, policy="streaming_llm", budget=512,
                  chunk_size=64)
    with model(None, on=own) as chat:
        called = chat.bind_tools([look], tool_choice="look").invoke("Where is the hen?", thread("a"))
        assert called.tool_calls[0]["name"] == "look" and not called.text


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_token_is_one_event(script: Script, tmp_path: Path, how: str):
    script.say = lambda _: f"<think>Where was it, then?</think>\n\nLet me look behind the rake.\n{CALL}"
    with model(tmp_path, response_template=THINKING) as chat:
        asked = [HumanMessage("Where is the hen?")]
        chunks = (await asyncio.to_thread(lambda: list(chat.stream(asked, thread("a"))))) if how == "sync" else [
            chunk async for chunk in chat.astream(asked, thread("a"))]
        told = [chunk for chunk in chunks if chunk.text or chunk.additional_kwargs or chunk.tool_call_chunks]
        assert len("".join(chunk.text for chunk in told)) > 20
        assert len(told) <= script.sampled
        ids = tokenizer().encode("Let me look behind the rake.", add_special_tokens=False)
        assert len([chunk for chunk in told if chunk.text]) <= len(ids) + 1


STRICT = """{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""


def test_histories_can_be_trimmed_by_a_template_whose_roles_alternate(script: Script, tmp_path: Path):
    """`trim_messages` counts parts of a history, from its end."""
    history = [HumanMessage("one " * 20), AIMessage("two " * 20), HumanMessage("three " * 20), AIMessage("four " * 20)]
    with model(None, on=runtime(tmp_path, template=STRICT)) as chat:
        whole = chat.get_num_tokens_from_messages(history)
        parts = [chat.get_num_tokens_from_messages([one]) for one in history]
        assert abs(sum(parts) - whole) <= 4 and min(parts) > 20
        for count in (1, 2, 3, 4):
            kept = trim_messages(history, max_tokens=sum(parts[-count:]), strategy="last", token_counter=chat)
            assert kept == history[-count:]


def test_one_stop_string_is_one(script: Script, tmp_path: Path):
    script.say = lambda shown: "No DNA at the END of it"
    with model(tmp_path) as chat:
        assert chat.invoke("hello", stop="END").text == "No DNA at the "  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["look", {"type": "function", "function": {"name": "look"}}, {"name": "look"}])
def test_a_tool_may_be_named_in_each_form_that_providers_know(choice: Any):
    tools = [convert_to_openai_tool(look), convert_to_openai_tool(asked)]
    assert tool_choice_of(choice, tools) == "look"
    with pytest.raises(ConfigError, match="expected one of the tools"):
        tool_choice_of(json.loads(json.dumps(choice).replace("look", "find")), tools)


def test_a_thread_begins_as_its_tokenizer_begins_a_text():
    """Some tokenizers write a space ahead of the first token, and none ahead of later text."""
    known = wrap(trained("metaspace"), template=(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
        "{% endif %}"))
    small = LlamaForCausalLM(LlamaConfig(vocab_size=len(known), hidden_size=16, intermediate_size=32,
                                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    with model(None, on=Runtime(small, known, policy="streaming_llm", budget=512, chunk_size=64), max_tokens=2) as chat:
        chat.invoke("hello", thread("a"))
        ids = memory(chat, "a")._session.state.history
        begin = known.encode("user: ", add_special_tokens=False)
        assert known.convert_ids_to_tokens(begin)[0].startswith("▁") and list(ids[:len(begin) - 1]) == begin[:-1]
