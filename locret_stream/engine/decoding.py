"""Decoding: the next token's logits of several contexts by one forward of shape [A, 1]. Knows no text and no sampling.

Each context stays in its own slot and at its own ranks, and every step may take other contexts. All that differs from
step to step is in one small tensor, so that on CUDA the whole step is a graph, captured once per batch size.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.cache import HeadwiseStore, Pool, QuantisedStore, UnitStore
from locret_stream.engine.layout import Layout
from locret_stream.engine.state import EngineState
from locret_stream.kernels import decode_attention, slot_units
from locret_stream.models import Attachment, Attended, LayerCall, Step, masked_attention

_log = logging.getLogger(__name__)
_capturing = threading.Lock()  # one capture at a time in a process


@dataclass(slots=True)
class NextToken:
    """A request for one context's next token: `choose` returns its id from logits [vocab] fp32, and it is accepted,
    unless it is one of `unheld`."""

    state: EngineState
    choose: Callable[[Tensor], int]
    unheld: Collection[int] = ()


class Decoder:
    """One forward over the newest pending token of each of A contexts, which writes no committed units.

    On CUDA steps are replayed as graphs (`LOCRET_CUDA_GRAPHS=0` runs them one operation at a time): batches are padded
    to a power of two with copies of their first row, which write the same as that row.

    Attributes:
        graphed: whether steps are replayed so.
        kinds: of each layer, the first one that has as many units and rotates alike: what follows from ranks is
            computed once for all of a kind. zeros: a tensor [0] on each device.
    """

    def __init__(self, layout: Layout, attachment: Attachment, pool: Pool):
        self.layout, self.attachment, self.pool = layout, attachment, pool
        self._chooses = layout.shape.chooses
        self.graphed = (all(layout.triton) and not (pool.quantised or self._chooses)
                        and attachment.device.type == "cuda"
                        and len(pool.devices) == 1 and os.environ.get("LOCRET_CUDA_GRAPHS") != "0")
        self._graphs: dict[int, _Graph | None] = {}  # None: there was no memory for that size
        self._in_blocks = any(unit.blocks for unit in layout.shape.units)
        tables = layout.tables
        kinds = [(budget, unit.sliding, unit.blocks, id(tables.layers[layer]), id(tables.factors.get(layer)),
                  attachment.places[layer].device)
                 for layer, (budget, unit) in enumerate(zip(layout.budgets, layout.shape.units, strict=True))]
        self.kinds = [kinds.index(kind) for kind in kinds]
        self._went_on = False  # whether recurrent states were written in the step that runs
        # Of each layer whose heads share a budget, the first of the rows of a batch that say where its heads lie.
        self._heads_at: dict[int, int] = {}
        at = 3 + layout.shape.layers
        for layer, unit in enumerate(layout.shape.units):
            if layout.headwise[layer]:
                self._heads_at[layer] = at
                at += 2 * unit.kv_heads
        self.zeros = {device: torch.zeros(1, dtype=torch.int64, device=device) for device in pool.devices}

    def run(self, states: Sequence[EngineState]) -> None:
        """Give each state's next pending id provisional units and set its `tail_logits`. A state that was swapped out
        meanwhile stays as it is: its units lie behind the committed ones of a slot, where the next context overwrites
        them."""
        counts = [state.provisional for state in states]
        for state in states if self.pool.states.forms else ():
            if not state.provisional:
                state.store.keep_state(state.store.state(provisional=False), provisional=True)
        self._went_on = False
        try:
            logits = [row.clone() for row in self._step(states, counts)]  # views would keep the whole batch's memory
        except BaseException:
            for state in states if self._went_on else ():
                state.provisional = 0  # its recurrent state may be of one token more
            raise
        for state, row, count in zip(states, logits, counts, strict=True):
            with state.lock:
                if not state.swapped_out:
                    self._took(state, row, count + 1)

    def _took(self, state: EngineState, logits: Tensor, provisional: int) -> None:
        """Take over that so many pending ids have units now, and the logits behind them."""
        state.tail_logits, state.provisional = logits, provisional

    def to_read(self, state: EngineState) -> int:
        """How many of the pending ids have units once those are read that one forward reads together; those behind them
        are run here, one by one."""
        alone = len(state.pending) - state.provisional == 1 and self.can_run(state)
        return state.provisional if alone else len(state.pending)

    def can_run(self, state: EngineState) -> bool:
        """Whether the next token of the context can be run here: not the first of a stream, where layers with a
        recurrent state have none to go on from; and none of a model whose layers read ranks from its cache, as these
        are not the same in every context."""
        if self.layout.shape.biased:
            return False
        return not self.pool.states.forms or bool(state.seen or state.provisional)

    def _step(self, states: Sequence[EngineState], counts: Sequence[int]) -> Tensor:
        """Logits [A, vocab] fp32 of the ids behind the first `counts` pending ones."""
        stores = [state.store for state in states]
        rows = [[state.pending[count] for state, count in zip(states, counts, strict=True)],
                [store.slot for store in stores]]
        for layer in range(self.layout.shape.layers):
            rows.append([store.counts[layer] + count for store, count in zip(stores, counts, strict=True)])
        rows.append([max(ranks) for ranks in zip(*rows[2:], strict=True)])
        for layer in self._heads_at:
            rows += _rows_of_heads(stores, counts, layer)
        if self._in_blocks:
            rows.append([state.seen + count for state, count in zip(states, counts, strict=True)])
        device = self.attachment.device
        if self.pool.quantised:
            return self._forward_quantised(stores, torch.tensor(rows, device=device))
        if self.graphed:
            size = 1 << (len(states) - 1).bit_length()
            batch = torch.tensor([row + row[:1] * (size - len(row)) for row in rows],
                                 pin_memory=torch.cuda.is_available())
            with torch.cuda.device_of(self.pool.scratch):
                graph = self._graph_of(size, batch)
                if graph is not None:
                    self._went_on = bool(self.pool.states.forms)
                    return graph.replay(batch)[:len(states)]
        return self._forward(torch.tensor(rows, device=device))

    def _graph_of(self, size: int, batch: Tensor) -> _Graph | None:
        """The graph of that batch size; None if memory ends, or the model's forward cannot be captured, as where it
        waits for the device. One warning says so; this size, or every step, runs without graphs from then on."""
        if size not in self._graphs:
            try:
                with _capturing:
                    self._graphs[size] = _Graph(self._forward, batch.to(self.attachment.device))
            except torch.OutOfMemoryError as error:
                _log.warning("steps of %d contexts decode without a CUDA graph, more slowly: there is no memory for it "
                             "(%s)", size, error)
                self._graphs[size] = None
            except RuntimeError as error:
                _log.warning("decoding goes on without CUDA graphs, more slowly: this model's forward cannot be "
                             "captured (%s)", error)
                self.graphed = False
                self._graphs.clear()
        return self._graphs.get(size)

    def _forward(self, batch: Tensor) -> Tensor:
        """batch [3 + L + ..., A] int64: ids, slots, for every layer the rank that the new unit gets, and the largest of
        these; of layers whose heads share a budget what `_rows_of_heads` gives; last, where some layer sees blocks, the
        tokens' positions in the stream. Logits [A, vocab] fp32."""
        layout, attachment, pool, tables = self.layout, self.attachment, self.pool, self.layout.tables
        kinds = self.kinds
        shared: dict[int, tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None, int | Tensor | None]] = {}

        def step(call: LayerCall) -> Attended:
            layer, heads, buffers = call.layer, call.q.shape[1], pool.layers[call.layer]
            if kinds[layer] not in shared:
                here = batch.to(attachment.places[layer].device)
                ranks, unit = here[2 + layer], layout.shape.units[layer]
                window = here[-1] % unit.sliding + 1 if unit.blocks and unit.sliding else unit.sliding
                shared[kinds[layer]] = here[1], ranks, ranks + 1, tables.turns(layer, ranks), window
            slots, ranks, lengths, turns, window = shared[kinds[layer]]
            cos = sin = None
            if layout.on_load[layer]:
                pair = tables.layers[layer]
                assert pair is not None, "kernels rotate keys on read only in layers with RoPE"
                cos, sin = pair[0][0], pair[1][0]
            k = call.k
            if layout.on_load[layer] or not call.keeps:
                q = tables.rotate_each(layer, call.q, turns)
            else:
                both = tables.rotate_each(layer, torch.cat([call.q, call.k], dim=1), turns)
                q, k = both[:, :heads], both[:, heads:]
            if call.keeps:
                buffers.write_each(slots, ranks, call.k, k, call.v)
            return decode_attention(q, buffers.rotated, buffers.values, slots, lengths, call.scale, cos=cos, sin=sin,
                                    window=window, softcap=call.softcap, sink_logits=call.sink_logits)

        def choosing(call: LayerCall) -> Attended:
            if call.asked is None and call.layer not in self._heads_at:
                return step(call)
            here = batch.to(attachment.places[call.layer].device)
            if call.layer in self._heads_at:
                return self._attend_headwise(call, here)
            return self._attend_chosen(call, here[1], here[2 + call.layer])

        return self._logits(batch, choosing if self._chooses or self._heads_at else step)

    def _attend_headwise(self, call: LayerCall, batch: Tensor) -> Tensor:
        """Attention in a layer whose heads share a budget: each head of a context is a context of one head."""
        layer, buffers = call.layer, self.pool.layers[call.layer]
        (contexts, query_heads), heads = call.q.shape[:2], self.layout.shape.units[layer].kv_heads
        firsts, ranks = self._of_heads(layer, batch)
        slots = batch[1].repeat_interleave(heads)
        q, turned = turn_heads(self.layout, call, ranks)
        k, v = (part.reshape(contexts * heads, 1, 1, part.shape[-1]) for part in (call.k, call.v))
        if call.keeps:
            buffers.write_each(slots, firsts + ranks, k, turned, v)
        cos = sin = None
        if self.layout.on_load[layer]:
            pair = self.layout.tables.layers[layer]
            assert pair is not None, "kernels rotate keys on read only in layers with RoPE"
            cos, sin = pair[0][0], pair[1][0]
        sinks = call.sink_logits
        out = decode_attention(q, buffers.rotated, buffers.values, slots, ranks + 1, call.scale, firsts=firsts, cos=cos,
                               sin=sin, softcap=call.softcap, sink_logits=sinks if sinks is None else
                               sinks.view(heads, -1).repeat(contexts, 1))
        return out.reshape(contexts, query_heads, 1, out.shape[-1])

    def _of_heads(self, layer: int, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Of each head of each context the first row, and the rank of its new unit, [A * H] each."""
        at, heads = self._heads_at[layer], self.layout.shape.units[layer].kv_heads
        firsts, ranks = (batch[start:start + heads].t().reshape(-1) for start in (at, at + heads))
        return firsts, ranks

    def _attend_headwise_codes(self, call: LayerCall, batch: Tensor, stores: Sequence[UnitStore],
                               counts: Sequence[int]) -> Tensor:
        """The same where committed units are codes; `counts`: of each context the rank of the new unit in the head with
        most."""
        layer, heads, rotate = call.layer, self.layout.shape.units[call.layer].kv_heads, self.layout.tables.rotate
        firsts, ranks = self._of_heads(layer, batch)
        q, turned = turn_heads(self.layout, call, ranks)
        slots, sinks, out = self.zeros[q.device].expand(heads), call.sink_logits, []
        for context, (store, rank) in enumerate(zip(stores, counts, strict=True)):
            assert isinstance(store, QuantisedStore), "a pool of codes has no others"
            own, here = slice(context * heads, (context + 1) * heads), slice(context, context + 1)
            if call.keeps:
                held, values = store.append(layer, rank, call.k[here], call.v[here], turned[own].transpose(0, 1),
                                            rotate)
            else:
                _, held, values = store.attended(layer, rank + 1, rotate)
            attended = decode_attention(q[own], held, values, slots, ranks[own] + 1, call.scale, firsts=firsts[own],
                                        softcap=call.softcap,
                                        sink_logits=sinks if sinks is None else sinks.view(heads, -1))
            out.append(attended.reshape(1, -1, 1, attended.shape[-1]))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _attend_chosen(self, call: LayerCall, slots: Tensor, ranks: Tensor) -> Tensor:
        """Attention in a layer with an index: of each context by itself."""
        layer, tables, buffers, dim = call.layer, self.layout.tables, self.pool.layers[call.layer], call.q.shape[-1]
        assert call.keeps and call.softcap is None, "no model of those that are served"
        own_k, turns = call.own_k, tables.turns(layer, ranks)
        q = tables.rotate_each(layer, call.q, turns)
        buffers.write_each(slots, ranks, own_k, tables.rotate_each(layer, own_k, turns), call.v)
        out = []
        for row, (slot, rank) in enumerate(zip(slots.tolist(), ranks.tolist(), strict=True)):
            held = slot_units(buffers.rotated, slot, 0, rank + 1)
            k = held[..., :dim]
            v = slot_units(buffers.values, slot, 0, rank + 1) if self.layout.shape.units[layer].value_dim else k
            out.append(masked_attention(q[row:row + 1], k, v, call.chosen(held, tables, row), call.scale,
                                        sink_logits=call.sink_logits))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _logits(self, batch: Tensor, step: Step) -> Tensor:
        """Logits [A, vocab] fp32 of a forward of `batch`, whose provisional states go on."""
        return self._logits_of(batch[0][:, None], batch[2 + len(self.kinds)][:, None], batch[1], step)[:, -1]

    def _logits_of(self, ids: Tensor, start: Tensor, slots: Tensor, step: Step, *, keep: bool = True) -> Tensor:
        """Logits [A, T, vocab] fp32 of a forward of ids [A, T] in the slots [A], the first of each context at the
        position `start` [A, 1]; provisional states go on, unless `keep` is false."""
        attachment, states = self.attachment, self.pool.states
        carried = attachment.carry(states.read(slots, provisional=True)) if states.forms else None
        logits = attachment.logits(attachment.hidden(ids, step, carried, start)).float()
        if carried is not None and keep:
            self._went_on = True
            states.write(slots, carried.tensors, provisional=True)
        return logits

    def _forward_quantised(self, stores: Sequence[UnitStore], batch: Tensor) -> Tensor:
        """`_forward` where committed units are codes: each context's layer is read, and attended to, by itself."""
        tables, shape = self.layout.tables, self.layout.shape
        counts = batch[2:].tolist()
        shared: dict[int, tuple[Tensor, Sequence[Tensor], tuple[Tensor, ...] | None]] = {}

        def step(call: LayerCall) -> Attended:
            layer, heads, device, unit = call.layer, call.q.shape[1], call.q.device, shape.units[call.layer]
            if layer in self._heads_at:
                return self._attend_headwise_codes(call, batch.to(device), stores, counts[layer])
            kind = self.kinds[layer]
            if kind not in shared:
                ranks = batch[2 + layer].to(device)
                lengths = (ranks + 1).split(1) if len(stores) > 1 else (ranks + 1,)
                shared[kind] = self.zeros[device], lengths, tables.turns(layer, ranks)
            here, lengths, turns = shared[kind]
            both = tables.rotate_each(layer, torch.cat([call.q, call.k], dim=1), turns)
            parts, out = (both[:, :heads], call.k, call.v, both[:, heads:]), []
            each = zip(*(part.split(1) for part in parts), strict=True) if len(stores) > 1 else (parts,)
            for store, rank, position, length, (q, k, v, turned) in zip(stores, counts[layer], counts[-1], lengths,
                                                                        each, strict=True):
                assert isinstance(store, QuantisedStore), "a pool of codes has no others"
                if call.keeps:
                    held, values = store.append(layer, rank, k, v, turned, tables.rotate)
                else:
                    _, held, values = store.attended(layer, rank + 1, tables.rotate)
                out.append(decode_attention(q, held, values, here, length, call.scale,
                                            window=unit.reach(position) if unit.blocks else unit.sliding,
                                            softcap=call.softcap, sink_logits=call.sink_logits))
            return torch.cat(out) if len(out) > 1 else out[0]

        return self._logits(batch, step)


def turn_heads(layout: Layout, call: LayerCall, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [A * H, G, 1, D] and keys [A * H, 1, 1, D] of one token of A contexts, in a layer whose heads share a
    budget, turned to the ranks [A * H] that it has in each head."""
    (contexts, query_heads, _, dim), heads = call.q.shape, call.k.shape[1]
    both = torch.cat([call.q.reshape(contexts * heads, query_heads // heads, 1, dim),
                      call.k.reshape(contexts * heads, 1, 1, dim)], dim=1)
    turned = layout.tables.rotate_each(call.layer, both, layout.tables.turns(call.layer, ranks))
    return turned[:, :-1], turned[:, -1:]


def _rows_of_heads(stores: Sequence[UnitStore], counts: Sequence[int], layer: int) -> list[list[int]]:
    """Of A contexts with so many provisional units, in a layer whose heads share a budget: of each head the row of its
    first unit in each slot, then the rank that each one's new unit gets; 2 * H rows of A."""
    firsts, ranks = [], []
    for store, count in zip(stores, counts, strict=True):
        assert isinstance(store, HeadwiseStore), "heads share a budget in no other"
        firsts.append(store.firsts(layer))
        ranks.append([held + count for held in store.of_heads[layer]])
    return [list(row) for rows in (firsts, ranks) for row in zip(*rows, strict=True)]


class _Graph:
    """A CUDA graph of one batch size. Its input, its output and the pool have fixed addresses."""

    def __init__(self, forward: Callable[[Tensor], Tensor], batch: Tensor):
        self._batch = batch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles kernels and fills caches; it writes the same as the step itself
            for _ in range(2):
                forward(batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # torch's default stream for captures belongs to the first device used. "thread_local" lets other threads run.
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            self._out = forward(batch)

    def replay(self, batch: Tensor) -> Tensor:
        """Logits [A, vocab] fp32, which the next replay overwrites."""
        self._batch.copy_(batch, non_blocking=True)
        self._graph.replay()
        return self._out
