"""H2O: heavy hitters, the units that received the most attention so far (arXiv:2306.14048)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class H2O(Policy):
    """Score = the softmax attention that a unit received at all commits, summed over all query heads of a KV head.

    Args:
        recent: share of every layer's budget that always goes to the last units (the paper: one half).

    Deviations: one eviction per chunk in place of one per token; only queries of committed chunks count, so that the
    state depends on the tokens alone.
    """

    name = "h2o"
    needs = frozenset({"column_sums"})
    stateful = True
    alone = True

    def __init__(self, recent: float = 0.5):
        self.check_knob(0 <= recent <= 1, "recent", recent, "a share of the budget in [0, 1]")
        self.recent = recent

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return sinks, max(stabilizers, min(int(budget * self.recent), budget - sinks - 1))

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        received = chunk.column_sums()
        received[:, :chunk.scores.shape[-1]] += chunk.scores[0]
        return received
