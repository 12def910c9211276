"""The numeric specification of every operation, in plain torch. Knows tensors only.

Shapes: H KV heads, G query heads per KV head, N units, T new tokens, R query rows, B budget units, D head dim,
S slots of capacity C. Query head h belongs to KV head h // G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locret_stream.budgets import group_of

CODES = (8, 4, 2, 1)  # bits of a channel that rows of codes are made for
_BLOCK_ELEMENTS = 1 << 22  # attention logits computed at once: bounds the memory of `attention`, `reduced_attention`


def order_keys(scores: Tensor) -> Tensor:
    """scores [..., N] fp32 in time order -> int64 keys of the same shape, all different: a total order (law 8).

    Keys order by score, where -0 = +0 and NaN is below everything; of equal scores the newer unit's key is greater.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # adding +0 turns -0 into +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = ordered.masked_fill(scores.isnan(), torch.iinfo(torch.int32).min)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered.long() << 32) + ranks


def competing_keys(scores: Tensor, sinks: int, stabilizers: int) -> Tensor:
    """`order_keys`, with the first `sinks` and the last `stabilizers` units above all others; still all different."""
    count = scores.shape[-1]
    keys = order_keys(scores)
    if sinks + stabilizers:
        above = torch.arange(count, device=keys.device) + ((1 << 63) - 1 - count)
        for part in (slice(sinks), slice(count - stabilizers, count)):
            keys[..., part] = above[part]
    return keys


def select_units(scores: Tensor, budget: int, sinks: int = 0, stabilizers: int = 0) -> Tensor:
    """The units that stay: scores [H, N] fp32 in time order -> [H, B] int64 ranks, ascending.

    The first `sinks` and the last `stabilizers` units stay whatever their score, inside the budget (law 7); the others
    compete by `order_keys`. All units stay where N <= budget.
    """
    count = scores.shape[-1]
    if count <= budget:
        return torch.arange(count, device=scores.device).expand(*scores.shape[:-1], count)
    keys = competing_keys(scores, sinks, stabilizers)
    return keys.topk(budget, dim=-1, sorted=False).indices.sort(dim=-1).values


def select_by_threshold(scores: Sequence[Tensor], units: int, least: int, most: int, sinks: int = 0,
                        stabilizers: int = 0) -> list[Tensor]:
    """The units that stay where the H heads of a layer compete for its units: scores, H of [N_h] fp32 in time order, of
    which `units` of all heads together stay -> ascending ranks int64 of each head, at least `least` of a head (or all
    that it has) and at most `most` (AdaKV, arXiv:2407.11550, section 4: the best of all heads, and a floor for each).

    The first `sinks` and the last `stabilizers` units of every head stay whatever their score; `least` has room for
    them. Of equal scores the unit of the higher rank stays, and of two heads' the first one's.
    """
    longest = max(map(len, scores))
    keys = torch.full((len(scores), longest), torch.iinfo(torch.int64).min, device=scores[0].device)
    for head, of_head in enumerate(scores):
        keys[head, :len(of_head)] = competing_keys(of_head, sinks, stabilizers)
    order = keys.argsort(dim=-1, descending=True)
    at = torch.arange(longest, device=keys.device).expand_as(keys)
    place = torch.empty_like(order).scatter_(1, order, at)  # of each unit among those of its head, the best at 0
    held = torch.tensor([len(of_head) for of_head in scores], device=keys.device)[:, None]
    allowed = (at < held) & (place < most)
    sure = allowed & (place < least)
    rest = max(0, min(units, int(held.clamp(max=most).sum())) - int(sure.sum()))
    rival = keys.masked_fill(~allowed | sure, torch.iinfo(torch.int64).min).flatten()
    sure.view(-1)[rival.sort(descending=True, stable=True).indices[:rest]] = True
    return [row.nonzero()[:, 0] for row in sure]


def slot_units(pool: Tensor, slot: int, first: int, stop: int) -> Tensor:
    """pool[slot, :, first:stop] of [S, H, C, D], as a view [1, H, stop - first, D] that takes one operation to make."""
    strides = pool.stride()
    return pool.as_strided((1, pool.shape[1], stop - first, pool.shape[3]), strides,
                           pool.storage_offset() + slot * strides[0] + first * strides[2])


