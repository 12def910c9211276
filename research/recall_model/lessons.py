"""What a model that starts from random weights is taught first: to look things up, with alphabets that grow.

Attention that matches a token with an earlier one needs two layers that are of no use without each other, and with
hundreds of keys from the start it is not found within hours. With eight keys it is found in a minute, and stays while
the keys double to all of them. Three lessons, each until it is done:

    pairs    <K V>       ?<K V      a key and its value side by side
    marks    <K:V>       ?<K:V      the key two tokens back, as in the tasks
    facts    <QX:471>    ?<QX:471   the tasks' own marks

K and V are any tokens, and so is a number of three digits: with a digit a token, the second and the third digit of 48
numbers do not follow from the two tokens in front of them, and to match more was not learnt in 36 minutes. A part of
every batch are segments that repeat; from the second lesson on mostly of so few letters that one token is not enough to
tell where they go on. Questions are drawn with replacement: else the value that was not asked for yet is found without
looking up its key.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from locret_stream.evaluation import markers
from research.recall_model.data import COPY_WEIGHT

KEYS, VALUES = (8, 676), (16, 900)  # how many at first and at last
GROW_AT = 0.9  # the share of right answers at which they double
END_WEIGHT = 0.1  # of the newline behind an answer
KEEP = 0.9  # of the running means


class Lesson(NamedTuple):
    """length: of a sequence; copies: share of the sequences that repeat a segment; few: share of these that have few
    letters; answered, copied: running shares of right tokens at which the lesson ends."""

    name: str
    length: int
    copies: float
    few: float
    answered: float
    copied: float


LESSONS = (Lesson("pairs", 40, 0.15, 0.0, 0.95, 0.9), Lesson("marks", 64, 0.5, 0.8, 0.97, 0.6),
           Lesson("facts", 96, 0.5, 0.8, 0.9, 0.6))
FIRST, DONE = (0, KEYS[0], VALUES[0]), (len(LESSONS), KEYS[1], VALUES[1])  # states: before them, and behind


class Lessons:
    """The lessons in turn; `heed` says how a batch went.

    Attributes:
        state: (lesson, keys, values), the numbers from which others go on.
        answered, copied: running shares of what was right in this lesson; None: nothing yet.
    """

    def __init__(self, tokenizer: Tokenizer, seed: str, state: tuple[int, int, int]):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.form = {sign: tokenizer.encode(sign).ids[0] for sign in "<>:?\n"}
        self.pool = sorted(set(range(1, tokenizer.get_vocab_size())) - set(self.form.values()))  # 0 ends a text
        random.Random(0).shuffle(self.pool)
        if len(self.pool) < KEYS[1] + VALUES[1]:
            raise SystemExit(f"the vocabulary has {len(self.pool)} tokens for lessons; expected {KEYS[1] + VALUES[1]}, "
                             "so a larger --vocab")
        self.state = tuple(state)
        self.answered: float | None = None
        self.copied: float | None = None

    @property
    def now(self) -> Lesson | None:
        """The lesson that is on; None: all are done."""
        return LESSONS[self.state[0]] if self.state[0] < len(LESSONS) else None

    def batch(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """inputs, targets, weights, answers, each [tokens // length, length]."""
        lesson, rows = self.now, []
        for _ in range(tokens // lesson.length):
            ids, weights = self._copies() if self.rng.random() < lesson.copies else self._lookups()
            rows.append((ids, weights))
        ids, weights = torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:], weights[:, 1:] == 1.0

    def _copies(self) -> tuple[list[int], list[float]]:
        rng, lesson, length = self.rng, self.now, self.now.length + 1
        size = rng.randint(8, max(9, length // 2))
        letters = self.pool[:2 * self.state[1] if lesson is LESSONS[0] else None]
        if rng.random() < lesson.few:
            letters = rng.sample(letters, max(2, int(size * rng.uniform(0.3, 1.0))))
        segment = rng.choices(letters, k=size)
        return (segment * (length // size + 1))[:length], [0.0] * (size + 3) + [COPY_WEIGHT] * (length - size - 3)

    def _lookups(self) -> tuple[list[int], list[float]]:
        """Marks, then questions with their answers; padded in front."""
        rng, length = self.rng, self.now.length + 1
        made = self._facts(length)
        ids = [token for mark, _, _ in made for token in mark]
        weights = [0.0] * len(ids)
        for _, ask, answer in rng.choices(made, k=len(made)):
            ids += [*ask, *answer, self.form["\n"]]
            weights += [0.0] * len(ask) + [1.0] * len(answer) + [END_WEIGHT]
        pad = length - len(ids)
        return [0] * pad + ids, [0.0] * pad + weights

    def _facts(self, length: int) -> list[tuple[list[int], list[int], list[int]]]:
        """(mark, question, answer) of each, as many as a sequence has room for."""
        rng, form, name = self.rng, self.form, self.now.name
        if name == "facts":  # a mark has 6 tokens, and so has a question with its answer
            pairs = [(key, markers.value(rng)) for key in rng.sample(markers.KEYS, length // 12)]
            return [[self.tokenizer.encode(part).ids for part in (f"<{key}:{value}>\n", f"?<{key}:", value)]
                    for key, value in pairs]
        between = [form[":"]] if name == "marks" else []
        count = length // (10 + 2 * len(between))
        _, keys, values = self.state
        first, others = rng.sample(self.pool[:keys], count), self.pool[KEYS[1]:KEYS[1] + values]
        openings = [[form["<"], key, *between] for key in first]
        return [([*opening, value, form[">"], form["\n"]], [form["?"], *opening], [value])
                for opening, value in zip(openings, rng.choices(others, k=count), strict=True)]

    def heed(self, answered: Tensor, copied: Tensor) -> None:
        """What of a batch was right: bool [answers], [copied tokens]. More keys, or the next lesson, if it is time."""
        self.answered, self.copied = _mean(self.answered, answered), _mean(self.copied, copied)
        at, keys, values = self.state
        lesson = LESSONS[at]
        if (self.answered or 0) > GROW_AT and (keys, values) != (KEYS[1], VALUES[1]):
            self.state, self.answered = (at, min(2 * keys, KEYS[1]), min(2 * values, VALUES[1])), None
        elif ((keys, values) == (KEYS[1], VALUES[1]) and (self.answered or 0) > lesson.answered
              and (self.copied or 0) > lesson.copied):
            self.state, self.answered, self.copied = (at + 1, keys, values), None, None


def _mean(before: float | None, right: Tensor) -> float | None:
    if not len(right):
        return before
    now = right.float().mean().item()
    return now if before is None else KEEP * before + (1 - KEEP) * now
