"""The arithmetic of budgets: whole units divided over layers, the most units that fit, and the bytes of units in few
bits. Knows numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

PYRAMID_BETA = 20
MOST_USUAL = 6000, 1024  # budget and chunk size that Locret was measured with (arXiv:2410.01805, section 4)


def in_bytes(count: float) -> str:
    """A size as people read it: 6.1 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def group_of(dim: int, bits: int) -> int:
    """Channels of a head that share a scale and a zero in codes of so many bits: the largest divisor of the head dim,
    at most 64 at 8 bits, where the two are fp32, and at 1 bit, where they take most of the bytes, else at most 32."""
    return next(size for size in range(min(dim, 64 if bits in (8, 1) else 32), 0, -1) if dim % size == 0)


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of one row of codes: D channels of so many bits, and a scale and a zero for each group of channels; 0 of no
    channels, as those of V where K is V, too."""
    return dim and dim * bits // 8 + (8 if bits == 8 else 4) * (dim // group_of(dim, bits))


def usual_memory(window: int) -> tuple[int, int]:
    """(budget in units per KV head, chunk size in tokens) where none are given: a quarter and a sixteenth of the
    window, so that eviction begins long before it ends, but no more than Locret's."""
    return max(1, min(MOST_USUAL[0], window // 4)), max(1, min(MOST_USUAL[1], window // 16))


def divide(total: int, shares: Sequence[float], *, most: int | None = None, least: Sequence[int] = ()) -> list[int]:
    """Whole numbers in proportion to `shares` [L], by largest remainder, so that their sum is exactly `total`.

    Args:
        most: an upper bound of every number; the others get what is cut off, in their proportions.
        least: lower bounds [L]; the others give what is added, in their proportions. Bounds that no numbers of that
            sum can keep have no effect.
    """
    weight = sum(shares)
    exact = [total * share / weight for share in shares]
    if most is not None and max(_rounded(exact, total)) > most:
        exact = _within(exact, [most] * len(exact), 1)
    if least:
        exact = _within(exact, least, -1)
    return _rounded(exact, total)


def pyramid(units: int, protected: int, layers: int) -> tuple[float, ...]:
    """Units that fall linearly from the first layer to the last, with the mean `units` (PyramidKV, arXiv:2406.02069,
    section 4.2): of the mean beside what is protected the last layer gets 1 / beta, and the first the rest of twice it.
    """
    free = max(0, units - protected)
    least = free / PYRAMID_BETA
    step = 2 * (free - least) / (layers - 1)
    return tuple(protected + 2 * free - least - step * layer for layer in range(layers))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does, provided that all below a fitting one fit, too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rounded(exact: list[float], total: int) -> list[int]:
    units = [math.floor(x + 1e-9) for x in exact]  # a whole number may have lost its last bit
    by_remainder = sorted(range(len(exact)), key=lambda i: (units[i] - exact[i], i))
    for i in by_remainder[: total - sum(units)]:
        units[i] += 1
    return units


def _within(exact: list[float], bounds: Sequence[int], sign: int) -> list[float]:
    """Numbers of the same sum, none of which is beyond its bound: above it for sign 1, below it for sign -1."""
    if sign * (sum(exact) - sum(bounds)) > 0.5:  # both are whole numbers, but for rounding
        return exact
    fixed: set[int] = set()
    while beyond := {i for i, units in enumerate(exact) if sign * units > sign * bounds[i] and i not in fixed}:
        fixed |= beyond
        rest = sum(exact) - sum(bounds[i] for i in fixed)
        weight = sum(units for i, units in enumerate(exact) if i not in fixed)
        exact = [bounds[i] if i in fixed else units * rest / weight for i, units in enumerate(exact)]
    return exact
