"""The heads before tuning: where they are stored, and how a folder goes back to them. Knows files, no training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.files import replace
from locret_stream.heads import RetainingHeads
from locret_stream.heads.module import CONFIG, WEIGHTS
from locret_stream.training import checkpoint as files
from locret_stream.training.results import Allocation, TuneResult
from locret_stream.training.validation import digest_of


def is_tuned(heads: str | os.PathLike[str]) -> bool:
    """Whether the tuning of the heads in that folder is finished, better or not, or was stopped while the tuned heads
    replaced the first ones. In the second case `tune` must finish before anything else is made of these heads."""
    path = Path(heads) / files.TUNING
    return (Path(heads) / files.FIRST_WEIGHTS).is_file() or (path.is_file() and read_tuning(path).better is not None)


def read_tuning(path: Path) -> TuneResult:
    """The content of a tuning.json. Raises ConfigError: it is damaged."""
    return files.read_json(path, TuneResult, "remove it, or restart=True, to tune anew")


def first_weights(folder: Path) -> str:
    """The name of the file that contains the first heads."""
    return files.FIRST_WEIGHTS if (folder / files.FIRST_WEIGHTS).is_file() else WEIGHTS


def replace_first_heads(folder: Path, tuned: RetainingHeads) -> None:
    """Write the tuned heads, after the first ones and their allocation got names of their own; a call that was killed
    can be repeated."""
    if not (folder / files.FIRST_WEIGHTS).is_file():
        replace(folder / files.FIRST_WEIGHTS, lambda path: shutil.copyfile(folder / WEIGHTS, path))
    if (folder / files.ALLOCATION).is_file():
        (folder / files.ALLOCATION).replace(folder / files.FIRST_ALLOCATION)
    tuned.save(folder)


def expect_tuned(folder: Path, result: TuneResult) -> None:
    """Raises ConfigError: the tuned heads replaced the first ones, and the folder contains others now."""
    if not result.better:
        return
    digest = digest_of(RetainingHeads.load(folder))
    if digest != result.tuned:
        raise ConfigError(
            f"{folder / files.TUNING} says that tuned heads took the place of the first; found "
            f"{'the first' if digest == result.heads else 'others'} in {WEIGHTS}, expected the tuned ones: leave out "
            "tune (train-heads: --tune) to use them as they are, or restart=True (--restart-tuning) to tune the first "
            "heads anew")


def forget_tuning(folder: Path) -> None:
    """Restore the first heads, their allocation and the shares that came of it; a call that was stopped anywhere can be
    repeated."""
    if (folder / files.FIRST_WEIGHTS).is_file() or (folder / files.FIRST_ALLOCATION).is_file():
        _restore_allocation(folder)
    for name in (files.TUNING, files.TUNING_METRICS, files.TUNING_CHECKPOINT):
        (folder / name).unlink(missing_ok=True)
    if (folder / files.FIRST_WEIGHTS).is_file():
        (folder / files.FIRST_WEIGHTS).replace(folder / WEIGHTS)


def _restore_allocation(folder: Path) -> None:
    """Replace the allocation of the tuned heads, if there is one, by that of the first heads."""
    first = RetainingHeads.load(folder, first_weights(folder))
    digest = digest_of(first)
    current, earlier = (files.read_json(path, Allocation, "remove it; `allocate` then measures anew")
                        if path.is_file() else None
                        for path in (folder / files.ALLOCATION, folder / files.FIRST_ALLOCATION))
    if earlier is not None and earlier.heads != digest:
        earlier = None  # its heads are lost
    if current is not None and current.heads != digest:
        if current.shares is not None and current.shares == first.config.budget_shares:
            shares = None if earlier is None else earlier.shares
            files.write_json(folder / CONFIG, msgspec.structs.replace(first.config, budget_shares=shares))
        if earlier is None:
            (folder / files.ALLOCATION).unlink()
    if earlier is not None:
        (folder / files.FIRST_ALLOCATION).replace(folder / files.ALLOCATION)
