"""What a model of a template writes: read off what the template shows of an answer, else by a table of forms.

A model is trained on what its template writes. So stock `apply_chat_template` shows its form: what stands behind the
generation prompt, without what closes the turn. Where the template shows no calls, or no thoughts, the marks in its
source name the form, as the model's page describes it; without tools at all calls go in the server's words. A form that
cannot be found is None, and what needs it is not asked of the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from template_lab.collection import EOS, last_mark, marks_at_start

Call = tuple[str, dict[str, Any]]
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Its plain name."}},
        "required": ["city"]}}}
ROME, OSLO = ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})
_ASKED, _ANSWER, _THOUGHT = "Zebra?", "Quagga one.", "Okapi two."
_OPENINGS = {"<think>": "</think>", "<thought>": "</thought>", "<|START_THINKING|>": "<|END_THINKING|>",
             "[THINK]": "[/THINK]"}
_REASONING = "reasoning_content", "thinking", "reasoning", "thought"


def _json(calls: Sequence[Call], arguments: str = "arguments") -> str:
    return json.dumps([{"name": name, arguments: given} for name, given in calls])


def _each(calls: Sequence[Call], pattern: str, between: str = "\n") -> str:
    return between.join(pattern.format(name=name, arguments=json.dumps(given), call=json.dumps(
        {"name": name, "arguments": given})) for name, given in calls)


def _python(calls: Sequence[Call], between: str) -> str:
    return between.join(f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in given.items())})"
                        for name, given in calls)


# The first whose mark is in the source. A template that shows calls itself needs none of them.
CALL_FORMS: tuple[tuple[str, Callable[[Sequence[Call]], str]], ...] = (
    ("<|tool_call_start|>\\n```python", lambda calls: (
        f"<|tool_call_start|>\n```python\n{_python(calls, chr(10))}\n```\n<|tool_call_end|>")),
    ("<|tool_call_argument_begin|>", lambda calls: "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)) + "<|tool_calls_section_end|>"),
    ("<|tool_call_start|>", lambda calls: f"<|tool_call_start|>[{_python(calls, ', ')}]<|tool_call_end|>"),
    ("<|tool|>", lambda calls: f"<|tool_call|>{_json(calls)}<|/tool_call|>"),
    ("<|tool_call|>", lambda calls: f"<|tool_call|>{_json(calls)}"),
    ("<|START_ACTION|>", lambda calls: "<|START_ACTION|>" + json.dumps([
        {"tool_call_id": str(at), "tool_name": name, "parameters": given} for at, (name, given) in enumerate(calls)
    ]) + "<|END_ACTION|>"),
    ("[TOOL_CALLS]", lambda calls: f"[TOOL_CALLS]{_json(calls)}"),
    ("<extra_id_1>Tool", lambda calls: _each(calls, "<toolcall> {call} </toolcall>")),
    ("<tool_calls>", lambda calls: f"<tool_calls>{_json(calls)}</tool_calls>"),
    ("functools[", lambda calls: f" functools{_json(calls)}"),
    ("Action:", lambda calls: "Action: ```json\n" + json.dumps([
        {"tool_name": name, "parameters": given} for name, given in calls]) + "\n```"),
    ("<|observation|>", lambda calls: _each(calls, "{name}\n{arguments}")),
    ("<tool_call>", lambda calls: _each(calls, "<tool_call>\n{call}\n</tool_call>")),
    ("```", lambda calls: f"```\n{_json(calls)}\n```"),
)
IN_WORDS = CALL_FORMS[-2][1]


@dataclass(frozen=True)
class Form:
    """How a model of one template writes.

    Attributes:
        closes: what it writes behind an answer; `ends`: the marks that end its replies.
        ahead: what it writes ahead of an answer without thoughts. opens: the mark of a thought that the generation
            prompt opens, "" if it opens none. thinks: the text around a thought, ahead of an answer: its two parts.
        shows_tools: whether the template does. source: where calls come from: "template", "table", "words", "".
    """

    closes: str
    ends: tuple[str, ...]
    ahead: str
    opens: str
    thinks: tuple[str, str] | None
    shows_tools: bool
    source: str
    _calls: Callable[[Sequence[Call]], str | None]

    def answer(self, text: str) -> str:
        return self.ahead + text + self.closes

    def thought(self, thought: str, text: str) -> str:
        """An answer behind a thought; only of a form that thinks."""
        assert self.thinks is not None
        return f"{self.thinks[0]}{thought}{self.thinks[1]}{text}{self.closes}"

    def calls(self, *calls: Call) -> str | None:
        """A reply that makes these calls; None if a model of this template never makes them in one answer."""
        return self._calls(calls)


class _Shown:
    """What stock `apply_chat_template` shows of an answer behind one question."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.prompt = self.render([], prompt=True) or ""
        bare = self.render([], prompt=False) or ""
        self.opens = next((mark for mark in _OPENINGS if self.prompt.rstrip().endswith(mark)), "")
        if _OPENINGS.get(self.opens, "-") in self.prompt[len(bare):]:
            self.opens = ""
        answered = self.render([{"content": _ANSWER}]) or ""
        self.head, self.closing, self.closes = "", "", EOS  # what opens and closes an answer in a history
        if _ANSWER in answered:
            start = answered[:answered.index(_ANSWER)]
            begun = next((each for each in (self.prompt, self._ahead_of_thought(), bare) if start.startswith(each)), "")
            self.head, self.closing = start[len(begun):], answered[answered.index(_ANSWER) + len(_ANSWER):]
            self.closes = marks_at_start(self.closing) or EOS

    def _ahead_of_thought(self) -> str:
        return self.prompt[:self.prompt.rindex(self.opens)] if self.opens else self.prompt

    def render(self, answers: Sequence[dict[str, Any]], *, prompt: bool = False, tools: bool = False) -> str | None:
        """None if the template refuses them."""
        said = [{"role": "user", "content": _ASKED}, *({"role": "assistant", **answer} for answer in answers)]
        for given in ([TOOL],) if tools else (None, []):  # some templates go through a list without asking for one
            try:
                return self._tokenizer.apply_chat_template(
                    said, tools=given, tokenize=False, add_generation_prompt=prompt)
            except Exception:  # a template may raise anything
                pass
        return None

    def behind_prompt(self, answer: dict[str, Any], *, tools: bool = False) -> tuple[str, str] | None:
        """(what the model writes of such an answer, the mark that ends it); None if the template shows none."""
        whole, prompt = self.render([answer], tools=tools), self.render([], prompt=True, tools=tools)
        if whole is None or prompt is None:
            return None
        if whole.startswith(prompt):
            text = whole[len(prompt):]
        elif self.opens and whole.startswith(prompt[:prompt.rindex(self.opens)]):
            text = whole[prompt.rindex(self.opens):]
            text = text.removeprefix(self.opens) if text.startswith(self.opens) else (
                f"\n{_OPENINGS[self.opens]}\n\n{text}")
        else:
            return None
        if not self.prompt or (self.head and not _marks_in(self.head)):
            text = text.removeprefix(self.head)  # a header that the template writes with the answer alone
        closing = self.closing.rstrip()
        if closing and text.rstrip().endswith(closing):
            return text.rstrip().removesuffix(closing), self.closes
        last = re.search(r"(<\|(?:call|eom_id|eot_id|im_end|end|eom|return)\|>)\s*\Z", text)
        return (text[:last.start()], last[1]) if last else (text.rstrip(), EOS)


