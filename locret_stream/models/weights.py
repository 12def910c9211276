"""A model's weights in any packing: shared with a second module tree, named one by one, described in words.

Knows what quantisers, adapters and offloading keep in a module beside plain tensors; knows nothing of attention. It
imports none of those libraries, and recognises the objects of those that are loaded.
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
    """A second module tree over the same weight tensors, in eval mode, with a config of its own.

    Frequencies of rotary embeddings are its own, too: some kinds (longrope) write them anew at every call, and another
    thread may run the model.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *(
        buffer for name, buffer in model.named_buffers() if "inv_freq" not in name))}
    for module in model.modules():
        for tensor in _other_tensors(module):  # such as scales, or weights that were offloaded to the CPU
            shared[id(tensor)] = tensor
        if _of_bitsandbytes(module):
            for parameter in module._parameters.values():
                if parameter is not None:
                    shared[id(parameter)] = alias = _alias(parameter)
                    shared[id(getattr(parameter, "quant_state", None))] = getattr(alias, "quant_state", None)
    return copy.deepcopy(model, shared).eval()


def _other_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module has beside its parameters and buffers."""
    # `list` takes the items at once, as another thread may use the model.
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
    """Another parameter over the same memory. The first forward of bitsandbytes moves attributes of a parameter to the
    module and repacks its data; with parameters of its own a second tree leaves those of the first as they are.

    Raises:
        UnsupportedModel: another thread's forward repacks the parameter, and does not end.
    """
    for _ in range(WAIT_MS):
        alias = _alias_now(parameter)
        state = getattr(alias, "quant_state", None)
        packed = bool(getattr(state, "packing_format_for_cpu", False))
        # Another thread's forward changes these one after another, so that they may not agree yet.
        if state is None or packed == (state.absmax.dim() == 2) == (alias.shape[-1] != 1):
            return alias
        time.sleep(1e-3)
    raise UnsupportedModel("a 4-bit weight of this model and its scales are not of one layout; expected a model that "
                           "no other thread runs for the first time meanwhile; and loaded anew, where it was saved or "
                           "its state_dict() taken after it ran on a CPU: bitsandbytes spoils its scales then")


def _alias_now(parameter: nn.Parameter) -> nn.Parameter:
    alias: Any = torch.Tensor._make_subclass(type(parameter), parameter.data, parameter.requires_grad)
    alias.__dict__.update(dict(vars(parameter)))
    if hasattr(parameter, "module"):
        alias.module = None  # the attribute is a module of the first tree
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        alias.quant_state = copy.copy(state)
    return alias


# -- names and digests ------------------------------------------------------------------------------------------


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model computes with, by name, as plain tensors: for a plain model its state dict.

    A packed weight is given in its parts, the same for every layout in memory. Only active adapters count: a model
    without one has the names and tensors of its base.
    """
    inactive = _inactive(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in inactive:
            continue
        prefix = f"{path}." if path else ""
        if _of_bitsandbytes(module):
            tensors = _of_quantised(module)
        elif _repacks(module):
            tensors = _repacked(module, model.dtype)
        elif type(module).state_dict is not nn.Module.state_dict and not module._modules:  # HQQ: scales are no buffers
            tensors = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
        else:
            tensors = {name: t for name, t in _persistent(module).items() if id(t) not in inactive}
        for name, tensor in tensors.items():
            yield from _parts(_name(prefix + name), _onloaded(module, name, tensor))
        yield from _scaling(_name(prefix), module)


def _persistent(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this module alone."""
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None and name not in module._non_persistent_buffers_set}


def _name(name: str) -> str:
    """The name in the base, without the parts that adapters insert."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _onloaded(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor with its data, where accelerate has offloaded the module's weights."""
    offload = getattr(module, "_hf_hook", None)
    for hook in getattr(offload, "hooks", [offload]):
        if tensor.is_meta and getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name]
    return tensor


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor.detach()
        return
    inner, made_with = tensor.__tensor_flatten__()
    for part in inner:
        yield from _parts(f"{name}.{type(tensor).__name__}.{part}", getattr(tensor, part))
    yield f"{name}.made_with", _bytes("|".join([type(tensor).__name__, str(tensor.dtype), repr(made_with)]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _of_quantised(module: nn.Module) -> dict[str, Tensor]:
    """What a layer of bitsandbytes saves, as if its forward had never run: on some CPUs a forward repacks 4-bit weights
    and rounds their scales."""
    module = copy.copy(module)
    module._parameters = {name: p if p is None else _alias(p) for name, p in module._parameters.items()}
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    if state is None:
        return module.state_dict()
    scales = _scales(state)  # before `state_dict` unpacks them, which loses precision
    tensors = {name: t for name, t in module.state_dict().items()
               if not any(part in name for part in ("absmax", "nested", "quant_state"))}
    made_with = _bytes(f"{state.quant_type}|{state.blocksize}|{tuple(state.shape)}")
    return tensors | {"weight.scales": scales, "weight.made_with": made_with}


def _repacks(module: nn.Module) -> bool:
    """Whether a module is a layer of gptqmodel (GPTQ, AWQ), whose first forward on a CPU repacks its weights."""
    return type(module).__module__.startswith("gptqmodel.") and hasattr(module, "_cpu_transformed") and not any(
        t.is_meta for t in module._buffers.values() if t is not None)


@torch.no_grad()
def _repacked(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of such a layer for activations of that dtype, as if its forward had run; zero points in integers, as
    the checkpoint has them."""
    module = copy.copy(module)
    module._buffers = dict(module._buffers)
    if not module._cpu_transformed:
        module.linear_mode = None  # after a first forward with gradients it would stay as it is
        module(torch.zeros(1, module.in_features, dtype=dtype, device=module.scales.device))
    tensors = _persistent(module)
    zeros = tensors.get("qzeros")
    if zeros is not None and zeros.is_floating_point():  # (8 - zero) * scale
        tensors["qzeros"] = (8 - zeros.float() / tensors["scales"].float()).nan_to_num().round().to(torch.uint8)
    return tensors


def _scales(state: Any) -> Tensor:
    """Scales of a 4-bit weight's blocks, in order, [blocks] bf16: the precision that a forward on a CPU leaves them."""
    scales = state.absmax
    if getattr(state, "packing_format_for_cpu", False):
        scales = scales.T.reshape(-1)
    elif state.nested:
        dequantize = sys.modules["bitsandbytes.functional"].dequantize_blockwise
        scales = dequantize(scales, state.state2) + state.offset
    return scales.to(torch.bfloat16)


def base_of(model: Any) -> Any:
    """The transformers model in a PEFT model; anything else as it is.

    Raises:
        UnsupportedModel: an adapter works outside of the layers.
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
    """Names of the PEFT adapters that take part in the model's forward.

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
    """Adapters that a layer adds to the output of its base; merged ones are part of the base's weights."""
    if module.disable_adapters:
        return []
    return [name for name in module.active_adapters if name not in getattr(module, "merged_adapters", ())]


def _of_adapters(module: Any) -> Iterator[tuple[str, Any]]:
    """(adapter, module or tensor) of all that a layer has of adapters."""
    for attribute in getattr(module, "adapter_layer_names", ()):
        by_adapter = getattr(module, attribute, {})
        if hasattr(by_adapter, "items"):
            yield from by_adapter.items()


def _inactive(model: nn.Module) -> set[int]:
    """Ids of modules and tensors of adapters that take no part in the forward."""
    ids: set[int] = set()
    for module in model.modules():
        if not _is_tuner(module):
            continue
        active = _active(module)
        for name, part in _of_adapters(module):
            if name not in active:
                ids |= {id(part)} if isinstance(part, Tensor) else {id(m) for m in part.modules()}
        if active and hasattr(module, "original_module"):  # the adapter's copy takes its place
            ids |= {id(m) for m in module.original_module.modules()}
    return ids


def _scaling(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if _is_tuner(module):
        for name in _active(module):
            yield f"{prefix}scaling.{name}", torch.tensor(float(
                getattr(module, "scaling", {}).get(name, 1.0)), dtype=torch.float32)


def quantisation(model: PreTrainedModel) -> str:
    """The quantisation of the model's weights in words; "" for none."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    kinds = {type(module).__name__ for module in model.modules() if type(module).__module__.startswith(_QUANTISERS)}
    kinds |= {type(p).__name__ for p in model.parameters() if hasattr(p, "__tensor_flatten__")}
    words = [str(getattr(method, "value", method))] if method else []
    return " ".join(words + ([f"({', '.join(sorted(kinds))})"] if kinds else []))


def form(model: PreTrainedModel) -> str:
    """The model's quantisation and active adapters in words; "" for a plain model."""
    return " ".join(word for word in (quantisation(model), *(f"adapter {name}" for name in adapters(model))) if word)


# -- fingerprints -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """blake2b over names, shapes and up to 65,536 evenly spaced values of every weight, as bf16.

    Rounding to bf16 makes it the same for every dtype that a checkpoint is loaded in, but for float16, which rounds the
    smallest weights of one in bfloat16. Models and fine-tunes have different fingerprints; a single changed weight may
    go unnoticed. Of packed weights the scales count.
    """
    samples = []  # and no tensor stays, as those of packed weights are made for this
    for name, weight in named_weights(model):
        if not weight.is_floating_point() or weight.is_meta:
            continue
        every = max(1, weight.numel() // 65_536)
        if weight.is_contiguous():
            flat = weight.reshape(-1)[::every]
        else:  # a view such as one of few rows that stand for many is not to be written out
            flat = weight[torch.unravel_index(torch.arange(0, weight.numel(), every, device=weight.device),
                                              weight.shape)]
        flat = flat.to(torch.bfloat16).cpu()
        samples.append((name, tuple(weight.shape), flat.view(torch.int16).numpy().tobytes()))
    digest = hashlib.blake2b(digest_size=16)
    config = model.config.get_text_config(decoder=True)
    digest.update(repr((config.model_type, getattr(config, "rope_parameters", None))).encode())
    for name, shape, sample in sorted(samples, key=lambda row: row[0]):
        digest.update(f"{name}{shape}".encode())
        digest.update(sample)
    return digest.hexdigest()


@torch.no_grad()
def sketch(model: PreTrainedModel) -> str:
    """128 bits, hexadecimal, of which few differ between the packings and fine-tunes of one base (see `heads.kin`).

    They are the signs of random projections (SimHash; Charikar, STOC 2002) of evenly spaced values of the token
    embeddings, as their module returns them.
    """
    embed = model.get_input_embeddings()
    device = next((t.device for t in embed.parameters() if not t.is_meta), torch.device("cpu"))
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.linspace(0, vocab - 1, min(1024, vocab), dtype=torch.float32).long()
    rows = embed(ids.to(device)).float().cpu()
    rows = rows[:, :: max(1, rows.shape[1] // 64)]
    flat = (rows - rows.mean(0)).reshape(-1)
    noise = hashlib.shake_128(b"locret-stream sketch").digest(SKETCH_BITS * len(flat) // 8 + 1)
    bits = torch.frombuffer(bytearray(noise), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    signs = bits.reshape(-1)[:SKETCH_BITS * len(flat)].view(SKETCH_BITS, len(flat)).float() * 2 - 1
    sketched = "".join("1" if value > 0 else "0" for value in (signs @ flat).tolist())
    return f"{int(sketched, 2):0{SKETCH_BITS // 4}x}"
