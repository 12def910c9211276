"""`locret-stream demo`: facts planted in a long stream, asked afterwards; beside sinks + recent at the same budget."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table
from rich.text import Text

from locret_stream.cli.demo_stream import GivenFact, blocks, count, cut_lines, read_facts
from locret_stream.cli.display import Board
from locret_stream.cli.loading import beside, make_runtime
from locret_stream.cli.options import (
    USUAL_BUDGET,
    Chunk,
    Heads,
    Json,
    Model,
    Policy,
    RuntimeOptions,
    TextOptions,
    grouped,
    on_command_line,
)
from locret_stream.cli.output import in_bytes, out, print_json, say_of_bytes
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.cli.text_input import check_readable, file_text
from locret_stream.errors import ConfigError, InputError

if TYPE_CHECKING:
    from locret_stream.context import StreamingContext
    from locret_stream.evaluation.facts import Fact
    from locret_stream.evaluation.haystack import PlantedStream
    from locret_stream.runtime import Runtime

TOKENS, DECOYS = 400_000, 110  # for the bundled model
CHAT_TOKENS, CHAT_FACTS = 64_000, 6  # for any other, without decoys
ANSWER_TOKENS = 32
HELP = """Stream real text past a small memory, then ask what was in it.

Twelve facts lie at random places in the standard library's sources, among 110 sentences of the same shape that are \
never asked; any model but the bundled one reads six facts as people tell them, and no decoys. Every question is asked \
on a copy of the memory; once more with recall, which searches all that was read for the question's words and reads \
those passages again; and of a memory that keeps the first and the most recent tokens at the same budget. Then the \
memory is saved, and a new process opens it and answers again.

Examples:

