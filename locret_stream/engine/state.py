"""The state of one context inside the engine, what becomes of its tokens, and whether tensors can be one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.cache import UnitStore
from locret_stream.engine.layout import Layout
from locret_stream.errors import SnapshotCorrupt

HISTORY = 1024  # token ids kept in memory, for repetition penalties; the full log is a file of the store


class EngineState:
    """One context inside the engine: a slot, how far it got, and what is pending.

    Attributes:
        seen: tokens committed; always a multiple of the chunk size.
        pending: accepted ids that are not committed yet.
        provisional: how many of the pending ids have K and V in the tail.
        committed_ids: the last 1,024 committed ids.
        focus: ids of the query in front of the stream; next_focus: those that replace it at the next grid point, None
            if nothing does. had_focus: it ever had one.
    """

    def __init__(self, store: UnitStore, policy_state: dict[str, Tensor]):
        self.store, self.policy_state = store, policy_state
        self.seen = 0
        self.pending: list[int] = []
        self.focus: list[int] = []
        self.next_focus: list[int] | None = None
        self.next_focus_at = 0  # position at which that was given
        self.had_focus = False
        self.provisional = 0
        self.peaks = [0] * len(store.counts)  # the most units ever held per layer, the tail included
        self.last_hidden: Tensor | None = None  # [1, 1, hidden] of the last committed token
        self.tail_logits: Tensor | None = None  # [vocab] fp32 behind pending[provisional - 1]
        self.swapped_out = False  # the slot is another's
        self.committed_ids: deque[int] = deque(maxlen=HISTORY)
        self.broken = False  # units were moved in some layers only
        self.lock = threading.RLock()  # ids are accepted on the caller's thread, or by a finaliser on any

    @property
    def position(self) -> int:
        """Absolute position of the next token: how many were accepted."""
        with self.lock:
            return self.seen + len(self.pending)

    @contextmanager
    def broken_by_failure(self) -> Iterator[None]:
        """Move units: a failure inside the block leaves layers that do not match, so the context is lost. Until then it
        is not broken: ids may be accepted on other threads meanwhile."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def small_tensors(self, pending: int | None = None) -> dict[str, Tensor]:
        """Everything but the units, as copies; of the pending ids the first `pending`, None for all."""
        with self.lock:
            out = {"seen": torch.tensor(self.seen), "pending": torch.tensor(self.pending[:pending], dtype=torch.int64),
                   "history": torch.tensor(list(self.committed_ids), dtype=torch.int64)}
            if self.had_focus:
                out["focus"] = torch.tensor(self.focus, dtype=torch.int64)
            if self.next_focus is not None:
                out["next_focus"] = torch.tensor([self.next_focus_at, *self.next_focus])
        if self.last_hidden is not None:
            out["last_hidden"] = self.last_hidden.clone()
        out.update({f"policy.{name}": tensor.clone() for name, tensor in self.policy_state.items()})
        return out

    @property
    def history(self) -> list[int]:
        """The last 1,024 accepted ids, committed or pending."""
        with self.lock:
            return [*self.committed_ids, *self.pending][-HISTORY:]


@dataclass(frozen=True, slots=True)
class Receipts:
    """What became of the tokens start .. end-1. Tokens accepted and not committed yet count as kept, without score.

    kept [L, H, T] bool; scores [L, H, T] fp32, nan where there is none.
    """

    start: int
    end: int
    kept: Tensor
    scores: Tensor


def focus_in(tensors: Mapping[str, Tensor]) -> tuple[list[int], list[int] | None]:
    """The focus, and the one that comes next, of tensors that `expect_loadable` took."""
    return (tensors["focus"].tolist() if "focus" in tensors else [],
            tensors["next_focus"].tolist()[1:] if "next_focus" in tensors else None)


