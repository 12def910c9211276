"""The chat template, rendered around probes: the template's own text may hold control tokens, the messages' may not.

Before the template runs, a probe replaces each text of a message, each string inside tool arguments, each name and each
tool description; the rendering is cut at the probes. The text between them is the template's own, in which control
tokens count; the texts that the probes stand for are encoded as data. So no message can spell a control token, however
the template treats it, and no text can change what the template does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from locret_stream.conversation import tool_prompt as words
from locret_stream.conversation.local_templates import messages_ahead
from locret_stream.conversation.messages import Message
from locret_stream.errors import ConfigError
from locret_stream.text import ChatFrame, FrameState, TextCodec

# The quotation mark shows whether the template wrote the text as it is or as JSON.
PROBE = re.compile(r'(\ue000|\\ue000)(\d+)(\\?")(?:\ue001|\\ue001)')
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null", "function"}
_SCHEMA = {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "anyOf",
           "allOf", "oneOf", "$ref", "$defs", "definitions", "default", "title", "format", "additionalProperties",
           "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "nullable", "const",
           "strict", "examples", "return"}
_PROBE_PART = re.compile(r"[\ue000\ue001]|\\ue00[01]")


@dataclass(frozen=True)
class Piece:
    """A part of a rendering: text of a message (`data` True), or the template's own."""

    text: str
    data: bool


