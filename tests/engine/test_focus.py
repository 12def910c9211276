"""A focus in front of the stream: inside the budget, outside the grid, seen by all tokens committed behind it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from locret_stream.engine import Engine, NextToken, core, focus
from locret_stream.errors import BudgetExceeded, ConfigError, SnapshotCorrupt
from tests.kit import (
    EVICTING,
    POLICIES,
    Boom,
    assert_same,
    build,
    failing_in_layer,
    feed,
    ids_of,
    logits_at_each,
    model,
    stock_logits,
)

CHUNK, UNITS, SINKS, STABILIZERS = 8, 20, 2, 3
SLIDING = ("gemma3", "gpt-oss")
QUERY, OTHER, LONG = ids_of(5, seed=11), ids_of(3, seed=12), ids_of(9, seed=13)


def engine_of(policy: str = "h2o", on: str = "llama", **more) -> Engine:
    return build(policy, on=model(on), units=UNITS, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS, **more)


def run(engine: Engine, slot: int, ids: list[int], focuses: dict[int, list[int]], step: int):
    """Feed in pieces of `step`; each focus is given at its position, the key of `focuses`."""
    state, at = engine.open(slot), 0
    while True:
        if at in focuses:
            engine.focus(state, focuses[at])
        if at == len(ids):
            return state
        stop = min([at + step, len(ids), *(place for place in focuses if place > at)])
        feed(engine, state, ids[at:stop])
        at = stop


def test_ids_are_accepted_while_a_focus_moves_units(monkeypatch):
    """The caller's thread accepts while the worker's puts the focus in front; nothing failed, so nothing is lost."""
    engine = engine_of()
    state, real, accepted = engine.open(0), core.put_in_front, []
    accepting = threading.Thread(target=lambda: accepted.append(engine.accept(state, OTHER)))

    def put_in_front(*args):
        accepting.start()
        accepting.join(0.2)  # it may wait until the focus is given
        return real(*args)

    feed(engine, state, ids_of(4 * CHUNK))
    monkeypatch.setattr(core, "put_in_front", put_in_front)
    assert engine.focus(state, QUERY) == 4 * CHUNK
    accepting.join(10)
    assert accepted == [None] and state.pending == OTHER and state.focus == QUERY


@pytest.mark.parametrize("policy", POLICIES)
def test_law_3_exact_while_it_fits(policy: str):
    """Logits are those of the stock model after the focus and the stream."""
    engine, ids = engine_of(policy), ids_of(UNITS - len(QUERY))
    state = engine.open(0)
    engine.focus(state, QUERY)
    found = logits_at_each(engine, state, ids)
    expected = stock_logits(model(), QUERY + ids)[len(QUERY):]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", ["llama", *SLIDING])
@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.thorough(but=7)
def test_it_stays_in_front_inside_the_budget_and_off_the_grid(policy: str, on: str):
    engine, ids = engine_of(policy, on), ids_of(7 * CHUNK)
    state = engine.open(0)
    engine.focus(state, QUERY)
    for start in range(0, len(ids), CHUNK):
        feed(engine, state, ids[start:start + CHUNK])
        assert state.seen == start + CHUNK
        for layer, units in enumerate(engine.budgets):
            positions, scores = state.store.positions(layer).cpu(), state.store.scores(layer).cpu()
            assert state.store.counts[layer] <= units and (positions.diff(dim=1) > 0).all()
            if engine.shape.sliding[layer]:
                assert (positions >= 0).all()
                continue
            q, count = len(QUERY), positions.shape[1]
            assert count == min(q + state.seen, units)
            assert (positions[:, :q + SINKS] == torch.arange(-q, SINKS)).all()
            assert (positions[:, count - STABILIZERS:] == torch.arange(state.seen - STABILIZERS, state.seen)).all()
            assert not scores[..., :q].any()
    assert max(peak - units for peak, units in zip(state.peaks, engine.budgets, strict=True)) <= CHUNK


@pytest.mark.parametrize("on", ["llama", *SLIDING])
def test_its_units_are_those_of_the_query_alone(on: str):
    engine = engine_of("h2o", on)
    state, alone = engine.open(0), engine.open(1)
    feed(engine, alone, QUERY + ids_of(CHUNK - len(QUERY)))
    feed(engine, state, ids_of(3 * CHUNK + 2))
    engine.focus(state, QUERY)
    feed(engine, state, ids_of(2 * CHUNK, seed=5))
    for layer, window in enumerate(engine.shape.sliding):
        if not window:
            for tensors in ("keys", "values"):
                found, expected = (getattr(one.store, tensors)(layer, len(QUERY)) for one in (state, alone))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.thorough(but=5)
def test_law_2_the_state_is_a_function_of_tokens_and_focuses(policy: str, on: str):
    engine, ids = engine_of(policy, on), ids_of(7 * CHUNK + 3)
    focuses = {0: QUERY, 2 * CHUNK: LONG, 3 * CHUNK + 1: OTHER, 3 * CHUNK + 5: QUERY, 5 * CHUNK + 2: [],
               7 * CHUNK + 1: OTHER}
    whole, small, ones = (run(engine, slot, ids, focuses, step) for slot, step in enumerate((len(ids), 5, 1)))
    assert whole.focus == [] and whole.next_focus == OTHER
    for state in (small, ones):
        assert_same(engine.export(state), engine.export(whole))
    engine.logits(small)
    feed(engine, small, ids_of(CHUNK))
    feed(engine, whole, ids_of(CHUNK))
    assert small.focus == OTHER and small.next_focus is None
    assert_same(engine.export(small), engine.export(whole))


def test_it_takes_effect_at_the_next_grid_point_and_revises_nothing():
    engine, ids = engine_of("locret"), ids_of(6 * CHUNK)
    with_focus, without = engine.open(0), engine.open(1)
    for state in (with_focus, without):
        feed(engine, state, ids[:2 * CHUNK + 3])
    engine.focus(with_focus, QUERY)
    assert torch.equal(engine.logits(with_focus), engine.logits(without))
    for state in (with_focus, without):
        feed(engine, state, ids[2 * CHUNK + 3:3 * CHUNK])
    q = len(QUERY)
    for layer in range(engine.shape.layers):
        found, scores = (of(layer).cpu()[..., q:] for of in (with_focus.store.positions, with_focus.store.scores))
        scores = scores[0]
        all_found, all_scores = without.store.positions(layer).cpu(), without.store.scores(layer)[0].cpu()
        assert found.shape[1] == UNITS - q
        for head, row in enumerate(found):
            place = torch.searchsorted(all_found[head], row)
            assert torch.equal(all_found[head, place], row) and torch.equal(all_scores[head, place], scores[head])
            left = torch.ones(UNITS, dtype=torch.bool).index_fill(0, place, False)
            free = slice(SINKS, UNITS - STABILIZERS)
            kept_worst = scores[head, SINKS:len(row) - STABILIZERS].min()
            assert all_scores[head, free][left[free]].max() <= kept_worst, "the worst ones left"
    for state in (with_focus, without):
        feed(engine, state, ids[3 * CHUNK:3 * CHUNK + 1])
    assert not torch.equal(engine.logits(with_focus), engine.logits(without))


def test_what_is_committed_behind_it_has_seen_it():
    engine, ids = engine_of("locret"), ids_of(CHUNK)
    scores = []
    for slot, query in enumerate((QUERY, ids_of(5, seed=99))):
        state = run(engine, slot, ids, {0: query}, CHUNK)
        scores.append(state.store.scores(1)[..., len(query):])
    assert not torch.allclose(*scores), "what heads say may depend on the query"


@pytest.mark.parametrize("on", ["llama", *SLIDING])
@pytest.mark.parametrize("policy", ["h2o", "locret", "infllm", "keydiff"])
@pytest.mark.thorough(but=2)
def test_law_6_it_moves_with_exports_and_forks(policy: str, on: str):
    engine, ids = engine_of(policy, on), ids_of(4 * CHUNK + 3)
    for focuses in ({0: QUERY}, {0: LONG, 2 * CHUNK + 1: OTHER}, {CHUNK: QUERY, 3 * CHUNK: []}, {4 * CHUNK + 1: LONG}):
        state = run(engine, 0, ids, focuses, 7)
        saved = engine.export(state)
        assert not any((saved[f"{layer}.positions"] < 0).any() for layer in range(engine.shape.layers))
        loaded, fork = engine.load(saved, 1), engine.fork(state, 2)
        assert_same(engine.export(loaded), saved)
        for layer in range(engine.shape.layers):
            assert torch.equal(loaded.store.rotated(layer, loaded.store.counts[layer]),
                               state.store.rotated(layer, state.store.counts[layer]))
        for context in (state, loaded, fork):
            engine.logits(context)
            feed(engine, context, ids_of(3 * CHUNK, seed=4))
        assert_same(engine.export(loaded), engine.export(state))
        assert_same(engine.export(fork), engine.export(state))


def test_law_6_swapped_out_units_are_saved_and_copied_as_if_they_were_in_their_slot():
    """From their own snapshot, and from no other."""
    engine = engine_of()
    state = run(engine, 0, ids_of(4 * CHUNK + 1), {0: QUERY}, 5)
    saved, before = engine.export(state), engine.moment(state, state.position)
    strangers = [engine.export(run(engine, 1, ids_of(count), {0: focus}, 5))
                 for count, focus in ((4 * CHUNK + 1, OTHER), (5 * CHUNK + 1, QUERY))]
    engine.swap_out(state)
    after = engine.moment(state, state.position, saved)
    assert after.counts == before.counts
    assert_same(after.state, before.state)
    assert_same(dict(enumerate(after.positions)), dict(enumerate(before.positions)))
    assert_same(engine.export(engine.fork(state, 1, saved)), saved)
    for stranger in strangers:
        for use in (engine.fork, engine.moment):
            with pytest.raises(SnapshotCorrupt, match="found units of position"):
                use(state, 1 if use == engine.fork else state.position, stranger)


def test_law_6_swapped_out_units_come_back_behind_it():
    engine = engine_of()
    state = run(engine, 0, ids_of(4 * CHUNK + 1), {0: QUERY}, 5)
    saved = engine.export(state)
    slot = engine.swap_out(state)
    engine.swap_in(state, saved, slot + 1)
    assert_same(engine.export(state), saved)
    engine.swap_out(state)
    other = engine.export(run(engine, 0, ids_of(4 * CHUNK + 1), {0: OTHER}, 5))
    with pytest.raises(SnapshotCorrupt, match="focus"):
        engine.swap_in(state, other, slot)


@pytest.mark.parametrize("layer", [0, 1])
def test_law_9_whole_or_not_at_all(layer: int):
    """It fails at once on a grid point, or in the commit that it waits for."""
    engine = engine_of()
    state = run(engine, 0, ids_of(3 * CHUNK), {0: QUERY}, 5)
    before = engine.export(state)
    with failing_in_layer(engine, layer), pytest.raises(Boom):
        engine.focus(state, OTHER)
    assert_same(engine.export(state), before)
    feed(engine, state, ids_of(4))
    engine.focus(state, OTHER)
    engine.accept(state, ids_of(4))
    before = engine.export(state)
    with failing_in_layer(engine, layer), pytest.raises(Boom):
        engine.commit(state)
    assert_same(engine.export(state), before)
    engine.commit(state)
    assert state.focus == OTHER


def test_one_that_has_no_room_is_refused():
    engine = engine_of()
    state = run(engine, 0, ids_of(3 * CHUNK), {0: QUERY}, 5)
    before = engine.export(state)
    most = UNITS - SINKS - STABILIZERS - 1
    with pytest.raises(ConfigError, match=f"{most + 1} tokens; .* at most {most} tokens"):
        engine.focus(state, ids_of(most + 1))
    assert_same(engine.export(state), before)
    engine.focus(state, ids_of(most))
    feed(engine, state, ids_of(3 * CHUNK))
    assert state.store.counts == [UNITS] * engine.shape.layers


def test_one_that_a_policy_of_ones_own_leaves_no_room_is_refused(monkeypatch):
    engine = engine_of("keydiff")
    state = run(engine, 0, ids_of(3 * CHUNK), {}, 5)
    before = engine.export(state)
    monkeypatch.setattr(engine.policy, "protection", lambda budget, sinks, stabilizers: (sinks, 16))
    with pytest.raises(ConfigError, match="first 7 and the last 16 units of 20, a focus of 5 tokens"):
        engine.focus(state, QUERY)
    assert_same(engine.export(state), before)


def test_a_policy_that_never_evicts_counts_it():
    engine = engine_of("full")
    state = engine.open(0)
    engine.focus(state, QUERY)
    assert engine.room(state) == UNITS - len(QUERY)
    feed(engine, state, ids_of(2 * CHUNK - 2))
    assert engine.room(state) == 1
    with pytest.raises(BudgetExceeded, match="no space for a focus of 9"):
        engine.focus(state, LONG)
    engine.focus(state, OTHER)
    assert engine.room(state) == 1, "the longer one is in force until the next grid point"
    with pytest.raises(BudgetExceeded, match="keeps 14 tokens behind a focus of 5, 2 more were given"):
        engine.accept(state, ids_of(2))


@pytest.mark.parametrize("on", ["llama", *SLIDING])
def test_contexts_with_and_without_are_decoded_together(on: str):
    engine = engine_of("locret", on)
    alone = []
    for slot, focuses in enumerate(({0: QUERY}, {}, {2 * CHUNK: LONG})):
        state = run(engine, slot, ids_of(3 * CHUNK + 2, seed=slot), focuses, 5)
        alone.append(logits_at_each(engine, state, [3, 4]))
    seen: list[list[torch.Tensor]] = [[], [], []]
    states = [run(engine, slot, ids_of(3 * CHUNK + 2, seed=slot), focuses, 5)
              for slot, focuses in enumerate(({0: QUERY}, {}, {2 * CHUNK: LONG}))]
    for state in states:
        feed(engine, state, [3])
    engine.decode([NextToken(state, lambda logits, n=n: seen[n].append(logits.clone()) or 4)
                   for n, state in enumerate(states)])
    engine.decode([NextToken(state, lambda logits, n=n: seen[n].append(logits.clone()) or 5)
                   for n, state in enumerate(states)])
    for rows, expected in zip(seen, alone, strict=True):
        torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-5, atol=1e-5)


def test_one_behind_a_whole_pending_chunk_waits_for_its_commit():
    """Otherwise it would take effect before its position in the stream."""
    engine = engine_of()
    state, other = engine.open(0), engine.open(1)
    engine.accept(state, ids_of(CHUNK + 2))
    before = engine.export(state)
    assert engine.focus(state, QUERY) is None
    assert_same(engine.export(state), before)
    engine.commit(state)
    assert engine.focus(state, QUERY) == CHUNK + 2 and state.focus == []
    assert_same(engine.export(state), engine.export(run(engine, 1, ids_of(CHUNK + 2), {CHUNK + 2: QUERY}, 3)))
    assert other.seen == 0


@pytest.mark.parametrize("meanwhile", [2, CHUNK])
def test_tokens_that_are_accepted_while_it_is_computed_come_before_it(meanwhile: int, monkeypatch):
    engine = engine_of()
    state = run(engine, 0, ids_of(2 * CHUNK), {}, 5)

    def units_of(*given: Any) -> list:
        engine.accept(state, ids_of(meanwhile))
        return focus.units_of(*given)

    monkeypatch.setattr(core, "units_of", units_of)
    given = engine.focus(state, QUERY)
    assert state.focus == []
    if meanwhile == CHUNK:
        assert given is None and state.next_focus is None
    else:
        assert given == state.next_focus_at == 2 * CHUNK + meanwhile and state.next_focus == QUERY


def test_full_keeps_everything_while_a_shorter_focus_waits():
    engine = engine_of("full")
    state = run(engine, 0, ids_of(CHUNK + 3), {0: LONG}, 5)
    assert engine.room(state) == 0
    engine.focus(state, [])
    assert engine.room(state) == 0, "the old one still takes its space"
    with pytest.raises(BudgetExceeded):
        engine.accept(state, ids_of(1))
    state = run(engine, 0, ids_of(CHUNK + 3), {0: QUERY}, 5)
    engine.focus(state, [])
    feed(engine, state, ids_of(4))
    assert engine.room(state) == 0
    state = run(engine, 0, ids_of(CHUNK), {0: LONG, CHUNK: []}, 5)
    assert engine.room(state) == UNITS - CHUNK
    assert engine.receipts(state).kept.all()


def test_full_takes_a_focus_as_long_as_there_is_room_whatever_waits():
    engine = engine_of("full")
    state = run(engine, 0, ids_of(3), {0: LONG}, 5)
    engine.focus(state, QUERY[:2])
    engine.focus(state, ids_of(12))
    assert len(state.next_focus) == 12 and engine.room(state) == UNITS - 3 - 12


def test_what_was_held_at_most_counts_the_focus():
    engine = engine_of()
    state = engine.open(0)
    engine.focus(state, QUERY)
    assert state.peaks == state.store.counts == [len(QUERY)] * engine.shape.layers


@pytest.mark.parametrize(("old", "new"), [(QUERY, OTHER), (OTHER, QUERY), (QUERY, []), (OTHER, LONG)])
def test_another_focus_takes_the_place_of_the_one_before_and_of_nothing_else(old: list[int], new: list[int]):
    """While the budget has space for all, on a grid point: the stream's units stay, each with its score."""
    engine = engine_of()
    state = run(engine, 0, ids_of(CHUNK), {0: old}, 5)
    before = engine.export(state)
    assert engine.focus(state, new) == CHUNK
    after = engine.export(state)
    assert_same({name: after[name] for name in after if name != "focus"},
                {name: before[name] for name in before if name != "focus"})
    assert after["focus"].tolist() == new and state.store.counts == [len(new) + CHUNK] * engine.shape.layers


