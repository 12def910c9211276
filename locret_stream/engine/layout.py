"""The layout of an engine's memory: all that is fixed when the engine is made, which its parts read. Runs nothing."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.cache import Pool, StateTensor, stored_row
from locret_stream.config import LEAST_OF_HEAD, ModelShape, StreamConfig, check_codes, check_window
from locret_stream.errors import ConfigError
from locret_stream.kernels import select_by_threshold, uses_triton
from locret_stream.models import Attachment, Foreseen, RopeTables
from locret_stream.policies import POLICIES, Policy, can_share


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and protections of every layer, and its RoPE tables.

    Attributes:
        budgets: b_l, the units per KV head that layer l keeps, [L].
        policy: scores units, and declares how many numbers it keeps per unit and how many units it protects.
        tables: RoPE at any rank that a unit may have.
        triton: for every layer, whether its operations run in Triton.
        on_load: for every layer, whether kernels apply RoPE as they read keys, so that no rotated keys are stored.
        dtype: of keys, values and hidden states.
        states: the tensors of the model's recurrent state.
        headwise: for every layer, whether its KV heads share its budget. most: the most units that one of its heads
            keeps, [L]: the budget, or where they share it what the window has room for.
        given_means: whether the means that codes of keys are without come with the heads, and not with each context.
    """

    shape: ModelShape
    config: StreamConfig
    policy: Policy
    budgets: tuple[int, ...]
    tables: RopeTables
    triton: tuple[bool, ...]
    on_load: tuple[bool, ...]
    dtype: torch.dtype
    states: tuple[StateTensor, ...]
    headwise: tuple[bool, ...]
    most: tuple[int, ...]
    given_means: bool

    @classmethod
    def of(cls, attachment: Attachment | Foreseen, config: StreamConfig, policy: Policy,
           shares: tuple[float, ...] | None, *, given_means: bool = False) -> Layout:
        """The layout of a model's memory; `shares` of the total budget come with the heads. Raises as `Engine`."""
        shape = attachment.shape
        budgets = config.budget.per_layer(shape, shares, most=shape.window - config.chunk_size)
        check_window(budgets, config.chunk_size, shape)
        headwise = tuple(config.budget.by_head and unit.kv_heads > 1 and not unit.sliding for unit in shape.units)
        most = tuple(min(units * unit.kv_heads, shape.window - config.chunk_size) if shared else units
                     for units, unit, shared in zip(budgets, shape.units, headwise, strict=True))
        tables = attachment.tables(max(most) + config.chunk_size)
        policy.expect_declared()
        if config.budget.by_head:
            _expect_headwise(policy, shape, headwise, tables.factors)
        check_codes(shape, config.store_bits)
        if config.exact is not None and shape.biased:
            raise ConfigError("exact: layers of this model add to logits what depends on ranks, which are read for one "
                              "context at a time; expected none, and store_bits alone")
        if config.exact is not None and config.exact.rows > 1 and attachment.states:
            raise ConfigError("exact: this model carries a recurrent state from token to token, which a second token "
                              "in a step would change; expected HostTier() without a guess")
        layout = cls(shape, config, policy, budgets, tables,
                     tuple(uses_triton(torch.empty(0, device=place.device)) for place in attachment.places),
                     tuple(pair is not None and attachment.rotates_on_load(layer) and not config.quantised
                           for layer, pair in enumerate(tables.layers)), attachment.dtype,
                     attachment.states, headwise, most, given_means and config.quantised)
        for units, window, (sinks, stabilizers) in zip(budgets, shape.sliding, layout.protection, strict=True):
            if not window and sinks + stabilizers >= units:
                saved = config.exact is not None and config.exact.saves == "codes"
                raise ConfigError(f"policy {policy.name!r} protects {sinks} + {stabilizers} units of {units}"
                                  + saved * ", the residual ones of HostTier(saves='codes') among them"
                                  + "; expected fewer than the budget")
        return layout

    def pool(self, attachment: Attachment | Foreseen, slots: int, *, key_means: Tensor | None = None,
             decode_copy: bool = False) -> Pool:
        """The memory of so many slots, allocated where the attachment's layers are. Arguments as of `Engine`."""
        return Pool(self.shape, self.budgets, self.chunk_size, slots, planes=self.policy.planes, dtype=self.dtype,
                    device=[place.device for place in attachment.places],
                    rope=tuple(copies == 2 for copies in attachment.key_copies), store_bits=self.config.store_bits,
                    firsts=self.firsts, key_means=key_means, decode_copy=decode_copy, states=self.states,
                    tier=self.config.exact, headwise=self.headwise)

    @property
    def stored_rows(self) -> list[tuple[int, int]]:
        """Items of K and of V of a stored unit, by layer: numbers, or bytes where codes are all that there is."""
        return [(key, value) if not self.config.stores_codes else
                (stored_row(key, self.config.store_bits[0], self.dtype),
                 stored_row(value, self.config.store_bits[1], self.dtype))
                for key, value in (unit.dims for unit in self.shape.units)]

    @property
    def chunk_size(self) -> int:
        """Tokens between two evictions."""
        return self.config.chunk_size

    @property
    def capacity(self) -> int | None:
        """How many tokens fit a policy that never evicts; None: any number."""
        if self.policy.bounded:
            return None
        # A layer whose budget is its whole window evicts nothing that it could still see.
        return min((units for units, window in zip(self.budgets, self.shape.sliding, strict=True)
                    if not window or units < window), default=None)

    @property
    def protection(self) -> list[tuple[int, int]]:
        """`protection_of` every layer, without a focus."""
        return [self.protection_of(layer) for layer in range(self.shape.layers)]

    def select(self, layer: int, scores: Sequence[Tensor], units: int, sinks: int, stabilizers: int, *,
               front: int = 0) -> list[Tensor]:
        """The units that stay in a layer whose heads share a budget of `units` for each of them: of each head the
        ascending ranks. `scores`: of each head, [N_h]; `front`: units that will stand in front of those that stay.
        Others as of `select_units`."""
        least = max(sinks + stabilizers, int(LEAST_OF_HEAD * units))
        return select_by_threshold(scores, units * len(scores), least, self.most[layer] - front, sinks,
                                   stabilizers)

    @property
    def firsts(self) -> tuple[int, ...]:
        """How many of the first units of each layer are kept exactly where the others are codes, [L]: those that always
        stay."""
        return tuple(first if self.config.quantised else 0 for first, _ in self.protection)

    def protection_of(self, layer: int, focus_count: int = 0, units: int | None = None) -> tuple[int, int]:
        """How many of the first units of a layer always stay, a focus of `focus_count` tokens included, and how many of
        the last, where it keeps so many `units` (None: its budget). Layers with a sliding window protect none, as they
        keep their last units.

        Where codes are saved, the last units that are saved exactly stay: if an older one could take the place of one
        of them, what is committed would depend on whether that one was restored from its code. A copy that is thinned
        commits nothing that is saved."""
        if self.shape.units[layer].sliding:
            return 0, 0
        budget, tier = self.config.budget, self.config.exact
        first, last = self.policy.protection(self.budgets[layer] if units is None else units,
                                             focus_count + budget.sinks, budget.stabilizers)
        return first, max(last, tier.residual) if units is None and tier is not None and tier.saves == "codes" else last


