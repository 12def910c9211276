"""KV heads that share the budget of their layer: against the naive engine, the laws, and equal heads as a special case.
"""

from __future__ import annotations

from copy import deepcopy as copy_of
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from locret_stream.cache import NOWHERE, HeadwiseStore
from locret_stream.config import Budget, StreamConfig, check_store_bits
from locret_stream.engine import Engine, EngineState, NextToken, layout
from locret_stream.engine.occupancy import occupancy
from locret_stream.errors import ConfigError, SnapshotCorrupt
from locret_stream.heads import RetainingHeads
from locret_stream.host_tier import HostTier
from locret_stream.kernels import quantise_units, reference
from locret_stream.models import attach
from locret_stream.policies import Chunk, Policy
from tests.architectures import CONFIGS, make
from tests.engine.naive import NaiveByHead
from tests.engine.test_host_tier import reply
from tests.engine.test_kinds import POLICIES, close
from tests.engine.test_laws import CHUNK, SHARES, SINKS, STABILIZERS, UNITS, Rig, operation, play
from tests.engine.test_store_bits import arrivals
from tests.kit import assert_same, build, examples, feed, ids_of, model, random_heads

QUERY = ids_of(4, seed=11)
KINDS = ["llama", "gemma3", "gemma2", "gpt-oss", "smollm3", "gemma4-e2b", "qwen3.5"]


class Leaning(Policy):
    """Scores by K alone, so for layers of any shapes; of the first head the highest, and the lowest."""

    name = "leaning"

    def score(self, chunk: Chunk) -> Tensor:
        scores = torch.sin(chunk.k.float().sum(-1))
        scores[0] *= 4
        return scores


FEW = HostTier(units=4, residual=3)
KEPT = [{}, {"store_bits": 4}, {"store_bits": (16, 4)}, {"store_bits": 2, "exact": FEW},
        {"store_bits": 4, "exact": HostTier(units=3, residual=6, prefill="codes", saves="codes")}]
"""How units are kept."""


def engine_of(on: str = "llama", *, by_head: bool = True, **more: Any) -> Engine:
    if on == "llama":
        return build("locret", on=model(on), by_head=by_head, **{
            "units": UNITS, "chunk_size": CHUNK, "sinks": SINKS, "stabilizers": STABILIZERS,
            "allocation": SHARES} | more)
    budget = Budget(units=UNITS, sinks=SINKS, stabilizers=STABILIZERS, allocation="uniform", by_head=by_head)
    decode_copy = more.pop("decode_copy", False)
    bits = check_store_bits(more.pop("store_bits", 16))
    return Engine(attach(model(on)), StreamConfig(budget=budget, chunk_size=CHUNK, policy="leaning", store_bits=bits,
                                                  **more), Leaning(), 4, decode_copy=decode_copy)


def windowed(window: int) -> Any:
    """A Llama that knows so many positions."""
    config = copy_of(model().config)
    config.max_position_embeddings = window
    return type(model())(config).eval()


def leaning(scale: float = 4.0) -> RetainingHeads:
    """Heads of which the first has the highest scores, and the lowest."""
    heads = random_heads(build("full", units=64).attachment)
    for weights in heads.fc2.parameters():
        weights.data[0] *= scale
    return heads


def kept(state: EngineState, layer: int) -> list[list[int]]:
    """Positions of each head."""
    return [[place for place in head if place != NOWHERE] for head in state.store.positions(layer).tolist()]


