"""The training loop: examples in, retaining heads out, resumable at every step. Knows no text and no file format.

One step runs its examples through the frozen model once. Inside each layer's attention the labels are made, the
layer's heads are scored and differentiated, and everything is dropped before the next layer: the memory of a step is
that of a prefill plus one layer's heads. No gradient enters the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locret_stream.errors import ConfigError
from locret_stream.files import alone_in
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import Attachment, LayerCall, RopeTables, attached
from locret_stream.training.checkpoint import CHECKPOINT, METRICS, Metric, RunFolder, RunIdentity, lost_metrics
from locret_stream.training.config import TrainConfig
from locret_stream.training.data import Example, load_examples
from locret_stream.training.labels import SINKS
from locret_stream.training.loss import layer_terms, top_overlap
from locret_stream.training.results import Progress, ProgressCallback, TrainResult
from locret_stream.training.sampler import Plain, Source
from locret_stream.training.steps import Updates, groups_of, saved_if_stopped, visit_labels


def train_heads(model: PreTrainedModel | Attachment, data: str | os.PathLike[str] | Iterable[Example],
                out: str | os.PathLike[str], config: TrainConfig | None = None, *,
                tokenizer: PreTrainedTokenizerBase | None = None, held_out: Iterable[Example] | None = None,
                background: Tensor | Sequence[int] | None = None,
                progress: ProgressCallback | None = None, restart: bool = False) -> TrainResult:
    """Train retaining heads for `model` and write them to the folder `out`.

    The same call on the same folder, without `restart`, goes on where an interrupted one stopped, bit for bit as if it
    had not been interrupted (same build, device and thread count), and returns at once when the run is finished. An
    iterable that is read once is then compared by its held-out examples alone. State is written every
    `checkpoint_every` steps and when any exception ends the run early, Ctrl-C included; no update is half written.

    Args:
        model: a causal LM as `attach` takes it; never changed. An Attachment is used and left attached.
        data: a JSONL file (see `data`; needs `tokenizer`), a sequence of Examples, or any other iterable of them,
            read once (see `Source`).
        held_out: examples that are never trained on; the first `held_out_max` of them are evaluated on. By default a
            share of `data`.
        background: for label "attention", token ids [N] of texts like those that will be read, about which nothing is
            asked. In every step a slice of it, as long as the examples, goes through the model beside them, and the
            heads learn to score it lower.
        progress: called after every step and evaluation. restart: forget an earlier run in `out`.

    Raises:
        ConfigError: values that cannot work; or `out` contains another run (the message names what differs), or
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
        plain = None if background is None else Plain(background, config, attachment.shape.vocab)
        Path(out).mkdir(parents=True, exist_ok=True)
        with alone_in(Path(out)):
            return _Run(attachment, source, config, plain, Path(out), progress, restart).run(limit)


@torch.no_grad()
def evaluate_heads(attachment: Attachment, heads: RetainingHeads, examples: Sequence[Example], config: TrainConfig,
                   tables: RopeTables | None = None) -> tuple[float, float, tuple[float, ...]]:
    """(loss, top-10 % overlap, overlap per layer [L]): means over `examples`, with the labels of `config`. No
    background runs along, so for label "attention" the loss is lower than that of a step that had one.

    Raises:
        ConfigError: no examples, or one that is longer than `config.max_tokens` or the model's window.
    """
    longest = max((len(example.ids) for example in examples), default=0)
    limit = min(config.max_tokens, attachment.shape.window)
    if not 0 < longest <= limit:
        raise ConfigError(f"evaluate: found {len(examples)} examples, the longest of {longest} tokens; expected at "
                          f"least one, and at most {limit} tokens in each")
    tables = tables or attachment.tables(limit)
    layers = attachment.shape.layers
    trained = heads.config.layers_with_head
    losses, overlaps = [0.0] * layers, [0.0] * layers
    for group in groups_of(examples, config.batch):
        def visit(call: LayerCall, labels: Tensor, valid: Tensor, size: int = len(group)) -> None:
            if not heads.config.has_head(call.layer):
                return
            scores = _scores(heads, call, config)[..., :labels.shape[-1]]
            regression, smoothing = layer_terms(scores, labels, valid, config.label)
            losses[call.layer] += size * (regression / len(trained) + config.alpha * smoothing).item()
            overlaps[call.layer] += size * top_overlap(scores, labels, valid).item()

        visit_labels(attachment, tables, group, visit, config)
    count = len(examples)
    per_layer = tuple(overlap / count for overlap in overlaps)
    return sum(losses) / count, sum(per_layer) / len(trained), per_layer


