"""What a memory is full of before an example begins: units of a long text that nobody will ask about.

An example fits the model's window; a stream does not, and by the time a fact of it arrives the memory holds what the
heads liked best of all that went by. Few tokens of plain text are mistaken for a fact, but of a million tokens these
few fill any budget. So tuning reads such a text with the engine, under the budget and with the heads as they are, and
lets every example begin behind it: its units compete with those that the heads wrongly kept (hard negatives), and
gradients go to the scores of both. The text is read anew, another slice of it, as the heads change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.config import StreamConfig
from locret_stream.engine import Engine, EngineState
from locret_stream.errors import ConfigError, InvalidTokens
from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment
from locret_stream.policies import Chunk, Listening, make_policy


class Background:
    """Slices of one text, [n] ids each: the first to measure with, the others to tune with, in turn. Allocation, which
    measures alone, takes the first.

    Args:
        ids: [N] token ids. tokens: of a slice, at most; whole chunks, and at most half of the text.
        least: tokens that a slice must have, or the memory would not be full. vocab: of the model.

    Raises:
        ConfigError: too little text. InvalidTokens: an id outside the vocabulary.
    """

    def __init__(self, ids: Tensor, tokens: int, chunk_size: int, least: int, vocab: int):
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu").flatten()
        count = min(tokens, len(ids) // 2) // chunk_size * chunk_size
        if count < max(least, 1):
            raise ConfigError(f"a background of {len(ids):,} tokens gives slices of {count:,}, and the largest "
                              f"layer holds {least:,}; expected a longer text and at least that many tokens of a slice")
        for wrong in (int(ids.min()), int(ids.max())):
            if not 0 <= wrong < vocab:
                raise InvalidTokens(f"the background has token id {wrong}; expected ids from 0 to below the "
                                    f"model's vocabulary of {vocab}")
        self.slices = ids[:len(ids) // count * count].view(-1, count)

    def to_measure(self) -> Tensor:
        """The slice that is never tuned with."""
        return self.slices[0]

    def to_tune(self, turn: int) -> Tensor:
        """The slice of that turn, counted from 0."""
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
    """What one layer holds of a background: keys before RoPE and values, [H, n, D], in time order.

    inputs: what the layer's heads read of the U units that any of them holds, units in the last dimension but one;
    index: [H, n] into these.
    """

    keys: Tensor
    values: Tensor
    inputs: tuple[Tensor, ...]
    index: Tensor

    def scores(self, heads: RetainingHeads, layer: int) -> Tensor:
        """[H, n] with a graph to the heads; those of a layer without a head are by age, and below any newer unit's."""
        if not heads.config.has_head(layer):
            count = self.index.shape[1]
            return torch.arange(-count, 0, dtype=torch.float32, device=self.index.device).expand(self.index.shape)
        whole = [part[None] for part in self.inputs]
        found = (heads.forward(layer, *whole) if heads.config.features == "hidden" else heads.score(layer, *whole))[0]
        return found.gather(-1, self.index)


class Reading:
    """Reads a slice as a runtime would, and keeps beside each unit that is held what the heads read of it."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, config: StreamConfig):
        self._hidden, self._seen = heads.config.features == "hidden", dict[int, tuple[Tensor, tuple[Tensor, ...]]]()
        policy = Listening(make_policy(config.policy, heads=heads), self._note, needs=frozenset())
        self._engine = Engine(attachment, config, policy, slots=1, shares=heads.config.budget_shares)

    def _note(self, chunk: Chunk, scores: Tensor) -> None:
        where = chunk.start + torch.arange(chunk.k.shape[1], device=chunk.k.device)
        inputs = (chunk.hidden,) if self._hidden else (chunk.q, chunk.k, chunk.v)
        if chunk.layer in self._seen:
            before, held = self._seen[chunk.layer]
            where = torch.cat([before, where])
            inputs = tuple(torch.cat(pair, -2) for pair in zip(held, inputs, strict=True))
        self._seen[chunk.layer] = where, inputs

    @torch.no_grad()
    def read(self, ids: Tensor) -> dict[int, Rivals]:
        """What each layer with full attention holds behind ids [n], whole chunks."""
        state = self._engine.open(0)
        self._engine.accept(state, ids.tolist())
        while self._engine.ready(state):
            self._engine.commit(state)
            for layer, (where, inputs) in self._seen.items():
                held = torch.isin(where, state.store.positions(layer).flatten()).nonzero()[:, 0]
                self._seen[layer] = where[held], tuple(part.index_select(-2, held) for part in inputs)
        return {layer: self._rivals(state, layer, *self._seen.pop(layer)) for layer in sorted(self._seen)}

    def _rivals(self, state: EngineState, layer: int, where: Tensor, inputs: tuple[Tensor, ...]) -> Rivals:
        store, count = state.store, state.store.counts[layer]
        return Rivals(store.keys(layer, count)[0].clone(), store.values(layer, count)[0].clone(), inputs,
                      torch.searchsorted(where, store.positions(layer).contiguous()))
