"""Units in few bits: codes are within half a step of what they were made of, and every form reads them alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locret_stream.budgets import group_of, row_bytes
from locret_stream.kernels import reference, torch_ops
from locret_stream.kernels.reference import CODES, quantise_units

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def units(dim: int, seed: int = 0, count: int = 37) -> Tensor:
    """[H, N, D] with channels of different sizes and places, as keys have them."""
    noise = torch.Generator().manual_seed(seed)
    size, place = torch.rand(dim, generator=noise) * 3 + 0.1, torch.randn(dim, generator=noise) * 4
    return torch.randn(2, count, dim, generator=noise) * size + place


def read(rows: Tensor, bits: int, dim: int, mean: Tensor | None = None, dtype: torch.dtype = torch.float32,
         by=reference) -> Tensor:
    return by.dequantise_units(rows, bits, torch.full((*rows.shape[:2], dim), float("nan"), dtype=dtype), mean)


@pytest.mark.parametrize(("dim", "group", "of_eight"), [(64, 32, 64), (128, 32, 64), (80, 20, 40), (16, 16, 16),
                                                        (96, 32, 48), (24, 24, 24)])
def test_a_row_has_a_scale_and_a_zero_for_each_group_of_channels(dim: int, group: int, of_eight: int):
    for bits in CODES:
        size, beside = (of_eight, 8) if bits == 8 else (of_eight if bits == 1 else group, 4)
        assert group_of(dim, bits) == size
        assert row_bytes(dim, bits) == dim * bits // 8 + beside * dim // size
        assert row_bytes(dim, bits) == quantise_units(units(dim), bits).shape[-1]
    assert 2 * row_bytes(64, 4) == 80 and 2 * row_bytes(64, 8) == 144


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("dim", [64, 80, 16])
def test_every_channel_is_within_half_a_step(bits: int, dim: int):
    x = units(dim)
    found = read(quantise_units(x, bits), bits, dim)
    groups = x.unflatten(-1, (-1, group_of(dim, bits)))
    span = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)).expand_as(groups).flatten(-2)
    size = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(-2)
    stored = 2.0**-16 if bits == 8 else 2.0**-11  # precision of scale and zero: it may move the ends of the range
    assert ((found - x).abs() <= span / (2**bits - 1) / 2 + (span + size) * stored).all()
    least = (found - x).abs().amax()
    assert least > 0, "the bound is not met by returning the input"


def test_one_bit_stands_for_the_middles_of_the_halves():
    """z = (3 min + max) / 4, s = (max - min) / 2 (SpeCache, arXiv:2503.16163, equation 3)."""
    x = torch.arange(64.0)[None, None] * 4 - 128  # from -128 to 124
    found = read(quantise_units(x, 1), 1, 64)[0, 0]
    assert (found == torch.where(x[0, 0] < -2, -65.0, 61.0)).all()
    assert row_bytes(64, 1) == 12


def test_the_order_of_the_bytes_is_as_specified():
    """Two groups: codes with the first channel in the lowest bits, then scale and zero, little-endian fp16."""
    x = torch.stack([torch.arange(32.0) % 16, 100 + 2 * (torch.arange(32.0) % 16)]).flatten()[None, None]
    row = quantise_units(x, 4)[0, 0]
    nibbles = [at % 16 | (at + 1) % 16 << 4 for at in range(0, 32, 2)]
    one, two, hundred, zero = ([*torch.tensor([value]).half().view(torch.uint8).tolist()]
                               for value in (1.0, 2.0, 100.0, 0.0))
    assert row.tolist() == [*nibbles, *one, *zero, *nibbles, *two, *hundred]
    assert torch.equal(read(row[None, None], 4, 64), x)
    x = (torch.arange(64.0) * 4 + 1)[None, None]
    x[..., -1] = 256  # 255 steps of one: the scale and the zero are 1, fp32 each
    row = quantise_units(x, 8)[0, 0]
    assert row.tolist() == [*(x[0, 0] - 1).int().tolist(), *torch.ones(2).view(torch.uint8).tolist()]


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_mean", [False, True])
def test_all_forms_read_the_same_bits(bits: int, dim: int, dtype: torch.dtype, with_mean: bool):
    x = units(dim)
    mean = x.mean(1, keepdim=True) if with_mean else None
    rows = quantise_units(x, bits, mean)
    whole = read(rows, bits, dim, mean, dtype)
    assert torch.equal(read(rows, bits, dim, mean, dtype, torch_ops), whole), "all of a layer at once"
    pool = torch.zeros(2, 50, row_bytes(dim, bits), dtype=torch.uint8)
    pool[:, 3:40] = rows
    expected = read(pool[:, 3:40], bits, dim, mean, dtype)
    assert torch.equal(read(pool[:, 3:40], bits, dim, mean, dtype, torch_ops), expected)
    assert torch.equal(read(pool[:, 3:4], bits, dim, mean, dtype, torch_ops), expected[:, :1]), "a row alone"
    assert read(pool[:, 3:3], bits, dim, mean, dtype, torch_ops).shape == (2, 0, dim)


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize(("dim", "count"), [(64, 37), (80, 5), (24, 200), (16, 1), (128, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.thorough(but=15)
def test_triton_reads_the_same_bits(bits: int, dim: int, count: int, dtype: torch.dtype, with_mean: bool):
    """Rows and channels in the middle of larger tensors, which stay as they are around them."""
    pytest.importorskip("triton", reason="triton is published for Linux only")
    from locret_stream.kernels.triton.dequantise_units import dequantise_units

    x = units(dim, count=count).to(DEVICE)
    mean = x.mean(1, keepdim=True) if with_mean else None
    rows = torch.full((2, count + 9, row_bytes(dim, bits)), 255, dtype=torch.uint8, device=DEVICE)
    rows[:, 3:3 + count] = quantise_units(x, bits, mean)
    whole = torch.full((2, count + 5, dim), 7.0, dtype=dtype, device=DEVICE)
    found = dequantise_units(rows[:, 3:3 + count], bits, whole[:, 2:2 + count], mean)
    expected = read(rows[:, 3:3 + count].cpu(), bits, dim, None if mean is None else mean.cpu(), dtype)
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # to which the interpreter truncates
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found.cpu(), expected)
    assert (whole[:, :2] == 7).all() and (whole[:, 2 + count:] == 7).all()
    assert dequantise_units(rows[:, 3:3], bits, whole[:, 2:2], mean).shape == (2, 0, dim)


@pytest.mark.parametrize("bits", CODES)
def test_a_row_does_not_depend_on_its_neighbours(bits: int):
    x = units(64)
    assert torch.equal(torch.cat([quantise_units(x[:, at:at + 1], bits) for at in range(x.shape[1])], 1),
                       quantise_units(x, bits))


@pytest.mark.parametrize("bits", CODES)
def test_keys_far_from_zero_keep_their_differences_once_the_mean_is_removed(bits: int):
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(2, 64, 64, generator=noise) * 0.1 + torch.randn(64, generator=noise) * 13
    mean = x.mean(1, keepdim=True)
    raw, less = (read(quantise_units(x, bits, m), bits, 64, m) for m in (None, mean))
    assert (less - x).square().mean() * 100 < (raw - x).square().mean()


@pytest.mark.parametrize("bits", CODES)
def test_strange_numbers_stay_where_they_are(bits: int):
    x = torch.zeros(1, 6, 64)
    x[0, 1] = 3.0  # equal channels have no steps between them
    x[0, 2, 0], x[0, 3, 0], x[0, 4, 40], x[0, 5] = 1e30, -1e30, float("nan"), 1e-30
    for by in (reference, torch_ops):
        found = read(quantise_units(x, bits), bits, 64, by=by)
        assert torch.equal(found[0, :2], x[0, :2]), "exact"
        assert found[0, 2:4].isfinite().all() and found[0, 2, 0] > 1e4 > -1e4 > found[0, 3, 0]
        first = 0 if bits in (8, 1) else 32
        assert found[0, 4, first:].isnan().all(), "its group"
        assert torch.equal(found[0, 4, :first], x[0, 4, :first]), "and no other"
        assert found[0, 5].abs().max() < 1e-6
        for extreme in (float("inf"), -float("inf")):
            row = torch.zeros(1, 1, 64)
            row[0, 0, 0] = extreme
            far = read(quantise_units(row, bits), bits, 64, by=by)[0, 0]
            assert far.isfinite().all() and far[0].sign() == (1 if extreme > 0 else -1) and far[0].abs() > 1e4
