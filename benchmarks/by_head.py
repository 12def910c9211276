"""What budgets by head buy: facts that are answered from as many units, divided in four ways.

SmolLM2 with its heads: `--facts` facts in sentences among the lines of a text of `--tokens` tokens, each asked in a
copy of the memory: how likely is its value, token by token. `--units` per KV head, the mean over the model, divided

    uniform      as many for every layer and head
    pyramid      falling from the first layer to the last (PyramidKV), as many for every head of a layer
    fixed        in every layer those numbers for its heads that `threshold` comes to on another stream
    threshold    by one threshold over the scores of a layer's heads, at every commit (`Budget(by_head=True)`)

and, of each way, how much likelier its values are than with uniform budgets, question by question. Also how long
reading takes, and a decoded token, against uniform budgets, in turn (`--steps N`). `--policy` takes another policy's
scores than the heads': with snapkv, `threshold` is AdaKV.

    python benchmarks/by_head.py --units 128 256 512 --streams 2 --asked 128 --keep by_head
    python benchmarks/by_head.py --policy snapkv --units 512 --asked 96 --ways uniform threshold --keep by_head_snapkv
    python benchmarks/by_head.py --steps 60 --units 1024 --keep by_head_steps
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from host_tier import SINKS, STABILIZERS, TOGETHER, Asked, asked, read, stream, summary
from record import record
from torch import Tensor

from locret_stream.cache import HeadwiseStore
from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine, EngineState, NextToken, layout
from locret_stream.evaluation import metrics
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import select_units
from locret_stream.models import attach
from locret_stream.named_models import model_path, named_model
from locret_stream.policies import make_policy
from locret_stream.runtime.loading import load_model, load_tokenizer

WAYS = ("uniform", "pyramid", "fixed", "threshold")
OTHER = 1000  # the number of the stream on which "fixed" is found


class Bench:
    """SmolLM2, its heads and its tokenizer, and streams of facts."""

    def __init__(self, options: argparse.Namespace):
        named = named_model("smollm2")
        assert named is not None and named.heads is not None
        path = model_path("smollm2")
        self.options, self.tokenizer = options, load_tokenizer(path)
        self.attachment = attach(load_model(path, "float32", "cpu"))
        self.heads = self.attachment.put_beside(RetainingHeads.load(named.heads), self.attachment.dtype)

    def engine(self, units: int, way: str, slots: int = 1 + TOGETHER) -> Engine:
        """An engine with the budget divided that way."""
        budget = Budget(units=units, sinks=SINKS, stabilizers=STABILIZERS, by_head=way in ("fixed", "threshold"),
                        allocation="pyramid" if way == "pyramid" else "uniform")
        policy = self.options.policy
        config = StreamConfig(budget=budget, chunk_size=self.options.chunk, policy=policy)
        made = make_policy(policy, {}, self.heads if policy == "locret" else None)
        return Engine(self.attachment, config, made, slots=slots)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def read(self, engine: Engine, seed: int) -> tuple[EngineState, list[Asked]]:
        """A context that has read stream number `seed`, and what is asked about it."""
        ids, asks = stream(self.ids, seed, self.options.tokens, self.options.facts)
        state = engine.open(0)
        read(engine, state, ids)
        return state, asks[:self.options.asked]


@contextlib.contextmanager
def fixed(counts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Meanwhile the heads of each layer keep these numbers of units, [L][H], where there are so many."""
    select = layout.Layout.select

    def chosen(made: layout.Layout, layer: int, scores: Sequence[Tensor], units: int, sinks: int, stabilizers: int,
               *, front: int = 0) -> list[Tensor]:
        return [select_units(of_head[None], count, sinks, stabilizers)[0]
                for of_head, count in zip(scores, counts[layer], strict=True)]

    layout.Layout.select = chosen  # type: ignore[method-assign]
    try:
        yield
    finally:
        layout.Layout.select = select  # type: ignore[method-assign]


