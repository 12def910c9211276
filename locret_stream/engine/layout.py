"""The layout of an engine's memory: what is fixed when the engine is made, and what its parts read. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.config import ModelShape, StreamConfig, check_window
from locret_stream.errors import ConfigError
from locret_stream.kernels import uses_triton
from locret_stream.models import Attachment, RopeTables
from locret_stream.policies import Policy


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and protections of every layer, and its RoPE tables.

    Attributes:
        budgets: b_l, the units per KV head that layer l keeps, [L].
        policy: what scores units; of its own it says how many numbers it keeps per unit and what it protects.
        tables: RoPE at any rank that a unit may have.
        triton: for every layer, whether its operations run in Triton.
        on_load: for every layer, whether RoPE is applied when keys are read, so that no rotated keys are stored.
        dtype: of keys, values and hidden states.
    """

    shape: ModelShape
    config: StreamConfig
    policy: Policy
    budgets: tuple[int, ...]
    tables: RopeTables
    triton: tuple[bool, ...]
    on_load: tuple[bool, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, attachment: Attachment, config: StreamConfig, policy: Policy,
           shares: tuple[float, ...] | None) -> Layout:
        """The layout of a model's memory; `shares` of the total budget are those that the retaining heads recommend.

        Raises:
            ConfigError, WindowExceeded.
        """
        shape = attachment.shape
        budgets = config.budget.per_layer(shape, shares, most=shape.window - config.chunk_size)
        check_window(budgets, config.chunk_size, shape)
        tables = attachment.tables(max(budgets) + config.chunk_size)
        policy.expect_declared()
        layout = cls(shape, config, policy, budgets, tables,
                     tuple(uses_triton(torch.empty(0, device=place.device)) for place in attachment.places),
                     tuple(pair is not None and attachment.rotates_on_load(layer)
                           for layer, pair in enumerate(tables.layers)), attachment.dtype)
        for units, window, (sinks, stabilizers) in zip(budgets, shape.sliding, layout.protection, strict=True):
            if not window and sinks + stabilizers >= units:
                raise ConfigError(f"policy {policy.name!r} protects {sinks} + {stabilizers} units of {units}; "
                                  "expected fewer than the budget")
        return layout

    @property
    def chunk_size(self) -> int:
        """Tokens between two evictions."""
        return self.config.chunk_size

    @property
    def capacity(self) -> int | None:
        """How many tokens a policy that never evicts can hold; None: there is no limit."""
        if self.policy.bounded:
            return None
        # A layer that holds its whole window evicts nothing that it could still see.
        return min((units for units, window in zip(self.budgets, self.shape.sliding, strict=True)
                    if not window or units < window), default=None)

    @property
    def protection(self) -> list[tuple[int, int]]:
        """`protection_of` every layer, without a focus."""
        return [self.protection_of(layer) for layer in range(self.shape.layers)]

    def protection_of(self, layer: int, focus: int = 0) -> tuple[int, int]:
        """How many of the first units of a layer always stay, a focus of that many tokens included, and how many of the
        last. Sliding-window layers protect none: they keep their last units."""
        if self.shape.sliding[layer]:
            return 0, 0
        budget = self.config.budget
        return self.policy.protection(self.budgets[layer], focus + budget.sinks, budget.stabilizers)

    def fronts(self, focus: Sequence[int]) -> list[int]:
        """How many units a focus has in every layer: none where the layer has a sliding window."""
        return [0 if window else len(focus) for window in self.shape.sliding]

    def rotate_keys(self, layer: int, keys: Tensor, start: int, out: Tensor | None = None) -> Tensor:
        """Keys [1, H, T, D] with the RoPE of ranks start .. start+T-1."""
        return self.tables.rotate(layer, keys, start, out)
