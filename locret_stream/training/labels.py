"""Labels: the causal importance of every token, read off the rows that predict replies. Knows attention, no training.

The importance of token k at KV head j is the largest value, over the rows that predict the tokens of any later reply
(its end-of-turn token included) and over the G query heads of the group, of

    logit     q_p · k_k · scale, both rotated, after the model's softcap  (Locret, arXiv:2410.01805, section 3.2)
    zscore    the same, then standardised per layer and head over the labelled tokens of the example
    logprob   log(softmax probability + eps), the softmax being the whole causal row of the model
    attention the softmax probability itself; the first `SINKS` tokens, which draw attention whatever they say and stay
              anyway, have no label, and tokens that the chat template wrote have the label `TEMPLATE`

The paper takes the rows of the replies' own tokens and leaves out the scale. The rows here are one earlier each, as
these decide the tokens of a reply, and the scale is the model's.

A reply labels all tokens before it, earlier replies included, never its own. Tokens that no reply follows, and tokens
that a sliding window hides from all replies, have no label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locret_stream.config import UnitShape
from locret_stream.models import Attachment, Attended, LayerCall, RopeTables, visible
from locret_stream.training.data import Example

SINKS = 4
TEMPLATE = -1.0
"""Of tokens between messages. They draw attention as the first ones do, and all say the same: where they compete as
text does, a dialogue of 200 turns fills two fifths of a memory with them."""
Visit = Callable[[LayerCall, Tensor, Tensor], None]
"""visit(call, labels [B, H, n] fp32, valid [B, n] bool), n <= T; labels are 0 where not valid. A call has the
sequences of a background behind the B examples."""

Masks = Callable[[UnitShape], Tensor | None]
"""From the shape of a layer to a mask, see `window_masks`."""


def answer_rows(spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(rows [R] that predict reply tokens, ascending; limits [R]): row r labels the tokens before limits[r]."""
    rows = torch.cat([torch.arange(start - 1, end - 1) for start, end in spans])
    limits = torch.cat([torch.full((end - start,), start) for start, end in spans])
    return rows, limits


def importance(q: Tensor, k: Tensor, rows: Tensor, limits: Tensor, *, kind: str, scale: float,
               unit: UnitShape, softcap: float | None = None, sink_logits: Tensor | None = None,
               eps: float = 1e-5, block_bytes: int = 32 * 2**20) -> tuple[Tensor, Tensor]:
    """Labels of one example at one layer.

    Args:
        q, k: [H*G, T, D] and [H, T, D], rotated, any float dtype; the arithmetic is fp32.
        rows, limits: from `answer_rows`, on q's device.
        unit: of the layer, whose window hides keys. sink_logits: [H*G] of the attention sinks.
        block_bytes: bound of one [H, G, rows, T] fp32 tensor, of at least one row; a handful of these exist at once.

    Returns:
        labels [H, n] fp32, 0 where not valid, and valid [n] bool, n = the last reply's start.
    """
    heads, total, dim = k.shape
    groups, n = q.shape[0] // heads, int(limits.max())
    q, k = q.view(heads, groups, total, dim), k.float()
    best = torch.full((heads, n), -math.inf, dtype=torch.float32, device=q.device)
    per_block = max(1, block_bytes // (4 * heads * groups * total))
    columns = torch.arange(total, device=q.device)
    for row, limit in zip(rows.split(per_block), limits.split(per_block), strict=True):
        stop = int(row[-1]) + 1
        x = (q[:, :, row].float().flatten(1, 2) @ k[:, :stop].transpose(1, 2)).unflatten(1, (groups, -1)) * scale
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        hidden = ~visible(unit, row, columns[:stop])
        if kind in ("logprob", "attention"):
            x.masked_fill_(hidden, -math.inf)
            norm = x.logsumexp(-1, keepdim=True)
            if sink_logits is not None:
                norm = torch.logaddexp(norm, sink_logits.float().view(heads, groups, 1, 1))
            x -= norm
        x.masked_fill_(hidden | (columns[None, :stop] >= limit[:, None]), -math.inf)
        reach = min(stop, n)
        best[:, :reach] = torch.maximum(best[:, :reach], x.amax((1, 2))[:, :reach])
    valid = best[0] != -math.inf  # NaN counts as valid, so that the loss shows it
    if kind == "logprob":
        best = torch.logaddexp(best, best.new_tensor(math.log(eps)))
    elif kind == "attention":
        valid[:SINKS] = False
        best = best.exp()
    elif kind == "zscore":
        seen = best[:, valid]
        best = (best - seen.mean(1, keepdim=True)) / (seen.std(1, correction=0, keepdim=True) + 1e-6)
    return best.masked_fill(~valid, 0.0), valid


@torch.no_grad()
def visit_layers(attachment: Attachment, tables: RopeTables, examples: Sequence[Example], visit: Visit, *,
                 kind: str, eps: float = 1e-5, block_bytes: int = 32 * 2**20,
                 background: Tensor | None = None) -> Tensor:
    """Run examples of one length through the model once; `visit` gets every layer's inputs and labels in turn.

    A `background` [b, T], ids of texts of that length about which nothing is asked, runs along: the last b sequences of
    a call are the background's, and no labels are made for them.

    Only one layer's tensors exist at a time, so `visit` may take gradients of its own (under `torch.enable_grad()`) and
    drop them before the next layer.

    Returns:
        The final hidden states [B + b, T, hidden], see `Attachment.hidden`.
    """
    device, shape = attachment.device, attachment.shape
    ids = torch.stack([example.ids for example in examples]).to(device)
    if background is not None:
        ids = torch.cat([ids, background.to(device)])
    rows = [tuple(t.to(device) for t in answer_rows(example.answer_spans)) for example in examples]
    n = max(int(limits.max()) for _, limits in rows)
    masks = window_masks(ids.shape[1], device)

    def step(call: LayerCall) -> Attended:
        unit = shape.units[call.layer]
        q, k, _, _ = attended = call.to_itself(tables, masks(unit))
        if not call.keeps:
            return attended
        labels = torch.zeros(len(examples), unit.kv_heads, n, dtype=torch.float32, device=device)
        valid = torch.zeros(len(examples), n, dtype=torch.bool, device=device)
        for i, ((row, limit), example) in enumerate(zip(rows, examples, strict=True)):
            best, labelled = importance(q[i], k[i], row, limit, kind=kind, scale=call.scale, unit=unit, eps=eps,
                                        softcap=call.softcap, sink_logits=call.sink_logits, block_bytes=block_bytes)
            if kind == "attention" and example.template is not None:
                best = best.masked_fill(example.template[:best.shape[1]].to(device) & labelled, TEMPLATE)
            labels[i, :, :best.shape[1]], valid[i, :best.shape[1]] = best, labelled
        visit(call, labels, valid)
        return attended

    return attachment.hidden(ids, step)


def window_masks(total: int, device: torch.device) -> Masks:
    """From the shape of a layer to what each of `total` rows attends to, bool [T, T], made once a window; to None where
    that is all before it."""
    masks: dict[tuple[int, bool], Tensor] = {}

    def mask(unit: UnitShape) -> Tensor | None:
        if unit.sliding is None or unit.sliding >= total:
            return None
        window = unit.sliding, unit.blocks
        if window not in masks:
            ranks = torch.arange(total, device=device)
            masks[window] = visible(unit, ranks, ranks)
        return masks[window]

    return mask
