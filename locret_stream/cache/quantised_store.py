"""Units in few bits: committed units are codes, rounded once at their commit and moved as they are. Knows no policy.

Rank r of a layer is row r of its codes, as long as it is committed. Exact are, in rows of their own, the first units of
the stream, to which models attend most, and the units behind the committed ones, chunk or provisional. Keys are coded
without a mean per channel: one that comes with the heads, the same for all slots, or else that of the first chunk,
which stays, and for those of a focus a mean of their own.
Attention reads a layer from a scratch, into which its codes are read and its keys rotated. All layers of a device
share one, or each has its own (`decode_copy`): then what one slot read stays right until its units change, and the
next token reads nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from locret_stream.cache.buffers import QuantisedBuffers
from locret_stream.cache.pool import Pool
from locret_stream.cache.unit_store import Keep, Rotate, UnitStore
from locret_stream.kernels import compact_units, dequantise_units, quantise_units, slot_units

_LATE = 16  # units of a layer that `append` keeps before it writes them


class _Part(NamedTuple):
    """K or V of a layer's committed units: bits, rows of codes [H, b, bytes], exact units [H, n, D], and the means of
    the stream and of a focus, [H, 1, D] each."""

    bits: int
    rows: Tensor
    exact: Tensor
    means: tuple[Tensor | None, ...]


class QuantisedStore(UnitStore):
    """One slot of a pool of codes. What its methods do is said where `UnitStore` has them."""

    def __init__(self, pool: Pool, slot: int):
        super().__init__(pool, slot)
        # Of each layer, the row of the first unit that decoding has appended and not yet written to its row, and those
        # units: several are written at once, which saves two small copies a layer and token.
        self._late: list[tuple[int, list[tuple[Tensor, Tensor]]]] = [(0, []) for _ in pool.layers]

    def _buffers(self, layer: int) -> QuantisedBuffers:
        buffers = self.pool.layers[layer]
        assert isinstance(buffers, QuantisedBuffers), "a pool of codes has no others"
        return buffers

    # -- a forward pass ---------------------------------------------------------------------------------------

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor, rotate: Rotate) -> None:
        """As of `UnitStore`."""
        self._write_late(layer)
        self._changed(layer, start)
        self._write_rows(layer, self._row(layer, start, keys.shape[2]), keys, values)

    def append(self, layer: int, rank: int, keys: Tensor, values: Tensor, turned: Tensor, rotate: Rotate
               ) -> tuple[Tensor, Tensor]:
        """Write one unit behind the others, and what a decode attends to: rotated keys and values, of which the first
        `rank` + 1 ranks are right, [1, H, more, D]. If the scratch holds the ranks before it already, only the new
        unit is copied in.

        Args:
            keys, values, turned: K before RoPE, V, and K at its rank, [1, H, 1, D]. The first two are kept for a while,
                on CPUs: nothing may change them.
        """
        dense = self._buffers(layer).dense
        if dense.owner != (self, layer, False) or dense.right[1] != rank or dense.right[2] != rank:
            self.write(layer, rank, keys, values, rotate)
            self._attended(layer, rank + 1, rotate)
            return self._found(layer)
        row = self._row(layer, rank)
        if keys.is_cpu:
            self._keep_late(layer, row, keys, values)
        else:
            self._write_rows(layer, row, keys, values)
        for part, unit in ((1, values), (2, turned)):
            self._put_new(layer, dense.parts[part], rank, unit)
            dense.right[part] = rank + 1
        return self._found(layer)

    def _put_new(self, layer: int, part: Tensor, rank: int, unit: Tensor) -> None:
        """Write one unit [1, H, 1, D] at that rank to a part of the scratch."""
        slot_units(part, 0, rank, rank + 1).copy_(unit)

    def _found(self, layer: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values in the scratch."""
        dense = self._buffers(layer).dense
        return dense.parts[2], dense.parts[1]

    def _row(self, layer: int, rank: int, new: int = 1) -> int:
        """The row, among the exact units, of the first of some new units at that rank."""
        behind = rank - self.counts[layer]
        assert 0 <= behind and behind + new <= self.pool.chunk_size, "a forward writes the tail area only"
        return self.pool.tails[layer] + behind

    def _write_rows(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Write K and V, [1, H, T, D], to the rows of exact units from that one on."""
        buffers, stop = self._buffers(layer), row + keys.shape[2]
        slot_units(buffers.exact_keys, self.slot, row, stop).copy_(keys)
        own = buffers.exact_values.shape[-1]  # 0 where V is K, too
        slot_units(buffers.exact_values, self.slot, row, stop).copy_(values[..., :own])

    def _keep_late(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Keep one unit for `_write_late`."""
        first, units = self._late[layer]
        if len(units) >= _LATE or (units and row != first + len(units)):
            self._write_late(layer)
            units = []
        if not units:
            self._late[layer] = row, units
        units.append((keys, values))

    def _write_late(self, layer: int) -> None:
        """Write the units that `append` has kept. Whatever reads rows of new units does this first."""
        first, units = self._late[layer]
        if units:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*units, strict=True))
            self._late[layer] = 0, []
            self._write_rows(layer, first, keys, values)

    def keys(self, layer: int, count: int) -> Tensor:
        """Keys before RoPE, read from their codes, until the next read of any layer of this device."""
        return self._dense(layer, count, 0)

    rotated = keys

    def values(self, layer: int, count: int) -> Tensor:
        """Values, as `keys`."""
        return self._dense(layer, count, 1)

    def attended(self, layer: int, count: int, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """As of `UnitStore`, until the next read of any layer of this device."""
        return self._attended(layer, count, rotate)

    def _attended(self, layer: int, count: int, rotate: Rotate, *, exact: bool = False
                  ) -> tuple[Tensor, Tensor, Tensor]:
        """`attended`: of committed units what their codes say, or, where the host has them, what is `exact`."""
        keys, dense = self._dense(layer, count, 0, exact=exact), self._buffers(layer).dense
        start = min(dense.right[2], count)
        if start < count:
            self._rotate_read(layer, start, count, rotate)
            dense.right[2] = count
        if dense.parts[1] is not dense.parts[2]:
            values = self._dense(layer, count, 1, exact=exact)
            return keys, self._of(layer, dense.parts[2], count), values
        dense.right[1] = dense.right[2]
        return keys, *(self._of(layer, dense.parts[2], count),) * 2

    def _dense(self, layer: int, count: int, part: int, *, exact: bool = False) -> Tensor:
        """K (part 0) or V (part 1) of the first `count` ranks, [1, H, count, D], in the scratch."""
        dense, committed = self._buffers(layer).dense, min(count, self.counts[layer])
        if dense.owner != (self, layer, exact):
            dense.owner, dense.right = (self, layer, exact), [0, 0, 0]
        right = dense.right[part]
        if right < committed:
            dense.shown = dense.cold = None
            self._read_committed(layer, part, committed, exact=exact)
            right = committed if exact else max(0, min(committed, self.counts[layer] - self.pool.residuals[layer]))
        if right < count:
            self._write_late(layer)
            self._read_behind(layer, part, right, count)
        dense.right[part] = max(dense.right[part], count)
        return self._of(layer, dense.parts[part], count)

    def _of(self, layer: int, part: Tensor, count: int) -> Tensor:
        """The first `count` ranks of a part of the scratch, [1, H, count, D]."""
        return part[:, :, :count]

    def _rotate_read(self, layer: int, start: int, count: int, rotate: Rotate) -> None:
        """Rotate the keys of the ranks start .. count-1 in the scratch."""
        keys, _, rotated = self._buffers(layer).dense.parts
        rotate(layer, keys[:, :, start:count], start, rotated[:, :, start:count])

    def _read_committed(self, layer: int, part: int, count: int, *, exact: bool) -> None:
        """Write K or V of the first `count` committed units to the scratch: what their codes say, or, where the host
        has them, what is `exact`."""
        out = self._buffers(layer).dense.parts[part][0, :, :count]
        (self._read_exact if exact else self._read_codes)(layer, part, out)

    def _read_behind(self, layer: int, part: int, start: int, count: int) -> None:
        """Write K or V of the ranks start .. count-1, which are exact on the device, to the scratch."""
        behind = self.pool.tails[layer] - self.counts[layer]  # the row of rank 0, if all ranks had rows there
        exact = self._parts(layer)[part].exact
        self._buffers(layer).dense.parts[part][0, :, start:count] = exact[:, behind + start:behind + count]

    def _read_codes(self, layer: int, part: int, out: Tensor) -> None:
        """Write K or V of the first committed units to `out` [H, n, D]: what their codes say, and the first ones of the
        stream exactly."""
        held, (front, stop) = self._parts(layer)[part], self._firsts(layer)
        say(held.bits, held.rows, held.exact, held.means, out, front, stop)

    def _read_exact(self, layer: int, part: int, out: Tensor) -> None:
        raise AssertionError("codes are the only copy")

    def _changed(self, layer: int, start: int = 0) -> None:
        """Ranks from `start` on are no longer as they were read."""
        dense = self._buffers(layer).dense
        if dense.owner is not None and dense.owner[:2] == (self, layer):
            dense.right = [min(right, start) for right in dense.right]

    def _parts(self, layer: int) -> tuple[_Part, _Part]:
        """K and V of the committed units."""
        buffers, slot, (keys, values) = self._buffers(layer), self.slot, self.pool.store_bits
        return (_Part(keys, buffers.keys[slot], buffers.exact_keys[slot],
                      tuple(buffers.means[slot][:, :, None].unbind())),
                _Part(values, buffers.values[slot], buffers.exact_values[slot], (None, None)))

    def _firsts(self, layer: int) -> tuple[int, int]:
        """The rank of the first of the units of the stream that are exact from their commit on, and the rank behind the
        last of them, whether or not they are there already."""
        return self.fronts[layer], self.fronts[layer] + self.pool.firsts[layer]

    # -- committed units --------------------------------------------------------------------------------------

    def _stored(self, layer: int, keys: Tensor, values: Tensor, *, focus: bool) -> tuple[Tensor, Tensor]:
        """Rows of codes, [H, T, bytes] each. Unless means are given, all units of a focus, which come at once, fix its
        mean, and those of the first chunk that of the stream."""
        if not self._buffers(layer).given and (focus or self.counts[layer] == self.fronts[layer]):
            self._buffers(layer).means[self.slot, int(focus)] = keys.float().mean(1)
        return self._coded(layer, keys, values, focus=focus)

    def _coded(self, layer: int, keys: Tensor, values: Tensor, *, focus: bool) -> tuple[Tensor, Tensor]:
        """`_stored`, by the means that there are."""
        coded = [part.contiguous().view(torch.uint8) if bits == 16 or not part.shape[-1] else
                 quantise_units(part, bits, means[focus])
                 for part, (bits, _, _, means) in zip((keys, values), self._parts(layer), strict=True)]
        return coded[0], coded[1]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Keep | None,
               rotate: Rotate) -> None:
        """Code the last `new` written units, and keep of all units those at the ranks `keep`; as `UnitStore.commit`."""
        self._write_late(layer)
        self._changed(layer)
        coded = self._code_new(layer, new)
        buffers, slot, count = self._buffers(layer), self.slot, self.counts[layer]
        total = count + new
        buffers.scores[slot, :, :, :total] = scores
        positions = buffers.positions[slot]
        positions[:, count:total] = torch.arange(first_position, first_position + new, device=positions.device)
        joined = [torch.cat(parts, dim=1) for parts in zip(UnitStore.rows(self, layer, count), coded, strict=True)]
        joined = joined[:len(buffers.moved)]
        kept = total
        if keep is not None:
            assert isinstance(keep, Tensor), "every head keeps as many"
            kept = keep.shape[1]
            compact_units([*joined, *buffers.scores[slot, :, :, :total], positions[:, :total]], keep, buffers.scratch)
        for rows, moved in zip(buffers.moved, joined, strict=True):
            rows[slot, :, :kept] = moved[:, :kept]
        self.counts[layer] = kept

    def _new_rows(self, layer: int, new: int) -> tuple[Tensor, Tensor]:
        """K before RoPE and V, [H, T, D], of the units that a forward has written."""
        buffers, tail = self._buffers(layer), self.pool.tails[layer]
        return (buffers.exact_keys[self.slot, :, tail:tail + new], buffers.exact_values[self.slot, :, tail:tail + new])

    def _code_new(self, layer: int, new: int) -> tuple[Tensor, Tensor]:
        """The last `new` written units as rows of codes, [H, T, bytes] each; the first ones of the stream are kept
        exactly, too. No unit leaves before these are there, so that all heads have as many until then."""
        buffers, slot, count = self._buffers(layer), self.slot, self.counts[layer]
        (first, stop), (keys, values) = self._firsts(layer), self._new_rows(layer, new)
        at, missing = count - first, max(0, min(stop, count + new) - count)
        buffers.exact_keys[slot, :, at:at + missing] = keys[:, :missing]
        buffers.exact_values[slot, :, at:at + missing] = values[:, :missing]
        return self._stored(layer, keys, values, focus=False)

    def copy_from(self, other: UnitStore, tail: int = 0) -> None:
        """As of `UnitStore`."""
        assert isinstance(other, QuantisedStore), "a pool of codes has no others"
        for layer, exact in enumerate(self.pool.tails):
            other._write_late(layer)
            self._changed(layer)
            self._late[layer] = 0, []
            buffers, count = self._buffers(layer), other._used(layer, 0)
            for tensor, axis, length in ((buffers.keys, 1, count), (buffers.values, 1, count),
                                         (buffers.exact_keys, 1, exact + tail), (buffers.exact_values, 1, exact + tail),
                                         (buffers.scores, 2, count), (buffers.positions, 1, count),
                                         *(() if buffers.given else ((buffers.means, 0, 2),))):
                tensor[self.slot].narrow(axis, 0, length).copy_(tensor[other.slot].narrow(axis, 0, length))
        self.counts, self.fronts = list(other.counts), list(other.fronts)
        self._copy_state(other)

    def put_in_front(self, layer: int, units: tuple[Tensor, Tensor] | None, keep: Keep, front: int,
                     rotate: Rotate) -> None:
        """As of `UnitStore`."""
        self._changed(layer)
        self._late[layer] = 0, []  # what was written behind the committed units is not there any more
        super().put_in_front(layer, units, keep, front, rotate)

    # -- as tensors -------------------------------------------------------------------------------------------

    def beside(self) -> dict[str, Tensor]:
        """As of `UnitStore`, and of each layer l: `l.first_keys`, `l.first_values` [H, n, D], the first units exactly,
        and `l.key_mean` [H, D] fp32, once there are any, unless means are given."""
        out = super().beside()
        for layer in range(len(self.counts)):
            buffers = self._buffers(layer)
            count = max(0, min(self.pool.firsts[layer], self.counts[layer] - self.fronts[layer]))
            out[f"{layer}.first_keys"] = buffers.exact_keys[self.slot, :, :count].clone()
            out[f"{layer}.first_values"] = buffers.exact_values[self.slot, :, :count].clone()
            if self.counts[layer] > self.fronts[layer] and not buffers.given:
                out[f"{layer}.key_mean"] = buffers.means[self.slot, 0].clone()
        return out

    def load(self, units: Mapping[str, Tensor], rotate: Rotate,
             fronts: Sequence[tuple[Tensor, Tensor] | None] = ()) -> None:
        """As of `UnitStore`."""
        super().load(units, rotate, fronts)
        for layer in range(len(self.counts)):
            self._changed(layer)
            self._late[layer] = 0, []
            buffers, first = self._buffers(layer), units[f"{layer}.first_keys"].shape[1]
            buffers.exact_keys[self.slot, :, :first] = units[f"{layer}.first_keys"].to(buffers.keys.device)
            buffers.exact_values[self.slot, :, :first] = units[f"{layer}.first_values"]
            if self.counts[layer] > self.fronts[layer] and not buffers.given:
                buffers.means[self.slot, 0] = units[f"{layer}.key_mean"].to(buffers.keys.device)


def say(bits: int, rows: Tensor, exact: Tensor, means: Sequence[Tensor | None], out: Tensor, front: int, stop: int
        ) -> None:
    """Write what the first n of the rows [H, b, bytes] say to `out` [H, n, D]: the first `front` are of a focus, and
    those up to the rank `stop` are exact, [H, s, D]. Others as of `_Part`."""
    count = out.shape[1]
    if bits == 16:
        out.copy_(rows[:, :count].view(out.dtype))
    else:
        of_front = min(front, count)
        dequantise_units(rows[:, :of_front], bits, out[:, :of_front], means[1])
        dequantise_units(rows[:, of_front:count], bits, out[:, of_front:], means[0])
    stop = max(front, min(stop, count))
    out[:, front:stop] = exact[:, :stop - front]
