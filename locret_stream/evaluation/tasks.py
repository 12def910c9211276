"""Facts, decoys and the streams they are planted in; knows nothing of models, tokens or tensors.

The recipe of the bundled model and the demo share this file, and `is_held_out` keeps them apart:
a word, a module or a sentence form is either trained on or asked about, never both.
Everything random comes from a `random.Random` the caller passes or a seed it names.
"""

from __future__ import annotations

import functools
import os
import random
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locret_stream.evaluation.words import ADJECTIVES, ATTRIBUTES, COLOURS, NAMES, NOUNS, ONSETS, RHYMES, SETTINGS

# ------------------------------------------------------------------ what is held out


def is_held_out(word: str, one_in: int = 4) -> bool:
    """Whether `word` belongs to the held-out part: one in `one_in`, by a hash that never changes."""
    return zlib.crc32(word.lower().encode()) % one_in == 0


# ------------------------------------------------------------------ sentences
# {E} entity, {A} attribute, {V} value. The value comes last: what is kept of a sentence is mostly its
# value, and a causal model can bind a value only to what it has read before it.

FORMS = [
    "The {A} of {E} is {V}.",
    "The {A} of the {E} is {V}.",
    "The {A} for {E} is {V}.",
    "Remember: the {A} for the {E} is {V}.",
    "Remember that the {A} of {E} is {V}.",
    "Please remember that the {A} of the {E} is {V}.",
    "Note that {E}'s {A} is {V}.",
    "Note: {A} of {E} is {V}.",
    "{E}'s {A} is {V}.",
    "{E}'s {A} was changed to {V}.",
    "For {E}, the {A} is {V}.",
    "For the {E} the {A} is now {V}.",
    "Set the {A} of {E} to {V}.",
    "We set the {A} for {E} to {V} this morning.",
    "The {E} has {A} {V}.",
    "{E} has the {A} {V}.",
    "{E} was given the {A} {V}.",
    "They gave {E} the {A} {V}.",
    "The {A} assigned to {E} is {V}.",
    "As of today, the {A} of {E} is {V}.",
    "It was agreed that the {A} of {E} is {V}.",
    "You should know that {E}'s {A} is {V}.",
    "Write this down: the {A} of {E} is {V}.",
    "According to the list, the {A} of {E} is {V}.",
    "In the end the {A} of the {E} became {V}.",
    "The {A} belonging to {E} is {V}, as before.",
    "When asked for the {A} of {E}, answer {V}.",
    "If you need the {A} for {E}, it is {V}.",
    "The {E} now answers to {A} {V}.",
    "# {E} {A}: {V}",
    "# the {A} of {E} is {V}",
    "config: {A} of {E} = {V}",
    "INFO {E}: {A} set to {V}",
    "{E}: {A} = {V}",
    "{A} ({E}): {V}",
    "{A} of {E}: {V}",
    "{E} {A} -> {V}",
    "[{E}] {A} is {V}",
    '{{"{E}": {{"{A}": "{V}"}}}}',
    "Just so you know, the {A} of {E} is {V}.",
    "Heads up: {E} has {A} {V}.",
    "Keep in mind that the {A} for {E} is {V}.",
    "For the record, {E}'s {A} is {V}.",
    "Here is the {A} of {E}: {V}.",
    "The clerk wrote that the {A} of {E} was {V}.",
    "Today {E} received the {A} {V}.",
    "The {A} that {E} has now is {V}.",
    "Please set {E}'s {A} to {V}.",
    "- {E}, {A}: {V}",
    "WARN {E}: {A} is {V}",
]

HELD_OUT_FORMS = [
    "By the way, the {A} of {E} will be {V}.",
    "Do not forget: {E} uses the {A} {V} now.",
    "The new {A} of {E} is {V}.",
    "Let it be known that the {A} for {E} equals {V}.",
    "Somebody told me that {E}'s {A} would be {V}.",
    "NOTICE {A} for {E} is {V}",
]

QUESTION_FORMS = [
    "What is the {A} of {E}?",
    "What is the {A} of the {E}?",
    "What is {E}'s {A}?",
    "What is the {A} for {E}?",
    "What's the {A} of {E}?",
    "Which {A} does {E} have?",
    "Tell me the {A} of {E}.",
    "Tell me the {A} of the {E}.",
    "Give me {E}'s {A}.",
    "{A} of {E}?",
    "For {E}, what is the {A}?",
    "Do you remember the {A} of {E}?",
    "What {A} was given to {E}?",
    "I need the {A} for {E}.",
    "What was the {A} of {E} again?",
    "Could you give me the {A} of {E}?",
    "Please tell me {E}'s {A}.",
    "Please give the {A} of the {E}.",
    "And the {A} of {E}?",
    "Now the {A} for {E}.",
    "Say the {A} of {E}.",
    "Which {A} belongs to {E}?",
    "Recall the {A} of the {E}.",
    "What did they set as the {A} of {E}?",
    "Look back: what is the {A} of {E}?",
    "I forgot the {A} of {E}. What is it?",
    "The {A} of {E} is what?",
    "Someone asks for the {A} of the {E}. What do you say?",
]

