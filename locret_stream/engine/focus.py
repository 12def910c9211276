"""The focus: a query that stands in front of the stream, as in Locret-Q (arXiv:2410.01805, section on query-aware
eviction). Its units lie at ranks 0 .. q-1 of every layer with full attention, inside the budget, and never leave; so
every token that is committed behind them has seen the query, and what its heads say of it may depend on that.

The query is no part of the stream: it counts no positions (its units bear -q .. -1), and the grid does not move. Its
units are computed from its ids alone, so that a context needs only these to have them again. Layers with a sliding
window hold none: they see what is near.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locret_stream.engine.attention import Attention
from locret_stream.engine.layout import Layout
from locret_stream.engine.state import EngineState
from locret_stream.errors import ConfigError
from locret_stream.kernels import select_units
from locret_stream.models import Attachment, Attended, LayerCall

Units = list[tuple[Tensor, Tensor] | None]
"""For every layer K before RoPE and V, [1, H, q, D]; None for one that holds none."""


def expect_focus(layout: Layout, ids: Sequence[int]) -> None:
    """Raises:
        ConfigError: a focus of so many tokens has no room in the budget, or no layer would hold it.
    """
    if not ids:
        return
    full = [units for units, window in zip(layout.budgets, layout.shape.sliding, strict=True) if not window]
    if not full:
        raise ConfigError("every layer of this model has a sliding window, so that none would hold a focus; expected "
                          "a model with a layer of full attention")
    budget = layout.config.budget
    most = min(full) - budget.sinks - budget.stabilizers - 1
    if len(ids) > most:
        raise ConfigError(f"the focus has {len(ids)} tokens; the smallest layer holds {min(full)} units, of which "
                          f"{budget.sinks} sinks and {budget.stabilizers} stabilizers stay: expected at most "
                          f"{max(0, most)} tokens, or a larger budget")
    for layer, units in enumerate(layout.budgets):
        first, last = layout.protection_of(layer, len(ids))
        if first + last > units:
            raise ConfigError(f"policy {layout.policy.name!r} protects the first {first} and the last {last} units of "
                              f"{units}, a focus of {len(ids)} tokens included; expected a shorter one")


def units_of(layout: Layout, attachment: Attachment, attention: Attention, ids: Sequence[int]) -> Units:
    """The units of a focus, by one forward of its ids with nothing before them. Writes nowhere."""
    found: Units = [None] * layout.shape.layers
    if not ids:
        return found

    def step(call: LayerCall) -> Attended:
        layer = call.layer
        if not layout.shape.sliding[layer]:
            found[layer] = call.k, call.v
        q = layout.tables.rotate(layer, call.q, 0)
        k = layout.tables.rotate(layer, call.k, 0)
        return attention.attend(call, q, k, call.v)[0]

    attachment.hidden(torch.tensor([list(ids)], device=attachment.device), step)
    return found


def put_in_front(layout: Layout, state: EngineState, ids: Sequence[int], units: Units) -> None:
    """Let the units of a new focus take the place of the old one's. Where the budget has no room for more, the stream's
    units with the lowest scores leave; no score changes."""
    for layer, found in enumerate(units):
        if layout.shape.sliding[layer]:
            continue
        store, old, new = state.store, len(state.focus), len(ids)
        count, room = store.counts[layer] - old, layout.budgets[layer] - new
        keep = torch.arange(old, old + count, device=store.positions(layer).device).expand(layout.shape.kv_heads, -1)
        if count > room:
            sinks, stabilizers = layout.protection_of(layer, new)
            keep = select_units(store.scores(layer)[0, :, old:], room, sinks - new, stabilizers) + old
        store.put_in_front(layer, found, keep, layout.rotate_keys)
        state.peaks[layer] = max(state.peaks[layer], store.counts[layer])
    state.focus, state.next_focus, state.had_focus = list(ids), None, True
