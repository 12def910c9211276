"""Codes on the device, exact units in the host's memory: the laws, and what a reply is a function of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from locret_stream.cache import TieredStore
from locret_stream.config import StreamConfig
from locret_stream.engine import Engine, EngineState, NextToken
from locret_stream.errors import ConfigError, SnapshotCorrupt
from locret_stream.host_tier import HostTier, host_tier
from locret_stream.kernels import quantise_units
from tests.engine.test_laws import CHUNK, SHARES, SINKS, STABILIZERS, UNITS, operation, play
from tests.kit import assert_same, build, examples, failing_in_layer, feed, ids_of, model

FEW = HostTier(units=4, residual=3)
GUESS = HostTier(units=4, residual=3, chosen_by="guess")
EXPERTS = ("gpt-oss", "deepseek-v3", "mimo", "llama4")
KINDS = ["llama", "gemma3", "gpt-oss", "deepseek-v3", "mimo", "gemma4-e2b", "llama4"]


def engine_of(exact: HostTier | None = FEW, bits: int | tuple[int, int] = 2, policy: str = "locret", on: str = "llama",
              **more: Any) -> Engine:
    shares = SHARES if on == "llama" else "uniform"
    policy = policy if on == "llama" or policy != "locret" else "keydiff"
    return build(policy, on=model(on), exact=exact, **{
        "units": UNITS, "chunk_size": CHUNK, "sinks": SINKS, "stabilizers": STABILIZERS, "allocation": shares,
        "store_bits": bits} | more)


def reply(engine: Engine, states: Sequence[EngineState], count: int) -> list[list[Tensor]]:
    """Logits of `count` greedy tokens of each context, decoded together."""
    seen: list[list[Tensor]] = [[] for _ in states]

    def chosen_by(kept: list[Tensor]) -> Any:
        def choose(logits: Tensor) -> int:
            kept.append(logits.clone())
            return int(logits.argmax())
        return choose

    for _ in range(count):
        for answer in engine.decode([NextToken(state, chosen_by(kept)) for state, kept in
                                     zip(states, seen, strict=True)]):
            assert isinstance(answer, int), answer
        for state in states:
            while engine.ready(state):
                engine.commit(state)
    return seen


def replied(engine: Engine, prompt: int, count: int, slot: int = 0) -> tuple[EngineState, list[Tensor]]:
    state = engine.open(slot)
    feed(engine, state, ids_of(prompt))
    return state, reply(engine, [state], count)[0]


@pytest.mark.parametrize("exact", [GUESS, FEW, HostTier(units=40, residual=0),
                                   HostTier(units=2, residual=9, prefill="codes", chosen_by="guess"),
                                   HostTier(units=3, residual=2, chosen_by="last")])
@pytest.mark.thorough(but=2)
def test_committed_state_is_a_function_of_the_tokens(exact: HostTier):
    """Laws 1, 2, 4, 7, 9 and 10 over random operations, as for exact units."""
    engine = engine_of(exact)

    @settings(max_examples=examples(12))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations: list[tuple]) -> None:
        play(engine, operations)

    law()


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.parametrize("exact", [GUESS, FEW])
@pytest.mark.thorough(but=6)
def test_what_is_committed_is_what_exact_units_commit(on: str, bits: int, exact: HostTier):
    """Bit for bit, with exact units before each chunk; over prompts, replies and commits inside them."""
    engine, plain = engine_of(exact, bits, on=on), engine_of(None, 16, on=on)
    states = [each.open(0) for each in (engine, plain)]
    for count in (3 * CHUNK + 5, 2 * CHUNK, CHUNK + 3):
        for each, state in zip((engine, plain), states, strict=True):
            feed(each, state, ids_of(count, seed=count))
        tokens = [int(logits.argmax()) for logits in reply(engine, states[:1], 4)[0]]
        feed(plain, states[1], tokens)
        whole, expected = (each.export(state) for each, state in zip((engine, plain), states, strict=True))
        assert_same({name: tensor for name, tensor in whole.items() if not name.endswith("key_mean")}, expected)


@pytest.mark.parametrize("on", KINDS)
def test_without_fetched_units_it_is_a_memory_of_codes(on: str):
    """k = 0, and codes before each chunk: the same bits as with codes alone."""
    engine = engine_of(HostTier(units=0, residual=0, prefill="codes"), 4, on=on)
    _, found = replied(engine, 5 * CHUNK + 3, 2 * CHUNK)
    _, expected = replied(engine_of(None, 4, on=on), 5 * CHUNK + 3, 2 * CHUNK)
    assert all(map(torch.equal, found, expected)) and engine.pool.fetched == 0


@pytest.mark.parametrize("on", [*KINDS, "gemma2"])
def test_with_all_units_fetched_by_queries_it_is_a_memory_of_exact_units(on: str):
    """Windows, sink logits, softcaps, and layers that share units included; in another order of sums."""
    engine = engine_of(HostTier(units=UNITS * 2, residual=0), on=on)
    _, found = replied(engine, 5 * CHUNK + 3, 12)
    _, expected = replied(engine_of(None, 16, on=on), 5 * CHUNK + 3, 12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("chosen_by", ["last", "guess"])
@pytest.mark.parametrize("decode_copy", [False, True])
@pytest.mark.thorough(but=8)
def test_with_all_units_fetched_it_is_a_memory_of_exact_units(on: str, chosen_by: str, decode_copy: bool):
    """k of all units: the same bits as with exact units; two tokens in a forward are summed in another order."""
    engine = engine_of(HostTier(units=UNITS * 2, residual=0, chosen_by=chosen_by), on=on, decode_copy=decode_copy)
    _, found = replied(engine, 5 * CHUNK + 3, 2 * CHUNK)
    _, expected = replied(engine_of(None, 16, on=on), 5 * CHUNK + 3, 2 * CHUNK)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if chosen_by == "last" else 1e-5)


def gaps(tiers: Sequence[HostTier]) -> list[float]:
    """How far from those of exact units logits are in 1 bit, with each tier, over the tokens of one reply."""
    _, expected = replied(engine_of(None, 16), 5 * CHUNK + 3, 12)
    far = []
    for exact in tiers:
        engine = engine_of(exact, 1)
        state = engine.open(0)
        feed(engine, state, ids_of(5 * CHUNK + 3))
        apart = []
        for logits in expected[:CHUNK - 4]:
            chosen = int(logits.argmax())
            seen: list[Tensor] = []
            engine.decode([NextToken(state, lambda logits, seen=seen, chosen=chosen: (seen.append(logits), chosen)[1])])
            apart.append(float((seen[0] - logits).square().mean()))
        far.append(sum(apart[1:]))
    return far


@pytest.mark.parametrize("chosen_by", ["guess", "query"])
def test_fewer_fetched_units_are_further_from_exact_ones(chosen_by: str):
    far = gaps([HostTier(units=units, residual=0, chosen_by=chosen_by) for units in (0, 4, 10, 40)])
    assert far == sorted(far, reverse=True) and far[0] > 3 * far[2] and far[3] < 1e-9


def test_the_query_finds_what_it_attends_to_best():
    query, guess, last = gaps([HostTier(units=6, residual=0, chosen_by=by) for by in ("query", "guess", "last")])
    assert query < min(guess, last)


@pytest.mark.parametrize(("on", "focus"), [*((on, []) for on in KINDS), ("llama", [5, 9, 11])])
def test_what_a_query_fetches_is_what_it_attends_to_most(on: str, focus: list[int], monkeypatch):
    """Of the units within its window whose codes are all that there is, those of a focus included; K and V are the
    host's, K at its rank."""
    engine, seen = engine_of(FEW, 1, on=on), []
    fetch = TieredStore.fetch

    def watched(store: TieredStore, layer: int, weights: Tensor, first: int, most: int, rotate_at: Any) -> Any:
        found = fetch(store, layer, weights.clone(), first, most, rotate_at)
        if found is not None:
            seen.append((store, layer, weights.clone(), first, [part.clone() for part in found]))
        return found

    monkeypatch.setattr(TieredStore, "fetch", watched)
    state = engine.open(0)
    feed(engine, state, ids_of(3 * CHUNK))
    engine.focus(state, focus)
    feed(engine, state, ids_of(2 * CHUNK + 2, seed=2))
    reply(engine, [state], 3)
    assert seen and state.store.fronts == [len(focus)] * len(engine.budgets)
    for store, layer, weights, first, (ranks, keys, values) in seen:
        count, front = store.counts[layer], store.fronts[layer]
        coded = [*range(first, front), *range(max(first, front + engine.pool.firsts[layer]), count - FEW.residual)]
        best = [sorted(coded, key=lambda rank, row=row: -float(row[rank - first]))[:FEW.units] for row in weights]
        assert [sorted(row) for row in ranks.tolist()] == [sorted(row) for row in best]
        of_host = store.rows(layer, count)
        at = torch.arange(count).expand(1, len(ranks), -1)
        turned = engine.layout.tables.rotate_at(layer, of_host[0][None], at)[0]
        held = of_host[1] if of_host[1].shape[-1] else turned
        for rows, found in ((turned, keys), (held, values)):
            torch.testing.assert_close(rows.gather(1, ranks[..., None].expand_as(found)), found)


