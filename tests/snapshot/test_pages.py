"""Units and pages: what lives is in just one page, pages stay few, and what is put together is what there was."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from locret_stream.errors import SnapshotCorrupt
from locret_stream.snapshot.format import Page, PageRef, pack, tensors, unpack
from locret_stream.snapshot.pages import (
    LIVE_SHARE,
    PAGE_BYTES,
    PAGE_SPAN,
    TAKEN_SHARE,
    Assembly,
    Geometry,
    LayerUnits,
    PageIndex,
    Plan,
    pack_masks,
    plan,
    read_page,
    unpack_masks,
    write_page,
)
from tests.snapshot.forge import GEOMETRY, MASK, build, layer_units, page_ref, parts_of, resaved, sound_page

SMALL = Geometry(layers=2, kv_heads=2, head_dim=2, dtype=torch.bfloat16)
BLANK = "0" * 32
REF = PageRef(BLANK, 10, 30, 0, 12, 12)  # of the sound page


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything a tensor is, NaN included."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Life:
    """Units that live in a cache and its pages in a store, through one save after another.

    K and V of a unit are random bits, drawn when it is born and kept beside it: NaN and infinities among them.
    """

    def __init__(self, geometry: Geometry, seed: int, page_bytes: int = PAGE_BYTES, *, contents: bool = True):
        self.geometry, self.page_bytes, self.contents = geometry, page_bytes, contents
        self.rng = np.random.default_rng(seed)
        self.seen = 0
        self.alive = [[np.zeros(0, np.int64) for _ in range(geometry.kv_heads)] for _ in range(geometry.layers)]
        self.content: dict[tuple[int, int, int], tuple[bytes, bytes]] = {}
        self.files: dict[str, bytes] = {}
        self.pages: list[PageIndex] = []
        self.born = self.written = self.number = 0

    def feed(self, count: int, budgets: Sequence[int], taste: str) -> None:
        """`count` new positions; then every head keeps its budget by taste."""
        new = np.arange(self.seen, self.seen + count)
        self.seen += count
        for layer, budget in enumerate(budgets):
            for head in range(self.geometry.kv_heads):
                if self.contents:
                    size = self.geometry.head_dim * self.geometry.dtype.itemsize
                    for position in new.tolist():
                        self.content[layer, head, position] = self.rng.bytes(size), self.rng.bytes(size)
                own = np.concatenate([self.alive[layer][head], new])
                score = {"newest": own, "oldest": -own, "random": self.rng.random(len(own)),
                         "mixed": own + self.rng.pareto(1, len(own)) * budget,
                         "stretches": own // 37 * 7919 % 1009}[taste]
                self.alive[layer][head] = np.sort(own[np.argsort(-score, kind="stable")[:budget]])
        self.born += count * self.geometry.layers * self.geometry.kv_heads

    @property
    def positions(self) -> list[Tensor]:
        return [torch.from_numpy(np.stack(heads)) for heads in self.alive]

    @property
    def living(self) -> int:
        return sum(len(own) for heads in self.alive for own in heads)

    def units(self, layer: int, start: int, end: int) -> LayerUnits:
        own = [heads[(heads >= start) & (heads < end)] for heads in self.alive[layer]]
        found = [self.content[layer, head, position] for head, inside in enumerate(own) for position in inside.tolist()]
        return LayerUnits(torch.tensor([len(inside) for inside in own]), torch.from_numpy(np.concatenate(own)),
                          *(self._tensor([pair[part] for pair in found]) for part in (0, 1)))

    def _tensor(self, found: list[bytes]) -> Tensor:
        data, dim = bytearray(b"".join(found)), self.geometry.head_dim
        return torch.frombuffer(data, dtype=self.geometry.dtype).reshape(-1, dim) if data else torch.empty(
            0, dim, dtype=self.geometry.dtype)

    def save(self) -> Plan:
        """Plan, write what is new, forget what is not needed."""
        found = plan(self.pages, self.positions, self.seen, self.geometry, self.page_bytes)
        pages = [index for index, _ in found.stay]
        for start, end in found.write:
            self.number += 1
            name = f"{self.number:032x}"
            if self.contents:
                layers = [self.units(layer, start, end) for layer in range(self.geometry.layers)]
                parts, index = write_page(start, end, layers)
                self.files[name] = b"".join(parts)
                assert index.ref.size == len(self.files[name])
            else:
                own = [[heads[(heads >= start) & (heads < end)] for heads in layer] for layer in self.alive]
                counts = np.array([[len(inside) for inside in layer] for layer in own], dtype=np.int32)
                total = int(counts.sum())
                index = PageIndex(PageRef(name, start, end, 0, total, total), counts,
                                  tuple(np.concatenate(layer) for layer in own))
            self.written += index.ref.units
            pages.append(PageIndex(msgspec.structs.replace(index.ref, name=name), index.counts, index.positions))
        self.pages = sorted(pages, key=lambda page: page.ref.start)
        return found

    def restored(self, found: Plan) -> dict[str, Tensor]:
        """What a reader puts together from the stored bytes, by the manifest's refs and masks alone."""
        masks = {page.ref.name: np.concatenate(layers) for page, layers in found.stay}
        refs = tuple(msgspec.structs.replace(
            page.ref, live=int(masks[page.ref.name].sum()) if page.ref.name in masks else page.ref.units)
            for page in self.pages)
        stored = b"".join(pack(Page(start=0, end=0),
                               {"masks": pack_masks([masks.get(page.ref.name) for page in self.pages])}))
        unpacked = unpack_masks(tensors(unpack(stored, Page, "it")[1]["masks"], "it"), refs, "it")
        assembly = Assembly([len(layer[0]) for layer in self.alive], self.geometry, "it")
        for ref, mask in zip(refs, unpacked, strict=True):
            body, sections, _ = unpack(bytearray(self.files[ref.name]), Page, "it")
            assembly.add(*read_page(ref, body, sections, self.geometry, "it"), mask)
        return assembly.finish()

    def expected(self) -> Iterator[tuple[str, Tensor]]:
        for layer, heads in enumerate(self.alive):
            yield f"{layer}.positions", self.positions[layer]
            for part, name in enumerate(("keys", "values")):
                yield f"{layer}.{name}", torch.stack([self._tensor(
                    [self.content[layer, head, position][part] for position in own.tolist()])
                    for head, own in enumerate(heads)])


