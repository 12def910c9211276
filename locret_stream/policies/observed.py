"""Wraps a policy and reports its scores: for measurements, never registered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from locret_stream.config import ModelShape
from locret_stream.policies.base import Chunk, Policy


class Listening(Policy):
    """Scores as `inner` does, and calls `heard(chunk, scores)` with its input and its scores: at every commit, for each
    layer with full attention in order. The chunk has what is in `needs`, too."""

    def __init__(self, inner: Policy, heard: Callable[[Chunk, Tensor], None],
                 needs: frozenset[str] = frozenset({"token_logprob"})):
        self.inner, self.heard = inner, heard
        self.name, self.scope, self.stateful, self.planes = inner.name, inner.scope, inner.stateful, inner.planes
        self.bounded, self.knobs, self.needs = inner.bounded, inner.knobs, inner.needs | needs

    def begin(self, shape: ModelShape) -> dict[str, Tensor]:
        return self.inner.begin(shape)

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return self.inner.protection(budget, sinks, stabilizers)

    def score(self, chunk: Chunk) -> Tensor:
        scores = self.inner.score(chunk)
        self.heard(chunk, scores)
        return scores
