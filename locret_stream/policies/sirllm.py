"""SirLLM: the tokens with the highest surprisal stay, the same in every layer and head (arXiv:2405.12528)."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class SirLLM(Policy):
    """Score = -log p(token | everything before it); the first token of a stream scores highest.

    Args:
        decay: factor on all scores of kept units at every commit (the paper: at every dialogue turn); 1: no decay.
    """

    name = "sirllm"
    needs = frozenset({"token_logprob"})
    scope = "model"
    stateful = True

    def __init__(self, decay: float = 1.0):
        self.check_knob(0 < decay <= 1, "decay", decay, "a factor in (0, 1]")
        self.decay = decay

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.logprobs is not None, "declared in needs"
        surprisal = -chunk.logprobs.float()
        if chunk.start == 0:  # nan elsewhere comes from the model, and such units leave first
            surprisal[0] = torch.finfo(torch.float32).max
        return torch.cat([chunk.scores[0, :1] * self.decay, surprisal[None]], dim=-1)