def expect_sound(life: Life, found: Plan) -> None:
    """The laws of every plan."""
    most = max(1, life.page_bytes // life.geometry.unit_bytes)
    ranges = sorted([(page.ref.start, page.ref.end) for page, _ in found.stay] + list(found.write))
    assert all(a < b <= c < d for (a, b), (c, d) in pairwise(ranges)) or len(ranges) < 2
    assert all(0 <= start < end <= life.seen and end - start <= PAGE_SPAN for start, end in ranges)
    assert list(found.write) == sorted(found.write)
    every = np.concatenate([np.concatenate(layer) for layer in life.alive])
    for start, end in found.write:
        inside = every[(every >= start) & (every < end)]
        assert len(inside) and (len(inside) <= most or len(np.unique(inside)) == 1)
    for layer, heads in enumerate(life.alive):
        for head, own in enumerate(heads):
            held = [own[(own >= start) & (own < end)] for start, end in found.write]
            for page, masks in found.stay:
                first = int(page.counts[layer][:head].sum())
                part = slice(first, first + int(page.counts[layer][head]))
                held.append(page.positions[layer][part][masks[layer][part]])
            assert np.sort(np.concatenate([*held, own[:0]])).tolist() == own.tolist()
    for page, masks in found.stay:
        assert sum(int(mask.sum()) for mask in masks) >= LIVE_SHARE * page.ref.units


TASTES = ["newest", "oldest", "random", "mixed", "stretches"]
STEPS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 7, 20]), st.tuples(st.integers(1, 12), st.integers(1, 12)),
                           st.sampled_from(TASTES)), min_size=1, max_size=12)


@given(STEPS, st.integers(0, 99), st.sampled_from([1, 24, 64, 200, PAGE_BYTES]))
@settings(max_examples=120)
def test_every_living_unit_is_in_just_one_page_and_is_put_together_bit_for_bit(steps, seed: int, page_bytes: int):
    life = Life(SMALL, seed, page_bytes)
    for count, budgets, taste in steps:
        life.feed(count, budgets, taste)
        found = life.save()
        expect_sound(life, found)
        restored = life.restored(found)
        for name, tensor in life.expected():
            assert bits(restored.pop(name)) == bits(tensor), name
        assert not restored


