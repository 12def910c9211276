"""The nine tasks, each as streams of lines with questions; what a run asks for by name. Knows no model.

A stream is a pure function of (task, seed, length): the same for every policy and budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from locret_stream.errors import ConfigError
from locret_stream.evaluation import markers, tasks
from locret_stream.evaluation.markers import Case

Measure = Callable[[str], int]
Lines = Callable[[int], Iterator[str]]
"""Text without end for a seed, in lines."""
Items = Callable[[int, int, Measure, Lines], "Iterator[Item]"]
"""items(seed, length, measure, lines): a stream of about `length` as measured, questions aside."""


@dataclass(frozen=True)
class Item:
    """A line of the stream, or with `answer` a question put to the memory there. `mark`: it is what questions are
    about."""

    text: str
    answer: str | None = None
    mark: bool = False


@dataclass(frozen=True)
class Task:
    """`asked` questions are in each of its streams.

    kind: "answers", scored by whether the answer is exactly right, or "bits", by the bits per byte of the text itself.
    """

    name: str
    title: str
    asked: int
    items: Items
    kind: str = "answers"


def _at_the_end(make: Callable[[random.Random], Case], name: str) -> Items:
    """The case's marks among lines of text, then its questions."""
    def items(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        case = make(random.Random(f"{name} {seed}"))
        marks = {line + "\n" for _, line in case.marks}
        for line in markers.planted(case, lines(seed), length, measure):
            yield Item(line, mark=line in marks)
        for question, answer in case.questions:
            yield Item(question, answer)

    return items


def _every_so_often(name: str, questions: int) -> Items:
    """A fact somewhere in each of as many stretches of text, and at the end of each a question about one of those so
    far."""
    def items(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        rng, text = random.Random(f"{name} {seed}"), lines(seed)
        keys, known, read = markers.Keys(rng), [], 0
        for number in range(questions):
            known.append((keys.take(), markers.value(rng)))
            case = replace(Case((), ()), marks=((rng.random(), "<{}:{}>".format(*known[-1])),))
            due = length * (number + 1) // questions - read  # what one stretch is too long, the next one is shorter
            for line in markers.planted(case, text, due, measure):
                read += measure(line)
                yield Item(line, mark=line.strip() == case.marks[0][1])
            key, value = rng.choice(known)
            yield Item(f"?<{key}:", value)

    return items


def _plain(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
    read, text = 0, lines(seed)
    while read < length:
        line = next(text).rstrip("\n") + "\n"
        read += measure(line)
        yield Item(line)


def _task(name: str, title: str, asked: int, make: Callable[[random.Random], Case]) -> Task:
    return Task(name, title, asked, _at_the_end(make, name))


TASKS = {task.name: task for task in (
    _task("passkey", "one fact in the whole stream", 1, markers.passkey),
    _task("recall", "48 facts of one value each", 16, lambda rng: markers.recall(rng, 48, asked=16)),
    _task("last_write", "12 keys written up to 3 times, the last one counts", 12,
          lambda rng: markers.last_write(rng, 12)),
    _task("several_values", "8 keys of 2 values each", 8, lambda rng: markers.several_values(rng, 8)),
    _task("decoys", "16 facts among 16 of a form that is never asked", 16, lambda rng: markers.decoys(rng, 16)),
    _task("variables", "8 chains of up to 2 variables", 8, lambda rng: markers.variables(rng, 8)),
    _task("preference", "what wins against whoever throws one thing most", 1,
          lambda rng: markers.preference(rng, 20)),
    Task("text", "bits per byte of text", 0, _plain, kind="bits"),
    Task("every_so_often", "a fact and a question in each of 16 stretches", 16,
         _every_so_often("every_so_often", 16)),
)}


def task_named(name: str) -> Task:
    """Raises ConfigError, with the names there are."""
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def stdlib(seed: int) -> Iterator[str]:
    """Sources of the standard library that no recipe of this project reads."""
    return tasks.stdlib_lines(seed)
