"""The numeric specification of every operation, in plain torch. Knows tensors only.

Shapes: H KV heads, G query heads per KV head, N held units, T new tokens, B budget units, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22  # of one block of attention logits; bounds the memory of column_sums


def order_keys(scores: Tensor) -> Tensor:
    """scores [..., N] fp32 -> int64 keys of the same shape, all different: a total order of the units (law 8).

    By score, -0 = +0, NaN below everything; on equal scores the newer unit (higher slab rank) is greater.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # adding +0 turns -0 into +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = ordered.masked_fill(scores.isnan(), torch.iinfo(torch.int32).min)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered.long() << 32) + ranks


def select_units(scores: Tensor, budget: int, sinks: int = 0, stabilizers: int = 0) -> Tensor:
    """Which units stay: scores [H, N] fp32 in time order -> [H, B] int64 slab ranks, ascending.

    The first `sinks` and the last `stabilizers` units stay whatever their score, inside the budget (law 7); the rest
    compete by `order_keys`. N <= budget keeps everything.
    """
    count = scores.shape[-1]
    if count <= budget:
        return torch.arange(count, device=scores.device).expand(*scores.shape[:-1], count)
    keys = order_keys(scores)
    protected = (1 << 63) - 1 - count
    if sinks:
        keys[..., :sinks] = protected
    if stabilizers:
        keys[..., count - stabilizers:] = protected
    return keys.topk(budget, dim=-1, sorted=False).indices.sort(dim=-1).values


def gather_units(x: Tensor, keep: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Move the units `keep` to the front, in place: x [H, N, ...], keep [H, B] int64 ascending -> x[:, :B] (a view).

    Bit-exact: rows move, nothing is rounded. `scratch` is preallocated memory of x's dtype, at least H * B * D.
    """
    heads, budget = keep.shape
    index = keep if x.dim() == 2 else keep[..., None].expand(heads, budget, x.shape[-1])
    out = None if scratch is None else scratch.view(-1)[: index.numel()].view(index.shape)
    moved = torch.gather(x, 1, index, out=out)
    x[:, :budget].copy_(moved)
    return x[:, :budget]


def column_sums(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None, softcap: float | None = None,
                sinks: Tensor | None = None) -> Tensor:
    """Attention that each unit receives: sum over the rows of q of softmax(q k^T * scale), summed over the G heads.

    q [H*G, T, D] and k [H, N, D] after RoPE, mask [T, N] bool (None: causal, ends aligned), `softcap` and `sinks`
    [H*G] as the model has them -> [H, N] fp32. From the row log-sum-exp, in blocks of rows: never a T x N matrix
    of all heads (NaCl, arXiv:2408.03675, Algorithm 2).
    """
    heads, count, dim = k.shape
    new = q.shape[1]
    q = q.reshape(heads, -1, new, dim).float()
    k = k.float()
    if mask is None:
        mask = torch.ones(new, count, dtype=torch.bool, device=q.device).tril(count - new)
    sums = torch.zeros(heads, count, device=q.device)
    rows = max(1, _BLOCK_ELEMENTS // (count * q.shape[0] * q.shape[1]))
    for start in range(0, new, rows):
        part = slice(start, start + rows)
        logits = torch.einsum("hgtd,hnd->hgtn", q[:, :, part], k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~mask[part], float("-inf"))
        log_sum = logits.logsumexp(-1, keepdim=True)
        if sinks is not None:
            log_sum = torch.logaddexp(log_sum, sinks.float().view(heads, -1, 1, 1))
        sums += (logits - log_sum).exp().sum((1, 2))
    return sums
