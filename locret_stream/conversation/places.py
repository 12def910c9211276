"""Where the messages of a memory stand in its log. A boundary has the places of the last messages before it: each with
the role under which the template showed it, and without the template's frame."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from locret_stream.conversation.messages import Message
from locret_stream.conversation.render import Piece, Rendered

UNKNOWN = "unknown"  # of what was told before the places that are kept
ROLES = (UNKNOWN, "user", "system", "assistant", "tool")
STREAM = 0x80
MOST = 512  # messages
_ROW = struct.Struct("<BQQ6s")


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
             each: Sequence[Sequence[int]]) -> None:
        """Pieces of a rendering of these messages are fed, which begin at its character `start`: the ids of each."""
        spans = iter(sorted((begin, end, number) for number, (begin, end) in enumerate(
            zip(rendered.begins, rendered.ends, strict=True)) if end > start))
        characters, found = rendered.places(start), dict[int, tuple[int, int]]()
        begin, end, number = next(spans, (0, 0, 0))
        for piece, ids in zip(pieces, each, strict=True):
            if piece.data:
                at = next(characters)
                while end and end <= at:
                    begin, end, number = next(spans, (0, 0, 0))
                if begin <= at < end:
                    found[number] = (found.get(number, (self.at, 0))[0], self.at + len(ids))
            self.at += len(ids)
        for number, (first, behind) in found.items():
            self.add(shown[number], first, behind)

    def add(self, message: Message, start: int, end: int, *, stream: bool = False) -> None:
        role = message.role if message.role in ROLES else UNKNOWN
        self.places.append(Place(role, start, end, message.digest[:6], stream))


def packed(before: bytes, tokens_before: int, places: Sequence[Place]) -> bytes:
    """The places behind those of an earlier boundary, from whose position they count. What no places are known of, and
    the oldest beyond 512, is one place of unknown role.

    Args:
        tokens_before: the position of that boundary.
    """
    known = unpacked(before) or ([Place(UNKNOWN, 0, tokens_before)] if tokens_before else [])
    known += [place._replace(start=place.start + tokens_before, end=place.end + tokens_before) for place in places]
    if len(known) > MOST:
        known = [Place(UNKNOWN, 0, known[-MOST].end), *known[1 - MOST:]]
    return b"".join(_ROW.pack(ROLES.index(place.role) | STREAM * place.stream, place.start, place.end, place.tag)
                    for place in known)


def unpacked(rows: bytes) -> list[Place]:
    """Places as a note has them; notes are untrusted: [] for what are none."""
    if len(rows) % _ROW.size:
        return []
    places = [Place(ROLES[code % STREAM] if code % STREAM < len(ROLES) else UNKNOWN, start, end, tag, code >= STREAM)
              for code, start, end, tag in _ROW.iter_unpack(rows)]
    ordered = all(place.start <= place.end for place in places) and all(
        one.end <= other.start for one, other in pairwise(places))
    return places if ordered else []
