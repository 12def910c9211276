"""What a model writes, in parts as it comes; transformers' parser separates content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import Call, Part
from locret_stream.conversation.tool_prompt import CLOSE, OPEN
from locret_stream.errors import ConfigError

CALLS = "tool_calls"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_HERMES = {"open": OPEN, "close": CLOSE, "content": "json", "repeats": True,
           "transform": {"type": "function", "function": "{content}"}}


def response_template(tokenizer: Any, given: dict[str, Any] | None, prompt: str,
                      chat_template: str | None = None, *, in_words: bool = False) -> dict[str, Any]:
    """The response template, which separates the parts of a reply: the given one, the tokenizer's own, or one that is
    read off the chat template.

    The last has content; reasoning between `<think>` and `</think>`, and JSON calls between `<tool_call>` and
    `</tool_call>`, if the chat template contains these marks.

    Args:
        prompt: the generation prompt, after which a reply begins.
        chat_template: is used in place of the tokenizer's, whose response template then does not count.
        in_words: calls are written in the form of `tool_prompt`, whatever the template writes.

    Raises:
        ConfigError: transformers refuses the response template.
    """
    template = given or (getattr(tokenizer, "response_template", None) if chat_template is None else None)
    if template is None:
        shown = str(chat_template or tokenizer.chat_template or "")
        fields: dict[str, Any] = {"content": {"content": "text", "content_args": {"strip": False}}}
        if "<think>" in shown:
            fields["thinking"] = {"open": "<think>", "close": "</think>"}
        if "<tool_call>" in shown and "</tool_call>" in shown:
            fields[CALLS] = _HERMES
        template = {"start_anchor": prompt, "fields": fields}
    if in_words:
        template = {**template, "fields": {**template.get("fields", {}), CALLS: _HERMES}}
    try:
        ResponseParser(template, prefix=prompt)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the response template cannot be used: {error}; expected one as transformers' "
                          "ResponseParser takes") from error
    return template


def shows_special(template: dict[str, Any], special: list[str]) -> bool:
    """Whether the marks that separate the parts of a reply contain special tokens, so that its text must show these."""
    anchors = json.dumps([template["fields"]], ensure_ascii=False)
    return any(token and json.dumps(token, ensure_ascii=False)[1:-1] in anchors for token in special)


class Reply:
    """One reply while it is generated; its parts add up to `message`.

    Args:
        template: as `response_template` gives it. prefix: the generation prompt and what the prompt wrote of the reply.
        tools: as OpenAI's function schemas.

    Attributes:
        calls: that were made so far.
    """

    def __init__(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]]):
        self._template, self._tools = template, list[dict[str, Any] | Callable[..., Any]](tools)
        self._parser = ResponseParser(template, prefix=prefix, tools=self._tools)
        self._region, self._raw = "", ""  # the field that is open, and its text
        self._content = self._white = ""  # the content so far, and line ends behind it that may belong to a call
        self.calls, self._ids, self._reasoning = list[Call](), set[str](), ""
        self._shown, self._thought, self._reported = "", "", 0  # since the last part; calls that parts had
        self._handle(self._parser.initial_events)

    def feed(self, text: str) -> Iterator[Part]:
        """The part that this text completes: one, or none."""
        for character in text:  # one by one, so that nothing else is lost with a region that cannot be parsed
            if self._region:
                self._raw += character
            try:
                self._handle(self._parser.feed(character))
            except (ValueError, RecursionError):
                self._unreadable()
        yield from self._part()

    def finish(self) -> Iterator[Part]:
        """The part of what was buffered; the reply ends here."""
        try:
            self._handle(self._parser.finalize()[1])
            if self._region == CALLS:  # cut short inside a call
                self._unreadable()
        except (ValueError, RecursionError):
            self._unreadable()
        yield from self._part()

    @property
    def message(self) -> Message:
        """The reply so far. Calls that cannot be read are text of it."""
        unreadable = "".join(call.arguments for call in self.calls if call.name is None)
        return Message("assistant", self._content + unreadable, self._reasoning, calls=tuple(
            (call.name, json.loads(call.arguments), call.id) for call in self.calls if call.name is not None))

    def _part(self) -> Iterator[Part]:
        """What was completed since the last part, if anything was."""
        called = tuple(self.calls[self._reported:])
        if self._shown or self._thought or called:
            yield Part(self._shown, self._thought, called)
            self._reasoning += self._thought
            self._shown, self._thought, self._reported = "", "", len(self.calls)

    def _handle(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            field = event["field"]
            if event["type"] == "region_open":
                self._region, self._raw = field, ""
            elif event["type"] == "region_chunk":
                if field == "content":
                    self._show(event["text"])
                elif field in _REASONING:
                    self._thought += event["text"]
                elif not self._raw:
                    self._raw = event["text"]  # from the prefix: the opening of a call that the caller demanded
            else:
                self._region = ""
                if field == CALLS:
                    for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                        self._call(value)

    def _show(self, text: str) -> None:
        """Add content, without line ends at its beginning or ahead of a call."""
        text = self._white + text
        if not self._content:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._white = text[len(shown):]
        self._content += shown
        self._shown += shown

    def _call(self, value: Any) -> None:
        """Add a tool call. What is not a name with an object of arguments becomes an invalid call with its text."""
        function = value.get("function", value) if isinstance(value, dict) else {}
        name, arguments = (function.get("name"), function.get("arguments", function.get("parameters"))) if isinstance(
            function, dict) else (None, None)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass
        if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not _whole([name, arguments]):
            self._invalid(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
            return
        written_id = function.get("id", value.get("id"))  # some templates show ids, and their models write them
        self._add(name, json.dumps(arguments, ensure_ascii=False), written_id)

    def _unreadable(self) -> None:
        """The region that is open cannot be parsed; a new parser begins behind it."""
        raw, self._region, self._raw = self._raw, "", ""
        self._parser = ResponseParser(self._template, prefix="", tools=self._tools)
        self._invalid(raw)

    def _invalid(self, raw: str) -> None:
        """Add a call that cannot be read, with the text written, its opening included."""
        field = self._template["fields"].get(CALLS, {})
        opening, closing = ([mark] if isinstance(mark, str) else mark
                            for mark in (field.get("open"), field.get("close")))
        for mark in closing or ():
            raw = raw.removesuffix(mark)
        self._add(None, f"{opening[0] if opening else OPEN}{raw}")

    def _add(self, name: str | None, arguments: str, written_id: Any = None) -> None:
        usable = isinstance(written_id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", written_id)
        call_id = written_id if usable and written_id not in self._ids else f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(call_id)
        self.calls.append(Call(name, arguments, call_id, len(self.calls)))


def _whole(value: Any) -> bool:
    """Whether a value can be written as UTF-8: JSON can spell half of a surrogate pair."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False