def _expect_headwise(policy: Policy, shape: ModelShape, headwise: Sequence[bool], factors: Container[int]) -> None:
    """Raises ConfigError unless the heads of some layers, `headwise`, can share its budget; `factors`: layers whose
    queries are multiplied by numbers of their rank."""
    check_sharing(policy)
    if shape.biased or shape.chooses or any(shared and layer in factors for layer, shared in enumerate(headwise)):
        raise ConfigError("budget: by_head gives a unit another rank in each head, and layers of this model use ranks "
                          "beside RoPE; expected by_head=False")
    if not any(headwise):
        raise ConfigError("budget: by_head lets the KV heads of a layer share its units, and each layer of this model "
                          "has one KV head or a sliding window; expected by_head=False")


def check_sharing(policy: Policy | type[Policy]) -> None:
    """Raises ConfigError unless the heads of a layer can share its units with this policy."""
    if not policy.bounded:
        raise ConfigError(f"budget: policy {policy.name!r} never evicts, so that no head leaves a unit to another; "
                          "expected by_head=False")
    if not can_share(policy):
        names = ", ".join(repr(name) for name, kind in POLICIES.items() if can_share(kind))
        raise ConfigError("budget: by_head needs scores that each KV head gets from its own units alone, and policy "
                          f"{policy.name!r} declares none; expected of {names}")
