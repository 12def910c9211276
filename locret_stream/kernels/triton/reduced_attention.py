"""Attention that each unit receives, summed over rows; each program owns its columns, so that none needs atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locret_stream.kernels.triton.tiles import (
    LN2,
    LOG2E,
    base2_logits,
    dot_dtype,
    dot_tiles,
    gather_tiles,
    load_tiles,
    tiles_of,
)


@triton.jit
def _row_lse(q, k, ranks, sink_logits, lse, stride_q, stride_k, R, N, scale, G: tl.constexpr, D: tl.constexpr,
             REST: tl.constexpr, SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr, DOT: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Log-sum-exp of a block of rows of one query head, sink logits included."""
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    units = tl.arange(0, BLOCK_N)
    inside = start + rows < R
    rank = tl.load(ranks + start + rows, mask=inside, other=-1).to(tl.int32)
    hi = tl.minimum(tl.max(rank, 0) + 1, N)  # the block's rows see no unit from there on
    tiles = load_tiles(q + head * stride_q[0] + start.to(tl.int64) * stride_q[1], rows, stride_q[1], stride_q[2],
                       R - start, D, REST, True, BLOCK_D, BLOCK_REST)
    if SINK_LOGITS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_logits + head).to(tl.float32) * LOG2E
        total = tl.zeros([BLOCK_M], tl.float32) + 1.0
    else:
        top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_M], tl.float32)
    k += head // G * stride_k[0]
    for n in range(0, hi, BLOCK_N):
        keys = load_tiles(k, units, stride_k[1], stride_k[2], hi - n, D, REST, True, BLOCK_D, BLOCK_REST)
        logits = base2_logits(dot_tiles(tiles, keys, DOT), scale, SOFTCAP)
        distance = rank[:, None] - (n + units)[None, :]
        seen = (distance >= 0) & (units < hi - n)[None, :]  # ranks may lie beyond the last unit
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
        top = new_top
        k += BLOCK_N * stride_k[1]
    top += tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(lse + head * R + start + rows, top * LN2, mask=inside)


@triton.jit
def _columns(q, k, ranks, lse, sums, stride_q, stride_k, stride_lse, R, N, scale, G: tl.constexpr, D: tl.constexpr,
             REST: tl.constexpr, SOFTCAP: tl.constexpr, ABOVE: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sums over all rows and G heads, for a block of columns of one KV head; ABOVE: counts weights over the mean."""
    start = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    units = tl.arange(0, BLOCK_N)
    # No row outside first .. last - 1 sees these columns. Where ranks are not in order, some inside do not either.
    first = start * 0 + R
    last = start * 0
    for r in range(0, R, BLOCK_R):
        row = r + tl.arange(0, BLOCK_R)
        rank = tl.load(ranks + row, mask=row < R, other=-1).to(tl.int32)
        sees = rank >= start
        first = tl.minimum(first, tl.min(tl.where(sees, row, R), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, row + 1, 0), 0))
    span = tl.maximum(last - first, 0)
    keys = load_tiles(k + head * stride_k[0] + start.to(tl.int64) * stride_k[1], units, stride_k[1], stride_k[2],
                      N - start, D, REST, True, BLOCK_D, BLOCK_REST)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for m in range(0, G * span, BLOCK_M):
        at = m + tl.arange(0, BLOCK_M)
        inside = at < G * span
        query_head = head * G + at // span
        row = (first + at % span).to(tl.int64)
        rank = tl.load(ranks + row, mask=inside, other=-1).to(tl.int32)
        total = tl.load(lse + query_head * stride_lse[0] + row * stride_lse[1], mask=inside, other=0.0) * LOG2E
        total = tl.where(total == float("-inf"), float("inf"), total)  # a row that sees nothing has weights 0, not NaN
        queries = (q + query_head * stride_q[0] + row * stride_q[1])[:, None]
        tiles = gather_tiles(queries, stride_q[2], inside, D, REST, BLOCK_D, BLOCK_REST)
        logits = base2_logits(dot_tiles(keys, tiles, DOT), scale, SOFTCAP)
        distance = rank[None, :] - (start + units)[:, None]
        weights = tl.exp2(tl.where(distance >= 0, logits, float("-inf")) - total[None, :])
        if ABOVE:
            weights = tl.where(weights * tl.minimum(rank + 1, N)[None, :] > 1.0, 1.0, 0.0)
        acc += weights
    tl.store(sums + head * N + start + units, tl.sum(acc, 1), mask=start + units < N)


def _blocks(dtype: tl.dtype, dim: int) -> dict[str, int]:
    """Block shapes, warps and stages: reckoned, and not yet tried against others on a GPU."""
    if dtype == tl.float32:  # "ieee" products are FMAs on operands in registers
        size = 32 if dim <= 128 else 16
        return {"BLOCK_M": size, "BLOCK_N": size, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4 if dim <= 256 else 8, "num_stages": 3 if dim <= 128 else 2}


def reduced_attention(q: Tensor, k: Tensor, scale: float, ranks: Tensor, lse: Tensor | None = None, *,
                      above_mean: bool = False, softcap: float | None = None, sink_logits: Tensor | None = None
                      ) -> Tensor:
    """`reference.reduced_attention`."""
    query_heads, rows, _ = q.shape
    heads, count, _ = k.shape
    dtype, tiles = dot_dtype(q, k), tiles_of(k, k)
    blocks = _blocks(dtype, tiles["BLOCK_D"] + tiles["BLOCK_REST"])
    shared = {"G": query_heads // heads, "SOFTCAP": softcap or 0.0, "DOT": dtype, "enable_fp_fusion": True, **blocks,
              **{name: tiles[name] for name in ("D", "REST", "BLOCK_D", "BLOCK_REST")}}
    ranks = ranks.contiguous()
    if lse is None:
        lse = q.new_empty(query_heads, rows, dtype=torch.float32)
        _row_lse[query_heads, triton.cdiv(rows, blocks["BLOCK_M"])](
            q, k, ranks, q if sink_logits is None else sink_logits.contiguous(), lse, q.stride(), k.stride(), rows,
            count, scale, SINK_LOGITS=sink_logits is not None, **shared)
    sums = q.new_empty(heads, count, dtype=torch.float32)
    _columns[triton.cdiv(count, blocks["BLOCK_N"]), heads](
        q, k, ranks, lse, sums, q.stride(), k.stride(), lse.stride(), rows, count, scale,
        ABOVE=above_mean, BLOCK_R=256, **shared)
    return sums
