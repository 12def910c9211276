"""Pages, masks and their assembly: what was written comes back, and what is not exactly as it should be is refused."""

from __future__ import annotations

import tracemalloc

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
    Assembly,
    Geometry,
    LayerUnits,
    PageIndex,
    pack_masks,
    read_page,
    unpack_masks,
    write_page,
)
from tests.snapshot.forge import (
    BLANK,
    GEOMETRY,
    MASK,
    bits,
    build,
    layer_units,
    page_ref,
    parts_of,
    resaved,
    sound_page,
)

REF = PageRef(BLANK, 10, 30, 0, 12, 12)  # of the sound page


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=2, max_size=2), st.integers(0, 2**52),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
@settings(max_examples=40)
def test_a_page_is_read_back_as_it_was_written(counts: list[list[int]], start: int, dtype: torch.dtype):
    geometry = Geometry.even(2, 2, 3, dtype)
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
    page, views, _ = unpack(data, Page, "it")
    with pytest.raises(SnapshotCorrupt) as caught:
        read_page(ref, page, views, geometry, "it")
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
    Geometry.even(1, 2, 2, torch.float32), Geometry.even(3, 2, 2, torch.float32), Geometry.even(2, 1, 2, torch.float32),
    Geometry.even(2, 4, 2, torch.float32), Geometry.even(4, 1, 2, torch.float32), Geometry.even(2, 2, 1, torch.float32),
    Geometry.even(2, 2, 4, torch.float32), Geometry.even(2, 2, 2, torch.float16), Geometry.even(2, 2, 1, torch.float64),
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
    unpacked = unpack_masks(tensors(unpack(data, Page, "it")[1]["masks"], "it"), refs, "it")
    for mask, back in zip(arrays, unpacked, strict=True):
        if mask is None or mask.all():
            assert back is None
        else:
            assert back.dtype == bool and back.tolist() == mask.tolist()


def bytes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


TWO = (page_ref(BLANK, 0, 1, 4, 4), page_ref(BLANK, 1, 2, 12, 9))
SOUND_MASK = torch.from_numpy(np.packbits(MASK))


@pytest.mark.parametrize("section, refs, says", [
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
def test_masks_that_are_not_of_their_pages_are_refused(section: dict, refs: tuple, says: str):
    assert [mask is None for mask in unpack_masks({"1": SOUND_MASK}, TWO, "it")] == [True, False]
    with pytest.raises(SnapshotCorrupt) as caught:
        unpack_masks(section, refs, "it")
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
    assembled = assembly.finish()
    assert assembled["0.positions"].tolist() == [[0, 2, 20], [0, 20, 22]]
    assert assembled["1.positions"].tolist() == [[20, 22, 24, 26], [0, 2, 4, 20]]
    assert assembled["0.keys"].dtype == torch.float32 and assembled["0.keys"].shape == (2, 3, 2)
    assert torch.equal(assembled["0.keys"][1], torch.cat([a[1]["0.keys"][2:], b[1]["0.keys"][1:]]))
    assert torch.equal(assembled["1.values"][1], torch.cat([a[1]["1.values"], b[1]["1.values"][4:]]))


def test_dead_units_are_left_out():
    index, units = page_at(0, [[2, 2], [2, 2]])
    assembly = Assembly((1, 1), GEOMETRY, "it")
    assembly.add(index, units, np.array([0, 1, 1, 0, 1, 0, 0, 1], dtype=bool))
    assembled = assembly.finish()
    assert [assembled[f"{layer}.positions"].flatten().tolist() for layer in (0, 1)] == [[2, 0], [0, 2]]
    assert torch.equal(assembled["0.keys"].flatten(0, 1), units["0.keys"][[1, 2]])
    assert torch.equal(assembled["1.values"].flatten(0, 1), units["1.values"][[0, 3]])


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
    assembled = Assembly((0, 0), GEOMETRY, "it").finish()
    assert {name: tuple(tensor.shape) for name, tensor in assembled.items()} == {
        f"{layer}.{part}": shape for layer in (0, 1)
        for part, shape in (("keys", (2, 0, 2)), ("values", (2, 0, 2)), ("positions", (2, 0)))}
