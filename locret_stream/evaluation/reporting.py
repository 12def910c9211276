"""Writes the reports on all results in a folder, one for each origin: report.md, report.json and, drawn, PNGs. In
Markdown a report is words and tables. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from locret_stream.budgets import in_bytes
from locret_stream.errors import InputError
from locret_stream.evaluation import cells, maps, plots, suite
from locret_stream.evaluation.cells import Cell, counted
from locret_stream.evaluation.report import LEAST_FULL, Estimate, Report, Row, Table, report_of
from locret_stream.evaluation.variants import FULL, ORACLES, Settings
from locret_stream.files import replace

BELOW, MISSING = "†", "‡"
CAPTIONS = {
    "by_budget": "quality against the budget", "by_length": "quality against the length of the stream",
    "retention": "what stays of a stream, dark where it stayed for most of what came after it; what is dark without a "
                 "mark above it are mostly facts that nobody asks about",
    "consistency": "of the highest scores after a prefix, how many are among the highest at the end; where scores are "
                   "given once, at arrival, that is always 1",
}


class Written(NamedTuple):
    """The reports, and the files that were written: report.md, report.json, and the pictures."""

    reports: list[Report]
    files: list[Path]
    pictures: list[Path]


def write_reports(folder: Path, draw: bool = False) -> Written:
    """Report on all results in the folder; with `draw`, draw curves, and the maps that were made before.

    Raises:
        InputError: no results, or damaged ones. ConfigError: matplotlib is not installed. OSError: as `replace`.
    """
    reports = [report_of(results) for _, results in cells.by_origin(cells.read_all(folder))]
    if not reports:
        raise InputError(f"{folder} holds no results of an evaluation; expected a folder that `locret-stream eval` "
                         "wrote results into")
    files = [folder / "report.md", folder / "report.json"]
    data = msgspec.json.format(msgspec.json.encode({"reports": reports}), indent=1)
    replace(files[1], lambda part: part.write_bytes(data))
    texts: list[str] = []
    pictures: list[Path] = []
    for report in reports:
        drawn, mapped = list[Path](), None
        if draw:
            path = maps.path_of(report.origin, folder)
            made = maps.read(path) if path.is_file() else None
            drawn = plots.draw(folder, report, made, f"{cells.tag_of(report.origin)}_" if len(reports) > 1 else "")
            mapped = made.cells[0] if made and made.cells else None
        texts.append(markdown(report, [picture.name for picture in drawn], mapped))
        pictures += drawn
    replace(files[0], lambda part: part.write_text("\n".join(texts), encoding="utf-8"))
    return Written(reports, [*files, *pictures], pictures)


def markdown(report: Report, pictures: Sequence[str] = (), mapped: Cell | None = None) -> str:
    """The whole report, ending in a newline.

    Args:
        pictures: the names of PNGs beside it. mapped: a cell that the maps among them are of.
    """
    return "\n".join(["# What the memory remembers", "", *_header(report),
                      *(_picture(name, mapped) for name in pictures),
                      *(line for table in report.tables for line in _section(report, table))]) + "\n"


def _picture(name: str, mapped: Cell | None) -> str:
    kind = next(kind for kind in CAPTIONS if kind in name)
    stream = ""
    if mapped is not None and not kind.startswith("by_"):
        units = f"{mapped.units} units" if kind == "retention" else "all units held"
        stream = f" ({mapped.task}, {mapped.length:,} tokens, {units})"
    return f"- Picture [{name}]({name}): {CAPTIONS[kind]}{stream}"


def _header(report: Report) -> list[str]:
    origin, policies = report.origin, {row.variant.policy for table in report.tables for row in table.rows}
    asked = ", ".join(f"{task} {_span(*report.questions[task])}{' streams' if task in report.bits else ''}"
                      for task in report.tasks)
    titles = "; ".join(f"`{task}`: {suite.TASKS[task].title}" for task in report.tasks if task in suite.TASKS)
    lines = [
        f"- Model: weights `{origin.weights}`, tokenizer `{origin.tokenizer}`",
        f"- Text between the facts: {origin.text}; tasks version {origin.tasks}" if origin.text
        else f"- Tasks version {origin.tasks}",
        f"- Tasks: {titles}" if titles else "",
        *(f"- File `{task}`: {file.path} (content `{file.digest[:8]}`), {counted(file.documents, 'document')} of "
          f"{_span(*file.tokens)} tokens" for task, file in report.files.items()),
        f"- {_settings(report.settings)}" if report.settings else "",
        f"- Questions in a cell: {asked}",
        f"- A cell is {_measured(report)}, with its 95 % interval (bootstrap over streams, over the questions of the "
        "only one where there is no other; wider the fewer they are, and for right and wrong answers at least Wilson's "
        "of so many independent questions).",
        "- `text` is bits per byte: lower is better. Its ratio, full / own, stands in a column of its own where the "
        "full cache read the same streams."
        if report.bits else "",
        "- `full` evicts nothing. It exists only at lengths that the model's window holds.",
        "- mean: of score / score of `full`, over the tasks with answers. Tasks on which `full` scores "
        f"{_below(report)} ({BELOW}) or was not run ({MISSING}) are shown and left out of it.",
        "- `oracle` and `oracle_per_head` know which lines will be asked about, and are no rivals. `oracle` keeps "
        "these lines whole, the same in every head and layer, and so runs out of room where the budget is small; "
        "`oracle_per_head` goes by the attention that the answers pay in each head. Neither is an upper bound: what is "
        "held beside the lines, or in place of parts of them, can help a policy or disturb an oracle."
        if policies & set(ORACLES) else "",
        "- **Bold**: the best of a column, and all that are not worse than it beyond the 95 % interval of their "
        "differences on the same streams (of fewer than five: all whose intervals meet).",
        "- units held: mean over the layers of units per KV head, for every token fed (KV footprint / tokens). held: "
        "bytes of one context. tok/s: of feeding, beside whatever else the machine did: no comparison.",
        f"- {report.superseded} results of cells of which there is another one, with more questions, are left out."
        if report.superseded else "",
    ]
    return [line for line in lines if line]


def _settings(settings: Settings) -> str:
    shares, sinks, stabilizers, chunks = settings.words()
    return f"Where a row does not say otherwise: {chunks} tokens, {sinks}, {stabilizers}, allocation {shares}"


def _kinds(report: Report, of_tasks: str, of_files: str) -> str:
    """The words for a report on tasks, on files, or on both."""
    if not report.files:
        return of_tasks
    return f"{of_tasks}, of a file {of_files}" if set(report.tasks) - set(report.files) else of_files


def _measured(report: Report) -> str:
    return _kinds(report, "the share of questions that were answered exactly right",
                  "the mean over its questions of what the benchmark's own metric gives, 0 to 1 (and behind it, what "
                  "share of the score of `full` that is)")


def _below(report: Report) -> str:
    return _kinds(report, f"below {LEAST_FULL}", "0")


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _section(report: Report, table: Table) -> list[str]:
    tasks = [task for task in report.tasks if any(task in row.cells for row in table.rows)]
    bits = [task for task in tasks if task in report.bits
            and any(task in row.cells and row.cells[task].ratio for row in table.rows)]
    columns = ["variant", *(f"{task}{_mark(task, report, table)}" for task in tasks), "mean",
             *(f"{task}: full / own" for task in bits), "tok/s", "held", "units held"]
    title = "all units" if table.units is None else f"{table.units:,} units"
    material = f"Streams of {table.length:,} tokens" if table.length else "Files"
    focus = ", the question told beforehand" if table.focus else ""
    lines = ["", f"## {material}, {title} per KV head{focus}", "", _line(columns),
             _line(["---", *["---:"] * (len(columns) - 1)])]
    lines += [_line([row.label, *(_cell(row, task, report) for task in tasks), _mean(row, table),
                     *(_estimate(row.cells[task].ratio if task in row.cells else None) for task in bits),
                     f"{row.tok_per_s:,.0f}",
                     in_bytes(row.peak_bytes), f"{row.units_held:,.0f}"]) for row in table.rows]
    return [*lines, *_notes(table)]


def _notes(table: Table) -> list[str]:
    elsewhere = [f"{task} {full.score:.2f} at {full.length:,}" for task, full in table.references.items()
                 if full.length != table.length]
    notes = ["", f"Read of a stream: {_span(*table.tokens)} tokens."] if table.length else []
    if elsewhere:
        some = "" if len(elsewhere) == len(table.references) else " on all tasks"
        notes += ["", f"`full` was not run at {table.length:,} tokens{some}; there the ratios are against its scores "
                      f"on other streams, the longest there are: {', '.join(elsewhere)}."]
    return notes


def _mark(task: str, report: Report, table: Table) -> str:
    reference = table.references.get(task)
    if reference is None:
        return f" {MISSING}"
    return "" if reference.counted or task in report.bits else f" {BELOW}"


def _line(words: list[str]) -> str:
    return "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


def _estimate(estimate: Estimate | None, best: bool = False) -> str:
    if estimate is None:
        return "–"
    words = f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
    return f"**{words}**" if best else words


def _cell(row: Row, task: str, report: Report) -> str:
    """The score of a row on a task; on a file also what share of the full cache's score it is."""
    return _estimate(row.cells[task].score, task in row.best) + _share(row, task, report) if task in row.cells else "–"


def _mean(row: Row, table: Table) -> str:
    """The mean of a row, with the number of its tasks where that is not the number of all counted tasks."""
    count = sum(reference.counted for reference in table.references.values())
    some = "" if row.mean is None or row.mean.tasks == count else f" ({row.mean.tasks} of {count} tasks)"
    return _estimate(row.mean, "mean" in row.best) + some


def _share(row: Row, task: str, report: Report) -> str:
    ratio = row.cells[task].ratio
    return f" = {ratio.value:.0%} of {FULL}" if task in report.files and ratio and row.variant.policy != FULL else ""
