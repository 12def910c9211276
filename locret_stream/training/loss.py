"""The loss of the heads and the figure they are judged by, for one layer of a batch. Knows tensors alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BESIDE, ENOUGH = 5, 0.3  # tokens; an attention that counts as whole


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


def layer_terms(scores: Tensor, labels: Tensor, valid: Tensor, kind: str | None, background: Tensor | None = None
                ) -> tuple[Tensor, Tensor]:
    """The loss of one layer for labels of that kind, and its smoothing term, which is 0 for "attention"; arguments as
    of `layer_losses` and `listwise_loss`."""
    if kind == "attention":
        return listwise_loss(scores, labels, valid, background), scores.new_zeros(())
    return layer_losses(scores, labels, valid)


def listwise_loss(scores: Tensor, labels: Tensor, valid: Tensor, background: Tensor | None = None) -> Tensor:
    """Cross-entropy of the scores' softmax against the answers' attention, in nats, mean over examples and heads.

        - sum over tokens of wanted * log softmax(scores),   wanted = min(attention, ENOUGH), as shares of their sum

    (ListNet, Cao et al. 2007; its top-one form). The softmax is over all tokens that compete: those of the example and
    of a background, so that heads learn an order that holds far beyond one example. Attention counts as the largest
    within `BESIDE` tokens, itself in the middle, because the words beside what is read make it findable. Tokens of the
    template, whose labels are negative, compete and are never wanted.

    Args:
        scores, labels: [B, H, n], labels of kind "attention"; valid: [B, n] bool.
        background: [b, H, T], scores of texts about which nothing is asked.
    """
    mask = valid[:, None]
    wanted = F.max_pool1d(labels.clamp(min=0), BESIDE, stride=1, padding=BESIDE // 2).clamp(max=ENOUGH)
    wanted = wanted.masked_fill(~mask | (labels < 0), 0.0)
    competing = scores.masked_fill(~mask, -torch.inf)
    if background is not None:
        others = background.transpose(0, 1).flatten(1)
        competing = torch.cat([competing, others.expand(len(scores), *others.shape)], -1)
    lost = (competing.logsumexp(-1, keepdim=True) - scores) * wanted
    return (lost.sum(-1) / wanted.sum(-1).clamp(min=1e-6)).mean()


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
