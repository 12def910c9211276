"""What an answer is worth, and how sure a mean is."""

from __future__ import annotations

import random
from collections.abc import Sequence


def exact(answer: str, expected: str) -> float:
    """1 if the answer is the expected one, spaces around it aside."""
    return float(answer.strip() == expected.strip())


def interval(groups: Sequence[Sequence[float]], share: float = 0.95, draws: int = 2000,
             seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean of all values: whole groups (streams) are drawn, as their values are not
    independent of each other."""
    rng = random.Random(seed)
    sums, counts = [sum(group) for group in groups], [len(group) for group in groups]
    means = []
    for _ in range(draws):
        chosen = rng.choices(range(len(groups)), k=len(groups))
        means.append(sum(sums[i] for i in chosen) / max(1, sum(counts[i] for i in chosen)))
    means.sort()
    edge = (1 - share) / 2
    return means[int(edge * draws)], means[min(draws - 1, int((1 - edge) * draws))]
