"""Messages that a chat template has no place for are shown in another way: nothing that was accepted is a dead end.

What is done follows from what the template shows (`text.traits`), from a message and from those ahead of it, so that
the beginning of a conversation is written in one way, whatever follows. What a template shows by itself is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from locret_stream.conversation import tool_prompt as words
from locret_stream.conversation.messages import Message
from locret_stream.text.traits import Kind, Traits

JOINT = "\n\n"  # between two texts of one turn
GREETING, GO_ON = "Hello.", "Go on."  # of a user, ahead of an answer that nobody asked for
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
Texts = list[tuple[str, int | None]]
"""Texts of one message for the template, each with the number of the message that says it; None: nobody did."""


@dataclass
class Line:
    """A message for the template.

    Attributes:
        number: of the message whose calls, ids and name it has; None for one of our own.
    """

    kind: Kind
    texts: Texts
    number: int | None = None
    reasoning: str = ""

    @property
    def role(self) -> str:
        return {"calls": "assistant", "result": "tool"}.get(self.kind, self.kind)


@dataclass
class Fitted:
    """A conversation for the template.

    Attributes:
        otherwise: by its number, in which other way a message is shown that the template has no place for.
    """

    lines: list[Line] = field(default_factory=list)
    otherwise: dict[int, str] = field(default_factory=dict)

    @property
    def last(self) -> Kind:
        return self.lines[-1].kind if self.lines else "start"

    def roles(self, said: Sequence[Message]) -> tuple[str, ...]:
        """Of the messages, as they are shown."""
        shown = {number: line.role for line in self.lines for _, number in line.texts}
        return tuple(shown.get(number, message.role) for number, message in enumerate(said))


class Fitting:
    """How messages become those that one template can show. Immutable.

    Args:
        in_words: tools are told of in a system text, so that calls and results are text, too.
        acknowledgement: what the assistant says between two turns of a user, where the two must speak in turn.
        plain: everything becomes text of a user or of the assistant, who speak in turn: the last resort.
    """

    def __init__(self, traits: Traits, *, in_words: bool, acknowledgement: str, plain: bool = False):
        self._traits, self._acknowledgement, self._plain = traits, acknowledgement, plain
        self._in_words = in_words or plain

    def fit(self, said: Sequence[Message], tool_text: str = "", apart: int | None = None) -> Fitted:
        """The messages as the template can show them.

        Args:
            tool_text: what tells of the tools, as a part of the system text.
            apart: messages from this number on are in no turn with those ahead of it.
        """
        out = Fitted()
        heads = next((at for at, message in enumerate(said) if message.role != "system"), len(said))
        heads = min(heads, apart) if apart else heads
        top = self._begin(out, said, heads, tool_text, alone=heads == len(said) or heads == apart)
        native = False  # whether the newest calls are shown as such
        for number in range(heads, len(said)):
            message = said[number]
            line, how = self._line(said, number, out.last, native)
            native = line.kind == "calls" if message.calls else native
            if how:
                out.otherwise[number] = how
            if top and line.kind == "user":
                line.texts[:0], top = [*top, (JOINT, None)], []
            before = out.lines[-1] if out.lines else None
            if (message.role == "tool" and line.kind == "user" and number != apart and before is not None
                    and before.kind == "user" and before.number is not None and said[before.number].role == "tool"
                    and not self._follows("user", "user")):
                before.texts += [("\n", None), *line.texts]
            else:
                self._add(out, line)
        return out

    def _follows(self, before: Kind, kind: Kind) -> bool:
        if self._plain:
            return (before, kind) in {("start", "user"), ("user", "assistant"), ("assistant", "user")}
        return self._traits.follows(before, kind)

    def _begin(self, out: Fitted, said: Sequence[Message], heads: int, tool_text: str, *, alone: bool) -> Texts:
        """Add the system texts that the conversation begins with; those that have to wait for the first user are
        returned."""
        texts: list[Texts] = [[(message.content, number)] for number, message in enumerate(said[:heads])]
        if tool_text:
            texts = [[(f"{said[0].content}{JOINT}{tool_text}", 0)], *texts[1:]] if texts else [[(tool_text, None)]]
        if not texts:
            return []
        following = [] if alone else said[heads:]
        place = "none" if self._plain else self._traits.system
        native = place == "turn" or (place == "first user" and any(message.role == "user" for message in following))
        if native and following and following[0].role == "assistant" and not self._follows("system", "assistant"):
            native = False
        if native:
            for each in texts:
                if out.lines and not self._follows("system", "system"):
                    out.lines[-1].texts += [(JOINT, None), *each]
                    out.otherwise |= {number: "with the system text before" for _, number in each if number is not None}
                else:
                    out.lines.append(Line("system", each))
            return []
        joined = [part for each in texts for part in ((JOINT, None), *each)][1:]
        waits = bool(following) and following[0].role == "user"
        how = "ahead of the first user's text" if waits else "as a user's text"
        out.otherwise |= {number: how for _, number in joined if number is not None}
        if waits:
            return joined
        self._add(out, Line("user", joined))
        return []

    def _line(self, said: Sequence[Message], number: int, before: Kind, native: bool) -> tuple[Line, str]:
        """A message for the template, and how it is shown otherwise; "" if it is shown as what it is.

        Args:
            before: what stands ahead of it. native: whether the newest calls are shown as such.
        """
        message = said[number]
        if message.role == "system":
            if self._follows(before, "system"):
                return Line("system", [(message.content, number)], number), ""
            return Line("user", [(message.content, number)], number), "as a user's text"
        if message.role == "tool":
            if self._shows_result(before, native):
                return Line("result", [(message.content, number)], number), ""
            return Line("user", [(words.result_text(message), number)], number), "in words"
        content, reasoning = message.content, message.reasoning
        if message.role == "assistant" and not reasoning and _THOUGHT_END in content and (
                _THOUGHT_END in self._traits.template.looked_up):  # it takes them apart, and is given them so
            reasoning, _, content = content.rpartition(_THOUGHT_END)
            reasoning = reasoning.rpartition(_THOUGHT)[2]
        if message.calls and not self._shows_calls(said, number):
            calls = [words.call_text(name, json.dumps(arguments, ensure_ascii=False))
                     for name, arguments, _ in message.calls]
            return Line("assistant", [("\n".join(filter(None, (content, *calls))), number)], number, reasoning), (
                "in words")
        kind: Kind = "calls" if message.calls else "user" if message.role == "user" else "assistant"
        return Line(kind, [(content, number)], number, reasoning), ""

    def _shows_calls(self, said: Sequence[Message], number: int) -> bool:
        """Whether the template shows the calls of an answer, and what comes behind it."""
        if self._in_words or not self._traits.calls or (len(said[number].calls) > 1 and not self._traits.several_calls):
            return False
        if number + 1 == len(said) or said[number + 1].role == "tool":
            return True
        following = said[number + 1]
        return self._follows("calls", "calls" if following.calls else following.role)  # type: ignore[arg-type]

    def _shows_result(self, before: Kind, native: bool) -> bool:
        if self._in_words:
            return False
        if before == "result" and not self._follows("result", "result"):
            return False
        return self._follows("calls", "result") if native else self._follows("assistant", "result")

    def _add(self, out: Fitted, line: Line) -> None:
        """Add a message; where it cannot stand behind the one before, with a short turn of the other one between."""
        if not self._follows(out.last, line.kind):
            other: Kind = "user" if line.kind in ("assistant", "calls") else "assistant"
            if self._follows(out.last, other) and self._follows(other, line.kind):
                text = self._acknowledgement if other == "assistant" else GO_ON if out.lines else GREETING
                out.lines.append(Line(other, [(text, None)]))
                out.otherwise |= {number: f"behind {text!r}" for _, number in line.texts
                                  if number is not None and number not in out.otherwise}
        out.lines.append(line)
