"""The second stage: trained heads are tuned with eviction in the loop, and stay so only if answers get better.

A step runs its examples through the frozen model twice. The teacher keeps everything: it gives what answers are
expected, and the first stage's labels. The student evicts, softly (see `gates` and `student`), under the budget that
is to be used. The loss is

    KL(teacher || student) over the rows that predict replies + weight * the first stage's loss,

the distillation of the full cache into the bounded one (as TRIM-KV's, arXiv:2512.03324), and its gradient goes to the
heads alone. Gates harden from step to step.

Before and after, what held-out answers cost is measured with the engine. The tuned heads replace the first only where
that is less by more than noise. The first stay beside them as heads.first.safetensors, to be renamed by who wants them
back, and allocation.json becomes allocation.first.json: its curves are of those. The shares stay until `allocate` finds
others. Who put the first back is told so when `tune` is called again: it neither says that they are tuned nor puts the
tuned ones, which are gone, in their place.

Heads of output "retention" are trained as their paper has it: see `retention`. The second term is then the capacity
loss, and nothing is evicted in a step, so that neither temperatures nor protection matter.

What is taught is what happens within the model's window, since the teacher holds all of an example; and examples teach
most where the budget is as tight for them as it will be in use. With a `background` examples begin in a memory that
is full, as a stream's is: see the module of that name. Layers with a sliding window see nothing of it. Query-aware
heads see the question in front of each example, where it competes as other units do.

Memory of a step: one hidden state per layer for all of the batch's examples of one length, and one layer's activations;
behind a background also, for every layer, the units that it left, and what heads read of each: of Llama 3.1 8B with
6,000 units in bf16 up to 0.6 GB a layer, so tune for less there.
Time: some ten times that of a step of the first stage, as measured on a small model on a CPU.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.config import ModelShape, StreamConfig, budget_from
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError, ModelError
from locret_stream.files import alone_in, replace
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.heads.module import CONFIG, WEIGHTS
from locret_stream.models import Attachment, LayerCall, attached, differentiable, expect_gradients
from locret_stream.policies import make_policy
from locret_stream.training import checkpoint as files
from locret_stream.training.background import Background, Reading, context_behind
from locret_stream.training.checkpoint import Metric
from locret_stream.training.config import (
    Allocation,
    Measurement,
    Progress,
    ProgressCallback,
    TrainConfig,
    TuneConfig,
    TuneResult,
)
from locret_stream.training.data import Example
from locret_stream.training.labels import answer_rows, visit_layers
from locret_stream.training.layer_shares import CHANCE, exceeds
from locret_stream.training.loop import groups_of, saved_if_stopped, uninterrupted
from locret_stream.training.loss import layer_losses
from locret_stream.training.sampler import Source
from locret_stream.training.student import Student, divergence
from locret_stream.training.trimkv import Fading, over_capacity
from locret_stream.training.validation import Recording, answer_nll, digest_of, policy_for, usable


def tune(model: PreTrainedModel | Attachment, heads: str | os.PathLike[str], examples: Iterable[Example],
         config: TuneConfig | None = None, *, held_out: Iterable[Example] | None = None,
         background: Tensor | Sequence[int] | None = None,
         progress: ProgressCallback | None = None, restart: bool = False) -> TuneResult:
    """Tune the retaining heads in the folder `heads` for the budget they will be used with; keep that if it helps.

    The same call, without `restart`, goes on where an interrupted one stopped, bit for bit (same build, device and
    thread count), and returns at once when it is finished, whatever shares were stored since.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        heads: a folder of retaining heads. If it was tuned before, the first heads are what counts.
        examples: as for `train_heads`: a sequence, or an iterable that is read once. Without a background, those that
            fit the budget teach what the first stage did and nothing more.
        held_out: to measure on, and not trained on; by default the share of `examples` that the first stage held out.
            Where its run.json is in the folder, `config` must agree with it on what that is.
        background: token ids [N] of a text like most of what the memory will read, about which nothing is asked; its
            first slice is read before each held-out example, another one before those that are trained on.
        progress: called after every step and measured example.
        restart: forget an earlier tuning and put the first heads back; where examples are no sequence, before these are
            looked at.

    Raises:
        ConfigError: values that cannot work, too few held-out examples that evict anything, or a tuning.json of another
            call (the message names what differs), or too little background; or the heads in the folder are not those
            that this tuning, which is finished, left there; or another run is at work there. The heads stay as they
            were.
        WindowExceeded: units + chunk_size. InvalidTokens: ids outside the vocabulary.
        HeadsMismatch: no heads, or those of another model.
        ModelError: the loss is not finite. OSError: a file of the folder cannot be written.
    """
    config, folder = config or TuneConfig(), Path(heads)
    with attached(model) as attachment:
        def begin(fresh: bool) -> _Run:
            first = RetainingHeads.load(folder, _first_weights(folder))
            attachment.expect_one_device("training")
            expect_gradients(attachment)
            attachment.check_heads(first)
            return _Run(attachment, first.to(attachment.device), examples, held_out, background, config, folder,
                        progress or (lambda at: None), fresh)

        with alone_in(folder):
            if restart:
                if isinstance(examples, Sequence):  # others can be read but once
                    begin(fresh=True)  # raises what would be raised after there is nothing left to go back to
                forget_tuning(folder)
            return begin(fresh=restart).finish()


def is_tuned(heads: str | os.PathLike[str]) -> bool:
    """Whether tuning of the heads in that folder is finished, be it that they were better or not, or was stopped while
    the tuned heads took the first ones' place: then `tune` ends that before anything else is made of them."""
    path = Path(heads) / files.TUNING
    return (Path(heads) / files.FIRST_WEIGHTS).is_file() or (path.is_file() and _read(path).better is not None)


