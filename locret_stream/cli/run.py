"""`locret-stream run`: text in from files or stdin, then questions, given or typed."""

from __future__ import annotations

import asyncio
import difflib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from locret_stream.cli.answering import answer, chat
from locret_stream.cli.display import Board, Row
from locret_stream.cli.loading import make_runtime
from locret_stream.cli.options import (
    DEFAULT_STORE,
    Json,
    Key,
    RuntimeOptions,
    StoreUrl,
    TextOptions,
    grouped,
    on_command_line,
)
from locret_stream.cli.output import describe, describe_runtime, err, say_of_bytes
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.cli.text_input import Reader, check_readable, path_text, stdin_is_terminal
from locret_stream.config import Sampling
from locret_stream.errors import ConfigError, StaleOwner, StoreError

if TYPE_CHECKING:
    from locret_stream.charsets import Decoder
    from locret_stream.context import StreamingContext
    from locret_stream.conversation.replies import Reply
    from locret_stream.snapshot import Store

LANGCHAIN = "langchain/"  # names of sessions that the adapter writes begin with it
LOOK_EVERY_S, SAVE_EVERY_S = 0.1, 60.0
_OFF = {"top_k": None, "top_p": 1, "min_p": None, "seed": 0}  # options of the noise, with what says nothing of it
HELP = """Read text into a bounded memory, then ask about it.

Files are read in the order given, "-" is stdin; without files and with something piped in, stdin is read. Every \
--ask is answered on a scratch copy of the memory, so that the questions do not see each other. Without --ask a chat \
starts, which the memory keeps; Ctrl-D or Ctrl-C ends it.

Examples:

\b
  locret-stream run notes.txt --ask "What is the door code of falcon?"
  tail -n 100000 service.log | locret-stream run --ask "What is the port of the gateway?"
  # read two files, then chat
  locret-stream run part1.txt part2.txt
  # what PowerShell's > wrote; or a log with bytes that are no text, which are read as U+FFFD and counted
  locret-stream run big.log --encoding utf-16 --ask "What is the port of the gateway?"
  locret-stream run raw.log --errors replace --ask "What is the port of the gateway?"
  # find again what was evicted, by the words of the question
  locret-stream run big.log --recall --ask "What is the port of the gateway?"
  # what to watch for, when it is known before reading
  locret-stream run big.log --focus "What is the port of the gateway?" --ask "What is the port of the gateway?"
  # a memory that goes on tomorrow
  locret-stream run today.log --session builds
  locret-stream run --session builds --ask "What is the port of the gateway?"
  # a model of your own, with its retaining heads
  locret-stream run big.txt --model ./llama --heads ./heads --budget 512MiB
  # or without any, by the policy that keeps most then, or by another one
  locret-stream run big.txt --model ./llama
  locret-stream run big.txt --model ./llama --policy streaming_llm"""
app = typer.Typer(rich_markup_mode="rich")


class SessionOptions(msgspec.Struct, frozen=True):
    """The stored session that goes on; without a name nothing is stored."""

    session: Annotated[str | None, typer.Option(help=(
        "Name of a stored session: goes on where it stopped, and is saved at the end."))] = None
    store: StoreUrl = DEFAULT_STORE
    key: Key = None
    save_every: Annotated[float, typer.Option(min=0, help=(
        "Seconds between two saves of a session while it reads; 0: only at the end."))] = SAVE_EVERY_S
    on_mismatch: Annotated[str, typer.Option(help=(
        '"rebuild" reads a session\'s log again if its snapshot is damaged or of another model or budget.'))] = "raise"

    def check(self, command: typer.Context) -> None:
        """Raises ConfigError, before a model is loaded: a value that cannot be used, or an option without effect."""
        given = on_command_line(command, ("store", "key", "save_every", "on_mismatch"))
        if self.session is None and given:
            raise ConfigError(f"found {given[0]} and no --session; expected --session with it")
        if self.session is not None and self.session.startswith(LANGCHAIN):
            raise ConfigError(f"session {self.session!r} is a thread of LocretChatModel, written as messages, which "
                              "run would go on from as plain text; expected "
                              f"thread_id={self.session.removeprefix(LANGCHAIN)!r} in LangChain, or another name")
        if self.on_mismatch not in ("raise", "rebuild"):
            raise ConfigError(f"--on-mismatch is {self.on_mismatch!r}; expected raise or rebuild")


