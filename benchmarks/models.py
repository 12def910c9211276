"""Which model classes of transformers are served: a verdict of each, and a final `N of M`.

    python benchmarks/models.py causal qwen3 falcon      # two types, in seconds
    python benchmarks/models.py all --out /tmp/models    # every class: about 10 minutes on one thread
    python benchmarks/models.py --list                   # what counts, and why the others do not

Of every class a tiny random model (2 to 6 layers of width 64, `model_lab/`) is saved as a folder with a tokenizer, and
loaded by `Runtime.from_pretrained`, each in a process of its own. Then

  fits     budget 256: 60 random ids in pieces; logits behind each piece, and 8 greedy tokens, against the model that
           transformers load from the same folder
  evicts   budget 48, chunks of 16, the policies keydiff and streaming_llm: 200 ids and 8 tokens; logits stay finite,
           and no layer ever keeps more than its budget

kinds:
  causal      the decoders that AutoModelForCausalLM lists
  multimodal  what AutoModelForImageTextToText lists, for its text
  variants    other published forms of a class, which are not counted
  all         these three

verdicts:
{verdicts}

The table of docs/models.md is made by

    python benchmarks/models.py all --keep models --write docs/models.md
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import torch
import transformers
from model_lab import counted, page, shapes
from model_lab.apart import Died, apart
from model_lab.measure import EQUAL, RAW, VERDICTS, Case, measure
from record import record
from rich.console import Console
from rich.table import Table

KINDS = (*counted.KINDS, "variants")
console = Console(stderr=True, width=130, highlight=False)


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def cases(kind: str, types: Sequence[str] = ()) -> list[Case]:
    """What is measured of that kind: everything, or what has one of these types or names."""
    found = [Case(kind, name, model_type, changes) for name, (model_type, changes) in shapes.VARIANTS.items()
             ] if kind == "variants" else [Case(kind, *each, {}) for each in counted.counted(kind)]
    return [case for case in found if not types or case.model_type in types or case.name in types]


def run(case: Case, *, quiet: bool) -> dict[str, Any]:
    """The verdict of a case, from a process of its own."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="locret-models-") as folder:
        try:
            found = apart(lambda: measure(case, Path(folder)), quiet=quiet)
        except Died as died:
            found = {"verdict": RAW, "says": str(died)}
    return {"name": case.name, "type": case.model_type, "class": case.name, **found,
            "s": round(time.perf_counter() - began, 1)}


def warm_up(loud: bool) -> None:
    """Import and make what every process needs, before they fork from this one."""
    if not loud:
        logging.disable(logging.WARNING)
        transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if importlib.util.find_spec("torchao"):  # transformers look for it when they load a model
        importlib.import_module("torchao")
    from model_lab.tiny import build
    build("llama").generate(input_ids=torch.arange(3, 7)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)


def summed(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"served": sum(row["verdict"] == EQUAL for row in rows),
            "verdicts": dict(Counter(row["verdict"] for row in rows)), "classes": rows}


def show(result: dict[str, Any]) -> None:
    """What is not served, with its reason, and the sums."""
    table = Table("verdict", "type", "class", "says", box=None, padding=(0, 2, 0, 0))
    for each in result.values():
        for row in each["classes"]:
            if row["verdict"] != EQUAL:
                table.add_row(row["verdict"], row["type"], row["name"], page.state(row))
    if table.row_count:
        console.print(table)
    for kind, each in result.items():
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(each["verdicts"].items()))
        say(f"{kind}: {each['served']} of {len(each['classes'])} served ({counts})")


def list_all() -> None:
    for kind in counted.KINDS:
        say(f"\n{kind}: {len(cases(kind))} classes count\n  {' '.join(case.model_type for case in cases(kind))}")
        for why, types in counted.NOT_COUNTED[kind].items():
            say(f"  not counted: what {why}\n    {types}")
    say("\n  ".join(["\nvariants:", *shapes.VARIANTS]))


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The results of the kinds that were asked for, and whether they are whole: Ctrl-C ends them early."""
    result: dict[str, Any] = {}
    for kind in KINDS if options.kind == "all" else (options.kind,):
        rows: list[dict[str, Any]] = []
        result[kind] = summed(kind, rows)
        chosen = cases(kind, options.types)
        for number, case in enumerate(chosen):
            try:
                row = run(case, quiet=not options.loud)
            except KeyboardInterrupt:
                return result, False
            rows.append(row)
            result[kind] = summed(kind, rows)
            gap = f", gap {row['gap']:.1e}, tokens {row['tokens']}" if "gap" in row else ""
            says = f", {row['says'][:options.width]}" if "says" in row else ""
            say(f"{number + 1:3} of {len(chosen)}  {row['verdict']:8}  {row['type']:24} {row['name']}{gap}{says}, "
                f"{row['s']} s")
    return result, True


def parsed() -> argparse.Namespace:
    verdicts = "\n".join(f"  {verdict:10}  {what}" for verdict, what in VERDICTS.items())
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("{verdicts}", verdicts),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=[*KINDS, "all"], default="all")
    parser.add_argument("types", nargs="*", help="model types (qwen3), classes (Qwen3ForCausalLM) or variants; all")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the results to FOLDER/models.json")
    parser.add_argument("--keep", metavar="NAME", help="write the results to benchmarks/results/NAME.json")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables of the results into that page")
    parser.add_argument("--of", type=Path, metavar="FILE", help="measure nothing: take the results of that file")
    parser.add_argument("--list", action="store_true", help="say what counts and what does not, and why")
    parser.add_argument("--loud", action="store_true", help="show what the processes print, warnings too")
    parser.add_argument("--width", type=int, default=160, help="characters of an error in the lines that tell of it")
    options = parser.parse_args()
    whole = options.kind == "all" and not options.types
    if (options.keep or options.write) and not whole:
        parser.error("--keep and --write are of all classes; expected `all` without types")
    if options.of and (options.out or options.keep or options.types):
        parser.error("--of measures nothing, so that there is nothing for --out and --keep to write")
    known = {word for kind in KINDS for case in cases(kind) for word in (case.model_type, case.name)}
    if strangers := sorted(set(options.types) - known):
        parser.error(f"{', '.join(strangers)}: no such type, class or variant counts; see --list")
    return options


def main() -> None:
    options = parsed()
    if options.list:
        list_all()
        return
    if options.of:
        kept = json.loads(options.of.read_bytes())
        show(kept["result"])
    else:
        warm_up(options.loud)
        result, whole = measured(options)
        if options.out:
            record("models", result, keep=True, results=options.out, shown=False)
        show(result)
        if not whole:
            say("stopped: these are the results until here")
            sys.exit(130)
        kept = record(options.keep or "models", result, keep=options.keep is not None, shown=False)
    if options.write:
        page.write(options.write, kept)


if __name__ == "__main__":
    main()
