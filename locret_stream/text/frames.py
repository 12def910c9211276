"""The tokens that a chat template writes around the contents of messages. Knows templates and turns, and no contents.

The template is rendered with probes as contents; the text before, between and after them are its *literals*. In these
added tokens are recognised, contents are encoded as data, and both are joined as ids: no content becomes control.

A frame is right for contents that the template copies unchanged. Templates that trim white space around a content are
accepted, and the content stays as it was fed. Templates whose literals depend on the contents, or on the turns that
follow, are refused.

The templates themselves have two limits. Data can imitate marks that are ordinary text to the tokenizer (`[INST]` of
the first Mistral models), as no control token keeps them apart. And a literal that ends in a space (`[INST] `) keeps
it as a token of its own, which in a whole text belongs to the next word.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.text.codec import TextCodec
from locret_stream.text.dated import now
from locret_stream.text.earlier import WrittenTemplate
from locret_stream.text.held_options import held_options
from locret_stream.text.template import Template
from locret_stream.text.traits import Traits, common

ACKNOWLEDGEMENT = "OK."  # of what was told and is not to be answered
SEPARATOR = "\n\n"  # before a question in a turn that has content, and after a system text in the first user's turn


class FrameState(msgspec.Struct, frozen=True):
    """The place in a conversation; part of a context's state.

    Args:
        turn: whose turn is open. "none": no turn began yet (`first`), or a reply was closed.
        has_content: whether the open turn has any content.
        first: whether no reply was closed yet.
    """

    turn: Literal["none", "user", "assistant"] = "none"
    has_content: bool = False
    first: bool = True

    def with_content(self) -> FrameState:
        """The same turn with content."""
        return msgspec.structs.replace(self, has_content=True)


class ChatFrame:
    """The template's transitions: each takes a state and returns (ids to append, next state). Immutable.

    The order is begin, [content], (question_separator, [question]), close_user_and_prompt, [reply], close_reply,
    open_user, [content], and so on. A step that was done already returns no ids.

    Args:
        codec: of the tokenizer that has the template.
        template: "auto" (the tokenizer's, or raw if it has none), "raw" (no ids at all), or a Jinja template.
        eos: the model's end markers (`generation_config.eos_token_id`).
        acknowledge: the reply that closes a user turn with content before a question, which then has a turn of its own;
            None: the question follows in the same turn, behind a blank line.
        options: variables of the template.

    Raises:
        ConfigError: not a template, or one whose literals cannot be separated from contents.

    Attributes:
        raw: whether the frame has no literals. template: the Jinja template given, None: the tokenizer's own.
        acknowledgement: what the assistant says between two turns of a user, where it has to say something.
        eos_ids: ids that end a reply: the model's, the tokenizer's, and the token by which the template closes replies.
        system_style: "turn" (the template has a place for a system text), "merged" (it has none, so that the text and a
            blank line precede the first user's content), or "raw".
    """

    def __init__(self, codec: TextCodec, tokenizer: Any, *, template: str = "auto",
                 eos: int | Iterable[int] | None = None, acknowledge: str | None = None,
                 options: Mapping[str, Any] | None = None):
        self._codec, self._tokenizer = codec, tokenizer
        self.acknowledgement, self.options = acknowledge or ACKNOWLEDGEMENT, dict(options or {})
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        self.raw = template == "raw" or (template == "auto" and not tokenizer.chat_template)
        self.system_style: Literal["turn", "merged", "raw"] = "raw"
        self.template: str | None = None
        self._now = now()
        self._begin = self._open = self._prompt = self._close = tuple[int, ...]()
        self._separator = self._before_question = tuple[int, ...]()
        self._system: tuple[tuple[int, ...], ...] = ()  # the literals before and after a system text
        if self.raw and self.options:
            raise ConfigError(f"found options of the chat template ({', '.join(self.options)}), and there is no chat "
                              "template; expected none, or a template that has them")
        if not self.raw:
            if template != "auto" and "{{" not in template and "{%" not in template:
                raise ConfigError(f"template is {template!r}; expected 'auto', 'raw' or a Jinja template")
            self.template = None if template == "auto" else template
            self._written_by = Template(tokenizer, self.template, self.options)
            self._derive(acknowledge)
        self._acknowledge = acknowledge
        self._ends = frozenset(ends if codec.eos_id is None else {*ends, codec.eos_id})
        if self._first_mark is not None:
            ends.add(self._first_mark)
        if codec.eos_id is not None:
            ends.add(codec.eos_id)
        self.eos_ids = frozenset(ends)

    @property
    def settings(self) -> str:
        """What a frame is made by, as JSON, which identifies it: the template and what it reads of its tokenizer, the
        acknowledgement, and the ids that end a reply. Nothing of it is rendered, so it is the same on every day; what
        a template writes of the date is in the memory as it was read."""
        made_by: dict[str, Any] = {"ends": sorted(self._ends)}
        if not self.raw:
            template = self.template or self._tokenizer.chat_template
            source = str(sorted(template.items())) if isinstance(template, Mapping) else str(template)
            # Only those that the template can read: whoever sets a padding token changes no template.
            marks = {name: str(mark) for name, mark in self._tokenizer.special_tokens_map.items() if name in source}
            made_by |= {"template": source, "marks": marks, "acknowledge": self._acknowledge}
            if self.held_options:  # else a store made without any opens
                made_by["options"] = self.held_options
        return json.dumps(made_by, sort_keys=True)  # it can hold lone surrogates

    @functools.cached_property
    def held_options(self) -> dict[str, Any]:
        """Of the options those that change more than the generation prompt."""
        return {} if self.raw else held_options(self._tokenizer, self.template, self.options)

    def written(self, digest: Callable[[str], str]) -> WrittenTemplate:
        """The template as libraries told it from others that took what it writes for its identity."""
        return WrittenTemplate(self._codec, self._tokenizer, template=self.template, raw=self.raw,
                               acknowledge=self._acknowledge, ends=self._ends, digest=digest)

    @property
    def literal_runs(self) -> tuple[tuple[int, ...], ...]:
        """The literals, each as ids; the acknowledgement is none of them."""
        return (self._begin, *self._system, self._prompt, self._close, self._open)

    @functools.cached_property
    def runs_at_other_times(self) -> list[tuple[tuple[int, ...], ...]]:
        """`literal_runs` as they are on other days, of a template that writes the date; else []."""
        return self.written(str).runs_at_other_times()

    def begin(self, system: str | None = None, *, trusted: bool = False) -> tuple[list[int], FrameState]:
        """The beginning of a sequence, the system text as data, and the start of the first user turn.

        Raises:
            InvalidText: `system` is not text.
            ConfigError: a system text in a raw frame, which has no place for it.
        """
        state = FrameState(turn="user")
        if self.raw:
            if system is not None:
                raise ConfigError(f"found a system text of {len(system)} characters in a raw frame; expected none: "
                                  "feed it, or give a template")
            return [], state
        begin, around = self._beginnings()
        if system is None or (self.system_style == "merged" and not system):
            return list(begin), state
        ids = self._codec.encode_text(system, trusted=trusted)
        if self.system_style == "merged":
            return [*begin, *ids, *self._separator], state
        before, after = around
        return [*before, *ids, *after], state

    def open_user(self, state: FrameState) -> tuple[list[int], FrameState]:
        """The start of a user turn: the first (as `begin` without a system text) or a later one."""
        if state.turn == "user":
            return [], state
        assert state.turn == "none", f"the assistant's turn is open: {state}"
        if state.first:
            return self.begin()
        return list(self._open), FrameState(turn="user", first=False)

    def blank_line(self, state: FrameState) -> list[int]:
        """The ids between what an open user turn has read and more text of another kind; none where it read nothing."""
        assert state.turn == "user", f"no user turn is open: {state}"
        return list(self._separator) if state.has_content else []

    def question_separator(self, state: FrameState) -> tuple[list[int], FrameState]:
        """The ids before a question in an open user turn: if the turn has content the acknowledgement, which closes the
        turn and opens another one, or a blank line; else none."""
        assert state.turn == "user", f"no user turn is open: {state}"
        return list(self._before_question) if state.has_content else [], state

    def close_user_and_prompt(self, state: FrameState) -> tuple[list[int], FrameState]:
        """The end of the user turn and the generation prompt."""
        assert state.turn == "user", f"no user turn is open: {state}"
        return list(self._prompt), FrameState(turn="assistant", first=state.first)

    def close_reply(self, state: FrameState, last_ids: Sequence[int], *, calls: bool = False
                    ) -> tuple[list[int], FrameState]:
        """The ids that close the reply, without those that the model sampled already.

        Args:
            last_ids: the last ids of the reply, its end marker included, or all of them.
            calls: whether the reply calls tools. One that ends with the mark of the other kind is closed as that kind.
        """
        assert state.turn == "assistant", f"no reply is open: {state}"
        closings = (self._close_calls, self._close) if calls else (self._close, self._close_calls)
        rests = (self._behind_sampled(closing, last_ids) for closing in closings)
        rest = next((rest for rest in rests if rest is not None), closings[0])
        return list(rest), FrameState(first=False)

    @property
    def _first_mark(self) -> int | None:
        """The first added token of what closes replies."""
        return next((token for token in self._close if token in self._codec.added_ids), None)

    def _behind_sampled(self, closing: Sequence[int], last_ids: Sequence[int]) -> Sequence[int] | None:
        """What of `closing` is left behind the marks of it with which a reply ends; None: it ends with none of them."""
        first = next((at for at, token in enumerate(closing) if token in self._codec.added_ids), None)
        if first is None:  # what closes replies may be text of the reply itself
            return None
        marks = tuple(closing[first:])
        most = min(len(last_ids), len(marks))
        sampled = next((n for n in range(most, 0, -1) if tuple(last_ids[-n:]) == marks[:n]), 0)
        return marks[sampled:] if sampled else None

    @functools.cached_property
    def _close_calls(self) -> tuple[int, ...]:
        """What closes a reply that calls tools: what closes any, unless the template ends it with another mark."""
        closing = () if self.raw else tuple(self._codec.literal(Traits(self._written_by).end_of("calls")))
        first = next((at for at, token in enumerate(closing) if token in self.eos_ids), None)
        return self._close if first is None or closing[first] == self._first_mark else closing[first:]

    @functools.cached_property
    def unheld_ends(self) -> frozenset[int]:
        """Ids that end a reply, and that the template does not write there: it closes replies with another mark, or
        with none, or the next turn begins with that mark. A memory holds what the template writes."""
        return frozenset() if self.raw else self.eos_ids - {*self._close, *self._close_calls}

    def _derive(self, acknowledge: str | None) -> None:
        """Take the literals from the template."""
        turns = ("user", "assistant") * 2 + ("user",)
        talk = self._literals(turns, prompt=True)
        once = self._literals(turns[:1], prompt=True)
        done = self._literals(turns[:2], prompt=False)
        _expect_same("between a user's turn and a reply", talk[1], talk[3])
        _expect_same("between a reply and the next turn", talk[2], talk[4])
        _expect_same("before the first turn, once others follow,", once[0], talk[0])
        _expect_same("as generation prompt, once others precede,", once[1], talk[5])

        literal = self._codec.literal
        self._separator = tuple(literal(SEPARATOR))
        self._begin = tuple(literal(talk[0], start=True))
        self._prompt = tuple(literal(talk[5]))
        # The literal that closes a reply is what the template writes in both cases: another turn follows, or none.
        traits = Traits(self._written_by)
        closing = traits.end_of("assistant")
        if not (talk[2].startswith(closing) and done[2].startswith(closing)):
            closing = common((talk[2], done[2]), traits.marks)
        self._close, self._open = tuple(literal(closing)), tuple(literal(talk[2][len(closing):]))
        self._before_question = self._separator if acknowledge is None else (
            *self._prompt, *self._codec.encode_text(acknowledge), *self._close, *self._open)

        self.system_style = "merged"
        try:
            first = self._literals(("system", *turns[:1]), prompt=True)
            long = self._literals(("system", *turns), prompt=True)
        except ConfigError:
            return  # the template has no system role, or no fixed place for it
        if first[:2] == long[:2] and first[2] == once[1] and long[2:] == talk[1:]:
            self.system_style = "turn"
            self._system = (tuple(literal(long[0], start=True)), tuple(literal(long[1])))

    def _beginnings(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """`_begin` and `_system` as they are at this time: a process may run for longer than the day that they tell."""
        if self.raw:
            return self._begin, self._system
        today, formats = now(), self._written_by.date_formats
        if not formats or all(today.strftime(form) == self._now.strftime(form) for form in formats):
            return self._begin, self._system
        later = ChatFrame(self._codec, self._tokenizer, template=self.template or "auto", options=self.options)
        return (later._begin, later._system) if later.system_style == self.system_style else (self._begin, self._system)

    def _literals(self, roles: Sequence[str], *, prompt: bool) -> list[str]:
        """The literals before, between and after messages of these roles, [len(roles) + 1]."""
        plain, special = (self._render(roles, prompt, probe) for probe in _PROBES)
        for place, literals in enumerate(zip(plain, special, strict=True)):
            _expect_same(f"at place {place} of the turns {', '.join(roles)}, by what they say,", *literals)
        return plain

    def _render(self, roles: Sequence[str], prompt: bool, probe: Callable[[int], str]) -> list[str]:
        contents = [probe(n) for n in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        text = self._written_by.write(messages, prompt=prompt, now=self._now)
        literals, end = [], 0
        for n, content in enumerate(contents):
            at = text.find(content, end)
            if at < 0 or text.count(content) != 1:
                raise ConfigError(f"the chat template shows the content of message {n} ({roles[n]}) "
                                  f"{text.count(content)} times, or out of order; expected {content!r} once, as it is")
            literals.append(text[end:at])
            end = at + len(content)
        return [*literals, text[end:]]


# Two kinds of content: a word, and lines with characters that templates and markup escape, split or look for.
_PROBES: tuple[Callable[[int], str], ...] = (
    lambda n: f"Probe{n}eborP",
    lambda n: f"<b>Probe {n}</b> & 'it',\n\n  \"{{{{ x }}}}\" {{% y %}}\té {n}eborP.",
)


def _expect_same(where: str, first: str, second: str) -> None:
    if first != second:
        raise ConfigError(f"the chat template differs {where}: found {first!r} and {second!r}; expected one literal, "
                          "as memory cannot be rewritten. Use template='raw' or a Jinja template of your own")