class ByHeadRig(Rig):
    def check(self) -> None:
        engine, state = self.engine, self.state
        store = state.store
        assert isinstance(store, HeadwiseStore)
        assert state.pending == self.tokens[state.seen:]
        for layer, units in enumerate(engine.budgets):
            heads = kept(state, layer)
            counts = [len(head) for head in heads]
            if not engine.layout.headwise[layer]:
                assert counts == [min(state.seen, units)] * len(heads)
                continue
            assert store.of_heads[layer] == counts and store.counts[layer] == max(counts)
            assert sum(counts) == len(counts) * min(state.seen, units)
            for head in heads:
                assert head == sorted(set(head))
                assert len(head) >= min(state.seen, SINKS + STABILIZERS, int(layout.LEAST_OF_HEAD * units))
                assert head[:SINKS] == list(range(min(SINKS, len(head))))
                last = min(STABILIZERS, len(head))
                assert head[len(head) - last:] == list(range(state.seen - last, state.seen))
            for firsts, room in ((store.firsts(layer), CHUNK), (store._begins(layer, counts),
                                                                0 if engine.pool.quantised else CHUNK)):
                ends = [first + count + room for first, count in zip(firsts, counts, strict=True)]
                assert all(end <= first for end, first in zip(ends, firsts[1:], strict=False))
                assert ends[-1] <= len(counts) * (units + room)


@pytest.mark.parametrize(("sinks", "stabilizers", "allocation"), [
    (2, 5, "uniform"), (0, 0, "uniform"), (3, 0, (1.0, 0.7, 1.3))])
@pytest.mark.parametrize("lean", [1.0, 4.0])
def test_the_engine_keeps_what_the_naive_one_keeps(sinks: int, stabilizers: int, allocation: Any, lean: float):
    engine = build("locret", units=18, chunk_size=8, sinks=sinks, stabilizers=stabilizers, allocation=allocation,
                   by_head=True, heads=leaning(lean))
    naive = NaiveByHead(model(), engine.policy.heads, list(engine.budgets), 8, sinks, stabilizers)
    state, ids, uneven = engine.open(0), ids_of(8 * 8 + 5, seed=4, distinct=True), 0
    for at in range(0, len(ids), 7):
        feed(engine, state, ids[at:at + 7])
        naive.feed(ids[at:at + 7])
        for layer in range(naive.layers):
            assert kept(state, layer) == naive.positions(layer), f"layer {layer} at {state.seen}"
            uneven += len(set(map(len, naive.positions(layer)))) > 1
        assert (engine.logits(state) - naive.next_logits()).abs().max() < 1e-4
    assert uneven > 5
    for token in ids_of(12, seed=5):  # by the decoder, over commits
        [answer] = engine.decode([NextToken(state, lambda logits, token=token: token)])
        assert answer == token
        feed(engine, state, [])
        naive.feed([token])
        assert (engine.logits(state) - naive.next_logits()).abs().max() < 1e-4


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.thorough(but=14)
def test_committed_state_is_a_function_of_the_tokens(on: str, how: dict[str, Any]):
    """All laws over random operations."""
    engine = engine_of(on, **({"heads": leaning()} if on == "llama" else {}), **how)
    assert any(engine.layout.headwise)

    @settings(max_examples=examples(15))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations: list[tuple]) -> None:
        play(engine, operations, close(on) if on in POLICIES else 1e-5, rigged=ByHeadRig)

    law()
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("how", [*KEPT, {"store_bits": 4, "decode_copy": True}])
@pytest.mark.thorough(but=14)
def test_with_a_floor_of_all_it_is_the_equal_heads(on: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "LEAST_OF_HEAD", 1.0)
    if "exact" in how:  # all: heads that share a budget share what is fetched, too
        how = how | {"exact": replace(how["exact"], units=200)}
    bits = check_store_bits(how.get("store_bits", 16))
    equal, shared = engine_of(on, by_head=False, **how), engine_of(on, **how)
    assert equal.pool.bytes_resident == shared.pool.bytes_resident
    ids = ids_of(7 * CHUNK + 3)
    found = []
    for engine in (equal, shared):
        states = [engine.open(0), engine.open(1)]
        for state, count in zip(states, (len(ids), 4 * CHUNK + 1), strict=True):
            feed(engine, state, ids[:count])
        logits: list[Tensor] = []

        def choose(row: Tensor, logits: list[Tensor] = logits) -> int:
            logits.append(row.clone())
            return 7

        for _ in range(3):
            engine.decode([NextToken(state, choose) for state in states])
        found.append((engine.export(states[0]), torch.stack(logits)))
    (before, logits), (after, others) = found
    for name, tensor in before.items():
        found = after[name]
        if tensor.dtype == torch.uint8 and bits[name.endswith("values")] < 16:
            assert (found == tensor).float().mean() > 0.98, "sums in another order may fall on another step"
            continue
        if tensor.dtype == torch.uint8:  # exact K or V, as bytes beside codes of the other
            found, tensor = found.view(torch.float32), tensor.view(torch.float32)
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(others, logits, rtol=1e-4, atol=1e-4)


