"""What some models multiply their queries by behind RoPE. It is taken from the modules of a shadow, and `RopeTables`
does it, at the rank that a query has. Knows modules of transformers; knows no store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locret_stream.errors import UnsupportedModel


@dataclass(slots=True, frozen=True)
class QueryFactors:
    """Of one layer.

    Attributes:
        heads: query heads of all KV heads. of_ranks: from a capacity to the factors of ranks 0..capacity-1,
            [capacity, D or 1] fp32.
    """

    heads: int
    of_ranks: Callable[[int], Tensor]


class At:
    """Stands for transformers' cache in a probe, where it says how many tokens came before. K and V pass through it."""

    def __init__(self, position: int):
        self.position = position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens came before."""
        return self.position

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """K and V of the new tokens, as they are."""
        return key, value


def take_temperature(module: Any, heads: int, queries_at: Callable[[int], Tensor]) -> QueryFactors | None:
    """Take from an attention module the temperature by position of layers without RoPE (Llama 4, after
    arXiv:2501.19399), as it asks a cache for the position; None where it has none.

    Args:
        queries_at: the module's own queries [1, heads, 1, D] of one token that stands at that position.

    Raises:
        UnsupportedModel: its queries do not grow so.
    """
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return None
    floor, scale = float(module.floor_scale), float(module.attn_scale)

    def of_ranks(capacity: int) -> Tensor:
        steps = torch.floor((torch.arange(capacity, dtype=torch.float32) + 1) / floor)
        return (torch.log1p(steps) * scale + 1)[:, None]

    last = int(3 * floor)
    table, first = of_ranks(last + 1), queries_at(0)
    for position in (int(floor) - 1, last):
        expected = first.float() * table[position].item() / table[0].item()
        if not torch.allclose(queries_at(position).float(), expected, rtol=2e-2 if first.dtype.itemsize < 4 else 1e-4):
            raise UnsupportedModel(f"{type(module).__name__}: its queries at position {position} are not those at 0, "
                                   "times a temperature as Llama 4 has it")
    module.attn_temperature_tuning = False
    return QueryFactors(heads, of_ranks)
