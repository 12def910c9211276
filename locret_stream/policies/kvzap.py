"""KVzap: retaining heads that read hidden states score each unit once, when it is committed (arXiv:2601.07891)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Chunk, Policy


class KVzap(Policy):
    """Score = the head's output on the hidden state that enters the layer's attention; static, per KV head.

    Deviations: the paper's heads learn KVzip's scores, and a threshold on these decides how many units stay; here heads
    learn the labels of `train-heads --features hidden`, and the budget decides. The budget's `stabilizers` take the
    place of the paper's window of 128 recent units.
    """

    name = "kvzap"
    needs = frozenset({"hidden"})
    features = "hidden"

    def __init__(self, heads: RetainingHeads):
        self.heads = heads

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.hidden is not None, "declared in needs"
        return self.heads.score(chunk.layer, chunk.q[None], chunk.k[None], chunk.v[None], chunk.hidden[None])[0]