SCORED_AGAIN = ["h2o", "snapkv", "keydiff", "scissorhands"]


@pytest.mark.parametrize("policy", SCORED_AGAIN)
@pytest.mark.parametrize("how", [{}, {"store_bits": 4}, {"store_bits": 2, "exact": FEW}])
def test_the_laws_hold_where_kept_units_are_scored_again(policy: str, how: dict[str, Any]):
    knobs: dict[str, Any] = {"h2o": {"recent": 0.2}, "snapkv": {"window": 4}}.get(policy, {})
    engine = build(policy, units=UNITS, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS, allocation=SHARES,
                   by_head=True, **knobs, **how)

    @settings(max_examples=examples(8))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations: list[tuple]) -> None:
        play(engine, operations, rigged=ByHeadRig)

    law()


@pytest.mark.parametrize("policy", SCORED_AGAIN)
@pytest.mark.parametrize("on", ["llama", "gpt-oss", "gemma2"])
@pytest.mark.parametrize("how", [{}, {"store_bits": 8}])
def test_with_a_floor_of_all_heads_are_scored_as_together(policy: str, on: str, how: dict[str, Any],
                                                          monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "LEAST_OF_HEAD", 1.0)
    found = []
    for by_head in (False, True):
        engine = build(policy, on=model(on), units=UNITS, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS,
                       by_head=by_head, **how)
        state = engine.open(0)
        feed(engine, state, ids_of(7 * CHUNK + 3))
        found.append([(state.store.positions(layer).clone(), state.store.scores(layer).clone())
                      for layer in range(engine.shape.layers)])
    for (places, scores), (others, other_scores) in zip(*found, strict=True):
        assert torch.equal(places, others)
        torch.testing.assert_close(scores, other_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"store_bits": 4}])
