"""Plans of snapshots: what lives is in just one page, pages stay few, and what is put together is what there was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
from tests.snapshot.forge import BLANK, bits

SMALL = Geometry.even(2, 2, 2, torch.bfloat16)


class Life:
    """Units that live in a cache and its pages in a store, through one save after another.

    K and V of a unit are random bits, drawn when it is born and kept beside it: NaN and infinities among them.
    """

    def __init__(self, geometry: Geometry, seed: int, page_bytes: int = PAGE_BYTES, *, contents: bool = True):
        self.geometry, self.page_bytes, self.contents = geometry, page_bytes, contents
        self.rng = np.random.default_rng(seed)
        self.seen = 0
        self.alive = [[np.zeros(0, np.int64) for _ in range(geometry.most_heads)] for _ in range(len(geometry.layers))]
        self.content: dict[tuple[int, int, int], tuple[bytes, bytes]] = {}
        self.files: dict[str, bytes] = {}
        self.pages: list[PageIndex] = []
        self.born = self.written = self.number = 0

    def feed(self, count: int, budgets: Sequence[int], taste: str) -> None:
        """`count` new positions; then every head keeps its budget by taste."""
        new = np.arange(self.seen, self.seen + count)
        self.seen += count
        for layer, budget in enumerate(budgets):
            for head in range(self.geometry.most_heads):
                if self.contents:
                    size = self.geometry.layers[0][1] * self.geometry.dtype.itemsize
                    for position in new.tolist():
                        self.content[layer, head, position] = self.rng.bytes(size), self.rng.bytes(size)
                own = np.concatenate([self.alive[layer][head], new])
                score = {"newest": own, "oldest": -own, "random": self.rng.random(len(own)),
                         "mixed": own + self.rng.pareto(1, len(own)) * budget,
                         "stretches": own // 37 * 7919 % 1009}[taste]
                self.alive[layer][head] = np.sort(own[np.argsort(-score, kind="stable")[:budget]])
        self.born += count * len(self.geometry.layers) * self.geometry.most_heads

    @property
    def positions(self) -> list[Tensor]:
        return [torch.from_numpy(np.stack(heads)) for heads in self.alive]

    @property
    def living(self) -> int:
        return sum(len(own) for heads in self.alive for own in heads)

    def units(self, layer: int, start: int, end: int) -> LayerUnits:
        own = [heads[(heads >= start) & (heads < end)] for heads in self.alive[layer]]
        pairs = [self.content[layer, head, position] for head, inside in enumerate(own) for position in inside.tolist()]
        return LayerUnits(torch.tensor([len(inside) for inside in own]), torch.from_numpy(np.concatenate(own)),
                          *(self._tensor([pair[part] for pair in pairs]) for part in (0, 1)))

    def _tensor(self, rows: list[bytes]) -> Tensor:
        data, dim = bytearray(b"".join(rows)), self.geometry.layers[0][1]
        return torch.frombuffer(data, dtype=self.geometry.dtype).reshape(-1, dim) if data else torch.empty(
            0, dim, dtype=self.geometry.dtype)

    def save(self) -> Plan:
        """Plan, write what is new, forget what is not needed."""
        planned = plan(self.pages, self.positions, self.seen, self.geometry, self.page_bytes)
        pages = [index for index, _ in planned.stay]
        for start, end in planned.write:
            self.number += 1
            name = f"{self.number:032x}"
            if self.contents:
                layers = [self.units(layer, start, end) for layer in range(len(self.geometry.layers))]
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
        return planned

    def restored(self, planned: Plan) -> dict[str, Tensor]:
        """What a reader puts together from the stored bytes, by the manifest's refs and masks alone."""
        masks = {page.ref.name: np.concatenate(layers) for page, layers in planned.stay}
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


def expect_sound(life: Life, planned: Plan) -> None:
    """The laws of every plan."""
    most = max(1, life.page_bytes // life.geometry.unit_bytes)
    ranges = sorted([(page.ref.start, page.ref.end) for page, _ in planned.stay] + list(planned.write))
    assert all(a < b <= c < d for (a, b), (c, d) in pairwise(ranges)) or len(ranges) < 2
    assert all(0 <= start < end <= life.seen and end - start <= PAGE_SPAN for start, end in ranges)
    assert list(planned.write) == sorted(planned.write)
    every = np.concatenate([np.concatenate(layer) for layer in life.alive])
    for start, end in planned.write:
        inside = every[(every >= start) & (every < end)]
        assert len(inside) and (len(inside) <= most or len(np.unique(inside)) == 1)
    for layer, heads in enumerate(life.alive):
        for head, own in enumerate(heads):
            held = [own[(own >= start) & (own < end)] for start, end in planned.write]
            for page, masks in planned.stay:
                first = int(page.counts[layer][:head].sum())
                part = slice(first, first + int(page.counts[layer][head]))
                held.append(page.positions[layer][part][masks[layer][part]])
            assert np.sort(np.concatenate([*held, own[:0]])).tolist() == own.tolist()
    for page, masks in planned.stay:
        assert sum(int(mask.sum()) for mask in masks) >= LIVE_SHARE * page.ref.units


TASTES = ["newest", "oldest", "random", "mixed", "stretches"]
STEPS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 7, 20]), st.tuples(st.integers(1, 12), st.integers(1, 12)),
                           st.sampled_from(TASTES)), min_size=1, max_size=12)


