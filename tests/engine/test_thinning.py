"""A copy that answers may keep less of its memory: the best units, where the memory they come from stays whole."""

from __future__ import annotations

import pytest
import torch

from locret_stream.engine import Engine, EngineState
from locret_stream.kernels import select_units
from tests.kit import EVICTING, assert_same, build, feed, ids_of, logits_at_each, model

CHUNK, UNITS, SINKS, STABILIZERS = 8, 20, 2, 3
QUERY = ids_of(4, seed=11)


def engine_of(policy: str = "h2o", on: str = "llama") -> Engine:
    return build(policy, on=model(on), units=UNITS, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS, slots=3)


def expect_left_whole(engine: Engine, state: EngineState, share: float) -> None:
    whole = engine.export(state)
    engine.thin(state, share)
    assert_same(engine.export(state), whole)


@pytest.mark.parametrize("on", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.thorough(but=5)
def test_it_keeps_what_an_eviction_to_that_share_would(policy: str, on: str):
    engine = engine_of(policy, on)
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK + 3))
    engine.focus(state, QUERY)
    feed(engine, state, ids_of(CHUNK, seed=4))
    engine.logits(state)
    before, copy = engine.export(state), engine.fork(state, 1)
    engine.thin(copy, 0.6)
    assert_same(engine.export(state), before)
    for layer, window in enumerate(engine.shape.sliding):
        positions, old = copy.store.positions(layer).cpu(), state.store.positions(layer).cpu()
        if window:
            assert torch.equal(positions, old)
            continue
        protected = engine.layout.protection_of(layer, len(QUERY), 12)
        kept = select_units(state.store.scores(layer)[0].cpu(), 12, *protected)
        assert copy.store.counts[layer] == 12 and torch.equal(positions, old.gather(1, kept))
        assert (positions[:, :len(QUERY) + SINKS] == torch.arange(-len(QUERY), SINKS)).all()
        assert (positions[:, -STABILIZERS:] == old[:, -STABILIZERS:]).all()
        for of_copy, of_state in ((copy.store.keys, state.store.keys), (copy.store.values, state.store.values)):
            all_units = of_state(layer, UNITS)[0].cpu()
            units = all_units.gather(1, kept[..., None].expand(-1, -1, all_units.shape[-1]))
            assert torch.equal(of_copy(layer, 12)[0].cpu(), units)


@pytest.mark.parametrize("policy", ["h2o", "locret", "streaming_llm"])
def test_it_answers_as_a_memory_of_these_units_does(policy: str):
    """Pending tokens, and those that come behind, see the units that are left, at their new ranks."""
    engine = engine_of(policy)
    state, other = engine.open(0), engine.open(1)
    feed(engine, state, ids_of(6 * CHUNK + 3))
    engine.logits(state)
    engine.thin(state, 0.5)
    tensors = engine.export(state)
    for layer in range(engine.shape.layers):
        other.store.counts[layer] = tensors[f"{layer}.keys"].shape[1]
    other.store.load(tensors, engine.layout.tables.rotate)
    other.pending, other.seen, other.policy_state = list(state.pending), state.seen, dict(state.policy_state)
    later = ids_of(2 * CHUNK, seed=7)
    assert torch.equal(logits_at_each(engine, state, later), logits_at_each(engine, other, later))
    assert state.store.counts == other.store.counts and state.store.counts[0] == UNITS


def test_what_always_stays_stays_and_a_memory_that_never_evicts_is_left_whole():
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK))
    expect_left_whole(engine, state, 1.0)
    engine.thin(state, 0.01)
    assert state.store.counts == [SINKS + STABILIZERS + 1] * engine.shape.layers
    engine.focus(state, QUERY)
    engine.thin(state, 0.01)
    assert state.store.counts == [len(QUERY) + SINKS + STABILIZERS + 1] * engine.shape.layers
    full = build("full", on=model("llama"), units=200, chunk_size=CHUNK)
    state = full.open(0)
    feed(full, state, ids_of(6 * CHUNK))
    expect_left_whole(full, state, 0.1)