@pytest.mark.parametrize("on", KINDS)
def test_the_newest_token_never_depends_on_the_guess(on: str, monkeypatch):
    """Of the same step, with any token for it: its unit and its logits are the same bits; in a mixture of experts,
    where an expert multiplies all tokens at once that choose it, they are the same up to the order of sums."""
    def one(guess: int | None) -> tuple[Tensor, dict[int, Tensor]]:
        engine = engine_of(GUESS, on=on)
        state, _ = replied(engine, 5 * CHUNK + 2, 3)
        if guess is not None:
            assert state.guess is not None
            state.guess = guess
        logits = engine.logits(state).clone()
        store, rows = state.store, {}
        for layer in range(len(engine.budgets)):
            store._write_late(layer)
            row = engine.pool.tails[layer] + len(state.pending) - 1
            rows[layer] = engine.pool.layers[layer].exact_keys[0, :, row].clone()
        return logits, rows

    found, close = [one(guess) for guess in (None, 3, 77)], 1e-5 if on in EXPERTS else 0
    for logits, rows in found[1:]:
        torch.testing.assert_close(logits, found[0][0], rtol=0, atol=close)
        for layer, row in rows.items():
            torch.testing.assert_close(row, found[0][1][layer], rtol=0, atol=close)


def test_the_guess_chooses_what_is_fetched():
    engine = engine_of(HostTier(units=3, residual=0, chosen_by="guess"))
    chosen = []
    for guess in (3, 77):
        state, _ = replied(engine, 5 * CHUNK + 2, 3)
        state.guess = guess
        engine.logits(state)
        chosen.append([set(engine.pool.layers[layer].hot.ranks[0].flatten().tolist()) for layer in range(3)])
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("exact", [FEW, GUESS, HostTier(units=4, residual=3, chosen_by="last"),
                                   HostTier(units=4, residual=0, prefill="codes", chosen_by="guess")])
