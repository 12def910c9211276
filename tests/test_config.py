"""The knobs: what is refused, how budgets are shared out, and what a size holds."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from locret_stream.budgets import largest
from locret_stream.config import (
    Budget,
    ModelShape,
    Sampling,
    StreamConfig,
    UnitBytes,
    budget_from,
    check_window,
    unit_bytes,
)
from locret_stream.errors import ConfigError, LocretError, WindowExceeded


def shape_of(layers: int = 3, window: int = 4096, sliding: tuple[int | None, ...] | None = None) -> ModelShape:
    return ModelShape.even(layers=layers, kv_heads=2, groups=2, head_dim=16, vocab=100, window=window, item_bytes=4,
                           sliding=sliding or (None,) * layers)


@pytest.mark.parametrize("knobs", [
    dict(units=0), dict(units=-5), dict(units=2.5), dict(units="10"), dict(units=True), dict(units=10, sinks=-1),
    dict(units=10, stabilizers=-1), dict(units=10, sinks=1.0), dict(units=10, stabilizers=None),
    dict(units=10, allocation="pyramids"), dict(units=10, allocation=()), dict(units=10, allocation=(1.0, 0.0)),
    dict(units=10, allocation=(1.0, -1.0)), dict(units=10, allocation=(math.inf, 1.0)),
    dict(units=10, allocation=(math.nan,)), dict(units=10, allocation=("a",)), dict(units=10, allocation=3),
    dict(units=10, allocation=None), dict(units=10**400), dict(units=2**31), dict(units=10, stabilizers=10**400),
    dict(units=10, allocation=(10**400, 1)),
])
def test_budget_refuses(knobs):
    with pytest.raises(ConfigError, match="expected"):
        Budget(**knobs)


@pytest.mark.parametrize(("units", "sinks", "stabilizers"), [(36, 4, 32), (10, 10, 0), (10, 0, 10), (10, 6, 5)])
def test_protection_must_leave_room_to_compete(units: int, sinks: int, stabilizers: int):
    least = sinks + stabilizers + 1
    with pytest.raises(ConfigError, match=rf"of {units} units the smallest layer gets {units}, and {sinks} sinks \+ "
                                          rf"{stabilizers} stabilizers .* at least {least} units"):
        Budget(units=units, sinks=sinks, stabilizers=stabilizers).per_layer(shape_of())
    assert Budget(units=least, sinks=sinks, stabilizers=stabilizers).per_layer(shape_of())
    assert Budget(units=units, sinks=sinks - (sinks > 0), stabilizers=max(0, units - sinks - 1)).per_layer(shape_of())


def test_protection_is_checked_against_the_smallest_layer():
    budget = Budget(units=20, sinks=4, stabilizers=8, allocation=(0.5, 1.0, 1.5))
    with pytest.raises(ConfigError, match=r"smallest layer gets 10, .* at least 26 units"):
        budget.per_layer(shape_of())
    assert min(msgspec.structs.replace(budget, units=26).per_layer(shape_of())) == 13


@given(st.integers(8, 9000), st.lists(st.floats(0.05, 20), min_size=1, max_size=8).map(tuple))
def test_without_explicit_protection_no_layer_is_protected_whole(units: int, shares: tuple[float, ...]):
    shape = shape_of(layers=len(shares))
    budget = budget_from(units, shape, 16, shares=shares)
    assert budget.sinks <= 4 and budget.stabilizers <= 32
    smallest = units * len(shares) * min(shares) / sum(shares)
    if smallest >= 1:
        assert min(budget.per_layer(shape, shares)) > budget.sinks + budget.stabilizers


def test_wrong_number_of_shares():
    with pytest.raises(ConfigError, match="2 layer shares for a model of 3 layers"):
        Budget(units=50, allocation=(1.0, 2.0)).per_layer(shape_of())


@pytest.mark.parametrize("shares", [(1e308, 1e308), (1e308, 1.0), (1e100, 1.0)])
def test_shares_that_no_sum_holds_are_refused(shares: tuple[float, ...]):
    with pytest.raises(ConfigError, match=r"positive numbers, together below 1e\+100"):
        Budget(units=50, allocation=shares)
    assert Budget(units=50, allocation=(4e99, 4e99)).per_layer(shape_of(2)) == (50, 50)


@given(st.integers(1, 5_000), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_shares_sum_to_the_total_exactly(units: int, shares: list[float]):
    budget = Budget(units=units, sinks=0, stabilizers=0, allocation=tuple(shares))
    try:
        found = budget.per_layer(shape_of(len(shares)))
    except ConfigError:  # a layer so poor that it holds nothing
        assert min(shares) * units * len(shares) / sum(shares) < 1.0
        return
    assert sum(found) == units * len(shares) and min(found) >= 1
    exact = [units * len(shares) * share / math.fsum(shares) for share in shares]
    assert all(abs(a - b) < 1 + 1e-6 for a, b in zip(found, exact, strict=True))
    order = sorted(range(len(shares)), key=shares.__getitem__)
    assert all(found[a] <= found[b] + 1 for a, b in itertools.pairwise(order))


def test_auto_takes_the_shares_of_the_heads():
    budget = Budget(units=40, sinks=0, stabilizers=0)
    assert budget.per_layer(shape_of()) == (40, 40, 40)
    assert budget.per_layer(shape_of(), (1.0, 2.0, 3.0)) == (20, 40, 60)
    uniform = Budget(units=40, sinks=0, stabilizers=0, allocation="uniform")
    assert uniform.per_layer(shape_of(), (1.0, 2.0, 3.0)) == (40, 40, 40)


@given(st.integers(1, 400), st.lists(st.floats(0.05, 20), min_size=1, max_size=8).map(tuple))
@example(83, (1.0, 1.5, 1.5, 1.125, 1.3125, 1.8125, 12.625, 0.080078125))  # one share is 400.6, and 400 rounded
def test_shares_of_heads_give_way_to_the_window(units: int, shares: tuple[float, ...]):
    """They were measured for another budget; the sum stays, and shares that fit the window do not change."""
    budget, shape = Budget(units=units, sinks=0, stabilizers=0), shape_of(len(shares))
    own = Budget(units=units, sinks=0, stabilizers=0, allocation=shares)
    try:
        assert own.per_layer(shape, most=400) == own.per_layer(shape), "given by hand they are no advice"
    except ConfigError:  # a layer so poor that it holds nothing
        return
    plain, found = budget.per_layer(shape, shares), budget.per_layer(shape, shares, most=400)
    if units * len(shares) * min(shares) / sum(shares) >= 1:
        assert plain == own.per_layer(shape)
    assert sum(found) == units * len(shares) and max(found) <= 400
    assert found == plain or max(plain) > 400
    free = [(a, b) for a, b in zip(found, plain, strict=True) if a < 400]
    assert all(a >= b - 1 for a, b in free), "what is cut off goes to the others"


@given(st.integers(1, 300), st.integers(0, 4), st.integers(0, 12),
       st.lists(st.floats(0.05, 20), min_size=1, max_size=8).map(tuple))
def test_shares_of_heads_leave_every_layer_room_to_compete(units: int, sinks: int, stabilizers: int, shares):
    """They were measured for another budget: only a mean that is too small for equal layers is refused."""
    budget, shape = Budget(units=max(units, sinks + stabilizers), sinks=sinks, stabilizers=stabilizers), shape_of(
        len(shares))
    if budget.units <= sinks + stabilizers:
        with pytest.raises(ConfigError, match=f"at least {sinks + stabilizers + 1} units"):
            budget.per_layer(shape, shares)
        return
    found = budget.per_layer(shape, shares)
    assert sum(found) == budget.units * len(shares) and min(found) > sinks + stabilizers
    exact = [budget.units * len(shares) * share / sum(shares) for share in shares]
    if min(exact) >= sinks + stabilizers + 1:
        assert all(abs(a - b) < 1 + 1e-6 for a, b in zip(found, exact, strict=True)), "as they were"
    assert all(a <= b + 1 for a, b in zip(found, exact, strict=True) if a > sinks + stabilizers + 2), "others give"
    by_share = sorted(range(len(shares)), key=shares.__getitem__)
    assert all(found[a] <= found[b] + 1 for a, b in itertools.pairwise(by_share))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8).map(tuple), st.integers(1, 2000))
def test_a_mean_that_fits_the_window_fits_it_by_any_shares(shares: tuple[float, ...], most: int):
    budget = Budget(units=most, sinks=0, stabilizers=0)
    assert budget.per_layer(shape_of(len(shares)), shares, most=most) == (most,) * len(shares)


def test_the_largest_number_that_fits_is_found_up_to_the_most():
    for most, fitting in itertools.product(range(7), range(9)):
        assert largest(fitting.__ge__, most) == min(fitting, most)


def test_uniform_is_no_advice():
    """It is none even if the heads have equal shares, as after an allocation that gained nothing."""
    shape = shape_of(4, sliding=(None, 16, None, 16))
    for shares in (None, (1.0, 1.0, 1.0, 1.0)):
        with pytest.raises(ConfigError, match=r"smallest layer gets 10, .* at least 13 units"):
            Budget(units=10, sinks=4, stabilizers=8, allocation="uniform").per_layer(shape, shares)
    assert Budget(units=10, sinks=4, stabilizers=8).per_layer(shape, (1.0, 1.0, 1.0, 1.0)) == (13, 7, 13, 7)


def test_only_advice_is_raised_and_only_where_all_is_attended_to():
    budget = Budget(units=64, sinks=4, stabilizers=4)
    assert budget.per_layer(shape_of(4), (16.0, 464.0, 16.0, 16.0), most=1152) == (9, 229, 9, 9)
    with pytest.raises(ConfigError, match=r"smallest layer gets 8, .* at least 72 units"):
        msgspec.structs.replace(budget, allocation=(16.0, 464.0, 16.0, 16.0)).per_layer(shape_of(4))
    shape = shape_of(4, sliding=(6, None, None, None))
    assert budget.per_layer(shape, (1.0, 29.0, 1.0, 1.0)) == (6, 230, 9, 9)


def test_shares_that_cannot_fit_the_window_stay_as_they_are():
    budget = Budget(units=500, sinks=0, stabilizers=0)
    assert budget.per_layer(shape_of(), (1.0, 2.0, 3.0), most=400) == (250, 500, 750)
    assert budget.per_layer(shape_of(), (1.0, 2.0, 3.0), most=600) == (300, 600, 600)


def test_adaptive_is_the_shares_of_the_heads_or_an_error():
    budget = Budget(units=40, sinks=0, stabilizers=0, allocation="adaptive")
    assert budget.per_layer(shape_of(), (1.0, 2.0, 3.0)) == (20, 40, 60)
    with pytest.raises(ConfigError, match=r"no shares are stored .* budget_shares"):
        budget.per_layer(shape_of())


def test_a_pyramid_falls_linearly_and_leaves_every_layer_what_is_protected():
    """PyramidKV's numbers: of 128 - 8 units a twentieth in the last layer, the rest of twice that in the first."""
    budget = Budget(units=128, sinks=0, stabilizers=8, allocation="pyramid")
    assert budget.per_layer(shape_of(5)) == (8 + 234, 8 + 177, 8 + 120, 8 + 63, 8 + 6)
    assert budget.per_layer(shape_of(1)) == (128,)
    for layers, units in ((2, 61), (32, 6000), (7, 100)):
        found = Budget(units=units, sinks=4, stabilizers=32, allocation="pyramid").per_layer(shape_of(layers))
        assert sum(found) == layers * units and list(found) == sorted(found, reverse=True)
        assert found[-1] == pytest.approx(36 + (units - 36) / 20, abs=1)
        steps = [a - b for a, b in itertools.pairwise(found)]
        assert max(steps) - min(steps) <= 2
    with pytest.raises(ConfigError, match="at least 56 units"):
        Budget(units=44, sinks=4, stabilizers=32, allocation="pyramid").per_layer(shape_of())
    assert Budget(units=56, sinks=4, stabilizers=32, allocation="pyramid").per_layer(shape_of())


