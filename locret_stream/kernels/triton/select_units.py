"""Selection of a budget by radix search: scores become ordered integers, whose threshold one program per head finds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # at 16 warps: 8 keys per thread, with three counters each, in 90 registers; others were not tried


def select_units(scores: Tensor, budget: int, sinks: int = 0, stabilizers: int = 0) -> Tensor:
    """`reference.select_units`, bit for bit. The host waits for nothing."""
    heads, count = scores.shape
    if count <= budget:
        return torch.arange(count, device=scores.device).expand(heads, count)
    out = torch.empty(heads, budget, dtype=torch.int64, device=scores.device)
    keys = torch.empty(heads, count, dtype=torch.int32, device=scores.device)
    block = min(_BLOCK, max(256, triton.next_power_of_2(count)))
    blocks = triton.cdiv(count, block)
    _order[(heads * blocks,)](scores, keys, count, blocks, sinks, stabilizers, *scores.stride(), BLOCK=block,
                              enable_fp_fusion=True)
    _select[(heads,)](keys, out, count, budget, BLOCK=block, num_warps=max(4, block // 256),
                     enable_fp_fusion=True)
    return out


@triton.jit(do_not_specialize=["blocks", "sinks", "stabilizers"])
def _order(scores, keys, count, blocks, sinks, stabilizers, stride_h, stride_n, BLOCK: tl.constexpr):
    """Scores -> int32 keys in the order of `order_keys`, but for equal scores; keys of protected units are the highest.

    All steps are in integers, so that it does not matter whether a device flushes subnormals.
    """
    head = (tl.program_id(0) // blocks).to(tl.int64)
    rank = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + head * stride_h + rank.to(tl.int64) * stride_n, mask=rank < count, other=0.0)
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # -0 = +0
    key = tl.where(magnitude > 0x7F800000, -0x80000000, key)  # NaN
    key = tl.where((rank < sinks) | (rank >= count - stabilizers), 0x7FFFFFFF, key)
    tl.store(keys + head * count + rank, key, mask=rank < count)


@triton.jit(do_not_specialize=["budget"])
def _select(keys, out, count, budget, BLOCK: tl.constexpr):
    """Ranks, ascending, of the `budget` highest keys of a head; of equal keys the newest stay."""
    head = tl.program_id(0).to(tl.int64)
    keys += head * count
    out += head * budget
    lane = tl.arange(0, BLOCK)

    # The highest threshold that at least `budget` keys reach, two bits at a time from the top. Three counters per lane
    # take the place of a histogram, whose digits would collide in shared memory. The threshold has 64 bits, as its sums
    # overflow 32.
    threshold = tl.full((), -0x80000000, tl.int64)
    reached = tl.full((), 0, tl.int32) + count
    for level in range(16):
        step = tl.full((), 1, tl.int64) << (30 - 2 * level)
        low, middle, high = threshold + step, threshold + 2 * step, threshold + 3 * step
        low_count = tl.full((BLOCK,), 0, tl.int32)
        middle_count = tl.full((BLOCK,), 0, tl.int32)
        high_count = tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, count, BLOCK):
            key = tl.load(keys + start + lane, mask=start + lane < count, other=-0x80000000)  # below any threshold here
            low_count += (key >= low.to(tl.int32)).to(tl.int32)
            middle_count += (key >= middle.to(tl.int32)).to(tl.int32)
            high_count += (key >= high.to(tl.int32)).to(tl.int32)
        reach_low, reach_middle, reach_high = tl.sum(low_count), tl.sum(middle_count), tl.sum(high_count)
        if reach_high >= budget:
            threshold, reached = high, reach_high
        elif reach_middle >= budget:
            threshold, reached = middle, reach_middle
        elif reach_low >= budget:
            threshold, reached = low, reach_low

    # All keys above the threshold stay, and of those equal to it all but the oldest `excess`.
    excess = reached - budget
    greater_seen = tl.full((), 0, tl.int32)
    equal_seen = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        rank = start + lane
        key = tl.load(keys + rank, mask=rank < count, other=-0x80000000)
        greater = (key > threshold.to(tl.int32)).to(tl.int32)
        equal = ((key == threshold.to(tl.int32)) & (rank < count)).to(tl.int32)
        greater_before = greater_seen + tl.cumsum(greater) - greater
        equal_before = equal_seen + tl.cumsum(equal) - equal
        stays = (greater > 0) | ((equal > 0) & (equal_before >= excess))
        position = greater_before + tl.maximum(equal_before - excess, 0)
        tl.store(out + position, rank.to(tl.int64), mask=stays)
        greater_seen += tl.sum(greater)
        equal_seen += tl.sum(equal)
