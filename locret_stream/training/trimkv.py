"""TRIM-KV's training (arXiv:2512.03324): the logits of a unit fade with its age, and a loss bounds what has not faded.

Heads of output "retention" give every unit a rate beta in (0, 1). In training nothing is evicted: the row at t sees
the unit at i with the logit beta_i^(t - i) q_t·k_i (retention-gated attention, in which a fully faded logit is 0), and
the capacity loss asks that beta_i^(t - i), summed over all units, is at most the budget. Evicting by beta_i^(t - i)
then removes units that hardly counted.

Deviations: beside the capacity loss there is the divergence from the full cache's answers alone, without a next-token
loss; the summed rates are those that the frozen model's own activations give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment, Attended, LayerCall
from locret_stream.training.gates import gated_attention
from locret_stream.training.student import Student


class Fading(Student):
    """A `Student` whose units fade instead of being evicted. In layers without a head nothing fades."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, budgets: Sequence[int], chunk_size: int,
                 sinks: int, stabilizers: int, longest: int, block_bytes: int = 32 * 2**20):
        super().__init__(attachment, heads, budgets, chunk_size, sinks, stabilizers, longest, block_bytes)
        self._absolute = attachment.tables(longest)

    def _attend(self, call: LayerCall, temperature: float) -> Attended:
        layer = call.layer
        if self.attachment.shape.sliding[layer]:
            return self._sliding(call)
        q, k = (self._absolute.rotate(layer, x, 0) for x in (call.q, call.k))
        if not self.heads.config.has_head(layer):
            return q, k, call.v, None
        rates = F.logsigmoid(self._scores(call))
        return gated_attention(q, k, call.v, rates.new_zeros(*rates.shape[:2], 0), fading=rates, scale=call.scale,
                               softcap=call.softcap, sink_logits=call.sink_logits, block_bytes=self.block_bytes)


def over_capacity(rates: Tensor, units: int, block_bytes: int = 32 * 2**20) -> Tensor:
    """The capacity loss: rates log beta [B, H, T] -> scalar, the mean over rows t = 1 .. T of

        max(0, sum over i <= t of beta_i^(t - i) - units) / t

    in [0, 1). Blocks of at most `block_bytes` are computed again in the backward pass.
    """
    total = rates.shape[-1]
    per_block = max(1, block_bytes // (4 * rates.numel()))
    parts = [checkpoint(_excess, rates[..., :min(start + per_block, total)], start, units, use_reentrant=False,
                        preserve_rng_state=False) for start in range(0, total, per_block)]
    return torch.stack(parts).sum() / rates.numel()


def _excess(rates: Tensor, start: int, units: int) -> Tensor:
    """The capacity loss of the rows from `start` on, summed over rows, examples and heads."""
    rows = torch.arange(start, rates.shape[-1], device=rates.device)
    age = rows[:, None] - torch.arange(rates.shape[-1], device=rates.device)
    remaining = (age.clamp(min=0) * rates[..., None, :]).exp().tril(start).sum(-1)
    return ((remaining - units).clamp(min=0) / (rows + 1)).sum()
