"""What a chat template does with messages, found by letting it write a few dozen short conversations.

Everything that reads or writes a chat asks this description, so that a template is judged in one place. Knows no
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from locret_stream.errors import ConfigError
from locret_stream.text.template import Template

Kind = Literal["start", "system", "user", "assistant", "calls", "result"]
_AHEAD: dict[str, tuple[str, ...]] = {  # a conversation that ends with a message of each kind
    "start": (), "system": ("system",), "user": ("user",), "assistant": ("user", "assistant"),
    "calls": ("user", "calls"), "result": ("user", "calls", "result")}
_OPENED = re.compile(r"(<[^<>/]*(?:think|thought|reason)[^<>]*>|\[THINK\])\s*\Z", re.IGNORECASE)
TOOL = {"type": "function", "function": {"name": "probe", "description": "probe", "parameters": {
    "type": "object", "properties": {"probe": {"type": "string", "description": "probe"}}, "required": []}}}
_WHEN = datetime(2026, 1, 2, 3, 4, 5)


class Traits:
    """The description of a template. Each part is found when it is first asked for, and then known. Immutable.

    A message is of a *kind*: "system", "user", "assistant" (an answer of text), "calls" (an answer that calls tools),
    "result" (of a tool); "start" is ahead of the first.
    """

    def __init__(self, template: Template):
        self.template = template
        self._follows, self._ends = dict[tuple[str, str], bool](), dict[str, str]()

    # -- turns ------------------------------------------------------------------------------------------------

    @property
    def user_end(self) -> str:
        """What ends a user's turn, whoever speaks next."""
        return self.end_of("user")

    def end_of(self, kind: Kind) -> str:
        """What ends a message of this kind, whoever speaks next."""
        if kind not in self._ends:
            ends = list[str]()
            for prompt in (False, True):
                with suppress(ConfigError):  # it is not shown last
                    text, places = self._shown(_AHEAD[kind], prompt=prompt)
                    ends.append(text[places[-1][1]:] if places else text)
            for following in ("user", "assistant"):
                if self.follows(kind, following):
                    with suppress(ConfigError):  # it is shown ahead of a user
                        text, places = self._shown((*_AHEAD[kind], following))
                        ends.append(text[places[-2][1]:places[-1][0]])
            end = common(ends, self.marks) if ends else ""
            if any(len(text) > len(end) for text in ends):  # what they share may be of the next turn's beginning
                end = end.rstrip(" ")
                lines, newline, last = end.rpartition("\n")
                end = lines + newline if newline and last in self.marks else end
            self._ends[kind] = end
        return self._ends[kind]

    @cached_property
    def prompt(self) -> str:
        """The generation prompt: what stands between the end of a user's turn and the reply; "" for none."""
        return self._tail(("user",), True)[len(self.user_end):]

    @cached_property
    def opened_thought(self) -> str:
        """The mark at the end of the prompt by which a reply begins as a thought; "" without."""
        found = _OPENED.search(self.prompt)
        return found[1] if found else ""

    def follows(self, before: Kind, kind: Kind) -> bool:
        """Whether the template shows a message of this kind behind one of that kind."""
        if (before, kind) not in self._follows:
            ahead = _AHEAD[before]
            if before == kind == "result" and self.several_calls:
                ahead = ("user", "several", "result")
            self._follows[before, kind] = self._shows((*ahead, kind)) or (
                kind == "assistant" and self._shows((*ahead, kind, "user")))
        return self._follows[before, kind]

    @property
    def alternates(self) -> bool:
        """Whether a user and the assistant must speak in turn."""
        return not self.follows("user", "user")

    # -- system texts -----------------------------------------------------------------------------------------

    @cached_property
    def system(self) -> Literal["turn", "first user", "none"]:
        """Where a system text that begins a conversation stands: in a turn of its own, in the first user's, nowhere."""
        if not self._shows(("system", "user")):
            return "none"
        return "turn" if self.follows("start", "system") else "first user"

    # -- tools ------------------------------------------------------------------------------------------------

    @cached_property
    def tools(self) -> bool:
        """Whether it shows tools."""
        asked = [{"role": "user", "content": "?"}]
        try:
            return self._write(asked, [TOOL], True) != self._write(asked, (), True)
        except ConfigError:
            return False

    @cached_property
    def refuses_tools(self) -> bool:
        """Whether it takes no tools in the form that everybody gives them, or nothing at all."""
        asked = [{"role": "user", "content": "?"}]
        try:
            self._write(asked, [TOOL], True)
        except ConfigError:
            return True
        return False

    @property
    def calls(self) -> bool:
        """Whether it shows the name and the arguments of a tool call in a history."""
        return self.follows("user", "calls")

    @cached_property
    def names_by_id(self) -> bool:
        """Whether it shows of a call its id and not its name, which the id then has to tell."""
        return not self._shows(("user", "calls"), ids=False) and self._shows(("user", "calls"), ids=True)

    @cached_property
    def several_calls(self) -> bool:
        """Whether it shows two calls of one answer."""
        return self._shows(("user", "several"), ids=self.names_by_id)

    # -- thoughts ---------------------------------------------------------------------------------------------

    @cached_property
    def thoughts(self) -> Literal["kept", "of the last answer", "left out"]:
        """Which thoughts (`reasoning_content`) it shows."""
        if self._shows(("user", "thinking", "user")):
            return "kept"
        return "of the last answer" if self._shows(("user", "thinking")) else "left out"

    # -- all of it --------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """All of it, by names that say what they are, as JSON holds it."""
        template, tools = self.template, self.tools
        return {
            "generation prompt": self.prompt, "end of a user's turn": self.user_end,
            "a thought is begun by": self.opened_thought, "user and assistant must speak in turn": self.alternates,
            "the assistant may speak first": self.follows("start", "assistant"), "system text": self.system,
            "several system texts": self.follows("system", "system"),
            "a later system text": self.follows("assistant", "system"), "tools": tools, "calls": tools and self.calls,
            "several calls of one answer": tools and self.several_calls,
            "results": "as what they are" if tools and any(
                self.follows(before, "result") for before in ("calls", "assistant")) else "in words",
            "calls are named by their ids": tools and self.names_by_id, "thoughts": self.thoughts,
            "looks for in texts": list(template.looked_up),
            "date": "of the clock" if template.date_formats is None else sorted(template.date_formats),
            "options": sorted(template.variables)}

    # -- how it is tried --------------------------------------------------------------------------------------

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The tokenizer's added tokens, as text: what is compared is never cut inside of one."""
        tokenizer = self.template.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        return tuple(sorted({token.content for token in added.values()} | {
            token for token in (tokenizer.bos_token, tokenizer.eos_token) if token}))

    def _write(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        return self.template.write(messages, tools, prompt=prompt, now=_WHEN)

    def _tail(self, kinds: Sequence[str], prompt: bool) -> str:
        """What it writes behind the text of the last message; "" if it does not show that."""
        try:
            text, places = self._shown(kinds, prompt=prompt)
        except ConfigError:
            return ""
        return text[places[-1][1]:]

    def _shows(self, kinds: Sequence[str], *, ids: bool | None = None) -> bool:
        """Whether it shows all texts of these messages, in their order."""
        ids = ids if ids is not None else bool({"calls", "several"} & {*kinds}) and self.names_by_id
        for prompt in (True, False):  # some want to be asked for an answer behind a user's message, others not
            try:
                self._shown(kinds, prompt=prompt, ids=ids)
                return True
            except ConfigError:
                continue
        return False

    def _shown(self, kinds: Sequence[str], *, prompt: bool = True, ids: bool = False
               ) -> tuple[str, list[tuple[int, int]]]:
        """What it writes of short messages of these kinds, and where the text of each begins and ends. Raises
        ConfigError: it refuses them, or does not show them all in their order."""
        messages, words = [], []
        for number, kind in enumerate(kinds):
            message, said = _message(kind, number, kinds, ids)
            messages.append(message)
            words.append(said)
        tools = [TOOL] if {"calls", "several", "result"} & {*kinds} else ()
        text, places, end = self._write(messages, tools, prompt), list[tuple[int, int]](), 0
        for kind, said in zip(kinds, words, strict=True):
            begin = None
            for word in said:
                at = text.find(word, end)
                if at < 0:
                    raise ConfigError(f"the chat template does not show {kind!r} in {', '.join(kinds)}")
                begin, end = at if begin is None else begin, at + len(word)
            places.append((begin or 0, end))
        return text, places


def _message(kind: str, number: int, kinds: Sequence[str], ids: bool) -> tuple[dict[str, Any], list[str]]:
    """A short message, and its texts in the order in which a template shows them."""
    word = f"Probe{number}eborP"
    if kind in ("system", "user", "assistant"):
        return {"role": kind, "content": word}, [word]
    if kind == "thinking":
        return {"role": "assistant", "content": word, "reasoning_content": f"Why{word}"}, [f"Why{word}", word]
    if kind == "result":
        asked = max((at for at in range(number) if kinds[at] in ("calls", "several")), default=0)
        at = number - asked - 1 if kinds[asked] == "several" else 0
        return {"role": "tool", "content": word, "tool_call_id": _call_id(asked, at, ids), "name": f"name{asked}of{at}"
                }, [word]
    calls, said = [], []
    for at in range(2 if kind == "several" else 1):
        name, key, value = (f"{part}{number}of{at}" for part in ("name", "key", "value"))
        calls.append({"type": "function", "id": _call_id(number, at, ids), "function": {
            "name": name, "arguments": {key: value}}})
        said += [name, key, value]
    return {"role": "assistant", "content": "", "tool_calls": calls}, said


def _call_id(number: int, at: int, named: bool) -> str:
    return f"functions.name{number}of{at}:{at}" if named else f"call{number:03}{at:02}"


def common(texts: Iterable[str], marks: Iterable[str] = ()) -> str:
    """What all texts begin with; it does not end inside of a mark of theirs."""
    texts, marks = list(texts), list(marks)
    at = next((at for at, letters in enumerate(zip(*texts, strict=False)) if len({*letters}) > 1), min(map(len, texts)))
    while any(text.startswith(mark, at - ahead) for text in texts for mark in marks
              for ahead in range(1, min(len(mark), at + 1))):
        at -= 1
    return texts[0][:at]
