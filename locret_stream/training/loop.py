"""The training loop: examples in, retaining heads out, resumable at every step. Knows no text and no file format.

One step runs its examples through the frozen model once. Inside each layer's attention the labels are made, the
layer's heads are scored and differentiated, and everything is dropped before the next layer: the memory of a step is
that of a prefill plus one layer's heads. No gradient enters the model.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locret_stream.errors import ConfigError, ModelError
from locret_stream.files import alone_in
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import Attachment, LayerCall, RopeTables, attached
from locret_stream.training.checkpoint import Metric, RunFolder, RunIdentity
from locret_stream.training.config import Progress, ProgressCallback, TrainConfig, TrainResult
from locret_stream.training.data import Example, load_examples
from locret_stream.training.labels import visit_layers
from locret_stream.training.loss import layer_losses, top_overlap
from locret_stream.training.sampler import Source


def train_heads(model: PreTrainedModel | Attachment, data: str | os.PathLike[str] | Iterable[Example],
                out: str | os.PathLike[str], config: TrainConfig | None = None, *,
                tokenizer: PreTrainedTokenizerBase | None = None, held_out: Iterable[Example] | None = None,
                progress: ProgressCallback | None = None, restart: bool = False) -> TrainResult:
    """Train retaining heads for `model` and write them to the folder `out`.

    The same call on the same folder, without `restart`, goes on where an interrupted one stopped, bit for bit as if it
    had not been (same build, device and thread count), and returns at once when the run is finished: of data that is
    read once it is then taken on trust that it is the same, but for what is held out. State is written every
    `checkpoint_every` steps and when anything ends the run early, Ctrl-C included; an update is never torn.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        data: a JSONL file (see `data`; needs `tokenizer`), a sequence of Examples, or any other iterable of them,
            read once (see `Source`).
        held_out: examples to evaluate on, the first `held_out_max`, and none of them to train on; by default a share of
            `data`.
        progress: called after every step and evaluation. restart: forget an earlier run in `out`.

    Raises:
        ConfigError: values that cannot work; or `out` holds another run (the message names what differs), or
            another run is at work there.
        InputError: a malformed line or example, by file and line. InvalidTokens: ids outside the vocabulary.
        UnsupportedModel: from `attach`. ModelError: the loss is not finite. HeadsMismatch: a checkpoint or the heads of
            a finished run are damaged. OSError: a file of `out` cannot be written.
    """
    config = config or TrainConfig()
    with attached(model) as attachment:
        attachment.expect_one_device("training")
        limit = min(config.max_tokens, attachment.shape.window)
        if isinstance(data, (str, os.PathLike)):
            if tokenizer is None:
                raise ConfigError(f"train: {data} is text, found no tokenizer; expected the model's own")
            data = load_examples(data, tokenizer)
        source = Source(data, config, limit, attachment.shape.vocab, held_out)
        Path(out).mkdir(parents=True, exist_ok=True)
        with alone_in(Path(out)):
            return _Run(attachment, source, config, Path(out), progress, restart).run(limit)


@torch.no_grad()
def evaluate_heads(attachment: Attachment, heads: RetainingHeads, examples: Sequence[Example], config: TrainConfig,
                   tables: RopeTables | None = None) -> tuple[float, float, tuple[float, ...]]:
    """(loss, top-10 % overlap, overlap per layer): means over `examples`, labels as `config` says.

    Raises:
        ConfigError: no examples, or one that is longer than `config.max_tokens` or the model's window.
    """
    longest = max((len(example.ids) for example in examples), default=0)
    if not 0 < longest <= min(config.max_tokens, attachment.shape.window):
        raise ConfigError(f"evaluate: found {len(examples)} examples, the longest of {longest} tokens; expected at "
                          f"least one, and at most {min(config.max_tokens, attachment.shape.window)} tokens in each")
    tables = tables or attachment.tables(min(config.max_tokens, attachment.shape.window))
    layers = attachment.shape.layers
    losses, overlaps = [0.0] * layers, [0.0] * layers
    for group in groups_of(examples, config.batch):
        def visit(call: LayerCall, labels: Tensor, valid: Tensor, size: int = len(group)) -> None:
            scores = _scores(heads, call, labels, config)
            regression, smoothing = layer_losses(scores, labels, valid)
            losses[call.layer] += size * (regression / layers + config.alpha * smoothing).item()
            overlaps[call.layer] += size * top_overlap(scores, labels, valid).item()

        _visit(attachment, tables, group, visit, config)
    count = len(examples)
    per_layer = tuple(x / count for x in overlaps)
    return sum(losses) / count, sum(per_layer) / layers, per_layer


class _Run:
    def __init__(self, attachment: Attachment, source: Source, config: TrainConfig, out: Path,
                 progress: ProgressCallback | None, restart: bool):
        self.attachment, self.source, self.config = attachment, source, config
        self.progress = progress or (lambda at: None)
        self.heads = _new_heads(attachment, config)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=config.lr, betas=config.betas,
                                           weight_decay=config.weight_decay)
        identity = RunIdentity(config=config, fingerprint=attachment.fingerprint, data=source.identity,
                               dtype=str(attachment.dtype).removeprefix("torch."))
        self.folder = RunFolder(out, identity, restart)
        self.step = 0

    def run(self, limit: int) -> TrainResult:
        done = self.folder.result()
        if done is not None:  # what is vouched for is looked at
            self.attachment.check_heads(self.folder.heads())
            return done
        started = time.monotonic()
        restored = self.folder.restore(self.heads, self.optimizer)
        if restored is not None:
            self.step, used = restored
            self.source.read_past(self.step, used)
        resumed_from = self.step
        self.tables = self.attachment.tables(limit)
        self.used = self.source.used()
        with saved_if_stopped(self._save):
            while True:
                self._evaluate_if_due()
                if self.step == self.config.steps:
                    break
                if self.step > resumed_from and self.step % self.config.checkpoint_every == 0:
                    self._save()
                self._train_step()
            result = self._result(resumed_from, time.monotonic() - started)
            self.folder.finish(self.heads, result)
            return result

    def _save(self) -> None:
        self.folder.save(self.heads, self.optimizer, self.step, self.used)

    def _train_step(self) -> None:
        config, layers = self.config, self.attachment.shape.layers
        batch = self.source.draw()
        if self.step == 0 and self.heads.config.bias:
            self._set_bias(batch)
        self.optimizer.zero_grad(set_to_none=True)
        terms = torch.zeros(2, dtype=torch.float64, device=self.attachment.device)
        for group in groups_of(batch, len(batch)):
            share = len(group) / len(batch)

            def visit(call: LayerCall, labels: Tensor, valid: Tensor, share: float = share) -> None:
                with torch.enable_grad():
                    scores = _scores(self.heads, call, labels, config)
                    regression, smoothing = layer_losses(scores, labels, valid)
                    (share * (regression / layers + config.alpha * smoothing)).backward()
                terms.add_(share * torch.stack([regression.detach() / layers, smoothing.detach()]))

            _visit(self.attachment, self.tables, group, visit, config)
        regression, smoothing = terms.tolist()
        loss = regression + config.alpha * smoothing
        if not abs(loss) < float("inf"):
            raise ModelError(f"train: the loss of step {self.step} is {loss}; expected a finite one: lower lr, or look "
                             f"at {', '.join(example.where or 'the example' for example in batch)}")
        torch.nn.utils.clip_grad_value_(self.heads.parameters(), config.clip)
        rate = config.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        metric = Metric(step=self.step + 1, loss=loss, regression=regression, smoothing=smoothing, lr=rate,
                        tokens=sum(len(example.ids) for example in batch))
        with uninterrupted():
            self.optimizer.step()
            self.step += 1
            self.used = self.source.used()
            self.folder.log(metric)
        self._report()

    def _set_bias(self, batch: Sequence[Example]) -> None:
        """Start the last layer's bias where the heads say the mean label of `batch`, per model layer and KV head."""
        shape = self.attachment.shape
        sums = torch.zeros(shape.layers, shape.kv_heads, device=self.attachment.device)
        counts = torch.zeros(shape.layers, device=self.attachment.device)

        def visit(call: LayerCall, labels: Tensor, valid: Tensor) -> None:
            sums[call.layer] += labels.sum((0, 2))  # labels are 0 where not valid
            counts[call.layer] += valid.sum()

        for group in groups_of(batch, len(batch)):
            _visit(self.attachment, self.tables, group, visit, self.config)
        with torch.no_grad():
            for layer, fc2 in enumerate(self.heads.fc2):
                mean = sums[layer] / counts[layer]
                if self.config.output == "retention":
                    rate = (mean / self.config.horizon).clamp(max=-1e-7)
                    mean = rate - torch.log(-torch.expm1(rate))  # the log odds of exp(rate)
                fc2.bias.copy_(mean)

    def _evaluate_if_due(self) -> None:
        due = self.step % self.config.eval_every == 0 or self.step == self.config.steps
        if not due or any(m.step == self.step and m.held_out_loss is not None for m in self.folder.metrics):
            return
        loss, overlap, per_layer = evaluate_heads(self.attachment, self.heads, self.source.held_out, self.config,
                                                  self.tables)
        self.folder.log(Metric(step=self.step, held_out_loss=loss, overlap=overlap, overlap_per_layer=per_layer))
        self._report()

    def _report(self) -> None:
        train = next((m for m in reversed(self.folder.metrics) if m.loss is not None), None)
        held = next((m for m in reversed(self.folder.metrics) if m.held_out_loss is not None), None)
        self.progress(Progress(step=self.step, steps=self.config.steps, loss=train.loss if train else None,
                               held_out_loss=held.held_out_loss if held else None,
                               overlap=held.overlap if held else None))

    def _result(self, resumed_from: int, seconds: float) -> TrainResult:
        steps = [m for m in self.folder.metrics if m.loss is not None]
        evaluations = [m for m in self.folder.metrics if m.held_out_loss is not None]
        first, last, source = evaluations[0], evaluations[-1], self.source
        return TrainResult(
            out=str(self.folder.path), steps=self.step, resumed_from=resumed_from, examples=source.size,
            held_out=len(source.held_out), cut=source.cut, skipped=source.skipped, loss=steps[-1].loss,
            held_out_loss=last.held_out_loss, overlap=last.overlap, overlap_before=first.overlap,
            overlap_per_layer=last.overlap_per_layer, seconds=seconds)


