"""Attention of a chunk to its slot, as in FlashAttention-2 (arXiv:2307.08691), with logits in base 2.

From Hopper on, the units that all rows of a tile see are loaded by tensor descriptors, which the card's copy engine
reads: quicker than by pointers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from locret_stream.kernels.triton.tiles import (
    LN2,
    LOG2E,
    ONE_TILE,
    add_tiles,
    base2_logits,
    block_dim,
    dot_dtype,
    dot_tiles,
    finish,
    load_tiles,
    softmax_step,
    store_tiles,
    tiles_of,
    zero_tiles,
)


@triton.jit
def _units(acc, top, total, q, k, v, stride_k, stride_v, ranks, lo, hi, scale, D: tl.constexpr, REST: tl.constexpr,
           V: tl.constexpr, V_REST: tl.constexpr, TIED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
           DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
           BLOCK_V: tl.constexpr, BLOCK_V_REST: tl.constexpr):
    """Adds units lo .. hi - 1 to the softmax of a tile of rows, of which some do not see all of them."""
    units = tl.arange(0, BLOCK_N)
    k += lo.to(tl.int64) * stride_k[1]
    v += lo.to(tl.int64) * stride_v[1]
    for start in range(lo, hi, BLOCK_N):
        keys = load_tiles(k, units, stride_k[1], stride_k[2], hi - start, D, REST, True, BLOCK_D, BLOCK_REST)
        if TIED:
            values = keys
        else:
            values = load_tiles(v, units, stride_v[1], stride_v[2], hi - start, V, V_REST, True, BLOCK_V,
                                BLOCK_V_REST)
        products = dot_tiles(q, keys, DOT)
        distance = ranks[:, None] - (start + units)[None, :]
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        logits = tl.where(seen, base2_logits(products, scale, SOFTCAP), float("-inf"))
        weights, kept, top, total = softmax_step(top, total, logits)
        acc = add_tiles(acc, kept, weights, values, DOT)
        k += BLOCK_N * stride_k[1]
        v += BLOCK_N * stride_v[1]
    return acc, top, total


@triton.jit
def _whole_blocks(acc, top, total, q, k, v, all_k, all_v, kv_head, stride_k, stride_v, lo, hi, scale, D: tl.constexpr,
                  REST: tl.constexpr, V: tl.constexpr, V_REST: tl.constexpr, TIED: tl.constexpr, SOFTCAP: tl.constexpr,
                  DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
                  BLOCK_V: tl.constexpr, BLOCK_V_REST: tl.constexpr, DESCRIBED: tl.constexpr):
    """Adds units lo .. hi - 1, whole blocks that every row of the tile sees."""
    units = tl.arange(0, BLOCK_N)
    k += lo.to(tl.int64) * stride_k[1]
    v += lo.to(tl.int64) * stride_v[1]
    for start in range(lo, hi, BLOCK_N):
        if DESCRIBED:
            keys = (all_k.load([kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D),)
            values = (all_v.load([kv_head, start, 0]).reshape(BLOCK_N, BLOCK_V),)
        else:
            keys = load_tiles(k, units, stride_k[1], stride_k[2], hi - start, D, REST, False, BLOCK_D, BLOCK_REST)
            if TIED:
                values = keys
            else:
                values = load_tiles(v, units, stride_v[1], stride_v[2], hi - start, V, V_REST, False, BLOCK_V,
                                    BLOCK_V_REST)
            k += BLOCK_N * stride_k[1]
            v += BLOCK_N * stride_v[1]
        products = dot_tiles(q, keys, DOT)
        if SOFTCAP > 0:
            weights, kept, top, total = softmax_step(top, total, base2_logits(products, scale, SOFTCAP))
        else:  # the same, where scaling and the difference to the maximum are one operation
            factor = scale * LOG2E
            new_top = tl.maximum(top, tl.max(products, 1) * factor)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(products * factor - safe[:, None])
            kept = tl.exp2(top - safe)
            total = total * kept + tl.sum(weights, 1)
            top = new_top
        acc = add_tiles(acc, kept, weights, values, DOT)
    return acc, top, total


@triton.jit
def _prefill(q, k, v, all_k, all_v, sink_logits, out, lse, stride_q, stride_k, stride_v, stride_out, T, N, scale,
             G: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, V: tl.constexpr, V_REST: tl.constexpr,
             TIED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr,
             DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_V_REST: tl.constexpr, DESCRIBED: tl.constexpr):
    """A tile of rows of one query head; how its units are cut says `tiles_of`."""
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    first = N - T + start  # ranks of the tile's rows: first .. last
    last = tl.minimum(first + BLOCK_M, N) - 1
    ranks = first + rows
    k += head // G * stride_k[0]
    v += head // G * stride_v[0]
    tiles = load_tiles(q + head * stride_q[0] + start.to(tl.int64) * stride_q[1], rows, stride_q[1], stride_q[2],
                       T - start, D, REST, True, BLOCK_D, BLOCK_REST)
    if SINK_LOGITS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits + head).to(tl.float32) * LOG2E
        total = tl.zeros([BLOCK_M], tl.float32) + 1.0
    else:
        top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tiles(BLOCK_M, BLOCK_V, BLOCK_V_REST)
    if BLOCK_D > 256 or BLOCK_V > 256:  # one loop for all: several would need more registers than there are
        begin = first * 0
        if WINDOW > 0:
            begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _units(acc, top, total, tiles, k, v, stride_k, stride_v, ranks, begin, last + 1, scale, D,
                                 REST, V, V_REST, TIED, WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_V,
                                 BLOCK_V_REST)
    else:
        # Blocks begin .. whole straddle the edge of the window, every row sees blocks whole .. diagonal, and the
        # others straddle the diagonal.
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        whole = first * 0
        if WINDOW > 0:
            begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            whole = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, diagonal)
            acc, top, total = _units(acc, top, total, tiles, k, v, stride_k, stride_v, ranks, begin, whole, scale, D,
                                     REST, V, V_REST, TIED, WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_V,
                                     BLOCK_V_REST)
        acc, top, total = _whole_blocks(acc, top, total, tiles, k, v, all_k, all_v, (head // G).to(tl.int32), stride_k,
                                        stride_v, whole, diagonal, scale, D, REST, V, V_REST, TIED, SOFTCAP, DOT,
                                        BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_V, BLOCK_V_REST, DESCRIBED)
        acc, top, total = _units(acc, top, total, tiles, k, v, stride_k, stride_v, ranks, diagonal, last + 1, scale, D,
                                 REST, V, V_REST, TIED, WINDOW, SOFTCAP, DOT, BLOCK_N, BLOCK_D, BLOCK_REST, BLOCK_V,
                                 BLOCK_V_REST)
    acc, top = finish(acc, top, total)
    inside = rows < T - start
    out += head * stride_out[0] + start.to(tl.int64) * stride_out[1]
    store_tiles(out, rows * stride_out[1], stride_out[2], acc, inside, V, V_REST, BLOCK_V, BLOCK_V_REST)
    tl.store(lse + head * T + start + rows, top * LN2, mask=inside)


def _blocks(dtype: tl.dtype, tiles: dict[str, int], rows: int, heads: int, described: bool) -> dict[str, int]:
    """Block shapes, warps and stages. Those of tall tiles of 16-bit operands of 128 features are the fastest of ten
    that were tried on an H200, the others are reckoned: the output is in registers, 128 of each thread where 64 rows of
    512 features have 8 warps, and queries and the units of all stages in shared memory, 180 KiB for latents of 576."""
    names, dim = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), max(tiles["BLOCK_D"], tiles["BLOCK_V"])
    tall = triton.cdiv(rows, 128) * heads >= 132  # every SM of an H100 has one
    if dtype == tl.float32:  # "ieee" products are FMAs on operands in registers
        values = (16, 16, 4, 2) if dim > 128 else (16, 32, 4, 2) if rows <= 16 else (32, 32, 8, 2)
    elif rows <= 16:
        values = (16, 64, 4, 3) if dim <= 128 else (16, 32, 4, 2)
    elif dim <= 128:
        values = (128, 128 if described else 64, 8, 3) if tall else (64, 64, 4, 3)
    elif dim <= 256:
        values = (128, 64, 8, 2) if tall and tiles["BLOCK_V"] <= 128 else (64, 64, 8, 2)
    else:
        values = (64, 32, 8, 3 if tiles["TIED"] else 2)
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
    return (x.stride(2) == 1 and x.shape[1] > 0 and x.shape[2] == block_dim(x.shape[2]) <= ONE_TILE
            and not any(span % 16 for span in spans))


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None,
                      softcap: float | None = None, sink_logits: Tensor | None = None, with_lse: bool = True
                      ) -> tuple[Tensor, Tensor | None]:
    """`reference.prefill_attention`; in memory the output is [T, H*G, D]."""
    heads, new, _ = q.shape
    out = q.new_empty(new, heads, v.shape[2]).transpose(0, 1)
    lse = q.new_empty(heads, new, dtype=torch.float32)
    if scale < 0:  # the kernel takes the maximum before it scales
        q, scale = -q, -scale
    dtype, tiles = dot_dtype(q, k, v), tiles_of(k, v)
    described = (k.element_size() == 2 and not tiles["TIED"] and _copy_engine(k.device)
                 and _describable(k) and _describable(v))
    blocks = _blocks(dtype, tiles, new, heads, described)
    all_k, all_v = [TensorDescriptor.from_tensor(x, [1, blocks["BLOCK_N"], x.shape[2]]) for x in (k, v)
                    ] if described else (k, v)
    _prefill[heads, triton.cdiv(new, blocks["BLOCK_M"])](
        q, k, v, all_k, all_v, q if sink_logits is None else sink_logits.contiguous(), out, lse, q.stride(), k.stride(),
        v.stride(), out.stride(), new, k.shape[1], scale, G=heads // k.shape[0], WINDOW=window or 0,
        SOFTCAP=softcap or 0.0, SINK_LOGITS=sink_logits is not None, DOT=dtype, DESCRIBED=described,
        enable_fp_fusion=True, **tiles, **blocks)
    return out, lse if with_lse else None
