"""∞Bench (InfiniteBench, arXiv:2402.13718): its records, its prompts (`infinitebench.json`) and its metrics. Knows no
model.

A record is {"id", "context", "input", "answer", "options"}; only the name of the file says which task it is of.
`answer` is a text, a number, or a list of them.

The prompts are worded anew: what is asked and how the answer is to look is the benchmark's, so scores compare with each
other, and with its tables only roughly. As there, three begin with what is asked for (`math_find`, `math_calc`,
`code_run`), so that a memory knows it while it reads.

Metrics are those of its `compute_scores.py`, by formula. Where they differ:

- `first_number` compares numbers: "3.5" is wrong where 3 is expected, and "3.0" right (there both end the run).
- `word` and the others take the first of several answers where there it is taken only for some tasks.
- `leading_integers` scores from the first number on, as for all models there but GPT-4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.evaluation.published import overlap, records
from locret_stream.evaluation.published.records import Benchmark, Document, Question, Table, best, listed

NAME = "infinitebench"
TABLE = Table.of(NAME)
LETTERS = "ABCD"
OF_OPTIONS = ("choice", "culprit")
OF_NUMBERS = {"last_integer": int, "first_number": float, "leading_integers": int}


class Record(msgspec.Struct, frozen=True):
    """One record of a file, its fields by their names there."""

    context: str
    input: str
    answer: str | int | float | list[str | int | float | list[int]]
    id: int | str = ""
    options: list[str] = []


def document(record: Record, task: str) -> Document:
    """One record, one question."""
    facts = TABLE.tasks[task]
    fields = _fields(record, task, facts)
    question = Question(facts.after.format(**fields), _answers(record, facts), f"{NAME}/{facts.metric}",
                        facts.max_new_tokens, name=str(record.id))
    return Document(NAME, task, facts.before.format(**fields) + record.context, (question,))


def _fields(record: Record, task: str, facts: records.TaskFacts) -> dict[str, str]:
    """The texts for the placeholders of the prompts."""
    fields = {"input": record.input}
    if facts.metric in OF_OPTIONS:
        if len(record.options) != len(LETTERS):
            raise ConfigError(f"found {len(record.options)} `options`, expected {len(LETTERS)} in {task}")
        fields |= zip(LETTERS, record.options, strict=True)
    if task == "code_run":
        fields["call"] = _searched(r"func_\d+\(-?\d+\)", record.input, "a call such as func_1(5)")
        fields["function"] = fields["call"].partition("(")[0]
    if task == "math_find":
        wanted = _searched(r"The .+ of", record.input, "a sentence such as 'The largest number of the list is'")
        fields["wanted"] = wanted.removesuffix(" of").lower()
    return fields


def _searched(pattern: str, text: str, what: str) -> str:
    match = re.search(pattern, text)
    if not match:
        raise ConfigError(f"found the input {text[:200]!r}, expected {what} in it")
    return match[0]


def _answers(record: Record, facts: records.TaskFacts) -> tuple[str, ...]:
    """The references as texts; of a question with options (text, letter)."""
    references: Sequence[object] = record.answer if isinstance(record.answer, list) else [record.answer]
    if references and isinstance(references[0], list):  # the results of math_calc, in some files a list within a list
        references = references[0]
    if not references:
        raise ConfigError("`answer` is empty; expected one reference at least")
    answers = tuple(map(str, references))
    if facts.metric == "named" and not all(map(str.strip, answers)):
        raise ConfigError("one of `answer` is empty, which any answer would hold; expected names")
    if facts.metric in OF_NUMBERS:
        try:
            list(map(OF_NUMBERS[facts.metric], answers))
        except ValueError as error:
            raise ConfigError(f"found the answer {record.answer!r}, expected numbers: {error}") from error
    if facts.metric not in OF_OPTIONS:
        return answers
    if len(answers) == 2 and answers[1] in LETTERS:
        return answers
    if len(answers) > 1 or answers[0] not in record.options:
        raise ConfigError(f"found the answer {record.answer!r}, expected one of the options {record.options}")
    return answers[0], LETTERS[record.options.index(answers[0])]


def first_integer(found: str, expected: str) -> float:
    """1 if the first run of digits is the expected one, leading zeros included."""
    digits = re.search("[0-9]+", found)
    return float(digits is not None and digits[0] == expected)


def word(found: str, expected: str) -> float:
    """1 if the expected word is among those of the answer, quotes, braces and punctuation aside."""
    return float(expected in re.sub("[\n:\"'.,?!{}]", " ", found).split())


def last_integer(found: str, expected: str) -> float:
    """1 if the last word is the expected integer."""
    words = re.sub("[\n.`'\":]", " ", found).split()
    try:
        return float(bool(words) and int(words[-1]) == int(expected))
    except ValueError:
        return 0.0


def first_number(found: str, expected: str) -> float:
    """1 if the first number, signs aside, is the expected one."""
    number = re.search(r"\d+\.\d+|\d+", found)
    return float(number is not None and float(number[0]) == float(expected))


def leading_integers(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The share of the expected integers before the first that is wrong or missing. The answer is read as runs of
    digits, so that an integer below zero is never right."""
    right = 0
    for digits, expected in zip(re.findall("[0-9]+", found), answers, strict=False):
        if int(digits) != int(expected):
            break
        right += 1
    return right / len(answers)


