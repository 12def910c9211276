"""TRIM-KV: every unit has a rate at which its worth decays (arXiv:2512.03324)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Chunk, Policy


class TrimKV(Policy):
    """Score = age * log beta: beta in (0, 1) is given by the head when the unit arrives, age is in tokens.

    A unit of great worth is overtaken by newer ones in the end, so that a memory never fills up for good.

    Heads are trained by `train-heads --output retention --tune STEPS`: the second stage is the paper's (retention-gated
    attention against the full cache, and a capacity loss). Without it they have only learnt that after `horizon`
    tokens the labels of Locret are left of a unit: useless units then leave slowly, and facts with them.

    Deviations: eviction once per chunk in place of once per token; heads read hidden states (as in the paper) or q, k
    and v, as they were trained; see `training.trimkv` for those of the training.
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
