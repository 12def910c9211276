"""Codes of layers whose KV heads share one budget, and the same with exact units in the host's memory. Knows no policy.

Rows of codes lie as `cache.headwise_store` says, without room behind those of a head: units that are exact on the
device have rows of their own, of which each head has as many. The scratch from which attention reads has the rows of
all heads one after another, too, with room for a chunk behind each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from locret_stream.cache.headwise_store import HeadwiseStore
from locret_stream.cache.pool import Pool
from locret_stream.cache.quantised_store import QuantisedStore, say
from locret_stream.cache.tiered_store import RotateAt, TieredStore
from locret_stream.cache.unit_store import Keep, Rotate, UnitStore


class HeadwiseCodes(HeadwiseStore, QuantisedStore):
    """One slot of a pool of codes in which the heads of some layers share a budget."""

    def __init__(self, pool: Pool, slot: int):
        super().__init__(pool, slot)
        # Where decoding writes to the scratch: of each head the row behind its committed units.
        self._ends: dict[int, Tensor] = {}
        self._set_all()

    def _set_all(self) -> None:
        for layer, counts in enumerate(self.of_heads):
            if counts:
                self._set(layer, counts)

    def _set(self, layer: int, counts: Sequence[int]) -> None:
        super()._set(layer, counts)
        ends = [first + count for first, count in zip(self.firsts(layer), counts, strict=True)]
        self._ends[layer] = torch.tensor(ends, device=self.pool.layers[layer].positions.device)

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """As of `UnitStore`."""
        super().copy_from(other, tail)
        self._set_all()

    def put_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Keep, front: int,
                     rotate: Rotate) -> None:
        """As of `UnitStore`."""
        self._changed(layer)
        self._late[layer] = 0, []  # what was written behind the committed units is not there any more
        super().put_in_front(layer, units, keep, front, rotate)

    # -- what attention reads ---------------------------------------------------------------------------------

    def heads(self, layer: int, offset: int, rotate: Rotate) -> list[tuple[Tensor, Tensor]]:
        """As of `HeadwiseStore`."""
        _, rotated, values = self.attended(layer, self.counts[layer] + offset, rotate)
        return [(rotated[:, :, first:first + count + offset], values[:, :, first:first + count + offset])
                for first, count in zip(self.firsts(layer), self.of_heads[layer], strict=True)]

    def head_keys(self, layer: int, head: int, offset: int) -> Tensor:
        """As of `HeadwiseStore`."""
        first, keys = self.firsts(layer)[head], self._flat(layer, self._buffers(layer).dense.parts[0])
        return keys[0, :, first:first + self.of_heads[layer][head] + offset]

    def _flat(self, layer: int, part: Tensor) -> Tensor:
        """A part of the scratch as rows of all heads, [1, 1, H * C, D]."""
        return part.view(1, 1, -1, part.shape[-1]) if self.of_heads[layer] else part

    def _found(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = super()._found(layer)
        return self._flat(layer, keys), self._flat(layer, values)

    def _of(self, layer: int, part: Tensor, count: int) -> Tensor:
        """As of `QuantisedStore`; rows of all heads, where they share a budget."""
        return self._flat(layer, part) if self.of_heads[layer] else super()._of(layer, part, count)

    def _put_new(self, layer: int, part: Tensor, rank: int, unit: Tensor) -> None:
        if not self.of_heads[layer]:
            super()._put_new(layer, part, rank, unit)
            return
        self._flat(layer, part)[0, 0].index_copy_(0, self._ends[layer] + (rank - self.counts[layer]), unit[0, :, 0])

    def _rotate_read(self, layer: int, start: int, count: int, rotate: Rotate) -> None:
        if not self.of_heads[layer]:
            super()._rotate_read(layer, start, count, rotate)
            return
        most = self.counts[layer]
        keys, _, rotated = (self._flat(layer, part) for part in self._buffers(layer).dense.parts)
        for first, held in zip(self.firsts(layer), self.of_heads[layer], strict=True):
            rank, stop = 0 if start < most else held + start - most, first + held + count - most
            rotate(layer, keys[:, :, first + rank:stop], rank, rotated[:, :, first + rank:stop])

    def _read_committed(self, layer: int, part: int, count: int, *, exact: bool) -> None:
        if not self.of_heads[layer]:
            super()._read_committed(layer, part, count, exact=exact)
            return
        assert count == self.counts[layer], "all committed units are read together"
        out = self._flat(layer, self._buffers(layer).dense.parts[part])[0, 0]
        into = [out[first:first + held] for first, held in zip(self.firsts(layer), self.of_heads[layer], strict=True)]
        (self._read_heads_exact if exact else self._say_heads)(layer, part, into)

    def _say_heads(self, layer: int, part: int, into: Sequence[Tensor]) -> None:
        """Write K or V of the committed units of each head, as their codes say it, to `into`, [n_h, D] each."""
        held, (front, stop) = self._parts(layer)[part], self._firsts(layer)
        for head, (out, stored) in enumerate(zip(into, self._stored_heads(layer), strict=True)):
            means = [None if mean is None else mean[head:head + 1] for mean in held.means]
            say(held.bits, held.rows[:, stored], held.exact[head:head + 1], means, out[None], front, stop)

    def _read_heads_exact(self, layer: int, part: int, into: Sequence[Tensor]) -> None:
        raise AssertionError("codes are the only copy")

    def _read_behind(self, layer: int, part: int, start: int, count: int) -> None:
        if not self.of_heads[layer]:
            super()._read_behind(layer, part, start, count)
            return
        most, tail, exact = self.counts[layer], self.pool.tails[layer], self._parts(layer)[part].exact
        out = self._flat(layer, self._buffers(layer).dense.parts[part])[0, 0]
        for of_head, first, held in zip(exact, self.firsts(layer), self.of_heads[layer], strict=True):
            offset = max(start - most, -held)
            out[first + held + offset:first + held + count - most] = of_head[tail + offset:tail + count - most]

    # -- committed units --------------------------------------------------------------------------------------

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Keep | None,
               rotate: Rotate) -> None:
        """As of `QuantisedStore`."""
        if not self.of_heads[layer]:
            super().commit(layer, first_position, new, scores, keep, rotate)
            return
        self._write_late(layer)
        self._changed(layer)
        coded, counts, device = self._code_new(layer, new), self.of_heads[layer], scores.device
        buffers, most = self._buffers(layer), self.counts[layer]
        for head, (stored, count) in enumerate(zip(self._stored_heads(layer), counts, strict=True)):
            buffers.scores[self.slot, :, 0, stored] = scores[:, head, :count]
        positions = torch.arange(first_position, first_position + new, device=device).expand(len(counts), -1)
        if keep is None:
            keep = [torch.arange(count + new, device=device) for count in counts]
        self._keep(layer, keep, 0, [*coded[:len(buffers.moved)], *scores[:, :, most:], positions])


class HeadwiseTier(TieredStore, HeadwiseCodes):
    """The same with exact units in the host's memory, which the query fetches (`HostTier.chosen_by`)."""

    def _begins(self, layer: int, counts: Sequence[int]) -> list[int]:
        return (HeadwiseStore if self.of_heads[layer] else TieredStore)._begins(self, layer, counts)

    def _counts_of(self, layer: int) -> list[int]:
        return self.of_heads[layer] or super()._counts_of(layer)

    def _read_heads_exact(self, layer: int, part: int, into: Sequence[Tensor]) -> None:
        host, at = self._of_host(layer)[0], self._live(layer)
        if part == 0:
            self.pool.read += len(at)
        rows = host.read_part(self.slot, host.places[self.slot][at], part).to(into[0].device)
        for out, units in zip(into, rows.split([len(out) for out in into]), strict=True):
            out.copy_(units)

    def _exact(self, layer: int, ranks: slice) -> tuple[Tensor, Tensor]:
        """As of `TieredStore`; of a layer whose heads share a budget all units, with zeros behind those of a head."""
        if not self.of_heads[layer]:
            return super()._exact(layer, ranks)
        assert ranks == slice(self.counts[layer]), "units of a layer whose heads share a budget are read together"
        counts = self.of_heads[layer]
        ranks_of = torch.arange(max(counts)).expand(len(counts), -1)
        return self._exact_at(layer, ranks_of, ranks_of < torch.tensor(counts)[:, None])

    def _exact_last(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """As of `TieredStore`; a head that has fewer has zeros before them."""
        if not self.of_heads[layer]:
            return super()._exact_last(layer, count)
        ranks = torch.tensor(self.of_heads[layer])[:, None] + torch.arange(-count, 0)
        return self._exact_at(layer, ranks, ranks >= 0)

    def _exact_at(self, layer: int, ranks: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """K before RoPE and V of the units at these ranks [H, n] of each head, [H, n, D] on the host; zeros where one
        is not `real`."""
        host, first = self._of_host(layer)[0], torch.tensor(self._begins(layer, self.of_heads[layer]))[:, None]
        at = torch.where(real, first + ranks, 0)
        keys, values = (part.reshape(*at.shape, part.shape[-1]).masked_fill(~real[..., None], 0)
                        for part in host.read(self.slot, host.places[self.slot][at].flatten()))
        return keys, values

    def fetch_of_heads(self, layer: int, weights: Sequence[Tensor], most: int, rotate_at: RotateAt
                       ) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """`fetch` in a layer whose heads share a budget: those with the greatest weights of all heads, `most` times as
        many as there are heads; of each head ranks [k_h], K at its rank and V, [k_h, D].

        Args:
            weights: of each head those of its units, [n_h] or more.
        """
        (front, stop), counts, device = self._firsts(layer), self.of_heads[layer], weights[0].device
        ends = [max(0, count - self.pool.residuals[layer]) for count in counts]
        coded = torch.cat([of_head[:end] for of_head, end in zip(weights, ends, strict=True)])
        starts, missing = list(accumulate(ends, initial=0)), 0
        for start, end in zip(starts, ends, strict=False):
            exact = slice(start + min(front, end), start + min(stop, end))
            coded[exact] = -1.0
            missing += exact.stop - exact.start
        most = min(most * len(counts), starts[-1] - missing)
        if most < 1:
            return None
        chosen = coded.topk(most, sorted=False).indices.sort().values
        bounds = torch.searchsorted(chosen, torch.tensor(starts, device=device)).tolist()
        sizes = [stop - start for start, stop in pairwise(bounds)]
        ranks = chosen - torch.tensor(starts[:-1], device=device).repeat_interleave(torch.tensor(sizes, device=device))
        rows = ranks.to("cpu") + torch.tensor(self._begins(layer, counts)).repeat_interleave(torch.tensor(sizes))
        keys, values = self._fetched(layer, self._of_host(layer)[0].places[self.slot][rows], ranks, rotate_at)
        return list(zip(ranks.split(sizes), keys.split(sizes), values.split(sizes), strict=True))

    def _said(self, layer: int, units: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As of `TieredStore`."""
        if not self.of_heads[layer]:
            return super()._said(layer, units)
        buffers, counts, front, out = self._buffers(layer), self.of_heads[layer], self.fronts[layer], []
        for part, name in enumerate(("keys", "values")):
            last = units[f"{layer}.last_{name}"]
            rows = buffers.exact_keys.new_zeros(len(counts), max(counts), last.shape[-1])
            if rows.numel():
                self._say_heads(layer, part, [of_head[:count] for of_head, count in zip(rows, counts, strict=True)])
            for of_head, count, exact in zip(rows, counts, last.to(rows.device), strict=True):
                own = min(len(exact), count - front)
                of_head[count - own:count] = exact[len(exact) - own:]
            out.append(rows[:, front:])
        return out[0], out[1]
