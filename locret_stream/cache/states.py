"""The recurrent states of all slots of a pool: of each slot one that belongs to its committed units, and one that goes
on with the provisional ones. Knows no model: what a state means is for the layers that carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the recurrent state of a context.

    Attributes:
        layer: of the decoder. kind: "conv", the last inputs of a convolution, or "recurrent". index: a layer may have
            several of a kind.
        shape: without the axis of the batch. device, dtype: as the model gives it.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """What snapshots call it."""
        return f"state.{self.layer}.{self.kind}" + (f".{self.index}" if self.index else "")

    @property
    def bytes(self) -> int:
        """Of one context."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateBuffers:
    """Committed and provisional states, [S, ...] for each of the forms."""

    def __init__(self, forms: Sequence[StateTensor], slots: int):
        self.forms = tuple(forms)
        self.committed, self.provisional = ([torch.zeros(slots, *form.shape, dtype=form.dtype, device=form.device)
                                             for form in self.forms] for _ in range(2))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, which have an axis of slots."""
        return [*self.committed, *self.provisional]

    def read(self, slots: Tensor | slice, *, provisional: bool) -> list[Tensor]:
        """Copies of the states of these slots, a slice or indices [A]: [A, ...] each."""
        held = self.provisional if provisional else self.committed
        return [tensor[slots].clone() if isinstance(slots, slice) else tensor[slots.to(tensor.device)]
                for tensor in held]

    def write(self, slots: Tensor | slice, tensors: Sequence[Tensor], *, provisional: bool) -> None:
        """Replace the states of these slots."""
        for held, tensor in zip(self.provisional if provisional else self.committed, tensors, strict=True):
            if isinstance(slots, slice):
                held[slots] = tensor.to(held.device)
            else:
                held.index_copy_(0, slots.to(held.device), tensor)
