"""The model with a memory that evicts softly, and the divergence of its answers from those of the full cache.

Chunks, budgets, protection and positions are those of the engine (see `engine.core`): the rows of a chunk see the units
committed before it through `gates`, at the ranks that these have in a budget, and each other without gates. With
`rivals` there are units before the example's own, see `background`; layers with a sliding window see none of these. At
temperature 0 it computes what the engine does, except for that. Knows nothing of steps and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locret_stream.errors import UnsupportedModel
from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment, Attended, LayerCall, visible
from locret_stream.training.background import Rivals
from locret_stream.training.gates import gated_attention, visibility


class Student:
    """Runs an attached model with soft eviction; gradients are for the heads alone (see `models.gradients`).

    Args:
        heads: of output "score" (for "retention" see `Fading`).
        budgets: units by layer, [L], as `Budget.per_layer` gives them.
        sinks, stabilizers: of every budget. longest: tokens of the longest example.
        block_bytes: bound of one tensor of attention logits.

    Raises:
        UnsupportedModel: layers of the model share units.

    Attributes:
        absolute: tables for the ranks that tokens have where nothing is evicted.
        rivals: by layer, the units that are kept before an example begins; empty for none.
    """

    def __init__(self, attachment: Attachment, heads: RetainingHeads, budgets: Sequence[int], chunk_size: int,
                 sinks: int, stabilizers: int, longest: int, block_bytes: int = 32 * 2**20):
        if attachment.shares:
            raise UnsupportedModel("heads are not tuned on a model whose layers share units; expected `train-heads` "
                                   "without --tune")
        if attachment.shape.chooses:
            raise UnsupportedModel("heads are not tuned on a model whose layers choose by an index what they attend "
                                   "to; expected `train-heads` without --tune")
        self.attachment, self.heads, self.budgets, self.chunk_size = attachment, heads, tuple(budgets), chunk_size
        self.protected, self.block_bytes = (sinks, stabilizers), block_bytes
        self.tables = attachment.tables(max(budgets) + chunk_size)
        self.rivals: Mapping[int, Rivals] = {}
        self.absolute = attachment.tables(longest)

    def hidden(self, ids: Tensor, temperature: float) -> Tensor:
        """ids [B, T] -> hidden states [B, T, hidden]; with a graph within `differentiable`."""
        return self.attachment.hidden(ids, lambda call: self._attend(call, temperature))

    def _attend(self, call: LayerCall, temperature: float) -> Attended:
        layer, total = call.layer, call.k.shape[2]
        if self.attachment.shape.units[layer].sliding:
            return self._sliding(call)
        before = keys, values, rival_scores = self._before(call)
        count = keys.shape[2]
        first = next((start for start in range(0, total, self.chunk_size)
                      if count + start > self.budgets[layer]), total)
        k = self.tables.rotate(layer, torch.cat([keys, call.k[:, :, :first]], 2), 0)
        q = self.tables.rotate_queries(layer, call.q[:, :, :first], count)
        if first == total and not count:  # nothing is evicted
            return q, k, call.v, None
        out = [self._rows(call, q, k, torch.cat([values, call.v[:, :, :first]], 2), torch.zeros_like(rival_scores))]
        scores = self._scores(call)
        for start in range(first, total, self.chunk_size):
            out.append(self._chunk(call, before, scores[..., :start], min(start + self.chunk_size, total), temperature))
        return torch.cat(out, 2)

    def _before(self, call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [B, H, n, D] and scores [B, H, n] of the units that are kept before the example."""
        batch, heads, _, dim = call.k.shape
        if call.layer not in self.rivals:
            none = call.k.new_zeros(batch, heads, 0, dim)
            return none, none, torch.zeros(batch, heads, 0, dtype=torch.float32, device=call.k.device)
        rivals = self.rivals[call.layer]
        scores = rivals.scores(self.heads, call.layer)
        return (rivals.keys.expand(batch, *rivals.keys.shape), rivals.values.expand(batch, *rivals.values.shape),
                scores.expand(batch, *scores.shape))

    def _scores(self, call: LayerCall) -> Tensor:
        """Scores [B, H, T]; in a layer without a head the newest units score best."""
        if not self.heads.config.has_head(call.layer):
            count = call.k.shape[2]
            return torch.arange(count, dtype=torch.float32, device=call.k.device).expand(*call.k.shape[:2], count)
        scores = self.heads.score(call.layer, call.q, call.k, call.own_v, call.hidden)
        return torch.cat([self.heads.averaged(chunk) for chunk in scores.split(self.chunk_size, -1)], -1)

    def _chunk(self, call: LayerCall, before: tuple[Tensor, Tensor, Tensor], scores: Tensor, stop: int,
               temperature: float) -> Tensor:
        """Attention of the rows up to `stop` over the rivals `before`, the n units with these `scores` [B, H, n] and
        the rows themselves."""
        layer, start = call.layer, scores.shape[-1]
        budget, tables = self.budgets[layer], self.tables
        gates, ranks = visibility(torch.cat([before[2], scores], -1), budget, *self.protected, temperature)
        committed = tables.rotate_at(layer, torch.cat([before[0], call.k[:, :, :start]], 2), ranks)
        k = torch.cat([committed, tables.rotate(layer, call.k[:, :, start:stop], budget)], 2)
        q = tables.rotate_queries(layer, call.q[:, :, start:stop], budget)
        return self._rows(call, q, k, torch.cat([before[1], call.v[:, :, :stop]], 2), gates)

    def _rows(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return gated_attention(q, k, v, gates, scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits,
                               block_bytes=self.block_bytes)

    def _sliding(self, call: LayerCall) -> Attended:
        """Attention without gates: the rows of a chunk see the last units before it, as many as the layer keeps, within
        the window."""
        layer, ranks = call.layer, torch.arange(call.k.shape[2], device=call.k.device)
        first = ranks // self.chunk_size * self.chunk_size - self.budgets[layer]
        mask = visible(self.attachment.shape.units[layer], ranks, ranks) & (ranks >= first[:, None])
        q, k = self.absolute.rotate_queries(layer, call.q, 0), self.absolute.rotate(layer, call.k, 0)
        return q, k, call.v, mask


class Fading(Student):
    """A `Student` whose units fade instead of being evicted, as in the training of TRIM-KV (arXiv:2512.03324). In
    layers without a head nothing fades.

    Heads of output "retention" give every unit a rate beta in (0, 1). The row at t sees the unit at i with the logit
    beta_i^(t - i) q_t·k_i (retention-gated attention, in which a fully faded logit is 0), and the capacity loss asks
    that beta_i^(t - i), summed over all units, is at most the budget. Evicting by beta_i^(t - i) then removes units
    that hardly counted.

    Deviations: beside the capacity loss there is the divergence from the full cache's answers alone, without a
    next-token loss; the summed rates are those that the frozen model's own activations give.
    """

    def _attend(self, call: LayerCall, temperature: float) -> Attended:
        layer = call.layer
        if self.attachment.shape.units[layer].sliding:
            return self._sliding(call)
        q, k = self.absolute.rotate_queries(layer, call.q, 0), self.absolute.rotate(layer, call.k, 0)
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


def divergence(attachment: Attachment, teacher: Tensor, student: Tensor, block_bytes: int = 32 * 2**20) -> Tensor:
    """KL(teacher || student) of next tokens, mean over rows, in nats; hidden states [R, hidden] of both -> scalar.

    Gradients go to the student's states. The logits of a block of rows are computed again in the backward pass.
    """
    per_block = max(1, block_bytes // (4 * attachment.shape.vocab))

    def block(teacher: Tensor, student: Tensor) -> Tensor:
        with torch.no_grad():
            expected = attachment.logits(teacher[None]).float().log_softmax(-1)
        actual = attachment.logits(student[None]).float().log_softmax(-1)
        return F.kl_div(actual, expected, reduction="sum", log_target=True)

    parts = [checkpoint(block, *blocks, use_reentrant=False, preserve_rng_state=False)
             for blocks in zip(teacher.split(per_block), student.split(per_block), strict=True)]
    return torch.stack(parts).sum() / len(teacher)
