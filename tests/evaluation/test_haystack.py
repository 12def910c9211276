"""The generators behind recipe and demo: deterministic, disjoint, and planted where they say."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from locret_stream.evaluation.facts import (
    FORMS,
    HELD_OUT_FORMS,
    HELD_OUT_QUESTION_FORMS,
    QUESTION_FORMS,
    Fact,
    make_facts,
)
from locret_stream.evaluation.haystack import (
    held_out_modules,
    plant,
    planted_stream,
    read_module,
    stdlib_lines,
    training_modules,
)
from locret_stream.evaluation.words import NAMES, NOUNS, is_held_out


def test_facts_are_a_function_of_the_seed() -> None:
    first = make_facts(random.Random(3), 50)
    assert first == make_facts(random.Random(3), 50)
    assert first != make_facts(random.Random(4), 50)


def test_words_on_either_side_never_meet() -> None:
    asked = make_facts(random.Random(0), 400, held_out=True)
    trained = make_facts(random.Random(0), 400, held_out=False)
    assert not {fact.entity for fact in asked} & {fact.entity for fact in trained}
    nouns = {word for fact in trained for word in fact.entity.replace("_", " ").split()}
    assert not any(is_held_out(word) for word in nouns & set(NOUNS + NAMES))


def test_enough_words_are_held_out() -> None:
    share = sum(map(is_held_out, NOUNS)) / len(NOUNS)
    assert 0.2 <= share <= 0.35


def test_forms_on_either_side_never_meet() -> None:
    assert len(set(FORMS)) == len(FORMS) >= 30
    assert len(HELD_OUT_FORMS) >= 2
    assert not set(FORMS) & set(HELD_OUT_FORMS)
    assert len(QUESTION_FORMS) >= 10
    assert not set(QUESTION_FORMS) & set(HELD_OUT_QUESTION_FORMS)


@pytest.mark.parametrize("form", FORMS + HELD_OUT_FORMS)
def test_a_sentence_says_its_fact(form: str) -> None:
    fact = Fact("falcon", "pass key", "48213", form, QUESTION_FORMS[0])
    assert "falcon" in fact.sentence and "48213" in fact.sentence and "ass key" in fact.sentence
    assert "\n" not in fact.sentence and fact.answer == "48213"


def test_the_value_comes_after_what_it_is_bound_to() -> None:
    for form in FORMS + HELD_OUT_FORMS:
        assert form.index("{V}") > max(form.index("{E}"), form.index("{A}"))


def test_decoys_are_distinct_and_share_entities() -> None:
    stream = planted_stream(7, 10_000)
    everyone = [*stream.facts, *stream.decoys]
    assert (len(stream.facts), len(stream.decoys)) == (12, 110)
    assert len({fact.key for fact in everyone}) == len(everyone)
    assert len({fact.value for fact in everyone}) == len(everyone)
    asked = {fact.entity for fact in stream.facts}
    assert any(decoy.entity in asked for decoy in stream.decoys), "some decoys are about an entity that is asked for"


def test_modules_on_either_side_never_meet() -> None:
    trained, held_out = training_modules(), held_out_modules()
    assert trained and held_out
    assert not set(trained) & set(held_out)
    assert not any(part in ("test", "tests") for name in trained for part in name.split("/"))
    assert read_module(held_out[0]) == read_module(held_out[0])


def test_stdlib_lines_follow_the_seed_and_do_not_end() -> None:
    name = held_out_modules(tests=False)[0]
    count = len(read_module(name).splitlines())
    lines = list(islice(stdlib_lines(1, [name]), 2 * count + 1))
    assert lines[:count] == lines[count : 2 * count]
    assert list(islice(stdlib_lines(1), 200)) == list(islice(stdlib_lines(1), 200))


def test_sentences_stand_where_they_were_put() -> None:
    text = [f"line {i}\n" for i in range(10)]
    pieces = list(plant(text, ["first.", "second.", "third."], [7.0, 21.0, 0.0]))
    assert [piece for piece, number in pieces if number is None] == text
    where = {number: i for i, (_, number) in enumerate(pieces) if number is not None}
    before = {n: sum(len(piece) for piece, number in pieces[:i] if number is None) for n, i in where.items()}
    assert before == {0: 7, 1: 21, 2: 0}
    assert pieces[where[0]][0] == "first.\n"


def test_what_is_due_after_the_end_comes_last_and_on_its_own_line() -> None:
    pieces = list(plant(["no newline"], ["late."], [1e9]))
    assert pieces == [("no newline", None), ("\nlate.\n", 0)]


def test_any_measure_and_any_text() -> None:
    pieces = list(plant(iter(["a b c ", "d e "]), ["X."], [3], measure=lambda s: len(s.split())))
    assert [piece for piece, _ in pieces] == ["a b c ", "\nX.\n", "d e "]


def test_a_stream_is_the_same_every_time_and_holds_every_sentence_once() -> None:
    stream = planted_stream(1, 60_000, facts=3, decoys=8)
    text = "".join(stream)
    assert text == "".join(stream) == "".join(planted_stream(1, 60_000, facts=3, decoys=8))
    for fact in (*stream.facts, *stream.decoys):
        assert text.count(fact.sentence + "\n") == 1
    planted = sum(len(fact.sentence) + 2 for fact in (*stream.facts, *stream.decoys))
    assert 60_000 <= len(text) <= 60_000 + planted + 10_000


def test_places_are_uniform_over_the_stream() -> None:
    stream = planted_stream(2, 1000, facts=200, decoys=0)
    assert 0 <= min(stream.places) and max(stream.places) <= 1000
    assert 400 < sum(stream.places) / 200 < 600
