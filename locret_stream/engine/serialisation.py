"""A context as named tensors and back: exports, what a snapshot takes, and what may be loaded.

The tensors are the units of every layer l, those of the focus left out, as they follow from its ids (`l.keys`,
`l.values` [H, n, D], `l.scores` [P, H, n], `l.positions` [H, n]); `seen`, `pending`, `history`, `focus`, `next_focus`
(the position at which it was given, then its ids), `last_hidden`, `peaks`, and the state of the policy as `policy.*`.
A model that carries a recurrent state has its tensors as `state.*` (`StateTensor`), once tokens were committed.
Where committed units are codes, `l.keys` and `l.values` are rows of them, [H, n, bytes] uint8, and `l.first_keys`,
`l.first_values` and `l.key_mean` are what `QuantisedStore.beside` has, and `l.last_keys` and `l.last_values` what
`TieredStore.beside` has where the host's memory has exact units, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from locret_stream.cache import NOWHERE
from locret_stream.engine.focus import Units, expect_focus
from locret_stream.engine.layout import Layout
from locret_stream.engine.state import MOST_PENDING, EngineState
from locret_stream.errors import ConfigError, SnapshotCorrupt
from locret_stream.snapshot import Moment
from locret_stream.snapshot.format import expect

_BESIDE = ("first_keys", "first_values", "last_keys", "last_values", "key_mean")  # of layers of codes


def export(state: EngineState) -> dict[str, Tensor]:
    """All tensors of a context but `peaks`, as copies."""
    return {**state.store.export(), **_small_tensors(state)}


def moment(layout: Layout, state: EngineState, position: int, stored: Mapping[str, Tensor] | None) -> Moment:
    """All tensors of a context after the first `position` accepted tokens but K and V; see `Engine.moment`."""
    assert state.seen <= position <= state.position and state.swapped_out == (stored is not None)
    tensors = _small_tensors(state, position - state.seen)
    if stored is None:
        store, fronts = state.store, state.store.fronts
        tensors |= store.beside()
        scores = [store.scores(layer)[..., front:].clone() for layer, front in enumerate(fronts)]
        positions = [store.positions(layer)[:, front:].cpu().clone() for layer, front in enumerate(fronts)]
    else:
        expect_units_of(state, stored)
        names = {form.name for form in layout.states}
        tensors |= {name: tensor for name, tensor in stored.items()
                    if name in names or name.partition(".")[2] in _BESIDE}
        scores = [stored[f"{layer}.scores"] for layer in range(layout.shape.layers)]
        positions = [stored[f"{layer}.positions"] for layer in range(layout.shape.layers)]
    tensors |= {f"{layer}.scores": tensor for layer, tensor in enumerate(scores)}
    tensors["peaks"] = torch.tensor(state.peaks)
    return Moment(seen=state.seen, tokens=position, counts=tuple(units.shape[1] for units in positions),
                  positions=positions, state={name: tensor.cpu() for name, tensor in tensors.items()})


def load(layout: Layout, state: EngineState, tensors: Mapping[str, Tensor],
         focus_units: Callable[[Sequence[int]], Units], last_device: torch.device) -> None:
    """Load `tensors` into an empty context; see `Engine.load`. `focus_units` computes the units of a focus from its
    ids; `last_device` is where the model's hidden states come out."""
    expect_loadable(layout, tensors, state)
    state.focus, state.next_focus = _focus_in(tensors)
    state.had_focus = "focus" in tensors
    if state.next_focus is not None:
        state.next_focus_at = int(tensors["next_focus"][0])
    for ids in (state.focus, state.next_focus or []):
        try:
            expect_focus(layout, ids)
        except ConfigError as error:
            raise SnapshotCorrupt(str(error)) from error
    state.store.load(tensors, layout.tables.rotate, focus_units(state.focus))
    state.seen = int(tensors["seen"])
    state.rounded = state.seen if layout.config.rounds else 0
    state.pending = tensors["pending"].tolist()
    state.committed_ids.extend(tensors["history"].tolist())
    state.peaks = (tensors["peaks"].tolist() if "peaks" in tensors else
                   [state.store.held(layer) for layer in range(layout.shape.layers)])
    if "last_hidden" in tensors:
        state.last_hidden = tensors["last_hidden"].to(last_device, copy=True)
    state.policy_state = {name: tensors[f"policy.{name}"].to(tensor.device, copy=True)
                          for name, tensor in state.policy_state.items()}


