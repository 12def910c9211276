"""The chat template, rendered around probes: what it writes itself is control, what is said is data.

Every text of a message, every string inside tool arguments, names and tool descriptions is replaced by a probe before
the template runs; the rendering is cut at the probes. What lies between them is the template's own and is encoded with
control tokens honoured; what the probes stand for is encoded as data. So nothing that anybody says can become control,
however the template treats it, and no text can change what the template does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from langchain_locret import tool_prompt as words
from langchain_locret.messages import Said
from locret_stream import ConfigError
from locret_stream.text import ChatFrame, FrameState, TextCodec

# The quotation mark tells whether the template wrote the text as it is or as JSON.
_PROBE = re.compile(r'(\ue000|\\ue000)(\d+)(\\?")(?:\ue001|\\ue001)')


_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null", "function"}
_SCHEMA = {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "anyOf",
           "allOf", "oneOf", "$ref", "$defs", "definitions", "default", "title", "format", "additionalProperties",
           "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "nullable", "const",
           "strict", "examples", "return"}
_LEFT = re.compile(r"[\ue000\ue001]|\\ue00[01]")  # a part of a probe


NO_CALLS = ("the chat template does not show tool calls behind its generation prompt, so that none can be begun for "
            "the model; expected tool_choice='auto', a chat template that shows them, or tool_prompt='auto', which "
            "tells of tools in a system text")


@dataclass(frozen=True)
class Piece:
    """A part of a rendering: the template's own (`data` False), or something said."""

    text: str
    data: bool


