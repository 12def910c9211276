"""Which layer needs how many units: measured with the engine, kept in allocation.json, stored with the heads as shares.

Rule "loss": with one full-attention layer holding few units and all others everything, how well are the answers
predicted? That, at several budgets, is the layer's curve; `division` spends the total where it gains most (greedy by
marginal gain, as in classical bit allocation: Shoham and Gersho, IEEE TASSP 36(9), 1988).

Rule "scores": nothing is evicted; of all units of an example the best L * units per head are taken, whatever their
layer, and counted (Ada-KV, arXiv:2407.11550, across layers in place of across heads). One pass, but scores must be
comparable: heads of label "logprob".

Either way the division is then measured against even budgets, both as at inference, and is used only if it is better
by more than noise. Examples would flatter what they made themselves: each half of them is measured with the division
that the other half makes, and these losses decide and are reported; kept is the division that all of them make. Layers
with a sliding window get what a uniform budget gives them, their window at most.

Streams are longer than examples, and what fills a layer is also what heads mistake for an answer: with a `background`
every measurement reads a long text first, see the module of that name.

Cost: (layers * budgets + 3) * (examples * tokens + background) of forward and the background once more, one example at
a time. Memory: one slot in which all layers but one hold the longest example, as the training of the heads does too;
with a background two.
"""

from __future__ import annotations

import hashlib
import os
import time
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
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.heads.module import CONFIG
from locret_stream.models import Attachment, attached
from locret_stream.policies import Policy, make_policy
from locret_stream.training.background import Background, context_behind
from locret_stream.training.checkpoint import ALLOCATION, expect_same, read_json, write_json
from locret_stream.training.config import (
    DIVIDED,
    EVEN,
    FULL,
    HALVES,
    Allocation,
    AllocationConfig,
    Measurement,
    Progress,
    ProgressCallback,
    TrainConfig,
)
from locret_stream.training.data import Example
from locret_stream.training.layer_shares import CROSSED, by_curves, crossed, exceeds, halves, proportional
from locret_stream.training.sampler import Source
from locret_stream.training.validation import Recording, answer_nll, digest_of, held_units, policy_for, usable

