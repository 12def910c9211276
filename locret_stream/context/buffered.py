"""Text and token ids that were pulled from a source and are not accepted yet. Knows no engine and no tokenizer.

A stream goes through four places, in this order, and every piece of it is in exactly one of them:
    segmenter (text whose cut is not known yet) -> segments (cut, not tokenised) -> ids (tokenised) -> the engine.
The first three are *buffered*: bounded, and taken first by the next feed. What the engine has is *accepted*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from locret_stream.errors import InvalidText
from locret_stream.text import Segmenter
from locret_stream.text.segmenter import SegmenterState

Segment = str | list[int]


class BufferedText:
    """The first three places of a stream.

    Attributes:
        left_by_break: what is buffered is the rest of a feed that was left, so it stays behind a question. Otherwise it
            was pushed before the question, and is accepted first.
    """

    def __init__(self, segmenter: SegmenterState | None = None, segments: Iterable[Segment] = (),
                 ids: Iterable[int] = (), *, left_by_break: bool = False):
        self.segmenter, self.segments, self.ids = Segmenter(segmenter), deque(segments), deque(ids)
        self.left_by_break = left_by_break

    def copy(self, *, left_by_break: bool = False) -> BufferedText:
        """The same again, to be changed on its own."""
        return BufferedText(self.segmenter.state, self.segments, self.ids,
                            left_by_break=self.left_by_break or left_by_break)

    @property
    def size(self) -> int:
        """Token ids plus characters."""
        return len(self.ids) + sum(map(len, self.segments)) + len(self.segmenter.state.text)

    def packed(self) -> bytes:
        """Segments, and ids as the first of them, as msgpack; the segmenter's text is stored beside it."""
        return msgspec.msgpack.encode([*([list(self.ids)] if self.ids else []), *self.segments])

    def push_text(self, text: str | bytes) -> None:
        """Add text.

        Raises:
            InvalidText: nothing of it was taken. The bytes of an unfinished character before it are dropped too, as
                the bytes that would have completed the character are lost.
        """
        try:
            self.segments.extend(self.segmenter.push(text))
        except InvalidText:
            self.segmenter.drop_partial()
            raise

    def push_ids(self, ids: list[int]) -> None:
        """Add token ids; the text before them ends there. They are taken also where `cut` raises InvalidText."""
        try:
            self.cut()
        finally:
            self.segments.append(ids)

    def cut(self) -> None:
        """End the text here: what the segmenter keeps back becomes a segment of its own.

        Raises:
            InvalidText: the bytes end inside a character; those bytes are dropped, the text before them is not.
        """
        try:
            self.segments.extend(self.segmenter.flush())
        except InvalidText:
            self.segmenter.drop_partial()
            self.segments.extend(self.segmenter.flush())
            raise

    def tokenized(self, count: int, ids: list[int]) -> None:
        """Replace the first `count` segments by their token ids."""
        for _ in range(count):
            self.segments.popleft()
        self.ids.extend(ids)

    def accepted(self, count: int) -> None:
        """Drop the first `count` ids, which the engine has now."""
        for _ in range(count):
            self.ids.popleft()

    def leave(self) -> None:
        """A feed ends before its source does: the rest of what it pulled stays behind a question."""
        self.left_by_break = self.size > 0

    def take_up(self) -> None:
        """Another call goes on with what is buffered, so it belongs before a question again."""
        self.left_by_break = False

    def discard(self) -> int:
        """Drop everything; returns its size."""
        size = self.size
        self.segments.clear()
        self.ids.clear()
        self.segmenter, self.left_by_break = Segmenter(), False
        return size
