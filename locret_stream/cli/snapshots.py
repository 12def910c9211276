"""`locret-stream snapshots`: what a store holds, whether it is sound, and removing it.

Loads a model only to replay logs; `show` needs the tokenizer, to write ids as text.
"""

from __future__ import annotations

import asyncio
import datetime
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from locret_stream.cli.common import (
    DEFAULT_STORE,
    Chunk,
    Device,
    Dtype,
    Heads,
    Json,
    Key,
    Model,
    Policy,
    StoreUrl,
    Units,
    err,
    in_bytes,
    make_runtime,
    out,
    print_json,
    stdin_is_terminal,
)
from locret_stream.errors import ConfigError, SnapshotError

if TYPE_CHECKING:
    from locret_stream.runtime import Runtime
    from locret_stream.snapshot import Snapshot, Store

HELP = """Look after stored sessions: list, info, show, verify, delete, gc, forget.

Examples:

\b
  locret-stream snapshots list
  locret-stream snapshots info alice --json
  # what its memory holds, as text
  locret-stream snapshots show alice
  # read every byte again
  locret-stream snapshots verify --store s3://bucket/memories
  # and that each session holds what its log gives
  locret-stream snapshots verify --replay --model ./llama --heads ./heads
  # one snapshot; without a number all of the name
  locret-stream snapshots delete alice --generation 3
  # the session with its forks, its log and its key
  locret-stream snapshots forget alice"""

ADVICE = ("Of a damaged one: `run --session NAME --on-mismatch rebuild` reads its log again; `snapshots delete NAME "
          "--generation NUMBER` goes back to the one before.")
WIDE = 10_000  # columns: a name is never cut, as it is what other verbs are given
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Name = Annotated[str, typer.Argument(help="Of a session or a fork.")]
app = typer.Typer(help=HELP, rich_markup_mode="rich", no_args_is_help=True)


def open_store(url: str, key: str | None) -> Store:
    """The store; looking into it changes nothing."""
    from locret_stream.snapshot import Store

    return Store(url, key=key)


