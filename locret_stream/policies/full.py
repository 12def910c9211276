"""Full: keeps all units until the budget is full, then refuses tokens; the upper bound of every comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class Full(Policy):
    """Never evicts: a token that does not fit raises BudgetExceeded, and the context stays as it was."""

    name = "full"
    bounded = False

    def score(self, chunk: Chunk) -> Tensor:
        return torch.zeros(1, chunk.k.shape[1], dtype=torch.float32, device=chunk.k.device)
