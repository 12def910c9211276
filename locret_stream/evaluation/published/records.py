"""What the files of every benchmark become: documents with questions; and how a line of JSON becomes a record, or an
error that says where. Knows no benchmark by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from locret_stream.errors import ConfigError

Metric = Callable[[str, tuple[str, ...], tuple[str, ...]], float]
"""metric(found, answers, classes): what an answer is worth, in [0, 1]."""


@dataclass(frozen=True)
class Question:
    """What is asked of a document that was read.

    text: all of it, with the wording of the benchmark and the words that an answer is to begin after.
    answers: the references; what they mean together is the metric's matter.
    metric: "benchmark/name", or "" for what only people or a judging model can score.
    max_new_tokens: how long the benchmark lets an answer be, in tokens.
    classes: of a classification, all there are.
    first_line: only the first line of an answer counts.
    length: of the record, as it says, in the benchmark's unit (LongBench words or Chinese characters, RULER tokens).
    name: the record's id, "" without one.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    first_line: bool = False
    length: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Document:
    """A text to read once, and what is asked of it afterwards, each question of the same state of the memory.

    context: hundreds of kB. With the text of a question behind it, it is one prompt.
    """

    benchmark: str
    task: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Benchmark:
    """One format of file.

    record: the fields of a line. knows(task): it has a task of that name. tasks: their names, in words.
    document(record, task): what it says, `task` None where the record itself must tell; raises ConfigError.
    names_itself: every record holds the name of its task, so that the file needs none.
    """

    name: str
    title: str
    record: type[msgspec.Struct]
    document: Callable[[Any, str | None], Document]
    metrics: dict[str, Metric]
    tasks: str
    knows: Callable[[str], bool]
    names_itself: bool = False

    @property
    def required(self) -> frozenset[str]:
        """The fields that no record is without."""
        return frozenset(field.encode_name for field in msgspec.structs.fields(self.record) if field.required)


class TaskFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a benchmark lays down for a task: the words before the context and behind it, how long an answer may be, and
    how it is scored."""

    before: str
    after: str
    max_new_tokens: int
    metric: str
    first_line: bool = False


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tasks of a benchmark, and where their limits and metrics were read."""

    source: str
    tasks: dict[str, TaskFacts]

    @classmethod
    def of(cls, name: str) -> Table:
        return msgspec.json.decode((Path(__file__).parent / f"{name}.json").read_bytes(), type=cls)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1; one in memory at a time."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if text:
                yield number, text


def fields_of(line: bytes) -> list[str]:
    """The names of the fields of an object of JSON. Raises ConfigError for anything else."""
    try:
        return list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not an object of JSON: {error}") from error


def decode(line: bytes, benchmark: Benchmark) -> Any:
    """The record of a line. Raises ConfigError, which says what was found and what a record of the benchmark has."""
    found = fields_of(line)
    try:
        return msgspec.json.decode(line, type=benchmark.record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{error}; found the fields {listed(found)}, expected those of {benchmark.title}, "
                          f"at least {listed(benchmark.required)}") from error


def listed(names: Any) -> str:
    """In one order, for messages."""
    return ", ".join(sorted(names)) or "none"


def best(one: Callable[[str, str], float]) -> Metric:
    """A metric of one reference as one of several: the best of them counts."""
    return lambda found, answers, classes: max(one(found, answer) for answer in answers)
