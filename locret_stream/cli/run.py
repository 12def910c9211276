"""`locret-stream run`: text in from files or stdin, then questions, given or typed."""

from __future__ import annotations

import asyncio
import difflib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from locret_stream.cli.common import (
    DEFAULT_STORE,
    Chunk,
    Device,
    Dtype,
    Heads,
    Held,
    Json,
    Key,
    Model,
    Policy,
    Reader,
    StoreUrl,
    Units,
    check_readable,
    describe,
    err,
    interruptible,
    make_runtime,
    mean,
    path_text,
    print_json,
    stdin_is_terminal,
)
from locret_stream.cli.display import Board, Row
from locret_stream.config import Sampling
from locret_stream.errors import ConfigError, StaleOwner, StoreError

if TYPE_CHECKING:
    from locret_stream.context import StreamingContext
    from locret_stream.snapshot import Store

LANGCHAIN = "langchain/"  # where the adapter keeps its threads
LOOK_EVERY_S, SAVE_EVERY_S = 0.1, 60.0
HELP = """Read text into a bounded memory, then ask about it.

Files are read in the order given, "-" is stdin; without files and with something piped in, stdin is read. Every \
--ask is answered on a scratch copy of the memory, so that the questions do not see each other. Without --ask a chat \
starts, which the memory keeps; Ctrl-D or Ctrl-C ends it.

Examples:

\b
  locret-stream run notes.txt --ask "What is the door code of falcon?"
  journalctl | locret-stream run --ask "Which unit failed?" --ask "When?"
  # read two files, then chat
  locret-stream run part1.txt part2.txt
  # what to watch for, when it is known before reading
  locret-stream run big.log --focus "Which unit failed?" --ask "Which unit failed?"
  # a memory that goes on tomorrow
  locret-stream run today.log --session builds
  locret-stream run --session builds --ask "What broke on Monday?"
  # a model of your own, with its retaining heads
  locret-stream run big.txt --model ./llama --heads ./heads --budget 512MiB
  # or with a policy that needs no heads
  locret-stream run big.txt --model ./llama --policy keydiff"""


def run(
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help='UTF-8 texts; "-" is stdin.')] = None,
    ask: Annotated[list[str] | None, typer.Option(help="A question; may be given more than once.")] = None,
    model: Model = "bundled",
    heads: Heads = None,
    policy: Policy = "locret",
    budget: Units = None,
    chunk_size: Chunk = None,
    device: Device = None,
    dtype: Dtype = "auto",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    focus: Annotated[str | None, typer.Option(help=(
        "What will be asked about: it stands in front of all that is read, so that heads trained for it keep what "
        "matters."))] = None,
    session: Annotated[str | None, typer.Option(help=(
        "Name of a stored session: goes on where it stopped, and is saved at the end."))] = None,
    store: StoreUrl = DEFAULT_STORE,
    key: Key = None,
    save_every: Annotated[float, typer.Option(min=0, help=(
        "Seconds between two saves of a session while it reads; 0: only at the end."))] = SAVE_EVERY_S,
    on_mismatch: Annotated[str, typer.Option(help=(
        '"rebuild" reads a session\'s log again if its snapshot is damaged or of another model or budget.'))] = "raise",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: for base models.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of one answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends an answer; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    as_json: Json = False,
) -> None:
    names = list(files or [])
    if session is not None and session.startswith(LANGCHAIN):
        raise ConfigError(f"session {session!r} is a thread of LocretChatModel, written as messages, which run would "
                          f"go on from as plain text; expected thread_id={session.removeprefix(LANGCHAIN)!r} in "
                          "LangChain, or another name")
    if on_mismatch not in ("raise", "rebuild"):
        raise ConfigError(f"--on-mismatch is {on_mismatch!r}; expected raise or rebuild")
    piped = not names and not stdin_is_terminal()
    if piped:
        names = ["-"]
    if names.count("-") > 1:
        raise ConfigError('"-" is given more than once; stdin can be read only once')
    for name in names:
        if name != "-":
            check_readable(Path(name))
    if "" in (ask or ()):
        raise ConfigError("--ask is empty; expected a question")
    if as_json and not ask:
        raise ConfigError("--json answers questions and ends; expected at least one --ask")
    questions = None if ask else _questions(stdin_taken="-" in names)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                        repetition_penalty=repetition_penalty, stop=tuple(stop or ()), seed=seed)
    held = Held()
    with interruptible(held):
        runtime = make_runtime(model, heads, policy, budget, chunk_size, device=device, dtype=dtype,
                               store=None if session is None else store, key=None if session is None else key)

        async def talk() -> None:
            async with aclosing(runtime), runtime.open(session, system=system, raw=True if raw else None,
                                                       on_mismatch=on_mismatch, focus=focus) as context:
                text = pieces(names) if names else None
                if piped and session is not None:
                    text = await if_any(text)
                if session is not None:
                    greet(session, context, runtime.store, told=text is not None or questions is not None)
                with held.watching(lambda: context.memory):
                    try:
                        row = await read(names, text, context, save_every if session else 0) if text else None
                        if questions is None:
                            await answer(list(ask or ()), context, sampling, row, as_json)
                        else:
                            await chat(questions, context, sampling)
                            err.print(f"Held at the end: {describe(context.memory)}.", soft_wrap=True)
                        if context.unsaved:
                            await context.snapshot()
                    except StaleOwner as error:
                        raise StaleOwner(f"{error}. {await rescue(session, context, runtime.store)}") from None

        asyncio.run(talk())