def test_nothing_is_written_where_nothing_changed_and_nothing_died():
    life = Life(SMALL, 0)
    life.feed(20, (9, 9), "random")
    life.save()
    again = life.save()
    assert again.write == () and [page for page, _ in again.stay] == life.pages


def test_an_empty_session_has_no_pages():
    found = plan([], [torch.zeros(2, 0, dtype=torch.int64)] * 2, 0, SMALL)
    assert found == Plan((), ())
    assert plan([], [torch.zeros(2, 0, dtype=torch.int64)] * 2, 50, SMALL) == found


@pytest.mark.parametrize("living, stays", [(8, True), (5, True), (4, True), (3, False), (1, False), (0, False)])
def test_a_page_stays_while_half_of_it_lives_and_is_written_anew_below(living: int, stays: bool):
    geometry = Geometry(1, 1, 2, torch.float32)
    page = PageIndex(PageRef(BLANK, 0, 8, 0, 8, 8), np.array([[8]], np.int32), (np.arange(8),))
    found = plan([page], [torch.arange(8 - living, 8)[None]], 8, geometry)
    assert len(found.stay) == stays
    assert found.write == (() if stays or not living else ((0, 8),))


def pages_of(*units: int, at: int = 0) -> list[PageIndex]:
    """Pages one behind another in one layer and head, every position from `at` on a unit."""
    out = []
    for count in units:
        out.append(PageIndex(PageRef(BLANK, at, at + count, 0, count, count), np.array([[count]], np.int32),
                             (np.arange(at, at + count),)))
        at += count
    return out


ONE = Geometry(1, 1, 2, torch.float32)  # 16 bytes a unit


@pytest.mark.parametrize("before, new, first", [
    ((60,), 40, 0), ((61,), 40, 61), ((100, 60), 40, 0), ((151, 60), 40, 151), ((500, 100, 60), 40, 500),
    ((300, 100, 60), 40, 0), ((40, 61), 40, 101), ((1,), 1, 0), ((2,), 1, 2),
])
@pytest.mark.parametrize("at", [0, 2**45])  # however late in a stream
def test_what_is_written_takes_in_pages_before_it_that_are_not_much_larger(before, new: int, first: int, at: int):
    seen = at + sum(before) + new
    found = plan(pages_of(*before, at=at), [torch.arange(at, seen)[None]], seen, ONE)
    assert found.write == ((at + first, seen),)
    assert [page.ref.end - at <= first for page, _ in found.stay] == [True] * len(found.stay)


@pytest.mark.parametrize("before, first", [(60, 0), (61, 61)])
def test_what_is_written_in_place_of_a_lost_page_takes_in_pages_by_its_own_units(before: int, first: int):
    kept, _, behind = pages_of(before, 40, 500)
    seen = before + 540
    assert plan([kept, behind], [torch.arange(seen)[None]], seen, ONE).write == ((first, before + 40),)


@pytest.mark.parametrize("page_bytes, written", [(16 * 100, ((0, 100),)), (16 * 99, ((60, 100),)), (16 * 30, (
    (60, 90), (90, 100)))])
def test_pages_do_not_grow_together_beyond_what_a_page_should_hold(page_bytes: int, written: tuple):
    assert plan(pages_of(60), [torch.arange(100)[None]], 100, ONE, page_bytes).write == written


def test_neighbours_that_are_both_mostly_dead_are_written_as_one():
    life = torch.tensor([[0, 1, 20, 21, 40, 41]])
    assert plan(pages_of(20, 20, 20), [life], 60, ONE).write == ((0, 60),)


def test_a_page_that_is_gone_is_written_again_wherever_it_lay():
    pages = pages_of(300, 100, 30, 8)
    for lost in range(4):
        found = plan(pages[:lost] + pages[lost + 1:], [torch.arange(438)[None]], 438, ONE)
        ranges = sorted([(page.ref.start, page.ref.end) for page, _ in found.stay] + list(found.write))
        assert ranges[0][0] == 0 and ranges[-1][1] == 438
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert (pages[lost].ref.start, pages[lost].ref.end) in found.write
    assert plan([], [torch.arange(438)[None]], 438, ONE).write == ((0, 438),)


