"""The units of one slot: the committed ones first, in time order, then a tail of new ones. Knows no policy.

Rank r of a layer is row r of its buffers. Rows 0 .. counts[l]-1 are committed; the rows that a forward pass writes
behind them are not, until `commit` takes them over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from locret_stream.cache.pool import Pool
from locret_stream.kernels import compact_units

Rotate = Callable[[int, Tensor, int, Tensor], Tensor]
"""Applies RoPE: (layer, keys [1, H, T, D], rank of the first, where to write the rotated keys) -> these."""
Keep = Tensor | Sequence[Tensor]
"""Ascending ranks of the units that stay: [H, n], or [n_h] of each head where the heads share a budget."""


class UnitStore:
    """One slot of a pool. All views are of batch 1: keys, values [1, H, n, D]; scores [P, H, n]; positions [H, n].

    Attributes:
        counts: committed units of each layer. fronts: how many of them, at the first ranks, are of a focus.
    """

    def __init__(self, pool: Pool, slot: int):
        self.pool, self.slot = pool, slot
        self.counts, self.fronts = [0] * len(pool.layers), [0] * len(pool.layers)

    def held(self, layer: int) -> int:
        """Committed units per KV head of a layer: the mean, rounded up, where its heads share a budget."""
        return self.counts[layer]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor, rotate: Rotate) -> None:
        """Write new units [1, H, T, D] at ranks start .. start+T-1, which must lie behind the committed ones."""
        buffers, stop = self.pool.layers[layer], start + keys.shape[2]
        assert self.counts[layer] <= start and stop <= buffers.keys.shape[2], "a forward writes the tail area only"
        buffers.keys[self.slot, :, start:stop] = keys[0]
        if buffers.values is not buffers.rotated:
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

    def attended(self, layer: int, count: int, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """Keys before and after RoPE (before it, where the pool holds no rotated ones), and values, of the first
        `count` ranks, [1, H, count, D] each."""
        return self.keys(layer, count), self.rotated(layer, count), self.values(layer, count)

    def rows(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `count` committed units as they are stored, [H, count, D]; V of no numbers where K is V,
        too."""
        buffers = self.pool.layers[layer]
        keys = buffers.keys[self.slot, :, :count]
        return keys, keys[..., :0] if buffers.values is buffers.rotated else buffers.values[self.slot, :, :count]

    def scores(self, layer: int) -> Tensor:
        """Scores of the committed units, [P, H, n] fp32; plane 0 is what they compete by."""
        return self.pool.layers[layer].scores[self.slot, :, :, :self.counts[layer]]

    def positions(self, layer: int) -> Tensor:
        """Absolute positions of the committed units, [H, n] int64, ascending."""
        return self.pool.layers[layer].positions[self.slot, :, :self.counts[layer]]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Keep | None,
               rotate: Rotate) -> None:
        """Commit the last `new` written units, and keep of all units those at the ranks `keep`.

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
        assert isinstance(keep, Tensor), "every head keeps as many"
        budget = keep.shape[1]
        compact_units([*(rows[self.slot, :, :total] for rows in buffers.moved),
                       *buffers.scores[self.slot, :, :, :total], positions[:, :total]], keep, buffers.scratch)
        if buffers.rotated is not buffers.keys:
            rotate(layer, self.keys(layer, budget), 0, self.rotated(layer, budget))
        self.counts[layer] = budget

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """Copy another slot of the same pool: its committed units and the first `tail` units written behind them."""
        for layer, buffers in enumerate(self.pool.layers):
            used = other._used(layer, tail)
            for tensor in buffers.tensors:
                axis = -1 if tensor is buffers.scores or tensor is buffers.positions else -2
                tensor[self.slot].narrow(axis, 0, used).copy_(tensor[other.slot].narrow(axis, 0, used))
        self.counts, self.fronts = list(other.counts), list(other.fronts)
        self._copy_state(other)

    def _used(self, layer: int, tail: int) -> int:
        """The rows from the first one on in which committed units lie, and `tail` behind them."""
        return self.counts[layer] + tail

    def put_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Keep, front: int,
                     rotate: Rotate) -> None:
        """Write units (K before RoPE and V, [1, H, q, D] each; None for none) at the first ranks of a layer, and behind
        them those of its units that are kept: those of the ascending ranks `keep` [H, n]. Then the first `front` are of
        a focus."""
        buffers, slot = self.pool.layers[layer], self.slot
        assert isinstance(keep, Tensor), "every head keeps as many"
        new = 0 if units is None else units[0].shape[2]
        total = new + keep.shape[1]
        assert total <= buffers.keys.shape[2]
        for rows in (rows[slot] for rows in buffers.moved):
            rows[:, new:total] = rows.gather(1, keep[..., None].expand(-1, -1, rows.shape[-1]))
        for row in (*buffers.scores[slot], buffers.positions[slot]):
            row[:, new:total] = row.gather(1, keep)
        self._write_front(layer, units)
        if buffers.rotated is not buffers.keys and total:
            rotate(layer, self.keys(layer, total), 0, self.rotated(layer, total))
        self.counts[layer], self.fronts[layer] = total, front

    def _stored(self, layer: int, keys: Tensor, values: Tensor, *, focus: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [H, T, D] of new committed units, of a `focus` or of the stream, as rows of the buffers."""
        return keys, values

    def _write_front(self, layer: int, units: tuple[Tensor, Tensor] | None) -> int:
        """Write units at the first ranks, with score 0 and negative positions; returns how many they are."""
        if units is None:
            return 0
        buffers, new = self.pool.layers[layer], units[0].shape[2]
        keys, values = self._stored(layer, units[0][0], units[1][0], focus=True)
        for rows, units_of in zip(buffers.moved, (keys, values), strict=False):
            rows[self.slot, :, :new] = units_of
        buffers.scores[self.slot, :, :, :new] = 0
        buffers.positions[self.slot, :, :new] = torch.arange(-new, 0, device=buffers.positions.device)
        return new

    # -- the recurrent state ----------------------------------------------------------------------------------

    @property
    def _here(self) -> slice:
        return slice(self.slot, self.slot + 1)

    def state(self, *, provisional: bool) -> list[Tensor]:
        """Copies of the tensors of the recurrent state, [1, ...] each: that of the committed units, or the one that
        goes on with the provisional ones."""
        return self.pool.states.read(self._here, provisional=provisional)

    def keep_state(self, tensors: Sequence[Tensor], *, provisional: bool) -> None:
        """Replace one of these."""
        self.pool.states.write(self._here, tensors, provisional=provisional)

    def _copy_state(self, other: UnitStore) -> None:
        for provisional in (False, True):
            self.keep_state(other.state(provisional=provisional), provisional=provisional)

    # -- as tensors -------------------------------------------------------------------------------------------

    def beside(self) -> dict[str, Tensor]:
        """Copies of what is stored beside the units: the recurrent state that belongs to them, once there are any."""
        if not any(count > front for count, front in zip(self.counts, self.fronts, strict=True)):
            return {}
        return {form.name: tensor[0] for form, tensor in zip(self.pool.states.forms, self.state(provisional=False),
                                                             strict=True)}

    def export(self) -> dict[str, Tensor]:
        """Copies of the committed units of each layer l, without those of a focus: `l.keys`, `l.values` [H, n, D],
        `l.scores` [P, H, n], `l.positions` [H, n]; and what `beside` has."""
        out = self.beside()
        for layer, (count, front) in enumerate(zip(self.counts, self.fronts, strict=True)):
            for part, rows in zip(("keys", "values"), self.rows(layer, count), strict=True):
                out[f"{layer}.{part}"] = rows[:, front:].clone()
            out[f"{layer}.scores"] = self.scores(layer)[..., front:].clone()
            out[f"{layer}.positions"] = self.positions(layer)[:, front:].clone()
        return out

    def load(self, units: Mapping[str, Tensor], rotate: Rotate,
             fronts: Sequence[tuple[Tensor, Tensor] | None] = ()) -> None:
        """Write what `export` gave, behind the units `fronts[l]` (see `put_in_front`). The caller has checked all
        shapes."""
        for layer in range(len(self.counts)):
            self._load(layer, units, rotate, fronts[layer] if fronts else None)
        forms = self.pool.states.forms
        if forms and forms[0].name in units:
            self.keep_state([units[form.name][None] for form in forms], provisional=False)

    def _load(self, layer: int, units: Mapping[str, Tensor], rotate: Rotate, front_units: tuple[Tensor, Tensor] | None
              ) -> None:
        buffers, front = self.pool.layers[layer], self._write_front(layer, front_units)
        count = front + units[f"{layer}.keys"].shape[1]
        for part, rows in zip(("keys", "values"), buffers.moved, strict=False):
            rows[self.slot, :, front:count] = units[f"{layer}.{part}"]
        buffers.scores[self.slot, :, :, front:count] = units[f"{layer}.scores"]
        buffers.positions[self.slot, :, front:count] = units[f"{layer}.positions"]
        if buffers.rotated is not buffers.keys and count:
            rotate(layer, self.keys(layer, count), 0, self.rotated(layer, count))
        self.counts[layer], self.fronts[layer] = count, front
