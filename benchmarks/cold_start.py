"""From the start of a process to what its user waits for: help, an import, the first token of the first answer.

    python benchmarks/cold_start.py --repeats 10
    python benchmarks/cold_start.py --repeats 3 --busy 2        # beside two processes that never rest

Every case is a new process each time, and the cases take turns, so that other work on the machine meets all of them.
Files were read before (an untimed round comes first), programs were not: this is the second start of a day. An
environment as `make chat` makes it shows what users meet: torchao, which the tests install, brings along all that the
command line leaves out of transformers.

  help                 `locret-stream --help`, to its end
  import_langchain     `import langchain_locret`, to the end of the process; fails if that imports torch
  imports              the class of a model is imported from transformers, without a search for garbage, to its first
                       output: what an answer would need before all else if the command line imported it as others do
  bundled, smollm2     `locret-stream run notes.txt --ask ...`: to the first characters of the answer, and to the end of
                       the process
  smollm2_spinning     with --busy: the same, where torch's threads wait as long for each other as libgomp lets them
                       (its usual GOMP_SPINCOUNT), which the command line shortens
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from record import record

from locret_stream.named_models import model_path

ROOT = Path(__file__).parents[1]
FACT, QUESTION, VALUE = "The door code of falcon is 48213.\n", "What is the door code of falcon?", "48213"
LANGCHAIN = "import sys, langchain_locret; sys.exit('torch' in sys.modules)"
IMPORTS = "import gc; gc.disable(); from transformers import LlamaForCausalLM; print(1, flush=True)"
BESIDE = ("torchao", "accelerate", "bitsandbytes", "peft")  # where installed: torchao brings torch's compiler along
USUAL_SPINS = "300000"


def _found(packages: tuple[str, ...]) -> dict[str, str]:
    return {package: version(package) for package in packages if find_spec(package)}


def answering(model: str, notes: Path) -> list[str]:
    return ["-m", "locret_stream", "run", str(notes), "--model", model, "--ask", QUESTION]


def cases(notes: Path, models: list[str], busy: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """By name: what follows `python`, and what is added to its environment."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        "help": (["-m", "locret_stream", "--help"], {}), "import_langchain": (["-c", LANGCHAIN], {}),
        "imports": (["-c", IMPORTS], {})}
    for model in models:
        found[model] = (answering(model, notes), {})
        if busy:
            found[f"{model}_spinning"] = (answering(model, notes), {"GOMP_SPINCOUNT": USUAL_SPINS})
    return found


def timed(arguments: list[str], env: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of a process to its first output and to its end. Raises RuntimeError: it failed, or its
    answer is wrong."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          stdin=subprocess.DEVNULL, env=os.environ | env, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = {"first_s": time.perf_counter() - began}
        out = first + process.stdout.read()
        status = process.wait()
        seconds["end_s"] = time.perf_counter() - began
        if status or (QUESTION in arguments and VALUE not in out.decode()):
            raise RuntimeError(f"{' '.join(arguments)}: status {status}, {out!r}, {process.stderr.read()[-2000:]!r}")
    return seconds


@contextmanager
def company(processes: int) -> Iterator[None]:
    """That many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="new processes of each case")
    parser.add_argument("--models", nargs="+", default=["bundled", "smollm2"], metavar="NAME")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes beside it that never rest")
    parser.add_argument("--keep", metavar="NAME", help="also write benchmarks/results/NAME.json")
    options = parser.parse_args()
    for model in options.models:
        model_path(model)  # which may convert it once
    times: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="locret-cold-") as folder, company(options.busy):
        notes = Path(folder) / "notes.txt"
        notes.write_text(FACT)
        for round_ in range(options.repeats + 1):
            for name, (arguments, env) in cases(notes, options.models, options.busy > 0).items():
                seconds = timed(arguments, env)
                if round_:
                    times.setdefault(name, []).append(seconds)
                print(f"{round_} {name}: {seconds['first_s']:.2f}, {seconds['end_s']:.2f} s", file=sys.stderr,
                      flush=True)
    result: dict[str, Any] = {
        "repeats": options.repeats, "busy": options.busy, "imported_with_transformers": _found(BESIDE),
        "cases": {name: {which: {"median": median(values := [each[which] for each in found]), "min": min(values),
                                 "max": max(values)} for which in ("first_s", "end_s")}
                  for name, found in times.items()}}
    record(options.keep or "cold_start", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
