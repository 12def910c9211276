"""What fills a memory before an example begins: units of a long text about which nothing is asked.

An example fits the model's window; a stream does not, and when a fact arrives the memory is full of what the heads
scored best of all that came before. Heads mistake few tokens of plain text for a fact, but in a million tokens these
few fill any budget. So tuning reads such a text with the engine, under the budget and with the heads as they are, and
lets every example begin behind it: its units compete with those that the heads kept by mistake (hard negatives), and
gradients go to the scores of both. Another slice of the text is read as the heads change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from locret_stream.config import StreamConfig
from locret_stream.engine import Engine, EngineState
from locret_stream.errors import ConfigError
from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment
from locret_stream.policies import Chunk, Listening, make_policy
from locret_stream.training.data import background_ids


class Background:
    """Slices of one text, [n] ids each: the first one to measure with, the others to tune with, in turn.

    Args:
        text: [N] token ids. tokens: of a slice, at most; a slice is whole chunks and at most half of the text.
        least: tokens that a slice must have, or the memory would not be full. vocab: of the model.

    Raises:
        ConfigError: too little text. InvalidTokens: an id outside the vocabulary.
    """

    def __init__(self, text: Tensor | Sequence[int], tokens: int, chunk_size: int, least: int, vocab: int):
        ids = background_ids(text, vocab)
        count = min(tokens, len(ids) // 2) // chunk_size * chunk_size
        if count < max(least, 1):
            raise ConfigError(f"a background of {len(ids):,} tokens gives slices of {count:,}, and the largest "
                              f"layer keeps {least:,}; expected a longer text and at least that many tokens of a slice")
        self.slices = ids[:len(ids) // count * count].view(-1, count)

    def to_measure(self) -> Tensor:
        """The slice that is never tuned with."""
        return self.slices[0]

    def to_tune(self, turn: int) -> Tensor:
        """The slice number `turn`, counted from 0, in an endless rotation over all but the first."""
        return self.slices[1 + turn % (len(self.slices) - 1)]

    def digest(self) -> bytes:
        """16 bytes that name the slices."""
        return hashlib.blake2b(self.slices.numpy().astype("<i8").tobytes(), digest_size=16).digest()


def context_behind(engine: Engine, ids: Tensor) -> EngineState:
    """The context in slot 0 that has read ids [n], whole chunks."""
    state = engine.open(0)
    engine.accept(state, ids.tolist())
    while engine.ready(state):
        engine.commit(state)
    return state


@dataclass(frozen=True)
class Rivals:
    """What one layer keeps of a background: keys before RoPE and values, [H, n, D], in time order.

    inputs: what the layer's heads read of U units, in the last dimension but one: of those that any KV head keeps, and
    of the neighbours over which scores are averaged. first, last: [H, n] into these units; a kept unit's score is the
    mean from its first to its last.
    """

    keys: Tensor
    values: Tensor
    inputs: tuple[Tensor, ...]
    first: Tensor
    last: Tensor

    def scores(self, heads: RetainingHeads, layer: int) -> Tensor:
        """Scores [H, n] with a graph to the heads. In a layer without a head they are negative ages, below the score of
        any newer unit."""
        if not heads.config.has_head(layer):
            count = self.first.shape[1]
            return torch.arange(-count, 0, dtype=torch.float32, device=self.first.device).expand(self.first.shape)
        whole = [part[None] for part in self.inputs]
        scores = (heads.forward(layer, *whole) if heads.config.features == "hidden" else heads.score(layer, *whole))[0]
        if torch.equal(self.first, self.last):
            return scores.gather(-1, self.first)
        sums = nn.functional.pad(scores.double().cumsum(-1), (1, 0))  # double: differences of sums over all units
        sums = sums.gather(-1, self.last + 1) - sums.gather(-1, self.first)
        return (sums / (self.last - self.first + 1)).to(scores.dtype)


class Reading:
    """Reads a slice as a runtime would, and keeps for each kept unit what the heads read of it."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, config: StreamConfig):
        self._positions: dict[int, Tensor] = {}  # by layer, of the U units that any KV head may keep: [U]
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # by layer, of these units
        self._hidden = heads.config.features == "hidden"
        kernel = heads.config.kernel
        self._beside, self._chunk_size = 0 if kernel is msgspec.UNSET else kernel // 2, config.chunk_size
        policy = Listening(make_policy(config.policy, heads=heads), self._record, needs=frozenset())
        self._engine = Engine(attachment, config, policy, slots=1, shares=heads.config.budget_shares)

    def _record(self, chunk: Chunk, scores: Tensor) -> None:
        layer = chunk.layer
        positions = chunk.start + torch.arange(chunk.k.shape[1], device=chunk.k.device)
        inputs: tuple[Tensor, ...] = (chunk.q, chunk.k, chunk.v)
        if self._hidden:
            assert chunk.hidden is not None, "a policy whose heads read hidden states declares them"
            inputs = (chunk.hidden,)
        if layer in self._positions:
            positions = torch.cat([self._positions[layer], positions])
            inputs = tuple(torch.cat(pair, -2) for pair in zip(self._inputs[layer], inputs, strict=True))
        self._positions[layer], self._inputs[layer] = positions, inputs

    @torch.no_grad()
    def read(self, ids: Tensor) -> dict[int, Rivals]:
        """What each layer with full attention keeps behind ids [n], whole chunks."""
        state = self._engine.open(0)
        self._engine.accept(state, ids.tolist())
        while self._engine.ready(state):
            self._engine.commit(state)
            for layer, positions in self._positions.items():
                first, last = self._around(state.store.positions(layer))
                needed = torch.cat([(first + step).minimum(last) for step in range(2 * self._beside + 1)])
                kept = torch.isin(positions, needed.flatten()).nonzero()[:, 0]
                self._positions[layer] = positions[kept]
                self._inputs[layer] = tuple(part.index_select(-2, kept) for part in self._inputs[layer])
        rivals = {layer: self._rivals(state, layer) for layer in sorted(self._positions)}
        self._positions, self._inputs = {}, {}
        return rivals

    def _rivals(self, state: EngineState, layer: int) -> Rivals:
        store, count = state.store, state.store.counts[layer]
        first, last = (torch.searchsorted(self._positions[layer], end.contiguous())
                       for end in self._around(store.positions(layer)))
        return Rivals(store.keys(layer, count)[0].clone(), store.values(layer, count)[0].clone(), self._inputs[layer],
                      first, last)

    def _around(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last position over which the score at each of `positions` is averaged."""
        begin = positions // self._chunk_size * self._chunk_size
        return (torch.maximum(positions - self._beside, begin),
                torch.minimum(positions + self._beside, begin + self._chunk_size - 1))