async def if_any(text: AsyncIterator[str]) -> AsyncIterator[str] | None:
    """The same text, once there is some; None if it ends first: then there are only questions to what is stored."""
    first = await anext(text, None)

    async def whole() -> AsyncIterator[str]:
        yield first
        async for piece in text:
            yield piece

    return None if first is None else whole()


async def rescue(session: str, context: StreamingContext, store: Store) -> str:
    """Keep what another owner's save fenced off, under a name of its own; says which."""
    number = 2
    while store.has(f"{session} ({number})"):
        number += 1
    saved = await context.save_as(f"{session} ({number})")
    return f"What was read here is kept as session {saved.name!r}, {saved.tokens:,} tokens"


def greet(session: str, context: StreamingContext, store: Store, *, told: bool) -> None:
    """Say whether the session goes on or begins.

    Args:
        told: whether anything will be read or said; asking a session that was never told anything is a mistyped name.

    Raises:
        StoreError: it cannot be saved. ConfigError: it is new and only asked.
    """
    if told:
        store.probe()
    if context.rebuilt:
        err.print(f"Session {session!r} was rebuilt from its log, and is saved so: {context.rebuilt}", soft_wrap=True)
    if context.resumed:
        err.print(f"Session {session!r} goes on: {describe(context.memory)}.", soft_wrap=True)
        return
    if not told:
        raise not_there(session, store)
    known = similar(session, store)
    err.print(f"Session {session!r} is new{f'; stored there is {known}' if known else ''}.", soft_wrap=True)


def not_there(session: str, store: Store) -> ConfigError:
    """What to say of a question to a session that is not stored."""
    known = similar(session, store) or ", ".join(repr(one.name) for one in store.list()[:5]) or "nothing"
    return ConfigError(f"session {session!r} is not in {store.url}; stored there is {known}; expected its name, or "
                       "text to begin it with")


def similar(session: str, store: Store) -> str:
    """Names like this one that are stored, in words."""
    return ", ".join(map(repr, difflib.get_close_matches(session, [one.name for one in store.list()], n=3, cutoff=0.5)))


def _questions(stdin_taken: bool) -> Reader:
    """Where questions are typed: stdin, or the terminal itself where stdin carried the text."""
    if not stdin_taken:
        return Reader()
    try:
        return Reader("the terminal", open("/dev/tty", "rb", buffering=0))
    except OSError:
        raise ConfigError("stdin carries the text and there is no terminal to chat in; expected --ask") from None


async def pieces(names: list[str]) -> AsyncIterator[str]:
    """The text of the named files one after the other."""
    for name in names:
        if name == "-":
            async for piece in Reader().pieces():
                yield piece
        else:
            async for piece in path_text(Path(name)):
                yield piece


async def read(names: list[str], text: AsyncIterator[str], context: StreamingContext, save_every: float) -> Row:
    """Feed the text of these files while a board shows the way; its row.

    Args:
        save_every: seconds between two saves; 0: none.
    """
    before, start = context.memory.tokens, time.perf_counter()

    def look() -> None:
        memory = context.memory
        row.set(memory.tokens - before, time.perf_counter() - start, memory)
        board.tick()

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            look()

    async def keep_saving() -> None:
        while True:
            await asyncio.sleep(save_every)
            try:
                await context.snapshot()
            except StoreError as error:  # the save at the end tells whether it stays so
                err.print(f"not saved: {error}", soft_wrap=True)

    with Board(f"reading {', '.join('stdin' if name == '-' else name for name in names)}", ["memory"]) as board:
        row = board.rows[0]
        try:
            async with asyncio.TaskGroup() as group:  # a save that another owner fences off ends the reading
                beside = [group.create_task(keep_looking())]
                if save_every:
                    beside.append(group.create_task(keep_saving()))
                report = await context.feed(text)
                row.set(report.tokens, report.seconds, context.memory)
                for task in beside:
                    task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    return row


async def answer(questions: list[str], context: StreamingContext, sampling: Sampling, row: Row | None,
                 as_json: bool) -> None:
    """Answer every question from the same memory."""
    answers = []
    for question in questions:
        text = await context.ask(question, sampling=sampling)
        answers.append({"question": question, "answer": text.strip()})
        if not as_json:
            print(text.strip() if len(questions) == 1 else f"{question}\n  {text.strip()}", flush=True)
    memory = context.memory
    if as_json:
        print_json({
            "tokens_fed": row.tokens if row else 0,
            "units": mean(memory.units),
            "bytes_resident": memory.bytes_resident,
            "bytes_full_cache": memory.bytes_full_cache,
            "tok_per_s": round(row.tok_per_s, 1) if row else 0.0,
            "answers": answers,
        })


async def chat(questions: Reader, context: StreamingContext, sampling: Sampling) -> None:
    """Questions and answers in turn, kept in the memory, until the input ends."""
    prompt = "> " if stdin_is_terminal() or questions.name != "stdin" else ""
    err.print("Ask away; Ctrl-D ends.")
    while True:
        print(prompt, end="", flush=True)
        question = await questions.line()
        if question is None:
            break
        if not question.strip():
            continue
        async for token in context.generate(question, sampling=sampling):
            print(token.text, end="", flush=True)
        print(flush=True)
    if prompt:
        print(file=sys.stderr)
