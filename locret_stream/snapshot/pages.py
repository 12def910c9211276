"""Units <-> pages: a page has the K and V of a range of stream positions, and is never changed.

Units are evicted one by one, all over the cache, so a page stays useful for long: a later snapshot names the same pages
and says by *masks* which of their units are still kept. A snapshot writes only new units, and those of pages most of
whose units were evicted. A unit is *live* while it is kept and *dead* after its eviction. Scores may change while a
unit is live, so they are never in a page but in the manifest, for live units only.

    page      "index": counts [L, H] i32, units per layer and KV head;  l.positions [N_l] i32, from the page's start on
              "units": l.keys, l.values [N_l, D], head by head, in time order;  N_l = counts[l].sum()
    manifest  "masks": page number [ceil(sum over layers of N_l / 8)] u8, a bit per unit, for pages with dead units

The ranges of a manifest's pages are disjoint, ascending, and cover all units (a range without units has no page).

Where units are stored in few bits, `l.keys` and `l.values` are rows of codes, [N_l, bytes] u8, as
`kernels.reference.quantise_units` makes them, and the manifest's "state" has what is needed beside them:
`l.first_keys`, `l.first_values` [H, n, D], the first units exactly, and `l.key_mean` [H, D] f32, which is added to
what the codes of keys say; where other exact units were in the host's memory and are not saved, `l.last_keys`,
`l.last_values` [H, n, D] as well, the last units exactly. The `dtype` of its identity names the bits, says whether
exact units were saved as codes, and names the means that come with the heads, where these are added and no
`l.key_mean` is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from locret_stream.cache import NOWHERE
from locret_stream.errors import SnapshotCorrupt
from locret_stream.snapshot.format import Buffer, Page, PageRef, expect, pack, tensors, total

PAGE_BYTES = 64 << 20  # the K and V that a page should have at most; larger ranges are cut
PAGE_SPAN = 1 << 31  # the positions that i32 can distinguish; longer ranges are cut
LIVE_SHARE = 0.5  # a page with a smaller share of live units is written anew
TAKEN_SHARE = 1.5  # a range that is written is merged with pages before it of up to so many times its units


@dataclass(frozen=True)
class Geometry:
    """The shape and dtype that all pages of a session share.

    Args:
        layers: of every layer its KV heads, and the items of a unit's K and of its V; where units are stored as rows of
            codes, uint8, their bytes.
        headwise: of every layer, whether its heads keep different numbers of units; () for none.
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    headwise: tuple[bool, ...] = ()

    @classmethod
    def even(cls, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None) -> Geometry:
        """Of layers that are alike; `value_dim` None: V has as many items as K."""
        return cls(((kv_heads, dim, dim if value_dim is None else value_dim),) * layers, dtype)

    @property
    def most_heads(self) -> int:
        """KV heads of the layer that has most."""
        return max(heads for heads, _, _ in self.layers)

    @property
    def unit_bytes(self) -> int:
        """Bytes of K and V of one unit, where they are most."""
        return max(key + value for _, key, value in self.layers) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerUnits:
    """Units of one layer in a range of positions, head by head: counts [H], positions [N] int64, K and V [N, D]."""

    counts: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def between(cls, start: int, end: int, positions: Tensor, keys: Tensor, values: Tensor) -> LayerUnits:
        """Copies of the units at positions start .. end-1, on the CPU.

        Args:
            positions: [H, n], ascending for every head. keys, values: [H, n, D].
        """
        ends = torch.tensor([start, end], device=positions.device).repeat(len(positions), 1)
        bounds = torch.searchsorted(positions.contiguous(), ends).tolist()
        inside = [torch.cat([units[head, first:stop] for head, (first, stop) in enumerate(bounds)]).cpu()
                  for units in (positions, keys, values)]
        return cls(torch.tensor([stop - first for first, stop in bounds]), *inside)


@dataclass(frozen=True)
class PageIndex:
    """Which units a page has: counts [L, H] and, for every layer, their positions [N_l] int64. A layer with fewer heads
    than another counts 0 in those that it lacks."""

    ref: PageRef
    counts: np.ndarray
    positions: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Plan:
    """What a snapshot consists of: pages that stay, with their masks, and ranges that must be written."""

    stay: tuple[tuple[PageIndex, tuple[np.ndarray, ...]], ...]  # masks: for every layer bool [N_l]
    write: tuple[tuple[int, int], ...]  # start and end, ascending


