"""Where the messages of a memory stand in its log. A boundary has the places of the last messages before it: each with
the role under which the template showed it, and without the template's frame."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from locret_stream.conversation.messages import Message
from locret_stream.conversation.probes import Piece
from locret_stream.conversation.render import ChatTemplate, Rendered
from locret_stream.errors import ConfigError
from locret_stream.text import TextCodec

UNKNOWN = "unknown"  # of what was told before the places that are kept
ROLES = (UNKNOWN, "user", "system", "assistant", "tool")
STREAM = 0x80
MOST = 512  # messages
_ROW = struct.Struct("<BQQ6s")
_ROWS = np.dtype([("code", "u1"), ("start", "<u8"), ("end", "<u8"), ("tag", "S6")])  # the same


class Place(NamedTuple):
    """Tokens start .. end-1 of the log are the content of one message, or all that was told before the others.

    Attributes:
        stream: it was absorbed, and no message has its text. tag: [6], of the message's digest.
    """

    role: str
    start: int
    end: int
    tag: bytes = bytes(6)
    stream: bool = False

    @property
    def id(self) -> str:
        """The same for as long as the message is held, in every process."""
        return f"msg_{self.start:016x}{self.tag.hex()}"


@dataclass
class Placing:
    """The places of messages that are fed one after another, counted from where the first of them begins.

    Attributes:
        at: the position of the next token.
    """

    at: int = 0
    places: list[Place] = field(default_factory=list)

    def take(self, rendered: Rendered, shown: Sequence[Message], start: int, pieces: Sequence[Piece],
             each: Sequence[Sequence[int]], template: ChatTemplate | None = None) -> None:
        """Pieces of a rendering of these messages are fed, which begin at its character `start`: the ids of each.

        Args:
            template: that wrote them. Without it what the template writes of a call, and messages without any text,
                are not found.
        """
        fed = _Fed(start, pieces, each, None if template is None else template.codec)
        last = start
        for begin, end, number in _spans(rendered, shown, start, template):
            begin = max(begin, last)
            if begin <= end and begin < fed.end:
                first = fed.token(begin, whole=begin == end)
                self.add(shown[number], self.at + first, self.at + max(first, fed.token(end, whole=True)))
                last = end
        self.at += fed.tokens

    def add(self, message: Message, start: int, end: int, *, stream: bool = False) -> None:
        role = message.role if message.role in ROLES else UNKNOWN
        self.places.append(Place(role, start, end, message.digest[:6], stream))


class _Fed:
    """Which tokens the characters of a rendering became, from `start` on.

    Attributes:
        end: the character behind them. tokens: their number.
    """

    def __init__(self, start: int, pieces: Sequence[Piece], each: Sequence[Sequence[int]], codec: TextCodec | None):
        self._pieces, self._each, self._codec = pieces, each, codec
        self._rows = list[tuple[int, int]]()  # the first character and the first token of each piece
        self.end, self.tokens = start, 0
        for piece, ids in zip(pieces, each, strict=True):
            self._rows.append((self.end, self.tokens))
            self.end += piece.covers
            self.tokens += len(ids)

    def token(self, at: int, *, whole: bool) -> int:
        """The number of tokens ahead of that character; `whole`: with one that has text on both sides of it."""
        number = bisect_right(self._rows, at, key=lambda row: row[0]) - 1
        (begin, tokens), piece, ids = self._rows[number], self._pieces[number], self._each[number]
        if at <= begin:
            return tokens
        if piece.data:  # white space at its ends stands outside of its probe
            return tokens + len(ids) * whole
        if at >= begin + len(piece.text):
            return tokens + len(ids)
        assert self._codec is not None
        ahead, count = piece.text[:at - begin].encode(), 0
        size = len(_dense(ahead))
        for text in (_dense(self._codec.piece(token)) for token in ids):
            if size <= 0 and (text or not ahead[-1:].isspace()):
                break
            size -= len(text)
            count += 1
        return tokens + count - (size < 0 and not whole)


def _dense(text: bytes) -> bytes:
    """Without white space, of which tokenizers add some."""
    return b"".join(text.split())


def _spans(rendered: Rendered, shown: Sequence[Message], start: int, template: ChatTemplate | None
           ) -> list[tuple[int, int, int]]:
    """(first character, the one behind the last, number) of each message that has any from `start` on, in order."""
    spans = []
    for number, (begin, end) in enumerate(zip(rendered.begins, rendered.ends, strict=True)):
        if end > start:
            if template is not None and shown[number].calls:
                begin, end = _with_call(template, shown[number], rendered.whole, begin, end)
            spans.append((begin, end, number))
    if template is not None:
        spans += [(at, at, number) for number, at in _without_text(rendered, shown, template) if at >= start]
    return sorted(spans)


def _with_call(template: ChatTemplate, message: Message, whole: str, begin: int, end: int) -> tuple[int, int]:
    """The characters of a message with calls, from what opens the first call, if that comes first, to what closes the
    last: what the template writes around such a message and not around an answer of text."""
    asked, call = Message("user", "?"), replace(message, content="", reasoning="")
    try:
        (ahead, behind), (header, ending) = (
            (shown.whole[shown.ends[0]:shown.begins[1]], shown.whole[shown.ends[1]:shown.body or None])
            for shown in (template.render([asked, said]) for said in (call, Message("assistant", "?"))))
    except ConfigError:
        return begin, end
    opening = ahead[_shared(ahead, header):]
    closing = behind[:len(behind) - _shared(behind[::-1], ending[::-1])]
    return (begin - len(opening) if whole.endswith(opening, 0, begin) else begin,
            end + len(closing) if whole.startswith(closing, end) else end)


def _shared(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _without_text(rendered: Rendered, shown: Sequence[Message], template: ChatTemplate) -> list[tuple[int, int]]:
    """(number, character) of each message without any text. Where it stands is seen when it has one, so that what is
    written behind it is known."""
    empty = [not (message.content or message.calls or end) for message, end in zip(shown, rendered.ends, strict=True)]
    if not any(empty):
        return []
    try:
        filled = template.render([replace(message, content="?") if none else message
                                  for message, none in zip(shown, empty, strict=True)])
    except ConfigError:
        return []
    found, at, same = list[tuple[int, int]](), rendered.body or len(rendered.whole), filled.body or len(filled.whole)
    for number in reversed(range(len(shown))):
        if empty[number]:
            behind = filled.whole[filled.ends[number]:same]
            if not behind or not rendered.whole.endswith(behind, 0, at):
                at = 0  # it is written in another way: where it stands is unknown, and those right ahead of it
                continue
            at, same = at - len(behind), filled.begins[number]
            found.append((number, at))
        elif rendered.ends[number]:
            at, same = rendered.begins[number], filled.begins[number]
    return found


def packed(before: bytes, tokens_before: int, places: Sequence[Place]) -> bytes:
    """The places behind those of an earlier boundary, from whose position they count. What no places are known of, and
    all ahead of the last 512, is one place of unknown role.

    Args:
        tokens_before: the position of that boundary.
    """
    rows = before if _ordered(before) else b""
    if not rows and tokens_before:
        rows = _packed(Place(UNKNOWN, 0, tokens_before))
    rows += b"".join(_packed(place._replace(start=place.start + tokens_before, end=place.end + tokens_before))
                     for place in places)
    if len(rows) > MOST * _ROW.size:
        cut = len(rows) - MOST * _ROW.size
        rows = _packed(Place(UNKNOWN, 0, _ROW.unpack(rows[cut - _ROW.size:cut])[2])) + rows[cut:]
    return rows


def _packed(place: Place) -> bytes:
    return _ROW.pack(ROLES.index(place.role) | STREAM * place.stream, place.start, place.end, place.tag)


def unpacked(rows: bytes) -> list[Place]:
    """Places as a note has them; notes are untrusted: [] for what are none."""
    if not _ordered(rows):
        return []
    return [Place(ROLES[code % STREAM] if code % STREAM < len(ROLES) else UNKNOWN, start, end, tag, code >= STREAM)
            for code, start, end, tag in _ROW.iter_unpack(rows)]


def _ordered(rows: bytes) -> bool:
    """Whether these are places, one behind another."""
    if len(rows) % _ROW.size:
        return False
    places = np.frombuffer(rows, _ROWS)
    starts, ends = places["start"], places["end"]
    return bool((starts <= ends).all() and (ends[:-1] <= starts[1:]).all())
