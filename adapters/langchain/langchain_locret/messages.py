"""LangChain's messages as a conversation has them; ids, usage and metadata are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from locret_stream import InputError
from locret_stream.conversation.messages import MEDIA, Message, unread_part
from locret_stream.conversation.tool_prompt import call_text

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "developer": "developer",
         "function": "tool"}
SUMMARY = "summarization"  # how LangChain's summarising middleware marks a message that it wrote for older ones
RECEIPT = "locret"  # the key of the receipt in response_metadata
WARNINGS = "warnings"  # the key of what the model warns of; it takes that out
_TEXT = {"text", "text-plain"}
_BESIDE_TEXT = {"tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "server_tool_call",
                "server_tool_call_chunk"}
_MEDIA = {"image", "audio", "video", "file", "text-plain"}


def read(messages: Sequence[BaseMessage], first: int = 0, stop: int | None = None) -> list[Message]:
    """The messages as a template sees them, from number `first` up to the one before `stop`. A call that cannot be read
    is text at the end of its answer: in words if it has a name; one without is of this model, and is all that it wrote
    of the call.

    Raises:
        InputError: a text model cannot be shown a message of this kind, or its content.
    """
    out: list[Message] = []
    open_calls: dict[str, int] | None = None  # ids of the newest message with calls; None: it was not looked for yet
    for number, message in enumerate(messages[first:stop], first):
        role = ROLES.get(message.type) or ROLES.get(message.type.removesuffix("MessageChunk").lower())
        if role is None:
            role = getattr(message, "role", None)
            if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,31}", role):
                raise InputError(f"message {number} is a {type(message).__name__} of type {message.type!r}; expected "
                                 "human, ai, system, tool or chat messages")
        content, reasoning, state_key = _text(number, message), "", b""
        calls: tuple[tuple[str, dict[str, Any], str], ...] = ()
        if isinstance(message, AIMessage):
            reasoning = _reasoning(message)
            calls = tuple((call["name"], _plain(call["args"] or {}), call["id"] or "") for call in message.tool_calls)
            unreadable = [(call["name"], _as_written(call["args"] or "")) for call in message.invalid_tool_calls]
            if (old := _old_call(message)) is not None:
                if (arguments := _object(old[1])) is not None:
                    calls = ((old[0], arguments, ""),)
                else:
                    unreadable.append(old)
            for name, written in unreadable:
                content += f"{content and chr(10)}{call_text(name, written)}" if name else written
            state_key = state_key_of(message)
            if message.tool_calls:
                open_calls = _numbers_of(message)
        call_id = message.tool_call_id if isinstance(message, ToolMessage) else ""
        name = "" if role == "assistant" else message.name or ""
        if call_id and open_calls is None:
            open_calls = next((_numbers_of(earlier) for earlier in reversed(messages[:number])
                               if isinstance(earlier, AIMessage) and earlier.tool_calls), {})
        answers = open_calls.get(call_id, -1) if call_id and open_calls else -1
        if message.type == "function" and number and (called := _old_call(messages[number - 1])) is not None:
            answers = 0 if called[0] == name and _object(called[1]) is not None else -1
        summary = message.additional_kwargs.get("lc_source") == SUMMARY
        out.append(Message(role, content, reasoning, calls, call_id, answers, name, summary, state_key))
    return out


def _old_call(message: BaseMessage) -> tuple[str, str] | None:
    """(name, arguments as they are written) of a call in OpenAI's old form, which LangChain does not read."""
    call = message.additional_kwargs.get("function_call")
    if not isinstance(message, AIMessage) or message.tool_calls or not isinstance(call, dict):
        return None
    name, written = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return None
    return name, written if isinstance(written, str) else json.dumps(written, ensure_ascii=False, default=str)


def _object(written: str) -> dict[str, Any] | None:
    """Arguments of a call; None: they are no JSON object."""
    try:
        arguments = json.loads(written) if written.strip() else None
    except (ValueError, RecursionError):
        return None
    return {} if arguments is None else arguments if isinstance(arguments, dict) else None


def _numbers_of(message: AIMessage) -> dict[str, int]:
    """The number of each call of a message, by the call's id."""
    return {call["id"] or "": at for at, call in enumerate(message.tool_calls)}


def as_argument(written: str) -> str:
    """What was written of a call that cannot be read, as LangChain is given it: it would try every beginning of a long
    text as JSON, and complete the beginning of an object to a call; but it recognises a JSON string at once."""
    plain = len(written) <= 1000 and not written.lstrip().startswith(("{", '"'))
    return written if plain else json.dumps(written, ensure_ascii=False)


def _as_written(argument: str) -> str:
    """Undoes `as_argument`."""
    if argument.startswith('"'):
        try:
            return str(json.loads(argument))
        except ValueError:
            pass
    return argument


def _plain(arguments: Any) -> Any:
    """Arguments as JSON: keys are strings, and a value that JSON does not know is its text."""
    return json.loads(json.dumps(arguments, default=str))


def _text(number: int, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    blocks: list[Mapping[str, Any]] = [*message.content_blocks]
    not_shown = [(at, block["type"]) for at, block in enumerate(blocks) if not _shown(block, isinstance(
        message, AIMessage))]
    for at, kind in not_shown:
        part = message.content[at] if at < len(message.content) else None  # calls of an answer come behind
        given = part.get("type", kind) if isinstance(part, dict) else kind
        if kind in _MEDIA or given in MEDIA or not isinstance(message, ToolMessage):
            raise InputError(unread_part(f"message {number}", at, given))
    if not_shown:  # a tool may return any value: the model reads it as JSON
        return json.dumps(message.content, ensure_ascii=False, default=str)
    return "".join(block.get("text") or "" for block in blocks if block["type"] in _TEXT)


def _shown(block: Mapping[str, Any], answer: bool) -> bool:
    """Whether the template can show all of a block: its text, or, in an answer, its calls and reasoning."""
    kind = block["type"]
    if kind == "text-plain":
        return "text" in block and not block.keys() & {"url", "base64", "file_id"}
    inner = block.get("value", {}).get("type") if kind == "non_standard" else None
    return kind == "text" or (answer and (kind in _BESIDE_TEXT or inner == "tool_use"))


def _reasoning(message: AIMessage) -> str:
    reasoning = message.additional_kwargs.get("reasoning_content")
    if isinstance(reasoning, str):
        return reasoning
    if isinstance(message.content, str):
        return ""
    return "".join(block.get("reasoning") or "" for block in message.content_blocks if block["type"] == "reasoning")


def state_key_of(message: BaseMessage) -> bytes:
    """Key of the boundary behind an answer, as its receipt says; b"" without a valid one. It proves nothing by itself.
    """
    receipt = message.response_metadata.get(RECEIPT)
    state = receipt.get("state") if isinstance(receipt, dict) else None
    return bytes.fromhex(state) if isinstance(state, str) and re.fullmatch(r"[0-9a-f]{64}", state) else b""