def test_a_snapshot_with_no_more_units_than_are_protected_is_refused():
    """Behind a focus there may be fewer units than the budget allows, where the focus before was longer."""
    engine = engine_of()
    saved, protected = engine.export(run(engine, 0, ids_of(5 * CHUNK), {0: QUERY}, 5)), SINKS + STABILIZERS
    for count in range(1, UNITS - len(QUERY) + 1):
        cut = {name: tensor[..., :count, :] if name.endswith(("keys", "values")) else
               tensor[..., :count] if name.endswith(("scores", "positions")) else tensor
               for name, tensor in saved.items()}
        if count > protected:
            engine.load(cut, 1)
        else:
            with pytest.raises(SnapshotCorrupt, match=r"0\.keys"):
                engine.load(cut, 1)


def test_receipts_tell_of_the_stream_alone():
    engine = engine_of()
    state = run(engine, 0, ids_of(5 * CHUNK), {0: QUERY}, 5)
    receipts = engine.receipts(state)
    assert receipts.kept.shape[-1] == 5 * CHUNK
    assert (receipts.kept.sum(-1) == UNITS - len(QUERY)).all()


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.update(focus=torch.tensor([10**6])), "'focus' holds 1 ids"),
    (lambda t: t.update(focus=torch.zeros(2, 2, dtype=torch.int64)), "'focus'"),
    (lambda t: t.update(focus=torch.arange(UNITS)), "."),
    (lambda t: t.update(next_focus=torch.tensor([5 * CHUNK + 1, *range(UNITS - 1)])), "given at"),
    (lambda t: t.update(next_focus=torch.tensor([5 * CHUNK + 1, *range(UNITS - 1)]), pending=torch.tensor([3])),
     "at most"),
    (lambda t: t.update({f"{layer}.{name}": t[f"{layer}.{name}"][..., :2, :] if name in ("keys", "values") else
                         t[f"{layer}.{name}"][..., :2] for layer in (0, 1, 2)
                         for name in ("keys", "values", "scores", "positions") if f"{layer}.{name}" in t}), "0.keys"),
    (lambda t: t.pop("focus"), "0.keys"),
])
def test_strange_ones_are_not_loaded(change, said: str):
    engine = engine_of()
    saved = engine.export(run(engine, 0, ids_of(5 * CHUNK), {0: QUERY}, 5))
    change(saved)
    with pytest.raises(SnapshotCorrupt, match=said):
        engine.load(saved, 1)


@pytest.mark.parametrize("before", [[], QUERY])
def test_a_focus_that_is_taken_back_before_it_is_in_force_leaves_nothing(before: list[int]):
    """Off the grid, where it would come into force later; as a session that is replayed never has it."""
    engine = engine_of()
    found = []
    for given in ([OTHER, before], [before], []):
        state = engine.open(len(found))
        engine.focus(state, before)
        feed(engine, state, ids_of(CHUNK + 3))
        for ids in given:
            engine.focus(state, ids)
        assert state.next_focus is None
        found.append(engine.export(state))
        feed(engine, state, ids_of(2 * CHUNK, seed=2))
        found[-1] |= {f"{name} later": tensor for name, tensor in engine.export(state).items()}
    for other in found[1:]:
        assert_same(other, found[0])
