"""Tasks in marker form: short facts between lines of text, and questions that only they answer. Knows no model.

    <QX:471>            the value of QX, three digits; written again, the last one counts
    [QX:471]            a decoy: the same form, another bracket, never asked
    (QX:471)            one of several values of QX, all of which count
    {QX:471} {QX:RY}    a variable: a value, or that of another variable
    @R                  a throw of rock, paper or scissors

    ?<QX:  ?(QX:  ?{QX:  ?@         a question; the answer ends with a newline
    ?<QX<RY:                        two keys at once; the answer is their marks, <QX:471><RY:033>

Keys are two capitals. Every marker stands on a line of its own. Everything random comes from a `random.Random` that
the caller passes.
"""

from __future__ import annotations

import itertools
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from locret_stream.errors import ConfigError
from locret_stream.evaluation.haystack import cut, plant

KEYS = [a + b for a in string.ascii_uppercase for b in string.ascii_uppercase]
BEATS = {"R": "P", "P": "S", "S": "R"}  # the throw that wins against each


class Question(NamedTuple):
    """A question, its answer without the newline that ends it, and the marks from which the answer follows."""

    ask: str
    answer: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """The marks that are planted in a stream, and its questions.

    Args:
        marks: (place, line): after which share of the text, in [0, 1), the line comes; ascending.
    """

    marks: tuple[tuple[float, str], ...]
    questions: tuple[Question, ...]


class Keys:
    """Draws keys, none of them twice."""

    def __init__(self, rng: random.Random):
        self._keys = KEYS[:]
        rng.shuffle(self._keys)

    def take(self) -> str:
        if not self._keys:
            raise ConfigError(f"a stream of marker tasks has {len(KEYS)} keys at most, all pairs of two capitals; "
                              "expected fewer facts")
        return self._keys.pop()


def value(rng: random.Random) -> str:
    """Three digits."""
    return f"{rng.randrange(1000):03d}"


def fact(key: str, value: str) -> tuple[str, Question]:
    """A mark of one value, and the question that it answers."""
    mark = f"<{key}:{value}>"
    return mark, Question(f"?<{key}:", value, (mark,))


def _spread(rng: random.Random, lines: list[str]) -> list[tuple[float, str]]:
    """The lines in the order given, at random places."""
    return list(zip(sorted(rng.random() for _ in lines), lines, strict=True))


def _case(rng: random.Random, marks: list[tuple[float, str]], questions: list[Question],
          asked: int | None = None) -> Case:
    rng.shuffle(questions)
    return Case(tuple(sorted(marks)), tuple(questions[:asked]))


def recall(rng: random.Random, facts: int, asked: int | None = None, keys: Keys | None = None) -> Case:
    """Task 2 (RULER's multi-key retrieval): `facts` keys with one value each."""
    keys = keys or Keys(rng)
    pairs = [fact(keys.take(), value(rng)) for _ in range(facts)]
    return _case(rng, [(rng.random(), mark) for mark, _ in pairs], [question for _, question in pairs], asked)


def passkey(rng: random.Random) -> Case:
    """Task 1 (arXiv:2305.16300): one fact in the whole stream."""
    return recall(rng, 1)


def last_write(rng: random.Random, facts: int, keys: Keys | None = None) -> Case:
    """Task 3: every key is written 1 to 3 times; the last one counts."""
    keys, marks, questions = keys or Keys(rng), [], []
    for _ in range(facts):
        key, values = keys.take(), [value(rng) for _ in range(rng.randint(1, 3))]
        marks += _spread(rng, [f"<{key}:{v}>" for v in values])
        questions.append(fact(key, values[-1])[1])
    return _case(rng, marks, questions)


def several_values(rng: random.Random, facts: int, keys: Keys | None = None) -> Case:
    """Task 4 (RULER's multi-value retrieval): two values a key, asked for from the newest to the oldest."""
    keys, marks, questions = keys or Keys(rng), [], []
    for _ in range(facts):
        key, of_key = keys.take(), [value(rng) for _ in range(2)]
        lines = [f"({key}:{v})" for v in of_key]
        marks += _spread(rng, lines)
        questions.append(Question(f"?({key}:", " ".join(reversed(of_key)), tuple(lines)))
    return _case(rng, marks, questions)


