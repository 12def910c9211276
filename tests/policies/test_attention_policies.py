"""Policies that watch attention, against their formulas written out: units as plain objects, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from locret_stream.policies import make_policy, noise
from locret_stream.policies.infllm import sum_of_blocks
from tests.engine.naive import NaiveStream, Unit
from tests.kit import build, feed, ids_of, model, random_heads

CHUNK, UNITS, LAYERS, HEADS, GROUPS = 8, 20, 3, 2, 2
Rows = list[list[float]]
"""What each query of a chunk pays to the units it sees; the first query head's queries, then the next one's."""


class Watched(NaiveStream):
    """Scores by a rule: rule(stream, layer, rows and units of every KV head), which sets the units' scores."""

    def __init__(self, rule: Callable[[Watched, int, list[tuple[Rows, list[Unit]]]], None], protection: tuple[int, int],
                 units: int = UNITS):
        heads = random_heads(build("full", units=64).attachment)
        super().__init__(model(), heads, [units] * LAYERS, CHUNK, *protection)
        self.rule = rule

    def saw(self, layer: int, head: int, units: list[Unit], weights: torch.Tensor) -> None:
        self.rows.setdefault((layer, head), []).append(weights.tolist())

    def commit(self) -> None:
        self.rows: dict[tuple[int, int], Rows] = {}
        keep, self.keep = self.keep, lambda units, budget: units  # first every unit, then the scores, then the budget
        super().commit()
        self.keep = keep
        for layer, heads in enumerate(self.kept):
            self.rule(self, layer, [(self.rows[layer, head], units) for head, units in enumerate(heads)])
            self.kept[layer] = [self.keep(units, self.budgets[layer]) for units in heads]


def received(rows: Rows, units: list[Unit], last: int = CHUNK) -> list[float]:
    """Attention of the last `last` queries of each query head."""
    chosen = [row for at, row in enumerate(rows) if at % CHUNK >= CHUNK - last]
    return [sum(row[i] for row in chosen if i < len(row)) for i in range(len(units))]


