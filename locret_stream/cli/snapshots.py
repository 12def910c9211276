"""`locret-stream snapshots`: what a store holds, whether it is sound, and removing it. Loads no model."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from locret_stream.cli.common import (
    DEFAULT_STORE,
    Json,
    Key,
    StoreUrl,
    err,
    in_bytes,
    out,
    print_json,
    stdin_is_terminal,
)
from locret_stream.errors import ConfigError

if TYPE_CHECKING:
    from locret_stream.snapshot import Snapshot, Store

HELP = """Look after stored sessions: list, info, verify, delete, gc, forget.

Examples:

\b
  locret-stream snapshots list
  locret-stream snapshots info alice --json
  # read every byte again
  locret-stream snapshots verify --store s3://bucket/memories
  # one snapshot; without a number all of the name
  locret-stream snapshots delete alice --generation 3
  # the session with its forks, its log and its key
  locret-stream snapshots forget alice"""

ADVICE = ("Of a damaged one: `run --session NAME --on-mismatch rebuild` reads its log again; `snapshots delete NAME "
          "--generation NUMBER` goes back to the one before.")
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


@app.command("verify", help="Read every byte that the snapshots need; exit status 1 if one is damaged.")
def verify(name: Annotated[str | None, typer.Argument(help="Of a session or a fork; all without.")] = None,
           store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    found = open_store(store, key).verify(name)
    bad = [one for one in found if one.problem and not one.locked]
    locked = [one for one in found if one.locked]
    if as_json:
        print_json({"snapshots": [_plain(one) for one in found], "sound": len(found) - len(bad) - len(locked)})
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
    if bad or not found:
        raise typer.Exit(1)


@app.command("delete", help="Delete one snapshot, or all of a name; forks keep theirs.")
def delete(name: Name, generation: Annotated[int | None, typer.Option(help="Number of the one to delete.")] = None,
           yes: Yes = False, store: StoreUrl = DEFAULT_STORE, key: Key = None, as_json: Json = False) -> None:
    opened = open_store(store, key)
    if generation is None:
        opened.info(name)  # raises where there is nothing of that name
        confirm(f"Delete all snapshots of {name!r} in {opened.url}?", yes)
    gone = opened.delete(name, generation)
    _say({"deleted": gone}, f"deleted {len(gone)} of {_line(name)}", as_json)


@app.command("gc", help="Remove what no snapshot needs: rests of saves that died.")
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
    if as_json:
        print_json({"snapshots": [_plain(one) for one in found]})
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
        out.print(table)
    for one in found:
        if one.problem:
            err.print(f"{_line(one.name)}, number {one.generation}: {one.problem}", soft_wrap=True)
    if any(one.problem and not one.locked for one in found):
        err.print(ADVICE, soft_wrap=True)
        raise typer.Exit(1)


def _line(name: str) -> str:
    """A name as it fits on a line: control characters written out."""
    return name if name.isprintable() else ascii(name)[1:-1]
