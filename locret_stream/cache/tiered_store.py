"""Codes on the device, and the same units exactly in the host's memory. Knows no policy.

Each row of codes has in the host's memory the row that the table of places has for it: a commit
moves codes and the table, and writes the units that are new, but no others. The last committed units are exact on the
device too (`Pool.residuals`), as are the first ones of the stream. A step of decoding reads codes, and fetches exact
units from the host, which are no part of what is committed: for the query that reads them (`fetch`), or one step before
(`choose`). Then they are *hot*, and stand in place of their codes in each KV head; whatever changes what is committed
drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from locret_stream.cache.buffers import Dense
from locret_stream.cache.host import HostRows, HotUnits
from locret_stream.cache.pool import Pool
from locret_stream.cache.quantised_store import QuantisedStore
from locret_stream.cache.unit_store import Keep, Rotate, UnitStore
from locret_stream.kernels import slot_units

RotateAt = Callable[[int, Tensor, Tensor], Tensor]
"""Applies RoPE: (layer, keys [N, D], ranks [N]) -> rotated keys."""


class TieredStore(QuantisedStore):
    """One slot of a pool of codes with exact units in the host's memory."""

    def __init__(self, pool: Pool, slot: int):
        super().__init__(pool, slot)
        assert pool.tier is not None, "a pool without exact units in the host's memory has another store"
        self.tier = pool.tier
        self._hot: list[tuple[int, object]] = []  # of each layer how many units are hot, and which choice that was
        self.cool()
        for layer in range(len(pool.layers)):
            self._of_host(layer)[0].forget(slot)

    def _of_host(self, layer: int) -> tuple[HostRows, HotUnits]:
        buffers = self._buffers(layer)
        assert buffers.host is not None and buffers.hot is not None, "a pool with a tier has them in every layer"
        return buffers.host, buffers.hot

    # -- a forward pass ---------------------------------------------------------------------------------------

    def attended(self, layer: int, count: int, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """As of `UnitStore`: committed units exactly, from the host, or what their codes say (`HostTier.prefill`)."""
        return self._attended(layer, count, rotate, exact=self.tier.prefill == "exact")

    def _read_exact(self, layer: int, part: int, out: Tensor) -> None:
        host, _ = self._of_host(layer)
        if part == 0:
            self.pool.read += out.shape[0] * out.shape[1]
        places = self._places(layer)[:, :out.shape[1]]
        out.copy_(host.read_part(self.slot, places.flatten(), part).view(*places.shape, -1))

    def _places(self, layer: int) -> Tensor:
        """Of each rank of each head the row of the host, [H, b]."""
        host, _ = self._of_host(layer)
        return host.places[self.slot].view(host.keys.shape[1], -1)

    def _begins(self, layer: int, counts: Sequence[int]) -> list[int]:
        """The first of the rows of codes of each head, where the heads have so many units."""
        return [head * self.pool.budgets[layer] for head in range(len(counts))]

    def _counts_of(self, layer: int) -> list[int]:
        """Committed units of each head."""
        return [self.counts[layer]] * self.pool.shape.units[layer].kv_heads

    def _live(self, layer: int) -> Tensor:
        """The rows of codes of all committed units, head by head, [N]."""
        counts = self._counts_of(layer)
        return torch.cat([torch.arange(first, first + count)
                          for first, count in zip(self._begins(layer, counts), counts, strict=True)])

    def _exact(self, layer: int, ranks: slice) -> tuple[Tensor, Tensor]:
        """K before RoPE and V of the committed units of a range of ranks, [H, n, D] on the host."""
        host, _ = self._of_host(layer)
        places = self._places(layer)[:, ranks]
        keys, values = host.read(self.slot, places.flatten())
        return keys.view(*places.shape, keys.shape[-1]), values.view(*places.shape, values.shape[-1])

    def _exact_last(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """The same of the last `count` committed units of each head."""
        return self._exact(layer, slice(self.counts[layer] - count, self.counts[layer]))

    # -- decoding ---------------------------------------------------------------------------------------------

    def step(self, layer: int, rank: int, keys: Tensor, values: Tensor, turned: Tensor, rotate: Rotate
             ) -> tuple[Tensor, Tensor]:
        """Write the first of some new units behind the others, and give what they attend to: rotated keys and values,
        of which the first `rank` + T ranks are right, [1, H, more, D], with hot units in place of their codes. Units
        behind the first one are nowhere but there, until the next read of any layer of this device.

        Args:
            keys, values, turned: K before RoPE, V, and K at its rank, [1, H, T, D]; see `append`.
        """
        if turned.shape[2] == 1:
            found = self.append(layer, rank, keys, values, turned, rotate)
            self._show(layer)
            return found
        first = slice(1)
        found = self.append(layer, rank, keys[:, :, first], values[:, :, first], turned[:, :, first], rotate)
        self._show(layer)
        self._write_guesses(layer, rank, turned, values)
        return found

    def step_again(self, layer: int, rank: int, values: Tensor, turned: Tensor, rotate: Rotate
                   ) -> tuple[Tensor, Tensor]:
        """What `step` gave, for a layer that reads the units of another one: arguments are those of that one."""
        self._attended(layer, rank + 1, rotate)
        self._show(layer)
        self._write_guesses(layer, rank, turned, values)
        return self._found(layer)

    def _write_guesses(self, layer: int, rank: int, turned: Tensor, values: Tensor) -> None:
        """Write units behind the first one to the scratch, where they count as not read."""
        dense, stop = self._buffers(layer).dense, rank + turned.shape[2]
        if stop > rank + 1:
            for part, units in ((1, values), (2, turned)):
                slot_units(dense.parts[part], 0, rank + 1, stop).copy_(units[:, :, 1:])

    def fetch(self, layer: int, weights: Tensor, first: int, most: int, rotate_at: RotateAt
              ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of each head the units with the greatest weights, `most` of them if there are so many, of those whose codes
        are all that the device has: their ranks [H, k], K at its rank and V, [H, k, D]. None: there is no such unit.

        Args:
            weights: [H, n] of the units from rank `first` on.
        """
        last = max(first, self.counts[layer] - min(self.pool.residuals[layer], self.counts[layer]))
        exact = self._firsts(layer)
        start, stop = (min(max(rank, first), last) for rank in exact)
        most = min(most, last - first - (stop - start))
        if most < 1:
            return None
        if start > first:
            weights = weights[:, :last - first].clone()
            weights[:, start - first:stop - first] = -1.0
            ranks = weights.topk(most, sorted=False).indices + first
        else:
            ranks = weights[:, stop - first:last - first].topk(most, sorted=False).indices + stop
        places = self._places(layer)
        return ranks, *self._fetched(layer, places.gather(1, ranks.to(places.device)), ranks, rotate_at)

    def _fetched(self, layer: int, places: Tensor, ranks: Tensor, rotate_at: RotateAt) -> tuple[Tensor, Tensor]:
        """K at its rank and V, [..., D], of the units at the host's rows `places` [...], whose ranks are [...]."""
        keys, values = self._of_host(layer)[0].read(self.slot, places.flatten(), ranks.device)
        turned = rotate_at(layer, keys, ranks.flatten()).view(*ranks.shape, keys.shape[-1])
        self.pool.fetched += len(keys)
        return turned, values.view(*ranks.shape, values.shape[-1]) if values.shape[-1] else turned

    def choose(self, layer: int, weights: Tensor, rotate_at: RotateAt) -> None:
        """Fetch from the host what the next token shall find exact, by weights [H, n] of the units."""
        hot = self._of_host(layer)[1]
        before = self._hot[layer][0]
        found = self.fetch(layer, weights, 0, hot.ranks.shape[-1], rotate_at)
        self._hot[layer] = 0 if found is None else found[0].shape[1], object()
        if found is not None:
            ranks, keys, values = found
            held = hot.ranks[self.slot, :, :before]
            self.pool.fetched -= int((ranks[:, :, None] == held[:, None]).sum())
            for rows, units in ((hot.keys, keys), (hot.values, values[..., :hot.values.shape[-1]]), (hot.ranks, ranks)):
                rows[self.slot, :, :ranks.shape[1]] = units

    def cool(self, layers: Sequence[int] | None = None) -> None:
        """Drop the hot units of these layers, of all by default."""
        nothing = (0, object())
        if layers is None:
            self._hot = [nothing] * len(self.counts)
        else:
            for layer in layers:
                self._hot[layer] = nothing

    @property
    def hot(self) -> list[int]:
        """Units of each KV head that are hot, by layer."""
        return [count for count, _ in self._hot]

    def _show(self, layer: int) -> None:
        """Put the hot units in place of what their codes say, in the scratch that this slot and layer own."""
        dense, (count, choice) = self._buffers(layer).dense, self._hot[layer]
        if dense.shown is choice:
            return
        if dense.cold is not None:
            self._put(dense, *dense.cold)
        dense.shown, dense.cold = choice, None
        if not count:
            return
        _, hot = self._of_host(layer)
        parts = self._shown_parts(dense)
        heads, room = dense.parts[2].shape[1:3]
        at = (hot.ranks[self.slot, :, :count]
              + torch.arange(0, heads * room, room, device=hot.ranks.device)[:, None]).flatten()
        if self.pool.decode_copy:  # else all of it is read again for the next token
            dense.cold = at, [dense.parts[part][0].flatten(0, 1).index_select(0, at) for part in parts]
        both = {1: hot.values, 2: hot.keys}
        self._put(dense, at, [both[part][self.slot, :, :count].reshape(len(at), -1) for part in parts])

    @staticmethod
    def _shown_parts(dense: Dense) -> list[int]:
        """Values and rotated keys; where K is V, too, the keys."""
        return [2] if dense.parts[1] is dense.parts[2] else [1, 2]

    def _put(self, dense: Dense, at: Tensor, rows: Sequence[Tensor]) -> None:
        for part, units in zip(self._shown_parts(dense), rows, strict=True):
            dense.parts[part][0].flatten(0, 1).index_copy_(0, at, units)

    # -- committed units --------------------------------------------------------------------------------------

    def rows(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """As of `UnitStore`: copies of the exact units, on the host; or codes, where these are what is saved."""
        if self.tier.saves == "codes":
            return super().rows(layer, count)
        return self._exact(layer, slice(count))

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Keep | None,
               rotate: Rotate) -> None:
        """As of `UnitStore`; the host gets those of the new units that are kept."""
        self._write_late(layer)
        self.cool([layer])
        before, begins = self._counts_of(layer), self._begins(layer, self._counts_of(layer))
        kept = [torch.arange(count + new) for count in before] if keep is None else _on_host(keep)
        self._take(layer, kept, before, begins, *self._new_rows(layer, new))
        super().commit(layer, first_position, new, scores, keep, rotate)
        self._keep_last(layer)

    def _take(self, layer: int, kept: Sequence[Tensor], before: Sequence[int], begins: Sequence[int], keys: Tensor,
              values: Tensor) -> None:
        """Let the host have of each head the units of the ascending ranks `kept`, of which those from the count
        `before` on are new: row rank - count of keys and values [H, T, D]. These get places that are free then.

        Args:
            begins: the first of the rows of codes of each head, as they were.
        """
        host, _ = self._of_host(layer)
        host.own(self.slot)
        lengths = [len(ranks) for ranks in kept]
        heads = torch.arange(len(kept)).repeat_interleave(torch.tensor(lengths))
        rows = torch.cat([torch.arange(first, first + length)
                          for first, length in zip(self._begins(layer, lengths), lengths, strict=True)])
        ranks, counts = torch.cat(list(kept)), torch.tensor(before)[heads]
        new = ranks >= counts
        old = host.places[self.slot][(ranks + torch.tensor(begins)[heads])[~new]]
        where = self._place(layer, rows[~new], old, rows[new])
        of_head, at = heads[new], (ranks - counts)[new]
        taken = [units[of_head.to(units.device), at.to(units.device)] for units in (keys, values)]
        host.write(self.slot, where, (taken[0], taken[1]))

    def _place(self, layer: int, rows: Tensor, places: Tensor, new: Tensor) -> Tensor:
        """Let the rows of codes `rows` [N] have these `places` [N], and the rows `new` [M] places that are free then,
        which are returned, [M]."""
        host, _ = self._of_host(layer)
        table = host.places[self.slot]
        is_free, without = (torch.ones(len(table), dtype=torch.bool) for _ in range(2))
        is_free[places], without[rows], without[new] = False, False, False
        free = is_free.nonzero()[:, 0]
        table[rows], table[new], table[without] = places, free[:len(new)], free[len(new):]
        return free[:len(new)]

    def _keep_last(self, layer: int) -> None:
        """Write the last committed units exactly to the rows that they have on the device."""
        buffers, tail = self._buffers(layer), self.pool.tails[layer]
        residual = min(self.pool.residuals[layer], self.counts[layer])
        exact = self._exact_last(layer, residual)
        self.pool.read += len(exact[0]) * residual
        for held, units in zip((buffers.exact_keys, buffers.exact_values), exact, strict=True):
            held[self.slot, :, tail - residual:tail] = units

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """As of `UnitStore`; hot units go with the others, so that a copy answers as its original. The host's rows are
        shared until either of the two commits."""
        assert isinstance(other, TieredStore), "a pool with a tier has no others"
        super().copy_from(other, tail)
        for layer in range(len(other.counts)):
            host, hot = self._of_host(layer)
            host.lend(other.slot, self.slot, other._live(layer))
            for tensor in (hot.keys, hot.values, hot.ranks):
                tensor[self.slot] = tensor[other.slot]
        self._hot = [(count, object()) for count in other.hot]

    def put_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Keep, front: int,
                     rotate: Rotate) -> None:
        """As of `UnitStore`."""
        self.cool([layer])
        self._put_host_in_front(layer, units, _on_host(keep))
        super().put_in_front(layer, units, keep, front, rotate)
        self._keep_last(layer)

    def _put_host_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Sequence[Tensor]) -> None:
        """The same for the host's rows: those that stay keep their places, those in front get free ones."""
        host, _ = self._of_host(layer)
        host.own(self.slot)
        before, new = self._begins(layer, self._counts_of(layer)), 0 if units is None else units[0].shape[2]
        begins = self._begins(layer, [new + len(ranks) for ranks in keep])
        rows = torch.cat([torch.arange(len(ranks)) + first + new for first, ranks in zip(begins, keep, strict=True)])
        places = host.places[self.slot][torch.cat([ranks + first for first, ranks in zip(before, keep, strict=True)])]
        fronts = (torch.tensor(begins)[:, None] + torch.arange(new)).flatten()
        where = self._place(layer, rows, places, fronts)
        if units is not None:
            keys, values = (part[0, ..., :held.shape[-1]].flatten(0, 1)
                            for part, held in zip(units, (host.keys, host.values), strict=True))
            host.write(self.slot, where, (keys, values))

    # -- as tensors -------------------------------------------------------------------------------------------

    def beside(self) -> dict[str, Tensor]:
        """As of `UnitStore`, and of each layer l `l.key_mean` [H, D] fp32, unless means are given: codes are made of
        the exact units again. Where codes are saved, all of `QuantisedStore.beside`, and `l.last_keys`, `l.last_values`
        [H, n, D], the last units exactly, which stay in every head."""
        if self.tier.saves == "codes":
            out = super().beside()
            for layer, (count, front, most) in enumerate(zip(self.counts, self.fronts, self.pool.residuals,
                                                             strict=True)):
                exact = self._exact_last(layer, min(most, count - front))
                out |= {f"{layer}.last_{name}": rows.clone() for name, rows in zip(("keys", "values"), exact,
                                                                                   strict=True)}
            return out
        return {name: tensor for name, tensor in super().beside().items()
                if name.partition(".")[2] not in ("first_keys", "first_values")}

    def load(self, units: Mapping[str, Tensor], rotate: Rotate,
             fronts: Sequence[tuple[Tensor, Tensor] | None] = ()) -> None:
        """As of `UnitStore`. Where codes are saved they stay as they are, and the host gets what they say."""
        self.cool()
        if self.tier.saves == "codes":
            super().load(units, rotate, fronts)
            for layer in range(len(self.counts)):
                self._load_host(layer, self._said(layer, units), fronts)
            return
        codes = dict(units)
        for layer in range(len(self.counts)):
            buffers, keys = self._buffers(layer), units[f"{layer}.keys"]
            if keys.shape[1] and not buffers.given:
                buffers.means[self.slot, 0] = units[f"{layer}.key_mean"].to(buffers.means.device)
            exact = keys.to(buffers.keys.device), units[f"{layer}.values"].to(buffers.keys.device)
            coded = self._coded(layer, *exact, focus=False)
            for name, part, rows in zip(("keys", "values"), exact, coded, strict=True):
                codes[f"{layer}.{name}"], codes[f"{layer}.first_{name}"] = rows, part[:, :self.pool.firsts[layer]]
        super().load(codes, rotate, fronts)
        for layer in range(len(self.counts)):
            self._load_host(layer, (units[f"{layer}.keys"], units[f"{layer}.values"]), fronts)

    def _load_host(self, layer: int, units: tuple[Tensor, Tensor],
                   fronts: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Let the host have K and V [H, n, D] of the stream, behind those of a focus, as its only rows."""
        host, front, counts = self._of_host(layer)[0], self.fronts[layer], self._counts_of(layer)
        host.own(self.slot)
        host.places[self.slot] = torch.arange(host.places.shape[1])
        of_front = (fronts[layer] if fronts else None) or (None, None)
        for held, rows, before in zip((host.keys, host.values), units, of_front, strict=True):
            flat = held[self.slot].flatten(0, 1)
            for head, (first, count) in enumerate(zip(self._begins(layer, counts), counts, strict=True)):
                if before is not None:
                    flat[first:first + front] = before[0, head, :, :held.shape[-1]]
                flat[first + front:first + count] = rows[head, :count - front]
        self._keep_last(layer)

    def _said(self, layer: int, units: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """K and V of the stream as their loaded codes say them, the first and the last ones exactly, [H, n, D]."""
        buffers, count, front = self._buffers(layer), self.counts[layer], self.fronts[layer]
        out = []
        for part, name in enumerate(("keys", "values")):
            last = units[f"{layer}.last_{name}"]
            rows = buffers.exact_keys.new_empty(len(last), count, last.shape[-1])
            if rows.numel():
                self._read_codes(layer, part, rows)
            rows[:, count - last.shape[1]:] = last.to(rows.device)
            out.append(rows[:, front:])
        return out[0], out[1]


def _on_host(keep: Keep) -> Sequence[Tensor]:
    if isinstance(keep, Tensor):
        return list(keep.to("cpu"))
    return torch.cat(list(keep)).to("cpu").split([len(ranks) for ranks in keep])  # one wait for the device
