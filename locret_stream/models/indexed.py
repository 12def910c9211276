"""Layers that choose by an index what they attend to (DeepSeek Sparse Attention, DeepSeek-V3.2): of up to `index_topk`
units they choose all, so that a memory of no more is exact without the index. Knows modules of transformers; knows no
store.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn


def chosen_at_most(decoder: nn.Module, config: Any) -> int | None:
    """Spare a decoder its indexes; returns how many units its layers may hold for that, None if it has none."""
    most: int | None = getattr(config, "index_topk", None)
    indexed: list[Any] = [module for module in decoder.modules() if isinstance(getattr(module, "indexer", None),
                                                                               nn.Module)]
    if not indexed or not most:
        return None
    for module in indexed:
        module.indexer.forward = _choose_nothing
        module.forward = functools.partial(_with_a_mask, weakref.ref(module), type(module).forward)
    return most


def _choose_nothing(*args: object, **kwargs: object) -> Tensor:
    """Takes the place of an index: the attention of this library sees all units, and reads nothing of what it chose."""
    return torch.empty(0)


def _with_a_mask(this: weakref.ref[nn.Module], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of such a module, which reads a mask for its index, though no mask is made here."""
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1)
    return forward(this(), *args, **kwargs)
