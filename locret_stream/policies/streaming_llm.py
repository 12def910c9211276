"""StreamingLLM: attention sinks and the most recent units (arXiv:2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class StreamingLLM(Policy):
    """All units have the same score, and of equal scores the newer stays; the budget says how many sinks there are."""

    name = "streaming_llm"

    def score(self, chunk: Chunk) -> Tensor:
        return torch.zeros(1, chunk.k.shape[1], dtype=torch.float32, device=chunk.k.device)
