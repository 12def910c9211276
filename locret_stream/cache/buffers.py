"""The tensors of one layer of a pool. Knows no slot's units."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from locret_stream.budgets import row_bytes
from locret_stream.cache.host import HostRows, HotUnits
from locret_stream.config import UnitShape
from locret_stream.kernels import slot_units, write_units


@dataclass(slots=True)
class LayerBuffers:
    """All slots of one layer. keys, rotated, values [S, H, C, D]; scores [S, P, H, C]; positions [S, H, C]. Where heads
    share a budget they have one axis of H * C rows, as if of one head (`cache.headwise_store`).

    `rotated` is `keys` itself where no rotated keys are kept, and `values` is `rotated` where K is V, too. All layers
    of a device share one `scratch`.
    """

    keys: Tensor
    rotated: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    scratch: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of this layer, each once; `scratch`, which layers share, is left out."""
        return list(dict.fromkeys([self.keys, self.values, self.scores, self.positions, self.rotated]))

    @property
    def moved(self) -> list[Tensor]:
        """Those of K and V that move as they are; rotated keys are made anew."""
        return [self.keys] if self.values is self.rotated else [self.keys, self.values]

    def write_each(self, slots: Tensor, ranks: Tensor, keys: Tensor, rotated: Tensor, values: Tensor) -> None:
        """Write one new unit for each of A slots, behind its committed units.

        On an accelerator the indices stay on the device, so that the host does not wait for it.

        Args:
            slots, ranks: [A], for every unit its slot and its rank there.
            keys, rotated, values: [A, H, 1, D]; the keys before and after RoPE.
        """
        written = [(self.keys, keys)]
        if self.values is not self.rotated:
            written.append((self.values, values))
        if self.rotated is not self.keys:
            written.append((self.rotated, rotated))
        if len(slots) == 1 and slots.device.type == "cpu":
            slot, rank = int(slots), int(ranks)
            for tensor, unit in written:
                slot_units(tensor, slot, rank, rank + 1).copy_(unit)
            return
        tensors, units = zip(*written, strict=True)
        write_units(tensors, units, slots, ranks)


@dataclass(slots=True)
class Dense:
    """Units as attention reads them, of one slot and layer at a time.

    parts: keys, values and rotated keys, [1, H, C, D] each; where K is V, too, the last two are one tensor.
    owner: whose they are, of which layer, and whether committed units are exact, from the host's memory.
    right: how many of the first ranks of each of the three are as the owner has them.
    shown: which of the owner's hot units stand in place of their codes (`cache.host`); cold: the rows where they stand,
        of all heads, and what stood there of values and of rotated keys.
    """

    parts: tuple[Tensor, Tensor, Tensor]
    owner: tuple[object, int, bool] | None = None
    right: list[int] = field(default_factory=lambda: [0, 0, 0])
    shown: object = None
    cold: tuple[Tensor, list[Tensor]] | None = None

    @classmethod
    def empty(cls, unit: UnitShape, room: int, dtype: torch.dtype, device: torch.device) -> Dense:
        """For at most `room` units of that shape."""
        keys, values, rotated = (torch.zeros(1, unit.kv_heads, room, dim, dtype=dtype, device=device)
                                 for dim in (*unit.dims, unit.key_dim))
        return cls((keys, values if unit.value_dim else rotated, rotated))


@dataclass(slots=True)
class QuantisedBuffers(LayerBuffers):
    """All slots of one layer whose committed units are codes.

    keys (also as `rotated`, and as `values`, where K is V, too), values: rows of codes, [S, H, b, bytes] uint8; where
    K or V is kept at 16 bits, a row holds its channels' bytes.
    exact_keys, exact_values: [S, H, first + residual + chunk, D], the first units, the last committed ones where some
        stay exact, then those behind them.
    means: of keys, those of the stream and those of a focus, [S, 2, H, D] fp32; `given`: they came with the heads; all
        slots share them, so they are not among a slot's tensors.
    dense: what was read of them last.
    host, hot: where exact units are in the host's memory.
    """

    exact_keys: Tensor
    exact_values: Tensor
    means: Tensor
    given: bool
    dense: Dense
    host: HostRows | None = None
    hot: HotUnits | None = None

    @classmethod
    def empty(cls, slots: int, unit: UnitShape, coded: tuple[int, int], exact: int, store_bits: tuple[int, int], *,
              scores: Tensor, positions: Tensor, scratch: Tensor, dense: Dense, means: Tensor | None = None,
              host: HostRows | None = None, hot: HotUnits | None = None) -> QuantisedBuffers:
        """Buffers of codes, for so many heads so many rows (`coded`), and of `exact` exact units of each head, in the
        dtype of `dense`; `means` [H, D] if given."""
        heads, dtype, device = unit.kv_heads, dense.parts[0].dtype, dense.parts[0].device
        keys, values = (torch.zeros(slots, *coded, stored_row(dim, bits, dtype), dtype=torch.uint8, device=device)
                        for dim, bits in zip(unit.dims, store_bits, strict=True))
        exact_keys, exact_values = (torch.zeros(slots, heads, exact, dim, dtype=dtype, device=device)
                                    for dim in unit.dims)
        of_means = 2, heads, unit.key_dim
        own = (torch.zeros(slots, *of_means, dtype=torch.float32, device=device) if means is None else
               means.to(device, torch.float32).expand(slots, *of_means))
        return cls(keys=keys, rotated=keys, values=values if unit.value_dim else keys, scores=scores,
                   positions=positions, scratch=scratch, exact_keys=exact_keys, exact_values=exact_values, means=own,
                   given=means is not None, dense=dense, host=host, hot=hot)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of this layer that have slots, on its device."""
        means = [] if self.given else [self.means]
        hot = [] if self.hot is None else [self.hot.keys, self.hot.values, self.hot.ranks]
        return list(dict.fromkeys([self.keys, self.values, self.exact_keys, self.exact_values, *means, self.scores,
                                   self.positions, *hot]))


def stored_row(dim: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes of a row of K or V: of codes, or, at 16 bits, of the channels themselves."""
    return dim * dtype.itemsize if bits == 16 else row_bytes(dim, bits)
