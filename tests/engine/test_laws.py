"""The laws of the memory as properties of the engine: one matrix over every policy. Each law's test bears its name."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.config import Budget, ModelShape, StreamConfig
from locret_stream.engine import Engine, EngineState, NextToken
from locret_stream.engine import state as engine_module
from locret_stream.engine.occupancy import occupancy
from locret_stream.errors import BudgetExceeded, ConfigError, ContextClosed, SnapshotCorrupt
from locret_stream.models import attach
from locret_stream.policies import Chunk, Policy
from tests.kit import (
    DEVICE,
    EVICTING,
    POLICIES,
    Boom,
    assert_same,
    build,
    examples,
    failing_in_layer,
    feed,
    ids_of,
    logits_at_each,
    model,
    random_heads,
    stock_logits,
)

CHUNK, UNITS = 8, 20
SHARES = (0.8, 1.0, 1.2)  # b_l = 16, 20, 24
SINKS, STABILIZERS = 2, 3
every_policy = pytest.mark.parametrize("policy", POLICIES)
of_exact_units = pytest.mark.skipif(os.environ.get("LOCRET_TEST_STORE_BITS", "16") != "16",
                                    reason="test_store_bits.py has this law for codes")
every_evicting = pytest.mark.parametrize("policy", EVICTING)


def engine_of(policy: str, on: str = "llama") -> Engine:
    """Budgets that overflow after a few chunks; `full` gets a budget for the whole test."""
    full = policy == "full"
    return build(policy, on=model(on), units=200 if full else UNITS, chunk_size=CHUNK, sinks=SINKS,
                 stabilizers=STABILIZERS, allocation="uniform" if full else SHARES, slots=4)


def committed_from_scratch(engine: Engine, ids: list[int], slot: int) -> dict[str, torch.Tensor]:
    """The reference: a context that gets the same tokens at once, and does nothing else."""
    state = engine.open(slot)
    feed(engine, state, ids)
    return engine.export(state)


# -- random operations ------------------------------------------------------------------------------------------------

operation = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 21), st.integers(0, 2**16)),
    st.tuples(st.just("decode"), st.integers(1, 6)),
    st.tuples(st.just("ask")),
    st.tuples(st.just("truncate"), st.integers(0, CHUNK - 1)),
    st.tuples(st.just("fork"), st.integers(1, 12)),
    st.tuples(st.just("become_fork")),
    st.tuples(st.just("neighbour"), st.integers(1, 12)),
    st.tuples(st.just("fail_commit"), st.sampled_from([0, 1, 2, "score", "keep"])),
    st.tuples(st.just("fail_logits"), st.sampled_from([0, 1, 2, "head"])),
    st.tuples(st.just("reload")),
)


@dataclass
class Rig:
    """One context under test, the tokens it should hold, and a neighbour in the same pool."""

    engine: Engine
    state: EngineState = field(init=False)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state, self.spare = self.engine.open(0), 2
        self.other = self.engine.open(1)
        self.fresh = iter(ids_of(4_000, seed=9))

    def run(self, name: str, *args: object) -> None:
        getattr(self, name)(*args)
        self.check()

    def check(self) -> None:
        """What must hold between any two operations: cap, order, protection, tokens."""
        engine, state = self.engine, self.state
        assert state.position == len(self.tokens) and state.seen % CHUNK == 0 and len(state.pending) < CHUNK
        assert state.pending == self.tokens[state.seen:]
        assert state.history == self.tokens[-engine_module.HISTORY:]
        for layer, units in enumerate(engine.budgets):
            count, positions = state.store.counts[layer], state.store.positions(layer).cpu()
            assert count <= units and count + len(state.pending) <= units + engine.chunk_size
            assert count == min(state.seen, units)
            assert (positions.diff(dim=1) > 0).all()
            if count and not engine.shape.sliding[layer]:
                sinks, stabilizers = engine.layout.protection[layer]
                assert (positions[:, :min(sinks, count)] == torch.arange(min(sinks, count))).all()
                last = min(stabilizers, count)
                assert (positions[:, count - last:] == torch.arange(state.seen - last, state.seen)).all()

    def feed(self, count: int, seed: int) -> None:
        """`count` tokens, split anywhere."""
        ids, cut = [next(self.fresh) for _ in range(count)], random.Random(seed)
        while ids:
            size = cut.randint(1, len(ids))
            feed(self.engine, self.state, ids[:size])
            self.tokens += ids[:size]
            del ids[:size]

    def decode(self, steps: int) -> None:
        """Greedy, by hand or as generations do, with the next step's forward run ahead or not."""
        for step in range(steps):
            if not self.tokens or step % 3 == 0:
                token = int(self.engine.logits(self.state).argmax()) if self.tokens else 1
                feed(self.engine, self.state, [token])
            else:
                [token] = self.engine.decode([NextToken(self.state, lambda logits: int(logits.argmax()))])
                if step % 3 == 1:
                    self.engine.run_ahead()
                feed(self.engine, self.state, [])
            self.tokens.append(token)

    def ask(self) -> None:
        if not self.tokens:
            with pytest.raises(ConfigError):
                self.engine.logits(self.state)
            return
        assert torch.equal(self.engine.logits(self.state), self.engine.logits(self.state))

    def truncate(self, drop: int) -> None:
        drop = min(drop, len(self.state.pending))
        self.engine.truncate(self.state, len(self.state.pending) - drop)
        self.tokens = self.tokens[:len(self.tokens) - drop]

    def fork(self, count: int) -> None:
        """A fork goes on alone; the context stays as it is."""
        before = self.engine.export(self.state)
        fork = self.engine.fork(self.state, self.spare)
        assert_same(self.engine.export(fork), before)
        if self.tokens:
            assert torch.equal(self.engine.logits(fork), self.engine.logits(self.state))
        logits_at_each(self.engine, fork, [next(self.fresh) for _ in range(count)])
        assert_same(self.engine.export(self.state), before)

    def become_fork(self) -> None:
        """Go on in the copy, in the other slot."""
        fork = self.engine.fork(self.state, self.spare)
        self.spare = self.state.store.slot
        self.state = fork

    def neighbour(self, count: int) -> None:
        logits_at_each(self.engine, self.other, [next(self.fresh) for _ in range(count)])

    def fail_commit(self, where: int | str) -> None:
        """A commit fails; the tokens stay accepted and the next try succeeds."""
        engine, state = self.engine, self.state
        ids = [next(self.fresh) for _ in range(CHUNK - len(state.pending))]
        engine.accept(state, ids)
        self.tokens += ids
        before = engine.export(state)
        if where == "score" and engine.shape.sliding.count(None) < 2:
            where = "keep"  # sliding layers ask no policy
        with pytest.raises(Boom):
            if where == "score":
                with fault_in(engine.policy, "score", after=1):
                    engine.commit(state)
            elif where == "keep":
                with fault_in(engine, "_keep", after=1):
                    engine.commit(state)
            else:
                with failing_in_layer(engine, where):
                    engine.commit(state)
        assert_same(engine.export(state), before)
        engine.commit(state)

    def fail_logits(self, where: int | str) -> None:
        """Asking fails; the same question then gets the answer that an untouched copy gives."""
        engine, state = self.engine, self.state
        if not state.pending:
            return
        fork, before, provisional = engine.fork(state, self.spare), engine.export(state), state.provisional
        if provisional == len(state.pending) and (where != "head" or state.tail_logits is not None):
            return  # nothing to run
        with pytest.raises(Boom):
            if where == "head":
                with fault_in(engine.attachment, "logits"):
                    engine.logits(state)
            else:
                with failing_in_layer(engine, where):
                    engine.logits(state)
        assert_same(engine.export(state), before)
        assert torch.equal(engine.logits(state), engine.logits(fork))

    def reload(self) -> None:
        """Export the context, and load it into another slot."""
        self.state, self.spare = self.engine.load(self.engine.export(self.state), self.spare), self.state.store.slot


