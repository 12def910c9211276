"""Recurrent layers that keep their state in attributes of their modules, and begin a convolution anew with every
forward of more than one token (RecurrentGemma): their state comes from `Carried`, and goes there, as that of others
does. Knows modules of transformers; knows no slots.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.models.decoders import layers_of


def carry_module_states(decoder: Any) -> None:
    """Make every block of a decoder whose modules hold its state take that from what a forward carries, and leave it
    there."""
    for number, layer in enumerate(layers_of(decoder)):
        for each in layer.modules():
            block: Any = each
            if hasattr(block, "conv1d_state") and hasattr(block, "conv_1d") and hasattr(block, "rg_lru"):
                before = _Before()
                block.forward = functools.partial(_carrying, weakref.ref(block), type(block).forward, number, before)
                block.conv_1d.forward = functools.partial(_going_on, weakref.ref(block.conv_1d), before)


class _Before:
    """The last inputs of one block's convolution, [B, width, kernel - 1], while its forward runs; else None."""

    inputs: Tensor | None = None


def _carrying(this: weakref.ref[nn.Module], forward: Any, number: int, before: _Before, *args: Any,
              past_key_values: Any = None, **kwargs: Any) -> Any:
    """The forward of a block; without what carries its state, that begins and is dropped."""
    block: Any = this()
    if past_key_values is None:
        return forward(block, *args, **kwargs)
    layer, x = past_key_values.layers[number], args[0]
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    if conv is None:
        conv = x.new_zeros(len(x), block.conv_1d.in_channels, block.conv1d_width - 1)
        recurrent = x.new_zeros(len(x), block.lru_width, dtype=torch.float32)
    before.inputs = block.conv1d_state = conv
    block.rg_lru.recurrent_states = recurrent
    try:
        out = forward(block, *args, **kwargs | {"use_cache": True})
        # With one token the convolution is no call of its module, and the block moves its inputs on itself.
        layer.conv_states[0] = block.conv1d_state if before.inputs is conv else before.inputs
        layer.recurrent_states[0] = block.rg_lru.recurrent_states
    finally:
        before.inputs = block.conv1d_state = block.rg_lru.recurrent_states = None
    return out


def _going_on(this: weakref.ref[nn.Module], before: _Before, x: Tensor) -> Tensor:
    """A causal convolution of x [B, width, T] that goes on behind the inputs before, in place of zeros."""
    conv: Any = this()
    if before.inputs is None:
        out: Tensor = type(conv).forward(conv, x)
        return out
    count = before.inputs.shape[-1]
    together = torch.cat([before.inputs, x], dim=-1)
    before.inputs = together[..., together.shape[-1] - count:]
    out = type(conv).forward(conv, together)[..., count:]
    return out