@app.command("list", help="The newest snapshot of every session and fork.")
def show_list(store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    _show(open_store(store, key).list(), as_json, f"nothing is stored in {store}")


@app.command("info", help="All snapshots of one session or fork, oldest first.")
def info(name: Name, store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    _show(open_store(store, key).info(name), as_json, "")


@app.command("show", help="What a session's memory holds, as text, and how much of it is kept; needs the tokenizer.")
def show(name: Name, generation: Annotated[int | None, typer.Option(help="Number of the snapshot.")] = None,
         model: Model = "bundled", store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    from locret_stream.runtime.loading import BUNDLED, load_tokenizer
    from locret_stream.snapshot.transcript import read_transcript
    from locret_stream.text import TextCodec

    codec = TextCodec(load_tokenizer(BUNDLED if model == "bundled" else model))
    found = read_transcript(open_store(store, key), name, generation, tokenizer=codec.fingerprint)
    passages = found.kept(lambda ids: codec.decode(ids, skip_special=False))
    if as_json:
        print_json({"name": name, "generation": found.generation, "tokens": found.tokens,
                    "passages": [_plain(one) for one in passages]})
        return
    for one in passages:
        shade = "bold" if one.share >= 2 / 3 else "" if one.share >= 1 / 3 else "dim"
        out.print(f"[{one.start:,} to {one.end:,}, {one.share:.0%}]", style="cyan", soft_wrap=True)
        out.print(Text(_safe(one.text), style=shade), soft_wrap=True)


@app.command("verify", help="Read every byte that the snapshots need; exit status 1 if one is damaged.")
def verify(name: Annotated[str | None, typer.Argument(help="Of a session or a fork; all without.")] = None,
           store: StoreUrl = DEFAULT_STORE, key: Key = None,
           replay: Annotated[bool, typer.Option("--replay", help=(
               "Also feed each log again and compare what is held, bit for bit: takes as long as reading did, and the "
               "model, heads, policy and budget that the sessions were read with."))] = False,
           model: Model = "bundled", heads: Heads = None, policy: Policy = "locret", budget: Units = None,
           chunk_size: Chunk = None, device: Device = None, dtype: Dtype = "auto", as_json: Json = False) -> None:
    opened = open_store(store, key)
    found = opened.verify(name)
    bad = [one for one in found if one.problem and not one.locked]
    locked = [one for one in found if one.locked]
    if replay and found and not as_json:
        err.print("replaying the logs", soft_wrap=True)
    broken = {one.name for one in (*bad, *locked)}
    replays = _replays(make_runtime(model, heads, policy, budget, chunk_size, device=device, dtype=dtype, store=opened),
                       sorted({one.name for one in found} - broken)) if replay and found else {}
    other = [name for name, said in replays.items() if said]
    if as_json:
        print_json({"snapshots": [_plain(one) for one in found], "sound": len(found) - len(bad) - len(locked),
                    **({"replays": replays} if replay else {})})
    elif not found:
        err.print(f"nothing is stored in {store}", soft_wrap=True)
    else:
        for one in bad:
            out.print(f"{_line(one.name)} {one.generation}: {one.problem}", soft_wrap=True)
        unchecked = f", {len(locked)} not checked for want of their key" if locked else ""
        sound = len(found) - len(bad) - len(locked)
        out.print(f"{sound} of {len(found)} snapshots are sound{unchecked}", soft_wrap=True)
        if bad:
            err.print(ADVICE, soft_wrap=True)
        for name, said in replays.items():
            out.print(f"{_line(name)}: {said or 'holds what its log gives'}", soft_wrap=True)
    if bad or other or not found:
        raise typer.Exit(1)


def _replays(runtime: Runtime, names: list[str]) -> dict[str, str]:
    """For each session what is wrong with it against its log, "" for nothing."""
    async def run() -> dict[str, str]:
        said = {}
        async with aclosing(runtime):
            for name in names:
                try:
                    differs = (await runtime.replay(name)).differs
                except SnapshotError as error:
                    said[name] = f"cannot be replayed: {error}"
                else:
                    said[name] = f"holds other {', '.join(differs)} than its log gives; it was read on another " \
                        "machine, or is damaged: `run --on-mismatch rebuild` reads the log again" if differs else ""
        return said

    return asyncio.run(run())


@app.command("delete", help="Delete one snapshot, or all of a name; forks keep theirs.")
def delete(name: Name, generation: Annotated[int | None, typer.Option(help="Number of the one to delete.")] = None,
           yes: Yes = False, store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    opened = open_store(store, key)
    if generation is None:
        opened.info(name)  # raises where there is nothing of that name
        confirm(f"Delete all snapshots of {name!r} in {opened.url}?", yes)
    gone = opened.delete(name, generation)
    _say({"deleted": gone}, f"deleted {len(gone)} of {_line(name)}", as_json)


@app.command("gc", help="Remove what no snapshot needs, rests of saves that died; write lost names of forks anew.")
def gc(name: Annotated[str | None, typer.Argument(help="Of a session; all without.")] = None,
       store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    done = open_store(store, key).gc(name)
    _say(_plain(done), f"removed {len(done.removed)} files, {in_bytes(done.bytes)}", as_json)


@app.command("forget", help="Remove a session whole: snapshots, forks, log, key.")
def forget(name: Name, yes: Yes = False, store: StoreUrl = DEFAULT_STORE, key: Key = None,
           as_json: Json = False) -> None:
    opened = open_store(store, key)
    if as_json and not yes:
        raise ConfigError("forgetting cannot be undone; expected --yes beside --json")
    confirm(f"Forget {name!r} in {opened.url}, with its forks, for ever?", yes)
    gone = opened.forget(name)
    _say({"removed": gone}, f"removed {len(gone)} files of {_line(name)}", as_json)


def confirm(question: str, yes: bool) -> None:
    """Ask, unless that was answered beforehand.

    Raises:
        ConfigError: there is nobody to ask.
    """
    if not yes:
        if not stdin_is_terminal():
            raise ConfigError(f"{question} Nobody is there to say so; expected --yes")
        typer.confirm(question, abort=True, err=True)


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def _say(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        out.print(text, soft_wrap=True)


def _show(found: list[Snapshot], as_json: bool, nothing: str) -> None:
    """Raises typer.Exit, status 1: one is damaged."""
    damaged = any(one.problem and not one.locked for one in found)
    if as_json:
        print_json({"snapshots": [_plain(one) for one in found]})
        if damaged:
            raise typer.Exit(1)
        return
    if not found:
        err.print(nothing, soft_wrap=True)
        return
    table = Table(pad_edge=False)
    for heading in ("name", "number", "saved", "tokens", "units", "size", "log", "encrypted"):
        table.add_column(heading, justify="right" if heading in ("number", "tokens", "units", "size") else "left")
    for one in found:
        if one.problem:
            continue
        saved = datetime.datetime.fromtimestamp(one.created).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(_line(one.name), str(one.generation), saved, f"{one.tokens:,}", f"{one.units:,}",
                      in_bytes(one.bytes), "yes" if one.log else "no", "yes" if one.encrypted else "no")
    if table.row_count:
        Console(file=out.file, width=WIDE, highlight=False, markup=False, emoji=False).print(table)
    for one in found:
        if one.problem:
            err.print(f"{_line(one.name)}, number {one.generation}: {one.problem}", soft_wrap=True)
    if damaged:
        err.print(ADVICE, soft_wrap=True)
        raise typer.Exit(1)


def _safe(text: str) -> str:
    """A text whose control characters are written out: it may have been anybody's."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def _line(name: str) -> str:
    """A name as it fits on a line: control characters written out."""
    return name if name.isprintable() else ascii(name)[1:-1]
