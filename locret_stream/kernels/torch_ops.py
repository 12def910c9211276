"""The operations in torch, made fast: for CPUs, and for CUDA without Triton. Knows tensors only.

`reduced_attention`, which is fast enough as `reference` has it, runs from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from locret_stream.budgets import group_of
from locret_stream.kernels import reference
from locret_stream.kernels.reference import slot_units

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_UNPACK = {bits: f"embedding_bag_{name}_unpack" for bits, name in ((8, "byte"), (4, "4bit"), (2, "2bit"))}


def compact_units(tensors: Sequence[Tensor], keep: Tensor, scratch: Tensor) -> None:
    """`reference.compact_units`; the rows of all heads are gathered by one copy and written back by another."""
    heads, budget = keep.shape
    indices: dict[int, Tensor] = {}  # of the rows of all heads, by the number of rows from one head to the next
    for x in tensors:
        apart, ragged = divmod(x.stride(0), x.stride(1))
        if keep.device.type != "cpu" or ragged or x.stride(1) != x[0, 0].numel():
            reference.compact_units([x], keep, scratch)
            continue
        if apart not in indices:
            indices[apart] = (keep + apart * torch.arange(heads)[:, None]).flatten()
        rows = x.as_strided(((heads - 1) * apart + x.shape[1], *x.shape[2:]), x.stride()[1:])
        out = scratch[:keep.numel() * x[0, 0].numel() * x.element_size()].view(x.dtype).view(-1, *x.shape[2:])
        torch.index_select(rows, 0, indices[apart], out=out)
        x[:, :budget].copy_(out.view(heads, budget, *x.shape[2:]))


def select_units(scores: Tensor, budget: int, sinks: int = 0, stabilizers: int = 0) -> Tensor:
    """`reference.select_units`; a partition gives the least key that stays, so that nothing is sorted."""
    count = scores.shape[-1]
    if scores.device.type != "cpu" or count <= budget:
        return reference.select_units(scores, budget, sinks, stabilizers)
    keys = reference.competing_keys(scores, sinks, stabilizers)
    least = torch.from_numpy(numpy.partition(keys.numpy(), count - budget, axis=-1)[..., count - budget, None])
    return (keys >= least).nonzero()[..., -1].view(*scores.shape[:-1], budget)


def dequantise_units(rows: Tensor, bits: int, out: Tensor, mean: Tensor | None = None) -> Tensor:
    """`reference.dequantise_units`; on a CPU by torch's unpacking of quantised embeddings, whose rows are a group of
    these, up to fifteen times as fast."""
    if rows.device.type != "cpu" or not out.numel():
        return reference.dequantise_units(rows, bits, out, mean)
    unpack, dim = getattr(torch.ops.quantized, _UNPACK[bits]), out.shape[-1]
    group_bytes = rows.shape[-1] // (dim // group_of(dim, bits))
    whole = rows.is_contiguous()  # as where a layer is full
    for part, of_part, of_mean in [(rows, out, mean)] if whole else [
            (rows[head], out[head], None if mean is None else mean[head]) for head in range(len(rows))]:
        channels = unpack(part.contiguous().view(-1, group_bytes)).view(of_part.shape)
        if of_mean is None:
            of_part.copy_(channels)
        elif out.dtype == torch.float32:
            torch.add(channels, of_mean, out=of_part)
        else:
            of_part.copy_(channels.add_(of_mean))
    return out


def score_units(q: Tensor, k: Tensor, v: Tensor, fc1: Tensor, fc2: Tensor, act: Callable[[Tensor], Tensor],
                bias1: Tensor | None = None, bias2: Tensor | None = None) -> Tensor:
    """`reference.score_units`, without the concatenation of q, k and v."""
    return reference.project(act(hidden_layer(q, k, v, fc1, bias1)), fc2, bias2)


def hidden_layer(q: Tensor, k: Tensor, v: Tensor, fc1: Tensor, bias1: Tensor | None) -> Tensor:
    """[q; k; v] fc1^T + bias1 by three products, [T, W] of the dtype of the weights; arguments as of `score_units`."""
    parts = [t.transpose(0, 1).flatten(1).to(fc1.dtype) for t in (q, k, v)]
    weights = fc1.split([part.shape[1] for part in parts], dim=1)
    hidden = F.linear(parts[0], weights[0], bias1)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        hidden.addmm_(part, weight.t())
    return hidden


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None,
                      softcap: float | None = None, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`reference.prefill_attention` by torch's flash kernels; KV heads are never repeated.

    On a CPU it takes two parts, joined by their log-sum-exps: every row sees all units before the chunk, so that they
    need no mask; and of the chunk's attention to itself only the causal half is computed.
    """
    heads, count, dim = k.shape
    old = count - q.shape[1]
    if window is not None and window >= count:
        window = None
    plain = window is None and softcap is None and sink_logits is None
    if not plain or (q.is_cuda and not _flash_can(q, k, v)):
        return reference.prefill_attention(q, k, v, scale, window=window, softcap=softcap, sink_logits=sink_logits)
    if q.is_cuda:  # this kernel's causal mask is aligned at the last unit, and it shares KV heads by itself
        out, lse, *_ = _FLASH_CUDA(q[None], k[None], v[None], is_causal=True, scale=scale)
        return out[0], lse[0]
    grouped = q.unflatten(0, (heads, -1))
    shape = (heads, grouped.shape[1], -1, dim)

    def part(of: slice, causal: bool) -> tuple[Tensor, Tensor]:
        return _FLASH_CPU(grouped, k[:, None, of].expand(shape), v[:, None, of].expand(shape), is_causal=causal,
                          scale=scale)

    out, lse = part(slice(old, count), True)
    if old:
        before, before_lse = part(slice(0, old), False)
        out = torch.lerp(out, before, torch.sigmoid(before_lse - lse).to(out.dtype)[..., None])
        lse = torch.logaddexp(lse, before_lse)
    return out.flatten(0, 1), lse.flatten(0, 1)


def _flash_can(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this GPU and this torch have a flash kernel for tensors of such a dtype and head dimension. The kernel is
    called directly, which leaves out the padding of heads to a multiple of 8."""
    params = SDPAParams(q[None], k[None], v[None], None, 0.0, False, True)
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float, *,
                     cos: Tensor | None = None, sin: Tensor | None = None, window: int | None = None,
                     softcap: float | None = None, sink_logits: Tensor | None = None) -> Tensor:
    """`reference.decode_attention`; the query heads of a KV head are rows of one attention over views of their slot."""
    if q.shape[2] > 1 or softcap is not None or sink_logits is not None:
        return reference.decode_attention(q, keys, values, slots, lengths, scale, cos=cos, sin=sin, window=window,
                                          softcap=softcap, sink_logits=sink_logits)
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
    contexts, out = grouped.split(1) if len(q) > 1 else [grouped], []
    for rows, slot, length in zip(contexts, slots.tolist(), lengths.tolist(), strict=True):
        first = max(0, length - window) if window else 0
        k, v = slot_units(keys, slot, first, length), slot_units(values, slot, first, length)
        if cos is not None:
            assert sin is not None, "cos and sin come together"
            k = reference.rotate_halves(k, cos[first:length], sin[first:length])
        out.append(F.scaled_dot_product_attention(rows, k, v, scale=scale) if q.is_cuda
                   else _FLASH_CPU(rows, k, v, scale=scale)[0])
    return (torch.cat(out) if len(out) > 1 else out[0]).reshape(q.shape)  # on CUDA it is a view of [A, T, H, D]
