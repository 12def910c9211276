"""Replies in the form of each family: thoughts and calls are taken apart, however the text is cut, and nothing is lost.

The templates here have the marks of published ones, and no text of them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream import Runtime
from locret_stream.conversation.parts import Part
from locret_stream.conversation.replies import Reply, marks_among, response_template
from tests.held_tools import tool
from tests.langchain.support import Script, model, receipt, tiny_model, tokenizer

TOOLS = [tool("look", {"type": "object", "required": ["at"], "properties": {
    "at": {"type": "string"}, "n": {"type": "integer"}, "sure": {"type": "boolean"},
    "box": {"$ref": "#/$defs/box"}, "note": {"type": ["string", "null"]}},
    "$defs": {"box": {"type": "object", "properties": {"x": {"type": "number"}}}}}), tool("wait", {"type": "object"})]
PROMPT = "<|turn|>model\n"
AT, NONE = '{"at": "the <b>shed</b> 🙂"}', "{}"


@dataclass(frozen=True)
class Form:
    """How a model calls `look` and then `wait`: the marks that its template shows, one call, and two in one reply."""

    shown: str
    one: str
    two: str
    ids: tuple[str, ...] = ()


def tagged(opening: str, closing: str, shown: str = "") -> Form:
    look, wait = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in (("look", AT), ("wait", NONE)))
    one = f"{opening}{look}{closing}"
    return Form(shown or opening.strip(), one, f"{one}\n{opening}{wait}{closing}")


def listed(opening: str, closing: str, shown: str = "", name: str = "name", arguments: str = "arguments") -> Form:
    look, wait = (f'{{"{name}": "{called}", "{arguments}": {given}}}' for called, given in (
        ("look", AT), ("wait", NONE)))
    return Form(shown or opening.strip(), f"{opening}[{look}]{closing}", f"{opening}[{look}, {wait}]{closing}")


TEXT = "the <b>shed</b> 🙂"
FUNCTION = f"<function=look>\n<parameter=at>\n{TEXT}\n</parameter>\n</function>"
INVOKED = f'<invoke name="look">\n<parameter name="at">{TEXT}</parameter>\n</invoke>\n'
KIMI = '<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>'
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
AHEAD = " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
MARKED = {
    "json": tagged("<tool_call>\n", "\n</tool_call>"), "json list": listed("<tool_calls>", "</tool_calls>"),
    "json of small letters": tagged("<toolcall> ", " </toolcall>", shown="<tool> "),
    "json of capitals": listed("<TOOLCALL>", "</TOOLCALL>"), "bars": listed("<|tool_call|>", "<|/tool_call|>"),
    "action": listed("<|START_ACTION|>", "<|END_ACTION|>", "", "tool_name", "parameters"),
    "tags": Form("<tool_call>", f"<tool_call>\n{FUNCTION}\n</tool_call>", f"<tool_call>\n{FUNCTION}\n</tool_call>\n"
                 "<tool_call>\n<function=wait>\n</function>\n</tool_call>"),
    "tags alone": Form("<function=", FUNCTION, f"{FUNCTION}\n<function=wait>\n</function>"),
    "json in tags": Form("<function=", f"<function=look>{AT}</function>",
                         f"<function=look>{AT}</function><function=wait>{{}}</function>"),
    "keys": Form("<tool_call>", f"<tool_call>look<arg_key>at</arg_key><arg_value>{TEXT}</arg_value></tool_call>",
                 f"<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{TEXT}</arg_value>\n</tool_call>"
                 "<tool_call>wait</tool_call>"),
    "invocations": Form("<minimax:tool_call>", f"<minimax:tool_call>\n{INVOKED}</minimax:tool_call>",
                        f'<minimax:tool_call>\n{INVOKED}<invoke name="wait">\n</invoke>\n</minimax:tool_call>'),
    "python": Form("<|tool_call_start|>", f'<|tool_call_start|>[look(at="{TEXT}")]<|tool_call_end|>',
                   f'<|tool_call_start|>[look(at="{TEXT}"), wait()]<|tool_call_end|>'),
    "python in a fence": Form(
        "<|tool_call_start|>", f'<|tool_call_start|>\n```python\nlook(at="{TEXT}")\n```\n<|tool_call_end|>',
        f'<|tool_call_start|>\n```python\nlook(at="{TEXT}")\nwait()\n```\n<|tool_call_end|>'),
    "section": Form("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>" + KIMI.format("look", 0, AT)
                    + "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>" + KIMI.format("look", 3, AT)
                    + KIMI.format("wait", 4, NONE) + "<|tool_calls_section_end|>",
                    ("functions.look:3", "functions.wait:4")),
    "separated": Form(CALLS_BEGIN, CALLS_BEGIN + DEEPSEEK.format("look", AT) + CALLS_END,
                      CALLS_BEGIN + DEEPSEEK.format("look", AT) + "\n" + DEEPSEEK.format("wait", NONE) + CALLS_END),
    "separated without fences": Form(
        CALLS_BEGIN, CALLS_BEGIN + DEEPSEEK31.format("look", AT) + CALLS_END,
        CALLS_BEGIN + DEEPSEEK31.format("look", AT) + DEEPSEEK31.format("wait", NONE) + CALLS_END),
    "colon": Form("<|tool_call>", f'<|tool_call>call:look{{at:<|"|>{TEXT}<|"|>}}<tool_call|>',
                  f'<|tool_call>call:look{{at:<|"|>{TEXT}<|"|>}}<tool_call|><|tool_call>call:wait{{}}<tool_call|>'),
    "channels": Form("<|channel|><|message|>", HARMONY.format("look", AT),
                     HARMONY.format("look", AT) + "<|start|>assistant" + HARMONY.format("wait", NONE)),
    "recipient ahead": Form("<|channel|><|message|>", AHEAD.format("look", AT),
                            AHEAD.format("look", AT) + "<|start|>assistant" + AHEAD.format("wait", NONE)),
    "lines of python": Form("<function_calls>", f'<function_calls>\nlook(at="{TEXT}")\n</function_calls>',
                            f'<function_calls>\nlook(at="{TEXT}")\nwait()\n</function_calls>'),
    "plugin": tagged("<|action_start|><|plugin|>\n", "<|action_end|>"),
    "fenced action": listed("Action: ```json\n", "\n```", "Action: ```json", "tool_name", "parameters"),
    "fenced action, told": listed("Action: ```json\n", "\n```", r"Write \'Action:\' and", "tool_name", "parameters"),
    "python marks": Form("<|python_start|>", f'<|python_start|>[look(at="{TEXT}")]<|python_end|>',
                         f'<|python_start|>[look(at="{TEXT}"), wait()]<|python_end|>'),
}
TO_THE_END = {  # nothing closes these but the end of a reply
    "list": listed("[TOOL_CALLS] ", ""), "bars": listed("<|tool_call|>", ""),
    "functools": listed(" functools", "", "functools["),
    "names": Form("[TOOL_CALLS]", f"[TOOL_CALLS]look[ARGS]{AT}",
                  f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{AT}[TOOL_CALLS]wait[ARGS]{{}}"),
    "python tag": Form("<|python_tag|>", f'<|python_tag|>{{"name": "look", "parameters": {AT}}}',
                       f'<|python_tag|>{{"name": "look", "parameters": {AT}}}; {{"name": "wait", "parameters": {{}}}}'),
}
ALONE = {  # the whole of a reply, which no mark tells
    "json": Form("", f'{{"name": "look", "parameters": {AT}}}',
                 f'{{"name": "look", "parameters": {AT}}}; {{"name": "wait", "parameters": {{}}}}'),
    "typed": Form("", f'{{"type": "function", "function": {{"name": "look", "parameters": {AT}}}}}',
                  f'[{{"type": "function", "name": "look", "parameters": {AT}}}, '
                  '{"name": "wait", "arguments": "{}"}]'),
    "list": listed("", ""), "fence": listed("```\n", "\n```"), "named fence": listed("```json\n", "\n```"),
    "python": Form("", f'[look(at="{TEXT}")]', f'[look(at="{TEXT}"), wait()]'),
}
ALL = {f"marked: {name}": form for name, form in MARKED.items()} | {
    f"to the end: {name}": form for name, form in TO_THE_END.items()} | {
    f"alone: {name}": form for name, form in ALONE.items()}
THOUGHTS = {
    "think": ("<think>\n", "\n</think>\n\n"), "seed": ("<seed:think>", "</seed:think>"),
    "brackets": ("[THINK]", "[/THINK]"), "thought": ("<thought>\n", "\n</thought>\n"),
    "reasoning": ("<reasoning>", "</reasoning>"), "start": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "thought start": ("<|thought_start|>\n", "\n<|thought_end|>\n"),
    "sentence": ("Here is my thought process: ", "\n\nHere is my response: "),
    "channel": ("<|channel>thought\n", "<channel|>"),
    "analysis": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}


def template_of(shown: str, prompt: str = PROMPT, special: Sequence[str] = ()) -> dict[str, Any]:
    class Known:
        chat_template = shown
        added_tokens_decoder = dict(enumerate(special))

    return response_template(Known, None, prompt)


def read(text: str, shown: str, *, cuts: Sequence[int] = (), prompt: str = PROMPT, tools: Sequence[dict] = TOOLS,
         stops: Sequence[str] = (), special: Sequence[str] = ()) -> tuple[Part, Reply]:
    """All parts as one, and the reply, whose message says the same."""
    reply, at, parts = Reply(template_of(shown, prompt, special), prompt, tools, stops), 0, list[Part]()
    for cut in (*sorted(cut for cut in cuts if cut < len(text)), len(text)):
        parts += reply.feed(text[at:cut])
        at = cut
    parts += reply.finish()
    whole = Part("".join(part.text for part in parts), "".join(part.reasoning for part in parts),
                 tuple(call for part in parts for call in part.calls))
    assert [call.index for call in whole.calls] == [*range(len(whole.calls))]
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    message = reply.message
    assert message.content == whole.text + "".join(call.arguments for call in whole.calls if call.name is None)
    assert message.reasoning == whole.reasoning
    return whole, reply


def called(part: Part) -> list[tuple[str, dict[str, Any]]]:
    assert all(call.name is not None for call in part.calls), part
    return [(call.name or "", json.loads(call.arguments)) for call in part.calls]


BOTH = [("look", {"at": TEXT}), ("wait", {})]


@pytest.mark.parametrize("name", ALL)
def test_a_call_of_each_form_is_read_with_text_around_it(name: str):
    form = ALL[name]
    whole, _ = read(form.one, form.shown)
    assert called(whole) == BOTH[:1] and not whole.text
    two, _ = read(form.two, form.shown)
    assert called(two) == BOTH and not two.text
    if form.ids:
        assert tuple(call.id for call in two.calls) == form.ids
    if name.startswith("marked"):
        around, _ = read(f"Let me look.\n{form.one}\nDone.", form.shown)
        assert called(around) == BOTH[:1] and around.text.split() == ["Let", "me", "look.", "Done."]
    if name.startswith("to the end"):
        ahead, _ = read(f"Let me look.\n{form.two}", form.shown)
        assert called(ahead) == BOTH and ahead.text.strip() == "Let me look."


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, 300)))
@pytest.mark.thorough(but=12)
def test_however_the_text_is_cut_the_parts_are_the_same(name: str, cuts: list[int]):
    form = ALL[name]
    for thought in ("", "<think>Where?</think>\n\n"):
        text = thought + form.two
        every, reply = read(text, form.shown + "<think>", cuts=range(len(text)))
        some, other = read(text, form.shown + "<think>", cuts=cuts)
        assert (some.text, some.reasoning, called(some)) == (every.text, every.reasoning, called(every))
        assert called(every) == BOTH and every.reasoning == ("Where?" if thought else "")
        assert other.message.digest == reply.message.digest


LOOK, WAIT = (f'{{"name": "{name}", "parameters": {given}}}' for name, given in (("look", AT), ("wait", NONE)))


@pytest.mark.parametrize("text", ["", "Let me look.", "Sure.", "Okay", "print(x) is it", "{braces} are"])
def test_calls_behind_marks_that_hold_what_the_answer_says(text: str):
    """As Llama 4's template writes them."""
    for cuts in ((), range(400)):
        found, _ = read(f"<|python_start|>{text}<|python_end|>{LOOK}{WAIT}", "<|python_start|>", cuts=cuts)
        assert called(found) == BOTH and found.text == text
    broken, _ = read("<|python_start|>[look(at=]<|python_end|>", "<|python_start|>")
    assert [call.arguments for call in broken.calls] == ["<|python_start|>[look(at=]<|python_end|>"]


