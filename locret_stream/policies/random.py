"""Random: uniform scores, a pure function of (seed, layer, head, position); the floor of every comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; splitmix wants zeros


class Random(Policy):
    """Scores in [0, 1), 24 bits. Because a unit keeps its score, the kept set is a uniform sample of the stream."""

    name = "random"

    def __init__(self, seed: int = 0):
        self.seed = seed
        self._key = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # any whole number, as int64

    def score(self, chunk: Chunk) -> Tensor:
        heads, new = chunk.k.shape[:2]
        device = chunk.k.device
        position = torch.arange(chunk.start, chunk.start + new, device=device)
        head = torch.arange(heads, device=device)[:, None]
        x = torch.zeros((), dtype=torch.int64, device=device)
        for word in (self._key, chunk.layer, head, position):
            x = (x ^ word) * _GOLDEN + _GOLDEN
            x = (x ^ _shift(x, 30)) * _MIX_1
            x = (x ^ _shift(x, 27)) * _MIX_2
            x = x ^ _shift(x, 31)
        return _shift(x, 40).float() / (1 << 24)
