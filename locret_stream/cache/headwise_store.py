"""Units of layers whose KV heads share one budget: each head keeps as many as its scores ask for. Knows no policy.

The rows of such a layer are those of all its heads, head by head: those that a head keeps, in time order, then room
for a chunk where new units lie behind the others. Rank r of a head is row r behind the first of that head. As long as
no head has more than the layer's budget, the heads begin where they would if each had that budget; else each begins
behind the room of the one before. So a layer takes the bytes that it would take with equal heads, and gives the heads
what it likes.

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
    """One slot of a pool in which the heads of some layers share a budget: what stores of exact units and of codes have
    in common. What its methods do is said where `UnitStore` has them.

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
        """Of a layer whose heads share a budget, the first row of each head where attention reads it."""
        return self._laid(layer, self.of_heads[layer], self.pool.chunk_size)

    def _begins(self, layer: int, counts: Sequence[int]) -> list[int]:
        """The first row of each head where its units are stored, when the heads have so many."""
        return self._laid(layer, counts, 0 if self.pool.quantised else self.pool.chunk_size)

    def _laid(self, layer: int, counts: Sequence[int], room: int) -> list[int]:
        """The first row of each head, with that room behind its units."""
        budget = self.pool.budgets[layer]
        if max(counts) <= budget:
            return [head * (budget + room) for head in range(len(counts))]
        return [0, *accumulate(count + room for count in counts[:-1])]

    def _stored_heads(self, layer: int) -> list[slice]:
        """The rows where the units of each head are stored."""
        counts = self.of_heads[layer]
        return [slice(first, first + count)
                for first, count in zip(self._begins(layer, counts), counts, strict=True)]

    def _set(self, layer: int, counts: Sequence[int]) -> None:
        self.of_heads[layer], self.counts[layer] = list(counts), max(counts)

    def heads(self, layer: int, offset: int, rotate: Rotate) -> list[tuple[Tensor, Tensor]]:
        """Of each head of a layer whose heads share a budget: rotated keys (before RoPE, where kernels rotate them as
        they load them) and values of the units that it keeps and of the first `offset` behind them, [1, 1, n, D] each;
        views, of codes until the next read of any layer of this device."""
        raise NotImplementedError

    def head_keys(self, layer: int, head: int, offset: int) -> Tensor:
        """Of one head of such a layer keys before RoPE of the units that it keeps and of the first `offset` behind
        them, [1, n, D]; behind a call of `heads`, and for as long."""
        raise NotImplementedError

    # -- committed units --------------------------------------------------------------------------------------

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
        for of_head, count, stored in zip(out, counts, self._stored_heads(layer), strict=True):
            of_head[:count] = rows[stored]
        return out

    def split(self, layer: int, scores: Tensor) -> list[Tensor]:
        """Scores [H, n + T] of a layer's committed units, as `scores` gives them, and of T new ones: of each head its
        own, in time order."""
        most = self.counts[layer]
        return [torch.cat([of_head[:count], of_head[most:]])
                for of_head, count in zip(scores, self.of_heads[layer], strict=True)]

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

    def _keep(self, layer: int, keep: Keep, front: int, behind: Sequence[Tensor] = ()) -> None:
        """Keep of each head the units at the ranks `keep`, behind room for `front` others.

        Args:
            behind: new units that have no rows yet, whose ranks are those behind the stored ones of each head: of K and
                V, as they are moved, of each plane of scores and of positions, [H, T, ...].
        """
        buffers, before, counts = self.pool.layers[layer], self._stored_heads(layer), self.of_heads[layer]
        self._set(layer, [front + len(ranks) for ranks in keep])
        chosen = torch.cat([ranks + rows.start for ranks, rows in zip(keep, before, strict=True)])
        sources = [*(rows[self.slot, 0] for rows in buffers.moved), *buffers.scores[self.slot, :, 0],
                   buffers.positions[self.slot, 0]]
        joined = sources
        if behind:
            end, new = before[-1].stop, behind[0].shape[1]
            chosen = torch.cat([torch.where(ranks < count, ranks + rows.start, ranks + (end + head * new - count))
                                for head, (ranks, rows, count) in enumerate(zip(keep, before, counts, strict=True))])
            joined = [torch.cat([rows[:end], units.flatten(0, 1)]) for rows, units in zip(sources, behind, strict=True)]
        for rows, joint in zip(sources, joined, strict=True):
            width = rows[0].numel() * rows.element_size()
            held = buffers.scratch[:len(chosen) * width].view(rows.dtype).view(len(chosen), *rows.shape[1:])
            torch.index_select(joint, 0, chosen, out=held)
            parts = held.split([len(ranks) for ranks in keep])
            for stored, part in zip(self._stored_heads(layer), parts, strict=True):
                rows[stored.start + front:stored.stop] = part

    def _rotate_all(self, layer: int, rotate: Rotate) -> None:
        """Make the rotated keys of a layer anew, where the pool holds any."""

    def _write_heads_front(self, layer: int, units: tuple[Tensor, Tensor] | None) -> None:
        """Write units, [1, H, q, D], at the first ranks of each head, as `_write_front`."""
        if units is None:
            return
        buffers, new = self.pool.layers[layer], units[0].shape[2]
        stored = self._stored(layer, units[0][0], units[1][0], focus=True)
        for head, rows in enumerate(self._stored_heads(layer)):
            front = slice(rows.start, rows.start + new)
            for moved, part in zip(buffers.moved, stored, strict=False):
                moved[self.slot, 0, front] = part[head]
            buffers.scores[self.slot, :, 0, front] = 0
            buffers.positions[self.slot, 0, front] = torch.arange(-new, 0, device=buffers.positions.device)

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """As of `UnitStore`."""
        assert isinstance(other, HeadwiseStore), "slots of one pool have stores of one kind"
        super().copy_from(other, tail)
        self.of_heads = [list(counts) for counts in other.of_heads]

    def _used(self, layer: int, tail: int) -> int:
        return self._stored_heads(layer)[-1].stop + tail if self.of_heads[layer] else super()._used(layer, tail)

    def _load(self, layer: int, units: Mapping[str, Tensor], rotate: Rotate, front_units: tuple[Tensor, Tensor] | None
              ) -> None:
        if not self.of_heads[layer]:
            super()._load(layer, units, rotate, front_units)
            return
        buffers, positions = self.pool.layers[layer], units[f"{layer}.positions"]
        front, counts = 0 if front_units is None else front_units[0].shape[2], (positions != NOWHERE).sum(1).tolist()
        self._set(layer, [front + count for count in counts])
        for head, (stored, count) in enumerate(zip(self._stored_heads(layer), counts, strict=True)):
            rows = slice(stored.start + front, stored.stop)
            for part, moved in zip(("keys", "values"), buffers.moved, strict=False):
                moved[self.slot, 0, rows] = units[f"{layer}.{part}"][head, :count]
            buffers.scores[self.slot, :, 0, rows] = units[f"{layer}.scores"][:, head, :count]
            buffers.positions[self.slot, 0, rows] = positions[head, :count]
        self._write_heads_front(layer, front_units)
        self._rotate_all(layer, rotate)
        self.fronts[layer] = front


