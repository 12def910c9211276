"""Attention in all its forms: the numeric specification against a softmax in float64, the fast forms against both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locret_stream.kernels import reference, torch_ops
from locret_stream.kernels.processor import bf16_products
from locret_stream.kernels.reference import attention, rotate_halves

OPERATIONS = [reference, torch_ops]
EXTRAS = [{}, {"window": 5}, {"softcap": 2.0}, {"sink_logits": True}, {"softcap": 1.5, "sink_logits": True},
          {"window": 9, "softcap": 1.5, "sink_logits": True}]


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, ranks: list[int], window=None, softcap=None,
          sink_logits=None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and column sums, one softmax per query head and row, in float64."""
    group = q.shape[0] // k.shape[0]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    sums = torch.zeros(k.shape[:2], dtype=torch.float64)
    for head in range(q.shape[0]):
        for row, rank in enumerate(ranks):
            seen = slice(0 if window is None else max(0, rank + 1 - window), rank + 1)
            logits = k[head // group, seen].double() @ q[head, row].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            whole = logits if sink_logits is None else torch.cat([logits, sink_logits[head:head + 1].double()])
            lse[head, row] = whole.logsumexp(0)
            weights = (logits - lse[head, row]).exp()
            out[head, row] = weights @ v[head // group, seen].double()
            sums[head // group, seen] += weights
    return out, lse, sums


def inputs(T: int, N: int, G: int, D: int = 10, H: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q as a model gives it, [T, H*G, D] in memory; k and v as views of a larger pool."""
    noise = torch.Generator().manual_seed(seed + T + N)
    q = torch.randn(T, H * G, D, generator=noise).transpose(0, 1) * 2
    pool = torch.randn(2, H, N + 3, D, generator=noise)
    return q, pool[0, :, :N], pool[1, :, :N]


def filled(extra: dict, heads: int) -> dict:
    return {**extra, "sink_logits": torch.linspace(-1, 2, heads)} if "sink_logits" in extra else extra


@pytest.mark.parametrize("block", [1 << 22, 1, 300])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("T", "N", "G"), [(13, 13, 1), (7, 30, 3), (1, 9, 2)])
def test_attention_and_reduced_attention_against_a_dense_softmax(T, N, G, extra, block, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", block)
    q, k, v = inputs(T, N, G)
    extra = filled(extra, 2 * G)
    ranks = torch.randperm(N, generator=torch.Generator().manual_seed(N))[:T]  # any rows, in any order
    out, lse, sums = dense(q, k, v, 0.3, ranks.tolist(), **extra)
    found_out, found_lse = attention(q, k, v, 0.3, ranks, **extra)
    torch.testing.assert_close(found_out.double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-6)
    if "window" in extra:  # nobody asks for the column sums of a layer with a sliding window
        return
    for given in (None, found_lse):
        found = reference.reduced_attention(q, k, 0.3, ranks, given, **extra)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), sums, rtol=1e-5, atol=1e-6)
    if "sink_logits" not in extra:  # every row gives one unit of attention per query head
        torch.testing.assert_close(found.sum(1), torch.full((2,), float(T * G)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sink_logits": True}, {"softcap": 1.5, "sink_logits": True}])
@pytest.mark.parametrize(("T", "N", "G"), [(13, 13, 1), (7, 30, 3), (1, 9, 2)])
def test_reduced_attention_counts_rows_that_pay_more_than_their_mean(T, N, G, extra):
    """Row by row: what one row pays is its column sums, and it sees as many units as it pays anything."""
    q, k, _ = inputs(T, N, G)
    extra, sums = filled(extra, 2 * G), torch.zeros(2, N)
    ranks = torch.randperm(N, generator=torch.Generator().manual_seed(N))[:T]
    for row in range(T):
        for group in range(G):
            own = [group, G + group]
            of_heads = {"sink_logits": extra["sink_logits"][own]} if "sink_logits" in extra else {}
            paid = reference.reduced_attention(q[own, row:row + 1], k, 0.3, ranks[row:row + 1], **extra | of_heads)
            sums += paid > 1 / (paid > 0).sum(1, keepdim=True)
    assert 0 < sums.sum() < 2 * N * T * G
    assert torch.equal(reference.reduced_attention(q, k, 0.3, ranks, above_mean=True, **extra), sums)


def test_reduced_attention_survives_large_logits():
    """Logits of 14,400: no overflow; what is lost is fp32's spacing there, 1e-3."""
    q, k = torch.full((2, 3, 4), 60.0), torch.full((1, 5, 4), 60.0)
    found = reference.reduced_attention(q, k, 1.0, torch.arange(2, 5)).sum()
    assert torch.allclose(found, torch.tensor(6.0), rtol=2e-3)


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("T", "N", "G"), [(13, 13, 1), (7, 30, 3), (40, 41, 2), (1, 9, 2), (33, 100, 1)])
def test_prefill_attention_is_causal_with_its_ends_aligned(ops, T, N, G, extra):
    q, k, v = inputs(T, N, G)
    extra = filled(extra, 2 * G)
    out, lse, _ = dense(q, k, v, 0.3, list(range(N - T, N)), **extra)
    found_out, found_lse = ops.prefill_attention(q, k, v, 0.3, **extra)
    torch.testing.assert_close(found_out.double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-6)
    same, none = ops.prefill_attention(q, k, v, 0.3, with_lse=False, **extra)
    assert torch.equal(same, found_out) and none is None


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize(("T", "N"), [(13, 13), (7, 30), (1, 9)])
def test_a_window_about_as_long_as_the_units_hides_just_those_before_it(ops, T, N):
    q, k, v = inputs(T, N, 2)
    for window in (N - 1, N, N + 1):
        out, lse, _ = dense(q, k, v, 0.3, list(range(N - T, N)), window=window)
        found_out, found_lse = ops.prefill_attention(q, k, v, 0.3, window=window)
        torch.testing.assert_close(found_out.double(), out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("T", "N"), [(12, 12), (12, 31), (4, 4), (4, 9), (8, 8), (11, 31)])
def test_prefill_attention_of_a_chunk_in_blocks(T, N, monkeypatch):
    """Of whole blocks, one or several, with units before the chunk and without; 11 rows are none of whole blocks."""
    monkeypatch.setattr(torch_ops, "CAUSAL_ROWS", 4)
    q, k, v = inputs(T, N, 3)
    out, lse, _ = dense(q, k, v, 0.3, list(range(N - T, N)))
    found_out, found_lse = torch_ops.prefill_attention(q, k, v, 0.3)
    torch.testing.assert_close(found_out.double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-6)


def peaked(T: int, N: int, G: int, D: int, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in bf16, of logits of up to about 40 where others are around 0, for the units that are named."""
    q, k, v = inputs(T, N, G, D=D)
    k = k.clone()
    if where == "own":
        q += 2.2 * k[:, N - T:].repeat_interleave(G, 0)
    elif where != "nowhere":
        q[..., 7] += 16
        k[:, {"first": slice(1), "several": slice((N - T) // 2, (N - T) // 2 + 5)}[where], 7] += 2.5 * D**0.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.skipif(not bf16_products(), reason="this processor multiplies no bf16 matrices")
@pytest.mark.parametrize("where", ["first", "own", "several", "nowhere"])
@pytest.mark.parametrize("logits", [1, 1 << 20])
@pytest.mark.parametrize(("T", "N", "G", "D"), [(128, 128, 2, 64), (64, 300, 3, 128), (256, 700, 2, 64),
                                               (192, 1000, 1, 80)])
@pytest.mark.thorough(but=10)
def test_attention_by_products_rounds_each_weight_and_each_output_once(T, N, G, D, logits, where, monkeypatch):
    """Which is off by 2**-8 of itself at most, whatever the logits are, and in blocks of any size."""
    monkeypatch.setattr(torch_ops, "LOGITS", logits)
    q, k, v = peaked(T, N, G, D, where)
    exact, lse, _ = dense(q, k, v, D**-0.5, list(range(N - T, N)))
    weighed, _, _ = dense(q, k, v.abs(), D**-0.5, list(range(N - T, N)))
    assert lse.max() > {"first": 30, "several": 30, "own": 10, "nowhere": 6}[where]
    found = torch_ops._attention_by_products(q, k, v, D**-0.5)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 1.01 * 2**-8 * (weighed + exact.abs()) + 1e-5).all()


@torch.no_grad()
@pytest.mark.skipif(not bf16_products(), reason="this processor multiplies no bf16 matrices")
def test_attention_by_products_is_for_chunks_in_bf16_of_which_nobody_needs_more(monkeypatch):
    used: list[torch.Size] = []
    monkeypatch.setattr(torch_ops, "_attention_by_products", lambda q, *_: used.append(q.shape) or q)
    monkeypatch.setattr(torch_ops, "slow_blas", lambda: True)
    q, k, v = (x.bfloat16() for x in inputs(128, 1100, 2, D=16))

    def uses(q: Tensor = q, k: Tensor = k, v: Tensor = v, **extra: Any) -> int:
        used.clear()
        torch_ops.prefill_attention(q, k, v, 0.25, **{"with_lse": False} | extra)
        return len(used)

    assert uses() == 1 and uses(window=1100) == 1
    assert not uses(with_lse=True) and not uses(window=500) and not uses(softcap=2.0)
    assert not uses(q.float(), k.float(), v.float())
    assert not uses(q[:, :127])  # no multiple of 64
    assert not uses(q, k[:, :1000], v[:, :1000])  # small
    with torch.enable_grad():
        assert not uses()
    monkeypatch.setattr(torch_ops, "slow_blas", lambda: False)
    assert not uses()


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}])
def test_decode_attention_has_a_window_of_each_context(ops, extra):
    q, keys, values = (torch.randn(3, heads, count, 8, generator=torch.Generator().manual_seed(heads + count))
                       for heads, count in ((4, 1), (2, 20), (2, 21)))
    slots, lengths, windows = torch.tensor([2, 0, 1]), torch.tensor([20, 7, 3]), torch.tensor([1, 5, 9])
    found = ops.decode_attention(q, keys, values[:, :, 1:], slots, lengths, 0.3, window=windows, **extra)
    for row in range(3):
        part = slice(row, row + 1)
        alone = ops.decode_attention(q[part], keys, values[:, :, 1:], slots[part], lengths[part], 0.3,
                                     window=int(windows[row]), **extra)
        assert torch.equal(found[part], alone)


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("on_load", [False, True])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("T", [1, 2])
def test_decode_attention_begins_at_the_row_of_each_context(ops, T, extra, on_load):
    """As if its units were moved to the first row of a slot of their own; a context may have sink logits of its own."""
    noise, D, G = torch.Generator().manual_seed(T), 10, 3
    keys, values = (torch.full((2, 1, 40, D), float("nan")) for _ in range(2))
    slots, firsts, lengths = torch.tensor([1, 0, 1]), torch.tensor([20, 3, 0]), torch.tensor([17, 9, T])
    alone_k, alone_v = torch.full((3, 1, 20, D), float("nan")), torch.full((3, 1, 20, D), float("nan"))
    for row, (slot, first, length) in enumerate(zip(slots.tolist(), firsts.tolist(), lengths.tolist(), strict=True)):
        alone_k[row, :, :length], alone_v[row, :, :length] = (torch.randn(1, length, D, generator=noise) for _ in "kv")
        keys[slot, :, first:first + length] = alone_k[row, :, :length]
        values[slot, :, first:first + length] = alone_v[row, :, :length]
    q = torch.randn(3, T, G, D, generator=noise).transpose(1, 2)
    angles = torch.randn(20, D // 2, generator=noise).repeat(1, 2)
    rope = {"cos": angles.cos(), "sin": angles.sin()} if on_load else {}
    extra = filled(extra, G)
    if "sink_logits" in extra:
        extra["sink_logits"] = torch.randn(3, G, generator=noise)
    found = ops.decode_attention(q, keys, values, slots, lengths, 0.3, firsts=firsts, **rope, **extra)
    for row in range(3):
        one = dict(extra) if "sink_logits" not in extra else extra | {"sink_logits": extra["sink_logits"][row]}
        alone = ops.decode_attention(q[row:row + 1], alone_k, alone_v, torch.tensor([row]), lengths[row:row + 1], 0.3,
                                     **rope, **one)
        torch.testing.assert_close(found[row:row + 1], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("on_load", [False, True])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("T", "G"), [(1, 1), (1, 3), (3, 2)])
def test_decode_attention_reads_each_slot_to_its_own_length(ops, T, G, extra, on_load):
    """Units behind a length, and slots of no context, are nan here and must not be read."""
    noise = torch.Generator().manual_seed(T)
    capacity, D = 21, 10
    keys, values = (torch.full((5, 2, capacity, D), float("nan")) for _ in range(2))
    slots, lengths = torch.tensor([3, 0, 4]), torch.tensor([T, 8, capacity])
    for slot, length in zip(slots, lengths, strict=True):
        keys[slot, :, :length] = torch.randn(2, int(length), D, generator=noise)
        values[slot, :, :length] = torch.randn(2, int(length), D, generator=noise)
    q = torch.randn(3, T, 2 * G, D, generator=noise).transpose(1, 2)
    angles = torch.randn(capacity + 2, D // 2, generator=noise).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    extra = filled(extra, 2 * G)
    found = ops.decode_attention(q, keys, values, slots, lengths, 0.3, cos=cos if on_load else None,
                                 sin=sin if on_load else None, **extra)
    assert found.shape == q.shape
    for a, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        k = keys[slot, :, :length]
        k = rotate_halves(k, cos[:length], sin[:length]) if on_load else k
        out, _, _ = dense(q[a], k, values[slot, :, :length], 0.3, list(range(length - T, length)), **extra)
        torch.testing.assert_close(found[a].double(), out, rtol=1e-5, atol=1e-6)
