"""The knobs, as frozen structs. Knows how they constrain each other; knows no tensors and no model code.

A *unit* is one token in the KV cache of one KV head: its key, value, scores and position. Shapes use one alphabet:
`H` KV heads, `G` query heads per KV head, `T` tokens, `B` budget units, `D` head dim, `L` layers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from locret_stream.budgets import PYRAMID_BETA, divide, group_of, largest, pyramid, row_bytes
from locret_stream.errors import ConfigError, WindowExceeded
from locret_stream.host_tier import HostTier

POLICY_NAMES = ("full", "h2o", "infllm", "keydiff", "kvzap", "locret", "nacl", "random", "scissorhands", "sirllm",
                "snapkv", "streaming_llm", "tova", "trimkv")  # their classes, which need torch, are in `policies`
LEAST_OF_HEAD = 0.2  # of an equal part, where the heads of a layer share its units (arXiv:2407.11550, section 4)
ALLOCATIONS = ("auto", "adaptive", "uniform", "pyramid")
MOST_SHARES = 1e100  # the sum of all shares stays below: keeps share × units finite
MOST_UNITS = 2**31 - 1  # in a layer: the largest 32-bit index
STORE_BITS = (16, 8, 4, 2, 1)
LOGIT_FACTORS = 1e-30, 1e30  # a logit divided or multiplied by a factor between these is still an fp32 number

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)\s*$", re.IGNORECASE)
_FACTORS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether the value is a finite number that fits a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class UnitShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a unit is in one layer, and how that layer attends.

    Args:
        kv_heads: H. groups: query heads that share a KV head, G.
        key_dim, value_dim: numbers of K and of V, D. V of 0 numbers: K is V, too, as latent attention has it.
        index_dim: numbers of the index key that is stored behind K, where the layer chooses what it attends to.
        sliding: how many of the last tokens the layer sees; None: all.
        blocks: whether it sees of these only the tokens of its own block: its window does not slide along, but begins
            anew at every multiple of its length (chunked attention, Llama 4).
    """

    kv_heads: int
    groups: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    sliding: int | None = None
    blocks: bool = False

    def reach(self, position: int) -> int | None:
        """How many of the last tokens the token at that position sees, itself included; None: all."""
        return position % self.sliding + 1 if self.sliding and self.blocks else self.sliding

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers that are stored of K and of V."""
        return self.key_dim + self.index_dim, self.value_dim

    @property
    def query_heads(self) -> int:
        """Query heads of all KV heads."""
        return self.kv_heads * self.groups


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model that the memory depends on; `models.attach` reads them off what its layers compute.

    Args:
        units: of every layer that keeps units, in order; these are the L layers of a memory.
        window: positions that the model was made for. item_bytes: of one element of K or V.
        state_bytes: of the recurrent state of one context, which layers without attention carry.
        limited: whether `window` is the number of units up to which layers attend to all of them.
        biased: whether layers add to logits what depends on the token and the distance of ranks.
        ranked: whether some numbers of rotated keys are their ranks (ALiBi).
    """

    units: tuple[UnitShape, ...]
    vocab: int
    window: int
    item_bytes: int
    hidden: int = 0
    state_bytes: int = 0
    limited: bool = False
    biased: bool = False
    ranked: bool = False

    @classmethod
    def even(cls, *, layers: int, kv_heads: int, groups: int, head_dim: int, sliding: Sequence[int | None] = (),
             **others: Any) -> ModelShape:
        """The shape of a model whose layers differ in nothing but their windows."""
        return cls(units=tuple(UnitShape(kv_heads=kv_heads, groups=groups, key_dim=head_dim, value_dim=head_dim,
                                         sliding=window) for window in sliding or (None,) * layers), **others)

    @property
    def layers(self) -> int:
        """Layers that keep units, L."""
        return len(self.units)

    @property
    def sliding(self) -> tuple[int | None, ...]:
        """Windows of the layers, [L]."""
        return tuple(unit.sliding for unit in self.units)

    @property
    def alike(self) -> bool:
        """Whether a unit has the same shape in every layer."""
        return len(self._forms) == 1

    @property
    def _forms(self) -> set[UnitShape]:
        return {msgspec.structs.replace(unit, sliding=None, blocks=False, index_dim=0) for unit in self.units}

    def one_unit(self, what: str) -> UnitShape:
        """The shape of a unit in every layer. Raises ConfigError: the layers differ, and `what` needs layers alike; or
        they are biased, which `what` knows nothing of."""
        if self.biased:
            raise ConfigError(f"{what} need attention by queries and keys alone; found a model that adds a bias by "
                              "distance to it: expected a policy that needs none, such as 'keydiff'")
        if not self.alike:
            forms = sorted({(unit.kv_heads, *unit.dims) for unit in self._forms})
            raise ConfigError(f"{what} need layers that are alike; found layers of {forms} (KV heads, numbers of K and "
                              "of V): expected a policy that needs none, such as 'keydiff'")
        return self._forms.pop()

    @property
    def chooses(self) -> bool:
        """Whether any layer chooses by index keys what it attends to."""
        return any(unit.index_dim for unit in self.units)

    @property
    def most_heads(self) -> int:
        """KV heads of the layer that has most."""
        return max(unit.kv_heads for unit in self.units)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers, as a cache takes that keeps every token."""
        return self.item_bytes * sum(unit.kv_heads * sum(unit.dims) for unit in self.units)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many units each layer keeps per KV head.

    Args:
        units: units per KV head, as the mean over the layers; the memory is bounded by the total L * units.
        sinks: how many of the first units of the stream always stay.
        stabilizers: how many of the last units stay at every eviction. Sinks and stabilizers count inside the budget.
        allocation: how L * units are divided: "auto" (by the shares stored with the retaining heads, else uniform),
            "adaptive" (by those shares, or an error), "uniform", "pyramid" (units beside the protected ones fall
            linearly from the first layer to the last; PyramidKV, arXiv:2406.02069, section 4.2, beta = 20), or
            relative shares, one per layer.
        by_head: whether the KV heads of a layer share its H * b_l units, which then go to the highest scores of all of
            them, with a floor of `LEAST_OF_HEAD` of an equal part for each head (AdaKV, arXiv:2407.11550). For policies
            that score each head by what it has, as locret and snapkv; in layers without a sliding window.

    Raises:
        ConfigError: values that cannot work together.
    """

    units: int
    sinks: int = 4
    stabilizers: int = 32
    allocation: str | tuple[float, ...] = "auto"
    by_head: bool = False

    def __post_init__(self) -> None:
        for name in ("units", "sinks", "stabilizers"):
            value = getattr(self, name)
            if not _is_whole(value) or value < (1 if name == "units" else 0):
                raise ConfigError(f"budget: {name} is {value!r}; expected a whole number of units, "
                                  f"at least {1 if name == 'units' else 0}")
            if value > MOST_UNITS:
                raise ConfigError(f"budget: {name} is more than any layer can hold; expected at most {MOST_UNITS:,}")
        if not isinstance(self.by_head, bool):
            raise ConfigError(f"budget: by_head is {self.by_head!r}; expected True or False")
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
        """Units per KV head of every layer, [L].

        The sum is L * units, except where a layer with a sliding window would keep more than its window: what is above
        the window goes to no other layer.

        Args:
            shares: [L], those stored with the retaining heads, for "auto" and "adaptive". They were measured for some
                other budget, so they are advice: where a layer would keep more than `most` units, the others get the
                rest, and where it would keep only protected units, the others give it one more.
            most: units of a layer that fit the model's window.

        Raises:
            ConfigError: a layer would keep nothing, or only protected units.
        """
        allocation = self._shares(shape, shares)
        if len(allocation) != shape.layers:
            raise ConfigError(f"budget: {len(allocation)} layer shares for a model of {shape.layers} layers; "
                              "expected one per layer")
        protected, advice = self.sinks + self.stabilizers, self.allocation in ("auto", "adaptive") and bool(shares)
        least_of_layers = [1 if window else protected + 1 for window in shape.sliding]
        divided = divide(self.units * shape.layers, allocation, most=most if advice else None,
                         least=least_of_layers if advice else ())
        kept = tuple(min(units, window or units) for units, window in zip(divided, shape.sliding, strict=True))
        least = (protected + 1 if advice else protected + PYRAMID_BETA if self.allocation == "pyramid" else
                 (protected + 1) * sum(allocation) / (min(allocation) * shape.layers))
        expected = f"at least {math.ceil(least)} units" if least <= MOST_UNITS else "shares closer to each other"
        smallest = min((units for units, window in zip(kept, shape.sliding, strict=True) if not window), default=None)
        if smallest is not None and smallest <= protected:
            raise ConfigError(f"budget: of {self.units} units the smallest layer gets {smallest}, and {self.sinks} "
                              f"sinks + {self.stabilizers} stabilizers always stay; expected {expected} at these "
                              "settings")
        if not min(kept):
            raise ConfigError(f"budget: of {self.units} units layer {kept.index(0)}, which has a sliding window, "
                              f"gets none; expected {expected} at these settings")
        return kept

    def _shares(self, shape: ModelShape, shares: tuple[float, ...] | None) -> tuple[float, ...]:
        if not isinstance(self.allocation, str):
            return self.allocation
        if self.allocation == "adaptive" and not shares:
            raise ConfigError("budget: allocation is 'adaptive', and no shares are stored with retaining heads; "
                              "expected heads whose heads.json has budget_shares, or one share per layer, or 'uniform'")
        if self.allocation in ("auto", "adaptive") and shares:
            return shares
        if self.allocation == "pyramid" and shape.layers > 1:
            return pyramid(self.units, self.sinks + self.stabilizers, shape.layers)
        return (1.0,) * shape.layers


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the committed state of a context depends on, beside the model and the tokens.

    Args:
        policy: its name, "" where whoever makes the engine knows it.
        store_bits: of a channel of committed K and of V; 16 keeps them as the model has them (`check_store_bits`).
        exact: how exact units in the host's memory serve them, where they are codes (`host_tier`).
    """

    budget: Budget
    chunk_size: int = 1024
    policy: str = ""
    knobs: dict[str, float | int | str | bool] = {}
    store_bits: tuple[int, int] = (16, 16)
    exact: HostTier | None = None

    @property
    def quantised(self) -> bool:
        """Whether committed units are codes."""
        return self.store_bits != (16, 16)

    @property
    def stores_codes(self) -> bool:
        """Whether a snapshot has codes of the committed units: where the host has them exactly, it has those, unless
        `HostTier.saves` says otherwise."""
        return self.quantised and (self.exact is None or self.exact.saves == "codes")

    @property
    def rounds(self) -> bool:
        """Whether exact units of a restored context are what its codes say."""
        return self.exact is not None and self.stores_codes

    def __post_init__(self) -> None:
        if not _is_whole(self.chunk_size) or self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size!r}; expected a whole number of tokens, at least 1")
        msgspec.structs.force_setattr(self, "store_bits", check_store_bits(self.store_bits))
        check_tier(self.exact, self.store_bits)
        check_shared(self.budget.by_head, self.exact)


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """How what was evicted is found again: before a question, the passages that have its words are read once more.

    Args:
        tokens: the most that are read again before a question. A passage has up to 64. They count in the budget: where
            it has no room for so many beside the share of `memory`, fewer are read, those that fit best.
        memory: the share of the budget that the copy which reads them keeps of a memory that evicted something: the
            units that its policy scores highest. With less beside the passages a small model answers from these more
            often. 1 keeps all.

    Raises:
        ConfigError: `tokens` is not a whole number of at least 64, or `memory` no share.
    """

    tokens: int = 128
    memory: float = 0.25

    def __post_init__(self) -> None:
        if not _is_whole(self.tokens) or not 64 <= self.tokens <= MOST_UNITS:
            raise ConfigError(f"recall: tokens is {self.tokens!r}; expected a whole number, at least 64")
        if isinstance(self.memory, bool) or not isinstance(self.memory, int | float) or not 0 < self.memory <= 1:
            raise ConfigError(f"recall: memory is {self.memory!r}; expected a share of the budget: above 0, at most 1")


def check_recall(recall: object) -> None:
    """Raises ConfigError: neither a truth value nor a Recall, nor None for what is usual."""
    if recall is not None and not isinstance(recall, bool | Recall):
        raise ConfigError(f"recall is {recall!r}; expected True, False or Recall(tokens=...)")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. The noise is a function of (seed, position).

    Args:
        max_new_tokens: the most tokens of one reply, its end marker included.
        temperature: logits are divided by it before noise is added; 0 is greedy.
        stop: strings that end the reply, which does not contain them.
        ignore_eos: go on past the model's end markers.
        schema: a JSON schema, as a dict or its text, that the reply fits: JSON in one line, with its properties in the
            order of the schema, and nothing before or after it. Needs `locret-stream[constrained]`. A keyword that
            cannot be held is refused before anything is read. The reply ends by itself where the JSON does; cut off
            by `max_new_tokens` it does not fit, and its `finish_reason` is "length".
        grammar: what the reply fits, in place of a schema: a Lark grammar as llguidance reads it.

    Raises:
        ConfigError: a value out of range, no JSON schema, both a schema and a grammar, or either with `ignore_eos`.
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
    schema: str | dict[str, Any] | None = None  # text, once it is here: settings are compared
    grammar: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether the reply is held to a schema or a grammar."""
        return self.schema is not None or self.grammar is not None

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
        if self.schema is not None:
            msgspec.structs.force_setattr(self, "schema", _schema_text(self.schema))
        check("grammar", self.grammar is None or (isinstance(self.grammar, str) and bool(self.grammar.strip())),
              "the text of a Lark grammar")
        if self.schema is not None and self.grammar is not None:
            raise ConfigError("found both a schema and a grammar; expected one of them")
        if self.constrained and self.ignore_eos:
            raise ConfigError("ignore_eos is True for a reply with a schema or a grammar, which ends where that lets "
                              "it; expected False")


