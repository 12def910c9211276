"""The tensors of one layer of a pool. Knows no slot's units."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from locret_stream.budgets import row_bytes
from locret_stream.kernels import slot_units, write_units


@dataclass(slots=True)
class LayerBuffers:
    """All slots of one layer. keys, rotated, values [S, H, C, D]; scores [S, P, H, C]; positions [S, H, C].

    `rotated` is `keys` itself where no rotated keys are kept. All layers of a device share one `scratch`.
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
        unrotated = [self.keys, self.values, self.scores, self.positions]
        return unrotated if self.rotated is self.keys else [*unrotated, self.rotated]

    def write_each(self, slots: Tensor, ranks: Tensor, keys: Tensor, rotated: Tensor, values: Tensor) -> None:
        """Write one new unit for each of A slots, behind its committed units.

        On an accelerator the indices stay on the device, so that the host does not wait for it.

        Args:
            slots, ranks: [A], for every unit its slot and its rank there.
            keys, rotated, values: [A, H, 1, D]; the keys before and after RoPE.
        """
        if len(slots) == 1 and slots.device.type == "cpu":
            slot, rank = int(slots), int(ranks)
            slot_units(self.keys, slot, rank, rank + 1).copy_(keys)
            slot_units(self.values, slot, rank, rank + 1).copy_(values)
            if self.rotated is not self.keys:
                slot_units(self.rotated, slot, rank, rank + 1).copy_(rotated)
            return
        if self.rotated is self.keys:
            write_units((self.keys, self.values), (keys, values), slots, ranks)
        else:
            write_units((self.keys, self.values, self.rotated), (keys, values, rotated), slots, ranks)


@dataclass(slots=True)
class Dense:
    """Units as attention reads them: keys, values and rotated keys, [3, H, C, D], of one slot and layer at a time.

    parts: views of the three, [1, H, C, D] each.
    owner: whose they are, and of which layer.
    right: how many of the first ranks of each of the three are as the owner has them.
    """

    units: Tensor
    parts: tuple[Tensor, ...] = field(init=False)
    owner: tuple[object, int] | None = None
    right: list[int] = field(default_factory=lambda: [0, 0, 0])

    def __post_init__(self) -> None:
        self.parts = self.units.split(1)


@dataclass(slots=True)
class QuantisedBuffers(LayerBuffers):
    """All slots of one layer whose committed units are codes.

    keys (also as `rotated`), values: rows of codes, [S, H, b, bytes] uint8; where K or V is kept at 16 bits, a row
    holds its channels' bytes.
    exact_keys, exact_values: [S, H, first + chunk, D], the first units, then those behind the committed ones.
    means: of keys, those of the stream and those of a focus, [S, 2, H, D] fp32; `given`: they came with the heads; all
        slots share them, so they are not among a slot's tensors.
    dense: what was read of them last.
    """

    exact_keys: Tensor
    exact_values: Tensor
    means: Tensor
    given: bool
    dense: Dense

    @classmethod
    def empty(cls, slots: int, heads: int, dim: int, units: int, exact: int, store_bits: tuple[int, int], *,
              scores: Tensor, positions: Tensor, scratch: Tensor, dense: Dense,
              means: Tensor | None = None) -> QuantisedBuffers:
        """Buffers of `units` coded units and `exact` exact ones, in the dtype of `dense`; `means` [H, D] if given."""
        dtype, device = dense.units.dtype, dense.units.device
        keys, values = (torch.zeros(slots, heads, units, stored_row(dim, bits, dtype), dtype=torch.uint8, device=device)
                        for bits in store_bits)
        exact_keys = torch.zeros(slots, heads, exact, dim, dtype=dtype, device=device)
        own = (torch.zeros(slots, 2, heads, dim, dtype=torch.float32, device=device) if means is None else
               means.to(device, torch.float32).expand(slots, 2, heads, dim))
        return cls(keys=keys, rotated=keys, values=values, scores=scores, positions=positions, scratch=scratch,
                   exact_keys=exact_keys, exact_values=torch.zeros_like(exact_keys), means=own,
                   given=means is not None, dense=dense)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of this layer that have slots."""
        means = [] if self.given else [self.means]
        return [self.keys, self.values, self.exact_keys, self.exact_values, *means, self.scores, self.positions]


def stored_row(dim: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes of a row of K or V: of codes, or, at 16 bits, of the channels themselves."""
    return dim * dtype.itemsize if bits == 16 else row_bytes(dim, bits)
