"""Where the time of prefill goes: `python benchmarks/breakdown.py --keep breakdown --plot breakdown.png`.

Every commit of a steady stream is cut into the projection GEMMs of the model, attention, retaining heads, selection,
compaction (with rotating anew what moved), RoPE, and the rest: norms, activations, residuals, embedding, copies, and
Python between them. Of the rest the torch profiler tells what is torch operations. `--model` takes other models. On
CUDA every part is timed between two synchronisations, so that the parts add up to somewhat more than an unhindered
commit takes, which is shown beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import record
from timing import WARM_UP, tiny_llama

from locret_stream import Runtime
from locret_stream.cache import UnitStore
from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine, EngineState, attention
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.heads import RetainingHeads
from locret_stream.models import attach
from locret_stream.named_models import NAMED_MODELS
from locret_stream.policies import make_policy

PARTS = ("projections", "attention", "heads", "selection", "compaction", "RoPE")
REST = "norms, activations, copies", "Python"


class Clock:
    """Seconds by part, of one commit. What runs inside another part belongs to that one."""

    def __init__(self, device: torch.device):
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth, self._started = 0, 0.0

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._wait()
            self._started = time.perf_counter()

    def end(self, part: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._wait()
            self.seconds[part] += time.perf_counter() - self._started

    def wrap(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return work(*args, **kwargs)
            finally:
                self.end(part)
        return timed


@contextlib.contextmanager
def timed(engine: Engine) -> Iterator[Clock]:
    """A clock that sees every part of what the engine does inside the block."""
    clock, attachment = Clock(engine.attachment.device), engine.attachment
    places = [("attention", attention, "prefill_attention"), ("selection", engine, "_keep"),
              ("compaction", UnitStore, "commit"), ("heads", engine.policy, "score"),
              ("RoPE", engine.layout.tables, "rotate")]
    before = [getattr(holder, name) for _, holder, name in places]
    hooks = []
    for layer in attachment.linears:
        hooks += [layer.register_forward_pre_hook(lambda *_: clock.begin()),
                  layer.register_forward_hook(lambda *_: clock.end("projections"))]
    try:
        for (part, holder, name), real in zip(places, before, strict=True):
            setattr(holder, name, clock.wrap(part, real))
        yield clock
    finally:
        for (_, holder, name), real in zip(places, before, strict=True):
            setattr(holder, name, real)
        for hook in hooks:
            hook.remove()


def commits(engine: Engine, state: EngineState, count: int, ids: torch.Tensor) -> Iterator[float]:
    """Seconds of `count` commits, one after another."""
    wait = torch.cuda.synchronize if engine.attachment.device.type == "cuda" else (lambda: None)
    for n in range(count):
        engine.accept(state, ids[n % len(ids)].tolist())
        wait()
        started = time.perf_counter()
        engine.commit(state)
        wait()
        yield time.perf_counter() - started


@torch.no_grad()
def profile(engine: Engine, chunks: int, ids: torch.Tensor) -> dict[str, Any]:
    """Milliseconds of a commit by part (medians over `chunks` steady ones), and of one that nobody watches.

    ids [N, chunk_size]: what is fed, over and over.
    """
    state = engine.open(0)
    full = -(-max(engine.budgets) // engine.chunk_size)
    list(commits(engine, state, full + WARM_UP, ids))
    unwatched, rows, wholes = [], [], []
    for _ in range(chunks):  # in turn, as the machine's speed changes
        unwatched += commits(engine, state, 1, ids)
        with timed(engine) as clock:
            wholes += commits(engine, state, 1, ids)
        rows.append(dict(clock.seconds))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        spent = sum(commits(engine, state, 3, ids))
    operations = sum(event.self_cpu_time_total for event in seen.key_averages()) / 1e6
    parts = {part: 1e3 * statistics.median(row.get(part, 0.0) for row in rows) for part in PARTS}
    whole = 1e3 * statistics.median(wholes)
    rest = whole - sum(parts.values())
    python = min(rest, whole * max(0.0, 1 - operations / spent))
    parts |= dict(zip(REST, (rest - python, python), strict=True))
    return {"commit_ms": 1e3 * statistics.median(unwatched), "watched_ms": whole, "parts_ms": parts,
            "shares": {part: ms / whole for part, ms in parts.items()},
            "heads_share": parts["heads"] / whole,
            "selection_and_compaction_share": (parts["selection"] + parts["compaction"]) / whole}


def show(profiled: dict[str, Any], out: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table("part", "ms of a commit", "share")
    for part, ms in profiled["parts_ms"].items():
        table.add_row(part, f"{ms:.2f}", f"{100 * profiled['shares'][part]:.1f} %")
    table.add_row("all", f"{profiled['watched_ms']:.2f}", f"unwatched {profiled['commit_ms']:.2f} ms")
    Console(file=out, width=100).print(table)


def plot(profiled: dict[str, Any], path: Path) -> None:
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 3))
    names = [*profiled["parts_ms"]][::-1]
    axes.barh(names, [profiled["parts_ms"][name] for name in names], color="#37669e")
    for row, name in enumerate(names):
        axes.text(profiled["parts_ms"][name], row, f" {100 * profiled['shares'][name]:.1f} %", va="center")
    axes.set_xlabel("milliseconds of a commit")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def tiny_engine(folder: str, budget: int, chunk: int) -> Engine:
    """The tiny random Llama of peers.py with random retaining heads."""
    from transformers import AutoModelForCausalLM
    attachment = attach(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    heads = RetainingHeads.load(Path(folder) / "heads")
    config = StreamConfig(budget=Budget(units=budget, sinks=4, stabilizers=32), chunk_size=chunk)
    return Engine(attachment, config, make_policy("locret", heads=heads), 1)


@contextlib.contextmanager
def engine_of(name: str, budget: int, chunk: int) -> Iterator[tuple[Engine, torch.Tensor]]:
    """The engine of a model, and eight chunks of ids to read over and over; budget and chunk are those of the tiny one,
    the others have their own."""
    if name == "tiny":
        with tiny_llama(chunk * 8) as folder:
            engine = tiny_engine(folder, budget, chunk)
            yield engine, torch.randint(3, engine.shape.vocab, (8, chunk))
        return
    runtime = Runtime.from_pretrained(name, max_live=1)
    runtime.start()
    lines = stdlib_lines(0)
    ids = runtime.codec.encode_text("".join(next(lines) for _ in range(2000)))
    yield runtime.engine, torch.tensor(ids[:8 * runtime.engine.chunk_size]).view(8, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", *NAMED_MODELS), default="tiny",
                        help="tiny: the Llama of peers.py")
    parser.add_argument("--budget", type=int, default=1024, help="of the tiny one; the others have their own")
    parser.add_argument("--chunk", type=int, default=1024, help="of the tiny one")
    parser.add_argument("--chunks", type=int, default=40, help="commits that are timed (default 40)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the parts into this PNG")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with engine_of(options.model, options.budget, options.chunk) as (engine, ids):
        profiled = profile(engine, options.chunks, ids)
    show(profiled, sys.stderr if options.json else sys.stdout)
    if options.plot:
        plot(profiled, options.plot)
    if options.json or options.keep:
        model = {"model": options.model, "budgets": engine.budgets, "chunk": engine.chunk_size,
                 "heads_parameters": sum(p.numel() for p in engine.policy.heads.parameters())}
        record(options.keep or "breakdown", model | profiled, keep=options.keep is not None)


if __name__ == "__main__":
    main()
