"""What the attention kernels share: units and queries in tiles, logits in base 2, and a step of the online softmax.

Rows are one tile or, where they are wider than 256 numbers, two: latents of DeepSeek-V3, which have 512 numbers and 64
that RoPE turned, are tiles of 512 and 64, where one of a power of two would be 1,024. In the kernels they are tuples of
tiles. A latent is K and V at once, and is loaded once for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ONE_TILE = 256  # features that are one tile in any case, padded to a power of two
FIRST_TILE = 512  # of more features, at most


def dot_dtype(*operands: Tensor) -> tl.dtype:
    """The dtype that operands of tl.dot are cast to: the one they share, or fp32 if they differ."""
    dtypes = {x.dtype for x in operands}
    interpreted_bf16 = triton.knobs.runtime.interpret and torch.bfloat16 in dtypes  # its tl.dot reads bf16 as integers
    same = len(dtypes) == 1 and not interpreted_bf16
    return getattr(tl, str(dtypes.pop()).removeprefix("torch.")) if same else tl.float32


def block_dim(dim: int) -> int:
    """Features of a tile: tl.dot takes powers of two from 16 on."""
    return max(16, triton.next_power_of_2(dim))


def tiles_of(keys: Tensor, values: Tensor, *, whole: bool = False) -> dict[str, int]:
    """How keys [..., D + REST] and values [..., V + V_REST] are cut into tiles: one, or of more than `ONE_TILE`
    features one of a power of two and one of what is left, so that less is padding. BLOCK_...: powers of two that hold
    them, 0 for none. TIED: V is K (latents), so that one load serves both. `whole`: K is one tile, and not V."""
    first, rest = _cut(keys.shape[-1], whole)
    value, value_rest = _cut(values.shape[-1])
    tied = not whole and (values is keys or (values.data_ptr() == keys.data_ptr() and values.dtype == keys.dtype and
                                             values.shape == keys.shape and values.stride() == keys.stride()))
    sizes = {"D": first, "REST": rest, "V": value, "V_REST": value_rest}
    return {**sizes, **{f"BLOCK_{name}": block_dim(size) if size else 0 for name, size in sizes.items()}, "TIED": tied}


def _cut(dim: int, whole: bool = False) -> tuple[int, int]:
    """Features of the first and of the second tile."""
    first = dim if whole or dim <= ONE_TILE else min(FIRST_TILE, 1 << dim.bit_length() - 1)
    return first, dim - first


@triton.jit
def load_tile(x, rows, dims, stride_row, stride_dim, count, dim, ROWS_MASKED: tl.constexpr, DIMS_MASKED: tl.constexpr):
    """x[rows, dims]; from row `count` and feature `dim` on zeros, where rows and features are masked."""
    at = x + rows[:, None] * stride_row + dims[None, :] * stride_dim
    if ROWS_MASKED:
        if DIMS_MASKED:
            tile = tl.load(at, mask=(rows[:, None] < count) & (dims[None, :] < dim), other=0.0)
        else:
            tile = tl.load(at, mask=rows[:, None] < count, other=0.0)
    elif DIMS_MASKED:
        tile = tl.load(at, mask=dims[None, :] < dim, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def base2_logits(products, scale, SOFTCAP: tl.constexpr):
    """Logits times log2(e), from the dot products of queries and keys; SOFTCAP 0: no softcap."""
    if SOFTCAP > 0:
        # tanh is computed from exp2; from 64 on it is 1 in fp32, and exp2 must not overflow.
        doubled = tl.minimum(products * (scale * (2.0 / SOFTCAP * LOG2E)), 64.0)
        logits = (1.0 - 2.0 / (1.0 + tl.exp2(doubled))) * (SOFTCAP * LOG2E)
    else:
        logits = products * (scale * LOG2E)
    return logits


@triton.jit
def load_tiles(x, rows, stride_row, stride_dim, count, D: tl.constexpr, REST: tl.constexpr, ROWS_MASKED: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """x[rows] in one tile of D features or, if there are REST more, in two."""
    tile = load_tile(x, rows, tl.arange(0, BLOCK_D), stride_row, stride_dim, count, D, ROWS_MASKED, D < BLOCK_D)
    if REST > 0:
        rest = load_tile(x + D * stride_dim, rows, tl.arange(0, BLOCK_REST), stride_row, stride_dim, count, REST,
                         ROWS_MASKED, REST < BLOCK_REST)
        tiles = (tile, rest)
    else:
        tiles = (tile,)
    return tiles


@triton.jit
def gather_tiles(rows, stride_dim, inside, D: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_REST: tl.constexpr):
    """`load_tiles` of rows at any addresses `rows` [M, 1]; zeros where they are not `inside` [M]."""
    dims = tl.arange(0, BLOCK_D)
    tile = tl.load(rows + dims[None, :] * stride_dim, mask=inside[:, None] & (dims[None, :] < D), other=0.0)
    if REST > 0:
        more = tl.arange(0, BLOCK_REST)
        rest = tl.load(rows + (D + more[None, :]) * stride_dim, mask=inside[:, None] & (more[None, :] < REST),
                       other=0.0)
        tiles = (tile, rest)
    else:
        tiles = (tile,)
    return tiles


@triton.jit
def dot_tiles(rows, columns, DOT: tl.constexpr):
    """Dot products of rows [M, D] and columns [N, D], each in the same tiles: [M, N]."""
    products = tl.dot(rows[0].to(DOT), tl.trans(columns[0].to(DOT)), input_precision="ieee")
    if len(rows) > 1:
        products = tl.dot(rows[1].to(DOT), tl.trans(columns[1].to(DOT)), products, input_precision="ieee")
    return products


@triton.jit
def softmax_step(top, total, logits):
    """Weights [M, N] of units with base-2 `logits`, what is kept [M] of those before, and the new maximum and sum."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that saw nothing yet has weights 0, not NaN
    weights = tl.exp2(logits - safe[:, None])
    kept = tl.exp2(top - safe)
    return weights, kept, new_top, total * kept + tl.sum(weights, 1)