def test_one_position_may_hold_more_units_than_a_page_should():
    wide = Geometry(4, 8, 2, torch.float32)  # 32 units a position
    positions = [torch.arange(6).expand(8, 6)] * 4
    for most, expected in ((1, 6), (31, 6), (32, 6), (63, 6), (64, 3), (96, 2), (191, 2), (192, 1)):
        found = plan([], positions, 6, wide, most * wide.unit_bytes)
        assert len(found.write) == expected and found.write[0][0] == 0 and found.write[-1][1] == 6


@pytest.mark.parametrize("start", [0, 5])
def test_a_range_longer_than_its_numbers_can_tell_apart_is_cut(start: int):
    """Positions in a page are 32 bits wide; after billions of tokens a budget's units lie further apart."""
    positions = torch.tensor([[start, start + PAGE_SPAN - 1, start + PAGE_SPAN, 3 * PAGE_SPAN, 2**40, 2**53 - 1]])
    found = plan([], [positions], 2**53, ONE)
    back = []
    for first, end in found.write:
        assert end - first <= PAGE_SPAN
        inside = positions[0][(positions[0] >= first) & (positions[0] < end)]
        empty = torch.zeros(len(inside), 2)
        parts, written = write_page(first, end, [LayerUnits(torch.tensor([len(inside)]), inside, empty, empty)])
        body, sections, _ = unpack(b"".join(parts), Page, "it")
        read, _ = read_page(written.ref, body, sections, ONE, "it")
        back += read.positions[0].tolist()
        assert written.positions[0].tolist() == read.positions[0].tolist()
    assert back == positions[0].tolist()
    assert PAGE_SPAN == 2**31 and PAGE_BYTES == 64 << 20
    # Nor do ranges grow over neighbours that far away.
    apart = PageIndex(PageRef(BLANK, 0, 10, 0, 1, 1), np.array([[1]], np.int32), (np.array([5]),))
    far = torch.tensor([[5, PAGE_SPAN + 1, PAGE_SPAN + 2, PAGE_SPAN + 3]])
    later = plan([apart], [far], PAGE_SPAN + 10, ONE)
    assert [page for page, _ in later.stay] == [apart] and later.write == ((10, PAGE_SPAN + 10),)
    assert plan([apart], [far - 3], PAGE_SPAN, ONE).write == ((0, PAGE_SPAN),)


def test_pages_out_of_order_or_behind_what_was_seen_are_a_mistake_of_ours():
    a, b = pages_of(4, 4)
    for pages, seen in (([b, a], 8), ([a, a], 8), ([a, b], 7)):
        with pytest.raises(AssertionError, match="pages overlap"):
            plan(pages, [torch.arange(seen)[None]], seen, ONE)


SIZES = {
    "even": lambda at, rng: 4,
    "shrinking": lambda at, rng: max(1, 240 - at),
    "growing": lambda at, rng: 1 + at // 8,
    "mixed": lambda at, rng: int(rng.integers(0, 30)),
    "bursts": lambda at, rng: int(rng.choice([0, 1, 64])),
}


@pytest.mark.parametrize("taste", [*TASTES, "all"])
@pytest.mark.parametrize("sizes", SIZES)
def test_after_hundreds_of_saves_pages_are_few_and_units_were_written_few_times(sizes: str, taste: str):
    life = Life(ONE, 5, contents=False)
    budget = 10**9 if taste == "all" else 300
    for number in range(250):
        life.feed(SIZES[sizes](number, life.rng), (budget,), "newest" if taste == "all" else taste)
        life.save()
        stored = sum(page.ref.units for page in life.pages)
        # Sizes fall by TAKEN_SHARE from page to page; pages that shrank meanwhile may lie between, no more than those.
        assert len(life.pages) <= 2 + 1.2 * math.log(max(2, stored), TAKEN_SHARE)
        assert stored <= life.living / LIVE_SHARE
    # A unit moves into a page at least 1 + 1 / TAKEN_SHARE times as large, or into one of which half has died.
    assert life.written <= life.born * (1 + math.log(max(2, life.living), 1 + 1 / TAKEN_SHARE))
    assert life.written <= 7 * life.born  # what it comes to


