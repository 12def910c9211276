"""The tasks, each as streams of lines with questions, by name. Knows no model.

A stream is a pure function of (task, seed, length, text): the same for every policy and budget. Ten tasks are in
marker form; "sentences" asks in plain words, and those of `chat` as people ask a chat model. `documents` makes tasks
from files.
"""

from __future__ import annotations

import difflib
import itertools
import math
import platform
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from locret_stream.errors import ConfigError
from locret_stream.evaluation import chat, markers
from locret_stream.evaluation.haystack import cut, planted_stream, stdlib_lines
from locret_stream.evaluation.markers import Case, whole_lines
from locret_stream.evaluation.published import Question

VERSION = 1
"""Of the streams: it is counted up whenever a stream changes, or what `published` makes of a record or an answer, so
that results of different streams are never mixed."""

TEXT_STREAMS = 8
ANSWER_TOKENS = 24

Measure = Callable[[str], int]
Lines = Callable[[int], Iterator[str]]
Items = Callable[[int, int, Measure, Lines], "Iterator[Item]"]
"""items(seed, length, measure, lines): a stream that measures about `length`, questions aside."""


@dataclass(frozen=True)
class Text:
    """A text that facts lie in: lines(seed) gives lines without end. Every text has another `name`."""

    name: str
    lines: Lines


