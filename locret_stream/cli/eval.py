"""`locret-stream eval`: tasks run against policies and budgets, and a report on the results.

The options say what `evaluation.request` asks for; what is run, kept and reported is the matter of `evaluation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.text import Text as Line

from locret_stream.cli.loading import load
from locret_stream.cli.options import (
    USUAL_BUDGET,
    Acknowledge,
    Chunk,
    Device,
    Dtype,
    Exact,
    ExactUnits,
    Json,
    Model,
    exact_of,
    on_command_line,
)
from locret_stream.cli.output import err, out, print_json
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.cli.text_input import check_readable
from locret_stream.errors import ConfigError
from locret_stream.evaluation.request import POLICIES, Request
from locret_stream.named_models import named_model

if TYPE_CHECKING:
    from locret_stream.evaluation.cells import Cell, CellResult
    from locret_stream.evaluation.documents import FileTask

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
  # a real chat model, asked as in a chat about facts that lie in a book
  locret-stream eval --model smollm2 --task chat --text emma.txt --length 1024 --budget 256 --out results
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
app = typer.Typer(rich_markup_mode="rich")

REPORTING = ("to", "plots", "report_only", "as_json")  # the options that a report alone has
USUAL = Request()


@app.command(help=HELP)
def evaluate(
    context: typer.Context,
    to: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for results and the report.")],
    model: Model = USUAL.model,
    heads: Annotated[list[str] | None, typer.Option(metavar="[POLICY=]FOLDER", help=(
        "Retaining heads, of locret where no policy is named; models with a name have their own. May be given more "
        "than once."))] = None,
    policy: Annotated[list[str] | None, typer.Option(show_default=" ".join(POLICIES) + " (full not of the bundled "
                                                     "model, which never learnt to hold everything)", help=(
        "A policy, oracle or oracle_per_head; may be given more than once."))] = None,
    task: Annotated[list[str] | None, typer.Option(show_default="sentences, unless there are files", help=(
        'A task, or "markers" or "chat" for all of that form; may be given more than once.'))] = None,
    file: Annotated[list[str] | None, typer.Option(metavar="[BENCHMARK[/TASK]=]PATH", help=(
        "A file of LongBench, RULER, InfiniteBench or L-Eval, as published; its fields, its name and its folder's tell "
        "which, or else BENCHMARK (longbench, ruler, infinitebench, leval) and TASK. May be given more than "
        "once."))] = None,
    raw: Annotated[bool, typer.Option("--raw", help=(
        "Read and ask files without the tokenizer's chat template, as base models are."))] = False,
    budget: Annotated[list[int] | None, typer.Option(min=1, show_default=USUAL_BUDGET, help=(
        "Units kept per KV head, mean over the layers; may be given more than once."))] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, show_default=" ".join(map(str, USUAL.lengths)), help=(
        "Tokens of a stream (not of a file: its documents are as long as they are); may be given more than "
        "once."))] = None,
    questions: Annotated[int, typer.Option(min=1, help=(
        "At least so many in a cell; all of a file that has fewer."))] = USUAL.questions,
    chunk_size: Chunk = None,
    sinks: Annotated[int, typer.Option(min=0, help="First units that always stay.")] = USUAL.sinks,
    stabilizers: Annotated[int, typer.Option(min=0, help="Last units that always stay.")] = USUAL.stabilizers,
    allocation: Annotated[list[str] | None, typer.Option(show_default=" ".join(USUAL.allocations), help=(
        "auto (the shares that come with the policy's heads, of a policy without heads those of locret, else the same "
        "for each layer), adaptive (those, or an error), uniform, pyramid, or shares such as 1,4,1,1; may be given "
        "more than once."))] = None,
    by_head: Annotated[bool, typer.Option("--by-head", help=(
        "Let the KV heads of a layer share its units, where the policy can."))] = False,
    knob: Annotated[list[str] | None, typer.Option(metavar="POLICY.NAME=VALUE", help=(
        "A policy's own setting; given again, another value of it."))] = None,
    store_bits: Annotated[list[int] | None, typer.Option(show_default="16", help=(
        "Bits per number of the K and V that are kept: 16 (as the model has them), 8, 4, 2 or 1; may be given more "
        "than once. full keeps 16."))] = None,
    exact: Exact = None,
    exact_units: ExactUnits = None,
    focus: Annotated[bool, typer.Option("--focus", help=(
        "Tell the first question of each stream beforehand, and ask only that one (Locret-Q)."))] = False,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, show_default="Python's standard library",
                                              help="What the facts lie in.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    acknowledge: Acknowledge = None,
    plots: Annotated[bool, typer.Option("--plots", help="Draw curves and maps as well (needs matplotlib).")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing, report on what is in --out.")]
    = False,
    as_json: Json = False,
) -> None:
    if report_only:
        expect_no_plan(context)
    if text is not None:
        check_readable(text)
    with interruptible(Summary(f"what is done is kept in {to}; the same command goes on from there")):
        from locret_stream.evaluation.plots import expect_matplotlib
        from locret_stream.evaluation.reporting import write_reports

        if plots:
            expect_matplotlib()
        summary: dict[str, Any] = {"out": str(to), "ran": 0, "read": 0, "skipped": {}}
        if not report_only:
            request = Request(
                model=model, heads=tuple(heads or ()), policies=tuple(policy or ()), tasks=tuple(task or ()),
                files=tuple(file or ()), raw=raw, budgets=tuple(budget or ()), lengths=tuple(length or USUAL.lengths),
                questions=questions, chunk_size=chunk_size, sinks=sinks, stabilizers=stabilizers,
                allocations=tuple(allocation or USUAL.allocations), knobs=tuple(knob or ()), focus=focus, text=text,
                store_bits=tuple(store_bits or USUAL.store_bits), exact=exact_of(exact, exact_units),
                by_head=by_head)
            summary |= run(request, to, plots, acknowledge, device=device, dtype=dtype)
        written = write_reports(to, plots)
        summary["reports"] = msgspec.to_builtins(written.reports)
        summary["files"] = [str(path) for path in written.files]
    if plots and not written.pictures:
        say("nothing to draw: curves need two budgets or two lengths, and maps are made where policies with a budget "
            "are run with --plots")
    if as_json:
        print_json(summary)
        return
    out.print((to / "report.md").read_text(encoding="utf-8"), soft_wrap=True, end="")
    say(f"written: {', '.join(summary['files'])}")


def expect_no_plan(context: typer.Context) -> None:
    """Raises ConfigError: --report-only is given together with an option that says what to run."""
    given = on_command_line(context, (name for name in context.params if name not in REPORTING))
    if given:
        raise ConfigError(f"found --report-only and {given[0]}; a report is on all that is in --out: expected none of "
                          "what says what to run")


# -- running ------------------------------------------------------------------------------------------------------


def run(request: Request, to: Path, plots: bool, acknowledge: str | None, **options: Any) -> dict[str, Any]:
    """Check the whole request, then run the cells that have no result yet; with `plots` make the maps. Returns the part
    of the JSON that is about the run.

    Args:
        acknowledge: the reply before a question; "" for none, None for that of the model.
        options: "device" and "dtype" of the model.
    """
    from locret_stream.evaluation import maps, plan
    from locret_stream.evaluation.cells import counted
    from locret_stream.evaluation.runner import Bench

    text, documents = request.lines(), request.documents()
    plan.planned(request.axes(), documents)  # raises before a model is loaded
    named = named_model(request.model)
    if acknowledge is None:
        acknowledge = "OK." if named is None else named.acknowledge
    bench = Bench(*load(request.model, **options), text, documents,
                  acknowledge=acknowledge or None)
    cells, skipped = plan.checked(plan.planned(request.axes(bench.shape[0].window), documents), bench)
    for document in documents:
        say(describe(document))
    for reason, count in skipped.items():
        say(f"skipped: {reason} ({counted(count, 'cell')})")
    read = sum(bench.path_of(cell, to).is_file() for cell in cells)
    with Board(cells, read, lambda cell: bench.task(cell).tokens(cell.streams, cell.length)) as board:
        bench.run(cells, to, progress=board)
    if plots:
        maps.update(bench, cells, to, say)
    return {"skipped": skipped, "documents": {task.path: task.summary() for task in documents},
            "ran": len(cells) - read, "read": read}


def say(line: str) -> None:
    """One line on stderr, never broken."""
    err.print(line, soft_wrap=True)


def describe(task: FileTask) -> str:
    """Which questions of a file are asked, and how many are not."""
    from locret_stream.evaluation.cells import counted

    left_out = f"; {task.unscored:,} left out, which only people or a judging model score" if task.unscored else ""
    return (f"{task.name}: {task.path}: {counted(sum(task.asks), 'question')} on "
            f"{counted(len(task.asks), 'document')}{left_out}")


class Board:
    """The progress of a run: cells done of all, the current one, the time that is left. It is live on a terminal, else
    a line for every cell.

    Args:
        read: how many of the cells have a result already. tokens: of a cell, about how many its streams have.
    """

    def __init__(self, cells: list[Cell], read: int, tokens: Callable[[Cell], int]):
        from locret_stream.evaluation.cells import counted, in_words

        self._cells, self._done, self._read, self._tokens = cells, 0, read, tokens
        self._counted, self._in_words = counted, in_words
        self._work, self._seconds, self._since = 0, 0.0, time.monotonic()
        self._live = Live(console=err, refresh_per_second=4, get_renderable=self._render) if err.is_terminal else None

    def __enter__(self) -> Board:
        if self._live:
            self._live.start()
        else:
            say(f"{self._counted(len(self._cells), 'cell')}, of which {self._read} "
                f"{'is' if self._read == 1 else 'are'} there already")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, result: CellResult, was_read: bool) -> None:
        """One more cell is done: it was run, or its result was read from its file."""
        now = time.monotonic()
        if not was_read:
            self._seconds += now - self._since
            self._work += self._tokens(result.cell)
        self._since, self._done = now, self._done + 1
        if not (self._live or was_read):
            say(f"{self._done} of {len(self._cells)}: {self._in_words(result.cell)}: {result.score:.2f} "
                f"[{result.low:.2f}, {result.high:.2f}], {result.tok_per_s:,.0f} tok/s{self._left()}")

    def _left(self) -> str:
        """The time that the remaining cells take, from the tokens of those that were run; "" before the first one."""
        if not self._work:
            return ""
        speed = self._work / self._seconds
        rest = sum(map(self._tokens, self._cells[self._done:])) - (time.monotonic() - self._since) * speed
        return f", {duration(rest / speed)} left" if rest > 0 else ""

    def _render(self) -> Line:
        current = f": {self._in_words(self._cells[self._done])}" if self._done < len(self._cells) else ""
        return Line(f"{self._done} of {len(self._cells)} cells{current}{self._left()}")


def duration(seconds: float) -> str:
    """90 s, 12 min, 3.4 h."""
    return (f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000
            else f"{seconds / 3600:.1f} h")