def test_a_memory_that_evicted_nothing_yet_is_left_whole():
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(2 * CHUNK))
    expect_left_whole(engine, state, 0.4)
    engine.focus(state, ids_of(5))
    engine.thin(state, 0.4)
    assert state.store.counts[0] < 2 * CHUNK


PENDING = 5


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize(("share", "left", "whole", "early"), [
    (0.01, SINKS + STABILIZERS + 1, 2 * CHUNK - 1 - PENDING, 2 * CHUNK - 1),
    (0.5, UNITS // 2, 2 * CHUNK - 1 - PENDING, CHUNK - 1),
    (1.0, UNITS, CHUNK - 1 - PENDING, CHUNK - 1)])
@pytest.mark.thorough(but=7)
def test_what_a_copy_reads_stays_where_there_is_room(policy: str, share: float, left: int, whole: int, early: int):
    """Of as many tokens as it has room for none is evicted. What is pending is committed before where that makes room,
    and takes the places that became free."""
    engine = engine_of(policy)
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK + PENDING))
    before = engine.export(state)
    assert engine.room_to_read(state, share) == max(whole, early)
    for reading in {1, CHUNK - PENDING, *range(max(1, whole - 1), max(whole, early) + 1)}:
        copy = engine.fork(state, 1)
        engine.thin(copy, share, reading)
        assert copy.position == state.position
        if reading <= whole:
            assert copy.pending == state.pending and copy.store.counts[0] == left
        else:
            assert not copy.pending and copy.store.counts[0] == min(UNITS, left + PENDING)
            pending = engine.receipts(copy, state.seen).kept
            assert pending.all() if left + PENDING <= UNITS else pending[..., -STABILIZERS:].all()
        feed(engine, copy, ids_of(reading, seed=9))
        engine.logits(copy)
        assert engine.receipts(copy, state.position).kept.all()
        assert max(copy.peaks) <= UNITS + CHUNK
    assert_same(engine.export(state), before)


def test_where_there_is_no_room_for_all_it_is_committed_on_the_grid():
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK + PENDING))
    engine.thin(state, 0.01, 2 * CHUNK)
    assert (state.seen, len(state.pending)) == (6 * CHUNK, PENDING)


def test_a_memory_that_evicted_nothing_yet_gives_way_to_what_has_no_room_behind_it():
    engine = build("keydiff", on=model("llama"), units=2 * CHUNK, chunk_size=CHUNK, sinks=SINKS,
                   stabilizers=STABILIZERS, slots=3)
    state = engine.open(0)
    feed(engine, state, ids_of(2 * CHUNK + PENDING))
    for reading in (1, CHUNK - 1 - PENDING, CHUNK - PENDING, engine.room_to_read(state, 0.25)):
        copy = engine.fork(state, 1)
        engine.thin(copy, 0.25, reading)
        assert (copy.store.counts[0] == 2 * CHUNK) == (reading < CHUNK - PENDING)
        feed(engine, copy, ids_of(reading, seed=9))
        engine.logits(copy)
        assert engine.receipts(copy, state.position).kept.all()


def test_a_focus_that_waits_takes_its_room():
    engine = build("keydiff", on=model("llama"), units=5 * CHUNK, chunk_size=CHUNK, sinks=SINKS,
                   stabilizers=STABILIZERS, slots=3)
    state = engine.open(0)
    feed(engine, state, ids_of(8 * CHUNK + PENDING))
    before = engine.room_to_read(state, 0.01)
    engine.focus(state, ids_of(CHUNK, seed=11))
    room = engine.room_to_read(state, 0.01)
    assert room < before
    copy = engine.fork(state, 1)
    engine.thin(copy, 0.01, room)
    feed(engine, copy, ids_of(room, seed=9))
    engine.logits(copy)
    assert copy.focus and engine.receipts(copy, state.position).kept.all()
