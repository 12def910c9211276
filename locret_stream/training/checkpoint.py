"""The out folder of a run: what it is a run of, its checkpoint, its metrics. Each file is replaced whole or not at all.

    run.json                 the TrainConfig, the model's fingerprint and the data's identity, written at the start
    checkpoint.safetensors   heads.*, exp_avg.*, exp_avg_sq.* (fp32); metadata: version, step, used, run (a digest of
                             what it is a checkpoint of), crc32 of the tensors
    metrics.jsonl            one object per step, one per evaluation
    heads.safetensors, heads.json, result.json     at the end; the checkpoint is then removed
    allocation.json          what `allocate` measured, as it is measured
    tuning.json              what `tune` came to, as it comes; tuning.jsonl: its metrics; tuning.safetensors: its
                             checkpoint while it is not finished
    heads.first.safetensors  the heads before `tune` replaced them; allocation.first.json: what was measured with those

No random state is stored: initial weights and the order of examples are functions of seed and step.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from locret_stream.errors import ConfigError, HeadsMismatch
from locret_stream.files import TEMPORARY, flush, replace
from locret_stream.heads import RetainingHeads
from locret_stream.heads.module import CONFIG, WEIGHTS
from locret_stream.training.config import TrainConfig, TrainResult

RUN, CHECKPOINT, METRICS, RESULT = "run.json", "checkpoint.safetensors", "metrics.jsonl", "result.json"
ALLOCATION = "allocation.json"
TUNING, TUNING_METRICS, TUNING_CHECKPOINT = "tuning.json", "tuning.jsonl", "tuning.safetensors"
FIRST_WEIGHTS, FIRST_ALLOCATION = "heads.first.safetensors", "allocation.first.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")

T = TypeVar("T", bound=msgspec.Struct)


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that the trained heads are a function of, beside the machine."""

    config: TrainConfig
    fingerprint: str
    data: str
    dtype: str = "float32"
    version: int = 1


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of metrics.jsonl: of a step (loss and its terms) or of an evaluation after `step` steps.

    Of tuning.jsonl: kl is the loss of the answers, temperature that of the gates.
    """

    step: int
    loss: float | None = None
    regression: float | None = None
    smoothing: float | None = None
    lr: float | None = None
    tokens: int | None = None
    held_out_loss: float | None = None
    overlap: float | None = None
    overlap_per_layer: tuple[float, ...] = ()
    kl: float | None = None
    temperature: float | None = None


class RunFolder:
    """Files of one run in `path`; `metrics` are those of the steps done so far."""

    def __init__(self, path: Path, identity: RunIdentity, restart: bool = False):
        self.path, self.metrics = path, []
        self.digest = digest_of_run(identity)
        path.mkdir(parents=True, exist_ok=True)
        for name in (RUN, CHECKPOINT, METRICS, RESULT, ALLOCATION, TUNING, TUNING_METRICS, TUNING_CHECKPOINT,
                     FIRST_ALLOCATION, FIRST_WEIGHTS, WEIGHTS, CONFIG):
            for left in path.glob(f"{name}*{TEMPORARY}"):  # by a run that was killed while it wrote
                left.unlink(missing_ok=True)
        run = path / RUN
        if restart:  # run.json goes last: until then the folder is still recognised
            for name in (CHECKPOINT, METRICS, RESULT, ALLOCATION, TUNING, TUNING_METRICS, TUNING_CHECKPOINT,
                         FIRST_ALLOCATION, FIRST_WEIGHTS, WEIGHTS, CONFIG, RUN):
                (path / name).unlink(missing_ok=True)
        if run.is_file():
            self._compare(identity)
        elif any((path / name).exists() for name in (WEIGHTS, CONFIG, CHECKPOINT)):
            raise ConfigError(f"{path} holds retaining heads that no {RUN} describes; expected an empty folder, one of "
                              "the same run, or restart=True")
        else:
            write_json(run, identity)

    def _compare(self, identity: RunIdentity) -> None:
        there = read_json(self.path / RUN, RunIdentity, "expected one written by train-heads, or restart=True")
        old, new = msgspec.to_builtins(there), msgspec.to_builtins(identity)
        old, new = {**old.pop("config"), **old}, {**new.pop("config"), **new}
        wrong = [f"{name}: there {old[name]!r}, now {new[name]!r}" for name in new if old[name] != new[name]]
        if wrong:
            raise ConfigError(f"{self.path} holds another run, which differs in {'; '.join(wrong)}; expected the same, "
                              "another out folder, or restart=True")

    def result(self) -> TrainResult | None:
        """That of a finished run, else None. Raises ConfigError: it cannot be read."""
        if not all((self.path / name).is_file() for name in (RESULT, WEIGHTS, CONFIG)):
            return None
        (self.path / CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
        there = read_json(self.path / RESULT, TrainResult, "remove it, or restart=True, to train these heads anew")
        return msgspec.structs.replace(there, out=str(self.path))  # it may have been moved since

    def heads(self) -> RetainingHeads:
        """Those of a finished run, tuned or not. Raises HeadsMismatch: they are damaged."""
        try:
            return RetainingHeads.load(self.path)
        except (HeadsMismatch, ConfigError) as error:
            raise HeadsMismatch(f"{error}; the run in {self.path} is finished and its heads are damaged: remove "
                                f"{WEIGHTS} to train them anew, or the folder (restart=True, train-heads: --restart)"
                                ) from error

    def finish(self, heads: RetainingHeads, result: TrainResult) -> None:
        heads.save(self.path)
        write_json(self.path / RESULT, result)
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def save(self, heads: RetainingHeads, optimizer: torch.optim.Optimizer, step: int, used: str) -> None:
        settle_metrics(self.path / METRICS, self.metrics)
        save_state(self.path / CHECKPOINT, heads, optimizer, step, used, self.digest)

    def restore(self, heads: RetainingHeads, optimizer: torch.optim.Optimizer) -> tuple[int, str] | None:
        """`restore_state` from the checkpoint, and the metrics are cut to it; None if there is none."""
        found = restore_state(self.path / CHECKPOINT, heads, optimizer, self.digest)
        self.metrics = cut_metrics(self.path / METRICS, found[0] if found else 0)
        first = any(metric.held_out_loss is not None and not metric.step for metric in self.metrics)
        if found and found[0] and not first:  # of a checkpoint before any step it may still be to come
            raise _lost(self.path / METRICS, "the evaluation before the first step")
        return found

    def log(self, metric: Metric) -> None:
        self.metrics.append(metric)
        append_metric(self.path / METRICS, metric)


def digest_of_run(*identity: object) -> str:
    """What tells the checkpoints of one run from those of another."""
    return hashlib.blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=16).hexdigest()


def save_state(path: Path, heads: RetainingHeads, optimizer: torch.optim.Optimizer, step: int, used: str,
               run: str) -> None:
    """Write weights and AdamW's moments, after `step` steps on the examples whose digest is `used`; `run` as of
    `digest_of_run`. Raises OSError."""
    tensors = {}
    for name, parameter in heads.named_parameters():
        tensors[f"heads.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state.get(parameter, {}).get(moment, torch.zeros_like(parameter))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"version": "2", "step": str(step), "used": used, "run": run, "crc32": str(_checksum(tensors))}
    replace(path, lambda p: save_file(tensors, p, metadata=metadata))


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    """Of fp32 tensors on the CPU, by name."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].numpy(), zlib.crc32(name.encode(), found))
    return found


