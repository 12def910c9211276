"""Random: uniform scores, a pure function of (seed, layer, head, position); the lower bound of every comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy
from locret_stream.policies.noise import uniform


class Random(Policy):
    """Scores in [0, 1), of 24 bits. As a unit keeps its score, the kept units are a uniform sample of the stream."""

    name = "random"

    def __init__(self, seed: int = 0):
        self.seed = seed

    def score(self, chunk: Chunk) -> Tensor:
        heads, new = chunk.k.shape[:2]
        positions = torch.arange(chunk.start, chunk.start + new, device=chunk.k.device)
        return uniform(self.seed, chunk.layer, positions.expand(heads, new))
