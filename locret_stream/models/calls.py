"""What attention is asked for in one layer, and what answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.config import UnitShape
from locret_stream.models.indexed import Asked
from locret_stream.models.rotary import RopeTables


@dataclass(slots=True)
class LayerCall:
    """One layer's attention, before RoPE: q [B, H*G, T, D], k and v [B, H, T, D].

    `hidden` [B, T, hidden] is the input of the attention module, after its norm. `softcap` bounds logits, in models
    that have one (Gemma2); `sink_logits` [H*G], or [B, H*G, T] by token (Inkling 2), are extra logits in the softmax's
    denominator (GPT-OSS). `bias` [B, H*G, T, S] is added to the logits of all units that the layer has then, the new
    ones last: it depends on the token and on the distance of ranks (Inkling). Where a layer reads the units of an
    earlier one and keeps none (Gemma 3n, Gemma 4), `layer` is that one, whose k and v these are, and `keeps` is False.
    `asked` is what it asks its index, in layers that choose what they attend to.
    """

    layer: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    keeps: bool = True
    asked: Asked | None = None
    bias: Tensor | None = None

    @property
    def own_k(self) -> Tensor:
        """K, and behind its numbers those of the index key, if there is one: what is stored."""
        if self.asked is None:
            return self.k
        keys = self.asked.keys.to(self.k).expand(-1, self.k.shape[1], -1, -1)
        return torch.cat([self.k, keys], dim=-1)

    @property
    def own_v(self) -> Tensor:
        """V, of no numbers where K is V, too (latent attention): what is stored, and scored, beside K."""
        return self.v[..., :0] if self.v is self.k else self.v

    def chosen(self, own_k: Tensor, tables: RopeTables, row: int = 0) -> Tensor | None:
        """Which units the new tokens of one row of the batch attend to, as the index chooses them: bool [1, 1 or H*G,
        T, S]. None: all up to each token; and where the layer has no index. `own_k` [1, H, S, D] after RoPE: of all
        units that the row may see, from rank 0 to its last token."""
        if self.asked is None or (total := own_k.shape[2]) <= self.asked.index.most:
            return None
        pair, there = tables.layers[self.layer], self.asked.keys.device  # it may be the index of an earlier layer
        embeddings = None if pair is None else (pair[0][:, :total].to(there), pair[1][:, :total].to(there))
        index_keys = own_k[0, ..., self.k.shape[-1]:].to(there)
        return self.asked.of(row).visible(index_keys, embeddings, self.q.shape[1]).to(own_k.device)

    def to_itself(self, tables: RopeTables, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The operands where the new tokens are a text from its beginning, and attend to nothing else: q, k, v and the
        `mask`, [T, T] bool or None for a causal one, of which an index leaves what it chooses."""
        q, own_k = tables.rotate_queries(self.layer, self.q, 0), tables.rotate(self.layer, self.own_k, 0)
        chosen = [self.chosen(each[None], tables, row) for row, each in enumerate(own_k)] if self.asked else [None]
        if chosen[0] is not None:
            of_rows = torch.cat([each for each in chosen if each is not None])
            mask = of_rows if mask is None else of_rows & mask
        return q, own_k[..., :self.k.shape[-1]], self.v, mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False,
                     sink_logits: Tensor | None = None) -> Tensor:
    """Attention of q [B, H*G, T, D] over k and v [B, H, S, D] -> [B, H*G, T, D]; KV heads are never repeated. `mask` is
    bool or additive, and broadcasts to [B, H*G, T, S]."""
    if sink_logits is not None:  # one more unit, with a key of zeros and no value, whose mask is the extra logit
        (batch, heads, new, _), total = q.shape, k.shape[2]
        shown = q.new_zeros(batch, heads, new, total + 1)
        if causal:
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        if mask is not None:
            shown[..., :total] = additive_mask(mask, q.dtype) if mask.dtype == torch.bool else mask
        shown[..., total] = sink_logits.to(q.dtype)[:, None]
        k, v, mask, causal = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), shown, False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal,
                                          enable_gqa=q.shape[1] != k.shape[1])


Attended = Tensor | tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The result of attention, [B, H*G, T, D]; or its operands: (q [B, H*G, T, D], k and v [B, H, S, D], mask [T, S]; None:
causal, where the last query sees all).

A mask is bool, True = visible, or the `additive_mask` of one, which callers can cache; of layers that choose what they
attend to it may be [B, 1 or H*G, T, S].
"""

Step = Callable[[LayerCall], Attended]


def visible(unit: UnitShape, queries: Tensor, keys: Tensor) -> Tensor:
    """Which tokens a layer of that shape sees: bool [T, S], of the positions of queries [T] and of keys [S]."""
    distance = queries[:, None] - keys
    seen = distance >= 0
    if unit.sliding and unit.blocks:
        return seen & (queries[:, None] // unit.sliding == keys // unit.sliding)
    return seen & (distance < unit.sliding) if unit.sliding else seen


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible [..., T, S] bool -> [..., T, S] of `dtype` to add to logits: 0 where visible, else the lowest finite
    number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
