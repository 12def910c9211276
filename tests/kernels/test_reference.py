"""Selecting, moving and scoring units: the numeric specification and its fast forms against plainer ones."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.kernels import reference, torch_ops
from locret_stream.kernels.reference import order_keys

OPERATIONS = [reference, torch_ops]
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


@pytest.mark.parametrize("ops", OPERATIONS)
@settings(max_examples=150)
@given(st.data())
def test_select_units_against_sorted(ops, data):
    values = data.draw(scores)
    count = len(values)
    budget = data.draw(st.integers(1, count + 2))
    sinks = data.draw(st.integers(0, budget))
    stabilizers = data.draw(st.integers(0, budget - sinks))
    other = data.draw(st.permutations(values))
    found = ops.select_units(torch.tensor([values, other]), budget, sinks, stabilizers)
    for head, row in zip((values, other), found.tolist(), strict=True):
        if count <= budget:
            expected = list(range(count))
        else:
            protected = {*range(sinks), *range(count - stabilizers, count)}
            free = [rank for rank in best_first(head) if rank not in protected]
            expected = sorted(protected | set(free[:budget - len(protected)]))
        assert row == expected


@pytest.mark.parametrize("ops", OPERATIONS)
def test_select_units_protects_over_infinite_scores_and_never_prefers_nan(ops):
    values = torch.tensor([[math.nan, math.inf, math.inf, 0.0, math.nan, math.inf, -math.inf, math.nan]])
    assert ops.select_units(values, 5, sinks=1, stabilizers=2).tolist() == [[0, 2, 5, 6, 7]]
    assert ops.select_units(values, 5).tolist() == [[1, 2, 3, 5, 6]]
    assert ops.select_units(values, 2, sinks=1, stabilizers=1).tolist() == [[0, 7]]


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize(("H", "N", "B", "sinks", "stabilizers"), [
    (2, 3040, 2784, 4, 32), (3, 352, 96, 0, 96), (8, 4097, 1, 0, 0), (1, 129, 128, 64, 64)])
def test_select_units_of_many_is_what_sorting_gives(ops, H: int, N: int, B: int, sinks: int, stabilizers: int):
    values = torch.randn(H, N, generator=torch.Generator().manual_seed(N)).round(decimals=1)  # many are equal
    keys = order_keys(values)
    keys[:, :sinks] = keys[:, N - stabilizers:] = torch.iinfo(torch.int64).max
    expected = keys.sort(dim=-1, descending=True, stable=True).indices[:, :B].sort(dim=-1).values
    assert torch.equal(ops.select_units(values, B, sinks, stabilizers), expected)


@pytest.mark.parametrize("ops", OPERATIONS)
def test_select_units_leaves_scores_alone(ops):
    values = torch.randn(2, 9)
    before = values.clone()
    ops.select_units(values, 4, 1, 1)
    assert torch.equal(values, before)


def test_order_keys_know_ranks_beyond_float_precision():
    """2^24 and more units: ranks are integers of their own, not sums with scores."""
    assert (order_keys(torch.zeros(2**24 + 9))[-20:].diff() == 1).all()


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64])
@pytest.mark.parametrize(("T", "D", "B"), [(63, 80, 17), (7, 1, 7), (300, 10, 257), (9, 64, 1)])
def test_compact_units_moves_rows_bit_exactly(ops, dtype: torch.dtype, T: int, D: int, B: int):
    noise = torch.Generator().manual_seed(T)
    big = torch.randint(-2**15, 2**15, (3, 2, T + 5, D), generator=noise).to(torch.int16)
    if dtype in (torch.bfloat16, torch.float16):
        x = big.view(dtype)  # any bits: infinities, subnormals, -0
        x[x.isnan()] = float("inf")  # the payload of a NaN is the one thing that torch.gather does not keep
    else:
        x = big.to(dtype)
    slot = x[1, :, :T]  # a view inside a larger pool, as the store gives it
    plain = torch.randn(2, T + 1, generator=noise)  # scores or positions
    outside = (x[0].clone(), x[2].clone(), x[1, :, T:].clone(), plain[:, T:].clone())
    first = min(3, B - 1)  # units that stay where they are
    keep = torch.stack([torch.cat([torch.arange(first), (torch.randperm(T - first, generator=noise)[:B - first] + first)
                                   .sort().values]) for _ in range(2)])
    expected = torch.stack([slot[head][keep[head]] for head in range(2)])
    numbers = plain[:, :T].gather(1, keep)
    ops.compact_units([slot, plain[:, :T]], keep, torch.empty(2 * B * D * 8 + 3, dtype=torch.uint8))
    as_bits = (lambda t: t.view(torch.int16)) if dtype.itemsize == 2 else (lambda t: t)
    assert torch.equal(as_bits(slot[:, :B].contiguous()), as_bits(expected.contiguous()))
    assert torch.equal(plain[:, :B], numbers)
    for found, kept in zip((x[0], x[2], x[1, :, T:], plain[:, T:]), outside, strict=True):
        same = as_bits if found.dtype == dtype else (lambda t: t)
        assert torch.equal(same(found.contiguous()), same(kept.contiguous()))


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("G", "T", "D", "W"), [(1, 1, 6, 5), (3, 17, 8, 33)])
def test_score_units_is_the_two_layer_network_over_the_concatenation(ops, bias: bool, G: int, T: int, D: int, W: int):
    noise = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(T, heads, D, generator=noise).transpose(0, 1) for heads in (2 * G, 2, 2))
    fc1, fc2 = torch.randn(W, (2 * G + 4) * D, generator=noise), torch.randn(2, W, generator=noise)
    bias1, bias2 = (torch.randn(W, generator=noise), torch.randn(2, generator=noise)) if bias else (None, None)
    found = ops.score_units(q, k, v, fc1, fc2, torch.nn.functional.silu, bias1, bias2)
    assert found.dtype == torch.float32 and found.shape == (2, T)
    for t in range(T):
        x = torch.cat([part[head, t] for part in (q, k, v) for head in range(len(part))]).double()
        hidden = fc1.double() @ x + (bias1.double() if bias else 0)
        expected = fc2.double() @ (hidden * hidden.sigmoid()) + (bias2.double() if bias else 0)
        assert torch.allclose(found[:, t].double(), expected, rtol=1e-5, atol=1e-4)