class _Run:
    def __init__(self, attachment: Attachment, source: Source, config: TrainConfig, plain: Plain | None, out: Path,
                 progress: ProgressCallback | None, restart: bool):
        self.attachment, self.source, self.config, self.plain = attachment, source, config, plain
        self.progress = progress or (lambda at: None)
        self.heads = _new_heads(attachment, config)
        data = source.identity if plain is None else f"{source.identity} background {plain.digest()}"
        identity = RunIdentity(config=config, fingerprint=attachment.fingerprint, data=data,
                               dtype=str(attachment.dtype).removeprefix("torch."))
        self.folder = RunFolder(out, identity, restart)
        self.updates = Updates("train", self.heads, source, config, out / CHECKPOINT, out / METRICS, self.folder.digest)

    def run(self, limit: int) -> TrainResult:
        done = self.folder.result()
        if done is not None:
            self.attachment.check_heads(self.folder.heads())
            return done
        started = time.monotonic()
        self.updates.restore()
        resumed_from = self.updates.step
        if resumed_from and not any(m.held_out_loss is not None and m.step == 0 for m in self.updates.metrics):
            raise lost_metrics(self.folder.path / METRICS, "the evaluation before the first step")
        self.tables = self.attachment.tables(limit)
        with saved_if_stopped(self.updates.save):
            while True:
                self._evaluate_if_due()
                if self.updates.step == self.config.steps:
                    break
                if self.updates.step > resumed_from and self.updates.step % self.config.checkpoint_every == 0:
                    self.updates.save()
                self._train_step()
            result = self._result(resumed_from, time.monotonic() - started)
            self.folder.finish(self.heads, result)
            return result

    def _train_step(self) -> None:
        config, layers = self.config, len(self.heads.config.layers_with_head)
        batch = self.updates.draw()
        if self.updates.step == 0 and self.heads.config.bias:
            self._set_bias(batch)
        terms = torch.zeros(2, dtype=torch.float64, device=self.attachment.device)
        for group in groups_of(batch, len(batch)):
            share, size = len(group) / len(batch), len(group)
            text = None if self.plain is None else self.plain.of_step(self.updates.step, len(group[0].ids))

            def visit(call: LayerCall, labels: Tensor, valid: Tensor, share: float = share, size: int = size) -> None:
                if not self.heads.config.has_head(call.layer):
                    return
                with torch.enable_grad():
                    scores = _scores(self.heads, call, config)
                    regression, smoothing = layer_terms(scores[:size, :, :labels.shape[-1]], labels, valid,
                                                        config.label, scores[size:, :, SINKS:])
                    (share * (regression / layers + config.alpha * smoothing)).backward()
                terms.add_(share * torch.stack([regression.detach() / layers, smoothing.detach()]))

            visit_labels(self.attachment, self.tables, group, visit, config, text)
        regression, smoothing = terms.tolist()
        metric = Metric(step=self.updates.step + 1, loss=regression + config.alpha * smoothing, regression=regression,
                        smoothing=smoothing)
        self.updates.update(batch, config.lr_at(self.updates.step), metric)
        self._report()

    def _set_bias(self, batch: Sequence[Example]) -> None:
        """Set the bias of the heads' last layer so that they start at the mean label of `batch`, per model layer and
        KV head."""
        shape = self.attachment.shape
        sums = torch.zeros(shape.layers, shape.most_heads, dtype=torch.float32, device=self.attachment.device)
        counts = torch.zeros(shape.layers, dtype=torch.float32, device=self.attachment.device)

        def visit(call: LayerCall, labels: Tensor, valid: Tensor) -> None:
            if self.config.label == "attention":
                labels = labels.clamp(min=0)  # without those of the template
            sums[call.layer] += labels.sum((0, 2))  # labels are 0 where not valid
            counts[call.layer] += valid.sum()

        for group in groups_of(batch, len(batch)):
            visit_labels(self.attachment, self.tables, group, visit, self.config)
        with torch.no_grad():
            for layer in self.heads.config.layers_with_head:
                fc2 = self.heads.fc2[layer]
                mean = sums[layer] / counts[layer]
                if self.config.output == "retention":
                    rate = (mean / self.config.horizon).clamp(max=-1e-7)
                    mean = rate - torch.log(-torch.expm1(rate))  # the log odds of exp(rate)
                assert isinstance(fc2, nn.Linear), "every layer has a head"
                fc2.bias.copy_(mean)

    def _evaluate_if_due(self) -> None:
        step, config = self.updates.step, self.config
        due = step % config.eval_every == 0 or step == config.steps
        if not due or any(m.step == step and m.held_out_loss is not None for m in self.updates.metrics):
            return
        loss, overlap, per_layer = evaluate_heads(self.attachment, self.heads, self.source.held_out, config,
                                                  self.tables)
        self.updates.log(Metric(step=step, held_out_loss=loss, overlap=overlap, overlap_per_layer=per_layer))
        self._report()

    def _report(self) -> None:
        last = next((m for m in reversed(self.updates.metrics) if m.loss is not None), Metric(step=0))
        evaluation = next((m for m in reversed(self.updates.metrics) if m.held_out_loss is not None), Metric(step=0))
        self.progress(Progress(step=self.updates.step, steps=self.config.steps, loss=last.loss,
                               held_out_loss=evaluation.held_out_loss, overlap=evaluation.overlap))

    def _result(self, resumed_from: int, seconds: float) -> TrainResult:
        steps = [m for m in self.updates.metrics if m.loss is not None]
        evaluations = [m for m in self.updates.metrics if m.held_out_loss is not None]
        first, last, source = evaluations[0], evaluations[-1], self.source
        loss = steps[-1].loss
        assert loss is not None and last.held_out_loss is not None, "a finished run has made steps and evaluations"
        assert first.overlap is not None and last.overlap is not None, "as every evaluation has"
        return TrainResult(
            out=str(self.folder.path), steps=self.updates.step, resumed_from=resumed_from, examples=source.size,
            held_out=len(source.held_out), cut=source.cut, skipped=source.skipped, loss=loss,
            held_out_loss=last.held_out_loss, overlap=last.overlap, overlap_before=first.overlap,
            overlap_per_layer=last.overlap_per_layer, seconds=seconds)