@pytest.mark.parametrize(("decode_copy", "on"), [(False, "llama"), (True, "llama"), (False, "lfm2")])
def test_a_reply_is_a_function_of_the_committed_state_and_the_tokens(exact: HostTier, decode_copy: bool, on: str):
    """Whatever happens meanwhile: a neighbour that answers, a fork, the slot given away, a step that fails."""
    if on != "llama" and exact.chosen_by == "guess":  # that has a recurrent state
        exact = msgspec.structs.replace(exact, chosen_by="last")

    def told(between: str) -> list[Tensor]:
        engine = engine_of(exact, on=on, decode_copy=decode_copy)
        state, found = replied(engine, 5 * CHUNK + 1, 3)
        if between == "neighbour":
            replied(engine, 4 * CHUNK + 3, 5, slot=1)
        elif between == "fork":
            state = engine.fork(state, 2)
        elif between == "swap":
            tensors = engine.export(state)
            engine.swap_out(state)
            replied(engine, 4 * CHUNK + 3, 2, slot=0)
            engine.swap_in(state, tensors, 3)
        elif between == "failure":
            with failing_in_layer(engine, 1), pytest.raises(RuntimeError):
                engine.logits(state)
        elif between == "ahead":
            engine.run_ahead()
        elif between == "taken back":
            [taken] = engine.decode([NextToken(state, lambda logits: 5)])
            assert taken == 5
            engine.truncate(state, len(state.pending) - 1)
        return [*found, *reply(engine, [state], CHUNK + 4)[0]]

    expected = told("")
    for between in ("neighbour", "fork", "swap", "failure", "ahead", "taken back"):
        found = told(between)
        assert all(map(torch.equal, found, expected)), between


