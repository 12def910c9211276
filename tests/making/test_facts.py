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


def test_facts_are_told_in_many_forms():
    made = [kind(random.Random(seed)) for kind in KINDS for seed in range(60)]
    told = [fact.told[0] for fact in made if len(fact.told) == 1]
    assert sum(fact.told[0].startswith(fact.value) for fact in made) > 60, "the value first"
    assert sum(one.startswith("| ") and one.endswith(" |") for one in told) > 10, "a row of a table"
    assert sum("\n" in one for one in told) > 30, "several lines"
    assert sum(one.startswith("- ") or bool(re.match(r"[^.]*: [^.]*$", one)) for one in told) > 50, "a note"
    assert sum("by" in one.split() or "was" in one.split() for one in told) > 100, "in the passive voice"
    assert sum(one.startswith(("If ", "Since ", "As ", "Because ")) for one in told) > 30, "a subordinate clause"
    assert {fact.told[0][0] for fact in made if len(fact.told) == 2} >= {'"'}, "a dialogue"


def test_evaluation_tells_things_otherwise():
    """But for "The ... is ..."."""
    lines = [told.line for seed in range(20) for made in (chat.numbers, chat.words, chat.tools, chat.needles)
             for told in made(random.Random(seed), 2)]
    asked = {" ".join(line.split()[:4]) for line in lines if not line.startswith("The ")} | {"is hidden"}
    for kind in KINDS:
        for seed in range(200):
            told = "\n".join(kind(random.Random(seed)).told)
            assert not [one for one in asked if one in told], told


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