def compact_units(tensors: Sequence[Tensor], keep: Tensor, scratch: Tensor) -> None:
    """Move the units `keep` to the front of every tensor, in place: x[h, i] = old x[h, keep[h, i]] for i < B.

    Rows move bit for bit. Rows B and up are left undefined.

    Args:
        tensors: [H, N, ...] of any dtypes, with contiguous rows, such as views into a pool.
        keep: [H, B] int64, ascending in every head.
        scratch: uint8, at least the bytes of [H, B, ...] of the largest tensor.
    """
    for x in tensors:
        rows = x if x.dim() > 2 else x[..., None]
        out = scratch[:keep.numel() * rows.shape[-1] * x.element_size()].view(x.dtype)
        out = out.view(*keep.shape, rows.shape[-1])
        torch.gather(rows, 1, keep[..., None].expand_as(out), out=out)
        rows[:, :keep.shape[1]].copy_(out)


def quantise_units(x: Tensor, bits: int, mean: Tensor | None = None) -> Tensor:
    """Rows of codes: x [..., D] -> uint8 [..., row_bytes(D, bits)].

    Every row is rounded for itself, so that rows can be moved and never have to be rounded again (law 5). A row has its
    groups of channels one after another, and a group its codes, the first channel in the lowest bits of the first byte,
    then scale and zero, fp16 each, or at 8 bits fp32: channel = code * scale + zero. Codes are rounded against the
    scale and the zero as they are stored; the least and the greatest channel of a group get the first and the last
    code. It is the layout of torch's quantised embeddings, a group in place of a row.

    At 1 bit the two codes stand for the middles of the lower and the upper half of a group's range, and not for its
    ends: scale = (max - min) / 2, zero = (3 min + max) / 4 (SpeCache, arXiv:2503.16163, section 3.4).

    Args:
        bits: of a code, one of `CODES`.
        mean: [..., D] fp32, subtracted before. Keys whose channels lie far from 0 lose their differences without it.
    """
    x = x.float() if mean is None else x.float() - mean
    size, most, stored = group_of(x.shape[-1], bits), 2**bits - 1, _stored(bits)
    groups = x.unflatten(-1, (-1, size))
    least, greatest = groups.aminmax(dim=-1, keepdim=True)
    # So that neither code * scale nor its sum with zero is infinite, where a channel is.
    limit, steepest = (2.0**127, 2.0**119) if stored == torch.float32 else (torch.finfo(stored).max,) * 2
    parts = most if bits > 1 else 2
    scale = ((greatest / parts - least / parts).clamp(max=steepest)).to(stored)
    if stored == torch.float32:  # to 16 bits, so that code * scale is exact
        scale = ((scale.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    zero = (least if bits > 1 else 0.75 * least + 0.25 * greatest).clamp(-limit, limit).to(stored)
    steps = (groups - zero.float()) / scale.float().masked_fill(scale == 0, 1.0)
    codes = steps.round().clamp(0, most).nan_to_num(0).to(torch.uint8)
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=x.device, dtype=torch.uint8) * bits
    packed = (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scale.view(torch.uint8), zero.view(torch.uint8)], dim=-1).flatten(-2)