@pytest.mark.parametrize("exact", [FEW, GUESS])
def test_contexts_that_decode_together_answer_as_alone(exact: HostTier):
    engine = engine_of(exact)
    alone = [replied(engine, prompt, 14)[1] for prompt in (5 * CHUNK + 1, 3 * CHUNK + 6, 2)]
    states = [engine.open(slot) for slot in range(3)]
    for state, prompt in zip(states, (5 * CHUNK + 1, 3 * CHUNK + 6, 2), strict=True):
        feed(engine, state, ids_of(prompt))
    for found, expected in zip(reply(engine, states, 14), alone, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("exact", "on"), [
    (FEW, "llama"), (GUESS, "llama"), (HostTier(units=4, residual=0, prefill="codes", chosen_by="guess"), "llama"),
    (FEW, "lfm2"),
    (HostTier(units=4, residual=3, chosen_by="last"), "lfm2"), (HostTier(units=4, chosen_by="last"), "falcon-h1")])
def test_a_prompt_is_read_alike_behind_a_reply_and_behind_its_text(exact: HostTier, on: str):
    """Nothing that was fetched for a reply is left in the units that the next prompt attends to, nor in a state."""
    engine = engine_of(exact, on=on)
    state, _ = replied(engine, 4 * CHUNK + 1, 4)
    tokens = state.pending[1:]
    feed(engine, state, [7, 8])
    behind = engine.logits(state).clone()
    other = engine.open(1)
    feed(engine, other, [*ids_of(4 * CHUNK + 1), *tokens, 7, 8])
    torch.testing.assert_close(engine.logits(other), behind, rtol=0, atol=1e-5)