def test_each_head_is_scored_by_what_it_has(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Its keys, its scores and its positions, though the heads have different numbers."""
    engine = build("keydiff", units=UNITS, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS, by_head=True, **how)
    state, score, seen, uneven = engine.open(0), type(engine.policy).score, list[tuple[int, int, Tensor]](), 0

    def watched(policy: Policy, chunk: Chunk) -> Tensor:
        scores = score(policy, chunk)
        assert chunk.keys.shape[:2] == scores.shape and torch.equal(chunk.keys[:, -CHUNK:], chunk.k)
        seen.append((chunk.layer, chunk.scores.shape[-1], chunk.scores[0, 0].clone()))
        return scores

    monkeypatch.setattr(type(engine.policy), "score", watched)
    for chunk in range(9):
        held = [list(counts) for counts in state.store.of_heads]
        scores = [state.store.scores(layer)[0].clone() for layer in range(engine.shape.layers)]
        uneven += any(len(set(counts)) > 1 for counts in held)
        seen.clear()
        feed(engine, state, ids_of(CHUNK, seed=chunk))
        assert [(layer, count) for layer, count, _ in seen] == [
            (layer, count) for layer, counts in enumerate(held) for count in counts]
        for (layer, count, before), head in zip(seen, [0, 1] * engine.shape.layers, strict=True):
            assert torch.equal(before, scores[layer][head, :count])
    assert uneven > 2


def replied(engine: Engine, count: int = 5 * CHUNK + 3) -> tuple[EngineState, list[Tensor]]:
    state = engine.open(0)
    feed(engine, state, ids_of(count))
    return state, reply(engine, [state], 2 * CHUNK)[0]


@pytest.mark.parametrize("on", KINDS)
def test_with_exact_units_in_the_host_memory_it_commits_what_exact_units_commit(on: str):
    """Bit for bit, though the heads differ; and where all units are fetched, replies are theirs."""
    heads = {"heads": leaning()} if on == "llama" else {}
    plain = engine_of(on, **heads)
    exact = engine_of(on, **heads, store_bits=1 if on != "qwen3.5" else 2, exact=HostTier(units=200, residual=3))
    (_, expected), (after, found) = replied(plain), replied(exact)
    if on == "llama":
        assert any(len(set(counts)) > 1 for counts in after.store.of_heads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    tokens = [[int(row.argmax()) for row in rows] for rows in (found, expected)]
    assert tokens[0] == tokens[1]
    committed = []
    for engine in (plain, exact):  # read as a prompt, as a reply is read again from codes and what was fetched
        state = engine.open(1)
        for count in (3 * CHUNK + 5, 2 * CHUNK, CHUNK + 3):
            feed(engine, state, ids_of(count, seed=count))
        committed.append({name: tensor for name, tensor in engine.export(state).items()
                          if not name.endswith("key_mean")})
    assert_same(*committed)


@pytest.mark.parametrize("on", KINDS)
def test_without_fetched_units_it_is_a_memory_of_codes_by_head(on: str):
    heads = {"heads": leaning()} if on == "llama" else {}
    _, found = replied(engine_of(on, **heads, store_bits=4, exact=HostTier(units=0, residual=0, prefill="codes")))
    for copy in (False, True):
        _, expected = replied(engine_of(on, **heads, store_bits=4, decode_copy=copy))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("bits", [4, (16, 2)])
def test_codes_of_each_head_are_those_of_its_units(bits: Any, monkeypatch: pytest.MonkeyPatch):
    """Coded once, as they arrived, and moved as they are, though each head moves them elsewhere."""
    engine = engine_of(heads=leaning(), store_bits=bits)
    state = engine.open(0)
    seen, came = arrivals(state, monkeypatch), dict[tuple[int, int], tuple[Tensor, Tensor]]()
    bits_of = check_store_bits(bits)
    for chunk in range(9):
        feed(engine, state, ids_of(CHUNK, seed=chunk))
        for layer, (keys, values) in seen.items():
            means = engine.pool.layers[layer].means[0, 0][:, None]
            coded = [part.contiguous().view(torch.uint8) if of == 16 else quantise_units(part, of, mean)
                     for part, of, mean in zip((keys, values), bits_of, (means, None), strict=True)]
            for offset in range(CHUNK):
                came[layer, chunk * CHUNK + offset] = tuple(part[:, offset] for part in coded)
    uneven = 0
    for layer in range(engine.shape.layers):
        heads = kept(state, layer)
        uneven += len(set(map(len, heads))) > 1
        for part, rows in enumerate(state.store.rows(layer, state.store.counts[layer])):
            for head, places in enumerate(heads):
                for rank, place in enumerate(places):
                    assert torch.equal(rows[head, rank], came[layer, place][part][head]), (layer, head, rank)
    assert uneven


@pytest.mark.parametrize("how", KEPT[1:])
@pytest.mark.parametrize("focus", [[], QUERY])
def test_saved_units_come_back_in_another_slot_and_answer_alike(how: dict[str, Any], focus: list[int]):
    engine = engine_of(heads=leaning(), **how)
    state = engine.open(0)
    feed(engine, state, ids_of(5 * CHUNK))
    if focus:
        engine.focus(state, focus)
    feed(engine, state, ids_of(2 * CHUNK + 3, seed=2))
    whole = engine.export(state)
    again = engine.load(whole, 3)
    assert_same(engine.export(again), whole)
    if "exact" not in how or how["exact"].saves != "codes":  # else what is fetched was rounded
        assert all(map(torch.equal, *(reply(engine, [each], CHUNK)[0] for each in (state, again))))
    fork = engine.fork(again, 1)
    feed(engine, again, ids_of(3 * CHUNK, seed=8))
    feed(engine, fork, ids_of(3 * CHUNK, seed=8))
    assert_same(engine.export(fork), engine.export(again))


@pytest.mark.parametrize("how", [*KEPT, {"store_bits": 4, "decode_copy": True}])
def test_contexts_that_decode_together_give_what_each_gives_alone(how: dict[str, Any]):
    engine = engine_of(heads=leaning(), **how)
    states = []
    for slot, count in enumerate((5 * CHUNK, 9 * CHUNK + 2, 3)):
        states.append(engine.open(slot))
        feed(engine, states[-1], ids_of(count, seed=slot))
    alone = []
    for state in states:
        fork = engine.fork(state, 3)
        feed(engine, fork, [9])
        alone.append(engine.logits(fork).clone())
    together: list[Tensor] = []

    def choose(row: Tensor) -> int:
        together.append(row.clone())
        return 1

    for state in states:
        engine.accept(state, [9])
    engine.decode([NextToken(state, choose) for state in states])
    for one, other in zip(together, alone, strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.parametrize("on", ["llama", "gemma3"])
@pytest.mark.parametrize("how", [{}, {"store_bits": 8}, {"store_bits": 2, "exact": FEW}])
def test_a_focus_and_a_thinned_copy_take_their_units_from_all_heads(on: str, how: dict[str, Any]):
    engine = engine_of(on, **({"heads": leaning()} if on == "llama" else {}), **how)
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK))
    engine.focus(state, QUERY)
    feed(engine, state, ids_of(CHUNK, seed=4))
    other = engine.open(1)
    feed(engine, other, ids_of(6 * CHUNK))
    engine.focus(other, ids_of(2, seed=1))
    engine.focus(other, QUERY)
    whole, copy = engine.export(state), engine.fork(state, 2)
    assert_same(engine.export(engine.load(whole, 3)), whole)
    engine.thin(copy, 0.6)
    assert_same(engine.export(state), whole)
    for layer, window in enumerate(engine.shape.sliding):
        if window:
            continue
        old, new = kept(state, layer), kept(copy, layer)
        units = max(int(0.6 * engine.budgets[layer]), len(QUERY) + SINKS + STABILIZERS + 1)
        assert sum(map(len, old)) == engine.budgets[layer] * len(old) and sum(map(len, new)) == units * len(new)
        for before, after in zip(old, new, strict=True):
            assert before[:4] == after[:4] == [-4, -3, -2, -1] and set(after) <= set(before)
            assert after[4:4 + SINKS] == list(range(SINKS)) and after[-STABILIZERS:] == before[-STABILIZERS:]
        positions = state.store.positions(layer)
        for head, of_head in enumerate(old):  # K and V went with their units
            at = [of_head.index(place) for place in new[head]]
            for whole_rows, part in zip(state.store.rows(layer, positions.shape[1]),
                                        copy.store.rows(layer, copy.store.counts[layer]), strict=True):
                assert torch.equal(part[head, :len(at)], whole_rows[head, at])
    assert torch.isfinite(engine.logits(copy)).all()


@pytest.mark.parametrize("how", [{}, {"store_bits": 4}])
def test_no_head_outgrows_the_window_behind_a_thinned_memory_or_a_focus(how: dict[str, Any]):
    """Where its layer has room, but the head with most has none."""
    heads = random_heads(build("full", units=64).attachment)
    for weights in heads.fc2.parameters():
        weights.data[0] = weights.data[0] + 9  # the first head has nearly all that it may have
    units, window = 40, 64
    on = windowed(window)
    engine = build("locret", on=on, units=units, chunk_size=CHUNK, sinks=SINKS, stabilizers=STABILIZERS, by_head=True,
                   heads=heads, **how)
    [most] = set(engine.layout.most)
    assert most == window - CHUNK < 2 * units
    state = engine.open(0)
    feed(engine, state, ids_of(20 * CHUNK))
    assert most in [max(counts) for counts in state.store.of_heads]
    copy = engine.fork(state, 1)
    engine.thin(copy, 0.8)
    assert most in [max(counts) for counts in copy.store.of_heads]
    feed(engine, copy, ids_of(CHUNK, seed=2))
    engine.focus(state, QUERY)
    for counts in (*state.store.of_heads, *copy.store.of_heads):
        assert max(counts) <= most
    feed(engine, state, ids_of(3, seed=3))
    assert torch.isfinite(engine.logits(state)).all() and torch.isfinite(engine.logits(copy)).all()


@pytest.mark.parametrize("how", [{"store_bits": 4, "decode_copy": True}, {"store_bits": 4}, {
    "store_bits": 2, "exact": FEW, "decode_copy": True}])
@pytest.mark.parametrize("changed", ["focus", "thin"])
def test_what_was_read_is_read_anew_where_units_stand_elsewhere(how: dict[str, Any], changed: str):
    """Behind an answer over the same units, whose tokens were taken back."""
    engine = engine_of(heads=leaning(), **how)
    logits = []
    for asked in (True, False):
        state = engine.open(0)
        feed(engine, state, ids_of(6 * CHUNK))
        if asked:
            reply(engine, [state], 3)
            engine.truncate(state, 0)
        if changed == "focus":
            engine.focus(state, QUERY)
        else:
            engine.thin(state, 0.6)
        engine.accept(state, [7, 9])
        logits.append(engine.logits(state).clone())
    assert torch.equal(*logits)


def test_units_of_a_focus_stay_exact_in_heads_with_few_units():
    """Fewer than stay exact on the device, of which those of the focus are some."""
    found = []
    for how in ({}, {"store_bits": 2, "exact": HostTier(units=200, residual=12)}):
        engine = engine_of(heads=leaning(), **how)
        state = engine.open(0)
        feed(engine, state, ids_of(6 * CHUNK))
        engine.focus(state, QUERY)
        feed(engine, state, ids_of(3 * CHUNK + 2, seed=3))
        assert min(map(min, state.store.of_heads)) < 12 + len(QUERY)
        found.append(reply(engine, [state], 6)[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("exact", [FEW, HostTier(units=64, residual=0)])
def test_heads_that_share_fetch_together_what_the_formula_says(exact: HostTier):
    """As many as there are heads times those of one, where they attend most, whatever each head has."""
    engine = engine_of(heads=leaning(), store_bits=2, exact=exact)
    state = engine.open(0)
    feed(engine, state, ids_of(9 * CHUNK + 1))
    of_token, of_chunk = engine.pool.formula_moved()
    fetched = engine.pool.fetched
    reply(engine, [state], 4)  # of which the first token's logits take a forward of the prompt
    assert engine.pool.fetched - fetched == 3 * of_token > 0
    read = engine.pool.read
    feed(engine, state, ids_of(2 * CHUNK - 5, seed=5))
    assert engine.pool.read - read == 2 * of_chunk > 0


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("residual", [2, 8, 12])
@pytest.mark.parametrize("focus", [[], QUERY])
def test_what_is_committed_depends_on_no_restore_where_codes_are_saved(by_head: bool, residual: int, focus: list[int]):
    """More exact units than stabilizers, heads that lose more than a chunk, and a focus that takes units, too."""
    tier = HostTier(units=6, residual=residual, prefill="codes", saves="codes")
    engine = engine_of(by_head=by_head, heads=leaning(), store_bits=2, exact=tier, allocation="uniform")
    for seed in range(4):
        state, restored = engine.open(0), engine.open(1)
        for at in range(5):
            ids = ids_of(3 * CHUNK, seed=10 * seed + at)
            if at == 2:
                engine.focus(state, focus)
                engine.focus(restored, focus)
            feed(engine, state, ids)
            feed(engine, restored, ids)
            restored = engine.load(engine.export(restored), 1)
        assert_same(engine.export(restored), engine.export(state))
        for layer in range(engine.shape.layers):
            for head in kept(state, layer):
                assert head[-residual:] == list(range(state.seen - residual, state.seen))


def test_receipts_and_occupancy_count_what_each_head_keeps():
    engine = engine_of(heads=leaning())
    state = engine.open(0)
    feed(engine, state, ids_of(9 * CHUNK))
    receipts, counted = engine.receipts(state), occupancy(state, 0, None, 1)
    for layer in range(engine.shape.layers):
        for head, places in enumerate(kept(state, layer)):
            assert receipts.kept[layer, head].nonzero()[:, 0].tolist() == places
            assert counted.kept[layer][head] == [len(places)]
    assert state.peaks == [units + CHUNK for units in engine.budgets]


@pytest.mark.parametrize("harm", ["order", "gap", "future", "many", "few", "shape"])
def test_tensors_of_no_context_are_refused(harm: str):
    engine = engine_of(heads=leaning())
    state = engine.open(0)
    feed(engine, state, ids_of(9 * CHUNK))
    tensors = engine.export(state)
    positions = tensors["1.positions"]
    short = int((positions != NOWHERE).sum(1).argmin())
    if harm == "order":
        positions[short, :2] = positions[short, :2].flip(0)
    elif harm == "gap":
        positions[short, 1] = NOWHERE
    elif harm == "future":
        positions[short][positions[short] != NOWHERE] = positions[short][positions[short] != NOWHERE] + 9 * CHUNK
    elif harm == "few":
        positions[short, int((positions[short] != NOWHERE).sum()) - 1] = NOWHERE
    elif harm == "many":
        positions[short] = torch.arange(positions.shape[1])
    else:
        tensors["1.positions"] = positions[:, :-1]
    with pytest.raises(SnapshotCorrupt):
        engine.load(tensors, 1)


@pytest.mark.parametrize(("more", "said"), [
    ({"store_bits": 4, "exact": HostTier(chosen_by="last")}, "chosen_by='query'"),
    ({"policy": "tova"}, "policy 'tova' declares none"), ({"policy": "full", "units": 200}, "never evicts"),
    ({"policy": "nacl"}, "expected of .*'snapkv'")])
def test_what_cannot_share_is_refused_by_name(more: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        build(**{"policy": "locret", "by_head": True} | more)


def test_a_model_none_of_whose_layers_can_share_is_refused():
    config = CONFIGS["llama"]()
    config.num_key_value_heads = 1
    with pytest.raises(ConfigError, match="each layer of this model has one KV head or a sliding window"):
        build("h2o", on=make("", config=config), by_head=True)


@pytest.mark.parametrize("on", ["llama4", "inkling", "deepseek-v3.2"])
def test_models_that_use_ranks_beside_rope_are_refused(on: str):
    with pytest.raises(ConfigError, match="use ranks beside RoPE"):
        engine_of(on)


@pytest.mark.parametrize("seed", range(6))
def test_select_by_threshold_is_the_best_of_all_heads_with_a_floor_and_a_most(seed: int):
    noise = torch.Generator().manual_seed(seed)
    scores = [torch.randint(-3, 4, (length,), generator=noise).float() for length in (9, 14, 11)]
    units, least, most, sinks, stabilizers = 18, 4, 9, 1, 2
    found = [ranks.tolist() for ranks in reference.select_by_threshold(scores, units, least, most, sinks, stabilizers)]
    ranked = []
    for of_head in scores:
        always = {*range(sinks), *range(len(of_head) - stabilizers, len(of_head))}
        ranked.append(sorted(range(len(of_head)), key=lambda i: (i not in always, -float(of_head[i]), -i))[:most])
    sure = {(head, i) for head, order in enumerate(ranked) for i in order[:least]}
    rest = sorted(((head, i) for head, order in enumerate(ranked) for i in order[least:]),
                  key=lambda at: (-float(scores[at[0]][at[1]]), -at[1], at[0]))
    sure |= set(rest[:units - len(sure)])
    assert found == [sorted(i for of, i in sure if of == head) for head in range(3)]
    assert sum(map(len, found)) == units
