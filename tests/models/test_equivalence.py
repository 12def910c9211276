"""Law 3, exact while it fits: with a full budget logits are the stock model's, on every supported architecture."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from locret_stream.engine import Engine
from tests.architectures import PLAIN
from tests.kit import assert_same, build, feed, ids_of, logits_at_each, model, stock_logits

transformers.logging.set_verbosity_error()  # yarn's advice about our small config

NO_SDPA = {"gemma2", "gpt-oss"}  # transformers itself refuses sdpa there
FIRST = ("llama", "stablelm")  # a usual one, and one that divides for a partial rotation by itself
BOTH = [(name, attn) for name in sorted(PLAIN, key=lambda name: name not in FIRST) for attn in ("sdpa", "eager")
        if attn == "eager" or name not in NO_SDPA]
COUNT = 90


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of logits; where a model's logits are small (Granite divides them by 8), in units of std."""
    return ((found - expected).abs().max() / expected.std().clamp(max=1.0)).item()


def run_in_pieces(engine: Engine, ids: list[int], pieces: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits after each piece, and the index of the token each row follows."""
    state, rows, at, start = engine.open(0), [], [], 0
    for size in pieces:
        feed(engine, state, ids[start:start + size])
        start += size
        rows.append(engine.logits(state))
        at.append(start - 1)
    assert start == len(ids)
    return torch.stack(rows), at


@pytest.mark.parametrize(("name", "attn"), BOTH)
@pytest.mark.thorough(but=5)
def test_exact_while_it_fits(name: str, attn: str, record_property):
    """Commits of 17; asked after every single token, and after pieces of odd sizes."""
    stock = model(name, attn)
    engine = build("streaming_llm", on=stock, attn=attn, units=128, chunk_size=17)
    assert engine.attachment.attn == attn
    ids = ids_of(COUNT)
    expected = stock_logits(stock, ids)
    singles = gap(logits_at_each(engine, engine.open(0), ids), expected)
    rows, at = run_in_pieces(engine, ids, [5, 12, 1, 33, 16, 2, 20, 1])
    pieces = gap(rows, expected[at])
    record_property("gap", max(singles, pieces))
    print(f"{name} {attn}: single steps {singles:.2e}, pieces {pieces:.2e}")
    assert max(singles, pieces) <= 1e-5


def test_exact_below_the_longrope_switch():
    """A session that fits the original window keeps Phi3's short factors; the stock model does so in short prompts."""
    stock = model("phi3-longrope", "sdpa")
    ids = ids_of(48)
    engine = build("streaming_llm", on=stock, units=48, chunk_size=16)
    assert gap(logits_at_each(engine, engine.open(0), ids), stock_logits(stock, ids)) <= 1e-5
    long = build("streaming_llm", on=stock, units=49, chunk_size=16)
    assert gap(logits_at_each(long, long.open(0), ids), stock_logits(stock, ids)) > 0.1  # the other regime, for good


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_exact_at_any_chunk_size(chunk_size: int):
    ids = ids_of(60)
    engine = build("keydiff", units=64, chunk_size=chunk_size)
    assert gap(logits_at_each(engine, engine.open(0), ids), stock_logits(model(), ids)) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "olmo2", "gemma2", "phi3-partial"])
def test_bf16_is_as_close_as_bf16_is(name: str):
    """OLMo 2 rotates in float32 and casts back; the others rotate in their own type."""
    stock = copy.deepcopy(model(name)).to(torch.bfloat16)
    ids = ids_of(60)
    engine = build("streaming_llm", on=stock, units=64, chunk_size=17)
    true = stock_logits(stock.float(), ids)  # of the same rounded weights
    own = (stock_logits(stock.bfloat16(), ids) - true).abs().mean()
    ours = (logits_at_each(engine, engine.open(0), ids) - true).abs().mean()
    assert ours <= 1.2 * own


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("policy", ["streaming_llm", "locret", "h2o"])
@pytest.mark.thorough(but=1)
def test_position_twenty_million_equals_position_two_thousand(name: str, policy: str):
    """Only ranks reach the model: a stream 20 million tokens old computes what a young one does, bit for bit."""
    engine = build(policy, on=model(name), units=40, chunk_size=16)
    young = engine.open(0)
    feed(engine, young, ids_of(2_000, seed=1))
    shift = 20_000_000 - young.seen
    assert young.seen == 2_000 and shift % 16 == 0
    exported = engine.export(young)
    exported["seen"] += shift
    for key in exported:
        if key.endswith(".positions"):
            exported[key] += shift
    old = engine.load(exported, 1)
    more = ids_of(100, seed=2)
    assert torch.equal(logits_at_each(engine, young, more), logits_at_each(engine, old, more))
    expected = engine.export(young)
    for key in expected:
        if key.endswith(".positions") or key == "seen":
            expected[key] += shift
    assert_same(engine.export(old), expected)
    assert int(expected["seen"]) > 2**24 and old.store.counts == list(engine.budgets)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_the_model_never_receives_a_position_above_capacity(name: str, monkeypatch):
    engine = build("streaming_llm", on=model(name), units=24, chunk_size=8)
    state, real, highest = engine.open(0), engine.layout.tables.rotate, 0

    def rotate(layer, x, start, out=None):
        nonlocal highest
        highest = max(highest, start + x.shape[2] - 1)
        return real(layer, x, start, out)

    def turns(layer, ranks):
        nonlocal highest
        highest = max(highest, int(ranks.max()))
        return real_turns(layer, ranks)

    assert engine.layout.tables.capacity == 32
    real_turns = engine.layout.tables.turns
    monkeypatch.setattr(engine.layout.tables, "rotate", rotate)
    monkeypatch.setattr(engine.layout.tables, "turns", turns)
    logits_at_each(engine, state, ids_of(100))
    assert highest == 24 + 8 - 1


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3", "gpt-oss"])
def test_sliding_layers_stay_exact_after_eviction(name: str):
    """Full layers hold everything, sliding ones evict down to their window, and logits remain the stock model's."""
    stock = model(name)
    engine = build("locret", on=stock, units=128, chunk_size=8)
    ids = ids_of(COUNT)
    state = engine.open(0)
    found = logits_at_each(engine, state, ids)
    assert gap(found, stock_logits(stock, ids)) <= 1e-5
    for layer, window in enumerate(engine.shape.sliding):
        assert state.store.counts[layer] == (window if window else state.seen)
        assert state.store.positions(layer)[0].tolist() == list(range(state.seen))[-state.store.counts[layer]:]
