"""Units of layers whose KV heads share one budget: each head keeps as many as its scores ask for. Knows no policy.

The rows of such a layer are those of all its heads, head by head: those that a head keeps, in time order, then room for
a chunk. Rank r of a head is row r behind the first of that head. As long as no head has more than the layer's budget,
the heads begin where they would if each had that budget; else each begins behind the room of the one before. So a
layer takes the bytes that it would take with equal heads, and gives the heads what it likes.

What leaves the store by layer, scores, positions, K and V, is [H, n, ...] as of other layers: n is what the head with
most keeps, and behind the units of the others lie rows of no unit, with the position `NOWHERE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from locret_stream.cache.pool import Pool
from locret_stream.cache.unit_store import Keep, Rotate, UnitStore

NOWHERE = 1 << 62
"""The position of a row of no unit: behind every token."""


class HeadwiseStore(UnitStore):
    """One slot of a pool in which the heads of some layers share a budget. What its methods do is said where
    `UnitStore` has them.

    Attributes:
        counts: of a layer whose heads share a budget, those of the head with most.
        of_heads: committed units of each head of these layers, [L][H]; [] of other layers.
    """

    def __init__(self, pool: Pool, slot: int):
        super().__init__(pool, slot)
        self.of_heads: list[list[int]] = [[0] * unit.kv_heads if shares else []
                                          for unit, shares in zip(pool.shape.units, pool.headwise, strict=True)]

    def held(self, layer: int) -> int:
        """As of `UnitStore`."""
        counts = self.of_heads[layer]
        return -(-sum(counts) // len(counts)) if counts else self.counts[layer]

    def firsts(self, layer: int) -> list[int]:
        """The first row of each head of a layer whose heads share a budget."""
        return self._firsts(layer, self.of_heads[layer])

    def _firsts(self, layer: int, counts: Sequence[int]) -> list[int]:
        budget, chunk = self.pool.budgets[layer], self.pool.chunk_size
        if max(counts) <= budget:
            return [head * (budget + chunk) for head in range(len(counts))]
        return [0, *accumulate(count + chunk for count in counts[:-1])]

    def _set(self, layer: int, counts: Sequence[int]) -> None:
        self.of_heads[layer], self.counts[layer] = list(counts), max(counts)

    # -- a forward pass ---------------------------------------------------------------------------------------

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor, rotate: Rotate) -> None:
        """As of `UnitStore`; `start` is the rank in the head with most units."""
        if not self.of_heads[layer]:
            super().write(layer, start, keys, values, rotate)
            return
        buffers, new, offset = self.pool.layers[layer], keys.shape[2], start - self.counts[layer]
        assert 0 <= offset and offset + new <= self.pool.chunk_size, "a forward writes the tail area only"
        for head, (first, count) in enumerate(zip(self.firsts(layer), self.of_heads[layer], strict=True)):
            rank = count + offset
            rows = slice(first + rank, first + rank + new)
            of_head = slice(head, head + 1)
            buffers.keys[self.slot, :, rows] = keys[0, of_head]
            if buffers.values is not buffers.rotated:
                buffers.values[self.slot, :, rows] = values[0, of_head]
            if buffers.rotated is not buffers.keys:
                rotate(layer, keys[:, of_head], rank, buffers.rotated[self.slot:self.slot + 1, :, rows])

    def heads(self, layer: int, offset: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each head of a layer whose heads share a budget: keys before RoPE, rotated keys, and values of the units
        that it keeps and of the first `offset` behind them, [1, 1, n, D] each; views."""
        buffers, out = self.pool.layers[layer], []
        for first, count in zip(self.firsts(layer), self.of_heads[layer], strict=True):
            rows = slice(first, first + count + offset)
            keys, rotated, values = (part[self.slot:self.slot + 1, :, rows]
                                     for part in (buffers.keys, buffers.rotated, buffers.values))
            out.append((keys, rotated, values))
        return out

    # -- committed units --------------------------------------------------------------------------------------

    def keys(self, layer: int, count: int) -> Tensor:
        """As of `UnitStore`; a copy, of committed units alone, where heads share a budget."""
        return self.rows(layer, count)[0][None] if self.of_heads[layer] else super().keys(layer, count)

    def values(self, layer: int, count: int) -> Tensor:
        """As `keys`."""
        return self.rows(layer, count)[1][None] if self.of_heads[layer] else super().values(layer, count)

    def rows(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """As of `UnitStore`; copies, where heads share a budget."""
        if not self.of_heads[layer]:
            return super().rows(layer, count)
        buffers = self.pool.layers[layer]
        keys = self._padded(layer, buffers.keys[self.slot, 0])[:, :count]
        if buffers.values is buffers.rotated:
            return keys, keys[..., :0]
        return keys, self._padded(layer, buffers.values[self.slot, 0])[:, :count]

    def scores(self, layer: int) -> Tensor:
        """As of `UnitStore`."""
        if not self.of_heads[layer]:
            return super().scores(layer)
        return torch.stack([self._padded(layer, plane[0]) for plane in self.pool.layers[layer].scores[self.slot]])

    def positions(self, layer: int) -> Tensor:
        """As of `UnitStore`."""
        if not self.of_heads[layer]:
            return super().positions(layer)
        return self._padded(layer, self.pool.layers[layer].positions[self.slot, 0], NOWHERE)

    def _padded(self, layer: int, rows: Tensor, filled: int = 0) -> Tensor:
        """The committed ones of the rows [R, ...] of a layer, as [H, n, ...]."""
        counts = self.of_heads[layer]
        out = rows.new_full((len(counts), max(counts), *rows.shape[1:]), filled)
        for head, (first, count) in enumerate(zip(self.firsts(layer), counts, strict=True)):
            out[head, :count] = rows[first:first + count]
        return out

    def split(self, layer: int, scores: Tensor) -> list[Tensor]:
        """Scores [H, n + T] of a layer's committed units, as `scores` gives them, and of T new ones: of each head its
        own, in time order."""
        most = self.counts[layer]
        return [torch.cat([of_head[:count], of_head[most:]])
                for of_head, count in zip(scores, self.of_heads[layer], strict=True)]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor,
               keep: Keep | None, rotate: Rotate) -> None:
        """As of `UnitStore`."""
        if not self.of_heads[layer]:
            super().commit(layer, first_position, new, scores, keep, rotate)
            return
        buffers, before = self.pool.layers[layer], self.of_heads[layer]
        positions = torch.arange(first_position, first_position + new, device=buffers.positions.device)
        most = self.counts[layer]
        for head, (first, count) in enumerate(zip(self.firsts(layer), before, strict=True)):
            buffers.scores[self.slot, :, 0, first:first + count] = scores[:, head, :count]
            rows = slice(first + count, first + count + new)
            buffers.scores[self.slot, :, 0, rows] = scores[:, head, most:]
            buffers.positions[self.slot, 0, rows] = positions
        total = [count + new for count in before]
        if keep is None and max(total) <= self.pool.budgets[layer]:
            self._set(layer, total)
            return
        everything = [torch.arange(count, device=positions.device) for count in total]
        self._keep(layer, everything if keep is None else keep, 0)
        self._rotate_all(layer, rotate)

    def put_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Keep, front: int,
                     rotate: Rotate) -> None:
        """As of `UnitStore`."""
        if not self.of_heads[layer]:
            super().put_in_front(layer, units, keep, front, rotate)
            return
        new = 0 if units is None else units[0].shape[2]
        self._keep(layer, keep, new)
        self._write_heads_front(layer, units)
        self._rotate_all(layer, rotate)
        self.fronts[layer] = front

    def _keep(self, layer: int, keep: Keep, front: int) -> None:
        """Keep of each head the units at the ranks `keep`, behind room for `front` others."""
        buffers, before = self.pool.layers[layer], self.firsts(layer)
        self._set(layer, [front + len(ranks) for ranks in keep])
        chosen = torch.cat([ranks + first for ranks, first in zip(keep, before, strict=True)])
        for rows in (*(rows[self.slot, 0] for rows in buffers.moved), *buffers.scores[self.slot, :, 0],
                     buffers.positions[self.slot, 0]):
            width = rows[0].numel() * rows.element_size()
            held = buffers.scratch[:len(chosen) * width].view(rows.dtype).view(len(chosen), *rows.shape[1:])
            torch.index_select(rows, 0, chosen, out=held)
            parts = held.split([len(ranks) for ranks in keep])
            for first, part in zip(self.firsts(layer), parts, strict=True):
                rows[first + front:first + front + len(part)] = part

    def _rotate_all(self, layer: int, rotate: Rotate) -> None:
        """Make the rotated keys of a layer anew."""
        buffers = self.pool.layers[layer]
        if buffers.rotated is not buffers.keys:
            for keys, rotated, _ in self.heads(layer, 0):
                if keys.shape[2]:
                    rotate(layer, keys, 0, rotated)

    def _write_heads_front(self, layer: int, units: tuple[Tensor, Tensor] | None) -> None:
        """Write units, [1, H, q, D], at the first ranks of each head, as `_write_front`."""
        if units is None:
            return
        buffers, new = self.pool.layers[layer], units[0].shape[2]
        for head, first in enumerate(self.firsts(layer)):
            rows = slice(first, first + new)
            for moved, part in zip(buffers.moved, units, strict=False):
                moved[self.slot, 0, rows] = part[0, head]
            buffers.scores[self.slot, :, 0, rows] = 0
            buffers.positions[self.slot, 0, rows] = torch.arange(-new, 0, device=buffers.positions.device)

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """As of `UnitStore`."""
        assert isinstance(other, HeadwiseStore), "slots of one pool have stores of one kind"
        super().copy_from(other, tail)
        self.of_heads = [list(counts) for counts in other.of_heads]

    def _used(self, layer: int, tail: int) -> int:
        counts = self.of_heads[layer]
        return self.firsts(layer)[-1] + counts[-1] + tail if counts else super()._used(layer, tail)

    def _load(self, layer: int, units: Mapping[str, Tensor], rotate: Rotate, front_units: tuple[Tensor, Tensor] | None
              ) -> None:
        if not self.of_heads[layer]:
            super()._load(layer, units, rotate, front_units)
            return
        buffers, positions = self.pool.layers[layer], units[f"{layer}.positions"]
        front, counts = 0 if front_units is None else front_units[0].shape[2], (positions != NOWHERE).sum(1).tolist()
        self._set(layer, [front + count for count in counts])
        for head, (first, count) in enumerate(zip(self.firsts(layer), counts, strict=True)):
            rows = slice(first + front, first + front + count)
            for part, moved in zip(("keys", "values"), buffers.moved, strict=False):
                moved[self.slot, 0, rows] = units[f"{layer}.{part}"][head, :count]
            buffers.scores[self.slot, :, 0, rows] = units[f"{layer}.scores"][:, head, :count]
            buffers.positions[self.slot, 0, rows] = positions[head, :count]
        self._write_heads_front(layer, front_units)
        self._rotate_all(layer, rotate)
        self.fronts[layer] = front
