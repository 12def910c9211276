"""Facts in plain sentences, and the questions about them. Knows nothing of models, tokens or tensors.

The demo, the recipe of the bundled model and the task "sentences" share these. A word (`words.is_held_out`) or a
sentence form is either trained on or asked about, never both. Everything random comes from a `random.Random` that the
caller passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from locret_stream.evaluation.words import (
    ADJECTIVES,
    ATTRIBUTES,
    COLOURS,
    NAMES,
    NOUNS,
    ONSETS,
    RHYMES,
    SETTINGS,
    is_held_out,
)

# {E} entity, {A} attribute, {V} value. The value comes last: a memory keeps of a sentence mostly its value, and a
# causal model can bind a value only to what it has read before it.

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
        return text[0].upper() + text[1:] if form.startswith("{A}") else text


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
    return _drawn(lambda: rng.choice(words), held_out)


def _invented_name(rng: random.Random, held_out: bool) -> str:
    name = _drawn(lambda: "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.randrange(2, 4))),
                  held_out)
    return name.capitalize() if rng.random() < 0.5 else name


def _drawn(draw: Callable[[], str], held_out: bool) -> str:
    """The first word drawn that is held out, or that is not."""
    while is_held_out(word := draw()) != held_out:
        pass
    return word


def make_value(rng: random.Random, digits_only: bool = True) -> str:
    """Four to six digits; otherwise, now and then, three digits, letters and digits, or a colour."""
    kind = 0.0 if digits_only else rng.random()
    if kind < 0.75:
        return "".join(rng.choice("0123456789") for _ in range(rng.randrange(4 if digits_only else 3, 7)))
    if kind < 0.96:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randrange(4, 6)))
    return rng.choice(COLOURS)


def make_facts(rng: random.Random, count: int, *, held_out: bool = True, forms: Sequence[str] = FORMS,
               question_forms: Sequence[str] = QUESTION_FORMS, digits_only: bool = True, share: float = 0.0,
               taken: Iterable[Fact] = (), extra_words: Sequence[str] = ()) -> list[Fact]:
    """`count` facts, no two of them, `taken` included, about the same attribute of the same entity or of the same value
    (colours aside).

    Args:
        held_out: draw entities from the held-out words (as the demo does) or from the others (as the recipe does).
        share: probability that a fact is about an entity already used, `taken` included.
    """
    facts, taken = list[Fact](), list(taken)
    keys, values, entities = ({fact.key for fact in taken}, {fact.value for fact in taken},
                              [fact.entity for fact in taken])
    while len(facts) < count:
        shared = bool(entities) and rng.random() < share
        entity = rng.choice(entities) if shared else make_entity(rng, held_out, extra_words)
        attribute = rng.choice(SETTINGS if rng.random() < 0.25 else ATTRIBUTES)
        value = make_value(rng, digits_only)
        if (entity.lower(), attribute) in keys or (value in values and value not in COLOURS):
            continue
        fact = Fact(entity, attribute, value, rng.choice(forms), rng.choice(question_forms))
        facts.append(fact)
        keys.add(fact.key)
        values.add(value)
        entities.append(entity)
    return facts
