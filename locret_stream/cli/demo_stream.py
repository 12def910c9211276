"""The stream of the demo: facts from a file, the text around them, and the blocks in which both are fed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from locret_stream.cli.text_input import file_text
from locret_stream.errors import InputError

BLOCK_CHARS = 16_384
LINE_CHARS = 4_096


class GivenFact(msgspec.Struct, frozen=True):
    """A line of `--facts`, with those attributes of `evaluation.facts.Fact` that a stream and the demo read."""

    sentence: str = msgspec.field(name="fact")
    question: str
    answer: str


def read_facts(path: Path) -> list[GivenFact]:
    """The facts of a JSONL file.

    Raises:
        InputError: a line is not a fact, which the error names, or the file has none.
    """
    facts = []
    text = "".join(file_text(path))
    for number, line in enumerate(text.split("\n"), 1):  # not `splitlines`: JSON strings may contain \u2028 and others
        if not line.strip():
            continue
        try:
            fact = msgspec.json.decode(line, type=GivenFact)
        except msgspec.MsgspecError as error:
            raise InputError(f'{path}, line {number}: {error}; expected {{"fact": "…", "question": "…", "answer": '
                             '"…"}') from None
        if not (fact.sentence.strip() and fact.question.strip() and fact.answer.strip()):
            raise InputError(f"{path}, line {number}: an empty text; expected a fact, its question and its answer")
        if "\0" in fact.question:  # the new process gets questions as arguments, which cannot contain NUL
            raise InputError(f"{path}, line {number}: a NUL character in the question; expected a question without")
        facts.append(fact)
    if not facts:
        raise InputError(f"{path} holds no facts; expected one JSON object per line")
    return facts


def cut_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Lines of a text that comes in pieces. Very long lines are cut, so that facts fit between the parts."""
    rest = ""
    for piece in pieces:
        for line in io.StringIO(rest + piece):  # splits at \n alone: other line ends are part of the text
            *whole, rest = (line[at : at + LINE_CHARS] for at in range(0, len(line), LINE_CHARS))
            yield from whole
            if rest.endswith("\n"):
                yield rest
                rest = ""
    if rest:
        yield rest


def count(lines: Iterable[str], measure: Callable[[str], int], limit: int | None) -> int:
    """The sum of `measure` over the lines, or `limit` once the sum reaches it."""
    total = 0
    for line in lines:
        total += measure(line)
        if limit is not None and total >= limit:
            return limit
    return total


def blocks(pieces: Iterable[str], sentences: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """Pieces of a planted stream joined to blocks of at least `BLOCK_CHARS` characters; a fact begins a new block.

    Yields:
        The text of a block, and the index in `sentences` of the fact that it begins with, or None.
    """
    index = {sentence.strip(): i for i, sentence in enumerate(sentences)}
    parts: list[str] = []
    size, begins = 0, None
    for piece in pieces:
        fact = index.pop(piece.strip(), None)
        if parts and (fact is not None or size >= BLOCK_CHARS):
            yield "".join(parts), begins
            parts, size, begins = [], 0, None
        begins = fact if fact is not None else begins
        parts.append(piece)
        size += len(piece)
    if parts:
        yield "".join(parts), begins
