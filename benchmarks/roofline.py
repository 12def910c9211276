"""How far reading and writing are from what the processor can: `python benchmarks/roofline.py --plot roofline.svg`.

Measured here and now: the best rate of products of matrices in the model's dtype, and the bandwidth of memory. Of
every part of a commit (`breakdown.py` times them) and of a token the operations and the least bytes are counted, and
from these follows the least time: operations at that rate, or bytes at that bandwidth, whichever is longer. Parts that
multiply nothing (norms, rotation, compaction, Python) have no least time, so that a share of 1 is out of reach.

    python benchmarks/roofline.py --models smollm2 tiny --keep roofline --plot roofline.svg

--models: `tiny` is the random Llama of peers.py in fp32, the others are those of the library in their dtype.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from breakdown import engine_of, profile
from record import record
from timing import WARM_UP

from locret_stream.engine import Engine
from locret_stream.models.linears import linear
from locret_stream.named_models import NAMED_MODELS

SIZES = (512, 1024, 2048)  # of square matrices
READ = 256 * 2**20  # bytes, several times the largest cache of a processor
COLORS = {"smollm2": "#37669e", "tiny": "#c1652f", "bundled": "#4f8a4c"}


def seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """The least of some runs, after one that is not counted: a limit is what the machine can do undisturbed."""
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    return min([once() for _ in range(repeats + 1)][1:])


@torch.inference_mode()
def limits(dtype: torch.dtype) -> dict[str, float]:
    """GFLOP/s of the best product, and GB/s of reading."""
    rates = []
    for size in SIZES:
        x, weight = (torch.randn(size, size).to(dtype) for _ in range(2))
        rates.append(2 * size**3 / seconds(lambda x=x, weight=weight: linear(weight, None, x)) / 1e9)
        rates.append(2 * size**3 / seconds(lambda x=x, weight=weight: torch.mm(x, weight)) / 1e9)
    rows = torch.zeros(READ // 8, dtype=torch.int64)
    return {"gflops": max(rates), "gbytes": READ / seconds(lambda: rows.max()) / 1e9}


def counted(engine: Engine) -> dict[str, tuple[float, float]]:
    """Operations and least bytes of the parts of a commit, in a full memory: weights, units, what goes in and out."""
    unit, rows, item = engine.shape.one_unit("figures"), engine.chunk_size, engine.attachment.dtype.itemsize
    linears = engine.attachment.linears
    heads = [weight for weight in engine.policy.heads.parameters() if weight.ndim > 1]
    pairs = sum(rows * (budget + (rows + 1) / 2) for budget in engine.budgets)
    return {
        "projections": (2.0 * rows * sum(layer.weight.numel() for layer in linears),
                        item * sum(layer.weight.numel() + rows * sum(layer.weight.shape) for layer in linears)),
        "attention": (4.0 * unit.kv_heads * unit.groups * unit.key_dim * pairs,
                      2.0 * item * unit.key_dim * sum(
                          unit.kv_heads * (rows * unit.groups + budget + rows) for budget in engine.budgets)),
        "heads": (2.0 * rows * sum(weight.numel() for weight in heads), item * sum(w.numel() for w in heads)),
    }


def a_token(engine: Engine) -> tuple[float, float]:
    """Operations and least bytes of a token behind a full memory: every weight and every unit is read once."""
    shape, unit, item = engine.shape, engine.shape.one_unit("figures"), engine.attachment.dtype.itemsize
    weights = sum(layer.weight.numel() for layer in engine.attachment.linears) + shape.hidden * shape.vocab
    units = sum(engine.budgets) * unit.kv_heads * unit.key_dim
    return (2.0 * weights + 4.0 * units * unit.groups, item * (weights + 2.0 * units))


@torch.inference_mode()
def decode_seconds(engine: Engine, ids: torch.Tensor, tokens: int = 48) -> float:
    """Median seconds of a token behind a full memory."""
    state = engine.open(0)
    for _ in range(-(-max(engine.budgets) // engine.chunk_size) + 1):
        engine.accept(state, ids[0].tolist())
        engine.commit(state)
    times = []
    for _ in range(min(tokens, engine.chunk_size - 1)):
        began = time.perf_counter()
        engine.accept(state, [int(engine.logits(state).argmax())])
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:])


def measure(name: str, chunks: int, chunk: int) -> dict[str, Any]:
    """Least and measured milliseconds of the parts of a commit and of a token."""
    with engine_of(name, chunk, chunk) as (engine, ids):
        best = limits(engine.attachment.dtype)
        profiled = profile(engine, chunks, ids)
        rows = {part: row(best, *counts, profiled["parts_ms"][part]) for part, counts in counted(engine).items()}
        rows |= {part: {"ms": ms} for part, ms in profiled["parts_ms"].items() if part not in rows}
        token = row(best, *a_token(engine), 1e3 * decode_seconds(engine, ids))
        least = sum(part.get("least_ms", 0.0) for part in rows.values())
        return {"dtype": str(engine.attachment.dtype)[6:], "budgets": sorted(set(engine.budgets)),
                "chunk": engine.chunk_size, "limits": best, "parts": rows, "commit_ms": profiled["commit_ms"],
                "watched_ms": profiled["watched_ms"], "least_ms": least,
                "share_of_limit": least / profiled["commit_ms"], "token": token}


def row(best: dict[str, float], operations: float, size: float, ms: float) -> dict[str, float]:
    least = 1e3 * max(operations / best["gflops"], size / best["gbytes"]) / 1e9
    return {"ms": ms, "least_ms": least, "share_of_limit": least / ms, "gflops": operations / ms / 1e6,
            "operations_a_byte": operations / size}


def show(name: str, found: dict[str, Any], out: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table(f"{name}, {found['dtype']}", "ms", "at least", "share of the limit", "GFLOP/s")
    whole = {"ms": found["commit_ms"], "least_ms": found["least_ms"], "share_of_limit": found["share_of_limit"]}
    for part, own in (found["parts"] | {"a commit, unwatched": whole, "a token": found["token"]}).items():
        told = [f"{own[key]:{form}}" if key in own else ""
                for key, form in (("least_ms", ".1f"), ("share_of_limit", ".2f"), ("gflops", ",.0f"))]
        table.add_row(part, f"{own['ms']:.1f}", *told)
    console = Console(file=out, width=100)
    console.print(table)
    console.print("best product {gflops:,.0f} GFLOP/s, memory {gbytes:.0f} GB/s".format(**found["limits"]))


def draw(results: dict[str, dict[str, Any]], picture: Path) -> None:
    """Both limits as a roof for each model, and below it what its parts reach."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    ax = figure.subplots()
    for name, found in results.items():
        color, best = COLORS.get(name, "#555555"), found["limits"]
        xs = [2.0**power for power in range(-2, 12)]
        ax.plot(xs, [min(best["gflops"], x * best["gbytes"]) for x in xs], color=color, linewidth=1.2,
                label=f"{name}, {found['dtype']}: what the processor can")
        dots = {part: own for part, own in found["parts"].items() if "gflops" in own} | {"a token": found["token"]}
        for part, own in dots.items():
            ax.plot(own["operations_a_byte"], own["gflops"], "o", color=color, markersize=5)
            ax.annotate(part, (own["operations_a_byte"], own["gflops"]), xytext=(6, -10), textcoords="offset points",
                        fontsize=8, color=color)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_xlabel("operations for each byte that has to be read or written", fontsize=8)
    ax.set_ylabel("GFLOP/s", fontsize=8)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", *NAMED_MODELS), default=["smollm2", "tiny"])
    parser.add_argument("--chunks", type=int, default=20, help="commits that are timed (default 20)")
    parser.add_argument("--chunk", type=int, default=1024, help="of the tiny one, and its budget")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofs and what is below them")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.models:
        results[name] = measure(name, options.chunks, options.chunk)
        show(name, results[name], sys.stderr)
    if options.plot:
        draw(results, options.plot)
    record(options.keep or "roofline", {"threads": options.threads, "models": results}, keep=options.keep is not None)


if __name__ == "__main__":
    main()