@pytest.mark.parametrize("exact", [FEW, GUESS])
def test_a_saved_context_answers_as_the_one_that_was_saved(exact: HostTier):
    """Exact units are what is saved; codes are made of them again, the same ones; nothing hot is in it."""
    engine = engine_of(exact)
    state, _ = replied(engine, 5 * CHUNK + 2, 3)
    tensors = engine.export(state)
    assert tensors["0.keys"].dtype == torch.float32 and not [name for name in tensors if "first" in name]
    assert tensors["pending"].tolist() == state.pending
    again = engine.load(tensors, 1)
    assert_same(engine.export(again), tensors)
    for layer, count in enumerate(state.store.counts):
        buffers = engine.pool.layers[layer]
        for rows in (buffers.keys, buffers.values):
            assert torch.equal(rows[0, :, :count], rows[1, :, :count])
        values = state.store.rows(layer, count)[1]
        assert torch.equal(buffers.values[0, :, :count], quantise_units(values, 2))
    for each in (state, again):
        feed(engine, each, [9])
    for one, other in zip(*(reply(engine, [each], 12)[0] for each in (state, again)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    del tensors["1.key_mean"]
    with pytest.raises(SnapshotCorrupt, match="key_mean"):
        engine.load(tensors, 2)


CODES = HostTier(units=4, residual=3, prefill="codes", saves="codes")


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.thorough(but=2)
def test_saved_codes_come_back_bit_for_bit_and_exact_units_as_they_say(on: str, bits: int):
    """Law 5: they are rounded once. What is exact on the device stays exact, so that what is committed next is the
    same; what the host has of the others is what codes say, and the context knows."""
    engine = engine_of(CODES, bits, on=on)
    state, _ = replied(engine, 5 * CHUNK + 2, 3)
    tensors = engine.export(state)
    assert tensors["0.keys"].dtype == torch.uint8 and state.rounded == 0
    again = engine.load(tensors, 1)
    assert_same(engine.export(again), tensors)
    assert again.rounded == state.seen and engine.fork(again, 2).rounded == state.seen
    for layer, count in enumerate(state.store.counts):
        buffers, first = engine.pool.layers[layer], engine.pool.firsts[layer]
        for rows in (buffers.keys, buffers.values):
            assert torch.equal(rows[0, :, :count], rows[1, :, :count])
        before, after = (store._exact(layer, slice(count)) for store in (state.store, again.store))
        for part, (kept, found) in enumerate(zip(before, after, strict=True)):
            if not kept.shape[-1]:
                continue  # K is V, too
            same = (kept == found).all(-1)
            assert same[:, :first].all() and same[:, max(first, count - CODES.residual):].all()
            assert not same.all(), "the others are rounded"
            said = torch.empty_like(kept)
            again.store._read_codes(layer, part, said)
            between = slice(first, max(first, count - CODES.residual))
            assert torch.equal(found[:, between], said[:, between])
    for each in (state, again):
        feed(engine, each, ids_of(2 * CHUNK + 1, seed=3))
    assert_same(engine.export(again), engine.export(state))


def test_a_reply_over_restored_codes_is_that_of_codes_alone():
    """However many units it fetches; that of the context that was saved is nearer to that of exact units."""
    tier = msgspec.structs.replace(CODES, units=UNITS * 2, residual=0)
    engine, plain = engine_of(tier), engine_of(None, 2)
    states = [each.open(0) for each in (engine, plain)]
    for each, state in zip((engine, plain), states, strict=True):
        feed(each, state, ids_of(5 * CHUNK))
    again = engine.load(engine.export(states[0]), 1)
    feed(engine, again, [7])
    feed(plain, states[1], [7])
    feed(engine, states[0], [7])
    [kept], [rounded], [codes] = (reply(each, [state], 4) for each, state in (
        (engine, states[0]), (engine, again), (plain, states[1])))
    for found, expected in zip(rounded, codes, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(kept[1], codes[1], atol=1e-2)


@pytest.mark.parametrize("focus", [[], [5, 9, 11]])
def test_saved_codes_of_a_context_with_a_focus_or_in_another_slot(focus: list[int]):
    """A focus is computed from its ids, exactly; swapping out and in rounds as a restart does."""
    engine = engine_of(CODES)
    state = engine.open(0)
    feed(engine, state, ids_of(3 * CHUNK))
    if focus:
        engine.focus(state, focus)
    feed(engine, state, ids_of(2 * CHUNK + 2, seed=2))
    tensors = engine.export(state)
    exact = [state.store._exact(layer, slice(front)) for layer, front in enumerate(state.store.fronts)]
    engine.swap_out(state)
    copy = engine.fork(state, 2, tensors)
    engine.swap_in(state, tensors, 1)
    assert state.rounded == copy.rounded == state.seen > 0
    for each in (state, copy):
        assert_same(engine.export(each), tensors)
        assert each.store.fronts == [len(focus)] * len(engine.budgets)
        for layer, (front, kept) in enumerate(zip(each.store.fronts, exact, strict=True)):
            for found, expected in zip(each.store._exact(layer, slice(front)), kept, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    del tensors["1.last_values"]
    with pytest.raises(SnapshotCorrupt, match="last_values"):
        engine.load(tensors, 3)


def test_a_guess_is_in_no_snapshot():
    """Nor in what is committed behind it: the tokens that were never chosen leave nothing."""
    engine = engine_of(GUESS)
    state, _ = replied(engine, 5 * CHUNK + 2, 3)
    assert state.guess is not None
    other = engine.open(1)
    feed(engine, other, [*ids_of(5 * CHUNK), *state.pending])
    assert_same(engine.export(state), engine.export(other))
    for each in (state, other):
        feed(engine, each, ids_of(CHUNK, seed=4))
    assert_same(engine.export(state), engine.export(other))


@pytest.mark.parametrize("exact", [FEW, GUESS, HostTier(units=64, residual=64, chosen_by="last"),
                                   HostTier(units=0, residual=0)])
@pytest.mark.parametrize("on", KINDS)
@pytest.mark.thorough(but=8)
def test_bytes_are_those_of_the_formula(exact: HostTier, on: str):
    engine = engine_of(exact, 4, on=on)
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()
    assert engine.pool.host_bytes == engine.pool.formula_host_bytes() > 0


def test_what_is_fetched_is_counted():
    """By a guess no more than k of each head, and only what is not on the device already."""
    engine = engine_of(HostTier(units=4, residual=0, chosen_by="guess"))
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK))
    heads = engine.shape.units[0].kv_heads
    before, ranks, missed = 0, None, []
    for _ in range(6):
        reply(engine, [state], 1)
        engine.logits(state)
        now = [set(head.tolist()) for layer in engine.pool.layers for head in layer.hot.ranks[0]]
        if ranks is not None:
            missed.append(engine.pool.fetched - before)
            assert missed[-1] == sum(len(one - other) for one, other in zip(now, ranks, strict=True))
        before, ranks = engine.pool.fetched, now
    assert 0 < sum(missed) < len(missed) * 4 * heads * 3


def test_a_query_fetches_so_many_of_each_head():
    engine = engine_of(HostTier(units=4, residual=0))
    state, _ = replied(engine, 6 * CHUNK, 1)
    engine.logits(state)
    before = engine.pool.fetched
    reply(engine, [state], 3)  # of which the first token's logits are there
    assert engine.pool.fetched - before == 2 * 4 * sum(unit.kv_heads for unit in engine.shape.units)


@pytest.mark.parametrize("exact", [FEW, HostTier(units=4, residual=3, prefill="codes"), HostTier(units=64, residual=0)])
def test_what_is_copied_from_the_host_is_what_the_formula_says(exact: HostTier):
    """For each chunk, and for each token that is decoded, once the layers are full."""
    engine = engine_of(exact)
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK))
    of_token, of_chunk = engine.pool.formula_moved()
    read = engine.pool.read
    feed(engine, state, ids_of(3 * CHUNK, seed=5))
    assert engine.pool.read - read == 3 * of_chunk and engine.pool.fetched == 0
    feed(engine, state, [7])
    engine.logits(state)
    read = engine.pool.read
    reply(engine, [state], 4)  # of which the first token's logits are there
    assert engine.pool.fetched == 3 * of_token > 0 and engine.pool.read == read


