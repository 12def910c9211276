"""`locret-stream demo`: facts planted in a long stream, asked afterwards; beside sinks + recent at the same budget."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from locret_stream.cli.common import (
    Heads,
    Held,
    Json,
    Model,
    Policy,
    beside,
    check_readable,
    file_text,
    in_bytes,
    interruptible,
    make_runtime,
    mean,
    out,
    print_json,
)
from locret_stream.cli.display import Board
from locret_stream.errors import ConfigError, InputError

if TYPE_CHECKING:
    from locret_stream.context import FeedReport, StreamingContext
    from locret_stream.runtime import Runtime

TOKENS, DECOYS = 400_000, 110
BLOCK_CHARS = 16_384
LINE_CHARS = 4_096
ANSWER_TOKENS = 24
HELP = """Stream real text past a small memory, then ask what was in it.

Twelve facts lie at random places in the standard library's sources, among 110 sentences of the same shape that are \
never asked. Every question is asked on a scratch copy of the memory, and again of a memory that keeps the first and \
the most recent tokens at the same budget. Then the memory is saved, and a new process opens it and answers again.

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
  # one JSON object; progress goes to stderr
  locret-stream demo --json > result.json"""


@dataclass(frozen=True)
class GivenFact:
    """A fact out of `--facts`; has what the tasks' own facts have."""

    sentence: str
    question: str
    answer: str


class _FactLine(msgspec.Struct, frozen=True):
    fact: str
    question: str
    answer: str


@dataclass
class Asked:
    """One question with its true answer, where its fact lay in the stream, and what each memory said."""

    question: str
    expected: str
    position: int | None = None
    answer: str = ""
    recent: str | None = None


@dataclass(frozen=True)
class Again:
    """What a new process answered from the saved memory: its size, and the seconds both took."""

    answers: list[str]
    bytes: int
    save_s: float
    process_s: float


def demo(
    tokens: Annotated[int | None, typer.Option(min=1_000, show_default="400000, or all of --stream",
                                               help="Tokens to stream.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Units kept per KV head: the mean over the layers.")] = 768,
    chunk_size: Annotated[int, typer.Option(min=1, help="Tokens read between two evictions.")] = 256,
    seed: Annotated[int, typer.Option(help="Chooses the facts, their places and the order of the text.")] = 0,
    facts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        'JSONL of your own facts: {"fact", "question", "answer"}.'))] = None,
    stream: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        "A UTF-8 text of your own instead of the standard library's sources."))] = None,
    policy: Policy = "locret",
    model: Model = "bundled",
    heads: Heads = None,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Run sinks + recent beside it.")] = True,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help=(
        "Save the memory and let a new process answer from it."))] = True,
    as_json: Json = False,
) -> None:
    given = None if facts is None else read_facts(facts)
    if stream is not None:
        check_readable(stream)
        if not stream.is_file():
            raise InputError(f"{stream} is a pipe or a device, which can be read but once, and --stream is read twice; "
                             "expected a file: save its text in one")
    held = Held()
    names = [policy, "sinks + recent"] if compare else [policy]

    with interruptible(held), tempfile.TemporaryDirectory(prefix="locret-demo-") as folder:
        from locret_stream.evaluation import tasks

        store = {"store": folder, "autosave": False} if restart else {}
        runtimes = [make_runtime(model, heads, policy, budget, chunk_size, **store)]
        if compare:
            runtimes.append(beside(runtimes[0], "streaming_llm"))

        async def show() -> None:
            async with AsyncExitStack() as stack:
                contexts = []
                for runtime, name in zip(runtimes, names, strict=True):
                    await stack.enter_async_context(aclosing(runtime))
                    contexts.append(await stack.enter_async_context(runtime.open(name)))
                measure = tasks.line_measure(runtimes[0].count_tokens)
                lines = None if stream is None else (lambda: cut_lines(file_text(stream)))
                size = (tokens or TOKENS) if lines is None else count(lines(), measure, tokens)
                planted = tasks.planted_stream(seed, size, decoys=DECOYS, measure=measure, lines=lines)
                if given is not None:
                    decoys = tasks.make_facts(random.Random(f"facts {seed}"), DECOYS, share=0.25)
                    told = list({fact.sentence.strip(): fact for fact in given}.values())  # each sentence once
                    planted = tasks.PlantedStream(told, decoys, size, seed, planted.lines, measure)
                stack.enter_context(held.watching(lambda: contexts[0].memory))
                expect_room(runtimes[0], [fact.sentence for fact in planted.facts])
                title = (f"{len(planted.facts)} facts and {DECOYS} decoys in {size:,} tokens; "
                         f"budget {budget:,} + chunk {chunk_size} units per KV head")
                with Board(title, names, size) as board:
                    asked = await feed_all(planted, given or planted.facts, contexts, board)
                    await ask(asked, contexts)
                again = None
                if restart:
                    again = await ask_again(asked, contexts[0], folder, [
                        "--model", model, "--policy", policy, "--budget", str(budget), "--chunk-size", str(chunk_size),
                        *([] if heads is None else ["--heads", str(heads)])])
                report(asked, board, budget, chunk_size, again, whole=given is None, as_json=as_json)

        asyncio.run(show())


