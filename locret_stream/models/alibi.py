"""ALiBi (Press et al., arXiv:2108.12409), a bias by distance, at ranks that change. Knows no modules.

A head adds -slope * (i - j) to the logit of query i and key j. A softmax over j does not see what is the same for all
j, so that slope * j does the same. Three more numbers give it: in queries 1 and twice slope / scale, in keys zeros; and
a *shear* takes the place of RoPE, which adds a key's rank to its last two. It adds it where the first number is 0, and
so leaves queries as they are, and is one function for both. A rank is in two parts, the multiples of 256 and the rest,
as in half precision each of them is exact up to 65,535.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PART = 256
MOST = PART**2  # ranks that are told apart in half precision
FAR = 1024  # keys up to which a bias is looked at


def is_ranked(module: nn.Module) -> bool:
    """Whether an attention module has ALiBi, as probes have found."""
    return vars(module).get("locret_slopes") is not None


class Ranks:
    """Stands where a rotary module does."""

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """High and low parts of positions [1, T], in the dtype of x: [1, T, 1] each."""
        low = positions[..., None] % PART
        return (positions[..., None] - low).to(x.dtype), low.to(x.dtype)


def shear(x: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Queries or keys [..., D + 3], at ranks in two parts [..., 1] each."""
    free = 1 - x[..., -3:-2]
    return torch.cat([x[..., :-2], x[..., -2:-1] + free * high, x[..., -1:] + free * low], dim=-1)


def numbers_of(slopes: Tensor, scale: float, like: Tensor) -> Tensor:
    """The three numbers of the queries of every head, [heads, 3], of slopes [heads], where `like` is."""
    per_rank = (slopes / scale).to(like.device, like.dtype)
    return torch.stack([torch.ones_like(per_rank), per_rank, per_rank], dim=-1)


def widen(q: Tensor, k: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H*G, T, D] and k [B, H, T, D] with the three numbers; `numbers` of queries, [H*G, 3]."""
    return (torch.cat([q, numbers[:, None].expand(*q.shape[:3], 3)], dim=-1),
            torch.cat([k, k.new_zeros(*k.shape[:3], 3)], dim=-1))


def bias_of(added: Sequence[tuple[Tensor, float]], heads: int, keys: int) -> Tensor:
    """What is added to logits, [heads, queries or 1, keys] fp32, of tensors that can be expanded to that, each with its
    factor."""
    total = torch.zeros(heads, 1, keys)
    for tensor, factor in added:
        total = total + factor * tensor.detach().float().cpu().reshape(-1, *tensor.shape[-2:])
    return total


def slopes_in(bias: Tensor) -> Tensor | None:
    """The slopes [heads] by which a bias begins, of at least two keys; None if there are none."""
    slopes = bias[:, 0, 1] - bias[:, 0, 0]
    return slopes if slopes.any() else None


def is_alibi(bias: Tensor, slopes: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a bias is ALiBi of those slopes for all its keys, but for rounding in that dtype, or none at all."""
    ranks = torch.arange(bias.shape[-1])
    right = (0 if slopes is None else slopes[:, None, None]) * ranks
    close = 4 * torch.finfo(dtype).eps * bias.abs().amax()
    return bool(((bias - bias[..., :1] - right).abs() <= close).all())