class fault_in:
    """Calls of `owner.name` raise Boom from the (after + 1)-th on."""

    def __init__(self, owner: object, name: str, after: int = 0):
        self.owner, self.name, self.left = owner, name, after

    def __enter__(self) -> None:
        real = getattr(self.owner, self.name)

        def call(*args, **kwargs):
            if self.left == 0:
                raise Boom(self.name)
            self.left -= 1
            return real(*args, **kwargs)

        setattr(self.owner, self.name, call)

    def __exit__(self, *error: object) -> None:
        delattr(self.owner, self.name)


def play(engine: Engine, operations: list[tuple], close: float = 1e-5, rigged: type[Rig] = Rig) -> None:
    rig = rigged(engine)
    for name, *args in operations:
        room = engine.room(rig.state)
        if room is not None and room < 2 * CHUNK + 22:
            break
        rig.run(name, *args)
    scratch = engine.open(3)
    feed(engine, scratch, rig.tokens)
    assert_same(engine.export(rig.state), engine.export(scratch))
    if engine.config.exact is not None:  # a reply holds what was fetched for it, until ids are accepted that are none
        for state in (rig.state, scratch):
            feed(engine, state, [5])
    if rig.tokens:
        assert (engine.logits(rig.state) - engine.logits(scratch)).abs().max() <= close


