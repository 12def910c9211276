"""How a total of units is divided among layers by what was measured. Knows numbers alone: no model and no tensors.

A layer's curve is its answer loss by units. Units go where the next one gains most; what is less than a standard error
is no gain, and a division that is not better than even budgets beyond noise is not used.

A division fits the noise of the examples that made it: the more layers, the more there is to choose from. So it is not
judged by those (cross-fitting): each half of the examples makes a division, and the other half judges it. As each half
both makes and judges, what they say is not quite independent, and asked for CROSSED they are wrong about as often as
CHANCE, see the tests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from locret_stream.errors import ConfigError
from locret_stream.training.config import LEAST_EXAMPLES

LEAST_GAIN = 1e-4  # nats per answer token; less is rounding of the forward, and nobody's loss
CHANCE = 0.05  # that even budgets are left for a division that is no better
CROSSED = 0.03  # what to ask of halves that judge each other: asked for 0.05, they err in 7 of 100 simulated cases
ONE_ERROR = 0.16  # that noise alone shows a gain of one standard error. A step of a curve needs no more proof, as the
# whole division has to prove itself; asked for more, the few examples of a user would show nothing.

Curve = Sequence[tuple[int, float]]
"""(units, loss), units ascending."""


def exceeds(first: Sequence[float], second: Sequence[float], weights: Sequence[int], chance: float) -> bool:
    """Whether the loss `first` is above `second` by more than noise: a paired one-sided t-test over examples.

    Args:
        first, second: nats of every example, summed over its answer tokens; weights: how many these are.
        chance: how often it may say so where there is no difference.
    """
    count, total = len(weights), sum(weights)
    gain = (math.fsum(first) - math.fsum(second)) / total
    if not gain > LEAST_GAIN or count < 2:
        return False
    # The standard error of a ratio of sums: examples with more answer tokens weigh more.
    rests = [(a - b - gain * w) / total for a, b, w in zip(first, second, weights, strict=True)]
    error = math.sqrt(count / (count - 1) * math.fsum(rest * rest for rest in rests))
    return error == 0 or t_tail(gain / error, count - 1) < chance


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) for Student's T of `freedom` degrees of freedom, t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    term = total = math.cos(angle) if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    if freedom == 1:
        total = 0.0
    inside = math.sin(angle) * total
    if freedom % 2:
        inside = 2 / math.pi * (angle + inside)
    return max(0.0, (1 - inside) / 2)


def envelope(units: Sequence[int], nll: Sequence[Sequence[float]], weights: Sequence[int], chance: float) -> Curve:
    """The points of a layer's curve that are worth going to: its lower convex hull, without steps of no real gain.

    Args:
        units: ascending; nll: for each, nats by example (see `exceeds`).

    From every point on, the next is the one of steepest fall among those that are lower by more than noise.
    """
    losses = [math.fsum(each) / sum(weights) for each in nll]
    at, chosen = 0, [0]
    while True:
        lower = [i for i in range(at + 1, len(units)) if exceeds(nll[at], nll[i], weights, chance)]
        if not lower:
            return [(units[i], losses[i]) for i in chosen]
        at = min(lower, key=lambda i: ((losses[i] - losses[at]) / (units[i] - units[at]), -units[i]))
        chosen.append(at)


def halves(examples: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Indices of every other example, and of those between; equal ones lie in one half, so that none judges itself.

    Raises:
        ConfigError: so few different ones that in a half nothing tells a gain from noise.
    """
    order = {one: n for n, one in enumerate(dict.fromkeys(examples))}
    if len(order) < LEAST_EXAMPLES:
        raise ConfigError(f"allocate: found {len(examples)} examples, {len(order)} of them different; expected at "
                          f"least {LEAST_EXAMPLES} different ones, as one half judges how the other would divide")
    first, second = ([i for i, one in enumerate(examples) if order[one] % 2 == side] for side in (0, 1))
    return first, second


def crossed(halves: tuple[Sequence[int], Sequence[int]], division: Callable[[Sequence[int]], list[int]],
            cost: Callable[[int, list[int]], Sequence[float]]) -> list[float]:
    """What every example loses with a division that it had no say in, [E].

    Args:
        division: units [L] by the examples of these indices.
        cost: nats of each example of half 0 or 1, in its order, with these units.
    """
    found = [0.0] * sum(map(len, halves))
    for side, half in enumerate(halves):
        for i, nll in zip(half, cost(side, division(halves[1 - side])), strict=True):
            found[i] = nll
    return found


def by_curves(units: Sequence[int], nll: Sequence[Sequence[Sequence[float]]], weights: Sequence[int], total: int,
              most: int, among: Sequence[int]) -> list[int]:
    """Units of every layer as the examples of the indices `among` have it.

    Args:
        units: [P] at which each layer was measured, ascending; nll: [L][P][E], see `exceeds`; weights: [E].
    """
    own = [weights[i] for i in among]
    return divide([envelope(units, [[each[i] for i in among] for each in layer], own, ONE_ERROR) for layer in nll],
                  total, most)


def divide(curves: Sequence[Curve], total: int, most: int) -> list[int]:
    """Units of every layer, together `total`: by marginal gain per unit, then what is left to those that have least.

    Args:
        curves: convex (see `envelope`), linear between their points; the first point is the least that a layer gets.
        most: no layer gets more.

    Raises:
        ConfigError: `total` is less than all layers' least, or more than they can get.
    """
    found = [curve[0][0] for curve in curves]
    left = total - sum(found)
    if left < 0 or total > most * len(found):
        raise ConfigError(f"allocate: found {total} units for {len(found)} layers; expected {sum(found)}, the least of "
                          f"each, to {most * len(found)}")
    steps = [((one[1] - two[1]) / (two[0] - one[0]), two[0] - one[0], layer)
             for layer, curve in enumerate(curves) for one, two in pairwise(curve)]
    for _, width, layer in sorted(steps, key=lambda step: -step[0]):  # of one layer in order: curves are convex
        taken = min(width, left, most - found[layer])
        found[layer] += taken
        left -= taken
    return _level(found, left, most)


def proportional(wanted: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Units of every layer, together `total`: `least`, and beyond it in proportion to what is wanted beyond it."""
    beyond = [max(0.0, want - least) for want in wanted]
    free = total - least * len(wanted)
    scale = free / sum(beyond) if any(beyond) else 0.0
    found = [min(most, least + math.floor(scale * each + 1e-9)) for each in beyond]  # 1e-9: what rounding took
    return _level(found, total - sum(found), most)


def _level(found: list[int], left: int, most: int) -> list[int]:
    """Give `left` units, each to the layer that has least then."""
    found = list(found)
    heap = [(units, layer) for layer, units in enumerate(found) if units < most]
    heapq.heapify(heap)
    for _ in range(left):
        units, layer = heapq.heappop(heap)
        found[layer] = units + 1
        if units + 1 < most:
            heapq.heappush(heap, (units + 1, layer))
    return found
