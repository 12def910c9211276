"""What a model writes, in parts as it comes; transformers' parser separates content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from locret_stream.conversation.call_readers import (
    INNER,
    UNREADABLE,
    Called,
    as_call,
    fitted,
    tools_by_name,
)
from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import Call, Part
from locret_stream.conversation.reply_forms import (
    ALONE,
    ANSWER,
    CALL_BEGINS,
    CALLS,
    READERS,
    SAYS,
    THINKING,
    UNMARKED,
    WITH_MARK,
    call_field,
    fields_of,
    known_marks,
)
from locret_stream.errors import ConfigError

_REASONING = (THINKING, "reasoning", "reasoning_content")


def response_template(tokenizer: Any, given: dict[str, Any] | None, prompt: str,
                      chat_template: str | None = None, *, in_words: bool = False) -> dict[str, Any]:
    """The response template, which separates the parts of a reply: the given one, the tokenizer's own, or one of the
    forms (`reply_forms`) whose marks the chat template, or an added token, shows.

    Args:
        prompt: the generation prompt, after which a reply begins: what the template writes behind the last message.
        chat_template: is used in place of the tokenizer's, whose response template then does not count.
        in_words: calls are written in the form of `tool_prompt`, whatever the template writes.

    Raises:
        ConfigError: transformers refuses the response template.
    """
    template = given or (getattr(tokenizer, "response_template", None) if chat_template is None else None)
    if template is None:
        source = str(chat_template or tokenizer.chat_template or "")
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        fields, written = fields_of(source, known_marks(source, [prompt, *added.values()]), prompt)
        template = {"start_anchor_pattern": r"\A" + re.escape(prompt.removesuffix(written)), "fields": fields}
    if in_words:
        template = {**template, "fields": {**template.get("fields", {}), _words_field(template): call_field()}}
    try:
        ResponseParser(template, prefix=prompt)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the response template cannot be used: {error}; expected one as transformers' "
                          "ResponseParser takes") from error
    return template


def read_response_template(written: bytes) -> dict[str, Any]:
    """A response template that is written as JSON. Raises ConfigError."""
    try:
        template = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"found no JSON: {error}; expected an object as of transformers' ResponseParser") from error
    return response_template(None, template or {"fields": {}}, "")


def marks_among(template: dict[str, Any], tokens: Iterable[str]) -> set[str]:
    """Those of the special tokens that separate the parts of a reply, so that its text must show them."""
    fields = template["fields"]
    anchors = json.dumps([fields], ensure_ascii=False)
    patterns = "\n".join(pattern for field in fields.values() for name in ("open_pattern", "close_pattern")
                         if isinstance(pattern := field.get(name), str))
    inner = INNER if any(name.startswith(f"{CALLS}:") and name != ALONE for name in fields) else ()
    return {token for token in tokens if token and (
        json.dumps(token, ensure_ascii=False)[1:-1] in anchors or re.escape(token) in patterns or token in inner)}


class Reply:
    """One reply while it is generated; its parts add up to `message`.

    Args:
        template: as `response_template` gives it. prefix: the generation prompt and what the prompt wrote of the reply.
        tools: as OpenAI's function schemas.
        stops: strings of which the first that stands in the content ends the reply, without it.

    Attributes:
        calls: that were made so far.
        text: all that was fed.
        stop_at: the character of `text` at which a stop string begins; None: there was none.
        cut_thought: whether the reply ended inside a thought.
    """

    def __init__(self, template: dict[str, Any], prefix: str, tools: Sequence[dict[str, Any]],
                 stops: Sequence[str] = (), begun: str = ""):
        self._tools, self._stops = tools_by_name(tools), [stop for stop in stops if stop]
        fields = template["fields"]
        self._known = ALONE in fields  # the forms are those of our table, which no text can make fail
        unmarked, self._kept = fields.get(UNMARKED), ""
        self._unmarked = (unmarked["open"], unmarked["close"]) if unmarked else None
        self._template = template = {**template, "fields": {
            name: field for name, field in fields.items() if name != UNMARKED and (tools or name != ALONE)}}
        self._parser = ResponseParser(template, prefix=prefix)  # without the tools: `fitted` knows types
        before = re.match(template["start_anchor_pattern"], prefix) if self._known else None
        # Of the reply, written by the prompt: no text of the model's.
        self._by_prompt = prefix.removesuffix(begun)[before.end():] if before else ""
        self._region, self._raw, self._ended = "", "", False  # the field that is open, its text; whether all came
        self._content = self._thoughts = ""
        self._pending = ""  # content that may begin a stop string, and line ends that may stand at its end
        self._white = ""  # of a thought, which may be the last of it
        self._run, self._run_at = "", 0  # content since the last mark, as it was written, and where it may begin
        self.calls, self._ids, self.text = list[Call](), set[str](), ""
        self.stop_at: int | None = None
        self.cut_thought = False
        self._shown, self._thought, self._reported = "", "", 0  # since the last part; calls that parts had
        self._handle(self._parser.initial_events)

    @property
    def thinking(self) -> bool:
        """Whether a thought is open."""
        return self._kind in _REASONING

    def feed(self, text: str) -> Iterator[Part]:
        """The part that this text completes: one, or none. Nothing is read behind a stop string."""
        # One by one where something else could be lost with a region that cannot be parsed, or a place counts.
        for piece in (text,) if self._known and not self._stops else text:
            if self.stop_at is not None:
                break
            self.text += piece
            for certain in self._certain(piece) if self._unmarked else [piece]:
                self._parse(certain)
        yield from self._part()

    def finish(self) -> Iterator[Part]:
        """The part of what was buffered; the reply ends here."""
        self._ended = True
        try:
            if self.stop_at is None:
                self._handle(self._parser.feed(self._kept))
                self._handle(self._parser.finalize()[1])
                if self._region == CALLS:  # cut short inside a call
                    self._unreadable()
        except (ValueError, RecursionError):
            self._unreadable()
        self._flush()
        yield from self._part()

    def _parse(self, piece: str) -> None:
        if self._region:
            self._raw += piece
        try:
            self._handle(self._parser.feed(piece))
        except (ValueError, RecursionError):
            self._unreadable()

    def _certain(self, piece: str) -> list[str]:
        """What can be parsed, of a reply that may have begun with a thought without its opening mark."""
        assert self._unmarked is not None
        mark, close = self._unmarked
        self._kept += piece
        begun = self._kept.lstrip()
        if mark.startswith(begun):
            return []
        out = [self._kept]
        if not begun.startswith(mark):
            at = self._kept.find(close, max(0, len(self._kept) - len(piece) - len(close)))
            if at < 0:
                return []
            behind = at + len(close)
            out = [mark + self._kept[:behind], self._kept[behind:]]
        self._unmarked, self._kept = None, ""
        return out

    @property
    def message(self) -> Message:
        """The reply so far. Calls that cannot be read are text of it."""
        unreadable = "".join(call.arguments for call in self.calls if call.name is None)
        return Message("assistant", self._content + unreadable, self._thoughts, calls=tuple(
            (call.name, json.loads(call.arguments), call.id) for call in self.calls if call.name is not None))

    def _part(self) -> Iterator[Part]:
        """What was completed since the last part, if anything was."""
        called = tuple(self.calls[self._reported:])
        if self._shown or self._thought or called:
            yield Part(self._shown, self._thought, called)
            self._shown, self._thought, self._reported = "", "", len(self.calls)

    @property
    def _kind(self) -> str:
        return self._region.partition(":")[0]

    def _handle(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if self.stop_at is not None:
                return
            field, kind = event["field"], event["field"].partition(":")[0]
            if event["type"] == "region_open":
                self._region, self._raw = field, ""
                if field != "content":
                    self._by_prompt = ""
                    self._begin_run()
            elif event["type"] == "region_chunk":
                if kind in ("content", ANSWER):
                    self._show(event["text"])
                elif kind in _REASONING:
                    self._think(event["text"])
                elif not self._raw:
                    self._raw = event["text"]  # from the prefix: the opening of a call that the caller demanded
            else:
                self._region = ""
                self._begin_run()
                if kind == CALLS:
                    self._close_calls(field, event["value"])
                elif kind in _REASONING:
                    self.cut_thought = self._ended
                    self._white = "\n" if self._thoughts else ""  # ahead of another thought

    def _begin_run(self) -> None:
        self._run, self._run_at = "", 0 if self._kept else max(0, len(self.text) - 2)

    def _think(self, text: str) -> None:
        """Add to the thoughts, without white space at either end."""
        text = self._white + text
        if not self._thoughts:
            text = text.lstrip()
        shown = text.rstrip()
        self._white = text[len(shown):]
        self._thoughts += shown
        self._thought += shown

    def _show(self, text: str) -> None:
        """Add content, without line ends at its beginning or ahead of a call, up to a stop string."""
        text, self._by_prompt = text.removeprefix(self._by_prompt), ""
        self._run += text
        pending = self._pending + text
        if not self._content:
            pending = pending.lstrip("\n")
        places = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            begins = max(0, len(self._run) - len(pending) + at)
            found = self.text.find(self._run[:begins + len(stop)], self._run_at)
            self.stop_at = len(self.text) if found < 0 else found + begins
            self._pending = pending[:at]
            self._flush()
            return
        kept = max((n for stop in self._stops for n in range(1, min(len(stop), len(pending) + 1))
                    if pending.endswith(stop[:n])), default=0)
        self._pending = pending[len(pending) - kept:]
        pending = pending[:len(pending) - kept]
        # White space alone is shown once more follows: it may be what a model writes around its calls.
        shown = pending.rstrip("\n") if self._content or not pending.isspace() else ""
        self._pending = pending[len(shown):] + self._pending
        self._content += shown
        self._shown += shown

    def _flush(self) -> None:
        """What is pending begins no stop string. White space that is all there is beside calls is no content."""
        shown = self._pending.rstrip("\n")
        self._pending = self._pending[len(shown):]
        if shown.isspace() and self.calls and not self._content:
            return
        self._content += shown
        self._shown += shown

    def _close_calls(self, field: str, value: Any) -> None:
        """Calls that are whole, or what else stands in their place."""
        if not (isinstance(value, dict) and field.startswith(CALLS) and "form" in value):
            for each in value if isinstance(value, list) else [value]:
                call = as_call(each)
                if call is None:
                    self._invalid(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False, default=str))
                else:
                    self._add(fitted(call, self._tools))
            return
        form, mark, text = value["form"], value["mark"], value["text"]
        close = self._template["fields"][field].get("close", "")
        open_ended = not close or self._ended
        try:
            found = READERS[form](mark + text if form in WITH_MARK else text, self._tools, not self._ended)
            called = [fitted(call, self._tools) for call in found[0]] if found is not None else []
        except UNREADABLE:
            found, called = None, []
        if found is None or not called or (found[1].strip() and not open_ended):
            written = mark + text + (close if isinstance(close, str) and not self._ended else "")
            if form == "alone":
                self._show(written)
            elif form in SAYS and not CALL_BEGINS.match(text):
                self._show(text)
            else:
                self._add_text(written)
            return
        for call in called:
            self._add(call)
        rest = found[1].strip()
        if rest and not (isinstance(close, str) and close.startswith(rest)):  # a closing mark may be cut off
            self._show(found[1])

    def _unreadable(self) -> None:
        """The region that is open cannot be parsed; a new parser begins behind it."""
        raw, self._region, self._raw = self._raw, "", ""
        self._parser = ResponseParser(self._template, prefix="")
        self._invalid(raw)

    def _invalid(self, raw: str) -> None:
        """Add a call that cannot be read, with the text written, its opening included."""
        field = self._template["fields"].get(CALLS, {})
        opening, closing = ([mark] if isinstance(mark, str) else mark
                            for mark in (field.get("open"), field.get("close")))
        for mark in closing or ():
            raw = raw.removesuffix(mark)
        self._add_text(f"{opening[0] if opening else '<tool_call>'}{raw}")

    def _add(self, called: Called) -> None:
        """Some templates show ids, and their models write them."""
        usable = re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", called.id) and called.id not in self._ids
        self.calls.append(Call(called.name, json.dumps(called.arguments, ensure_ascii=False),
                               self._new_id(called.id if usable else ""), len(self.calls)))
        self._flush()

    def _add_text(self, written: str) -> None:
        """Add a call that cannot be read."""
        self._flush()
        self.calls.append(Call(None, written, self._new_id(), len(self.calls)))

    def _new_id(self, written: str = "") -> str:
        call_id = written or f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(call_id)
        return call_id


def _words_field(template: dict[str, Any]) -> str:
    """The field of calls in words: among those of the table one more, else in place of what there is."""
    return f"{CALLS}:<tool_call>" if ALONE in template.get("fields", {}) else CALLS
