"""The chat template, rendered around probes: the template's own text may hold control tokens, the messages' may not.

Before the template runs, a probe replaces each text of a message, each string inside tool arguments, each name and each
tool description (`probes`); the rendering is cut at the probes. The text between them is the template's own, in which
control tokens count; the texts that the probes stand for are encoded as data. So no message can spell a control token,
however the template treats it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from locret_stream.conversation import tool_prompt as words
from locret_stream.conversation.fitting import Fitted, Fitting, Line
from locret_stream.conversation.local_templates import messages_ahead
from locret_stream.conversation.messages import Message
from locret_stream.conversation.probes import PROBE, Piece, Probes
from locret_stream.errors import ConfigError
from locret_stream.text import ChatFrame, FrameState, Template, TextCodec, Traits, dated
from locret_stream.text.held_options import held_options
from locret_stream.text.template import NO_OPTIONS
from locret_stream.text.traits import common

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null", "function"}
_SCHEMA = {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "anyOf",
           "allOf", "oneOf", "$ref", "$defs", "definitions", "default", "title", "format", "additionalProperties",
           "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "nullable", "const",
           "strict", "examples", "return"}
_NAMED_ID = re.compile(r"functions\.(.+):(\d+)")  # an id that tells which function it calls
_NEXT = [{"role": "user", "content": "?"}]
_WORD = re.compile(r"\w+\Z")


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it, with probes in place of texts.

    Attributes:
        whole: with the generation prompt. body: the number of characters of it ahead of the generation prompt.
        begins, ends: the characters at which the first probe of each message begins and its last one ends, 0 without.
        left_out: numbers of messages whose text the template does not show.
        otherwise: how messages are shown that the template has no place for, by their numbers.
        roles: of the messages, as they are shown.
        now: the date that it tells, if it tells any.
    """

    whole: str
    body: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    left_out: tuple[int, ...]
    probes: Probes
    otherwise: Mapping[int, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    now: datetime | None = None

    def pieces(self, start: int, end: int | None = None) -> list[Piece]:
        """The pieces of `whole[start:end]`. Raises ConfigError."""
        return self.probes.pieces(self.whole[start:end])


class ChatTemplate:
    """A tokenizer's chat template for whole conversations. Immutable.

    Args:
        tokenizer: whose template it is, unless `frames` has another one.
        codec: encodes the pieces.
        options: variables of the template (`enable_thinking`, ...).
        tool_prompt: "auto": if the template shows no tools, a system text does (`tool_prompt.tool_text`).
        like: one that writes the same but for the generation prompt.

    Attributes:
        traits: what the template does with messages.
        tells_of_tools: whether a model is told of its tools at all. in_words: whether a system text does it.
        held_options: of all its options those that change more than the generation prompt.
        closing: what closes a reply, as text. key: what the keys of memories have of `in_words`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, codec: TextCodec, frames: ChatFrame, *,
                 options: Mapping[str, Any] | None = None, tool_prompt: words.ToolPrompt = "template",
                 like: ChatTemplate | None = None):
        if frames.raw:
            raise ConfigError("the tokenizer has no chat template; expected template=<Jinja chat template>")
        self._tokenizer, self.codec, self.frames, self._tool_prompt = tokenizer, codec, frames, tool_prompt
        self._template = Template(tokenizer, frames.template, {**frames.options, **(options or {})})
        self.held_options: Mapping[str, Any] = held_options(tokenizer, frames.template, self._template.options)
        self.traits: Traits = Traits(self._template) if like is None else like.traits
        self._control = [token for i in codec.control_ids if (token := codec.decode([i], skip_special=False))]
        self._flags = [text for text in self._template.looked_up
                       if len(text) > 1 and not _WORD.match(text) and self._harmless(text)]
        self.closing = codec.decode(frames.close_reply(FrameState(turn="assistant"), [])[0], skip_special=False)
        # What is proved of a template holds where transformers itself renders it, with variables that cannot change.
        plain = self._template.by_transformers and all(
            isinstance(value, (str, int, float, type(None))) for value in self._template.options.values())
        written = frames.template or tokenizer.chat_template
        self._ahead = messages_ahead(written) if plain and isinstance(written, str) else None
        self.in_words = not self.traits.tools and tool_prompt == "auto"
        self.tells_of_tools = self.traits.tools or self.in_words
        self.key = self.in_words and not self.traits.refuses_tools
        self._fitting, self._last_resort = (
            Fitting(self.traits, in_words=self.in_words, acknowledgement=frames.acknowledgement, plain=plainly)
            for plainly in (False, True))

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The same template with further variables.

        Raises:
            ConfigError: a name that is no caller's, or a text that could be a control token, or complete one.
        """
        for name, value in options.items():
            if name in NO_OPTIONS:
                raise ConfigError(f"{name!r} cannot be an option of the chat template: it is what the template writes; "
                                  f"expected one of its variables: {', '.join(self.variables) or 'it has none'}")
            if any(map(self._spells_control, _strings(value))):
                raise ConfigError(f"the option {name!r} of the chat template holds, or is a part of, a control token; "
                                  "expected plain text")
        whole = {**self._template.options, **options}
        alike = held_options(self._tokenizer, self.frames.template, whole) == self.held_options
        return ChatTemplate(self._tokenizer, self.codec, self.frames, tool_prompt=self._tool_prompt, options=whole,
                            like=self if alike else None)

    def _spells_control(self, text: str) -> bool:
        """Whether a text contains a control token, or two characters or more of one at its edges."""
        return any(token in text or any(text.endswith(token[:n]) or text.startswith(token[-n:])
                                        for n in range(2, len(token))) for token in self._control)

    @property
    def variables(self) -> list[str]:
        """Names of the options that it knows."""
        return sorted(self._template.variables)

    # -- rendering --------------------------------------------------------------------------------------------

    def render(self, said: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, apart: int | None = None,
               now: datetime | None = None) -> Rendered:
        """The conversation as the template writes it. What it has no place for is shown in another way (`fitting`).

        Args:
            apart: messages from this number on stand in no turn with those ahead of it.
            now: the date that the template may tell; None: today's.

        Raises:
            ConfigError: the template refuses these messages however they are shown.
        """
        now, text = now or dated.now(), words.tool_text(tools) if tools else ""
        shown = () if self.in_words or self.traits.refuses_tools else tools
        in_words = text if self.in_words else ""
        refused: ConfigError | None = None
        left: Rendered | None = None
        # As it is; with all that a tool may leave out; as text of two who speak in turn; with the tools as text, too.
        for fitting, given, told in ((self._fitting, shown, in_words), (self._fitting, _completed(shown), in_words),
                                     (self._last_resort, _completed(shown), in_words),
                                     (self._last_resort, (), text if self.tells_of_tools else "")):
            try:
                found = self._written(said, given, fitting.fit(said, told, apart), now)
            except ConfigError as error:
                refused = refused or error
                continue
            if all(said[number].role == "system" or said[number].calls for number in found.left_out):
                return found
            left = left or found
        if left is not None:
            return left
        assert refused is not None
        raise refused

    def last_of(self, said: Sequence[Message], count: int, tools: Sequence[dict[str, Any]] = ()) -> Sequence[Message]:
        """The messages of which a rendering ends like that of all: from the first `count` on, which are held already,
        both are the same. Fewer than all of them if the template is proved to write each by itself."""
        if self._ahead is None or count - 1 <= self._ahead or self.traits.names_by_id:
            return said
        waits = said[0].role == "system" and all(message.role != "user" for message in said[:self._ahead])
        if waits and (self.in_words or self.traits.system != "turn"):
            return said  # what it says goes into the first user's message
        if self.in_words and (tools or any(message.calls or message.role == "tool" for message in said)):
            return said
        return [*said[:self._ahead], *said[count - 1:]]

    def _written(self, said: Sequence[Message], tools: Sequence[dict[str, Any]], fitted: Fitted, now: datetime
                 ) -> Rendered:
        probes = Probes(self._flags)
        shown = [self._hide_tool(tool, probes) for tool in tools]
        names = self._ids(said) if self.traits.names_by_id else {}
        spans = [list[int]() for _ in said]  # the probes of each message, and those of what it says
        texts = [list[int]() for _ in said]
        messages = [self._message(line, said, probes, spans, texts, names) for line in fitted.lines]

        def write(prompt: bool, following: Sequence[dict[str, Any]] = ()) -> str:
            return self._template.write([*messages, *following], shown, prompt=prompt, now=now)

        whole = self._with_stand_ins(messages, probes, write)
        places = dict[int, tuple[int, int]]()
        for match in PROBE.finditer(whole):  # a template may write a text again, such as a tool's name with its result
            places.setdefault(int(match[2]), match.span())
        found = [[places[probe] for probe in span if probe in places] for span in spans]
        for number, message in enumerate(said):
            if message.calls and fitted.otherwise.get(number) != "in words" and any(
                    probe not in places for probe in spans[number] if probe not in texts[number]):
                raise ConfigError(f"the chat template leaves out a part of the calls of message {number}; expected a "
                                  "template that shows their names and arguments")
        return Rendered(
            whole, self._body(whole, write(False), fitted, probes, lambda: write(True, _NEXT)),
            tuple(min((begin for begin, _ in each), default=0) for each in found),
            tuple(max((end for _, end in each), default=0) for each in found),
            tuple(number for number, each in enumerate(texts) if each and not places.keys() & each),
            probes, fitted.otherwise, fitted.roles(said), now)

    @staticmethod
    def _with_stand_ins(messages: list[dict[str, Any]], probes: Probes, write: Callable[[bool], str]) -> str:
        """What the template writes, with probes for messages without any text, if these are all that this changes."""
        marked, empty = write(True), {number for number, hidden in enumerate(probes.hidden) if not hidden.text}
        if not empty:
            return marked

        def without(text: str) -> str:
            return PROBE.sub(lambda probe: "" if int(probe[2]) in empty else probe[0], text)

        contents = [message["content"] for message in messages]
        for message in messages:
            message["content"] = without(message["content"])
        with suppress(ConfigError):  # it takes no empty contents
            if without(marked) != (plain := write(True)):
                return plain
        for message, content in zip(messages, contents, strict=True):
            message["content"] = content
        return marked

    def _body(self, whole: str, alone: str, fitted: Fitted, probes: Probes, followed: Callable[[], str]) -> int:
        """The number of characters ahead of the generation prompt.

        Args:
            alone: the same conversation without it. followed: the same once a user speaks next.
        """
        *_, last = [None, *PROBE.finditer(whole)]
        said = 0 if last is None else last.end() + len(probes.behind(whole, last))
        body = len(alone) if whole.startswith(alone) else len(common((whole, alone), self.traits.marks))
        # Some write behind the last message what does not stand there once anybody speaks next.
        end = self.traits.end_of(fitted.last)
        if whole.startswith(end, said) and (end or fitted.last != "calls"):
            return min(body, said + len(end))
        if fitted.last in ("system", "user", "result"):
            with suppress(ConfigError):  # its ends tell the date, or are others here: it is tried
                shared = len(common((whole, followed()), self.traits.marks))
                body = min(body, shared) if shared >= said else body
        return body if body >= said else 0

    def count(self, said: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> int:
        """The number of tokens of a conversation without the generation prompt. Raises as `render`."""
        rendered = self.render(said, tools)
        return len(self.encode(rendered.pieces(0, rendered.body or None), start=True))

    def after(self, said: Sequence[Message], count: int, tools: Sequence[dict[str, Any]],
              rendered: Rendered) -> int | None:
        """The character of the rendered conversation at which what follows its first `count` messages begins.

        None if there is no such place, because the template writes these messages differently once others follow.
        Behind an answer, which the memory holds as it was sampled, it is the end of what closes the answer.
        """
        if not count:
            return 0
        if said[count - 1].role == "assistant":
            at = self._behind_answer(said, count, rendered)
        else:
            try:
                before = self.render(said[:count], tools, now=rendered.now)
            except ConfigError:  # the template refuses them as a conversation
                return None
            text = before.whole[:before.body]
            at = len(text) if before.body and rendered.whole.startswith(text) else None
        # Whatever follows must be shown behind that place.
        shown = all(not end or begin >= at for begin, end in
                    zip(rendered.begins[count:], rendered.ends[count:], strict=True)) if at is not None else False
        return at if shown else None

    def behind_start(self, rendered: Rendered) -> int:
        """The character behind the beginning-of-sequence token, for a rendering that continues another one."""
        mark = self._tokenizer.bos_token
        return len(mark) if mark and rendered.whole.startswith(mark) else 0

    def _behind_answer(self, said: Sequence[Message], count: int, rendered: Rendered) -> int | None:
        """The character behind what closes an answer: what the template writes if nothing follows the answer, or what
        closes a reply, or as many marks as it writes if nothing follows."""
        end = rendered.ends[count - 1]
        if not end:  # it is not shown
            return None
        try:
            alone = self.render([Message("user", "?"), said[count - 1]], now=rendered.now)
            closing = alone.whole[alone.ends[1]:alone.body] if alone.ends[1] else ""
        except ConfigError:
            closing = ""
        if closing and rendered.whole.startswith(closing, end):
            return end + len(closing)
        begins = rendered.begins[count] if count < len(said) else len(rendered.whole)
        at = rendered.whole.find(self.closing, end, begins) if self.closing and begins else -1
        if at >= 0:
            return at + len(self.closing)
        marks = re.compile("|".join(map(re.escape, sorted(self.traits.marks, key=len, reverse=True))))
        instead = [match.end() for match in marks.finditer(rendered.whole, end, max(begins, end))]
        closes = len(marks.findall(closing))
        return instead[closes - 1] if 0 < closes <= len(instead) else end

    def _message(self, line: Line, said: Sequence[Message], probes: Probes, spans: list[list[int]],
                 texts: list[list[int]], names: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
        """A message for the template, with probes, which are noted for the messages that they are of."""
        out: dict[str, Any] = {"role": line.role, "content": ""}
        for text, number in line.texts:
            first = len(probes.hidden)
            out["content"] += probes.hide_content(text)
            if number is not None:
                spans[number] += range(first, len(probes.hidden))
                texts[number] += range(first, len(probes.hidden))
        if line.number is None:
            return out
        if not out["content"] and line.kind != "calls":  # where it stands is known by its place
            spans[line.number].append(len(probes.hidden))
            out["content"] = probes.stand_in()
        message = said[line.number]
        if line.reasoning:  # which templates often leave out
            out["reasoning_content"] = probes.hide_content(line.reasoning)
        first = len(probes.hidden)
        if line.kind == "calls":
            out["tool_calls"] = []
            for name, arguments, call_id in message.calls:
                hidden = probes.hide(name)
                shown = f"functions.{hidden}:{names[call_id][1]}" if call_id in names else self.short_id(call_id)
                out["tool_calls"].append({"type": "function", "id": shown, "function": {
                    "name": hidden, "arguments": probes.hide_all(arguments)}})
        if line.kind == "result":
            name, number = names.get(message.call_id, ("", 0))
            out["tool_call_id"] = f"functions.{probes.hide(name)}:{number}" if name else self.short_id(message.call_id)
        spans[line.number] += range(first, len(probes.hidden))
        if message.name:
            out["name"] = probes.hide(message.name)
        return out

    @staticmethod
    def _ids(said: Sequence[Message]) -> dict[str, tuple[str, int]]:
        """(name, number) of each call by its id: the number that its id tells, or how many calls stand ahead of it."""
        names: dict[str, tuple[str, int]] = {}
        for name, _, call_id in (call for message in said for call in message.calls):
            named = _NAMED_ID.fullmatch(call_id)
            names[call_id] = (name, int(named[2][:9]) if named is not None and named[1] == name else len(names))
        return names

    def _hide_tool(self, value: Any, probes: Probes, *, names: bool = False) -> Any:
        """A tool's schema with probes for descriptions, and for every other text that could be, or complete, a control
        token. The rest stays as it is: templates compare it with words of JSON schema.

        Args:
            names: the keys of this dict are names that the tool chose, not words of JSON schema.
        """
        def word(text: str) -> str:
            return text if self._harmless(text) else probes.hide_same(text)

        if isinstance(value, dict):
            out = {}
            for key, inner in value.items():
                of_schema = not names and key in _SCHEMA
                if of_schema and key == "description" and isinstance(inner, str):
                    out[key] = probes.hide(inner)
                elif of_schema and key == "type" and isinstance(inner, str) and inner in _TYPES:
                    out[key] = inner
                else:
                    out[key if of_schema else word(str(key))] = self._hide_tool(
                        inner, probes, names=of_schema and key in ("properties", "$defs", "definitions"))
            return out
        if isinstance(value, (list, tuple)):
            return [inner if isinstance(inner, str) and inner in _TYPES else self._hide_tool(inner, probes)
                    for inner in value]
        return word(value) if isinstance(value, str) else value

    def _harmless(self, text: str) -> bool:
        """Whether a text contains no control token, is no part of one, and cannot complete one at its edges."""
        if "\ue000" in text or "\ue001" in text:
            return False
        return not any(token in text or text in token or any(
            text.endswith(token[:n]) or text.startswith(token[-n:]) for n in range(1, len(token)))
            for token in self._control)

    def short_id(self, call_id: str) -> str:
        """An id of nine letters and digits, which some templates demand, and which spells no control token."""
        if re.fullmatch(r"[A-Za-z0-9]{9}", call_id) and self._harmless(call_id):
            return call_id
        number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:7], "big")
        return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[number // 36**n % 36] for n in range(9))

    # -- ids --------------------------------------------------------------------------------------------------

    def encode(self, pieces: Sequence[Piece], *, start: bool) -> list[int]:
        """Token ids of pieces; `start`: they open the sequence. Raises InvalidText."""
        return [token for ids in self.encode_each(pieces, start=start) for token in ids]

    def encode_each(self, pieces: Sequence[Piece], *, start: bool) -> list[list[int]]:
        """Token ids of each piece; `start`: they open the sequence. Raises InvalidText."""
        each: list[list[int]] = []
        for piece in pieces:
            each.append(self.codec.encode_text(piece.text) if piece.data else self.codec.literal(
                piece.text, start=start and not any(each)))
        return each


def _completed(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with what a tool may leave out, and some templates ask for."""
    return [{**tool, "function": {"description": "", **tool["function"], "parameters": {
        "type": "object", "properties": {}, **(tool["function"].get("parameters") or {})}}} for tool in tools]


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _strings(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in _strings(part))