@pytest.mark.parametrize("white", [" ", "  \n ", "\n"])
def test_white_space_around_calls_is_no_content(white: str):
    one = f'<tool_call>{{"name": "look", "arguments": {AT}}}</tool_call>'
    for text in (white + one, one + white, white + one + white + one + white):
        for cuts in ((), range(len(text))):
            found, _ = read(text, "<tool_call>", cuts=cuts)
            assert called(found)[0] == BOTH[0] and not found.text
    assert read(f" {AT} ", "<tool_call>")[0].text == f" {AT} "  # without calls it is the answer's
    assert read(" ", "<tool_call>")[0].text == " "


RECIPIENTS, TO = "<|from|><|recipient|><|content|>", "<|from|>assistant\n<|recipient|>"


@pytest.mark.parametrize(("written", "text", "calls"), [
    ("all\n<|content|>Yes.", "Yes.", 0), (f"look\n<|content|>{AT}", "", 1),
    (f"all\n<|content|>So.\n{TO}look\n<|content|>{AT}\n{TO}wait\n<|content|>{{}}", "So.", 2),
    (f'all\n<|content|><tool_call>{{"name": "look", "arguments": {AT}}}</tool_call>', "", 1), ("Yes.", "Yes.", 0)])
def test_of_what_the_prompt_wrote_of_a_reply_nothing_is_shown(written: str, text: str, calls: int):
    """As functionary, whose prompt begins the header of a reply."""
    for cuts in ((), range(len(written))):
        found, _ = read(written, RECIPIENTS + "<tool_call>", prompt=TO, cuts=cuts)
        assert (found.text, called(found)) == (text, BOTH[:calls])


