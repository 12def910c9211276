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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from langchain_locret.messages import Said
from locret_stream import ConfigError, InputError
from locret_stream.text import ChatFrame, FrameState, TextCodec

# The quotation mark tells whether the template wrote the text as it is or as JSON.
_PROBE = re.compile(r'(\ue000|\\ue000)(\d+)(\\?")(?:\ue001|\\ue001)')


@dataclass(frozen=True)
class Piece:
    """A part of a rendering: the template's own (`data` False), or something said."""

    text: str
    data: bool


class _Probes:
    """Numbers texts, and finds them again in what the template wrote."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def hide(self, text: str) -> str:
        if not text:  # templates ask whether there is any
            return text
        self.texts.append(text)
        return f'\ue000{len(self.texts) - 1}"\ue001'

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
        return [*out, Piece(rendered[at:], False)] if at < len(rendered) else out


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it, probes still in it.

    Attributes:
        whole: with the generation prompt. body: how many characters of it come before the generation prompt.
        ends: for each message where the last of its probes ends, 0 if it has none. left_out: messages whose text the
            template does not show.
    """

    whole: str
    body: int
    ends: tuple[int, ...]
    left_out: tuple[int, ...]
    probes: _Probes

    def pieces(self, start: int, end: int | None = None) -> list[Piece]:
        return self.probes.pieces(self.whole[start:end])


class ChatTemplate:
    """A tokenizer's chat template for whole conversations. Immutable.

    Args:
        tokenizer: whose template it is. template: another one in its place, or None.
        options: variables that the template knows (`enable_thinking`, ...).
    """

    def __init__(self, tokenizer: Any, codec: TextCodec, frames: ChatFrame, *, options: dict[str, Any] | None = None):
        if frames.raw:
            raise ConfigError("the tokenizer has no chat template; expected template=<Jinja chat template>")
        self._tokenizer, self.codec, self.frames = tokenizer, codec, frames
        self._options = dict(options or {})
        self._close = codec.decode(frames.close_reply(FrameState(turn="assistant"), [])[0], skip_special=False)

    # -- rendering --------------------------------------------------------------------------------------------

    def render(self, said: Sequence[Said], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Raises:
            ConfigError: the template refuses these messages.
            InputError: a tool whose schema spells a control token.
        """
        probes = _Probes()
        shown = [self._hide_tool(tool, probes) for tool in tools]
        messages, spans = [], []
        for message in said:
            first = len(probes.texts)
            messages.append(self._message(message, probes))
            spans.append(range(first, len(probes.texts)))
        body = self._write(messages, shown, prompt=False)
        whole = self._write(messages, shown, prompt=True)
        found = {int(match[2]): match.end() for match in _PROBE.finditer(whole)}
        ends = tuple(max((found.get(probe, 0) for probe in span), default=0) for span in spans)
        left_out = tuple(number for number, (message, span) in enumerate(zip(said, spans, strict=True))
                         if message.content and span.start not in found)
        return Rendered(whole, len(body) if whole.startswith(body) else 0, ends, left_out, probes)

    def after(self, said: Sequence[Said], count: int, tools: Sequence[dict[str, Any]],
              rendered: Rendered) -> int | None:
        """Where in the rendering of the whole conversation what follows its first `count` messages begins.

        None if the template writes these differently once others follow, so that there is no such place. After an
        answer, which memory holds as it was sampled, that is behind what closes it.
        """
        if not count:
            return 0
        if said[count - 1].role == "assistant":
            end = rendered.ends[count - 1]
            at = rendered.whole.find(self._close, end) if end and self._close else -1
            following = min((e for e in rendered.ends[count:] if e), default=len(rendered.whole))
            return None if at < 0 or at > following else at + len(self._close)
        try:
            before = self.render(said[:count], tools)
        except ConfigError:  # not as a conversation of its own
            return None
        text = before.whole[:before.body]
        return len(text) if before.body and rendered.whole.startswith(text) else None

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
                {"type": "function", "id": _short(call_id),
                 "function": {"name": probes.hide(name), "arguments": probes.hide_all(arguments)}}
                for name, arguments, call_id in message.calls]
        if message.role == "tool":
            out["tool_call_id"] = _short(message.call_id)
        if message.name:
            out["name"] = probes.hide(message.name)
        return out

    def _hide_tool(self, tool: Any, probes: _Probes, name: str = "") -> Any:
        """A tool's schema: descriptions are data; templates look at the rest, which must not spell control tokens."""
        if isinstance(tool, dict):
            name = name or str(tool.get("function", tool).get("name", ""))
            return {self._hide_tool(key, probes, name):
                    probes.hide(value) if key == "description" and isinstance(value, str)
                    else self._hide_tool(value, probes, name) for key, value in tool.items()}
        if isinstance(tool, (list, tuple)):
            return [self._hide_tool(value, probes, name) for value in tool]
        if isinstance(tool, str) and not self.codec.control_ids.isdisjoint(self.codec.literal(tool)):
            raise InputError(f"tool {name!r}: {tool!r} in its schema is, or holds, a control token of this tokenizer; "
                             "expected one only in a description")
        return tool

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
        asked = Said("user", "?")
        prompt = self.render([asked], tools)
        called = self.render([asked, Said("assistant", "", calls=(("name", {"key": "value"}, "call"),))], tools)
        at = [match for match in _PROBE.finditer(called.whole) if match.end() > called.ends[0]]
        begun = prompt.whole[prompt.ends[0]:]
        written = called.whole[called.ends[0]:at[0].start()] if len(at) >= 3 else ""
        if not written.startswith(begun) or written == begun:
            raise ConfigError("the chat template does not show tool calls behind its generation prompt; expected "
                              "tool_choice='auto', or a template that does")
        opening = [Piece(written[len(begun):], False)]
        if not name:
            return opening
        opening.append(Piece(name, True))
        to_key, to_value = (called.whole[one.end():other.start()] for one, other in pairwise(at[:3]))
        if not to_key.endswith('{"') or not to_value.endswith('"'):
            return opening  # arguments are not written as JSON
        key, kind = _first_argument(next(tool["function"] for tool in tools if tool["function"]["name"] == name))
        if key is None:
            return [*opening, Piece(to_key[:-2], False)]
        return [*opening, Piece(to_key, False), Piece(json.dumps(key, ensure_ascii=False)[1:-1], True),
                Piece(to_value if kind == "string" else to_value[:-1], False)]


def _first_argument(function: dict[str, Any]) -> tuple[str | None, Any]:
    """Name and type of the first argument that a call must have; (None, None) if there is none."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or [None]
    schema = (parameters.get("properties") or {}).get(required[0])
    return (required[0], schema.get("type")) if isinstance(schema, dict) else (None, None)


def _short(call_id: str) -> str:
    """An id that any template takes and that spells nothing: some ask for nine letters and digits."""
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:7], "big")
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[number // 36**n % 36] for n in range(9))