def test_sliding_layers_never_hold_more_than_their_window():
    shape = shape_of(sliding=(24, None, None))
    assert Budget(units=100).per_layer(shape) == (24, 100, 100)
    assert Budget(units=40).per_layer(shape) == (24, 40, 40)  # protection is that of the full layers
    every = shape_of(sliding=(24, 24, 24))
    assert Budget(units=30).per_layer(every) == (24, 24, 24), "they protect nothing"


def test_a_layer_that_would_hold_nothing_is_refused():
    shape = shape_of(sliding=(24, None, None))
    with pytest.raises(ConfigError, match=r"layer 0, which has a sliding window, gets none; expected at least 1000001"):
        Budget(units=30, sinks=0, stabilizers=0, allocation=(1e-6, 1.5, 1.5)).per_layer(shape)
    assert Budget(units=30, sinks=2, stabilizers=2).per_layer(shape, (1e-9, 1.0, 1.0)) == (1, 45, 44), "advice"
    for allocation in ((5e-324, 1.0, 1.0), (1.0, 5e-324, 1.0)):
        with pytest.raises(ConfigError, match="expected shares closer to each other"):
            Budget(units=30, allocation=allocation).per_layer(shape)


def test_window_exceeded_names_what_would_fit():
    shape = shape_of(window=100, sliding=(24, None, None))
    check_window((24, 84, 84), 16, shape)
    with pytest.raises(WindowExceeded, match=r"layer 2 would hold 85 \+ 16 = 101 .* knows 100 .* at most 84 units"):
        check_window((24, 84, 85), 16, shape)
    with pytest.raises(WindowExceeded, match="expected a chunk_size below 100"):
        check_window((24, 1, 1), 100, shape)
    assert issubclass(WindowExceeded, ConfigError) and issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, LocretError)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, "8", None, True])
