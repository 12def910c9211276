"""Starting weights: random ones, and in them the few circuits that small models are slow to learn.

Every embedding shares a direction `u`, so that a head of layer 0 can attend by distance alone: two
heads fetch the tokens 1 and 2 back, two fetch soft bags of the last several tokens. In the recall
layer, one head matches (this token, its bags) with (the token before, its bags), where `u` also
carries a term against matching the question itself; a second matches two tokens in a row; both
copy. Everything is trained afterwards like any other weight.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import Recaller


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Random weights; the projections that write to the residual stream begin at zero."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=0.08 if "embed" in name else 1 / math.sqrt(weight.shape[1]))


def initialise(model: Recaller, seed: int) -> None:
    """Draw the weights, then write the circuits into them."""
    draw_weights(model, seed)
    _seed_circuits(model)


@torch.no_grad()
def _seed_circuits(model: Recaller) -> None:
    shape = model.shape
    dim, half, width = shape.head_dim, shape.head_dim // 2, shape.width
    first, recall = model.layers[0].self_attn, model.layers[shape.recall_layer].self_attn
    inverse = model.inverse_frequencies

    common = F.normalize(torch.randn(width), dim=0)
    table = model.embed_tokens.weight
    table.normal_(std=0.08)
    table.add_(torch.outer(0.5 - table @ common, common))
    strength = 0.5 / math.sqrt(0.0064 * width + 0.25) * math.sqrt(width)  # of `common` behind the norm

    def without_common(matrix: Tensor) -> Tensor:
        return matrix - torch.outer(matrix @ common, common)

    # Layer 0: heads that attend by distance. Logit = peak * mean of cos(inverse * (distance - offset)).
    fast = inverse.topk(6).indices.sort().values
    middle = ((inverse < 0.09) & (inverse > 0.008)).nonzero().flatten()
    heads = [(fast, 1.0, 57.0), (fast, 2.0, 57.0), (middle, 4.0, 40.0), (middle, 10.0, 22.0)]
    key_gain = {0: math.sqrt(57 * 8) / strength, 1: math.sqrt(25 * 8) / strength}
    groups = shape.query_heads // shape.kv_heads
    for head, (bands, offset, peak) in enumerate(heads):
        group = head // groups
        key, query = torch.zeros(dim), torch.zeros(dim)
        key[bands] = 1 / math.sqrt(len(bands))
        query[bands] = key[bands] * (-offset * inverse[bands]).cos()
        query[bands + half] = key[bands] * (-offset * inverse[bands]).sin()
        gain = math.sqrt(peak * math.sqrt(dim)) / strength
        first.k_proj.weight[group * dim : (group + 1) * dim] = key_gain[group] * torch.outer(key, common)
        query_rows = slice(head * dim, (head + 1) * dim)
        first.q_proj.weight[query_rows] = gain**2 / key_gain[group] * torch.outer(query, common)

    slow_bands = (inverse < 1.6e-3).nonzero().flatten()
    slow = torch.cat([slow_bands, slow_bands + half])
    rank = len(slow) // 3
    identity = without_common(nn.init.orthogonal_(torch.empty(rank, width)))
    fetched = without_common(nn.init.orthogonal_(torch.empty(4 * rank, width))).view(4, rank, width)
    nn.init.orthogonal_(first.v_proj.weight)
    for group in range(shape.kv_heads):
        first.v_proj.weight[group * dim : group * dim + rank] = identity
    first.o_proj.weight.zero_()
    for head in range(4):
        gain = 0.5 if head < 2 else 1.5
        first.o_proj.weight[:, head * dim : head * dim + rank] = gain * fetched[head].T

    # The recall layer: match and copy.
    before, two_before, near_bag, wide_bag = 2 * fetched
    recall.q_proj.weight[:dim] = 0
    recall.k_proj.weight[:] = 0
    recall.q_proj.weight[2 * dim : 3 * dim] = 0
    thirds = [slow[i * rank : (i + 1) * rank] for i in range(3)]
    match = [(identity, before, 1.6), (near_bag, near_bag, 0.56), (wide_bag, wide_bag, 0.56)]
    for rows, (query, key, gain) in zip(thirds, match, strict=True):
        recall.q_proj.weight[rows] = gain * query
        recall.k_proj.weight[rows] = gain * key
    for rows, (query, key) in zip(thirds, [(identity, before), (before, two_before)], strict=False):
        recall.q_proj.weight[2 * dim + rows] = 1.9 * query
        recall.k_proj.weight[dim + rows] = 1.9 * key

    # Against matching the question itself: logit -16 at distance 0, rising to 0 over some 40 tokens.
    bands = middle[:4]
    near = torch.zeros(dim)
    near[bands] = 0.5
    gain = math.sqrt(16 * 8) / (strength * 0.8)
    recall.k_proj.weight[:dim] += gain * torch.outer(near, common)
    recall.q_proj.weight[:dim] -= gain * torch.outer(near, common)

    copied = nn.init.orthogonal_(torch.empty(width, width))
    recall.v_proj.weight[:dim] = copied[:dim]
    recall.v_proj.weight[dim : 2 * dim] = copied[-dim:]
    recall.o_proj.weight[:, :dim] = 0.7 * copied[:dim].T
    recall.o_proj.weight[:, 2 * dim : 3 * dim] = 0.7 * copied[-dim:].T
