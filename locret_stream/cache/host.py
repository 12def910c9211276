"""What a layer of codes has beside them where exact units are in the host's memory. Knows no slot's units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.config import UnitShape


@dataclass(slots=True)
class HostRows:
    """Exact units of all slots of one layer in the host's memory, at places which do not follow their ranks: moving
    rows at each commit would copy all of them.

    keys, values: [S, H, b, D] of the model's dtype, K before RoPE; pinned where the device is CUDA. V of no numbers
        where K is V, too.
    places: [S, H, b] int64 on the host: of each rank its row; behind the committed units the rows that are free, so
        that the row of a slot is a permutation.
    """

    keys: Tensor
    values: Tensor
    places: Tensor

    @classmethod
    def empty(cls, slots: int, unit: UnitShape, units: int, dtype: torch.dtype, device: torch.device) -> HostRows:
        """Room for `units` units of that shape in each slot, beside a layer on that device."""
        host = device if device.type == "meta" else torch.device("cpu")
        keys, values = (torch.zeros(slots, unit.kv_heads, units, dim, dtype=dtype, device=host,
                                    pin_memory=device.type == "cuda") for dim in unit.dims)
        return cls(keys, values, torch.arange(units, device=host).repeat(slots, unit.kv_heads, 1))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, with an axis of slots."""
        return [self.keys, self.values, self.places]


@dataclass(slots=True)
class HotUnits:
    """The units of all slots of one layer that are exact on the device for the next token, in place of their codes.

    keys, values: [S, H, k, D]; K at its rank, after RoPE. ranks: [S, H, k] int64.
    """

    keys: Tensor
    values: Tensor
    ranks: Tensor

    @classmethod
    def empty(cls, slots: int, unit: UnitShape, units: int, dtype: torch.dtype, device: torch.device) -> HotUnits:
        """Room for `units` units of that shape in each slot."""
        keys, values = (torch.zeros(slots, unit.kv_heads, units, dim, dtype=dtype, device=device)
                        for dim in (unit.key_dim, unit.value_dim))
        return cls(keys, values, torch.zeros(slots, unit.kv_heads, units, dtype=torch.int64, device=device))
