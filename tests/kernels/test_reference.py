"""The numeric specification against slower, plainer ones."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.kernels import column_sums, gather_units, reference, select_units
from locret_stream.kernels.reference import order_keys

awkward = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0, 1e-45, -1e-45, 3e38])
score = st.one_of(awkward, st.floats(width=32))
scores = st.lists(score, min_size=1, max_size=24)


def wins(a: tuple[float, int], b: tuple[float, int]) -> int:
    """Law 8 in words: a NaN loses to a number; the higher score wins; on equal scores the newer one."""
    (x, i), (y, j) = a, b
    if math.isnan(x) != math.isnan(y):
        return -1 if math.isnan(x) else 1
    if x == y or math.isnan(x):
        return (i > j) - (i < j)
    return 1 if x > y else -1


def best_first(values: list[float]) -> list[int]:
    values = torch.tensor(values, dtype=torch.float32).tolist()
    pairs = [(value, rank) for rank, value in enumerate(values)]
    return [rank for _, rank in sorted(pairs, key=functools.cmp_to_key(wins), reverse=True)]


@settings(max_examples=150)
@given(scores)
def test_order_keys_are_the_total_order_of_law_8(values: list[float]):
    keys = order_keys(torch.tensor(values))
    assert keys.dtype == torch.int64 and len(set(keys.tolist())) == len(values)
    assert keys.argsort(descending=True).tolist() == best_first(values)


def test_order_keys_span_all_of_fp32():
    """Every exponent and sign, in order, with NaN of either sign below all."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    positive = torch.cat([(2.0 ** exponents).float(), torch.tensor([math.inf])])
    rising = torch.cat([-positive.flip(0), torch.zeros(1), positive])
    keys = order_keys(rising)
    assert (keys.diff() >> 31 > 0).all()
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    with_nans = order_keys(torch.cat([rising, nans]))
    assert with_nans[-4:].max() < with_nans[:-4].min()


def test_order_keys_take_half_precision_and_many_dimensions():
    values = torch.randn(2, 3, 17, generator=torch.Generator().manual_seed(0))
    assert torch.equal(order_keys(values), torch.stack([torch.stack([order_keys(r) for r in h]) for h in values]))
    half = values.bfloat16()
    assert torch.equal(order_keys(half), order_keys(half.float()))


@settings(max_examples=150)
@given(st.data())
def test_select_units_against_sorted(data):
    values = data.draw(scores)
    count = len(values)
    budget = data.draw(st.integers(1, count + 2))
    sinks = data.draw(st.integers(0, budget))
    stabilizers = data.draw(st.integers(0, budget - sinks))
    other = data.draw(st.permutations(values))
    found = select_units(torch.tensor([values, other]), budget, sinks, stabilizers)
    for head, row in zip((values, other), found.tolist(), strict=True):
        if count <= budget:
            expected = list(range(count))
        else:
            protected = {*range(sinks), *range(count - stabilizers, count)}
            free = [rank for rank in best_first(head) if rank not in protected]
            expected = sorted(protected | set(free[:budget - len(protected)]))
        assert row == expected


def test_select_units_protects_over_infinite_scores_and_never_prefers_nan():
    values = torch.tensor([[math.nan, math.inf, math.inf, 0.0, math.nan, math.inf, -math.inf, math.nan]])
    assert select_units(values, 5, sinks=1, stabilizers=2).tolist() == [[0, 2, 5, 6, 7]]
    assert select_units(values, 5).tolist() == [[1, 2, 3, 5, 6]]
    assert select_units(values, 2, sinks=1, stabilizers=1).tolist() == [[0, 7]]


def test_select_units_leaves_scores_alone():
    values = torch.randn(2, 9)
    before = values.clone()
    select_units(values, 4, 1, 1)
    assert torch.equal(values, before)


def test_order_keys_know_ranks_beyond_float_precision():
    """2^24 and more units: ranks are integers of their own, not sums with scores."""
    assert (order_keys(torch.zeros(2**24 + 9))[-20:].diff() == 1).all()