def named(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if any of the names occurs, case aside."""
    return float(any(answer.upper() in found.upper() for answer in answers))


def choice(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if the letter of the right option was chosen, `answers` its text and its letter.

    The letter that stands alone, the last one of the first line that has one; else the answer itself or its first
    letter; else what follows "answer is" and the like; else the first word of these letters.
    """
    found = found.strip()
    if _lone_letter(found, "A-D") in answers:
        return 1.0
    if not found or found[0] in LETTERS:
        return float(found[:1] in answers)
    if found in answers:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", found))
    said = _said(text, ("answer is:", "answer:", "answer is", "option is"))
    if said is not None:
        return float(said.startswith(answers))
    return float(next((word for word in text.split() if word in LETTERS), None) in answers)


def culprit(found: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if the function with the error was named or its letter chosen, `answers` its name and its letter: alone in a
    line, at the beginning, or after "answer is:" and the like."""
    found = found.strip()
    if _lone_letter(found, "A-J") == answers[1]:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n`'\"*-]|[Oo]ption", " ", found))
    if text.startswith(answers):
        return 1.0
    said = _said(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(said is not None and said.startswith(answers))


def _lone_letter(text: str, letters: str) -> str | None:
    match = re.search(rf"\b[{letters}]\b(?!.*\b[{letters}]\b)", text)
    return match and match[0]


def _said(text: str, openings: tuple[str, ...]) -> str | None:
    """The text from one character behind the first of these openings that occurs at all."""
    for opening in openings:
        at = text.find(opening)
        if at >= 0:
            return text[at + len(opening) + 1:]
    return None


def qa_f1_zh(found: str, expected: str) -> float:
    """F1 of characters, punctuation aside."""
    return overlap.f1(overlap.chinese_bare(found), overlap.chinese_bare(expected))


def _first(metric: Callable[[str, str], float]) -> records.Metric:
    return lambda found, answers, classes: metric(found, answers[0])


BENCHMARK = Benchmark(
    NAME, "∞Bench", Record, document, tasks=listed(TABLE.tasks), knows=TABLE.tasks.__contains__,
    metrics={
        "first_integer": _first(first_integer), "word": _first(word), "last_integer": _first(last_integer),
        "first_number": _first(first_number), "leading_integers": leading_integers, "choice": choice,
        "culprit": culprit, "named": named, "qa_f1": best(overlap.qa_f1), "qa_f1_zh": best(qa_f1_zh),
        "rouge_l_sum": best(overlap.rouge_l_sum)})
