"""KeyDiff: units whose keys differ most from the mean key stay (arXiv:2504.15364)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class KeyDiff(Policy):
    """Score = -cosine(key, mean of the normalised keys of all units of the head); computed anew at every commit.

    Deviation: keys are taken before RoPE, so that a unit's score does not depend on its rank.
    """

    name = "keydiff"
    needs = frozenset({"keys"})
    stateful = True
    alone = True

    def score(self, chunk: Chunk) -> Tensor:
        keys = F.normalize(chunk.keys.float(), dim=-1)
        anchor = F.normalize(keys.mean(1, keepdim=True), dim=-1)
        return -torch.matmul(keys, anchor.transpose(1, 2))[..., 0]
