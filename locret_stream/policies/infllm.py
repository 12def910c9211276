"""InfLLM's cache: blocks of neighbouring tokens, of which the least used leave (arXiv:2402.04617)."""

from __future__ import annotations

import torch
from torch import Tensor

from locret_stream.policies.base import Chunk, Policy


class InfLLM(Policy):
    """Score = the attention that all units of a unit's block received, where every commit multiplies by `decay` what
    was received before.

    Args:
        block: consecutive positions that stay or leave together (the paper: 128).
        decay: factor on the attention of earlier commits.

    Deviations: the paper keeps evicted blocks in host memory, which grows with the stream, and fetches relevant ones;
    here evicted units are lost. This is the paper's rule for what stays on the device: how often a block is used. Its
    local window (4,096 tokens, whose attention to each other counts for no block) does not exist here: the newest block
    is scored by the attention of its own tokens, so that recent blocks win where few fit the budget. The units of a
    block have equal scores, of which the newest stay: the last block that fits stays in part, and where not even one
    block fits beside the protected units, only the end of the stream stays, as with `streaming_llm`. A smaller block
    avoids that.
    """

    name = "infllm"
    needs = frozenset({"column_sums", "positions"})
    stateful = True
    planes = 2  # the score of the block, and the attention that the unit itself received

    def __init__(self, block: int = 128, decay: float = 0.1):
        self.check_knob(block >= 1, "block", block, "at least 1 token")
        self.check_knob(0 <= decay <= 1, "decay", decay, "a factor in [0, 1]")
        self.block, self.decay = block, decay

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None and chunk.positions is not None, "declared in needs"
        received = chunk.column_sums()
        received[:, :chunk.scores.shape[-1]] += self.decay * chunk.scores[1]
        return torch.stack([sum_of_blocks(received, chunk.positions // self.block, self.block), received])


def sum_of_blocks(x: Tensor, blocks: Tensor, longest: int) -> Tensor:
    """Sums of x [H, N] over runs of equal, ascending `blocks` [H, N], written to all places of a run.

    No run is longer than `longest`. Neighbours are added at distances that double, always in one order: unlike
    scatter_add on a GPU that gives the same bits every time.
    """
    distances, total = [1 << n for n in range((longest - 1).bit_length())], x.shape[1]
    out = x.clone()
    for distance in distances:  # every place gets the sum of its run up to there
        if distance < total:
            same = blocks[:, distance:] == blocks[:, :-distance]
            out[:, distance:] = out[:, distance:] + out[:, :-distance].masked_fill(~same, 0)
    for distance in distances:  # every place gets the sum at the end of its run
        if distance < total:
            same = blocks[:, distance:] == blocks[:, :-distance]
            out[:, :-distance] = torch.where(same, out[:, distance:], out[:, :-distance])
    return out
