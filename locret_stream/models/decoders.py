"""Where in a causal LM its decoder is, and its layers in that. Knows modules of transformers; runs nothing."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: Any) -> Any:
    """The decoder of a causal LM, or of a multimodal model around one: what transformers takes for it; where that is
    itself a causal LM (Llama 4, Mllama), the part of it that has layers; where that has no layers, the base model. (Of
    a ModernBERT decoder transformers takes the output layer, which bears that name.) None: there is no such part."""
    found = model.get_decoder()
    if found is model or (isinstance(found, PreTrainedModel) and found.get_output_embeddings() is not None):
        parts = [child for child in found.children() if isinstance(getattr(child, "layers", None), nn.ModuleList)]
    else:
        parts = [found]
    parts += [] if model.base_model is model else [model.base_model]
    return next((part for part in parts if layers_of(part)), None)


def head_of(model: Any) -> nn.Module | None:
    """What makes logits of hidden states: the output embeddings of a model or, where it has none, those of the causal
    LM that it takes for its decoder (NemotronH Omni)."""
    found = model.get_decoder()
    own: nn.Module | None = model.get_output_embeddings()
    return own if own is not None or not isinstance(found, PreTrainedModel) else found.get_output_embeddings()


def layers_of(decoder: nn.Module | None) -> list[nn.Module]:
    """The layers of a decoder, in order: its `layers` or, where it has none of that name, the members of its outermost
    lists of modules: of one (GPT-J, DBRX), or of one in each of its stacks (HRM)."""
    if decoder is None:
        return []
    layers = getattr(decoder, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else _listed(decoder)


def path_to_replace(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """The name, in a model, of what stands for all that comes before its head: its base model, where the decoder is in
    that, and the head is not; else the decoder itself. None where there is no decoder."""
    head, prefix = head_of(model), model.base_model_prefix
    base = getattr(model, prefix, None)
    inside = list(base.modules()) if isinstance(base, nn.Module) else []
    if any(module is decoder for module in inside) and not any(module is head for module in inside):
        return prefix
    return next((name for name, module in model.named_modules() if module is decoder and name), None)


def _listed(module: nn.Module) -> list[nn.Module]:
    return [layer for child in module.children()
            for layer in (child if isinstance(child, nn.ModuleList) else _listed(child))]
