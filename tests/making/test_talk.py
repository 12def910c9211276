"""Talk that is made: it tells every fact, and shares nothing with what dialogues are measured with."""

from __future__ import annotations

import random
import re
import runpy
from pathlib import Path

import pytest

from locret_stream.making import Making, Texts, conversation, talk
from locret_stream.making.facts import facts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("\n".join(f"Sentence number {n} of the book is not a long one." for n in range(150)))
    return Texts([path])


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("seed", range(30))
def test_talk_tells_every_fact_in_turns_of_its_own(texts: Texts, seed: int):
    r = random.Random(seed)
    told = facts(r, 6)
    turns = talk.talk(texts, r, words, 500, told)
    assert sorted(fact.question for turn in turns for fact in turn.facts) == sorted(fact.question for fact in told)
    for fact in told:
        own = [turn for turn in turns if turn.tells is fact]
        read = "\n".join(turn.text for turn in own)
        assert 1 <= len(own) <= len(fact.told) and all(sentence in read for sentence in fact.told)
        assert own[-1].facts == (fact,) and not any(turn.facts for turn in own[:-1])
    for turn in turns:
        assert turn.text.strip() and turn.reply.strip()
        assert not re.search(r"\{[a-z]+\}", turn.text + turn.reply), "every slot is filled"
        assert turn.tells or not turn.facts
    assert 480 <= sum(words(turn.text) + words(turn.reply) for turn in turns) <= 900


def test_replies_confirm_in_several_ways(texts: Texts):
    r = random.Random(0)
    replies = [turn.reply for _ in range(60) for turn in talk.talk(texts, r, words, 100, facts(r, 4)) if turn.facts]
    short = sum(reply in talk.SHORT for reply in replies)
    assert 0.25 < short / len(replies) < 0.55, "the others repeat what was told"


def of_talk(texts: Texts, seed: int):
    """A conversation in talk, or None."""
    made = conversation(texts, random.Random(seed), words, Making(tokens=(200, 400), facts=(4, 4), system=0.0))
    return made if made.telling else None


def test_a_share_of_the_conversations_is_talk(texts: Texts):
    share = sum(of_talk(texts, seed) is not None for seed in range(200)) / 200
    assert 0.3 < share < 0.55


def test_what_no_answer_needs_is_not_told(texts: Texts):
    for made in filter(None, (of_talk(texts, seed) for seed in range(60))):
        facts_asked = list(dict.fromkeys(question.fact for question in made.questions))
        lost, kept = facts_asked[0], facts_asked[1:]
        less = made.without({question.message for question in made.questions if question.fact is lost})
        said = "\n".join(message["content"] for message in less.messages)
        assert lost.question not in said and lost.answer not in said
        for sentence in lost.told:
            assert said.count(sentence) == sum(sentence in fact.told for fact in kept)
        for fact in kept:
            assert fact.question in said and all(sentence in said for sentence in fact.told)
        for question in less.questions:
            assert less.messages[question.message]["content"] == question.fact.answer
        roles = [message["role"] for message in less.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_a_fact_that_one_of_two_questions_needs_stays(texts: Texts):
    for seed in range(400):
        made = of_talk(texts, seed)
        asked = [question.fact for question in made.questions] if made else []
        twice = next((fact for fact in asked if asked.count(fact) == 2), None)
        if made and twice:
            first = next(question.message for question in made.questions if question.fact == twice)
            said = "\n".join(message["content"] for message in made.without({first}).messages)
            assert all(sentence in said for sentence in twice.told) and said.count(twice.question) == 1
            return
    raise AssertionError("no fact was asked twice")


def runs_of(text: str, length: int = 4) -> set[tuple[str, ...]]:
    """All runs of that many words, without slots, marks and case."""
    found = set()
    for piece in re.split(r"\{\w+\}|[.?!:\n]", text.lower()):
        split = re.findall(r"[a-z']+", piece)
        found |= {tuple(split[at:at + length]) for at in range(len(split) - length + 1)}
    return found


def test_measured_dialogues_say_other_things():
    measured = runpy.run_path(str(BENCHMARKS / "dialogue_talk.py"))
    theirs = [text for name in ("TALK", "KNOWLEDGE", "PASSAGES", "LOGS") for pair in measured[name] for text in pair]
    ours = [text for name in ("CHATTER", "KNOWLEDGE", "PASSAGES") for pair in getattr(talk, name) for text in pair]
    ours += [text for pairs in talk.LINES.values() for pair in pairs for text in pair]
    shared = {run for text in theirs for run in runs_of(text)} & {run for text in ours for run in runs_of(text)}
    assert not shared, f"runs of four words: {sorted(shared)}"
    script = (BENCHMARKS / "dialogue_script.py").read_text()
    for opening in filter(None, talk.OPENINGS):
        assert f'"{opening}"' not in script
