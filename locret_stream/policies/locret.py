"""Locret: a trained retaining head scores each unit once, when it is committed (arXiv:2410.01805, Algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.policies.base import Chunk, Policy


class Locret(Policy):
    """Score = the head's output on [q; k; v] before RoPE; static, per KV head. Where the heads have a `kernel`, it is
    averaged over so many neighbouring tokens of the chunk.

    Deviations from the released code: there are sinks; stabilizers stay at every eviction, the last one included;
    eviction goes on during decoding. `train-heads` trains heads on standardised logits, the paper on raw ones
    (`--label logit`).
    """

    name = "locret"
    needs = frozenset({"qkv"})
    features = "qkv"

    def __init__(self, heads: RetainingHeads):
        self.heads = heads

    def score(self, chunk: Chunk) -> Tensor:
        scores = self.heads.score(chunk.layer, chunk.q[None], chunk.k[None], chunk.v[None])
        return self.heads.averaged(scores)[0]
