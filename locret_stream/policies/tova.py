"""TOVA: in every layer the tokens that the last query attends to stay (arXiv:2401.06104)."""

from __future__ import annotations

from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class TOVA(Policy):
    """Score = softmax attention of the chunk's last query, summed over all heads of the layer, which share it.

    Deviations: one eviction per chunk in place of one per token; the budget's sinks and stabilizers stay (the paper has
    none: `Budget(sinks=0, stabilizers=0)`).
    """

    name = "tova"
    needs = frozenset({"column_sums"})
    scope = "layer"
    stateful = True

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None, "declared in needs"
        new = chunk.k.shape[1]
        return chunk.column_sums(slice(new - 1, new)).sum(0, keepdim=True)