def test_chunk_size_refuses(chunk_size):
    with pytest.raises(ConfigError, match="chunk_size"):
        StreamConfig(budget=Budget(units=10), chunk_size=chunk_size)


def test_budget_from_units_and_budgets():
    shape = shape_of()
    assert budget_from(6000, shape, 1024) == Budget(units=6000, sinks=4, stabilizers=32)
    assert budget_from(16, shape, 8) == Budget(units=16, sinks=2, stabilizers=2)
    assert budget_from(3, shape, 8) == Budget(units=3, sinks=0, stabilizers=0)
    assert budget_from(100, shape, 8, sinks=0, stabilizers=9) == Budget(units=100, sinks=0, stabilizers=9)
    budget = Budget(units=7, sinks=1, stabilizers=1)
    assert budget_from(budget, shape, 8) is budget


@pytest.mark.parametrize(("size", "number"), [
    ("512MiB", 512 * 2**20), ("1.5 gib", 1.5 * 2**30), ("300KB", 300_000), (" 2MB ", 2_000_000), ("999999B", 999_999)])
def test_budget_from_sizes(size: str, number: float):
    """The size holds budget + chunk_size units of every layer and head, and not one more."""
    shape = shape_of()
    per_row = unit_bytes(shape.units[0], 4).kept * shape.layers
    units = budget_from(size, shape, 64).units
    assert (units + 64) * per_row <= number < (units + 65) * per_row