def restore_state(path: Path, heads: RetainingHeads, optimizer: torch.optim.Optimizer,
                  run: str) -> tuple[int, str] | None:
    """Fill both from what `save_state` wrote: (steps done, digest of the examples used), None if there is no file.

    Raises:
        HeadsMismatch: the file is damaged, or of another run than `run`.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        step, used, there = int(metadata["step"]), metadata["used"], metadata["run"]
        if int(metadata["crc32"]) != _checksum(tensors):
            raise ValueError("its tensors are not those that were written")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise HeadsMismatch(f"{path} cannot be read as a checkpoint: {error!r}; remove it to start anew") from error
    if there != run:
        raise HeadsMismatch(f"{path} is a checkpoint of other settings, data, heads or another model; remove it to "
                            "start anew")
    parts: dict[str, dict[str, torch.Tensor]] = {"heads": {}, **{moment: {} for moment in _MOMENTS}}
    for name, tensor in tensors.items():
        part, _, name = name.partition(".")
        parts.setdefault(part, {})[name] = tensor
    for moment in _MOMENTS:
        if {n: t.shape for n, t in parts[moment].items()} != {n: t.shape for n, t in parts["heads"].items()}:
            raise HeadsMismatch(f"{path}: the shapes of {moment} are not those of the heads")
    heads.load_strictly(parts["heads"])
    for name, parameter in heads.named_parameters() if step else ():
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **{
            moment: parts[moment][name].to(parameter.device) for moment in _MOMENTS}}
    return step, used


def cut_metrics(path: Path, step: int) -> list[Metric]:
    """Those of the file up to `step`; what is behind them is dropped from it.

    Raises:
        ConfigError: it has not a line for each of these steps.
    """
    found: list[Metric] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            metric = msgspec.json.decode(line, type=Metric)
        except msgspec.MsgspecError:
            break  # torn by the interruption: behind `step` it is written again
        if metric.step <= step:
            found.append(metric)
    if [metric.step for metric in found if metric.loss is not None] != list(range(1, step + 1)):
        raise _lost(path, f"lines of the {step} steps that are done")
    settle_metrics(path, found)
    return found


def _lost(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} has lost {what}, which the result is made of; expected it as it was written: start "
                       "anew with restart=True (train-heads: --restart, or --restart-tuning for tuning.jsonl)")


def expect_same(path: Path, what: str, there: Any, fresh: Any, names: Iterable[str], remedy: str) -> None:
    """Raises ConfigError: the file is of another run, whose config or whose fields of those names differ."""
    old, new = ({**msgspec.structs.asdict(each.config), **{name: getattr(each, name) for name in names}}
                for each in (there, fresh))
    wrong = [f"{name}: there {old[name]!r}, now {new[name]!r}" for name in new if old[name] != new[name]]
    if wrong:
        raise ConfigError(f"{path} holds another {what}, which differs in {'; '.join(wrong)}; expected the same, or "
                          f"{remedy}")


def append_metric(path: Path, metric: Metric) -> None:
    """One more line. Raises OSError, naming the file, of which a part of the line may be left."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(metric) + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def settle_metrics(path: Path, metrics: Iterable[Metric]) -> None:
    """Let the file, on the disk, be just these lines before a checkpoint that counts on them is written: the last ones
    may not have gone in. Raises OSError, naming the file, which is as it was."""
    lines = b"".join(msgspec.json.encode(metric) + b"\n" for metric in metrics)
    if not path.is_file() or path.read_bytes() != lines:
        replace(path, lambda p: p.write_bytes(lines))
    else:
        flush(path)


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """What `write_json` wrote. Raises ConfigError: it is damaged, and what to do is `remedy`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {remedy}") from error


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write it, readable, whole or not at all."""
    replace(path, lambda p: p.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2)))
