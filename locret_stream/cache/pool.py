"""The pool: for each layer K, rotated K, V, scores and positions of all slots, allocated once. Addresses never move.

    bytes = slots * sum over layers of H * (b_l + chunk) * unit_l  +  scratch
    unit_l = (2 or 3) * D * item + 4 * planes + 8      (3: K, rotated K, V; 2 in a layer without RoPE, and where the
                                                        kernels rotate keys as they load them)
    scratch = H * max_l(b_l) * max(D * item, 8)        (on each device that holds layers)

Where committed units are codes (see `cache.quantised_store`):

    bytes = slots * sum over layers of H * (b_l * kept + (chunk + first_l) * new + (b_l + chunk) * beside + mean)
            + scratch
    kept = row(K) + row(V)                             (see `budgets.row_bytes`; D * item at 16 bits)
    new = 2 * D * item, beside = 4 * planes + 8        (first_l: the first units of layer l, which are kept exactly too:
                                                        its sinks, none where it has a sliding window)
    mean = 8 * D                                       (0 where means of keys come with the heads: one [H, D] fp32 a
                                                        layer for all slots)
    scratch = H * max_l(b_l) * max(D * item, 8) + dense
    dense = 3 * H * max_l(b_l + chunk) * D * item      (of each layer its own with `decode_copy`, else one for all)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locret_stream.cache.buffers import Dense, LayerBuffers, QuantisedBuffers
from locret_stream.config import ModelShape, unit_bytes


class Pool:
    """`slots` slots of capacity b_l + chunk_size units per KV head in layer l.

    Args:
        budgets: b_l for every layer, [L].
        rope: for every layer, whether rotated keys are kept beside the keys.
        planes: fp32 numbers kept per unit: the score first, then what the policy declares.
        device: of all layers, or one for every layer; a layer's memory lies on the device that computes the layer.
        store_bits: of a channel of K and of V; (16, 16) stores them in `dtype`, and `layers` are `LayerBuffers`, else
            `QuantisedBuffers`, without rotated keys.
        firsts: how many of the first units of each layer are kept exactly beside their codes, [L].
        key_means: of each layer, [L, H, D], which keys are coded without; None: each slot has its own.
        decode_copy: whether each layer of codes has a scratch of its own, so that what one slot read stays read.
    """

    def __init__(self, shape: ModelShape, budgets: tuple[int, ...], chunk_size: int, slots: int, *,
                 rope: tuple[bool, ...], planes: int, dtype: torch.dtype,
                 device: torch.device | Sequence[torch.device], store_bits: tuple[int, int] = (16, 16),
                 firsts: Sequence[int] = (), key_means: Tensor | None = None, decode_copy: bool = False):
        self.shape, self.budgets, self.chunk_size, self.slots = shape, budgets, chunk_size, slots
        self.store_bits, self.quantised, self.dtype = store_bits, store_bits != (16, 16), dtype
        self.planes, self.rope = planes, (False,) * len(budgets) if self.quantised else rope
        self.firsts = tuple(firsts) or (0,) * len(budgets)
        devices = [device] * len(budgets) if isinstance(device, torch.device) else device
        self.devices = tuple(dict.fromkeys(devices))
        heads, dim = shape.kv_heads, shape.head_dim
        means = [None] * len(budgets) if key_means is None or not self.quantised else list(key_means)
        self.own_means = means[0] is None
        row = max(dim * dtype.itemsize, 8)  # a row of K or V, or a position
        scratches = {device: torch.zeros(heads * max(budgets) * row, dtype=torch.uint8, device=device)
                     for device in self.devices}
        self.scratch = next(iter(scratches.values()))
        self.decode_copy = decode_copy and self.quantised
        shared: dict[torch.device, Dense] = {}
        self.layers: list[LayerBuffers] = []
        for units, rotates, first, device, mean in zip(budgets, self.rope, self.firsts, devices, means, strict=True):
            scores = torch.zeros(slots, planes, heads, units + chunk_size, dtype=torch.float32, device=device)
            positions = torch.zeros(slots, heads, units + chunk_size, dtype=torch.int64, device=device)
            if self.quantised:
                most = units if decode_copy else max(budgets)
                if decode_copy or device not in shared:
                    shared[device] = Dense(torch.zeros(3, heads, most + chunk_size, dim, dtype=dtype, device=device))
                self.layers.append(QuantisedBuffers.empty(
                    slots, heads, dim, units, first + chunk_size, store_bits, scores=scores, positions=positions,
                    scratch=scratches[device], dense=shared[device], means=mean))
                continue
            keys = torch.zeros(slots, heads, units + chunk_size, dim, dtype=dtype, device=device)
            self.layers.append(LayerBuffers(
                keys=keys, rotated=torch.zeros_like(keys) if rotates else keys, values=torch.zeros_like(keys),
                scores=scores, positions=positions, scratch=scratches[device]))

    def release(self) -> None:
        """Give the memory back, though contexts that are closed may still be held."""
        self.layers.clear()
        self.scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of slots, layer by layer."""
        return [t for layer in self.layers for t in layer.tensors]

    @property
    def bytes_resident(self) -> int:
        """Bytes that the pool's tensors really take."""
        shared = {id(t): t for layer in self.layers for t in (
            (layer.scratch, layer.dense.units) if isinstance(layer, QuantisedBuffers) else (layer.scratch,))}
        return sum(t.untyped_storage().nbytes() for t in (*self.tensors, *shared.values()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, which is what one open context takes."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors) // self.slots

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer of one slot, by the formula in this module's docstring."""
        return [self.shape.kv_heads * unit_bytes(
                    self.shape, self.planes, key_copies=2 if rotates else 1, store_bits=self.store_bits,
                    own_means=self.own_means).of(budget, self.chunk_size, first)
                for budget, rotates, first in zip(self.budgets, self.rope, self.firsts, strict=True)]

    def formula_bytes(self) -> int:
        """Bytes by the formula in this module's docstring; `bytes_resident` must equal them."""
        shape = self.shape
        row = shape.head_dim * shape.item_bytes
        scratch = shape.kv_heads * max(self.budgets) * max(row, 8)
        dense = [units + self.chunk_size for units in self.budgets] if self.decode_copy else [
            max(self.budgets) + self.chunk_size] * len(self.devices) if self.quantised else []
        return (self.slots * sum(self.layer_bytes) + len(self.devices) * scratch
                + 3 * shape.kv_heads * sum(dense) * row)
