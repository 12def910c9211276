"""What a model's layers keep, as forwards of three tokens show it: which modules attend, what they give to attention,
which of them have RoPE and from where, and the recurrent state. Nothing of it is read from names of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

from locret_stream.cache import StateTensor
from locret_stream.config import ModelShape, UnitShape
from locret_stream.errors import UnsupportedModel
from locret_stream.models.alibi import MOST, Ranks, is_ranked
from locret_stream.models.asked import join_pairs
from locret_stream.models.calls import LayerCall
from locret_stream.models.decoders import layers_of, probe_ids
from locret_stream.models.latent import latent_of
from locret_stream.models.mixers import forgetful, mixing
from locret_stream.models.recurrent import Carried
from locret_stream.models.refusals import ATTENDING, BLOCKS, why_not
from locret_stream.models.rotary import Rotary, Source

Ask = Callable[..., tuple[Tensor, list[tuple[Any, LayerCall]]]]
"""Runs ids [1, T] in a forward in which attention gives zeros, from a recurrent state and at a `start` that it may be
given; returns hidden states, and who asked it for what."""
RANKED = Source(Ranks(), ())
_POSITIONS = ("max_position_embeddings", "max_seq_len", "seq_length")  # names in configs for how many there are
LATER = 3  # another position of a probe's first id, by which keys before RoPE must not differ


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """A layer that attends: its number in the decoder, its module, which may be that of others, too (HRM), what it gave
    to attention before RoPE, where its embeddings come from, if it has RoPE, whether something normalises keys behind
    that, which layer before, among those that attend, it reads the units of, if it keeps none, and whether RoPE turns
    its keys, and not only its index keys."""

    number: int
    module: Any
    call: LayerCall
    source: Source | None
    normed: bool
    reads: int | None = None
    turns: bool = True

    @property
    def lead(self) -> int:
        """How many numbers of a key stand before those that RoPE turns."""
        if not self.turns:
            return self.call.k.shape[-1]
        latent = latent_of(self.module)
        return 0 if latent is None else latent.width


@torch.no_grad()
def probe(model: PreTrainedModel, decoder: Any, config: Any, rotary: Rotary, ask: Ask
          ) -> tuple[list[Probed], tuple[StateTensor, ...], list[nn.Module], torch.device]:
    """Which modules of the decoder attend, in order, and what each gives to attention; the forms of the recurrent
    state, and the modules that go on from it for one token only (`mixers`); and the device where hidden states come
    out. The parameters of a quantised or offloaded model have other dtypes and devices, so they do not tell. As
    attention gives zeros, layers behind it get the same with and without RoPE: a layer whose keys are the same has
    none, if they are the same at other positions, too.

    Raises:
        UnsupportedModel: nothing attends, or the layers differ in dtype.
    """
    ids = probe_ids(model)
    carried = Carried(config) if _has_states(config) else None
    with mixing(decoder) as mixers:
        out, plain = ask(ids, carried)
    if join_pairs(plain):
        out, plain = ask(ids, None)
    _expect_alike(model, {call.k.dtype for _, call in plain})
    sources: dict[int, Source | None] = {}
    with rotary.as_the_model_has_it() as source_of, ExitStack() as hooks:
        for module in {id(module): module for module, _ in plain}.values():
            hooks.enter_context(module.register_forward_hook(
                lambda module, args, kwargs, _: sources.__setitem__(
                    id(module), source_of(module, (args, kwargs)) or rotary.source_within(module)), with_kwargs=True))
        _, rotated = ask(ids)
    alike = [torch.equal(call.k, turned.k) for (_, call), (_, turned) in zip(plain, rotated, strict=True)]
    later = ask(ids, start=LATER)[1] if any(alike) else plain
    numbers = {id(module): number for number, layer in enumerate(layers_of(decoder)) for module in layer.modules()}
    layers: list[Probed] = []
    for (module, call), (_, turned), (_, moved), same in zip(plain, rotated, later, alike, strict=True):
        number, rotates = numbers[id(module)], not same
        reads = next((at for at, earlier in enumerate(layers) if call.k is earlier.call.k), None)
        if sources[id(module)] is None if rotates else not torch.equal(call.k, moved.k):
            raise UnsupportedModel(f"{type(model).__name__}: layer {number} turns its keys by position in a way of "
                                   f"its own; {why_not(model)}")
        if call.asked is not None and turned.asked is not None and not call.asked.index.see_turned(
                call.asked.keys, turned.asked.keys, rotary.embeddings(sources[id(module)], call.k)):
            raise UnsupportedModel(f"{type(model).__name__}: the index of layer {number} turns its keys by position in "
                                   f"a way of its own; {why_not(model)}")
        has = rotates or (call.asked is not None and call.asked.index.turned_at is not None)
        source = sources[id(module)] if has else RANKED if is_ranked(module) else None
        layers.append(Probed(number, module, call, source,
                             rotates and not _doubled(call.k[:, :, 0].float(), turned.k[:, :, 0].float()), reads,
                             rotates or source is RANKED))
    if carried is None:
        return layers, (), [], out.device
    attend = [module for module, _ in plain]
    stepwise = forgetful([mixed for mixed in mixers if mixed.module not in attend], config, carried)
    return layers, carried.found(), stepwise, out.device


def _doubled(first: Tensor, longer: Tensor) -> bool:
    """Whether any number of keys at position 0 doubled with the embeddings."""
    return bool((longer.abs() > 1.5 * first.abs()).any())


def shape_of(model: PreTrainedModel, config: Any, layers: list[Probed], most: int | None, state_bytes: int
             ) -> ModelShape:
    """The shape of the model, of what its layers gave to attention.

    Args:
        config: of the decoder. layers: those that keep units. most: units up to which these attend to all of them, if
            they choose among more.

    Raises:
        UnsupportedModel: a layer is of a kind that is not served.
    """
    kinds, _ = get_layer_types_and_kwargs(config)
    windows = windows_of(config, [layer.number for layer in layers])
    reaches = [reach for reach, _ in windows]
    ranked = any(layer.source is RANKED for layer in layers)
    # RecurrentGemma names no positions, as all its layers have windows: what they hide begins behind the longest.
    named = most_positions(config, 1 + max(reach or 0 for reach in reaches) if reaches and all(reaches) else MOST)
    window, units = min(named, most or named, MOST if ranked else named), []
    for layer, (reach, blocks) in zip(layers, windows, strict=True):
        number, call = layer.number, layer.call
        kind = kinds[number] if number < len(kinds) else "full_attention"
        if kind not in ATTENDING and call.asked is None:
            raise UnsupportedModel(f"{type(model).__name__}: {why_not(model)}")
        # Some checkpoints (Phi-3-mini-128k) have a sliding window at least as long as all positions: it hides
        # nothing.
        heads, _, key_dim = call.k.shape[1:]
        reach = None if not reach or reach >= window else reach
        units.append(UnitShape(kv_heads=heads, groups=call.q.shape[1] // heads, key_dim=key_dim,
                               value_dim=0 if call.v is call.k else call.v.shape[-1],
                               index_dim=0 if call.asked is None else call.asked.keys.shape[-1],
                               sliding=reach, blocks=blocks and reach is not None))
    return ModelShape(units=tuple(units), vocab=config.vocab_size, window=window,
                      item_bytes=layers[0].call.k.dtype.itemsize, hidden=config.hidden_size, state_bytes=state_bytes,
                      limited=most is not None, biased=any(layer.call.bias is not None for layer in layers),
                      ranked=ranked)


def windows_of(config: Any, numbers: Iterable[int]) -> list[tuple[int | None, bool]]:
    """Of the layers of a decoder with these numbers: how long a window each has, None without one, and whether it sees
    blocks of that length."""
    kinds, options = get_layer_types_and_kwargs(config)
    return [(options[number].get("sliding_window") or None, number < len(kinds) and kinds[number] == BLOCKS)
            for number in numbers]


def most_positions(config: Any, unnamed: int = MOST) -> int:
    """How many positions a decoder was made for; `unnamed`, where its config does not say."""
    return next((found for name in _POSITIONS if (found := getattr(config, name, None))), unnamed)


def _expect_alike(model: PreTrainedModel, dtypes: set[torch.dtype]) -> None:
    """Raises UnsupportedModel: no module attends, or the dtypes of their keys differ."""
    if not dtypes:
        raise UnsupportedModel(f"{type(model).__name__}: {why_not(model)}")
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise UnsupportedModel(f"{type(model).__name__}: its layers give keys of {sorted(map(str, dtypes))}; "
                               "expected one floating-point dtype: load it with dtype=... for all of them")


def _has_states(config: Any) -> bool:
    """Whether any layer of a decoder with that config has a recurrent state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


