"""What training, allocation and tuning report and store as JSON. Knows no tensors and no model code."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from locret_stream.training.config import AllocationConfig, TuneConfig

# Names of measurements in an Allocation.
FULL, EVEN, DIVIDED = "full", "even", "divided"
HALVES = ("divided, half 1", "divided, half 2")


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Answer loss with these budgets: `budgets` [L] units per KV head, `nll` nats summed over the answer tokens of each
    example, `loss` their mean over all answer tokens."""

    budgets: tuple[int, ...]
    loss: float
    nll: tuple[float, ...]
    seconds: float


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A division of the budget and all that was measured for it; also written as allocation.json beside the heads.

    policy: what scored. fingerprint, heads, data: digests of the model, the heads and the examples.
    sinks, stabilizers: the protected units of every layer. tokens, answer_tokens: of each example, [E].
    sliding: [L] windows of the layers that have one; these are not measured and get what uniform budgets give them.
    behind: tokens of a background that were read before each example, 0 without one.
    measured: by name: "full" (nothing of an example is evicted; with a background, every layer has as many units),
        "layer 2: 64 units" (in that layer alone), "even", "divided, half 1" and "divided, half 2" (the examples of one
        half, in their order, with the division that the other half makes), "divided" (these two together: its `nll`
        and `loss` are of examples that had no say in their division; its `budgets` are `units`).
    units: the division that all examples make, [L], its sum L * config.units. shares: [L], mean 1: those of `units`,
        or even ones where the answers are no better for it. Both are None until everything is measured.
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
    units: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    version: int = 2  # version 1 judged a division by the examples that made it

    @property
    def curves(self) -> dict[int, dict[int, float]]:
        """Answer loss by units, for every measured layer, when that layer alone evicts."""
        curves: dict[int, dict[int, float]] = {}
        for name, measurement in self.measured.items():
            if name.startswith("layer "):
                layer = int(name.split()[1].rstrip(":"))
                curves.setdefault(layer, {})[measurement.budgets[layer]] = measurement.loss
        return {layer: dict(sorted(curve.items())) for layer, curve in sorted(curves.items())}

    @property
    def better(self) -> bool:
        """Whether the measured division is better than even budgets, so that `shares` are its own."""
        return self.units is not None and self.shares == tuple(units / self.config.units for units in self.units)

    @property
    def seconds(self) -> float:
        """Duration of all measurements together."""
        return sum(measurement.seconds for measurement in self.measured.values())


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a tuning; also written as tuning.json beside the heads, as far as it is measured.

    fingerprint, heads, data, policy: digests of the model, of the heads before and of the examples, and what scores.
    budgets: units by layer, [L]; sinks, stabilizers: of each. tokens, answer_tokens: of each held-out example, [E].
    behind: tokens of a background that were read before each example, 0 without one.
    before, after: answer loss of the heads before and after tuning, measured by the engine, as at inference.
    kl: divergence from the full cache in the last tenth of the steps, nats per answer token.
    tuned: digest of the tuned heads, if they replaced the first ones.
    better: whether the tuned heads are better by more than noise, so that they replaced the first ones.
    Each of these is None until it is measured. seconds: of this process alone, measurements included.
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


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a training run; also written as result.json.

    `overlap` is the share of the top 10 % of held-out tokens, per layer and head, that the heads put in their own top
    10 %; `overlap_per_layer` its mean by layer, `overlap_before` its value before training. `cut` examples were
    shortened to max_tokens, `skipped` ones could not be. `seconds` counts this process alone.
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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is: `loss` of the last step, held-out figures of the last evaluation (None before the first one).

    Of an allocation, `step` counts the examples read and `steps` all that will be; `note` says with which budgets.
    """

    step: int
    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    overlap: float | None = None
    note: str = ""


ProgressCallback = Callable[[Progress], None]
