"""Where in a causal LM its decoder is, the module that has the layers. Knows modules of transformers; runs nothing."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """The decoder of a causal LM, or of a multimodal model around one. Some classes (Llama 4, Mllama) name themselves
    in its place: there it is the one part of them that has layers."""
    decoder: Any = model.get_decoder()
    if hasattr(decoder, "layers"):
        return decoder
    return next((child for child in decoder.children() if hasattr(child, "layers")), decoder)


def path_to_replace(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """The name, in a model, of what stands for all that comes before its head: its base model, where the decoder is in
    that, and the head is not; else the decoder itself. None where there is no decoder."""
    head, prefix = model.get_output_embeddings(), model.base_model_prefix
    base = getattr(model, prefix, None)
    inside = list(base.modules()) if isinstance(base, nn.Module) else []
    if any(module is decoder for module in inside) and not any(module is head for module in inside):
        return prefix
    return next((name for name, module in model.named_modules() if module is decoder and name), None)
