"""Share of prefill time that retaining heads, selection and compaction take: `python benchmarks/heads.py`.

Runs chunks of the bundled model through the engine with timers around the parts; medians over chunks of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from record import record

from locret_stream import Runtime
from locret_stream.cache import UnitStore
from locret_stream.evaluation import tasks


def timed(spent: dict[str, float], name: str, function: Callable) -> Callable:
    """The function, adding its wall time to spent[name]."""
    def run(*args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - started
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    runtime = Runtime.from_pretrained("bundled", max_live=1)
    runtime.start()
    engine, spent = runtime.engine, defaultdict(float)
    state = engine.open(0)
    lines = tasks.stdlib_lines(0)
    ids: list[int] = []
    shares: dict[str, list[float]] = defaultdict(list)
    engine.policy.score = timed(spent, "heads", engine.policy.score)
    engine._keep = timed(spent, "selection", engine._keep)
    store_commit, UnitStore.commit = UnitStore.commit, timed(spent, "compaction", UnitStore.commit)
    with torch.no_grad():
        for number in range(options.chunks + 20):
            while len(ids) < engine.chunk_size:
                ids += runtime.codec.encode_text(next(lines))
            engine.accept(state, ids[:engine.chunk_size])
            del ids[:engine.chunk_size]
            spent.clear()
            started = time.perf_counter()
            engine.commit(state)
            whole = time.perf_counter() - started
            if number >= 20:  # steady: every layer is full and everything is warm
                shares["chunk_ms"].append(whole * 1e3)
                for name, seconds in spent.items():
                    shares[name].append(seconds / whole)
    UnitStore.commit = store_commit
    sizes = {"heads": sum(p.numel() for p in engine.policy.heads.parameters()),
             "model": sum(p.numel() for p in runtime.model.parameters())}
    record(options.keep or "heads", {"chunks": options.chunks, "chunk_size": engine.chunk_size, "parameters": sizes,
                                     **{name: statistics.median(values) for name, values in shares.items()}},
           keep=options.keep is not None)


if __name__ == "__main__":
    main()
