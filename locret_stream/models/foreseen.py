"""What a model's layers will keep, told without its weights: a twin of few layers is attached in its place.

The model is made of its config on the meta device, whole, where tensors have a shape and no values. Of its layers the
first ones stay that show every form of layer there is; these get random numbers, and are attached and tried as any
model is. So what is told, and the reason where a model is refused, are those of attaching itself; the layers behind are
of forms that were seen. Modules of one name and shape share their numbers, embeddings overlap, and of stacked experts
one is made, so that of a large model one layer's weights are filled, and not one byte of a checkpoint is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locret_stream.cache import StateTensor
from locret_stream.config import ModelShape
from locret_stream.models.attaching import attach, detach
from locret_stream.models.attachment import Attachment
from locret_stream.models.decoders import decoder_of, head_of, layers_of
from locret_stream.models.rotary import Place, RopeTables, Rotary

META = torch.device("meta")
ROWS = 512  # of the output embeddings of a twin: logits of so many tokens are compared
FILLED = 1_000_003  # numbers that are drawn; a prime, so that no two rows of a weight are alike
SEED = 7


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A model that was not loaded, as far as the layout of a memory needs it; its tensors are on the meta device.

    Attributes:
        shape, states, places, dtype, key_copies: as an `Attachment` has them.
        keeps: of every layer of the decoder, in words. wraps: whether it is a multimodal model around a decoder.
        device: where the model would run. weights: numbers of its parameters.
    """

    shape: ModelShape
    states: tuple[StateTensor, ...]
    places: tuple[Place, ...]
    dtype: torch.dtype
    key_copies: tuple[int, ...]
    keeps: tuple[str, ...]
    wraps: bool
    device: torch.device
    weights: int

    def rotates_on_load(self, layer: int) -> bool:
        """Nothing runs here."""
        return False

    def tables(self, capacity: int) -> RopeTables:
        """None for any layer."""
        rotary = Rotary(nn.Module())
        rotary.plain = [False] * self.shape.layers
        return RopeTables(rotary, capacity, [None] * self.shape.layers, {})


@torch.no_grad()
def foresee(make: Callable[[], PreTrainedModel], device: torch.device) -> Foreseen:
    """What attaching the model that `make` gives would find. It is tried in float32, so that rounding refuses none.

    Args:
        make: the model without weights, with tensors of the dtype that it would be loaded in; called on the meta
            device. device: where it would run.

    Raises:
        UnsupportedModel: it would be refused, in these words.
    """
    with META:
        model = make().eval()
    Attachment._check(model)
    decoder = decoder_of(model)
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers = layers_of(decoder)
    by_layer = [value for value in vars(decoder.config).values()
                if isinstance(value, (list, tuple)) and len(value) == len(layers)]
    forms = [(_form(layer, number), *(repr(value[number]) for value in by_layer))
             for number, layer in enumerate(layers)]
    seen = [forms.index(form) for form in forms]
    dtypes = _dtypes(model)
    with _cut(model, decoder, max(seen) + 1):
        _fill(model, device, {})
        spare = _sparable(model)
        attachment = attach(model)  # which tries it
        try:
            if any(dtype.is_floating_point and dtype != torch.float32 for dtype in dtypes.values()):
                _fill(model, device, dtypes)
                spare()
                attachment = Attachment(model, "auto")
            return _extended(attachment, seen, weights, device, wraps=model.config.get_text_config(decoder=True)
                             is not model.config)
        finally:
            detach(model)


