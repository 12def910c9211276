"""What a layer of codes has beside them where exact units are in the host's memory: whose row is where."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from locret_stream.config import UnitShape


@dataclass(slots=True)
class HostRows:
    """Exact units of all slots of one layer in the host's memory, at places which do not follow their ranks: moving
    rows at each commit would copy all of them.

    units: [S, H, b, D_K + D_V] of the model's dtype, K before RoPE and then V, so that one copy fetches both. V of no
        numbers where K is V, too. Not pinned: what is fetched is gathered first, so that no copy is of this tensor.
        Where heads share a budget, any row may be of any head.
    keys, values: the two parts of it, [S, H, b, D]. rows: of each slot the whole of it, head by head, [H * b, ...].
    places: [S, H * b] int64 on the host: of each row of codes, head by head, which of `rows` has the same unit exactly;
        where no unit lies, one that is free, so that they are a permutation.
    lent: of each slot that reads the rows of another one, which it is, and the places of its units there: a copy of a
        slot takes no rows of its own until either of the two writes (`own`).
    """

    units: Tensor
    keys: Tensor
    values: Tensor
    rows: list[Tensor]
    places: Tensor
    lent: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def empty(cls, slots: int, unit: UnitShape, units: int, dtype: torch.dtype, device: torch.device) -> HostRows:
        """Room for `units` units of that shape in each slot, beside a layer on that device."""
        host = device if device.type == "meta" else torch.device("cpu")
        heads, dims = unit.kv_heads, unit.dims
        both = torch.zeros(slots, heads, units, sum(dims), dtype=dtype, device=host)
        keys, values = both.split(dims, dim=-1)
        return cls(both, keys, values, [slot.flatten(0, 1) for slot in both],
                   torch.arange(heads * units, device=host).repeat(slots, 1))

    def read(self, slot: int, at: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """K before RoPE and V, [N, D], of the rows `at` [N]: two parts of one copy, on the host or on a device."""
        rows = self.rows[self._source(slot)].index_select(0, at)
        keys, values = (rows if device is None else rows.to(device)).split_with_sizes(
            (self.keys.shape[-1], self.values.shape[-1]), dim=-1)
        return keys, values

    def read_part(self, slot: int, at: Tensor, part: int) -> Tensor:
        """K before RoPE (part 0) or V (part 1), [N, D], of the rows `at` [N]."""
        return (self.keys, self.values)[part][self._source(slot)].flatten(0, 1).index_select(0, at)

    def write(self, slot: int, at: Tensor, units: tuple[Tensor, Tensor]) -> None:
        """Write K before RoPE and V, [N, D], to the rows `at` [N]."""
        for held, rows in zip(self.rows[slot].split((self.keys.shape[-1], self.values.shape[-1]), dim=-1), units,
                              strict=True):
            held[at] = rows.to(held.device)

    def _source(self, slot: int) -> int:
        """The slot whose rows that one reads."""
        return self.lent[slot][0] if slot in self.lent else slot

    def lend(self, slot: int, to: int, live: Tensor) -> None:
        """Let another slot have the units of this one, which lie at the rows `live` [N] of codes."""
        self.own(to)
        self.places[to] = self.places[slot]
        self.lent[to] = self._source(slot), self.places[slot][live]

    def own(self, slot: int) -> None:
        """Whatever writes rows of a slot calls this first: from then on it shares none."""
        for other in [slot, *(other for other, (source, _) in self.lent.items() if source == slot)]:
            if other in self.lent:
                _, at = self.lent[other]
                rows = self.rows[self._source(other)].index_select(0, at)
                del self.lent[other]
                self.rows[other][at] = rows

    def forget(self, slot: int) -> None:
        """The slot begins anew, and needs what was lent to it no more."""
        self.lent.pop(slot, None)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, with an axis of slots."""
        return [self.units, self.places]


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