def _schema_text(schema: object) -> str:
    """A JSON schema as text, its properties in the order given. Raises ConfigError: it is no JSON object."""
    found: object = schema
    try:
        if isinstance(schema, str):
            found = json.loads(schema)
        if not isinstance(found, dict):
            raise TypeError(f"it is a {type(found).__name__}")
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        shown = repr(schema)
        raise ConfigError(f"schema is {shown if len(shown) <= 80 else shown[:77] + '...'}: {error}; expected a JSON "
                          "schema as a dict, or its text") from error
    return text


def check_store_bits(value: object) -> tuple[int, int]:
    """Bits of a channel of K and of V, of one number for both or of two.

    Raises:
        ConfigError: neither.
    """
    pair = (value, value) if _is_whole(value) else tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not all(_is_whole(bits) and bits in STORE_BITS for bits in pair):
        raise ConfigError(f"store_bits is {value!r}; expected 16 (K and V as the model has them), 8, 4, 2 or 1 "
                          "(the last two with exact='host'; alone they are coarse), or two of these for K and V")
    return pair


def check_shared(by_head: bool, tier: HostTier | None) -> None:
    """Raises ConfigError where heads share a budget and exact units wait on the device for the next token."""
    if by_head and tier is not None and tier.hot:
        raise ConfigError(f"exact: chosen_by is {tier.chosen_by!r}, which keeps the same number of fetched units of "
                          "each KV head on the device, and with by_head heads keep different numbers; expected "
                          "chosen_by='query'")


