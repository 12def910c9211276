"""H2O: heavy hitters, units by the attention they have received so far (arXiv:2306.14048)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.policies.base import Chunk, Policy


class H2O(Policy):
    """Score = sum of the softmax attention received over all commits, from all query heads of a KV head; a recent share
    is protected.

    Args:
        recent: share of every layer's budget that always goes to the last units (the paper: one half).

    Deviations: one eviction per chunk in place of one per token; rows are the queries of committed chunks only, so that
    the state depends on the tokens alone.
    """

    name = "h2o"
    needs = frozenset({"column_sums"})
    stateful = True

    def __init__(self, recent: float = 0.5):
        if not 0 <= recent <= 1:
            raise ConfigError(f"policy 'h2o': recent is {recent!r}; expected a share of the budget in [0, 1]")
        self.recent = recent

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return sinks, max(stabilizers, min(int(budget * self.recent), budget - sinks - 1))

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        received = chunk.column_sums()
        received[:, :chunk.scores.shape[-1]] += chunk.scores[0]
        return received
