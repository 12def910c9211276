"""What all benchmarks have in common: documents with questions, and records read from lines of JSON. Knows no benchmark
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from locret_stream.errors import ConfigError

Metric = Callable[[str, tuple[str, ...], tuple[str, ...]], float]
"""metric(found, answers, classes): what the answer `found` is worth, in [0, 1]."""


@dataclass(frozen=True)
class Question:
    """What is asked of a document that was read.

    Args:
        text: the whole question, with the wording of the benchmark and the words that an answer is to begin after.
        answers: the references; the metric decides what they mean together.
        metric: "benchmark/name", or "" for a question that only people or a judging model can score.
        max_new_tokens: the longest answer that the benchmark allows.
        classes: of a classification, all its classes.
        first_line: only the first line of an answer counts.
        name: the id of the record, "" without one.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    first_line: bool = False
    name: str = ""


@dataclass(frozen=True)
class Document:
    """A text to read once, and the questions that are asked afterwards, each of the same state of the memory.

    Args:
        context: the text, up to hundreds of kB. With the text of a question behind it, it is one prompt.
    """

    benchmark: str
    task: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, which has one format of file.

    Args:
        record: the fields of a line.
        document: document(record, task) is what the record says; `task` is "" where the record itself must tell. Raises
            ConfigError.
        tasks: the names of its tasks, in words. knows: knows(task) says whether it has a task of that name.
        names_itself: every record has the name of its task, so that the name of the file need not tell it.
    """

    name: str
    title: str
    record: type[msgspec.Struct]
    document: Callable[[Any, str], Document]
    metrics: dict[str, Metric]
    tasks: str
    knows: Callable[[str], bool]
    names_itself: bool = False

    @property
    def required(self) -> frozenset[str]:
        """The fields that every record has."""
        return frozenset(field.encode_name for field in msgspec.structs.fields(self.record) if field.required)


class TaskFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a benchmark for a task: the words before the context and behind it, how long an answer may be, and
    how it is scored."""

    before: str
    after: str
    max_new_tokens: int
    metric: str
    first_line: bool = False


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tasks of a benchmark, and the source of their limits and metrics."""

    source: str
    tasks: dict[str, TaskFacts]

    @classmethod
    def of(cls, name: str) -> Table:
        """The table of that benchmark, from the file beside this one."""
        return msgspec.json.decode((Path(__file__).parent / f"{name}.json").read_bytes(), type=cls)


def lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """(number from 1, line) of the lines of a file that are not blank; one in memory at a time."""
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
    """The record of a line. Raises ConfigError, which says which fields were found and which were expected."""
    fields = fields_of(line)
    try:
        return msgspec.json.decode(line, type=benchmark.record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{error}; found the fields {listed(fields)}, expected those of {benchmark.title}, "
                          f"at least {listed(benchmark.required)}") from error


def listed(names: Iterable[str]) -> str:
    """The names in alphabetical order, for messages."""
    return ", ".join(sorted(names)) or "none"


def best(metric: Callable[[str, str], float]) -> Metric:
    """A metric of one reference as a metric of several: the best of them counts."""
    return lambda found, answers, classes: max(metric(found, answer) for answer in answers)
