"""Pool and store: where units lie, what moves, what is written, and how many bytes it takes."""

from __future__ import annotations

import pytest
import torch

from locret_stream.cache import Pool, UnitStore
from locret_stream.config import ModelShape

H, D, CHUNK = 2, 6, 4
BUDGETS = (5, 8, 3)
ROPE = (True, False, True)


def shape_of(item_bytes: int = 4) -> ModelShape:
    return ModelShape.even(layers=3, kv_heads=H, groups=2, head_dim=D, vocab=10, window=100, item_bytes=item_bytes,
                      sliding=(None, None, None))


def pool_of(slots: int = 3, planes: int = 1, dtype: torch.dtype = torch.float32) -> Pool:
    return Pool(shape_of(dtype.itemsize), BUDGETS, CHUNK, slots, rope=ROPE, planes=planes, dtype=dtype,
                device=torch.device("cpu"))


def turn(layer: int, keys: torch.Tensor, start: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Stands in for RoPE: what it gives depends on the rank."""
    turned = keys * 2 + torch.arange(start, start + keys.shape[2])[:, None]
    return turned if out is None else out.copy_(turned)


def write_and_commit(store: UnitStore, layer: int, first: int, keep: torch.Tensor | None, seed: int) -> tuple:
    noise = torch.Generator().manual_seed(seed)
    dtype = store.pool.layers[0].keys.dtype
    k, v = (torch.randn(1, H, CHUNK, D, generator=noise).to(dtype) for _ in range(2))
    start = store.counts[layer]
    store.write(layer, start, k, v, turn)
    total = start + CHUNK
    scores = torch.randn(store.pool.planes, H, total, generator=noise)
    store.commit(layer, first, CHUNK, scores, keep, turn)
    return k[0], v[0], scores


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kept", [[[0, 1, 4, 7], [2, 3, 5, 6]], [[0, 1, 2, 7], [0, 1, 5, 6]],
                                  [[0, 1, 2, 3], [0, 1, 2, 4]], [[0, 1, 2, 3], [0, 1, 2, 3]]])
def test_commit_keeps_exactly_the_units_it_is_told(planes: int, layer: int, kept: list[list[int]]):
    """Whether all, some or none of them move."""
    store = UnitStore(pool_of(planes=planes), 1)
    k1, v1, s1 = write_and_commit(store, layer, 0, None, 1)
    assert store.counts[layer] == 4 and store.positions(layer).tolist() == [[0, 1, 2, 3]] * H
    assert torch.equal(store.scores(layer), s1)
    keep = torch.tensor(kept)
    k2, v2, s2 = write_and_commit(store, layer, 4, keep, 2)
    assert store.counts[layer] == 4 and store.positions(layer).tolist() == keep.tolist()
    for name, parts in (("keys", (k1, k2)), ("values", (v1, v2))):
        everything = torch.cat(parts, 1)
        expected = torch.stack([everything[h][keep[h]] for h in range(H)])
        assert torch.equal(getattr(store, name)(layer, 4)[0], expected)
    assert torch.equal(store.scores(layer), torch.stack([torch.stack([p[h][keep[h]] for h in range(H)]) for p in s2]))
    keys = store.keys(layer, 4)
    assert torch.equal(store.rotated(layer, 4), turn(layer, keys, 0) if ROPE[layer] else keys)


def test_a_forward_writes_the_tail_area_only():
    store = UnitStore(pool_of(), 0)
    write_and_commit(store, 0, 0, None, 1)
    unit = torch.zeros(1, H, 1, D)
    with pytest.raises(AssertionError):
        store.write(0, 3, unit, unit, turn)  # a committed unit
    store.write(0, 8, unit, unit, turn)  # the last row: 5 + 4 - 1
    with pytest.raises(AssertionError):
        store.write(0, 9, unit, unit, turn)


def test_slots_and_layers_are_apart():
    pool = pool_of()
    for layer in pool.layers:
        for tensor in layer.tensors:
            tensor.fill_(7)
    write_and_commit(UnitStore(pool, 1), 0, 0, None, 1)
    for number, layer in enumerate(pool.layers):
        for tensor in layer.tensors:
            assert (tensor[0] == 7).all() and (tensor[2] == 7).all()
            assert number == 0 or (tensor[1] == 7).all()


@pytest.mark.parametrize("tail", [0, 3])
def test_copy_from_copies_units_and_tail_and_nothing_else(tail: int):
    pool = pool_of(planes=2)
    source, copy = UnitStore(pool, 0), UnitStore(pool, 2)
    for layer in range(3):
        write_and_commit(source, layer, 0, torch.tensor([[0, 1, 3]] * H) if layer == 2 else None, layer)
    rows = torch.randn(1, H, 3, D)
    for layer in range(3):
        source.write(layer, source.counts[layer], rows, rows * 3, turn)
        for tensor in pool.layers[layer].tensors:
            tensor[2].fill_(-1)
    copy.copy_from(source, tail)
    assert copy.counts == source.counts == [4, 4, 3]
    for layer, count in enumerate(source.counts):
        for name in ("keys", "rotated", "values"):
            copied = getattr(copy, name)(layer, 9 if layer == 0 else 7)
            assert torch.equal(copied[:, :, :count + tail], getattr(source, name)(layer, count + tail))
            assert (copied[:, :, count + tail:] == -1).all()
        assert torch.equal(copy.scores(layer), source.scores(layer))
        assert torch.equal(copy.positions(layer), source.positions(layer))
    before = {name: tensor.clone() for name, tensor in source.export().items()}
    write_and_commit(copy, 0, 4, torch.tensor([[0, 1, 2, 3, 7]] * H), 9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.export().items())


def test_export_and_load_are_inverse_and_rotate_anew():
    pool = pool_of(planes=2)
    source, copy = UnitStore(pool, 0), UnitStore(pool, 1)
    for layer in range(3):
        write_and_commit(source, layer, 0, torch.tensor([[0, 2, 3], [0, 1, 3]]) if layer == 2 else None, layer)
    copy.load(source.export(), turn)
    assert copy.counts == source.counts
    for layer, count in enumerate(source.counts):
        assert torch.equal(copy.rotated(layer, count), source.rotated(layer, count))
    for name, tensor in copy.export().items():
        assert torch.equal(tensor, source.export()[name])
    empty = UnitStore(pool, 2)
    empty.load(UnitStore(pool, 2).export(), turn)
    assert empty.counts == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("slots", [1, 5])
def test_bytes_follow_from_the_formula(slots: int, planes: int, dtype: torch.dtype):
    pool = pool_of(slots, planes, dtype)
    by_hand = 0
    for units, rope in zip(BUDGETS, ROPE, strict=True):
        rows = slots * H * (units + CHUNK)
        by_hand += rows * (3 if rope else 2) * D * dtype.itemsize  # K, V, rotated K
        by_hand += rows * 4 * planes + rows * 8  # scores, positions
    scratch = H * max(BUDGETS) * D * dtype.itemsize
    assert pool.bytes_resident == pool.formula_bytes() == by_hand + scratch
    assert pool.slot_bytes == by_hand // slots
