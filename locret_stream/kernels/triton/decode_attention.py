"""Attention of several contexts, each to its own slot: split-K (flash-decoding), with RoPE applied when keys are read.

The grid depends on shapes alone, and lengths are read on the device, so that a CUDA graph can contain the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locret_stream.kernels.triton.tiles import (
    LOG2E,
    add_tiles,
    base2_logits,
    block_dim,
    dot_dtype,
    dot_tiles,
    finish,
    gather_tiles,
    load_tile,
    load_tiles,
    softmax_step,
    store_tiles,
    tiles_of,
    zero_tiles,
)

_PROGRAMS = 2 * 132  # two for each SM of an H100
_IN_FLIGHT = 100 << 10  # bytes of its shared memory for each of the two


@triton.jit
def _partial(q, keys, values, slots, lengths, firsts, windows, cos, sin, sink_logits, out, lse, stride_q, stride_k,
             stride_v, stride_cos, stride_sin, stride_out, stride_sinks, T, H, scale, G: tl.constexpr, D: tl.constexpr,
             REST: tl.constexpr, V: tl.constexpr, V_REST: tl.constexpr, TIED: tl.constexpr, WINDOW: tl.constexpr,
             OF_EACH: tl.constexpr, FIRSTS: tl.constexpr, SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr,
             ROPE: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_V_REST: tl.constexpr,
             BLOCK_HALF: tl.constexpr):
    """One split of one context's units, for a tile of the G * T rows of one KV head; how units are cut says `tiles_of`.

    WINDOW: of all contexts, 0 for none. OF_EACH: each has its own, in `windows`. FIRSTS: each begins at a row of its
    own, in `firsts`.
    SPLIT: normalized rows and their base-2 log-sum-exp into [A * H*G * T, splits, V + V_REST] and [A * H*G * T,
    splits]; else the result itself.
    """
    split = tl.program_id(0)
    context = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(G * T, BLOCK_M)
    head = (tl.program_id(1) // tiles).to(tl.int64)
    rows = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < G * T
    query_heads = head * G + rows // T
    slot = tl.load(slots + context).to(tl.int64)
    length = tl.load(lengths + context).to(tl.int32)
    ranks = length - T + rows % T
    # The units that some query sees, in equal splits: a short context has as many splits as others, and shorter ones.
    first = length * 0
    if OF_EACH:
        window = tl.load(windows + context).to(tl.int32)
    else:
        window = WINDOW
    if WINDOW > 0 or OF_EACH:
        first = tl.maximum(length - T - window + 1, 0)
    span = tl.cdiv(tl.cdiv(length - first, tl.num_programs(0)), 16) * 16
    lo = first + split * span
    hi = tl.minimum(lo + span, length)

    units = tl.arange(0, BLOCK_N)
    halves = tl.arange(0, BLOCK_HALF)
    HALF: tl.constexpr = D // 2
    q_rows = (q + context * stride_q[0] + query_heads * stride_q[1] + rows % T * stride_q[2])[:, None]
    if ROPE:
        q_at = q_rows + halves[None, :] * stride_q[3]
        q_mask = inside[:, None] & (halves[None, :] < HALF)
        q1 = tl.load(q_at, mask=q_mask, other=0.0).to(DOT)
        q2 = tl.load(q_at + HALF * stride_q[3], mask=q_mask, other=0.0).to(DOT)
        cos += lo.to(tl.int64) * stride_cos[0]
        sin += lo.to(tl.int64) * stride_sin[0]
    else:
        q_tiles = gather_tiles(q_rows, stride_q[3], inside, D, REST, BLOCK_D, BLOCK_REST)
    begin = lo.to(tl.int64)
    if FIRSTS:
        begin += tl.load(firsts + context).to(tl.int64)
    k = keys + slot * stride_k[0] + head * stride_k[1] + begin * stride_k[2]
    v = values + slot * stride_v[0] + head * stride_v[1] + begin * stride_v[2]

    top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINK_LOGITS:  # the first split alone counts them
        counted = rows < tl.where(split == 0, G * T, 0)
        sinks = sink_logits + context * stride_sinks + query_heads
        sink_logit = tl.load(sinks, mask=counted, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, sink_logit * LOG2E)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = zero_tiles(BLOCK_M, BLOCK_V, BLOCK_V_REST)
    for start in range(lo, hi, BLOCK_N):
        left = hi - start
        if not TIED:
            v_tiles = load_tiles(v, units, stride_v[2], stride_v[3], left, V, V_REST, True, BLOCK_V, BLOCK_V_REST)
        if ROPE:
            k1 = load_tile(k, units, halves, stride_k[2], stride_k[3], left, HALF, True, HALF < BLOCK_HALF)
            k2 = load_tile(k + HALF * stride_k[3], units, halves, stride_k[2], stride_k[3], left, HALF, True,
                           HALF < BLOCK_HALF)
            c1 = load_tile(cos, units, halves, stride_cos[0], stride_cos[1], left, HALF, True, HALF < BLOCK_HALF)
            c2 = load_tile(cos + HALF * stride_cos[1], units, halves, stride_cos[0], stride_cos[1], left, HALF, True,
                           HALF < BLOCK_HALF)
            s1 = load_tile(sin, units, halves, stride_sin[0], stride_sin[1], left, HALF, True, HALF < BLOCK_HALF)
            s2 = load_tile(sin + HALF * stride_sin[1], units, halves, stride_sin[0], stride_sin[1], left, HALF, True,
                           HALF < BLOCK_HALF)
            x1 = k1.to(tl.float32)
            x2 = k2.to(tl.float32)
            turned1 = x1 * c1.to(tl.float32) - x2 * s1.to(tl.float32)
            turned2 = x2 * c2.to(tl.float32) + x1 * s2.to(tl.float32)
            products = tl.dot(q1, tl.trans(turned1.to(k1.dtype).to(DOT)), input_precision="ieee")
            products = tl.dot(q2, tl.trans(turned2.to(k2.dtype).to(DOT)), products, input_precision="ieee")
            cos += BLOCK_N * stride_cos[0]
            sin += BLOCK_N * stride_sin[0]
        else:
            k_tiles = load_tiles(k, units, stride_k[2], stride_k[3], left, D, REST, True, BLOCK_D, BLOCK_REST)
            products = dot_tiles(q_tiles, k_tiles, DOT)
            if TIED:
                v_tiles = k_tiles
        distance = ranks[:, None] - (start + units)[None, :]
        seen = (distance >= 0) & (units < left)[None, :]
        if WINDOW > 0 or OF_EACH:
            seen = seen & (distance < window)
        logits = tl.where(seen, base2_logits(products, scale, SOFTCAP), float("-inf"))
        weights, kept, top, total = softmax_step(top, total, logits)
        acc = add_tiles(acc, kept, weights, v_tiles, DOT)
        k += BLOCK_N * stride_k[2]
        v += BLOCK_N * stride_v[2]
    acc, top = finish(acc, top, total)

    if SPLIT:
        at = ((context * H + head) * (G * T) + rows) * tl.num_programs(0) + split
        # Rows that saw nothing stay unwritten, and `_combine` does not read them, as their log-sum-exp is -inf.
        written = inside & (top > float("-inf"))
        store_tiles(out, at * (V + V_REST), 1, acc, written, V, V_REST, BLOCK_V, BLOCK_V_REST)
        tl.store(lse + at, top, mask=inside)
    else:
        at = context * stride_out[0] + query_heads * stride_out[1] + rows % T * stride_out[2]
        store_tiles(out, at, stride_out[3], acc, inside, V, V_REST, BLOCK_V, BLOCK_V_REST)


@triton.jit
def _combine(partial, lse, out, stride_out, T, HEADS, SPLITS, D: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_S: tl.constexpr, CHUNK: tl.constexpr):
    """One row of the output: the sum of its splits, weighted by their log-sum-exps."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BLOCK_S)
    sums = tl.load(lse + row * SPLITS + every, mask=every < SPLITS, other=float("-inf"))
    top = tl.max(sums, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(sums - top), 0)
    total = tl.where(total == 0.0, 1.0, total)
    chunk = tl.arange(0, CHUNK)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        at = row * SPLITS + start + chunk
        some = tl.load(lse + at, mask=start + chunk < SPLITS, other=float("-inf"))
        written = (some > float("-inf"))[:, None] & (dims < D)[None, :]
        tile = tl.load(partial + at[:, None] * D + dims[None, :], mask=written, other=0.0)
        acc += tl.sum(tl.exp2(some - top)[:, None] * tile, 0)
    context = row // (HEADS * T)
    at = context * stride_out[0] + row // T % HEADS * stride_out[1] + row % T * stride_out[2]
    tl.store(out + at + dims * stride_out[3], (acc / total).to(out.dtype.element_ty), mask=dims < D)


