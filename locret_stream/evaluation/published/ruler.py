"""RULER (arXiv:2404.06654): its records and its metrics. Knows no model.

A record is {"index", "input", "outputs", "length"}, in later versions with "answer_prefix". `input` is text and
question together, in a chat template if it was made with one. It is cut where the question begins: at the last
occurrence of the words with which the template of the task begins its question, else at the last line that is not
blank. The question is all behind the cut, and then the answer prefix, so that nothing is lost. The instructions that qa
repeats before its question are read with the text.

The metrics are those of its `eval/synthetic/constants.py`.
"""

from __future__ import annotations

import re

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.evaluation.published.records import Benchmark, Document, Question

NAME = "ruler"
# family: (tokens to generate, what the question begins with), of data/synthetic/constants.py
FAMILIES = {
    "niah": (128, ("What are all the special magic ", "What is the special magic ")),
    "vt": (30, ("Question: Find all variables",)),
    "cwe": (120, ("Question: What are the 10 most common",)),
    "fwe": (50, ("Question: Do not provide",)),
    "qa": (32, ("Question: ",)),
}
LONG = {"variable_tracking": "vt", "common_words_extraction": "cwe", "freq_words_extraction": "fwe"}


class Record(msgspec.Struct, frozen=True):
    """One record of a file, its fields by their names there."""

    input: str
    outputs: list[str]
    index: int | str = ""
    answer_prefix: str = ""


def family(task: str) -> str | None:
    """The family of a task: of niah_single_1 "niah", of qa_2 "qa"; None for an unknown task."""
    return LONG.get(task) or next((name for name in FAMILIES if re.fullmatch(rf"{name}(_\w+)?", task)), None)


def question_at(text: str, task: str) -> int:
    """Where in a prompt its question begins. Raises ConfigError for a prompt of one line without a known question."""
    at = max(text.rfind(opening) for opening in FAMILIES[_known(task)][1])
    if at < 0:
        at = text.rstrip().rfind("\n") + 1
    if at <= 0:
        raise ConfigError(f"`input` is one line without a question of {task}; expected text, and after it a question "
                          "of RULER's template or a line of its own")
    return at


def _known(task: str) -> str:
    name = family(task)
    assert name is not None  # `published.load` refuses any other task
    return name


def document(record: Record, task: str) -> Document:
    """One record, one question."""
    if not record.outputs or not all(map(str.strip, record.outputs)):
        raise ConfigError("`outputs` is empty, or one of them, which any answer would hold; expected references")
    kind, at = _known(task), question_at(record.input, task)
    metric = "string_match_part" if kind == "qa" else "string_match_all"
    question = Question(record.input[at:] + record.answer_prefix, tuple(record.outputs), f"{NAME}/{metric}",
                        FAMILIES[kind][0], name=str(record.index))
    return Document(NAME, task, record.input[:at], (question,))


def _in(found: str, answers: tuple[str, ...]) -> list[bool]:
    found = re.sub(r"[\x00-\x1f]", "\n", found.strip()).strip().lower()
    return [answer.lower() in found for answer in answers]


def string_match_all(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The share of the references that occur in the answer, case aside."""
    return sum(_in(found, answers)) / len(answers)


def string_match_part(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if any reference occurs in the answer, case aside."""
    return float(any(_in(found, answers)))


BENCHMARK = Benchmark(
    NAME, "RULER", Record, document, tasks="niah_…, vt, cwe, fwe, qa_…", knows=lambda task: family(task) is not None,
    metrics={"string_match_all": string_match_all, "string_match_part": string_match_part})
