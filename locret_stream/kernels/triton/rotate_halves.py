"""RoPE in one pass: every element is read once and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements that one program turns


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """`reference.rotate_halves` of x [B, heads, T, D], computed in fp32, and in fp64 of such x. A token's bits are the
    same alone and among many."""
    batch, heads, new, dim = x.shape
    if out is None:
        out = torch.empty_like(x)
    if not x.numel():
        return out
    half = dim // 2
    block_half = triton.next_power_of_2(half)
    block_new = max(1, min(triton.next_power_of_2(new), _TILE // (2 * block_half)))
    cos, sin = cos.expand(x.shape), sin.expand(x.shape)
    _rotate[(triton.cdiv(new, block_new), batch * heads)](
        x, cos, sin, out, x.stride(), cos.stride(), sin.stride(), out.stride(), heads, new, HALF=half,
        BLOCK_T=block_new, BLOCK_HALF=block_half, enable_fp_fusion=False)
    return out


@triton.jit(do_not_specialize=["T"])
def _rotate(x, cos, sin, out, stride_x, stride_cos, stride_sin, stride_out, H, T, HALF: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """BLOCK_T tokens of one head. Products are not fused with sums, so that the code around them changes no bit."""
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (token < T) & (dim < HALF)
    kind: tl.constexpr = out.dtype.element_ty
    wide: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    x += batch * stride_x[0] + head * stride_x[1] + token * stride_x[2] + dim * stride_x[3]
    cos += batch * stride_cos[0] + head * stride_cos[1] + token * stride_cos[2] + dim * stride_cos[3]
    sin += batch * stride_sin[0] + head * stride_sin[1] + token * stride_sin[2] + dim * stride_sin[3]
    out += batch * stride_out[0] + head * stride_out[1] + token * stride_out[2] + dim * stride_out[3]
    first = tl.load(x, mask=mask).to(wide)
    second = tl.load(x + HALF * stride_x[3], mask=mask).to(wide)
    cos_first = tl.load(cos, mask=mask).to(wide)
    cos_second = tl.load(cos + HALF * stride_cos[3], mask=mask).to(wide)
    sin_first = tl.load(sin, mask=mask).to(wide)
    sin_second = tl.load(sin + HALF * stride_sin[3], mask=mask).to(wide)
    tl.store(out, (first * cos_first - second * sin_first).to(kind), mask=mask)
    tl.store(out + HALF * stride_out[3], (second * cos_second + first * sin_second).to(kind), mask=mask)