def expect_units_of(state: EngineState, stored: Mapping[str, Tensor]) -> None:
    """Raises SnapshotCorrupt for stored units of another position or focus than those of a swapped-out state."""
    seen, focus = int(stored["seen"]), _focus_in(stored)[0]
    if seen != state.seen or focus != state.focus:
        raise SnapshotCorrupt(f"found units of position {seen} and focus {focus}; expected {state.seen} and "
                              f"{state.focus}")


def expect_loadable(layout: Layout, tensors: Mapping[str, Tensor], fresh: EngineState) -> None:
    """Raises SnapshotCorrupt, which names the first tensor that is not as of a context of this layout, before any is
    used; they may come from anywhere. The policy state and history of `fresh`, an empty context, say what is expected.
    """
    shape, planes = layout.shape, layout.policy.planes
    seen = tensors.get("seen")
    if seen is None or seen.dtype != torch.int64 or seen.dim() or int(seen) < 0 or int(seen) % layout.chunk_size:
        raise SnapshotCorrupt(f"'seen' is {seen}; expected a multiple of the chunk size {layout.chunk_size}")
    count = int(seen)
    dtype = layout.dtype
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"seen": (torch.int64, ())}
    units_of: dict[tuple[int, int | None], int] = {}  # layers of equal budget and window have equally many units
    for layer, (budget, unit) in enumerate(zip(layout.budgets, shape.units, strict=True)):
        heads, kind = unit.kv_heads, (budget, unit.sliding)
        if layout.headwise[layer]:
            units = _expected_of_most(tensors.get(f"{layer}.positions"), count, layer, layout)
        else:
            units = units_of.setdefault(kind, _expected_units(tensors.get(f"{layer}.keys"), count, *kind, tensors,
                                                              layout))
        if layout.config.stores_codes:
            expected |= _expected_codes(layout, layer, units)
        else:
            for part, dim in zip(("keys", "values"), unit.dims, strict=True):
                expected[f"{layer}.{part}"] = (dtype, (heads, units, dim))
        if layout.config.quantised and units and not layout.given_means:
            expected[f"{layer}.key_mean"] = (torch.float32, (heads, unit.key_dim))
        expected[f"{layer}.scores"] = (torch.float32, (planes, heads, units))
        expected[f"{layer}.positions"] = (torch.int64, (heads, units))
    if count:
        expected["last_hidden"] = (dtype, (1, 1, shape.hidden))
        expected |= {form.name: (form.dtype, form.shape) for form in layout.states}
    if "peaks" in tensors:
        expected["peaks"] = (torch.int64, (shape.layers,))
    expected |= {f"policy.{name}": (t.dtype, tuple(t.shape)) for name, t in fresh.policy_state.items()}
    for name in ("pending", "history", *(name for name in ("focus", "next_focus") if name in tensors)):
        expected[name] = (torch.int64, (len(tensors[name]),) if name in tensors and tensors[name].dim() else (0,))
    expect(tensors, expected, "its state")
    next_focus = tensors.get("next_focus")
    if next_focus is not None and not (
            len(next_focus) and count < int(next_focus[0]) <= count + len(tensors["pending"])):
        raise SnapshotCorrupt(f"'next_focus' was given at {next_focus[:1].tolist()}; expected a place of the pending "
                              "ids")
    for name, most in (("pending", MOST_PENDING), ("history", fresh.committed_ids.maxlen or 0),
                       ("focus", max(layout.budgets)), ("next_focus", max(layout.budgets))):
        ids = tensors.get(name, torch.zeros(0, dtype=torch.int64))[name == "next_focus":]
        if len(ids) > most or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < shape.vocab):
            raise SnapshotCorrupt(f"{name!r} holds {len(ids)} ids; expected at most {most}, each below {shape.vocab}")
    for layer in range(shape.layers):
        positions = tensors[f"{layer}.positions"]
        if layout.headwise[layer]:
            _expect_headwise(layout, layer, positions, count, had_focus="focus" in tensors)
        elif positions.shape[1] and (int(positions.min()) < 0 or int(positions.max()) >= count
                                   or bool((positions.diff(dim=-1) <= 0).any())):
            raise SnapshotCorrupt(f"positions of layer {layer} do not ascend inside 0 to {count}")
    if "peaks" in tensors and not all(
            0 <= peak <= budget + layout.chunk_size
            for peak, budget in zip(tensors["peaks"].tolist(), layout.budgets, strict=True)):
        raise SnapshotCorrupt("'peaks' are not numbers of units that a layer can hold")


