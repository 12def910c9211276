"""Modules that ask attention for more than q, k and v, in place of which units become wider. Such a module has a config
of its own that names another attention function, so that the others are as quick as they were. Knows modules of
transformers; knows no store.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from locret_stream.models.calls import LayerCall

_BIASED, _TWICE = "locret-biased", "locret-twice"


def keep_biases(decoder: nn.Module) -> int | None:
    """Make modules that add a number of each key to its logits (the dynamic mask of Doge, made of values) keep it as
    one more number of the key, which queries multiply by 1. Returns how many keys they see all of, as of more they see
    those with the largest numbers; None where no module is such a one."""
    biased: list[Any] = [module for module in decoder.modules() if hasattr(module, "prepare_dynamic_mask")]
    for module in biased:
        module.prepare_dynamic_mask = _as_it_is
        _ask_otherwise(module, _BIASED)
    return min((module.keep_window_size for module in biased), default=None)


def join_pairs(asked: Sequence[tuple[Any, LayerCall]]) -> bool:
    """Make modules that asked twice for attention of the same q and k, to one half of the values and to the other
    (DiffLlama), ask once for both, side by side; whether there are any."""
    times = Counter(id(module) for module, _ in asked)
    pairs = {id(first): first for (first, one), (second, other) in itertools.pairwise(asked)
             if first is second and times[id(first)] == 2 and one.k is other.k and one.v.shape == other.v.shape}
    for module in pairs.values():
        _ask_otherwise(module, _TWICE)
        module.locret_first = None
    return bool(pairs)


def _ask_otherwise(module: Any, name: str) -> None:
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = name


def _as_it_is(*, dt_states: Tensor, **kwargs: object) -> Tensor:
    """Takes the place of what makes a mask of such numbers [B, H, T]: they are the same for all queries."""
    return dt_states[:, :, None]


def _biased(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, scaling: float | None = None,
            **kwargs: object) -> tuple[Tensor, None]:
    """transformers calls this with the numbers as a mask [B, H*G, 1, T]."""
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    biases = attention_mask[:, ::q.shape[1] // k.shape[1], 0, :, None] / scale
    q, k = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1), torch.cat([k, biases.to(k.dtype)], dim=-1)
    found: tuple[Tensor, None] = module.locret_attachment()._attend(module, q, k, v, scale, kwargs)
    return found


def _twice(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
           **kwargs: object) -> tuple[Tensor, None]:
    """transformers calls this with one half of the values, and then, with the same keys, with the other. What the first
    call returns is filled in by the second, before anything reads it."""
    keys, before, first = module.locret_first or (None, v, v)
    if keys is not k:  # another forward may have failed between the two
        module.locret_first = k, v, q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[-1])
        return module.locret_first[2], None
    module.locret_first = None
    both, _ = module.locret_attachment()._attend(module, q, k, torch.cat([before, v], dim=-1), scaling, kwargs)
    width = v.shape[-1]
    first.copy_(both[..., :width])
    return both[..., width:], None


AttentionInterface.register(_BIASED, _biased)
AttentionInterface.register(_TWICE, _twice)
