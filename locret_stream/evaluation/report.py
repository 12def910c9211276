"""What the results of one origin say together: a table for each length and budget, against the full cache; those of
files in tables of their own, as their documents are of any length.

The *ratio* of a cell is its score over that of the full cache on the same task; of "text" (bits per byte, lower is
better) the full cache's over its own. The *mean* of a row is that of its ratios over the tasks with answers whose full
cache scores at least 0.9: where the model itself fails, a memory cannot be judged. Files count whatever it scores above
0, as no model comes near 1 by F1 or ROUGE, and what is left of the model's own score is what is asked. The interval of
a mean is a bootstrap over streams within each cell. Runs nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import metrics, suite
from locret_stream.evaluation.cells import CellResult, Origin
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
LEAST_STREAMS = 5  # of fewer nothing tells a difference from chance
VERSION = 2


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A value and its 95 % interval. tasks: of how many it is the mean."""

    value: float
    low: float
    high: float
    tasks: int = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: its score, and that against the full cache: None where it is not to be had, or does not count."""

    score: Estimate
    questions: int
    streams: int
    ratio: Estimate | None = None


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The full cache on one task: at the table's length, or the longest there is. counted: it enters the mean."""

    length: int
    score: float
    counted: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A variant. best: the columns, tasks or "mean", in which nothing is better beyond chance (see `_with_best`).

    tok_per_s: of feeding. peak_bytes: of one context. units_held: mean over the layers, for every token fed
    (KV footprint / tokens).
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
    """All variants on streams of one length (0: on the documents of files) with one budget; units None: without any.
    focus: the question was told beforehand, and is the only one, so that it stands apart from those without.
    tokens: the fewest and the most that were read of a stream."""

    length: int
    units: int | None
    focus: bool
    tokens: tuple[int, int]
    references: dict[str, Reference]
    rows: tuple[Row, ...]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a task: its digest, how many documents were read at most, and the fewest and most tokens of one."""

    path: str
    digest: str
    documents: int
    tokens: tuple[int, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """tasks: in their order; bits: those of them that are scored by bits per byte; files: those that are of one, called
    by more of their paths where several are of one task. questions: of each task the fewest and the most in a cell.
    settings: what most rows have in common. superseded: other results of the same cells, of fewer or other streams,
    left out."""

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
    """The report on results of one origin, heads aside; the order in which they come does not matter.

    Raises:
        ConfigError: no results, or of several origins (`cells.by_origin` parts them).
    """
    results = list(results)
    origins = [origin for origin, _ in files.by_origin(results)]
    if len(origins) != 1:
        raise ConfigError(f"a report on results of {len(origins)} origins (models, tokenizers, texts, versions of the "
                          "tasks); expected those of one")
    kept = _by_column(_most_streams(results))
    tasks = _in_order({one.cell.task for one in kept})
    names, tables = labels((one.cell, one.origin) for one in kept), []
    for length, focus in sorted({(one.cell.length, one.cell.focus) for one in kept},
                                key=lambda place: (place[0] == 0, *place)):
        alike = [one for one in kept if one.cell.focus == focus]  # the same questions
        here = [one for one in alike if one.cell.length == length]
        budgets = sorted({one.cell.units for one in here if one.cell.units is not None}) or [None]
        tables += [_table(length, units, focus, [one for one in here if one.cell.units in (units, None)], alike, names)
                   for units in budgets]
    return Report(origin=origins[0], tasks=tasks, settings=settings_of((one.cell, one.origin) for one in kept),
                  superseded=len(results) - len(kept),
                  tables=tuple(tables),
                  files={task: _source([one for one in kept if one.cell.task == task]) for task in tasks
                         if any(one.origin.file for one in kept if one.cell.task == task)},
                  bits=tuple(task for task in tasks if any(_in_bits(one) for one in kept if one.cell.task == task)),
                  questions={task: (min(counts), max(counts)) for task in tasks
                             if (counts := [one.questions for one in kept if one.cell.task == task])})


def _most_streams(results: Sequence[CellResult]) -> list[CellResult]:
    """Of every cell the result with the most questions, in an order that depends on the cells alone."""
    found: dict[tuple, CellResult] = {}
    for one in sorted(results, key=lambda one: (-one.questions, one.cell.first_seed,
                                                files.name_of(one.cell, one.origin))):
        found.setdefault((variant_of(one.cell, one.origin), one.cell.task, one.cell.length, one.cell.units,
                          one.origin.file), one)
    return list(found.values())


def _by_column(results: list[CellResult]) -> list[CellResult]:
    """The same; where several files are of one task (RULER's at two lengths, one that was changed since), the task is
    called by what tells them apart as well."""
    paths: dict[str, dict[str, str]] = {}
    for one in results:
        if one.origin.file:
            paths.setdefault(one.cell.task, {}).setdefault(one.origin.file, one.cell.file)
    ends = {task: path_ends(found, "content") for task, found in paths.items() if len(found) > 1}
    return [msgspec.structs.replace(one, cell=msgspec.structs.replace(
                one.cell, task=f"{one.cell.task}, {ends[one.cell.task][one.origin.file]}"))
            if one.origin.file and one.cell.task in ends else one for one in results]


def _source(results: list[CellResult]) -> Source:
    tokens = [stream.tokens for one in results for stream in one.streams]
    return Source(path=results[0].cell.file, digest=results[0].origin.file,
                  documents=max(len(one.streams) for one in results), tokens=(min(tokens), max(tokens)))


def _in_order(tasks: set[str]) -> tuple[str, ...]:
    known = list(suite.TASKS)
    return tuple(sorted(tasks, key=lambda task: (known.index(task) if task in known else len(known), task)))


def _in_bits(result: CellResult) -> bool:
    return any(stream.bytes for stream in result.streams)


def _table(length: int, units: int | None, focus: bool, here: list[CellResult], everywhere: list[CellResult],
           names: dict[Variant, str]) -> Table:
    tasks = _in_order({one.cell.task for one in here})
    full = {task: found for task in tasks if (found := _full(everywhere, task, length))}
    references = {task: Reference(length=one.cell.length, score=one.score, counted=_counted(one))
                  for task, one in full.items()}
    groups: dict[Variant, dict[str, CellResult]] = {}
    for one in here:
        groups.setdefault(variant_of(one.cell, one.origin), {})[one.cell.task] = one
    groups = {variant: {task: own[task] for task in tasks if task in own} for variant, own in groups.items()}
    rows = [_row(names[variant], variant, own, full, references) for variant, own in groups.items()]
    rows.sort(key=lambda row: (*_place(row.variant.policy), -(row.mean.value if row.mean else 0.0), row.label))
    bits = {one.cell.task for one in here if _in_bits(one)}
    counted = sum(reference.counted for reference in references.values())
    read = [stream.tokens for one in here for stream in one.streams]
    return Table(length=length, units=units, focus=focus, tokens=(min(read), max(read)), references=references,
                 rows=_with_best(rows, {names[variant]: own for variant, own in groups.items()}, tasks, bits,
                                 counted, lambda own: _counted_pairs(own, full, references)))


def _counted(full: CellResult) -> bool:
    """Whether what is left of that score says something of a memory."""
    if full.origin.file:
        return full.score > 0
    return not _in_bits(full) and full.score >= LEAST_FULL


def _full(results: list[CellResult], task: str, length: int) -> CellResult | None:
    """The full cache's result on that task: at that length, or else at the longest there is."""
    found = [one for one in results if one.cell.policy == FULL and one.cell.task == task]
    return max(found, default=None, key=lambda one: (one.cell.length == length, one.cell.length, one.questions,
                                                     -one.cell.chunk_size))


def _place(policy: str) -> tuple[int, int]:
    if policy in FIRST:
        return 0, FIRST.index(policy)
    return (2, LAST.index(policy)) if policy in LAST else (1, 0)


def _row(label: str, variant: Variant, own: dict[str, CellResult], full: dict[str, CellResult],
         references: dict[str, Reference]) -> Row:
    entries = {}
    for task, one in own.items():
        judged = task in full and (references[task].counted or (  # another text has other bits
            _in_bits(one) and references[task].length == one.cell.length))
        entries[task] = Entry(score=Estimate(value=one.score, low=one.low, high=one.high), questions=one.questions,
                              streams=len(one.streams), ratio=_ratio([_pair(one, full[task])]) if judged else None)
    counted = _counted_pairs(own, full, references)
    streams = [stream for one in own.values() for stream in one.streams]
    tokens = max(1, sum(stream.tokens for stream in streams))
    return Row(label=label, variant=variant, heads=next(one.cell.heads for one in own.values()), cells=entries,
               mean=_ratio(counted) if counted else None,
               tok_per_s=tokens / max(1e-9, sum(stream.seconds for stream in streams)),
               peak_bytes=max(one.peak_bytes for one in own.values()),
               units_held=sum(stream.unit_tokens for stream in streams) / tokens)


Pair = tuple[metrics.Groups, metrics.Groups, bool]


def _pair(own: CellResult, full: CellResult) -> Pair:
    """What is divided by what, and whether both saw the same streams."""
    groups = [[files.values(stream) for stream in one.streams] for one in (own, full)]
    same = own.cell.length == full.cell.length and [s.seed for s in own.streams] == [s.seed for s in full.streams]
    above, below = reversed(groups) if _in_bits(own) else groups
    return above, below, same


def _counted_pairs(own: dict[str, CellResult], full: dict[str, CellResult],
                   references: dict[str, Reference]) -> list[Pair]:
    """Those that the mean of a row is made of."""
    return [_pair(one, full[task]) for task, one in own.items() if task in full and references[task].counted]


def _ratio(pairs: list[Pair]) -> Estimate | None:
    """None where the full cache has nothing right."""
    means = [[sum(map(sum, groups)) / max(1, sum(map(len, groups))) for groups in pair[:2]] for pair in pairs]
    if not all(below for _, below in means):
        return None
    low, high = metrics.ratio_interval(pairs)
    value = sum(above / below for above, below in means) / len(means)
    return Estimate(value=value, low=min(low, value), high=max(high, value), tasks=len(pairs))


def _with_best(rows: list[Row], results: dict[str, dict[str, CellResult]], tasks: tuple[str, ...], bits: set[str],
               counted: int, pairs: Callable[[dict[str, CellResult]], list[Pair]]) -> tuple[Row, ...]:
    """Rows that know where they are best, among those that have a budget and do not know what will be asked; in the
    mean, among those that have all `counted` tasks. Beside the best itself these are all from which it differs by no
    more than chance: by the interval of the differences on the same streams, or, where streams are few or others, as
    their intervals meet."""
    rivals = [row for row in rows if not row.variant.everything and row.variant.policy not in ORACLES]
    best: dict[str, list[str]] = {row.label: [] for row in rows}
    for column in (*tasks, "mean"):
        found = ({row.label: row.mean for row in rivals if row.mean and row.mean.tasks == counted} if column == "mean"
                 else {row.label: row.cells[column].score for row in rivals if column in row.cells})
        if len(found) < 2:
            continue
        sign = -1 if column in bits else 1
        first = max(found, key=lambda label, found=found, sign=sign: sign * found[label].value)
        used = {label: results[label] if column == "mean" else {column: results[label][column]} for label in found}
        draws = {label: metrics.ratio_draws(pairs(own)) if column == "mean" else
                 sign * metrics.mean_draws([files.values(stream) for stream in own[column].streams])
                 for label, own in used.items()}
        for label, one in found.items():
            count = _same_streams(used[label], used[first])
            if one.value and (metrics.reaches(draws[label], draws[first], count) if count >= LEAST_STREAMS else
                              _meet(one, found[first])):
                best[label].append(column)
    return tuple(msgspec.structs.replace(row, best=tuple(best[row.label])) for row in rows)


def _same_streams(one: dict[str, CellResult], other: dict[str, CellResult]) -> int:
    """How many streams both saw, the fewest of a task; 0: not the same ones."""
    seeds = [[[stream.seed for stream in found[task].streams] for found in (one, other)] for task in one]
    return min(len(ours) for ours, _ in seeds) if all(ours == theirs for ours, theirs in seeds) else 0


def _meet(one: Estimate, other: Estimate) -> bool:
    return one.low <= other.high and other.low <= one.high
