"""What may be fed: text, bytes, token ids, or an (async) iterator of these, pulled piece by piece; and what was pulled
and is not accepted yet. Knows no engine and no tokenizer.

A stream goes through four places, in this order, and every piece of it is in exactly one of them:
    segmenter (text whose cut is not known yet) -> segments (cut, not tokenised) -> ids (tokenised) -> the engine.
The first three are *buffered*: bounded, and taken first by the next feed. What the engine has is *accepted*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import cast

import msgspec

from locret_stream.errors import InputError, InvalidText, LocretError, SourceError
from locret_stream.text import Segmenter
from locret_stream.text.segmenter import SegmenterState

Piece = str | bytes | list[int]
Segment = str | list[int]
Source = str | bytes | Iterable[Piece] | Iterable[int] | AsyncIterable[Piece] | AsyncIterable[int]

_EXPECTED = "expected text (str), UTF-8 bytes, token ids (list[int]), or an iterator or async iterator of these"


def as_piece(value: object) -> Piece:
    """One item of a source as a piece; a single int is one token id. Raises InputError for any other type."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(value)
    item = getattr(value, "tolist", None)  # numpy arrays and tensors of ids
    if item is not None:
        ids = item()
        return ids if isinstance(ids, list) else [ids]
    raise InputError(f"found a piece of type {type(value).__name__}; {_EXPECTED}")


class Puller:
    """Pulls pieces from a source, never more than asked for. It never closes the source: what is left stays in it.

    A plain iterator is advanced on the event loop, so it should not block for long; wrap slow ones in an async
    generator.
    """

    def __init__(self, source: Source):
        self.pulled = 0
        self._ended = False
        self._async: AsyncIterator[object] | None = None
        self._sync: Iterator[object] = iter(())
        if isinstance(source, (str, bytes, bytearray, memoryview)):
            self._sync = iter([as_piece(source)] if len(source) else [])
        elif isinstance(source, (list, tuple)) and source and not isinstance(source[0], (str, bytes, list, tuple)):
            self._sync = iter([list(source)])  # ids; a wrong one inside is reported with its place
        elif (hasattr(source, "__aiter__") or hasattr(source, "__iter__")) and not isinstance(source, Mapping):
            try:  # the keys of a mapping, such as a message or a part of one, are no text
                if hasattr(source, "__aiter__"):
                    self._async = source.__aiter__()
                else:
                    self._sync = iter(cast(Iterable[object], source))
            except Exception as error:  # such as an array without dimensions
                raise SourceError(f"a source of type {type(source).__name__} cannot be iterated "
                                  f"({type(error).__name__}: {error}); {_EXPECTED}") from error
        else:
            raise InputError(f"found a source of type {type(source).__name__}; {_EXPECTED}")

    async def next(self) -> Piece | None:
        """The next piece, or None at the end.

        Raises:
            SourceError: the source raised; its own error is the cause. It counts as ended then.
            InputError: the piece is of another type. It is dropped; the source can be pulled further.
        """
        if self._ended:
            return None
        try:
            value = await anext(self._async) if self._async is not None else next(self._sync)
        except (StopIteration, StopAsyncIteration):
            self._ended = True
            return None
        except LocretError:
            self._ended = True
            raise
        except Exception as error:
            self._ended = True
            raise SourceError(f"the source raised {type(error).__name__} after {self.pulled} pieces: {error}. What it "
                              "gave before is accepted or buffered; feed a new source to go on") from error
        self.pulled += 1
        return as_piece(value)


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

    def cut_whole(self) -> None:
        """End the text here, before a question: but the bytes of an unfinished character, whose rest comes later, stay
        behind it."""
        tail = self.segmenter.drop_partial()
        self.segments.extend(self.segmenter.flush())
        self.segmenter = Segmenter(SegmenterState(tail=tail))

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
