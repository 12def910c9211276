"""The focus: a text in front of the stream, which tells the memory what it will be asked about.

It is the query of Locret-Q (arXiv:2410.01805, section on query-aware eviction). Its units have ranks 0 .. q-1 in every
layer with full attention, count in the budget, and never leave; so every token that is committed behind them has seen
the focus, and the scores of its units may depend on it.

The focus is no part of the stream: it takes no positions (its units have positions -q .. -1), and grid points stay
where they are. Its units are computed from its ids alone, so that these are all that has to be stored. Layers with a
sliding window have no units of it, as they see the last tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locret_stream.cache import HeadwiseStore
from locret_stream.engine.attention import Attention
from locret_stream.engine.layout import Layout
from locret_stream.engine.state import EngineState
from locret_stream.errors import ConfigError
from locret_stream.kernels import select_units
from locret_stream.models import Attachment, Attended, LayerCall

Units = list[tuple[Tensor, Tensor] | None]
"""For every layer K before RoPE and V, [1, H, q, D]; None for a layer without units of the focus."""


def expect_focus(layout: Layout, ids: Sequence[int]) -> None:
    """Raises ConfigError if such a focus has no space in the budget, or no layer would have units of it."""
    if not ids:
        return
    full = [units for units, window in zip(layout.budgets, layout.shape.sliding, strict=True) if not window]
    if not full:
        raise ConfigError("every layer of this model has a sliding window, so that none would keep a focus; expected "
                          "a model with a layer of full attention")
    budget = layout.config.budget
    most = min(full) - budget.sinks - budget.stabilizers - 1
    if len(ids) > most:
        raise ConfigError(f"the focus has {len(ids)} tokens; the smallest layer keeps {min(full)} units, of which "
                          f"{budget.sinks} sinks and {budget.stabilizers} stabilizers stay: expected at most "
                          f"{max(0, most)} tokens, or a larger budget")
    for layer, units in enumerate(layout.budgets):
        first, last = layout.protection_of(layer, len(ids))
        if first + last > units:
            raise ConfigError(f"policy {layout.policy.name!r} protects the first {first} and the last {last} units of "
                              f"{units}, a focus of {len(ids)} tokens included; expected a shorter one")


def units_of(layout: Layout, attachment: Attachment, attention: Attention, ids: Sequence[int]) -> Units:
    """The units of a focus, by one forward over its ids alone. Writes into no slot."""
    units: Units = [None] * layout.shape.layers
    if not ids:
        return units

    def step(call: LayerCall) -> Attended:
        layer = call.layer
        if call.keeps and not layout.shape.units[layer].sliding:
            units[layer] = call.own_k, call.v
        q = layout.tables.rotate_queries(layer, call.q, 0)
        k = layout.tables.rotate(layer, call.own_k, 0)
        return attention.attend(call, q, k, call.v, 0)[0]

    attachment.hidden(torch.tensor([list(ids)], device=attachment.device), step)
    return units


def put_in_front(layout: Layout, state: EngineState, ids: Sequence[int], units: Units) -> None:
    """Replace the units of the focus by those of a new one. Where the budget has no space for more, the stream's units
    with the lowest scores leave; no score changes."""
    for layer, of_layer in enumerate(units):
        if layout.shape.units[layer].sliding:
            continue
        store, old, new = state.store, len(state.focus), len(ids)
        count, space, scores = store.held(layer) - old, layout.budgets[layer] - new, store.scores(layer)[0]
        sinks, stabilizers = layout.protection_of(layer, new)
        keep: Tensor | list[Tensor]
        if isinstance(store, HeadwiseStore) and layout.headwise[layer]:
            of_heads = [of_head[old:] for of_head in store.split(layer, scores)]
            keep = [ranks + old for ranks in layout.select(layer, of_heads, min(count, space), sinks - new,
                                                           stabilizers, front=new)]
        else:
            keep = torch.arange(old, old + count, device=scores.device).expand(len(scores), -1)
            if count > space:
                keep = select_units(scores[:, old:], space, sinks - new, stabilizers) + old
        store.put_in_front(layer, of_layer, keep, new, layout.tables.rotate)
        state.peaks[layer] = max(state.peaks[layer], store.held(layer))
    state.forget_units()
    state.focus, state.next_focus, state.had_focus = list(ids), None, state.had_focus or bool(ids)
