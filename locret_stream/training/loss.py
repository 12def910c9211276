"""The loss of the heads and the figure they are judged by, for one layer of a batch. Knows tensors alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_losses(scores: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of one layer: scores and labels [B, H, n], valid [B, n] bool -> two scalars.

    regression: SmoothL1 (beta 1), mean over heads and valid tokens, then over examples.
    smoothing: squared difference of neighbouring scores where both are valid, with the same means.
    The loss of a step is  mean over layers of regression + alpha * sum over layers of smoothing
    (Locret, arXiv:2410.01805, eq. 3, as its code computes it).
    """
    heads = scores.shape[1]
    weight = valid.to(scores.dtype)[:, None]
    regression = (F.smooth_l1_loss(scores, labels, reduction="none") * weight).sum((1, 2))
    regression = regression / (heads * weight.sum((1, 2))).clamp(min=1)
    pair = weight[..., 1:] * weight[..., :-1]
    smoothing = ((scores[..., 1:] - scores[..., :-1]).square() * pair).sum((1, 2))
    smoothing = smoothing / (heads * pair.sum((1, 2))).clamp(min=1)
    return regression.mean(), smoothing.mean()


@torch.no_grad()
def top_overlap(scores: Tensor, labels: Tensor, valid: Tensor, share: float = 0.1) -> Tensor:
    """How many of the valid tokens with the top labels also have the top scores; mean over examples and heads.

    scores and labels [B, H, n], valid [B, n] -> scalar in [0, 1]; random scores give `share` on average.
    """
    overlaps = []
    for score, label, mask in zip(scores, labels, valid, strict=True):
        score, label = score[:, mask], label[:, mask]
        top = max(1, round(share * score.shape[1]))
        best = torch.zeros_like(score, dtype=torch.bool).scatter_(1, label.topk(top, 1).indices, True)
        overlaps.append(best.gather(1, score.topk(top, 1).indices).float().mean())
    return torch.stack(overlaps).mean()