def dequantise_units(rows: Tensor, bits: int, out: Tensor, mean: Tensor | None = None) -> Tensor:
    """What `quantise_units` made, again as channels: rows uint8 [H, N, row_bytes(D, bits)] -> out [H, N, D].

    code * scale is exact in fp32, so that every implementation gives the same bits: it is rounded where zero is added,
    where `mean` [H, 1, D] fp32 is, and to the dtype of `out`.
    """
    per_byte, width = 8 // bits, _stored(bits).itemsize
    groups = rows.unflatten(-1, (-1, group_of(out.shape[-1], bits) * bits // 8 + 2 * width))
    shifts = torch.arange(per_byte, device=rows.device, dtype=torch.uint8) * bits
    codes = ((groups[..., :-2 * width, None] >> shifts) & (2**bits - 1)).flatten(-2).float()
    scale, zero = (groups[..., part].clone(memory_format=torch.contiguous_format).view(_stored(bits)).float()
                   for part in (slice(-2 * width, -width), slice(-width, None)))
    channels = (codes * scale + zero).flatten(-2)
    return out.copy_(channels if mean is None else channels + mean)


def _stored(bits: int) -> torch.dtype:
    """The dtype of the scale and the zero of a group of codes."""
    return torch.float32 if bits == 8 else torch.float16


def score_units(q: Tensor, k: Tensor, v: Tensor, fc1: Tensor, fc2: Tensor, act: Callable[[Tensor], Tensor],
                bias1: Tensor | None = None, bias2: Tensor | None = None) -> Tensor:
    """Scores of a retaining head: act([q; k; v] fc1^T + bias1) fc2^T + bias2 (Locret, arXiv:2410.01805, section 3.2).

    q [H*G, T, D], k and v [H, T, D] before RoPE; fc1 [W, (H*G + 2*H) * D] over the features of q, then k, then v, head
    by head; fc2 [H, W] -> [H, T] fp32. The first product runs in the dtype of the weights, the second in fp32.
    """
    x = torch.cat([t.transpose(0, 1).flatten(1) for t in (q, k, v)], dim=-1).to(fc1.dtype)
    return project(act(torch.nn.functional.linear(x, fc1, bias1)), fc2, bias2)


def project(hidden: Tensor, fc2: Tensor, bias2: Tensor | None) -> Tensor:
    """hidden [..., T, W] after the activation -> [..., H, T], in fp32."""
    bias = None if bias2 is None else bias2.float()
    return torch.nn.functional.linear(hidden.float(), fc2.float(), bias).transpose(-1, -2)


def write_units(tensors: Sequence[Tensor], units: Sequence[Tensor], slots: Tensor, ranks: Tensor) -> None:
    """Write units[i] [A, H, 1, D] into tensors[i] [S, H, C, D], each at its slot and its rank there: slots, ranks [A].

    Contexts that share slot and rank must have the same units: a CUDA graph pads its batch by repeating the first one.
    """
    for x, new in zip(tensors, units, strict=True):
        x[slots, :, ranks] = new[:, :, 0]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """RoPE: x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of x [..., D]; cos and sin broadcast to x.

    `out`: a tensor that takes the result and shares no memory with x.
    """
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, ranks: Tensor, *, window: int | None = None,
              softcap: float | None = None, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention of one context, in fp32: row r of q sees the units of rank ranks[r] - window + 1 to ranks[r].

    Args:
        q, k, v: [H*G, R, D] and [H, N, D] after RoPE, [H, N, D].
        ranks: [R] int64.
        window: None: a row sees all units from rank 0 on.
        softcap: logits become softcap * tanh(logits / softcap).
        sink_logits: [H*G], an extra logit of each query head in the softmax's denominator.

    Returns:
        [H*G, R, D] of q's dtype, and the log-sum-exp of the rows [H*G, R] fp32, sink logits included.
    """
    count = k.shape[1]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = max(1, _BLOCK_ELEMENTS // (count * q.shape[0]))
    for start in range(0, q.shape[1], rows):
        part = slice(start, start + rows)
        logits = masked_logits(q[:, part], k, scale, ranks[part], window=window, softcap=softcap)
        total = log_sum(logits, sink_logits)
        weights = (logits - total[..., None]).exp()
        out[:, part] = torch.einsum("hgrn,hnd->hgrd", weights, v.float()).flatten(0, 1).to(q.dtype)
        lse[:, part] = total.flatten(0, 1)
    return out, lse


def masked_logits(q: Tensor, k: Tensor, scale: float, ranks: Tensor, *, window: int | None,
                  softcap: float | None, bias: Tensor | None = None) -> Tensor:
    """Logits [H, G, R, N] fp32 of q [H*G, R, D] and k [H, N, D], with a bias [H*G, R, N] added; -inf where a row does
    not see a unit."""
    heads, count, dim = k.shape
    logits = torch.einsum("hgrd,hnd->hgrn", q.float().view(heads, -1, q.shape[1], dim), k.float()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.float().reshape(logits.shape)
    distance = ranks[:, None] - torch.arange(count, device=q.device)
    return logits.masked_fill((distance < 0) | (distance >= (window or count + 1)), float("-inf"))


def log_sum(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Log-sum-exp [H, G, R] of logits [H, G, R, N], with the extra logit `sink_logits` of each query head, [H*G], or of
    each of its rows, [H*G, R]."""
    total = logits.logsumexp(-1)
    return total if sink_logits is None else torch.logaddexp(total, sink_logits.float().view(*logits.shape[:2], -1))


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None,
                      softcap: float | None = None, sink_logits: Tensor | None = None, with_lse: bool = True
                      ) -> tuple[Tensor, Tensor | None]:
    """`attention` of a chunk to its slot, of whose N units the last T are the chunk's: its rows have ranks N-T .. N-1.

    q [H*G, T, D], k and v [H, N, D], q and k after RoPE -> [H*G, T, D], log-sum-exp [H*G, T] fp32. Where nobody needs
    the latter (`with_lse=False`) it is None, and there may be a quicker way.
    """
    count, new = k.shape[1], q.shape[1]
    ranks = torch.arange(count - new, count, device=q.device)
    out, lse = attention(q, k, v, scale, ranks, window=window, softcap=softcap, sink_logits=sink_logits)
    return out, lse if with_lse else None


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float, *,
                     firsts: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
                     window: int | Tensor | None = None, softcap: float | None = None,
                     sink_logits: Tensor | None = None) -> Tensor:
    """`attention` of the T newest tokens of each of A contexts, each to its own slot, which holds their units already.

    Args:
        q: [A, H*G, T, D] after RoPE.
        keys, values: [S, H, C, D], all slots of a layer.
        slots: [A] int64, the slot of each context.
        lengths: [A] int64, the units that a context's last query sees: query t of T sees lengths - T + t + 1.
        firsts: [A] int64, the row of each context's first unit in its slot; None: row 0.
        cos, sin: [C', D], C' >= C: keys are stored before RoPE and are rotated by halves at their rank when they are
            read. None: keys are stored after RoPE.
        window, softcap, sink_logits: as for `attention`; a window may be of each context, [A] int64, and so may sink
            logits, [A, H*G].

    Returns:
        [A, H*G, T, D] of q's dtype.
    """
    out = q.new_empty(*q.shape[:3], values.shape[-1])
    new = q.shape[2]
    starts = [0] * len(q) if firsts is None else firsts.tolist()
    for a, (slot, first, length, seen) in enumerate(zip(slots.tolist(), starts, lengths.tolist(),
                                                        of_each(window, len(q)), strict=True)):
        k, v = keys[slot, :, first:first + length], values[slot, :, first:first + length]
        if cos is not None:
            assert sin is not None, "cos and sin come together"
            k = rotate_halves(k.float(), cos[:length].float(), sin[:length].float()).to(k.dtype)
        ranks = torch.arange(length - new, length, device=q.device)
        sinks = sink_logits if sink_logits is None or sink_logits.dim() == 1 else sink_logits[a]
        out[a] = attention(q[a], k, v, scale, ranks, window=seen, softcap=softcap, sink_logits=sinks)[0]
    return out


