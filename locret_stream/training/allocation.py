"""Which layer needs how many units: measured with the engine, kept in allocation.json, stored with the heads as shares.

While one full-attention layer keeps few units and all others keep everything, how well are the answers predicted? The
answer loss at several budgets is the layer's curve. `layer_shares` spends the total where it gains most (greedy by
marginal gain, as in classical bit allocation: Shoham and Gersho, IEEE TASSP 36(9), 1988).

The division is then measured against even budgets, both as at inference, and is used only if it is better by more than
noise. The examples that made a division would flatter it: each half of them is measured with the division that the
other half makes. These losses decide and are reported; the division that is stored is made by all examples. Layers
with a sliding window get what a uniform budget gives them, their window at most.

Streams are longer than examples, and what fills a layer is also what heads mistake for an answer: with a `background`
every measurement reads a long text first, see the module of that name.

Cost: (layers * budgets + 3) * (examples * tokens + background) of forward passes and the background once more, one
example at a time. Memory: one slot in which all layers but one keep the longest example, as much as the training of
the heads needs too; with a background two slots.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.config import Budget, ModelShape, StreamConfig
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError
from locret_stream.files import alone_in
from locret_stream.heads import RetainingHeads
from locret_stream.heads.module import CONFIG
from locret_stream.models import Attachment, attached
from locret_stream.policies import Policy, make_policy
from locret_stream.training.background import Background
from locret_stream.training.checkpoint import ALLOCATION, expect_same, read_json, write_json
from locret_stream.training.config import AllocationConfig, TrainConfig
from locret_stream.training.data import Example
from locret_stream.training.layer_shares import CROSSED, by_curves, crossed, exceeds, halves, proportional
from locret_stream.training.results import (
    DIVIDED,
    EVEN,
    FULL,
    HALVES,
    Allocation,
    Measurement,
    Progress,
    ProgressCallback,
)
from locret_stream.training.sampler import Source
from locret_stream.training.validation import (
    Recording,
    committed_units,
    digest_of,
    expect_eviction,
    measure,
    policy_for,
    usable,
)

Divide = Callable[[Sequence[int]], list[int]]
"""From indices of examples to the units of the full-attention layers that these examples ask for."""


def held_out_examples(attachment: Attachment, examples: Sequence[Example], config: TrainConfig) -> list[Example]:
    """All examples that `train_heads` with this config never trains on.

    Raises:
        ConfigError: too few to split. InvalidTokens: ids outside the vocabulary.
    """
    limit = min(config.max_tokens, attachment.shape.window)
    config = msgspec.structs.replace(config, held_out_max=max(1, len(examples)))
    return Source(examples, config, limit, attachment.shape.vocab).held_out


@torch.no_grad()
def allocate(model: PreTrainedModel | Attachment, heads: str | os.PathLike[str], examples: Sequence[Example],
             config: AllocationConfig | None = None, *, background: Tensor | Sequence[int] | None = None,
             progress: ProgressCallback | None = None, restart: bool = False) -> Allocation:
    """Divide the budget among the layers and store the shares in the folder `heads`, for `allocation="adaptive"`.

    The same call goes on where an interrupted one stopped: every measurement is in allocation.json as soon as it is
    made. A finished allocation is returned at once.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        heads: a folder of retaining heads of any kind; they score with the policy that takes them.
        examples: examples that the heads were not trained on. The first `config.examples` are used of those that commit
            more than `config.units` units before the last reply ends (with a background, any at all), as nothing is
            evicted in the others. At least four of them must differ.
        background: token ids [N] of a text like most of what the memory will read, about which nothing is asked.
        progress: called after every example. restart: forget what was measured before.

    Raises:
        ConfigError: values that cannot work, too few examples that evict anything, or an allocation.json of another
            call (the message names what differs), or another run is at work there. The heads stay as they were.
        WindowExceeded: units + chunk_size exceed the model's window.
        HeadsMismatch: no heads, or those of another model. InvalidTokens: ids outside the vocabulary.
    """
    config, folder = config or AllocationConfig(), Path(heads)
    with attached(model) as attachment, alone_in(folder):
        loaded = RetainingHeads.load(folder)
        attachment.expect_one_device("training")
        attachment.check_heads(loaded)
        digest = digest_of(loaded)
        loaded = loaded.to(attachment.device, attachment.dtype if attachment.dtype.itemsize < 4 else None)
        measurable = usable(attachment.shape, examples, config.units, config.chunk_size, config.examples,
                            verb="allocate", full=background is not None)
        run = _Run(attachment, loaded, digest, measurable, background, config, folder / ALLOCATION,
                   progress or (lambda at: None), restart)
        allocation = run.finish()
        heads_config = msgspec.structs.replace(loaded.config, budget_shares=allocation.shares)
        if heads_config != loaded.config:  # the weights stay untouched
            write_json(folder / CONFIG, heads_config)
        return allocation


class _Run:
    """One allocation in its file: the measurements that were made, and those that are left to make."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, digest: str, examples: list[Example],
                 background: Tensor | Sequence[int] | None, config: AllocationConfig, path: Path,
                 progress: ProgressCallback, restart: bool):
        self.attachment, self.heads, self.examples = attachment, heads, examples
        self.config, self.path, self.progress = config, path, progress
        shape = attachment.shape
        self.layers = [layer for layer, window in enumerate(shape.sliding) if window is None]
        sinks, stabilizers = config.protected
        expect_eviction("allocate", shape, heads.config, background is not None)
        self.budget(None).per_layer(shape)  # raises where even layers cannot keep what is protected
        digests = [example.digest() for example in examples]
        self.halves = halves(digests)
        self.before: Tensor | None = None
        if background is not None:
            longest = committed_units(max(len(example.ids) for example in examples), config.chunk_size)
            slices = Background(background, config.background_tokens, config.chunk_size, longest, shape.vocab)
            self.before = slices.to_measure()
            digests.append(slices.digest())
        self.state = self._read(restart, Allocation(
            config=config, policy=policy_for(heads.config), fingerprint=attachment.fingerprint, heads=digest,
            data=hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest(), sinks=sinks, stabilizers=stabilizers,
            behind=0 if self.before is None else len(self.before),
            tokens=tuple(len(example.ids) for example in examples),
            answer_tokens=tuple(example.answer_tokens for example in examples), sliding=shape.sliding))
        self.total = 0

    def _read(self, restart: bool, fresh: Allocation) -> Allocation:
        if restart or not self.path.is_file():
            return fresh
        stored = read_json(self.path, Allocation, "remove it to measure anew")
        names = ("policy", "fingerprint", "heads", "data", "sinks", "stabilizers", "version")
        expect_same(self.path, "allocation", stored, fresh, names, "remove that file to measure anew")
        return stored

    def finish(self) -> Allocation:
        """Make all measurements that are left, and settle the shares."""
        if self.state.shares is not None:
            return self.state
        config, shape = self.config, self.attachment.shape
        whole = committed_units(max(self.state.tokens), config.chunk_size)
        full = (whole,) * shape.layers
        total, most = self._total()
        least = max(int(config.units * min(config.factors)), sum(config.protected) + 1)
        largest = min(most, total - least * (len(self.layers) - 1))
        points = sorted({min(max(least, int(config.units * factor)), largest) for factor in config.factors})
        points = [units for units in points if units < whole]
        self.total = (3 + len(points) * len(self.layers)) * len(self.examples)
        exact = self.measure(FULL, full)
        top = [whole] if whole <= largest else []  # nothing is evicted at this point, whose loss is that of `exact`
        nll = []
        for layer in self.layers:
            alone = [self.measure(f"layer {layer}: {units} units", (*full[:layer], units, *full[layer + 1:]))
                     for units in points]
            nll.append([measurement.nll for measurement in alone] + [exact.nll] * len(top))

        def division(among: Sequence[int]) -> list[int]:
            return by_curves([*points, *top], nll, self.state.answer_tokens, total, most, among)

        return self._settle(division, proportional([0.0] * len(self.layers), total, 0, most))

    def _settle(self, division: Divide, even: list[int]) -> Allocation:
        """Choose the division that all examples make, where the division of each half is better for the other half than
        even budgets; else choose even ones."""
        weights, everyone = self.state.answer_tokens, range(len(self.examples))
        even_units, own_units = (self._of_all_layers(units) for units in (even, division(everyone)))
        before = self.measure(EVEN, self._budgets(even_units))
        nll = crossed(self.halves, division, lambda side, units: self.measure(
            HALVES[side], self._budgets(self._of_all_layers(units)), self.halves[side]).nll)
        after = Measurement(budgets=self._budgets(own_units), nll=tuple(nll), loss=sum(nll) / sum(weights), seconds=0.0)
        chosen = own_units if exceeds(before.nll, after.nll, weights, CROSSED) else even_units
        self._keep(units=own_units, shares=tuple(units / self.config.units for units in chosen),
                   measured={**self.state.measured, DIVIDED: after})
        return self.state

    def _total(self) -> tuple[int, int]:
        """Units of the full-attention layers together, and the most that one of them can get."""
        shape, units = self.attachment.shape, self.config.units
        most = shape.window - self.config.chunk_size
        sliding = sum(min(units, window) for window in shape.sliding if window is not None)
        return min(units * shape.layers - sliding, most * len(self.layers)), most

    def _of_all_layers(self, units_of_full: list[int]) -> tuple[int, ...]:
        """Units [L], their sum exactly L * units: `units_of_full` for the full-attention layers in order, the rest of
        the total for the others."""
        shape, units = self.attachment.shape, self.config.units
        sliding = [float(min(units, window)) for window in shape.sliding if window is not None]
        rest = units * shape.layers - sum(units_of_full)
        full, others = iter(units_of_full), iter(proportional(sliding, rest, 0, rest) if sliding else ())
        return tuple(next(full) if window is None else next(others) for window in shape.sliding)

    def budget(self, units: tuple[int, ...] | None) -> Budget:
        """The budget as it is given at inference: `units` [L] of each layer, or uniform for None."""
        sinks, stabilizers = self.config.protected
        return Budget(units=self.config.units, sinks=sinks, stabilizers=stabilizers,
                      allocation="uniform" if units is None else tuple(float(each) for each in units))

    def _budgets(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """Units [L] that the layers get at inference."""
        return self.budget(units).per_layer(self.attachment.shape)

    def measure(self, name: str, budgets: tuple[int, ...], among: Sequence[int] | None = None) -> Measurement:
        """Answer loss with these budgets, of all examples or those with the indices `among`; read from the file where
        it was measured before."""
        if name not in self.state.measured:
            among = range(len(self.examples)) if among is None else among
            self._keep(measured={**self.state.measured, name: self._measure(name, budgets, among)})
        return self.state.measured[name]

    def _keep(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        write_json(self.path, self.state)

    def _measure(self, name: str, budgets: tuple[int, ...], among: Sequence[int]) -> Measurement:
        policy = Recording(make_policy(self.state.policy, heads=self.heads))
        engine = self._engine(policy, budgets)
        done = sum(len(measurement.nll) for measurement in self.state.measured.values())

        def report(count: int, loss: float) -> None:
            self.progress(Progress(step=done + count, steps=self.total, note=f"{name}: loss {loss:.4f}"))

        return measure(engine, policy, [self.examples[i] for i in among], self.before, report)

    def _engine(self, policy: Policy, budgets: tuple[int, ...]) -> Engine:
        sinks, stabilizers = self.config.protected
        budget = _ExactBudget(units=self.config.units, sinks=sinks, stabilizers=stabilizers, allocation=budgets)
        try:
            return Engine(self.attachment, StreamConfig(budget=budget, chunk_size=self.config.chunk_size,
                                                        policy=policy.name), policy,
                          slots=1 if self.before is None else 2)
        except (RuntimeError, MemoryError) as error:  # torch has several messages for a lack of memory
            raise ConfigError(f"allocate: {self.attachment.device} has no space for {sum(budgets)} units per KV head, "
                              f"all layers together; expected examples of fewer than {max(self.state.tokens)} tokens"
                              ) from error


class _ExactBudget(Budget, frozen=True, kw_only=True):
    """Gives the layers exactly the units of `allocation`, whose mean is more than `units` where most layers keep
    everything."""

    def per_layer(self, shape: ModelShape, shares: tuple[float, ...] | None = None,
                  most: int | None = None) -> tuple[int, ...]:
        assert isinstance(self.allocation, tuple)
        return tuple(int(min(units, window or units))
                     for units, window in zip(self.allocation, shape.sliding, strict=True))
