"""Streams for `long_memory.py`: a book, sentence by sentence, with facts in it as people would tell them in between.
Knows no model; tokens come from a function that is given.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locret_stream.errors import ConfigError
from locret_stream.evaluation import chat
from locret_stream.evaluation.chat import Told
from locret_stream.evaluation.haystack import cut

FACTS: dict[str, Callable[[random.Random, int], list[Told]]] = {
    "numbers": chat.numbers, "words": chat.words,
    "mixed": lambda r, count: chat.numbers(r, count - count // 2) + chat.words(r, count // 2),
}
_SENTENCE = re.compile(r"(?<=[.;!?])\s+")


@dataclass(frozen=True)
class Planted:
    """A fact, and where it stands.

    Args:
        piece: number of the stream's piece that tells it.
        start, end: its tokens in the stream. value: those of them, counted from `start`, that tell what is asked.
    """

    told: Told
    piece: int
    start: int
    end: int
    value: slice


@dataclass(frozen=True)
class Stream:
    """A finite stream: sentences with the white space behind them, the ids of each, and the facts as they are asked."""

    number: int
    pieces: list[str]
    ids: list[list[int]]
    facts: list[Planted]

    @functools.cached_property
    def tokens(self) -> list[int]:
        """The ids of all pieces."""
        return list(itertools.chain.from_iterable(self.ids))

    def groups(self, size: int, start: int = 0) -> Iterator[range]:
        """Numbers of neighbouring pieces from `start` on, as many as `size` tokens hold, and one at least."""
        held = 0
        for number in range(start, len(self.pieces)):
            if held and held + len(self.ids[number]) > size:
                yield range(start, number)
                start, held = number, 0
            held += len(self.ids[number])
        yield range(start, len(self.pieces))

    def part(self, numbers: Sequence[int]) -> list[int]:
        """The ids of those pieces."""
        return [token for number in numbers for token in self.ids[number]]


class Book:
    """The sentences of a file. A line break inside a paragraph is white space like any other.

    Attributes:
        name: of the file, with a checksum of what it holds.

    Raises:
        ConfigError: there is no text in it.
    """

    def __init__(self, path: Path):
        data = path.read_bytes()
        self.name = f"{path.name} {zlib.crc32(data):08x}"
        self._sentences: list[str] = []
        for paragraph in re.split(r"\n\s*\n", data.decode("utf-8-sig", "replace").replace("\r", "")):
            sentences = _SENTENCE.split(" ".join(paragraph.split()))
            self._sentences += [one + " " for one in sentences[:-1]] + ([sentences[-1] + "\n\n"] * bool(sentences[-1]))
        if not self._sentences:
            raise ConfigError(f"{path} has no text in it; expected a book to hide facts in")

    def read(self, r: random.Random) -> Iterator[str]:
        """The sentences from a place drawn from `r` on, without end: behind the last one comes the first."""
        at = r.randrange(len(self._sentences))
        return itertools.cycle(itertools.chain(self._sentences[at:], self._sentences[:at]))


def make_stream(number: int, books: Sequence[Book], tokens: int, facts: str, count: int,
                encode: Callable[[str], list[int]]) -> Stream:
    """Stream `number`: a function of its arguments alone. Books take turns; facts go between two sentences, at places
    that are drawn evenly."""
    r = random.Random(f"long memory {facts} {number}")
    told = FACTS[facts](r, count)
    lines = [one.line + " " for one in told]
    size = max(0, tokens - sum(len(encode(line)) for line in lines))
    order = sorted(range(count), key=[r.random() for _ in told].__getitem__)
    shares = sorted(r.random() for _ in told)
    pieces, ids, read = list[str](), list[list[int]](), 0
    starts: dict[int, tuple[int, int]] = {}  # by fact its piece and its first token

    def add(piece: str) -> None:
        nonlocal read
        pieces.append(piece)
        ids.append(encode(piece))
        read += len(ids[-1])

    def plant(until: float) -> None:
        while len(starts) < count and shares[len(starts)] * tokens <= until:
            fact = order[len(starts)]
            starts[fact] = len(pieces), read
            add(lines[fact])

    for sentence in cut(books[number % len(books)].read(r), size, lambda one: len(encode(one))):
        plant(read)
        add(sentence)
    plant(tokens)
    planted = []
    for fact, one in enumerate(told):
        piece, start = starts[fact]
        at = one.line.index(one.value)
        value = slice(len(encode(one.line[:at].rstrip())), len(encode(one.line[:at + len(one.value)])))
        planted.append(Planted(one, piece, start, start + len(encode(one.line)), value))
    return Stream(number, pieces, ids, planted)