def h2o(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
    for rows, units in heads:
        for unit, new in zip(units, received(rows, units), strict=True):
            unit.score = new + (unit.score if unit.position < stream.seen - CHUNK else 0)


def snapkv(window: int, kernel: int):
    def rule(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
        for rows, units in heads:
            found = received(rows, units, window)
            inside = len(units) - window
            for i, unit in enumerate(units):
                around = [found[j] if 0 <= j < inside else 0.0 for j in range(i - kernel // 2, i + kernel // 2 + 1)]
                unit.score = sum(around) / kernel if i < inside else found[i]

    return rule


def tova(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
    per_head = [received(rows, units, 1) for rows, units in heads]
    for _, units in heads:
        for i, unit in enumerate(units):
            unit.score = sum(found[i] for found in per_head)


def scissorhands(window: int):
    def rule(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
        for rows, units in heads:
            chosen = [row for at, row in enumerate(rows) if at % CHUNK >= CHUNK - window]
            for i, unit in enumerate(units):
                unit.score = float(sum(i < len(row) and row[i] > 1 / len(row) for row in chosen))

    return rule


def infllm(block: int, decay: float):
    used: dict[tuple[int, int, int], float] = {}  # what a unit received

    def rule(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
        for head, (rows, units) in enumerate(heads):
            for unit, new in zip(units, received(rows, units), strict=True):
                used[layer, head, unit.position] = decay * used.get((layer, head, unit.position), 0.0) + new
            for unit in units:
                block_of = unit.position // block
                unit.score = sum(used[layer, head, other.position] for other in units
                                 if other.position // block == block_of)

    return rule


def nacl(proxies: int, first: int, share: float, seed: int, fresh: bool, uniform: bool = False):
    def rule(stream: Watched, layer: int, heads: list[tuple[Rows, list[Unit]]]) -> None:
        chosen = [*range(first), *range(CHUNK - proxies + first, CHUNK)]
        positions = torch.tensor([[unit.position for unit in units] for _, units in heads])
        luck = noise.gumbel(seed, layer, positions, stream.seen - CHUNK if fresh else None)
        for head, (rows, units) in enumerate(heads):
            some = [row for at, row in enumerate(rows) if at % CHUNK in chosen]
            score = [sum(row[i] for row in some if i < len(row)) / GROUPS for i in range(len(units))]
            own = {stream.seen - CHUNK + row for row in chosen} if proxies < CHUNK else set()
            room = UNITS - stream.sinks - stream.stabilizers
            free = range(stream.sinks, len(units) - stream.stabilizers)
            best = sorted(free, key=lambda i: (math.inf if units[i].position in own else score[i], i))
            stays = best[len(best) - (room - int(share * room)):]
            for i, unit in enumerate(units):
                drawn = float(luck[head, i]) + (0.0 if uniform else score[i])
                unit.score = 2.0**22 + stays.index(i) + 1 if i in stays else drawn

    return rule


@pytest.mark.parametrize(("policy", "knobs", "protection", "rule"), [
    ("h2o", {}, (2, 10), h2o),
    ("snapkv", {"window": 4, "kernel": 3}, (2, 4), snapkv(4, 3)),
    ("snapkv", {"window": 1, "kernel": 1}, (2, 3), snapkv(1, 1)),
    ("snapkv", {"window": 100}, (2, 17), snapkv(8, 5)),
    ("tova", {}, (2, 3), tova),
    ("scissorhands", {}, (2, 10), scissorhands(8)),
    ("scissorhands", {"window": 3, "recent": 0}, (2, 3), scissorhands(3)),
    ("infllm", {"block": 4, "decay": 0.5}, (2, 3), infllm(4, 0.5)),
    ("infllm", {"block": 1, "decay": 1.0}, (2, 3), infllm(1, 1.0)),
    ("infllm", {}, (2, 3), infllm(128, 0.1)),
    ("nacl", {"proxies": 0.25, "random": 0.5, "seed": 3}, (2, 3), nacl(2, 0, 0.5, 3, True)),
    ("nacl", {"proxies": 0.5, "random": 0.3, "where": "both", "draw": "reservoir"}, (2, 3),
     nacl(4, 2, 0.3, 0, False)),
    ("nacl", {"random": 0.0}, (2, 3), nacl(1, 0, 0.0, 0, True)),
    ("nacl", {"proxies": 1.0, "random": 1.0}, (2, 3), nacl(8, 0, 1.0, 0, True)),
    ("nacl", {"proxies": 1.0, "random": 0.4}, (2, 3), nacl(8, 0, 0.4, 0, True)),
    ("nacl", {"proxies": 0.0, "random": 0.5, "chances": "uniform"}, (2, 3), nacl(1, 0, 0.5, 0, True, True)),
])
@pytest.mark.thorough(but=2)
def test_it_evicts_as_its_formula_does(policy: str, knobs: dict, protection: tuple[int, int], rule):
    """12 chunks with eviction: the same units in every layer and head, the same scores to 1e-4."""
    engine = build(policy, units=UNITS, chunk_size=CHUNK, sinks=2, stabilizers=3, **knobs)
    assert engine.layout.protection == [protection] * LAYERS
    naive = Watched(rule, protection)
    state, ids = engine.open(0), ids_of(12 * CHUNK, seed=3)
    for at in range(0, len(ids), CHUNK):
        feed(engine, state, ids[at:at + CHUNK])
        naive.feed(ids[at:at + CHUNK])
        full = state.seen > UNITS
        for layer in range(LAYERS):
            assert state.store.positions(layer).tolist() == naive.positions(layer)
            if full and policy == "nacl":  # the tolerance below is wider than the steps between those that stay
                above = [[max(score - 2.0**22, 0.0) for score in row] for row in naive.scores(layer)]
                assert (state.store.scores(layer)[0] - 2.0**22).clamp(min=0).tolist() == above
            if full or policy != "nacl":  # nobody asks it before the memory is full
                torch.testing.assert_close(state.store.scores(layer)[0], torch.tensor(naive.scores(layer)), atol=1e-4,
                                           rtol=1e-4)


def test_a_copy_that_keeps_less_keeps_the_best_of_nacl():
    engine = build("nacl", units=UNITS, chunk_size=CHUNK, sinks=0, stabilizers=0, random=0.5, proxies=0.125)
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK, seed=3))
    before = [(state.store.positions(layer).clone(), state.store.scores(layer)[0].clone()) for layer in range(LAYERS)]
    engine.thin(state, 0.25)
    for layer, (positions, scores) in enumerate(before):
        assert scores.isfinite().all()
        kept = state.store.positions(layer)
        for head in range(len(positions)):
            assert positions[head][scores[head].argmax()] == state.seen - 1, "the proxy itself is the best"
            best = scores[head].topk(kept.shape[1]).indices
            assert kept[head].tolist() == positions[head][best.sort().values].tolist()


# -- knobs that change what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["snapkv", "scissorhands"])
def test_a_window_always_fits_the_budget(name: str):
    policy = make_policy(name, {"window": 500} if name == "snapkv" else {"recent": 500})
    assert policy.protection(20, 4, 2) == (4, 15)
    assert policy.protection(5, 4, 0) == (4, 0)


@pytest.mark.parametrize("knobs", [{"seed": 1}, {"draw": "reservoir"}, {"random": 0.0}, {"proxies": 1.0},
                                   {"chances": "uniform"}, {"where": "both", "proxies": 0.5}])
@pytest.mark.thorough(but=2)
def test_knobs_of_nacl_are_heard(knobs: dict):
    def kept(**knobs) -> list:
        engine = build("nacl", units=UNITS, chunk_size=CHUNK, **{"random": 0.6, "proxies": 0.25} | knobs)
        state = engine.open(0)
        feed(engine, state, ids_of(8 * CHUNK))
        return [state.store.positions(layer).tolist() for layer in range(LAYERS)]

    assert kept() == kept() != kept(**knobs)


def test_with_all_tokens_as_proxies_one_eviction_is_that_of_h2o():
    """NaCl, Figure 5: a share of 100 % is H2O."""
    kept = []
    for policy, knobs in (("nacl", {"proxies": 1.0, "random": 0.0}), ("h2o", {"recent": 0.0})):
        engine = build(policy, units=UNITS, chunk_size=4 * UNITS, stabilizers=3, **knobs)
        state = engine.open(0)
        feed(engine, state, ids_of(4 * UNITS))
        kept.append([state.store.positions(layer).tolist() for layer in range(LAYERS)])
    assert kept[0] == kept[1]


def test_heads_and_layers_draw_apart():
    """With equal scores the draws of NaCl by head and by layer, and those of the random policy, keep other units."""
    engine = build("nacl", units=UNITS, chunk_size=CHUNK, random=1.0)
    state = engine.open(0)
    feed(engine, state, [7] * (8 * CHUNK))
    sets = {tuple(head) for layer in range(LAYERS) for head in state.store.positions(layer).tolist()}
    assert len(sets) == LAYERS * HEADS


def test_one_lot_for_a_layer_falls_alike_in_all_its_heads():
    engine = build("nacl", units=UNITS, chunk_size=CHUNK, random=1.0, lots="layer")
    state = engine.open(0)
    feed(engine, state, [7] * (8 * CHUNK))
    sets = [{tuple(head) for head in state.store.positions(layer).tolist()} for layer in range(LAYERS)]
    assert all(len(found) == 1 for found in sets) and len(set.union(*sets)) == LAYERS


# -- noise ----------------------------------------------------------------------------------------------------------


def test_gumbel_noise_has_its_distribution_and_is_new_at_every_step():
    positions = torch.arange(50_000).expand(2, -1)
    first, again, other, ever = (noise.gumbel(1, 2, positions, step) for step in (8, 8, 16, None))
    assert torch.equal(first, again)
    for sample in (*first, *other, *ever):
        assert sample.isfinite().all()
        assert abs(float(sample.mean()) - 0.5772) < 0.03 and abs(float(sample.var()) - math.pi**2 / 6) < 0.06
    rows = torch.stack([*first, *other, *ever]).double()
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 0.02


def test_gumbel_noise_draws_from_the_softmax_without_replacement():
    """2 of 4 by score + noise, 20,000 times: how often each is among them, worked out by hand."""
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0])
    p = scores.double().softmax(0).tolist()
    draws = scores + noise.gumbel(0, 0, torch.arange(80_000).view(20_000, 4))
    found = torch.zeros(4).scatter_add_(0, draws.topk(2).indices.flatten(), torch.ones(40_000)) / 20_000
    expected = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    assert torch.allclose(found, torch.tensor(expected), atol=0.015)


@pytest.mark.parametrize("longest", [1, 2, 3, 7, 8, 128])
def test_sums_of_blocks(longest: int):
    noisy = torch.Generator().manual_seed(longest)
    positions = torch.stack([torch.randperm(400, generator=noisy)[:90].sort().values for _ in range(3)])
    x, blocks = torch.randn(3, 90, generator=noisy), positions // longest
    expected = torch.stack([torch.stack([row[own == block].sum() for block in own])
                            for row, own in zip(x, blocks, strict=True)])
    before = x.clone()
    torch.testing.assert_close(sum_of_blocks(x, blocks, longest), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


# -- heads on other features ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("policy", ["kvzap", "trimkv"])
def test_heads_read_what_the_attention_module_is_given(policy: str, name: str):
    """Against hooks on the stock model's attention modules, run over the whole prompt at once."""
    stock, ids = model(name), ids_of(40)
    engine = build(policy, on=stock, units=64)
    state = engine.open(0)
    feed(engine, state, ids)
    given: dict[int, torch.Tensor] = {}
    hooks = [layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: given.__setitem__(module.layer_idx, kwargs["hidden_states"][0]), with_kwargs=True)
        for layer in stock.get_decoder().layers]
    with torch.no_grad():
        stock(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    heads = engine.policy.heads
    for layer in range(engine.shape.layers):
        if engine.shape.sliding[layer]:
            continue
        inner = torch.nn.functional.silu(given[layer] @ heads.fc1[layer].weight.T)
        out = (inner @ heads.fc2[layer].weight.T).T
        scores = state.store.scores(layer)
        if policy == "kvzap":
            torch.testing.assert_close(scores[0], out, rtol=1e-4, atol=1e-4)
            continue
        log_beta = -(1 + (-out).exp()).log()
        torch.testing.assert_close(scores[1], log_beta, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores[0], log_beta * (40 - torch.arange(40)), rtol=1e-4, atol=1e-3)


def test_trimkv_lets_every_unit_fall_behind():
    """Newer units overtake the best old ones, which the same heads would keep for ever as static scores."""
    engine = build("trimkv", units=UNITS, chunk_size=CHUNK, sinks=0, stabilizers=0)
    state = engine.open(0)
    feed(engine, state, ids_of(60 * CHUNK))
    for layer in range(LAYERS):
        assert int(state.store.positions(layer).min()) > 20 * CHUNK
        log_beta, age = state.store.scores(layer)[1], state.seen - state.store.positions(layer)
        assert torch.equal(state.store.scores(layer)[0], log_beta * age)