def check_alone(budget: Any, sinks: int | None, stabilizers: int | None, by_head: bool) -> None:
    """Raises ConfigError where what a `Budget` says is given beside one."""
    if isinstance(budget, Budget) and (sinks is not None or stabilizers is not None or by_head):
        raise ConfigError("sinks, stabilizers or by_head were given beside a Budget; expected them inside it")


def check_tier(tier: HostTier | None, store_bits: tuple[int, int]) -> None:
    """Raises ConfigError: exact units in the host's memory beside exact units on the device."""
    if tier is not None and store_bits == (16, 16):
        raise ConfigError("exact keeps exact units in the host's memory beside codes on the device, and store_bits is "
                          "16, so that there are no codes; expected store_bits of 8, 4, 2 or 1 with it")


def check_codes(shape: ModelShape, store_bits: tuple[int, int]) -> None:
    """Raises ConfigError: groups of channels of this model do not fill whole bytes in so few bits, or codes would take
    no less than exact units."""
    if store_bits != (16, 16) and shape.chooses:
        raise ConfigError(f"store_bits is {list(store_bits)}: index keys, by which layers of this model choose what "
                          "they attend to, are kept as the model has them; expected 16")
    if store_bits[0] != 16 and shape.ranked:
        raise ConfigError(f"store_bits is {list(store_bits)}: with ALiBi keys have their ranks among their numbers, "
                          "which must stay exact; expected 16 for K")
    for dim, bits in sorted({pair for unit in shape.units for pair in zip(unit.dims, store_bits, strict=True)}):
        if bits == 16 or not dim:
            continue
        if (group := group_of(dim, bits)) * bits % 8:
            raise ConfigError(f"store_bits is {bits}: with a head dim of {dim}, {group} channels share a "
                              "scale and fill no whole bytes; expected 16, or 8")
        if row_bytes(dim, bits) >= dim * shape.item_bytes:
            raise ConfigError(f"store_bits is {bits}: with a head dim of {dim} codes take "
                              f"{row_bytes(dim, bits)} bytes and exact units {dim * shape.item_bytes}; expected 16")