def forget_tuning(folder: Path) -> None:
    """Put the first heads, what was measured with them and the shares that came of it back; stopped anywhere, the same
    call does the rest."""
    if (folder / files.FIRST_WEIGHTS).is_file() or (folder / files.FIRST_ALLOCATION).is_file():
        _forget_allocation(folder)
    for name in (files.TUNING, files.TUNING_METRICS, files.TUNING_CHECKPOINT):
        (folder / name).unlink(missing_ok=True)
    if (folder / files.FIRST_WEIGHTS).is_file():
        (folder / files.FIRST_WEIGHTS).replace(folder / WEIGHTS)


def _first_weights(folder: Path) -> str:
    """The file that the first heads are in."""
    return files.FIRST_WEIGHTS if (folder / files.FIRST_WEIGHTS).is_file() else WEIGHTS


def _forget_allocation(folder: Path) -> None:
    """That of the tuned heads, if there is one, gives way to that of the first, wherever they lie."""
    first = RetainingHeads.load(folder, _first_weights(folder))
    digest = digest_of(first)
    there, before = (files.read_json(path, Allocation, "remove it; `allocate` then measures anew")
                     if path.is_file() else None
                     for path in (folder / files.ALLOCATION, folder / files.FIRST_ALLOCATION))
    if before is not None and before.heads != digest:
        before = None  # the heads that it is of are gone
    if there is not None and there.heads != digest:
        if there.shares is not None and there.shares == first.config.budget_shares:
            shares = None if before is None else before.shares
            files.write_json(folder / CONFIG, msgspec.structs.replace(first.config, budget_shares=shares))
        if before is None:
            (folder / files.ALLOCATION).unlink()
    if before is not None:
        (folder / files.FIRST_ALLOCATION).replace(folder / files.ALLOCATION)


