"""The files of published benchmarks, as documents to read and questions to ask, and the score of an answer by the
metric of its benchmark. Knows no model and fetches nothing: the files are on disk.

    LongBench  hotpotqa.jsonl, hotpotqa_e.jsonl, …     `data.zip` of the dataset THUDM/LongBench on Hugging Face
    RULER      niah_single_1/validation.jsonl, …       made by `scripts/data/prepare.py` of github.com/NVIDIA/RULER
    ∞Bench     passkey.jsonl, longbook_qa_eng.jsonl, … the dataset xinrongzhang2022/InfiniteBench on Hugging Face
    L-Eval     coursera.jsonl, …                       `LEval-data` of github.com/OpenLMLab/LEval

All are UTF-8 with one JSON object on each line; blank lines and a byte order mark are skipped. There is a module for
each benchmark, which says what its fields are, how a record becomes text and question, and where its metrics differ
from the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from os import PathLike
from pathlib import Path

from locret_stream.errors import ConfigError
from locret_stream.evaluation.published import infinitebench, leval, longbench, records, ruler
from locret_stream.evaluation.published.records import Benchmark, Document, Question, listed

__all__ = ["BENCHMARKS", "METRICS", "Document", "Question", "detect", "load", "score"]

BENCHMARKS = {module.BENCHMARK.name: module.BENCHMARK for module in (longbench, ruler, infinitebench, leval)}
METRICS = {f"{benchmark.name}/{name}": metric
           for benchmark in BENCHMARKS.values() for name, metric in benchmark.metrics.items()}


def load(path: str | PathLike[str], benchmark: str | None = None, task: str | None = None) -> Iterator[Document]:
    """The documents of one file, in its order; at most two of its lines are in memory at a time.

    Records that follow each other and have the same text (the questions on one book of ∞Bench) are one document, so
    that it is read once.

    Args:
        benchmark: a name of BENCHMARKS; without it the fields of the first record tell.
        task: the task of every record; without it the name of the file or of its folder tells.

    Raises:
        ConfigError: at once if there is no such file, benchmark or task, or if nothing tells which; while the file is
            read if a line is not a record of the benchmark. The message names file, line, what was found and what was
            expected.
    """
    path = Path(path)
    if benchmark is not None and benchmark not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {benchmark!r}; expected one of {listed(BENCHMARKS)}")
    kind = BENCHMARKS[benchmark or detect(path)]
    if task is None and not kind.names_itself:
        task = _task_of(path, kind)
    if task is not None and not kind.knows(task):
        raise ConfigError(f"{kind.title} has no task {task!r}; expected {kind.tasks}")
    _check(path)
    return _grouped(_documents(path, kind, task or ""))


def detect(path: str | PathLike[str]) -> str:
    """The name of the benchmark whose fields the first record of a file has. Raises ConfigError if there is none."""
    path = Path(path)
    _check(path)
    with closing(records.lines(path)) as lines:
        number, line = next(lines, (0, b""))
    if not number:
        raise ConfigError(f"{path} holds no record; expected one object of JSON a line")
    try:
        fields = set(records.fields_of(line))
    except ConfigError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    matching = [benchmark for benchmark in BENCHMARKS.values() if benchmark.required <= fields]
    if not matching:
        expected = "; or ".join(f"{listed(kind.required)} ({kind.title})" for kind in BENCHMARKS.values())
        raise ConfigError(f"{path}, line {number}: found the fields {listed(fields)}; expected {expected}")
    return max(matching, key=lambda benchmark: len(benchmark.required)).name


def score(question: Question, found: str) -> float:
    """The score of the answer `found`, in [0, 1], by the metric of the question.

    Raises:
        ConfigError: the question has no metric, because only people or a judging model can score it, or an unknown one.
    """
    if question.metric not in METRICS:
        raise ConfigError(f"found the metric {question.metric!r}, expected one of {listed(METRICS)}; a question "
                          "without any is scored by people or by a judging model")
    if question.first_line:
        found = found.lstrip("\n").split("\n")[0]
    return float(METRICS[question.metric](found, question.answers, question.classes))


def _check(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is a folder; expected one of its files" if path.is_dir() else
                          f"there is no file {path}; expected one of the benchmarks "
                          f"{listed(kind.title for kind in BENCHMARKS.values())}")


def _task_of(path: Path, kind: Benchmark) -> str:
    for name in (path.stem, path.absolute().parent.name):
        if kind.knows(name):
            return name
    raise ConfigError(f"nothing tells of which task {path} is: its records do not, and neither its name nor that of "
                      f"its folder is a task of {kind.title}; name the task, one of {kind.tasks}")


def _documents(path: Path, kind: Benchmark, task: str) -> Iterator[Document]:
    for number, line in records.lines(path):
        try:
            document = kind.document(records.decode(line, kind), task)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        yield document


def _grouped(documents: Iterator[Document]) -> Iterator[Document]:
    """The documents; those that follow each other and have the same text are one, with the questions of all of them."""
    last = None
    for document in documents:
        if last is not None and (last.task, last.context) == (document.task, document.context):
            last = replace(last, questions=last.questions + document.questions)
            continue
        if last is not None:
            yield last
        last = document
    if last is not None:
        yield last
