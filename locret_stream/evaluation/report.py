"""The report on all results of one origin: a table for each length and budget, against the full cache. Files have
tables of their own, because their documents have any length.

The *ratio* of a cell is its score over that of the full cache on the same task; of "text" (bits per byte, lower is
better) it is the full cache's score over that of the cell. The *mean* of a row is the mean of its ratios over the tasks
with answers on which the full cache scores at least 0.9: where the model itself fails, a memory cannot be judged. Files
count wherever the full cache scores above 0: no model comes near 1 by F1 or ROUGE, and the question is how much of the
model's own score is left. The interval of a mean is a bootstrap over streams within each cell. Runs nothing and writes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from locret_stream.errors import ConfigError
from locret_stream.evaluation import metrics, suite
from locret_stream.evaluation.cells import CellResult, Origin, by_origin, file_name, values
from locret_stream.evaluation.variants import (
    FIRST,
    FULL,
    LAST,
    ORACLES,
    Settings,
    Variant,
    labels,
    path_ends,
    settings_of,
    variant_of,
)

LEAST_FULL = 0.9
LEAST_STREAMS = 5  # with fewer, no difference can be told from chance
VERSION = 2


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A value and its 95 % interval. tasks: over how many tasks it is the mean."""

    value: float
    low: float
    high: float
    tasks: int = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: its score, and its ratio to the full cache, None where there is none or it does not count."""

    score: Estimate
    questions: int
    streams: int
    ratio: Estimate | None = None


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The full cache on one task: at the table's length, or at the longest at which it was run. counted: the task is
    part of the mean."""

    length: int
    score: float
    counted: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One variant.

    Args:
        tok_per_s: of feeding. peak_bytes: of one context.
        units_held: mean over the layers and over the tokens fed (KV footprint / tokens).
        best: the columns, tasks or "mean", in which no other row is better beyond chance (see `_with_best`).
    """

    label: str
    variant: Variant
    heads: str
    cells: dict[str, Entry]
    mean: Estimate | None
    tok_per_s: float
    peak_bytes: int
    units_held: float
    best: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All variants on streams of one length with one budget.

    Args:
        length: 0 for the documents of files. units: None for no budget.
        focus: a question was announced before each stream, and was the only one asked.
        tokens: the fewest and the most tokens of a stream.
    """

    length: int
    units: int | None
    focus: bool
    tokens: tuple[int, int]
    references: dict[str, Reference]
    rows: tuple[Row, ...]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a task: its digest, how many documents of it were read at most, and the fewest and the most tokens of
    a document."""

    path: str
    digest: str
    documents: int
    tokens: tuple[int, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report says.

    Args:
        tasks: in their order. bits: the tasks that are scored by bits per byte. files: the tasks that are files, with
            more of their paths in the name where several files are of one task.
        questions: of each task the fewest and the most in a cell.
        settings: what most rows have in common.
        superseded: how many results are left out, because another one of the same cell has more questions.
    """

    version: int = VERSION
    origin: Origin
    tasks: tuple[str, ...]
    bits: tuple[str, ...]
    questions: dict[str, tuple[int, int]]
    settings: Settings | None
    superseded: int
    tables: tuple[Table, ...]
    files: dict[str, Source] = {}


def report_of(results: Iterable[CellResult]) -> Report:
    """The report on results of one origin, heads aside; their order has no effect.

    Raises:
        ConfigError: no results, or results of several origins (`cells.by_origin` groups them).
    """
    results = list(results)
    origins = [origin for origin, _ in by_origin(results)]
    if len(origins) != 1:
        raise ConfigError(f"a report on results of {len(origins)} origins (models, tokenizers, texts, versions of the "
                          "tasks); expected those of one")
    kept = _by_column(_most_streams(results))
    tasks = _in_order({result.cell.task for result in kept})
    by_task = {task: [result for result in kept if result.cell.task == task] for task in tasks}
    names = labels((result.cell, result.origin) for result in kept)
    tables: list[Table] = []
    for length, focus in sorted({(result.cell.length, result.cell.focus) for result in kept},
                                key=lambda place: (place[0] == 0, *place)):
        alike = [result for result in kept if result.cell.focus == focus]  # the same questions
        of_length = [result for result in alike if result.cell.length == length]
        budgets: list[int | None] = [*sorted({units for result in of_length
                                              if (units := result.cell.units) is not None})]
        for units in budgets or [None]:
            of_table = [result for result in of_length if result.cell.units in (units, None)]
            tables.append(_table(length, units, focus, of_table, alike, names))
    questions = {task: [result.questions for result in by_task[task]] for task in tasks}
    return Report(origin=origins[0], tasks=tasks, tables=tuple(tables), superseded=len(results) - len(kept),
                  settings=settings_of((result.cell, result.origin) for result in kept),
                  files={task: _source(by_task[task]) for task in tasks
                         if any(result.origin.file for result in by_task[task])},
                  bits=tuple(task for task in tasks if any(map(_in_bits, by_task[task]))),
                  questions={task: (min(questions[task]), max(questions[task])) for task in tasks})


