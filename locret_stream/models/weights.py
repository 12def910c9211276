"""A model's weights, however they are packed: shared with a second module tree, named one by one, and told in words.

Knows what quantisers, adapters and offloading keep in a module beside plain tensors; knows nothing of attention. None
of those libraries is imported here: what they have loaded is recognised.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locret_stream.errors import UnsupportedModel

_PLAIN = (Tensor, nn.Parameter)
_QUANTISERS = ("bitsandbytes.", "hqq.", "gptqmodel.", "auto_gptq.", "awq.", "optimum.quanto.", "auto_round.")
SKETCH_BITS = 128
WAIT_MS = 2000


# -- a second tree over the same tensors ------------------------------------------------------------------------


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same weight tensors, in eval mode, with a config of its own."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for tensor in _beside(module):  # such as scales, or weights that wait on the CPU
            shared[id(tensor)] = tensor
        if _of_bitsandbytes(module):
            for parameter in module._parameters.values():
                if parameter is not None:
                    shared[id(parameter)] = twin = _alias(parameter)
                    shared[id(getattr(parameter, "quant_state", None))] = getattr(twin, "quant_state", None)
    return copy.deepcopy(model, shared).eval()


def _beside(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module holds otherwise than as parameters and buffers."""
    # By `list`, which no other thread can come between: the model may be in use.
    waiting: list[Any] = [value for name, value in list(vars(module).items())
                          if name not in ("_parameters", "_buffers", "_modules")]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting += list(value.values()) if type(value) is dict else list(vars(value).values())
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif hasattr(value, "__dict__") and not callable(value):
            waiting += list(vars(value).values())


