"""Cuts text before it is tokenised, by a pure function of the text. Knows nothing of tokens.

A segment that begins at character s ends at the smallest of
    the end of its first run of newlines (`\\r` and `\\n` in any mix), once another character follows the run;
    the first i >= s + 1,024 where character i is whitespace other than a newline and character i - 1 is not
        whitespace: a run of whitespace stays whole, at the head of the next segment;
    s + 4,096.
All three depend on characters already read, so the pieces in which the text arrives change nothing. A character (a
code point) is never divided; a line of more than 4,096 characters without whitespace may be cut between a letter and
its combining mark.
"""

from __future__ import annotations

import codecs
import re

import msgspec

from locret_stream.errors import InvalidText

SOFT_LIMIT = 1024  # characters; after these whitespace ends a segment
HARD_LIMIT = 4096  # characters; no segment has more

_LINE_END = re.compile(r"[\r\n](?=[^\r\n])")
_GAP = re.compile(r"(?<=\S)[^\S\r\n]")


class SegmenterState(msgspec.Struct, frozen=True):
    """The text that a segmenter has buffered: fewer than 4,096 characters, and up to 3 bytes of an incomplete one."""

    text: str = ""
    tail: bytes = b""


class Segmenter:
    """Cuts a stream of text; buffers a segment until its end is certain.

    Args:
        state: that of another segmenter, from a snapshot or a fork.

    Raises:
        InvalidText: no segmenter has such a state.

    Time is linear in the text, whatever the pieces; memory is bounded by `SegmenterState` and the piece.
    """

    def __init__(self, state: SegmenterState | None = None):
        self._text, self._tail, self._seen = "", b"", 0
        if state is not None:
            if self.push(state.text) or self.push(state.tail) or self.state != state:
                raise InvalidText(f"the buffered {len(state.text)} characters and {len(state.tail)} bytes are more "
                                  "than one unfinished segment; expected the state of a segmenter")

    @property
    def state(self) -> SegmenterState:
        """The state from which another segmenter can go on."""
        return SegmenterState(self._text, self._tail)

    def push(self, piece: str | bytes | bytearray | memoryview) -> list[str]:
        """Append a piece of text, or of its UTF-8 bytes, and return the segments that it completes.

        Raises:
            InvalidText: lone surrogates, bytes that are not UTF-8, text in the middle of an incomplete character,
                or neither text nor bytes. Nothing of the piece was appended.
        """
        fresh, tail = self._read(piece)
        text = self._text + fresh
        segments, start, seen = [], 0, self._seen
        while (end := _cut(text, start, seen)) is not None:
            segments.append(text[start:end])
            start = seen = end
        self._text, self._tail, self._seen = text[start:], tail, len(text) - start
        return segments

    def flush(self) -> list[str]:
        """End the text here: the buffered text is the last segment, if there is any.

        Raises:
            InvalidText: the bytes end inside a character; nothing changed. Push its other bytes, or `drop_partial()`.
        """
        if self._tail:
            raise InvalidText(f"the bytes end inside a character: found {self._tail!r}; expected the rest of it")
        segments = [self._text] if self._text else []
        self._text, self._seen = "", 0
        return segments

    def drop_partial(self) -> bytes:
        """Drop the bytes of an incomplete character, and return them."""
        tail, self._tail = self._tail, b""
        return tail

    def _read(self, piece: str | bytes | bytearray | memoryview) -> tuple[str, bytes]:
        """The piece as text, and the bytes of an incomplete character at its end."""
        if isinstance(piece, str):
            if self._tail and piece:
                raise InvalidText(f"text arrived inside a character begun by {self._tail!r}; expected its other bytes")
            return check_text(piece), self._tail
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidText(f"found a piece of type {type(piece).__name__}; expected str or UTF-8 bytes")
        data = self._tail + bytes(piece)
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            at = error.start - len(self._tail)
            where = f"byte {at} of the piece" if at >= 0 else f"{-at} bytes before the piece"
            raise InvalidText(f"{where}: found {data[error.start:error.end + 1]!r} ({error.reason}); "
                              "expected UTF-8") from None
        return text, data[used:]


def cut(text: str) -> list[str]:
    """The segments of a whole text.

    Raises:
        InvalidText: lone surrogates.
    """
    segmenter = Segmenter()
    return segmenter.push(text) + segmenter.flush()


def check_text(text: str) -> str:
    """`text`, if UTF-8 can encode it.

    Raises:
        InvalidText: names the position of a lone surrogate.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidText(f"character {error.start}: found the lone surrogate U+{ord(text[error.start]):04X}; "
                              "expected text that UTF-8 can carry") from None
    return text


def _cut(text: str, start: int, seen: int) -> int | None:
    """Where the segment that begins at `start` ends; None: not in `text`. The first `seen` characters have no end."""
    limit = start + HARD_LIMIT
    line = _LINE_END.search(text, max(start, seen - 1), limit)
    stop = line.end() if line else min(len(text), limit)
    gap = _GAP.search(text, max(start + SOFT_LIMIT, seen), stop)
    if gap:
        return gap.start()
    return stop if line or stop == limit else None
