"""What made facts say, and that they share nothing with what evaluation asks."""

from __future__ import annotations

import random
import re

import pytest

from locret_stream.evaluation import chat
from locret_stream.evaluation import words as evaluated
from locret_stream.making import words
from locret_stream.making.facts import KINDS, facts

LISTS = [getattr(words, name) for name in vars(words) if name.isupper() and isinstance(getattr(words, name), list)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fact_tells_its_answer(kind):
    wordings = set()
    for seed in range(200):
        fact = kind(random.Random(seed))
        assert fact == kind(random.Random(seed)), "a function of the seed"
        told = " ".join(fact.told)
        assert fact.value in told or fact.value in told.replace(fact.value.capitalize(), fact.value)
        assert fact.value in fact.answer and fact.value not in fact.question
        assert fact.answer.endswith(".") and fact.question.endswith("?") and 1 <= len(fact.told) <= 2
        wordings.add(re.sub(r"[A-Z0-9][\w-]*", "", told.replace(fact.value, "")))
    assert len(wordings) > 1, "several wordings"


def test_facts_of_one_conversation_have_different_questions():
    for seed in range(50):
        made = facts(random.Random(seed), 8, "code")
        assert len({fact.question for fact in made}) == 8
        assert {fact.style for fact in made} <= {"code", "prose"}
    assert any(fact.style == "code" for seed in range(9) for fact in facts(random.Random(seed), 8, "code"))


def test_evaluation_asks_about_other_things():
    made = {word.lower() for some in LISTS for word in some}
    asked = [(name, getattr(evaluated, name)) for name in ("NOUNS", "NAMES", "ATTRIBUTES")]
    asked += [(name, getattr(chat, name)) for name in ("RELATIONS", "WOMEN", "FAMILIES", "OFFICES", "THINGS", "SPOTS",
                                                       "MACHINES", "NEEDLES")]
    for name, some in [*asked, ("CAUSES", [*chat.CAUSES, *chat.CAUSES.values()])]:
        shared = made & {word.lower() for word in some}
        assert not shared, f"{name}: {sorted(shared)}"
    relations = {word for phrase in words.QUANTITIES for word in [phrase]}
    assert not relations & {relation.partition(" of ")[0] for relation in chat.RELATIONS}