@pytest.mark.parametrize(("shown", "prompt", "text", "said"), [
    ("<think>", f"{PROMPT}<think>\n", f'Hm.</think><tool_call>{LOOK}</tool_call><think>\nis a mark.', "is a mark."),
    ("<|START_RESPONSE|><|START_ACTION|>", f"{PROMPT}<|START_RESPONSE|>",
     "<|START_ACTION|><|END_ACTION|><|START_RESPONSE|>a b", "a b")])
def test_of_what_the_model_wrote_nothing_is_taken_for_the_prompts(shown: str, prompt: str, text: str, said: str):
    found = [read(text, shown, prompt=prompt, cuts=cuts)[0] for cuts in ((), range(len(text)), range(0, len(text), 7))]
    assert len({(each.text, each.reasoning) for each in found}) == 1 and found[0].text.endswith(said)


def letters(text: str) -> str:
    """A text without white space and marks."""
    return re.sub(r"<\|start\|>assistant|<[|｜/]?[^<>]*>|\[/?[A-Z_]+\]|```\w*|\s|functools|Action:", "", text)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.thorough(but=12)
def test_cut_off_anywhere_nothing_is_lost_and_nothing_is_completed(name: str):
    """A call is one when it is whole; before that what was written of it is text."""
    form = ALL[name]
    text = f"{form.two} " if name.startswith("alone") else f"So.\n{form.two}"
    for end in range(len(text) + 1):
        written = text[:end]
        part, reply = read(written, form.shown)
        calls = [call for call in part.calls if call.name is not None]
        assert [call.name for call in calls] == ["look", "wait"][:len(calls)]
        assert all(json.loads(call.arguments) in ({"at": TEXT}, {}) for call in calls)
        if not calls:
            assert "".join(reply.message.content.split()).startswith("".join(written.split())[:3])
            assert letters(reply.message.content) == letters(written)
        elif len(calls) == 1 and form.two.startswith(form.one) and form.one in written:
            assert letters(reply.message.content) == letters(written.replace(form.one, "", 1))


