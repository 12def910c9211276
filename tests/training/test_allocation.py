"""Units go where they gain most, noise moves none, every measurement is stored, and a runtime uses the shares."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import msgspec
import pytest
import torch
from hypothesis import example as tried
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream import Budget, Runtime, models
from locret_stream.config import StreamConfig
from locret_stream.engine import Engine
from locret_stream.errors import ConfigError, HeadsMismatch, InvalidTokens, WindowExceeded
from locret_stream.heads import RetainingHeads
from locret_stream.policies import make_policy
from locret_stream.training import (
    Allocation,
    AllocationConfig,
    Example,
    TrainConfig,
    allocate,
    held_out_examples,
    train_heads,
    validation,
)
from locret_stream.training.layer_shares import (
    CHANCE,
    CROSSED,
    ONE_ERROR,
    by_curves,
    crossed,
    divide,
    envelope,
    exceeds,
    halves,
    proportional,
    t_tail,
)
from locret_stream.training.results import HALVES
from tests.architectures import make
from tests.kit import WITH_HEADS, random_heads, saved_heads
from tests.training.tiny import make_examples, make_tokenizer

pytestmark = pytest.mark.thorough

LENGTH = 72
SMALL = AllocationConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, examples=10, factors=(1 / 4, 1, 4))
FINER = msgspec.structs.replace(SMALL, units=24, examples=4, factors=AllocationConfig().factors)


@torch.no_grad()
def answered(model, count: int, seed: int = 0) -> list[Example]:
    """Random ids with three replies in each that the model itself gives: any eviction makes them less likely."""
    noise, ids, spans = torch.Generator().manual_seed(seed), torch.empty(count, 0, dtype=torch.int64), []
    for end in range(LENGTH // 3, LENGTH + 1, LENGTH // 3):
        ids = torch.cat([ids, torch.randint(3, 401, (count, LENGTH // 6), generator=noise)], 1)
        spans.append((ids.shape[1], end))
        while ids.shape[1] < end:
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return [Example(row, tuple(spans)) for row in ids]


def silenced(name: str = "llama", but: int | None = None):
    """A model in which the attention of one layer alone, or of none, adds anything."""
    model = make(name)
    for layer, block in enumerate(model.model.layers):
        if layer != but:
            block.self_attn.o_proj.weight.data.zero_()
    return model


@pytest.fixture(scope="module")
def model():
    return make("llama")


@pytest.fixture(scope="module")
def examples(model):
    return answered(model, 10)


def faked(monkeypatch, loss=lambda budgets: 10 / budgets[1]) -> list[tuple[int, ...]]:
    """Make every measurement loss(budgets) plus a constant of the example, per answer token; by default only layer 1
    matters. Returns the list of budgets that are measured."""
    asked = []

    def answer_nll(engine, policy, example, behind=None):
        asked.append(engine.budgets)
        weight = sum(end - start for start, end in example.answer_spans)
        return weight * (loss(engine.budgets) + int(example.ids[5]) % 7 / 10)

    monkeypatch.setattr(validation, "answer_nll", answer_nll)
    return asked


# -- numbers alone ------------------------------------------------------------------------------------------------


def read_off(curve, units: int) -> float:
    """The loss at that many units, linear between the points and constant after the last one."""
    for (low, high), (one, two) in zip(itertools.pairwise([u for u, _ in curve]),
                                       itertools.pairwise([x for _, x in curve]), strict=True):
        if units <= high:
            return one + (two - one) * (units - low) / (high - low)
    return curve[-1][1]


@st.composite
def convex_curves(draw):
    curves = []
    for _ in range(draw(st.integers(1, 3))):
        at, loss, slope = draw(st.integers(1, 3)), 10.0, draw(st.floats(0.1, 2))
        curve = [(at, loss)]
        for _ in range(draw(st.integers(0, 3))):
            width = draw(st.integers(1, 5))
            at, loss = at + width, loss - slope * width
            curve.append((at, loss))
            slope *= draw(st.floats(0.1, 1))
        curves.append(curve)
    most = draw(st.integers(max(curve[-1][0] for curve in curves), 20))
    least = sum(curve[0][0] for curve in curves)
    return curves, draw(st.integers(least, min(most * len(curves), least + 20))), most


@settings(max_examples=150)
@given(convex_curves())
def test_no_division_is_better(case):
    curves, total, most = case
    found = divide(curves, total, most)
    assert sum(found) == total
    assert all(curve[0][0] <= units <= most for curve, units in zip(curves, found, strict=True))

    def cost(division):
        return sum(read_off(curve, units) for curve, units in zip(curves, division, strict=True))

    ranges = [range(curve[0][0], most + 1) for curve in curves]
    best = min(cost(division) for division in itertools.product(*ranges) if sum(division) == total)
    assert cost(found) == pytest.approx(best, abs=1e-9)


def test_what_gains_nothing_goes_to_those_that_have_least():
    assert divide([[(2, 1.0)], [(2, 5.0), (10, 1.0)], [(2, 1.0)]], 24, 100) == [7, 10, 7]
    assert divide([[(2, 1.0)]] * 3, 25, 100) == [9, 8, 8]
    assert divide([[(2, 9.0), (50, 1.0)], [(2, 1.0)]], 40, 30) == [30, 10]  # no layer gets more than the window leaves
    with pytest.raises(ConfigError, match="found 5 units for 3 layers; expected 6, the least of each, to 300"):
        divide([[(2, 1.0)]] * 3, 5, 100)


@settings(max_examples=60)
@tried([0.0, 1.8125, 14.8125, 27.8125], 0, 3)  # 3 * 14.8125 / 44.4375 is 1, and less in floating point
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 200))
def test_proportional_is_exact(wanted, least, more):
    total = least * len(wanted) + more
    found = proportional(wanted, total, least, total)
    assert sum(found) == total and min(found) >= least
    beyond = [max(0.0, want - least) for want in wanted]
    if sum(beyond) > 1e-6:
        for units, each in zip(found, beyond, strict=True):  # rounding is for those that have least
            assert units - least > more * each / sum(beyond) - 1
    else:
        assert max(found) - min(found) <= 1


def test_students_t_is_that_of_the_tables():
    for t, freedom, expected in ((12.706, 1, 0.025), (4.303, 2, 0.025), (2.353, 3, 0.05), (4.785, 7, 0.001),
                                 (2.228, 10, 0.025), (3.3749, 31, 0.001), (0.0, 5, 0.5)):
        assert t_tail(t, freedom) == pytest.approx(expected, rel=2e-3)


def test_noise_is_no_gain_and_a_gain_is():
    rng, alarms, missed = random.Random(0), 0, 0
    weights = [rng.randint(1, 9) for _ in range(12)]
    for _ in range(2000):
        one, two = ([w * rng.gauss(2, 0.5) for w in weights] for _ in range(2))
        alarms += exceeds(one, two, weights, CHANCE)
        missed += not exceeds([a + w for a, w in zip(one, weights, strict=True)], two, weights, CHANCE)
    assert 0.02 < alarms / 2000 < 0.08 and missed / 2000 < 0.1
    assert not exceeds([1.0, 2.0], [1.0, 2.0], [1, 1], 0.5)
    assert not exceeds([1 + 1e-6, 2 + 1e-6], [1.0, 2.0], [1, 1], 0.5)  # rounding, the same in every example
    assert exceeds([2.0, 3.0], [1.0, 2.0], [1, 1], 1e-9)


def test_with_equal_weights_the_test_of_a_difference_is_students():
    """Of differences 1, 2 and 4 t is mean / (s / sqrt(3)); with two degrees of freedom P(T > t) has a closed form."""
    mean, variance = 7 / 3, ((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2
    t = mean / (variance / 3) ** 0.5
    chance = 0.5 - t / (2 * (2 + t * t) ** 0.5)
    for factor, found in ((1.01, True), (0.99, False)):
        assert exceeds([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], [1, 1, 1], factor * chance) == found


def test_an_envelope_is_the_convex_hull_and_of_noise_its_first_point():
    rng = random.Random(1)
    for _ in range(200):
        units = sorted(rng.sample(range(1, 100), 6))
        losses = [rng.uniform(0, 5) for _ in units]
        found = envelope(units, [[loss, loss * 2] for loss in losses], [1, 2], 1e-12)
        assert found[0] == (units[0], pytest.approx(losses[0])) and found[-1][1] == pytest.approx(
            min(losses)) if min(losses) < losses[0] - 1e-3 else True
        slopes = [(b - a) / (v - u) for (u, a), (v, b) in itertools.pairwise(found)]
        assert slopes == sorted(slopes) and all(slope < 0 for slope in slopes)
        for u, loss in zip(units, losses, strict=True):
            assert read_off(found, u) < loss + 1e-3
    noise = [[rng.gauss(2, 1) for _ in range(16)] for _ in range(6)]
    assert len(envelope([1, 2, 4, 8, 16, 32], noise, [1] * 16, CHANCE / 60)) == 1


def judged(layers: int, count: int, needy: int = 0, seed: int = 0) -> tuple[bool, bool]:
    """Whether a division is found better (as `allocate` does it, by the very examples that made it).

    Every example prefers some layers at random; that the first `needy` of them need units is all that is true.
    """
    rng, points, average = random.Random(seed), (8, 16, 32, 64, 128, 256), 64
    falls = [[rng.gauss(2 * (layer < needy), 1) for _ in range(count)] for layer in range(layers)]
    weights = [rng.randint(1, 9) for _ in range(count)]
    nll = [[[w * fall * (5 - p) / 5 for w, fall in zip(weights, layer, strict=True)] for p in range(6)]
           for layer in falls]

    def cost(units, among):
        return [sum(read_off([(u, each[i]) for u, each in zip(points, layer, strict=True)], own)
                    for own, layer in zip(units, nll, strict=True)) for i in among]

    def division(among):
        return by_curves(points, nll, weights, average * layers, 4096, among)

    everyone, sides = range(count), halves(range(count))
    even = cost([average] * layers, everyone)
    others = crossed(sides, division, lambda side, units: cost(units, sides[side]))
    return exceeds(even, others, weights, CROSSED), exceeds(even, cost(division(everyone), everyone), weights, CHANCE)


@pytest.mark.thorough
def test_a_division_that_fits_noise_is_no_gain_though_there_are_many_layers():
    found = [judged(32, 32, seed=seed) for seed in range(150)]
    alarms, naive = (sum(each) / len(found) for each in zip(*found, strict=True))
    assert 0.01 < alarms < 0.1, "CHANCE in the long run"
    assert naive > 0.5, "by what made it, noise nearly always looks like a gain: else this shows nothing"
    assert sum(judged(32, 7, seed=seed)[0] for seed in range(100)) < 12  # 4 and 3


def test_a_division_that_gains_is_found_by_examples_that_did_not_make_it():
    assert sum(judged(32, 32, needy=4, seed=seed)[0] for seed in range(20)) == 20
    assert sum(judged(32, 7, needy=8, seed=seed)[0] for seed in range(20)) > 12


def test_halves_are_every_other_one_and_equal_ones_lie_together():
    assert halves("abcd") == ([0, 2], [1, 3]) and halves("abcde") == ([0, 2, 4], [1, 3])
    assert halves("aabcad") == ([0, 1, 3, 4], [2, 5])
    for few, different in ("abc", 3), ("aabb", 2), ("", 0):
        with pytest.raises(ConfigError, match=f"found {len(few)} examples, {different} of them different; expected at "
                                              "least 4 different ones"):
            halves(few)


def test_every_example_is_charged_for_what_the_other_half_divides():
    found = crossed(([0, 2, 4], [1, 3]), lambda among: list(among), lambda side, units: [sum(units)] * (3 - side))
    assert found == [4, 6, 4, 6, 4]


# -- measured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, policy", [*(("llama", policy) for policy in WITH_HEADS), ("gemma3", "locret")])
@pytest.mark.thorough(but=2)
def test_losses_are_those_of_answers_given_token_by_token(name, policy):
    model = make(name)
    attachment = models.attach(model)
    heads = random_heads(attachment, policy=policy)
    config = StreamConfig(budget=Budget(units=14, sinks=1, stabilizers=2, allocation=(1.0, 2.0, 0.5)), chunk_size=8,
                          policy=policy)
    plain = Engine(attachment, config, make_policy(policy, heads=heads), 1)
    listening = validation.Recording(make_policy(policy, heads=heads))
    engine = Engine(attachment, config, listening, 1)
    for length in (57, 64, 71):  # a last chunk of one token, a whole one, and one between
        spans = ((9, 12), (length // 2, length // 2 + 9), (length - 3, length))
        example = Example(make_examples(1, length)[0].ids, spans)
        state, expected = plain.open(0), 0.0
        for position, token in enumerate(example.ids.tolist()):
            if any(start <= position < end for start, end in example.answer_spans):
                expected -= plain.logits(state).log_softmax(-1)[token].item()
            plain.accept(state, [token])
            while plain.ready(state):
                plain.commit(state)
        with torch.no_grad():
            assert validation.answer_nll(engine, listening, example) == pytest.approx(expected, rel=1e-4)
        assert plain.budgets == (12, 24, 6) and state.seen > 24  # every layer has evicted
    models.detach(model)


@pytest.mark.parametrize("policy, layer", [("locret", 0), ("kvzap", 2), ("trimkv", 1)])
@pytest.mark.thorough(but=1)
def test_the_only_layer_that_matters_gets_all(tmp_path, policy, layer):
    model = silenced(but=layer)
    heads = saved_heads(model, tmp_path, policy)
    weights = (heads / "heads.safetensors").read_bytes()
    seen = []
    made = allocate(model, heads, answered(model, 10), SMALL, progress=seen.append)
    expected = [3, 3, 3]
    expected[layer] = 36 - 6
    assert made.units == tuple(expected) and made.better and made.policy == policy
    assert made.shares == tuple(units / 12 for units in expected) and sum(made.shares) == 3
    assert made.measured["divided"].budgets == made.units and made.measured["even"].budgets == (12, 12, 12)
    assert made.measured["divided"].loss < made.measured["even"].loss
    assert sorted(made.curves) == [0, 1, 2] and list(made.curves[0]) == [3, 12, 30]
    quiet = (layer + 1) % 3
    assert max(made.curves[quiet].values()) == pytest.approx(made.measured["full"].loss, abs=1e-5)
    assert made.curves[layer][3] > made.curves[layer][12] > made.curves[layer][30] > made.measured["full"].loss
    assert made.measured[f"layer {quiet}: 3 units"].budgets == tuple(3 if n == quiet else 60 for n in range(3))
    assert seen[-1].step == seen[-1].steps == 10 * (9 + 3) and "divided, half 2: loss" in seen[-1].note
    assert RetainingHeads.load(heads).config.budget_shares == made.shares
    assert (heads / "heads.safetensors").read_bytes() == weights
    assert msgspec.json.decode((heads / "allocation.json").read_bytes(), type=Allocation) == made
    assert models.detach(model) == 0  # nothing is left attached


def test_where_no_layer_matters_all_get_the_same(tmp_path):
    model = silenced()
    made = allocate(model, saved_heads(model, tmp_path), answered(model, 4), SMALL)
    assert made.units == (12, 12, 12) and made.shares == (1.0, 1.0, 1.0)


def test_shares_are_served(model, examples, tmp_path, monkeypatch):
    heads = saved_heads(model, tmp_path)

    async def budgets(how: str) -> tuple[int, ...]:
        budget = Budget(units=12, sinks=1, stabilizers=1, allocation=how)
        async with Runtime(model, make_tokenizer(), heads=heads, budget=budget, chunk_size=8) as runtime:
            async with runtime.open() as ctx:
                await ctx.feed(list(range(3, 200)))
                return tuple(ctx.memory.units)

    with pytest.raises(ConfigError, match="no shares are stored"):
        asyncio.run(budgets("adaptive"))
    faked(monkeypatch)
    made = allocate(model, heads, examples, SMALL)
    assert asyncio.run(budgets("adaptive")) == asyncio.run(budgets("auto")) == made.units == (3, 30, 3)
    assert asyncio.run(budgets("uniform")) == (12, 12, 12)


def test_a_division_that_is_no_better_in_the_end_is_not_used(model, examples, tmp_path, monkeypatch):
    """Evicting in one layer alone costs little; evicting in several costs much."""
    asked = faked(monkeypatch, lambda budgets: 5 / budgets[0] + (budgets[1] < 10 and budgets[2] < 10))
    made = allocate(model, saved_heads(model, tmp_path), examples, SMALL)
    assert made.units == (30, 3, 3) and not made.better and made.shares == (1.0, 1.0, 1.0)
    assert made.measured["divided"].loss > made.measured["even"].loss
    assert asked[-10:] == [(30, 3, 3)] * 10 and asked[-20:-10] == [(12, 12, 12)] * 10
    assert RetainingHeads.load(tmp_path).config.budget_shares == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [4, 7, 10])
def test_a_division_is_judged_by_examples_that_had_no_say_in_it(count, tmp_path, model, examples, monkeypatch):
    """Every other example needs layer 0, the others layer 2: a division that serves its makers costs the other half."""
    examples, asked = examples[:count], []
    needs = {example.digest(): 2 * (n % 2) for n, example in enumerate(examples)}

    def answer_nll(engine, policy, example, behind=None):
        asked.append((needs[example.digest()], engine.budgets))
        return sum(end - start for start, end in example.answer_spans) * 10 / engine.budgets[needs[example.digest()]]

    monkeypatch.setattr(validation, "answer_nll", answer_nll)
    made = allocate(model, saved_heads(model, tmp_path), examples, SMALL)
    of_all = [10 / made.units[need] for need in needs.values()]
    assert sum(of_all) / count < 10 / 12 - 0.1, "by those who made it, it is far better than even"
    assert made.measured["even"].loss == pytest.approx(10 / 12)
    assert made.measured["divided"].loss == pytest.approx(10 / 3)
    assert not made.better and made.shares == (1.0, 1.0, 1.0)
    first, second = (made.measured[name] for name in HALVES)
    assert first.budgets == (3, 3, 30) and second.budgets == (30, 3, 3)  # each as the other half would have it
    assert asked[-count:] == [(0, (3, 3, 30))] * (count - count // 2) + [(2, (30, 3, 3))] * (count // 2)
    assert made.measured["divided"].nll[::2] == first.nll and made.measured["divided"].nll[1::2] == second.nll


def test_equal_examples_do_not_judge_each_other(tmp_path, model, examples, monkeypatch):
    faked(monkeypatch)
    heads = saved_heads(model, tmp_path)
    doubled = [example for example in examples[:4] for _ in range(2)]
    made = allocate(model, heads, doubled, SMALL)
    first, second = (made.measured[name].nll for name in HALVES)
    assert made.measured["divided"].nll == first[:2] + second[:2] + first[2:] + second[2:] and made.better
    with pytest.raises(ConfigError, match="found 8 examples, 2 of them different; expected at least 4"):
        allocate(model, heads, examples[:2] * 4, SMALL, restart=True)


@pytest.mark.thorough
def test_noise_alone_divides_nothing(model, examples, tmp_path, monkeypatch):
    """Curves may follow the noise; the division they lead to is measured anew, and is better only by chance."""
    heads, alarms = saved_heads(model, tmp_path), 0
    for seed in range(20):
        noise = random.Random(seed)
        faked(monkeypatch, lambda budgets, noise=noise: noise.gauss(2, 1))
        made = allocate(model, heads, examples, SMALL, restart=True)
        alarms += made.shares != (1.0, 1.0, 1.0)
    assert alarms <= 3, "1 of 20 in the long run"


def test_gains_that_differ_from_example_to_example_are_found():
    """Twelve examples, of which four need the units: a gain of one standard error that a strict test would miss."""
    weights, before = [10] * 12, [20.0] * 12
    after = [a - b for a, b in zip(before, [9, 0, 0.5, 4, 0, 0.2, 6, 0, 0.1, 3, 0, 0.3], strict=True)]
    assert not exceeds(before, after, weights, CHANCE / 84)
    assert envelope([16, 64], [before, after], weights, ONE_ERROR)[-1][0] == 64


def test_budgets_that_evict_nothing_are_not_measured(model, examples, tmp_path, monkeypatch):
    """60 units are committed at the end, so that 66, the most that one layer could get, would be no better."""
    asked = faked(monkeypatch, lambda budgets: max(0, 60 - budgets[1]) / 100)
    made = allocate(model, saved_heads(model, tmp_path), examples, FINER)
    assert list(made.curves[1]) == [3, 6, 12, 24, 48]
    assert len(asked) == 4 * (3 * 5 + 3) and max(max(each) for each in asked) == 60
    assert made.units == (6, 60, 6)  # what it has no use for is the others'


def test_sliding_layers_keep_their_window_and_the_others_get_the_rest(tmp_path, monkeypatch):
    model = make("gemma3")  # layer 0 slides over 24
    heads = saved_heads(model, tmp_path)
    faked(monkeypatch, lambda budgets: 10 / budgets[2])
    made = allocate(model, heads, make_examples(4, 120), msgspec.structs.replace(FINER, units=40, chunk_size=8))
    assert made.units == (24, 5, 91) and sum(made.units) == 120 and sorted(made.curves) == [1, 2]
    assert made.measured["layer 1: 5 units"].budgets == (24, 5, 112)
    assert made.measured["even"].budgets == (24, 48, 48) and made.measured["divided"].budgets == (24, 5, 91)
    assert sum(made.shares) == pytest.approx(3)
    attachment = models.attach(model)
    budget = Budget(units=40, sinks=1, stabilizers=1, allocation="adaptive")
    assert budget.per_layer(attachment.shape, made.shares) == (24, 5, 91)
    models.detach(model)
    every = make("mistral-sliding")
    with pytest.raises(ConfigError, match="every layer of this model has a sliding window"):
        allocate(every, saved_heads(every, tmp_path / "every"), make_examples(4, LENGTH), SMALL)


# -- kept and resumed ---------------------------------------------------------------------------------------------


def without_seconds(made: Allocation) -> Allocation:
    return msgspec.structs.replace(made, measured={
        name: msgspec.structs.replace(each, seconds=0.0) for name, each in made.measured.items()})


def test_an_interrupted_one_goes_on_and_measures_nothing_twice(model, examples, tmp_path, monkeypatch):
    config = msgspec.structs.replace(SMALL, examples=4)
    faked(monkeypatch)
    straight = allocate(model, saved_heads(model, tmp_path / "straight"), examples, config)
    heads = saved_heads(model, tmp_path / "stopped")
    real, calls = validation.answer_nll, []
    monkeypatch.setattr(validation, "answer_nll", lambda *args: calls.append(1) or real(*args))

    def stop_at(step: int) -> None:
        def progress(at):
            if at.step == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            allocate(model, heads, examples, config, progress=progress)

    stop_at(3)
    assert not (heads / "allocation.json").exists()
    for _ in range(2):  # within the third measurement
        stop_at(9)
        found = msgspec.json.decode((heads / "allocation.json").read_bytes(), type=Allocation)
        assert len(found.measured) == 2 and found.shares is None
        assert RetainingHeads.load(heads).config.budget_shares is None
    assert len(calls) == 3 + 9 + 1
    calls.clear()
    assert without_seconds(allocate(model, heads, examples, config)) == without_seconds(straight)
    left = len(calls)
    assert left == 4 * (len(straight.measured) - 2 - 2)  # two were stored; the last two are of half the examples each
    assert allocate(model, heads, examples, config) == msgspec.json.decode(
        (heads / "allocation.json").read_bytes(), type=Allocation)
    assert len(calls) == left  # a finished one is not measured again
    for to_come, stored in (3, ()), (1, HALVES[:1]):  # within the first half, within the second
        (heads / "allocation.json").unlink()
        stop_at(4 * 2 + left - to_come)
        found = msgspec.json.decode((heads / "allocation.json").read_bytes(), type=Allocation)
        assert tuple(name for name in HALVES if name in found.measured) == stored and found.shares is None
        assert without_seconds(allocate(model, heads, examples, config)) == without_seconds(straight)


@pytest.mark.parametrize("change, message", [
    (lambda stored: stored | {"version": 1}, r"differs in version: stored 1, now 2; .*remove that file to measure"),
    (lambda stored: stored | {"config": stored["config"] | {"rule": "scores"}}, "rule is 'scores'; expected 'loss'"),
])
def test_what_an_earlier_version_measured_is_refused_and_stays(model, examples, tmp_path, monkeypatch, change, message):
    faked(monkeypatch)
    heads = saved_heads(model, tmp_path)
    made = allocate(model, heads, examples, SMALL)
    path = heads / "allocation.json"
    stored = json.loads(path.read_bytes())
    path.write_text(json.dumps(stored | {"tops": None}))  # a field that was removed is ignored
    assert allocate(model, heads, examples, SMALL) == made
    path.write_text(json.dumps(change(stored)))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        allocate(model, heads, examples, SMALL)
    assert path.read_bytes() == before


def test_shares_that_were_not_stored_yet_are(model, examples, tmp_path, monkeypatch):
    """As after a kill between the writing of the two files."""
    faked(monkeypatch)
    heads = saved_heads(model, tmp_path)
    before = (heads / "heads.json").read_bytes()
    made = allocate(model, heads, examples, SMALL)
    (heads / "heads.json").write_bytes(before)
    assert allocate(model, heads, examples, SMALL) == made
    assert RetainingHeads.load(heads).config.budget_shares == made.shares


def test_measurements_of_something_else_are_never_mixed(model, examples, tmp_path, monkeypatch):
    faked(monkeypatch)
    heads = saved_heads(model, tmp_path)

    def differs(what: str, of=model, among=examples, config=SMALL) -> None:
        before = (heads / "allocation.json").read_bytes()
        with pytest.raises(ConfigError, match=rf"another allocation, which differs in {what}: .*remove that file"):
            allocate(of, heads, among, config)
        assert (heads / "allocation.json").read_bytes() == before

    made = allocate(model, heads, examples, SMALL)
    differs("chunk_size", config=msgspec.structs.replace(SMALL, chunk_size=10))
    differs("stabilizers", config=msgspec.structs.replace(SMALL, stabilizers=0))
    differs("data", among=examples[::-1])
    differs("fingerprint", of=make("llama", seed=4))
    other = RetainingHeads.load(heads)
    other.fc2[0].weight.data[0, 0] += 1
    other.save(heads)
    differs("heads")
    again = allocate(model, heads, examples, SMALL, restart=True)
    assert again.heads != made.heads and again.fingerprint == made.fingerprint
    (heads / "allocation.json").write_text("{")
    with pytest.raises(ConfigError, match=r"allocation\.json cannot be read: .*remove it to measure anew"):
        allocate(model, heads, examples, SMALL)


def test_training_anew_forgets_them(model, tmp_path, monkeypatch):
    faked(monkeypatch)
    config = TrainConfig(steps=2, width=8, held_out=0.4)
    examples = make_examples(20, LENGTH)
    train_heads(model, examples, tmp_path, config)
    attachment = models.attach(model)
    kept_out = held_out_examples(attachment, examples, config)
    models.detach(model)
    assert len(kept_out) >= 4 and train_heads(model, examples, tmp_path, config).held_out == len(kept_out)
    made = allocate(model, tmp_path, kept_out, SMALL)
    assert train_heads(model, examples, tmp_path, config).steps == 2  # finished as before
    assert RetainingHeads.load(tmp_path).config.budget_shares == made.shares
    train_heads(model, examples, tmp_path, msgspec.structs.replace(config, seed=1), restart=True)
    assert not (tmp_path / "allocation.json").exists()
    assert RetainingHeads.load(tmp_path).config.budget_shares is None


# -- refused ------------------------------------------------------------------------------------------------------


def test_examples_in_which_nothing_is_evicted_are_no_use(model, examples, tmp_path, monkeypatch):
    faked(monkeypatch)
    heads = saved_heads(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    short = make_examples(9, 24)
    with pytest.raises(ConfigError, match=r"of 9 held-out examples, the longest of 24 tokens, 0 are so long that "
                                          r"anything is evicted at 12 units in chunks of 12; expected at least 4"):
        allocate(model, heads, short, SMALL)
    with pytest.raises(ConfigError, match="of 12 held-out examples, the longest of 72 tokens, 3 are so long"):
        allocate(model, heads, short + examples[:3], SMALL)
    with pytest.raises(ConfigError, match="of 0 held-out examples"):
        allocate(model, heads, [], SMALL)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(allocate(model, heads, short + examples[:4], SMALL).tokens) == 4


def test_what_cannot_work_is_refused(model, examples, tmp_path):
    heads = saved_heads(model, tmp_path)
    with pytest.raises(InvalidTokens, match="token id 401; expected ids below the model's vocabulary of 401"):
        allocate(model, heads, [*examples, Example([1, 2, 401, 4], ((2, 4),))], SMALL)
    with pytest.raises(ConfigError, match="expected at least 37 units"):
        allocate(model, heads, examples, msgspec.structs.replace(SMALL, sinks=4, stabilizers=32))
    with pytest.raises(WindowExceeded, match=r"4090 units \+ chunk_size 12: the model knows 4096 positions"):
        allocate(model, heads, examples, msgspec.structs.replace(SMALL, units=4090))
    with pytest.raises(HeadsMismatch, match=r"no heads\.safetensors"):
        allocate(model, tmp_path / "none", examples, SMALL)
    larger = make("qwen3")
    with pytest.raises(HeadsMismatch, match="another model"):
        allocate(larger, heads, examples, SMALL)
    assert models.detach(model) == 0


@pytest.mark.parametrize("name, value", [
    ("units", 0), ("chunk_size", 1.5), ("sinks", -1), ("stabilizers", True), ("examples", 3), ("factors", ()),
    ("factors", (2.0, 4.0)), ("factors", (0.0, 1.0)), ("rule", "best"),
])
def test_configs_check_themselves(name, value):
    with pytest.raises(ConfigError, match=f"allocate: {name} is .*; expected "):
        AllocationConfig(**{name: value})


def test_what_is_protected_by_default_fits_the_smallest_layer():
    assert AllocationConfig(units=128).protected == (4, 5)
    assert AllocationConfig().protected == (4, 32)
    assert AllocationConfig(units=8).protected == (0, 0)
    for units in (8, 40, 128, 768, 6000):
        config = AllocationConfig(units=units)
        assert sum(config.protected) < max(1, units // 8)