def of_each(window: int | Tensor | None, contexts: int) -> list[int | None]:
    """The window of each of A contexts."""
    return window.tolist() if isinstance(window, Tensor) else [window] * contexts


def reduced_attention(q: Tensor, k: Tensor, scale: float, ranks: Tensor, lse: Tensor | None = None, *,
                      above_mean: bool = False, softcap: float | None = None, sink_logits: Tensor | None = None,
                      bias: Tensor | None = None) -> Tensor:
    """Attention that each unit receives from some rows: softmax(q_r k^T * scale), summed over the rows and the G heads.

    The rows are computed in blocks, so that an R x N matrix of all heads never exists (NaCl, arXiv:2408.03675,
    Algorithm 2).

    Args:
        q, k: [H*G, R, D] and [H, N, D] after RoPE.
        ranks: [R] int64, the rank of each row, in any order.
        lse: [H*G, R] fp32, as `attention` returns it; None: computed here.
        above_mean: count the rows that give a unit more than 1 / (units they see), in place of summing what they give
            (Scissorhands, arXiv:2305.17118, Algorithm 2).
        softcap, sink_logits: as for `attention`; of the latter, one for each row, [H*G, R], too.
        bias: [H*G, R, N], added to the logits.

    Returns:
        [H, N] fp32.
    """
    heads, count, _ = k.shape
    sums = torch.zeros(heads, count, dtype=torch.float32, device=q.device)
    rows = max(1, _BLOCK_ELEMENTS // (count * q.shape[0]))
    for start in range(0, q.shape[1], rows):
        part = slice(start, start + rows)
        logits = masked_logits(q[:, part], k, scale, ranks[part], window=None, softcap=softcap,
                               bias=None if bias is None else bias[:, part])
        sinks = sink_logits if sink_logits is None or sink_logits.dim() == 1 else sink_logits[:, part]
        total = log_sum(logits, sinks) if lse is None else lse[:, part].reshape(heads, -1, logits.shape[2])
        weights = (logits - total[..., None]).exp()
        if above_mean:
            weights = (weights * logits.isfinite().sum(-1, keepdim=True) > 1).float()
        sums += weights.sum((1, 2))
    return sums
