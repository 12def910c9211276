"""A policy that is overheard while it works: for measurements, never registered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from locret_stream.config import ModelShape
from locret_stream.policies.base import Chunk, Policy


class Listening(Policy):
    """Scores just as `inner` does. At every commit `heard(chunk, scores)` is told, layer by layer in order, what each
    layer with full attention was given, what is in `needs` included, and the scores it gave."""

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
        found = self.inner.score(chunk)
        self.heard(chunk, found)
        return found
