"""Marker tasks: what is asked has one right answer, and it is in the stream where it should be."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locret_stream.errors import ConfigError
from locret_stream.evaluation import markers, metrics, suite

SEEDS = st.integers(0, 10**6)


def lines_of(case: markers.Case) -> list[str]:
    return [line for _, line in case.marks]


def reader(lines: list[str], question: str) -> str:
    """Answers a question by reading the marks, as somebody would who kept them all."""
    if question == "?@":
        throws = [line[1] for line in lines if line.startswith("@")]
        most = max("RPS", key=throws.count)
        return markers.BEATS[most]
    if question.count("<") > 1:
        return "".join(f"<{key}:{reader(lines, f'?<{key}:')}>" for key in question[2:-1].split("<"))
    bracket, key = question[1], question[2:4]
    found = [line[4:-1] for line in lines if line.startswith(f"{bracket}{key}:")]
    if bracket == "<":
        return found[-1]
    if bracket == "(":
        return " ".join(reversed(found))
    value = found[0]
    return value if value.isdigit() else reader(lines, f"?{{{value}:")


MAKERS = {
    "passkey": markers.passkey,
    "recall": lambda rng: markers.recall(rng, 48, asked=16),
    "last_write": lambda rng: markers.last_write(rng, 12),
    "several_values": lambda rng: markers.several_values(rng, 8),
    "several_keys": lambda rng: markers.several_keys(rng, 9, together=3),
    "decoys": lambda rng: markers.decoys(rng, 16),
    "variables": lambda rng: markers.variables(rng, 8, hops=3),
    "preference": lambda rng: markers.preference(rng, 9),
}


@pytest.mark.parametrize("name", MAKERS)
@given(seed=SEEDS)
@pytest.mark.thorough(but=2)
def test_who_keeps_every_mark_knows_every_answer(name: str, seed: int):
    case = MAKERS[name](random.Random(seed))
    assert case == MAKERS[name](random.Random(seed))
    assert [place for place, _ in case.marks] == sorted(place for place, _ in case.marks)
    assert all(0 <= place < 1 for place, _ in case.marks)
    assert case.questions
    for question, answer, needs in case.questions:
        assert reader(lines_of(case), question) == answer
        assert reader([line for line in lines_of(case) if line in needs], question) == answer, "of what it needs alone"
        assert re.fullmatch(r"[0-9]{3}( [0-9]{3})*|[RPS]|(<[A-Z]{2}:[0-9]{3}>){3}", answer)


@given(SEEDS)
def test_a_preference_has_one_winner(seed: int):
    throws = [line[1] for line in lines_of(markers.preference(random.Random(seed), 7))]
    counts = sorted(throws.count(t) for t in "RPS")
    assert counts[2] > counts[1]


@given(SEEDS)
def test_variables_are_defined_before_they_are_used(seed: int):
    known = set()
    for line in lines_of(markers.variables(random.Random(seed), 10, hops=4)):
        key, value = line[1:3], line[4:-1]
        assert key not in known and (value.isdigit() or value in known)
        known.add(key)


@given(SEEDS)
def test_decoys_are_never_asked_and_some_are_of_asked_keys(seed: int):
    case = markers.decoys(random.Random(seed), 16)
    decoys = [line[1:3] for line in lines_of(case) if line.startswith("[")]
    assert len(decoys) == 16 and all(question.startswith("?<") for question, *_ in case.questions)
    assert set(decoys) & {question.ask[2:4] for question in case.questions}


def test_merged_cases_keep_their_answers():
    rng = random.Random(0)
    keys = markers.Keys(rng)
    case = markers.merged(rng, [markers.recall(rng, 5, keys=keys), markers.last_write(rng, 5, keys=keys),
                                markers.variables(rng, 5, keys=keys)])
    assert len(case.questions) == 15
    for question, answer, _ in case.questions:
        assert reader(lines_of(case), question) == answer


def test_who_wants_more_keys_than_there_are_is_told():
    with pytest.raises(ConfigError, match="676 keys at most"):
        markers.recall(random.Random(0), 677)


# -- streams ----------------------------------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split()) + 1


def prose(seed: int):
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choice(("once", "upon", "a", "time")) for _ in range(rng.randint(1, 9)))


@pytest.mark.parametrize("name", suite.MARKER_TASKS)
@pytest.mark.parametrize("length", [400, 3000])
def test_streams_are_as_long_as_they_say_and_the_same_every_time(name: str, length: int):
    task = suite.TASKS[name]
    items = list(task.items(7, length, words, prose))
    assert items == list(task.items(7, length, words, prose)) != list(task.items(8, length, words, prose))
    text = [item for item in items if item.answer is None]
    assert abs(sum(words(item.text) for item in text) - length) < 40 + 0.05 * length
    assert all(item.text.endswith("\n") and item.text.count("\n") == 1 for item in text)
    asked = [item for item in items if item.answer is not None]
    assert len(asked) == task.asked and not any(item.needed for item in asked)
    for at, item in enumerate(items):
        if item.answer is not None:  # by what was read until then
            before = [other.text.strip() for other in items[:at] if other.needed]
            assert reader(before, item.text) == item.answer
    assert any(item.needed for item in items) == (task.kind == "answers")


def test_only_what_an_answer_follows_from_is_needed():
    """What the oracle keeps: not the facts that nobody asks for, not what was overwritten, no decoy."""
    for name, brackets in (("recall", "<"), ("last_write", "<"), ("decoys", "<"), ("variables", "{"),
                           ("every_so_often", "<")):
        items = list(suite.TASKS[name].items(3, 3000, words, prose))
        needed = [item.text.strip() for item in items if item.needed]
        asked = {item.text[2:4] for item in items if item.answer is not None}
        marks = [item.text for item in items if item.answer is None and item.text[0] in "<[{"]
        assert all(line[0] in brackets for line in needed) and len(needed) <= len(marks)
        assert asked <= {line[1:3] for line in needed}
        if name != "variables":
            assert len(needed) == len(asked) < len(marks)


def test_sentences_are_as_long_as_asked_for():
    for length in (256, 1000, 3000):
        items = suite.TASKS["sentences"].items(1, length, words, prose)
        read = sum(words(item.text) for item in items if item.answer is None)
        assert length <= read <= max(length, 140) + 20, "12 facts take some 100"


def test_sentences_ask_for_what_was_planted():
    items = list(suite.TASKS["sentences"].items(0, 3000, words, prose))
    assert items == list(suite.TASKS["sentences"].items(0, 3000, words, prose))
    asked = [item for item in items if item.answer is not None]
    assert len(asked) == 12 == sum(item.needed for item in items)
    needed = "".join(item.text for item in items if item.needed)
    assert all(item.answer in needed for item in asked)


def test_a_file_of_text_begins_where_the_seed_says(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("one\n\ntwo\nthree\n")
    text = suite.text_of(path)
    found = {tuple(itertools.islice(text.lines(seed), 4)) for seed in range(20)}
    assert found == {("one", "two", "three", "one"), ("two", "three", "one", "two"), ("three", "one", "two", "three")}
    path.write_text("other\n")
    assert suite.text_of(path).name != text.name
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="no text in it"):
        suite.text_of(path)


def test_every_so_often_asks_between_the_text():
    items = list(suite.TASKS["every_so_often"].items(0, 3000, words, prose))
    asked = [at for at, item in enumerate(items) if item.answer is not None]
    assert all(b - a > 10 for a, b in itertools.pairwise(asked))


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_right_if_it_is_the_expected_one():
    assert metrics.exact(" 471\n", "471") == 1
    assert metrics.exact("4711", "471") == metrics.exact("", "471") == metrics.exact("47 1", "471") == 0


def test_intervals_hold_the_mean_and_count_streams_not_questions():
    rng = random.Random(0)
    apart = [[float(rng.random() < 0.7)] for _ in range(400)]
    low, high = metrics.interval(apart)
    mean = sum(map(sum, apart)) / 400
    assert low < mean < high and 0.06 < high - low < 0.13  # 2 * 1.96 * sqrt(0.7 * 0.3 / 400) = 0.09
    alike = [[value[0]] * 16 for value in apart[:25]]
    wide = metrics.interval(alike)
    assert wide[1] - wide[0] > 2.5 * (high - low), "400 answers of 25 streams that are right or wrong together"


@pytest.mark.parametrize("streams,asked", [(1, 16), (2, 12), (4, 16), (6, 12), (16, 16)])
@pytest.mark.thorough(but=2)
def test_nineteen_intervals_of_twenty_hold_the_truth_however_few_the_streams(streams: int, asked: int):
    rng, held, runs = random.Random(f"{streams} {asked}"), 0, 300
    for run in range(runs):
        groups = [[float(rng.random() < 0.6) for _ in range(asked)] for _ in range(streams)]
        low, high = metrics.interval(groups, draws=500, seed=run)
        assert 0 <= low < high <= 1
        held += low <= 0.6 <= high
    assert held / runs > 0.92


def test_intervals_hold_the_truth_where_streams_are_hard_or_easy():
    rng, held, runs = random.Random(0), 0, 300
    for run in range(runs):
        groups = [[float(rng.random() < ease) for _ in range(16)] for ease in rng.choices((0.3, 0.9), k=16)]
        low, high = metrics.interval(groups, draws=500, seed=run)
        held += low <= 0.6 <= high
    assert held / runs > 0.92


def test_where_all_are_right_a_doubt_is_left():
    assert metrics.interval([[1.0] * 16] * 16) == (pytest.approx(0.985, abs=0.001), 1.0)
    assert metrics.interval([[0.0, 0.0], [0.0]]) == (0.0, pytest.approx(0.56, abs=0.01))
    assert metrics.interval([[1.7], [1.7], [1.7]]) == (pytest.approx(1.7), pytest.approx(1.7)), "bits are no shares"
