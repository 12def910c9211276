"""The marks by which models tell thoughts, answers and calls apart, and which of them a model knows: by the text of its
chat template and by its added tokens, never by its name.

One entry a form; what stands between the marks of a call is `call_readers`' part. All of it is said as transformers'
ResponseParser takes it: a field for each pair of marks, and in the value of a call's field the name of the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from locret_stream.constraints import CallForm
from locret_stream.conversation.call_readers import (
    Reader,
    alone,
    as_function_tags,
    as_header,
    as_json,
    as_named,
    behind_tag,
    inside,
)

TEXT = {"content": "text", "content_args": {"strip": False}}  # the field of what no mark tells apart
THINKING, ANSWER, CALLS = "thinking", "answer", "tool_calls"  # what the names of fields begin with
ALONE = f"{CALLS}:alone"
UNMARKED = f"{THINKING}:unmarked"  # not the parser's: all is kept back until the closing mark, or the end, comes

# A thought stands where a reply begins, or behind another one; elsewhere its marks are text.
_THOUGHTS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek R1 and V3.1, GLM, Kimi, SmolLM3, LFM2.5, Granite 3.3, MiniMax, and more
    ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<longcat_think>", "</longcat_think>"),  # LongCat
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
    ("<|thought_start|>", "<|thought_end|>"),  # MiniCPM3
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("Here is my thought process:", "Here is my response:"))  # Granite 3.2
# Around an answer, where a reply begins and ends; the prompt may write the first. Calls stand between them, too.
_ANSWERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Command A and R7B
    ("<|begin_of_solution|>", "<|end_of_solution|>"),  # OpenThinker, Sky-T1
    ("<response>", "</response>"))  # Granite 3.3


@dataclass(frozen=True)
class Form:
    """How calls are marked off.

    Attributes:
        name: the opening mark, unless there is a pattern. close: the closing mark; "": nothing but the end of a reply
            closes it, and text may follow the calls.
        pattern: of the opening, with a group `mark`; "": the mark alone.
        told: marks of which one in a template tells that its model writes calls so; (): the opening one.
        says: what stands between the marks and does not look like a call is text of the answer, and calls may follow.
        held: how such a call is begun and held where a template shows none.
    """

    name: str
    close: str = ""
    reader: Reader = inside
    pattern: str = ""
    told: tuple[str, ...] = ()
    says: bool = False
    held: CallForm | None = None


_PLAIN, _LIST = '", "arguments": ', '[{"name": "'
FORMS = (
    # JSON: Hermes, Qwen2.5 and 3, Granite 4, SmolLM3, and more (Granite 3.0 leaves out the closing mark). Tags of
    # functions: Qwen3-Coder and Qwen3.5. Keys and values: GLM 4.5 to 5.
    Form("<tool_call>", "</tool_call>", held=CallForm()),
    Form("<tool_calls>", "</tool_calls>", held=CallForm(f"<tool_calls>{_LIST}", _PLAIN, "}]</tool_calls>")),  # Jamba
    # Nemotron-mini, whose template shows the marks of tools alone; Nemotron Nano
    Form("<toolcall>", "</toolcall>", told=("<toolcall>", "<tool> "),
         held=CallForm('<toolcall> {"name": "', _PLAIN, "} </toolcall>")),
    Form("<TOOLCALL>", "</TOOLCALL>", held=CallForm(f"<TOOLCALL>{_LIST}", _PLAIN, "}]</TOOLCALL>")),
    Form("<function_call>", "</function_call>"),  # Granite 20B for functions
    Form("<function_calls>", "</function_calls>"),  # OLMo 3, in lines of Python
    Form("<longcat_tool_call>", "</longcat_tool_call>"),  # LongCat
    Form("<|action_start|><|plugin|>", "<|action_end|>"),  # InternLM 2 and 3
    Form("<seed:tool_call>", "</seed:tool_call>"),  # Seed-OSS
    Form("<minimax:tool_call>", "</minimax:tool_call>"),  # MiniMax M2
    Form("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),  # DeepSeek V3.2
    # Granite 3, Phi-4-mini, whose template shows the marks of tools alone
    Form("<|tool_call|>", "<|/tool_call|>", told=("<|tool_call|>", "<|/tool|>"),
         held=CallForm(f"<|tool_call|>{_LIST}", _PLAIN, "}]")),
    Form("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2, MiniCPM
    Form("<|tool_call>", "<tool_call|>"),  # Gemma 4
    Form("<|python_start|>", "<|python_end|>", says=True),  # Llama 4
    # Command A and R7B
    Form("<|START_ACTION|>", "<|END_ACTION|>", held=CallForm(
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}\n]<|END_ACTION|>")),
    Form("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", held=CallForm(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>", "raw")),  # Kimi K2
    Form("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", held=CallForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "raw")),  # DeepSeek V3, R1
    Form("[TOOL_CALLS]", reader=as_named, held=CallForm(f"[TOOL_CALLS] {_LIST}", _PLAIN, "}]")),  # Mistral
    Form("functools", reader=as_json, pattern=r"(?P<mark>\s?functools)(?=\[)", told=("functools[",)),  # Firefunction
    Form("Action:", "```", as_json, r"(?P<mark>Action:\s*```(?:json)?\s)",
         ("Action:```json", "Action: ```json", "'Action:")),  # Command R
    Form("<|python_tag|>", reader=behind_tag),  # Llama 3.x
    # Llama 3.1 with JSON in it, Qwen3-Coder where it leaves out <tool_call>
    Form("<function=", "</function>", lambda text, tools, closed: as_function_tags(
        f"<function={text}</function>", tools) if closed else None))
SAYS = {form.name for form in FORMS if form.says}
READERS: dict[str, Reader] = {form.name: form.reader for form in FORMS} | {
    "alone": alone, "header": as_header}
WITH_MARK = {"alone", "header"}  # forms whose readers need what opened a call


_NOTHING = r"(?:(?=.))"  # stands behind a mark that opens no part of its own
_OBJECT = r'\{\s*+"(?:name|type|function)"\s*+:'  # the beginning of a call in JSON
_CALL = rf"(?:```(?:json)?\s*+)?(?:\[\s*+(?:{_OBJECT}|[A-Za-z_][\w.]*+\()|{_OBJECT})"
CALL_BEGINS = re.compile(rf"\s*{_CALL}")


def fields_of(source: str, known: str, prompt: str) -> tuple[dict[str, Any], str]:
    """The fields of a model's replies, and what the prompt wrote of the reply.

    Args:
        source: the chat template. known: the same with all added tokens.
        prompt: what the template writes ahead of a reply.
    """
    thoughts = [pair for number, pair in enumerate(_THOUGHTS) if not number or any(mark in known for mark in pair)]
    answers = [pair for pair in _ANSWERS if pair[0] in known]
    calls = [form for form in FORMS if any(mark in known for mark in form.told or (form.name,))]
    ahead = [*(close for _, close in thoughts), *(mark for mark, _ in answers),
             *(form.close for form in calls if form.says)]
    start = rf"(?:\A|(?<={'|'.join(map(re.escape, ahead))}))\s*"  # of a reply, or behind a thought
    begun = opened(prompt)[0] or next(
        (mark for mark in (*(mark for mark, _ in answers), "<|recipient|>") if prompt.endswith(mark)), "")
    fields: dict[str, Any] = {"content": TEXT}
    for number, (mark, close) in enumerate(thoughts):
        end = rf"(?:{re.escape(close)}\s*)" if close.endswith(":") else close  # of a sentence with its space
        fields[f"{THINKING}:{number}"] = _field(start + re.escape(mark), end)
        # A template that knows the closing mark alone: what stands ahead of it was thought.
        if close in source and mark not in source and not begun and not prompt.rstrip().endswith(close):
            fields[UNMARKED] = {"open": mark, "close": close}
    for number, (mark, close) in enumerate(answers):
        fields[f"mark:{number}"] = _field(start + re.escape(mark), _NOTHING)
        fields[f"mark:{number} end"] = _field(re.escape(close) + r"\s*\Z", None)
    fields |= {f"{CALLS}:{form.name}": call_field(form) for form in calls}
    fields[ALONE] = _field(rf"{start}(?P<mark>{_CALL})", None, "alone")
    for header in _HEADERS:
        if all(mark in known for mark in header.told):
            fields |= header.fields
    return fields, begun


def call_field(form: Form = FORMS[0]) -> dict[str, Any]:
    """The field of calls in a form."""
    return _field(form.pattern or f"(?P<mark>{re.escape(form.name)})", form.close or None, form.name)


def known_marks(source: str, tokens: Iterable[object]) -> str:
    """What forms are found in: a chat template, and added tokens."""
    return "\0".join([source, *map(str, tokens)])


def described(source: str, tokens: Iterable[object], prompt: str) -> dict[str, Any]:
    """What is read in replies of a model with this template, by names that say what it is."""
    known = known_marks(source, tokens)
    fields, _ = fields_of(source, known, prompt)
    thoughts = [" … ".join(pair) for pair in _THOUGHTS if any(mark in known for mark in pair)]
    calls = [name.partition(":")[2] for name in fields if name.startswith(CALLS) and name != ALONE]
    return {"thoughts are read between": thoughts or [" … ".join(_THOUGHTS[0]) + ", should the model write them"],
            "calls are read after": [*calls, "no mark, where an answer is nothing but calls"],
            "channels": [name.partition(":")[2] for header in _HEADERS if all(mark in known for mark in header.told)
                         for name in header.fields]}


def held_form(known: str) -> CallForm | None:
    """How a call is begun by a model that knows these marks, where its template shows none: those of the template
    before those of tokens."""
    return next((form.held for where in (known.partition("\0")[0], known) for form in FORMS
                 if form.held is not None and any(mark in where for mark in form.told or (form.name,))), None)


def opened(prompt: str) -> tuple[str, str]:
    """The mark of a thought that the prompt opens at its end, white space included, and what closes it; ("", "")."""
    for mark, close in _THOUGHTS:
        if (begun := re.search(rf"{re.escape(mark)}\s*\Z", prompt)) is not None:
            return begun[0], close
    return "", ""


def _field(pattern: str, close: str | list[str] | None, form: str = "") -> dict[str, Any]:
    field: dict[str, Any] = {"open_pattern": pattern, "content": "text", "content_args": {"strip": False},
                             "repeats": True}
    if close is not None:
        field["close_pattern" if isinstance(close, str) and close.startswith("(?:") else "close"] = close
    if form:
        field["transform"] = {"form": form, "mark": "{mark}", "text": "{content}"}
    return field


@dataclass(frozen=True)
class _Headers:
    """Messages of an answer, each with a header that says for whom it is. told: marks, all of them in the template."""

    told: tuple[str, ...]
    fields: dict[str, Any]


_BEGUN, _TO, _JSON_FOLLOWS = r"(?:<\|start\|>assistant)?", r"\s*to=[^\s<]+", r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
_ENDS = ["<|end|>", "<|call|>", "<|return|>"]
_FROM, _NEXT = r"(?:<\|from\|>assistant\n)?", r"(?:\s*(?=<\|from\|>)|<\|stop\|>)"
_HEADERS = (
    _Headers(("<|channel|>", "<|message|>"), {  # gpt-oss: channels for thoughts, preambles and calls, and the answer
        f"{THINKING}:analysis": _field(rf"{_BEGUN}<\|channel\|>\s*analysis\s*<\|message\|>", _ENDS),
        f"{ANSWER}:final": _field(rf"{_BEGUN}<\|channel\|>\s*(?:final|commentary){_JSON_FOLLOWS}<\|message\|>", _ENDS),
        f"{CALLS}:channel": _field(
            rf"{_BEGUN}(?P<mark>(?:{_TO}\s*<\|channel\|>\s*\w+|<\|channel\|>\s*\w+{_TO}){_JSON_FOLLOWS}<\|message\|>)",
            _ENDS, "header")}),
    _Headers(("<|from|>", "<|recipient|>", "<|content|>"), {  # functionary 2
        "mark:all": _field(rf"{_FROM}<\|recipient\|>\s*all\s*\n<\|content\|>", _NOTHING),  # calls may stand behind it
        f"{CALLS}:recipient": _field(rf"{_FROM}(?P<mark><\|recipient\|>(?!\s*all\s*\n)[^\n]+\n<\|content\|>)",
                                     _NEXT, "header")}))
