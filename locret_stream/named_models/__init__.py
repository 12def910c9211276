"""Models that have a name of their own: "bundled" and "smollm2", with the heads and the memory that they come with.

Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from locret_stream.config import Recall
from locret_stream.named_models import smollm2

BUNDLED = Path(__file__).parents[1] / "assets" / "bundled"


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a name stands for.

    Args:
        folder: finds it, and may convert it first; raises UnsupportedModel.
        ahead: does what `folder` would do first and needs no torch; may run in a thread beside other work.
        heads: the folder of its retaining heads.
        budget, chunk_size: what it runs with by default; the budget in units per KV head.
        dtype: what "auto" means for it; the figures of the bundled model are of float32.
        acknowledge: see `Runtime`; the bundled model was trained to be asked in the turn that it reads.
        recall: how much is read again where recall is asked for. What a small model reads again it confuses with what
            else it remembers, so that little of that stays beside it (`benchmarks/results/recall_*`, `long_memory_*`).
        tools: whether its chat template shows tools.
        bounded: whether it never learnt to hold a whole stream, so that a full cache of it is no yardstick.
    """

    folder: Callable[[], Path]
    ahead: Callable[[], object] | None = None
    heads: Path
    budget: int
    chunk_size: int
    dtype: str = "auto"
    acknowledge: str | None = "OK."
    recall: Recall = Recall()
    tools: bool = False
    bounded: bool = False


NAMED_MODELS = {
    "bundled": NamedModel(folder=lambda: BUNDLED, heads=BUNDLED, budget=768, chunk_size=256, dtype="float32",
                          acknowledge=None, recall=Recall(tokens=96, memory=0.05), tools=True, bounded=True),
    smollm2.NAME: NamedModel(folder=smollm2.smollm2_folder, ahead=smollm2.converted_folder_is_whole,
                             heads=smollm2.HEADS, budget=1024, chunk_size=256, recall=Recall(memory=0.1)),
}


def named_model(model: str | Path) -> NamedModel | None:
    """The model that a name stands for; None: it is no name but a path or a hub id. A Path is never a name."""
    return NAMED_MODELS.get(model) if isinstance(model, str) else None


def model_path(model: str | Path) -> str | Path:
    """The folder of a model with a name; any other path or hub id as it is. Raises UnsupportedModel."""
    named = named_model(model)
    return model if named is None else named.folder()
