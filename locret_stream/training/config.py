"""What a training run is a function of, and what it reports. Knows no tensors and no model code."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from locret_stream.errors import ConfigError

LABELS = ("zscore", "logit", "logprob")
FEATURES, OUTPUTS = ("qkv", "hidden"), ("score", "retention")
RULES = ("loss", "scores")
FULL, EVEN, DIVIDED = "full", "even", "divided"
HALVES = ("divided, half 1", "divided, half 2")
MOST_SEED = 2**40  # with the number of an epoch below it, torch's generators take it
LEAST_EXAMPLES = 4  # two in each half: of one alone nothing tells a gain from noise


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How retaining heads are trained; the defaults are the paper's (arXiv:2410.01805), but for the label.

    Args:
        label: "zscore" (the largest pre-softmax logit, standardised per layer and head), "logit" (that, as it is: the
            paper's, but for two things, see `labels`) or "logprob" (log of the largest softmax probability + eps).
            None: "zscore", with which heads keep most (research/findings.py), and "logprob" for output "retention":
            settled at once, so `replace` of the output takes a label.
        steps: optimiser steps; batch: examples per step, of any lengths (equal lengths share one forward).
        lr, betas, weight_decay: of AdamW. warmup: share of the steps with rising lr, then linear to 0.
        clip: largest magnitude of one gradient element; alpha: weight of the smoothing loss.
        width: of the heads' hidden layer; act: its activation, None for the model's own.
        features: "qkv" (Locret), or "hidden": what the layer's attention module is given (KVzap, TRIM-KV).
        output: "score", or "retention": the rate at which a unit's worth decays, so that its label is what is left
            after `horizon` tokens (for policy "trimkv"; always with biases; needs label "logprob").
        query_tokens: Locret-Q: so many ids that end the question stand in front of every example, which labels one
            reply alone (see `data.with_query`); for heads that are used with a focus. 0: none.
        input_norm: LayerNorm without weights before the heads; bias: biases in both of their layers, the last one
            set to the mean label of the first batch at the start. Neither is in the paper.
        eps: what is added to probabilities before the log: the floor of "logprob" labels.
        max_tokens: longer examples are cut (see `data.fit`); the model's window is a second limit.
        held_out: share of the examples kept for evaluation, chosen by hash; held_out_max: at most so many.
        eval_every, checkpoint_every: in steps; the last step always does both.
        budget_shares: per-layer shares stored with the heads for `Budget(allocation="adaptive")`; not trained: what
            `allocate` measures takes their place.
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
    features: str = "qkv"
    output: str = "score"
    horizon: int = 4096
    query_tokens: int = 0
    input_norm: bool = False
    bias: bool = False
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
        if self.label is None:  # what is written down names it
            msgspec.structs.force_setattr(self, "label", "logprob" if self.output == "retention" else "zscore")
        check("label", self.label in LABELS, f"one of {', '.join(LABELS)}")
        check("features", self.features in FEATURES, f"one of {', '.join(FEATURES)}")
        check("output", self.output in OUTPUTS, f"one of {', '.join(OUTPUTS)}")
        check("label", self.output == "score" or self.label == "logprob", "'logprob' for heads of output 'retention'")
        for name in ("steps", "batch", "width", "held_out_max", "eval_every", "checkpoint_every", "block_mib",
                     "horizon"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        check("query_tokens", _whole(self.query_tokens, 0), "a whole number of tokens, 0 for none")
        check("alpha", _number(self.alpha) and self.alpha >= 0, "0 or more")
        _check_optimiser(self, check)
        for name in ("input_norm", "bias"):
            check(name, isinstance(getattr(self, name), bool), "true or false")
        shares = self.budget_shares
        check("budget_shares", shares is None or (bool(shares) and all(_number(s) and s > 0 for s in shares)),
              "None or one number above 0 per layer")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update number `step`, counted from 0: linear up, then linear to 0."""
        warm = round(self.steps * self.warmup)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * (self.steps - step) / (self.steps - warm)


class AllocationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the total budget is to be divided among the layers, see `allocation`.

    Args:
        units: mean over the layers of units per KV head; chunk_size: tokens between two evictions. Both as the memory
            is to be used: shares found for one budget are a guess for another.
        sinks, stabilizers: always kept, of every budget; None: as a runtime protects by default where its smallest
            layer has the least that is measured here.
        examples: measure on at most so many.
        factors: the budgets that a layer is measured at, as multiples of `units`; the smallest is the least that any
            layer will get.
        background_tokens: of a background, at most so many are read before the examples, once for each measurement.
        rule: "loss" (by what evicting in one layer costs the answers) or "scores" (by how many of the best scores of
            all layers lie in each; for heads of label "logprob").

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
        check("rule", self.rule in RULES, f"one of {', '.join(RULES)}")
        for name in ("units", "chunk_size", "background_tokens"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        _check_measured(self, check)
        check("factors", bool(self.factors) and all(_number(f) and f > 0 for f in self.factors)
              and min(self.factors) <= 1, "numbers above 0, at least one of them not above 1")

    @property
    def protected(self) -> tuple[int, int]:
        """(sinks, stabilizers): as given, or by default as few as the smallest layer can bear."""
        small = math.floor(self.units * min(self.factors))
        return (min(4, self.units // 8, small // 4) if self.sinks is None else self.sinks,
                min(32, self.units // 8, small // 3) if self.stabilizers is None else self.stabilizers)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Answer loss with these budgets: `budgets` [L] units per KV head, `nll` nats summed over the answer tokens of each
    example, `loss` their mean over all answer tokens."""

    budgets: tuple[int, ...]
    loss: float
    nll: tuple[float, ...]
    seconds: float


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A division of the budget and all that was measured for it; also written as allocation.json beside the heads.

    policy, fingerprint, heads, data: what scored, and digests of the model, the heads and the examples.
    sinks, stabilizers: as they were protected. tokens, answer_tokens: of each example, [E].
    sliding: [L] windows of the layers that have one; these are not measured, they get what uniform budgets give them.
    behind: tokens of a background that were read before each, 0 without one.
    measured: by name: "full" (nothing of an example is evicted; behind a background, as many units in every layer),
        "layer 2: 64 units" (in that layer alone), "even", "divided, half 1" and "divided, half 2" (the examples of one
        half alone, in their order, with the division that the other half makes), "divided" (these two together: its
        `nll` and `loss` are of examples that had no say in their division; its `budgets` are `units`).
    tops: of each example, units of each layer among the best scores of all, [E][L]; of rule "scores" alone.
    units: the division that all examples make, [L], its sum L * config.units. shares: [L], mean 1: those of `units`,
        or even ones where the answers are no better for it. Both None until all is measured.
    """

    config: AllocationConfig
    policy: str
    fingerprint: str
    heads: str
    data: str
    sinks: int
    stabilizers: int
    tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    sliding: tuple[int | None, ...]
    behind: int = 0
    measured: dict[str, Measurement] = {}
    tops: tuple[tuple[float, ...], ...] | None = None
    units: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    version: int = 2  # 1 judged a division by the examples that made it

    @property
    def top(self) -> tuple[float, ...] | None:
        """Of `tops` the mean over the examples, [L]."""
        return None if self.tops is None else tuple(sum(each) / len(self.tops) for each in zip(*self.tops, strict=True))

    @property
    def curves(self) -> dict[int, dict[int, float]]:
        """Answer loss by units, for every layer that was measured, when that layer alone evicts."""
        found: dict[int, dict[int, float]] = {}
        for name, measurement in self.measured.items():
            if name.startswith("layer "):
                layer = int(name.split()[1].rstrip(":"))
                found.setdefault(layer, {})[measurement.budgets[layer]] = measurement.loss
        return {layer: dict(sorted(curve.items())) for layer, curve in sorted(found.items())}

    @property
    def better(self) -> bool:
        """Whether the division that was found is what `shares` say."""
        return self.units is not None and self.shares == tuple(units / self.config.units for units in self.units)

    @property
    def seconds(self) -> float:
        """What all measurements took."""
        return sum(measurement.seconds for measurement in self.measured.values())


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How trained heads are tuned with eviction in the loop, see `tuning`.

    Args:
        units: mean over the layers of units per KV head; chunk_size: tokens between two evictions. Both as the memory
            is to be used. Layers get what the shares stored with the heads say, else the same each.
        sinks, stabilizers: always kept, of every budget; None: what a runtime protects by default.
        steps, batch, lr, betas, weight_decay, warmup, clip: as of TrainConfig.
        hot, cold: temperature of the gates at the first and the last step, falling geometrically; in standard
            deviations of a head's scores.
        weight: of the first stage's loss beside the divergence from the full cache, so that scores stay what they say;
            of heads of output "retention", of the capacity loss.
        eps: of the labels, as of TrainConfig.
        examples: measure on at most so many.
        background_tokens: of a background, at most so many are read before an example begins; renew_every: steps with
            the same of it. Checkpoints are then made as often, and only so.
        max_tokens, held_out, seed, block_mib, checkpoint_every: as of TrainConfig; `held_out` as the first stage had
            it, or examples are measured on that it was trained on.

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
            check(name, _number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0")
        check("cold", self.cold <= self.hot, f"at most hot, which is {self.hot!r}")
        check("weight", _number(self.weight) and self.weight >= 0, "0 or more")
        _check_optimiser(self, check)

    def temperature_at(self, step: int) -> float:
        """That of the update number `step`, counted from 0."""
        return self.hot * (self.cold / self.hot) ** (step / max(1, self.steps - 1))


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """What tuning came to; also written as tuning.json beside the heads, as it is found.

    fingerprint, heads, data, policy: digests of the model, of the heads before and of the examples, and what scores.
    budgets: units by layer, [L]; sinks, stabilizers: of each. tokens, answer_tokens: of each held-out example, [E].
    behind: tokens of a background that were read before each, 0 without one.
    before, after: answer loss of the heads as they were and tuned, measured by the engine, as at inference.
    kl: divergence from the full cache in the last tenth of the steps, nats per answer token.
    tuned: digest of the tuned heads, if they took the others' place.
    better: whether the tuned heads are better by more than noise, so that they took the others' place.
    All of these None until they are known. seconds: of this process alone, measuring included.
    """

    config: TuneConfig
    policy: str
    fingerprint: str
    heads: str
    data: str
    budgets: tuple[int, ...]
    sinks: int
    stabilizers: int
    tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    behind: int = 0
    before: Measurement | None = None
    after: Measurement | None = None
    kl: float | None = None
    tuned: str | None = None
    better: bool | None = None
    resumed_from: int = 0
    seconds: float = 0.0
    version: int = 1


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is: `loss` of the last step, held-out figures of the last evaluation (None before it).

    Of an allocation: examples read of all that will be; `note` says with which budgets.
    """

    step: int
    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    overlap: float | None = None
    note: str = ""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to; also written as result.json.

    `overlap` is the share of the top 10 % of held-out tokens, per layer and head, that the heads put in their own top
    10 %; `overlap_per_layer` its mean by layer; both with the values before training. `cut` examples were shortened
    to max_tokens, `skipped` ones could not be. `seconds` counts this process alone.
    """

    out: str
    steps: int
    resumed_from: int
    examples: int
    held_out: int
    cut: int
    skipped: int
    loss: float
    held_out_loss: float
    overlap: float
    overlap_before: float
    overlap_per_layer: tuple[float, ...]
    seconds: float


ProgressCallback = Callable[[Progress], None]


def _checking(config: msgspec.Struct, what: str) -> Callable[[str, bool, str], None]:
    """check(name, ok, expected): raises ConfigError about that field of the config unless it is ok."""
    def check(name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{what}: {name} is {getattr(config, name)!r}; expected {expected}")

    return check


def _check_optimiser(config: TrainConfig | TuneConfig, check: Callable[[str, bool, str], None]) -> None:
    """What both stages of training have."""
    for name in ("lr", "clip", "eps"):
        check(name, _number(getattr(config, name)) and getattr(config, name) > 0, "a number above 0")
    for name in ("warmup", "held_out"):
        check(name, _number(getattr(config, name)) and 0 <= getattr(config, name) < 1, "a share in [0, 1)")
    check("weight_decay", _number(config.weight_decay) and config.weight_decay >= 0, "0 or more")
    check("max_tokens", _whole(config.max_tokens, 2), "a whole number of tokens, at least 2")
    check("seed", _whole(config.seed, 0) and config.seed <= MOST_SEED, f"a whole number, 0 to {MOST_SEED:,}")
    check("betas", len(config.betas) == 2 and all(_number(b) and 0 <= b < 1 for b in config.betas), "two in [0, 1)")


def _check_measured(config: AllocationConfig | TuneConfig, check: Callable[[str, bool, str], None]) -> None:
    """What is needed to measure answers with a budget."""
    check("examples", _whole(config.examples, LEAST_EXAMPLES),
          f"a whole number, at least {LEAST_EXAMPLES}, to tell gains from noise")
    for name in ("sinks", "stabilizers"):
        check(name, getattr(config, name) is None or _whole(getattr(config, name), 0), "None or a number of units")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
