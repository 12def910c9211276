"""What a model writes, as LangChain's chunks: transformers' response parser tells content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.messages.utils import message_chunk_to_message
from transformers.utils.chat_parsing import ResponseParser

from langchain_locret.tool_prompt import CLOSE, OPEN
from locret_stream import ConfigError

CALLS = "tool_calls"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_HERMES = {"open": OPEN, "close": CLOSE, "content": "json", "repeats": True,
           "transform": {"type": "function", "function": "{content}"}}


def response_template(tokenizer: Any, given: dict[str, Any] | None, prompt: str,
                      chat_template: str | None = None, *, in_words: bool = False) -> dict[str, Any]:
    """What tells the parts of a reply apart: the given one, the tokenizer's own, or what the chat template shows.

    Without one there is content alone, `<think>` as reasoning and `<tool_call>` as JSON calls where the chat template
    writes these.

    Args:
        prompt: the generation prompt, after which a reply begins.
        chat_template: that is used in place of the tokenizer's, whose own response template then does not count.
        in_words: calls are written in the form of `tool_prompt`, whatever the template writes.
    """
    found = given or (getattr(tokenizer, "response_template", None) if chat_template is None else None)
    if found is None:
        shown = str(chat_template or tokenizer.chat_template or "")
        fields: dict[str, Any] = {"content": {"content": "text", "content_args": {"strip": False}}}
        if "<think>" in shown:
            fields["thinking"] = {"open": "<think>", "close": "</think>"}
        if "<tool_call>" in shown and "</tool_call>" in shown:
            fields[CALLS] = _HERMES
        found = {"start_anchor": prompt, "fields": fields}
    if in_words:
        found = {**found, "fields": {**found.get("fields", {}), CALLS: _HERMES}}
    try:
        ResponseParser(found, prefix=prompt)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the response template cannot be used: {error}; expected one as transformers' "
                          "ResponseParser takes") from error
    return found


def shows_special(template: dict[str, Any], special: list[str]) -> bool:
    """Whether a reply can only be told apart with special tokens in its text."""
    anchors = json.dumps([template["fields"]], ensure_ascii=False)
    return any(token and json.dumps(token, ensure_ascii=False)[1:-1] in anchors for token in special)


class Reply:
    """One reply as it comes in; its chunks add up to the message.

    Attributes:
        merged: the chunks so far as one.
    """

    def __init__(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]]):
        self._template, self._tools = template, tools
        self._parser = ResponseParser(template, prefix=prefix, tools=tools)
        self._region, self._raw = "", ""
        self._content = self._held = ""
        self._calls, self._ids = 0, set[str]()
        self._shown, self._thought, self._called = "", "", list[ToolCallChunk]()  # since the last chunk
        self.merged = AIMessageChunk(content="")
        self._handle(self._parser.initial_events)

    def feed(self, text: str) -> Iterator[AIMessageChunk]:
        """The chunk that this text completes: one, or none."""
        for character in text:  # one by one: a region that cannot be read is then lost with nothing else
            if self._region:
                self._raw += character
            try:
                self._handle(self._parser.feed(character))
            except (ValueError, RecursionError):
                self._unreadable()
        yield from self._chunk()

    def finish(self) -> Iterator[AIMessageChunk]:
        """What was held back; the reply ends here."""
        try:
            self._handle(self._parser.finalize()[1])
            if self._region == CALLS:  # cut short inside a call
                self._unreadable()
        except (ValueError, RecursionError):
            self._unreadable()
        yield from self._chunk()

    @property
    def message(self) -> AIMessage:
        return message_chunk_to_message(self.merged)

    def _chunk(self) -> Iterator[AIMessageChunk]:
        """What was completed since the last one, if anything was."""
        if self._shown or self._thought or self._called:
            beside = {"reasoning_content": self._thought} if self._thought else {}
            chunk = AIMessageChunk(content=self._shown, additional_kwargs=beside, tool_call_chunks=self._called)
            self._shown, self._thought, self._called = "", "", []
            self.merged = self.merged + chunk
            yield chunk

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
                    self._raw = event["text"]  # of the prompt: the opening of a call that was asked for
            else:
                self._region = ""
                if field == CALLS:
                    for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                        self._call(value)

    def _show(self, text: str) -> None:
        """Content without the white space around calls that belongs to neither."""
        text = self._held + text
        if not self._content:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._held = text[len(shown):]
        self._content += shown
        self._shown += shown

    def _call(self, value: Any) -> None:
        """A tool call; one that is not a name with an object of arguments is invalid and says what was written."""
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
        own = function.get("id", value.get("id"))  # some templates show ids, and their models write them
        self._add(name, json.dumps(arguments, ensure_ascii=False), own)

    def _unreadable(self) -> None:
        """The region that is open cannot be read; the parser begins anew behind it."""
        raw, self._region, self._raw = self._raw, "", ""
        self._parser = ResponseParser(self._template, prefix="", tools=self._tools)
        self._invalid(raw)

    def _invalid(self, raw: str) -> None:
        """What was written instead of a call, its opening included: LangChain would complete JSON that breaks off."""
        field = self._template["fields"].get(CALLS, {})
        opening, closing = ([one] if isinstance(one, str) else one for one in (field.get("open"), field.get("close")))
        for one in closing or ():
            raw = raw.removesuffix(one)
        written = f"{opening[0] if opening else '<tool_call>'}{raw}"
        # LangChain would try every beginning of a long text for JSON; a JSON string is told apart at once.
        self._add(None, written if len(written) <= 1000 else json.dumps(written, ensure_ascii=False))

    def _add(self, name: str | None, arguments: str, own: Any = None) -> None:
        taken = isinstance(own, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", own) and own not in self._ids
        call_id = own if taken else f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(call_id)
        self._called.append(tool_call_chunk(name=name, args=arguments, id=call_id, index=self._calls))
        self._calls += 1


def _whole(value: Any) -> bool:
    """Whether it can be written as text: JSON can spell half of a character."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False
