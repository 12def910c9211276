"""Calls that are demanded: whatever the model, what comes out is a call of an allowed tool that fits its schema."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel, Field

from langchain_locret import LocretChatModel, ToolsWarning
from langchain_locret.messages import read
from locret_stream import ConfigError, Runtime
from locret_stream.constraints import CallForm
from locret_stream.conversation.call_forms import begun_call, call_form
from locret_stream.conversation.held_replies import HeldReply
from locret_stream.conversation.messages import Message
from locret_stream.conversation.render import ChatTemplate
from locret_stream.text import ChatFrame, TextCodec
from tests.context.support import expect_pure
from tests.held_tools import SCHEMAS, closed, expect_call, tool
from tests.langchain.support import (
    Script,
    held,
    memory,
    model,
    receipt,
    rendered,
    scripted,
    thread,
    tiny_model,
    tokenizer,
)
from tests.langchain.templates import TEMPLATES, TOKENS
from tests.tiny_tokenizers import trained, wrap

ALL = list(SCHEMAS)
SEEDS = 20


def asked(chat: LocretChatModel, names: list[str], choice: Any, seed: int, **config: Any) -> AIMessage:
    bound = chat.bind_tools([tool(name) for name in names], tool_choice=choice)
    return bound.bind(seed=seed, temperature=1.0).invoke(f"Go on, {seed}.", config or None)


def expect_one_call(answer: AIMessage, among: list[str]) -> None:
    [call] = answer.tool_calls
    expect_call(call["name"], call["args"], among)
    assert not answer.text and not answer.invalid_tool_calls
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert "not_held" not in receipt(answer)


@pytest.mark.parametrize(("name", "seeds"), [(name, 6) for name in ALL[:2]] + [(name, SEEDS) for name in ALL])
@pytest.mark.thorough(but=2)
def test_a_demanded_call_fits_whatever_the_model_would_say(tmp_path: Path, name: str, seeds: int):
    with model(tmp_path) as chat:
        said = set()
        for seed in range(seeds):
            answer = asked(chat, [name], name, seed)
            expect_one_call(answer, [name])
            said.add(json.dumps(answer.tool_calls[0]["args"]))
        assert len(said) > 1 or name == "no arguments"


@pytest.mark.thorough
def test_any_tool_is_one_of_them(tmp_path: Path):
    with model(tmp_path) as chat:
        called = set()
        for seed in range(SEEDS):
            answer = asked(chat, ALL, "any", seed)
            expect_one_call(answer, ALL)
            called.add(answer.tool_calls[0]["name"])
        assert len(called) > 2
        expect_one_call(asked(chat, ALL, "nested", 1), ["nested"])


def test_what_the_memory_holds_is_what_its_tokens_alone_give(tmp_path: Path):
    """And it is what was said, marks included, closed as the template closes an answer."""
    with model(tmp_path) as chat:
        for number, name in enumerate(("enums", "nested", "ünïcode 🙂")):
            answer = asked(chat, [name], name, number, **thread(name))
            shown = held(chat, name)
            said = shown.rpartition("<|im_start|>assistant\n")[2]
            assert said.startswith('<tool_call>\n{"name": "') and said.endswith("}\n</tool_call><|im_end|>\n")
            call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>\n"))
            assert call["arguments"] == answer.tool_calls[0]["args"] and call["name"] == name
            context = memory(chat, name)
            chat.shared.loop.call(lambda threads, context=context: expect_pure(context))
            history = [HumanMessage(f"Go on, {number}."), answer, HumanMessage("And?")]
            more = chat.bind_tools([tool(name)]).invoke(history, thread(name), max_tokens=4)
            assert receipt(more)["source"] == "live", "the answer is the one that the memory holds"


class Place(BaseModel):
    """Where a thing is."""

    at: str = Field(max_length=6)
    floor: int = Field(ge=-1, le=9)
    tags: list[str] = Field(max_length=0)


@pytest.mark.parametrize("how", ["invoke", "stream", "ainvoke"])
async def test_structured_output_is_always_what_was_asked_for(tmp_path: Path, how: str):
    with model(tmp_path, temperature=1.0) as chat:
        for seed in range(6):
            structured = chat.model_copy(update={"seed": seed}).with_structured_output(Place)
            if how == "invoke":
                found = structured.invoke("Where?")
            elif how == "ainvoke":
                found = await structured.ainvoke("Where?")
            else:
                found = [*structured.stream("Where?")][-1]
            assert isinstance(found, Place) and -1 <= found.floor <= 9 and len(found.at) <= 6


def test_a_call_that_is_cut_off_says_so_and_shows_what_was_written(tmp_path: Path):
    with model(tmp_path, max_tokens=3, temperature=1.0) as chat:
        bound = chat.bind_tools([tool("nested")], tool_choice="nested")
        first = bound.invoke([HumanMessage("Go on.")], thread("a"))
        assert not first.tool_calls and first.response_metadata["finish_reason"] == "length"
        [cut] = first.invalid_tool_calls
        assert cut["args"].startswith('<tool_call>\n{"name": "nested", "arguments":')
        more = bound.invoke([HumanMessage("Go on."), first, HumanMessage("And?")], thread("a"))
        assert receipt(more)["source"] == "live"


def test_a_stop_string_cuts_no_call(script: Script, tmp_path: Path):
    with model(tmp_path, stop=["shed", "\n"]) as chat:
        script.say = lambda _: '<tool_call>\n{"name": "look", "arguments": {"at": "the shed"}}\n</tool_call>'
        look = tool("look", closed(at={"type": "string"}))
        answer = chat.bind_tools([look], tool_choice="look").invoke("?", thread("a"))
        assert answer.tool_calls[0]["args"] == {"at": "the shed"}
        assert held(chat, "a") == rendered([HumanMessage("?"), answer], [look])


def test_a_script_that_does_not_fit_fails_its_test(tmp_path: Path):
    with pytest.raises(AssertionError, match="the script would say"), scripted() as script, model(tmp_path) as chat:
        script.say = lambda _: '<tool_call>\n{"name": "numbers", "arguments": {"heat": "hot"}}\n</tool_call>'
        with pytest.raises(AssertionError):
            chat.bind_tools([tool("numbers")], tool_choice="numbers").invoke("?")


# -- what is refused, and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("schema", "why"), [
    (closed(a={"not": {}}), r'Unimplemented keys: \["not"\]'), (closed(a={"type": "array", "uniqueItems": True}),
                                                                "uniqueItems"),
    (closed(a={"type": "string", "pattern": "(?=a)b"}), r"the pattern '\(\?=a\)b': look-around"),
    ({"type": "string"}, "are of type 'string'; "), (closed(a={"enum": []}), "unsatisfiable"),
    (closed(a={"minimum": float("nan")}), "NaN|nan")])
@pytest.mark.parametrize("choice", ["bad", "any"])
@pytest.mark.thorough(but=2)
def test_a_schema_that_cannot_be_held_is_refused_by_its_tools_name_and_nothing_is_read(
        script: Script, tmp_path: Path, schema: dict[str, Any], why: str, choice: str):
    with model(tmp_path) as chat:
        tools = [tool("numbers"), tool("bad", schema)]
        with pytest.raises(ConfigError, match=rf"^the arguments of the tool 'bad'.*({why}).*expected") as error:
            chat.bind_tools(tools, tool_choice=choice).invoke("?", thread("a"))
        assert str(error.value).endswith(("or tool_choice='auto'", "expected an object"))
        assert chat.thread_memory("a") is None and not script.sampled
        script.say = lambda _: '<tool_call>\n{"name": "numbers", "arguments": {"heat": 1, "count": 1, "sure": true, ' \
                               '"nothing": null}}\n</tool_call>'
        assert chat.bind_tools(tools, tool_choice="numbers").invoke("?", thread("a")).tool_calls


def test_without_the_library_one_command_is_named(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with model(tmp_path) as chat:
        with pytest.raises(ConfigError, match=r"pip install 'locret-stream\[constrained\]'"):
            chat.bind_tools([tool("enums")], tool_choice="enums").invoke("?")
        assert not script.sampled
        assert chat.bind_tools([tool("optional")]).invoke("?").tool_calls, "the model's own choice needs no grammar"


PYTHON = """{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<|tool_call_start|>[{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ ", " if not loop.first }}{{ key }}="{{ value }}"
{%- endfor %})]
{%- endfor %}{% if m.tool_calls %}<|tool_call_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TAGS = """{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KEYS = """{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""

WITHOUT_CALLS = """{% for tool in tools or [] %}{{ tool.function.name }} - call it behind <|tool_call|>
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def of_template(store: Path, template: str) -> Runtime:
    known = copy.deepcopy(tokenizer())
    known.chat_template = template
    return Runtime(tiny_model(), known, store=store, policy="streaming_llm", budget=512, chunk_size=64)


def test_a_call_that_nothing_can_hold_is_begun_and_said_to_be(script: Script, tmp_path: Path):
    """A template that writes calls as Python does: no grammar of ours holds these."""
    script.say = lambda _: '<|tool_call_start|>[look(at="shed")]<|tool_call_end|>'
    with model(None, on=of_template(tmp_path, PYTHON)) as chat:
        bound = chat.bind_tools([tool("look", closed(at={"type": "string"}))], tool_choice="look")
        with pytest.warns(ToolsWarning, match="begun for the model, and nothing held it.*as JSON"):
            answer = bound.invoke("?", thread("a"))
        assert answer.tool_calls[0]["args"] == {"at": "shed"} and "as JSON" in receipt(answer)["not_held"]
        either = [tool("look", closed(at={"type": "string"})), tool("numbers")]
        with pytest.warns(ToolsWarning, match="begun for the model"):
            answer = chat.bind_tools(either, tool_choice="any").invoke("?", thread("b"))
        assert answer.tool_calls[0]["name"] == "look" and "as JSON" in receipt(answer)["not_held"]


@pytest.mark.parametrize("template", [TAGS, KEYS], ids=["tags", "keys"])
@pytest.mark.parametrize("names", [["numbers"], ["nested"], ["references"], ["optional", "no arguments", "numbers"]])
@pytest.mark.thorough(but=2)
def test_arguments_that_stand_between_marks_are_held_one_by_one(tmp_path: Path, template: str, names: list[str]):
    """Texts as they are, everything else as JSON of its schema."""
    with model(None, on=of_template(tmp_path, template)) as chat:
        for seed in range(4):
            answer = asked(chat, names, names[0] if len(names) == 1 else "any", seed, **thread("a"))
            expect_one_call(answer, names)
            context = memory(chat, "a")
            chat.shared.loop.call(lambda threads, context=context: expect_pure(context))


@pytest.mark.parametrize("template", [TAGS, KEYS])
def test_a_held_argument_ends_at_its_mark_and_is_read_as_it_was_written(script: Script, tmp_path: Path, template: str):
    odd = 'null "x" </param <b>\n\n{1}'
    opened = ("<tool_call>\n<function=look>\n<parameter=at>\n", "\n</parameter>\n</function>\n</tool_call>") if (
        template is TAGS) else ("</think><tool_call>look<arg_key>at</arg_key><arg_value>", "</arg_value></tool_call>")
    script.say = lambda _: ("" if template is TAGS else "<think>") + opened[0] + odd + opened[1]
    with model(None, on=of_template(tmp_path, template)) as chat:
        look = tool("look", closed(at={"anyOf": [{"type": "string"}, {"type": "null"}]}))
        answer = chat.bind_tools([look], tool_choice="look").invoke("?", thread("a"))
        assert answer.tool_calls[0]["args"] == {"at": odd}
        assert held(chat, "a").endswith(opened[0] + odd + opened[1] + "<|im_end|>\n")


def test_what_a_text_between_marks_cannot_be_held_to_is_said(script: Script, tmp_path: Path):
    script.say = lambda _: ("<tool_call>\n<function=look>\n<parameter=at>\nshed\n</parameter>\n</function>\n"
                            "</tool_call>")
    with model(None, on=of_template(tmp_path, TAGS)) as chat:
        look = tool("look", closed(at={"type": "string", "pattern": "[a-z]+"}))
        with pytest.warns(ToolsWarning, match="argument 'at' is a text with 'pattern'"):
            answer = chat.bind_tools([look], tool_choice="look").invoke("?", thread("a"))
        assert answer.tool_calls[0]["args"] == {"at": "shed"}


def test_where_a_template_shows_no_calls_they_are_held_in_the_form_that_it_tells_of(tmp_path: Path):
    with model(None, on=of_template(tmp_path, WITHOUT_CALLS), temperature=1.0) as chat:
        answer = chat.bind_tools([tool("numbers")], tool_choice="numbers").bind(seed=1).invoke("?", thread("a"))
        expect_one_call(answer, ["numbers"])
        assert '<|im_start|>assistant\n<|tool_call|>[{"name": "numbers", "arguments": {' in held(chat, "a")


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_held_call_is_what_the_template_writes_and_the_reader_reads(name: str):
    reads = wrap(trained("byte_level"), template=TEMPLATES[name], marks=TOKENS)
    codec = TextCodec(reads)
    template = ChatTemplate(reads, codec, ChatFrame(codec, reads))
    tools, arguments = [tool("numbers")], {"at": "the shed", "n": [1, {"é": None}]}
    form = call_form(template, tools)
    assert form is not None and form.call_id == (template.short_id("call") if name == "mistral" else "")
    question = Message("user", "?")
    answer = Message("assistant", "", calls=(("numbers", arguments, "a1B2c3D4e"),))
    shown = template.render([question, answer], tools)
    whole = "".join(piece.text for piece in shown.pieces(0, shown.body or None))
    prompt = "".join(piece.text for piece in template.render([question], tools).pieces(0))
    after = form.after.replace(form.call_id, "a1B2c3D4e") if form.call_id else form.after
    call = form.before + form.written("numbers") + form.between + json.dumps(arguments, ensure_ascii=False) + after
    assert whole.startswith(prompt + call) and whole.removeprefix(prompt + call) in (template.closing, reads.eos_token)
    for tool_name in ("numbers", ""):
        begun = "".join(piece.text for piece in begun_call(template, form, tool_name))
        assert call.startswith(begun) and not begun.endswith(" ")
        reply = HeldReply(form, [tool(each, {}) for each in ("number", "numbers", "numbers and more")], begun)
        for letter in call[len(begun):]:
            assert not [*reply.feed(letter)]
        [part] = reply.finish()
        assert [(each.name, json.loads(each.arguments)) for each in part.calls] == [("numbers", arguments)]
        assert (part.calls[0].id == "a1B2c3D4e") == (name == "mistral")


def test_what_a_string_spells_neither_ends_a_call_nor_changes_its_type():
    """The mark of the end, half of a surrogate pair, and numbers and nulls as text."""
    form = CallForm()
    for inside, expected in (('{"a": "}\\n</tool_call>", "b": "3"}', {"a": "}\n</tool_call>", "b": "3"}),
                             ('{"a": "\\ud83d", "b": "null"}', {"a": "\ufffd", "b": "null"}),
                             ('{"a": "\\ud83d\\ude42"}', {"a": "🙂"})):
        reply = HeldReply(form, [tool("look", {})], form.before)
        assert not [*reply.feed(f'look", "arguments": {inside}}}\n</tool_call>')]
        [part] = reply.finish()
        assert json.loads(part.calls[0].arguments) == expected
        assert reply.message.calls[0][1] == expected
        said = AIMessage("", tool_calls=[{"name": "look", "args": expected, "id": "x"}])
        assert read([said])[0].digest == reply.message.digest


def test_json_beside_tools_comes_as_text_as_it_is_written():
    form, text = CallForm(), '{"name": "look", "arguments": {}}'
    reply = HeldReply(form, [tool("look", {})], "")
    parts = [part for letter in text for part in reply.feed(letter)] + [*reply.finish()]
    assert len(parts) == len(text) and "".join(part.text for part in parts) == text == reply.message.content
    assert not reply.calls