def _extended(attachment: Attachment, seen: list[int], weights: int, device: torch.device, *, wraps: bool) -> Foreseen:
    """What the twin's layers keep, told of all layers: layer l is of the form of layer seen[l]."""
    kept: dict[int, list[int]] = {}
    numbers = {id(module): number for number, layer in enumerate(attachment.layers) for module in layer.modules()}
    for index, attention in enumerate(attachment._attentions):
        kept.setdefault(numbers[id(attention)], []).append(index)
    states = tuple(replace(form, layer=number, device=META) for number, twin in enumerate(seen)
                   for form in attachment.states if form.layer == twin)
    order, shape = [index for twin in seen for index in kept.get(twin, [])], attachment.shape
    return Foreseen(
        shape=msgspec.structs.replace(shape, units=tuple(shape.units[index] for index in order),
                                      state_bytes=sum(form.bytes for form in states)),
        states=states, places=tuple(Place(META, attachment.places[index].keys) for index in order),
        dtype=attachment.dtype, key_copies=tuple(attachment.key_copies[index] for index in order),
        keeps=tuple(_in_words(attachment, kept.get(twin, []), any(form.layer == twin for form in attachment.states))
                    for twin in seen), wraps=wraps, device=device, weights=weights)


def _in_words(attachment: Attachment, indices: list[int], has_state: bool) -> str:
    """What a layer keeps: units of these numbers, and a state."""
    words = []
    for index in indices:
        unit = attachment.shape.units[index]
        words.append(("units" if unit.value_dim else "latents") + (f" of the last {unit.sliding:,} tokens"
                                                                   if unit.sliding else ""))
    return " and ".join([*words, *(["a state"] if has_state else [])]) or "nothing"


def _form(layer: nn.Module, number: int) -> str:
    """What tells a layer from others: its modules, the shapes of its weights, and the settings that it was made with,
    but for its own number, and for factors, which change no shape."""
    told = []
    for path, module in layer.named_modules():
        settings = {name: value for name, value in vars(module).items()
                    if isinstance(value, (bool, int, str)) and not name.startswith("_")
                    and not (value == number and re.search("idx|index|layer", name))}
        told.append((path, type(module).__name__, sorted(settings.items()),
                     [(name, tuple(tensor.shape)) for name, tensor in (*module._parameters.items(),
                                                                       *module._buffers.items())
                      if tensor is not None]))
    return repr(told)


@contextmanager
def _cut(model: PreTrainedModel, decoder: Any, layers: int) -> Iterator[None]:
    """Leave the first layers of the decoder alone, and of the output embeddings the first rows. Inside of the block the
    config, which is the caller's, has as many. Decoders with layers of another name keep all: these are old, or run
    them in an order of their own (HRM)."""
    whole = len(layers_of(decoder))
    if isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        decoder.layers = decoder.layers[:layers]
    else:
        layers = decoder.config.num_hidden_layers
    head: Any = head_of(model)
    rows = min(ROWS, head.weight.shape[0])
    for name, parameter in list(head._parameters.items()):
        if parameter is not None:
            head._parameters[name] = nn.Parameter(parameter[:rows], requires_grad=False)
    head.out_features = rows
    configs: list[Any] = list({id(config): config for config in (
        decoder.config, model.config.get_text_config(decoder=True))}.values())
    before = [config.num_hidden_layers for config in configs]
    try:
        for config in configs:
            config.num_hidden_layers = config.num_hidden_layers * layers // whole  # several may be one module
        yield
    finally:
        for config, count in zip(configs, before, strict=True):
            config.num_hidden_layers = count