@given(STEPS, st.integers(0, 99), st.sampled_from([1, 24, 64, 200, PAGE_BYTES]))
@settings(max_examples=120)
@pytest.mark.thorough
def test_every_living_unit_is_in_just_one_page_and_is_put_together_bit_for_bit(steps, seed: int, page_bytes: int):
    life = Life(SMALL, seed, page_bytes)
    for count, budgets, taste in steps:
        life.feed(count, budgets, taste)
        planned = life.save()
        expect_sound(life, planned)
        restored = life.restored(planned)
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
    planned = plan([], [torch.zeros(2, 0, dtype=torch.int64)] * 2, 0, SMALL)
    assert planned == Plan((), ())
    assert plan([], [torch.zeros(2, 0, dtype=torch.int64)] * 2, 50, SMALL) == planned


@pytest.mark.parametrize("living, stays", [(8, True), (5, True), (4, True), (3, False), (1, False), (0, False)])
def test_a_page_stays_while_half_of_it_lives_and_is_written_anew_below(living: int, stays: bool):
    geometry = Geometry.even(1, 1, 2, torch.float32)
    page = PageIndex(PageRef(BLANK, 0, 8, 0, 8, 8), np.array([[8]], np.int32), (np.arange(8),))
    planned = plan([page], [torch.arange(8 - living, 8)[None]], 8, geometry)
    assert len(planned.stay) == stays
    assert planned.write == (() if stays or not living else ((0, 8),))


def pages_of(*units: int, at: int = 0) -> list[PageIndex]:
    """Pages one behind another in one layer and head, every position from `at` on a unit."""
    out = []
    for count in units:
        out.append(PageIndex(PageRef(BLANK, at, at + count, 0, count, count), np.array([[count]], np.int32),
                             (np.arange(at, at + count),)))
        at += count
    return out


ONE = Geometry.even(1, 1, 2, torch.float32)  # 16 bytes a unit


@pytest.mark.parametrize("before, new, first", [
    ((60,), 40, 0), ((61,), 40, 61), ((100, 60), 40, 0), ((151, 60), 40, 151), ((500, 100, 60), 40, 500),
    ((300, 100, 60), 40, 0), ((40, 61), 40, 101), ((1,), 1, 0), ((2,), 1, 2),
])
@pytest.mark.parametrize("at", [0, 2**45])  # however late in a stream
def test_what_is_written_takes_in_pages_before_it_that_are_not_much_larger(before, new: int, first: int, at: int):
    seen = at + sum(before) + new
    planned = plan(pages_of(*before, at=at), [torch.arange(at, seen)[None]], seen, ONE)
    assert planned.write == ((at + first, seen),)
    assert [page.ref.end - at <= first for page, _ in planned.stay] == [True] * len(planned.stay)


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
        planned = plan(pages[:lost] + pages[lost + 1:], [torch.arange(438)[None]], 438, ONE)
        ranges = sorted([(page.ref.start, page.ref.end) for page, _ in planned.stay] + list(planned.write))
        assert ranges[0][0] == 0 and ranges[-1][1] == 438
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert (pages[lost].ref.start, pages[lost].ref.end) in planned.write
    assert plan([], [torch.arange(438)[None]], 438, ONE).write == ((0, 438),)


def test_one_position_may_hold_more_units_than_a_page_should():
    wide = Geometry.even(4, 8, 2, torch.float32)  # 32 units a position
    positions = [torch.arange(6).expand(8, 6)] * 4
    for most, expected in ((1, 6), (31, 6), (32, 6), (63, 6), (64, 3), (96, 2), (191, 2), (192, 1)):
        planned = plan([], positions, 6, wide, most * wide.unit_bytes)
        assert len(planned.write) == expected and planned.write[0][0] == 0 and planned.write[-1][1] == 6


@pytest.mark.parametrize("start", [0, 5])
def test_a_range_longer_than_its_numbers_can_tell_apart_is_cut(start: int):
    """Positions in a page are 32 bits wide; after billions of tokens a budget's units lie further apart."""
    positions = torch.tensor([[start, start + PAGE_SPAN - 1, start + PAGE_SPAN, 3 * PAGE_SPAN, 2**40, 2**53 - 1]])
    planned = plan([], [positions], 2**53, ONE)
    back = []
    for first, end in planned.write:
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
@pytest.mark.thorough(but=5)
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
