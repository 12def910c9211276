"""The synchronous engine: commits chunks, keeps a provisional tail for answers, forks, exports. No async, no text.

The state of a context is committed units + pending ids (fewer than `chunk_size` once they were committed). A chunk is
committed by one forward of shape [1, chunk_size] over the committed units. Answers in between need units of pending
tokens; these are provisional: a forward writes them behind the committed ones, nothing scores them, and the commit
computes them anew. So the committed state is a pure function of model, config, tokens and focus (see `engine.focus`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from locret_stream.cache import HeadwiseStore, UnitStore, store_of
from locret_stream.config import StreamConfig
from locret_stream.engine import serialisation
from locret_stream.engine.attention import Attention
from locret_stream.engine.decoding import Decoder, NextToken
from locret_stream.engine.fetching import FetchingDecoder
from locret_stream.engine.focus import Units, expect_focus, put_in_front, units_of
from locret_stream.engine.layout import Layout
from locret_stream.engine.scorer import Scorer
from locret_stream.engine.state import MOST_PENDING, MOST_RECEIPTS, EngineState, Receipts
from locret_stream.errors import BudgetExceeded, ConfigError
from locret_stream.kernels import select_units
from locret_stream.models import Attachment, Attended, LayerCall
from locret_stream.policies import Policy
from locret_stream.snapshot import Geometry, LayerUnits, Moment

_log = logging.getLogger(__name__)


class Engine:
    """Runs contexts of one model, one at a time; every method is a bounded step and belongs to one thread.

    Args:
        attachment: the model.
        config: budget, chunk size, policy.
        policy: made by `make_policy`.
        slots: how many contexts fit at once, scratch slots included.
        shares: share of the total budget per layer that the heads recommend, for `allocation="auto"`.
        key_means: that keys are coded without, [L, H, D], where they come with the heads (`Pool`).
        decode_copy: with units in few bits, keep those of the context that decodes as attention reads them (`Pool`).

    Attributes:
        layout: all that is fixed; shape, budgets, chunk_size and capacity are attributes of the engine, too.

    Raises:
        ConfigError: settings that cannot work together. WindowExceeded: they do not fit the model's window. Nothing was
            allocated.
    """

    def __init__(self, attachment: Attachment, config: StreamConfig, policy: Policy, slots: int, *,
                 shares: tuple[float, ...] | None = None, key_means: Tensor | None = None,
                 decode_copy: bool = False):
        self.attachment, self.config, self.policy, self.shape = attachment, config, policy, attachment.shape
        self.layout = layout = Layout.of(attachment, config, policy, shares,
                                                   given_means=key_means is not None)
        self.key_means = key_means if config.quantised else None
        self.budgets, self.chunk_size, self.capacity = layout.budgets, layout.chunk_size, layout.capacity
        self.pool = layout.pool(attachment, slots, key_means=key_means, decode_copy=decode_copy)
        self.attention = Attention(layout, attachment)
        self.decoder = (Decoder if config.exact is None else FetchingDecoder)(layout, attachment, self.pool)
        self._decoding: list[EngineState] = []  # the contexts of the last step of decoding
        self._shared_failed = False

    @property
    def bytes_resident(self) -> int:
        """Bytes of the pool, the RoPE tables and the attention masks."""
        return self.pool.bytes_resident + self.layout.tables.bytes_resident + self.attention.bytes_resident

    @property
    def geometry(self) -> Geometry:
        """What a unit's K and V are in snapshots."""
        dtype, layers = self.attachment.dtype, self.layout.stored_rows
        return Geometry(tuple((unit.kv_heads, *rows) for unit, rows in zip(self.shape.units, layers, strict=True)),
                        torch.uint8 if self.config.stores_codes else dtype, self.layout.headwise)

    def replace_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, which must declare and protect the same as the one before."""
        self.policy, self.layout = policy, dataclasses.replace(self.layout, policy=policy)

    # -- contexts ---------------------------------------------------------------------------------------------

    def open(self, slot: int) -> EngineState:
        """An empty context in that slot."""
        return EngineState(store_of(self.pool, slot), self.policy.begin(self.shape))

    def fork(self, state: EngineState, slot: int, stored: Mapping[str, Tensor] | None = None) -> EngineState:
        """A copy of a context in another slot, its provisional units included.

        Args:
            stored: the units of a swapped-out state, from its own snapshot; None: the units are in its slot.

        Raises:
            SnapshotCorrupt: not tensors of this state; nothing was written into the slot.
        """
        state.expect_whole()
        assert state.swapped_out == (stored is not None), "units are either in the slot or in the store"
        store = store_of(self.pool, slot) if stored is None else self._store_of(state, stored, slot)
        with state.lock:
            if stored is None:
                store.copy_from(state.store, state.provisional)
            copy = state.copy(store)
        if stored is not None and self.config.rounds:
            copy.rounded = copy.seen
        return copy

    def thin(self, state: EngineState, share: float, reading: int = 0) -> None:
        """Keep of every layer that share of its budget: the units that its policy scores highest, and what it protects.
        Layers with a sliding window stay as they are, and so does a memory that evicted nothing yet, where all that is
        read has room in it.

        For copies that answer: what is committed behind it is no function of the tokens alone.

        Args:
            reading: tokens that are read next. Where a commit would evict some of them, and none if what is pending is
                committed before, as the short chunk that it is, into the places that became free, that is done.
        """
        state.expect_whole()
        if not self.policy.bounded:
            return
        budgets = [units for units, window in zip(self.budgets, self.shape.sliding, strict=True) if not window]
        room = self._room_behind([state.seen + _longer_focus(state)] * len(self.budgets)) - len(state.pending)
        if state.seen + len(state.focus) <= min(budgets, default=0) and reading <= max(0, room):
            return
        whole, early = self._rooms(state, share)
        with state.broken_by_failure():
            state.forget_units()
            for layer in range(self.shape.layers):
                most = self._thinned(layer, share, len(state.focus))
                if state.store.held(layer) > most and not self.shape.units[layer].sliding:
                    sinks, stabilizers = self.layout.protection_of(layer, len(state.focus), most)
                    keep = self._best(state, layer, state.store.scores(layer)[0], most, sinks, stabilizers)
                    state.store.put_in_front(layer, None, keep, len(state.focus), self.layout.tables.rotate)
        if whole < reading <= early and 0 < len(state.pending) < self.chunk_size:
            self._commit(state, len(state.pending))

    def room_to_read(self, state: EngineState, share: float) -> int:
        """Tokens that a copy of a context reads, once it keeps that share of its memory, before a commit evicts any of
        them (see `thin`). Layers with a sliding window do not count."""
        return max(self._rooms(state, share))

    def _rooms(self, state: EngineState, share: float) -> tuple[int, int]:
        """`room_to_read` where what is pending stays so, and where it is committed first."""
        focus_count, pending = _longer_focus(state), len(state.pending)
        left = [self._thinned(layer, share, focus_count) for layer in range(self.shape.layers)]
        return (self._room_behind(left) - pending,
                self._room_behind([min(units, count + pending)
                                   for units, count in zip(self.budgets, left, strict=True)]))

    def _room_behind(self, counts: Sequence[int]) -> int:
        """Tokens that can be read behind so many units of each layer before a commit evicts any."""
        free = min((units - count for units, count, window in zip(self.budgets, counts, self.shape.sliding, strict=True)
                    if not window), default=0)
        return (max(0, free) // self.chunk_size + 1) * self.chunk_size - 1

    def _thinned(self, layer: int, share: float, focus_count: int) -> int:
        """Units that `thin` leaves in a layer without a sliding window."""
        least = self.config.budget.sinks + self.config.budget.stabilizers + 1
        return max(int(share * self.budgets[layer]), least + focus_count)

    def export(self, state: EngineState) -> dict[str, Tensor]:
        """All that a context consists of, as copies by name (see `engine.serialisation`)."""
        state.expect_whole()
        return serialisation.export(state)

    def moment(self, state: EngineState, position: int, stored: Mapping[str, Tensor] | None = None) -> Moment:
        """What a snapshot of the first `position` accepted tokens needs beside K and V of the units; on the CPU.
        `stored` as for `fork`: saving a swapped-out state again needs no slot."""
        state.expect_whole()
        return serialisation.moment(self.layout, state, position, stored)

    def units_between(self, state: EngineState, layer: int, start: int, end: int,
                      stored: Mapping[str, Tensor] | None = None) -> LayerUnits:
        """Committed units of one layer at positions start .. end-1; on the CPU. `stored` as for `fork`."""
        state.expect_whole()
        if stored is not None:
            return LayerUnits.between(start, end,
                                      *(stored[f"{layer}.{name}"] for name in ("positions", "keys", "values")))
        store, count = state.store, state.store.counts[layer]
        return LayerUnits.between(start, end, store.positions(layer), *store.rows(layer, count))

    def load(self, tensors: Mapping[str, Tensor], slot: int) -> EngineState:
        """A context from the tensors of `export` or of a snapshot, of an engine with the same model and config. Raises
        SnapshotCorrupt for other tensors, by name; nothing was written into the slot then."""
        state = self.open(slot)
        serialisation.load(self.layout, state, tensors, self._focus_units, self.attachment.last_device)
        return state

    def swap_out(self, state: EngineState) -> int:
        """Give the slot away; returns it. The caller has saved the units: until `swap_in` the state serves only `fork`,
        `moment` and `units_between`, which take them as `stored`."""
        state.expect_whole()
        with state.lock:
            state.swapped_out = True
            state.forget_units()
        return state.store.slot

    def swap_in(self, state: EngineState, tensors: Mapping[str, Tensor], slot: int) -> None:
        """Load the units of a swapped-out state into a slot, from its own snapshot. Raises as `fork`."""
        state.store = self._store_of(state, tensors, slot)
        state.rounded = state.seen if self.config.rounds else 0
        state.swapped_out = False

    def _store_of(self, state: EngineState, tensors: Mapping[str, Tensor], slot: int) -> UnitStore:
        """The units of a swapped-out state in a slot, from its own snapshot."""
        serialisation.expect_loadable(self.layout, tensors, self.open(slot))
        serialisation.expect_units_of(state, tensors)
        store = store_of(self.pool, slot)
        store.load(tensors, self.layout.tables.rotate, self._focus_units(state.focus))
        return store

    # -- tokens -----------------------------------------------------------------------------------------------

    def room(self, state: EngineState) -> int | None:
        """How many more tokens can be accepted; None: any number. Only a policy that never evicts has a limit."""
        return None if self.capacity is None else self.capacity - state.position - _longer_focus(state)

    def expect_room(self, state: EngineState, count: int) -> None:
        """Raises BudgetExceeded unless `count` more tokens can be accepted."""
        room = self.room(state)
        if room is not None and count > room:
            focus_count = _longer_focus(state)
            raise BudgetExceeded(
                f"policy {self.policy.name!r} never evicts: it keeps {state.position} tokens"
                + (f" behind a focus of {focus_count}" if focus_count else "") + f", {count} more were given, and the "
                f"smallest layer has space for {self.capacity}; expected a larger budget or an evicting policy")

    def accept(self, state: EngineState, ids: Iterable[int], *, chosen: bool = False) -> None:
        """Append ids to the pending ones, all or none: raises as `expect_room`, and ConfigError where more than
        `MOST_PENDING` would be pending. Runs nothing: the caller calls `commit` as long as `ready` is true.

        Args:
            chosen: whether they were chosen by the logits behind the ids before them: a reply begins with them, or goes
                on.
        """
        state.expect_whole()
        ids = list(ids)
        self.expect_room(state, len(ids))
        if len(state.pending) + len(ids) > MOST_PENDING:
            raise ConfigError(f"a prompt of {len(ids):,} tokens would wait to be committed, behind "
                              f"{len(state.pending):,}; expected at most {MOST_PENDING:,} at once: feed() it before "
                              "the question, or ask with recall=False")
        with state.lock:
            if chosen:
                state.reply_from = len(state.pending) if state.reply_from is None else state.reply_from
            elif ids and state.reply_from is not None:
                if self.config.exact is not None:
                    state.forget_reply(stateful=bool(self.layout.states))
                state.reply_from = None
            state.pending.extend(ids)

    def ready(self, state: EngineState) -> bool:
        """Whether a whole chunk is pending."""
        return len(state.pending) >= self.chunk_size

    def truncate(self, state: EngineState, pending: int) -> None:
        """Forget all but the first `pending` pending ids."""
        dropped = len(state.pending) - pending
        assert 0 <= dropped, "only pending ids can be truncated"
        del state.pending[pending:]
        if self.layout.states:  # a state cannot be taken back: it goes on from the committed one again
            state.provisional = state.provisional if state.provisional <= pending else 0
        elif state.provisional >= pending:
            state.provisional = max(0, pending - 1) if dropped else pending
        if dropped and self.config.exact is not None:
            # What was fetched for the token that would have come next is not what it was.
            state.forget_reply(stateful=bool(self.layout.states))

    def commit(self, state: EngineState) -> None:
        """Commit one chunk of pending ids: one forward, then every layer keeps its budget. Whole or not at all."""
        assert self.ready(state), "commit needs a whole chunk pending"
        self._commit(state, self.chunk_size)

    def _commit(self, state: EngineState, count: int) -> None:
        """Commit the first `count` pending ids, at most a chunk of them."""
        state.expect_whole()
        assert count <= self.chunk_size, "a slot has room for one chunk"
        ids = state.pending[:count]
        state.forget_units()  # the forward overwrites them
        focus_units = None if state.next_focus is None else self._focus_units(state.next_focus)
        scorer = Scorer(self.layout, self.attachment.logits, state)
        hidden, carried = self._forward(state, ids, 0, scorer)
        scores = scorer.finish(ids, hidden)
        keeps = [self._keep(state, layer, total, len(ids)) for layer, total in enumerate(scores)]
        with state.broken_by_failure():
            for layer, total in enumerate(scores):
                state.store.commit(layer, state.seen, len(ids), total, keeps[layer], self.layout.tables.rotate)
            if focus_units is not None:
                assert state.next_focus is not None, "focus_units are its units"
                put_in_front(self.layout, state, state.next_focus, focus_units)
            state.store.keep_state(carried, provisional=False)
            state.policy_state = scorer.policy_state
            state.last_hidden = hidden[:, -1:].clone()
            with state.lock:
                state.seen += len(ids)
                state.committed_ids.extend(ids)
                del state.pending[:len(ids)]
                if state.reply_from is not None:
                    state.reply_from = max(0, state.reply_from - len(ids))

    def focus(self, state: EngineState, ids: Sequence[int]) -> int | None:
        """Put a focus in front of the stream, in place of the one before, from the next grid point on, or at once if
        the position is a grid point; no ids: none. Source: Locret-Q, arXiv:2410.01805.

        Returns the position at which it was given. If a whole chunk is pending, nothing happens and None is returned:
        the caller commits first, as this focus must not take effect before tokens that precede it are committed.

        Raises:
            ConfigError: no space for it in the budget; BudgetExceeded: a policy that never evicts has no space left.
                The focus is as it was.
        """
        state.expect_whole()
        ids = list(ids)
        expect_focus(self.layout, ids)
        if self.capacity is not None and max(len(ids), len(state.focus)) > self.capacity - state.position:
            raise BudgetExceeded(f"policy {self.policy.name!r} never evicts, and has no space for a focus of "
                                 f"{len(ids)} tokens; expected a larger budget or an evicting policy")
        units = None if state.pending else self._focus_units(ids)
        with state.lock:  # other threads may accept ids
            if self.ready(state):
                return None
            if state.pending:
                state.next_focus = None if ids == state.focus else ids  # a focus that is there already changes nothing
                state.next_focus_at = state.position
            elif units is not None:
                with state.broken_by_failure():
                    put_in_front(self.layout, state, ids, units)
            return state.position

    def logits(self, state: EngineState) -> Tensor:
        """Logits [vocab] fp32 of the next token; pending ids without units get provisional ones."""
        state.expect_whole()
        assert not self.ready(state), "a whole chunk is committed first"
        if not state.pending:
            if state.last_hidden is None:
                raise ConfigError("nothing was fed yet, so there is nothing to continue; feed or ask something first")
            return self.attachment.logits(state.last_hidden)[0, -1].float()
        asked = len(state.pending)  # other threads may accept ids
        while state.provisional < asked:
            if (read := min(asked, self.decoder.to_read(state))) > state.provisional:
                self._read(state, read)
            else:
                self.decoder.run([state])
        assert state.tail_logits is not None
        state.peaks = [max(peak, state.store.held(layer) + state.provisional)
                       for layer, peak in enumerate(state.peaks)]
        return state.tail_logits

    def _read(self, state: EngineState, until: int) -> None:
        """Give the first `until` pending ids provisional units, by one forward of those that have none."""
        before = state.provisional
        hidden, carried = self._forward(state, state.pending[before:until], before, None)
        state.tail_logits = self.attachment.logits(hidden[:, -1:])[0, -1].float()
        state.provisional = 0  # while the state is written
        state.store.keep_state(carried, provisional=True)
        state.provisional = until

    def decode(self, asked: Sequence[NextToken]) -> list[int | BaseException]:
        """One step of several contexts: for each the id that it chose, which is accepted (`NextToken`), or the error
        that it raised.

        Contexts with just one pending id without units, as all have after their first step, share one forward. Its
        logits agree with those of a forward of each alone to 1e-5 (fp32).
        """
        self._decoding = []  # a context of an earlier step may be closed, and its slot given to another
        self._run_shared([request.state for request in asked])
        chosen: list[int | BaseException] = []
        for request in asked:
            try:
                token = request.choose(self.logits(request.state))
                if token not in request.unheld:
                    self.accept(request.state, [token], chosen=True)
                chosen.append(token)
            except BaseException as error:  # of any kind, as the ids of the contexts before it are accepted already
                chosen.append(error)
        self._decoding = [request.state for request in asked]
        return chosen

    def run_ahead(self) -> None:
        """Run the forward of the next `decode` for the contexts of the last one, while the caller hands out their ids.

        The caller calls it right after that step: it writes into the tails of slots that no other step has used since.
        Its units are provisional, so the only effect is that the next step has less to do.
        """
        states, self._decoding = self._decoding, []
        self._run_shared(states, least=1)

    def _run_shared(self, states: Sequence[EngineState], least: int = 2) -> None:
        shared = [state for state in states if len(state.pending) - state.provisional == 1
                  and self.decoder.can_run(state) and not (state.broken or state.swapped_out or self.ready(state))]
        if len(shared) >= least:
            # An error of one context must not fail the others: `logits` runs each alone then, and raises it again.
            try:
                self.decoder.run(shared)
            except Exception as error:
                if not self._shared_failed and len(shared) > 1:
                    _log.warning("a step of %d contexts failed, which each take alone now, more slowly; said once: %s",
                                 len(shared), error)
                    self._shared_failed = True

    def receipts(self, state: EngineState, start: int = 0, end: int | None = None) -> Receipts:
        """Which of the accepted tokens start .. end-1 (None: all so far) each KV head keeps, and with what scores.

        Raises:
            ConfigError: the range is not inside the accepted tokens, or longer than 1,048,576. ContextClosed.
        """
        state.expect_whole()
        end = state.position if end is None else end
        if not 0 <= start <= end <= state.position:
            raise ConfigError(f"receipts of tokens {start} to {end}: {state.position} tokens were accepted; expected "
                              f"0 <= start <= end <= {state.position}")
        if end - start > MOST_RECEIPTS:
            raise ConfigError(f"receipts of {end - start:,} tokens at once; expected at most {MOST_RECEIPTS:,}, or "
                              "occupancy(), which counts what is kept of any number")
        kept = torch.zeros(self.shape.layers, self.shape.most_heads, end - start, dtype=torch.bool)
        scores = torch.full(kept.shape, float("nan"), dtype=torch.float32)
        for layer, unit in enumerate(self.shape.units):
            kept[layer, :unit.kv_heads, max(0, state.seen - start):] = True
            positions, units_scores = state.store.positions(layer).cpu(), state.store.scores(layer)[0].cpu()
            for head in range(unit.kv_heads):
                inside = (positions[head] >= start) & (positions[head] < end)
                at = positions[head][inside] - start
                kept[layer, head, at] = True
                scores[layer, head, at] = units_scores[head][inside]
        return Receipts(start, end, kept, scores)

    # -- inside -----------------------------------------------------------------------------------------------

    def _forward(self, state: EngineState, ids: list[int], offset: int, scorer: Scorer | None
                 ) -> tuple[Tensor, list[Tensor]]:
        """Run ids at ranks counts[l] + offset; writes no committed units. Returns hidden states [1, T, hidden], and the
        recurrent state behind the ids."""
        store, new = state.store, len(ids)
        begins, ranks = not (state.seen or offset), [count + offset for count in store.counts]
        carried = self.attachment.carry(() if begins else store.state(provisional=offset > 0), ranks)

        def step(call: LayerCall) -> Attended:
            layer, start = call.layer, ranks[call.layer]
            total = start + new
            if call.keeps:
                store.write(layer, start, call.own_k, call.v, self.layout.tables.rotate)
            state.peaks[layer] = max(state.peaks[layer], store.held(layer) + offset + new)
            if self.layout.headwise[layer]:
                assert isinstance(store, HeadwiseStore), "heads share a budget in no other"
                heads = store.heads(layer, offset + new, self.layout.tables.rotate)
                out, seen = self.attention.attend_headwise(call, heads)
                if scorer is not None and call.keeps:
                    scorer.see_heads(call, store, seen)
                return out
            q = self.layout.tables.rotate_queries(layer, call.q, start)
            keys, k, v = store.attended(layer, total, self.layout.tables.rotate)
            if self.layout.on_load[layer]:
                k = self.layout.tables.rotate(layer, k, 0)
            attended, lse = self.attention.attend(call, q, k, v, state.seen + offset)
            if scorer is not None and call.keeps:
                scorer.see(call, q, keys[0], k, lse)
            return attended

        tensor = torch.tensor([ids], dtype=torch.int64, device=self.attachment.device)
        hidden = self.attachment.hidden(tensor, step, carried, max(ranks))
        return hidden, [] if carried is None else carried.tensors

    def _focus_units(self, ids: Sequence[int]) -> Units:
        return units_of(self.layout, self.attachment, self.attention, ids)

    def _keep(self, state: EngineState, layer: int, scores: Tensor, new: int) -> Tensor | list[Tensor] | None:
        """Ranks that stay of a layer's units and `new` ones, [H, B], or of each head where the heads share a budget;
        None where all units fit. Layers with a sliding window keep their last units."""
        store = state.store
        if store.held(layer) + new <= self.budgets[layer] and store.counts[layer] + new <= self.layout.most[layer]:
            return None
        sinks, stabilizers = self.layout.protection_of(layer, len(state.focus))
        rank_by = torch.zeros_like(scores[0]) if self.shape.units[layer].sliding else scores[0]
        return self._best(state, layer, rank_by, self.budgets[layer], sinks, stabilizers)

    def _best(self, state: EngineState, layer: int, scores: Tensor, units: int, sinks: int, stabilizers: int
              ) -> Tensor | list[Tensor]:
        """`select_units` of scores [H, N], or of each head `Layout.select` where the heads share a budget."""
        if not isinstance(state.store, HeadwiseStore) or not self.layout.headwise[layer]:
            return select_units(scores, units, sinks, stabilizers)
        return self.layout.select(layer, state.store.split(layer, scores), units, sinks, stabilizers)


def _longer_focus(state: EngineState) -> int:
    """Tokens of the longer focus: until the next grid point the old one takes space, and from there on the new one."""
    return max(len(state.focus), len(state.next_focus or ()))
