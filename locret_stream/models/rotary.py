"""A model's rotary embeddings (RoPE), applied outside of it: at any rank, by its own function. Knows no attention.

A unit's rank changes with every eviction, so keys are stored before RoPE, and rotated for their present rank. In the
decoder identity embeddings take the place of the real ones.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.kernels import reference, rotate_halves, uses_triton
from locret_stream.models.alibi import Ranks, shear
from locret_stream.models.functions import calls, globals_of, with_globals
from locret_stream.models.indexed import Index, turn
from locret_stream.models.position_tables import take_tables
from locret_stream.models.queries import QueryFactors


@dataclass(slots=True, frozen=True)
class Place:
    """Where a layer works: its device, and the dtype of its keys."""

    device: torch.device
    keys: torch.dtype


@dataclass(slots=True, frozen=True)
class Source:
    """Where a layer's embeddings come from: a rotary module, and the kind of layer that it is asked for, if it has
    several; or ranks, where it has ALiBi. in_pairs: whether they are complex numbers, which turn pairs of neighbours
    (DeepSeek-V2, Llama 4)."""

    module: Any
    kind: tuple[str, ...]
    in_pairs: bool = False


class Rotary:
    """The rotary embeddings of a decoder, in which identity ones take their place; of one that has none, nothing.

    Attributes:
        uses: by layer, whether it has RoPE. plain: by layer, whether that is the usual rotation of halves.
        factors: by layer, what its queries are multiplied by behind RoPE; empty for most models.
    """

    def __init__(self, decoder: Any):
        self._identities: list[_Identity] = []
        for parent in list(decoder.modules()):
            for name, module in list(parent.named_children()):
                if "RotaryEmbedding" in type(module).__name__:
                    self._identities.append(_Identity(module))
                    parent._modules[name] = self._identities[-1]
        self._tables = take_tables(decoder)
        self._attentions: list[Any] = []
        self._sources: list[Source | None] = []
        self._sliced: list[bool] = []
        self._computing = threading.Lock()  # longrope writes its frequencies, then reads them: one call at a time
        self._places: list[Place] = []
        self.uses: list[bool] = []
        self.plain: list[bool] = []
        self.factors: dict[int, QueryFactors] = {}

    @contextmanager
    def as_the_model_has_it(self) -> Iterator[Callable[[Any, object], Source | None]]:
        """Inside, for probes, the decoder has its real embeddings, twice as long: a key at position 0 doubles, unless
        something behind the rotation normalises it. Gives a function that says where those of a module come from: from
        a table of its own, or those among its arguments."""
        given: list[tuple[Tensor, Source]] = []
        tables = {id(table.module): Source(table.real, (), in_pairs=True) for table in self._tables}
        for identity in self._identities:
            identity.given = given
        for table in self._tables:
            table.put(2 * table.real.tensor)
        try:
            yield lambda module, arguments: tables.get(id(module)) or next(
                (source for same in (_is, _equals) for tensor in _tensors(arguments) for cos, source in given
                 if same(tensor, cos)), None)
        finally:
            for identity in self._identities:
                identity.given = None
            for table in self._tables:
                table.put(table.identity)

    def source_within(self, module: nn.Module) -> Source | None:
        """Where the embeddings of a module come from that makes them itself, in a probe (RecurrentGemma)."""
        own = [each.real[0] for each in module.modules() if isinstance(each, _Identity)]
        given = self._identities[0].given if own else None
        return next((source for _, source in given or () if source.module in own), None)

    def set_layers(self, attentions: list[Any], sources: list[Source | None], places: list[Place],
                   dims: Sequence[int], leads: Sequence[int], indexes: Sequence[Index | None],
                   factors: dict[int, QueryFactors]) -> None:
        """Set, by layer, the attention module, and what probes have shown: where its embeddings come from (None: it has
        no RoPE), where it works, the numbers of its keys, how many of these stand before those that RoPE turns, and its
        index, if it has one; and `factors`."""
        self.factors = factors
        self._attentions, self._sources, self._places, self._leads = attentions, sources, places, leads
        self._dims, self._indexes = dims, indexes
        self.uses, self._sliced = [source is not None for source in sources], [False] * len(sources)
        self._sliced = [use and self._takes_a_part(layer, dims[layer]) for layer, use in enumerate(self.uses)]
        self.plain = [use and layer not in factors and indexes[layer] is None and self._is_plain(layer, dims[layer])
                      for layer, use in enumerate(self.uses)]
        for module, use in zip(attentions, self.uses, strict=True):
            if use:
                _spare_rotation(module)

    def cos_sin(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a layer with RoPE at positions [1, T]: [1, T, width] each; half as wide for pairs."""
        place, source = self._places[layer], self._sources[layer]
        assert source is not None, "the layer has RoPE"
        return self._made(source, positions, place)

    def _made(self, source: Source, positions: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        with self._computing:
            made = source.module(torch.empty(1, dtype=place.keys, device=place.device), positions, *source.kind)
        cos, sin = (made.real, made.imag) if source.in_pairs else made
        return cos.to(place.device), sin.to(place.device)  # the module is on one device, the layers may be on several

    def embeddings(self, source: Source | None, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the keys [1, H, T, D] of a stream's first tokens, twice as long, as `as_the_model_has_it`
        gives them to the decoder; None without a source."""
        if source is None:
            return None
        positions = torch.arange(keys.shape[2], device=keys.device)[None]
        cos, sin = self._made(source, positions, Place(keys.device, keys.dtype))
        return 2 * cos, 2 * sin

    @torch.no_grad()
    def tables(self, capacity: int, first: int = 0) -> RopeTables:
        """Tables for ranks first..capacity-1, whose rank 0 is `first`."""
        made: dict[tuple[Source | None, torch.device], tuple[Tensor, Tensor]] = {}
        layers: list[tuple[Tensor, Tensor] | None] = []
        for layer, (source, place) in enumerate(zip(self._sources, self._places, strict=True)):
            key = source, place.device
            if source is not None and key not in made:
                made[key] = self.cos_sin(layer, torch.arange(first, capacity, device=place.device)[None])
            layers.append(None if source is None else made[key])
        return RopeTables(self, capacity - first, layers,
                          {layer: each.of_ranks(capacity)[first:].to(self._places[layer].device)
                           for layer, each in self.factors.items()})

    def apply(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, heads, T, D] -> rotated by the model's own function, in halves, in pairs, or in part; and where index
        keys lie behind keys, these as the index turns them."""
        source, index, dim = self._sources[layer], self._indexes[layer], self._dims[layer]
        assert source is not None, "the layer has RoPE"
        if index is not None and x.shape[-1] > dim:
            of_index = x[..., dim:] if index.turned_at is None else turn(index.turned_at, x[..., dim:], cos, sin)
            return torch.cat([self.apply(layer, x[..., :dim], cos, sin), of_index], dim=-1)
        if isinstance(source.module, Ranks):
            return shear(x, cos[:, None], sin[:, None])
        if (lead := self._leads[layer]) == dim:
            return x
        if lead or source.in_pairs:
            rotate = _rotate_pairs if source.in_pairs else reference.rotate_halves
            stop = lead + cos.shape[-1] * (2 if source.in_pairs else 1)
            turned = rotate(x[..., lead:stop], cos[:, None], sin[:, None])
            whole = turned.shape[-1] == x.shape[-1]
            return turned if whole else torch.cat([x[..., :lead], turned, x[..., stop:]], dim=-1)
        if not self._sliced[layer]:
            return self._turn(layer, x, cos, sin)
        width = cos.shape[-1]
        return torch.cat([self._turn(layer, x[..., :width], cos, sin), x[..., width:]], dim=-1)

    def _turn(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """By the model's own function, of q and k or of one of them (Gemma 4)."""
        rotate = sys.modules[type(self._attentions[layer]).__module__].apply_rotary_pos_emb
        return rotate(x, cos, sin) if _of_one(rotate) else rotate(x, x[:, :0], cos, sin)[0]

    def _is_ours(self, layer: int) -> bool:
        """Whether a layer is turned by a function of this library, and not by the model's own."""
        source = self._sources[layer]
        return bool(self._leads[layer] or (source and (source.in_pairs or isinstance(source.module, Ranks))))

    @torch.no_grad()
    def keeps_lengths(self, layer: int) -> bool:
        """Whether a layer's embeddings turn without making longer, as some that reach further do (yarn)."""
        place = self._places[layer]
        cos, sin = self.cos_sin(layer, torch.tensor([[0, 5]], device=place.device))
        return bool(((cos.float()**2 + sin.float()**2 - 1).abs() < (1e-4 if place.keys.itemsize >= 4 else 2e-2)).all())

    @torch.no_grad()
    def _takes_a_part(self, layer: int, head_dim: int) -> bool:
        """Whether the model divides x for a partial rotation outside of its function (StableLM)."""
        if self._is_ours(layer):
            return False
        place = self._places[layer]
        cos, sin = self.cos_sin(layer, torch.zeros(1, 1, dtype=torch.int64, device=place.device))
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
        if self._is_ours(layer):
            return False
        place = self._places[layer]
        x = torch.linspace(-1, 1, 2 * head_dim, dtype=place.keys, device=place.device).view(1, 1, 2, head_dim)
        cos, sin = self.cos_sin(layer, torch.tensor([[1, 5]], device=place.device))
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
        factors: by layer, what queries of each rank are multiplied by behind it, [capacity, D or 1] fp32.
    """

    def __init__(self, rotary: Rotary, capacity: int, layers: list[tuple[Tensor, Tensor] | None],
                 factors: dict[int, Tensor]):
        self.capacity, self.layers, self.factors = capacity, layers, factors
        self._rotary = rotary
        self._matrices = [pair if pair is None else (pair[0][0], pair[1][0]) for pair in layers]
        # Where a kernel rotates chunks it rotates single tokens, too: the same bits alone and among many.
        self._by_kernel = [pair is not None and plain and uses_triton(pair[0])
                           for pair, plain in zip(layers, rotary.plain, strict=True)]

    @property
    def bytes_resident(self) -> int:
        """Bytes of the tables, which layers of one kind share."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for pair in (*self.layers, tuple(self.factors.values())) if pair is not None for t in pair}
        return sum(storages.values())

    def rotate(self, layer: int, x: Tensor, start: int, out: Tensor | None = None) -> Tensor:
        """Keys x [B, heads, T, D] before RoPE -> rotated at ranks start .. start+T-1; x itself where there is no RoPE.

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

    def rotate_queries(self, layer: int, q: Tensor, start: int) -> Tensor:
        """Queries [B, heads, T, D] before RoPE -> rotated as keys are, and multiplied by their factors."""
        turned, factors = self.rotate(layer, q, start), self.factors.get(layer)
        return turned if factors is None else (turned * factors[start:start + q.shape[2]]).to(q.dtype)

    def turns(self, layer: int, ranks: Tensor) -> tuple[Tensor, ...] | None:
        """The argument of `rotate_each` that rotates one token at each of the ranks [B]; equal for layers that share a
        table and have no factors. None where nothing is done."""
        pair = self.layers[layer]
        if layer in self.factors:
            factors = self.factors[layer][ranks][:, None, None]
            return (factors,) if pair is None else (factors, pair[0][0, ranks, None], pair[1][0, ranks, None])
        if pair is None:
            return None
        cos, sin = pair[0][0, ranks, None], pair[1][0, ranks, None]
        if not self._rotary.plain[layer]:
            return cos, sin
        if self._by_kernel[layer]:
            return cos[:, None], sin[:, None]
        half = sin.shape[-1] // 2
        return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None]

    def rotate_each(self, layer: int, x: Tensor, turns: tuple[Tensor, ...] | None) -> Tensor:
        """x [B, heads, 1, D] before RoPE, the heads of queries and then, if there are more, those of keys -> rotated by
        `turns`, each row of the batch at its own rank."""
        if turns is None:
            return x
        if self._by_kernel[layer]:
            return rotate_halves(x, *turns)
        if self._rotary.plain[layer]:  # (-x2, x1) * sin is (x2, x1) * (-sin1, sin2)
            return torch.addcmul(x * turns[0], x.roll(x.shape[-1] // 2, -1), turns[1])
        if layer not in self.factors:
            return self._rotary.apply(layer, x, *turns)
        factors, *pair = turns
        turned, heads = self._rotary.apply(layer, x, *pair) if pair else x, self._rotary.factors[layer].heads
        return torch.cat([(turned[:, :heads] * factors).to(x.dtype), turned[:, heads:]], dim=1)

    def rotate_at(self, layer: int, x: Tensor, ranks: Tensor) -> Tensor:
        """Keys x [B, heads, T, D] before RoPE -> rotated, every unit at its own rank: ranks [B, heads, T] int64."""
        return self.rotate_rows(layer, x.flatten(0, 2), ranks.flatten()).view(x.shape)

    def rotate_rows(self, layer: int, x: Tensor, ranks: Tensor) -> Tensor:
        """Keys x [N, D] before RoPE -> rotated, each at its own rank: ranks [N] int64."""
        pair = self._matrices[layer]
        if pair is None:
            return x
        cos, sin = (table.index_select(0, ranks) for table in pair)  # quicker than by an index of several dimensions
        if self._by_kernel[layer]:
            return rotate_halves(x[None, None], cos[None, None], sin[None, None])[0, 0]
        if self._rotary.plain[layer]:
            return rotate_halves(x, cos, sin)
        return self._rotary.apply(layer, x[None, None], cos[None], sin[None])[0, 0]


class _Identity(nn.Module):
    """Takes the place of a model's rotary module: cos = 1, sin = 0, of the dtype of the real ones; or 1 + 0i."""

    def __init__(self, real: nn.Module):
        super().__init__()
        self.real = [real]  # a list makes it no submodule, so that `.to()` on the shadow never touches shared buffers
        self.given: list[tuple[Tensor, Source]] | None = None  # where a probe runs: the real ones, and whose they are
        self._like: dict[tuple[str, ...], tuple[list[Tensor], int]] = {}

    def __getattr__(self, name: str) -> Any:
        """Decoders read more of their rotary module, as its kinds of layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"][0], name)

    def forward(self, x: Tensor, position_ids: Tensor, *kind: str, **named: str) -> Any:
        kind = (*kind, *named.values())
        if self.given is not None:
            real = self.real[0](x, position_ids, *kind)
            in_pairs = isinstance(real, Tensor)
            first, *others = (2 * each for each in ((real,) if in_pairs else real))
            self.given.append((first, Source(self.real[0], kind, in_pairs)))
            return (first, *others) if others else first
        if kind not in self._like:  # the real module runs once: it may wait for the device
            real = self.real[0](x, position_ids[..., :1], *kind)
            like = real if isinstance(real, Tensor) else real[0]
            ones = [like.new_ones(())] if real is like else [like.new_ones(()), like.new_zeros(())]
            self._like[kind] = ones, like.shape[-1]
        ones, width = self._like[kind]
        made = tuple(each.expand(*position_ids.shape[-2:], width) for each in ones)
        return made if len(made) > 1 else made[0]


def _is(tensor: Tensor, cos: Tensor) -> bool:
    return tensor is cos


def _equals(tensor: Tensor, cos: Tensor) -> bool:
    """Whether it is a copy, as on the device of another layer."""
    return tensor.shape == cos.shape and tensor.dtype == cos.dtype and torch.equal(tensor.to(cos.device), cos)


def _tensors(arguments: object) -> Iterator[Tensor]:
    """The tensors among arguments, at any depth of tuples, lists and dicts."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, dict | list | tuple):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _tensors(each)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of neighbours: x [..., D], cos and sin [..., D / 2] that broadcast to half of it."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


@functools.cache
def _of_one(rotate: Callable[..., Any]) -> bool:
    """Whether a model's `apply_rotary_pos_emb` takes one tensor, and not q and k."""
    return list(inspect.signature(rotate).parameters)[1:2] in (["cos"], ["sin"])


def _unturned(q: Tensor, k: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Takes the place of a model's `apply_rotary_pos_emb`."""
    return q, k


def _unturned_one(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Takes the place of one that takes one tensor."""
    return x


def _spare_rotation(module: nn.Module) -> None:
    """Make this one module's forward skip the rotation by identity embeddings, which changes nothing.

    In it the rotation is `_unturned`: that saves some ten small operations per layer and step. A forward that the
    module has of its own, or that rotates in another way, stays as it is.
    """
    forward = getattr(type(module), "forward", None)
    if "forward" in vars(module) or not calls(forward, "apply_rotary_pos_emb"):
        return
    spared = _unturned_one if _of_one(globals_of(forward)["apply_rotary_pos_emb"]) else _unturned
    unrotated = with_globals(forward, apply_rotary_pos_emb=spared)
    this = weakref.ref(module)  # a bound method would keep the module, and its weights, until a search for garbage
    module.forward = lambda *args, **kwargs: unrotated(this(), *args, **kwargs)