class UnitBytes(NamedTuple):
    """Bytes in all KV heads of one layer: of a kept unit, of a unit of the chunk, of each of the first units that are
    kept exactly beside their codes, and of the means that keys are stored without; of each unit that is exact for the
    next token, where there are at most `most_hot` of these. At most `residual` of the last units are exact, too, which
    take what the first ones do."""

    kept: int
    new: int
    first: int = 0
    mean: int = 0
    hot: int = 0
    most_hot: int = 0
    residual: int = 0

    def of(self, kept: int, new: int, first: int) -> int:
        """Of so many units in each head."""
        return (kept * self.kept + new * self.new + first * self.first + self.mean
                + min(kept, self.most_hot) * self.hot + min(kept, self.residual) * self.first)


def unit_bytes(unit: UnitShape, item_bytes: int, planes: int = 1, *, key_copies: int = 2,
               store_bits: tuple[int, int] = (16, 16), own_means: bool = True, tier: HostTier | None = None
               ) -> UnitBytes:
    """What a unit of one layer takes: K and V in the model's dtype, whose elements have `item_bytes`, or in codes, fp32
    score planes, int64 position.

    `key_copies`: 2 where K is stored before and after RoPE, 1 where a layer has no RoPE or kernels apply it on read;
    codes are of K before RoPE alone. `own_means`: whether a slot has means of keys of its own, or those of the heads.
    `tier`: where exact units are in the host's memory, whose bytes are not among these.
    """
    heads, beside = unit.kv_heads, 4 * planes + 8
    key, value = (dim * item_bytes for dim in unit.dims)
    if store_bits == (16, 16):
        row = heads * (key_copies * key + value + beside)
        return UnitBytes(row, row)
    rows = sum(dim * item_bytes if bits == 16 else row_bytes(dim, bits)
               for dim, bits in zip(unit.dims, store_bits, strict=True))
    exact, mean = heads * (key + value), 8 * heads * unit.key_dim if own_means else 0
    hot, most_hot, residual = (0, 0, 0) if tier is None else (
        heads * ((unit.key_dim + unit.value_dim) * item_bytes + 8), tier.hot, tier.residual)
    return UnitBytes(heads * (rows + beside), heads * (key + value + beside), exact, mean, hot, most_hot, residual)