class _Run:
    """One tuning in its folder: what is done already, and what is still to be."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, examples: Iterable[Example],
                 held_out: Iterable[Example] | None, background: Tensor | Sequence[int] | None, config: TuneConfig,
                 folder: Path, progress: ProgressCallback, fresh: bool):
        self.attachment, self.heads, self.config, self.folder = attachment, heads, config, folder
        self.progress, shape = progress, attachment.shape
        expect_tunable(shape, heads.config, background is not None)
        self.budget = budget_from(config.units, shape, config.chunk_size, sinks=config.sinks,
                                  stabilizers=config.stabilizers, shares=heads.config.budget_shares)
        budgets = self.budget.per_layer(shape, heads.config.budget_shares, most=shape.window - config.chunk_size)
        whole = isinstance(examples, Sequence)
        if held_out is None:
            _expect_the_same_held_out(folder, config, whole, shape.window)
        self.first_stage = _first_stage(config, heads.config, max(1, len(examples)) if whole else config.examples)
        limit = min(config.max_tokens, shape.window)
        self.source = Source(examples, self.first_stage, limit, shape.vocab, held_out)
        self.held_out = usable(shape, self.source.held_out, config.units, config.chunk_size, config.examples,
                               verb="tune", full=background is not None)
        self.background = None if background is None else Background(
            background, config.background_tokens, config.chunk_size, max(budgets), shape.vocab)
        self.tables = attachment.tables(limit)
        kind = Fading if heads.config.output == "retention" else Student
        self.student = kind(attachment, heads, budgets, config.chunk_size, self.budget.sinks,
                            self.budget.stabilizers, limit, config.block_mib * 2**20)
        self.optimizer = torch.optim.AdamW(heads.parameters(), lr=config.lr, betas=config.betas,
                                           weight_decay=config.weight_decay)
        chain = hashlib.blake2b(self.source.identity.encode(), digest_size=16)
        for example in self.held_out:
            chain.update(example.digest())
        if self.background:
            chain.update(self.background.digest())
        self.state = _resumed(None if fresh else folder / files.TUNING, TuneResult(
            config=config, policy=policy_for(heads.config), fingerprint=attachment.fingerprint,
            heads=digest_of(heads), data=chain.hexdigest(), budgets=budgets, sinks=self.budget.sinks,
            stabilizers=self.budget.stabilizers, behind=len(self.background.to_measure()) if self.background else 0,
            tokens=tuple(len(example.ids) for example in self.held_out),
            answer_tokens=tuple(sum(end - start for start, end in e.answer_spans) for e in self.held_out)))
        self.run = files.digest_of_run(*(getattr(self.state, name) for name in (
            "config", "policy", "fingerprint", "heads", "data", "budgets", "sinks", "stabilizers", "behind")))
        self.step, self.metrics = 0, list[Metric]()

    def finish(self) -> TuneResult:
        """All that is left to do."""
        if self.state.better is not None:
            self._expect_tuned()
            (self.folder / files.TUNING_CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
            return self.state
        started = time.monotonic()
        if self.state.before is None:
            for name in (files.TUNING_CHECKPOINT, files.TUNING_METRICS):  # of one whose tuning.json was removed
                (self.folder / name).unlink(missing_ok=True)
            self._keep(before=self._measure("before"))
        restored = files.restore_state(self.folder / files.TUNING_CHECKPOINT, self.heads, self.optimizer, self.run)
        if restored is not None:
            self.step = restored[0]
            self.source.read_past(*restored)
        self.metrics = files.cut_metrics(self.folder / files.TUNING_METRICS, self.step)
        self.used, resumed_from = self.source.used(), self.step
        every = self.config.renew_every if self.background else self.config.checkpoint_every
        with saved_if_stopped(self._save_if_whole):
            while self.step < self.config.steps:
                if self.step > resumed_from and self.step % every == 0:
                    self._save()
                if self.background and self.step % every == 0:
                    self._renew()
                self._train_step()
            self._save()
        self.student.rivals = {}
        if self.state.after is None:
            last = [metric.kl for metric in self.metrics[-max(1, self.config.steps // 10):]]
            self._keep(after=self._measure("after"), kl=sum(last) / len(last), resumed_from=resumed_from)
        return self._settle(time.monotonic() - started)

    def _settle(self, seconds: float) -> TuneResult:
        """Let the tuned heads take the first ones' place where they are better; killed within, it is done again."""
        folder, state = self.folder, self.state
        better = exceeds(state.before.nll, state.after.nll, state.answer_tokens, CHANCE)
        if better:
            if not (folder / files.FIRST_WEIGHTS).is_file():
                replace(folder / files.FIRST_WEIGHTS, lambda path: shutil.copyfile(folder / WEIGHTS, path))
            if (folder / files.ALLOCATION).is_file():
                (folder / files.ALLOCATION).replace(folder / files.FIRST_ALLOCATION)
            self.heads.save(folder)
        self._keep(better=better, tuned=digest_of(self.heads) if better else None, seconds=seconds)
        (folder / files.TUNING_CHECKPOINT).unlink(missing_ok=True)
        return self.state

    def _expect_tuned(self) -> None:
        """Raises ConfigError: the tuned heads were better, and others lie in their place now."""
        found = digest_of(RetainingHeads.load(self.folder)) if self.state.better else None
        first = found == self.state.heads
        if first or (found and self.state.tuned not in (None, found)):  # None: kept before that was written down
            raise ConfigError(
                f"{self.folder / files.TUNING} says that tuned heads took the place of the first; found "
                f"{'the first' if first else 'others'} in {WEIGHTS}, expected the tuned ones: leave out tune "
                "(train-heads: --tune) to use them as they are, or restart=True (--restart-tuning) to tune the first "
                "heads anew")

    def _keep(self, **more: object) -> None:
        self.state = msgspec.structs.replace(self.state, **more)
        files.write_json(self.folder / files.TUNING, self.state)

    def _save(self) -> None:
        files.settle_metrics(self.folder / files.TUNING_METRICS, self.metrics)
        files.save_state(self.folder / files.TUNING_CHECKPOINT, self.heads, self.optimizer, self.step, self.used,
                         self.run)

    def _save_if_whole(self) -> None:
        """Where a step can be gone on from: behind a background the units held are what earlier heads kept of it, until
        it is read anew."""
        if not self.background or self.step % self.config.renew_every == 0 or self.step == self.config.steps:
            self._save()

    def _stream_config(self) -> StreamConfig:
        return StreamConfig(budget=self.budget, chunk_size=self.config.chunk_size, policy=self.state.policy)

    def _served(self) -> RetainingHeads:
        """The heads as they are, as a runtime would use them."""
        dtype = self.attachment.dtype if self.attachment.dtype.itemsize < 4 else torch.float32
        return copy.deepcopy(self.heads).to(dtype)

    # -- a step -----------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Let examples begin behind another slice of the background, read with the heads as they are."""
        ids = self.background.to_tune(self.step // self.config.renew_every)
        self.progress(Progress(step=self.step, steps=self.config.steps, note=f"reading {len(ids):,} tokens"))
        self.student.rivals = {}  # before others come
        self.student.rivals = Reading(self.attachment, self._served(), self._stream_config()).read(ids)

    def _train_step(self) -> None:
        config, temperature = self.config, self.config.temperature_at(self.step)
        batch = self.source.draw()
        self.optimizer.zero_grad(set_to_none=True)
        terms = torch.zeros(3, dtype=torch.float64, device=self.attachment.device)
        for group in groups_of(batch, len(batch)):
            share = len(group) / len(batch)
            terms[1:] += self._teach(group, share)
            terms[0] += share * self._learn(group, share, temperature)
        kl, regression, smoothing = terms.tolist()
        loss = kl + config.weight * (regression + self.first_stage.alpha * smoothing)
        if not abs(loss) < float("inf"):
            raise ModelError(f"tune: the loss of step {self.step} is {loss}; expected a finite one: lower lr, or look "
                             f"at {', '.join(example.where or 'the example' for example in batch)}")
        torch.nn.utils.clip_grad_value_(self.heads.parameters(), config.clip)
        rate = self.first_stage.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metric = Metric(step=self.step + 1, loss=loss, kl=kl, regression=regression, smoothing=smoothing, lr=rate,
                        temperature=temperature, tokens=sum(len(example.ids) for example in batch))
        with uninterrupted():
            self.optimizer.step()
            self.step += 1
            self.used = self.source.used()
            self.metrics.append(metric)
            files.append_metric(self.folder / files.TUNING_METRICS, metric)
        self.progress(Progress(step=self.step, steps=config.steps, loss=loss, note=f"KL {kl:.4f}"))

    def _teach(self, group: list[Example], share: float) -> Tensor:
        """Keep everything: the first stage's loss, whose gradient is taken, as [regression, smoothing] (of "retention",
        the capacity loss and 0); and what the answers are expected to be becomes `expected`."""
        layers, config, found = self.attachment.shape.layers, self.first_stage, []

        def visit(call: LayerCall, labels: Tensor, valid: Tensor) -> None:
            if not self.heads.config.has_head(call.layer):
                return
            with torch.enable_grad():
                regression, smoothing = self._beside(call, labels, valid)
                (share * self.config.weight * (regression / layers + config.alpha * smoothing)).backward()
            found.append(share * torch.stack([regression.detach() / layers, smoothing.detach()]).double())

        self.expected = visit_layers(self.attachment, self.tables, group, visit, kind=config.label, eps=config.eps,
                                     block_bytes=config.block_mib * 2**20)
        return torch.stack(found).sum(0)

    def _beside(self, call: LayerCall, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's heads learn beside the divergence: the terms of the first stage, or those of `retention`."""
        if self.heads.config.output == "retention":
            rates = F.logsigmoid(self.heads.score(call.layer, call.q, call.k, call.v, call.hidden))
            return over_capacity(rates, self.state.budgets[call.layer], self.student.block_bytes), rates.new_zeros(())
        n = labels.shape[-1]
        scores = self.heads.score(call.layer, call.q[:, :, :n], call.k[:, :, :n], call.v[:, :, :n], call.hidden[:, :n])
        return layer_losses(scores, labels, valid)

    def _learn(self, group: list[Example], share: float, temperature: float) -> float:
        """Forget softly: the divergence from what is expected, whose gradient is taken."""
        attachment, kl = self.attachment, torch.zeros((), device=self.attachment.device)
        ids = torch.stack([example.ids for example in group]).to(attachment.device)
        with torch.enable_grad(), differentiable(attachment):
            hidden = self.student.hidden(ids, temperature)
            for teacher, student, example in zip(self.expected, hidden, group, strict=True):
                rows = answer_rows(example.answer_spans)[0].to(attachment.device)
                kl = kl + divergence(attachment, teacher[rows], student[rows], self.student.block_bytes) / len(group)
            if kl.requires_grad:  # else nothing was evicted
                (share * kl).backward()
        return kl.item()

    # -- measured ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, name: str) -> Measurement:
        """Answer loss of the heads as they are, as a runtime would use them."""
        started, nll, heads = time.monotonic(), [], self._served()
        policy = Recording(make_policy(self.state.policy, heads=heads))
        engine = Engine(self.attachment, self._stream_config(), policy, slots=2 if self.background else 1,
                        shares=heads.config.budget_shares)
        behind = context_behind(engine, self.background.to_measure()) if self.background else None
        for example in self.held_out:
            nll.append(answer_nll(engine, policy, example, behind))
            loss = sum(nll) / sum(self.state.answer_tokens[:len(nll)])
            self.progress(Progress(step=self.step, steps=self.config.steps,
                                   note=f"{name}: held-out loss {loss:.4f} of {len(nll)}/{len(self.held_out)}"))
        return Measurement(budgets=engine.budgets, nll=tuple(nll), loss=loss, seconds=time.monotonic() - started)


def expect_tunable(shape: ModelShape, heads: HeadsConfig | TrainConfig, background: bool) -> None:
    """Raises ConfigError: heads that are made so cannot be tuned in this model, or not behind a background."""
    if heads.output == "retention" and background:
        raise ConfigError("tune: found a background, and heads of output 'retention', which learn without eviction; "
                          "expected none")
    if heads.query_tokens and background:
        raise ConfigError("tune: found a background, and query-aware heads, whose question stands in front of all that "
                          "is read; expected none")
    if all(shape.sliding):
        raise ConfigError("tune: every layer of this model has a sliding window, where no head decides; expected a "
                          "layer with full attention")


def _expect_the_same_held_out(folder: Path, config: TuneConfig, whole: bool, window: int) -> None:
    """Raises ConfigError: the first stage, if its run.json is there, would have trained on what is measured on."""
    if not (folder / files.RUN).is_file():
        return
    first = files.read_json(folder / files.RUN, files.RunIdentity, "expected one written by train-heads").config
    wrong = []
    if whole and first.held_out != config.held_out:
        wrong.append(f"held_out {first.held_out}, now {config.held_out}")
    if min(first.max_tokens, window) != min(config.max_tokens, window):  # examples are told apart as they were cut
        wrong.append(f"max_tokens {first.max_tokens}, now {config.max_tokens}")
    if not whole and config.examples > first.held_out_max:
        wrong.append(f"held_out_max {first.held_out_max}, now {config.examples} examples to measure on")
    if wrong:
        raise ConfigError(f"tune: the first stage of the heads in {folder} had {'; '.join(wrong)}, so that examples to "
                          "measure on may be among those it trained on; expected the same, or held_out=")


def _first_stage(config: TuneConfig, heads: HeadsConfig, held_out_max: int) -> TrainConfig:
    """What the first stage would be of these heads and examples: labels, rates and order of the examples."""
    same = ("steps", "batch", "lr", "betas", "weight_decay", "warmup", "clip", "eps", "max_tokens", "held_out", "seed",
            "block_mib")
    return TrainConfig(label=heads.label, alpha=heads.alpha, features=heads.features, query_tokens=heads.query_tokens,
                       held_out_max=held_out_max, **{name: getattr(config, name) for name in same})


def _read(path: Path) -> TuneResult:
    return files.read_json(path, TuneResult, "remove it, or restart=True, to tune anew")


def _resumed(path: Path | None, fresh: TuneResult) -> TuneResult:
    """What is in the file, if it is of the same tuning, else an error; what is fresh if there is none."""
    if path is None or not path.is_file():
        return fresh
    there = _read(path)
    names = ["policy", "fingerprint", "heads", "data", "version"]
    if there.better and there.tuned == fresh.heads:  # the first were removed, which nothing is made of any more
        names.remove("heads")
    if there.better is None:  # behind a finished one the shares may be others
        names += ["budgets", "sinks", "stabilizers"]
    files.expect_same(path, "tuning", there, fresh, names,
                      "restart=True (train-heads: --restart-tuning) to tune the first heads anew")
    return there
