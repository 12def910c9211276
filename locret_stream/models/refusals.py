"""Why a model is not served, in the words of who runs it. Knows configs and names of modules; runs nothing."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

BLOCKS = "chunked_attention"
ATTENDING = ("full_attention", "sliding_attention", BLOCKS, "hybrid", "hybrid_sliding")
"""Kinds of layers with attention, in configs, that are served; `hybrid` has a recurrent state beside it, and `BLOCKS`
sees the tokens of its own block alone."""
_POSITIONS = ("wpe", "wpe_embed", "embed_positions", "position_embeddings", "positions_embed", "position_embedding")
_CHOOSING = ("indexed_attention", "minimax_m3_sparse")  # kinds of layers whose index is found in their modules
_OTHERS = ("expected a decoder with rotary embeddings, such as Llama, Qwen, Mistral, Gemma and DeepSeek-V3, or a "
           "hybrid of attention and recurrent layers")


def why_not(model: nn.Module) -> str:
    """What about the model is not served: a sentence for the user, without its class."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return f"{_reason(model, text)}; {_OTHERS}"


def learned_positions(decoder: nn.Module) -> bool:
    """Whether a decoder adds learned embeddings of positions to its tokens; towers in it that read images may."""
    return any(name in _POSITIONS and isinstance(module, nn.Embedding) for name, module in decoder.named_children())


def _reason(model: nn.Module, config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder, and its encoder reads a text as a whole"
    if any(learned_positions(module) for module in model.modules()):
        return ("its positions are learned embeddings, which are added to tokens before the first layer: a unit that "
                "moves to another rank would keep the position that it had")
    kinds = _kinds(config)
    if _recurrent(config) or (getattr(model, "_is_stateful", False) and not hasattr(config, "num_attention_heads")):
        return ("it is recurrent, without attention: its state is of a fixed size already, so that there is nothing to "
                "evict and this library has nothing to add")
    unknown = sorted({*kinds} - {*ATTENDING, *_CHOOSING, "linear_attention", "conv", "dummy"})
    if unknown:
        return f"it has layers of kind {', '.join(unknown)}, which are not served yet"
    if any(kind in _CHOOSING for kind in kinds):
        return "its layers choose what they attend to (sparse attention) by an index of a form that is not served yet"
    if getattr(config, "cross_attention_layers", None):
        return "it has layers that attend to images (cross attention), which are not served"
    return "its attention is not of a form that is served"


def _kinds(config: Any) -> list[str]:
    try:
        return list(get_layer_types_and_kwargs(config)[0])
    except Exception:  # configs of old models lack what it reads
        return []


def _recurrent(config: Any) -> bool:
    """Whether every layer of a transformers cache for it has a recurrent state alone."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # as above
        return False
    return bool(layers) and all(type(layer).__name__ == "LinearAttentionLayer" and isinstance(
        layer, LinearAttentionCacheLayerMixin) for layer in layers)
