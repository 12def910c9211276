"""Where in a causal LM its decoder is, and its layers in that. Knows modules of transformers; runs nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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


def probe_ids(model: PreTrainedModel) -> Tensor:
    """Three ids [1, 3] that a probe reads, on the device where ids go in: none that is padding, whose embedding is zero
    in many models, and would hide what becomes of it. The parameters of a quantised or offloaded model have other
    dtypes and devices, so they do not tell."""
    embeddings: Any = model.get_input_embeddings()
    padding = getattr(embeddings, "padding_idx", None)
    device = next((tensor.device for tensor in embeddings.parameters() if not tensor.is_meta), torch.device("cpu"))
    return torch.tensor([[number for number in range(4) if number != padding][:3]], device=device)


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