class _Probes:
    """Numbers texts, and finds them again in what the template wrote. Equal texts of a schema get equal probes, so that
    a template can look one up in a list of others."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._same: dict[str, str] = {}

    def hide(self, text: str) -> str:
        if not text:  # templates ask whether there is any
            return text
        self.texts.append(text)
        return f'\ue000{len(self.texts) - 1}"\ue001'

    def hide_same(self, text: str) -> str:
        if text not in self._same:
            self._same[text] = self.hide(text)
        return self._same[text]

    def hide_all(self, value: Any) -> Any:
        """The same structure with every string inside it hidden, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(str(key)): self.hide_all(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(inner) for inner in value]
        return value

    def pieces(self, rendered: str) -> list[Piece]:
        out, at = [], 0
        for match in _PROBE.finditer(rendered):
            if match.start() > at:
                out.append(Piece(rendered[at:match.start()], False))
            text = self.texts[int(match[2])]
            if match[3] != '"':
                text = json.dumps(text, ensure_ascii=match[1] != "\ue000")[1:-1]
            out.append(Piece(text, True))
            at = match.end()
        out += [Piece(rendered[at:], False)] if at < len(rendered) else []
        if any(_LEFT.search(piece.text) for piece in out if not piece.data):
            raise ConfigError("the chat template changes what is said in a way that cannot be followed (it escapes it, "
                              "or takes a part of it); expected a template that writes it as it is, or as JSON")
        return out


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it, probes still in it.

    Attributes:
        whole: with the generation prompt. body: how many characters of it come before the generation prompt.
        begins, ends: for each message where its first probe begins and its last one ends, 0 if it has none.
        left_out: messages whose text the template does not show.
    """

    whole: str
    body: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    left_out: tuple[int, ...]
    probes: _Probes

    def pieces(self, start: int, end: int | None = None) -> list[Piece]:
        return self.probes.pieces(self.whole[start:end])

    def without_first(self, count: int) -> Rendered:
        """The same, counting messages behind the first `count`; less than 0: as if there were more ahead of them."""
        if count < 0:
            return replace(self, begins=(0,) * -count + self.begins, ends=(0,) * -count + self.ends,
                           left_out=tuple(number - count for number in self.left_out))
        return replace(self, begins=self.begins[count:], ends=self.ends[count:],
                       left_out=tuple(number - count for number in self.left_out if number >= count))


class ChatTemplate:
    """A tokenizer's chat template for whole conversations. Immutable.

    Args:
        tokenizer: whose template it is. template: another one in its place, or None.
        options: variables that the template knows (`enable_thinking`, ...).
        tool_prompt: "auto": where the template tells of no tools, a system text of our own does.

    Attributes:
        tells_of_tools: whether a model is told of its tools at all. in_words: by a text of our own.
    """

    def __init__(self, tokenizer: Any, codec: TextCodec, frames: ChatFrame, *, options: dict[str, Any] | None = None,
                 tool_prompt: words.ToolPrompt = "template"):
        if frames.raw:
            raise ConfigError("the tokenizer has no chat template; expected template=<Jinja chat template>")
        self._tokenizer, self.codec, self.frames = tokenizer, codec, frames
        self._options = dict(options or {})
        self._control = [token for i in codec.control_ids if (token := codec.decode([i], skip_special=False))]
        self._close = codec.decode(frames.close_reply(FrameState(turn="assistant"), [])[0], skip_special=False)

        own = self._knows_tools()
        self.in_words = not own and tool_prompt == "auto"
        self.tells_of_tools = own or self.in_words

    # -- rendering --------------------------------------------------------------------------------------------

    def _knows_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "probe", "description": "probe", "parameters": {
            "type": "object", "properties": {"probe": {"type": "string", "description": "probe"}}}}}
        asked = [{"role": "user", "content": "?"}]
        try:
            return self._write(asked, [tool], prompt=True) != self._write(asked, [], prompt=True)
        except ConfigError:  # it asks for more than this: of tools nothing is known
            return True

    def render(self, said: Sequence[Said], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Raises:
            ConfigError: the template refuses these messages, or does not show the calls in them.
        """
        if not self.in_words:
            return self._render(said, tools)
        texts = words.written_out(said, tools)
        try:
            found = self._render(texts, ())
        except ConfigError:
            found = None
        if (found is None or 0 in found.left_out) and texts and texts[0].role == "system":  # no place for a system text
            texts = words.ahead_of_the_first(texts)
            found = self._render(texts, ())
        elif found is None:
            found = self._render(texts, ())
        return found.without_first(len(texts) - len(said))

    def _render(self, said: Sequence[Said], tools: Sequence[dict[str, Any]]) -> Rendered:
        probes = _Probes()
        shown = [self._hide_tool(tool, probes) for tool in tools]
        messages, spans = [], []
        for message in said:
            first = len(probes.texts)
            messages.append(self._message(message, probes))
            spans.append(range(first, len(probes.texts)))
        body = self._write(messages, shown, prompt=False)
        whole = self._write(messages, shown, prompt=True)
        found = {int(match[2]): (match.start(), match.end()) for match in _PROBE.finditer(whole)}
        begins = tuple(min((found[probe][0] for probe in span if probe in found), default=0) for span in spans)
        ends = tuple(max((found[probe][1] for probe in span if probe in found), default=0) for span in spans)
        for number, (message, span) in enumerate(zip(said, spans, strict=True)):
            beside = bool(message.content) + bool(message.reasoning)  # come first; reasoning is often left out
            if message.calls and any(probe not in found for probe in span[beside:]):
                raise ConfigError(f"the chat template leaves out a part of the calls of message {number}; expected a "
                                  "template that shows their names and arguments")
        left_out = tuple(number for number, (message, span) in enumerate(zip(said, spans, strict=True))
                         if message.content and span.start not in found)
        return Rendered(whole, len(body) if whole.startswith(body) else 0, begins, ends, left_out, probes)

    def count(self, said: Sequence[Said], tools: Sequence[dict[str, Any]] = ()) -> int:
        """Tokens of a conversation, the generation prompt left out. Raises as `render`."""
        rendered = self.render(said, tools)
        return len(self.encode(rendered.pieces(0, rendered.body or None), start=True))

    def after(self, said: Sequence[Said], count: int, tools: Sequence[dict[str, Any]],
              rendered: Rendered) -> int | None:
        """Where in the rendering of the whole conversation what follows its first `count` messages begins.

        None if the template writes these differently once others follow, so that there is no such place. After an
        answer, which memory holds as it was sampled, that is behind what closes it.
        """
        if not count:
            return 0
        if said[count - 1].role == "assistant":
            at = self._behind_answer(said, count, rendered)
        else:
            try:
                before = self.render(said[:count], tools)
            except ConfigError:  # not as a conversation of its own
                return None
            text = before.whole[:before.body]
            at = len(text) if before.body and rendered.whole.startswith(text) else None
        # Whatever follows must be shown behind that place.
        shown = all(not end or begin >= at for begin, end in
                    zip(rendered.begins[count:], rendered.ends[count:], strict=True)) if at is not None else False
        return at if shown else None

    def behind_start(self, rendered: Rendered) -> int:
        """Where in a rendering that stands behind something else what follows the mark of a beginning begins."""
        mark = self._tokenizer.bos_token
        return len(mark) if mark and rendered.whole.startswith(mark) else 0

    def _behind_answer(self, said: Sequence[Said], count: int, rendered: Rendered) -> int | None:
        """Behind what closes an answer: as the template closes it where nothing follows, or as it closes replies."""
        end = rendered.ends[count - 1]
        if not end:  # says nothing that could be found
            return None
        try:
            alone = self.render([Said("user", "?"), said[count - 1]])
            closing = alone.whole[alone.ends[1]:alone.body] if alone.ends[1] else ""
        except ConfigError:
            closing = ""
        if closing and rendered.whole.startswith(closing, end):
            return end + len(closing)
        begins = rendered.begins[count] if count < len(said) else len(rendered.whole)
        at = rendered.whole.find(self._close, end, begins) if self._close and begins else -1
        return None if at < 0 else at + len(self._close)

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt,
                chat_template=self.frames.template, **self._options)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raise ConfigError(f"the chat template cannot show this conversation ({'..., ' if len(messages) > 4 else ''}"
                              f"{roles}): {error}") from error

    def _message(self, message: Said, probes: _Probes) -> dict[str, Any]:
        out: dict[str, Any] = {"role": message.role, "content": probes.hide(message.content)}
        if message.reasoning:
            out["reasoning_content"] = probes.hide(message.reasoning)
        if message.calls:
            out["tool_calls"] = [
                {"type": "function", "id": self._short(call_id),
                 "function": {"name": probes.hide(name), "arguments": probes.hide_all(arguments)}}
                for name, arguments, call_id in message.calls]
        if message.role == "tool":
            out["tool_call_id"] = self._short(message.call_id)
        if message.name:
            out["name"] = probes.hide(message.name)
        return out

    def _hide_tool(self, value: Any, probes: _Probes, *, names: bool = False) -> Any:
        """A tool's schema. Descriptions are data; so is every other text that could be, or complete, a control token:
        templates compare the rest with words they know.

        Args:
            names: the keys of this dict are the tool's own, not words of JSON schema.
        """
        def word(text: str) -> str:
            return text if self._harmless(text) else probes.hide_same(text)

        if isinstance(value, dict):
            out = {}
            for key, inner in value.items():
                known = not names and key in _SCHEMA
                if known and key == "description" and isinstance(inner, str):
                    out[key] = probes.hide(inner)
                elif known and key == "type" and isinstance(inner, str) and inner in _TYPES:
                    out[key] = inner
                else:
                    out[key if known else word(str(key))] = self._hide_tool(
                        inner, probes, names=known and key in ("properties", "$defs", "definitions"))
            return out
        if isinstance(value, (list, tuple)):
            return [inner if isinstance(inner, str) and inner in _TYPES else self._hide_tool(inner, probes)
                    for inner in value]
        return word(value) if isinstance(value, str) else value

    def _harmless(self, text: str) -> bool:
        """Whether no control token lies in a text, around it, or across its edges."""
        if "\ue000" in text or "\ue001" in text:
            return False
        return not any(token in text or text in token or any(
            text.endswith(token[:n]) or text.startswith(token[-n:]) for n in range(1, len(token)))
            for token in self._control)

    def _short(self, call_id: str) -> str:
        """An id that any template takes and that spells nothing: some ask for nine letters and digits."""
        if re.fullmatch(r"[A-Za-z0-9]{9}", call_id) and self._harmless(call_id):
            return call_id
        number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:7], "big")
        return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[number // 36**n % 36] for n in range(9))

    # -- ids --------------------------------------------------------------------------------------------------

    def encode(self, pieces: Sequence[Piece], *, start: bool) -> list[int]:
        """Token ids of pieces; `start`: they open the sequence. Raises InvalidText."""
        ids: list[int] = []
        for piece in pieces:
            ids += self.codec.encode_text(piece.text) if piece.data else self.codec.literal(
                piece.text, start=start and not ids)
        return ids

    # -- tool calls -------------------------------------------------------------------------------------------

    def call_opening(self, tools: Sequence[dict[str, Any]], name: str = "") -> list[Piece]:
        """What a call begins with, behind the generation prompt, as this template writes calls.

        Args:
            name: of the tool that is called: the opening goes on to the value of its first required argument, as far as
                that is certain. "": of any tool, up to its name.

        Raises:
            ConfigError: the template shows no tool calls.
        """
        if self.in_words:
            return self._opening_in_words(tools, name)
        asked = Said("user", "?")
        try:
            prompt = self.render([asked], tools)
            called = self.render([asked, Said("assistant", "", calls=(("name", {"key": "value"}, "call"),))], tools)
        except ConfigError as error:
            raise ConfigError(NO_CALLS) from error
        at = [match for match in _PROBE.finditer(called.whole) if match.end() > called.ends[0]]
        begun = prompt.whole[prompt.ends[0]:]
        written = called.whole[called.ends[0]:at[0].start()] if len(at) >= 3 else ""
        if not written.startswith(begun) or written == begun:
            raise ConfigError(NO_CALLS)
        opening = [Piece(written[len(begun):], False)]
        if not name:
            return opening
        opening.append(Piece(name, True))
        to_key, to_value = (called.whole[one.end():other.start()] for one, other in pairwise(at[:3]))
        if not to_key.endswith('{"') or not to_value.endswith('"'):
            return opening  # arguments are not written as JSON
        key, kind = _first_argument(tool_parameters(tools, name))
        if key is None:
            none = not (tool_parameters(tools, name).get("properties"))
            return [*opening, Piece(to_key[:-2] + ("{}" if none else ""), False)]
        return [*opening, Piece(to_key, False), Piece(json.dumps(key, ensure_ascii=False)[1:-1], True),
                Piece(to_value if kind == "string" else to_value[:-1], False)]


    def _opening_in_words(self, tools: Sequence[dict[str, Any]], name: str) -> list[Piece]:
        begun = words.opening(name)
        if name:
            key, kind = _first_argument(tool_parameters(tools, name))
            if key is not None:
                begun += f"{{{json.dumps(key, ensure_ascii=False)}: " + ('"' if kind == "string" else "")
            elif not tool_parameters(tools, name).get("properties"):
                begun += "{}"
        return [Piece(begun, True)]


def tool_parameters(tools: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return next(tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name) or {}


def _first_argument(parameters: dict[str, Any]) -> tuple[str | None, Any]:
    """Name and type of the first argument that a call must have; (None, None) if there is none."""
    required = parameters.get("required") or [None]
    schema = (parameters.get("properties") or {}).get(required[0])
    return (required[0], schema.get("type")) if isinstance(schema, dict) else (None, None)
