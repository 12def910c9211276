"""The synchronous engine: commits chunks, keeps a provisional tail for answers, forks, exports. No async, no text.

The state of a context is committed units + pending ids (fewer than `chunk_size` when it rests). A chunk is committed
by one forward of shape [1, chunk_size] over the committed units; what answers need in between is provisional: written
in the same tail, never scored, dropped and recomputed at the commit. So the committed state is a pure function of
model, config and tokens (and of the focus, if it was given one: see `engine.focus`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from locret_stream.cache import Pool, UnitStore
from locret_stream.config import StreamConfig
from locret_stream.engine.attention import Attention
from locret_stream.engine.decoding import Decoder, NextToken
from locret_stream.engine.focus import Units, expect_focus, put_in_front, units_of
from locret_stream.engine.layout import Layout
from locret_stream.engine.scorer import Scorer
from locret_stream.engine.state import EngineState, Receipts, expect_loadable, focus_in
from locret_stream.errors import BudgetExceeded, ConfigError, ContextClosed, SnapshotCorrupt
from locret_stream.kernels import select_units
from locret_stream.models import Attachment, Attended, LayerCall
from locret_stream.policies import Policy
from locret_stream.snapshot import LayerUnits, Moment


class Engine:
    """Runs contexts of one model, one at a time; every method is a bounded step and belongs to one thread.

    Args:
        attachment: the model.
        config: budget, chunk size, policy.
        policy: made by `make_policy`.
        slots: contexts (scratch ones included) that fit at once.
        shares: share of the total budget per layer that the heads recommend, for `allocation="auto"`.

    Attributes:
        layout: what is fixed: shape, budgets, chunk size, capacity (which are attributes here, too), protection, RoPE.

    Raises:
        ConfigError, WindowExceeded: before anything is allocated.
    """

    def __init__(self, attachment: Attachment, config: StreamConfig, policy: Policy, slots: int, *,
                 shares: tuple[float, ...] | None = None):
        self.attachment, self.config, self.policy, self.shape = attachment, config, policy, attachment.shape
        self.layout = layout = Layout.of(attachment, config, policy, shares)
        self.budgets, self.chunk_size, self.capacity = layout.budgets, layout.chunk_size, layout.capacity
        self.pool = Pool(self.shape, self.budgets, self.chunk_size, slots, planes=policy.planes, dtype=attachment.dtype,
                         device=[place.device for place in attachment.places],
                         rope=tuple(copies == 2 for copies in attachment.key_copies))
        self.attention = Attention(layout, attachment)
        self.decoder = Decoder(layout, attachment, self.pool)
        self._decoding: list[EngineState] = []  # who took the last step

    @property
    def bytes_resident(self) -> int:
        """Bytes that the pool, the RoPE tables and the kept masks hold."""
        return self.pool.bytes_resident + self.layout.tables.bytes_resident + self.attention.bytes_resident

    def replace_policy(self, policy: Policy) -> None:
        """Score with another policy from now on, which declares and protects what the one before did."""
        self.policy, self.layout = policy, dataclasses.replace(self.layout, policy=policy)

    # -- contexts ---------------------------------------------------------------------------------------------

    def open(self, slot: int) -> EngineState:
        """An empty context in that slot."""
        return EngineState(UnitStore(self.pool, slot), self.policy.begin(self.shape))

    def fork(self, state: EngineState, slot: int, stored: Mapping[str, Tensor] | None = None) -> EngineState:
        """A copy of a context in another slot, its provisional tail included.

        Args:
            stored: the units of a state that is swapped out, from its own snapshot; None: they are in its slot.

        Raises:
            SnapshotCorrupt: not tensors of this state; nothing was written into the slot.
        """
        self._check(state)
        assert state.swapped_out == (stored is not None), "units are in the slot, or in the store"
        store = UnitStore(self.pool, slot) if stored is None else self._store_of(state, stored, slot)
        with state.lock:
            twin = EngineState(store, dict(state.policy_state))
            if stored is None:
                store.copy_from(state.store, state.provisional)
            twin.seen, twin.pending, twin.provisional = state.seen, list(state.pending), state.provisional
            twin.last_hidden, twin.tail_logits = state.last_hidden, state.tail_logits
            twin.committed_ids, twin.peaks = state.committed_ids.copy(), list(state.peaks)
            twin.focus, twin.had_focus = state.focus, state.had_focus
            twin.next_focus, twin.next_focus_at = state.next_focus, state.next_focus_at
            return twin

    def export(self, state: EngineState) -> dict[str, Tensor]:
        """All that a context is, as copies: units (those of the focus follow from its ids), pending ids, focus, last
        hidden state, policy state, newest ids."""
        self._check(state)
        return {**state.store.export(self.layout.fronts(state.focus)), **state.small_tensors()}

    def moment(self, state: EngineState, position: int, stored: Mapping[str, Tensor] | None = None) -> Moment:
        """What a snapshot of the first `position` accepted tokens needs beside K and V of the units; on the CPU.

        `stored` as for `fork`: a state that is swapped out needs no slot to be saved again.

        Raises:
            SnapshotCorrupt: not tensors of this state.
        """
        self._check(state)
        assert state.seen <= position <= state.position and state.swapped_out == (stored is not None)
        small = state.small_tensors(position - state.seen)
        if stored is None:
            store, fronts = state.store, self.layout.fronts(state.focus)
            scores = [store.scores(layer)[..., front:].clone() for layer, front in enumerate(fronts)]
            positions = [store.positions(layer)[:, front:].cpu().clone() for layer, front in enumerate(fronts)]
        else:
            _expect_units_of(state, stored)
            scores = [stored[f"{layer}.scores"] for layer in range(self.shape.layers)]
            positions = [stored[f"{layer}.positions"] for layer in range(self.shape.layers)]
        small |= {f"{layer}.scores": tensor for layer, tensor in enumerate(scores)}
        small["peaks"] = torch.tensor(state.peaks)
        return Moment(seen=state.seen, tokens=position, counts=tuple(held.shape[1] for held in positions),
                      positions=positions, state={name: tensor.cpu() for name, tensor in small.items()})

    def units_between(self, state: EngineState, layer: int, start: int, end: int,
                      stored: Mapping[str, Tensor] | None = None) -> LayerUnits:
        """Committed units of one layer whose source position lies in start .. end-1; on the CPU. `stored` as for
        `fork`."""
        self._check(state)
        if stored is not None:
            return LayerUnits.between(start, end, *(stored[f"{layer}.{what}"] for what in
                                                    ("positions", "keys", "values")))
        store, count = state.store, state.store.counts[layer]
        return LayerUnits.between(start, end, store.positions(layer), store.keys(layer, count)[0],
                                  store.values(layer, count)[0])

    def load(self, tensors: Mapping[str, Tensor], slot: int) -> EngineState:
        """A context from what `export` gave, or from a snapshot, of an engine of the same model and config.

        Raises:
            SnapshotCorrupt: not such tensors, by name; nothing was written into the slot.
        """
        state = self.open(slot)
        expect_loadable(self.layout, tensors, state)
        (state.focus, state.next_focus), state.had_focus = focus_in(tensors), "focus" in tensors
        if state.next_focus is not None:
            state.next_focus_at = int(tensors["next_focus"][0])
        self._expect_focus_again(state)
        state.store.load(tensors, self.layout.rotate_keys, self._focus_units(state.focus))
        state.seen = int(tensors["seen"])
        state.pending = tensors["pending"].tolist()
        state.committed_ids.extend(tensors["history"].tolist())
        state.peaks = tensors["peaks"].tolist() if "peaks" in tensors else list(state.store.counts)
        if "last_hidden" in tensors:
            state.last_hidden = tensors["last_hidden"].to(self.attachment.last_device, copy=True)
        state.policy_state = {name: tensors[f"policy.{name}"].to(tensor.device, copy=True)
                              for name, tensor in state.policy_state.items()}
        return state

    def swap_out(self, state: EngineState) -> int:
        """Let go of the slot; returns it. The units are elsewhere, and nothing but `swap_in` may use the state."""
        self._check(state)
        with state.lock:
            state.swapped_out, state.provisional, state.tail_logits = True, 0, None
        return state.store.slot

    def swap_in(self, state: EngineState, tensors: Mapping[str, Tensor], slot: int) -> None:
        """Put the units of a state that is swapped out into a slot, from its own snapshot.

        Raises:
            SnapshotCorrupt: not tensors of this state; nothing changed.
        """
        store = self._store_of(state, tensors, slot)
        state.store, state.swapped_out = store, False

    def _store_of(self, state: EngineState, tensors: Mapping[str, Tensor], slot: int) -> UnitStore:
        """The units of a state that is swapped out, from its own snapshot, in a slot."""
        expect_loadable(self.layout, tensors, self.open(slot))
        _expect_units_of(state, tensors)
        store = UnitStore(self.pool, slot)
        store.load(tensors, self.layout.rotate_keys, self._focus_units(state.focus))
        return store

    # -- tokens -----------------------------------------------------------------------------------------------

    def room(self, state: EngineState) -> int | None:
        """How many more tokens can be accepted; None: no end. Only policies that never evict have one."""
        return None if self.capacity is None else self.capacity - state.position - _room_of_focus(state)

    def expect_room(self, state: EngineState, count: int) -> None:
        """Raises BudgetExceeded unless `count` more tokens can be accepted."""
        room = self.room(state)
        if room is not None and count > room:
            focus = _room_of_focus(state)
            raise BudgetExceeded(
                f"policy {self.policy.name!r} never evicts: {state.position} tokens are held"
                + (f" behind a focus of {focus}" if focus else "") + f", {count} more were given, the smallest layer "
                f"holds {self.capacity}; expected a larger budget or an evicting policy")

    def accept(self, state: EngineState, ids: Iterable[int]) -> None:
        """Take ids over as pending. Runs nothing; `commit` as long as `ready` is true.

        Raises:
            BudgetExceeded: a policy that never evicts has no room for all of them; none was taken.
        """
        self._check(state)
        ids = list(ids)
        self.expect_room(state, len(ids))
        with state.lock:
            state.pending.extend(ids)

    def ready(self, state: EngineState) -> bool:
        """Whether a whole chunk is pending."""
        return len(state.pending) >= self.chunk_size

    def truncate(self, state: EngineState, pending: int) -> None:
        """Forget all but the first `pending` pending ids."""
        dropped = len(state.pending) - pending
        assert 0 <= dropped, "truncate reaches pending ids only"
        del state.pending[pending:]
        if state.provisional >= pending:
            state.provisional = max(0, pending - 1) if dropped else pending

    def commit(self, state: EngineState) -> None:
        """Commit one chunk of pending ids: one forward, then every layer keeps its budget. Whole or not at all."""
        self._check(state)
        assert self.ready(state), "commit needs a whole chunk pending"
        ids = state.pending[:self.chunk_size]
        state.provisional, state.tail_logits = 0, None  # their place in the tail is used now
        focus = None if state.next_focus is None else self._focus_units(state.next_focus)
        scorer = Scorer(self.layout, self.attachment.logits, state)
        hidden = self._forward(state, ids, 0, scorer)
        scores = scorer.finish(ids, hidden)
        keeps = [self._keep(layer, total, len(state.focus)) for layer, total in enumerate(scores)]
        with state.broken_by_failure():
            for layer, total in enumerate(scores):
                state.store.commit(layer, state.seen, len(ids), total, keeps[layer], self.layout.rotate_keys)
            if focus is not None:
                assert state.next_focus is not None, "whose units these are"
                put_in_front(self.layout, state, state.next_focus, focus)
            state.policy_state = scorer.policy_state
            state.last_hidden = hidden[:, -1:].clone()
            with state.lock:
                state.seen += len(ids)
                state.committed_ids.extend(ids)
                del state.pending[:len(ids)]

    def focus(self, state: EngineState, ids: Sequence[int]) -> int | None:
        """Put a query in front of the stream from the next grid point on (at once on one), in place of the one before;
        no ids: none. Source: Locret-Q, arXiv:2410.01805.

        Returns the position at which it was given; None, and nothing happened, if a whole chunk is pending: it is to be
        committed first, as a focus behind it must not come into force before it.

        Raises:
            ConfigError: there is no room for it; BudgetExceeded: a policy that never evicts has none left. The focus is
                as it was.
        """
        self._check(state)
        ids = list(ids)
        expect_focus(self.layout, ids)
        if self.capacity is not None and max(len(ids), len(state.focus)) > self.capacity - state.position:
            raise BudgetExceeded(f"policy {self.policy.name!r} never evicts, and has no room for a focus of {len(ids)} "
                                 "tokens; expected a larger budget or an evicting policy")
        units = None if state.pending else self._focus_units(ids)
        with state.lock:  # ids are accepted on other threads
            if self.ready(state):
                return None
            if state.pending:
                state.next_focus, state.next_focus_at = ids, state.position
            elif units is not None:
                with state.broken_by_failure():
                    put_in_front(self.layout, state, ids, units)
            return state.position

    def logits(self, state: EngineState) -> Tensor:
        """Logits [vocab] fp32 of the next token; pending ids without units get provisional ones."""
        self._check(state)
        assert not self.ready(state), "commit first"
        if not state.pending:
            if state.last_hidden is None:
                raise ConfigError("nothing was fed yet, so there is nothing to continue; feed or ask something first")
            return self.attachment.logits(state.last_hidden)[0, -1].float()
        new = state.pending[state.provisional:]
        if len(new) == 1:
            self.decoder.run([state])
        elif new:
            hidden = self._forward(state, new, state.provisional, None)
            state.tail_logits = self.attachment.logits(hidden[:, -1:])[0, -1].float()
            state.provisional += len(new)
        assert state.tail_logits is not None
        state.peaks = [max(peak, count + state.provisional)
                       for peak, count in zip(state.peaks, state.store.counts, strict=True)]
        return state.tail_logits

    def decode(self, asked: Sequence[NextToken]) -> list[int | BaseException]:
        """One step of several contexts: for each the id it chose, which is accepted, or what went wrong with it alone.

        Those with just one pending id without units, as all have after their first step, share one forward; it agrees
        with a forward of each alone to 1e-5 (fp32).
        """
        self._decoding = []  # whoever took an earlier step may be closed, and the slot another's
        self._run_shared([one.state for one in asked])
        chosen: list[int | BaseException] = []
        for one in asked:
            try:
                token = one.choose(self.logits(one.state))
                self.accept(one.state, [token])
                chosen.append(token)
            except BaseException as error:  # whatever it is, what the others chose is accepted already
                chosen.append(error)
        self._decoding = [one.state for one in asked]
        return chosen

    def run_ahead(self) -> None:
        """The forward of the next `decode`, should the same contexts go on: while what they chose is handed out.

        Right behind that step and nothing else: what it writes lies in tails that nobody else has written since.
        Its units are provisional as all before a commit, so it shows only in that the next step has less to do.
        """
        states, self._decoding = self._decoding, []
        self._run_shared(states, least=1)

    def _run_shared(self, states: Sequence[EngineState], least: int = 2) -> None:
        shared = [state for state in states if len(state.pending) - state.provisional == 1
                  and not (state.broken or state.swapped_out or self.ready(state))]
        if len(shared) >= least:
            # What is wrong with one is not the others' fault: then each runs alone, and fails or not by itself.
            with contextlib.suppress(Exception):
                self.decoder.run(shared)

    def receipts(self, state: EngineState, start: int = 0, end: int | None = None) -> Receipts:
        """Kept or evicted, per layer and KV head, for accepted tokens start .. end-1 (None: all so far)."""
        end = state.position if end is None else end
        if not 0 <= start <= end <= state.position:
            raise ConfigError(f"receipts of tokens {start} to {end}: {state.position} tokens were accepted; expected "
                              f"0 <= start <= end <= {state.position}")
        kept = torch.zeros(self.shape.layers, self.shape.kv_heads, end - start, dtype=torch.bool)
        scores = torch.full(kept.shape, float("nan"))
        kept[:, :, max(0, state.seen - start):] = True
        for layer in range(self.shape.layers):
            positions, found = state.store.positions(layer).cpu(), state.store.scores(layer)[0].cpu()
            for head in range(self.shape.kv_heads):
                inside = (positions[head] >= start) & (positions[head] < end)
                at = positions[head][inside] - start
                kept[layer, head, at] = True
                scores[layer, head, at] = found[head][inside]
        return Receipts(start, end, kept, scores)

    # -- inside -----------------------------------------------------------------------------------------------

    def _check(self, state: EngineState) -> None:
        if state.broken:
            raise ContextClosed("a commit failed while units were moved, so this context is lost; expected to be "
                                "closed and opened anew (restored, if it was saved)")

    def _forward(self, state: EngineState, ids: list[int], offset: int, scorer: Scorer | None) -> Tensor:
        """Run ids at ranks counts[l] + offset; writes tail areas only. Returns hidden states [1, T, hidden]."""
        store, new = state.store, len(ids)

        def step(call: LayerCall) -> Attended:
            layer, start = call.layer, store.counts[call.layer] + offset
            total = start + new
            store.write(layer, start, call.k, call.v, self.layout.rotate_keys)
            state.peaks[layer] = max(state.peaks[layer], total)
            q = self.layout.tables.rotate(layer, call.q, start)
            k, v = store.rotated(layer, total), store.values(layer, total)
            if self.layout.on_load[layer]:
                k = self.layout.rotate_keys(layer, k, 0)
            attended, lse = self.attention.attend(call, q, k, v)
            if scorer is not None:
                scorer.see(call, q, k, lse)
            return attended

        tensor = torch.tensor([ids], dtype=torch.int64, device=self.attachment.device)
        return self.attachment.hidden(tensor, step)

    def _focus_units(self, ids: Sequence[int]) -> Units:
        return units_of(self.layout, self.attachment, self.attention, ids)

    def _expect_focus_again(self, state: EngineState) -> None:
        for ids in (state.focus, state.next_focus or []):
            try:
                expect_focus(self.layout, ids)
            except ConfigError as error:
                raise SnapshotCorrupt(str(error)) from error

    def _keep(self, layer: int, scores: Tensor, focus: int) -> Tensor | None:
        """Ranks that stay, [H, B], or None where everything fits. Sliding layers keep their last units."""
        if scores.shape[-1] <= self.budgets[layer]:
            return None
        sinks, stabilizers = self.layout.protection_of(layer, focus)
        rank_by = torch.zeros_like(scores[0]) if self.shape.sliding[layer] else scores[0]
        return select_units(rank_by, self.budgets[layer], sinks, stabilizers)


def _room_of_focus(state: EngineState) -> int:
    """Units of the longer focus: until the next grid point the old one needs its room, and from there on the new."""
    return max(len(state.focus), len(state.next_focus or ()))


def _expect_units_of(state: EngineState, stored: Mapping[str, Tensor]) -> None:
    """Raises:
        SnapshotCorrupt: stored units of another place than a state that is swapped out.
    """
    found, focus = int(stored["seen"]), focus_in(stored)[0]
    if found != state.seen or focus != state.focus:
        raise SnapshotCorrupt(f"found units of position {found} and focus {focus}; expected {state.seen} and "
                              f"{state.focus}")