def _stored_units(keys: Tensor | None, seen: int, kind: tuple[int, int | None], tensors: Mapping[str, Tensor],
                  protected: int) -> int:
    """How many units a layer of (budget, window) must have. All there is room for; a context that had a focus may have
    fewer, where the one before was longer, but no longer than `expect_focus` lets it be."""
    (budget, window), focus = kind, tensors.get("focus")
    if focus is None or window:
        return min(seen, budget)
    most = min(seen, max(0, budget - focus.numel()))
    count = keys.shape[1] if keys is not None and keys.dim() == 3 else most
    return count if min(seen, protected + 1) <= count <= most else most


def expect_loadable(layout: Layout, tensors: Mapping[str, Tensor], fresh: EngineState) -> None:
    """Refuse tensors that are not a context of this engine, before any is used; they may come from anywhere.

    Args:
        fresh: an empty context of the engine, whose policy state says what is expected.

    Raises:
        SnapshotCorrupt: naming the first tensor that cannot be.
    """
    shape, planes = layout.shape, layout.policy.planes
    seen = tensors.get("seen")
    if seen is None or seen.dtype != torch.int64 or seen.dim() or int(seen) < 0 or int(seen) % layout.chunk_size:
        raise SnapshotCorrupt(f"'seen' is {seen}; expected a multiple of the chunk size {layout.chunk_size}")
    count = int(seen)
    heads, dim, dtype = shape.kv_heads, shape.head_dim, layout.dtype
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"seen": (torch.int64, ())}
    units_of: dict[tuple[int, int | None], int] = {}  # layers of one kind hold equally many
    for layer, kind in enumerate(zip(layout.budgets, shape.sliding, strict=True)):
        units = units_of.setdefault(kind, _stored_units(tensors.get(f"{layer}.keys"), count, kind, tensors,
                                                        layout.config.budget.sinks + layout.config.budget.stabilizers))
        expected[f"{layer}.keys"] = expected[f"{layer}.values"] = (dtype, (heads, units, dim))
        expected[f"{layer}.scores"] = (torch.float32, (planes, heads, units))
        expected[f"{layer}.positions"] = (torch.int64, (heads, units))
    if count:
        expected["last_hidden"] = (dtype, (1, 1, shape.hidden))
    if "peaks" in tensors:
        expected["peaks"] = (torch.int64, (shape.layers,))
    expected |= {f"policy.{name}": (t.dtype, tuple(t.shape)) for name, t in fresh.policy_state.items()}
    for name in ("pending", "history", *(name for name in ("focus", "next_focus") if name in tensors)):
        expected[name] = (torch.int64, (len(tensors[name]),) if name in tensors and tensors[name].dim() else (0,))
    for name in sorted(tensors.keys() | expected.keys()):
        found = (tensors[name].dtype, tuple(tensors[name].shape)) if name in tensors else None
        if found != expected.get(name):
            raise SnapshotCorrupt(f"tensor {name!r} is {found or 'missing'}; expected {expected.get(name, 'none')}")
    coming = tensors.get("next_focus")
    if coming is not None and not (len(coming) and count < int(coming[0]) <= count + len(tensors["pending"])):
        raise SnapshotCorrupt(f"'next_focus' was given at {coming[:1].tolist()}; expected a place of the pending ids")
    for name, most in (("pending", 64 * layout.chunk_size), ("history", HISTORY), ("focus", max(layout.budgets)),
                       ("next_focus", max(layout.budgets))):
        ids = tensors.get(name, torch.zeros(0, dtype=torch.int64))[name == "next_focus":]
        if len(ids) > most or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < shape.vocab):
            raise SnapshotCorrupt(f"{name!r} holds {len(ids)} ids; expected at most {most}, each below {shape.vocab}")
    for layer in range(shape.layers):
        positions = tensors[f"{layer}.positions"]
        if positions.shape[1] and (int(positions.min()) < 0 or int(positions.max()) >= count
                                   or bool((positions.diff(dim=-1) <= 0).any())):
            raise SnapshotCorrupt(f"positions of layer {layer} do not ascend inside 0 to {count}")
    if "peaks" in tensors and not all(
            0 <= peak <= budget + layout.chunk_size
            for peak, budget in zip(tensors["peaks"].tolist(), layout.budgets, strict=True)):
        raise SnapshotCorrupt("'peaks' are not numbers of units that a layer can hold")
