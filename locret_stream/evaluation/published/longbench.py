"""LongBench (arXiv:2308.14508): its records, its prompts (`longbench.json`) and its metrics. Knows no model.

A record is {"input", "context", "answers", "dataset", "length", "language", "all_classes", "_id"}; those of LongBench-E
are the same, their dataset's name may end in "_e". The prompts are worded anew: what is asked and how the answer is to
look is the benchmark's, so scores compare with each other, and with its tables only roughly.

Metrics are those of its `eval.py` and `metrics.py`, by formula. Where they differ:

- `qa_f1_zh` and `rouge_zh` cut Chinese into characters (letters and digits of ASCII that stand together are one token),
  where LongBench cuts it into words with jieba. Scores of Chinese tasks compare with each other, not with its tables.
- `code_sim` is that of fuzzywuzzy with `difflib`; python-Levenshtein beside fuzzywuzzy changes it by a few percent.
- `rouge` compares sentences of any length; see there.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.evaluation.published import overlap
from locret_stream.evaluation.published.records import Benchmark, Document, Question, Table, best, listed

NAME = "longbench"
TABLE = Table.of(NAME)
PARAGRAPH = {"retrieval": re.compile(r"Paragraph (\d+)"), "retrieval_zh": re.compile(r"段落(\d+)")}


class Record(msgspec.Struct, frozen=True):
    """One record of a file, its fields by their names there."""

    input: str
    context: str
    answers: list[str]
    dataset: str
    all_classes: list[str] | None = None
    id: str | int = msgspec.field(default="", name="_id")


def document(record: Record, task: str) -> Document:
    """One record, one question."""
    task = task or record.dataset.removesuffix("_e")
    if task not in TABLE.tasks:
        raise ConfigError(f"LongBench has no dataset {task!r}; expected one of {listed(TABLE.tasks)}")
    facts = TABLE.tasks[task]
    if not record.answers:
        raise ConfigError("`answers` is empty; expected one reference at least")
    if facts.metric == "classification" and not record.all_classes:
        raise ConfigError(f"`all_classes` is missing or empty; {task} is scored by them")
    if facts.metric in PARAGRAPH and not all(map(PARAGRAPH[facts.metric].search, record.answers)):
        raise ConfigError(f"found the answers {record.answers}, expected {PARAGRAPH[facts.metric].pattern!r} in each")
    question = Question(facts.after.format(input=record.input), tuple(record.answers), f"{NAME}/{facts.metric}",
                        facts.max_new_tokens, tuple(record.all_classes or ()), facts.first_line, str(record.id))
    return Document(NAME, task, facts.before + record.context, (question,))


def qa_f1_zh(found: str, expected: str) -> float:
    """F1 of characters, punctuation aside."""
    sides = [[bare for token in overlap.chinese_tokens(text) if (bare := overlap.chinese_bare(token))]
             for text in (found, expected)]
    return overlap.f1(*sides)


def rouge_zh(found: str, expected: str) -> float:
    """ROUGE-L of characters."""
    return overlap.rouge(*(" ".join(overlap.chinese_tokens(text)) for text in (found, expected)))


def count(found: str, expected: str) -> float:
    """The share of the expected number among all numbers of the answer."""
    numbers = re.findall(r"\d+", found)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def retrieval(found: str, expected: str) -> float:
    """`count`, of the number of the paragraph."""
    return count(found, PARAGRAPH["retrieval"].findall(expected)[0])


def retrieval_zh(found: str, expected: str) -> float:
    """`count`, of the number of the paragraph."""
    return count(found, PARAGRAPH["retrieval_zh"].findall(expected)[0])


def code_sim(found: str, expected: str) -> float:
    """How alike the expected line is to the first line of the answer without a backquote, "#" or "//"; in whole
    percents."""
    line = next((line for line in found.lstrip("\n").split("\n") if not re.search("`|#|//", line)), "")
    if line == expected:
        return 1.0
    return round(100 * SequenceMatcher(None, line, expected).ratio()) / 100 if line and expected else 0.0


def classification(found: str, answers: tuple[str, ...], classes: tuple[str, ...]) -> float:
    """1 over the number of classes that the answer names, if the expected one is among them; classes whose name is part
    of the expected one's do not count."""
    return max(_one_class(found, answer, classes) for answer in answers)


def _one_class(found: str, expected: str, classes: tuple[str, ...]) -> float:
    named, at = [name for name in classes if name in found], 0
    while at < len(named):
        if named[at] in expected and named[at] != expected:
            del named[at]
        at += 1  # also past the name behind one that was dropped, as LongBench's own loop does
    return 1 / len(named) if expected in named else 0.0


BENCHMARK = Benchmark(
    NAME, "LongBench", Record, document, tasks=listed(TABLE.tasks), knows=TABLE.tasks.__contains__, names_itself=True,
    metrics={
        "qa_f1": best(overlap.qa_f1), "qa_f1_zh": best(qa_f1_zh), "rouge": best(overlap.rouge),
        "rouge_zh": best(rouge_zh), "classification": classification, "retrieval": best(retrieval),
        "retrieval_zh": best(retrieval_zh), "count": best(count), "code_sim": best(code_sim)})