@every_policy
@pytest.mark.thorough(but=3)
def test_committed_state_is_a_function_of_the_tokens(policy: str):
    """Laws 1, 2, 4, 7, 9 and 10 over random operations: whatever was asked, forked, undone, or failed, and whoever
    else was served, equal tokens give bit-equal exports, and the invariants of `Rig.check` hold after every step."""
    engine = engine_of(policy)

    @settings(max_examples=examples(30))
    @given(st.lists(operation, min_size=6, max_size=14))
    def law(operations):
        play(engine, operations)

    law()


@pytest.mark.parametrize(("on", "policy"), [("gemma3", "locret"), ("gpt-oss", "h2o"), ("smollm3", "keydiff"),
                                            ("mistral-sliding", "sirllm"), ("gemma2", "sirllm")])
@pytest.mark.thorough(but=2)
def test_committed_state_is_a_function_of_the_tokens_on_other_architectures(on: str, policy: str):
    """The same with sliding layers, softcaps, learned sink logits and layers without RoPE."""
    engine = engine_of(policy, on)

    @settings(max_examples=examples(12))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations):
        play(engine, operations)

    law()


class Toy(Policy):
    """Uses all that a policy may declare: planes that travel with their units, and tensors of the context."""

    name = "toy"
    stateful = True
    planes = 3

    def begin(self, shape: ModelShape) -> dict[str, torch.Tensor]:
        return {"commits": torch.zeros(shape.layers, dtype=torch.int64), "sum": torch.zeros(shape.layers)}

    def score(self, chunk: Chunk) -> torch.Tensor:
        heads = chunk.k.shape[0]
        commits = chunk.state["commits"].clone()
        commits[chunk.layer] += 1
        total = chunk.state["sum"].clone()
        total[chunk.layer] += chunk.k.sum().cpu()
        chunk.state["commits"], chunk.state["sum"] = commits, total
        position = torch.arange(chunk.start, chunk.start + chunk.k.shape[1], device=DEVICE).float().expand(heads, -1)
        old = torch.cat([chunk.scores[2], position], 1)
        age = torch.cat([chunk.scores[1] + 1, torch.zeros_like(position)], 1)
        score = torch.sin(old * (1 + torch.arange(heads, device=DEVICE))[:, None] + total[chunk.layer]) - 0.1 * age
        return torch.stack([score, age, old])


def toy_engine() -> Engine:
    config = StreamConfig(budget=Budget(units=UNITS, sinks=SINKS, stabilizers=STABILIZERS, allocation=SHARES),
                          chunk_size=CHUNK, policy="toy")
    return Engine(attach(model()), config, Toy(), 4)


