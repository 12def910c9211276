"""InfLLM's cache: blocks of neighbouring tokens, the least used of them leave (arXiv:2402.04617)."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.policies.base import Chunk, Policy


class InfLLM(Policy):
    """Score = how much its block is used: attention that the units of the block received, decayed at every commit.

    Args:
        block: consecutive positions that stay or leave together (the paper: 128).
        decay: factor on what was received earlier.

    Deviations: the paper keeps evicted blocks in host memory and fetches the relevant ones back; that grows with the
    stream, so here what leaves is gone. This is a rule by which it chooses what stays on the device: how often a block
    is used. Its local window (4,096 tokens, whose attention to themselves counts for no block) is not kept apart: the
    newest block is scored by what its own tokens pay to it, so that recent blocks win where few fit the budget.
    The units of a block are equal, and of those the newest stay: the last block that has room stays in part, and where
    a budget has no room for a whole block beside what is protected, what stays is the end of the stream alone, as with
    `streaming_llm`: take a smaller block there.
    """

    name = "infllm"
    needs = frozenset({"column_sums", "positions"})
    stateful = True
    planes = 2  # the block's score, and what the unit itself received

    def __init__(self, block: int = 128, decay: float = 0.1):
        if block < 1:
            raise ConfigError(f"policy 'infllm': block is {block!r}; expected at least 1 token")
        if not 0 <= decay <= 1:
            raise ConfigError(f"policy 'infllm': decay is {decay!r}; expected a factor in [0, 1]")
        self.block, self.decay = block, decay

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None and chunk.positions is not None, "declared in needs"
        received = chunk.column_sums()
        received[:, :chunk.scores.shape[-1]] += self.decay * chunk.scores[1]
        return torch.stack([sum_of_blocks(received, chunk.positions // self.block, self.block), received])


def sum_of_blocks(x: Tensor, blocks: Tensor, longest: int) -> Tensor:
    """Sums of x [H, N] over runs of equal, ascending `blocks` [H, N], at every place of a run; no run is longer than
    `longest`. By doubling, in one order: the same bits every time, unlike scatter_add on a GPU."""
    apart, total = [1 << n for n in range((longest - 1).bit_length())], x.shape[1]
    out = x.clone()
    for step in apart:  # sums up to each place
        if step < total:
            out[:, step:] = out[:, step:] + out[:, :-step].masked_fill(blocks[:, step:] != blocks[:, :-step], 0)
    for step in apart:  # the sum at the end of a run, to all of it
        if step < total:
            out[:, :-step] = torch.where(blocks[:, step:] == blocks[:, :-step], out[:, step:], out[:, :-step])
    return out
