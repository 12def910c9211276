"""`locret-stream eval`: tasks run against policies and budgets, and a report on what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.text import Text as Line

from locret_stream.cli.common import (
    Device,
    Dtype,
    Held,
    Json,
    Model,
    check_readable,
    err,
    interruptible,
    load,
    out,
    print_json,
)
from locret_stream.errors import ConfigError, InputError

if TYPE_CHECKING:
    from locret_stream.evaluation.cells import Cell, CellResult
    from locret_stream.evaluation.documents import FileTask
    from locret_stream.evaluation.plan import Axes
    from locret_stream.evaluation.runner import Bench

HELP = """Measure how much a bounded memory remembers.

Every task and file is run with every policy, budget, stream length, allocation and set of heads given. Results are \
kept in --out, one file a cell, and are not run again; a report on all that is there is written beside them: \
report.md, report.json and, with --plots, PNGs. "full" is the cache that evicts nothing, at lengths that the model's \
window holds; "oracle" knows what will be asked, which a file does not say.

Examples:

\b
  locret-stream eval --out results
  # all tasks in marker form, two budgets, curves
  locret-stream eval --model ./recall --heads ./recall/heads --task markers --length 1024 --length 16384 \
--budget 128 --budget 256 --chunk-size 128 --out results --plots
  # several policies, and how the budget is divided among the layers
  locret-stream eval --policy locret --policy h2o --policy full --allocation uniform --allocation pyramid --out results
  # heads of another policy, and one knob at two values
  locret-stream eval --model ./llama --policy kvzap --heads kvzap=./zap --policy h2o --knob h2o.recent=0.1 \
--knob h2o.recent=0.5 --out results
  # files of LongBench, RULER, InfiniteBench and L-Eval, each scored by its own metric
  locret-stream eval --model ./llama --heads ./heads --file longbench/qasper.jsonl \
