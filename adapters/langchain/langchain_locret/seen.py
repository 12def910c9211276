"""Histories that were given before, recognised by one digest of what stands in their messages.

LangChain gives a chat model new message objects in every call, of a history of which all but the end was read in the
call before. Here a beginning is compared with those given last, at a fraction of what reading it takes. Where none is
the same to the letter, all messages are read.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_locret.messages import RECEIPT, SUMMARY, read
from locret_stream.conversation.histories import History, Known

THREADS = 64  # of which something is kept
EACH = 8  # beginnings of one thread; of conversations without a thread, of all together
_TYPES: dict[type[BaseMessage], str] = {
    HumanMessage: "human", AIMessage: "ai", AIMessageChunk: "AIMessageChunk", SystemMessage: "system",
    ToolMessage: "tool", ChatMessage: "chat"}
_strictly = json.JSONEncoder().encode  # what JSON does not know is an error


class Seen:
    """The beginnings that were given last, 8 of each of 64 threads: of each a digest and what it is (`Known`), and none
    of its text. The 512 of them take 400 KB; each that has absorbed streams, or receipts that lead elsewhere, up to
    20 KB more, so 10 MB at worst.

    Its methods may be called from any OS thread.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._beginnings: OrderedDict[str | None, OrderedDict[tuple[bytes, bytes], Known]] = OrderedDict()

    def history(self, thread: str | None, messages: Sequence[BaseMessage]) -> History:
        """The messages, of which those are read that do not belong to a beginning that was given before. The others
        may be read later, so that the caller must not change any before the call ends.

        Raises:
            InputError: as `read`.
        """
        messages = [*messages]
        with self._guard:
            beginnings = [*self._beginnings.get(thread, {}).items()]
        hashed = _hashed(messages, [known.count for _, known in beginnings])
        same = [known for (given, _), known in beginnings
                if known.count in hashed and hashed[known.count].digest() == given]
        same.sort(key=lambda known: -known.count)
        first = same[0].count if same else 0
        before, new = _written(messages[first:]), read(messages, first)
        after = _written(messages[first:])  # the caller may change a message meanwhile, on another OS thread

        def remember(known: Known) -> None:
            if before is not None and before == after:
                whole = hashed[first].copy()
                whole.update(before)
                self._keep(thread, whole.digest(), known)

        return History(len(messages), new, partial(read, messages), same, remember)

    def forget(self, thread: str) -> None:
        with self._guard:
            self._beginnings.pop(thread, None)

    def _keep(self, thread: str | None, given: bytes, known: Known) -> None:
        with self._guard:
            beginnings = self._beginnings.setdefault(thread, OrderedDict())
            beginnings[given, known.start] = known
            beginnings.move_to_end((given, known.start))
            self._beginnings.move_to_end(thread)
            if len(beginnings) > EACH:
                beginnings.popitem(last=False)
            if len(self._beginnings) > THREADS:
                self._beginnings.popitem(last=False)


def _hashed(messages: Sequence[BaseMessage], counts: Sequence[int]) -> dict[int, hashlib._Hash]:
    """sha256 by the number of messages that it is of: 0, and each of `counts` up to the first message that cannot be
    compared."""
    sha, at, out = hashlib.sha256(), 0, {0: hashlib.sha256()}
    for count in sorted({*counts}):
        if count > len(messages) or (written := _written(messages[at:count])) is None:
            break
        sha.update(written)
        out[count], at = sha.copy(), count
    return out


def _written(messages: Sequence[BaseMessage]) -> bytes | None:
    """All that `read` may look at in these messages; what is written alike is read alike. `_written(a + b)` is
    `_written(a) + _written(b)`. None if one of them cannot be compared like this: it is of
    somebody's own class, or has objects among its tools' arguments, for example.
    """
    try:
        # Version 2 writes equal values, of the same types, as the same bytes, and different ones as others. Behind the
        # mark and the length of the list (5 bytes) stand its values, each of which tells where it ends.
        return marshal.dumps(_held(messages), 2)[5:]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _held(messages: Sequence[BaseMessage]) -> list[Any]:
    """The values of these messages, one behind another; the first one of each message tells how many follow. Raises
    whatever a message does that cannot be compared."""
    held: list[Any] = []  # one list: with one for each message Python would look for garbage every few hundred of them
    for message in messages:
        fields = message.__dict__
        kind, content, more = fields["type"], fields["content"], fields["additional_kwargs"]
        if _TYPES[type(message)] != kind:
            raise ValueError(kind)
        answer = kind == "ai" or kind == "AIMessageChunk"
        if more and "function_call" in more:  # nobody writes these any more
            raise ValueError(kind)
        if type(content) is not str:
            if answer:  # its blocks may depend on all that it has
                held += "whole " + kind, _strictly(fields)
                continue
            content = (_strictly(content),)
        marks = more and (more.get("lc_source") == SUMMARY, more.get("reasoning_content"))
        if answer:
            calls, unreadable = fields["tool_calls"], fields["invalid_tool_calls"]
            if calls or unreadable:
                calls, unreadable = _strictly(calls), _strictly(unreadable)
            receipt = fields["response_metadata"].get(RECEIPT)
            state = receipt.get("state") if isinstance(receipt, dict) else None
            held += kind, content, marks, calls, unreadable, state
        elif kind == "tool" or kind == "chat":
            held += kind, content, marks, fields["name"], fields["tool_call_id" if kind == "tool" else "role"]
        else:
            held += kind, content, marks, fields["name"]
    return held