BITS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=at>",
        "</parameter>", "\n", " ", "x", "<", "{", '{"name": "look", "arguments": {"at": "y"}}', "[", "]", "<|channel|>",
        "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.look", "commentary", "json",
        "[TOOL_CALLS]", "[ARGS]", "look", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "END", "EN",
        "Here is my thought process:", "Here is my response:", "```", "```json\n", "functools", "Action: ", '{"na', "(",
        '(at="x")', "<|tool_call|>", "<response>", "</response>"]
SHOWN = ["<think><tool_call><function=<response>", "<|channel|><|message|>", "[TOOL_CALLS]", "</think>functools[",
         "<|START_THINKING|><|START_RESPONSE|>", "Here is my thought process:<|tool_call|>", "Action:```json"]


@settings(max_examples=300, deadline=None)
@given(bits=st.lists(st.sampled_from(BITS), max_size=12), cuts=st.lists(st.integers(0, 80), max_size=4),
       shown=st.sampled_from(SHOWN), tail=st.sampled_from(["", "<think>\n"]),
       stops=st.sampled_from([(), ("END",), ("\n", "x <")]))
def test_any_text_of_marks_is_read_the_same_however_it_is_cut(bits: list[str], cuts: list[int], shown: str, tail: str,
                                                              stops: Sequence[str]):
    text = "".join(bits)
    found = []
    for at in ((), range(len(text)), cuts):
        part, reply = read(text, shown, prompt=PROMPT + tail, cuts=at, stops=stops)
        found.append((part.text, part.reasoning, [(call.name, call.arguments) for call in part.calls], reply.stop_at))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", MARKED)