--file ruler/niah_single_1/validation.jsonl --policy locret --policy streaming_llm --policy full --budget 6000 \
--out results
  # the report again, of what is there
  locret-stream eval --out results --report-only --plots"""

POLICIES = ["locret", "streaming_llm", "random", "oracle", "full"]
REPORTING = ("to", "plots", "report_only", "as_json")  # what a report alone listens to
MARKERS = "markers"
LENGTHS = [1024, 16_384]
MAP_TOKENS = 65_536  # a map of more would be a smear
COMPARED = ("h2o", "snapkv", "sirllm")  # whose scores the paper's Figure 1 looks at


def evaluate(
    context: typer.Context,
    to: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for results and the report.")],
    model: Model = "bundled",
    heads: Annotated[list[str] | None, typer.Option(metavar="[POLICY=]FOLDER", help=(
        "Retaining heads, of locret where no policy is named; the bundled model has its own. May be given more than "
        "once."))] = None,
    policy: Annotated[list[str] | None, typer.Option(show_default=" ".join(POLICIES) + " (full not of the bundled "
                                                     "model, which never learnt to hold everything)", help=(
        "A policy, oracle or oracle_per_head; may be given more than once."))] = None,
    task: Annotated[list[str] | None, typer.Option(show_default="sentences, unless there are files", help=(
        'A task, or "markers" for all in marker form; may be given more than once.'))] = None,
    file: Annotated[list[str] | None, typer.Option(metavar="[BENCHMARK[/TASK]=]PATH", help=(
        "A file of LongBench, RULER, InfiniteBench or L-Eval, as published; its fields, its name and its folder's tell "
        "which, or else BENCHMARK (longbench, ruler, infinitebench, leval) and TASK. May be given more than "
        "once."))] = None,
    raw: Annotated[bool, typer.Option("--raw", help=(
        "Read and ask files without the tokenizer's chat template, as base models are."))] = False,
    budget: Annotated[list[int] | None, typer.Option(min=1, show_default="768 for the bundled model, else 6000", help=(
        "Units kept per KV head, mean over the layers; may be given more than once."))] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, show_default=" ".join(map(str, LENGTHS)), help=(
        "Tokens of a stream (not of a file: its documents are as long as they are); may be given more than "
        "once."))] = None,
    questions: Annotated[int, typer.Option(min=1, help=(
        "At least so many in a cell; all of a file that has fewer."))] = 64,
    chunk_size: Annotated[int | None, typer.Option(min=1, show_default="256 for the bundled model, else 1024", help=(
        "Tokens read between two evictions."))] = None,
    sinks: Annotated[int, typer.Option(min=0, help="First units that always stay.")] = 4,
    stabilizers: Annotated[int, typer.Option(min=0, help="Last units that always stay.")] = 32,
    allocation: Annotated[list[str] | None, typer.Option(show_default="auto", help=(
        "auto (the shares that come with the policy's heads, of a policy without heads those of locret, else the same "
        "for each layer), adaptive (those, or an error), uniform, pyramid, or shares such as 1,4,1,1; may be given "
        "more than once."))] = None,
    knob: Annotated[list[str] | None, typer.Option(metavar="POLICY.NAME=VALUE", help=(
        "A policy's own setting; given again, another value of it."))] = None,
    focus: Annotated[bool, typer.Option("--focus", help=(
        "Tell the first question of each stream beforehand, and ask only that one (Locret-Q)."))] = False,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, show_default="Python's standard library",
                                              help="What the facts lie in.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    plots: Annotated[bool, typer.Option("--plots", help="Draw curves and maps as well (needs matplotlib).")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing, report on what is in --out.")]
    = False,
    as_json: Json = False,
) -> None:
    if report_only:
        expect_no_plan(context)
    if text is not None:
        check_readable(text)
    with interruptible(Held(f"what is done is kept in {to}; the same command goes on from there")):
        from locret_stream.evaluation import plots as drawing
        from locret_stream.evaluation import suite
        from locret_stream.runtime.core import BUNDLED_BUDGET, BUNDLED_CHUNK, DEFAULT_BUDGET, DEFAULT_CHUNK

        if plots:
            drawing.expect_matplotlib()
        found: dict[str, Any] = {"out": str(to), "ran": 0, "read": 0, "skipped": {}}
        if not report_only:
            bundled = model == "bundled"
            tasks = task or ([] if file else ["sentences"])
            units, chunk = (BUNDLED_BUDGET, BUNDLED_CHUNK) if bundled else (DEFAULT_BUDGET, DEFAULT_CHUNK)
            usual = [name for name in POLICIES if not (bundled and name == "full")]
            axes = axes_of(tasks, policy or usual, budget or [units], length or LENGTHS, allocation or ["auto"],
                           heads or (), knob or (), bundled, {
                               "questions": questions, "chunk_size": chunk_size or chunk, "sinks": sinks,
                               "stabilizers": stabilizers, "focus": focus})
            source = suite.STDLIB if text is None else suite.text_of(text)
            run_all(axes, documents_of(file or (), raw), model, {"device": device, "dtype": dtype}, source, to, plots,
                    found)
        found["files"] = [str(path) for path in report_on(to, plots, found)]
    if as_json:
        print_json(found)
        return
    out.print((to / "report.md").read_text(encoding="utf-8"), soft_wrap=True, end="")
    err.print(f"written: {', '.join(found['files'])}", soft_wrap=True)


def expect_no_plan(context: typer.Context) -> None:
    """Raises ConfigError: the command line says what to run, beside --report-only."""
    given = [name for name in context.params if name not in REPORTING
             and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise ConfigError(f"found --report-only and --{given[0].replace('_', '-')}; a report is on all that is in "
                          "--out: expected none of what says what to run")


# -- what was asked for -------------------------------------------------------------------------------------------


def axes_of(tasks: Iterable[str], policies: Iterable[str], budgets: Iterable[int], lengths: Iterable[int],
            allocations: Iterable[str], heads: Iterable[str], knobs: Iterable[str], bundled: bool,
            rest: dict[str, int]) -> Axes:
    """What the options say, each value once, in their order. Raises ConfigError: a value that cannot be."""
    from locret_stream.evaluation import plan, suite
    from locret_stream.runtime import BUNDLED

    names = [name for one in tasks for name in (suite.MARKER_TASKS if one == MARKERS else [one])]
    for name in names:
        if name not in suite.TASKS:
            suite.task_named(name)
    folders = folders_of(heads)
    if bundled:
        folders.setdefault("locret", [str(BUNDLED)])
    policies = list(dict.fromkeys(policies))
    for name in policies:
        plan.with_heads(name)  # raises UnknownPolicy
    for name in sorted(set(folders) - {*policies, "locret"}):  # those of locret may be there for their shares alone
        raise ConfigError(f"--heads {name}={folders[name][0]}: policy {name!r} is not run; expected --policy {name} "
                          "with them")
    return plan.Axes(
        tasks=tuple(dict.fromkeys(names)), policies=tuple(policies), budgets=tuple(dict.fromkeys(budgets)),
        lengths=tuple(dict.fromkeys(lengths)), allocations=tuple(dict.fromkeys(map(allocation_of, allocations))),
        heads={name: tuple(dict.fromkeys(found)) for name, found in folders.items() if name in policies},
        shares_of=next(iter(folders.get("locret", ())), ""), knobs=knobs_of(knobs), **rest)


def documents_of(values: Iterable[str], raw: bool) -> list[FileTask]:
    """The files, each content once. Raises ConfigError: one that cannot be run, or --raw without any."""
    from locret_stream.evaluation.documents import file_task

    found = {(one.name, one.digest): one for one in (file_task(value, raw) for value in values)}
    if raw and not found:
        raise ConfigError("--raw is about files; expected a --file with it")
    return list(found.values())


def allocation_of(value: str) -> str | tuple[float, ...]:
    """A name, or numbers with commas between. Raises ConfigError."""
    from locret_stream.config import Budget

    try:
        shares: str | tuple[float, ...] = tuple(float(share) for share in value.split(","))
    except ValueError:
        shares = value
    return Budget(units=1, sinks=0, stabilizers=0, allocation=shares).allocation


def folders_of(values: Iterable[str]) -> dict[str, list[str]]:
    """Folders of heads by policy; "locret" where none is named. Raises ConfigError: no such folder or policy."""
    from locret_stream.evaluation import plan

    found: dict[str, list[str]] = {}
    for value in values:
        name, equals, folder = value.partition("=")
        if not equals or Path(value).is_dir():
            name, folder = "locret", value
        if not plan.with_heads(name):
            raise ConfigError(f"--heads {value}: policy {name!r} scores without heads; expected [POLICY=]FOLDER")
        if not Path(folder).is_dir():
            raise ConfigError(f"--heads {value}: no folder {folder!r}; expected [POLICY=]FOLDER, made by "
                              "`locret-stream train-heads`")
        found.setdefault(name, []).append(folder)
    return found


def knobs_of(values: Iterable[str]) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Values of each knob of each policy. Raises ConfigError: not of that form."""
    found: dict[str, dict[str, tuple[Any, ...]]] = {}
    for one in values:
        left, equals, value = one.partition("=")
        policy, dot, name = left.partition(".")
        if not (equals and dot and policy and name and value):
            raise ConfigError(f"--knob {one}: expected POLICY.NAME=VALUE, such as h2o.recent=0.1")
        own = found.setdefault(policy, {})
        own[name] = tuple(dict.fromkeys((*own.get(name, ()), value_of(value))))
    return found