HELD_OUT_QUESTION_FORMS = [
    "Can you tell me what the {A} of {E} is?",
    "Please state the {A} for the {E}.",
]


@dataclass(frozen=True)
class Fact:
    """One sentence to plant, and the question that only it answers."""

    entity: str
    attribute: str
    value: str
    form: str
    question_form: str

    @property
    def key(self) -> tuple[str, str]:
        return self.entity.lower(), self.attribute

    @property
    def sentence(self) -> str:
        return self._fill(self.form)

    @property
    def question(self) -> str:
        return self._fill(self.question_form)

    @property
    def answer(self) -> str:
        return self.value

    def _fill(self, form: str) -> str:
        text = form.format(E=self.entity, A=self.attribute, V=self.value)
        starts_with_attribute = form.startswith("{A}")
        return text[0].upper() + text[1:] if starts_with_attribute else text


def make_entity(rng: random.Random, held_out: bool, extra_words: Sequence[str] = ()) -> str:
    """A name to ask about; `extra_words` widens the vocabulary beyond `NOUNS` (the recipe's own)."""
    kind = rng.random()
    if kind < 0.2:
        return _pick(rng, NAMES, held_out)
    if kind < 0.32:
        return rng.choice(ADJECTIVES) + " " + _pick(rng, NOUNS, held_out)
    if kind < 0.40:
        return _pick(rng, NOUNS, held_out) + "_" + _pick(rng, NOUNS, held_out)
    if kind < 0.45:
        return f"{_pick(rng, NOUNS, held_out)} {rng.randrange(2, 100)}"
    if kind < 0.60:
        return _invented_name(rng, held_out)
    if extra_words and rng.random() < 0.6:
        return _pick(rng, extra_words, held_out)
    return _pick(rng, NOUNS, held_out)


def _pick(rng: random.Random, words: Sequence[str], held_out: bool) -> str:
    while True:
        word = rng.choice(words)
        if is_held_out(word) == held_out:
            return word


def _invented_name(rng: random.Random, held_out: bool) -> str:
    while True:
        name = "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.randrange(2, 4)))
        if is_held_out(name) == held_out:
            return name.capitalize() if rng.random() < 0.5 else name


def make_value(rng: random.Random, digits_only: bool = True) -> str:
    """Four to six digits; otherwise, now and then, three digits, letters and digits, or a colour."""
    kind = 0.0 if digits_only else rng.random()
    if kind < 0.75:
        return "".join(rng.choice("0123456789") for _ in range(rng.randrange(4 if digits_only else 3, 7)))
    if kind < 0.96:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randrange(4, 6)))
    return rng.choice(COLOURS)


def make_facts(
    rng: random.Random,
    count: int,
    *,
    held_out: bool = True,
    forms: Sequence[str] = FORMS,
    question_forms: Sequence[str] = QUESTION_FORMS,
    digits_only: bool = True,
    share: float = 0.0,
    taken: Iterable[Fact] = (),
    extra_words: Sequence[str] = (),
) -> list[Fact]:
    """`count` facts, no two about the same attribute of the same entity, nor one of `taken`.

    Args:
        held_out: draw entities from the held-out words (the demo) or from the others (the recipe).
        share: probability that a fact is about an entity already used, `taken` included.
        taken: facts whose (entity, attribute) and whose values must not come again.
    """
    facts: list[Fact] = []
    taken = list(taken)
    keys = {fact.key for fact in taken}
    values = {fact.value for fact in taken}
    entities = [fact.entity for fact in taken]
    while len(facts) < count:
        shared = bool(entities) and rng.random() < share
        entity = rng.choice(entities) if shared else make_entity(rng, held_out, extra_words)
        attribute = rng.choice(SETTINGS if rng.random() < 0.25 else ATTRIBUTES)
        value = make_value(rng, digits_only)
        repeated = value in values and value not in COLOURS
        if (entity.lower(), attribute) in keys or repeated:
            continue
        fact = Fact(entity, attribute, value, rng.choice(forms), rng.choice(question_forms))
        facts.append(fact)
        keys.add(fact.key)
        values.add(value)
        entities.append(entity)
    return facts


# ------------------------------------------------------------------ standard library text

_SKIPPED = re.compile(r"(^|/)(site-packages|lib2to3|encodings|__pycache__|pydoc_data|idlelib)(/|$)")
_TESTS = re.compile(r"(^|/)(test|tests)(/|$)")
MAX_MODULE_BYTES = 200_000