def _marks_in(text: str) -> bool:
    """Whether a text says what kind of text follows: a thought that is closed, or a channel."""
    return any(mark in text for mark in (*_OPENINGS, *_OPENINGS.values(), "<|channel|>", "<|content|>",
                                          "<|START_RESPONSE|>"))


def why_no_chat(tokenizer: Any) -> str:
    """Why transformers itself shows no plain chat of three messages with this template; "" if it does."""
    said = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _THOUGHT}]
    try:
        shown = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        return f"{type(error).__name__}: {error}"
    return next((f"it leaves out {each['role']} messages" for each in said if each["content"] not in shown), "")


def form_of(tokenizer: Any) -> Form:
    """The form of the tokenizer's template."""
    shown, source = _Shown(tokenizer), tokenizer.chat_template
    ahead = shown.head if _marks_in(shown.head) else ""
    if shown.opens:
        ahead = ahead.removeprefix(shown.opens) if _OPENINGS[shown.opens] in ahead else (
            f"\n{_OPENINGS[shown.opens]}\n\n")
    shows_tools = ROME[0] in (shown.render([], prompt=True, tools=True) or "")
    calls, where = _calls(shown, source, shows_tools, ahead)
    one = calls([ROME])
    ends = [last_mark(text) for text in (shown.closes, one.partition("\0")[2] if one else "")]

    def written(made: Sequence[Call]) -> str | None:
        found = calls(made)
        return None if found is None else found.replace("\0", "")

    return Form(shown.closes, tuple(dict.fromkeys(filter(None, ends))), ahead, shown.opens, _thinks(shown, source),
                shows_tools, where, written)


