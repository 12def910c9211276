"""What is minimised and what is measured, for one layer of a batch. Knows tensors alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_losses(scores: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of one layer: scores and labels [B, H, n], valid [B, n] bool -> two scalars.

    regression: SmoothL1 (beta 1), mean over heads and valid tokens, then over examples.
    smoothing: squared difference of neighbouring scores where both are valid, mean likewise.
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
    """Share of the top `share` of valid tokens by label that are in the top by score; mean over examples and heads.

    scores and labels [B, H, n], valid [B, n] -> scalar in [0, 1]; `share` itself is what chance gives.
    """
    found = []
    for own, true, mask in zip(scores, labels, valid, strict=True):
        own, true = own[:, mask], true[:, mask]
        top = max(1, round(share * own.shape[1]))
        best = torch.zeros_like(own, dtype=torch.bool).scatter_(1, true.topk(top, 1).indices, True)
        found.append(best.gather(1, own.topk(top, 1).indices).float().mean())
    return torch.stack(found).mean()