def _fill(model: PreTrainedModel, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give all tensors of a model numbers: matrices random ones as large as initialisation makes them, all others what
    their modules begin with and some noise, as a norm of ones alone would hide what it does.

    Args:
        dtypes: of parameters and buffers by name; others are of float32.
    """
    drawn = torch.randn(FILLED, generator=torch.Generator().manual_seed(SEED)).to(device)
    made: dict[object, nn.Parameter] = {}
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    for name, module, own, parameter in list(_parameters(model)):
        key = (re.sub(r"\d+", "#", name), tuple(parameter.shape))
        if key not in made:
            wanted = dtypes.get(name, torch.float32) if parameter.is_floating_point() else parameter.dtype
            made[key] = nn.Parameter(_numbers(module, parameter, drawn, len(made), wanted), requires_grad=False)
            made[key]._is_hf_initialized = parameter.dim() > 1  # type: ignore[attr-defined]
        module._parameters[own] = made[key]
    _choose_alike(model)
    for path, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None:
                wanted = dtypes.get(f"{path}.{own}", torch.float32) if buffer.is_floating_point() else buffer.dtype
                module._buffers[own] = (torch.zeros_like(buffer, device=device, dtype=wanted) if buffer.is_meta
                                        else buffer.to(wanted))
    model.initialize_weights()
    for at, parameter in enumerate(made.values()):
        if not parameter._is_hf_initialized and parameter.is_floating_point():  # type: ignore[attr-defined]
            parameter.add_(0.1 * _tiled(drawn, parameter.shape, at))


def _dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Of parameters and buffers by name, as `from_pretrained` loads them: some models keep a few in float32."""
    kept = model._get_dtype_plan(model.dtype)
    found = {name: next((dtype for part, dtype in kept.items() if part in name), parameter.dtype)
             for name, _, _, parameter in _parameters(model)}
    return found | {f"{path}.{own}": buffer.dtype for path, module in model.named_modules()
                    for own, buffer in module._buffers.items() if buffer is not None}


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules that hold a stack of experts, which is one many times, and how many."""
    for path, module in model.named_modules():
        counts = {parameter.shape[0] for parameter in module._parameters.values()
                  if parameter is not None and parameter.dim() == 3 and not parameter.stride(0)}
        if counts:
            yield path, module, counts.pop()


def _choose_alike(model: nn.Module) -> None:
    """Let all tokens choose the same experts, as those of a stack are alike and each that is chosen takes its time: of
    the module around a stack, the matrix that has a row for each expert is zero."""
    for path, _, count in list(_stacks(model)):
        for parameter in model.get_submodule(path.rpartition(".")[0]).parameters():
            if parameter.dim() == 2 and parameter.shape[0] == count:
                parameter.zero_()


def _sparable(model: nn.Module) -> Callable[[], None]:
    """Look, in forwards from now on, whether experts give what they take, in shape and dtype; what is returned then
    lets them give zeros. Half precision takes CPUs long, and the second pass is about dtypes alone."""
    stacks, alike = [module for _, module, _ in _stacks(model)], list[bool]()

    def look(_: nn.Module, given: tuple[Any, ...], out: object) -> None:
        alike.append(isinstance(out, Tensor) and bool(given) and out.shape == given[0].shape
                     and out.dtype == given[0].dtype)

    hooks = [module.register_forward_hook(look) for module in stacks]

    def spare() -> None:
        for hook in hooks:
            hook.remove()
        for module in stacks if alike and all(alike) else ():
            module.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)

    return spare


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{own}", module, own, parameter


def _numbers(module: nn.Module, parameter: Tensor, drawn: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """Numbers for a parameter; `at` makes those of several differ."""
    shape = parameter.shape
    if parameter.dim() < 2:
        return torch.zeros(shape, dtype=dtype, device=drawn.device)
    drawn = (drawn * shape[-1] ** -0.5).to(dtype)
    if shape.numel() <= len(drawn):
        return _tiled(drawn, shape, at)
    if isinstance(module, nn.Embedding):  # rows overlap: each is a number further on
        return drawn.repeat(-(-sum(shape) // len(drawn))).as_strided(shape, (1, 1))
    return _tiled(drawn, shape[-2:], at).expand(shape)  # experts of a stack are alike


def _tiled(drawn: Tensor, shape: torch.Size, at: int) -> Tensor:
    """The numbers that were drawn, over and over, from one on that `at` tells."""
    count, start = shape.numel(), at * 7919 % len(drawn)
    return drawn.repeat(-(-(count + start) // len(drawn)))[start:start + count].view(shape)
