"""KVzap: heads on hidden states score each unit once, when it arrives (arXiv:2601.07891)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Chunk, Policy


class KVzap(Policy):
    """Score = the head's output on the hidden state that the layer's attention is given; static, per KV head.

    Deviations: the paper's heads learn KVzip's scores and prune by a threshold, so that the memory follows the text;
    these learn the labels of `train-heads --features hidden`, and the budget decides how many stay. The paper's window
    of 128 recent units is the budget's `stabilizers`.
    """

    name = "kvzap"
    needs = frozenset({"hidden"})
    features = "hidden"

    def __init__(self, heads: RetainingHeads):
        self.heads = heads

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.hidden is not None, "declared in needs"
        return self.heads.score(chunk.layer, chunk.q[None], chunk.k[None], chunk.v[None], chunk.hidden[None])[0]
