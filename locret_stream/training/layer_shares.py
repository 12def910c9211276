"""How a total of units is divided among layers by measured losses. Knows numbers alone: no model and no tensors.

A layer's curve is its answer loss by units. Units go where the next one gains most; a fall of less than a standard
error is no gain, and a division that is not better than even budgets beyond noise is not used.

A division fits the noise of the examples that made it, the more so the more layers there are. So other examples judge
it (cross-fitting): each half of the examples makes a division, and the other half judges it. As each half both makes
and judges, the two verdicts are not quite independent: tested at the level CROSSED they err about as often as CHANCE,
see the tests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from locret_stream.errors import ConfigError
from locret_stream.training.config import LEAST_EXAMPLES

LEAST_GAIN = 1e-4  # nats per answer token; a smaller one is rounding of the forward pass
CHANCE = 0.05  # probability that even budgets give way to a division that is no better
CROSSED = 0.03  # level of the test by halves that judge each other: at 0.05 they err in 7 of 100 simulated cases
ONE_ERROR = 0.16  # probability that noise alone shows a gain of one standard error. A step of a curve needs no more
# proof, as the whole division is tested later; at a stricter level the few examples of a user would show nothing.

Curve = Sequence[tuple[int, float]]
"""(units, loss), units ascending."""


def exceeds(first: Sequence[float], second: Sequence[float], weights: Sequence[int], chance: float) -> bool:
    """Whether the loss `first` is above `second` by more than noise: a paired one-sided t-test over examples.

    Args:
        first, second: [E] nats of every example, summed over its answer tokens; weights: [E] numbers of these tokens.
        chance: the level of the test: how often it may be True where there is no difference.
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
    """The points of a layer's curve that are worth their units: its lower convex hull, without steps inside the noise.

    Args:
        units: [P] ascending; nll: [P][E], see `exceeds`.

    From every point, the next is the one with the steepest fall among those that are lower by more than noise.
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
    """Indices of every other example, and of those between; equal ones are in one half, so that none judges itself.

    Raises:
        ConfigError: too few different examples to tell a gain from noise in each half.
    """
    order = {example: n for n, example in enumerate(dict.fromkeys(examples))}
    if len(order) < LEAST_EXAMPLES:
        raise ConfigError(f"allocate: found {len(examples)} examples, {len(order)} of them different; expected at "
                          f"least {LEAST_EXAMPLES} different ones, as one half judges how the other would divide")
    first, second = ([i for i, example in enumerate(examples) if order[example] % 2 == side] for side in (0, 1))
    return first, second


def crossed(halves: tuple[Sequence[int], Sequence[int]], division: Callable[[Sequence[int]], list[int]],
            cost: Callable[[int, list[int]], Sequence[float]]) -> list[float]:
    """The loss of every example with the division that the other half makes: nats [E].

    Args:
        division: from indices of examples to the units [L] that these ask for.
        cost: from the number of a half, 0 or 1, and units [L] to the nats of its examples, in their order.
    """
    costs = [0.0] * sum(map(len, halves))
    for side, half in enumerate(halves):
        for i, nll in zip(half, cost(side, division(halves[1 - side])), strict=True):
            costs[i] = nll
    return costs


def by_curves(units: Sequence[int], nll: Sequence[Sequence[Sequence[float]]], weights: Sequence[int], total: int,
              most: int, among: Sequence[int]) -> list[int]:
    """Units [L] of every layer, by the losses of the examples with the indices `among`.

    Args:
        units: [P] at which each layer was measured, ascending; nll: [L][P][E], see `exceeds`; weights: [E].
        total, most: see `divide`.
    """
    chosen = [weights[i] for i in among]
    return divide([envelope(units, [[point[i] for i in among] for point in layer], chosen, ONE_ERROR) for layer in nll],
                  total, most)


def divide(curves: Sequence[Curve], total: int, most: int) -> list[int]:
    """Units [L] of every layer, together `total`: by marginal gain per unit; units that gain nothing go to the layers
    that have least.

    Args:
        curves: convex (see `envelope`), linear between their points; the first point is the least that a layer gets.
        most: no layer gets more.

    Raises:
        ConfigError: `total` is less than the sum of the least, or more than all layers can get.
    """
    division = [curve[0][0] for curve in curves]
    left = total - sum(division)
    if left < 0 or total > most * len(division):
        raise ConfigError(f"allocate: found {total} units for {len(division)} layers; expected {sum(division)}, the "
                          f"least of each, to {most * len(division)}")
    steps = [((loss - lower) / (more - units), more - units, layer)
             for layer, curve in enumerate(curves) for (units, loss), (more, lower) in pairwise(curve)]
    for _, width, layer in sorted(steps, key=lambda step: -step[0]):  # of one layer in order, as curves are convex
        taken = min(width, left, most - division[layer])
        division[layer] += taken
        left -= taken
    return _level(division, left, most)


def proportional(wanted: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Units [L] of every layer, together `total`: `least`, and beyond it in proportion to what is wanted beyond it."""
    beyond = [max(0.0, want - least) for want in wanted]
    free = total - least * len(wanted)
    scale = free / sum(beyond) if any(beyond) else 0.0
    division = [min(most, least + math.floor(scale * each + 1e-9)) for each in beyond]  # 1e-9 undoes rounding errors
    return _level(division, total - sum(division), most)


def _level(division: list[int], left: int, most: int) -> list[int]:
    """Give `left` more units, each to the layer that has least at that moment."""
    division = list(division)
    heap = [(units, layer) for layer, units in enumerate(division) if units < most]
    heapq.heapify(heap)
    for _ in range(left):
        units, layer = heapq.heappop(heap)
        division[layer] = units + 1
        if units + 1 < most:
            heapq.heappush(heap, (units + 1, layer))
    return division
