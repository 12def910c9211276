"""What training, allocation and tuning are a function of. Knows no tensors and no model code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from locret_stream.config import is_number
from locret_stream.errors import ConfigError

LABELS = ("zscore", "logit", "logprob", "attention")
FEATURES, OUTPUTS = ("qkv", "hidden"), ("score", "retention")
MOST_SEED = 2**40  # torch's generators take it shifted by 20 bits, with the number of an epoch below it
LEAST_EXAMPLES = 4  # two in each half: one alone cannot tell a gain from noise

Check = Callable[[str, bool, str], None]
"""check(name, ok, expected): raises ConfigError about that field of a config unless it is ok."""


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How retaining heads are trained; the defaults are the paper's (arXiv:2410.01805), except for the label.

    Args:
        label: "zscore" (the largest pre-softmax logit, standardised per layer and head), "logit" (the same logit as it
            is, which is the paper's label with two differences, see `labels`), "logprob" (log of the largest softmax
            probability + eps) or "attention" (the probability, by which heads learn to rank: `loss.listwise_loss`;
            without smoothing, and with a background also against plain text). None: "logprob" for output "retention",
            else "zscore". The choice is made at once, so `replace` of the output needs a label too.
        steps: optimiser steps; batch: examples per step, of any lengths (equal lengths share one forward pass).
        lr, betas, weight_decay: of AdamW. warmup: share of the steps with rising lr, which then falls linearly to 0.
        clip: largest magnitude of one gradient element; alpha: weight of the smoothing loss.
        width: of the heads' hidden layer; act: its activation, None for the model's own.
        features: "qkv" (Locret), or "hidden": the input of the layer's attention module (KVzap, TRIM-KV).
        output: "score", or "retention": the rate at which a unit's worth decays, whose label is the worth that remains
            after `horizon` tokens (for policy "trimkv"; always with biases; needs label "logprob").
        layers: that get a head; None: all. In the others the newest units stay.
        query_tokens: Locret-Q: the last ids of the question that stand in front of every example, at most so many,
            where one reply alone makes the labels (see `data.with_query`); for heads used with a focus. 0: none.
        input_norm: LayerNorm without weights before the heads; bias: biases in both layers of the heads; the last one
            starts at the mean label of the first batch. Neither is in the paper.
        kernel: odd width in tokens over which policy `locret` averages scores, stored with the heads: 9 keeps the words
            of a sentence together, 1 averages nothing. With label "attention" the averaged scores are trained, with the
            others each token's own score.
        eps: added to probabilities before the log: the floor of "logprob" labels.
        max_tokens: longer examples are cut (see `data.fit`); the model's window is a second limit.
        held_out: share of the examples kept for evaluation, chosen by hash; held_out_max: at most so many.
        eval_every, checkpoint_every: in steps; the last step always does both.
        budget_shares: per-layer shares stored with the heads for `Budget(allocation="adaptive")`; not trained, and
            replaced by what `allocate` measures.
        block_mib: bound of the largest tensor of attention logits, in MiB.

    Raises:
        ConfigError: naming the value and what was expected.
    """

    label: str | None = None
    steps: int = 3000
    batch: int = 1
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup: float = 2 / 3
    clip: float = 0.5
    alpha: float = 2.5e-3
    width: int = 1024
    act: str | None = None
    features: Literal["qkv", "hidden"] = "qkv"
    output: Literal["score", "retention"] = "score"
    horizon: int = 4096
    layers: tuple[int, ...] | None = None
    query_tokens: int = 0
    input_norm: bool = False
    bias: bool = False
    kernel: int = 1
    eps: float = 1e-5
    max_tokens: int = 10_240
    held_out: float = 0.05
    held_out_max: int = 32
    eval_every: int = 100
    checkpoint_every: int = 100
    seed: int = 0
    budget_shares: tuple[float, ...] | None = None
    block_mib: int = 32

    def __post_init__(self) -> None:
        check = _checking(self, "train")
        if self.label is None:  # run.json names the label that was used
            msgspec.structs.force_setattr(self, "label", "logprob" if self.output == "retention" else "zscore")
        check("label", self.label in LABELS, f"one of {', '.join(LABELS)}")
        check("features", self.features in FEATURES, f"one of {', '.join(FEATURES)}")
        check("output", self.output in OUTPUTS, f"one of {', '.join(OUTPUTS)}")
        check("label", self.output == "score" or self.label == "logprob", "'logprob' for heads of output 'retention'")
        for name in ("steps", "batch", "width", "held_out_max", "eval_every", "checkpoint_every", "block_mib",
                     "horizon"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        check("query_tokens", _whole(self.query_tokens, 0), "a whole number of tokens, 0 for none")
        check("alpha", is_number(self.alpha) and self.alpha >= 0, "0 or more")
        check("kernel", _whole(self.kernel, 1) and self.kernel % 2 == 1, "an odd number of tokens, 1 for no average")
        check("kernel", self.kernel == 1 or (self.features, self.output) == ("qkv", "score"),
              "1 for heads of features 'hidden' or output 'retention': policy locret alone averages")
        _check_optimiser(self, check)
        check("layers", self.layers is None or (bool(self.layers) and all(_whole(layer, 0) for layer in self.layers)
                                                and len(set(self.layers)) == len(self.layers)),
              "None, or numbers of layers, each once")
        for name in ("input_norm", "bias"):
            check(name, isinstance(getattr(self, name), bool), "true or false")
        shares = self.budget_shares
        check("budget_shares", shares is None or (bool(shares) and all(is_number(s) and s > 0 for s in shares)),
              "None or one number above 0 per layer")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update number `step`, counted from 0: linear up, then linear to 0."""
        warm = round(self.steps * self.warmup)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * (self.steps - step) / (self.steps - warm)


class AllocationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the total budget is divided among the layers, see `allocation`.

    Args:
        units: mean over the layers of units per KV head; chunk_size: tokens between two evictions. Both as the memory
            will be used: shares that were measured for one budget are a guess for another.
        sinks, stabilizers: always kept, inside every budget; None: the default of a runtime whose smallest layer has
            the smallest budget that is measured here.
        examples: measure on at most so many.
        factors: the budgets at which a layer is measured, as multiples of `units`; the smallest is the least that any
            layer gets.
        background_tokens: of a background, at most so many are read before the examples, once for each measurement.
        rule: "loss", the only one: by what eviction in one layer costs the answers. Stored in allocation.json.

    Raises:
        ConfigError: naming the value and what was expected.
    """

    units: int = 6000
    chunk_size: int = 1024
    sinks: int | None = None
    stabilizers: int | None = None
    examples: int = 32
    factors: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
    background_tokens: int = 32_768
    rule: str = "loss"

    def __post_init__(self) -> None:
        check = _checking(self, "allocate")
        check("rule", self.rule == "loss", "'loss', the only one")
        for name in ("units", "chunk_size", "background_tokens"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        _check_measured(self, check)
        check("factors", bool(self.factors) and all(is_number(f) and f > 0 for f in self.factors)
              and min(self.factors) <= 1, "numbers above 0, at least one of them not above 1")

    @property
    def protected(self) -> tuple[int, int]:
        """(sinks, stabilizers): as given, or by default as few as the smallest layer can bear."""
        small = math.floor(self.units * min(self.factors))
        return (min(4, self.units // 8, small // 4) if self.sinks is None else self.sinks,
                min(32, self.units // 8, small // 3) if self.stabilizers is None else self.stabilizers)


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How trained heads are tuned with eviction in the loop, see `tuning`.

    Args:
        units: mean over the layers of units per KV head; chunk_size: tokens between two evictions. Both as the memory
            will be used. Layers get the shares stored with the heads, else the same each.
        sinks, stabilizers: always kept, inside every budget; None: the default of a runtime.
        steps, batch, lr, betas, weight_decay, warmup, clip: as of TrainConfig.
        hot, cold: temperature of the gates at the first and at the last step, falling geometrically; in standard
            deviations of a head's scores.
        weight: of the first stage's loss beside the divergence from the full cache, so that scores keep their meaning
            (with label "attention" without a background); for heads of output "retention", of the capacity loss.
        eps: of the labels, as of TrainConfig.
        examples: measure on at most so many.
        background_tokens: of a background, at most so many are read before an example begins; renew_every: steps
            between two readings of it. Checkpoints are then written at these steps, and at no others.
        max_tokens, held_out, seed, block_mib, checkpoint_every: as of TrainConfig; `held_out` must be that of the first
            stage, or the measured examples are among those that it trained on.

    Raises:
        ConfigError: naming the value and what was expected.
    """

    units: int = 6000
    chunk_size: int = 1024
    sinks: int | None = None
    stabilizers: int | None = None
    steps: int = 200
    batch: int = 1
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 0.5
    hot: float = 0.2
    cold: float = 0.01
    weight: float = 1.0
    eps: float = 1e-5
    examples: int = 32
    background_tokens: int = 131_072
    renew_every: int = 25
    max_tokens: int = 10_240
    held_out: float = 0.05
    seed: int = 0
    block_mib: int = 32
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        check = _checking(self, "tune")
        for name in ("units", "chunk_size", "steps", "batch", "background_tokens", "renew_every", "block_mib",
                     "checkpoint_every"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        _check_measured(self, check)
        for name in ("hot", "cold"):
            check(name, is_number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0")
        check("cold", self.cold <= self.hot, f"at most hot, which is {self.hot!r}")
        check("weight", is_number(self.weight) and self.weight >= 0, "0 or more")
        _check_optimiser(self, check)

    def temperature_at(self, step: int) -> float:
        """The temperature of the gates in the update number `step`, counted from 0."""
        return self.hot * (self.cold / self.hot) ** (step / max(1, self.steps - 1))


def _checking(config: msgspec.Struct, what: str) -> Check:
    def check(name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{what}: {name} is {getattr(config, name)!r}; expected {expected}")

    return check


def _check_optimiser(config: TrainConfig | TuneConfig, check: Check) -> None:
    """Check the fields that both stages of training have."""
    for name in ("lr", "clip", "eps"):
        check(name, is_number(getattr(config, name)) and getattr(config, name) > 0, "a number above 0")
    for name in ("warmup", "held_out"):
        check(name, is_number(getattr(config, name)) and 0 <= getattr(config, name) < 1, "a share in [0, 1)")
    check("weight_decay", is_number(config.weight_decay) and config.weight_decay >= 0, "0 or more")
    check("max_tokens", _whole(config.max_tokens, 2), "a whole number of tokens, at least 2")
    check("seed", _whole(config.seed, 0) and config.seed <= MOST_SEED, f"a whole number, 0 to {MOST_SEED:,}")
    check("betas", len(config.betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in config.betas), "two in [0, 1)")


def _check_measured(config: AllocationConfig | TuneConfig, check: Check) -> None:
    """Check the fields that a measurement of answers with a budget needs."""
    check("examples", _whole(config.examples, LEAST_EXAMPLES),
          f"a whole number, at least {LEAST_EXAMPLES}, to tell gains from noise")
    for name in ("sinks", "stabilizers"):
        check(name, getattr(config, name) is None or _whole(getattr(config, name), 0), "None or a number of units")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