def value_of(word: str) -> float | int | str:
    """A number where it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


# -- running ------------------------------------------------------------------------------------------------------


class Board:
    """Cells done of all, the current one, the time that is left: live on a terminal, else a line for every cell."""

    def __init__(self, cells: list[Cell], there: int, tokens: Callable[[Cell], int]):
        self._cells, self._done, self._read, self._there, self._tokens = cells, 0, 0, there, tokens
        self._work, self._seconds, self._since = 0, 0.0, time.monotonic()
        self._live = Live(console=err, refresh_per_second=4, get_renderable=self._render) if err.is_terminal else None

    def __enter__(self) -> Board:
        if self._live:
            self._live.start()
        else:
            err.print(f"{counted(len(self._cells), 'cell')}, of which {self._there} "
                      f"{'is' if self._there == 1 else 'are'} there already", soft_wrap=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, result: CellResult, there: bool) -> None:
        """One more is done."""
        now = time.monotonic()
        if there:
            self._read += 1
        else:
            self._seconds += now - self._since
            self._work += self._tokens(result.cell)
        self._since, self._done = now, self._done + 1
        if not (self._live or there):
            err.print(f"{self._done} of {len(self._cells)}: {name_of(result.cell)}: {result.score:.2f} "
                      f"[{result.low:.2f}, {result.high:.2f}], {result.tok_per_s:,.0f} tok/s{self._left()}",
                      soft_wrap=True)

    def _left(self) -> str:
        """By the tokens of the cells that are to come; none of those that are there before the first is run."""
        if not self._work:
            return ""
        speed = self._work / self._seconds
        rest = sum(map(self._tokens, self._cells[self._done:])) - (time.monotonic() - self._since) * speed
        return f", {duration(rest / speed)} left" if rest > 0 else ""

    def _render(self) -> Line:
        current = f": {name_of(self._cells[self._done])}" if self._done < len(self._cells) else ""
        return Line(f"{self._done} of {len(self._cells)} cells{current}{self._left()}")


def name_of(cell: Cell) -> str:
    """A cell in words."""
    of = (counted(cell.streams, "document") if cell.file
          else f"{counted(cell.streams, 'stream')} of {counted(cell.length, 'token')}")
    ways = [f"{name}={value}" for name, value in cell.knobs.items()] + [Path(cell.heads).name] * bool(cell.heads)
    if cell.units is None:
        return f"{cell.task}, {cell.policy}, all units, {of}"
    ways.append(cell.allocation if isinstance(cell.allocation, str) else ":".join(map(str, cell.allocation)))
    return f"{cell.task}, {cell.policy} ({', '.join(ways)}), {cell.units} units, {of}"


def counted(count: int, word: str) -> str:
    """1 cell, 2 cells."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """90 s, 12 min, 3.4 h."""
    return (f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000
            else f"{seconds / 3600:.1f} h")


def run_all(axes: Axes, documents: list[FileTask], model: str, options: dict[str, Any], text: Any, to: Path,
            plots: bool, found: dict[str, Any]) -> None:
    """Check everything, then run what is not there; counts go into `found`."""
    from locret_stream.evaluation import cells as files
    from locret_stream.evaluation import plan
    from locret_stream.evaluation.runner import Bench

    cells = plan.planned(axes, documents)
    bench = Bench(*load(model, **options), text, documents)
    cells, found["skipped"] = plan.checked(cells, bench)
    if not cells:
        raise ConfigError(f"no cell can run: {'; '.join(found['skipped'])}; expected another policy or "
                          "task, or, for full, shorter streams")
    found["documents"] = {one.path: told_of(one) for one in documents}
    for reason, count in found["skipped"].items():
        err.print(f"skipped: {reason} ({counted(count, 'cell')})", soft_wrap=True)
    there = sum((to / files.name_of(cell, bench.origin_of(cell))).is_file() for cell in cells)
    with Board(cells, there, lambda cell: bench.task(cell).tokens(cell.streams, cell.length)) as board:
        bench.run(cells, to, progress=board)
    found["ran"], found["read"] = len(cells) - there, there
    if plots:
        make_maps(bench, cells, to)


def told_of(one: FileTask) -> dict[str, Any]:
    """What of a file is asked and what is not, also said on stderr."""
    err.print(f"{one.name}: {one.path}: {counted(sum(one.asks), 'question')} on "
              f"{counted(len(one.asks), 'document')}"
              + (f"; {one.unscored:,} left out, which only people or a judging model score" if one.unscored else ""),
              soft_wrap=True)
    return {"task": one.name, "documents": len(one.asks), "questions": sum(one.asks), "unscored": one.unscored}


def make_maps(bench: Bench, cells: list[Cell], to: Path) -> None:
    """Maps for the variants of one task, at the longest stream that can be looked at and the smallest budget: of what
    stays, and, with the policies of the paper's figure, of how far scores foresee. Kept in a file of their own, to
    which another run adds its variants."""
    from locret_stream.errors import HeadsMismatch
    from locret_stream.evaluation import cells as files
    from locret_stream.evaluation import maps
    from locret_stream.evaluation.runner import ORACLES
    from locret_stream.evaluation.variants import LAST, labels, variant_of

    usable = [cell for cell in cells if cell.units is not None and cell.policy not in ORACLES and not cell.focus
              and cell.length <= MAP_TOKENS and bench.task(cell).kind == "answers"]
    if not usable:
        return
    origin = bench.origin("")
    path = to / f"maps-{files.tag_of(origin)}.json"
    old = maps.read(path) if path.is_file() else maps.Maps(origin=origin, cells=[])
    there = []
    for cell in old.cells:
        try:
            bench.origin_of(cell)
            there.append(cell)
        except (ConfigError, HeadsMismatch) as error:  # its heads are gone
            err.print(f"the map of {name_of(cell)} is left out: {error}", soft_wrap=True)
    usable = there + [cell for cell in usable if cell not in there]
    length = max(cell.length for cell in usable)
    units = min(cell.units for cell in usable if cell.length == length)
    chosen = [cell for cell in usable if (cell.length, cell.units) == (length, units)]
    chosen = [cell for cell in chosen if cell.task == chosen[0].task]
    if chosen == there and len(usable) > len(there):
        err.print(f"maps are of {chosen[0].task}, {counted(length, 'token')} and {units} units, as before; remove "
                  f"{path} to have others", soft_wrap=True)
    origins = [bench.origin_of(cell) for cell in chosen]
    if (old.cells, old.origins) == (chosen, origins):
        return
    err.print(f"making maps of {counted(len(chosen), 'variant')}", soft_wrap=True)
    names = labels(zip(chosen, origins, strict=True))
    named = {names[variant_of(cell, origin)]: cell for cell, origin in zip(chosen, origins, strict=True)}
    kept = [maps.retention(bench, cell, label) for label, cell in named.items()]
    named = {label: cell for label, cell in named.items() if cell.policy not in LAST}  # theirs never change
    for name in COMPARED:
        if all(cell.policy != name for cell in chosen):
            named[name] = msgspec.structs.replace(chosen[0], policy=name, knobs={}, heads="")
    try:
        foreseen = maps.consistency(bench, named)
    except ConfigError as error:  # too short a stream or window: no reason to lose the rest
        foreseen = None
        err.print(f"no map of how far scores foresee: {error}", soft_wrap=True)
    maps.write(maps.Maps(origin=origin, cells=chosen, origins=origins, retention=kept, consistency=foreseen), path)


# -- reporting ----------------------------------------------------------------------------------------------------


def report_on(to: Path, plots: bool, found: dict[str, Any]) -> list[Path]:
    """Write the reports on all results in the folder, one for each origin; what was written. The content goes into
    `found`.

    Raises:
        InputError: no results, or damaged ones.
    """
    from locret_stream.evaluation import cells as files
    from locret_stream.evaluation import maps
    from locret_stream.evaluation import plots as drawing
    from locret_stream.evaluation.report import report_of
    from locret_stream.evaluation.tables import markdown
    from locret_stream.files import replace

    reports = [report_of(results) for _, results in files.by_origin(files.read_all(to))]
    if not reports:
        raise InputError(f"{to} holds no results of an evaluation; expected a folder that `locret-stream eval` wrote "
                         "results into")
    written = [to / "report.md", to / "report.json"]
    found["reports"] = msgspec.to_builtins(reports)
    replace(written[1], lambda part: part.write_bytes(
        msgspec.json.format(msgspec.json.encode({"reports": reports}), indent=1)))
    told = []
    for report in reports:
        drawn, looked_at = list[Path](), None
        if plots:
            tag = files.tag_of(report.origin)
            path = to / f"maps-{tag}.json"
            looks = maps.read(path) if path.is_file() else None
            drawn = drawing.draw(to, report, looks, prefix=f"{tag}_" if len(reports) > 1 else "")
            looked_at = looks.cells[0] if looks and looks.cells else None
        told.append(markdown(report, [path.name for path in drawn], looked_at))
        written += drawn
    replace(written[0], lambda part: part.write_text("\n".join(told), encoding="utf-8"))
    if plots and len(written) == 2:
        err.print("nothing to draw: curves need two budgets or two lengths, and maps are made where policies with a "
                  "budget are run with --plots", soft_wrap=True)
    return written
