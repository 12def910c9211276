"""A model's rotary embeddings (RoPE), applied outside of it: at any rank, by its own function. Knows no attention.

A unit's rank changes with every eviction, so keys are stored before RoPE, and rotated for their present rank. In the
decoder identity embeddings take the place of the real ones.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.kernels import reference, rotate_halves, uses_triton


@dataclass(slots=True, frozen=True)
class Place:
    """Where a layer works: its device, and the dtypes of its attention's input and of its keys."""

    device: torch.device
    hidden: torch.dtype
    keys: torch.dtype


class Rotary:
    """The rotary embeddings of a decoder, in which identity ones take their place.

    Attributes:
        uses: by layer, whether it has RoPE. plain: by layer, whether that is the usual rotation of halves.
    """

    def __init__(self, decoder: Any, layer_types: list[str] | None):
        self._real, self._layer_types = decoder.rotary_emb, layer_types
        self._attentions = [layer.self_attn for layer in decoder.layers]
        self._sliced = [False] * len(self._attentions)
        self._computing = threading.Lock()  # longrope writes its frequencies, then reads them: one call at a time
        self._places: list[Place] = []
        self.uses = self.plain = [False] * len(self._attentions)
        decoder.rotary_emb = _Identity(self._real)

    def set_layers(self, uses: list[bool], places: list[Place], head_dim: int) -> None:
        """Set which layers use RoPE and where they work, as probes have shown."""
        self.uses, self._places = uses, places
        self._sliced = [use and self._takes_a_part(layer, head_dim) for layer, use in enumerate(uses)]
        self.plain = [use and self._is_plain(layer, head_dim) for layer, use in enumerate(uses)]
        for module, use in zip(self._attentions, uses, strict=True):
            if use:
                _spare_rotation(module)

    def cos_sin(self, layer: int, positions: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """cos and sin of the layer at positions [1, T]: [1, T, width] each."""
        like = torch.empty(1, dtype=place.keys, device=place.device)
        per_type = isinstance(getattr(self._real, "rope_type", None), dict)
        kind = [self._layer_types[layer]] if self._layer_types and per_type else []
        with self._computing:
            cos, sin = self._real(like, positions, *kind)
        return cos.to(place.device), sin.to(place.device)  # the module is on one device, the layers may be on several

    @torch.no_grad()
    def tables(self, capacity: int) -> RopeTables:
        """Tables for ranks 0..capacity-1."""
        made: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        layers: list[tuple[Tensor, Tensor] | None] = []
        for layer, (rope, place) in enumerate(zip(self.uses, self._places, strict=True)):
            kind = self._layer_types[layer] if self._layer_types else "", place.device
            if rope and kind not in made:
                made[kind] = self.cos_sin(layer, torch.arange(capacity, device=place.device)[None], place)
            layers.append(made[kind] if rope else None)
        return RopeTables(self, capacity, layers)

    def apply(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, heads, T, D] -> rotated by the model's own function, in halves, in pairs, or in part."""
        module = self._attentions[layer]
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        if not self._sliced[layer]:
            return rotate(x, x[:, :0], cos, sin)[0]
        width = cos.shape[-1]
        turned = rotate(x[..., :width], x[:, :0, :, :width], cos, sin)[0]
        return torch.cat([turned, x[..., width:]], dim=-1)

    @torch.no_grad()
    def _takes_a_part(self, layer: int, head_dim: int) -> bool:
        """Whether the model divides x for a partial rotation outside of its function (StableLM)."""
        place = self._places[layer]
        cos, sin = self.cos_sin(layer, torch.zeros(1, 1, dtype=torch.int64, device=place.device), place)
        try:
            self.apply(layer, torch.zeros(1, 1, 1, head_dim, dtype=place.keys, device=place.device), cos, sin)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the widths do not fit
            return True
        return False

    @torch.no_grad()
    def _is_plain(self, layer: int, head_dim: int) -> bool:
        """Whether the model's own rotation is the usual one of halves, as `rotate_halves` does it."""
        place = self._places[layer]
        x = torch.linspace(-1, 1, 2 * head_dim, dtype=place.keys, device=place.device).view(1, 1, 2, head_dim)
        cos, sin = self.cos_sin(layer, torch.tensor([[1, 5]], device=place.device), place)
        if cos.shape[-1] != x.shape[-1]:
            return False
        close = 1e-5 if x.dtype in (torch.float32, torch.float64) else 1e-2
        own, plain = self.apply(layer, x, cos, sin), reference.rotate_halves(x, cos[:, None], sin[:, None])
        # A model that rotates in float32 and casts back (OLMo 2) has another dtype here, and uses its own function.
        return own.dtype == plain.dtype and torch.allclose(own, plain, rtol=close, atol=close)


class RopeTables:
    """RoPE by tables: cos and sin of ranks 0..capacity-1 for every layer, from the model's own rotary module.

    Attributes:
        layers: (cos, sin), [1, capacity, width] each, by layer; None: no RoPE.
    """

    def __init__(self, rotary: Rotary, capacity: int, layers: list[tuple[Tensor, Tensor] | None]):
        self.capacity, self.layers = capacity, layers
        self._rotary = rotary
        # Where a kernel rotates chunks it rotates single tokens, too: the same bits alone and among many.
        self._by_kernel = [pair is not None and plain and uses_triton(pair[0])
                           for pair, plain in zip(layers, rotary.plain, strict=True)]

    @property
    def bytes_resident(self) -> int:
        """Bytes of the tables, which layers of one kind share."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for pair in self.layers if pair is not None for t in pair}
        return sum(storages.values())

    def rotate(self, layer: int, x: Tensor, start: int, out: Tensor | None = None) -> Tensor:
        """x [B, heads, T, D] before RoPE -> rotated at ranks start .. start+T-1; x itself where there is no RoPE.

        `out`: a tensor that takes the result and shares no memory with x.
        """
        pair = self.layers[layer]
        if pair is None:
            return x if out is None else out.copy_(x)
        stop = start + x.shape[2]
        cos, sin = pair[0][:, start:stop], pair[1][:, start:stop]
        if self._rotary.plain[layer]:
            return rotate_halves(x, cos[:, None], sin[:, None], out)
        turned = self._rotary.apply(layer, x, cos, sin)
        return turned if out is None else out.copy_(turned)

    def turns(self, layer: int, ranks: Tensor) -> tuple[Tensor, Tensor] | None:
        """The argument of `rotate_each` that rotates one token at each of the ranks [B]; equal for layers that share a
        table. None where there is no RoPE."""
        pair = self.layers[layer]
        if pair is None:
            return None
        cos, sin = pair[0][0, ranks, None], pair[1][0, ranks, None]
        if not self._rotary.plain[layer]:
            return cos, sin
        if self._by_kernel[layer]:
            return cos[:, None], sin[:, None]
        half = sin.shape[-1] // 2
        return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None]

    def rotate_each(self, layer: int, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [B, heads, 1, D] before RoPE -> rotated by `turns`, each row of the batch at its own rank."""
        if turns is None:
            return x
        if self._by_kernel[layer]:
            return rotate_halves(x, *turns)
        if self._rotary.plain[layer]:  # (-x2, x1) * sin is (x2, x1) * (-sin1, sin2)
            return torch.addcmul(x * turns[0], x.roll(x.shape[-1] // 2, -1), turns[1])
        return self._rotary.apply(layer, x, *turns)

    def rotate_at(self, layer: int, x: Tensor, ranks: Tensor) -> Tensor:
        """x [B, heads, T, D] before RoPE -> rotated, every unit at its own rank: ranks [B, heads, T] int64."""
        pair = self.layers[layer]
        if pair is None:
            return x
        cos, sin = pair[0][0, ranks], pair[1][0, ranks]
        if self._rotary.plain[layer]:
            return rotate_halves(x, cos, sin)
        turned = self._rotary.apply(layer, x.flatten(0, 1)[:, None], cos.flatten(0, 1), sin.flatten(0, 1))
        return turned.view(x.shape)


class _Identity(nn.Module):
    """Takes the place of a model's rotary module: cos = 1, sin = 0, of the shape and dtype of the real ones."""

    def __init__(self, real: nn.Module):
        super().__init__()
        self.real = [real]  # a list makes it no submodule, so that `.to()` on the shadow never touches shared buffers
        self._like: dict[str | None, tuple[Tensor, Tensor, int]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        if layer_type not in self._like:  # the real module runs once: it may wait for the device
            cos, _ = self.real[0](x, position_ids[:, :1], *([layer_type] if layer_type else []))
            self._like[layer_type] = cos.new_ones(()), cos.new_zeros(()), cos.shape[-1]
        one, zero, width = self._like[layer_type]
        shape = (x.shape[0], position_ids.shape[-1], width)
        return one.expand(shape), zero.expand(shape)


def _unturned(q: Tensor, k: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Takes the place of a model's `apply_rotary_pos_emb`."""
    return q, k


def _spare_rotation(module: nn.Module) -> None:
    """Make this one module's forward skip the rotation by identity embeddings, which changes nothing.

    Its code runs with globals of its own, in which the rotation is `_unturned`: that saves some ten small operations
    per layer and step. A forward that is wrapped, or rotates in another way, stays as it is.
    """
    forward = getattr(type(module), "forward", None)
    if ("forward" in vars(module) or not isinstance(forward, types.FunctionType)
            or "apply_rotary_pos_emb" not in forward.__code__.co_names):
        return
    unrotated = types.FunctionType(forward.__code__, {**forward.__globals__, "apply_rotary_pos_emb": _unturned},
                                   forward.__name__, forward.__defaults__, forward.__closure__)
    unrotated.__kwdefaults__ = forward.__kwdefaults__
    this = weakref.ref(module)  # a bound method would keep the module, and its weights, until a search for garbage
    module.forward = lambda *args, **kwargs: unrotated(this(), *args, **kwargs)