def test_places_are_a_permutation_and_rows_are_what_was_written(monkeypatch):
    """Over commits that keep other units in each head; and what is not kept is written nowhere."""
    engine = engine_of()
    state, written = engine.open(0), []
    take = TieredStore._take

    def watched(store: TieredStore, layer: int, kept: Sequence[Tensor], before: Sequence[int], *rest: Any) -> None:
        host = engine.pool.layers[layer].host
        values = host.values[0].clone()
        take(store, layer, kept, before, *rest)
        written.append((int((host.values[0] != values).any(-1).sum()),
                        sum(int((ranks >= count).sum()) for ranks, count in zip(kept, before, strict=True))))

    monkeypatch.setattr(TieredStore, "_take", watched)
    ids = ids_of(6 * CHUNK, distinct=True)
    for start in range(0, len(ids), CHUNK):
        feed(engine, state, ids[start:start + CHUNK])
        for layer in engine.pool.layers:
            assert torch.equal(layer.host.places[0].sort().values, torch.arange(layer.host.places.shape[1]))
    assert all(rows == new for rows, new in written) and len({new for _, new in written}) > 1


def test_a_fork_shares_rows_until_one_of_the_two_writes():
    """Then both have what they had, whoever writes first, a fork of a fork and a slot that is given away included."""
    engine = engine_of()
    state, _ = replied(engine, 5 * CHUNK + 2, 3)
    whole = engine.export(state)
    held = [layer.host.keys.clone() for layer in engine.pool.layers]
    fork = engine.fork(state, 1)
    again = engine.fork(fork, 2)
    assert all(map(torch.equal, held, [layer.host.keys for layer in engine.pool.layers])), "nothing is copied"
    for each in (fork, again):
        assert_same(engine.export(each), whole)
    feed(engine, fork, ids_of(2 * CHUNK, seed=8))
    for each in (state, again):
        assert_same(engine.export(each), whole)
    other = engine.open(0)  # the slot of the first one, which is closed
    feed(engine, other, ids_of(6 * CHUNK, seed=9))
    assert_same(engine.export(again), whole)
    feed(engine, again, ids_of(2 * CHUNK, seed=8))
    assert_same(engine.export(again), engine.export(fork))
    engine.fork(other, 1)
    assert all(layer.host.lent for layer in engine.pool.layers)
    engine.open(1)
    assert not any(layer.host.lent for layer in engine.pool.layers)
    feed(engine, other, ids_of(CHUNK, seed=3))
    plain = engine.open(2)
    feed(engine, plain, [*ids_of(6 * CHUNK, seed=9), *ids_of(CHUNK, seed=3)])
    assert_same(engine.export(other), engine.export(plain))