Divide = Callable[[Sequence[int]], list[int]]
"""Units of the full-attention layers, by the examples of these indices."""


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
    made. A finished one is returned at once.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        heads: a folder of retaining heads of any kind; they score by the policy that takes them.
        examples: ones that the heads were not trained on. Used are the first `config.examples` of those in which more
            than `config.units` units would be held when the last reply is given, with a background any; of the others
            nothing is learnt. At least four of them differ.
        background: token ids [N] of a text like most of what the memory will read, about which nothing is asked.
        progress: called after every example. restart: forget what was measured before.

    Raises:
        ConfigError: values that cannot work, too few examples that evict anything, or an allocation.json of another
            call (the message names what differs), or another run is at work there. The heads stay as they were.
        WindowExceeded: units + chunk_size.
        HeadsMismatch: no heads, or those of another model. InvalidTokens: ids outside the vocabulary.
    """
    config, folder = config or AllocationConfig(), Path(heads)
    with attached(model) as attachment, alone_in(folder):
        loaded = RetainingHeads.load(folder)
        attachment.expect_one_device("training")
        attachment.check_heads(loaded)
        digest = digest_of(loaded)
        loaded = loaded.to(attachment.device, attachment.dtype if attachment.dtype.itemsize < 4 else None)
        found = usable(attachment.shape, examples, config.units, config.chunk_size, config.examples, verb="allocate",
                       full=background is not None)
        run = _Run(attachment, loaded, digest, found, background, config, folder / ALLOCATION,
                   progress or (lambda at: None), restart)
        made = run.finish()
        described = msgspec.structs.replace(loaded.config, budget_shares=made.shares)
        if described != loaded.config:  # the weights stay untouched
            write_json(folder / CONFIG, described)
        return made


def expect_divisible(shape: ModelShape, heads: HeadsConfig | TrainConfig, rule: str, background: bool) -> None:
    """Raises ConfigError: that rule cannot divide a budget for heads that are made so, or not behind a background."""
    if all(shape.sliding):
        raise ConfigError("allocate: every layer of this model has a sliding window, which bounds what it holds; "
                          "expected a layer with full attention")
    if heads.query_tokens and background:
        raise ConfigError("allocate: found a background, and query-aware heads, whose question stands in front of all "
                          "that is read; expected none")
    if rule == "scores" and background:
        raise ConfigError("allocate: rule 'scores' counts the units of examples alone; expected no background, or rule "
                          "'loss'")
    some = getattr(heads, "trained_layers", None) is not None  # training makes heads for every layer
    if rule == "scores" and (heads.label != "logprob" or some):
        raise ConfigError(f"allocate: rule 'scores' compares scores of all layers; found heads of label "
                          f"{heads.label!r}{' in some layers alone' if some else ''}; expected 'logprob' in all "
                          "layers, or rule 'loss'")


class _Run:
    """One allocation in its file: what is measured already, and what is still to be."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, digest: str, examples: list[Example],
                 background: Tensor | Sequence[int] | None, config: AllocationConfig, path: Path,
                 progress: ProgressCallback, restart: bool):
        self.attachment, self.heads, self.examples = attachment, heads, examples
        self.config, self.path, self.progress = config, path, progress
        shape = attachment.shape
        self.layers = [layer for layer, window in enumerate(shape.sliding) if window is None]
        sinks, stabilizers = config.protected
        expect_divisible(shape, heads.config, config.rule, background is not None)
        self.budget(None).per_layer(shape)  # raises where not even equal layers hold what is protected
        held, chain = held_units(max(len(e.ids) for e in examples), config.chunk_size), [e.digest() for e in examples]
        self.halves = halves(chain)
        self.before: Tensor | None = None
        if background is not None:
            slices = Background(background, config.background_tokens, config.chunk_size, held, shape.vocab)
            self.before = slices.to_measure()
            chain.append(slices.digest())
        self.state = self._read(restart, Allocation(
            config=config, policy=policy_for(heads.config), fingerprint=attachment.fingerprint, heads=digest,
            data=hashlib.blake2b(b"".join(chain), digest_size=16).hexdigest(), sinks=sinks, stabilizers=stabilizers,
            behind=0 if self.before is None else len(self.before),
            tokens=tuple(len(example.ids) for example in examples),
            answer_tokens=tuple(sum(end - start for start, end in e.answer_spans) for e in examples),
            sliding=shape.sliding))
        self.total = 0

    def _read(self, restart: bool, fresh: Allocation) -> Allocation:
        if restart or not self.path.is_file():
            return fresh
        there = read_json(self.path, Allocation, "remove it to measure anew")
        if there.version == 1:
            there = _judged_anew(there)
        names = ("policy", "fingerprint", "heads", "data", "sinks", "stabilizers", "version")
        expect_same(self.path, "allocation", there, fresh, names, "remove that file to measure anew")
        return there

    def finish(self) -> Allocation:
        """All that is left to do."""
        if self.state.shares is not None:
            return self.state
        config, shape = self.config, self.attachment.shape
        held = held_units(max(self.state.tokens), config.chunk_size)
        full = (held,) * shape.layers
        total, most = self._total()
        least = max(int(config.units * min(config.factors)), sum(config.protected) + 1)
        largest = min(most, total - least * (len(self.layers) - 1))
        points = sorted({min(max(least, int(config.units * factor)), largest) for factor in config.factors})
        points = [units for units in points if units < held]
        self.total = (3 + (len(points) * len(self.layers) if config.rule == "loss" else 0)) * len(self.examples)
        whole = self.measure(FULL, full)
        if config.rule == "scores":
            def division(among: Sequence[int]) -> list[int]:
                tops = zip(*(self.state.tops[i] for i in among), strict=True)
                return proportional([sum(each) / len(among) for each in tops], total, least, most)
        else:
            nll, top = [], [held] if held <= largest else []  # there nothing is evicted, and nothing to measure
            for layer in self.layers:
                budgets = [(*full[:layer], units, *full[layer + 1:]) for units in points]
                made = [self.measure(f"layer {layer}: {units} units", each)
                        for units, each in zip(points, budgets, strict=True)]
                nll.append([m.nll for m in made] + [whole.nll] * len(top))

            def division(among: Sequence[int]) -> list[int]:
                return by_curves([*points, *top], nll, self.state.answer_tokens, total, most, among)
        return self._settle(division, proportional([0.0] * len(self.layers), total, 0, most))

    def _settle(self, division: Divide, even: list[int]) -> Allocation:
        """Take the division of all over even budgets, where those of each half are better for the other half."""
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

    def _of_all_layers(self, own: list[int]) -> tuple[int, ...]:
        """Units [L], their sum exactly L * units: `own` of the full-attention layers, and of the others the rest."""
        shape, units = self.attachment.shape, self.config.units
        sliding = [float(min(units, window)) for window in shape.sliding if window is not None]
        rest = units * shape.layers - sum(own)
        found, others = iter(own), iter(proportional(sliding, rest, 0, rest) if sliding else ())
        return tuple(next(found) if window is None else next(others) for window in shape.sliding)

    def budget(self, units: tuple[int, ...] | None) -> Budget:
        """As it is given at inference; None: uniform."""
        sinks, stabilizers = self.config.protected
        return Budget(units=self.config.units, sinks=sinks, stabilizers=stabilizers,
                      allocation="uniform" if units is None else tuple(float(each) for each in units))

    def _budgets(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """What the layers get at inference."""
        return self.budget(units).per_layer(self.attachment.shape)

    def measure(self, name: str, budgets: tuple[int, ...], among: Sequence[int] | None = None) -> Measurement:
        """Answer loss with these budgets, of all examples or those `among` them; from the file if it is there."""
        if name not in self.state.measured:
            among = range(len(self.examples)) if among is None else among
            self._keep(measured={**self.state.measured, name: self._measure(name, budgets, among)})
        return self.state.measured[name]

    def _keep(self, **more: object) -> None:
        self.state = msgspec.structs.replace(self.state, **more)
        write_json(self.path, self.state)

    def _measure(self, name: str, budgets: tuple[int, ...], among: Sequence[int]) -> Measurement:
        started, config = time.monotonic(), self.config
        policy = Recording(make_policy(self.state.policy, heads=self.heads))
        engine = self._engine(policy, budgets)
        behind = None if self.before is None else context_behind(engine, self.before)
        done, nll, tops = sum(len(each.nll) for each in self.state.measured.values()), [], []
        weights = [self.state.answer_tokens[i] for i in among]
        for example in (self.examples[i] for i in among):
            nll.append(answer_nll(engine, policy, example, behind))
            if name == FULL and config.rule == "scores":
                scores = torch.stack([policy.scores[layer] for layer in self.layers])
                tops.append(_top_units(scores[..., :example.answer_spans[-1][0]], config))
            self.progress(Progress(step=done + len(nll), steps=self.total,
                                   note=f"{name}: loss {sum(nll) / sum(weights[:len(nll)]):.4f}"))
        if tops:
            self._keep(tops=tuple(tuple(each.tolist()) for each in tops))
        return Measurement(budgets=engine.budgets, nll=tuple(nll), seconds=time.monotonic() - started,
                           loss=sum(nll) / sum(weights))

    def _engine(self, policy: Policy, budgets: tuple[int, ...]) -> Engine:
        sinks, stabilizers = self.config.protected
        budget = _Exactly(units=self.config.units, sinks=sinks, stabilizers=stabilizers, allocation=budgets)
        try:
            return Engine(self.attachment, StreamConfig(budget=budget, chunk_size=self.config.chunk_size,
                                                        policy=policy.name), policy,
                          slots=1 if self.before is None else 2)
        except (RuntimeError, MemoryError) as error:  # torch's words for no memory are several
            raise ConfigError(f"allocate: {self.attachment.device} has no room for {sum(budgets)} units per KV head, "
                              f"all layers together; expected examples of fewer than {max(self.state.tokens)} tokens"
                              ) from error


def _judged_anew(there: Allocation) -> Allocation:
    """One of version 1, which judged its division by the examples that made it: all else that it measured is good, but
    that of rule "scores" it kept no counts of single examples, which come of what nothing is evicted in."""
    stale = {DIVIDED, FULL} if there.config.rule == "scores" else {DIVIDED}
    return msgspec.structs.replace(there, version=2, units=None, shares=None, measured={
        name: each for name, each in there.measured.items() if name not in stale})


class _Exactly(Budget, frozen=True, kw_only=True):
    """Units per layer just as `allocation` says: of layers that hold everything, `units` is not the mean."""

    def per_layer(self, shape: ModelShape, shares: tuple[float, ...] | None = None,
                  most: int | None = None) -> tuple[int, ...]:
        return tuple(min(units, window or units) for units, window in zip(self.allocation, shape.sliding, strict=True))


def _top_units(scores: Tensor, config: AllocationConfig) -> Tensor:
    """scores [L, H, n] -> units per KV head [L] fp64 of the best L * H * units; those always kept come first."""
    sinks, stabilizers = config.protected
    scores = scores.float().clone()
    scores[..., :sinks] = scores[..., scores.shape[-1] - stabilizers:] = float("inf")
    layers, heads, held = scores.shape
    best = scores.flatten().topk(min(config.units, held) * layers * heads).indices
    return torch.bincount(best // (heads * held), minlength=layers).double().cpu() / heads
