"""Batched decoding: contexts of any lengths share a step, join and leave between steps; each is as if it were alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from locret_stream.engine import Engine, EngineState, NextToken, decoding
from tests.kit import DEVICE, EVICTING, Boom, assert_same, build, failing_in_layer, feed, ids_of, model

CHUNK, UNITS = 8, 20
TOLERANCE = 1e-5  # of provisional logits, law 2


def engine_of(policy: str = "locret", on: str = "llama", slots: int = 6) -> Engine:
    return build(policy, on=model(on), units=UNITS, chunk_size=CHUNK, slots=slots)


def alone(engine: Engine, state: EngineState, tokens: list[int]) -> list[Tensor]:
    """Logits before each of the tokens, which are accepted one by one."""
    found = []
    for token in tokens:
        found.append(engine.logits(state))
        feed(engine, state, [token])
    return found


def together(engine: Engine, states: list[EngineState], tokens: list[int]) -> list[Tensor]:
    """One joint step in which each context takes the given token; returns the logits that each saw."""
    seen: dict[int, Tensor] = {}

    def choose(n: int, logits: Tensor) -> int:
        seen[n] = logits.clone()
        return tokens[n]

    found = engine.decode([NextToken(state, lambda logits, n=n: choose(n, logits)) for n, state in enumerate(states)])
    assert found == tokens
    for state in states:
        while engine.ready(state):
            engine.commit(state)
    return [seen[n] for n in range(len(states))]


@pytest.mark.parametrize(("on", "policy"), [*(("llama", policy) for policy in EVICTING), ("qwen3", "locret"),
                                            ("gemma2", "locret"), ("gemma3", "h2o"), ("gpt-oss", "locret"),
                                            ("mistral-sliding", "keydiff"), ("smollm3", "locret"),
                                            ("phi3-longrope", "locret")])
@pytest.mark.thorough(but=4)
def test_contexts_that_join_and_leave_are_each_what_they_are_alone(on: str, policy: str):
    """Logits to 1e-5 at every step, committed states bit for bit; prompts of 1 to 50 tokens, 30 steps."""
    engine = engine_of(policy, on)
    lengths, dice = (1, 7, 8, 29, 50), random.Random(on + policy)
    prompts = [ids_of(length, seed=length) for length in lengths]
    replies = [ids_of(30, seed=100 + length) for length in lengths]
    expected, states = [], []
    for prompt, reply in zip(prompts, replies, strict=True):
        state = engine.open(5)
        feed(engine, state, prompt)
        expected.append((alone(engine, state, reply), engine.export(state), state.peaks))
    for slot, prompt in zip((3, 0, 4, 1, 2), prompts, strict=True):
        states.append(engine.open(slot))
        feed(engine, states[-1], prompt)
    done, widest = [0] * len(states), 0
    while any(count < 30 for count in done):
        members = [n for n, count in enumerate(done) if count < 30 and dice.random() < 0.8]
        dice.shuffle(members)
        found = together(engine, [states[n] for n in members], [replies[n][done[n]] for n in members])
        widest = max(widest, len(members))
        for n, logits in zip(members, found, strict=True):
            torch.testing.assert_close(logits, expected[n][0][done[n]], rtol=TOLERANCE, atol=TOLERANCE)
            done[n] += 1
    assert widest == len(states)
    for state, (_, export, peaks) in zip(states, expected, strict=True):
        assert_same(engine.export(state), export)
        assert state.peaks == peaks
        assert all(peak <= units + CHUNK for peak, units in zip(state.peaks, engine.budgets, strict=True))


@pytest.mark.parametrize(("on", "allocation"), [("llama", (0.8, 1.0, 1.2)), ("gemma3", (0.8, 1.0, 1.2)),
                                                ("gpt-oss", (0.8, 1.0, 1.2)), ("smollm3", (0.8, 1.0, 1.2)),
                                                ("gemma3", "uniform"), ("smollm3", "uniform")])
@pytest.mark.thorough(but=2)
def test_a_step_agrees_with_a_forward_of_the_same_tokens_at_once(on: str, allocation):
    """With unequal, full budgets every layer has other ranks; with one budget and several RoPE tables layers of equal
    ranks rotate by different tables."""
    engine = build("locret", on=model(on), units=UNITS, chunk_size=CHUNK, slots=3, allocation=allocation)
    if allocation == "uniform":
        alike: dict[int, set[int]] = {}
        for units, tables in zip(engine.budgets, engine.layout.tables.layers, strict=True):
            alike.setdefault(units, set()).add(id(tables))
        assert any(len(tables) > 1 for tables in alike.values())
    ids, reply = ids_of(64 + 3), [5, 6, 7]
    states = [engine.open(slot) for slot in (2, 0)]
    for state in states:
        feed(engine, state, ids)
        engine.logits(state)
    assert allocation == "uniform" or len(set(states[0].store.counts)) > 1
    for token in reply:
        together(engine, states, [token, token])
    at_once = engine.open(1)
    feed(engine, at_once, [*ids, *reply])
    for state in states:
        torch.testing.assert_close(engine.logits(state), engine.logits(at_once), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_step_together_is_one_forward(monkeypatch):
    engine, shapes = engine_of(), []
    states = [engine.open(slot) for slot in range(4)]
    for length, state in enumerate(states, start=9):
        feed(engine, state, ids_of(length))
    hidden = engine.attachment.hidden
    monkeypatch.setattr(engine.attachment, "hidden", lambda ids, *more: shapes.append(tuple(ids.shape)) or
                        hidden(ids, *more))
    together(engine, states, [5, 6, 7, 8])
    assert shapes == [(1, 1), (1, 2), (1, 3), (1, 4)], "what of a prompt is pending is read first"
    shapes.clear()
    for _ in range(3):
        together(engine, states, [5, 6, 7, 8])
    assert [shape for shape in shapes if shape[1] != CHUNK] == [(4, 1)] * 3


def test_what_fails_for_one_fails_for_it_alone():
    engine = engine_of()
    states = [engine.open(slot) for slot in range(4)]
    for length, state in enumerate(states, start=9):
        feed(engine, state, ids_of(length))
    together(engine, states, [1, 2, 3, 4])
    before = [engine.export(state) for state in states]

    def boom(logits: Tensor) -> int:
        raise Boom("choice")

    def quit(logits: Tensor) -> int:
        raise SystemExit("a sampler may raise what it likes")

    states[2].broken = True
    found = engine.decode([NextToken(states[0], lambda logits: 5), NextToken(states[1], boom),
                           NextToken(states[2], lambda logits: 6), NextToken(states[3], lambda logits: 7)])
    assert found[0] == 5 and found[3] == 7
    assert isinstance(found[1], Boom) and "lost" in str(found[2])
    states[2].broken = False
    for n in (1, 2):
        assert_same(engine.export(states[n]), before[n])
    with failing_in_layer(engine, 1):
        assert all(isinstance(one, Boom) for one in engine.decode(
            [NextToken(states[n], lambda logits: 5) for n in (0, 3)]))
    assert [state.pending[-1] for state in states] == [5, 2, 3, 7]
    left, right = engine.decode([NextToken(states[0], lambda logits: 8), NextToken(states[1], quit)])
    assert left == 8 and isinstance(right, SystemExit)
    assert engine.decode([NextToken(state, lambda logits: 9) for state in states]) == [9] * 4


def test_what_was_run_ahead_is_only_ever_used_for_the_tokens_it_was_run_for():
    """After truncation, other tokens, a fork, a swap out and in: always the logits of a fresh context."""
    engine = engine_of()
    state, prompt = engine.open(0), ids_of(11)
    feed(engine, state, prompt)

    def said(ids: list[int], slot: int = 4) -> Tensor:
        fresh = engine.open(slot)
        feed(engine, fresh, ids)
        return engine.logits(fresh)

    def step(token: int) -> None:
        assert engine.decode([NextToken(state, lambda logits: token)]) == [token]
        engine.run_ahead()

    step(5)
    assert state.provisional == 4 and state.tail_logits is not None
    torch.testing.assert_close(engine.logits(state), said([*prompt, 5]), rtol=TOLERANCE, atol=TOLERANCE)
    fork = engine.fork(state, 1)
    engine.truncate(state, 3)
    feed(engine, state, [6])
    for one, last in ((state, 6), (fork, 5)):
        torch.testing.assert_close(engine.logits(one), said([*prompt, last]), rtol=TOLERANCE, atol=TOLERANCE)
    step(7)
    feed(engine, state, [8])  # accepted by somebody else, behind what was run
    torch.testing.assert_close(engine.logits(state), said([*prompt, 6, 7, 8]), rtol=TOLERANCE, atol=TOLERANCE)
    assert engine.decode([NextToken(state, lambda logits: 9)]) == [9]
    saved = engine.export(state)
    engine.swap_out(state)
    engine.run_ahead()  # too late
    assert state.provisional == 0 and state.tail_logits is None
    engine.swap_in(state, saved, 2)
    torch.testing.assert_close(engine.logits(state), said([*prompt, 6, 7, 8, 9]), rtol=TOLERANCE, atol=TOLERANCE)
    for token in range(10, 20):
        step(token)
        feed(engine, state, [])  # a whole chunk is committed, with its units computed anew
    alone = engine.open(3)
    feed(engine, alone, [*prompt, 6, 7, 8, 9, *range(10, 20)])
    assert_same(engine.export(state), engine.export(alone))


def test_running_ahead_never_raises_and_what_failed_is_tried_again():
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(11))
    assert engine.decode([NextToken(state, lambda logits: 5)]) == [5]
    with failing_in_layer(engine, 1):
        engine.run_ahead()
    assert state.provisional == 3
    [token] = engine.decode([NextToken(state, lambda logits: int(logits.argmax()))])
    fresh = engine.open(1)
    feed(engine, fresh, [*ids_of(11), 5])
    assert token == int(engine.logits(fresh).argmax())


def test_nothing_is_run_ahead_for_a_context_whose_slot_is_another_s():
    """The contexts of a step may be closed before the next one: the next context in the slot keeps every bit."""
    engine = engine_of()
    old, owner = engine.open(0), None
    feed(engine, old, ids_of(11))
    assert engine.decode([NextToken(old, lambda logits: 5)]) == [5]  # other work waits, so nothing is run ahead
    owner = engine.open(0)
    feed(engine, owner, ids_of(64, seed=5))
    before = engine.export(owner)
    assert engine.decode([]) == []
    engine.run_ahead()
    assert_same(engine.export(owner), before)


def test_a_swapped_out_context_is_left_out_of_a_forward_that_runs_ahead():
    """The next context in its slot keeps every bit, provisional units included."""
    engine = engine_of()
    old, other = engine.open(0), engine.open(1)
    feed(engine, old, ids_of(CHUNK))  # after a step one id of it is pending
    feed(engine, other, ids_of(11))
    together(engine, [old, other], [5, 6])
    engine.swap_out(old)
    owner = engine.open(0)
    feed(engine, owner, ids_of(23, seed=5))
    engine.logits(owner)
    slot = [tensor[0].clone() for layer in engine.pool.layers for tensor in layer.tensors]
    engine.run_ahead()
    assert other.provisional == 4 and (old.provisional, old.tail_logits) == (0, None)
    for kept, tensor in zip(slot, (t for layer in engine.pool.layers for t in layer.tensors), strict=True):
        assert torch.equal(tensor[0], kept)


def test_a_context_that_is_swapped_out_during_a_forward_stays_as_it_is(monkeypatch):
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(11))
    together(engine, [state], [5])
    hidden = engine.attachment.hidden

    def swap_out(*given: object) -> Tensor:
        found = hidden(*given)
        engine.swap_out(state)
        return found

    monkeypatch.setattr(engine.attachment, "hidden", swap_out)
    engine.run_ahead()
    assert (state.provisional, state.tail_logits) == (0, None)


def test_a_fork_has_the_tail_of_the_original(monkeypatch):
    """It has copies of the provisional units and of their logits, so that it goes on without a forward."""
    engine = engine_of()
    state = engine.open(0)
    feed(engine, state, ids_of(11))
    expected = engine.logits(state).clone()
    fork = engine.fork(state, 1)
    with failing_in_layer(engine, 0):
        assert torch.equal(engine.logits(fork), expected)
    engine.swap_out(state)
    feed(engine, engine.open(0), ids_of(40, seed=3))
    shapes, run = [], engine.attachment.hidden
    monkeypatch.setattr(engine.attachment, "hidden", lambda ids, *more: shapes.append(ids.shape) or run(ids, *more))
    feed(engine, fork, [5])
    found = engine.logits(fork)
    assert shapes == [(1, 1)], "the units of the tail were copied"
    fresh = engine.open(2)
    feed(engine, fresh, [*ids_of(11), 5])
    torch.testing.assert_close(found, engine.logits(fresh), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_row_of_a_batch_does_not_keep_the_batch():
    engine = engine_of()
    states = [engine.open(slot) for slot in range(3)]
    for state in states:
        feed(engine, state, ids_of(12))
    for _ in range(2):
        together(engine, states, [1, 2, 3])
    for state in states:
        assert state.tail_logits.untyped_storage().nbytes() == state.tail_logits.nbytes


def test_a_forward_that_cannot_be_captured_runs_without_graphs_and_says_so_once(monkeypatch, caplog):
    engine, tried = engine_of(), []

    def refuses(forward, batch):
        tried.append(tuple(batch.shape))
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoding, "_Graph", refuses)
    engine.decoder.graphed = True
    states = [engine.open(slot) for slot in range(3)]
    for state in states:
        feed(engine, state, ids_of(12))
    for _ in range(3):
        together(engine, states, [1, 2, 3])
    assert len(tried) == 1 and caplog.text.count("without CUDA graphs") == 1
    alone = engine.open(4)
    feed(engine, alone, [*ids_of(12), 1, 1, 1])
    torch.testing.assert_close(engine.logits(states[0]), engine.logits(alone), rtol=TOLERANCE, atol=TOLERANCE)


def test_graphs_are_padded_with_copies_of_the_first_row(monkeypatch):
    """With graphs replaced by the forward that they would replay."""
    engine, sizes = engine_of(), []

    class Plain:
        def __init__(self, forward, batch):
            self.forward = forward
            sizes.append(batch.shape[1])

        def replay(self, batch):
            return self.forward(batch.to(DEVICE))

    monkeypatch.setattr(decoding, "_Graph", Plain)
    plain, states = [engine.open(slot) for slot in range(3)], [engine.open(slot) for slot in range(3, 6)]
    for state in (*plain, *states):
        feed(engine, state, ids_of(12))
    for tokens in ([1, 2, 3], [4, 5, 6]):
        engine.decoder.graphed = False
        expected = together(engine, plain, tokens)
        engine.decoder.graphed = True
        for found, logits in zip(together(engine, states, tokens), expected, strict=True):
            torch.testing.assert_close(found, logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert 4 in sizes and len(sizes) == len(set(sizes)), "one graph per power of two"
    for one, other in zip(plain, states, strict=True):
        assert_same(engine.export(other), engine.export(one))


def test_a_step_writes_nothing_of_other_contexts():
    """A context that takes no part keeps all its units, provisional ones included."""
    engine = engine_of()
    states = [engine.open(slot) for slot in range(3)]
    for state in states:
        feed(engine, state, ids_of(12))
        engine.logits(state)
    still = [tensor[states[1].store.slot].clone() for layer in engine.pool.layers for tensor in layer.tensors]
    for _ in range(3):
        together(engine, [states[0], states[2]], [1, 2])
    for kept, tensor in zip(still, (t for layer in engine.pool.layers for t in layer.tensors), strict=True):
        assert torch.equal(tensor[states[1].store.slot], kept)


def test_a_batch_size_without_memory_for_its_graph_runs_without_one_and_the_others_keep_theirs(monkeypatch, caplog):
    engine, tried = engine_of(), []

    class Captured:
        def __init__(self, forward, batch):
            tried.append(batch.shape[1])
            if batch.shape[1] == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.replay = forward

    monkeypatch.setattr(decoding, "_Graph", Captured)
    engine.decoder.graphed = True
    states = [engine.open(slot) for slot in range(3)]
    for state in states:
        feed(engine, state, ids_of(12))
    for count in (3, 2, 3, 2, 3, 3, 2):
        together(engine, states[:count], [1, 2, 3][:count])
    assert tried.count(4) == tried.count(2) == 1 and engine.decoder.graphed
    assert caplog.text.count("no memory for it") == 1


def test_a_shared_step_that_fails_is_said_once_and_each_context_goes_on_alone(monkeypatch, caplog):
    engine = engine_of()
    states = [engine.open(slot) for slot in range(3)]
    for state in states:
        feed(engine, state, ids_of(12))

    run = engine.decoder.run

    def fails(states):
        if len(states) > 1:
            raise RuntimeError("too many at once")
        run(states)

    monkeypatch.setattr(engine.decoder, "run", fails)
    for _ in range(4):
        together(engine, states, [1, 2, 3])
        engine.run_ahead()
    assert caplog.text.count("too many at once") == 1
