"""`/v1/responses`: only what is new comes with a request; `previous_response_id` or a conversation says behind what."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from locret_stream.conversation.messages import MEDIA, Message, unread_part
from locret_stream.conversation.parts import Call, End, Part
from locret_stream.conversation.tool_prompt import call_text
from locret_stream.serving.bodies import Json, Sampled, as_struct, as_whole, ignored, refuse, text_of
from locret_stream.serving.chat import ROLES, read_arguments, read_calls, receipt_of, unreadable
from locret_stream.serving.errors import ApiError
from locret_stream.serving.thinking import FIELDS as THINKING

_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("background", False, "a request that is waited for, or stream=true"), ("prompt", {}, "input"),
    ("top_logprobs", 0, "no log-probabilities"), ("modalities", ["text"], "text"))

_UNREAD = {
    "item_reference": "answers are kept in a memory, and no item of them by its id; expected previous_response_id or "
                      "conversation, which go on behind what was said, or the item itself",
    "custom_tool_call": "the only tools here are functions; expected function_call, with arguments as JSON",
    "custom_tool_call_output": "the only tools here are functions; expected function_call_output",
    "compaction": "only who made it can read it; expected the messages themselves"}


class ResponsesBody(Sampled, kw_only=True):
    """What is read of a body of `/v1/responses`."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def read_responses(body: Mapping[str, Any]) -> tuple[ResponsesBody, list[str]]:
    """A body, and the names of its fields that have no effect. Raises ApiError 400."""
    refuse(body, _REFUSED)
    given = as_struct(body, ResponsesBody)
    if given.previous_response_id is not None and given.conversation is not None:
        raise ApiError(400, "previous_response_id and conversation were both given; expected one of them",
                       param="conversation", code="mutually_exclusive_parameters")
    if not given.input:
        raise ApiError(400, "input is empty; expected a text, or items", param="input")
    return given, ignored(body, ResponsesBody, (*THINKING, *(name for name, _, _ in _REFUSED)))


def conversation_id(given: str | Mapping[str, Any] | None) -> str | None:
    """Raises ApiError 400."""
    name = given.get("id") if isinstance(given, Mapping) else given
    if given is not None and (not isinstance(name, str) or not name):
        raise ApiError(400, "conversation has no id; expected an id, or an object with one", param="conversation")
    return name


def read_items(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None, *, field: str = "input"
               ) -> list[Message]:
    """Items of that field as messages, instructions ahead of them. Reasoning is passed over, and a reference to it. A
    call whose arguments are no JSON object is text, as in `chat.read_messages`, whose messages with calls and of the
    role `tool` are read, too. Raises ApiError 400."""
    out = [Message("system", instructions)] if instructions else []
    if isinstance(items, str):
        return [*out, Message("user", items)]
    calls: list[tuple[str, Json, str]] = []
    odd: list[tuple[str, str]] = []  # (id, text) of each
    order: dict[str, int] = {}  # of the newest calls

    def close() -> None:
        """The calls so far belong to the answer before them, or are one without text."""
        if calls or odd:
            whole = tuple(calls)
            if not out or out[-1].role != "assistant" or out[-1].calls:
                out.append(Message("assistant", ""))
            text = "\n".join(filter(None, (out[-1].content, *(written for _, written in odd))))
            out[-1] = replace(out[-1], content=text, calls=whole)
            if whole:
                order.clear()
            order.update({call_id: -1 for call_id, _ in odd})
            order.update({call_id: at for at, (_, _, call_id) in enumerate(whole)})
            calls.clear()
            odd.clear()

    for number, item in enumerate(items):
        where = f"{field}[{number}]"
        if not isinstance(item, Mapping):
            raise ApiError(400, f"{where} is a {type(item).__name__}; expected an object", param=where)
        kind = _kind(item)
        if kind == "function_call":
            name, call_id = item.get("name"), item.get("id") if item.get("call_id") is None else item["call_id"]
            if not isinstance(name, str) or not isinstance(call_id, str):
                raise ApiError(400, f"{where} has no {'name' if not isinstance(name, str) else 'call_id'}; expected a "
                               "function_call with both", param=where)
            arguments = read_arguments(item.get("arguments"), where)
            if isinstance(arguments, str):
                odd.append((call_id, call_text(name, arguments)))
            else:
                calls.append((name, arguments, call_id))
            continue
        if kind == "reasoning":
            continue
        close()
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or ROLES.get(role) in (None, "tool"):
                raise ApiError(400, f"{where}.role is {role!r}; expected user, assistant, system or developer",
                               param=f"{where}.role")
            out.append(Message(ROLES[role], text_of(item.get("content"), f"{where}.content")))
            if role == "assistant" and item.get("tool_calls"):
                given, texts = read_calls(item, where)
                calls += given
                odd += [("", text) for text in texts]
                close()
        elif kind == "function_call_output":
            call_id = item.get("call_id", item.get("tool_call_id"))
            output = item.get("content") if "output" not in item else item["output"]
            if not isinstance(call_id, str):
                raise ApiError(400, f"{where} has no call_id", param=where)
            text = text_of(output, f"{where}.output") if isinstance(output, (str, list, type(None))) else json.dumps(
                output, ensure_ascii=False)
            # Without any call here it answers one that the memory has, as behind `previous_response_id`.
            out.append(Message("tool", text, call_id=call_id, answers=order.get(call_id, -1 if order else 0)))
        elif kind in MEDIA:  # as a part of a message would be
            raise ApiError(400, unread_part(where, 0, kind), param=where, code="unsupported_content")
        else:
            raise ApiError(400, f"{where} is of type {kind!r:.60}; "
                           f"{_UNREAD.get(str(kind), 'expected messages, function calls and their outputs')}",
                           param=where, code="unsupported_item")
    close()
    return out


