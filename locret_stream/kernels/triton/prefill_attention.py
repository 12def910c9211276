"""Attention of a chunk to its slot, as in FlashAttention-2 (arXiv:2307.08691), with logits in base 2.

From Hopper on, the units that all rows of a tile see are loaded by tensor descriptors, which the card's copy engine
reads: quicker than by pointers.

The other attention kernels import from here what all of them share: tile loads, logits, a step of the online softmax.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def dot_dtype(*operands: Tensor) -> tl.dtype:
    """The dtype that operands of tl.dot are cast to: the one they share, or fp32 if they differ."""
    dtypes = {x.dtype for x in operands}
    interpreted_bf16 = triton.knobs.runtime.interpret and torch.bfloat16 in dtypes  # its tl.dot reads bf16 as integers
    same = len(dtypes) == 1 and not interpreted_bf16
    return getattr(tl, str(dtypes.pop()).removeprefix("torch.")) if same else tl.float32


def block_dim(dim: int) -> int:
    """Features of a tile: tl.dot takes powers of two from 16 on."""
    return max(16, triton.next_power_of_2(dim))


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
def softmax_step(acc, top, total, logits, v, DOT: tl.constexpr):
    """Adds units with base-2 `logits` [M, N] and values v [N, D] to the running output, maximum and sum of M rows."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that saw nothing yet has weights 0, not NaN
    weights = tl.exp2(logits - safe[:, None])
    kept = tl.exp2(top - safe)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype).to(DOT), v.to(DOT), acc * kept[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def finish(acc, top, total):
    """Output and base-2 log-sum-exp of the rows; 0 and -inf where a row saw nothing."""
    total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def _units(acc, top, total, q, k, v, stride_k, stride_v, ranks, lo, hi, scale, D: tl.constexpr, WINDOW: tl.constexpr,
           SOFTCAP: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds units lo .. hi - 1 to the softmax of a tile of rows, of which some do not see all of them."""
    units = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k += lo.to(tl.int64) * stride_k[1]
    v += lo.to(tl.int64) * stride_v[1]
    for start in range(lo, hi, BLOCK_N):
        keys = load_tile(k, units, dims, stride_k[1], stride_k[2], hi - start, D, True, D < BLOCK_D)
        values = load_tile(v, units, dims, stride_v[1], stride_v[2], hi - start, D, True, D < BLOCK_D)
        products = tl.dot(q.to(DOT), tl.trans(keys.to(DOT)), input_precision="ieee")
        distance = ranks[:, None] - (start + units)[None, :]
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        logits = tl.where(seen, base2_logits(products, scale, SOFTCAP), float("-inf"))
        acc, top, total = softmax_step(acc, top, total, logits, values, DOT)
        k += BLOCK_N * stride_k[1]
        v += BLOCK_N * stride_v[1]
    return acc, top, total


@triton.jit
def _whole_blocks(acc, top, total, q, k, v, all_k, all_v, kv_head, stride_k, stride_v, lo, hi, scale, D: tl.constexpr,
                  SOFTCAP: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  DESCRIBED: tl.constexpr):
    """Adds units lo .. hi - 1, whole blocks that every row of the tile sees."""
    units = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k += lo.to(tl.int64) * stride_k[1]
    v += lo.to(tl.int64) * stride_v[1]
    for start in range(lo, hi, BLOCK_N):
        if DESCRIBED:
            keys = all_k.load([kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
            values = all_v.load([kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            keys = load_tile(k, units, dims, stride_k[1], stride_k[2], hi - start, D, False, D < BLOCK_D)
            values = load_tile(v, units, dims, stride_v[1], stride_v[2], hi - start, D, False, D < BLOCK_D)
            k += BLOCK_N * stride_k[1]
            v += BLOCK_N * stride_v[1]
        products = tl.dot(q.to(DOT), tl.trans(keys.to(DOT)), input_precision="ieee")
        if SOFTCAP > 0:
            acc, top, total = softmax_step(acc, top, total, base2_logits(products, scale, SOFTCAP), values, DOT)
        else:  # the same, where scaling and the difference to the maximum are one operation
            factor = scale * LOG2E
            new_top = tl.maximum(top, tl.max(products, 1) * factor)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(products * factor - safe[:, None])
            kept = tl.exp2(top - safe)
            total = total * kept + tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype).to(DOT), values.to(DOT), acc * kept[:, None], input_precision="ieee")
            top = new_top
    return acc, top, total


@triton.jit
def _prefill(q, k, v, all_k, all_v, sink_logits, out, lse, stride_q, stride_k, stride_v, stride_out, T, N, scale,
             G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr,
             DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             DESCRIBED: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    first = N - T + start  # ranks of the tile's rows: first .. last
    last = tl.minimum(first + BLOCK_M, N) - 1
    ranks = first + rows
    k += head // G * stride_k[0]
    v += head // G * stride_v[0]
    tile = load_tile(q + head * stride_q[0] + start.to(tl.int64) * stride_q[1], rows, dims, stride_q[1], stride_q[2],
                     T - start, D, True, D < BLOCK_D)
    if SINK_LOGITS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits + head).to(tl.float32) * LOG2E
        total = tl.zeros([BLOCK_M], tl.float32) + 1.0
    else:
        top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Blocks begin .. whole straddle the edge of the window, every row sees blocks whole .. diagonal, and the others
    # straddle the diagonal.
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    whole = first * 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, diagonal)
        acc, top, total = _units(acc, top, total, tile, k, v, stride_k, stride_v, ranks, begin, whole, scale, D,
                                 WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D)
    acc, top, total = _whole_blocks(acc, top, total, tile, k, v, all_k, all_v, (head // G).to(tl.int32), stride_k,
                                    stride_v, whole, diagonal, scale, D, SOFTCAP, DOT, BLOCK_N, BLOCK_D, DESCRIBED)
    acc, top, total = _units(acc, top, total, tile, k, v, stride_k, stride_v, ranks, diagonal, last + 1, scale, D,
                             WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D)
    acc, top = finish(acc, top, total)
    inside = rows < T - start
    out += head * stride_out[0] + start.to(tl.int64) * stride_out[1]
    tl.store(out + rows[:, None] * stride_out[1] + dims[None, :] * stride_out[2], acc.to(out.dtype.element_ty),
             mask=inside[:, None] & (dims[None, :] < D))
    tl.store(lse + head * T + start + rows, top * LN2, mask=inside)


def _blocks(dtype: tl.dtype, dim: int, rows: int, heads: int, described: bool) -> dict[str, int]:
    """Block shapes, warps and stages. Those of tall tiles of 16-bit operands of 128 features are the fastest of ten
    that were tried on an H200, the others are reckoned."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    if dtype == tl.float32:  # "ieee" products are FMAs on operands in registers
        values = (16, 16, 4, 2) if dim > 128 else (16, 32, 4, 2) if rows <= 16 else (32, 32, 8, 2)
    elif rows <= 16:
        values = (16, 64, 4, 3) if dim <= 128 else (16, 32, 4, 2)
    elif dim <= 128:  # tall tiles while every SM of an H100 has one
        tall = (128, 128, 8, 3) if described else (128, 64, 8, 3)
        values = tall if triton.cdiv(rows, 128) * heads >= 132 else (64, 64, 4, 3)
    else:
        values = (64, 64, 8, 2) if dim <= 256 else (64, 32, 8, 2)
    return dict(zip(names, values, strict=True))


@functools.cache
def _copy_engine(device: torch.device) -> bool:
    """Whether this card reads tiles by descriptors, and has as much shared memory as an H100, for three stages."""
    if device.type != "cuda":
        return False
    card = torch.cuda.get_device_properties(device)
    return card.major >= 9 and card.shared_memory_per_block_optin >= 227 << 10


def _describable(x: Tensor) -> bool:
    """Whether a descriptor can say where the rows of x [H, N, D] lie."""
    spans = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:2]))
    return (x.stride(2) == 1 and x.shape[1] > 0 and x.shape[2] == block_dim(x.shape[2])
            and not any(span % 16 for span in spans))


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None,
                      softcap: float | None = None, sink_logits: Tensor | None = None, with_lse: bool = True
                      ) -> tuple[Tensor, Tensor | None]:
    """`reference.prefill_attention`; in memory the output is [T, H*G, D]."""
    heads, new, dim = q.shape
    out = q.new_empty(new, heads, dim).transpose(0, 1)
    lse = q.new_empty(heads, new, dtype=torch.float32)
    if scale < 0:  # the kernel takes the maximum before it scales
        q, scale = -q, -scale
    dtype, wide = dot_dtype(q, k, v), block_dim(dim)
    described = k.element_size() == 2 and _copy_engine(k.device) and _describable(k) and _describable(v)
    blocks = _blocks(dtype, wide, new, heads, described)
    tiles = [TensorDescriptor.from_tensor(x, [1, blocks["BLOCK_N"], wide]) for x in (k, v)] if described else [k, v]
    _prefill[heads, triton.cdiv(new, blocks["BLOCK_M"])](
        q, k, v, *tiles, q if sink_logits is None else sink_logits.contiguous(), out, lse, q.stride(), k.stride(),
        v.stride(), out.stride(), new, k.shape[1], scale, G=heads // k.shape[0], D=dim, WINDOW=window or 0,
        SOFTCAP=softcap or 0.0, SINK_LOGITS=sink_logits is not None, DOT=dtype, BLOCK_D=wide, DESCRIBED=described,
        enable_fp_fusion=True, **blocks)
    return out, lse if with_lse else None