@pytest.mark.parametrize("page_bytes", [1, 100, 1600])
def test_small_pages_stay_within_their_size_after_many_saves(page_bytes: int):
    life = Life(SMALL, 3, page_bytes, contents=False)
    most = max(1, page_bytes // SMALL.unit_bytes)
    for number in range(60):
        life.feed(5, (40, 25), "mixed" if number % 2 else "random")
        expect_sound(life, life.save())
    whole = sum(page.ref.units for page in life.pages)
    assert max(page.ref.units for page in life.pages) <= max(most, 4)  # 4 units share one position
    if most > 4:
        assert len(life.pages) <= 4 * whole / most + 12


# -- pages --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=2, max_size=2), st.integers(0, 2**52),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
@settings(max_examples=40)
def test_a_page_is_read_back_as_it_was_written(counts: list[list[int]], start: int, dtype: torch.dtype):
    geometry = Geometry(2, 2, 3, dtype)
    layers = [layer_units(start, count, seed, geometry) for seed, count in enumerate(counts)]
    parts, written = write_page(start, start + 20, layers)
    body, sections, _ = unpack(bytearray(b"".join(parts)), Page, "it")
    index, units = read_page(written.ref, body, sections, geometry, "it")
    total = sum(map(sum, counts))
    assert index.ref == written.ref == PageRef(BLANK, start, start + 20, sum(map(len, parts)), total, total)
    assert index.counts.tolist() == written.counts.tolist() == counts
    for layer, given_units in enumerate(layers):
        assert index.positions[layer].tolist() == written.positions[layer].tolist() == given_units.positions.tolist()
        assert index.positions[layer].dtype == written.positions[layer].dtype == np.int64
        assert bits(units[f"{layer}.keys"]) == bits(given_units.keys)
        assert bits(units[f"{layer}.values"]) == bits(given_units.values)


def test_an_index_holds_no_page_in_memory_and_nothing_of_the_cache():
    """An owner keeps the indices of all its pages for as long as it lives."""
    data = bytearray(sound_page())
    body, sections, _ = unpack(data, Page, "it")
    index, units = read_page(REF, body, sections, GEOMETRY, "it")
    del sections, units
    data.clear()  # BufferError while anything looks into it
    assert index.counts.sum() == 12 and index.positions[1].tolist() == [12, 14, 16, 12, 14]
    slot = torch.arange(10, 40)
    layers = [LayerUnits(torch.tensor([3, 2]), slot[:5], torch.zeros(5, 2), torch.zeros(5, 2))] * 2
    _, index = write_page(10, 40, layers)
    slot.zero_()
    assert index.positions[0].tolist() == [10, 11, 12, 13, 14]


def refuse_page(ref: PageRef = REF, body: dict | None = None, geometry: Geometry = GEOMETRY,
                **sections: dict[str, Tensor | None] | None) -> str:
    """What the refusal says of the sound page with tensors of its sections changed, or a section left out."""
    header, contents = parts_of(sound_page())
    for name, change in sections.items():
        if change is None:
            del contents[name]
        else:
            contents[name] = resaved(contents.get(name, contents["index"]), **change)
    data = build(2, header["body"] | (body or {}), list(contents.items()))
    found, views, _ = unpack(data, Page, "it")
    with pytest.raises(SnapshotCorrupt) as caught:
        read_page(ref, found, views, geometry, "it")
    assert str(caught.value).startswith("it: ")
    return str(caught.value)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_page_that_is_changed_below_is_sound():
    body, sections, _ = unpack(sound_page(), Page, "it")
    assert read_page(REF, body, sections, GEOMETRY, "it")[0].counts.tolist() == [[3, 4], [3, 2]]


@pytest.mark.parametrize("change, says", [
    ({"start": 11}, "positions 11 to 30"), ({"end": 31}, "positions 10 to 31"), ({"start": 30, "end": 10}, "30 to 10"),
])
def test_a_page_of_another_range_is_refused(change: dict, says: str):
    assert says in refuse_page(body=change)


@pytest.mark.parametrize("sections", [{"units": None}, {"index": None}, {"more": {}}])
def test_a_page_of_other_sections_is_refused(sections: dict):
    assert "index and units" in refuse_page(**sections)


@pytest.mark.parametrize("geometry", [
    Geometry(1, 2, 2, torch.float32), Geometry(3, 2, 2, torch.float32), Geometry(2, 1, 2, torch.float32),
    Geometry(2, 4, 2, torch.float32), Geometry(4, 1, 2, torch.float32), Geometry(2, 2, 1, torch.float32),
    Geometry(2, 2, 4, torch.float32), Geometry(2, 2, 2, torch.float16), Geometry(2, 2, 1, torch.float64),
])
def test_a_page_of_another_geometry_is_refused(geometry: Geometry):
    assert "counts" in (message := refuse_page(geometry=geometry)) or "tensor '0.keys'" in message


@pytest.mark.parametrize("counts", [
    None, i32(3, 4, 3, 2), i32(3, 4, 3, 2).reshape(1, 4), i32(3, 4, 3, 2).reshape(4, 1), i32().reshape(0, 2),
    i32(3, 4, 3, 2).reshape(2, 2).long(), i32(3, 4, 3, 2).reshape(2, 2).float(), torch.tensor(7, dtype=torch.int32),
    i32(3, 4, 3, 2).reshape(2, 2, 1), i32(8, -1, 3, 2).reshape(2, 2), i32(3, 4, 6, -1).reshape(2, 2),
])
def test_a_page_without_sound_counts_is_refused(counts: Tensor | None):
    assert "counts" in refuse_page(index={"counts": counts})


@pytest.mark.parametrize("counts", [
    (4, 4, 3, 2), (2, 4, 3, 2), (3, 4, 3, 3), (2**31 - 1, 2**31 - 1, 3, 2), (2**31 - 1,) * 4, (0, 0, 0, 0),
    (0, 0, 3, 2),
])
def test_a_page_whose_counts_are_not_of_its_positions_is_refused(counts: tuple[int, ...]):
    assert ".positions'" in refuse_page(index={"counts": i32(*counts).reshape(2, 2)})


@pytest.mark.parametrize("change, name", [
    ({"0.positions": None}, "'0.positions' is missing"), ({"1.positions": i32(2, 4, 6, 2)}, "'1.positions'"),
    ({"0.positions": i32(0, 2, 4, 0, 2, 4, 6).long()}, "'0.positions'"), ({"2.positions": i32(0)}, "'2.positions'"),
    ({"0.positions": i32(0, 2, 4, 0, 2, 4, 6)[None]}, "'0.positions'"), ({"more": i32()}, "'more'"),
])
def test_an_index_of_other_tensors_is_refused(change: dict, name: str):
    assert name in refuse_page(index=change)


@pytest.mark.parametrize("change, name", [
    ({"0.keys": None}, "'0.keys' is missing"), ({"1.values": None}, "'1.values' is missing"),
    ({"0.keys": torch.zeros(6, 2)}, "'0.keys'"), ({"1.values": torch.zeros(5, 3)}, "'1.values'"),
    ({"1.keys": torch.zeros(5, 2).double()}, "'1.keys'"), ({"0.values": torch.zeros(14)}, "'0.values'"),
    ({"2.keys": torch.zeros(1)}, "'2.keys'"), ({"0.scores": torch.zeros(7)}, "'0.scores'"),
    ({"0.keys": torch.zeros(7, 2, 1)}, "'0.keys'"),
])
def test_units_of_other_tensors_are_refused(change: dict, name: str):
    assert name in refuse_page(units=change)


@pytest.mark.parametrize("positions", [
    (0, 2, 2, 0, 2, 4, 6), (0, 4, 2, 0, 2, 4, 6), (-1, 2, 4, 0, 2, 4, 6), (0, 2, 20, 0, 2, 4, 6),
    (0, 2, 4, 0, 2, 4, 20), (0, 2, 4, -1, 2, 4, 6), (0, 2, 4, 6, 4, 2, 0), (-2**31, 2, 4, 0, 2, 4, 6),
    (0, 2, 2**31 - 1, 0, 2, 4, 6), (2, 0, 4, 0, 2, 4, 6), (0, 2, 4, 0, 2, 2, 6), (0, 2, 4, 0, 2, 4, 4),
])
def test_a_page_whose_positions_do_not_ascend_inside_it_is_refused(positions: tuple[int, ...]):
    assert "layer 0 are not ascending inside" in refuse_page(index={"0.positions": i32(*positions)})
    body, sections, _ = unpack(sound_page(), Page, "it")
    assert read_page(REF, body, sections, GEOMETRY, "it")  # each head begins anew


@pytest.mark.parametrize("units", [0, 11, 13, 2**53])
def test_a_page_of_another_number_of_units_than_the_manifest_says_is_refused(units: int):
    assert f"12 units; expected {units}" in refuse_page(ref=msgspec.structs.replace(REF, units=units))


# -- masks --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), max_size=40) | st.none(), max_size=12))
@settings(max_examples=100)
def test_masks_come_back_as_they_were_and_those_of_whole_pages_take_no_room(masks: list[list[bool] | None]):
    arrays = [None if mask is None else np.array(mask, dtype=bool) for mask in masks]
    refs = [page_ref(BLANK, 0, 1, 7 if mask is None else len(mask), 7 if mask is None else int(mask.sum()))
            for mask in arrays]
    stored = pack_masks(arrays)
    assert all(t.numel() <= len(masks[int(name)]) // 8 + 1 for name, t in stored.items())
    assert set(stored) == {str(number) for number, mask in enumerate(masks) if mask is not None and not all(mask)}
    data = b"".join(pack(Page(start=0, end=1), {"masks": stored}))
    found = unpack_masks(tensors(unpack(data, Page, "it")[1]["masks"], "it"), refs, "it")
    for mask, back in zip(arrays, found, strict=True):
        if mask is None or mask.all():
            assert back is None
        else:
            assert back.dtype == bool and back.tolist() == mask.tolist()


def bytes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


TWO = (page_ref(BLANK, 0, 1, 4, 4), page_ref(BLANK, 1, 2, 12, 9))
SOUND_MASK = torch.from_numpy(np.packbits(MASK))


@pytest.mark.parametrize("found, refs, says", [
    ({}, TWO, "page 1 has 12 living units; expected 9"),
    ({"1": SOUND_MASK, "2": SOUND_MASK}, TWO, "a mask of page '2'"),
    ({"1": SOUND_MASK, "01": SOUND_MASK}, TWO, "a mask of page '01'"),
    ({"1": SOUND_MASK, "": SOUND_MASK}, TWO, "a mask of page ''"),
    ({"1": SOUND_MASK, "-1": SOUND_MASK}, TWO, "a mask of page '-1'"),
    ({"0": SOUND_MASK}, (), "a mask of page '0'"),
    ({"1": SOUND_MASK.to(torch.int32)}, TWO, "the mask of page 1 is torch.int32"),
    ({"1": SOUND_MASK[:1]}, TWO, "the mask of page 1 is torch.uint8 (1,)"),
    ({"1": torch.cat([SOUND_MASK, bytes_of(0)])}, TWO, "the mask of page 1 is torch.uint8 (3,)"),
    ({"1": SOUND_MASK[None]}, TWO, "the mask of page 1 is torch.uint8 (1, 2)"),
    ({"1": SOUND_MASK[0]}, TWO, "the mask of page 1 is torch.uint8 ()"),
    ({"1": SOUND_MASK | bytes_of(0, 1)}, TWO, "behind its end"),
    ({"1": SOUND_MASK | bytes_of(0, 8)}, TWO, "behind its end"),
    ({"1": SOUND_MASK | bytes_of(64, 0)}, TWO, "page 1 has 10 living units; expected 9"),
    ({"1": SOUND_MASK & bytes_of(127, 255)}, TWO, "page 1 has 8 living units; expected 9"),
    ({"1": SOUND_MASK, "0": bytes_of(0xE0)}, TWO, "page 0 has 3 living units; expected 4"),
    ({}, (page_ref(BLANK, 0, 1, 0, 1),), "page 0 has 0 living units; expected 1"),
    ({}, (page_ref(BLANK, 0, 1, 2**53, 2**53 - 1),), f"page 0 has {2**53} living units"),
    ({"0": bytes_of(255)}, (page_ref(BLANK, 0, 1, 2**53, 8),), "the mask of page 0 is"),
])
def test_masks_that_are_not_of_their_pages_are_refused(found: dict, refs: tuple, says: str):
    assert [mask is None for mask in unpack_masks({"1": SOUND_MASK}, TWO, "it")] == [True, False]
    with pytest.raises(SnapshotCorrupt) as caught:
        unpack_masks(found, refs, "it")
    assert str(caught.value).startswith("it: ") and says in str(caught.value)


def test_a_manifest_that_claims_endless_units_takes_no_memory():
    refs = (page_ref(BLANK, 0, 1, 2**53, 2**53),) * 1000
    tracemalloc.start()
    try:
        assert unpack_masks({}, refs, "it") == [None] * 1000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


# -- putting together ---------------------------------------------------------------------------------------------


def page_at(start: int, counts: list[list[int]]) -> tuple[PageIndex, dict[str, Tensor]]:
    layers = [layer_units(start, count, start + layer) for layer, count in enumerate(counts)]
    parts, written = write_page(start, start + 20, layers)
    body, sections, _ = unpack(b"".join(parts), Page, "it")
    return read_page(written.ref, body, sections, GEOMETRY, "it")


def test_units_are_put_together_in_the_order_of_their_positions():
    a, b = page_at(0, [[2, 1], [0, 3]]), page_at(20, [[1, 2], [4, 1]])
    assembly = Assembly((3, 4), GEOMETRY, "it")
    assembly.add(*a, None)
    assembly.add(*b, np.ones(8, dtype=bool))
    found = assembly.finish()
    assert found["0.positions"].tolist() == [[0, 2, 20], [0, 20, 22]]
    assert found["1.positions"].tolist() == [[20, 22, 24, 26], [0, 2, 4, 20]]
    assert found["0.keys"].dtype == torch.float32 and found["0.keys"].shape == (2, 3, 2)
    assert torch.equal(found["0.keys"][1], torch.cat([a[1]["0.keys"][2:], b[1]["0.keys"][1:]]))
    assert torch.equal(found["1.values"][1], torch.cat([a[1]["1.values"], b[1]["1.values"][4:]]))


def test_dead_units_are_left_out():
    index, units = page_at(0, [[2, 2], [2, 2]])
    assembly = Assembly((1, 1), GEOMETRY, "it")
    assembly.add(index, units, np.array([0, 1, 1, 0, 1, 0, 0, 1], dtype=bool))
    found = assembly.finish()
    assert [found[f"{layer}.positions"].flatten().tolist() for layer in (0, 1)] == [[2, 0], [0, 2]]
    assert torch.equal(found["0.keys"].flatten(0, 1), units["0.keys"][[1, 2]])
    assert torch.equal(found["1.values"].flatten(0, 1), units["1.values"][[0, 3]])


@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (1, 1), (0, 0)])
def test_more_units_than_the_manifest_says_are_refused(counts: tuple[int, int]):
    assembly = Assembly(counts, GEOMETRY, "it")
    with pytest.raises(SnapshotCorrupt, match=r"it: layer \d has more than"):
        assembly.add(*page_at(0, [[4, 4], [4, 4]]), None)


