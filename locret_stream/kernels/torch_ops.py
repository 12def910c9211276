"""The operations in torch, made fast: for CPUs, and for CUDA without Triton. Knows tensors only.

`reduced_attention`, which is fast enough as `reference` has it, runs from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from locret_stream.budgets import group_of
from locret_stream.kernels import reference
from locret_stream.kernels.processor import bf16_products, slow_blas
from locret_stream.kernels.reference import slot_units

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
CAUSAL_ROWS = 256  # of a chunk attend to themselves at once on CPUs: of more, torch computes more above the diagonal
ROWS = 64  # of a chunk are one block of `_attention_by_products` at least; a chunk that is no multiple of it has none
LOGITS = 1 << 20  # of a block at most, if it has more than ROWS: 4 MiB, which a processor's cache holds
PRODUCTS_LEAST = 1 << 18  # rows times units of a KV head, from which on `_attention_by_products` is quicker
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
    these, up to fifteen times as fast, and of single bits by a table of all bytes."""
    if rows.device.type != "cpu" or not out.numel():
        return reference.dequantise_units(rows, bits, out, mean)
    unpack, dim = _unpack_bits if bits == 1 else getattr(torch.ops.quantized, _UNPACK[bits]), out.shape[-1]
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


def _unpack_bits(groups: Tensor) -> Tensor:
    """Groups of codes of one bit, [N, bytes] -> channels [N, channels] fp32."""
    codes = _bits_of_bytes()[groups[:, :-4].int().flatten()].view(len(groups), -1)
    scale, zero = groups[:, -4:].contiguous().view(torch.float16).float().split(1, dim=1)
    return codes.mul_(scale).add_(zero)


@functools.cache
def _bits_of_bytes() -> Tensor:
    """The eight bits of every byte, the lowest first, [256, 8] fp32."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float()


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
                      softcap: float | None = None, sink_logits: Tensor | None = None, with_lse: bool = True
                      ) -> tuple[Tensor, Tensor | None]:
    """`reference.prefill_attention` by torch's flash kernels, or by oneDNN's products; KV heads are never repeated. On
    a CPU it cannot be differentiated."""
    if window is not None and window >= k.shape[1]:
        window = None
    plain = window is None and softcap is None and sink_logits is None
    if not plain or (q.is_cuda and not _flash_can(q, k, v)):
        return reference.prefill_attention(q, k, v, scale, window=window, softcap=softcap, sink_logits=sink_logits,
                                           with_lse=with_lse)
    if q.is_cuda:  # this kernel's causal mask is aligned at the last unit, and it shares KV heads by itself
        out, lse, *_ = _FLASH_CUDA(q[None], k[None], v[None], is_causal=True, scale=scale)
        return out[0], lse[0] if with_lse else None
    if not with_lse and _products_win(q, k):
        return _attention_by_products(q, k, v, scale), None
    out, lse = _flash_in_blocks(q, k, v, scale)
    return out, lse if with_lse else None


def _products_win(q: Tensor, k: Tensor) -> bool:
    """Whether `_attention_by_products` is quicker than the flash kernel, whose products in bf16 are MKL's: no quicker
    than in fp32. The processor, the dtype and the sizes decide alone, so that the same tokens give the same bits."""
    return (q.dtype == torch.bfloat16 and slow_blas() and bf16_products() and not torch.is_grad_enabled()
            and q.shape[1] % ROWS == 0 and q.shape[0] * q.shape[1] * k.shape[1] >= PRODUCTS_LEAST * k.shape[0])


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The output of `prefill_attention` in bf16. Of each KV head and block of rows: logits by oneDNN's product in fp32
    (that in bf16 would round them), softmax, and values by oneDNN's product in bf16. So weights are rounded once, and
    the output once."""
    (heads, count, dim), new = k.shape, q.shape[1]
    group, old, rows = len(q) // heads, count - new, ROWS
    while new % (2 * rows) == 0 and group * 2 * rows * count <= LOGITS:
        rows *= 2
    queries = q.unflatten(0, (heads, group)).float().mul_(scale)
    above = torch.full((rows, rows), float("-inf"), dtype=torch.float32).triu_(1)
    out = q.new_empty(new, heads, group, dim)  # as models take it: a token's heads side by side
    product = torch.ops.mkldnn._linear_pointwise
    for head in range(heads):
        keys, values = k[head].float(), v[head].t()
        for start in range(0, new, rows):
            part, seen = slice(start, start + rows), old + start + rows
            logits = product(queries[head, :, part].flatten(0, 1), keys[:seen], None, "none", [], "")
            logits.view(group, rows, seen)[..., -rows:].add_(above)
            weights = torch.softmax(logits, -1, out=logits).to(q.dtype)
            attended = product(weights, values[:, :seen], None, "none", [], "")
            out[part, head] = attended.view(group, rows, dim).transpose(0, 1)
    return out.view(new, -1, dim).transpose(0, 1)


