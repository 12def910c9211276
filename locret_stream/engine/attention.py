"""Attention of new tokens to the units of one context: by a kernel where that is faster, else with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from locret_stream.engine.layout import Layout
from locret_stream.kernels import prefill_attention
from locret_stream.models import Attachment, Attended, LayerCall, additive_mask, visible

MASKS = 4  # attention masks kept per device


class Attention:
    """Attention in one engine, with a cache of the masks that were used last."""

    def __init__(self, layout: Layout, attachment: Attachment):
        self.layout, self.attachment = layout, attachment
        self._masks: dict[tuple[Any, ...], Tensor] = {}  # the last ones used: a long stream always needs the same

    @property
    def bytes_resident(self) -> int:
        """Bytes of the cached masks."""
        return sum(mask.untyped_storage().nbytes() for mask in [*self._masks.values()])

    def attend(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, position: int) -> tuple[Attended, Tensor | None]:
        """Attention of the last T tokens, q [1, H*G, T, D], to all units, k and v [1, H, n+T, D], for `LayerCall`; and
        the rows' log-sum-exp [H*G, T] where a kernel computes it and the policy needs it. k has index keys behind it in
        layers with an index. `position`: of the first of the tokens, in the stream."""
        if call.asked is not None:
            return self._chosen(call, q, k, v, position), None
        new, total, unit = q.shape[2], k.shape[2], self.layout.shape.units[call.layer]
        window = unit.sliding
        if unit.blocks and window and position % window + new <= window:  # all are of one block: causal within it
            first = max(0, total - new - position % window)
            k, v, total, window = k[:, :, first:], v[:, :, first:], total - first, None
        if (window is None or not unit.blocks) and call.bias is None and self._by_kernel(call, total, window):
            out, lse = prefill_attention(q[0], k[0], v[0], call.scale, window=window,
                                         softcap=call.softcap, sink_logits=call.sink_logits,
                                         with_lse="column_sums" in self.layout.policy.needs)
            return out[None], lse
        first, mask = self._visible(call.layer, total - new, new, position)
        return (q, k[:, :, first:], v[:, :, first:], mask), None

    def attend_headwise(self, call: LayerCall, heads: Sequence[tuple[Tensor, Tensor]]
                        ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor | None]]]:
        """Attention of the last T tokens in a layer whose heads share a budget, [1, H*G, T, D]; and of each head its
        queries [G, T, D] and keys [1, n, D] after RoPE, and the rows' log-sum-exp [G, T], as of `attend`.

        Args:
            heads: of each rotated keys and values of the units that it keeps and of the new tokens, [1, 1, n, D].
        """
        layer, new, group, tables = call.layer, call.q.shape[2], call.q.shape[1] // len(heads), self.layout.tables
        out, seen = [], []
        for head, (k, v) in enumerate(heads):
            of_head = slice(head * group, (head + 1) * group)
            q = tables.rotate_queries(layer, call.q[:, of_head], k.shape[2] - new)
            if self.layout.on_load[layer]:
                k = tables.rotate(layer, k, 0)
            sinks = None if call.sink_logits is None else call.sink_logits[of_head]
            attended, lse = prefill_attention(q[0], k[0], v[0], call.scale, softcap=call.softcap, sink_logits=sinks,
                                              with_lse="column_sums" in self.layout.policy.needs)
            out.append(attended)
            seen.append((q[0], k[0], lse))
        return torch.cat(out)[None], seen

    def _chosen(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, position: int) -> Attended:
        """What attends in `attend` where a layer has an index."""
        new, total, dim = q.shape[2], k.shape[2], q.shape[-1]
        mask = call.chosen(k, self.layout.tables)
        if mask is None:
            mask = self._visible(call.layer, total - new, new, position)[1]
        k = k[..., :dim]
        return q, k, v if self.layout.shape.units[call.layer].value_dim else k, mask

    def _by_kernel(self, call: LayerCall, total: int, window: int | None) -> bool:
        """Whether `prefill_attention` is faster: in Triton always, in torch where it needs no mask."""
        return self.layout.triton[call.layer] or (self.attachment.attn == "sdpa" and call.softcap is None
                                                  and call.sink_logits is None and (window is None or window >= total))

    def _visible(self, layer: int, start: int, new: int, position: int) -> tuple[int, Tensor | None]:
        """The first rank that any of the new queries sees, and the mask from there on (None: one query sees all)."""
        unit, device = self.layout.shape.units[layer], self.attachment.places[layer].device
        reach = unit.reach(position)
        first = max(0, start + 1 - reach) if reach else 0
        if new == 1:
            return first, None
        before, in_block = start - first, position % unit.sliding if unit.blocks and unit.sliding else 0
        key = (before, new, unit.sliding or 0, unit.blocks, in_block, device)
        mask = self._masks.pop(key, None)
        if mask is None:
            positions = torch.arange(position - before, position + new, device=device)
            mask = additive_mask(visible(unit, positions[before:], positions), self.attachment.dtype)
        while len(self._masks) >= MASKS * len({place.device for place in self.attachment.places}):
            del self._masks[next(iter(self._masks))]
        self._masks[key] = mask
        return first, mask