def _most_streams(results: Sequence[CellResult]) -> list[CellResult]:
    """Of every cell the result with the most questions, in an order that depends on the cells alone."""
    kept: dict[tuple, CellResult] = {}
    for result in sorted(results, key=lambda result: (-result.questions, result.cell.first_seed,
                                                      file_name(result.cell, result.origin))):
        cell = result.cell
        kept.setdefault((variant_of(cell, result.origin), cell.task, cell.length, cell.units, result.origin.file),
                        result)
    return list(kept.values())


def _by_column(results: list[CellResult]) -> list[CellResult]:
    """The same results; where several files are of one task (RULER's at two lengths, or one that has changed), the name
    of the task also has what tells the files apart."""
    paths: dict[str, dict[str, str]] = {}
    for result in results:
        if result.origin.file:
            paths.setdefault(result.cell.task, {}).setdefault(result.origin.file, result.cell.file)
    ends = {task: path_ends(of_task, "content") for task, of_task in paths.items() if len(of_task) > 1}
    return [msgspec.structs.replace(result, cell=msgspec.structs.replace(
                result.cell, task=f"{result.cell.task}, {ends[result.cell.task][result.origin.file]}"))
            if result.origin.file and result.cell.task in ends else result for result in results]


def _source(results: list[CellResult]) -> Source:
    tokens = [stream.tokens for result in results for stream in result.streams]
    return Source(path=results[0].cell.file, digest=results[0].origin.file,
                  documents=max(len(result.streams) for result in results), tokens=(min(tokens), max(tokens)))


def _in_order(tasks: set[str]) -> tuple[str, ...]:
    """Tasks of the suite in its order, then all others by name."""
    return (*(task for task in suite.TASKS if task in tasks), *sorted(tasks - set(suite.TASKS)))


def _in_bits(result: CellResult) -> bool:
    return any(stream.bytes for stream in result.streams)


def _table(length: int, units: int | None, focus: bool, results: list[CellResult], everywhere: list[CellResult],
           names: dict[Variant, str]) -> Table:
    """The table of `results`; the full cache is looked for `everywhere`, at all lengths."""
    tasks = _in_order({result.cell.task for result in results})
    full = {task: result for task in tasks if (result := _full(everywhere, task, length))}
    references = {task: Reference(length=result.cell.length, score=result.score, counted=_counts(result))
                  for task, result in full.items()}
    by_variant: dict[Variant, dict[str, CellResult]] = {}
    for task in tasks:
        for result in results:
            if result.cell.task == task:
                by_variant.setdefault(variant_of(result.cell, result.origin), {})[task] = result
    rows = [_row(names[variant], variant, by_task, full, references) for variant, by_task in by_variant.items()]
    rows.sort(key=lambda row: (*_place(row.variant.policy), -(row.mean.value if row.mean else 0.0), row.label))
    bits = {result.cell.task for result in results if _in_bits(result)}
    counted = sum(reference.counted for reference in references.values())
    tokens = [stream.tokens for result in results for stream in result.streams]
    return Table(length=length, units=units, focus=focus, tokens=(min(tokens), max(tokens)), references=references,
                 rows=_with_best(rows, {names[variant]: by_variant[variant] for variant in by_variant}, tasks, bits,
                                 counted, lambda by_task: _counted_pairs(by_task, full, references)))


def _counts(full: CellResult) -> bool:
    """Whether ratios to this score of the full cache are part of a mean."""
    if full.origin.file:
        return full.score > 0
    return not _in_bits(full) and full.score >= LEAST_FULL


def _full(results: list[CellResult], task: str, length: int) -> CellResult | None:
    """The full cache's result on that task: at that length, or else at the longest at which it was run."""
    return max((result for result in results if result.cell.policy == FULL and result.cell.task == task), default=None,
               key=lambda result: (result.cell.length == length, result.cell.length, result.questions,
                                   -result.cell.chunk_size))


def _place(policy: str) -> tuple[int, int]:
    """Where the rows of a policy stand in a table, for sorting."""
    if policy in FIRST:
        return 0, FIRST.index(policy)
    return (2, LAST.index(policy)) if policy in LAST else (1, 0)


