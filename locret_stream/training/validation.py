"""The answer loss of held-out examples with a budget, measured as at inference: by the engine, chunk by chunk.

Knows engines and policies; knows nothing of what is compared.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from locret_stream import policies
from locret_stream.config import ModelShape
from locret_stream.engine import Engine, EngineState
from locret_stream.errors import ConfigError, WindowExceeded
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.training.background import context_behind
from locret_stream.training.config import LEAST_EXAMPLES, TrainConfig
from locret_stream.training.data import Example, fit
from locret_stream.training.results import Measurement


def policy_for(config: HeadsConfig | TrainConfig) -> str:
    """The name of the policy that scores with heads of this configuration."""
    return "trimkv" if config.output == "retention" else "kvzap" if config.features == "hidden" else "locret"


class Recording(policies.Listening):
    """Scores as another policy does, and keeps the log-probabilities of the newest chunk's tokens.

    Attributes:
        logprobs: [T], see `Chunk`.
    """

    def __init__(self, inner: policies.Policy):
        super().__init__(inner, self._record)
        self.logprobs = torch.empty(0)

    def _record(self, chunk: policies.Chunk, scores: Tensor) -> None:
        assert chunk.logprobs is not None
        self.logprobs = chunk.logprobs


def answer_nll(engine: Engine, policy: Recording, example: Example, behind: EngineState | None = None) -> float:
    """-log p of the answer tokens of an example, summed, as the engine would give them one by one. It is read in slot
    0, or in slot 1 on a copy of the context `behind`, which has nothing pending.

    The logits of a token are the same whether the tokens before it are pending or committed, so whole chunks are
    committed; the last one is filled up with ids that come after every row that counts.
    """
    state = engine.open(0) if behind is None else engine.fork(behind, 1)
    engine.accept(state, example.ids.tolist() + [0] * (-len(example.ids) % engine.chunk_size))
    chunks = []
    while engine.ready(state):
        engine.commit(state)
        chunks.append(policy.logprobs)
    logprobs = torch.cat(chunks).double().cpu()
    return -sum(float(logprobs[start:end].sum()) for start, end in example.answer_spans)


def measure(engine: Engine, policy: Recording, examples: Sequence[Example], background: Tensor | None,
            report: Callable[[int, float], None]) -> Measurement:
    """`answer_nll` of every example, behind ids [n] of a background where there is one; `report(count, loss)` is called
    after each example with the mean per answer token of those measured."""
    started, nll, tokens, loss = time.monotonic(), list[float](), 0, 0.0
    behind = None if background is None else context_behind(engine, background)
    for example in examples:
        nll.append(answer_nll(engine, policy, example, behind))
        tokens += example.answer_tokens
        loss = sum(nll) / tokens
        report(len(nll), loss)
    return Measurement(budgets=engine.budgets, nll=tuple(nll), loss=loss, seconds=time.monotonic() - started)


def committed_units(tokens: int, chunk_size: int) -> int:
    """Units that are committed when the last of `tokens` tokens is read: a budget of so many evicts nothing."""
    return (tokens - 1) // chunk_size * chunk_size


def usable(shape: ModelShape, examples: Sequence[Example], units: int, chunk_size: int, most: int, *,
           verb: str, full: bool = False) -> list[Example]:
    """The first `most` examples in which a uniform budget evicts something, cut to whole chunks inside the window. With
    `full` the memory is full before an example begins, so that any committed unit evicts another.

    Raises:
        ConfigError: too few. WindowExceeded: the budget itself does not fit. InvalidTokens: ids outside the vocabulary.
            Messages begin with `verb`.
    """
    limit, evicting, longest = shape.window // chunk_size * chunk_size, list[Example](), 0
    if units + chunk_size > shape.window:
        raise WindowExceeded(f"{verb}: {units} units + chunk_size {chunk_size}: the model knows {shape.window} "
                             "positions; expected less")
    for example in examples:
        example.expect_vocabulary(shape.vocab)
        fitted = fit(example, limit)
        if fitted is not None:
            longest = max(longest, len(fitted.ids))
            if committed_units(len(fitted.ids), chunk_size) > (0 if full else units):
                evicting.append(fitted)
    if len(evicting) < LEAST_EXAMPLES:
        raise ConfigError(
            f"{verb}: of {len(examples)} held-out examples, the longest of {longest} tokens, {len(evicting)} are so "
            f"long that anything is evicted at {units} units{' (full before)' * full} in chunks of {chunk_size}; "
            f"expected at least {LEAST_EXAMPLES}: more or longer examples (at most {limit} tokens fit the model), a "
            "larger share held out, or fewer units")
    return evicting[:most]


def expect_eviction(verb: str, shape: ModelShape, heads: HeadsConfig | TrainConfig, background: bool) -> None:
    """Raises ConfigError, which begins with `verb`: heads decide nothing in this model, or such heads not behind a
    background."""
    if all(shape.sliding):
        raise ConfigError(f"{verb}: every layer of this model has a sliding window, which bounds what it keeps, so "
                          "that no head decides; expected a layer with full attention")
    if heads.output == "retention" and background and verb == "tune":
        raise ConfigError("tune: found a background, and heads of output 'retention', which learn without eviction; "
                          "expected none")
    if heads.query_tokens and background:
        raise ConfigError(f"{verb}: found a background, and query-aware heads, whose question stands in front of all "
                          "that is read; expected none")


def digest_of(heads: RetainingHeads) -> str:
    """16 bytes in hexadecimal that name the heads' weights and configuration, without its budget shares."""
    digest = hashlib.blake2b(msgspec.json.encode(msgspec.structs.replace(heads.config, budget_shares=None)),
                             digest_size=16)
    for name, tensor in sorted(heads.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
