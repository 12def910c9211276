"""What attention is asked for in one layer, and what answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.config import UnitShape


@dataclass(slots=True)
class LayerCall:
    """One layer's attention, before RoPE: q [B, H*G, T, D], k and v [B, H, T, D].

    `hidden` [B, T, hidden] is the input of the attention module, after its norm. `softcap` bounds logits, in models
    that have one (Gemma2); `sink_logits` [H*G] are extra logits in the softmax's denominator (GPT-OSS). Where a layer
    reads the units of an earlier one and keeps none (Gemma 3n, Gemma 4), `layer` is that one, whose k and v these are,
    and `keeps` is False.
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

    @property
    def own_v(self) -> Tensor:
        """V, of no numbers where K is V, too (latent attention): what is stored, and scored, beside K."""
        return self.v[..., :0] if self.v is self.k else self.v


Attended = Tensor | tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The result of attention, [B, H*G, T, D]; or its operands: (q [B, H*G, T, D], k and v [B, H, S, D], mask [T, S]; None:
causal, where the last query sees all).

A mask is bool, True = visible, or the `additive_mask` of one, which callers can cache.
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
    """visible [T, S] bool -> [T, S] of `dtype` to add to logits: 0 where visible, else the lowest finite number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