def plan(pages: Sequence[PageIndex], positions: Sequence[Tensor], seen: int, geometry: Geometry,
         page_bytes: int = PAGE_BYTES) -> Plan:
    """Which pages stay for a snapshot, and which ranges of positions must be written for it.

    Ranges that no page covers are written. A range that is written is merged with the neighbours before it that are not
    much larger, so that sizes fall geometrically from page to page: pages are few, and every unit is rewritten a
    logarithmic number of times.

    Args:
        pages: those that are stored, disjoint and in order. positions: of the kept units, for every layer [H, n].
        seen: committed tokens, the end of the last range. page_bytes: the K and V that a page should have at most.
    """
    live = [layer.cpu().numpy() for layer in positions]
    masks = [tuple(_masks(page, live)) for page in pages]
    ranges: list[list[int]] = []  # start, end, units, number of the page that covers the range or -1
    at = 0
    for number, page in enumerate(pages):
        assert at <= page.ref.start < page.ref.end <= seen, "pages overlap, or end behind what was seen"
        if at < page.ref.start:
            ranges.append([at, page.ref.start, _count(live, at, page.ref.start), -1])
        units = sum(int(mask.sum()) for mask in masks[number])
        ranges.append([page.ref.start, page.ref.end, units, number if units >= LIVE_SHARE * page.ref.units else -1])
        at = page.ref.end
    if at < seen:
        ranges.append([at, seen, _count(live, at, seen), -1])
    most = max(1, page_bytes // geometry.unit_bytes)
    merged: list[list[int]] = []
    for entry in ranges:
        start, end, units, number = entry
        while merged and number < 0 and merged[-1][2] + units <= most and end - merged[-1][0] <= PAGE_SPAN and (
                merged[-1][3] < 0 or merged[-1][2] <= TAKEN_SHARE * units):
            start, units = merged[-1][0], units + merged.pop()[2]
        merged.append([start, end, units, number])
    stay = tuple((pages[number], masks[number]) for _, _, _, number in merged if number >= 0)
    write = [(start, end) for start, end, _, number in merged if number < 0]
    return Plan(stay, tuple(cut for start, end in write for cut in _cut(live, start, end, most)))


def _masks(page: PageIndex, live: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """For every layer which units of the page are live, bool [N_l]; `live` has their positions [H, n]."""
    for layer, kept in enumerate(live):
        ends = np.cumsum(page.counts[layer][:len(kept)])
        heads = np.split(page.positions[layer], ends[:-1])
        yield np.concatenate([_among(positions, kept[head]) for head, positions in enumerate(heads)])


def _among(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of the numbers are among the others, bool [n]; both ascend."""
    if not len(others):
        return np.zeros(len(numbers), dtype=bool)
    return others[np.minimum(np.searchsorted(others, numbers), len(others) - 1)] == numbers


def _count(live: Sequence[np.ndarray], start: int, end: int) -> int:
    return sum(int(((layer >= start) & (layer < end)).sum()) for layer in live)


def _cut(live: Sequence[np.ndarray], start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range into ranges with some units each: at most `most`, unless one position has more."""
    inside = np.sort(np.concatenate([layer[(layer >= start) & (layer < end)] for layer in live]))
    at = 0
    while at < len(inside):
        if inside[at] >= start + PAGE_SPAN:
            start = int(inside[at])
        stop = min(end, start + PAGE_SPAN)
        if at + most < len(inside):  # units of one position stay together
            stop = min(stop, max(int(inside[at + most]), int(inside[at]) + 1))
        yield start, stop
        start, at = stop, int(np.searchsorted(inside, stop))


def write_page(start: int, end: int, layers: Sequence[LayerUnits]) -> tuple[list[Buffer], PageIndex]:
    """The container of the kept units of positions start .. end-1, and its index.

    The `ref` of the index has no name yet, which writing the page gives it.
    """
    index: dict[str, Tensor] = {}
    content: dict[str, Tensor] = {}
    counts = pad_sequence([units.counts for units in layers], batch_first=True).to(torch.int32)
    for layer, units in enumerate(layers):
        index[f"{layer}.positions"] = (units.positions - start).to(torch.int32)
        content[f"{layer}.keys"], content[f"{layer}.values"] = units.keys, units.values
    parts = pack(Page(start=start, end=end), {"index": {"counts": counts, **index}, "units": content})
    positions = tuple(units.positions.numpy().copy() for units in layers)
    count = int(counts.sum())
    ref = PageRef("0" * 32, start, end, total(parts), units=count, live=count)
    return parts, PageIndex(ref, counts.numpy(), positions)


def read_page(ref: PageRef, body: Page, sections: Mapping[str, memoryview], geometry: Geometry,
              what: str) -> tuple[PageIndex, dict[str, Tensor]]:
    """The index of a verified page and its K and V, `l.keys` and `l.values` [N_l, D]. Raises SnapshotCorrupt if it has
    another geometry, or is not the page that `ref` describes."""
    if (body.start, body.end) != (ref.start, ref.end) or set(sections) != {"index", "units"}:
        raise SnapshotCorrupt(f"{what}: positions {body.start} to {body.end}, sections {sorted(sections)}; expected "
                              f"{ref.start} to {ref.end}, index and units")
    index = tensors(sections["index"], what)
    layers, form = range(len(geometry.layers)), (len(geometry.layers), geometry.most_heads)
    counts = index.get("counts")
    if counts is None or counts.dtype != torch.int32 or counts.shape != form or (counts < 0).any() or any(
            counts[layer, heads:].any() for layer, (heads, _, _) in enumerate(geometry.layers)):
        raise SnapshotCorrupt(f"{what}: no counts of {form[0]} layers and {form[1]} KV heads")
    sizes = counts.long().sum(-1).tolist()
    expect(index, {"counts": (torch.int32, form),
                   **{f"{layer}.positions": (torch.int32, (sizes[layer],)) for layer in layers}}, what)
    units = tensors(sections["units"], what)
    expect(units, {f"{layer}.{part}": (geometry.dtype, (sizes[layer], dim))
                   for layer, (_, *dims) in enumerate(geometry.layers)
                   for part, dim in zip(("keys", "values"), dims, strict=True)}, what)
    if sum(sizes) != ref.units:
        raise SnapshotCorrupt(f"{what}: {sum(sizes)} units; expected {ref.units}")
    positions = tuple(index[f"{layer}.positions"].numpy().astype(np.int64) + ref.start for layer in layers)
    for layer in layers:
        for head in np.split(positions[layer], np.cumsum(counts[layer].numpy())[:-1]):
            if len(head) and (head[0] < ref.start or head[-1] >= ref.end or (np.diff(head) <= 0).any()):
                raise SnapshotCorrupt(f"{what}: positions of layer {layer} are not ascending inside the page")
    return PageIndex(ref, counts.numpy().copy(), positions), units  # a view would keep the whole page in memory


def pack_masks(masks: Sequence[np.ndarray | None]) -> dict[str, Tensor]:
    """The "masks" section of a manifest: a tensor for every page with dead units. `masks` as of `unpack_masks`."""
    return {str(number): torch.from_numpy(np.packbits(mask)) for number, mask in enumerate(masks)
            if mask is not None and not mask.all()}


def unpack_masks(section: Mapping[str, Tensor], refs: Sequence[PageRef], what: str) -> list[np.ndarray | None]:
    """For every page of the manifest which units are live, bool [units], None for all. Raises SnapshotCorrupt for a
    mask of no page, of another size, with bits behind its end, or of another number of live units than stated."""
    strange = sorted(set(section) - {str(number) for number in range(len(refs))})
    if strange:
        raise SnapshotCorrupt(f"{what}: a mask of page {strange[0]!r}, which is not there")
    masks: list[np.ndarray | None] = []
    for number, ref in enumerate(refs):
        bits, mask, live = section.get(str(number)), None, ref.units
        if bits is not None:
            if bits.dtype != torch.uint8 or bits.shape != (-(-ref.units // 8),):
                raise SnapshotCorrupt(f"{what}: the mask of page {number} is {bits.dtype} {tuple(bits.shape)}")
            whole = np.unpackbits(bits.numpy()).view(bool)
            if whole[ref.units:].any():
                raise SnapshotCorrupt(f"{what}: the mask of page {number} names units behind its end")
            mask = whole[:ref.units]
            live = int(mask.sum())
        if live != ref.live:
            raise SnapshotCorrupt(f"{what}: page {number} has {live} living units; expected {ref.live}")
        masks.append(mask)
    return masks


class Assembly:
    """Puts live units of pages together, page by page, into tensors [H, n, D] and [H, n] for every layer. Where heads
    keep different numbers, the rows behind the units of a head are zeros, at the position `NOWHERE`.

    Args:
        counts: units per layer, n: of each head, or where the heads share a budget of the one with most. Their memory
            is allocated here, so the caller must check them before.

    Raises:
        SnapshotCorrupt: there are too many units or too few, or they are out of order.
    """

    def __init__(self, counts: Sequence[int], geometry: Geometry, what: str):
        self.geometry, self.what, self.counts = geometry, what, tuple(counts)
        if len(self.counts) != len(geometry.layers):
            raise SnapshotCorrupt(f"{what}: units of {len(self.counts)} layers; expected {len(geometry.layers)}")
        self.end = 0
        self.filled = [np.zeros(heads, dtype=np.int64) for heads, _, _ in geometry.layers]
        # numpy allocates and copies, because its memory is not mapped in small pages, and because torch would share
        # every copy with a second thread and wait for it while that thread reads the next page.
        self._bytes: dict[str, np.ndarray] = {}
        self.headwise = geometry.headwise or (False,) * len(self.counts)
        for layer, (count, (heads, *dims)) in enumerate(zip(self.counts, geometry.layers, strict=True)):
            self._bytes[f"{layer}.positions"] = np.full((heads, count), NOWHERE, np.int64)
            for part, dim in zip(("keys", "values"), dims, strict=True):
                self._bytes[f"{layer}.{part}"] = (np.zeros if self.headwise[layer] else np.empty)(
                    (heads, count, dim * geometry.dtype.itemsize), np.uint8)

    def add(self, page: PageIndex, units: Mapping[str, Tensor], mask: np.ndarray | None) -> None:
        """Add the next page, in the order of positions, as `read_page` gave it, with its mask from `unpack_masks`."""
        if page.ref.start < self.end:
            raise SnapshotCorrupt(f"{self.what}: a page from position {page.ref.start} on; expected {self.end} or more")
        self.end, first = page.ref.end, 0
        mask = np.ones(page.ref.units, dtype=bool) if mask is None else mask
        for layer, (heads, _, _) in enumerate(self.geometry.layers):
            sources = {f"{layer}.{part}": units[f"{layer}.{part}"].view(torch.uint8).numpy()
                       for part in ("keys", "values")}
            sources[f"{layer}.positions"] = page.positions[layer]
            bounds = np.concatenate([[0], np.cumsum(page.counts[layer])])
            live = mask[first:first + bounds[-1]]
            first += bounds[-1]
            for head in range(heads):
                part = slice(int(bounds[head]), int(bounds[head + 1]))
                chosen = live[part]
                at, count = int(self.filled[layer][head]), int(chosen.sum())
                if at + count > self.counts[layer]:
                    raise SnapshotCorrupt(f"{self.what}: layer {layer} has more than {self.counts[layer]} units")
                for name, source in sources.items():
                    target = self._bytes[name][head, at:at + count]
                    if count == len(chosen):
                        target[...] = source[part]
                    else:
                        np.compress(chosen, source[part], axis=0, out=target)
                self.filled[layer][head] += count

    def finish(self) -> dict[str, Tensor]:
        """All units: `l.keys`, `l.values` [H, n, D] and `l.positions` [H, n] of every layer l."""
        dtype = self.geometry.dtype
        for layer, count in enumerate(self.counts):
            if (self.filled[layer] != count).any() and not (self.headwise[layer] and max(self.filled[layer]) == count):
                raise SnapshotCorrupt(f"{self.what}: layer {layer} has {self.filled[layer].tolist()} units per KV head;"
                                      f" expected {count}")
        return {name: _as(dtype, units) if units.dtype == np.uint8 else torch.from_numpy(units)
                for name, units in self._bytes.items()}


def _as(dtype: torch.dtype, data: np.ndarray) -> Tensor:
    """The memory of an array [..., bytes] as a tensor [..., D] of a dtype that numpy may not know."""
    shape = (*data.shape[:-1], data.shape[-1] // dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype).view(shape) if data.size else torch.empty(shape, dtype=dtype)
