"""Scissorhands: units that received more than average attention from recent tokens (arXiv:2305.17118)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class Scissorhands(Policy):
    """Score = how many of the last `window` queries give a unit more than the average attention (Algorithm 2).

    Args:
        window: how many queries count (the paper: 400).
        recent: how many of the last units always stay (the paper: 10).

    Deviations: the window ends with the chunk and is never longer than it; for a unit inside the window only the
    queries that see it count; query heads that share a key are counted together.
    """

    name = "scissorhands"
    needs = frozenset({"column_sums"})
    stateful = True
    alone = True

    def __init__(self, window: int = 400, recent: int = 10):
        self.check_knob(window >= 1, "window", window, "at least 1 query")
        self.check_knob(recent >= 0, "recent", recent, "0 or more units")
        self.window, self.recent = window, recent

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return sinks, max(stabilizers, min(self.recent, budget - sinks - 1))

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        new = chunk.k.shape[1]
        return chunk.column_sums(slice(max(0, new - self.window), new), above_mean=True)
