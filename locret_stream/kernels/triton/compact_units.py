"""Compaction of a slot: rows are gathered into scratch as integers, so that no bit of any dtype can change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_TILE = 2048  # integers that one program moves at a time


def compact_units(tensors: Sequence[Tensor], keep: Tensor, scratch: Tensor) -> None:
    """`reference.compact_units`, NaN payloads included, by two launches for each tensor. The host waits for nothing."""
    heads, budget = keep.shape
    for x in tensors:
        rows = x.view(*x.shape[:2], x.shape[2:].numel())
        assert rows.stride(2) == 1 or rows.shape[2] == 1, "rows are contiguous"
        row_bytes = rows.shape[2] * x.element_size()
        if not keep.numel() * row_bytes:
            continue
        word = _word(rows, scratch)
        rows = rows.view(_WORDS[word])
        width = row_bytes // word
        out = scratch[:keep.numel() * row_bytes].view(rows.dtype).view(heads, budget, width)
        columns = min(256, triton.next_power_of_2(width))
        tile_rows = min(_TILE // columns, triton.next_power_of_2(budget))
        _gather[(heads * triton.cdiv(budget, tile_rows),)](
            rows, keep, out, budget, width, rows.stride(0), rows.stride(1), *keep.stride(), ROWS=tile_rows,
            COLUMNS=columns, enable_fp_fusion=True)
        rows[:, :budget].copy_(out)


def _word(rows: Tensor, scratch: Tensor) -> int:
    """Bytes of the widest integer that divides and aligns rows [H, N, D], in their tensor and in scratch."""
    size = rows.element_size()
    spans = (rows.data_ptr(), scratch.data_ptr(), *(n * size for n in (rows.shape[2], rows.stride(0), rows.stride(1))))
    return next(word for word in _WORDS if not any(span % word for span in spans))


@triton.jit
def _gather(rows, keep, out, budget, width, stride_h, stride_n, keep_stride_h, keep_stride_b, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):
    """out[h, i] = rows[h, keep[h, i]]; each program moves ROWS rows of one head."""
    blocks = tl.cdiv(budget, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    rank = tl.load(keep + head * keep_stride_h + row * keep_stride_b, mask=row < budget, other=0)
    source = rows + head * stride_h + rank * stride_n
    target = out + (head * budget + row) * width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < budget)[:, None] & (column < width)[None, :]
        words = tl.load(source[:, None] + column[None, :], mask=mask)
        tl.store(target[:, None] + column[None, :], words, mask=mask)
