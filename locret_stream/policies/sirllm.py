"""SirLLM: tokens that surprised the model stay, the same ones in every layer and head (arXiv:2405.12528)."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.policies.base import Chunk, Policy


class SirLLM(Policy):
    """Score = -log p(token | everything before it); the first token of a stream scores highest.

    Args:
        decay: factor on all held scores at every commit (the paper: once per dialogue turn); 1 is off.
    """

    name = "sirllm"
    needs = frozenset({"token_logprob"})
    scope = "model"
    stateful = True

    def __init__(self, decay: float = 1.0):
        if not 0 < decay <= 1:
            raise ConfigError(f"policy 'sirllm': decay is {decay!r}; expected a factor in (0, 1]")
        self.decay = decay

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.logprobs is not None, "declared in needs"
        surprise = -chunk.logprobs.float()
        if chunk.start == 0:  # any other that is not a number is a fault of the model, and ranks last
            surprise[0] = torch.finfo(torch.float32).max
        return torch.cat([chunk.scores[0, :1] * self.decay, surprise[None]], dim=-1)