def several_keys(rng: random.Random, facts: int, together: int = 2, keys: Keys | None = None) -> Case:
    """Task 4 (RULER's multi-query retrieval): one question for `together` of the facts, answered by their marks."""
    keys = keys or Keys(rng)
    pairs = [(key, *fact(key, value(rng))) for key in (keys.take() for _ in range(facts))]
    marks = [(rng.random(), mark) for _, mark, _ in pairs]
    rng.shuffle(pairs)
    groups = [pairs[at:at + together] for at in range(0, facts - together + 1, together)]
    return _case(rng, marks, [Question("?" + "".join(f"<{key}" for key, *_ in group) + ":",
                                       "".join(mark for _, mark, _ in group), tuple(mark for _, mark, _ in group))
                              for group in groups])


def decoys(rng: random.Random, facts: int, keys: Keys | None = None) -> Case:
    """Task 5: facts, and as many decoys of the same form under another bracket, some of the same keys."""
    keys = keys or Keys(rng)
    asked_keys = [keys.take() for _ in range(facts)]
    pairs = [fact(key, value(rng)) for key in asked_keys]
    marks = [(rng.random(), mark) for mark, _ in pairs]
    for n in range(facts):
        key = asked_keys[n] if n % 2 else keys.take()
        marks.append((rng.random(), f"[{key}:{value(rng)}]"))
    return _case(rng, marks, [question for _, question in pairs])


def variables(rng: random.Random, chains: int, hops: int = 2, keys: Keys | None = None) -> Case:
    """Task 6 (RULER's variable tracking): chains of up to `hops` variables, asked for at the last one."""
    keys, marks, questions = keys or Keys(rng), [], []
    for _ in range(chains):
        chain, first = [keys.take() for _ in range(rng.randint(1, hops))], value(rng)
        lines = [f"{{{chain[0]}:{first}}}", *(f"{{{b}:{a}}}" for a, b in itertools.pairwise(chain))]
        marks += _spread(rng, lines)
        questions.append(Question(f"?{{{chain[-1]}:", first, tuple(lines)))
    return _case(rng, marks, questions)


def preference(rng: random.Random, throws: int) -> Case:
    """Task 7 (SirLLM's rock, paper, scissors, arXiv:2405.12528): the throw that wins against the most frequent one."""
    favourite = rng.choice("RPS")
    thrown = [favourite if rng.random() < 0.6 else rng.choice("RPS") for _ in range(throws)]
    counts = Counter(thrown)
    while len({favourite} | {t for t in "RPS" if counts[t] == max(counts.values())}) > 1:  # one winner, no tie
        thrown[rng.randrange(throws)] = favourite
        counts = Counter(thrown)
    needs = ("@R", "@P", "@S")  # every throw counts
    return _case(rng, [(rng.random(), f"@{t}") for t in thrown], [Question("?@", BEATS[favourite], needs)])


def merged(rng: random.Random, cases: list[Case]) -> Case:
    """Several cases in one stream; their keys must differ."""
    return _case(rng, [mark for case in cases for mark in case.marks],
                 [question for case in cases for question in case.questions])


def planted(case: Case, text: Iterator[str], size: int, measure: Callable[[str], int]) -> Iterator[str]:
    """Lines of `text` with the case's marks among them, which measure about `size` together."""
    marks = [line + "\n" for _, line in case.marks]
    size = max(0, size - sum(map(measure, marks)))
    lines = cut(whole_lines(text), size, measure)
    return (line for line, _ in plant(lines, marks, [place * size for place, _ in case.marks], measure))


def whole_lines(text: Iterable[str]) -> Iterator[str]:
    """The lines, each with the newline that some lack."""
    return (line.rstrip("\n") + "\n" for line in text)