def test_what_stands_between_the_marks_and_is_no_call_stays_text(name: str):
    form = MARKED[name]
    broken = form.one.replace('"at"', '"at').replace("at=", "=").replace("=at>", "=at").replace(
        '="at"', '=at').replace("<arg_key>at", "<arg_key").replace('at:<|"|>', ":")
    assert broken != form.one
    part, reply = read(f"So.{broken}Done.", form.shown)
    assert not [call for call in part.calls if call.name is not None]
    assert letters(reply.message.content.replace("Done.", "")) == letters(f"So.{broken}")
    assert "Done." in reply.message.content


@pytest.mark.parametrize("text", [
    '{"name": "Bob", "parameters": {"at": "x"}}', '{"name": "look", "parameters": {"at": "x"}} is how it is called',
    'See {"name": "look", "parameters": {}}', '[{"name": "look"}]', '{"name": "look", "parameters": [1]}', "[]", "[1]",
    '{"a": {"name": "look", "parameters": {}}}', "[link](to look)", "[look(at=x)]", "[look('x')]", "[open()]",
    '```python\nlook(at="x")\n```', '{"name": "look", "parameters": {"at": NaN}}', '[look(at="x")', '{"name": "look"'])
def test_json_and_python_are_calls_only_if_they_are_the_whole_reply_and_name_a_tool(text: str):
    part, _ = read(text, "")
    assert not part.calls and part.text == text
    part, _ = read('{"name": "look", "parameters": {"at": "x"}}', "", tools=())
    assert not part.calls and part.text