@dataclass(frozen=True)
class Item:
    """A line of the stream, or with `answer` a question that is asked at that place.

    Args:
        needed: the answer to a question of the stream follows from this line.
        question: the question of a benchmark, which says how long an answer may be and how it is scored.
    """

    text: str
    answer: str | None = None
    needed: bool = False
    question: Question | None = None

    @property
    def answer_tokens(self) -> int:
        """The longest answer that is allowed."""
        return ANSWER_TOKENS if self.question is None else self.question.max_new_tokens


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        asked: how many questions each of its streams has; of a file, the most that a document has.
        kind: "answers" is scored by whether the answer is exactly right, "bits" by the bits per byte of the text
            itself, "documents" by the metrics of their benchmark.
        raw: no chat frame, even if the tokenizer has one.
    """

    name: str
    title: str
    asked: int
    items: Items
    kind: str = "answers"
    raw: bool = True

    def streams(self, questions: int, focus: bool = False) -> int:
        """How many streams have at least so many questions together; with a focus each has one."""
        return TEXT_STREAMS if self.kind == "bits" else math.ceil(questions / (1 if focus else self.asked))

    def tokens(self, streams: int, length: int) -> int:
        """About how many tokens so many streams of that length have together."""
        return streams * length


def _at_the_end(make: Callable[[random.Random], Case], name: str) -> Items:
    """The case's marks among lines of text, then its questions."""
    def items(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        case = make(random.Random(f"{name} {seed}"))
        needed = {mark + "\n" for question in case.questions for mark in question.needs}
        for line in markers.planted(case, lines(seed), length, measure):
            yield Item(line, needed=line in needed)
        for question in case.questions:
            yield Item(question.ask, question.answer)

    return items


def _every_so_often(name: str, questions: int) -> Items:
    """`questions` stretches of text, each with a fact in it and a question at its end about one of the facts so far."""
    def items(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        rng, text = random.Random(f"{name} {seed}"), lines(seed)
        keys, read = markers.Keys(rng), 0
        facts = [markers.fact(keys.take(), markers.value(rng)) for _ in range(questions)]
        asked = [rng.choice(facts[:number + 1])[1] for number in range(questions)]
        needed = {mark + "\n" for question in asked for mark in question.needs}
        for number, (mark, _) in enumerate(facts):
            due = length * (number + 1) // questions - read  # after a stretch that is too long the next is shorter
            for line in markers.planted(Case(((rng.random(), mark),), ()), text, due, measure):
                read += measure(line)
                yield Item(line, needed=line in needed)
            yield Item(asked[number].ask, asked[number].answer)

    return items


def _plain(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
    yield from map(Item, cut(whole_lines(lines(seed)), length, measure))


def _sentences(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
    """12 facts, and a decoy for every 256 tokens; both count as part of the length."""
    planted = planted_stream(seed, length, decoys=length // 256, measure=measure, lines=lambda: lines(seed))
    sentences = sum(measure(fact.sentence + "\n") for fact in (*planted.facts, *planted.decoys))
    planted = replace(planted, size=max(0, length - sentences))
    needed = {fact.sentence + "\n" for fact in planted.facts}
    for piece in planted:
        yield Item(piece, needed=piece.lstrip("\n") in needed)
    for fact in planted.facts:
        yield Item(fact.question, fact.answer)


def _chat(name: str) -> Items:
    """Facts among whole lines of text, then a question about each, whose free answer has to contain the value."""
    def items(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
        rng = random.Random(f"{name} {seed}")
        told = chat.MADE[name](rng)
        for line, needed in chat.in_text(told, rng, whole_lines(lines(seed)), length, measure):
            yield Item(line, needed=needed)
        for *_, last in told:
            yield Item(last.question, last.value, question=last.asked())

    return items


def _task(name: str, title: str, asked: int, make: Callable[[random.Random], Case]) -> Task:
    return Task(name, title, asked, _at_the_end(make, name))


TASKS = {task.name: task for task in (
    _task("passkey", "one fact in the whole stream", 1, markers.passkey),
    _task("recall", "48 facts of one value each", 16, lambda rng: markers.recall(rng, 48, asked=16)),
    _task("last_write", "12 keys written up to 3 times, the last one counts", 12,
          lambda rng: markers.last_write(rng, 12)),
    _task("several_values", "8 keys of 2 values each", 8, lambda rng: markers.several_values(rng, 8)),
    _task("several_keys", "16 facts, asked for two at once", 8, lambda rng: markers.several_keys(rng, 16)),
    _task("decoys", "16 facts among 16 of a form that is never asked", 16, lambda rng: markers.decoys(rng, 16)),
    _task("variables", "8 chains of up to 2 variables", 8, lambda rng: markers.variables(rng, 8)),
    _task("preference", "what wins against whoever throws one thing most", 1,
          lambda rng: markers.preference(rng, 20)),
    Task("text", "bits per byte of text", 0, _plain, kind="bits"),
    Task("every_so_often", "a fact and a question in each of 16 stretches", 16,
         _every_so_often("every_so_often", 16)),
    *(Task(name, title, asked, _chat(name), raw=False) for name, title, asked in (
        ("chat_numbers", "4 numbers of different relations, asked as in a chat", 4),
        ("chat_words", "3 names, places and reasons of several words", 3),
        ("chat_tools", "2 values in the JSON of a tool", 2), ("chat_needles", "2 needles in RULER's words", 2),
        ("chat_updates", "2 numbers, each changed once", 2))),
    Task("sentences", "12 facts in plain sentences, among others of the same form", 12, _sentences, raw=False),
)}
CHAT_TASKS = tuple(chat.MADE)
MARKER_TASKS = tuple(name for name in TASKS if name != "sentences" and name not in CHAT_TASKS)


def task_named(name: str) -> Task:
    """Raises ConfigError, with all names and the closest one."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        raise ConfigError(f"there is no task {name!r}; expected one of {', '.join(TASKS)}."
                          + (f" Did you mean {close[0]!r}?" if close else ""))
    return TASKS[name]


STDLIB = Text(f"standard library of Python {platform.python_version()}", stdlib_lines)
"""The sources that no model of this project was trained on."""


def text_of(path: Path) -> Text:
    """The lines of a file, over and over, from a place drawn from the seed. Raises ConfigError: it has no lines."""
    data = path.read_bytes()
    lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no text in it; expected lines to hide facts in")

    def read(seed: int) -> Iterator[str]:
        at = random.Random(f"place {seed}").randrange(len(lines))
        return itertools.cycle(itertools.chain(lines[at:], lines[:at]))

    return Text(f"{path.name} {zlib.crc32(data):08x}", read)
