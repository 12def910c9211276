"""The pool: for each layer K, rotated K, V, scores and positions of all slots, allocated once. Addresses never move.

    bytes = slots * sum over layers of H * (b_l + chunk) * unit_l  +  scratch
    unit_l = ((1 or 2) * D_K + D_V) * item + 4 * planes + 8  (2: K and rotated K; 1 in a layer without RoPE, and where
                                                        the kernels rotate keys as they load them; D_K: with the
                                                        numbers of an index key)
    scratch = max_l(H * b_l * max(D * item, 8))        (on each device that holds layers; D: the larger of both)

and slots * 2 * state where layers carry a recurrent state (see `cache.states`).

Where committed units are codes (see `cache.quantised_store`):

    bytes = slots * sum over layers of H * (b_l * kept + (chunk + first_l + residual_l) * new + (b_l + chunk) * beside
                                            + mean + hot) + scratch
    kept = row(K) + row(V)                             (see `budgets.row_bytes`; D * item at 16 bits)
    new = (D_K + D_V) * item, beside = 4 * planes + 8  (first_l: the first units of layer l, which are kept exactly too:
                                                        its sinks, none where it has a sliding window)
    mean = 8 * D_K                                     (0 where means of keys come with the heads: one [H, D] fp32 a
                                                        layer for all slots)
    residual_l = hot = 0                               (see below)
    scratch = max_l(H * b_l * max(D * item, 8)) + dense
    dense = (2 * D_K + D_V) * H * max_l(b_l + chunk) * item  (of each layer its own with `decode_copy`, else one for all
                                                        layers of one H and D)

Where exact units are in the host's memory (see `cache.host`), of which k wait on the device for the next token:

    residual_l = min(that of `HostTier`, b_l)
    hot = min(k, b_l) * (new + 8)                      (0 by the query: nothing waits)
    bytes of the host = slots * sum over layers of H * b_l * (new + 8)

and once a layer without a window is full, so many of its units, of `new` bytes each, are copied from there:

    for a token that is decoded, by the query          H * min(k, b_l - first_l - residual_l)
                                                       (of all heads together, where they share b_l; up to H * k where
                                                       one has fewer than residual_l)
    for a chunk                                        H * b_l, where chunks read exact units, and H * residual_l
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locret_stream.cache.buffers import Dense, LayerBuffers, QuantisedBuffers
from locret_stream.cache.host import HostRows, HotUnits
from locret_stream.cache.states import StateBuffers, StateTensor
from locret_stream.config import ModelShape, unit_bytes
from locret_stream.host_tier import HostTier


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
        states: the tensors of the model's recurrent state.
        tier: how exact units in the host's memory serve units that are codes; None: there are none.
        headwise: of each layer, whether its KV heads share their budget (see `cache.headwise_store`), [L]: its buffers
            have the rows of all heads one after another, as if of one head.

    Attributes:
        residuals: of each layer, how many of the last committed units are exact on the device at most, [L].
        tails: of each layer, how many exact units have rows before those behind the committed ones, [L].
        fetched: units that decoding has copied from the host to the device. read: those that chunks and prompts have,
            and those that were the last ones behind a commit or a load.
    """

    def __init__(self, shape: ModelShape, budgets: tuple[int, ...], chunk_size: int, slots: int, *,
                 rope: tuple[bool, ...], planes: int, dtype: torch.dtype,
                 device: torch.device | Sequence[torch.device], store_bits: tuple[int, int] = (16, 16),
                 firsts: Sequence[int] = (), key_means: Tensor | None = None, decode_copy: bool = False,
                 states: Sequence[StateTensor] = (), tier: HostTier | None = None, headwise: Sequence[bool] = ()):
        assert tier is None or store_bits != (16, 16), "units that are exact on the device need no copy"
        self.headwise = tuple(headwise) or (False,) * len(budgets)
        self.shape, self.budgets, self.chunk_size, self.slots = shape, budgets, chunk_size, slots
        self.store_bits, self.quantised, self.dtype = store_bits, store_bits != (16, 16), dtype
        self.states = StateBuffers(states, slots)
        self.planes, self.rope = planes, (False,) * len(budgets) if self.quantised else rope
        self.firsts = tuple(firsts) or (0,) * len(budgets)
        self.tier, self.fetched, self.read = tier, 0, 0
        self.residuals = tuple(min(units, tier.residual if tier else 0) for units in budgets)
        self.tails = tuple(map(sum, zip(self.firsts, self.residuals, strict=True)))
        devices = [device] * len(budgets) if isinstance(device, torch.device) else device
        self._devices_of_layers, self.devices = tuple(devices), tuple(dict.fromkeys(devices))
        means = [None] * len(budgets) if key_means is None or not self.quantised else list(key_means)
        self.own_means = means[0] is None
        scratches = {device: torch.zeros(self._scratch_bytes(), dtype=torch.uint8, device=device)
                     for device in self.devices}
        self.scratch = next(iter(scratches.values()))
        self.decode_copy = decode_copy and self.quantised
        shared: dict[object, Dense] = {}
        self.layers: list[LayerBuffers] = []
        for layer, (unit, units, device) in enumerate(zip(shape.units, budgets, devices, strict=True)):
            heads, room = unit.kv_heads, units + chunk_size
            if self.headwise[layer]:
                heads, room = 1, heads * room
            scores = torch.zeros(slots, planes, heads, room, dtype=torch.float32, device=device)
            positions = torch.zeros(slots, heads, room, dtype=torch.int64, device=device)
            if self.quantised:
                form = layer if decode_copy else (unit.kv_heads, *unit.dims, device)
                if form not in shared:
                    most = units if decode_copy else max(budgets)
                    shared[form] = Dense.empty(unit, most + chunk_size, dtype, device)
                coded = (1, unit.kv_heads * units) if self.headwise[layer] else (unit.kv_heads, units)
                self.layers.append(QuantisedBuffers.empty(
                    slots, unit, coded, self.tails[layer] + chunk_size, store_bits, scores=scores,
                    positions=positions, scratch=scratches[device], dense=shared[form], means=means[layer],
                    host=HostRows.empty(slots, unit, units, dtype, device) if tier else None,
                    hot=HotUnits.empty(slots, unit, min(units, tier.hot), dtype, device) if tier else None))
                continue
            keys = torch.zeros(slots, heads, room, unit.dims[0], dtype=dtype, device=device)
            rotated = torch.zeros_like(keys) if self.rope[layer] else keys
            values = rotated if not unit.value_dim else torch.zeros(slots, heads, room, unit.value_dim, dtype=dtype,
                                                                    device=device)
            self.layers.append(LayerBuffers(keys=keys, rotated=rotated, values=values, scores=scores,
                                            positions=positions, scratch=scratches[device]))

    def release(self) -> None:
        """Give the memory back, though contexts that are closed may still be held."""
        self.layers.clear()
        self.states = StateBuffers((), 0)
        self.scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of slots, layer by layer, then recurrent states."""
        return [*(t for layer in self.layers for t in layer.tensors), *self.states.tensors]

    @property
    def bytes_resident(self) -> int:
        """Bytes that the pool's tensors really take."""
        shared = {id(t): t for layer in self.layers for t in (
            (layer.scratch, *layer.dense.parts) if isinstance(layer, QuantisedBuffers) else (layer.scratch,))}
        return sum(t.untyped_storage().nbytes() for t in (*self.tensors, *shared.values()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, which is what one open context takes."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors) // self.slots

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer of one slot, by the formula in this module's docstring."""
        return [unit_bytes(unit, self.shape.item_bytes, self.planes, key_copies=2 if rotates else 1,
                           store_bits=self.store_bits, own_means=self.own_means, tier=self.tier
                           ).of(budget, self.chunk_size, first)
                for unit, budget, rotates, first in zip(self.shape.units, self.budgets, self.rope, self.firsts,
                                                        strict=True)]

    @property
    def host_bytes(self) -> int:
        """Bytes that exact units take in the host's memory, of all slots: of the tensors themselves."""
        return sum(t.untyped_storage().nbytes() for layer in self.layers
                   if isinstance(layer, QuantisedBuffers) and layer.host is not None for t in layer.host.tensors)

    def formula_host_bytes(self) -> int:
        """The same by the formula in this module's docstring."""
        return 0 if self.tier is None else self.slots * sum(
            unit.kv_heads * budget * (sum(unit.dims) * self.shape.item_bytes + 8)
            for unit, budget in zip(self.shape.units, self.budgets, strict=True))

    def formula_moved(self) -> tuple[int, int]:
        """Units that a decoded token fetches by the query, and that a chunk reads, by the formula in this module's
        docstring."""
        tier, token, chunk = self.tier, 0, 0
        for unit, units, first, last in zip(self.shape.units, self.budgets, self.firsts, self.residuals, strict=True):
            assert not unit.sliding, "a layer with a window reads no more than that"
            if tier is not None:
                token += unit.kv_heads * max(0, min(tier.units - tier.hot, units - first - last))
                chunk += unit.kv_heads * ((units if tier.prefill == "exact" else 0) + last)
        return token, chunk

    def formula_bytes(self) -> int:
        """Bytes by the formula in this module's docstring; `bytes_resident` must equal them."""
        read = [(unit.kv_heads * (2 * unit.key_dim + unit.value_dim) * self.shape.item_bytes, device, unit)
                for unit, device in zip(self.shape.units, self._devices_of_layers, strict=True)]
        dense = 0
        if self.decode_copy:
            dense = sum(row * (units + self.chunk_size) for (row, _, _), units in zip(read, self.budgets, strict=True))
        elif self.quantised:
            forms = {(unit.kv_heads, *unit.dims, device): row for row, device, unit in read}
            dense = sum(forms.values()) * (max(self.budgets) + self.chunk_size)
        of_slot = sum(self.layer_bytes) + 2 * sum(form.bytes for form in self.states.forms)
        return self.slots * of_slot + len(self.devices) * self._scratch_bytes() + dense

    def _scratch_bytes(self) -> int:
        """Room for the rows of K or V of all kept units of any layer, or for their positions."""
        return max(unit.kv_heads * units * max(max(unit.dims) * self.dtype.itemsize, 8)
                   for unit, units in zip(self.shape.units, self.budgets, strict=True))