@pytest.mark.parametrize("written", ["focus", "load"])
def test_a_fork_keeps_its_rows_where_a_focus_or_a_snapshot_is_written_over_them(written: str):
    engine = engine_of()
    other, _ = replied(engine, 4 * CHUNK, 1)
    tensors = engine.export(other)
    state = engine.open(1)
    feed(engine, state, ids_of(5 * CHUNK, seed=6))
    fork = engine.fork(state, 2)
    whole = engine.export(fork)
    if written == "focus":
        engine.focus(state, [5, 9, 11])
        feed(engine, state, [4])
        assert state.store.fronts[0] == 3
    else:
        engine.load(tensors, 1)
    assert_same(engine.export(fork), whole)


@pytest.mark.parametrize("settings", [{"units": -1}, {"residual": 1.5}, {"chosen_by": "me"}, {"prefill": "fast"},
                                      {"saves": "codes"}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"exact: {next(iter(settings))} is .*expected"):
        HostTier(**settings)


def test_what_a_user_may_give():
    assert host_tier(None) is host_tier("none") is None and host_tier("host") == HostTier()
    assert host_tier(FEW) is FEW and host_tier(msgspec.to_builtins(FEW)) == FEW, "as a server on many machines gets it"
    with pytest.raises(ConfigError, match="exact has no setting 'places'; expected of units"):
        host_tier({"places": 3})
    with pytest.raises(ConfigError, match="exact is 'disk'; expected None, 'host'"):
        host_tier("disk")
    with pytest.raises(ConfigError, match=r"store_bits is 16.*expected store_bits of"):
        engine_of(FEW, 16)
    assert StreamConfig(budget=engine_of().config.budget, store_bits=(4, 4), exact=FEW).exact == FEW


def test_a_model_with_a_recurrent_state_has_no_guess():
    with pytest.raises(ConfigError, match=r"recurrent state.*expected HostTier\(\) without a guess"):
        engine_of(GUESS, on="lfm2", policy="keydiff")
    with pytest.raises(ConfigError, match=r"depends on ranks.*expected none"):
        engine_of(HostTier(chosen_by="last"), 8, on="inkling", policy="keydiff")
    engine = engine_of(HostTier(units=40, residual=0, chosen_by="last"), on="lfm2", policy="keydiff")
    _, found = replied(engine, 5 * CHUNK + 3, 2 * CHUNK)
    _, expected = replied(engine_of(None, 16, on="lfm2", policy="keydiff"), 5 * CHUNK + 3, 2 * CHUNK)
    assert all(map(torch.equal, found, expected))