class SamplingOptions(msgspec.Struct, frozen=True):
    """How answers are sampled: the fields of `Sampling`."""

    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of one answer.")] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int | None, typer.Option(help="Sample among this many most probable tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help=(
        "Sample among the most probable tokens that make up this share."))] = None
    min_p: Annotated[float | None, typer.Option(help=(
        "Least probability of a token, as a share of the greatest."))] = None
    repetition_penalty: Annotated[float | None, typer.Option(help=(
        "Above 1: tokens that occurred are less likely."))] = None
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends an answer; may be repeated.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0

    def sampling(self) -> Sampling:
        """Raises ConfigError: a value out of range, or an option of the noise where there is none."""
        sampling = Sampling(**{**msgspec.structs.asdict(self), "stop": tuple(self.stop or ())})
        given = [name for name, off in _OFF.items() if getattr(self, name) not in (None, off)]
        if given and not self.temperature:
            raise ConfigError(f"found --{given[0].replace('_', '-')} and no --temperature above 0; an answer is "
                              "greedy without it: expected --temperature with it")
        return sampling


@app.command(help=HELP)
@grouped
def run(
    command: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help='Texts; "-" is stdin.')] = None,
    ask: Annotated[list[str] | None, typer.Option(help="A question; may be given more than once.")] = None,
    *,
    text: TextOptions,
    options: RuntimeOptions,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    focus: Annotated[str | None, typer.Option(help=(
        "What will be asked about: it stands in front of all that is read, so that heads trained for it keep what "
        "matters."))] = None,
    stored: SessionOptions,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: for base models.")] = False,
    answering: SamplingOptions,
    as_json: Json = False,
) -> None:
    stored.check(command)
    session = stored.session
    piped = not files and sys.stdin is not None and not stdin_is_terminal()
    names = ["-"] if piped else list(files or [])
    if "-" in names and sys.stdin is None:
        raise ConfigError('found "-" and no stdin; expected the names of files')
    if names.count("-") > 1:
        raise ConfigError('"-" is given more than once; stdin can be read only once')
    for name in names:
        if name != "-":
            check_readable(Path(name))
    if any(not question.strip() for question in ask or ()):
        raise ConfigError("--ask is empty; expected a question")
    if as_json and not ask:
        raise ConfigError("--json answers questions and ends; expected at least one --ask")
    questions = None if ask else _questions(stdin_taken="-" in names)
    sampling = answering.sampling()
    given = on_command_line(command, ("errors", "encoding"))
    if given and not names:
        raise ConfigError(f"found {given[0]} and no text to read; expected files with it, or text on stdin")
    decoders = [text.decoder("stdin" if name == "-" else name) for name in names]
    summary = Summary()
    with interruptible(summary):
        runtime = make_runtime(options, **({} if session is None else {"store": stored.store, "key": stored.key}))

        err.print(f"model {options.model}: {describe_runtime(runtime)}", soft_wrap=True)

        async def talk() -> None:
            async with aclosing(runtime), runtime.open(
                    session, system=system, raw=True if raw else None, focus=focus,
                    on_mismatch="rebuild" if stored.on_mismatch == "rebuild" else "raise") as context:
                def apart() -> tuple[Reply, list[int]]:
                    from locret_stream.conversation.reading import reader_in
                    return reader_in(runtime, raw=context.raw)

                source = pieces(names, decoders) if names else None
                if source is not None and piped and session is not None:
                    source = await if_any(source)
                if session is not None and runtime.store is not None:
                    greet(session, context, runtime.store, grows=source is not None or questions is not None)
                with summary.watching(lambda: context.memory):
                    try:
                        row = None if source is None else await read(
                            names, source, context, stored.save_every if session else 0)
                        say_of_bytes(decoders)
                        if questions is None:
                            await answer(list(ask or ()), context, sampling, row, as_json, recall=bool(options.recall),
                                         evicts=runtime.engine.policy.bounded,
                                         receipt=receipt_of(decoders), apart=apart)
                        else:
                            await chat(questions, context, sampling, apart)
                            err.print(f"At the end: {describe(context.memory)}.", soft_wrap=True)
                        if context.unsaved:
                            await context.snapshot()
                    except StaleOwner as error:
                        assert session is not None and runtime.store is not None  # only stored sessions have owners
                        raise StaleOwner(f"{error}. {await rescue(session, context, runtime.store)}") from None

        asyncio.run(talk())