@triton.jit
def zero_tiles(M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_V_REST: tl.constexpr):
    """The output of M rows, before they saw anything."""
    acc = tl.zeros([M, BLOCK_V], tl.float32)
    if BLOCK_V_REST > 0:
        tiles = (acc, tl.zeros([M, BLOCK_V_REST], tl.float32))
    else:
        tiles = (acc,)
    return tiles


@triton.jit
def add_tiles(acc, kept, weights, values, DOT: tl.constexpr):
    """acc * kept + weights [M, N] times values [N, D], tile by tile."""
    added = tl.dot(weights.to(values[0].dtype).to(DOT), values[0].to(DOT), acc[0] * kept[:, None],
                   input_precision="ieee")
    if len(values) > 1:
        tiles = (added, tl.dot(weights.to(values[1].dtype).to(DOT), values[1].to(DOT), acc[1] * kept[:, None],
                               input_precision="ieee"))
    else:
        tiles = (added,)
    return tiles


@triton.jit
def finish(acc, top, total):
    """Output and base-2 log-sum-exp of the rows; 0 and -inf where a row saw nothing."""
    total = tl.where(total == 0.0, 1.0, total)
    if len(acc) > 1:
        tiles = (acc[0] / total[:, None], acc[1] / total[:, None])
    else:
        tiles = (acc[0] / total[:, None],)
    return tiles, top + tl.log2(total)


@triton.jit
def store_tiles(out, at, stride_dim, acc, inside, D: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_REST: tl.constexpr):
    """Write rows in one tile or two to the places `at` [M] of `out`, those that are `inside` [M]."""
    dims = tl.arange(0, BLOCK_D)
    tl.store(out + at[:, None] + dims[None, :] * stride_dim, acc[0].to(out.dtype.element_ty),
             mask=inside[:, None] & (dims[None, :] < D))
    if len(acc) > 1:
        rest = tl.arange(0, BLOCK_REST)
        tl.store(out + at[:, None] + (D + rest[None, :]) * stride_dim, acc[1].to(out.dtype.element_ty),
                 mask=inside[:, None] & (rest[None, :] < REST))
