"""The pool: for each layer K, rotated K, V, scores and positions of all slots, allocated once. Addresses never move.

    bytes = slots * sum over layers of H * (b_l + chunk) * unit_l  +  scratch
    unit_l = (2 or 3) * D * item + 4 * planes + 8      (3: K, rotated K, V; 2 in a layer without RoPE, and where the
                                                        kernels rotate keys as they load them)
    scratch = H * max_l(b_l) * max(D * item, 8)        (on each device that holds layers)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_stream.config import ModelShape, unit_bytes
from locret_stream.kernels import slot_units


@dataclass(slots=True)
class LayerBuffers:
    """All slots of one layer. keys, rotated, values [S, H, C, D]; scores [S, P, H, C]; positions [S, H, C].

    `rotated` is `keys` itself where no rotated keys are kept. All layers of a device share one `scratch`.
    """

    keys: Tensor
    rotated: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    scratch: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of this layer, each once; `scratch`, which layers share, is left out."""
        unrotated = [self.keys, self.values, self.scores, self.positions]
        return unrotated if self.rotated is self.keys else [*unrotated, self.rotated]

    def write_each(self, slots: Tensor, ranks: Tensor, keys: Tensor, rotated: Tensor, values: Tensor) -> None:
        """Write one new unit for each of A slots, behind its committed units.

        On an accelerator the indices stay on the device, so that the host does not wait for it.

        Args:
            slots, ranks: [A], for every unit its slot and its rank there.
            keys, rotated, values: [A, H, 1, D]; the keys before and after RoPE.
        """
        if len(slots) == 1 and slots.device.type == "cpu":
            slot, rank = int(slots), int(ranks)
            slot_units(self.keys, slot, rank, rank + 1).copy_(keys)
            slot_units(self.values, slot, rank, rank + 1).copy_(values)
            if self.rotated is not self.keys:
                slot_units(self.rotated, slot, rank, rank + 1).copy_(rotated)
            return
        self.keys[slots, :, ranks] = keys[:, :, 0]
        self.values[slots, :, ranks] = values[:, :, 0]
        if self.rotated is not self.keys:
            self.rotated[slots, :, ranks] = rotated[:, :, 0]


class Pool:
    """`slots` slots of capacity b_l + chunk_size units per KV head in layer l.

    Args:
        budgets: b_l for every layer, [L].
        rope: for every layer, whether rotated keys are kept beside the keys.
        planes: fp32 numbers kept per unit: the score first, then what the policy declares.
        device: of all layers, or one for every layer; a layer's memory lies on the device that computes the layer.
    """

    def __init__(self, shape: ModelShape, budgets: tuple[int, ...], chunk_size: int, slots: int, *,
                 rope: tuple[bool, ...], planes: int, dtype: torch.dtype,
                 device: torch.device | Sequence[torch.device]):
        self.shape, self.budgets, self.chunk_size, self.slots = shape, budgets, chunk_size, slots
        self.planes, self.rope = planes, rope
        heads, dim = shape.kv_heads, shape.head_dim
        row = max(dim * dtype.itemsize, 8)  # a row of K or V, or a position
        devices = [device] * len(budgets) if isinstance(device, torch.device) else device
        self.devices = tuple(dict.fromkeys(devices))
        scratches = {device: torch.zeros(heads * max(budgets) * row, dtype=torch.uint8, device=device)
                     for device in self.devices}
        self.scratch = next(iter(scratches.values()))
        self.layers: list[LayerBuffers] = []
        for units, rotates, device in zip(budgets, rope, devices, strict=True):
            capacity = units + chunk_size
            keys = torch.zeros(slots, heads, capacity, dim, dtype=dtype, device=device)
            self.layers.append(LayerBuffers(
                keys=keys, rotated=torch.zeros_like(keys) if rotates else keys, values=torch.zeros_like(keys),
                scores=torch.zeros(slots, planes, heads, capacity, device=device),
                positions=torch.zeros(slots, heads, capacity, dtype=torch.int64, device=device),
                scratch=scratches[device]))

    @property
    def bytes_resident(self) -> int:
        """Bytes that the pool's tensors really take."""
        scratches = {id(layer.scratch): layer.scratch for layer in self.layers}
        tensors = [t for layer in self.layers for t in layer.tensors]
        return sum(t.untyped_storage().nbytes() for t in (*tensors, *scratches.values()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, which is what one open context takes."""
        return sum(t.untyped_storage().nbytes() for layer in self.layers for t in layer.tensors) // self.slots

    def formula_bytes(self) -> int:
        """Bytes by the formula in this module's docstring; `bytes_resident` must equal them."""
        shape = self.shape
        units = sum((budget + self.chunk_size) * unit_bytes(shape, self.planes, key_copies=2 if rotates else 1)
                    for budget, rotates in zip(self.budgets, self.rope, strict=True))
        row = max(shape.head_dim * shape.item_bytes, 8)
        scratch = shape.kv_heads * max(self.budgets) * row
        return self.slots * shape.kv_heads * units + len(self.devices) * scratch