@pytest.mark.parametrize("scratched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64])
@pytest.mark.parametrize(("T", "D", "B"), [(63, 80, 17), (7, 1, 7), (300, 10, 257), (9, 64, 1)])
def test_gather_units_moves_rows_bit_exactly(dtype: torch.dtype, T: int, D: int, B: int, scratched: bool):
    noise = torch.Generator().manual_seed(T)
    big = torch.randint(-2**15, 2**15, (3, 2, T + 5, D), generator=noise).to(torch.int16)
    if dtype in (torch.bfloat16, torch.float16):
        x = big.view(dtype)  # any bits: infinities, subnormals, -0
        x[x.isnan()] = float("inf")  # the payload of a NaN is the one thing that torch.gather does not keep
    else:
        x = big.to(dtype)
    slot = x[1, :, :T]  # a view inside a larger pool, as the store gives it
    outside = (x[0].clone(), x[2].clone(), x[1, :, T:].clone())
    keep = torch.stack([torch.randperm(T, generator=noise)[:B].sort().values for _ in range(2)])
    expected = torch.stack([slot[head][keep[head]] for head in range(2)])
    scratch = torch.empty(2 * B * D + 3, dtype=dtype) if scratched else None
    out = gather_units(slot, keep, scratch)
    as_bits = (lambda t: t.view(torch.int16)) if dtype.itemsize == 2 else (lambda t: t)
    assert torch.equal(as_bits(out.contiguous()), as_bits(expected.contiguous()))
    assert out.data_ptr() == slot.data_ptr()
    for found, kept in zip((x[0], x[2], x[1, :, T:]), outside, strict=True):
        assert torch.equal(as_bits(found.contiguous()), as_bits(kept.contiguous()))


def test_gather_units_of_planes_without_a_last_dimension():
    x = torch.arange(20.0).view(2, 10)
    keep = torch.tensor([[0, 3, 9], [1, 2, 4]])
    assert gather_units(x, keep).tolist() == [[0, 3, 9], [11, 12, 14]]
    assert x[:, :3].tolist() == [[0, 3, 9], [11, 12, 14]]


def dense_column_sums(q, k, scale, mask, softcap, sinks):
    """One softmax per query head and row, in float64."""
    heads, count, _ = k.shape
    group = q.shape[0] // heads
    out = torch.zeros(heads, count, dtype=torch.float64)
    for query_head in range(q.shape[0]):
        for t in range(q.shape[1]):
            logits = k[query_head // group].double() @ q[query_head, t].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits[mask[t]]
            if sinks is not None:
                logits = torch.cat([logits, sinks[query_head:query_head + 1].double()])
            weights = logits.softmax(0)
            out[query_head // group, mask[t]] += weights[:int(mask[t].sum())]
    return out


@pytest.mark.parametrize("block", [1 << 22, 1, 500])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("T", "N", "groups", "masked"), [(13, 13, 1, False), (7, 30, 3, False), (1, 9, 2, False),
                                                          (11, 30, 2, True)])
def test_column_sums_against_a_dense_softmax(T, N, groups, masked, softcap, with_sinks, block, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", block)
    noise = torch.Generator().manual_seed(T)
    q, k = (torch.randn(2 * g, n, 10, generator=noise) * 2 for g, n in ((groups, T), (1, N)))
    causal = torch.ones(T, N, dtype=torch.bool).tril(N - T)
    mask = causal & (torch.rand(T, N, generator=noise) < 0.7) if masked else causal
    mask[:, 0] = True
    sinks = torch.randn(2 * groups, generator=noise) if with_sinks else None
    found = column_sums(q, k, 0.3, mask if masked else None, softcap, sinks)
    expected = dense_column_sums(q, k, 0.3, mask, softcap, sinks)
    assert found.dtype == torch.float32 and found.shape == (2, N)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)
    if not with_sinks:  # every row gives one unit of attention per query head
        assert torch.allclose(found.sum(1), torch.full((2,), float(T * groups)), rtol=1e-5)


def test_column_sums_survive_large_logits():
    """Logits of 14,400: no overflow; what is lost is fp32's spacing there, 1e-3."""
    q, k = torch.full((2, 3, 4), 60.0), torch.full((1, 5, 4), 60.0)
    assert torch.allclose(column_sums(q, k, 1.0).sum(), torch.tensor(6.0), rtol=2e-3)
