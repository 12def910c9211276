"""What both stages of training share: batches, updates of the heads with their checkpoints, and what Ctrl-C may cut.

Knows heads and optimisers; knows nothing of losses.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from locret_stream.errors import ModelError
from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment, RopeTables
from locret_stream.training import checkpoint as files
from locret_stream.training.config import TrainConfig, TuneConfig
from locret_stream.training.data import Example
from locret_stream.training.labels import Visit, visit_layers
from locret_stream.training.sampler import Source


class Updates:
    """The heads, their optimiser, and the checkpoint and metrics of the updates made so far.

    Args:
        verb: begins messages. checkpoint, log: files of this stage. run: from `checkpoint.digest_of_run`.

    Attributes:
        step: updates made. metrics: lines of the log up to it.
    """

    def __init__(self, verb: str, heads: RetainingHeads, source: Source, config: TrainConfig | TuneConfig,
                 checkpoint: Path, log: Path, run: str):
        self.heads, self.source, self.step, self.metrics = heads, source, 0, list[files.Metric]()
        self._verb, self._clip, self._checkpoint, self._log, self._run = verb, config.clip, checkpoint, log, run
        self._optimizer = torch.optim.AdamW(heads.parameters(), lr=config.lr, betas=config.betas,
                                            weight_decay=config.weight_decay)
        self._used = source.used()

    def restore(self) -> None:
        """Go on from the checkpoint, if there is one. Raises HeadsMismatch and ConfigError, see `checkpoint`."""
        restored = files.restore_state(self._checkpoint, self.heads, self._optimizer, self._run)
        self.step = 0 if restored is None else restored[0]
        self.metrics = files.cut_metrics(self._log, self.step)
        if restored is not None:
            self.source.read_past(*restored)
        self._used = self.source.used()

    def save(self) -> None:
        """Write the checkpoint. Raises OSError."""
        files.settle_metrics(self._log, self.metrics)
        files.save_state(self._checkpoint, self.heads, self._optimizer, self.step, self._used, self._run)

    def log(self, metric: files.Metric) -> None:
        """Append to the metrics. Raises OSError."""
        self.metrics.append(metric)
        files.append_metric(self._log, metric)

    def draw(self) -> list[Example]:
        """The batch of the next update, for which the gradients are reset."""
        self._optimizer.zero_grad(set_to_none=True)
        return self.source.draw()

    def update(self, batch: Sequence[Example], lr: float, metric: files.Metric) -> None:
        """Apply the gradients of the batch and log the metric, both or neither if Ctrl-C comes.

        Raises:
            ModelError: the loss in the metric is infinite or NaN. OSError: it cannot be logged.
        """
        assert metric.loss is not None
        if not abs(metric.loss) < float("inf"):
            raise ModelError(f"{self._verb}: the loss of step {self.step} is {metric.loss}; expected a finite one: "
                             f"lower lr, or look at {', '.join(example.where or 'the example' for example in batch)}")
        torch.nn.utils.clip_grad_value_(self.heads.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with uninterrupted():
            self._optimizer.step()
            self.step += 1
            self._used = self.source.used()
            self.log(msgspec.structs.replace(metric, lr=lr, tokens=sum(len(example.ids) for example in batch)))


def visit_labels(attachment: Attachment, tables: RopeTables, group: Sequence[Example], visit: Visit,
                 config: TrainConfig, background: Tensor | None = None) -> Tensor:
    """`labels.visit_layers` with the labels that `config` describes; returns hidden states [B + b, T, hidden]."""
    assert config.label is not None, "TrainConfig chooses one where none is given"
    return visit_layers(attachment, tables, group, visit, kind=config.label, eps=config.eps,
                        block_bytes=config.block_mib * 2**20, background=background)


def groups_of(examples: Sequence[Example], most: int) -> Iterator[list[Example]]:
    """Groups of examples of one length, at most `most` each, from short to long."""
    def length(example: Example) -> int:
        return len(example.ids)

    for _, equal in groupby(sorted(examples, key=length), key=length):
        equally_long = list(equal)
        for start in range(0, len(equally_long), most):
            yield equally_long[start:start + most]


@contextmanager
def saved_if_stopped(save: Callable[[], None]) -> Iterator[None]:
    """Call `save` when any exception ends the block. If `save` fails too, an error of the block stays the one that is
    raised; Ctrl-C gives way to the failure, as whoever pressed it expects the state to be saved."""
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
    """Delay Ctrl-C until the end of the block. Only the main thread gets signals: elsewhere, and where Ctrl-C is
    ignored, this does nothing."""
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