@given(st.integers(60_000, 3_000_000), st.lists(st.sampled_from([None, 24, 200]), min_size=3, max_size=3).map(tuple),
       st.lists(st.sampled_from([UnitBytes(280, 280), UnitBytes(408, 408), UnitBytes(80, 280, 256, 128)]), min_size=3,
                max_size=3).map(tuple),
       st.none() | st.lists(st.floats(0.05, 20), min_size=3, max_size=3).map(tuple))
def test_a_size_is_that_of_a_slot(size: int, sliding: tuple, per_unit: tuple, shares: tuple | None):
    """Whatever its layers hold: as many units as fit, and not one more where a layer can take one."""
    shape = shape_of(sliding=sliding, window=10**6)

    def takes(budget: Budget) -> int:
        kept = budget.per_layer(shape, shares)
        return sum(unit.of(units, 16, 0) for units, unit in zip(kept, per_unit, strict=True))

    budget = budget_from(f"{size}B", shape, 16, sinks=0, stabilizers=0, shares=shares, per_unit=per_unit)
    assert takes(budget) <= size
    if None in sliding:
        assert takes(msgspec.structs.replace(budget, units=budget.units + 2)) > size


def test_a_size_beyond_any_memory_is_refused():
    for size in ("9" * 400 + "GB", "999999999999999GB"):
        with pytest.raises(ConfigError, match="expected a smaller size"):
            budget_from(size, shape_of(), 64)
    with pytest.raises(ConfigError, match="expected at most 2,147,483,647"):
        budget_from(10**400, shape_of(), 64)


