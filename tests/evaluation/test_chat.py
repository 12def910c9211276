"""The chat tasks: what is told, where it lies, and what counts as an answer."""

from __future__ import annotations

import random

import pytest

from locret_stream.evaluation import chat, published, suite
from locret_stream.evaluation.request import Request

LENGTH = 400


def measure(text: str) -> int:
    return len(text.split())


def lines(seed: int):
    while True:
        yield f"line of text {seed}\n"


@pytest.mark.parametrize("name", suite.CHAT_TASKS)
@pytest.mark.parametrize("seed", range(12))
def test_every_question_is_about_a_line_of_the_stream(name: str, seed: int):
    task = suite.task_named(name)
    items = list(task.items(seed, LENGTH, measure, lines))
    assert items == list(task.items(seed, LENGTH, measure, lines)), "a function of the seed"
    asked = [item for item in items if item.answer is not None]
    told = [item for item in items if item.needed]
    assert len(asked) == len(told) == task.asked and len({item.text for item in asked}) == task.asked
    assert all(any(item.answer in one.text for one in told) for item in asked)
    assert abs(sum(measure(item.text) for item in items if item.answer is None) - LENGTH) <= 4
    assert not any(item.answer in one.text for item in asked for one in items if one.answer is None and not one.needed)


def test_an_answer_counts_where_it_contains_the_value():
    [one, *_] = chat.numbers(random.Random(0), 4)
    question = one.asked()
    assert published.score(question, f"Well, it is {one.value}, I think.") == 1
    assert published.score(question, "Well, it is 1, I think.") == 0


def test_of_what_changes_the_last_value_is_told_last_and_asked():
    for seed in range(20):
        items = list(suite.task_named("chat_updates").items(seed, LENGTH, measure, lines))
        for asked in (item for item in items if item.answer is not None):
            what = asked.text.removeprefix("What is the ").removesuffix(" now?")
            about = [item for item in items if item.answer is None and what in item.text]
            assert len(about) == 2 and asked.answer in about[1].text and about[1].needed and not about[0].needed


def test_chat_stands_for_all_of_them():
    assert Request(tasks=("chat", "sentences")).axes().tasks == (*suite.CHAT_TASKS, "sentences")
    assert not set(Request(tasks=("markers",)).axes().tasks) & set(suite.CHAT_TASKS)
