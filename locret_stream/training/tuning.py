"""The second stage: trained heads are tuned with eviction in the loop, and kept only if answers get better.

The loss of a step (see `distillation`) is

    KL(teacher || student) over the rows that predict replies + weight * the first stage's loss,

the distillation of the full cache into the bounded one (as in TRIM-KV, arXiv:2512.03324), and its gradient goes to the
heads alone. The gates harden from step to step. Heads of output "retention" are trained as their paper does it, see
`student.Fading`: the second term is then the capacity loss, and nothing is evicted in a step, so that neither
temperatures nor protection matter.

The engine measures the loss of held-out answers before and after. The tuned heads replace the first ones only where
the loss falls by more than noise. The first ones are kept as heads.first.safetensors, to be renamed by whoever wants
them back, and their allocation.json as allocation.first.json; the shares stay until `allocate` runs again. If the first
heads were restored by hand, a later `tune` raises ConfigError: it neither calls them tuned nor has the tuned ones left.

The student learns what happens within the model's window, since the teacher keeps all of an example; and examples teach
most where the budget is as tight for them as it will be in use. With a `background` examples begin in a memory that
is full, as a stream's is: see the module of that name. Layers with a sliding window see nothing of it. Query-aware
heads see the question in front of each example, where it competes as other units do.

Memory of a step: one hidden state per layer for all of the batch's examples of one length, and one layer's activations;
behind a background also, for every layer, the units that it left, and what heads read of each: for Llama 3.1 8B with
6,000 units in bf16 up to 0.6 GB a layer, so tune for less there.
Time: some ten times that of a step of the first stage, as measured on a small model on a CPU.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.config import StreamConfig, budget_from
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError
from locret_stream.files import alone_in
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import Attachment, attached, expect_gradients
from locret_stream.policies import make_policy
from locret_stream.training import checkpoint as files
from locret_stream.training import first_heads
from locret_stream.training.background import Background, Reading
from locret_stream.training.checkpoint import Metric
from locret_stream.training.config import TrainConfig, TuneConfig
from locret_stream.training.data import Example
from locret_stream.training.distillation import Distillation
from locret_stream.training.layer_shares import CHANCE, exceeds
from locret_stream.training.results import Measurement, Progress, ProgressCallback, TuneResult
from locret_stream.training.sampler import Source
from locret_stream.training.steps import Updates, saved_if_stopped
from locret_stream.training.validation import Recording, digest_of, expect_eviction, measure, policy_for, usable


def tune(model: PreTrainedModel | Attachment, heads: str | os.PathLike[str], examples: Iterable[Example],
         config: TuneConfig | None = None, *, held_out: Iterable[Example] | None = None,
         background: Tensor | Sequence[int] | None = None,
         progress: ProgressCallback | None = None, restart: bool = False) -> TuneResult:
    """Tune the retaining heads in the folder `heads` for the budget of their use; keep the tuned ones if they help.

    The same call, without `restart`, goes on where an interrupted one stopped, bit for bit (same build, device and
    thread count), and returns at once when it is finished, whatever shares were stored since.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        heads: a folder of retaining heads. If they were tuned before, tuning starts from the first ones.
        examples: as for `train_heads`: a sequence, or an iterable that is read once. Without a background, those that
            fit the budget teach what the first stage did and nothing more.
        held_out: examples to measure on and never to train on; by default the share of `examples` that the first stage
            held out. Where its run.json is in the folder, `config` must choose the same share.
        background: token ids [N] of a text like most of what the memory will read, about which nothing is asked; its
            first slice is read before each held-out example, the others before examples that are trained on.
        progress: called after every step and measured example.
        restart: forget an earlier tuning and restore the first heads. Unless `examples` is a sequence, this happens
            before any example is read.

    Raises:
        ConfigError: values that cannot work, too few held-out examples that evict anything, or a tuning.json of another
            call (the message names what differs), or too little background; or this tuning is finished, and its heads
            are no longer in the folder; or another run is at work there. The heads stay as they were.
        WindowExceeded: units + chunk_size exceed the model's window. InvalidTokens: ids outside the vocabulary.
        HeadsMismatch: no heads, or those of another model.
        ModelError: the loss is not finite. OSError: a file of the folder cannot be written.
    """
    config, folder = config or TuneConfig(), Path(heads)
    with attached(model) as attachment:
        def begin(fresh: bool) -> _Run:
            first = RetainingHeads.load(folder, first_heads.first_weights(folder))
            attachment.expect_one_device("training")
            expect_gradients(attachment)
            attachment.check_heads(first)
            return _Run(attachment, first.to(attachment.device), examples, held_out, background, config, folder,
                        progress or (lambda at: None), fresh)

        with alone_in(folder):
            if restart:
                if isinstance(examples, Sequence):  # an iterator can be read only once
                    begin(fresh=True)  # raises its errors before anything is forgotten
                first_heads.forget_tuning(folder)
            return begin(fresh=restart).finish()


class _Run:
    """One tuning in its folder: the steps and measurements that were made, and those that are left to make."""

    def __init__(self, attachment: Attachment, heads: RetainingHeads, examples: Iterable[Example],
                 held_out: Iterable[Example] | None, background: Tensor | Sequence[int] | None, config: TuneConfig,
                 folder: Path, progress: ProgressCallback, fresh: bool):
        self.attachment, self.heads, self.config, self.folder = attachment, heads, config, folder
        self.progress, shape = progress, attachment.shape
        expect_eviction("tune", shape, heads.config, background is not None)
        self.budget = budget_from(config.units, shape, config.chunk_size, sinks=config.sinks,
                                  stabilizers=config.stabilizers, shares=heads.config.budget_shares)
        budgets = self.budget.per_layer(shape, heads.config.budget_shares, most=shape.window - config.chunk_size)
        size = len(examples) if isinstance(examples, Sequence) else None
        if held_out is None:
            _expect_the_same_held_out(folder, config, size is not None, shape.window)
        self.first_stage = _first_stage(config, heads.config, config.examples if size is None else max(1, size))
        limit = min(config.max_tokens, shape.window)
        self.source = Source(examples, self.first_stage, limit, shape.vocab, held_out)
        self.held_out = usable(shape, self.source.held_out, config.units, config.chunk_size, config.examples,
                               verb="tune", full=background is not None)
        self.background = None if background is None else Background(
            background, config.background_tokens, config.chunk_size, max(budgets), shape.vocab)
        self.distillation = Distillation(attachment, heads, config, self.first_stage, budgets,
                                         (self.budget.sinks, self.budget.stabilizers), limit)
        data = hashlib.blake2b(self.source.identity.encode(), digest_size=16)
        for example in self.held_out:
            data.update(example.digest())
        if self.background:
            data.update(self.background.digest())
        self.state = _resumed(None if fresh else folder / files.TUNING, TuneResult(
            config=config, policy=policy_for(heads.config), fingerprint=attachment.fingerprint,
            heads=digest_of(heads), data=data.hexdigest(), budgets=budgets, sinks=self.budget.sinks,
            stabilizers=self.budget.stabilizers, behind=len(self.background.to_measure()) if self.background else 0,
            tokens=tuple(len(example.ids) for example in self.held_out),
            answer_tokens=tuple(example.answer_tokens for example in self.held_out)))
        run = files.digest_of_run(*(getattr(self.state, name) for name in (
            "config", "policy", "fingerprint", "heads", "data", "budgets", "sinks", "stabilizers", "behind")))
        self.updates = Updates("tune", heads, self.source, config, folder / files.TUNING_CHECKPOINT,
                               folder / files.TUNING_METRICS, run)

    def finish(self) -> TuneResult:
        """Make all steps and measurements that are left, and settle which heads are used."""
        if self.state.better is not None:
            first_heads.expect_tuned(self.folder, self.state)
            (self.folder / files.TUNING_CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
            return self.state
        started = time.monotonic()
        if self.state.before is None:
            for name in (files.TUNING_CHECKPOINT, files.TUNING_METRICS):  # of a tuning whose tuning.json was removed
                (self.folder / name).unlink(missing_ok=True)
            self._keep(before=self._measure("before"))
        self.updates.restore()
        resumed_from = self.updates.step
        every = self.config.renew_every if self.background else self.config.checkpoint_every
        with saved_if_stopped(self._save_if_resumable):
            while self.updates.step < self.config.steps:
                if self.updates.step > resumed_from and self.updates.step % every == 0:
                    self.updates.save()
                if self.background and self.updates.step % every == 0:
                    self._renew(self.background)
                self._train_step()
            self.updates.save()
        self.distillation.begin_behind({})
        if self.state.after is None:
            last = [m.kl for m in self.updates.metrics[-max(1, self.config.steps // 10):] if m.kl is not None]
            self._keep(after=self._measure("after"), kl=sum(last) / len(last), resumed_from=resumed_from)
        return self._settle(time.monotonic() - started)

    def _settle(self, seconds: float) -> TuneResult:
        """Replace the first heads by the tuned ones where these are better; if it is killed, the next call repeats it.
        """
        before, after = self.state.before, self.state.after
        assert before is not None and after is not None, "both are measured"
        better = exceeds(before.nll, after.nll, self.state.answer_tokens, CHANCE)
        if better:
            first_heads.replace_first_heads(self.folder, self.heads)
        self._keep(better=better, tuned=digest_of(self.heads) if better else None, seconds=seconds)
        (self.folder / files.TUNING_CHECKPOINT).unlink(missing_ok=True)
        return self.state

    def _keep(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        files.write_json(self.folder / files.TUNING, self.state)

    def _save_if_resumable(self) -> None:
        """Save unless the next step depends on units of a background that earlier heads kept, which are not saved."""
        step = self.updates.step
        if not self.background or step % self.config.renew_every == 0 or step == self.config.steps:
            self.updates.save()

    def _stream_config(self) -> StreamConfig:
        return StreamConfig(budget=self.budget, chunk_size=self.config.chunk_size, policy=self.state.policy)

    def _served(self) -> RetainingHeads:
        """A copy of the heads in the dtype that a runtime uses."""
        dtype = self.attachment.dtype if self.attachment.dtype.itemsize < 4 else torch.float32
        return copy.deepcopy(self.heads).to(dtype)

    def _renew(self, background: Background) -> None:
        """Let examples begin behind the next slice of the background, read with the heads as they are."""
        ids = background.to_tune(self.updates.step // self.config.renew_every)
        self._report(note=f"reading {len(ids):,} tokens")
        self.distillation.begin_behind({})  # frees their memory first
        reading = Reading(self.attachment, self._served(), self._stream_config())
        self.distillation.begin_behind(reading.read(ids))

    def _train_step(self) -> None:
        config, step = self.config, self.updates.step
        temperature = config.temperature_at(step)
        batch = self.updates.draw()
        kl, regression, smoothing = self.distillation.backward(batch, temperature)
        loss = kl + config.weight * (regression + self.first_stage.alpha * smoothing)
        self.updates.update(batch, self.first_stage.lr_at(step), Metric(
            step=step + 1, loss=loss, kl=kl, regression=regression, smoothing=smoothing, temperature=temperature))
        self._report(loss, f"KL {kl:.4f}")

    def _report(self, loss: float | None = None, note: str = "") -> None:
        self.progress(Progress(step=self.updates.step, steps=self.config.steps, loss=loss, note=note))

    @torch.no_grad()
    def _measure(self, name: str) -> Measurement:
        """Answer loss of the heads as they are, as a runtime would use them."""
        heads = self._served()
        policy = Recording(make_policy(self.state.policy, heads=heads))
        engine = Engine(self.attachment, self._stream_config(), policy, slots=2 if self.background else 1,
                        shares=heads.config.budget_shares)

        def report(count: int, loss: float) -> None:
            self._report(note=f"{name}: held-out loss {loss:.4f} of {count}/{len(self.held_out)}")

        background = self.background.to_measure() if self.background else None
        return measure(engine, policy, self.held_out, background, report)


def _expect_the_same_held_out(folder: Path, config: TuneConfig, whole: bool, window: int) -> None:
    """Raises ConfigError: the first stage, if its run.json is in the folder, may have trained on measured examples.

    whole: the examples are a sequence, whose held-out part is a share; of a stream it is the first ones.
    """
    if not (folder / files.RUN).is_file():
        return
    first = files.read_json(folder / files.RUN, files.RunIdentity, "expected one written by train-heads").config
    wrong = []
    if whole and first.held_out != config.held_out:
        wrong.append(f"held_out {first.held_out}, now {config.held_out}")
    if min(first.max_tokens, window) != min(config.max_tokens, window):  # a cut changes an example's hash
        wrong.append(f"max_tokens {first.max_tokens}, now {config.max_tokens}")
    if not whole and config.examples > first.held_out_max:
        wrong.append(f"held_out_max {first.held_out_max}, now {config.examples} examples to measure on")
    if wrong:
        raise ConfigError(f"tune: the first stage of the heads in {folder} had {'; '.join(wrong)}, so that examples to "
                          "measure on may be among those it trained on; expected the same, or held_out=")


def _first_stage(config: TuneConfig, heads: HeadsConfig, held_out_max: int) -> TrainConfig:
    """The first stage with these heads and examples: it defines labels, rates and the order of the examples."""
    same = ("steps", "batch", "lr", "betas", "weight_decay", "warmup", "clip", "eps", "max_tokens", "held_out", "seed",
            "block_mib")
    return TrainConfig(label=heads.label, alpha=heads.alpha, features=heads.features, query_tokens=heads.query_tokens,
                       held_out_max=held_out_max, **{name: getattr(config, name) for name in same})


def _resumed(path: Path | None, fresh: TuneResult) -> TuneResult:
    """The stored result if it is of the same tuning, else ConfigError; `fresh` if there is none."""
    if path is None or not path.is_file():
        return fresh
    stored = first_heads.read_tuning(path)
    names = ["policy", "fingerprint", "heads", "data", "version"]
    if stored.better and stored.tuned == fresh.heads:  # the first heads were removed: only the tuned ones are left
        names.remove("heads")
    if stored.better is None:  # `allocate` may have changed the shares after a finished tuning
        names += ["budgets", "sinks", "stabilizers"]
    files.expect_same(path, "tuning", stored, fresh, names,
                      "restart=True (train-heads: --restart-tuning) to tune the first heads anew")
    return stored