def test_values_between_marks_are_what_the_tool_takes_and_texts_stay_texts():
    def one(key: str, value: str) -> Any:
        text = f"<function=look>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
        return called(read(text, "<function=")[0])[0][1][key]

    for value in ("null", "None", "3", "true", '"x"', '{"a": 1}', "", "two\n\nlines", " edge "):
        assert one("at", value) == value and one("note", value) == value and one("unknown", value) == value
    assert one("n", "3") == 3 and one("n", "3.0") == 3 and one("n", "three") == "three" and one("n", "3.5") == "3.5"
    assert one("sure", "True") is True and one("sure", "false") is False and one("sure", "1") == "1"
    assert one("box", '{"x": 1}') == {"x": 1} and one("box", "[1]") == "[1]"
    twice = "<function=look><parameter=at>a</parameter><parameter=at>b</parameter></function>"
    part, _ = read(twice, "<function=")
    assert [call.name for call in part.calls] == [None] and "a" in part.calls[0].arguments


def test_the_tool_decides_on_types_with_a_template_that_is_given_too():
    given_one = {"start_anchor": PROMPT, "fields": {"content": {}, "tool_calls": {
        "open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "xml-inline", "repeats": True,
        "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}}}
    look = tool("look", {"type": "object", "properties": {
        "at": {"type": "string"}, "note": {"type": ["string", "null"]}, "n": {"type": "integer"},
        "sure": {"type": "boolean"}, "any": {"nullable": True},
        "all": {"allOf": [{"type": "string"}], "nullable": True},
        "one": {"enum": [1, None]}, "few": {"enum": [[1], [2]]}, "size": {"type": "number"}}})
    for key, value, expected in [
            ("at", "null", "null"), ("note", "null", "null"), ("any", "null", "null"), ("all", "None", "None"),
            ("at", "true", "true"), ("note", "12", "12"), ("any", "12", "12"), ("n", "3", 3), ("n", "3_0", "3_0"),
            ("sure", "true", True), ("sure", "1", "1"), ("one", "null", None), ("one", "1", 1), ("few", "[1]", [1]),
            ("size", "1e999", "1e999"), ("unknown", "null", "null")]:
        reply = Reply(given_one, PROMPT, [look])
        parts = [*reply.feed(f"<call look><{key}>{value}</{key}></call>"), *reply.finish()]
        assert json.loads(parts[-1].calls[0].arguments) == {key: expected}, (key, value)
        part, _ = read(f"<function=look>\n<parameter={key}>\n{value}\n</parameter>\n</function>", "<function=",
                       tools=[look])
        assert called(part)[0][1] == {key: expected}, (key, value)


# -- thoughts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("by", ["template", "token"])
def test_a_thought_is_taken_apart_by_marks_that_the_template_or_a_token_shows(name: str, by: str):
    opening, closing = THOUGHTS[name]
    text = f"{opening}Because.\nSo.{closing}Answer."
    marks = [part for part in re.split(r"(?<=[>\]])", opening + closing) if part.strip()] + ["<|message|>"]
    marks = [mark.strip() for mark in marks]
    for cuts in ((), range(len(text))):
        shown, special = ("".join(marks), ()) if by == "template" else ("", marks)
        part, _ = read(text, shown, special=special, cuts=cuts)
        assert (part.reasoning, part.text.strip(), part.calls) == ("Because.\nSo.", "Answer.", ())
    cut, _ = read(f"{opening}Because.\nSo.", "".join(marks))
    assert (cut.reasoning, cut.text) == ("Because.\nSo.", "")


@pytest.mark.parametrize(("tail", "text", "reasoning", "content"), [
    ("<think>\n", "Because.\n</think>\n\nAnswer.", "Because.", "Answer."),
    ("<think>", "Because.</think>Answer.", "Because.", "Answer."), ("<think>\n", "Because.", "Because.", ""),
    ("<think>\n\n</think>\n\n", "Answer.", "", "Answer."), ("</think>", "Answer.", "", "Answer."),
    ("<think>\n\n</think>\n\n", "<think>Still.</think>Answer.", "Still.", "Answer."),
    ("", "<think>\nBecause.\n</think>\n\nAnswer.", "Because.", "Answer."), ("", "Answer.", "", "Answer."),
    ("", "The tag <think> opens, </think> closes.", "", "The tag <think> opens, </think> closes."),
    ("", "<think>One.</think><think>Two.</think>Answer.", "One.\nTwo.", "Answer.")])
@pytest.mark.parametrize("shown", ["<think></think>", "{{ '<think>' }}"])
def test_the_prompt_may_have_opened_a_thought_or_closed_one(tail: str, text: str, reasoning: str, content: str,
                                                            shown: str):
    for cuts in ((), range(len(text))):
        part, _ = read(text, shown, prompt=PROMPT + tail, cuts=cuts)
        assert (part.reasoning, part.text) == (reasoning, content)


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("Because.\n</think>\n\nAnswer.", "Because.", "Answer."), ("<think>Because.</think>Answer.", "Because.", "Answer."),
    ("Answer.", "", "Answer."), ("  <thin", "", "  <thin"), ("", "", ""), ("</think>Answer.", "", "Answer.")])
def test_a_template_that_knows_the_closing_mark_alone_may_have_thoughts_without_the_other(text: str, reasoning: str,
                                                                                         content: str):
    """So nothing is given out until it is certain what it is."""
    shown = "{{ content.split('</think>')[-1] }}"
    for cuts in ((), range(len(text))):
        part, _ = read(text, shown, cuts=cuts)
        assert (part.reasoning, part.text) == (reasoning, content)
    streamed = Reply(template_of("<think></think>"), PROMPT, [])
    assert [part.text for part in streamed.feed("An")] == ["An"], "elsewhere text comes as it is written"


@pytest.mark.parametrize(("tail", "text"), [
    ("", "<|START_RESPONSE|>Answer.<|END_RESPONSE|>"), ("<|START_RESPONSE|>", "Answer.<|END_RESPONSE|>"),
    ("<|START_RESPONSE|>", "Answer."), ("<|START_RESPONSE|>", "<|START_RESPONSE|>Answer.\n<|END_RESPONSE|>\n"),
    ("", "<|START_THINKING|>Because.<|END_THINKING|><|START_RESPONSE|>Answer.<|END_RESPONSE|>"),
    ("", "<think>Because.</think><response>Answer.</response>")])
def test_marks_around_an_answer_are_not_shown(tail: str, text: str):
    shown = "<|START_THINKING|><|START_RESPONSE|><response>"
    for cuts in ((), range(len(text))):
        part, _ = read(text, shown, prompt=PROMPT + tail, cuts=cuts)
        assert (part.text, part.reasoning) == ("Answer.", "Because." if "Because" in text else "")
        within, _ = read(text.replace("Answer.", MARKED["json"].two), shown + "<tool_call>", prompt=PROMPT + tail)
        assert called(within) == BOTH and not within.text
    elsewhere = "The tag <response> opens it, </response> ends it."
    assert read(elsewhere, shown)[0].text == elsewhere


def test_a_prompt_of_nothing_is_no_obstacle():
    """Templates without a generation prompt: what ends the user's turn is all that stands ahead of a reply, or nothing.
    """
    for prompt in ("", " [/INST]", "\n"):
        assert read("Hello\n there.", "[INST] x [/INST]", prompt=prompt)[0].text == "Hello\n there."
        part, _ = read(ALL["to the end: list"].two, "[INST][TOOL_CALLS]", prompt=prompt)
        assert called(part) == BOTH


def test_marks_that_are_special_tokens_are_kept_for_the_reader_and_no_others():
    special = ["<|START_ACTION|>", "<|im_end|>", "<|tool_call_begin|>", "[TOOL_CALLS]", "[ARGS]", ""]
    kept = marks_among(template_of("<|START_ACTION|>"), special)
    assert kept == {"<|START_ACTION|>", "<|tool_call_begin|>", "[ARGS]"}
    assert marks_among(template_of("[TOOL_CALLS]"), special) >= {"[TOOL_CALLS]", "[ARGS]"}
    assert not marks_among(template_of(""), special)


# -- stop strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(), range(200)])
@pytest.mark.parametrize(("text", "stops", "content", "reasoning"), [
    ("<think>One END.\n\nTwo.</think>\n\nAnswer END two.", ["END"], "Answer ", "One END.\n\nTwo."),
    ("<think>One.</think>\n\nAnswer one.\n\nAnswer two.", ["\n\n"], "Answer one.", "One."),
    ("<think>END</think>END", ["END"], "", "END"), ("<think>a</think>EN", ["END"], "EN", "a"),
    ("<think>a</think><<", ["<"], "", "a"), ("EEND", ["END"], "E", ""), ("ab", ["b", "ab"], "", ""),
    ("</think>x", ["</think>"], "", ""), ("Hm", ["zz", ""], "Hm", "")])
def test_stop_strings_end_the_content_and_nothing_else(text: str, stops: list[str], content: str, reasoning: str,
                                                       cuts: Sequence[int]):
    part, reply = read(text, "<think></think>", stops=stops, cuts=cuts)
    assert (part.text, part.reasoning) == (content, reasoning)
    if reply.stop_at is not None:
        assert any(text.startswith(stop, reply.stop_at) for stop in stops if stop)
        assert text[:reply.stop_at].rstrip("\n").endswith(content)
    else:
        assert part.text == text.rpartition("</think>")[2]


def test_a_stop_string_inside_a_call_does_not_cut_it():
    form = MARKED["json"]
    part, reply = read(form.two, form.shown, stops=["shed", "\n", "wait"])
    assert called(part) == BOTH and reply.stop_at is None
    part, reply = read(f"{form.one}So END.{form.one}", form.shown, stops=["shed", "END"])
    assert called(part) == BOTH[:1] and part.text == "So " and reply.stop_at == len(form.one) + 3


# -- LangChain ---------------------------------------------------------------------------------------------------------


def test_langchain_is_told_of_thoughts_and_of_limits(script: Script, tmp_path: Path):
    known = copy.deepcopy(tokenizer())
    known.chat_template += "{# <think> </think> #}"
    own = Runtime(tiny_model(), known, store=tmp_path, policy="streaming_llm", budget=512, chunk_size=64)
    one = MARKED["json"].one.replace(TEXT, "shed")
    script.say = lambda _: f"<think>\nWhere?\n</think>\n\n{one}\n{one}"
    with model(None, on=own) as chat:
        size = len(known.encode(f"<think>\nWhere?\n</think>\n\n{one}\n", add_special_tokens=False))
        bound = chat.bind_tools([TOOLS[0]])
        for most, finish, calls in ((size + 6, "length", 1), (400, "tool_calls", 2)):
            answer = bound.invoke("?", max_tokens=most)
            assert answer.response_metadata["finish_reason"] == finish and len(answer.tool_calls) == calls
            assert len(answer.invalid_tool_calls) == 2 - calls
            assert answer.additional_kwargs["reasoning_content"] == "Where?"
            assert 0 < answer.usage_metadata["output_token_details"]["reasoning"] < size
        script.say = lambda _: "<think>\nWhere?"
        assert "not closed" in receipt(bound.invoke("?"))["empty"]
        script.say = lambda _: "Fine."
        answer = bound.invoke("?")
        assert "empty" not in receipt(answer) and "output_token_details" not in answer.usage_metadata