def _row(label: str, variant: Variant, results: dict[str, CellResult], full: dict[str, CellResult],
         references: dict[str, Reference]) -> Row:
    """The row of a variant. results: its results by task; full, references: the full cache by task."""
    entries = {}
    for task, result in results.items():
        judged = task in full and (references[task].counted or (  # another text has other bits
            _in_bits(result) and references[task].length == result.cell.length))
        entries[task] = Entry(score=Estimate(value=result.score, low=result.low, high=result.high),
                              questions=result.questions, streams=len(result.streams),
                              ratio=_ratio([_pair(result, full[task])]) if judged else None)
    counted = _counted_pairs(results, full, references)
    streams = [stream for result in results.values() for stream in result.streams]
    tokens = max(1, sum(stream.tokens for stream in streams))
    return Row(label=label, variant=variant, heads=next(iter(results.values())).cell.heads, cells=entries,
               mean=_ratio(counted) if counted else None,
               tok_per_s=tokens / max(1e-9, sum(stream.seconds for stream in streams)),
               peak_bytes=max(result.peak_bytes for result in results.values()),
               units_held=sum(stream.unit_tokens for stream in streams) / tokens)


def _pair(result: CellResult, full: CellResult) -> metrics.Pair:
    """The scores of a variant over those of the full cache; of bits the other way round."""
    groups = [[*map(values, either.streams)] for either in (result, full)]
    same = result.cell.length == full.cell.length and [s.seed for s in result.streams] == [s.seed for s in full.streams]
    above, below = reversed(groups) if _in_bits(result) else groups
    return metrics.Pair(above, below, same)


def _counted_pairs(results: dict[str, CellResult], full: dict[str, CellResult],
                   references: dict[str, Reference]) -> list[metrics.Pair]:
    """The pairs whose ratios are part of the mean of a row."""
    return [_pair(result, full[task]) for task, result in results.items() if task in full and references[task].counted]


def _ratio(pairs: list[metrics.Pair]) -> Estimate | None:
    """The mean of the ratios; None where the full cache has no right answer."""
    means = [[sum(map(sum, groups)) / max(1, sum(map(len, groups))) for groups in pair[:2]] for pair in pairs]
    if not all(below for _, below in means):
        return None
    low, high = metrics.ratio_interval(pairs)
    value = sum(above / below for above, below in means) / len(means)
    return Estimate(value=value, low=min(low, value), high=max(high, value), tasks=len(pairs))


def _with_best(rows: list[Row], results: dict[str, dict[str, CellResult]], tasks: tuple[str, ...], bits: set[str],
               counted: int, pairs: Callable[[dict[str, CellResult]], list[metrics.Pair]]) -> tuple[Row, ...]:
    """The rows, each with the columns in which it is best. Rivals are the rows that have a budget and do not know what
    will be asked; in the mean, those of them that have all `counted` tasks. Beside the best row, all rows are best that
    differ from it by no more than chance: by the interval of the differences on the same streams, or, where streams are
    fewer than `LEAST_STREAMS` or not the same, where their intervals meet.

    Args:
        results: by label and task. pairs: gives those that the mean of such results is made of.
    """
    rivals = [row for row in rows if not row.variant.everything and row.variant.policy not in ORACLES]
    best: dict[str, list[str]] = {row.label: [] for row in rows}
    for column in (*tasks, "mean"):
        standings = {row.label: _standing(row, results[row.label], column, -1 if column in bits else 1, pairs)
                     for row in rivals if (row.mean is not None and row.mean.tasks == counted if column == "mean" else
                                           column in row.cells)}
        if len(standings) < 2:
            continue
        first = max(standings.values(), key=lambda standing: standing.rank)
        for label, standing in standings.items():
            count = _same_streams(standing.results, first.results)
            if standing.estimate.value and (
                    metrics.reaches(standing.draws, first.draws, count) if count >= LEAST_STREAMS else
                    _meet(standing.estimate, first.estimate)):
                best[label].append(column)
    return tuple(msgspec.structs.replace(row, best=tuple(best[row.label])) for row in rows)


class _Standing(NamedTuple):
    """A row in one column. rank, draws: of the value, or of bits its negative, so that more is better."""

    estimate: Estimate
    rank: float
    draws: np.ndarray
    results: dict[str, CellResult]


def _standing(row: Row, results: dict[str, CellResult], column: str, sign: int,
              pairs: Callable[[dict[str, CellResult]], list[metrics.Pair]]) -> _Standing:
    if column == "mean":
        assert row.mean is not None
        return _Standing(row.mean, row.mean.value, metrics.ratio_draws(pairs(results)), results)
    estimate, streams = row.cells[column].score, results[column].streams
    return _Standing(estimate, sign * estimate.value, sign * metrics.mean_draws([*map(values, streams)]),
                     {column: results[column]})


def _same_streams(one: dict[str, CellResult], other: dict[str, CellResult]) -> int:
    """How many streams both were run on, the fewest of a task; 0 if they are not the same streams."""
    seeds = [[[stream.seed for stream in results[task].streams] for results in (one, other)] for task in one]
    return min(len(ours) for ours, _ in seeds) if all(ours == theirs for ours, theirs in seeds) else 0


def _meet(one: Estimate, other: Estimate) -> bool:
    return one.low <= other.high and other.low <= one.high