class HeadwiseUnits(HeadwiseStore):
    """`HeadwiseStore` of exact units: those behind the committed ones lie behind them in the same rows."""

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

    def heads(self, layer: int, offset: int, rotate: Rotate) -> list[tuple[Tensor, Tensor]]:
        """As of `HeadwiseStore`."""
        buffers, here = self.pool.layers[layer], slice(self.slot, self.slot + 1)
        return [(buffers.rotated[here, :, stored.start:stored.stop + offset],
                 buffers.values[here, :, stored.start:stored.stop + offset]) for stored in self._stored_heads(layer)]

    def keys(self, layer: int, count: int) -> Tensor:
        """As of `UnitStore`; a copy, of committed units alone, where heads share a budget."""
        return self.rows(layer, count)[0][None] if self.of_heads[layer] else super().keys(layer, count)

    def values(self, layer: int, count: int) -> Tensor:
        """As `keys`."""
        return self.rows(layer, count)[1][None] if self.of_heads[layer] else super().values(layer, count)

    def head_keys(self, layer: int, head: int, offset: int) -> Tensor:
        """As of `HeadwiseStore`."""
        stored = self._stored_heads(layer)[head]
        return self.pool.layers[layer].keys[self.slot, :, stored.start:stored.stop + offset]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor,
               keep: Keep | None, rotate: Rotate) -> None:
        """As of `UnitStore`."""
        if not self.of_heads[layer]:
            super().commit(layer, first_position, new, scores, keep, rotate)
            return
        buffers, before = self.pool.layers[layer], self.of_heads[layer]
        positions = torch.arange(first_position, first_position + new, device=buffers.positions.device)
        most = self.counts[layer]
        for head, (stored, count) in enumerate(zip(self._stored_heads(layer), before, strict=True)):
            buffers.scores[self.slot, :, 0, stored] = scores[:, head, :count]
            rows = slice(stored.stop, stored.stop + new)
            buffers.scores[self.slot, :, 0, rows] = scores[:, head, most:]
            buffers.positions[self.slot, 0, rows] = positions
        total = [count + new for count in before]
        if keep is None and max(total) <= self.pool.budgets[layer]:
            self._set(layer, total)
            return
        everything = [torch.arange(count, device=positions.device) for count in total]
        self._keep(layer, everything if keep is None else keep, 0)
        self._rotate_all(layer, rotate)

    def _rotate_all(self, layer: int, rotate: Rotate) -> None:
        buffers, slot = self.pool.layers[layer], self.slot
        if buffers.rotated is not buffers.keys:
            for stored in self._stored_heads(layer):
                if stored.stop > stored.start:
                    rotate(layer, buffers.keys[slot:slot + 1, :, stored], 0, buffers.rotated[slot:slot + 1, :, stored])
