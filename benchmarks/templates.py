"""Every chat template of a collection × what sessions do: a server and a LocretChatModel of each, and a table of cells.

    python benchmarks/templates.py --collection templates.json --json cells.json --markdown table.md

A collection is a JSON object of names and Jinja sources, or a folder of `*.jinja`; none comes along. Each template is
put on the bundled tokenizer, with its own marks as added tokens, over a tiny random Llama. A script writes what the
model says, in the form that the template shows (`template_lab/forms.py`); HTTP, template, memory, snapshots and store
are the real ones. What a cell is judged by: the request is answered; the answer is what the script said, its thought
apart and its calls equal; the model was shown all that was said; what is new was read, and no more than 64 tokens
beside it.

  chat, responses, ingest, told, tools, thoughts, roles, finish   one server
  langchain, rendering   a LocretChatModel. rendering: what the model is shown of 23 conversations, and behind an answer
                         and a call of its own, equals what `apply_chat_template` gives, wherever both render and that
                         leaves nothing out
  restart, replay        a new process over the store. replay: what is held is what a new runtime makes of the log
  next day               another process over the store, with a clock that is a day ahead

Not asked ("-") is what the models of a template never do (thoughts, two calls at once), and what is refused with a
template with which transformers itself shows no plain chat. With --expect the exit status is 1 unless at most 2 % is
refused and nothing else fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

GROUPS = ("chat", "responses", "ingest", "told", "tools", "thoughts", "roles", "finish", "langchain", "rendering",
          "restart", "next day", "replay")
LATER = {"restart": 0, "next day": 1}  # groups of processes of their own, and how many days ahead their clocks are
SHARED = Path("/dev/shm")
NO_CHAT = "no plain chat"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def started(cells: dict[str, str], opened: AbstractContextManager[Any], behaviour: str) -> Iterator[Any]:
    """What is opened; if it does not open, that is the verdict of `behaviour` and None comes."""
    from template_lab.verdicts import judged
    with judged(cells, behaviour):
        found = opened.__enter__()
    if cells[behaviour] != "ok":
        yield None
        return
    try:
        yield found
    finally:
        opened.__exit__(None, None, None)


def first_process(name: str, template: str, folder: Path, groups: tuple[str, ...], noted: dict[str, str]
                  ) -> dict[str, str]:
    """The cells of one template, and what it leaves for other processes, in `folder`."""
    from template_lab import chains, chats, going_on, rendering, scripted, tool_loops
    cells: dict[str, str] = {}
    subject = scripted.Subject(name, template)
    steps: dict[str, Callable[..., None]] = {
        "chat": chats.plain, "responses": chats.by_id, "ingest": chats.ingested, "told": chats.told,
        "tools": tool_loops.loops, "thoughts": chats.thoughts, "roles": chats.systems, "finish": tool_loops.cut}
    left: dict[str, Any] = {}
    thread: dict[str, Any] = {}
    later = any(group in groups for group in (*LATER, "replay"))
    with started(cells, subject.served(folder / "server"), "start.server") as served:
        if served is not None:
            for group, step in steps.items():
                if group in groups:
                    step(subject, served, cells)
            left = going_on.leave(subject, served) if later else {}
    with started(cells, subject.langchain(folder / "chain"), "start.langchain") as model:
        if model is not None:
            if "langchain" in groups:
                chains.chains(subject, model, cells)
            if "rendering" in groups:
                for_run = model.model_copy(update={"save": "run"})
                rendering.renderings(subject, for_run, cells, noted)
                rendering.own_answers(subject, for_run, cells)
            thread = going_on.leave_thread(subject, model) if later else {}
    going_on.write_left(folder, subject, left, thread)
    return cells


def later_process(folders: Path, when: str, groups: tuple[str, ...]) -> None:
    """The cells of one process that goes on with what the first one left, on stdout."""
    from template_lab import going_on, scripted
    found: dict[str, dict[str, str]] = {}
    with scripted.later(LATER[when]) if LATER[when] else nullcontext():
        for folder in sorted(folders.iterdir()):
            began = time.perf_counter()
            kept = json.loads((folder / going_on.LEFT).read_text())
            subject = scripted.Subject(kept["name"], kept["template"])
            cells = found[kept["name"]] = dict[str, str]()
            if kept["left"]:
                with started(cells, subject.served(folder / "server"), f"{when}.server") as served:
                    if served is not None and when == "restart" and "replay" in groups:
                        going_on.replayed(served, cells)
                    if served is not None and when in groups:
                        going_on.go_on(subject, served, kept["left"], cells, when)
            if kept["thread"] and when in groups:
                with started(cells, subject.langchain(folder / "chain"), f"{when}.model") as model:
                    if model is not None:
                        going_on.go_on_with_thread(subject, model, kept["thread"], cells, when)
            say(f"{when}: {kept['name']}: {brief(cells)}, {time.perf_counter() - began:.1f} s")
    print(json.dumps(found))


def brief(cells: Mapping[str, str]) -> str:
    from template_lab.verdicts import OK, asked
    every = asked(cells)
    return f"{sum(cell == OK for cell in every.values())} of {len(every)}"


def measure(templates: Mapping[str, str], groups: tuple[str, ...]) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """The cells of each template, and differences of renderings that count for nothing."""
    table: dict[str, dict[str, str]] = {}
    noted: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="locret-templates-", dir=SHARED if SHARED.is_dir() else None) as root:
        folders = Path(root) / "restart"
        for number, (name, template) in enumerate(templates.items()):
            began, folder, notes = time.perf_counter(), folders / f"{number:04}", {}
            folder.mkdir(parents=True)
            table[name] = first_process(name, template, folder, groups, notes)
            noted |= {name: notes} if notes else {}
            say(f"{number + 1} of {len(templates)}: {name}: {brief(table[name])}, {time.perf_counter() - began:.1f} s")
        if "next day" in groups:
            shutil.copytree(folders, Path(root) / "next day")
        for when in LATER:
            if when in groups or (when == "restart" and "replay" in groups):
                done = subprocess.run([sys.executable, __file__, "--go-on", str(Path(root) / when), "--when", when,
                                       "--behaviour", ",".join(groups)], stdout=subprocess.PIPE, text=True, check=True)
                for name, cells in json.loads(done.stdout.splitlines()[-1]).items():
                    table[name] |= cells
    fill_up(table)
    for name, template in templates.items():  # what no engine would answer is not asked
        if why := no_chat(template):
            noted.setdefault(name, {})[NO_CHAT] = why
            table[name] |= {behaviour: "-" for behaviour, cell in table[name].items() if cell.startswith("refused")}
    return table, noted


def no_chat(template: str) -> str:
    from template_lab.collection import tokenizer_of
    from template_lab.forms import why_no_chat
    return why_no_chat(tokenizer_of(template))


def fill_up(table: dict[str, dict[str, str]]) -> None:
    """Of a template with which nothing starts, every behaviour that is asked of others fails for that reason."""
    from template_lab.verdicts import NONE, OK
    behaviours = dict.fromkeys(behaviour for cells in table.values() for behaviour in cells)
    for cells in table.values():
        why = {part: cells.pop(f"start.{part}", OK) for part in ("server", "langchain")}
        for group in LATER:  # a start that failed is told by what came of it
            why |= {f"{group}.{part}": cells.pop(f"{group}.{part}", OK) for part in ("server", "model")}
        for behaviour in behaviours:
            group = behaviour.partition(".")[0]
            if group == "start" or behaviour in [f"{when}.{part}" for when in LATER for part in ("server", "model")]:
                continue
            chain = group in ("langchain", "rendering") or behaviour.endswith(".langchain")
            first = why["langchain" if chain else "server"]
            second = why.get(f"{group}.{'model' if chain else 'server'}", OK)
            reason = next((each for each in (first, second) if each != OK), NONE)
            if behaviour not in cells:
                optional = group in ("thoughts", "replay") or behaviour.endswith((".thought", ".thoughts"))
                cells[behaviour] = NONE if optional and reason != NONE else reason
        in_order = sorted(cells, key=lambda each: GROUPS.index(each.partition(".")[0]))
        cells |= {behaviour: cells.pop(behaviour) for behaviour in in_order}


# -- what is shown ------------------------------------------------------------------------------------------------


def shorten(cell: str) -> str:
    """A reason without what is one template's own: quoted texts, numbers."""
    text = re.sub(r"\d+", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", cell))
    return text[:110]


def markdown(table: Mapping[str, Mapping[str, str]], summed: Mapping[str, Any], noted: Mapping[str, Any]) -> str:
    from template_lab.verdicts import KINDS, OK, asked, kind_of, reasons
    found = {behaviour.partition(".")[0] for cells in table.values() for behaviour in cells}
    groups = [group for group in GROUPS if group in found]
    lines = ["# Chat templates × behaviours", "", closing(summed), "",
             "| behaviour | asked | ok | " + " | ".join(KINDS) + " |", "|---|---|---|" + "---|" * len(KINDS)]
    for behaviour, counts in summed["by_behaviour"].items():
        lines.append(f"| {behaviour} | {sum(counts.values())} | {counts.get(OK, 0)} | "
                     + " | ".join(str(counts.get(kind, "")) for kind in KINDS) + " |")
    lines += ["", "| template | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for name, cells in table.items():
        row = []
        for group in groups:
            some = [kind_of(cell) for behaviour, cell in asked(cells).items() if behaviour.startswith(f"{group}.")]
            bad = {kind: some.count(kind) for kind in KINDS if kind in some}
            row.append(("ok" if not bad else ", ".join(f"{kind} {count}" for kind, count in bad.items())
                        + f" of {len(some)}") if some else "")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines += ["", "| what failed | cells | templates |", "|---|---|---|"]
    for why, count, names in reasons(table, shorten):
        lines.append(f"| {why.replace('|', chr(92) + '|')} | {count} | {', '.join(names[:4])}"
                     f"{f' and {len(names) - 4} more' if len(names) > 4 else ''} |")
    if unshown := {name: notes[NO_CHAT] for name, notes in noted.items() if NO_CHAT in notes}:
        lines += ["", "Transformers show no plain chat with these, so what is refused is not counted:", "",
                  *(f"- {name}: {why}" for name, why in unshown.items())]
    noted = {name: {each: why for each, why in notes.items() if each != NO_CHAT} for name, notes in noted.items()}
    if any(noted.values()):
        lines += ["", "Renderings that differ from transformers' and count for nothing (white space is fed as it was "
                  "given; where transformers leave something out nothing is compared):", ""]
        grouped: dict[str, list[str]] = {}
        for name, notes in noted.items():
            for conversation, why in notes.items():
                grouped.setdefault(f"{conversation}: {shorten(why)}", []).append(name)
        lines += [f"- {why}: {len(names)} templates" for why, names in sorted(
            grouped.items(), key=lambda each: -len(each[1]))]
    return "\n".join(lines) + "\n"


def closing(summed: Mapping[str, Any]) -> str:
    """The last line: what came of all cells."""
    from template_lab.verdicts import KINDS, OK
    told = ", ".join(f"{kind} {summed[kind]} ({summed['percent'][kind]} %)" for kind in (OK, *KINDS))
    return f"{summed['templates']} templates × {summed['behaviours']} behaviours, {summed['cells']} cells: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, help="a JSON file of names and sources, or a folder of *.jinja")
    parser.add_argument("--only", default="", metavar="NAME-PART", help="templates whose name contains this")
    parser.add_argument("--behaviour", default=",".join(GROUPS), metavar="GROUP,...", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write cells and totals there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, in place of stdout")
    parser.add_argument("--keep", metavar="NAME", help="keep totals and failures in results/NAME.json")
    parser.add_argument("--expect", action="store_true", help="exit 1 unless all is ok but 2 %% that may be refused")
    parser.add_argument("--go-on", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--when", help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups = tuple(options.behaviour.split(","))
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--behaviour has {', '.join(sorted(unknown))}; expected some of {', '.join(GROUPS)}")
    if options.go_on:
        return later_process(options.go_on, options.when, groups)
    if not options.collection:
        parser.error("expected --collection FILE.json, or a folder of *.jinja")
    from template_lab.collection import read_collection
    try:
        found = read_collection(options.collection)
    except (OSError, ValueError) as error:
        parser.error(f"--collection: {error}")
    templates = {name: source for name, source in found.items() if options.only in name}
    if not templates:
        parser.error(f"--only is {options.only!r}; expected a part of one of the {len(found)} names")
    from template_lab.verdicts import OK, as_expected, asked, totals
    began = time.perf_counter()
    table, noted = measure(templates, groups)
    summed = totals(table) | {"seconds": round(time.perf_counter() - began, 1)}
    tables = markdown(table, summed, noted)
    if options.markdown:
        options.markdown.write_text(tables)
    elif not options.keep:
        print(tables)
    if options.json:
        options.json.write_text(json.dumps({"totals": summed, "cells": table, "noted": noted}, indent=1,
                                           ensure_ascii=False) + "\n")
    if options.keep:
        from record import record
        record(options.keep, summed | {"failures": {
            name: bad for name, cells in table.items()
            if (bad := {behaviour: cell for behaviour, cell in asked(cells).items() if cell != OK})}}, keep=True)
    say(closing(summed))
    if options.expect and not as_expected(summed):
        sys.exit(1)


if __name__ == "__main__":
    import torch
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder of stores is removed
    main()