async def if_any(text: AsyncIterator[str]) -> AsyncIterator[str] | None:
    """The same text, once its first piece has come; None if it is empty: a stored session is then only asked."""
    first = await anext(text, None)
    return None if first is None else _joined(first, text)


async def _joined(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in rest:
        yield piece


async def rescue(session: str, context: StreamingContext, store: Store) -> str:
    """Save a context that another owner fenced off, under a new name; a sentence that says which."""
    number = 2
    while store.has(f"{session} ({number})"):
        number += 1
    saved = await context.save_as(f"{session} ({number})")
    return f"What was read here is kept as session {saved.name!r}, {saved.tokens:,} tokens"


def greet(session: str, context: StreamingContext, store: Store, *, grows: bool) -> None:
    """Print whether the session goes on or is new.

    Args:
        grows: whether text or chat will be added to it; a new session that is only asked must be a mistyped name where
            the store has others.

    Raises:
        StoreError: it cannot be saved. ConfigError: it is new and only asked, and there are others.
    """
    if grows:
        store.probe()
    if context.rebuilt:
        err.print(f"Session {session!r} was rebuilt from its log, and is saved so: {context.rebuilt}", soft_wrap=True)
    if context.resumed:
        err.print(f"Session {session!r} goes on: {describe(context.memory)}.", soft_wrap=True)
        return
    stored = [snapshot.name for snapshot in store.list()]
    names = ", ".join(map(repr, difflib.get_close_matches(session, stored, n=3, cutoff=0.5)))
    if stored and not grows:
        raise ConfigError(f"session {session!r} is not in {store.url}, which has "
                          f"{names or ', '.join(map(repr, stored[:5]))}; expected a stored name, or text to begin the "
                          "session with")
    err.print(f"Session {session!r} is new{f'; the store has {names}' if names else ''}."
              f"{'' if grows else ' Nothing was read: the model answers alone, and nothing is saved.'}", soft_wrap=True)


def _questions(stdin_taken: bool) -> Reader:
    """Where questions are typed: stdin, or the terminal itself where stdin carries the text."""
    if not stdin_taken:
        if sys.stdin is None:
            raise ConfigError("there is no stdin to chat on; expected --ask")
        return Reader()
    try:
        return Reader("the terminal", open("/dev/tty", "rb", buffering=0))
    except OSError:
        raise ConfigError("stdin carries the text and there is no terminal to chat in; expected --ask") from None


async def pieces(names: list[str], decoders: list[Decoder]) -> AsyncIterator[str]:
    """The text of the named files one after the other, each through its decoder."""
    for name, decoder in zip(names, decoders, strict=True):
        async for piece in Reader(decoder=decoder).pieces() if name == "-" else path_text(Path(name), decoder):
            yield piece


def receipt_of(decoders: list[Decoder]) -> dict[str, Any]:
    """What JSON says of the same, all texts together."""
    out: dict[str, Any] = {}
    for decoder in decoders:
        for name, value in decoder.receipt.items():
            out[name] = out[name] + value if name in out else value
    return out


async def read(names: list[str], text: AsyncIterator[str], context: StreamingContext, save_every_s: float) -> Row:
    """Feed the text of these files while a board shows how far it is; the board's row.

    Args:
        save_every_s: seconds between two saves; 0: none.
    """
    before, start = context.memory.tokens, time.perf_counter()

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            memory = context.memory
            row.set(memory.tokens - before, time.perf_counter() - start, memory)
            board.tick()

    async def keep_saving() -> None:
        while True:
            await asyncio.sleep(save_every_s)
            try:
                await context.snapshot()
            except StoreError as error:  # raised again by the save at the end, if it lasts until then
                err.print(f"not saved: {error}", soft_wrap=True)

    with Board(f"reading {', '.join('stdin' if name == '-' else name for name in names)}", ["memory"]) as board:
        row = board.rows[0]
        try:
            async with asyncio.TaskGroup() as group:  # a save that another owner fences off ends the reading
                tasks = [group.create_task(keep_looking())]
                if save_every_s:
                    tasks.append(group.create_task(keep_saving()))
                report = await context.feed(text)
                row.set(report.tokens, report.seconds, context.memory)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return row