def _flash_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`prefill_attention` on a CPU. The chunk comes in blocks, each in two parts that their log-sum-exps join:
    attention of a block to itself, of which only the causal half is computed; and to all units before it, where every
    row sees every unit, so that no mask is needed, and the query heads of a KV head are rows of one attention.
    """
    (heads, count, dim), new = k.shape, q.shape[1]
    group, old = len(q) // heads, count - new
    blocks = new // CAUSAL_ROWS if new % CAUSAL_ROWS == 0 else 1
    rows = new // blocks
    shape = (heads * blocks, group, rows, dim)

    def in_blocks(x: Tensor) -> Tensor:
        """[H*g, T, D] -> [H, blocks, g, rows, D]."""
        return x.view(heads, -1, blocks, rows, dim).transpose(1, 2)

    queries = in_blocks(q).contiguous()
    own, own_lse = _FLASH_CPU(queries.view(shape), *(in_blocks(x[:, old:]).reshape(-1, 1, rows, dim).expand(shape)
                                                     for x in (k, v)), is_causal=True, scale=scale)
    if count == rows:
        return own.flatten(0, 1), own_lse.flatten(0, 1)
    own, own_lse = own.view(heads, blocks, group, rows, dim), own_lse.view(heads, blocks, group, rows)
    # As models take it: a token's heads side by side.
    memory, lse = q.new_empty(blocks, rows, heads, group, dim), own_lse.new_empty(heads, group, blocks, rows)
    for block, seen in enumerate(range(old, count, rows)):
        out = memory[block].permute(1, 2, 0, 3)
        if not seen:
            out.copy_(own[:, block])
            lse[:, :, block] = own_lse[:, block]
            continue
        before, before_lse = _FLASH_CPU(queries[:, block].view(1, heads, -1, dim), k[None, :, :seen],
                                        v[None, :, :seen], scale=scale)
        before_lse = before_lse.view(heads, group, rows)
        share = torch.sigmoid(before_lse - own_lse[:, block]).to(q.dtype)[..., None]
        torch.lerp(own[:, block], before.view(heads, group, rows, dim), share, out=out)
        torch.logaddexp(own_lse[:, block], before_lse, out=lse[:, :, block])
    return memory.view(new, -1, dim).transpose(0, 1), lse.view(-1, new)


def _flash_can(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this GPU and this torch have a flash kernel for tensors of such a dtype and head dimension. The kernel is
    called directly, which leaves out the padding of heads to a multiple of 8."""
    params = SDPAParams(q[None], k[None], v[None], None, 0.0, False, True)
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float, *,
                     firsts: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
                     window: int | Tensor | None = None, softcap: float | None = None,
                     sink_logits: Tensor | None = None) -> Tensor:
    """`reference.decode_attention`; the query heads of a KV head are rows of one attention over views of their slot."""
    if q.shape[2] > 1 or softcap is not None or sink_logits is not None:
        return reference.decode_attention(q, keys, values, slots, lengths, scale, firsts=firsts, cos=cos, sin=sin,
                                          window=window, softcap=softcap, sink_logits=sink_logits)
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
    contexts, out = grouped.split(1) if len(q) > 1 else [grouped], []
    windows = reference.of_each(window, len(q))
    starts = [0] * len(q) if firsts is None else firsts.tolist()
    for rows, slot, start, length, seen in zip(contexts, slots.tolist(), starts, lengths.tolist(), windows,
                                               strict=True):
        first = max(0, length - seen) if seen else 0
        k, v = (slot_units(units, slot, start + first, start + length) for units in (keys, values))
        if cos is not None:
            assert sin is not None, "cos and sin come together"
            k = reference.rotate_halves(k, cos[first:length], sin[first:length])
        out.append(F.scaled_dot_product_attention(rows, k, v, scale=scale) if q.is_cuda
                   else _FLASH_CPU(rows, k, v, scale=scale)[0])
    return (torch.cat(out) if len(out) > 1 else out[0]).reshape(q.shape)  # on CUDA it is a view of [A, T, H, D]
