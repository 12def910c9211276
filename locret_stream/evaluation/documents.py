"""Files of published benchmarks as tasks: each document is a stream, and its questions are asked at its end. Knows no
model, and has one document in memory at a time, because a file may have gigabytes of them.

Questions that only people or a judging model can score are left out, and so are documents without any other question.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import published
from locret_stream.evaluation.published import Document, Question
from locret_stream.evaluation.suite import Item, Lines, Measure, Task

CHARACTERS = 4  # of a token, about


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """The documents of one file; stream number n is the n-th document that has a question with a score.

    Args:
        path: of the file, as it was given. digest: of its content.
        asks, characters: of each document, how many questions it has and how long it is.
        unscored: how many questions were left out.
    """

    path: str
    digest: str
    asks: tuple[int, ...]
    characters: tuple[int, ...]
    unscored: int

    def streams(self, questions: int, focus: bool = False) -> int:
        """How many documents have at least so many questions together; all where they have fewer."""
        reached = itertools.accumulate(1 if focus else asks for asks in self.asks)
        return next((number for number, asked in enumerate(reached, 1) if asked >= questions), len(self.asks))

    def tokens(self, streams: int, length: int) -> int:
        """About how many tokens the first `streams` documents have."""
        return sum(self.characters[:streams]) // CHARACTERS

    def summary(self) -> dict[str, str | int]:
        """What of the file is asked and what is left out, for the JSON of the command line."""
        return {"task": self.name, "documents": len(self.asks), "questions": sum(self.asks), "unscored": self.unscored}


def file_task(value: str, raw: bool = False) -> FileTask:
    """The task of a file, which is read to its end, so that a broken line is reported before anything runs.

    Args:
        value: PATH, or BENCHMARK=PATH, or BENCHMARK/TASK=PATH where fields and names do not tell.
        raw: its documents are read and asked without a chat frame; that is another task, with another name.

    Raises:
        ConfigError: no such file, benchmark or task, a line that is no record, documents of several tasks, or no
            question that has a score.
    """
    name, equals, path = value.partition("=")
    if not equals or Path(value).is_file():
        name, path = "", value
    benchmark, _, task = name.partition("/")
    read = functools.partial(published.load, path, benchmark or None, task or None)
    stamp = _stamp(path)
    asks: list[int] = []
    characters: list[int] = []
    names: list[str] = []
    unscored = 0
    for document in read():
        if (name := f"{document.benchmark}/{document.task}") not in names:
            names.append(name)
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
    return FileTask(
        name=f"{names[0]} (raw)" if raw else names[0], title=f"documents of {path}", asked=max(asks),
        items=Reader(path, read, stamp).items, kind="documents", raw=raw, path=path, digest=_digest(path),
        asks=tuple(asks), characters=tuple(characters), unscored=unscored)


def _scored(document: Document) -> list[Question]:
    return [question for question in document.questions if question.metric]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _stamp(path: str) -> tuple[int, int] | None:
    """Size and time of the last change; None without a file, for which `published.load` raises."""
    if not Path(path).is_file():
        return None
    status = Path(path).stat()
    return status.st_size, status.st_mtime_ns


class Reader:
    """The documents of a file by number. Documents that are asked for in order are read once; going back begins again
    at the first line."""

    def __init__(self, path: str, read: Callable[[], Iterator[Document]], stamp: tuple[int, int] | None):
        self._path, self._read, self._stamp = path, read, stamp
        self._rest: Iterator[Document] = iter(())
        self._last: Document | None = None
        self._number = -1  # of the last document

    def document(self, number: int) -> Document:
        """Document `number`. Raises InputError: the file has changed since the run began; ConfigError: it has fewer
        documents."""
        if _stamp(self._path) != self._stamp:
            raise InputError(f"{self._path} has changed since this run began; expected one content for all cells: run "
                             "the command again")
        if number < self._number or self._last is None:
            self._rest, self._number = filter(_scored, self._read()), -1
        while self._last is None or self._number < number:
            self._last = next(self._rest, None)
            if self._last is None:
                raise ConfigError(f"{self._path} has no stream {number}: it holds {self._number + 1} documents with "
                                  "questions that have a score")
            self._number += 1
        return self._last

    def items(self, seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        """Document `seed` in one piece, then its questions. The other arguments have no effect on a document."""
        document = self.document(seed)
        yield Item(document.context)
        for question in _scored(document):
            yield Item(question.text, " | ".join(question.answers), question=question)
