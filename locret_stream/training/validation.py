"""What the answers of held-out examples cost with a budget, measured as at inference: by the engine, chunk by chunk.

Knows engines and policies; knows nothing of what is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from locret_stream import policies
from locret_stream.config import ModelShape
from locret_stream.engine import Engine, EngineState
from locret_stream.errors import ConfigError, InvalidTokens, WindowExceeded
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.training.config import LEAST_EXAMPLES, TrainConfig
from locret_stream.training.data import Example, fit


def policy_for(made: HeadsConfig | TrainConfig) -> str:
    """The name of the policy that scores with heads that are made so."""
    return "trimkv" if made.output == "retention" else "kvzap" if made.features == "hidden" else "locret"


class Recording(policies.Listening):
    """Scores as another policy does, and notes what went by.

    Attributes:
        logprobs: [T] of the chunk, see `Chunk`.
        scores: by layer, [H, n] fp32 of all units that the layer held or was given.
    """

    def __init__(self, inner: policies.Policy):
        super().__init__(inner, self._note)
        self.logprobs, self.scores = torch.empty(0), dict[int, Tensor]()

    def _note(self, chunk: policies.Chunk, found: Tensor) -> None:
        assert chunk.logprobs is not None
        self.logprobs = chunk.logprobs
        best = found[0] if found.dim() == 3 else found
        self.scores[chunk.layer] = best if self.stateful else torch.cat([chunk.scores[0], best.float()], dim=-1)


def answer_nll(engine: Engine, policy: Recording, example: Example, behind: EngineState | None = None) -> float:
    """-log p of the answer tokens of an example, summed, as the engine would give them one by one; in slot 0, or in
    slot 1 on a copy of the context `behind`, which has nothing pending.

    Whether a token is pending or committed changes nothing of what it is told by those before it, so whole chunks are
    committed; the last one is filled up with ids that no row which counts can see.
    """
    ids, logprobs = example.ids.tolist(), []
    state = engine.open(0) if behind is None else engine.fork(behind, 1)
    ids += [0] * (-len(ids) % engine.chunk_size)
    engine.accept(state, ids)
    while engine.ready(state):
        engine.commit(state)
        logprobs.append(policy.logprobs)
    found = torch.cat(logprobs).double().cpu()
    return -sum(float(found[start:end].sum()) for start, end in example.answer_spans)


def held_units(tokens: int, chunk_size: int) -> int:
    """Units that are committed when the last of `tokens` tokens is read: budgets of so many evict nothing."""
    return (tokens - 1) // chunk_size * chunk_size


def usable(shape: ModelShape, examples: Sequence[Example], units: int, chunk_size: int, most: int, *,
           verb: str, full: bool = False) -> list[Example]:
    """The first `most` that a uniform budget evicts something of; whole chunks of them fit the window. `full`: the
    memory is full before an example begins.

    Raises:
        ConfigError: too few. WindowExceeded: the budget itself does not fit. InvalidTokens: ids outside the vocabulary.
            Messages begin with `verb`.
    """
    limit, found, longest = shape.window // chunk_size * chunk_size, [], 0
    if units + chunk_size > shape.window:
        raise WindowExceeded(f"{verb}: {units} units + chunk_size {chunk_size}: the model knows {shape.window} "
                             "positions; expected less")
    for example in examples:
        largest = int(example.ids.max())
        if largest >= shape.vocab:
            raise InvalidTokens(f"{example.where or 'example'}: found token id {largest}; expected ids below the "
                                f"model's vocabulary of {shape.vocab}")
        fitted = fit(example, limit)
        if fitted is not None:
            longest = max(longest, len(fitted.ids))
            if held_units(len(fitted.ids), chunk_size) > (0 if full else units):
                found.append(fitted)
    if len(found) < LEAST_EXAMPLES:
        raise ConfigError(
            f"{verb}: of {len(examples)} held-out examples, the longest of {longest} tokens, {len(found)} are so "
            f"long that anything is evicted at {units} units{' (full before)' * full} in chunks of {chunk_size}; "
            f"expected at least {LEAST_EXAMPLES}: more or longer examples (at most {limit} tokens fit the model), a "
            "larger share held out, or fewer units")
    return found[:most]


def digest_of(heads: RetainingHeads) -> str:
    """Of the heads' weights and what they are, the shares left out."""
    chain = hashlib.blake2b(msgspec.json.encode(msgspec.structs.replace(heads.config, budget_shares=None)),
                            digest_size=16)
    for name, tensor in sorted(heads.state_dict().items()):
        chain.update(name.encode())
        chain.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return chain.hexdigest()
