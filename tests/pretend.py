"""Devices that are none: tensors that lie on the CPU and insist on one of several devices, as CUDA's do.

An operation on tensors of two of them fails; so does one that mixes one with a CPU tensor that has dimensions. Only
copying goes across: `.to`, `.cpu`, `copy_`, and assignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

ONE, TWO = torch.device("xpu", 0), torch.device("xpu", 1)
CPU = torch.device("cpu")
ACROSS = {Tensor.copy_, Tensor.__setitem__, Tensor.to, Tensor.cpu, torch._has_compatible_shallow_copy_type}


class There(Tensor):
    """A tensor on a pretended device."""

    place: torch.device

    @property
    def device(self) -> torch.device:
        return self.place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> There:
        return memo.setdefault(id(self), put(self.as_subclass(Tensor).clone(), self.place))


def put(tensor: Tensor, place: torch.device) -> Tensor:
    """The same memory, as a tensor of that device."""
    if place == CPU:
        return tensor
    out = torch.Tensor._make_subclass(There, tensor, tensor.requires_grad)
    out.place = place
    return out


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run on the CPU what all given tensors are on one device for."""
    with torch._C.DisableTorchFunction():
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        places = [x.place for x in flat if isinstance(x, There)]
        asked = kwargs.get("device")
        if func in (Tensor.to, Tensor.cpu):
            words = [x for x in args[1:] if isinstance(x, (torch.device, str))]
            asked = CPU if func is Tensor.cpu else torch.device(asked or words[0]) if asked or words else None
            args = tuple(CPU if isinstance(x, (torch.device, str)) else x for x in args)
        elif func is Tensor.numpy:
            raise TypeError(f"found a tensor on {args[0].device}; expected one on the CPU")
        elif func not in ACROSS and (len(set(places)) > 1 or (places and any(
                x.dim() for x in flat if not isinstance(x, There)))):
            found = sorted({str(x.device) for x in flat})
            raise RuntimeError(f"{getattr(func, '__name__', func)} got tensors of {found}")
        where = torch.device(asked) if asked is not None else places[0] if places else CPU
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        plain = tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, There) else x, (args, kwargs))
        if func is Tensor.cpu:
            found = plain[0][0].clone()
        elif func is Tensor.to:
            found = plain[0][0].to(*plain[0][1:], **plain[1])
            found = found.clone() if found is plain[0][0] and where != (places or [CPU])[0] else found
            if found is plain[0][0]:
                return args[0]
        else:
            found = func(*plain[0], **plain[1])
        for theirs, own in zip(flat, tree_flatten(plain)[0], strict=False):
            if found is own and func is not Tensor.to:
                return theirs  # worked in place
        if type(found).__module__ == "torch.return_types":
            return type(found)(put(x, where) for x in found)
        return tree_map(lambda x: put(x, where) if type(x) is Tensor else x, found)


class Pretending(TorchFunctionMode):
    """Within it tensors can be made on pretended devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [kwargs.get("device"), *(args[1:] if func is Tensor.to else ())]
        if any(isinstance(each, torch.device) and each.type == "xpu" for each in named):
            return call(func, args, kwargs)
        return func(*args, **kwargs)


def _fetch(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """As accelerate's hooks do: what a layer is given comes to its device."""
    return tree_map(lambda x: x.to(module.works_on) if isinstance(x, Tensor) else x, (args, kwargs))


@contextmanager
def spread(model: PreTrainedModel, split: int) -> Iterator[PreTrainedModel]:
    """The model with its first `split` layers on one pretended device, and what comes behind on another."""
    decoder = model.get_decoder()
    for module, place in [(decoder.embed_tokens, ONE), (decoder.rotary_emb, ONE), (decoder.norm, TWO),
                          (model.lm_head, TWO),
                          *((layer, ONE if index < split else TWO) for index, layer in enumerate(decoder.layers))]:
        module.works_on = place
        module.register_forward_pre_hook(_fetch, with_kwargs=True)
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    own = put(parameter.detach().clone(), place)
                    each._parameters[name] = own
            for name, buffer in each._buffers.items():
                each._buffers[name] = put(buffer.clone(), place)
    replaced = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # so that `Module.to` takes what `Tensor.to` gives
    try:
        with Pretending():
            yield model
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(replaced)
