"""Messages as a chat template sees them, and the digests by which memory is bound to them.

The digests cover what the template can show: role, text, reasoning, tool calls, and which call a result answers. They
leave out ids, usage and metadata, so that a message that went through a checkpointer, a database or another process is
the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from locret_stream.errors import InputError

_in_quotes = json.encoder.encode_basestring_ascii
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)
_STAND_IN = re.compile(r"\A\[absorbed stream (.{1,80}): (\d{1,20}) characters, sha256 ([0-9a-f]{64})\]\Z")


def digest(*parts: bytes) -> bytes:
    """sha256 [32] of parts, each with its length ahead, so that different lists of parts differ."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def canonical(value: Any) -> bytes:
    """JSON, the same bytes for equal values; it can hold lone surrogates."""
    return _CANONICAL.encode(value).encode()


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
        if self.calls:
            calls = [[name, arguments] for name, arguments, _ in self.calls]
            return digest(canonical([self.role, self.content, self.reasoning, calls, self.name, self.answers]))[:16]
        # The same bytes, sooner: a history of thousands of messages is hashed in every turn.
        role, content, reasoning, name = map(_in_quotes, (self.role, self.content, self.reasoning, self.name))
        return digest(f"[{role},{content},{reasoning},[],{name},{self.answers}]".encode())[:16]

    @property
    def stream(self) -> bool:
        """Whether it is the stand-in of an absorbed stream."""
        return self.role == "user" and _STAND_IN.match(self.content) is not None


MEDIA = frozenset(f"{before}{kind}" for before in ("", "input_") for kind in (
    "image", "image_url", "audio", "video", "video_url", "audio_url", "file"))
"""Types of parts that are images, sound, video or files, as clients write them."""


def unread_part(where: str, number: int, kind: object) -> str:
    """Why a part of a message's content is refused, and what to do: parts that are no text are not left out, as the
    answer would be to something else than was asked.

    Args:
        where: the message. number: of the part in its content, from 0. kind: its type, as it was given.
    """
    return (f"{where}: part {number} of its content is of type {kind!r:.60}; this library reads text alone in this "
            "version, no images, sound, video or files: expected parts of type 'text', so send what it shows or says "
            "as text")


def stand_in(label: str, characters: int, sha256: str) -> str:
    """The text of the user's message that stands for an absorbed stream; it is all that identifies the stream."""
    return f"[absorbed stream {label}: {characters} characters, sha256 {sha256}]"


def check_label(label: str) -> str:
    """The label.

    Raises:
        InputError: a stand-in with this label could not be recognised.
    """
    if not isinstance(label, str) or not _STAND_IN.match(stand_in(label, 0, "0" * 64)):
        raise InputError(f"label is {label!r}; expected a short text of one line, at most 80 characters")
    return label


def chain(start: bytes, said: Sequence[Message]) -> list[bytes]:
    """Keys of all boundaries: `start`, then one behind each message."""
    keys = [start]
    for message in said:
        keys.append(digest(keys[-1], message.digest))
    return keys
