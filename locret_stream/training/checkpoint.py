"""The out folder of a run: its identity, checkpoint and metrics. Each file is replaced atomically.

    run.json                 the TrainConfig, the model's fingerprint and the data's identity, written at the start
    checkpoint.safetensors   heads.*, exp_avg.*, exp_avg_sq.* (fp32); metadata: version, step, used, run (a digest of
                             the run's identity), crc32 of the tensors
    metrics.jsonl            one object per step, one per evaluation
    heads.safetensors, heads.json, result.json     at the end; the checkpoint is then removed
    allocation.json          all measurements of `allocate`, rewritten after each
    tuning.json              the outcome of `tune` so far; tuning.jsonl: its metrics; tuning.safetensors: its
                             checkpoint while it is not finished
    heads.first.safetensors  the heads before `tune` replaced them; allocation.first.json: their allocation.json
    key_means.safetensors    means of the keys of the model, see `key_means`

No random state is stored: initial weights and the order of examples are functions of seed and step.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from locret_stream.errors import ConfigError, HeadsMismatch
from locret_stream.files import TEMPORARY, flush, replace
from locret_stream.heads import RetainingHeads
from locret_stream.heads.module import CONFIG, MEANS, WEIGHTS
from locret_stream.training.config import TrainConfig
from locret_stream.training.results import Allocation, TrainResult, TuneResult

RUN, CHECKPOINT, METRICS, RESULT = "run.json", "checkpoint.safetensors", "metrics.jsonl", "result.json"
ALLOCATION = "allocation.json"
TUNING, TUNING_METRICS, TUNING_CHECKPOINT = "tuning.json", "tuning.jsonl", "tuning.safetensors"
FIRST_WEIGHTS, FIRST_ALLOCATION = "heads.first.safetensors", "allocation.first.json"
_OF_RUN = (CHECKPOINT, METRICS, RESULT, ALLOCATION, TUNING, TUNING_METRICS, TUNING_CHECKPOINT, FIRST_ALLOCATION,
           FIRST_WEIGHTS, MEANS, WEIGHTS, CONFIG, RUN)  # run.json is removed last: until then the folder is recognised
_MOMENTS = ("exp_avg", "exp_avg_sq")

T = TypeVar("T", bound=msgspec.Struct)


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that the trained heads are a function of, beside the machine."""

    config: TrainConfig
    fingerprint: str
    data: str
    dtype: str = "float32"
    version: int = 1


Configured = RunIdentity | Allocation | TuneResult


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of metrics.jsonl: of a step (loss and its terms) or of an evaluation after `step` steps.

    In tuning.jsonl, kl is the divergence of the answers and temperature that of the gates.
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
    """What a run in `path` is and what it resulted in."""

    def __init__(self, path: Path, identity: RunIdentity, restart: bool = False):
        self.path = path
        self.digest = digest_of_run(identity)
        path.mkdir(parents=True, exist_ok=True)
        for name in _OF_RUN:
            for temporary in path.glob(f"{name}*{TEMPORARY}"):  # left by a run that was killed while it wrote
                temporary.unlink(missing_ok=True)
        run = path / RUN
        if restart:
            for name in _OF_RUN:
                (path / name).unlink(missing_ok=True)
        if run.is_file():
            stored = read_json(run, RunIdentity, "expected one written by train-heads, or restart=True")
            expect_same(path, "run", stored, identity, ("fingerprint", "data", "dtype", "version"),
                        "another out folder, or restart=True")
        elif any((path / name).exists() for name in (WEIGHTS, CONFIG, CHECKPOINT)):
            raise ConfigError(f"{path} contains retaining heads that no {RUN} describes; expected an empty folder, one "
                              "of the same run, or restart=True")
        else:
            write_json(run, identity)

    def result(self) -> TrainResult | None:
        """The result of a finished run, else None. Raises ConfigError: it cannot be read."""
        if not all((self.path / name).is_file() for name in (RESULT, WEIGHTS, CONFIG)):
            return None
        (self.path / CHECKPOINT).unlink(missing_ok=True)  # a kill may have left it
        result = read_json(self.path / RESULT, TrainResult, "remove it, or restart=True, to train these heads anew")
        return msgspec.structs.replace(result, out=str(self.path))  # the folder may have been moved since

    def heads(self) -> RetainingHeads:
        """The heads of a finished run, tuned or not. Raises HeadsMismatch: they are damaged."""
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