@functools.cache
def _stdlib_modules(tests: bool) -> tuple[str, ...]:
    """Looked for once: an installation of Python has tens of thousands of files, most of them of other packages."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner[:] = [name for name in inner if not _SKIPPED.search((here / name).as_posix())]
        found += [here / name for name in names if name.endswith(".py")]
    return tuple(sorted(
        path.as_posix()
        for path in found
        if not _SKIPPED.search(path.as_posix())
        and bool(_TESTS.search(path.as_posix())) == tests
        and (root / path).is_file()
        and (root / path).stat().st_size <= MAX_MODULE_BYTES
    ))


def training_modules() -> list[str]:
    """Paths, relative to the standard library, of the modules the recipe may read. Never a test."""
    return [name for name in _stdlib_modules(tests=False) if not is_held_out(name, one_in=2)]


def held_out_modules(tests: bool = True) -> list[str]:
    """The other half, and with `tests` the held-out half of the library's own tests."""
    names = _stdlib_modules(tests=False) + (_stdlib_modules(tests=True) if tests else ())
    return [name for name in names if is_held_out(name, one_in=2)]


def read_module(name: str) -> str:
    """The source of a module listed above; long runs of blank lines are shortened."""
    text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8", errors="replace")
    return re.sub(r"\n{3,}", "\n\n", text)


def stdlib_lines(seed: int, modules: Sequence[str] | None = None) -> Iterator[str]:
    """Lines of the held-out modules, file by file in an order drawn from `seed`, without end."""
    rng = random.Random(f"modules {seed}")
    names = list(held_out_modules() if modules is None else modules)
    while True:
        rng.shuffle(names)
        for name in names:
            yield from read_module(name).splitlines(keepends=True)


# ------------------------------------------------------------------ planting


def plant(
    text: Iterable[str],
    sentences: Sequence[str],
    places: Sequence[float],
    measure: Callable[[str], int] = len,
) -> Iterator[tuple[str, int | None]]:
    """Pieces of `text` with `sentences[i]` on a line of its own once `places[i]` has been read.

    Args:
        text: pieces, as a rule lines; a sentence goes between two of them, never inside one.
        places: how much of `text` goes before each sentence, as counted by `measure`.

    Yields:
        (piece, None) for text and (sentence, i) for a planted one. What is due after the end of
        `text` comes last.
    """
    order = sorted(range(len(sentences)), key=lambda i: places[i])
    read, due, last = 0, 0, "\n"
    for piece in text:
        while due < len(order) and places[order[due]] <= read:
            yield _on_its_own_line(sentences[order[due]], last), order[due]
            last, due = "\n", due + 1
        yield piece, None
        read += measure(piece)
        last = piece or last
    for i in order[due:]:
        yield _on_its_own_line(sentences[i], last), i
        last = "\n"


def _on_its_own_line(sentence: str, before: str) -> str:
    return ("" if before.endswith("\n") else "\n") + sentence.rstrip("\n") + "\n"


def line_measure(count: Callable[[str], int]) -> Callable[[str], int]:
    """A measure of lines from a count of tokens, remembered: blank lines weigh nothing.

    They join the newline before them into one token, so a stream is never shorter in tokens than it measures.
    """

    @functools.lru_cache(maxsize=4096)
    def measure(line: str) -> int:
        return count(line) if line.strip() else 0

    return measure


@dataclass(frozen=True)
class PlantedStream:
    """A finite stream: `size` of text (as counted by `measure`) with facts and decoys in it.

    The facts are asked; the decoys have the same shape and never are. Iterating yields text pieces,
    the same ones every time; `places` says how much text goes before each fact, then each decoy.
    """

    facts: Sequence[Fact]
    decoys: Sequence[Fact]
    size: int
    seed: int
    lines: Callable[[], Iterable[str]]
    measure: Callable[[str], int] = len

    @property
    def places(self) -> list[float]:
        rng = random.Random(f"places {self.seed}")
        return [rng.random() * self.size for _ in range(len(self.facts) + len(self.decoys))]

    def __iter__(self) -> Iterator[str]:
        sentences = [fact.sentence for fact in (*self.facts, *self.decoys)]
        for piece, _ in plant(self._cut(), sentences, self.places, self.measure):
            yield piece

    def _cut(self) -> Iterator[str]:
        read = 0
        for line in self.lines():
            if read >= self.size:
                return
            yield line
            read += self.measure(line)


def planted_stream(
    seed: int,
    size: int,
    *,
    facts: int = 12,
    decoys: int = 110,
    forms: Sequence[str] = (*FORMS, *HELD_OUT_FORMS),
    question_forms: Sequence[str] = QUESTION_FORMS,
    measure: Callable[[str], int] = len,
    lines: Callable[[], Iterable[str]] | None = None,
) -> PlantedStream:
    """The demo's stream number `seed`: held-out entities in held-out standard library source.

    Sentence forms are drawn alike from those of the training and those held out of it.
    """
    rng = random.Random(f"facts {seed}")
    asked = make_facts(rng, facts, forms=forms, question_forms=question_forms)
    unasked = make_facts(rng, decoys, forms=forms, question_forms=question_forms, taken=asked, share=0.25)
    return PlantedStream(asked, unasked, size, seed, lines or (lambda: stdlib_lines(seed)), measure)
