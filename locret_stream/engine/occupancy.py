"""How much of each part of a stream the memory keeps: counted from the positions of its units, not along the stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locret_stream.engine.state import EngineState
from locret_stream.errors import InputError

MOST_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Units kept of the tokens start .. end-1.

    Attributes:
        position: tokens that the memory accepted. pending: the last of them, which are not committed yet; every layer
            and head counts as keeping them.
        column: tokens of one column; the last column may have fewer.
        kept: [L][H][columns], units of these tokens by layer and KV head.
    """

    start: int
    end: int
    position: int
    pending: int
    column: int
    kept: list[list[list[int]]]


def occupancy(state: EngineState, start: int, end: int | None, columns: int) -> Occupancy:
    """Count the units of a context on the engine's thread.

    Args:
        end: None for all that was accepted. columns: at most so many.

    Raises:
        InputError: there are no such tokens, or columns is not 1 to 4,096. ContextClosed: the context is lost.
    """
    state.expect_whole()
    with state.lock:
        seen, position = state.seen, state.position
    end = position if end is None else end
    if not 0 <= start <= end <= position:
        raise InputError(f"found tokens {start:,} to {end:,} of {position:,}; expected 0 <= start <= end, and end at "
                         "most what was accepted")
    if not 1 <= columns <= MOST_COLUMNS:
        raise InputError(f"columns is {columns}; expected 1 to {MOST_COLUMNS:,}")
    column = max(1, -(-(end - start) // columns))
    count = -(-(end - start) // column)
    pending = torch.bincount((torch.arange(max(start, seen), max(end, seen, start)) - start) // column, minlength=count)
    kept = []
    for layer in range(len(state.store.counts)):
        # The heads of a layer are counted at once: those of head h in columns h * (count + 1) and on; the last of each
        # takes what lies elsewhere.
        positions = state.store.positions(layer)
        inside = (positions >= start) & (positions < end)
        at = torch.where(inside, (positions - start) // column, count)
        heads = positions.shape[0]
        at = at + torch.arange(heads, device=at.device)[:, None] * (count + 1)
        counted = torch.bincount(at.flatten(), minlength=heads * (count + 1)).view(heads, count + 1)[:, :count].cpu()
        kept.append((counted + pending).tolist())
    return Occupancy(start, end, position, position - seen, column, kept)