def digest_of_run(*identity: object) -> str:
    """16 bytes in hexadecimal that name a run, so that its checkpoints are not taken for those of another."""
    return hashlib.blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=16).hexdigest()


def save_state(path: Path, heads: RetainingHeads, optimizer: torch.optim.Optimizer, step: int, used: str,
               run: str) -> None:
    """Write weights and AdamW's moments, after `step` steps on the examples whose digest is `used`; `run` as of
    `digest_of_run`. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in heads.named_parameters():
        tensors[f"heads.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state.get(parameter, {}).get(moment, torch.zeros_like(parameter))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"version": "2", "step": str(step), "used": used, "run": run, "crc32": str(_checksum(tensors))}
    replace(path, lambda p: save_file(tensors, p, metadata=metadata))


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    """crc32 over names and contents of fp32 tensors on the CPU, in the order of their names."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].numpy().data, zlib.crc32(name.encode(), checksum))
    return checksum


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
        step, used, written_by = int(metadata["step"]), metadata["used"], metadata["run"]
        if int(metadata["crc32"]) != _checksum(tensors):
            raise ValueError("its tensors are not those that were written")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise HeadsMismatch(f"{path} cannot be read as a checkpoint: {error!r}; remove it to start anew") from error
    if written_by != run:
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
    """The metrics up to `step`; later ones are removed from the file.

    Raises:
        ConfigError: the file lacks the line of one of these steps.
    """
    metrics: list[Metric] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            metric = msgspec.json.decode(line, type=Metric)
        except msgspec.MsgspecError:
            break  # the interruption cut this line; the lines after `step` are written again
        if metric.step <= step:
            metrics.append(metric)
    if [metric.step for metric in metrics if metric.loss is not None] != list(range(1, step + 1)):
        raise lost_metrics(path, f"lines of the {step} steps that are done")
    settle_metrics(path, metrics)
    return metrics


def lost_metrics(path: Path, what: str) -> ConfigError:
    """The error of a log whose lines cannot be made again."""
    return ConfigError(f"{path} has lost {what}, which the result is made of; expected it as it was written: start "
                       "anew with restart=True (train-heads: --restart, or --restart-tuning for tuning.jsonl)")


def expect_same(path: Path, what: str, stored: Configured, fresh: Configured, names: Iterable[str],
                remedy: str) -> None:
    """Raises ConfigError: the config of `stored`, or one of its fields `names`, differs from that of `fresh`."""
    old, new = ({**msgspec.structs.asdict(each.config), **{name: getattr(each, name) for name in names}}
                for each in (stored, fresh))
    wrong = [f"{name}: stored {old[name]!r}, now {new[name]!r}" for name in new if old[name] != new[name]]
    if wrong:
        raise ConfigError(f"{path} contains another {what}, which differs in {'; '.join(wrong)}; expected the same, or "
                          f"{remedy}")


def append_metric(path: Path, metric: Metric) -> None:
    """Append one line. Raises OSError, naming the file, in which a part of the line may be left."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(metric) + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def settle_metrics(path: Path, metrics: Iterable[Metric]) -> None:
    """Make the file contain exactly these lines, durably, before a checkpoint that relies on them is written: appending
    the last ones may have failed. Raises OSError, naming the file, which is then unchanged."""
    lines = b"".join(msgspec.json.encode(metric) + b"\n" for metric in metrics)
    if not path.is_file() or path.read_bytes() != lines:
        replace(path, lambda p: p.write_bytes(lines))
    else:
        flush(path)


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Read what `write_json` wrote. Raises ConfigError: it is damaged; the message ends with `remedy`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {remedy}") from error


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Replace the file atomically with indented JSON. Raises OSError."""
    replace(path, lambda p: p.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2)))
