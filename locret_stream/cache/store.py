"""The units of one slot: kept ones first, in time order, then a tail of new ones. Never knows who scored them.

Rank r of a layer is row r of its buffers. Rows 0 .. counts[l]-1 are committed; what a forward writes behind them is
not, until `commit` says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from locret_stream.cache.pool import Pool
from locret_stream.kernels import compact_units

Rotate = Callable[[int, Tensor, int, Tensor], Tensor]
"""(layer, keys [1, H, T, D] before RoPE, first rank, where the rotated ones are to be)."""


class UnitStore:
    """One slot of a pool. All views are of batch 1: keys, values [1, H, n, D]; scores [P, H, n]; positions [H, n]."""

    def __init__(self, pool: Pool, slot: int):
        self.pool, self.slot = pool, slot
        self.counts = [0] * len(pool.layers)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor, rotate: Rotate) -> None:
        """Write new units [1, H, T, D] at ranks start .. start+T-1, which must lie behind the committed ones."""
        buffers, stop = self.pool.layers[layer], start + keys.shape[2]
        assert self.counts[layer] <= start and stop <= buffers.keys.shape[2], "a forward writes the tail area only"
        buffers.keys[self.slot, :, start:stop] = keys[0]
        buffers.values[self.slot, :, start:stop] = values[0]
        if buffers.rotated is not buffers.keys:
            rotate(layer, keys, start, buffers.rotated[self.slot:self.slot + 1, :, start:stop])

    def keys(self, layer: int, count: int) -> Tensor:
        """Keys before RoPE of the first `count` ranks, [1, H, count, D]; a view, as all of these."""
        return self.pool.layers[layer].keys[self.slot:self.slot + 1, :, :count]

    def rotated(self, layer: int, count: int) -> Tensor:
        """Keys after RoPE, [1, H, count, D]; `keys` where the pool holds no rotated ones."""
        return self.pool.layers[layer].rotated[self.slot:self.slot + 1, :, :count]

    def values(self, layer: int, count: int) -> Tensor:
        """Values, [1, H, count, D]."""
        return self.pool.layers[layer].values[self.slot:self.slot + 1, :, :count]

    def scores(self, layer: int) -> Tensor:
        """Scores of the committed units, [P, H, n] fp32; plane 0 is what they compete by."""
        return self.pool.layers[layer].scores[self.slot, :, :, :self.counts[layer]]

    def positions(self, layer: int) -> Tensor:
        """Absolute positions of the committed units, [H, n] int64, ascending."""
        return self.pool.layers[layer].positions[self.slot, :, :self.counts[layer]]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Tensor | None,
               rotate: Rotate) -> None:
        """Take `new` written units over, and keep of all units those in `keep`.

        Args:
            first_position: absolute position of the first new unit.
            scores: [P, H, counts + new] fp32 for all units, old and new.
            keep: [H, B] int64 ascending ranks; None keeps everything.
            rotate: rotates keys for the ranks that units move to.
        """
        buffers, total = self.pool.layers[layer], self.counts[layer] + new
        buffers.scores[self.slot, :, :, :total] = scores
        positions = buffers.positions[self.slot]
        positions[:, total - new:total] = torch.arange(first_position, first_position + new, device=positions.device)
        if keep is None:
            self.counts[layer] = total
            return
        budget = keep.shape[1]
        compact_units([buffers.keys[self.slot, :, :total], buffers.values[self.slot, :, :total],
                       *buffers.scores[self.slot, :, :, :total], positions[:, :total]], keep, self.pool.scratch)
        if buffers.rotated is not buffers.keys:
            rotate(layer, self.keys(layer, budget), 0, self.rotated(layer, budget))
        self.counts[layer] = budget

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """Become a copy of another slot of the same pool: its committed units and the first `tail` written behind."""
        for buffers, count in zip(self.pool.layers, other.counts, strict=True):
            count += tail
            for tensor in buffers.tensors:
                cut = (Ellipsis, slice(count), slice(None)) if tensor.dim() == 4 and tensor is not buffers.scores \
                    else (Ellipsis, slice(count))
                tensor[self.slot][cut].copy_(tensor[other.slot][cut])
        self.counts = list(other.counts)

    def export(self) -> dict[str, Tensor]:
        """Copies of the committed units: `l.keys`, `l.values` [H, n, D], `l.scores` [P, H, n], `l.positions` [H, n]."""
        out: dict[str, Tensor] = {}
        for layer, (buffers, count) in enumerate(zip(self.pool.layers, self.counts, strict=True)):
            out[f"{layer}.keys"] = buffers.keys[self.slot, :, :count].clone()
            out[f"{layer}.values"] = buffers.values[self.slot, :, :count].clone()
            out[f"{layer}.scores"] = buffers.scores[self.slot, :, :, :count].clone()
            out[f"{layer}.positions"] = buffers.positions[self.slot, :, :count].clone()
        return out

    def load(self, units: dict[str, Tensor], rotate: Rotate) -> None:
        """Take over what `export` gave; shapes were checked by the caller."""
        for layer, buffers in enumerate(self.pool.layers):
            keys = units[f"{layer}.keys"].to(buffers.keys.device)
            count = keys.shape[1]
            buffers.keys[self.slot, :, :count] = keys
            buffers.values[self.slot, :, :count] = units[f"{layer}.values"]
            buffers.scores[self.slot, :, :, :count] = units[f"{layer}.scores"]
            buffers.positions[self.slot, :, :count] = units[f"{layer}.positions"]
            if buffers.rotated is not buffers.keys and count:
                rotate(layer, self.keys(layer, count), 0, self.rotated(layer, count))
            self.counts[layer] = count