def test_unit_bytes_is_that_of_a_pool():
    import torch

    from locret_stream.cache import Pool
    shape = shape_of()
    pool = Pool(shape, (50, 50, 50), 8, 1, rope=(True,) * 3, planes=2, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.slot_bytes == unit_bytes(shape.units[0], 4, planes=2).of(50, 8, 0) * 3
    coded = Pool(shape, (50, 50, 50), 8, 1, rope=(True,) * 3, planes=2, dtype=torch.float32, device=torch.device("cpu"),
                 store_bits=(8, 4), firsts=(3, 3, 3))
    assert coded.slot_bytes == unit_bytes(shape.units[0], 4, planes=2, store_bits=(8, 4)).of(50, 8, 3) * 3


@pytest.mark.parametrize("value", ["512", "12 parsecs", "-5MiB", "MiB", "", "1KB", 1.5, None, True, [5]])
def test_budget_from_refuses(value):
    with pytest.raises(ConfigError, match="expected"):
        budget_from(value, shape_of(), 1024)


@pytest.mark.parametrize("value", [0, -1])
def test_budget_from_refuses_no_units(value):
    with pytest.raises(ConfigError, match="units"):
        budget_from(value, shape_of(), 1024)


@pytest.mark.parametrize("knobs", [
    dict(max_new_tokens=0), dict(max_new_tokens=1.5), dict(max_new_tokens=True), dict(temperature=-0.1),
    dict(temperature=math.nan), dict(temperature=math.inf), dict(temperature=10**400),
    dict(temperature="hot"), dict(temperature=None),
    dict(top_k=0), dict(top_k=2.5), dict(top_k=True), dict(top_p=0), dict(top_p=1.01), dict(top_p=math.nan),
    dict(top_p=True), dict(min_p=0.0), dict(min_p=2), dict(repetition_penalty=0), dict(repetition_penalty=-1),
    dict(repetition_penalty=math.inf), dict(stop="END"), dict(stop=("",)), dict(stop=(1,)), dict(stop=["END"]),
    dict(seed=1.5), dict(seed=None),
])
def test_sampling_refuses(knobs):
    with pytest.raises(ConfigError, match=rf"{next(iter(knobs))} is .*; expected"):
        Sampling(**knobs)


def test_sampling_accepts_the_edges():
    Sampling(max_new_tokens=1, temperature=0, top_k=1, top_p=1, min_p=1, repetition_penalty=1e-3, stop=("a", "b"),
             seed=-(2**70))
    with pytest.raises(AttributeError):
        Sampling().temperature = 1.0