def test_law_6_planes_and_state_of_a_policy_move_with_the_units():
    """Over random operations they are forked, saved and restored with their units, and survive failures."""
    engine = toy_engine()

    @settings(max_examples=examples(20))
    @given(st.lists(operation, min_size=6, max_size=14))
    def law(operations):
        play(engine, operations)

    law()
    state = engine.open(0)
    feed(engine, state, ids_of(100))
    assert state.policy_state["commits"].tolist() == [12] * 3
    for layer in range(3):
        positions, (_, age, old) = state.store.positions(layer), state.store.scores(layer)
        assert torch.equal(old, positions.float())
        assert torch.equal(age, (11 - positions // CHUNK).float())
    assert {"policy.commits", "policy.sum"} <= engine.export(state).keys()
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()


# -- one law at a time ------------------------------------------------------------------------------------------------


@of_exact_units
@every_evicting
@pytest.mark.thorough(but=3)
def test_law_1_cap_during_decode_of_five_chunks(policy: str, monkeypatch):
    """No row behind b_l + chunk_size is ever written, addresses never move, and all bytes follow from the formula."""
    engine = engine_of(policy)
    pool, highest = engine.pool, [0] * engine.shape.layers
    addresses = [[t.data_ptr() for t in layer.tensors] for layer in pool.layers]
    state = engine.open(0)
    write = type(state.store).write

    def watched(store, layer, start, keys, *rest):
        highest[layer] = max(highest[layer], start + keys.shape[2])
        write(store, layer, start, keys, *rest)

    def watched_each(buffers, slots, ranks, *rest):
        layer = next(n for n, other in enumerate(pool.layers) if other is buffers)
        highest[layer] = max(highest[layer], int(ranks.max()) + 1)
        write_each(buffers, slots, ranks, *rest)

    write_each = type(pool.layers[0]).write_each
    monkeypatch.setattr(type(state.store), "write", watched)
    monkeypatch.setattr(type(pool.layers[0]), "write_each", watched_each)
    feed(engine, state, ids_of(45))
    for _ in range(5 * CHUNK):
        feed(engine, state, [int(engine.logits(state).argmax())])
    assert highest == state.peaks == [units + CHUNK for units in engine.budgets]
    assert sum(engine.budgets) == UNITS * engine.shape.layers
    assert [[t.data_ptr() for t in layer.tensors] for layer in pool.layers] == addresses
    units_bytes = sum(t.numel() * t.element_size() for layer in pool.layers for t in layer.tensors)
    scratch = pool.scratch.numel() * pool.scratch.element_size()
    assert pool.bytes_resident == pool.formula_bytes() == units_bytes + scratch
    assert [layer.keys.shape[2] for layer in pool.layers] == [units + CHUNK for units in engine.budgets]


@every_policy
@pytest.mark.thorough(but=2)
def test_law_2_grid_every_split_commits_the_same(policy: str):
    engine = engine_of(policy)
    ids = ids_of(90, seed=2)
    expected = committed_from_scratch(engine, ids, 0)
    for size in (1, 3, 7, 8, 9, 31):
        state = engine.open(1)
        for at in range(0, len(ids), size):
            feed(engine, state, ids[at:at + size])
            assert state.seen == min(at + size, len(ids)) // CHUNK * CHUNK
        assert_same(engine.export(state), expected)
    state = engine.open(2)
    logits_at_each(engine, state, ids)  # the same, decoded: every token was provisional before
    assert_same(engine.export(state), expected)


@every_policy
@pytest.mark.thorough(but=3)
def test_law_2_provisional_logits_agree_however_they_were_asked_for(policy: str):
    engine = engine_of(policy)
    ids = ids_of(71, seed=3)
    one, other = engine.open(0), engine.open(1)
    singles = logits_at_each(engine, one, ids)
    for at in range(0, len(ids), 5):
        feed(engine, other, ids[at:at + 5])
        assert (engine.logits(other) - singles[min(at + 5, len(ids)) - 1]).abs().max() <= 1e-5


@every_policy
@pytest.mark.parametrize("kept", [0, 1, 4, 6])
@pytest.mark.thorough(but=10)
def test_law_2_what_was_provisional_and_taken_back_is_never_answered_from(policy: str, kept: int):
    """Ask at 7 pending tokens, take some back, go on with others: the answer is that of the tokens that are left."""
    engine = engine_of(policy)
    ids, others = ids_of(39, seed=3), ids_of(6, seed=4)
    state = engine.open(0)
    feed(engine, state, ids)
    engine.logits(state)
    engine.truncate(state, kept)
    for more in range(7 - kept):
        plain = engine.open(1)
        feed(engine, plain, ids[:32 + kept] + others[:more])
        assert (engine.logits(state) - engine.logits(plain)).abs().max() <= 1e-5
        feed(engine, state, others[more:more + 1])


@of_exact_units
@every_policy
@pytest.mark.thorough(but=3)
def test_law_3_exact_while_it_fits(policy: str):
    engine = engine_of(policy)
    ids = ids_of(min(engine.budgets) if policy != "full" else 60, seed=4)
    assert (logits_at_each(engine, engine.open(0), ids) - stock_logits(model(), ids)).abs().max() <= 1e-5
    if policy != "full":  # and really not after that
        ids = ids_of(60, seed=4)
        assert (logits_at_each(engine, engine.open(0), ids) - stock_logits(model(), ids)).abs().max() > 1e-2


@every_policy
@pytest.mark.thorough(but=3)
def test_law_4_time_order(policy: str):
    """Positions rise within every head, and each unit is the one that was committed at its position."""
    engine = engine_of(policy)
    ids = ids_of(17 * CHUNK, seed=5)
    state = engine.open(0)
    original: list[dict[int, torch.Tensor]] = [{} for _ in engine.budgets]
    for at in range(0, len(ids), CHUNK):
        feed(engine, state, ids[at:at + CHUNK])
        for layer in range(engine.shape.layers):
            positions, values = state.store.positions(layer), state.store.values(layer, state.store.counts[layer])[0]
            assert (positions.diff(dim=1) > 0).all() and int(positions.max()) == state.seen - 1
            for head in range(engine.shape.units[0].kv_heads):
                for rank, position in enumerate(positions[head].tolist()):
                    kept = original[layer].setdefault((head, position), values[head, rank].clone())
                    assert torch.equal(kept, values[head, rank])


@of_exact_units
@every_evicting
@pytest.mark.thorough(but=3)
def test_law_5_no_drift(policy: str):
    """Over 40 commits a kept key stays, bit for bit, as its forward made it; stored rotated keys are one rotation of it
    at its rank."""
    engine = engine_of(policy)
    ids = ids_of(40 * CHUNK, seed=6)
    state = engine.open(0)
    arrived: dict[tuple[int, int, int], torch.Tensor] = {}
    for at in range(0, len(ids), CHUNK):
        feed(engine, state, ids[at:at + CHUNK])
        for layer, count in enumerate(state.store.counts):
            keys = state.store.keys(layer, count)
            turned = keys if engine.layout.on_load[layer] else engine.layout.tables.rotate(layer, keys, 0)
            assert torch.equal(state.store.rotated(layer, count), turned)
            for head in range(engine.shape.units[0].kv_heads):
                for rank, position in enumerate(state.store.positions(layer)[head].tolist()):
                    key = arrived.setdefault((layer, head, position), keys[0, head, rank].clone())
                    assert torch.equal(key, keys[0, head, rank])


@every_policy
@pytest.mark.thorough(but=3)
def test_law_6_state_moves_with_the_units(policy: str):
    """A context loaded into another engine goes on with the logits, evictions and scores of the exported one."""
    engine, other = engine_of(policy), engine_of(policy)
    state = engine.open(0)
    feed(engine, state, ids_of(61, seed=7))
    exported = engine.export(state)
    loaded = other.load({name: tensor.clone() for name, tensor in exported.items()}, 2)
    assert_same(other.export(loaded), exported)
    more = ids_of(50, seed=8)
    assert torch.equal(logits_at_each(engine, state, more), logits_at_each(other, loaded, more))
    assert_same(other.export(loaded), engine.export(state))


@every_policy
def test_law_6_an_export_is_a_copy(policy: str):
    engine = engine_of(policy)
    state = engine.open(0)
    feed(engine, state, ids_of(30))
    exported = engine.export(state)
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    loaded = engine.load(exported, 1)
    feed(engine, state, ids_of(40, seed=1))
    feed(engine, loaded, ids_of(40, seed=2))
    assert_same(exported, kept)


@every_evicting
@pytest.mark.parametrize(("sinks", "stabilizers"), [(0, 0), (5, 0), (0, 7), (6, 9)])
@pytest.mark.thorough(but=9)
def test_law_7_protection_counts_inside_the_budget(policy: str, sinks: int, stabilizers: int):
    engine = build(policy, units=16, chunk_size=CHUNK, sinks=sinks, stabilizers=stabilizers)
    state = engine.open(0)
    for number in range(9):
        feed(engine, state, ids_of(CHUNK, seed=number))
        for layer, count in enumerate(state.store.counts):
            assert count == min(state.seen, 16)
            for positions in state.store.positions(layer).tolist():
                assert positions[:sinks] == list(range(sinks))
                last = min(stabilizers, count)
                assert positions[count - last:] == list(range(state.seen - last, state.seen))
    if policy == "random" and not sinks:  # 0 means 0: nothing is protected, so some head has lost its ends
        firsts = [int(state.store.positions(layer)[:, 0].min()) for layer in range(3)]
        lasts = [int(state.store.positions(layer)[:, -1].min()) for layer in range(3)]
        assert max(firsts) > 0 and (stabilizers or min(lasts) < state.seen - 1)


def test_law_8_a_total_order():
    """Equal scores: the newest stay, whatever the order in which tokens arrived."""
    engine = build("streaming_llm", units=16, chunk_size=CHUNK, sinks=0, stabilizers=0)
    state = engine.open(0)
    feed(engine, state, [7] * 50)
    assert all(head == list(range(32, 48)) for layer in range(3) for head in state.store.positions(layer).tolist())


@every_policy
@pytest.mark.thorough(but=3)
def test_law_9_whole_or_not_at_all(policy: str):
    """A fault in any layer of a commit or an answer leaves the export bit-identical and the next logits equal."""
    engine = engine_of(policy)
    state = engine.open(0)
    feed(engine, state, ids_of(37, seed=1))
    expected = engine.logits(engine.fork(state, 1))
    before = engine.export(state)
    for layer in range(engine.shape.layers):
        with failing_in_layer(engine, layer), pytest.raises(Boom):
            engine.logits(state)
        assert_same(engine.export(state), before)
    assert torch.equal(engine.logits(state), expected)
    engine.accept(state, ids_of(3, seed=2))
    for layer in range(engine.shape.layers):
        with failing_in_layer(engine, layer), pytest.raises(Boom):
            engine.commit(state)
    engine.truncate(state, 5)
    assert_same(engine.export(state), before)
    assert (engine.logits(state) - expected).abs().max() <= 1e-5
    feed(engine, state, ids_of(30, seed=3))
    assert_same(engine.export(state), committed_from_scratch(engine, ids_of(37, seed=1) + ids_of(30, seed=3), 2))


def test_law_9_a_fault_while_units_move_is_never_silent(monkeypatch):
    """After a fault inside the compaction, as of a broken device, the context refuses every call."""
    engine = engine_of("locret")
    state, neighbour = engine.open(0), engine.open(1)
    feed(engine, state, ids_of(40))
    feed(engine, neighbour, ids_of(40))
    kept = engine.export(neighbour)
    real, calls = type(state.store).commit, []

    def commit(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Boom("compaction")
        return real(*args)

    engine.accept(state, ids_of(8))
    monkeypatch.setattr(type(state.store), "commit", commit)
    with pytest.raises(Boom):
        engine.commit(state)
    monkeypatch.undo()
    for refused in (lambda: engine.logits(state), lambda: engine.export(state), lambda: engine.fork(state, 2),
                    lambda: engine.accept(state, [1]), lambda: engine.commit(state)):
        with pytest.raises(ContextClosed, match="lost"):
            refused()
    assert_same(engine.export(neighbour), kept)


def test_law_9_ids_are_accepted_while_units_move(monkeypatch):
    """The caller's thread accepts while the worker commits; nothing failed, so nothing is lost."""
    engine = engine_of("locret")
    state, real, accepted = engine.open(0), None, []

    def commit(*args):
        accepting = threading.Thread(target=lambda: accepted.append(engine.accept(state, [7])))
        accepting.start()
        accepting.join(10)
        return real(*args)

    feed(engine, state, ids_of(40))
    engine.accept(state, ids_of(8))
    real = type(state.store).commit
    monkeypatch.setattr(type(state.store), "commit", commit)
    engine.commit(state)
    monkeypatch.undo()
    assert accepted == [None] * engine.shape.layers and state.pending == [7] * engine.shape.layers
    feed(engine, state, ids_of(30, seed=3))
    assert_same(engine.export(state), committed_from_scratch(
        engine, ids_of(40) + ids_of(8) + [7] * engine.shape.layers + ids_of(30, seed=3), 2))


@every_policy
@pytest.mark.thorough(but=3)
def test_law_10_alone(policy: str):
    """Two contexts stepped in turn, one of them decoding, are what they are when each is alone."""
    engine = engine_of(policy)
    first, second = ids_of(64, seed=1), ids_of(64, seed=2)
    alone = [engine.open(2), engine.open(3)]
    expected = logits_at_each(engine, alone[0], first)
    feed(engine, alone[1], second)
    one, two, rows = engine.open(0), engine.open(1), []
    for a, b in zip(first, second, strict=True):
        feed(engine, one, [a])
        feed(engine, two, [b])
        rows.append(engine.logits(one))
    assert torch.equal(torch.stack(rows), expected)
    assert_same(engine.export(one), engine.export(alone[0]))
    assert_same(engine.export(two), engine.export(alone[1]))


def test_a_slot_is_reused_without_a_trace():
    engine = engine_of("h2o")
    feed(engine, engine.open(0), ids_of(100, seed=1))
    ids = ids_of(50, seed=2)
    assert_same(committed_from_scratch(engine, ids, 0), committed_from_scratch(engine, ids, 1))


def test_full_refuses_rather_than_grows():
    """BudgetExceeded takes nothing; what fits is still accepted, and the context goes on answering."""
    engine = build("full", units=20, chunk_size=CHUNK, sinks=0, stabilizers=0, allocation=SHARES)
    assert engine.budgets == (16, 20, 24)
    state, ids = engine.open(0), ids_of(30)
    feed(engine, state, ids[:13])
    expected, before = engine.logits(state), engine.export(state)
    assert engine.room(state) == 3
    for count in (4, 100):
        with pytest.raises(BudgetExceeded, match="keeps 13 tokens"):
            engine.accept(state, ids[13:13 + count] * (count // 4))
        assert_same(engine.export(state), before)
    assert torch.equal(engine.logits(state), expected)
    feed(engine, state, ids[13:16])
    assert engine.room(state) == 0 and state.seen == 16
    with pytest.raises(BudgetExceeded):
        engine.accept(state, [1])
    engine.accept(state, [])
    assert (engine.logits(state) - stock_logits(model(), ids[:16])[-1]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-sliding"])
def test_full_is_full_of_what_its_layers_can_see(name: str):
    """Layers with a sliding window need space for no more than that; with less, there is a limit."""
    engine, ids = build("full", on=model(name), units=100, chunk_size=CHUNK, sinks=0, stabilizers=0), ids_of(100)
    state = engine.open(0)
    assert min(engine.budgets) == 24 and engine.room(state) == (100 if None in engine.shape.sliding else None)
    logits = logits_at_each(engine, state, ids)
    assert (logits - stock_logits(model(name), ids)).abs().max() <= 1e-5
    less = build("full", on=model(name), units=20, chunk_size=CHUNK, sinks=0, stabilizers=0)
    assert less.room(less.open(0)) == 20


def test_history_is_a_function_of_the_tokens(monkeypatch):
    """The last ids, for repetition penalties: truncation brings back older ones."""
    monkeypatch.setattr(engine_module, "HISTORY", 10)
    engine = engine_of("streaming_llm")
    state, ids = engine.open(0), ids_of(30)
    feed(engine, state, ids[:29])
    assert state.history == ids[19:29]
    feed(engine, state, [5, 6])
    engine.truncate(state, 5)
    assert state.history == ids[19:29]
    assert engine.fork(state, 1).history == engine.load(engine.export(state), 2).history == state.history


@pytest.mark.parametrize("policy", ["locret", "h2o"])
def test_receipts_tell_what_is_kept(policy: str):
    engine = engine_of(policy)
    state = engine.open(0)
    feed(engine, state, ids_of(61))
    receipts = engine.receipts(state, 5, 60)
    for layer in range(engine.shape.layers):
        for head, positions in enumerate(state.store.positions(layer).tolist()):
            expected = {p for p in positions if 5 <= p < 60} | set(range(state.seen, 60))
            assert {5 + i for i, kept in enumerate(receipts.kept[layer, head].tolist()) if kept} == expected
            for rank, position in enumerate(positions):
                if 5 <= position < 60:
                    assert receipts.scores[layer, head, position - 5] == state.store.scores(layer)[0, head, rank]
    assert receipts.scores[receipts.kept.logical_not()].isnan().all()
    with pytest.raises(ConfigError):
        engine.receipts(state, 0, 62)


def test_receipts_of_what_is_pending_say_that_it_is_kept():
    engine = engine_of("locret")
    state = engine.open(0)
    feed(engine, state, ids_of(7 * CHUNK + 5))
    for start in range(7 * CHUNK - 2, 7 * CHUNK + 6):
        receipts = engine.receipts(state, start)
        assert (receipts.start, receipts.end) == (start, 7 * CHUNK + 5)
        pending = slice(max(0, 7 * CHUNK - start), None)
        assert receipts.kept.shape[-1] == receipts.end - start and receipts.kept[..., pending].all()
        assert receipts.scores[..., pending].isnan().all()


def test_a_fork_is_of_one_moment_while_other_threads_accept_ids():
    """Other threads than the engine's accept ids; a fork waits until they have accepted all of a call."""
    engine = engine_of("streaming_llm")
    state, twins = engine.open(0), []
    feed(engine, state, ids_of(30))
    copying = threading.Thread(target=lambda: twins.append(engine.fork(state, 1)))
    with state.lock:
        copying.start()
        copying.join(0.2)
        assert not twins
        engine.accept(state, [5])
    copying.join(20)
    assert twins[0].pending == state.pending


def with_a_focus_that_waits() -> tuple[Engine, dict[str, torch.Tensor]]:
    """An engine, and a context of it that has a focus, pending ids and another focus behind them."""
    engine = engine_of("streaming_llm")
    state = engine.open(0)
    engine.focus(state, [7])
    feed(engine, state, ids_of(30))
    engine.focus(state, [8])
    return engine, engine.export(state)


@pytest.mark.parametrize("name", ["pending", "history", "focus", "next_focus"])
def test_the_first_id_behind_the_vocabulary_is_none_of_a_snapshot(name: str):
    engine, exported = with_a_focus_that_waits()
    for strange, known in ((engine.shape.vocab, engine.shape.vocab - 1), (-1, 0)):
        for id in (known, strange):
            changed = {key: tensor.clone() for key, tensor in exported.items()}
            changed[name][-1] = id
            if id == known:
                engine.load(changed, 1)
            else:
                with pytest.raises(SnapshotCorrupt, match=f"'{name}' holds .* each below {engine.shape.vocab}"):
                    engine.load(changed, 1)


@pytest.mark.parametrize("name", ["seen", "pending", "history", "focus", "next_focus", "last_hidden", "0.keys"])
def test_a_tensor_of_no_dimension_or_of_one_too_many_is_none_of_a_snapshot(name: str):
    engine, exported = with_a_focus_that_waits()
    for strange in (torch.zeros((), dtype=exported[name].dtype), exported[name][None]):
        if strange.dim() or name != "seen":
            with pytest.raises(SnapshotCorrupt, match=f"{name!r} is .*; expected"):
                engine.load(exported | {name: strange}, 1)


def test_receipts_of_a_long_stream_are_asked_for_in_parts():
    """They take memory for every token, kept or not."""
    engine = engine_of("streaming_llm")
    state = engine.open(0)
    feed(engine, state, ids_of(30))
    state.seen += 10_000_000
    with pytest.raises(ConfigError, match=r"10,000,030 tokens at once; expected at most 1,048,576, or occupancy\(\)"):
        engine.receipts(state)
    assert engine.receipts(state, 10_000_000).kept.shape[-1] == 30


def test_nothing_is_given_out_of_a_context_that_is_lost():
    engine = engine_of("streaming_llm")
    state = engine.open(0)
    feed(engine, state, ids_of(30))
    state.broken = True  # what a fault leaves while units move
    for use in (lambda: engine.export(state), lambda: engine.fork(state, 1), lambda: engine.moment(state, 30),
                lambda: engine.units_between(state, 0, 0, 8), lambda: engine.swap_out(state),
                lambda: engine.accept(state, [5]), lambda: engine.focus(state, [5]), lambda: engine.logits(state),
                lambda: engine.receipts(state), lambda: occupancy(state, 0, None, 4)):
        with pytest.raises(ContextClosed, match="this context is lost"):
            use()


@pytest.mark.parametrize(("policy", "store_bits"), [("locret", None), ("h2o", None), ("snapkv", None), ("full", None),
                                                    ("streaming_llm", None), ("keydiff", 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torch_s_default_dtype_changes_no_bit(policy: str, store_bits: int | None, dtype: torch.dtype):
    """A caller may set it, and transformers does while it loads a model in another thread."""
    heads = random_heads(attach(model())) if policy == "locret" else None

    def made() -> tuple[Engine, dict[str, torch.Tensor]]:
        engine = build(policy, heads=heads, units=64 if policy == "full" else 20, store_bits=store_bits)
        state = engine.open(0)
        feed(engine, state, ids_of(60, distinct=True))
        return engine, engine.export(state)

    _, expected = made()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        engine, found = made()
        assert_same(found, expected)
        assert_same(engine.export(engine.load(found, 1)), expected)
    finally:
        torch.set_default_dtype(before)