def _of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter over the same memory. bitsandbytes' forwards move what a parameter holds to the module and
    repack its data, once: in a tree of their own that leaves the first tree's parameters alone.

    Raises:
        UnsupportedModel: the model is in use, and a forward that repacks it does not come to an end.
    """
    for _ in range(WAIT_MS):
        twin = _alias_now(parameter)
        state = getattr(twin, "quant_state", None)
        packed = bool(getattr(state, "packing_format_for_cpu", False))
        # Another thread's forward changes these one after another.
        if state is None or packed == (state.absmax.dim() == 2) == (twin.shape[-1] != 1):
            return twin
        time.sleep(1e-3)
    raise UnsupportedModel("a 4-bit weight of this model and its scales are not of one layout; expected a model that "
                           "no other thread runs for the first time meanwhile; and loaded anew, where it was saved or "
                           "its state_dict() taken after it ran on a CPU: bitsandbytes spoils its scales then")


def _alias_now(parameter: nn.Parameter) -> nn.Parameter:
    twin: Any = torch.Tensor._make_subclass(type(parameter), parameter.data, parameter.requires_grad)
    twin.__dict__.update(dict(vars(parameter)))
    if hasattr(parameter, "module"):
        twin.module = None  # it is of the first tree
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        twin.quant_state = copy.copy(state)
    return twin


# -- names and digests ------------------------------------------------------------------------------------------


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by which the model computes, by name, in plain tensors: of a plain model its state dict.

    A packed weight gives its parts, the same however they lie in memory. Of adapters those count that are active; a
    model without an active one has the names and tensors of its base.
    """
    left_out = _idle(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in left_out:
            continue
        prefix = f"{path}." if path else ""
        if _of_bitsandbytes(module):
            own = _of_quantised(module)
        elif _repacks(module):
            own = _repacked(module, model.dtype)
        elif type(module).state_dict is not nn.Module.state_dict and not module._modules:  # HQQ: scales are no buffers
            own = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
        else:
            own = {name: t for name, t in (*module._parameters.items(), *module._buffers.items())
                   if t is not None and name not in module._non_persistent_buffers_set and id(t) not in left_out}
        for name, tensor in own.items():
            yield from _parts(_name(prefix + name), _at_hand(module, name, tensor))
        yield from _scaling(_name(prefix), module)


def _name(name: str) -> str:
    """Without what adapters wrap around a module of the base."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _at_hand(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself where the module's weights wait elsewhere (accelerate's offloading)."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        if tensor.is_meta and getattr(each, "weights_map", None) is not None:
            return each.weights_map[name]
    return tensor


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor.detach()
        return
    inner, made_with = tensor.__tensor_flatten__()
    for part in inner:
        yield from _parts(f"{name}.{type(tensor).__name__}.{part}", getattr(tensor, part))
    told = "|".join([type(tensor).__name__, str(tensor.dtype), repr(made_with)])
    yield f"{name}.made_with", torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)


def _of_quantised(module: nn.Module) -> dict[str, Tensor]:
    """What a layer of bitsandbytes saves, as if its forward had never run: on some CPUs it repacks 4-bit weights, and
    rounds their scales."""
    twin = copy.copy(module)
    twin._parameters = {name: p if p is None else _alias(p) for name, p in module._parameters.items()}
    state = getattr(twin._parameters.get("weight"), "quant_state", None)
    if state is None:
        return twin.state_dict()
    scales = _scales(state)  # before it is unpacked, which is where precision would be lost
    out = twin.state_dict()
    kept = {name: t for name, t in out.items() if "absmax" not in name and "nested" not in name
            and "quant_state" not in name}
    told = f"{state.quant_type}|{state.blocksize}|{tuple(state.shape)}"
    return kept | {"weight.scales": scales, "weight.made_with": torch.frombuffer(
        bytearray(told.encode()), dtype=torch.uint8)}


def _repacks(module: nn.Module) -> bool:
    """Whether it is a layer of gptqmodel (GPTQ, AWQ) whose forward on a CPU repacks its weights, once."""
    return type(module).__module__.startswith("gptqmodel.") and hasattr(module, "_cpu_transformed") and not any(
        t.is_meta for t in module._buffers.values() if t is not None)


@torch.no_grad()
def _repacked(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What such a layer computes by in that dtype of activations, as if its forward had run; zero points in integers,
    as it was given them."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    if not twin._cpu_transformed:
        twin.linear_mode = None  # a first forward with gradients has it stay as it is
        twin(torch.zeros(1, twin.in_features, dtype=dtype, device=twin.scales.device))
    own = {name: t for name, t in (*twin._parameters.items(), *twin._buffers.items())
           if t is not None and name not in twin._non_persistent_buffers_set}
    zeros = own.get("qzeros")
    if zeros is not None and zeros.is_floating_point():  # (8 - zero) * scale
        own["qzeros"] = (8 - zeros.float() / own["scales"].float()).nan_to_num().round().to(torch.uint8)
    return own


def _scales(state: Any) -> Tensor:
    """Of a 4-bit weight's blocks, in order, [blocks] bf16: what its forward makes of them on CPUs, and all that is left
    of them there."""
    scales = state.absmax
    if getattr(state, "packing_format_for_cpu", False):
        scales = scales.T.reshape(-1)
    elif state.nested:
        dequantize = sys.modules["bitsandbytes.functional"].dequantize_blockwise
        scales = dequantize(scales, state.state2) + state.offset
    return scales.to(torch.bfloat16)


def base_of(model: Any) -> Any:
    """The transformers model in a PEFT one; anything else as it is.

    Raises:
        UnsupportedModel: its adapters work outside of the layers.
    """
    of_peft = isinstance(model, nn.Module) and hasattr(model, "get_base_model") and hasattr(model, "peft_config")
    if not of_peft:
        return model
    for name in model.active_adapters:
        config = model.peft_config[name]
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModel(f"adapter {name!r} is {getattr(config.peft_type, 'value', config.peft_type)}, which "
                                   "puts virtual tokens in front of every call; expected one that changes layers, such "
                                   "as LoRA")
    return model.get_base_model()


# -- adapters ---------------------------------------------------------------------------------------------------


def adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters (PEFT's) that take part in the model's forward.

    Raises:
        UnsupportedModel: a forward would change the weights.
    """
    active: dict[str, None] = {}
    for module in model.modules():
        if _is_tuner(module):
            if module.disable_adapters and getattr(module, "merged_adapters", ()):
                raise UnsupportedModel(f"the adapters {module.merged_adapters} are merged into the weights and "
                                       "disabled: the next forward would take them out of weights that are shared; "
                                       "expected unmerge_adapter() first")
            active |= dict.fromkeys(_active(module))
    return tuple(active)


def _is_tuner(module: nn.Module) -> TypeGuard[Any]:
    peft = sys.modules.get("peft.tuners.tuners_utils")
    other = sys.modules.get("peft.utils.other")
    kinds = [peft and peft.BaseTunerLayer, other and getattr(other, "AuxiliaryTrainingWrapper", None)]
    return isinstance(module, tuple(kind for kind in kinds if kind))


def _active(module: Any) -> list[str]:
    """Adapters that a layer adds to what its base gives; those merged into the base's weights are part of it."""
    if module.disable_adapters:
        return []
    return [name for name in module.active_adapters if name not in getattr(module, "merged_adapters", ())]


def _of_adapters(module: Any) -> Iterator[tuple[str, Any]]:
    """(adapter, what a layer holds of it: a module or tensor)."""
    for attribute in getattr(module, "adapter_layer_names", ()):
        held = getattr(module, attribute, {})
        if hasattr(held, "items"):
            yield from held.items()


def _idle(model: nn.Module) -> set[int]:
    """Ids of modules and tensors that belong to adapters which take no part."""
    idle: set[int] = set()
    for module in model.modules():
        if not _is_tuner(module):
            continue
        active = _active(module)
        for name, held in _of_adapters(module):
            if name not in active:
                idle |= {id(held)} if isinstance(held, Tensor) else {id(m) for m in held.modules()}
        if active and hasattr(module, "original_module"):  # its copy is used in its place
            idle |= {id(m) for m in module.original_module.modules()}
    return idle


def _scaling(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if _is_tuner(module):
        for name in _active(module):
            yield f"{prefix}scaling.{name}", torch.tensor(float(getattr(module, "scaling", {}).get(name, 1.0)))


def quantisation(model: PreTrainedModel) -> str:
    """What packs the model's weights, in words; "" where nothing does."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    kinds = {type(module).__name__ for module in model.modules() if type(module).__module__.startswith(_QUANTISERS)}
    kinds |= {type(p).__name__ for p in model.parameters() if hasattr(p, "__tensor_flatten__")}
    words = [str(getattr(method, "value", method))] if method else []
    return " ".join(words + ([f"({', '.join(sorted(kinds))})"] if kinds else []))


def form(model: PreTrainedModel) -> str:
    """How the model differs from a plain one, in words: its quantisation and active adapters; "" for a plain one."""
    return " ".join(word for word in (quantisation(model), *(f"adapter {name}" for name in adapters(model))) if word)


# -- fingerprints -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """blake2b over names, shapes and up to 65,536 evenly spaced values of every weight, as bf16.

    Rounding to bf16 makes it the same for every dtype a checkpoint is loaded in. It tells models and fine-tunes
    apart; it is not proof against a single changed weight. Of packed weights it sees the scales.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = model.config.get_text_config(decoder=True)
    digest.update(repr((config.model_type, getattr(config, "rope_parameters", None))).encode())
    for name, weight in sorted(named_weights(model), key=lambda pair: pair[0]):
        if not weight.is_floating_point() or weight.is_meta:
            continue
        flat = weight.reshape(-1)
        flat = flat[:: max(1, flat.numel() // 65_536)].to(torch.bfloat16).cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def sketch(model: PreTrainedModel) -> str:
    """The model up to quantisation: 128 bits, hexadecimal, that differ little where embeddings differ little.

    Signs of random projections (SimHash; Charikar, STOC 2002) of evenly spaced values of the embeddings of tokens,
    which their module gives: every packing of one base, and its fine-tunes, differ in a few bits (see `heads.kin`).
    """
    embed = model.get_input_embeddings()
    device = next((t.device for t in embed.parameters() if not t.is_meta), torch.device("cpu"))
    count = min(1024, model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.linspace(0, model.config.get_text_config(decoder=True).vocab_size - 1, count).long()
    rows = embed(ids.to(device)).float().cpu()
    rows = rows[:, :: max(1, rows.shape[1] // 64)]
    flat = (rows - rows.mean(0)).reshape(-1)
    noise = hashlib.shake_128(b"locret-stream sketch").digest(SKETCH_BITS * len(flat) // 8 + 1)
    bits = torch.frombuffer(bytearray(noise), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    signs = bits.reshape(-1)[:SKETCH_BITS * len(flat)].view(SKETCH_BITS, len(flat)).float() * 2 - 1
    found = "".join("1" if value > 0 else "0" for value in (signs @ flat).tolist())
    return f"{int(found, 2):0{SKETCH_BITS // 4}x}"
