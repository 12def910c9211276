"""`/v1/chat/completions`: the whole history comes with every request, and only what is new of it is read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from locret_stream.conversation.messages import Message, unread_part
from locret_stream.conversation.parts import Call, End, Part
from locret_stream.conversation.tool_prompt import call_text
from locret_stream.serving.bodies import Json, Sampled, as_struct, check_depth, ignored, refuse, text_of
from locret_stream.serving.errors import ApiError
from locret_stream.serving.thinking import FIELDS as THINKING

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}
_NO_SEARCH = "one choice of likeliest or sampled tokens: temperature, top_p, top_k, min_p, repetition_penalty"
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("n", 1, "one answer a request"), ("logprobs", False, "no log-probabilities"),
    ("top_logprobs", 0, "no log-probabilities"), ("logit_bias", {}, _NO_SEARCH),
    ("presence_penalty", 0, _NO_SEARCH), ("frequency_penalty", 0, _NO_SEARCH), ("audio", {}, "text"),
    ("modalities", ["text"], "text"), ("functions", [], "tools"), ("function_call", "none", "tool_choice"),
    ("web_search_options", {}, "tools of your own"))


class ChatBody(Sampled, kw_only=True):
    """What is read of a body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


def read_chat(body: Mapping[str, Any]) -> tuple[ChatBody, list[str]]:
    """A body, and the names of its fields that have no effect. Raises ApiError 400."""
    refuse(body, _REFUSED)
    chat = as_struct(body, ChatBody)
    if not chat.messages:
        raise ApiError(400, "messages is empty; expected at least one", param="messages")
    return chat, ignored(body, ChatBody, (*THINKING, *(name for name, _, _ in _REFUSED)))


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as OpenAI writes them, in its old form, too: `function_call` of an answer, and results of the role
    `function`, which name their tool instead of a call.

    What an answer thought is passed over: most clients do not send it again, and the memory of an answer given here has
    it. A call whose arguments are no JSON object was written so by a model, and clients send it back: it is text at the
    end of its answer, as where an answer of this server has such a call.

    Raises ApiError 400.
    """
    out: list[Message] = []
    open_calls: dict[str, int] = {}
    names: list[str] = []  # of the newest calls
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ApiError(400, f"{where}.role is {role!r}; expected one of {', '.join(ROLES)}", param=f"{where}.role")
        content = text_of(message.get("content"), f"{where}.content")
        name, call_id = message.get("name") or "", ""
        calls: tuple[tuple[str, Json, str], ...] = ()
        if role == "assistant":
            refusal = message.get("refusal")
            if not content and isinstance(refusal, str):
                content = refusal
            if message.get("audio") is not None and not content:  # an earlier answer, by its id alone
                raise ApiError(400, unread_part(where, 0, "audio"), param=f"{where}.audio", code="unsupported_content")
            calls, odd = read_calls(message, where)
            content, name = "\n".join(filter(None, (content, *odd))), ""
            if calls:
                open_calls = {call[2]: at for at, call in enumerate(calls)}
                names = [call[0] for call in calls]
        if role == "tool":
            call_id = message.get("tool_call_id") or ""
        for field, text in (("name", name), ("tool_call_id", call_id)):
            if not isinstance(text, str):
                raise ApiError(400, f"{where}.{field} is {text!r:.80}; expected a text", param=f"{where}.{field}")
        answers = open_calls.get(call_id, -1) if call_id else -1
        if role == "function" and name in names:
            answers = names.index(name)
        out.append(Message(ROLES[role], content, "", calls, call_id, answers, name))
    return out


def read_calls(message: Mapping[str, Any], where: str) -> tuple[tuple[tuple[str, Json, str], ...], list[str]]:
    """(tool calls of an answer, the texts of those whose arguments are no JSON object). Raises ApiError 400."""
    given, old = message.get("tool_calls") or (), message.get("function_call")
    each = [(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(
        given if isinstance(given, (list, tuple)) else [given])]
    if old is not None and not each:  # beside `tool_calls` it is one of them once more
        each.append(({"function": old}, f"{where}.function_call"))
    calls, odd = list[tuple[str, Json, str]](), list[str]()
    for call, place in each:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{place} is no call of a function with a name", param=place)
        name, arguments = function["name"], read_arguments(function.get("arguments"), place)
        if isinstance(arguments, str):
            odd.append(call_text(name, arguments))
        else:
            calls.append((name, arguments, str(call.get("id") or "")))
    return tuple(calls), odd


def read_arguments(written: Any, where: str) -> Json | str:
    """Arguments of a call; as they are written where they are no JSON object, such as a list or the beginning of one.
    Raises ApiError 400: they have too many levels."""
    try:
        arguments = json.loads(written) if isinstance(written, str) and written.strip() else written
    except ValueError:
        return str(written)
    except RecursionError:
        raise ApiError(400, f"{where}.arguments has too many levels; expected fewer", code="too_deep",
                       param=f"{where}.arguments") from None
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    check_depth(arguments)
    if not isinstance(arguments, dict):
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    return arguments


def read_tools(tools: Sequence[Any]) -> tuple[Json, ...]:
    """Tools as OpenAI's function schemas, from either API's form. Raises ApiError 400."""
    out, taken = [], set[str]()
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise ApiError(400, f"tools[{at}] is of type {kind!r}; expected 'function': the server has no tools of its "
                           "own", param=f"tools[{at}]", code="unsupported_tool")
        inner = tool.get("function", tool)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"] or not isinstance(
                inner.get("parameters") or {}, dict):
            raise ApiError(400, f"tools[{at}] has no name, or parameters that are no JSON schema", param=f"tools[{at}]")
        if inner["name"] in taken:
            raise ApiError(400, f"tools[{at}] is named {inner['name']!r:.80}, as an earlier one is; expected names of "
                           "their own", param=f"tools[{at}]")
        taken.add(inner["name"])
        schema = inner.get("parameters") or {}
        required, properties = schema.get("required") or [], schema.get("properties") or {}
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required) or not isinstance(
                properties, dict):
            raise ApiError(400, f"tools[{at}] has parameters whose required are no list of names, or whose properties "
                           "are no object; expected a JSON schema", param=f"tools[{at}]")
        out.append({"type": "function", "function": {
            key: inner[key] for key in ("name", "description", "parameters") if inner.get(key) is not None}})
    return tuple(out)


def read_format(form: Mapping[str, Any] | None, where: str) -> Json | None:
    """The JSON schema that an answer is asked to fit, from either API's form; None for any text. Raises ApiError 400.
    """
    if form is not None and not isinstance(form, Mapping):
        raise ApiError(400, f"{where} is a {type(form).__name__}; expected an object with a type", param=where)
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(400, f"{where} is of type {kind!r:.60}, or has no schema; expected text, json_object, or "
                       "json_schema with a schema", param=where)
    return schema


def read_choice(choice: Any, tools: Sequence[Json]) -> tuple[str, bool]:
    """(a tool's name, "any", or "" for the model's choice; whether the model is told of the tools). Raises ApiError
    400: there is no such tool."""
    if choice in (None, "auto"):
        return "", True
    if choice == "none":
        return "", False
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice is 'required', and there are no tools; expected tools", param="tool_choice")
    if choice == "required":
        return names[0] if len(names) == 1 else "any", True
    name: Any = None
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ApiError(400, f"tool_choice is {choice!r:.120}; expected 'auto', 'none', 'required', or one of the tools "
                       f"{names}", param="tool_choice")
    return name, True


def unreadable(calls: Sequence[Call]) -> str:
    """What was written of calls that cannot be read: an answer shows it behind its text, as the memory holds it."""
    return "".join(call.arguments for call in calls if call.name is None)


async def chunks(parts: AsyncGenerator[Part | End], model: str, unused: list[str], *, usage: bool
                 ) -> AsyncGenerator[Json]:
    """The answer as chunks of a stream; the last one but `usage` has the receipt (`locret`)."""
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion.chunk", "created": int(time.time()),
            "model": model}

    def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
        return head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]} | more

    begun, index, odd = False, 0, list[Call]()
    async with aclosing(parts):
        async for part in parts:
            if not begun:
                begun = True
                yield chunk({"role": "assistant", "content": "", "refusal": None})
            if isinstance(part, End):
                if odd:
                    yield chunk({"content": unreadable(odd)})
                finish = part.finish if part.finish != "tool_calls" or index else "stop"
                yield chunk({}, finish, locret=receipt_of(part, unused))
                if usage:
                    yield head | {"choices": [], "usage": usage_of(part)}
                continue
            delta: Json = {}
            if part.text:
                delta["content"] = part.text
            if part.reasoning:
                delta["reasoning_content"] = part.reasoning
            odd += [call for call in part.calls if call.name is None]
            calls = [call for call in part.calls if call.name is not None]
            if calls:
                delta["tool_calls"] = [{"index": index + at, "id": call.id, "type": "function", "function": {
                    "name": call.name, "arguments": call.arguments}} for at, call in enumerate(calls)]
                index += len(calls)
            if delta:
                yield chunk(delta)


async def completion(chunks: AsyncIterator[Json]) -> Json:
    """The chunks of an answer as one object."""
    text, reasoning, calls, out = list[str](), list[str](), list[Json](), Json()
    finish = None
    async for each in chunks:
        out |= {key: value for key, value in each.items() if key not in ("choices", "object")}
        for choice in each["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            text.append(delta.get("content") or "")
            reasoning.append(delta.get("reasoning_content") or "")
            calls += [{key: value for key, value in call.items() if key != "index"}
                      for call in delta.get("tool_calls") or ()]
    message: Json = {"role": "assistant", "content": "".join(text) or (None if calls else ""), "refusal": None}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return out | {"object": "chat.completion", "choices": [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}]}


def usage_of(end: End) -> Json:
    return {"prompt_tokens": end.prompt, "completion_tokens": end.sampled, "total_tokens": end.prompt + end.sampled,
            "prompt_tokens_details": {"cached_tokens": end.cached},
            "completion_tokens_details": {"reasoning_tokens": end.reasoning}}


def receipt_of(end: End, unused: Sequence[str]) -> Json:
    """What the memory did (`source`, `reused`, `fed`, ...), what a caller ought to know, and fields without effect."""
    out = dict(end.receipt)
    unused = [*unused, *out.pop("no_option", ())]
    if end.warnings:
        out["warnings"] = list(end.warnings.values())
    if unused:
        out["ignored"] = unused
    return out
