"""A tiny random model of any class of transformers, made from its config class. Knows no model by its name."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from typing import Any

import torch
from model_lab import shapes
from model_lab.sizes import LAYERS, OF_OTHERS, OF_TEXT, sized
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_timm_available

_OF_TEXT = ("text_config", "llm_config", "language_config", "decoder", "decoder_config", "thinker_config")
"""Names of the config of a text model in that of a multimodal one."""


def build(model_type: str, kind: str = "causal", changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """A random model of that type in float32.

    Args:
        kind: "causal" or "multimodal", which class of transformers makes it. changes: fields of its config.
    """
    if not is_timm_available():
        _do_without_timm()
    around = {**shapes.AROUND.get(model_type, {}), **(changes or {})}
    config = tiny_config(CONFIG_MAPPING[model_type], OF_TEXT, around)
    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForImageTextToText
    torch.manual_seed(0)
    return noisy(auto.from_config(config, dtype=torch.float32))


def tiny_config(cls: Any, sizes: dict[str, Any], changes: dict[str, Any]) -> PreTrainedConfig:
    """A config of that class. A dict in `changes` under the name of a config within it changes that one, and None
    leaves it out."""
    fields, inner = _fields(cls), _inner(cls)
    given: dict[str, Any] = {}
    if not any(name in _OF_TEXT for name in inner):
        given = sized({name: default for name, default in fields.items() if name not in inner}, sizes)
        if sizes is OF_TEXT:
            given |= _pattern(cls, fields, given)
            changes = shapes.TEXT.get(cls.model_type, {}) | changes
    given |= {name: value for name, value in changes.items() if name not in inner}
    for name, (inner_class, kept) in inner.items():
        change = changes.get(name, {})
        if change is None:
            given[name] = None
            continue
        if "model_type" in change:
            inner_class, kept = CONFIG_MAPPING[change["model_type"]], {}
        given[name] = tiny_config(inner_class, OF_TEXT if name in _OF_TEXT else OF_OTHERS, kept | {
            field: value for field, value in change.items() if field != "model_type"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**given)


def noisy(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """With weights large enough that attention matters, drawn anew, and vectors near what they are: norms near 1, and
    decays of recurrent layers, which a class chooses itself."""
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=noise).to(weight.dtype)
            if weight.dim() <= 1 or "A_log" in name:
                weight += 0.1 * draw
            else:
                weight.copy_(draw * weight.shape[-1] ** -0.5)
    return model.eval()


class _Tower(PreTrainedModel):
    """Takes the place of a tower of timm, which text passes by."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.nothing = nn.Linear(1, 1)
        self.post_init()


def _do_without_timm() -> None:
    """Let transformers make models around timm's towers where timm is not installed, in this process."""
    for model_type in shapes.TOWERS_OF_TIMM:
        cls = CONFIG_MAPPING[model_type]
        AutoModel.register(cls, type("Tower", (_Tower,), {"config_class": cls}), exist_ok=True)


def _fields(cls: Any) -> dict[str, Any]:
    """Names of a config's fields with their defaults; None where there is none."""
    return {field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(cls)}


def _inner(cls: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """By name, the class of each config within a config, and the settings that the outer class chooses for it."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    declared = {**(getattr(cls, "sub_configs", None) or {}), **(getattr(cls, "sub_configs_defaults", None) or {})}
    for name, spec in declared.items():
        if isinstance(spec, type):
            found[name] = (spec, {})
        elif spec.config_class.__name__ != "AutoConfig" or spec.model_type is not None:
            inner = CONFIG_MAPPING[spec.model_type] if spec.config_class.__name__ == "AutoConfig" else spec.config_class
            found[name] = (inner, {key: value for key, value in spec.init_kwargs.items()
                                   if value is None or isinstance(value, (str, bool))})
    return found


def _pattern(cls: Any, fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Every kind of layer that the class has by default, in turn, full attention last; nothing for one kind alone."""
    if "layer_types" not in fields or len(kinds := _kinds(cls)) < 2:
        return {}
    count = shapes.TEXT.get(cls.model_type, {}).get("num_hidden_layers", given.get("num_hidden_layers", LAYERS))
    return {"layer_types": [*(kinds[at % len(kinds)] for at in range(count - 1)), kinds[-1]]}


@cache
def _kinds(cls: Any) -> tuple[str, ...]:
    """Kinds of layers in the class's default config, full attention last; none where it has no default config."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            types = list(dict.fromkeys(cls().layer_types or ()))
    except Exception:
        return ()
    return tuple(sorted(types, key=lambda kind: kind == shapes.FULL))
