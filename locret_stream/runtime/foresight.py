"""What a memory is made of, worked out before it is allocated: of a model that is loaded, and of one that is not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locret_stream.budgets import usual_memory
from locret_stream.cache import Pool
from locret_stream.config import Budget, StreamConfig, UnitBytes, budget_from, unit_bytes
from locret_stream.engine.layout import Layout
from locret_stream.heads import RetainingHeads
from locret_stream.host_tier import HostTier
from locret_stream.models import Attachment, Foreseen, foresee
from locret_stream.named_models.one_at_a_time import one_at_a_time
from locret_stream.policies import Policy, make_policy, usual_policy
from locret_stream.runtime.loading import (
    base_of,
    class_of,
    config_of,
    cpu_dtype,
    drop_towers,
    dtype_of,
    readable,
    source_of,
)
from locret_stream.runtime.valueless import quick_arithmetic


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user asks of a memory; the fields are arguments of `Runtime`."""

    policy: str | Policy | None
    knobs: dict[str, Any]
    budget: int | str | Budget | None
    chunk_size: int | None
    sinks: int | None
    stabilizers: int | None
    by_head: bool
    store_bits: tuple[int, int]
    exact: HostTier | None

    def of(self, model: Attachment | Foreseen, heads: RetainingHeads | None) -> Settings:
        """The settings of a memory of that model with these heads. Raises ConfigError, WindowExceeded."""
        means = None
        if heads is not None and heads.key_means is not None:
            means = heads.key_means.clone()  # the caller's stay theirs
        policy = self.policy if isinstance(self.policy, Policy) else make_policy(
            self.policy or usual_policy(with_heads=heads is not None), self.knobs, heads)
        # A policy that never evicts is full as soon as its smallest layer is.
        shares = heads.config.budget_shares if heads is not None and policy.bounded else None
        shape = model.shape
        usual_budget, usual_chunk = usual_memory(shape.window)
        chunk_size = usual_chunk if self.chunk_size is None else self.chunk_size
        per_unit = tuple(unit_bytes(unit, shape.item_bytes, policy.planes, key_copies=copies,
                                    store_bits=self.store_bits, own_means=means is None, tier=self.exact)
                         for unit, copies in zip(shape.units, model.key_copies, strict=True))
        budget = budget_from(usual_budget if self.budget is None else self.budget, shape, chunk_size,
                             sinks=self.sinks, stabilizers=self.stabilizers, by_head=self.by_head, shares=shares,
                             per_unit=per_unit)
        return Settings(StreamConfig(budget=budget, chunk_size=chunk_size, policy=policy.name, knobs=self.knobs,
                                     store_bits=self.store_bits, exact=self.exact), policy, shares, means, per_unit)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is made with beside the model: arguments of `Engine`, and what a unit takes in each layer."""

    config: StreamConfig
    policy: Policy
    shares: tuple[float, ...] | None
    means: Tensor | None
    per_unit: tuple[UnitBytes, ...]


@dataclass(frozen=True, slots=True)
class Foresight:
    """A runtime that was not started: its model, the layout of its memory, and a pool on the meta device, whose tensors
    take no memory and have the sizes of those that starting would allocate.

    Attributes:
        weights_stored, weights_held: bytes in the checkpoint, and in memory, where they are not packed; None: unknown.
    """

    model: Foreseen
    layout: Layout
    pool: Pool
    weights_stored: int | None
    weights_held: int | None

    @property
    def snapshot_bytes(self) -> int:
        """Of the first snapshot of a full memory, about: what is kept, without the chunk's room and rotated keys."""
        layout = self.layout
        item = 1 if layout.config.stores_codes else layout.shape.item_bytes
        units = sum(unit.kv_heads * budget * (sum(rows) * item + 4 * self.pool.planes + 8)
                    for unit, budget, rows in zip(layout.shape.units, layout.budgets, layout.stored_rows, strict=True))
        if layout.config.rounds:
            units += sum(unit.kv_heads * last * sum(unit.dims) * layout.shape.item_bytes
                         for unit, last in zip(layout.shape.units, self.pool.residuals, strict=True))
        return units + layout.shape.state_bytes + layout.shape.hidden * layout.shape.item_bytes


def foresee_model(path: str | Path, dtype: str | torch.dtype, device: str | Mapping[str, Any]
                  ) -> tuple[Foreseen, bool]:
    """What the model of a checkpoint will keep, told by its config, and whether its weights are packed. Arguments are
    those of `load_model`; a model over several devices is told of as on one. Neither packing nor adapters change what
    layers keep, and they are not looked at.

    Raises:
        UnsupportedModel: the config cannot be read; or the model would be refused, in the words of attaching it.
    """
    single = isinstance(device, (str, torch.device)) and device != "auto"
    where = torch.device(device if single else "cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    with one_at_a_time():
        with readable(path, "configuration"):
            _, options = source_of(path)
            config = config_of(path, options)
            declared = config.to_dict()
            packed = declared.get("quantization_config") is not None and not options
            if dtype == "auto":
                own = None if options else dtype_of(declared)
                dtype = own or torch.float32 if packed or where.type != "cpu" else cpu_dtype(own)
            kind = class_of(config, options)
        if hasattr(config, "quantization_config"):
            del config.quantization_config

        def make() -> Any:
            with quick_arithmetic():
                model = getattr(kind, "from_config", None) or kind._from_config
                made = model(config, dtype=dtype, experts_implementation="eager")
            drop_towers(made)
            return made

        return foresee(make, where), packed


def weights_bytes(path: str | Path) -> int | None:
    """Bytes of the weights in a checkpoint, of an adapter with its base, as sizes and headers of its files tell them;
    None where they are not here."""
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file():
        own, base = weights_bytes_in(folder), weights_bytes(base_of(path))
        return None if own is None or base is None else own + base
    return weights_bytes_in(folder)


def weights_bytes_in(folder: Path) -> int | None:
    """The same of one folder or GGUF file."""
    if folder.suffix == ".gguf":
        return folder.stat().st_size
    files = [*folder.glob("*.safetensors")]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        files = [folder / name for name in set(index["weight_map"].values())]
        if not all(file.is_file() for file in files):  # not downloaded yet
            return int(index["metadata"]["total_size"])
    if files:
        return sum(map(_of_tensors, files))
    sizes = [file.stat().st_size for file in folder.glob("pytorch_model*.bin")]
    return sum(sizes) if sizes else None


def _of_tensors(file: Path) -> int:
    """Bytes of the tensors of a safetensors file: all but its header, whose length comes first."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
