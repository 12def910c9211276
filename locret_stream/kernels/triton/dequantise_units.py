"""Rows of codes, again as channels: one launch for a layer.

Attention then reads what this wrote. Codes are not unpacked by the attention kernels themselves: the layer that is read
is small (6,000 units of 8 heads of 128 channels take 25 MB, half of an H100's L2 cache), and prefill would unpack every
unit once for each of its tiles of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from locret_stream.budgets import group_of

_CHANNELS = 4096  # that one program reads


def dequantise_units(rows: Tensor, bits: int, out: Tensor, mean: Tensor | None = None) -> Tensor:
    """`reference.dequantise_units`, bit for bit."""
    heads, count, dim = out.shape
    if not out.numel():
        return out
    assert rows.stride(2) == 1, "the bytes of a row are contiguous"
    group, wide = group_of(dim, bits), triton.next_power_of_2(dim)
    units = max(1, min(triton.next_power_of_2(count), _CHANNELS // wide))
    mean = None if mean is None else mean.expand(heads, 1, dim)
    _dequantise[(triton.cdiv(count, units), heads)](
        rows, out, mean, count, rows.stride(0), rows.stride(1), *out.stride(), *((0, 0) if mean is None else (
            mean.stride(0), mean.stride(2))), BITS=bits, GROUP=group, D=dim, UNITS=units, BLOCK_D=wide,
        enable_fp_fusion=True)
    return out


@triton.jit
def _word(at, mask, BYTES: tl.constexpr):
    """Little-endian integers of two or four bytes, which need not be aligned."""
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, BYTES):
        word = word | (tl.load(at + byte, mask=mask, other=0).to(tl.int32) << (8 * byte))
    return word


@triton.jit
def _dequantise(rows, out, mean, count, stride_h, stride_n, out_stride_h, out_stride_n, out_stride_d, mean_stride_h,
                mean_stride_d, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, UNITS: tl.constexpr,
                BLOCK_D: tl.constexpr):
    """UNITS rows of one head. code * scale is exact in fp32, so that it may be fused with what adds zero."""
    head = tl.program_id(1).to(tl.int64)
    unit = (tl.program_id(0) * UNITS + tl.arange(0, UNITS)).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    mask = (unit < count)[:, None] & (dim < D)[None, :]
    CODES: tl.constexpr = GROUP * BITS // 8  # bytes of a group's codes
    WIDTH: tl.constexpr = 4 if BITS == 8 else 2
    group = rows + head * stride_h + unit[:, None] * stride_n + (dim // GROUP * (CODES + 2 * WIDTH))[None, :]
    byte = tl.load(group + (dim % GROUP * BITS // 8)[None, :], mask=mask, other=0).to(tl.int32)
    code = (byte >> (dim % GROUP * BITS % 8)[None, :]) & ((1 << BITS) - 1)
    scale = _word(group + CODES, mask, WIDTH)
    zero = _word(group + CODES + WIDTH, mask, WIDTH)
    if WIDTH == 4:
        scale = scale.to(tl.float32, bitcast=True)
        zero = zero.to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = zero.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    x = code.to(tl.float32) * scale + zero
    if mean is not None:
        x += tl.load(mean + head * mean_stride_h + dim * mean_stride_d, mask=dim < D, other=0.0)[None, :]
    tl.store(out + head * out_stride_h + unit[:, None] * out_stride_n + dim[None, :] * out_stride_d,
             x.to(out.dtype.element_ty), mask=mask)