def _new_heads(attachment: Attachment, config: TrainConfig) -> RetainingHeads:
    """Fresh fp32 heads on the model's device; initial weights depend on the seed alone."""
    shape = attachment.shape
    if config.budget_shares is not None and len(config.budget_shares) != shape.layers:
        raise ConfigError(f"train: found {len(config.budget_shares)} budget_shares; expected {shape.layers}, one per "
                          "layer")
    if max(config.layers or (0,)) >= shape.layers:
        raise ConfigError(f"train: layers is {list(config.layers or ())}; expected numbers from 0 to "
                          f"{shape.layers - 1}")
    if config.layers and all(shape.units[layer].sliding for layer in config.layers):
        raise ConfigError(f"train: layers {list(config.layers)} all have a sliding window, so that no head decides "
                          "there; expected a layer with full attention")
    assert config.label is not None, "TrainConfig chooses one where none is given"
    unit = shape.one_unit("retaining heads")
    if config.features == "qkv" and unit.key_dim != unit.value_dim:
        raise ConfigError("train: features is 'qkv', and " + (
            f"keys of this model have {unit.key_dim} numbers, values {unit.value_dim}" if unit.value_dim else
            "this model keeps latents, which are keys and values at once")
            + "; expected features='hidden' (--features hidden), heads that read the hidden state")
    described = HeadsConfig(
        layers=shape.layers, query_heads=unit.query_heads, kv_heads=unit.kv_heads,
        head_dim=unit.key_dim, width=config.width, act=config.act or attachment.activation,
        input_norm=config.input_norm, bias=config.bias or config.output == "retention", label=config.label,
        alpha=config.alpha, fingerprint=attachment.fingerprint, budget_shares=config.budget_shares,
        trained_layers=config.layers, features=config.features, hidden=shape.hidden, output=config.output,
        query_tokens=config.query_tokens, sketch=attachment.sketch, form=attachment.packing,
        kernel=msgspec.UNSET if config.kernel == 1 else config.kernel,
        value_dim=msgspec.UNSET if unit.value_dim == unit.key_dim else unit.value_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        heads = RetainingHeads(described)
    return heads.to(attachment.device)


def _scores(heads: RetainingHeads, call: LayerCall, config: TrainConfig) -> Tensor:
    """What is trained to be near the labels of all T tokens of all rows, [B, H, T] fp32."""
    scores = heads.score(call.layer, call.q, call.k, call.own_v, call.hidden)
    if config.label == "attention":
        return heads.averaged(scores)
    return scores if config.output == "score" else F.logsigmoid(scores) * config.horizon