def read_facts(path: Path) -> list[GivenFact]:
    """The facts of a JSONL file.

    Raises:
        InputError: naming the line that is not a fact, or a file without any.
    """
    found = []
    text = "".join(file_text(path)).removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), 1):  # at \n alone: JSON strings may hold other line ends
        if not line.strip():
            continue
        try:
            given = msgspec.json.decode(line, type=_FactLine)
        except msgspec.MsgspecError as error:
            raise InputError(f'{path}, line {number}: {error}; expected {{"fact": "…", "question": "…", "answer": '
                             '"…"}') from None
        if not (given.fact.strip() and given.question.strip() and given.answer.strip()):
            raise InputError(f"{path}, line {number}: an empty text; expected a fact, its question and its answer")
        if "\0" in given.question:  # which no argument of a process can hold
            raise InputError(f"{path}, line {number}: a NUL character in the question; expected a question without")
        found.append(GivenFact(given.fact, given.question, given.answer))
    if not found:
        raise InputError(f"{path} holds no facts; expected one JSON object per line")
    return found


def expect_room(runtime: Runtime, sentences: Sequence[str]) -> None:
    """Raises ConfigError where the memory has no room for a single fact beside what always stays."""
    budget, least = runtime.engine.config.budget, min(map(runtime.count_tokens, sentences))
    free = budget.units - budget.sinks - budget.stabilizers
    if free < least:
        raise ConfigError(f"of a budget of {budget.units} units {free} are free to be kept, and the shortest fact has "
                          f"{least} tokens; expected --budget {-(-4 * least // 3)} or more")  # at most a quarter is not


