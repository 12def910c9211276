"""Scissorhands: units that were of more than average importance to recent tokens (arXiv:2305.17118)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.policies.base import Chunk, Policy


class Scissorhands(Policy):
    """Score = how many of the last `window` queries pay a unit more than the average attention (Algorithm 2).

    Args:
        window: queries that are counted (the paper: 400).
        recent: last units that always stay (the paper: 10).

    Deviations: the window ends with the chunk and is never longer than it, and a unit that came inside it is counted by
    the fewer queries that saw it; heads that share keys are counted together.
    """

    name = "scissorhands"
    needs = frozenset({"column_sums"})
    stateful = True

    def __init__(self, window: int = 400, recent: int = 10):
        if window < 1:
            raise ConfigError(f"policy 'scissorhands': window is {window!r}; expected at least 1 query")
        if recent < 0:
            raise ConfigError(f"policy 'scissorhands': recent is {recent!r}; expected 0 or more units")
        self.window, self.recent = window, recent

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return sinks, max(stabilizers, min(self.recent, budget - sinks - 1))

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        new = chunk.k.shape[1]
        return chunk.column_sums(slice(max(0, new - self.window), new), above_mean=True)