class _Probes:
    """Replaces texts by numbered probes, and finds these in a rendering."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._same: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """A probe for a text; "" for an empty one, as templates ask whether a text is empty."""
        if not text:
            return text
        self.texts.append(text)
        # Of one length and in the order of the texts, whatever the number: a template may measure or sort them.
        return f'\ue000{len(self.texts) - 1:08d}"\ue001'

    def hide_same(self, text: str) -> str:
        """As `hide`, with the same probe for equal texts: a template may look one up in a list of others."""
        if text not in self._same:
            self._same[text] = self.hide(text)
        return self._same[text]

    def hide_all(self, value: Any) -> Any:
        """The same structure with a probe for every string in it, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(str(key)): self.hide_all(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(inner) for inner in value]
        return value

    def pieces(self, rendered: str) -> list[Piece]:
        """The rendering with the texts in place of their probes. Raises ConfigError if a probe was changed."""
        out, at = [], 0
        for match in PROBE.finditer(rendered):
            if match.start() > at:
                out.append(Piece(rendered[at:match.start()], False))
            text = self.texts[int(match[2])]
            if match[3] != '"':
                text = json.dumps(text, ensure_ascii=match[1] != "\ue000")[1:-1]
            out.append(Piece(text, True))
            at = match.end()
        out += [Piece(rendered[at:], False)] if at < len(rendered) else []
        if any(_PROBE_PART.search(piece.text) for piece in out if not piece.data):
            raise ConfigError("the chat template changes what is said in a way that cannot be followed (it escapes it, "
                              "or takes a part of it); expected a template that writes it as it is, or as JSON")
        return out


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it, with probes in place of texts.

    Attributes:
        whole: with the generation prompt. body: the number of characters of it ahead of the generation prompt.
        begins, ends: the characters at which the first probe of each message begins and its last one ends, 0 without.
        left_out: numbers of messages whose text the template does not show.
    """

    whole: str
    body: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    left_out: tuple[int, ...]
    probes: _Probes

    def pieces(self, start: int, end: int | None = None) -> list[Piece]:
        """The pieces of `whole[start:end]`. Raises ConfigError."""
        return self.probes.pieces(self.whole[start:end])

    def places(self, start: int) -> Iterator[int]:
        """The characters at which the probes from that character on begin: one for each piece of data."""
        return (match.start() for match in PROBE.finditer(self.whole, start))

    def without_first(self, count: int) -> Rendered:
        """The same without the first `count` messages in the lists; below 0, with as many more ahead."""
        if count < 0:
            return replace(self, begins=(0,) * -count + self.begins, ends=(0,) * -count + self.ends,
                           left_out=tuple(number - count for number in self.left_out))
        return replace(self, begins=self.begins[count:], ends=self.ends[count:],
                       left_out=tuple(number - count for number in self.left_out if number >= count))


class ChatTemplate:
    """A tokenizer's chat template for whole conversations. Immutable.

    Args:
        tokenizer: whose template it is, unless `frames` has another one.
        codec: encodes the pieces.
        options: variables of the template (`enable_thinking`, ...).
        tool_prompt: "auto": if the template shows no tools, a system text does (`tool_prompt.written_out`).

    Attributes:
        tells_of_tools: whether a model is told of its tools at all. in_words: whether a system text does it.
        closing: what closes a reply, as text.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, codec: TextCodec, frames: ChatFrame, *, options: dict[str, Any] | None = None,
                 tool_prompt: words.ToolPrompt = "template"):
        if frames.raw:
            raise ConfigError("the tokenizer has no chat template; expected template=<Jinja chat template>")
        self._tokenizer, self.codec, self.frames = tokenizer, codec, frames
        self._options = dict(options or {})
        self._control = [token for i in codec.control_ids if (token := codec.decode([i], skip_special=False))]
        self.closing = codec.decode(frames.close_reply(FrameState(turn="assistant"), [])[0], skip_special=False)
        # What is proved of a template holds where transformers itself renders it, with variables that cannot change.
        plain = type(tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base" and all(
            isinstance(value, (str, int, float, type(None))) for value in self._options.values())
        written = frames.template or tokenizer.chat_template
        self._ahead = messages_ahead(written) if plain and isinstance(written, str) else None
        shows_tools = self._shows_tools()
        self.in_words = not shows_tools and tool_prompt == "auto"
        self.tells_of_tools = shows_tools or self.in_words

    # -- rendering --------------------------------------------------------------------------------------------

    def _shows_tools(self) -> bool:
        """Whether the rendering changes with a tool; True for a template that refuses the try."""
        tool = {"type": "function", "function": {"name": "probe", "description": "probe", "parameters": {
            "type": "object", "properties": {"probe": {"type": "string", "description": "probe"}}}}}
        asked = [{"role": "user", "content": "?"}]
        try:
            return self._write(asked, [tool], prompt=True) != self._write(asked, [], prompt=True)
        except ConfigError:
            return True

    def render(self, said: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """The conversation as the template writes it.

        Raises:
            ConfigError: the template refuses these messages, or does not show the calls in them.
        """
        if not self.in_words:
            return self._render(said, tools)
        texts = words.written_out(said, tools)
        has_system = bool(texts) and texts[0].role == "system"
        try:
            rendered = self._render(texts, ())
        except ConfigError:
            if not has_system:
                raise
            rendered = None
        if rendered is None or (0 in rendered.left_out and has_system):  # no place for a system text
            texts = words.ahead_of_the_first(texts)
            rendered = self._render(texts, ())
        return rendered.without_first(len(texts) - len(said))

    def last_of(self, said: Sequence[Message], count: int, tools: Sequence[dict[str, Any]] = ()) -> Sequence[Message]:
        """The messages of which a rendering ends like that of all: from the first `count` on, which are held already,
        both are the same. Fewer than all of them if the template is proved to write each by itself."""
        if self._ahead is None or count - 1 <= self._ahead:
            return said
        if self.in_words and (tools or any(message.calls or message.role == "tool" for message in said) or (
                said[0].role == "system" and all(message.role != "user" for message in said[:self._ahead]))):
            return said  # what is written out goes into the first messages, up to the first user's
        return [*said[:self._ahead], *said[count - 1:]]

    def _render(self, said: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        probes = _Probes()
        shown = [self._hide_tool(tool, probes) for tool in tools]
        messages, spans = [], []
        for message in said:
            first = len(probes.texts)
            messages.append(self._message(message, probes))
            spans.append(range(first, len(probes.texts)))
        body = self._write(messages, shown, prompt=False)
        whole = self._write(messages, shown, prompt=True)
        places = {int(match[2]): (match.start(), match.end()) for match in PROBE.finditer(whole)}
        begins = tuple(min((places[probe][0] for probe in span if probe in places), default=0) for span in spans)
        ends = tuple(max((places[probe][1] for probe in span if probe in places), default=0) for span in spans)
        for number, (message, span) in enumerate(zip(said, spans, strict=True)):
            first_of_calls = bool(message.content) + bool(message.reasoning)  # templates often leave out reasoning
            if message.calls and any(probe not in places for probe in span[first_of_calls:]):
                raise ConfigError(f"the chat template leaves out a part of the calls of message {number}; expected a "
                                  "template that shows their names and arguments")
        left_out = tuple(number for number, (message, span) in enumerate(zip(said, spans, strict=True))
                         if message.content and span.start not in places)
        return Rendered(whole, len(body) if whole.startswith(body) else 0, begins, ends, left_out, probes)

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
                before = self.render(said[:count], tools)
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
        closes a reply."""
        end = rendered.ends[count - 1]
        if not end:  # an answer without text or calls
            return None
        try:
            alone = self.render([Message("user", "?"), said[count - 1]])
            closing = alone.whole[alone.ends[1]:alone.body] if alone.ends[1] else ""
        except ConfigError:
            closing = ""
        if closing and rendered.whole.startswith(closing, end):
            return end + len(closing)
        begins = rendered.begins[count] if count < len(said) else len(rendered.whole)
        at = rendered.whole.find(self.closing, end, begins) if self.closing and begins else -1
        return None if at < 0 else at + len(self.closing)

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt,
                chat_template=self.frames.template, **self._options)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raise ConfigError(f"the chat template cannot show this conversation ({'..., ' if len(messages) > 4 else ''}"
                              f"{roles}): {error}") from error

    def _message(self, message: Message, probes: _Probes) -> dict[str, Any]:
        out: dict[str, Any] = {"role": message.role, "content": probes.hide(message.content)}
        if message.reasoning:
            out["reasoning_content"] = probes.hide(message.reasoning)
        if message.calls:
            out["tool_calls"] = [
                {"type": "function", "id": self.short_id(call_id),
                 "function": {"name": probes.hide(name), "arguments": probes.hide_all(arguments)}}
                for name, arguments, call_id in message.calls]
        if message.role == "tool":
            out["tool_call_id"] = self.short_id(message.call_id)
        if message.name:
            out["name"] = probes.hide(message.name)
        return out

    def _hide_tool(self, value: Any, probes: _Probes, *, names: bool = False) -> Any:
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
