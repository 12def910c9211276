"""`locret-stream snapshots`: lists what a store has, checks it and deletes it.

Loads a model only to replay logs; `show` needs the tokenizer, to write ids as text.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from locret_stream.cli.loading import make_runtime
from locret_stream.cli.options import (
    DEFAULT_STORE,
    Json,
    Key,
    Model,
    RuntimeOptions,
    StoreUrl,
    grouped,
    on_command_line,
)
from locret_stream.cli.output import err, in_bytes, out, print_json
from locret_stream.cli.text_input import stdin_is_terminal
from locret_stream.errors import ConfigError, SnapshotError, UnknownPolicy

if TYPE_CHECKING:
    from locret_stream.runtime import Runtime
    from locret_stream.snapshot import Snapshot, Store

HELP = """Manage stored sessions: list, info, show, verify, delete, gc, forget.

Examples:

\b
  locret-stream snapshots list
  locret-stream snapshots info alice --json
  # the text that its memory keeps
  locret-stream snapshots show alice
  # read every byte again
  locret-stream snapshots verify --store s3://bucket/memories
  # and compare every session with a replay of its log, each with its own policy, budget and chunk size
  locret-stream snapshots verify --replay --model ./llama --heads ./heads
  # one snapshot; without a number, all snapshots of the name
  locret-stream snapshots delete alice --generation 3
  # the session with its forks, its log and its key
  locret-stream snapshots forget alice"""

ADVICE = ("For a damaged one: `run --session NAME --on-mismatch rebuild` reads its log again; `snapshots delete NAME "
          "--generation NUMBER` goes back to the previous one.")
WIDE = 10_000  # columns, so that no name is cut: other verbs expect whole names
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Name = Annotated[str, typer.Argument(help="Name of a session or a fork.")]
app = typer.Typer(help=HELP, rich_markup_mode="rich", no_args_is_help=True)


def open_store(url: str, key: str | None) -> Store:
    """The store at this place. Opening it writes nothing."""
    from locret_stream.snapshot import Store

    return Store(url, key=key)


@app.command("list", help="The newest snapshot of every session and fork.")
def show_list(store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    _show(open_store(store, key).list(), as_json, f"nothing is stored in {store}")


@app.command("info", help="All snapshots of one session or fork, oldest first.")
def info(name: Name, store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    _show(open_store(store, key).info(name), as_json, "")


@app.command("show", help="The text that a session's memory keeps, and how much of it; needs the tokenizer.")
def show(name: Name, generation: Annotated[int | None, typer.Option(help="Number of the snapshot.")] = None,
         model: Model = "bundled", store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    from locret_stream.named_models import model_path
    from locret_stream.runtime.loading import load_tokenizer
    from locret_stream.snapshot.transcript import read_transcript
    from locret_stream.text import TextCodec

    codec = TextCodec(load_tokenizer(model_path(model)))
    transcript = read_transcript(open_store(store, key), name, generation, tokenizer=codec.fingerprints)
    passages = transcript.kept(lambda ids: codec.decode(ids, skip_special=False))
    if as_json:
        print_json({"name": name, "generation": transcript.generation, "tokens": transcript.tokens,
                    "passages": msgspec.to_builtins(passages)})
        return
    for passage in passages:
        style = "bold" if passage.share >= 2 / 3 else "" if passage.share >= 1 / 3 else "dim"
        out.print(f"[{passage.start:,} to {passage.end:,}, {passage.share:.0%}]", style="cyan", soft_wrap=True)
        out.print(Text(_escaped(passage.text, "\n\t"), style=style), soft_wrap=True)


@app.command("verify", help=(
    "Read every byte that the snapshots need; exit status 1 if one is damaged, or if there is no such folder."))
@grouped
def verify(command: typer.Context,
           name: Annotated[str | None, typer.Argument(help="Name of a session or a fork; without it, all.")] = None,
           store: StoreUrl = DEFAULT_STORE, key: Key = None,
           replay: Annotated[bool, typer.Option("--replay", help=(
               "Also read each log again and compare the memory bit for bit: takes as long as reading did; needs the "
               "model and heads. Policy, budget, chunk size and bits are each session's, unless given; so is whether "
               "heads share their layer's budget."))] = False,
           *, options: RuntimeOptions, as_json: Json = False) -> None:
    opened = open_store(store, key)
    verified = opened.verify(name)
    nowhere = "://" not in store and not Path(store).expanduser().is_dir()  # a mistyped --store
    damaged = [snapshot for snapshot in verified if snapshot.problem and not snapshot.locked]
    locked = [snapshot for snapshot in verified if snapshot.locked]
    sound = len(verified) - len(damaged) - len(locked)
    if replay and verified and not as_json:
        err.print("replaying the logs", soft_wrap=True)
    unreadable = {snapshot.name for snapshot in (*damaged, *locked)}
    replays = _replays(command, options, opened, sorted({snapshot.name for snapshot in verified} - unreadable)
                       ) if replay else {}
    if as_json:
        print_json({"snapshots": msgspec.to_builtins(verified), "sound": sound,
                    **({"replays": replays} if replay else {})})
    elif not verified:
        err.print(f"nothing is stored in {store}" + (", which is no folder here" if nowhere else ""), soft_wrap=True)
    else:
        for snapshot in damaged:
            out.print(f"{_escaped(snapshot.name)} {snapshot.generation}: {snapshot.problem}", soft_wrap=True)
        unchecked = f", {len(locked)} not checked for want of their key" if locked else ""
        out.print(f"{sound} of {len(verified)} snapshots are sound{unchecked}", soft_wrap=True)
        if damaged:
            err.print(ADVICE, soft_wrap=True)
        for session, problem in replays.items():
            out.print(f"{_escaped(session)}: {problem or 'agrees with its log'}", soft_wrap=True)
    if damaged or any(replays.values()) or nowhere:
        raise typer.Exit(1)


def _replays(command: typer.Context, options: RuntimeOptions, store: Store, names: list[str]) -> dict[str, str]:
    """The problem of each session against its log; "" where they agree. The model is loaded once for all sessions that
    were read with the same settings."""
    from locret_stream.runtime.as_saved import settings_of

    given = {word.removeprefix("--").replace("-", "_")
             for word in on_command_line(command, (
                 "policy", "budget", "chunk_size", "store_bits", "exact", "exact_units"))}
    if "policy" in given:
        given.add("knobs")
    if "exact_units" in given:
        given.add("exact")
    alike = list[tuple[dict[str, Any], list[str]]]()
    for name in names:
        settings = settings_of(store.identity(name))
        if (budget := settings.get("budget")) is not None:  # it says whether heads share it, also where units are given
            by_head = budget.by_head or options.by_head
            settings["budget"] = msgspec.structs.replace(budget, by_head=by_head)
            settings["by_head"] = "budget" in given and by_head
        settings = {key: value for key, value in settings.items() if key not in given}
        for known, those in alike:
            if known == settings:
                those.append(name)
                break
        else:
            alike.append((settings, [name]))
    problems = dict[str, str]()
    for settings, those in alike:
        try:
            runtime = make_runtime(options, store=store, **settings)
        except UnknownPolicy as error:  # of a newer version, or the user's own: the other sessions are replayed
            problems |= dict.fromkeys(those, f"cannot be replayed: {error}")
        else:
            problems |= _replayed(runtime, those)
    return dict(sorted(problems.items()))


def _replayed(runtime: Runtime, names: list[str]) -> dict[str, str]:
    async def run() -> dict[str, str]:
        problems = {}
        async with aclosing(runtime):
            for name in names:
                try:
                    differs = (await runtime.replay(name)).differs
                except SnapshotError as error:
                    problems[name] = f"cannot be replayed: {error}"
                else:
                    problems[name] = f"differs from its log in {', '.join(differs)}; it was read on another machine, " \
                        "or is damaged: `run --on-mismatch rebuild` reads the log again" if differs else ""
        return problems

    return asyncio.run(run())


@app.command("delete", help="Delete one snapshot, or all of a name; its forks stay.")
def delete(name: Name, generation: Annotated[int | None, typer.Option(help="Number of the snapshot.")] = None,
           yes: Yes = False, store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    opened = open_store(store, key)
    if generation is None:
        opened.info(name)  # raises where nothing of that name is stored
        confirm(f"Delete all snapshots of {name!r} in {opened.url}?", yes)
    deleted = opened.delete(name, generation)
    _report({"deleted": deleted}, f"deleted {len(deleted)} of {_escaped(name)}", as_json)


@app.command("gc", help="Remove what no snapshot needs and what crashed saves left; rewrite lost names of forks.")
def gc(name: Annotated[str | None, typer.Argument(help="Name of a session; without it, all.")] = None,
       store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    collected = open_store(store, key).gc(name)
    _report(msgspec.to_builtins(collected), f"removed {len(collected.removed)} files, {in_bytes(collected.bytes)}",
            as_json)


@app.command("forget", help="Remove a session whole: snapshots, forks, log, key.")
def forget(name: Name, yes: Yes = False, store: StoreUrl = DEFAULT_STORE, key: Key = None,
           as_json: Json = False) -> None:
    opened = open_store(store, key)
    if as_json and not yes:
        raise ConfigError("forgetting cannot be undone; expected --yes beside --json")
    confirm(f"Forget {name!r} in {opened.url}, with its forks, for ever?", yes)
    removed = opened.forget(name)
    _report({"removed": removed}, f"removed {len(removed)} files of {_escaped(name)}", as_json)


def confirm(question: str, yes: bool) -> None:
    """Ask, unless --yes answered beforehand.

    Raises:
        ConfigError: stdin is no terminal. Abort: the answer is not yes. KeyboardInterrupt: it is Ctrl-C.
    """
    if not yes:
        if not stdin_is_terminal():
            raise ConfigError(f"{question} There is no terminal to ask in; expected --yes")
        err.print(f"{question} [y/N] ", end="", soft_wrap=True)
        try:
            answer = input()
        except EOFError:
            err.print()
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise typer.Abort


def _report(value: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        out.print(text, soft_wrap=True)


def _show(snapshots: Sequence[Snapshot], as_json: bool, nothing: str) -> None:
    """Print the snapshots, or `nothing` where there are none. Raises typer.Exit, status 1: one is damaged."""
    damaged = any(snapshot.problem and not snapshot.locked for snapshot in snapshots)
    if as_json:
        print_json({"snapshots": msgspec.to_builtins(snapshots)})
        if damaged:
            raise typer.Exit(1)
        return
    if not snapshots:
        err.print(nothing, soft_wrap=True)
        return
    table = Table(pad_edge=False)
    for heading in ("name", "number", "saved", "tokens", "units", "size", "log", "encrypted"):
        table.add_column(heading, justify="right" if heading in ("number", "tokens", "units", "size") else "left")
    for snapshot in snapshots:
        if snapshot.problem:
            continue
        saved = datetime.datetime.fromtimestamp(snapshot.created).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(_escaped(snapshot.name), str(snapshot.generation), saved, f"{snapshot.tokens:,}",
                      f"{snapshot.units:,}", in_bytes(snapshot.bytes), "yes" if snapshot.log else "no",
                      "yes" if snapshot.encrypted else "no")
    if table.row_count:
        Console(file=out.file, width=WIDE, highlight=False, markup=False, emoji=False).print(table)
    for snapshot in snapshots:
        if snapshot.problem:
            err.print(f"{_escaped(snapshot.name)}, number {snapshot.generation}: {snapshot.problem}", soft_wrap=True)
        elif snapshot.rounded:
            out.print(f"{_escaped(snapshot.name)}, number {snapshot.generation}: its exact units were saved as codes, "
                      "and are rounded where it is opened", soft_wrap=True)
    if damaged:
        err.print(ADVICE, soft_wrap=True)
        raise typer.Exit(1)


def _escaped(text: str, allowed: str = "") -> str:
    """A text whose control characters are escaped, as anybody may have written it: all but those allowed."""
    return "".join(char if char.isprintable() or char in allowed else ascii(char)[1:-1] for char in text)
