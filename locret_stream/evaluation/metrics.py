"""The score of an answer, and bootstrap intervals of means and ratios."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Groups = Sequence[Sequence[float]]
"""The values of a cell, stream by stream."""


class Pair(NamedTuple):
    """What is divided by what. together: both are of the same streams."""

    above: Groups
    below: Groups
    together: bool


def exact(found: str, expected: str) -> float:
    """1 if the answer is the expected one, spaces around it aside."""
    return float(found.strip() == expected.strip())


def interval(groups: Groups, share: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean of all values. Whole groups (streams) are drawn, because the values of a group are
    not independent of each other; of a single group its values are drawn. The fewer groups, the further out are the
    ends (`ends`); of right and wrong answers they are never closer than those of as many independent answers
    (`wilson`), because two streams that happen to be alike would leave no doubt otherwise."""
    rng, values, groups = random.Random(seed), [value for group in groups for value in group], drawn_from(groups)
    sums, counts = [sum(group) for group in groups], [len(group) for group in groups]
    means = []
    for _ in range(draws):
        chosen = rng.choices(range(len(groups)), k=len(groups))
        means.append(sum(sums[i] for i in chosen) / max(1, sum(counts[i] for i in chosen)))
    low, high = ends(sorted(means), len(groups), share)
    if set(values) <= {0.0, 1.0}:
        least, most = wilson(sum(values), len(values), share)
        low, high = min(low, least), max(high, most)
    return low, high


def ends(means: Sequence[float], groups: int, share: float) -> tuple[float, float]:
    """The interval from ascending bootstrap means of so many groups: the expanded percentile interval (Hesterberg,
    arXiv:1411.5279), whose percentiles are those of Student's t, corrected by the factor n / (n - 1) by which the
    variance of a bootstrap is too small. Of fewer than about five groups these are the least and the greatest mean."""
    z, freedom = NormalDist().inv_cdf((1 + share) / 2), max(1, groups - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Cornish and Fisher
    edge = NormalDist().cdf(-t * math.sqrt(1 + 1 / freedom))
    return means[int(edge * len(means))], means[min(len(means) - 1, int((1 - edge) * len(means)))]


def wilson(right: float, count: int, share: float) -> tuple[float, float]:
    """Wilson's interval of a share, given that `right` of `count` independent draws are right."""
    z = NormalDist().inv_cdf((1 + share) / 2)
    centre, spread = right + z * z / 2, z * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, (centre - spread) / (count + z * z)), min(1.0, (centre + spread) / (count + z * z))


def drawn_from(groups: Groups) -> Groups:
    """What a bootstrap draws: the groups, or the values of a single group."""
    return [[value] for value in groups[0]] if len(groups) == 1 else groups


def ratio_interval(pairs: Sequence[Pair], share: float = 0.95, draws: int = 2000, seed: int = 0
                   ) -> tuple[float, float]:
    """Bootstrap interval of the mean over `pairs` of (mean of above) / (mean of below), by `ends` for the fewest
    streams of a cell.

    Streams are drawn within each cell, and for both sides at once where they are the same streams (`together`), so that
    the difficulty of a stream cancels out. A draw in which a mean below is 0 does not count.
    """
    means = np.sort(ratio_draws(pairs, draws, seed))  # nan comes last
    return ends(means[~np.isnan(means)].tolist(), min(len(drawn_from(above)) for above, _, _ in pairs), share)


def ratio_draws(pairs: Sequence[Pair], draws: int = 2000, seed: int = 0) -> np.ndarray:
    """The draws of `ratio_interval`, [draws], nan where one does not count. Pairs of as many streams have the same
    streams drawn."""
    total, counts = np.zeros(draws), np.ones(draws, dtype=bool)
    for number, (above, below, together) in enumerate(pairs):
        rng, above, below = np.random.default_rng((seed, number)), drawn_from(above), drawn_from(below)
        chosen = _drawn(rng, len(above), draws)
        divisor = _means(below, chosen if together else _drawn(rng, len(below), draws))
        counts &= divisor > 0
        total += np.divide(_means(above, chosen), divisor, out=np.zeros(draws), where=divisor > 0)
    return np.where(counts, total / len(pairs), np.nan)


def mean_draws(groups: Groups, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Bootstrap means of all values, [draws]. Of as many groups the same ones are drawn."""
    groups = drawn_from(groups)
    return _means(groups, _drawn(np.random.default_rng(seed), len(groups), draws))


def reaches(own: np.ndarray, best: np.ndarray, groups: int, share: float = 0.95) -> bool:
    """Whether the interval of own - best, both [draws] from the same so many groups, reaches 0 or more."""
    above = np.sort(own - best)
    return ends(above[~np.isnan(above)].tolist(), groups, share)[1] >= 0


def _drawn(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """Indices [draws, count]; the first draw is all groups once, so that at least one draw counts."""
    return np.concatenate([np.arange(count)[None], rng.integers(0, count, (draws - 1, count))])


def _means(groups: Groups, chosen: np.ndarray) -> np.ndarray:
    """Mean of all values of the chosen groups: chosen [draws, N] -> [draws]."""
    sums, counts = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    return sums[chosen].sum(1) / np.maximum(1, counts[chosen].sum(1))
