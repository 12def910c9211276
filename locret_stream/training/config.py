"""What a training run is a function of, and what it reports. Knows no tensors and no model code."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from locret_stream.errors import ConfigError

LABELS = ("logprob", "zscore", "logit")
FEATURES, OUTPUTS = ("qkv", "hidden"), ("score", "retention")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How retaining heads are trained; the defaults are the paper's (arXiv:2410.01805), but for the label.

    Args:
        label: "logprob" (log of the largest softmax probability + eps), "zscore" (the largest pre-softmax logit,
            standardised per layer and head) or "logit" (that, as it is: the paper's).
        steps: optimiser steps; batch: examples per step, of any lengths (equal lengths share one forward).
        lr, betas, weight_decay: of AdamW. warmup: share of the steps with rising lr, then linear to 0.
        clip: largest magnitude of one gradient element; alpha: weight of the smoothing loss.
        width: of the heads' hidden layer; act: its activation, None for the model's own.
        features: "qkv" (Locret), or "hidden": what the layer's attention module is given (KVzap, TRIM-KV).
        output: "score", or "retention": the rate at which a unit's worth decays, so that its label is what is left
            after `horizon` tokens (for policy "trimkv"; always with biases; needs label "logprob").
        input_norm: LayerNorm without weights before the heads; bias: biases in both of their layers, the last one
            set to the mean label of the first batch at the start. Neither is in the paper.
        eps: what is added to probabilities before the log: the floor of "logprob" labels.
        max_tokens: longer examples are cut (see `data.fit`); the model's window is a second limit.
        held_out: share of the examples kept for evaluation, chosen by hash; held_out_max: at most so many.
        eval_every, checkpoint_every: in steps; the last step always does both.
        budget_shares: per-layer shares stored with the heads for `Budget(allocation="auto")`; not trained.
        block_mib: bound of the largest tensor of attention logits, in MiB.

    Raises:
        ConfigError: naming the value and what was expected.
    """

    label: str = "logprob"
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
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise ConfigError(f"train: {name} is {getattr(self, name)!r}; expected {expected}")

        check("label", self.label in LABELS, f"one of {', '.join(LABELS)}")
        check("features", self.features in FEATURES, f"one of {', '.join(FEATURES)}")
        check("output", self.output in OUTPUTS, f"one of {', '.join(OUTPUTS)}")
        check("label", self.output == "score" or self.label == "logprob", "'logprob' for heads of output 'retention'")
        for name in ("steps", "batch", "width", "held_out_max", "eval_every", "checkpoint_every", "block_mib",
                     "horizon"):
            check(name, _whole(getattr(self, name), 1), "a whole number, at least 1")
        check("max_tokens", _whole(self.max_tokens, 2), "a whole number of tokens, at least 2")
        check("seed", _whole(self.seed, 0), "a whole number, 0 or more")
        for name in ("lr", "clip", "eps"):
            check(name, _number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0")
        for name in ("weight_decay", "alpha"):
            check(name, _number(getattr(self, name)) and getattr(self, name) >= 0, "0 or more")
        for name in ("warmup", "held_out"):
            check(name, _number(getattr(self, name)) and 0 <= getattr(self, name) < 1, "a share in [0, 1)")
        check("betas", len(self.betas) == 2 and all(_number(b) and 0 <= b < 1 for b in self.betas), "two in [0, 1)")
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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is: `loss` of the last step, held-out figures of the last evaluation (None before it)."""

    step: int
    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    overlap: float | None = None


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


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