@pytest.mark.parametrize("counts", [(5, 4), (4, 5), (2**8, 2**8)])
def test_fewer_units_than_the_manifest_says_are_refused(counts: tuple[int, int]):
    assembly = Assembly(counts, GEOMETRY, "it")
    assembly.add(*page_at(0, [[4, 4], [4, 4]]), None)
    with pytest.raises(SnapshotCorrupt, match=r"it: layer . has \[4, 4\] units per KV head; expected"):
        assembly.finish()


def test_heads_of_a_layer_with_different_numbers_of_units_are_refused():
    assembly = Assembly((4, 4), GEOMETRY, "it")
    assembly.add(*page_at(0, [[4, 3], [4, 4]]), None)
    with pytest.raises(SnapshotCorrupt, match=r"layer 0 has \[4, 3\]"):
        assembly.finish()


@pytest.mark.parametrize("starts", [(20, 0), (0, 0), (0, 19), (20, 20, 40), (0, 40, 20)])
def test_pages_out_of_order_are_refused(starts: tuple[int, ...]):
    assembly = Assembly((9, 9), GEOMETRY, "it")
    with pytest.raises(SnapshotCorrupt, match="it: a page from position"):
        for start in starts:
            assembly.add(*page_at(start, [[1, 1], [1, 1]]), None)


@pytest.mark.parametrize("counts", [(), (1,), (1, 1, 1)])
def test_units_of_another_number_of_layers_are_refused(counts: tuple[int, ...]):
    with pytest.raises(SnapshotCorrupt, match=f"units of {len(counts)} layers; expected 2"):
        Assembly(counts, GEOMETRY, "it")


def test_a_snapshot_without_units_is_put_together_from_no_pages():
    found = Assembly((0, 0), GEOMETRY, "it").finish()
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        f"{layer}.{part}": shape for layer in (0, 1)
        for part, shape in (("keys", (2, 0, 2)), ("values", (2, 0, 2)), ("positions", (2, 0)))}