def cut_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Lines of a text that comes in pieces; lines beyond any reason are cut, so that facts fit between."""
    rest = ""
    for piece in pieces:
        for line in io.StringIO(rest + piece):  # at \n alone: other line ends are text like any other
            *whole, rest = (line[at : at + LINE_CHARS] for at in range(0, len(line), LINE_CHARS))
            yield from whole
            if rest.endswith("\n"):
                yield rest
                rest = ""
    if rest:
        yield rest


def count(lines: Iterable[str], measure: Callable[[str], int], limit: int | None) -> int:
    """What `lines` measure together, or `limit` once they reach it."""
    total = 0
    for line in lines:
        total += measure(line)
        if limit is not None and total >= limit:
            return limit
    return total


def blocks(planted: Iterable[str], sentences: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """(text, fact it begins with or None): pieces put together to a size worth a call."""
    index = {sentence.strip(): i for i, sentence in enumerate(sentences)}
    parts: list[str] = []
    size, begins = 0, None
    for piece in planted:
        fact = index.pop(piece.strip(), None)
        if parts and (fact is not None or size >= BLOCK_CHARS):
            yield "".join(parts), begins
            parts, size, begins = [], 0, None
        begins = fact if fact is not None else begins
        parts.append(piece)
        size += len(piece)
    if parts:
        yield "".join(parts), begins


async def feed_all(planted: Any, facts: Iterable[Any], contexts: list[StreamingContext], board: Board) -> list[Asked]:
    """Feed all contexts the same blocks, at the same time; note where each fact began. Several of `facts` may be
    questions about one that is planted."""

    async def one(context: StreamingContext, text: str) -> FeedReport:
        return await context.feed(text)

    asked, about = list[Asked](), dict[str, list[Asked]]()
    for fact in facts:
        asked.append(Asked(fact.question, fact.answer))
        about.setdefault(fact.sentence.strip(), []).append(asked[-1])
    sentences = list(about)
    for text, begins in blocks(planted, sentences):
        for question in () if begins is None else about[sentences[begins]]:
            question.position = contexts[0].memory.tokens
        feeds = [asyncio.ensure_future(one(context, text)) for context in contexts]
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


async def ask(asked: list[Asked], contexts: list[StreamingContext]) -> None:
    """Fill in what every memory answers."""
    for one in asked:
        one.answer = (await contexts[0].ask(one.question, max_new_tokens=ANSWER_TOKENS)).strip()
        if len(contexts) > 1:
            one.recent = (await contexts[1].ask(one.question, max_new_tokens=ANSWER_TOKENS)).strip()


async def ask_again(asked: list[Asked], context: StreamingContext, folder: str, options: list[str]) -> Again:
    """Save the memory, and ask the same questions in a new process that opens it.

    Raises:
        InputError: that process failed; with its own last line.
    """
    began = time.perf_counter()
    saved = await context.snapshot()
    save_s = time.perf_counter() - began
    questions = [word for one in asked for word in ("--ask", one.question)]
    own = {name: value for name, value in os.environ.items() if name not in ("LOCRET_KEY", "LOCRET_STORE")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "locret_stream", "run", "--session", context.name, "--store", folder, *options,
        "--max-new-tokens", str(ANSWER_TOKENS), "--json", *questions, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=own)
    try:
        said, complaint = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(f"the new process could not go on from the saved memory: {last}")
    answers = [one["answer"] for one in json.loads(said)["answers"]]
    return Again(answers, saved.bytes, save_s, time.perf_counter() - began - save_s)


def is_right(answer: str | None, expected: str, whole: bool = True) -> bool:
    """Whether the answer is the expected one, but for case, white space and a full stop at the end.

    Args:
        whole: nothing else may be said; False lets it be words of a longer answer, for facts of the user's own.
    """
    plain = lambda text: " ".join(text.split()).removesuffix(".").casefold()  # noqa: E731
    if answer is None:
        return False
    if whole:
        return plain(answer) == plain(expected)
    return re.search(rf"(?<!\w){re.escape(plain(expected))}(?!\w)", plain(answer)) is not None


def same(one: Asked, answer: str) -> bool:
    """Whether the new process said the very same."""
    return one.answer == answer


def _marked(answer: str | None, expected: str, whole: bool) -> Text:
    right = is_right(answer, expected, whole)
    return Text(("✓ " if right else "✗ ") + " ".join((answer or "").split()), style="green" if right else "red")


def report(asked: list[Asked], board: Board, budget: int, chunk_size: int, again: Again | None, *, whole: bool,
           as_json: bool) -> None:
    """Print answers beside the truth, or the JSON object of the contract."""
    row = board.rows[0]
    memory = row.memory
    right = sum(is_right(one.answer, one.expected, whole) for one in asked)
    recent = sum(is_right(one.recent, one.expected, whole) for one in asked)
    compared = len(board.rows) > 1
    if as_json:
        print_json({
            "tokens_fed": row.tokens,
            "budget_units": budget,
            "chunk_size": chunk_size,
            "peak_units": mean(memory.peak),
            "bytes_resident": memory.bytes_resident,
            "bytes_full_cache": memory.bytes_full_cache,
            "recall": right / len(asked),
            "recall_recent": recent / len(asked) if compared else None,
            "tok_per_s": round(row.tok_per_s, 1),
            "answers": [{"question": one.question, "expected": one.expected, "answer": one.answer,
                         "position": one.position} for one in asked],
            "restored": None if again is None else {
                "answers": again.answers, "same": sum(map(same, asked, again.answers)),
                "snapshot_bytes": again.bytes, "save_s": round(again.save_s, 3),
                "process_s": round(again.process_s, 1)},
        })
        return
    table = Table(title=f"asked after {row.tokens:,} tokens", title_justify="left", pad_edge=False)
    for heading in ("at token", "question", "truth", row.name, *(["sinks + recent"] if compared else [])):
        table.add_column(heading, justify="right" if heading == "at token" else "left", overflow="fold")
    for one in sorted(asked, key=lambda one: one.position or 0):
        given = (one.answer, one.recent) if compared else (one.answer,)
        table.add_row(f"{one.position or 0:,}", one.question, one.expected,
                      *(_marked(answer, one.expected, whole) for answer in given))
    out.print(table)
    out.print(f"{row.name}: {right} of {len(asked)} right, from {in_bytes(memory.bytes_resident)} where a full cache "
              f"would need {in_bytes(memory.bytes_full_cache)}; {row.tok_per_s:,.0f} tok/s", soft_wrap=True)
    if again is not None:
        out.print(f"saved in {again.save_s:.2f} s ({in_bytes(again.bytes)}); a new process opened it and gave "
                  f"{sum(map(same, asked, again.answers))} of {len(asked)} answers the same, {again.process_s:.1f} s "
                  "from its start on", soft_wrap=True)
    if compared:
        out.print(f"sinks + recent at the same budget: {recent} of {len(asked)} right", soft_wrap=True)
