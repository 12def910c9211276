"""Files of published benchmarks as tasks: each document is a stream, and its questions are asked at its end. Knows no
model, and holds one document at a time, as a file may have gigabytes of them.

Where a question is scored by people or by a judging model it is left out, and so is a document that asks nothing else.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import published
from locret_stream.evaluation.published import Document, Question
from locret_stream.evaluation.suite import Item, Lines, Measure, Task

CHARACTERS = 4  # a token, about


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """The documents of one file; stream number n is the n-th of those that are asked something with a score.

    Args:
        path: of the file, as it was given. digest: of its content.
        asks, characters: of each document, the questions and about how long it is.
        unscored: questions that were left out.
    """

    path: str
    digest: str
    asks: tuple[int, ...]
    characters: tuple[int, ...]
    unscored: int

    def streams(self, questions: int, focus: bool = False) -> int:
        """The first documents that have so many, or all there are."""
        found = 0
        for number, asks in enumerate(self.asks, 1):
            found += 1 if focus else asks
            if found >= questions:
                return number
        return len(self.asks)

    def tokens(self, streams: int, length: int) -> int:
        return sum(self.characters[:streams]) // CHARACTERS


def file_task(value: str, raw: bool = False) -> FileTask:
    """The task of a file, which is read to its end, so that no line of it is a surprise later.

    Args:
        value: PATH, or BENCHMARK=PATH, or BENCHMARK/TASK=PATH where fields and names do not tell.
        raw: its documents are read and asked without a chat frame; this makes it another task, of another name.

    Raises:
        ConfigError: no such file, benchmark or task, a line that is no record, documents of several tasks, or nothing
            in it that has a score.
    """
    name, equals, path = value.partition("=")
    if not equals or Path(value).is_file():
        name, path = "", value
    benchmark, _, task = name.partition("/")
    read = functools.partial(published.load, path, benchmark or None, task or None)
    stamp = _stamp(path)
    asks, characters, names, unscored = [], [], {}, 0
    for document in read():
        names.setdefault(f"{document.benchmark}/{document.task}")
        count = len(_scored(document))
        unscored += len(document.questions) - count
        if count:
            asks.append(count)
            characters.append(len(document.context))
    if len(names) > 1:
        raise ConfigError(f"{path} holds documents of several tasks: {', '.join(names)}; expected a file for each, as "
                          "their scores have no common mean")
    if not asks:
        raise ConfigError(f"{path}: all of its {unscored} questions are scored by people or by a judging model; "
                          "expected a file with questions that have a metric")
    [name] = names
    return FileTask(
        name=f"{name} (raw)" if raw else name, title=f"documents of {path}", asked=max(asks),
        items=Reader(path, read, stamp).items, kind="documents", raw=raw, path=path, digest=_digest(path),
        asks=tuple(asks), characters=tuple(characters), unscored=unscored)


def _scored(document: Document) -> list[Question]:
    return [question for question in document.questions if question.metric]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _stamp(path: str) -> tuple[int, int] | None:
    """Another one once the file was written to; None without a file, of which `published.load` says more."""
    if not Path(path).is_file():
        return None
    found = Path(path).stat()
    return found.st_size, found.st_mtime_ns


class Reader:
    """The documents of a file by number. Read in order they are read once; who goes back begins again."""

    def __init__(self, path: str, read: Callable[[], Iterator[Document]], stamp: tuple[int, int] | None):
        self._path, self._read, self._stamp = path, read, stamp
        self._rest: Iterator[Document] = iter(())
        self._last: Document | None = None
        self._number = -1  # of the last one

    def document(self, number: int) -> Document:
        """Raises InputError: the file is not what it was when the run began. ConfigError: it has not so many."""
        if _stamp(self._path) != self._stamp:
            raise InputError(f"{self._path} has changed since this run began; expected one content for all cells: run "
                             "the command again")
        if number < self._number or self._last is None:
            self._rest, self._number = (one for one in self._read() if _scored(one)), -1
        while self._number < number:
            self._last = next(self._rest, None)
            if self._last is None:
                raise ConfigError(f"{self._path} has no stream {number}: it holds {self._number + 1} documents with "
                                  "questions that have a score")
            self._number += 1
        return self._last

    def items(self, seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        """Document `seed` in one piece, then its questions; the rest is for streams that are made up."""
        document = self.document(seed)
        yield Item(document.context)
        for question in _scored(document):
            yield Item(question.text, " | ".join(question.answers), question=question)
