"""KV heads that share the budget of their layer: against the naive engine, the laws, and equal heads as a special case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from locret_stream.cache import NOWHERE, HeadwiseStore
from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine, EngineState, NextToken, layout
from locret_stream.engine.occupancy import occupancy
from locret_stream.errors import ConfigError, SnapshotCorrupt
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import reference
from locret_stream.models import attach
from locret_stream.policies import Chunk, Policy
from tests.engine.naive import NaiveByHead
from tests.engine.test_laws import CHUNK, SHARES, SINKS, STABILIZERS, UNITS, Rig, operation, play
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


def engine_of(on: str = "llama", *, by_head: bool = True, **more: Any) -> Engine:
    if on == "llama":
        return build("locret", on=model(on), by_head=by_head, **{
            "units": UNITS, "chunk_size": CHUNK, "sinks": SINKS, "stabilizers": STABILIZERS,
            "allocation": SHARES} | more)
    budget = Budget(units=UNITS, sinks=SINKS, stabilizers=STABILIZERS, allocation="uniform", by_head=by_head)
    return Engine(attach(model(on)), StreamConfig(budget=budget, chunk_size=CHUNK, policy="leaning"), Leaning(), 4)


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
            ends = [first + count + CHUNK for first, count in zip(store.firsts(layer), counts, strict=True)]
            assert all(end <= first for end, first in zip(ends, store.firsts(layer)[1:], strict=False))
            assert ends[-1] <= len(counts) * (units + CHUNK)


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
def test_committed_state_is_a_function_of_the_tokens(on: str):
    """All laws of exact units over random operations."""
    engine = engine_of(on, **({"heads": leaning()} if on == "llama" else {}))
    assert any(engine.layout.headwise)

    @settings(max_examples=examples(15))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations: list[tuple]) -> None:
        play(engine, operations, rigged=ByHeadRig)

    law()
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()


@pytest.mark.parametrize("on", KINDS)
def test_with_a_floor_of_all_it_is_the_equal_heads(on: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "LEAST_OF_HEAD", 1.0)
    equal, shared = engine_of(on, by_head=False), engine_of(on)
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
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(others, logits, rtol=1e-4, atol=1e-4)


def test_contexts_that_decode_together_give_what_each_gives_alone():
    engine = engine_of(heads=leaning())
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
def test_a_focus_and_a_thinned_copy_take_their_units_from_all_heads(on: str):
    engine = engine_of(on, **({"heads": leaning()} if on == "llama" else {}))
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
    ({"store_bits": 4}, "store_bits=16"), ({"policy": "h2o"}, "scores units again"),
    ({"policy": "full", "units": 200}, "never evicts"), ({"policy": "sirllm"}, "for all heads together")])
def test_what_cannot_share_is_refused_by_name(more: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        build(**{"policy": "locret", "by_head": True} | more)


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
