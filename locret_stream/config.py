"""The knobs, as frozen structs. Knows how they constrain each other; knows no tensors and no model code.

Units: a *unit* is one cached token of one KV head (its K, V, score and position). Shapes use one alphabet:
`H` KV heads, `G` query heads per KV head, `T` tokens, `B` budget units, `D` head dim, `L` layers.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable

import msgspec

from locret_stream.errors import ConfigError, WindowExceeded

ALLOCATIONS = ("auto", "adaptive", "uniform", "pyramid")
MOST_SHARES = 1e100  # of all layers together: times any number of units it is finite
MOST_UNITS = 2**31 - 1  # in a layer: what any index has room for
PYRAMID_BETA = 20
LOGIT_FACTORS = 1e-30, 1e30  # divided or multiplied by what lies between, logits of any model are fp32 numbers

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)\s*$", re.IGNORECASE)
_FACTORS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is one, finite, and a float can hold it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory needs to know of a model; read off its config and weights at attach.

    `window` is the number of positions the model was made for; `sliding[l]` the window of layer l, or None
    where it attends to everything; `item_bytes` the bytes of one K or V element.
    """

    layers: int
    kv_heads: int
    groups: int
    head_dim: int
    vocab: int
    window: int
    item_bytes: int
    sliding: tuple[int | None, ...]
    hidden: int = 0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many units each layer keeps per KV head.

    Args:
        units: mean over the layers of units per KV head; the total L * units is what is capped.
        sinks: the first units of the stream, always kept.
        stabilizers: the last units at every eviction, always kept. Both count inside the budget; 0 means 0.
        allocation: how L * units are divided: "auto" (the shares stored with the retaining heads, else uniform),
            "adaptive" (those, or an error), "uniform", "pyramid" (from more in the first layer linearly to less in the
            last, beside what is protected; PyramidKV, arXiv:2406.02069, section 4.2, beta = 20), or one number per
            layer: relative shares.

    Raises:
        ConfigError: values that cannot work together.
    """

    units: int
    sinks: int = 4
    stabilizers: int = 32
    allocation: str | tuple[float, ...] = "auto"

    def __post_init__(self) -> None:
        for name in ("units", "sinks", "stabilizers"):
            value = getattr(self, name)
            if not _is_whole(value) or value < (1 if name == "units" else 0):
                raise ConfigError(f"budget: {name} is {value!r}; expected a whole number of units, "
                                  f"at least {1 if name == 'units' else 0}")
            if value > MOST_UNITS:
                raise ConfigError(f"budget: {name} is more than any layer can hold; expected at most {MOST_UNITS:,}")
        if isinstance(self.allocation, str):
            if self.allocation not in ALLOCATIONS:
                raise ConfigError(f"budget: allocation is {self.allocation!r}; expected one of "
                                  f"{', '.join(map(repr, ALLOCATIONS))}, or one share per layer")
        elif not (isinstance(self.allocation, tuple) and self.allocation
                  and all(is_number(share) and share > 0 for share in self.allocation)
                  and sum(self.allocation) < MOST_SHARES):
            raise ConfigError(f"budget: allocation shares are {self.allocation!r}; expected a tuple of positive "
                              f"numbers, together below {MOST_SHARES:g}")

    def per_layer(self, shape: ModelShape, shares: tuple[float, ...] | None = None,
                  most: int | None = None) -> tuple[int, ...]:
        """Units per KV head of every layer, [L]; `shares` are those of the heads, used by "auto" and "adaptive".

        Such shares are advice, found for some budget: where a layer would get more than `most` units (what the window
        holds), the others get the rest; where it would get no more than is protected, they give it one unit more.
        Sliding-window layers hold the last units alone, and never more than their window; what is over is given to no
        other layer. Rounds by largest remainder, so that the sum is exactly L * units before that cap.

        Raises:
            ConfigError: a layer would hold nothing, or no more than is protected.
        """
        allocation = self._shares(shape, shares)
        if len(allocation) != shape.layers:
            raise ConfigError(f"budget: {len(allocation)} layer shares for a model of {shape.layers} layers; "
                              "expected one per layer")
        total, weight = self.units * shape.layers, sum(allocation)
        exact = [total * share / weight for share in allocation]
        protected, advice = self.sinks + self.stabilizers, self.allocation in ("auto", "adaptive") and bool(shares)
        if advice and most is not None and max(_rounded(exact, total)) > most:
            exact = _capped(exact, most)
        if advice:
            exact = _raised(exact, [1 if window else protected + 1 for window in shape.sliding])
        units = _rounded(exact, total)
        capped = tuple(min(u, w) if w else u for u, w in zip(units, shape.sliding, strict=True))
        least = (protected + 1 if advice else protected + PYRAMID_BETA if self.allocation == "pyramid" else
                 (protected + 1) * weight / (min(allocation) * shape.layers))
        expected = f"at least {math.ceil(least)} units" if least <= MOST_UNITS else "shares closer to each other"
        smallest = min((u for u, w in zip(capped, shape.sliding, strict=True) if not w), default=None)
        if smallest is not None and smallest <= protected:
            raise ConfigError(f"budget: of {self.units} units the smallest layer gets {smallest}, and {self.sinks} "
                              f"sinks + {self.stabilizers} stabilizers always stay; expected {expected} at these "
                              "settings")
        if not min(capped):
            raise ConfigError(f"budget: of {self.units} units layer {capped.index(0)}, which has a sliding window, "
                              f"gets none; expected {expected} at these settings")
        return capped

    def _shares(self, shape: ModelShape, shares: tuple[float, ...] | None) -> tuple[float, ...]:
        if not isinstance(self.allocation, str):
            return self.allocation
        if self.allocation == "adaptive" and not shares:
            raise ConfigError("budget: allocation is 'adaptive', and no shares are stored with retaining heads; "
                              "expected heads whose heads.json has budget_shares, or one share per layer, or 'uniform'")
        if self.allocation in ("auto", "adaptive") and shares:
            return shares
        if self.allocation == "pyramid" and shape.layers > 1:
            protected = self.sinks + self.stabilizers
            free = max(0, self.units - protected)
            least = free / PYRAMID_BETA
            step = 2 * (free - least) / (shape.layers - 1)
            return tuple(protected + 2 * free - least - step * layer for layer in range(shape.layers))
        return (1.0,) * shape.layers


def _rounded(exact: list[float], total: int) -> list[int]:
    """Whole numbers of that sum, by largest remainder."""
    units = [math.floor(x + 1e-9) for x in exact]  # a whole number that lost its last bit is one
    by_remainder = sorted(range(len(exact)), key=lambda i: (units[i] - exact[i], i))
    for i in by_remainder[: total - sum(units)]:
        units[i] += 1
    return units


def _capped(exact: list[float], most: int) -> list[float]:
    """The same sum with no number above `most`, the others in their proportions; as it is where that cannot be."""
    if sum(exact) > most * len(exact) + 0.5:  # whole numbers both, but for rounding
        return exact
    capped: set[int] = set()
    while over := {i for i, units in enumerate(exact) if units > most and i not in capped}:
        capped |= over
        rest, weight = sum(exact) - most * len(capped), sum(units for i, units in enumerate(exact) if i not in capped)
        exact = [most if i in capped else units * rest / weight for i, units in enumerate(exact)]
    return exact


def _raised(exact: list[float], least: list[int]) -> list[float]:
    """The same sum with no number below its `least`, the others in their proportions; as it is where that cannot be."""
    if sum(exact) < sum(least) - 0.5:  # whole numbers both, but for rounding
        return exact
    raised: set[int] = set()
    while under := {i for i, units in enumerate(exact) if units < least[i] and i not in raised}:
        raised |= under
        rest = sum(exact) - sum(least[i] for i in raised)
        weight = sum(units for i, units in enumerate(exact) if i not in raised)
        exact = [least[i] if i in raised else units * rest / weight for i, units in enumerate(exact)]
    return exact


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the committed state of a context is a function of, beside the model and the tokens."""

    budget: Budget
    chunk_size: int = 1024
    policy: str = "locret"
    knobs: dict[str, float | int | str | bool] = {}

    def __post_init__(self) -> None:
        if not _is_whole(self.chunk_size) or self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size!r}; expected a whole number of tokens, at least 1")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Noise is keyed by (seed, position).

    Args:
        max_new_tokens: the most tokens of one reply, its end marker included.
        temperature: what logits are divided by before noise is added; 0 is greedy.
        stop: strings that end the reply; the text before them is what is yielded last.
        ignore_eos: go on past the model's end markers.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")

        check("max_new_tokens", _is_whole(self.max_new_tokens) and self.max_new_tokens >= 1, "at least 1")
        least, most = LOGIT_FACTORS
        check("temperature", is_number(self.temperature)
              and (self.temperature == 0 or least <= self.temperature <= most),
              f"0 (greedy), or a number from {least:g} to {most:g}")
        check("top_k", self.top_k is None or (_is_whole(self.top_k) and self.top_k >= 1), "at least 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            check(name, value is None or (is_number(value) and 0 < value <= 1), "a number in (0, 1]")
        check("repetition_penalty", self.repetition_penalty is None
              or (is_number(self.repetition_penalty) and least <= self.repetition_penalty <= most),
              f"a number from {least:g} to {most:g}")
        check("stop", isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
              "a tuple of non-empty strings")
        check("seed", _is_whole(self.seed), "a whole number")


def unit_bytes(shape: ModelShape, planes: int = 1, *, key_copies: int = 2) -> int:
    """Bytes of one unit: K and V in the model's dtype, fp32 score planes, int64 position.

    K is held before and after RoPE, unless kernels rotate it as they load it: `key_copies` is 1 then.
    """
    return (key_copies + 1) * shape.head_dim * shape.item_bytes + 4 * planes + 8


def budget_from(value: int | str | Budget, shape: ModelShape, chunk_size: int, *, sinks: int | None = None,
                stabilizers: int | None = None, shares: tuple[float, ...] | None = None,
                per_unit: tuple[int, ...] | None = None) -> Budget:
    """A Budget from what a user may give: units, a size such as "512MiB" of one slot, or a Budget.

    Without explicit values 4 sinks and 32 stabilizers are protected; small budgets protect an eighth of each instead,
    and never more than a part of the smallest layer that the heads' `shares` leave. `per_unit` [L]: bytes of a unit in
    each layer (see `unit_bytes`), those of a layer with rotary embeddings by default.

    Raises:
        ConfigError: neither of these, or a size too small for a single unit per head, or too large for any.
    """
    if isinstance(value, Budget):
        if sinks is not None or stabilizers is not None:
            raise ConfigError("sinks and stabilizers were given beside a Budget; expected them inside it")
        return value

    def budget_of(units: int) -> Budget:
        least = min(shares) * len(shares) / sum(shares) if shares else 1.0
        smallest = math.floor(min(units, MOST_UNITS) * least)
        return Budget(units=units, sinks=min(4, units // 8, smallest // 4) if sinks is None else sinks,
                      stabilizers=min(32, units // 8, smallest // 3) if stabilizers is None else stabilizers)

    if isinstance(value, str):
        match = _SIZE.match(value)
        if not match:
            raise ConfigError(f"budget is {value!r}; expected units per KV head (6000) or a size such as '512MiB'")
        size = float(match[1]) * _FACTORS[match[2].upper()]
        per_unit = per_unit or (unit_bytes(shape),) * shape.layers
        if size >= MOST_UNITS * shape.kv_heads * sum(per_unit):
            raise ConfigError(f"budget {match[0].strip()!r} is more than {MOST_UNITS:,} units per KV head take; "
                              "expected a smaller size")

        def takes(units: int) -> int:
            """Bytes of one slot."""
            try:
                held = budget_of(units).per_layer(shape, shares, most=shape.window - chunk_size)
            except ConfigError:  # too few for what is protected: refused, with its reason, where they are used
                held = (units,) * shape.layers
            return shape.kv_heads * sum((count + chunk_size) * one for count, one in zip(held, per_unit, strict=True))

        windows = [window for window in shape.sliding if window]  # what is over a window is given to no one
        most = max(windows) if len(windows) == len(shape.sliding) else MOST_UNITS
        value = _largest(lambda units: takes(units) <= size, most)
        if value < 1:
            capacity = int(size // (shape.kv_heads * sum(per_unit)))
            raise ConfigError(f"budget {match[0].strip()!r} holds {capacity} units per KV head, chunk_size alone takes "
                              f"{chunk_size}; expected a larger size or a smaller chunk_size")
    if not _is_whole(value):
        raise ConfigError(f"budget is {value!r}; expected units per KV head (6000), a size ('512MiB') or a Budget")
    return budget_of(value)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 if none does: as if all below one that fits did too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_window(budgets: tuple[int, ...], chunk_size: int, shape: ModelShape) -> None:
    """Ranks reach b_l + chunk_size; they must be positions the model knows (law 4).

    Raises:
        WindowExceeded: naming the layer and the largest budget that fits.
    """
    for layer, units in enumerate(budgets):
        if units + chunk_size > shape.window and not shape.sliding[layer]:
            raise WindowExceeded(
                f"layer {layer} would hold {units} + {chunk_size} = {units + chunk_size} units, the model knows "
                f"{shape.window} positions; expected "
                + (f"at most {shape.window - chunk_size} units in a layer at this chunk_size"
                   if chunk_size < shape.window else f"a chunk_size below {shape.window}"))