def _blocks(dtype: tl.dtype, rows: int, dim: int, unit_bytes: int) -> dict[str, int]:
    """Rows and units of a block, warps and stages, where there are `rows`, a row of the output has `dim` features in
    tiles, and one unit takes `unit_bytes` of shared memory.

    Reckoned, and not yet tried against others on a GPU: the output is in registers, 128 of each thread where 64 rows of
    256 features have 4 warps, or of 512 features 8.
    """
    most, tall = 64, 64
    if dtype == tl.float32:  # "ieee" products are FMAs on operands in registers
        most, tall = (32, 64) if dim <= 128 else (16, 64) if dim <= 256 else (16, 16)
    rows = min(tall, max(16, triton.next_power_of_2(rows)))
    count = max(16, min(most, _IN_FLIGHT // (2 * unit_bytes) // 16 * 16))
    count = 1 << count.bit_length() - 1
    return {"BLOCK_M": rows, "BLOCK_N": count, "num_warps": 4 if rows * dim <= 64 * 256 else 8,
            "num_stages": 3 if 2 * count * unit_bytes <= _IN_FLIGHT else 2}


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float, *,
                     firsts: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
                     window: int | Tensor | None = None, softcap: float | None = None,
                     sink_logits: Tensor | None = None) -> Tensor:
    """`reference.decode_attention`."""
    contexts, query_heads, new, _ = q.shape
    heads, capacity = keys.shape[1:3]
    group, dim = query_heads // heads, values.shape[3]
    out = torch.empty_like(q) if dim == q.shape[3] else q.new_empty(contexts, new, query_heads, dim).transpose(1, 2)
    rope = cos is not None and sin is not None
    dtype, tiles = dot_dtype(q, keys, values), tiles_of(keys, values, whole=rope)
    wide, wide_v = tiles["BLOCK_D"] + tiles["BLOCK_REST"], tiles["BLOCK_V"] + tiles["BLOCK_V_REST"]
    loaded = keys.element_size() + (cos.element_size() + sin.element_size() if rope else 0)
    unit_bytes = wide * loaded + (0 if tiles["TIED"] else wide_v * values.element_size())
    blocks = _blocks(dtype, group * new, max(wide, wide_v), unit_bytes)
    rows = heads * triton.cdiv(group * new, blocks["BLOCK_M"])
    most = triton.cdiv(capacity, blocks["BLOCK_N"])
    programs = _PROGRAMS * 4 // blocks["num_warps"]  # one of 8 warps takes an SM for itself
    splits = max(1, min(most, triton.cdiv(programs, max(1, contexts * rows))))
    if splits > 1:
        partial = q.new_empty(contexts * query_heads * new, splits, dim, dtype=torch.float32)
        lse = q.new_empty(contexts * query_heads * new, splits, dtype=torch.float32)
    else:
        partial = lse = out
    if not rope:
        cos = sin = q  # not read
    of_each = isinstance(window, Tensor)
    windows, one = (window.contiguous(), 0) if isinstance(window, Tensor) else (lengths, window or 0)
    sinks = q if sink_logits is None else sink_logits.contiguous()
    _partial[splits, rows, contexts](
        q, keys, values, slots.contiguous(), lengths.contiguous(), lengths if firsts is None else firsts.contiguous(),
        windows, cos, sin, sinks, partial, lse, q.stride(), keys.stride(), values.stride(), cos.stride(), sin.stride(),
        out.stride(), sinks.stride(0) if sink_logits is not None and sinks.dim() == 2 else 0, new, heads, scale,
        G=group, WINDOW=one, OF_EACH=of_each, FIRSTS=firsts is not None, SOFTCAP=softcap or 0.0,
        SINK_LOGITS=sink_logits is not None, ROPE=rope, SPLIT=splits > 1, DOT=dtype,
        BLOCK_HALF=block_dim(tiles["D"] // 2), enable_fp_fusion=True, **tiles, **blocks)
    if splits > 1:
        _combine[(contexts * query_heads * new,)](
            partial, lse, out, out.stride(), new, query_heads, splits, D=dim, BLOCK_D=block_dim(dim),
            BLOCK_S=triton.next_power_of_2(splits), CHUNK=16, num_warps=4, enable_fp_fusion=True)
    return out
