"""Policies that only an evaluation can have: oracles, which know what will be asked, and probes, which measure the
attention of answers and record log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locret_stream.config import ModelShape
from locret_stream.errors import ConfigError
from locret_stream.policies import Chunk, Policy


class Oracle(Policy):
    """Keeps every token of every line from which an answer follows, in every head and layer; all others score 0.

    Attributes:
        wanted: [N], the absolute positions of these tokens in the stream, ascending.
        worth: [L, H, N], their scores; None scores all of them 1. Both are set before the tokens are committed.
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
        is_wanted = wanted[at] == positions
        if self.worth is None:
            return is_wanted.float()
        worth = self.worth[chunk.layer, :, :len(wanted)].to(positions.device)
        return torch.where(is_wanted, worth.gather(1, at), 0.0)


class PerHeadOracle(Oracle):
    """An oracle that decides for each head by itself: a token is worth the attention that the answers pay to it in that
    head, as `Attention` measures it on the wanted lines, the questions and the answers alone."""

    name = "oracle_per_head"


class Attention(Policy):
    """Measures attention over one chunk, of which nothing may be evicted.

    Attributes:
        rows: indices of the tokens whose attention counts. received: [L, H, T], what each token receives from them.
    """

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


class LogprobRecorder:
    """Records log p of every committed token, for a `Listening` policy; nan for the first token of a stream.

    Raises:
        ConfigError: every layer has a sliding window.
    """

    def __init__(self, shape: ModelShape):
        scored = [layer for layer, window in enumerate(shape.sliding) if not window]
        if not scored:
            raise ConfigError("every layer of this model has a sliding window, so that no policy decides about any; "
                              "expected a model with a layer of full attention")
        self.layer = scored[0]
        self.logprobs: list[Tensor] = []  # of each chunk

    def __call__(self, chunk: Chunk, scores: Tensor) -> None:
        if chunk.layer == self.layer:
            assert chunk.logprobs is not None
            self.logprobs.append(chunk.logprobs.cpu())

    def bits(self, tokens: int) -> float:
        """Bits of the first `tokens` tokens; the first token of the stream counts 0."""
        logprobs = torch.cat(self.logprobs)[:tokens]
        return -float(logprobs.nan_to_num(0.0).double().sum()) / math.log(2)
