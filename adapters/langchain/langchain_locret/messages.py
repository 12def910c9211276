"""Messages as a chat template sees them, and the digests by which memory is bound to them.

The digests cover what the template can show: role, text, reasoning, tool calls, and which call a result answers. They
leave out ids, usage and metadata, so that a message that went through a checkpointer, a database or another process is
the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from locret_stream import InputError

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "developer": "developer"}
SUMMARY = "summarization"  # how LangChain's summarising middleware marks a message that it wrote for older ones
RECEIPT = "locret"  # the key of the receipt in response_metadata
_STAND_IN = re.compile(r"\A\[absorbed stream (.{1,80}): (\d{1,20}) characters, sha256 ([0-9a-f]{64})\]\Z")
_TEXT = {"text", "text-plain"}
_BESIDE_TEXT = {"tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "server_tool_call",
                "server_tool_call_chunk"}
_MEDIA = {"image", "audio", "video", "file", "text-plain"}


def digest(*parts: bytes) -> bytes:
    """sha256 [32] of parts, each with its length ahead, so that different lists of parts differ."""
    out = hashlib.sha256()
    for part in parts:
        out.update(len(part).to_bytes(8, "little") + part)
    return out.digest()


def canonical(value: Any) -> bytes:
    """JSON, the same bytes for equal values; it can hold lone surrogates."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


@dataclass(frozen=True)
class Message:
    """One message as the template sees it.

    Attributes:
        calls: (name, arguments, id) of each tool call.
        call_id, answers: of a tool result, the id of the call that it answers, and that call's number in the newest
            message with calls, -1 if it is none of these.
        name: of the tool or the speaker; "" for an answer, as agents write their name into answers afterwards.
        summary: it stands for older messages.
        state_key: of the boundary behind this answer, as its receipt says; b"" without a receipt.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any], str], ...] = ()
    call_id: str = ""
    answers: int = -1
    name: str = ""
    summary: bool = False
    state_key: bytes = b""

    @cached_property
    def digest(self) -> bytes:
        """[16] bytes, of this message alone."""
        calls = [[name, arguments] for name, arguments, _ in self.calls]
        return digest(canonical([self.role, self.content, self.reasoning, calls, self.name, self.answers]))[:16]

    @property
    def stream(self) -> bool:
        """Whether it is the stand-in of an absorbed stream."""
        return self.role == "user" and _STAND_IN.match(self.content) is not None


def stand_in(label: str, characters: int, sha256: str) -> HumanMessage:
    """The message that stands for an absorbed stream; its text is all that identifies the stream."""
    return HumanMessage(f"[absorbed stream {label}: {characters} characters, sha256 {sha256}]")


def check_label(label: str) -> str:
    """The label.

    Raises:
        InputError: a stand-in with this label could not be recognised.
    """
    if not isinstance(label, str) or not _STAND_IN.match(stand_in(label, 0, "0" * 64).text):
        raise InputError(f"label is {label!r}; expected a short text of one line, at most 80 characters")
    return label


def read(messages: Iterable[BaseMessage]) -> list[Message]:
    """The messages as a template sees them.

    Raises:
        InputError: a text model cannot be shown a message of this kind, or its content.
    """
    out: list[Message] = []
    open_calls: dict[str, int] = {}
    for number, message in enumerate(messages):
        role = ROLES.get(message.type.removesuffix("MessageChunk").lower(), getattr(message, "role", None))
        if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,31}", role):
            raise InputError(f"message {number} is a {type(message).__name__} of type {message.type!r}; expected "
                             "human, ai, system, tool or chat messages")
        content, reasoning, state_key = _text(number, message), "", b""
        calls: tuple[tuple[str, dict[str, Any], str], ...] = ()
        if isinstance(message, AIMessage):
            reasoning = _reasoning(message)
            calls = tuple((call["name"], _plain(call["args"] or {}), call["id"] or "") for call in message.tool_calls)
            content += "".join(call["args"] or "" for call in message.invalid_tool_calls)
            state_key = state_key_of(message)
            if calls:
                open_calls = {call_id: at for at, (_, _, call_id) in enumerate(calls)}
        call_id = message.tool_call_id if isinstance(message, ToolMessage) else ""
        name = "" if role == "assistant" else message.name or ""
        answers = open_calls.get(call_id, -1) if call_id else -1
        summary = message.additional_kwargs.get("lc_source") == SUMMARY
        out.append(Message(role, content, reasoning, calls, call_id, answers, name, summary, state_key))
    return out


def _plain(arguments: Any) -> Any:
    """Arguments as JSON: keys are strings, and a value that JSON does not know is its text."""
    return json.loads(json.dumps(arguments, default=str))


def _text(number: int, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    blocks: list[Mapping[str, Any]] = [*message.content_blocks]
    not_shown = [block["type"] for block in blocks if not _shown(block, isinstance(message, AIMessage))]
    for kind in not_shown:
        if kind in _MEDIA or not isinstance(message, ToolMessage):
            raise InputError(f"message {number} holds {kind!r} content; expected text: this model reads nothing else")
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


def chain(start: bytes, said: Sequence[Message]) -> list[bytes]:
    """Keys of all boundaries: `start`, then one behind each message."""
    keys = [start]
    for message in said:
        keys.append(digest(keys[-1], message.digest))
    return keys