def _expected_codes(layout: Layout, layer: int, units: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of a layer's codes, and of what is stored beside them."""
    unit, first, tier = layout.shape.units[layer], min(layout.firsts[layer], units), layout.config.exact
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for part, dim, row in zip(("keys", "values"), unit.dims, layout.stored_rows[layer], strict=True):
        expected[f"{layer}.{part}"] = (torch.uint8, (unit.kv_heads, units, row))
        expected[f"{layer}.first_{part}"] = (layout.dtype, (unit.kv_heads, first, dim))
        if tier is not None:
            last = min(tier.residual, layout.budgets[layer], units)
            expected[f"{layer}.last_{part}"] = (layout.dtype, (unit.kv_heads, last, dim))
    return expected


def _expected_units(keys: Tensor | None, seen: int, budget: int, window: int | None, tensors: Mapping[str, Tensor],
                    layout: Layout) -> int:
    """How many units a layer of that budget and window must have: as many as fit. In a context that had a focus they
    may be fewer, where the focus before was longer, but never so few that `expect_focus` would have refused it."""
    focus = tensors.get("focus")
    if focus is None or window:
        return min(seen, budget)
    protected = layout.config.budget.sinks + layout.config.budget.stabilizers
    most = min(seen, max(0, budget - focus.numel()))
    count = keys.shape[1] if keys is not None and keys.dim() == 3 else most
    return count if min(seen, protected + 1) <= count <= most else most


def _expected_of_most(positions: Tensor | None, seen: int, layer: int, layout: Layout) -> int:
    """How many units the head with most must have, in a layer whose heads share a budget: as many as are said, if they
    can be so many."""
    most = min(seen, layout.most[layer])
    return min(positions.shape[1], most) if positions is not None and positions.dim() == 2 else most


def _expect_headwise(layout: Layout, layer: int, positions: Tensor, seen: int, *, had_focus: bool) -> None:
    """Raises SnapshotCorrupt unless the positions [H, n] of a layer whose heads share a budget ascend in each head up
    to its last unit, and its heads together have as many units as it keeps, or fewer, where there was a focus."""
    real = positions != NOWHERE
    ascend = (positions.diff(dim=-1) > 0) | ~real[:, 1:]
    held = int(real.sum())
    if bool((real[:, 1:] & ~real[:, :-1]).any()) or not bool(ascend.all()) or (held and not (
            0 <= int(positions[real].min()) and int(positions[real].max()) < seen)):
        raise SnapshotCorrupt(f"positions of layer {layer} do not ascend inside 0 to {seen} in every KV head")
    most = min(seen, layout.budgets[layer]) * len(positions)
    if held > most or (held < most and not had_focus):
        raise SnapshotCorrupt(f"layer {layer} has {held} units; expected {'at most ' * had_focus}{most} of its "
                              f"{len(positions)} KV heads, which share them")


def _focus_in(tensors: Mapping[str, Tensor]) -> tuple[list[int], list[int] | None]:
    """The ids of the focus and of the next one, of tensors that `expect_loadable` accepts."""
    return (tensors["focus"].tolist() if "focus" in tensors else [],
            tensors["next_focus"].tolist()[1:] if "next_focus" in tensors else None)


def _small_tensors(state: EngineState, pending: int | None = None) -> dict[str, Tensor]:
    """All tensors but units and peaks, as copies; of the pending ids the first `pending`, None for all."""
    with state.lock:
        tensors = {"seen": torch.tensor(state.seen),
                   "pending": torch.tensor(state.pending[:pending], dtype=torch.int64),
                   "history": torch.tensor(list(state.committed_ids), dtype=torch.int64)}
        if state.had_focus:
            tensors["focus"] = torch.tensor(state.focus, dtype=torch.int64)
        if state.next_focus is not None:
            tensors["next_focus"] = torch.tensor([state.next_focus_at, *state.next_focus])
    if state.last_hidden is not None:
        tensors["last_hidden"] = state.last_hidden.clone()
    return tensors | {f"policy.{name}": tensor.clone() for name, tensor in state.policy_state.items()}