def budget_from(value: int | str | Budget, shape: ModelShape, chunk_size: int, *, sinks: int | None = None,
                stabilizers: int | None = None, by_head: bool = False, shares: tuple[float, ...] | None = None,
                per_unit: tuple[UnitBytes, ...] | None = None) -> Budget:
    """The Budget for what a user may give: units, a size such as "512MiB" of one slot, or a Budget.

    Without explicit values 4 sinks and 32 stabilizers are protected, in small budgets an eighth of the units each, and
    never more than a part of the smallest layer by the heads' `shares`.

    Args:
        per_unit: what a unit takes in each layer, [L] (see `unit_bytes`); None: as in a layer with RoPE.

    Raises:
        ConfigError: none of these, or a size too small for a single unit per head, or too large for any model.
    """
    if isinstance(value, Budget):
        check_alone(value, sinks, stabilizers, by_head)
        return value

    def budget_of(units: int) -> Budget:
        least = min(shares) * len(shares) / sum(shares) if shares else 1.0
        smallest = math.floor(min(units, MOST_UNITS) * least)
        return Budget(units=units, sinks=min(4, units // 8, smallest // 4) if sinks is None else sinks,
                      stabilizers=min(32, units // 8, smallest // 3) if stabilizers is None else stabilizers,
                      by_head=by_head)

    if isinstance(value, str):
        match = _SIZE.match(value)
        if not match:
            raise ConfigError(f"budget is {value!r}; expected units per KV head (6000) or a size such as '512MiB'")
        size = float(match[1]) * _FACTORS[match[2].upper()]
        per_unit = per_unit or tuple(unit_bytes(unit, shape.item_bytes) for unit in shape.units)
        of_kept = sum(unit.kept for unit in per_unit)
        if size >= MOST_UNITS * of_kept:
            raise ConfigError(f"budget {match[0].strip()!r} is more than {MOST_UNITS:,} units per KV head take; "
                              "expected a smaller size")

        def slot_bytes(units: int) -> int:
            budget = budget_of(units)
            try:
                kept = budget.per_layer(shape, shares, most=shape.window - chunk_size)
            except ConfigError:  # too few beside the protected ones: whoever uses the budget raises this again
                kept = (units,) * shape.layers
            return 2 * shape.state_bytes + sum(
                unit.of(count, chunk_size, 0 if window else budget.sinks)
                for count, unit, window in zip(kept, per_unit, shape.sliding, strict=True))

        windows = [window for window in shape.sliding if window]  # no layer gets what is above another's window
        most = max(windows) if len(windows) == len(shape.sliding) else MOST_UNITS
        value = largest(lambda units: slot_bytes(units) <= size, most)
        if value < 1:
            raise ConfigError(f"budget {match[0].strip()!r}: one unit per KV head and a chunk of {chunk_size} take "
                              f"{slot_bytes(1):,} bytes; expected a larger size or a smaller chunk_size")
    if not _is_whole(value):
        raise ConfigError(f"budget is {value!r}; expected units per KV head (6000), a size ('512MiB') or a Budget")
    return budget_of(value)


def check_window(budgets: tuple[int, ...], chunk_size: int, shape: ModelShape) -> None:
    """Check that all ranks, which reach b_l + chunk_size, are positions that the model was made for (law 4).

    Raises:
        WindowExceeded: names the layer and the largest budget that fits.
    """
    for layer, units in enumerate(budgets):
        if units + chunk_size > shape.window and not shape.units[layer].sliding:
            raise WindowExceeded(
                f"layer {layer} would hold {units} + {chunk_size} = {units + chunk_size} units, the model "
                + (f"attends to all of at most {shape.window}, and of more to those that it chooses, which is not "
                   "served" if shape.limited else f"knows {shape.window} positions") + "; expected "
                + (f"at most {shape.window - chunk_size} units in a layer at this chunk_size"
                   if chunk_size < shape.window else f"a chunk_size below {shape.window}"))
