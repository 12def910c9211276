"""Random numbers as a pure function of what they are drawn for: the same after a restore, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64
_BITS = 24  # of a draw: a whole number that fp32 represents exactly


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; splitmix64 shifts in zeros


def _draw(seed: int, layer: int, positions: Tensor, step: int | None, alike: bool = False) -> Tensor:
    """positions [H, N] int64 -> [H, N] int64 below 2^24, independent for every position, step and head (`alike`: the
    same for all heads)."""
    key = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps any whole number to int64
    head = 0 if alike else torch.arange(positions.shape[0], device=positions.device)[:, None]
    x = torch.zeros((), dtype=torch.int64, device=positions.device)
    for word in (key, layer, head, positions, *([] if step is None else [step])):
        x = (x ^ word) * _GOLDEN + _GOLDEN
        x = (x ^ _shift(x, 30)) * _MIX_1
        x = (x ^ _shift(x, 27)) * _MIX_2
        x = x ^ _shift(x, 31)
    return _shift(x, 64 - _BITS)


def uniform(seed: int, layer: int, positions: Tensor, step: int | None = None) -> Tensor:
    """[H, N] fp32 in [0, 1) for absolute positions [H, N]; another draw for every `step`, None: always the same."""
    return _draw(seed, layer, positions, step).float() / (1 << _BITS)


def gumbel(seed: int, layer: int, positions: Tensor, step: int | None = None, alike: bool = False) -> Tensor:
    """[H, N] fp32 with the standard Gumbel distribution: the k largest of log p + gumbel are k draws from p without
    replacement (arXiv:1903.06059). `alike`: the same draw for all heads."""
    return -(-((_draw(seed, layer, positions, step, alike).double() + 0.5) / (1 << _BITS)).log()).log().float()
