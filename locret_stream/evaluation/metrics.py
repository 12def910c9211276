"""What an answer is worth, and how sure a mean is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Groups = Sequence[Sequence[float]]
"""The values of a cell, stream by stream."""


def exact(answer: str, expected: str) -> float:
    """1 if the answer is the expected one, spaces around it aside."""
    return float(answer.strip() == expected.strip())


def interval(groups: Groups, share: float = 0.95, draws: int = 2000,
             seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean of all values: whole groups (streams) are drawn, as their values are not
    independent of each other; where there is only one, its values, as it says nothing of others. The ends are further
    out the fewer groups there are (`ends`), and of right and wrong answers never closer than were they independent
    (`wilson`): else two streams that happen to be alike would leave no doubt."""
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
    """The interval from ascending bootstrap means of so many groups: percentiles as far out as Student's t, and the
    factor n / (n - 1) by which a bootstrap's variance falls short, ask for (Hesterberg, arXiv:1411.5279, "expanded
    percentile interval"). Of fewer than about five groups these are the least and the greatest."""
    z, freedom = NormalDist().inv_cdf((1 + share) / 2), max(1, groups - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Cornish and Fisher
    edge = NormalDist().cdf(-t * math.sqrt(1 + 1 / freedom))
    return means[int(edge * len(means))], means[min(len(means) - 1, int((1 - edge) * len(means)))]


def wilson(right: float, count: int, share: float) -> tuple[float, float]:
    """Wilson's interval of a share of which `right` of `count` independent draws are."""
    z = NormalDist().inv_cdf((1 + share) / 2)
    centre, spread = right + z * z / 2, z * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, (centre - spread) / (count + z * z)), min(1.0, (centre + spread) / (count + z * z))


def drawn_from(groups: Groups) -> Groups:
    """What a bootstrap draws: the groups, or the values of the only one."""
    return [[value] for value in groups[0]] if len(groups) == 1 else groups


def ratio_interval(pairs: Sequence[tuple[Groups, Groups, bool]], share: float = 0.95, draws: int = 2000,
                   seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean over `pairs` of (mean of the first) / (mean of the second).

    Args:
        pairs: (above, below, together); streams are drawn within each cell, and for both at once where `together`
            says that they are the same streams, so that what makes one of them hard cancels out. The second's mean is
            above 0; a draw in which it is not says nothing of the ratio, and does not count. The ends are those of
            `ends`, for the fewest streams of a cell.
    """
    means = np.sort(ratio_draws(pairs, draws, seed))  # those that do not count come last
    return ends(means[~np.isnan(means)].tolist(), min(len(drawn_from(above)) for above, _, _ in pairs), share)


def ratio_draws(pairs: Sequence[tuple[Groups, Groups, bool]], draws: int = 2000, seed: int = 0) -> np.ndarray:
    """What `ratio_interval` draws, [draws], nan where it does not count: of pairs of as many streams the same ones."""
    total, counts = np.zeros(draws), np.ones(draws, dtype=bool)
    for number, (above, below, together) in enumerate(pairs):
        rng, above, below = np.random.default_rng((seed, number)), drawn_from(above), drawn_from(below)
        chosen = _drawn(rng, len(above), draws)
        divisor = _means(below, chosen if together else _drawn(rng, len(below), draws))
        counts &= divisor > 0
        total += np.divide(_means(above, chosen), divisor, out=np.zeros(draws), where=divisor > 0)
    return np.where(counts, total / len(pairs), np.nan)


def mean_draws(groups: Groups, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Bootstrap means of all values, [draws]: of as many groups the same ones."""
    groups = drawn_from(groups)
    return _means(groups, _drawn(np.random.default_rng(seed), len(groups), draws))


def reaches(own: np.ndarray, best: np.ndarray, groups: int, share: float = 0.95) -> bool:
    """Whether the interval of own - best, drawn from the same so many groups, holds 0 or more."""
    above = np.sort(own - best)
    return ends(above[~np.isnan(above)].tolist(), groups, share)[1] >= 0


def _drawn(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """Indices [draws, count]; the first draw is the groups as they are, so that one draw counts always."""
    return np.concatenate([np.arange(count)[None], rng.integers(0, count, (draws - 1, count))])


def _means(groups: Groups, chosen: np.ndarray) -> np.ndarray:
    """Mean of all values of the chosen groups: chosen [draws, N] -> [draws]."""
    sums, counts = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    return sums[chosen].sum(1) / np.maximum(1, counts[chosen].sum(1))
