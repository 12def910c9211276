"""Every policy against a naive formula, and what the registry accepts."""

from __future__ import annotations

import math

import pytest
import torch

from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError, UnknownPolicy
from locret_stream.kernels import select_units
from locret_stream.models import attach
from locret_stream.policies import POLICIES, Chunk, Policy, make_policy
from tests.kit import build, feed, ids_of, model

# -- locret -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-oss"])
def test_locret_scores_once_with_what_attention_sees_before_rope(name: str):
    """Against hooks on the stock model's own projections (and q/k norms), run over the whole prompt at once."""
    stock, ids = model(name), ids_of(40)
    engine = build("locret", on=stock, units=64)
    state = engine.open(0)
    feed(engine, state, ids)
    seen: dict[str, torch.Tensor] = {}

    def keep(key: str):
        return lambda module, args, out: seen.__setitem__(key, out)

    hooks = []
    for index, layer in enumerate(stock.get_decoder().layers):
        for kind in "qkv":
            source = getattr(layer.self_attn, f"{kind}_norm", None) or getattr(layer.self_attn, f"{kind}_proj")
            hooks.append(source.register_forward_hook(keep(f"{index}.{kind}")))
    with torch.no_grad():
        stock(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    heads = engine.policy.heads
    for layer in range(engine.shape.layers):
        if engine.shape.sliding[layer]:
            continue
        x = torch.cat([seen[f"{layer}.{kind}"].reshape(40, -1) for kind in "qkv"], -1)
        inner = torch.nn.functional.silu(x @ heads.fc1[layer].weight.T)
        expected = (inner @ heads.fc2[layer].weight.T).T
        assert torch.allclose(state.store.scores(layer)[0], expected, atol=1e-5)


# -- streaming_llm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 2**24 // 8 * 8 + 8, 2**31])
def test_streaming_llm_keeps_sinks_and_recent_exactly(base: int):
    """Also where fp32 no longer counts positions one by one."""
    engine = build("streaming_llm", units=20, chunk_size=8, sinks=3, stabilizers=4, allocation=(0.8, 1.0, 1.2))
    state = engine.open(0)
    state.seen = base
    for _ in range(12):
        feed(engine, state, ids_of(8))
        seen = list(range(base, state.seen))
        for layer, units in enumerate(engine.budgets):
            expected = seen if len(seen) <= units else seen[:3] + seen[-(units - 3):]
            assert state.store.positions(layer).tolist() == [expected] * engine.shape.units[0].kv_heads


# -- random -----------------------------------------------------------------------------------------------------------


def random_scores(policy, start: int, count: int, layer: int = 0, heads: int = 2) -> torch.Tensor:
    empty = torch.zeros(heads, count, 4)
    return policy.score(Chunk(layer=layer, start=start, q=empty, k=empty, v=empty, keys=empty,
                              scores=torch.zeros(1, heads, 0), budget=count, sinks=0, stabilizers=0))


def test_random_is_uniform_and_uncorrelated():
    scores = random_scores(make_policy("random"), 0, 50_000, heads=4).double()
    assert scores.min() >= 0 and scores.max() < 1
    histogram = torch.stack([torch.histc(row, 20, 0, 1) for row in scores])
    chi2 = ((histogram - 2_500) ** 2 / 2_500).sum(1)
    assert (chi2 < 50).all()  # 19 degrees of freedom: p > 1e-4
    rows = torch.stack([*scores, scores[0].roll(1), random_scores(make_policy("random"), 0, 50_000, 1)[0].double(),
                        random_scores(make_policy("random", {"seed": 1}), 0, 50_000)[0].double()])
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 0.02


def test_random_kept_sets_are_uniform_over_the_stream():
    """256 heads keep 16 of 96 tokens, 16 at a time as an endless stream does: no position is favoured."""
    counts, scores = torch.zeros(96), random_scores(make_policy("random", {"seed": 5}), 0, 96, heads=256)
    kept = torch.arange(16).expand(256, 16)
    for start in range(16, 96, 16):
        kept = torch.cat([kept, torch.arange(start, start + 16).expand(256, 16)], 1)
        kept = kept.gather(1, select_units(scores.gather(1, kept), 16))
    counts.scatter_add_(0, kept.flatten(), torch.ones(256 * 16))
    expected = 256 * 16 / 96
    assert ((counts - expected) ** 2 / expected).sum() < 150  # 95 degrees of freedom


def test_random_is_seeded_and_independent_of_the_split():
    whole = random_scores(make_policy("random", {"seed": 3}), 1_000, 64, layer=2)
    parts = [random_scores(make_policy("random", {"seed": 3}), start, 16, layer=2) for start in range(1_000, 1_064, 16)]
    assert torch.equal(whole, torch.cat(parts, 1))
    assert not torch.equal(whole, random_scores(make_policy("random", {"seed": 4}), 1_000, 64, layer=2))
    far = random_scores(make_policy("random"), 2**40, 64)
    assert far.unique().numel() > 120
    for seed in (-1, 2**63, -(2**70)):
        assert random_scores(make_policy("random", {"seed": seed}), 0, 8).unique().numel() == 16
    engines = [build("random", units=64, chunk_size=size, seed=11) for size in (4, 16)]
    states = [engine.open(0) for engine in engines]
    for engine, state in zip(engines, states, strict=True):
        feed(engine, state, ids_of(48))
    assert torch.equal(states[0].store.scores(1), states[1].store.scores(1))


# -- keydiff ----------------------------------------------------------------------------------------------------------


def keydiff_by_hand(keys: torch.Tensor) -> list[float]:
    """keys [N, D] of one head: minus the cosine with the mean of the normalised keys."""
    unit = [key / key.norm() for key in keys.double()]
    anchor = sum(unit) / len(unit)
    return [-float(key @ anchor / anchor.norm()) for key in unit]


@pytest.mark.parametrize("commits", [2, 7])
def test_keydiff_against_the_formula(commits: int, monkeypatch):
    """At every commit all units, kept and new, are scored anew by their keys before RoPE."""
    engine = build("keydiff", units=20, chunk_size=8, sinks=0, stabilizers=0)
    keys_of: dict[int, torch.Tensor] = {}
    real = engine.policy.score
    monkeypatch.setattr(engine.policy, "score", lambda chunk: (keys_of.update({chunk.layer: chunk.keys.clone()}),
                                                              real(chunk))[1])
    state = engine.open(0)
    feed(engine, state, ids_of(commits * 8))
    for layer, keys in keys_of.items():
        count = state.store.counts[layer]
        for head in range(engine.shape.units[0].kv_heads):
            scores = torch.tensor(keydiff_by_hand(keys[head]))
            best = scores.argsort(descending=True)[:count].sort().values
            assert torch.equal(state.store.keys(layer, count)[0, head], keys[head][best])
            assert torch.allclose(state.store.scores(layer)[0, head], scores[best].float(), atol=1e-6)


# -- h2o --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "smollm3", "olmo2"])
def test_h2o_sums_the_attention_of_the_stock_model(name: str):
    """While everything fits: column sums of the stock model's own attention weights, added over each GQA group.

    With softcaps (Gemma2), learned sink logits (GPT-OSS), layers without RoPE (SmolLM3) and q/k norms (OLMo2).
    """
    stock, ids = model(name, "eager"), ids_of(48)
    engine = build("h2o", on=stock, units=64, chunk_size=8)
    state = engine.open(0)
    feed(engine, state, ids)
    with torch.no_grad():
        attentions = stock(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    checked = 0
    for layer, weights in enumerate(attentions):
        if engine.shape.sliding[layer]:
            continue
        unit = engine.shape.units[layer]
        received = weights[0].view(unit.kv_heads, unit.groups, 48, -1)[..., :48].sum((1, 2))
        assert torch.allclose(state.store.scores(layer)[0], received, rtol=1e-5, atol=1e-5)
        checked += 1
    assert checked >= 1


def test_h2o_recent_share_fits_any_budget():
    policy = make_policy("h2o", {"recent": 1.0})
    assert policy.protection(10, 4, 2) == (4, 5)
    assert make_policy("h2o", {"recent": 0}).protection(10, 4, 2) == (4, 2)
    assert make_policy("h2o").protection(3, 2, 0) == (2, 0)


# -- sirllm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_sirllm_scores_surprise_of_the_stock_model(name: str):
    """-log p(token | everything before), over commit boundaries too; the first token highest; one set for all heads."""
    stock, ids = model(name), ids_of(48)
    engine = build("sirllm", on=stock, units=64, chunk_size=8)
    state = engine.open(0)
    feed(engine, state, ids)
    with torch.no_grad():
        logprobs = stock(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    expected = [math.inf] + [-float(logprobs[t - 1, ids[t]]) for t in range(1, 48)]
    for layer in range(engine.shape.layers):
        if engine.shape.sliding[layer]:
            continue
        for head in state.store.scores(layer)[0]:
            assert head[0] == torch.finfo(torch.float32).max
            assert torch.allclose(head[1:], torch.tensor(expected[1:]), atol=2e-5)


def test_sirllm_keeps_the_same_tokens_everywhere_and_decays_them():
    engine = build("sirllm", units=20, chunk_size=8, sinks=0, stabilizers=2, decay=0.5)
    state, ids = engine.open(0), ids_of(64)
    feed(engine, state, ids[:16])
    before = state.store.scores(0)[0, 0].clone()
    feed(engine, state, ids[16:24])
    first = state.store.positions(0)[0]
    old = first < 16
    assert torch.equal(state.store.scores(0)[0, 0][old], before[first[old]] * 0.5)
    feed(engine, state, ids[24:])
    kept = state.store.positions(0)[0]
    for layer in range(3):
        assert (state.store.positions(layer) == kept).all()
        assert torch.equal(state.store.scores(layer)[0, 0], state.store.scores(0)[0, 0])


def test_sirllm_ranks_nan_last():
    """It comes from the model, for example from an overflow in half precision."""
    policy, empty = make_policy("sirllm"), torch.zeros(2, 4, 4)

    def scores(start: int) -> torch.Tensor:
        return policy.score(Chunk(layer=0, start=start, q=empty, k=empty, v=empty, keys=empty,
                                  scores=torch.zeros(1, 2, 0), budget=4, sinks=0, stabilizers=0,
                                  logprobs=torch.tensor([math.nan, -1.0, math.nan, -2.0])))

    assert torch.allclose(scores(0)[0], torch.tensor([torch.finfo(torch.float32).max, 1.0, math.nan, 2.0]),
                          equal_nan=True)
    assert select_units(scores(8), 2).tolist() == [[1, 3]]


# -- what a policy of one's own declares -------------------------------------------------------------------------------


class Own(Policy):
    name = "own"

    def __init__(self, shape: tuple[int, ...], **declared: object):
        self.gives = shape
        for name, value in declared.items():
            setattr(self, name, value)

    def score(self, chunk: Chunk) -> torch.Tensor:
        return torch.zeros(self.gives)


def engine_with(policy: Policy) -> Engine:
    config = StreamConfig(budget=Budget(units=20, sinks=2, stabilizers=3, allocation="uniform"), chunk_size=8)
    return Engine(attach(model()), config, policy, 1)


@pytest.mark.parametrize(("shape", "declared", "expected"), [
    ((2, 8), {}, None), ((1, 8), {}, None), ((2, 2, 8), {"planes": 2}, None), ((1, 8), {"scope": "layer"}, None),
    ((1, 8), {"scope": "model", "stateful": True}, None), ((2, 8), {"scope": "layer"}, r"\[1, 8\], as it has scope 'l"),
    ((8,), {}, r"\[2 or 1, 8\]"), ((1,), {}, r"\[2 or 1, 8\]"), ((2, 7), {}, "is static"), ((3, 8), {}, r"\[2 or 1, "),
    ((2, 16), {}, "is static"), ((2, 8), {"planes": 2}, r"\[2, 2 or 1, 8\]"), ((1, 2, 8), {"planes": 2}, r"\[2, 2 or"),
])
def test_scores_have_the_shape_that_was_declared(shape: tuple[int, ...], declared: dict, expected: str | None):
    engine = engine_with(Own(shape, **declared))
    state = engine.open(0)
    engine.accept(state, ids_of(8))
    if expected is None:
        engine.commit(state)
        assert state.seen == 8
        return
    with pytest.raises(ConfigError, match=expected):
        engine.commit(state)
    assert state.seen == 0 and not state.broken, "nothing happened"


@pytest.mark.parametrize(("declared", "says"), [
    ({"needs": frozenset({"logprobs"})}, "needs 'logprobs'; expected of .*'token_logprob'"),
    ({"scope": "heads"}, "scope 'heads'; expected 'head'"),
    ({"protection": lambda budget, sinks, stabilizers: (sinks, budget - sinks)}, r"protects 2 \+ 18 units of 20"),
])
def test_declarations_that_mean_nothing_are_refused(declared: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        engine_with(Own((2, 8), **declared))


# -- registry ---------------------------------------------------------------------------------------------------------


def test_policies_bear_the_names_of_their_papers():
    assert set(POLICIES) == {"locret", "streaming_llm", "random", "keydiff", "h2o", "sirllm", "nacl", "snapkv", "tova",
                             "scissorhands", "infllm", "kvzap", "trimkv", "full"}
    assert all(kind.name == name for name, kind in POLICIES.items())
    assert [name for name, kind in POLICIES.items() if not kind.bounded] == ["full"]
    static = {name for name, kind in POLICIES.items() if not kind.stateful}
    assert static == {"locret", "streaming_llm", "random", "kvzap", "full"}
    assert POLICIES["sirllm"].scope == "model" and POLICIES["locret"].needs == {"qkv"}


@pytest.mark.parametrize(("name", "close"), [
    ("locrt", "locret"), ("StreamingLLM", None), ("stream_llm", "streaming_llm"), ("h20", "h2o"), ("", None),
    (None, None), (["h2o"], None)])
def test_unknown_policies_are_refused_with_suggestions(name, close):
    with pytest.raises(UnknownPolicy) as caught:
        make_policy(name)
    assert "streaming_llm" in str(caught.value)
    assert (f"Did you mean {close!r}?" in str(caught.value)) == (close is not None)


@pytest.mark.parametrize(("name", "knobs"), [
    ("h2o", {"recnt": 0.5}), ("h2o", {"recent": "half"}), ("h2o", {"recent": math.nan}), ("h2o", {"recent": -0.1}),
    ("h2o", {"recent": 1.5}), ("h2o", {"recent": True}), ("random", {"seed": 1.5}), ("random", {"seed": "a"}),
    ("sirllm", {"decay": math.inf}), ("sirllm", {"decay": 0}), ("random", {"seed": 10**400}),
    ("h2o", {"recent": 10**400}), ("h2o", {"recent": -2**40}), ("sirllm", {"decay": 1.5}), ("keydiff", {"seed": 1}),
    ("streaming_llm", {"sinks": 4}), ("full", {"x": 1}), ("locret", {"alpha": 1}), ("locret", {}), ("kvzap", {}),
    ("trimkv", {}), ("nacl", {"proxies": -0.1}), ("nacl", {"random": 1.1}),
    ("nacl", {"where": "middle"}), ("nacl", {"chances": "fair"}),
    ("nacl", {"where": 1}), ("nacl", {"draw": ""}), ("nacl", {"seed": 0.5}), ("snapkv", {"window": 0}),
    ("snapkv", {"kernel": 4}), ("snapkv", {"kernel": -1}), ("tova", {"window": 1}), ("scissorhands", {"window": 0}),
    ("scissorhands", {"recent": -1}), ("infllm", {"block": 0}), ("infllm", {"decay": 1.1}),
])
def test_knobs_are_checked(name: str, knobs: dict):
    with pytest.raises(ConfigError, match=name):
        make_policy(name, knobs)


def test_a_count_that_no_index_holds_is_refused():
    with pytest.raises(ConfigError, match="block is 1000000000000; expected at most 2,147,483,647"):
        make_policy("infllm", {"block": 10**12})
    assert make_policy("random", {"seed": 10**18}).knobs["seed"] == 10**18
