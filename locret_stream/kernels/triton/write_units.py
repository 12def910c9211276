"""One new unit for each of several contexts, into up to three tensors of a layer by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


def write_units(tensors: Sequence[Tensor], units: Sequence[Tensor], slots: Tensor, ranks: Tensor) -> None:
    """`reference.write_units`. No host synchronisation."""
    assert 1 <= len(tensors) == len(units) <= 3, "K, V, and where they are kept rotated keys"
    heads = tensors[0].shape[1]
    more = 3 - len(tensors)
    targets, sources = [*tensors, *[tensors[0]] * more], [*units, *[units[0]] * more]
    strides = [x.stride() for x in targets] + [(x.stride(0), x.stride(1), x.stride(3)) for x in sources]
    dims = {name: size for i, x in enumerate(targets)  # V may have another width than K
            for name, size in ((f"D{i}", x.shape[3]), (f"BLOCK_{i}", triton.next_power_of_2(x.shape[3])))}
    _write[(len(slots), heads)](*targets, *sources, slots.contiguous(), ranks.contiguous(), *strides,
                                COUNT=len(tensors), **dims, num_warps=1)


@triton.jit
def _write(x0, x1, x2, u0, u1, u2, slots, ranks, stride_x0, stride_x1, stride_x2, stride_u0, stride_u1, stride_u2,
           COUNT: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_0: tl.constexpr,
           BLOCK_1: tl.constexpr, BLOCK_2: tl.constexpr):
    """The rows of one context and one head."""
    context = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + context).to(tl.int64)
    rank = tl.load(ranks + context).to(tl.int64)
    _row(x0, u0, stride_x0, stride_u0, context, head, slot, rank, D0, BLOCK_0)
    if COUNT > 1:
        _row(x1, u1, stride_x1, stride_u1, context, head, slot, rank, D1, BLOCK_1)
    if COUNT > 2:
        _row(x2, u2, stride_x2, stride_u2, context, head, slot, rank, D2, BLOCK_2)


@triton.jit
def _row(x, u, stride_x, stride_u, context, head, slot, rank, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    unit = tl.load(u + context * stride_u[0] + head * stride_u[1] + dim * stride_u[2], mask=dim < D)
    tl.store(x + slot * stride_x[0] + head * stride_x[1] + rank * stride_x[2] + dim * stride_x[3], unit, mask=dim < D)