def _kind(item: Mapping[str, Any]) -> Any:
    """The type of an item, also of one that does not say it: a message, or a reference, which has nothing but an id."""
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if isinstance(item.get("id"), str) and not item.keys() - {"id", "type"} else "message"
    if kind == "message" and item.get("role") == "tool" and item.get("tool_call_id") is not None:
        return "function_call_output"
    if kind == "item_reference" and str(item.get("id")).startswith("rs_"):
        return "reasoning"
    return kind


def read_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None, *, field: str = "input"
                  ) -> list[Message]:
    """`read_items`, of which there must be some that are read. Raises ApiError 400."""
    said = read_items(items, instructions, field=field)
    if not said:
        raise ApiError(400, f"{field} has nothing but reasoning, which is not read; expected a message", param=field)
    return said


class Response:
    """One response while it comes: `events` of its stream, the last of which has it whole."""

    def __init__(self, response_id: str, body: Mapping[str, Any], model: str, conversation: str | None,
                 unused: Sequence[str]):
        self._unused, self._sequence = unused, 0
        self._calls: list[Call] = []
        self._output = list[Json]()
        self._item: Json | None = None  # the one that is open, of thoughts or of text
        self._text = ""  # of it
        self._head: Json = {
            "id": response_id, "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "model": model, "output": [], "error": None, "incomplete_details": None,
            "instructions": body.get("instructions"), "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto", "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"), "metadata": body.get("metadata") or {},
            "temperature": body.get("temperature"), "top_p": body.get("top_p"),
            "store": body.get("store") is not False,
            "max_output_tokens": as_whole(body.get("max_output_tokens")),
            "text": body.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled", "usage": None,
            "conversation": {"id": conversation} if conversation is not None else None}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def failed(self, error: ApiError) -> Json:
        """The event of a failure in mid-stream."""
        return self._event("error", code=error.code or error.kind, message=str(error), param=error.param)

    async def events(self, parts: AsyncGenerator[Part | End]) -> AsyncGenerator[Json]:
        """The first ones come with the first part, so that what fails before it is an error of HTTP."""
        begun = False
        async with aclosing(parts):
            async for part in parts:
                if not begun:
                    begun = True
                    yield self._event("response.created", response=self._head)
                    yield self._event("response.in_progress", response=self._head)
                if isinstance(part, Part):
                    self._calls += part.calls
                    for event in (*self._said("reasoning", part.reasoning), *self._said("message", part.text)):
                        yield event
                    continue
                for event in (*self._said("message", unreadable(self._calls)), *self._finished()):
                    yield event
                yield self._whole(part)

    def _said(self, kind: str, text: str) -> list[Json]:
        """Text that came, of a thought ("reasoning") or of the answer ("message"): the first opens an item of that
        kind."""
        if not text:
            return []
        out = list[Json]()
        if self._item is None or self._item["type"] != kind:
            out += self._closed()
            thought = kind == "reasoning"
            self._item = {"id": f"{'rs' if thought else 'msg'}_{secrets.token_hex(12)}", "type": kind,
                          **({"summary": []} if thought else {"role": "assistant"}),
                          "status": "in_progress", "content": []}
            out += [self._event("response.output_item.added", output_index=len(self._output), item=self._item),
                    self._event("response.content_part.added", **self._place, part=self._part)]
        self._text += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return [*out, self._event(f"response.{self._part['type']}.delta", **self._place, delta=text, **logprobs)]

    @property
    def _place(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}

    @property
    def _part(self) -> Json:
        """The part of the item that is open."""
        assert self._item is not None
        return {"type": "reasoning_text", "text": self._text} if self._item["type"] == "reasoning" else {
            "type": "output_text", "text": self._text, "annotations": []}

    def _closed(self) -> list[Json]:
        """The item that is open, if one is, is whole."""
        if self._item is None:
            return []
        part, place = self._part, self._place
        item = self._item | {"status": "completed", "content": [part]}
        logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
        out = [self._event(f"response.{part['type']}.done", **place, text=self._text, **logprobs),
               self._event("response.content_part.done", **place, part=part),
               self._event("response.output_item.done", output_index=len(self._output), item=item)]
        self._output.append(item)
        self._item, self._text = None, ""
        return out

    def _finished(self) -> list[Json]:
        """Text and calls are whole."""
        out = self._closed()
        for call in self._calls:
            if call.name is None:
                continue
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed",
                    "call_id": call.id, "name": call.name, "arguments": call.arguments}
            at = len(self._output)
            self._output.append(item)
            out += [self._event("response.output_item.added", output_index=at,
                                item=item | {"status": "in_progress", "arguments": ""}),
                    self._event("response.function_call_arguments.delta", item_id=item["id"], output_index=at,
                                delta=call.arguments),
                    self._event("response.function_call_arguments.done", item_id=item["id"], output_index=at,
                                arguments=call.arguments, name=call.name),
                    self._event("response.output_item.done", output_index=at, item=item)]
        return out

    def _whole(self, end: End) -> Json:
        cut = end.finish == "length"
        whole = self._head | {
            "status": "incomplete" if cut else "completed", "output": self._output,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {"input_tokens": end.prompt, "input_tokens_details": {"cached_tokens": end.cached},
                      "output_tokens": end.sampled, "output_tokens_details": {"reasoning_tokens": end.reasoning},
                      "total_tokens": end.prompt + end.sampled},
            "locret": receipt_of(end, self._unused)}
        return self._event("response.incomplete" if cut else "response.completed", response=whole)
