"""What only an evaluation can have: policies that know what will be asked, and an ear for the text that passes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locret_stream.config import ModelShape
from locret_stream.errors import ConfigError
from locret_stream.policies import Chunk, Policy


class Oracle(Policy):
    """Keeps every token of every line from which an answer follows, in every head and layer.

    `wanted` [N] holds their absolute positions in the stream, ascending, and `worth` [L, H, N] their scores (alike
    unless they are set); what is not wanted scores 0. Both are set before the tokens are committed.
    """

    name = "oracle"
    needs = frozenset({"positions"})
    stateful = True

    def __init__(self) -> None:
        self.wanted: Tensor = torch.zeros(0, dtype=torch.int64)
        self.worth: Tensor | None = None

    def score(self, chunk: Chunk) -> Tensor:
        positions = chunk.positions
        assert positions is not None
        if not len(self.wanted):
            return torch.zeros(positions.shape, device=positions.device)
        wanted = self.wanted.to(positions.device)
        at = torch.searchsorted(wanted, positions).clamp(max=len(wanted) - 1)
        found = wanted[at] == positions
        if self.worth is None:
            return found.float()
        worth = self.worth[chunk.layer, :, :len(wanted)].to(positions.device)
        return torch.where(found, worth.gather(1, at), 0.0)


class PerHeadOracle(Oracle):
    """The same, each head by itself: a token is worth the attention that the answers pay to it there, as measured by
    `Attention` on the wanted lines and the questions alone."""

    name = "oracle_per_head"


class Attention(Policy):
    """Evicts nothing of one chunk, and remembers the attention that each of its tokens receives from those at `rows`:
    `received` [L, H, T]."""

    name = "attention"
    needs = frozenset({"column_sums"})

    def __init__(self) -> None:
        self.rows: Tensor = torch.zeros(0, dtype=torch.int64)
        self.received: Tensor = torch.zeros(0)

    def begin(self, shape: ModelShape) -> dict[str, Tensor]:
        self.layers = shape.layers
        return {}

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None
        sums = chunk.column_sums(self.rows.to(chunk.k.device))
        if self.received.shape != (self.layers, *sums.shape):
            self.received = torch.zeros(self.layers, *sums.shape)
        self.received[chunk.layer] = sums.cpu()
        return sums[:, :chunk.k.shape[1]]


class Heard:
    """Collects log p of every committed token, for a `Listening` policy; nan for the first of a stream."""

    def __init__(self, shape: ModelShape):
        scored = [layer for layer, window in enumerate(shape.sliding) if not window]
        if not scored:
            raise ConfigError("every layer of this model has a sliding window, so that no policy decides about any; "
                              "expected a model with a layer of full attention")
        self.layer = scored[0]
        self.logprobs: list[Tensor] = []

    def __call__(self, chunk: Chunk, scores: Tensor) -> None:
        if chunk.layer == self.layer:
            assert chunk.logprobs is not None
            self.logprobs.append(chunk.logprobs.cpu())

    def bits(self, tokens: int) -> float:
        """Of the first `tokens` tokens; the first of the stream counts nothing."""
        heard = torch.cat(self.logprobs)[:tokens]
        return -float(heard.nan_to_num(0.0).double().sum()) / math.log(2)
