"""TRIM-KV: every unit has a rate at which its score decays (arXiv:2512.03324)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Chunk, Policy


class TrimKV(Policy):
    """Score = age * log beta: the head gives beta in (0, 1) when the unit is committed; age is in tokens.

    Newer units overtake any unit in the end, so that a memory never fills up with units that stay for good.

    Heads are trained by `train-heads --output retention --tune STEPS`: the second stage is the paper's (retention-gated
    attention against the full cache, and a capacity loss). Heads without it have only learned to give the labels of
    Locret, as they are after `horizon` tokens: useless units then leave slowly, and facts with them.

    Deviations: one eviction per chunk in place of one per token; heads read hidden states (as in the paper) or q, k and
    v, as they were trained; `training.student.Fading` lists those of the training.
    """

    name = "trimkv"
    needs = frozenset({"qkv", "hidden", "positions"})
    stateful = True
    planes = 2  # the score, and log beta
    features = None
    output = "retention"

    def __init__(self, heads: RetainingHeads):
        self.heads = heads

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.hidden is not None and chunk.positions is not None, "declared in needs"
        odds = self.heads.score(chunk.layer, chunk.q[None], chunk.k[None], chunk.v[None], chunk.hidden[None])[0]
        log_beta = torch.cat([chunk.scores[1], F.logsigmoid(odds)], dim=1)
        age = chunk.start + chunk.k.shape[1] - chunk.positions
        return torch.stack([log_beta * age, log_beta])