def _thinks(shown: _Shown, source: str) -> tuple[str, str] | None:
    for key in _REASONING:
        found = shown.behind_prompt({"content": _ANSWER, key: _THOUGHT})
        if found and _THOUGHT in found[0] and _ANSWER in found[0]:
            before, _, rest = found[0].partition(_THOUGHT)
            return before, rest.partition(_ANSWER)[0]
    if shown.opens:
        return "", f"\n{_OPENINGS[shown.opens]}\n\n"
    for opening, closing in _OPENINGS.items():
        if closing in source:
            return f"{opening}\n", f"\n{closing}\n\n{'' if closing in shown.head else shown.head}"
    if "deep thinking" in source:  # a model that a sentence in the system text asks for it
        return "<think>\n", "\n</think>\n\n"
    return None


def _sound(written: str) -> bool:
    """Whether calls are written as a model was taught: marks come in pairs, and JSON is not quoted once more."""
    return '\\"' not in written and all(
        written.count(f"<{name}>") == written.count(f"</{name}>") for name in re.findall(r"</(\w+)>", written))


def _calls(shown: _Shown, source: str, shows_tools: bool, ahead: str
           ) -> tuple[Callable[[Sequence[Call]], str | None], str]:
    """Writes calls and, behind a zero byte, the mark that ends them; and where that comes from.

    Args:
        ahead: what stands ahead of an answer without thoughts.
    """
    closed = f"\n{_OPENINGS[shown.opens]}\n\n" if shown.opens else ""
    if not shows_tools:
        return lambda made: f"{ahead}{IN_WORDS(made)}\0{shown.closes}", "words"

    def by_template(made: Sequence[Call]) -> str | None:
        for as_text in (False, True):
            for content in ("", None):
                found = shown.behind_prompt({"content": content, "tool_calls": [
                    {"type": "function", "id": f"call{at:05}", "function": {
                        "name": name, "arguments": json.dumps(given) if as_text else given}}
                    for at, (name, given) in enumerate(made)]}, tools=True)
                if found and found[0].count(made[0][0]) == len(made) and all(
                        str(value) in found[0] for _, given in made for value in given.values()) and _sound(
                            shown.opens + found[0]):
                    return "\0".join(found)
        return None

    if by_template([ROME]) is not None:
        return by_template, "template"
    write = next((write for mark, write in CALL_FORMS if mark in source), None)
    if write is None:
        return lambda made: None, ""
    return lambda made: f"{closed}{write(made)}\0{shown.closes}", "table"