def _new_heads(attachment: Attachment, config: TrainConfig) -> RetainingHeads:
    """Fresh fp32 heads on the model's device; initial weights depend on the seed alone."""
    shape = attachment.shape
    if config.budget_shares is not None and len(config.budget_shares) != shape.layers:
        raise ConfigError(f"train: found {len(config.budget_shares)} budget_shares; expected {shape.layers}, one per "
                          "layer")
    described = HeadsConfig(
        layers=shape.layers, query_heads=shape.kv_heads * shape.groups, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, width=config.width, act=config.act or attachment.activation,
        input_norm=config.input_norm, bias=config.bias or config.output == "retention", label=config.label,
        alpha=config.alpha, fingerprint=attachment.fingerprint, budget_shares=config.budget_shares,
        features=config.features, hidden=shape.hidden, output=config.output, query_tokens=config.query_tokens,
        sketch=attachment.sketch, form=attachment.form)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        heads = RetainingHeads(described)
    return heads.to(attachment.device)


def _scores(heads: RetainingHeads, call: LayerCall, labels: Tensor, config: TrainConfig) -> Tensor:
    """What the heads say of the labelled tokens, [B, H, n]: to be near the labels."""
    n = labels.shape[-1]
    found = heads.score(call.layer, call.q[:, :, :n], call.k[:, :, :n], call.v[:, :, :n], call.hidden[:, :n])
    return found if config.output == "score" else F.logsigmoid(found) * config.horizon


def _visit(attachment: Attachment, tables: RopeTables, group: Sequence[Example], visit, config: TrainConfig) -> None:
    visit_layers(attachment, tables, group, visit, kind=config.label, eps=config.eps,
                 block_bytes=config.block_mib * 2**20)


def groups_of(examples: Sequence[Example], most: int) -> Iterator[list[Example]]:
    """Runs of examples of one length, at most `most` each."""
    for _, run in groupby(sorted(examples, key=lambda e: len(e.ids)), key=lambda e: len(e.ids)):
        run = list(run)
        for start in range(0, len(run), most):
            yield run[start:start + most]


@contextmanager
def saved_if_stopped(save: Callable[[], None]) -> Iterator[None]:
    """`save` when anything ends what is inside early. If that fails too, an error stays the one that is told; Ctrl-C
    gives way, as who pressed it expects the state to be saved."""
    try:
        yield
    except BaseException as stopped:
        try:
            save()
        except OSError as failed:
            if not isinstance(stopped, Exception):
                raise
            stopped.add_note(f"and the state could not be saved: {failed}")
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside is raised at the end. Only the main thread gets signals; elsewhere this does nothing, nor where
    Ctrl-C is ignored."""
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is signal.SIG_IGN):
        yield
        return
    caught: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


