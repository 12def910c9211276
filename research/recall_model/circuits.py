"""Starting weights of a small Llama: random, or with the circuits in place that small models are slow to find.

Seeded, every embedding shares a direction `u`, so that the heads of layer 0 can attend by distance alone: they fetch
the tokens 1 to 4 back. The first head of layer 1 matches (this token, the one before, the one before that) with (the
token before, …) and copies what it finds. Everything is trained afterwards like any other weight.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from examples.bundled_model.circuits import draw_weights

NGRAM = 3  # tokens that the matching head compares


def initialise(model: LlamaForCausalLM, *, seeded: bool, seed: int) -> None:
    draw_weights(model, seed)
    if seeded:
        _seed(model)


@torch.no_grad()
def _seed(model: LlamaForCausalLM) -> None:
    config, first, second = model.config, *(layer.self_attn for layer in model.model.layers[:2])
    width, dim, half = config.hidden_size, config.head_dim, config.head_dim // 2
    inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)

    common = F.normalize(torch.randn(width), dim=0)
    table = model.model.embed_tokens.weight
    table.normal_(std=0.08)
    table.add_(torch.outer(0.5 - table @ common, common))

    def without_common(matrix: Tensor) -> Tensor:
        return matrix - torch.outer(matrix @ common, common)

    # Layer 0: head h peaks at distance h + 1, by the phase between its query and the shared key.
    bands = 6  # the fastest rotations
    key = torch.zeros(dim)
    key[:bands] = 1 / math.sqrt(bands)
    for group in range(config.num_key_value_heads):
        first.k_proj.weight[group * dim:(group + 1) * dim] = 3.9 * torch.outer(key, common)
    for head in range(config.num_attention_heads):
        angle = -(head + 1) * inverse
        query = torch.cat([key[:half] * angle.cos(), key[:half] * angle.sin()])
        first.q_proj.weight[head * dim:(head + 1) * dim] = 3.9 * torch.outer(query, common)
    nn.init.orthogonal_(first.v_proj.weight)
    nn.init.orthogonal_(first.o_proj.weight)

    # What they fetch goes to directions of its own, where layer 1 finds it in its slowest rotations.
    slow = (inverse < 4e-3).nonzero().flatten()
    slow = torch.cat([slow, slow + half])
    rank = len(slow) // NGRAM
    own = without_common(nn.init.orthogonal_(torch.empty(rank, width)))
    fetched = without_common(nn.init.orthogonal_(torch.empty(rank * NGRAM, width))).view(NGRAM, rank, width)
    for group in range(config.num_key_value_heads):
        first.v_proj.weight[group * dim:group * dim + rank] = own
    second.q_proj.weight[:dim] = 0
    second.k_proj.weight[:dim] = 0
    for n in range(NGRAM):
        first.o_proj.weight[:, n * dim:(n + 1) * dim] = 0
        first.o_proj.weight[:, n * dim:n * dim + rank] = 0.5 * fetched[n].T
        rows = slow[n * rank:(n + 1) * rank]
        second.q_proj.weight[rows] = 1.6 * (own if n == 0 else 2 * fetched[n - 1])
        second.k_proj.weight[rows] = 3.2 * fetched[n]
    nn.init.orthogonal_(second.v_proj.weight[:dim])
    second.o_proj.weight[:, :dim] = 0.7 * second.v_proj.weight[:dim].T
