"""Attention modules that rotate by a table of their own (GPT-J, CodeGen): sines and cosines of all positions, in one
buffer. Knows modules of transformers; knows no attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Table:
    """Sines and cosines of all positions in one tensor [positions, width], as a rotary module of pairs."""

    def __init__(self, tensor: Tensor):
        self.tensor, self._cos_first = tensor, bool(tensor[0, 0] > 0.5)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """cos + i sin at positions [1, T]: [1, T, width / 2]."""
        halves = self.tensor.to(positions.device)[positions].float().chunk(2, dim=-1)
        return torch.complex(*(halves if self._cos_first else halves[::-1]))

    @staticmethod
    def holds(tensor: Tensor) -> bool:
        """Whether a tensor is such a table: its halves are sines and cosines of the same angles, the first of which
        are 0."""
        if (tensor.dim() != 2 or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel()
                or tensor.shape[1] % 2):
            return False
        one, other = tensor.float().chunk(2, dim=-1)
        return bool(((one.square() + other.square() - 1).abs() < 1e-2).all() and (one[0] + other[0] == 1).all())


@dataclass(slots=True, frozen=True)
class TableOf:
    """A buffer of an attention module that is such a table (GPT-J, CodeGen). identity: its first row, for all."""

    module: Any
    name: str
    real: Table
    identity: Tensor

    def put(self, tensor: Tensor) -> None:
        """Make it that tensor, in this module tree."""
        self.module._buffers[self.name] = tensor


def take_tables(decoder: nn.Module) -> list[TableOf]:
    """The tables of modules that rotate by their own; in their place are identity ones, from now on."""
    found: list[TableOf] = []
    for module in decoder.modules():
        if hasattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb"):
            for name, buffer in module.named_buffers(recurse=False):
                if Table.holds(buffer):
                    same = (each.real for each in found if torch.equal(each.real.tensor, buffer))
                    found.append(TableOf(module, name, next(same, None) or Table(buffer), buffer[:1].expand_as(buffer)))
    for table in found:
        table.put(table.identity)
    return found
