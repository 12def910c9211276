"""Results made by hand: streams of questions of which so many were answered right."""

from __future__ import annotations

from locret_stream.evaluation import metrics
from locret_stream.evaluation.cells import Cell, CellResult, Origin, StreamResult

ORIGIN = Origin(weights="3f5a0c", tokenizer="77b1", heads="", text="prose", tasks=1)
ASKED = 4


def result(policy: str, right: list[int] | None = None, *, bits: list[float] | None = None,
           origin: Origin = ORIGIN, **more) -> CellResult:
    """`right[i]` of the `ASKED` questions of stream i were answered right; or stream i took `bits[i]` per byte."""
    cell = Cell(**{"task": "text" if bits else "recall", "policy": policy, "length": 1000,
                   "units": None if policy == "full" else 64, "streams": len(bits or right or [])} | more)
    streams = [StreamResult(seed=seed, tokens=1000, seconds=0.5, unit_tokens=60_000.0, **given) for seed, given in
               enumerate([{"bits": 100 * rate, "bytes": 100} for rate in bits] if bits else
                         [{"answers": [("?", "x", "x" if n < count else "y") for n in range(ASKED)]}
                          for count in right])]
    groups = ([[rate] for rate in bits] if bits else
              [[float(n < count) for n in range(ASKED)] for count in right])
    values = [value for group in groups for value in group]
    low, high = metrics.interval(groups)
    return CellResult(cell=cell, origin=origin, score=sum(values) / len(values), low=low, high=high,
                      questions=len(values), tok_per_s=2000.0, budgets=(64, 64), peak_bytes=1 << 20, streams=streams)