\b
  # the whole of it: 400,000 tokens, 12 facts
  locret-stream demo
  # a shorter stream, other facts
  locret-stream demo --tokens 50000 --seed 7
  # your own facts, one {"fact": …, "question": …, "answer": …} per line
  locret-stream demo --facts facts.jsonl
  # in your own text
  locret-stream demo --stream book.txt
  # a real chat model, 64,000 tokens of a book
  locret-stream demo --model smollm2 --stream book.txt --tokens 64000
  # one JSON object; progress goes to stderr
  locret-stream demo --json > result.json"""
app = typer.Typer(rich_markup_mode="rich")


@dataclass
class Asked:
    """One question with its true answer, the position of its fact in the stream, and what each memory answered.

    answer: of the memory under test. recalled: of the same memory with recall; None without. recent: of sinks + recent;
    None without the comparison.
    """

    question: str
    expected: str
    position: int | None = None
    answer: str = ""
    recalled: str | None = None
    recent: str | None = None

    @property
    def best(self) -> str:
        """With recall, where that was asked."""
        return self.answer if self.recalled is None else self.recalled


@dataclass(frozen=True)
class Restored:
    """The answers of a new process from the saved memory, its size, and the seconds of saving and of the process."""

    answers: list[str]
    bytes: int
    save_s: float
    process_s: float


@app.command(help=HELP)
@grouped
def demo(
    *,
    command: typer.Context,
    tokens: Annotated[int | None, typer.Option(min=1_000, help="Tokens to stream.", show_default=(
        "400000 for bundled, else 64000; or all of --stream"))] = None,
    budget: Annotated[int | None, typer.Option(min=1, show_default=USUAL_BUDGET, help=(
        "Units kept per KV head: the mean over the layers."))] = None,
    chunk_size: Chunk = None,
    seed: Annotated[int, typer.Option(help="Chooses the facts, their places and the order of the text.")] = 0,
    facts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        'JSONL of your own facts: {"fact", "question", "answer"}.'))] = None,
    stream: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        "A text of your own instead of the standard library's sources."))] = None,
    text: TextOptions,
    policy: Policy = None,
    model: Model = "bundled",
    heads: Heads = None,
    recall: Annotated[bool, typer.Option("--recall/--no-recall", help="Ask once more with recall.")] = True,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Run sinks + recent beside it.")] = True,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help=(
        "Save the memory and let a new process answer from it."))] = True,
    as_json: Json = False,
) -> None:
    ours = facts is None and model == "bundled"
    given = None if ours else chat_facts(seed) if facts is None else read_facts(facts)
    tokens = tokens or (None if stream else TOKENS if model == "bundled" else CHAT_TOKENS)
    if stream is not None:
        check_readable(stream)
        if not stream.is_file():
            raise InputError(f"{stream} is a pipe or a device, which can be read but once, and --stream is read twice; "
                             "expected a file: save its text in one")
    if stream is None and (lone := on_command_line(command, ("errors", "encoding"))):
        raise ConfigError(f"found {lone[0]} and no --stream; expected --stream with it")
    lines = None if stream is None else Lines(stream, text)
    summary = Summary()
    options = RuntimeOptions(model=model, heads=heads, policy=policy, budget=None if budget is None else str(budget),
                             chunk_size=chunk_size, recall=recall)

    with interruptible(summary), tempfile.TemporaryDirectory(prefix="locret-demo-") as folder:
        runtimes = [make_runtime(options, **({"store": folder, "autosave": False} if restart else {}))]
        units, chunk = runtimes[0].engine.config.budget.units, runtimes[0].engine.chunk_size
        names = [runtimes[0].engine.policy.name]
        if compare:
            runtimes.append(beside(runtimes[0], "streaming_llm"))
            names.append("sinks + recent")

        async def show() -> None:
            async with AsyncExitStack() as stack:
                contexts = []
                for runtime, name in zip(runtimes, names, strict=True):
                    await stack.enter_async_context(aclosing(runtime))
                    contexts.append(await stack.enter_async_context(runtime.open(name)))
                planted = plant(runtimes[0], seed, tokens, lines, given, DECOYS if model == "bundled" else 0)
                stack.enter_context(summary.watching(lambda: contexts[0].memory))
                expect_room(runtimes[0], [fact.sentence for fact in planted.facts])
                decoys = f" and {len(planted.decoys)} decoys" if planted.decoys else ""
                title = (f"{len(planted.facts)} facts{decoys} in {planted.size:,} tokens; "
                         f"budget {units:,} + chunk {chunk} units per KV head")
                with Board(title, names, planted.size) as board:
                    asked = await feed_all(planted, given or planted.facts, contexts, board)
                    await ask(asked, contexts, recall=recall and runtimes[0].engine.policy.bounded)
                restored = await ask_again(asked, contexts[0], folder, options) if restart else None
                report(asked, board, units, chunk, restored, whole=ours, as_json=as_json)

        asyncio.run(show())


class Lines:
    """The lines of a text, any number of times. `decoder`: that of the last time."""

    def __init__(self, path: Path, text: TextOptions):
        self._path, self._text = path, text
        self.decoder = text.decoder(str(path))

    def __call__(self) -> Iterator[str]:
        self.decoder = self._text.decoder(str(self._path))
        return cut_lines(file_text(self._path, self.decoder))


def chat_facts(seed: int) -> list[GivenFact]:
    """Facts as people tell and ask them, half of them numbers."""
    from locret_stream.evaluation import chat

    rng = random.Random(f"facts {seed}")
    told = [*chat.numbers(rng, CHAT_FACTS // 2), *chat.words(rng, CHAT_FACTS - CHAT_FACTS // 2)]
    return [GivenFact(one.line, one.question, one.value) for one in told]


def plant(runtime: Runtime, seed: int, tokens: int | None, lines: Lines | None, given: list[GivenFact] | None,
          decoys: int) -> PlantedStream:
    """The stream of this seed.

    Args:
        tokens: its length; None, with `lines` alone: all of them.
        lines: of a text to plant the facts in, instead of the standard library.
        given: the facts, if not those that the bundled model was trained for. decoys: so many, of its kind.
    """
    from locret_stream.evaluation.facts import make_facts
    from locret_stream.evaluation.haystack import PlantedStream, line_measure, planted_stream

    measure = line_measure(runtime.count_tokens)
    size = tokens if lines is None else count(lines(), measure, tokens)
    if lines is not None:
        say_of_bytes([lines.decoder])
    assert size is not None, "only a text of the user's own has a length of its own"
    planted = planted_stream(seed, size, decoys=decoys, measure=measure, lines=lines)
    if given is None:
        return planted
    unasked = make_facts(random.Random(f"facts {seed}"), decoys, share=0.25)
    once = {fact.sentence.strip(): fact for fact in given}.values()  # several questions may be about one sentence
    # A planted stream reads nothing of a fact but what a GivenFact has too.
    return PlantedStream(cast("list[Fact]", list(once)), unasked, size, seed, planted.lines, measure)


def expect_room(runtime: Runtime, sentences: Sequence[str]) -> None:
    """Raises ConfigError: the budget has no room for a single fact beside the units that always stay."""
    budget, least = runtime.engine.config.budget, min(map(runtime.count_tokens, sentences))
    free = budget.units - budget.sinks - budget.stabilizers
    if free < least:  # the budget to expect: at most a quarter of it is protected
        raise ConfigError(f"of a budget of {budget.units} units {free} are free to be kept, and the shortest fact has "
                          f"{least} tokens; expected --budget {-(-4 * least // 3)} or more")


async def feed_all(planted: PlantedStream, facts: Iterable[Fact | GivenFact], contexts: list[StreamingContext],
                   board: Board) -> list[Asked]:
    """Feed all contexts the same blocks at the same time.

    Args:
        facts: what will be asked; several may be about one sentence of the stream.

    Returns:
        A question for every fact, with the position of its sentence in the stream.
    """
    asked, about = list[Asked](), dict[str, list[Asked]]()
    for fact in facts:
        asked.append(Asked(fact.question, fact.answer))
        about.setdefault(fact.sentence.strip(), []).append(asked[-1])
    sentences = list(about)
    for text, begins in blocks(planted, sentences):
        for entry in () if begins is None else about[sentences[begins]]:
            entry.position = contexts[0].memory.tokens
        feeds = [asyncio.ensure_future(context.feed(text)) for context in contexts]
        try:
            reports = await asyncio.gather(*feeds)
        except BaseException:
            for running in feeds:
                running.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)
            raise
        for context, row, fed in zip(contexts, board.rows, reports, strict=True):
            row.add(fed.tokens, fed.seconds, context.memory)
        board.tick()
    return asked


async def ask(asked: list[Asked], contexts: list[StreamingContext], *, recall: bool) -> None:
    """Write the answer of every memory into the entries; `recall`: that of the first memory with recall, too."""
    async def answer(context: StreamingContext, question: str, *, again: bool = False) -> str:
        return (await context.ask(question, max_new_tokens=ANSWER_TOKENS, recall=again)).strip()

    for entry in asked:
        entry.answer = await answer(contexts[0], entry.question)
        if recall:
            entry.recalled = await answer(contexts[0], entry.question, again=True)
        if len(contexts) > 1:
            entry.recent = await answer(contexts[1], entry.question)


async def ask_again(asked: list[Asked], context: StreamingContext, folder: str, options: RuntimeOptions) -> Restored:
    """Save the memory, and ask the same questions in a new process that opens it.

    Raises:
        InputError: that process failed; the message ends with its last line on stderr.
    """
    began = time.perf_counter()
    saved = await context.snapshot()
    save_s = time.perf_counter() - began
    words = [word for name in ("model", "policy", "budget", "chunk_size", "heads")
             if (value := getattr(options, name)) is not None for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--recall"] if options.recall else []
    questions = [word for entry in asked for word in ("--ask", entry.question)]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCRET_KEY", "LOCRET_STORE")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "locret_stream", "run", "--session", context.name, "--store", folder, *words,
        "--max-new-tokens", str(ANSWER_TOKENS), "--json", *questions, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment)
    try:
        printed, complaint = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(f"the new process could not go on from the saved memory: {last}")
    answers = [entry["answer"] for entry in json.loads(printed)["answers"]]
    return Restored(answers, saved.bytes, save_s, time.perf_counter() - began - save_s)


def is_right(answer: str | None, expected: str, whole: bool = True) -> bool:
    """Whether the answer is the expected one, but for case, white space and a full stop at the end.

    Args:
        whole: the answer must be nothing else; False: it may be part of a longer answer, for facts of the user's own.
    """
    if answer is None:
        return False
    answer, expected = (" ".join(text.split()).removesuffix(".").casefold() for text in (answer, expected))
    return answer == expected if whole else re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", answer) is not None


def _marked(answer: str | None, expected: str, whole: bool) -> Text:
    right = is_right(answer, expected, whole)
    return Text(("✓ " if right else "✗ ") + " ".join((answer or "").split()), style="green" if right else "red")


def report(asked: list[Asked], board: Board, budget: int, chunk_size: int, restored: Restored | None, *, whole: bool,
           as_json: bool) -> None:
    """Print a table of answers beside the truth, or the JSON object."""
    row = board.rows[0]
    memory = row.memory
    assert memory is not None  # every stream has a first block, after which the row has a memory
    right = sum(is_right(entry.answer, entry.expected, whole) for entry in asked)
    recalled = sum(is_right(entry.recalled, entry.expected, whole) for entry in asked)
    recent = sum(is_right(entry.recent, entry.expected, whole) for entry in asked)
    same = 0 if restored is None else sum(
        entry.best == answer for entry, answer in zip(asked, restored.answers, strict=True))
    compared, reread = len(board.rows) > 1, asked[0].recalled is not None
    if as_json:
        print_json({
            "tokens_fed": row.tokens,
            "budget_units": budget,
            "chunk_size": chunk_size,
            "peak_units": fmean(memory.peak),
            "bytes_resident": memory.bytes_resident,
            "bytes_full_cache": memory.bytes_full_cache,
            "recall": right / len(asked),
            "recall_rereading": recalled / len(asked) if reread else None,
            "recall_recent": recent / len(asked) if compared else None,
            "tok_per_s": round(row.tok_per_s, 1),
            "answers": [{"question": entry.question, "expected": entry.expected, "answer": entry.answer,
                         **({"recalled": entry.recalled} if reread else {}), "position": entry.position}
                        for entry in asked],
            "restored": None if restored is None else {
                "answers": restored.answers, "same": same, "snapshot_bytes": restored.bytes,
                "save_s": round(restored.save_s, 3), "process_s": round(restored.process_s, 1)},
        })
        return
    table = Table(title=f"asked after {row.tokens:,} tokens", title_justify="left", pad_edge=False)
    for heading in ("at token", "question", "truth", row.name, *(["with recall"] if reread else []),
                    *(["sinks + recent"] if compared else [])):
        table.add_column(heading, justify="right" if heading == "at token" else "left", overflow="fold")
    for entry in sorted(asked, key=lambda entry: entry.position or 0):
        answers = (entry.answer, *([entry.recalled] if reread else []), *([entry.recent] if compared else []))
        table.add_row(f"{entry.position or 0:,}", entry.question, entry.expected,
                      *(_marked(answer, entry.expected, whole) for answer in answers))
    out.print(table)
    out.print(f"{row.name}: {right} of {len(asked)} right, from {in_bytes(memory.bytes_resident)} where a full cache "
              f"would need {in_bytes(memory.bytes_full_cache)}; {row.tok_per_s:,.0f} tok/s", soft_wrap=True)
    if reread:
        out.print(f"with recall, from an index of {in_bytes(memory.bytes_recall)} beside it: {recalled} of "
                  f"{len(asked)} right", soft_wrap=True)
    if restored is not None:
        out.print(f"saved in {restored.save_s:.2f} s ({in_bytes(restored.bytes)}); a new process gave {same} of "
                  f"{len(asked)} answers{' with recall' if reread else ''} the same, the last one "
                  f"{restored.process_s:.1f} s after its start", soft_wrap=True)
    if compared:
        out.print(f"sinks + recent at the same budget: {recent} of {len(asked)} right", soft_wrap=True)
