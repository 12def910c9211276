"""Names in requests: of sessions, and the ids of responses, which say whose memory they belong to."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from locret_stream.serving.errors import ApiError

MARK_BYTES = 16
UNNAMED = "responses/"  # sessions of responses that name none begin so
HEADERS = ("x-session-id", "x-openwebui-chat-id")
_MOST = 200  # characters of a session's name
_UNNAMED = re.compile(rf"{UNNAMED}[0-9a-f]{{24}}")
# What stands behind a session in a path, so that no session's name may end so.
_ENDS = re.compile(r"/(ingest|ask|fork|focus|rewind|snapshot|memory|map|text|search|items(/[^/]*)?)$")
_ID = re.compile(r"resp_([A-Za-z0-9_-]{0,1200})\.([0-9a-f]{32})")


def check_session(name: Any, param: str = "session_id", *, new: bool = False) -> str:
    """The name of a session. Raises ApiError 400.

    Args:
        param: the field that has it. new: it may not be of the form of those that nobody named, which are deleted.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST or not name.isprintable():
        shown = repr(name[:40]) if isinstance(name, str) else "missing" if name is None else f"{name!r:.40}"
        raise ApiError(400, f"{param} is {shown}; expected a text of 1 to {_MOST} printable characters", param=param,
                       code="bad_session")
    if {".", ".."} & {*name.split("/")}:
        raise ApiError(400, f"{param} is {name!r:.80}: clients read '.' and '..' in a path as folders; expected "
                       "another name", param=param, code="bad_session")
    if (end := _ENDS.search(name)) is not None or (new and _UNNAMED.fullmatch(name)):
        why = f"no path could tell it from {end[0]!r} of another" if end else (
            "sessions of that form were named by nobody, and are deleted after a while")
        raise ApiError(400, f"{param} is {name!r:.80}: {why}; expected another name", param=param, code="bad_session")
    return name


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session that a request names: in the body's `session_id`, a header, `metadata.session`, or
    `prompt_cache_key`; None for none. `user` names a person and no conversation. Raises ApiError 400."""
    metadata = body.get("metadata")
    named = [("session_id", body.get("session_id")), *((header, _text_of(headers.get(header))) for header in HEADERS),
             ("metadata.session", metadata.get("session") if isinstance(metadata, Mapping) else None),
             ("prompt_cache_key", body.get("prompt_cache_key"))]
    return next((check_session(name, param, new=True) for param, name in named if name is not None), None)


def _text_of(header: str | None) -> str | None:
    """A header's text, which clients write in UTF-8 and HTTP reads as latin-1."""
    try:
        return None if header is None else header.encode("latin-1").decode()
    except UnicodeError:
        return header


def new_mark() -> bytes:
    return secrets.token_bytes(MARK_BYTES)


def new_session() -> str:
    """A name for the session of a response that names none."""
    return f"{UNNAMED}{secrets.token_hex(12)}"


def new_conversation() -> str:
    """An id for a conversation: it says when it was made, as nothing else is kept of that."""
    return f"conv_{int(time.time()):08x}{secrets.token_hex(12)}"


def created_at(conversation: str) -> int:
    """Seconds since 1970 at which a conversation was made; 0 for a session of another name."""
    match = re.fullmatch(r"conv_([0-9a-f]{8})[0-9a-f]{24}", conversation)
    return int(match[1], 16) if match else 0


def response_id(session: str, mark: bytes) -> str:
    """The id of a response: it holds the name of the session, so that no table of ids is kept anywhere."""
    return f"resp_{base64.urlsafe_b64encode(session.encode()).decode().rstrip('=')}.{mark.hex()}"


def parse_response_id(value: Any) -> tuple[str, bytes]:
    """(session, mark) of a response's id. Raises ApiError 404: it is none."""
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        name = base64.b64decode(match[1] + "=" * (-len(match[1]) % 4), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise no_response(value) from None
    return name, bytes.fromhex(match[2])


def no_response(value: Any) -> ApiError:
    shown = value if isinstance(value, str) and len(value) < 400 else "..."
    return ApiError(404, f"Previous response with id {shown!r} not found: it was never made here, is older than the "
                    "responses that its session keeps, or was forgotten. Expected a later id, or the whole history",
                    code="previous_response_not_found", param="previous_response_id")
