"""Eviction with a derivative: gates in [0, 1] in place of kept or evicted. Knows tensors alone.

A gate g adds log g to the attention logit of its unit: at 1 the unit counts fully, at 0 it is evicted. For the n units
that compete for `keep` places with scores s, the gates of each KV head are

    g_i = sigmoid((z_i - tau) / temperature),  z = (s - mean) / std,  tau such that the sum of the gates is `keep`.

So the budget is kept by construction at any temperature: a gate that opens closes others, in the value and in the
gradient, and no capacity loss (TRIM-KV, arXiv:2512.03324) is needed. Like eviction, the gates do not depend on the
scale and the offset of a head's scores. At temperature 0 tau lies half-way between the last unit that is kept and the
first that is not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locret_stream.kernels import select_units

_STEPS = 10  # of Newton's method
_LEAST_SPREAD = 1e-6


def log_gates(scores: Tensor, keep: int, temperature: float) -> Tensor:
    """Scores [..., n] -> log gates [..., n], for 0 < keep < n; see the module."""
    mean, spread = scores.mean(-1, keepdim=True), scores.std(-1, correction=0, keepdim=True)
    x = (scores - mean) / (spread + _LEAST_SPREAD) / temperature
    return F.logsigmoid(x - _threshold(x, keep))


def _threshold(x: Tensor, keep: int) -> Tensor:
    """tau [..., 1] with sum of sigmoid(x - tau) = keep over x [..., n], and its gradient."""
    with torch.no_grad():
        ordered = x.sort(-1, descending=True).values
        kept, others = ordered[..., :keep], ordered[..., keep:]
        odds = torch.logit(x.new_tensor(keep / x.shape[-1], dtype=torch.float64)).item()
        low, high = ordered[..., -1:] - odds, ordered[..., :1] - odds  # all gates above keep / n, all gates below
        tau = (kept[..., -1:] + others[..., :1]) / 2  # the solution at temperature 0
        for _ in range(_STEPS):
            # The root of log(sum of the others' gates) - log(sum of what the kept ones lack of 1), in logs because both
            # may underflow: almost a straight line in tau, of slope -1 to -2.
            got, lacked = F.logsigmoid(others - tau), F.logsigmoid(tau - kept)
            excess = got.logsumexp(-1, keepdim=True) - lacked.logsumexp(-1, keepdim=True)
            slope = ((got.softmax(-1) * got.expm1()).sum(-1, keepdim=True)
                     + (lacked.softmax(-1) * lacked.expm1()).sum(-1, keepdim=True))
            low, high = torch.where(excess > 0, tau, low), torch.where(excess < 0, tau, high)
            newton = tau - excess / slope.clamp(max=-_LEAST_SPREAD)
            tau = torch.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
        # d tau / d x_i = g_i (1 - g_i) / sum of these, as the sum of the gates is constant.
        weights = (F.logsigmoid(x - tau) + F.logsigmoid(tau - x)).softmax(-1)
    return tau + (weights * (x - x.detach())).sum(-1, keepdim=True)


def visibility(scores: Tensor, budget: int, sinks: int, stabilizers: int, temperature: float) -> tuple[Tensor, Tensor]:
    """How the rows behind n committed units see them.

    Args:
        scores: [B, H, n] of all units that were ever committed, in time order. As they never change, eviction chunk by
            chunk and eviction at once keep the same units: a stabilizer competes by its score later.
        budget: units that the layer keeps, the first `sinks` and the last `stabilizers` among them.

    Returns:
        log gates [B, H, n] with gradients to scores, 0 for protected units, and ranks [B, H, n] int64: the place of
        each unit among those that a hard eviction keeps; for an evicted unit the place that it would take.
    """
    count = scores.shape[-1]
    if count <= budget:
        return torch.zeros_like(scores), torch.arange(count, device=scores.device).expand(scores.shape)
    free = scores[..., sinks:count - stabilizers]
    gates = F.pad(log_gates(free, budget - sinks - stabilizers, temperature), (sinks, stabilizers))
    kept = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    units = select_units(scores.detach().flatten(0, -2), budget, sinks, stabilizers)  # kernels take [H, n]
    kept.scatter_(-1, units.view(*scores.shape[:-1], budget), 1)
    return gates, kept.cumsum(-1) - kept


def gated_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *, scale: float, softcap: float | None = None,
                    sink_logits: Tensor | None = None, fading: Tensor | None = None,
                    block_bytes: int = 32 * 2**20) -> Tensor:
    """Causal attention of R rows over n units behind gates and over the rows themselves.

    Args:
        q, k, v: [B, H*G, R, D] and [B, H, n + R, D], q and k rotated, any float dtype; the arithmetic is fp32.
        gates: [B, H, n] log gates. sink_logits: [H*G] of the attention sinks.
        fading: [B, H, n + R] log rates at which the logits of units fall towards 0 with every row (`student.Fading`).
        block_bytes: bound of one tensor of logits; logits are computed again in the backward pass, block by block.

    Returns:
        [B, H*G, R, D] of q's dtype.
    """
    rows, gated = q.shape[2], gates.shape[-1]
    per_block = max(1, block_bytes // (4 * q.shape[0] * q.shape[1] * k.shape[2]))
    out = []
    for start in range(0, rows, per_block):
        stop = min(start + per_block, rows)
        units = gated + stop
        out.append(checkpoint(_attend, q[:, :, start:stop], k[:, :, :units], v[:, :, :units], gates, scale, softcap,
                              sink_logits, None if fading is None else fading[..., :units], use_reentrant=False,
                              preserve_rng_state=False))
    return torch.cat(out, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, scale: float, softcap: float | None,
            sink_logits: Tensor | None, fading: Tensor | None) -> Tensor:
    """The attention of one block; the last R of the units are those of the rows."""
    (batch, heads, count, dim), rows = k.shape, q.shape[2]
    high = torch.promote_types(q.dtype, torch.float32)
    x = q.reshape(batch, heads, -1, dim).to(high) @ k.to(high).transpose(2, 3) * scale
    x = x.view(batch, heads, -1, rows, count)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if fading is not None:
        age = torch.arange(count - rows, count, device=x.device)[:, None] - torch.arange(count, device=x.device)
        x = x * (age.clamp(min=0) * fading[:, :, None, None]).exp()
    x = x + F.pad(gates, (0, count - gates.shape[-1]))[:, :, None, None]
    hidden = torch.ones(rows, count, dtype=torch.bool, device=q.device).triu(count - rows + 1)
    x = x.masked_fill(hidden, -torch.inf)
    norm = x.logsumexp(-1, keepdim=True)
    if sink_logits is not None:
        norm = torch.logaddexp(norm, sink_logits.to(high).view(heads, -1, 1, 1))
    return ((x - norm).exp().flatten(2, 3) @ v.to(high)).view(batch, -1, rows, dim).to(q.dtype)