def kept_by(bench: Bench, units: int) -> list[list[int]]:
    """Units of every head, [L][H], that one threshold a layer leaves: the mean over the commits of a stream."""
    engine, sums, commits = bench.engine(units, "threshold"), [], 0
    commit = engine.commit

    def counted(state: EngineState) -> None:
        nonlocal sums, commits
        commit(state)
        assert isinstance(state.store, HeadwiseStore)
        if state.seen > 4 * units:
            held = [list(counts) for counts in state.store.of_heads]
            sums = held if not sums else [[a + b for a, b in zip(*pair, strict=True)]
                                          for pair in zip(sums, held, strict=True)]
            commits += 1

    engine.commit = counted  # type: ignore[method-assign]
    bench.read(engine, OTHER)
    whole = []
    for of_layer in sums:
        counts = [count // commits for count in of_layer]
        counts[0] += units * len(counts) - sum(counts)
        whole.append(counts)
    return whole


@torch.no_grad()
def measured(bench: Bench) -> dict[str, Any]:
    """Of each number of units and each way the loss, what uniform budgets lose more, and the units of the heads."""
    options, rows = bench.options, {}
    for units in options.units:
        of_ways: dict[str, list[float]] = {}
        row: dict[str, Any] = {}
        for way in options.ways:
            began, counts = time.perf_counter(), kept_by(bench, units) if way == "fixed" else []
            engine, found = bench.engine(units, way), []
            with fixed(counts) if way == "fixed" else contextlib.nullcontext():
                for seed in range(options.streams):
                    found += asked(engine, *bench.read(engine, seed))
            of_ways[way] = [loss for loss, _ in found]
            row[way] = summary(found) | {"bytes": engine.pool.slot_bytes}
            if "uniform" in of_ways and way != "uniform":
                gains = [[before - after] for before, after in zip(of_ways["uniform"], of_ways[way], strict=True)]
                row[way] |= {"gain": round(statistics.mean(gain for [gain] in gains), 4),
                             "gain_interval": list(metrics.interval(gains))}
            if counts:
                row[way]["least"], row[way]["most"] = min(map(min, counts)), max(map(max, counts))
            print(f"{units} units, {way}: {row[way]}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        rows[str(units)] = row
    return rows


@torch.no_grad()
def timed(bench: Bench) -> dict[str, Any]:
    """Medians of a chunk's and of a token's time, and of their ratios to those with uniform budgets, in turn."""
    units, steps = bench.options.units[0], bench.options.steps
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(3, bench.attachment.shape.vocab, (units + bench.options.chunk * (steps + 5),),
                        generator=noise).tolist()
    running = {way: bench.engine(units, way, slots=1) for way in ("uniform", "threshold")}
    states = {way: engine.open(0) for way, engine in running.items()}
    spent: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in running} for kind in ("chunk", "token")}
    for way, engine in running.items():
        engine.accept(states[way], ids)
        while len(states[way].pending) >= bench.options.chunk * (steps + 2):
            engine.commit(states[way])
    for kind in ("chunk", "token"):
        for turn in range(steps):
            for way, engine in running.items():
                began = time.perf_counter()
                if kind == "chunk":
                    engine.commit(states[way])
                else:
                    engine.decode([NextToken(states[way], lambda logits: int(logits.argmax()))])
                if turn > 1:  # the first ones fill what later ones find
                    spent[kind][way].append(time.perf_counter() - began)
                while engine.ready(states[way]) and kind == "token":
                    engine.commit(states[way])
        for way, engine in running.items():
            while engine.ready(states[way]):
                engine.commit(states[way])
    return {kind: {way: {"ms": round(1000 * statistics.median(times), 2), "ratio": round(statistics.median(
        one / base for one, base in zip(times, ways["uniform"], strict=True)), 3)} for way, times in ways.items()}
        for kind, ways in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--facts", type=int, default=128, help="told in each stream")
    parser.add_argument("--asked", type=int, default=128, help="of these")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--policy", default="locret", help="one of `locret-stream policies`")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    result = {"policy": options.policy} | ({"units": options.units[0], "steps": timed(bench)} if options.steps else {
        name: getattr(options, name) for name in ("tokens", "facts", "asked", "streams", "chunk")} | measured(bench))
    record(options.keep or "by_head", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
