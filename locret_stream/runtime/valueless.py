"""Tensors on the meta device, which have a shape and no values, without torch's own arithmetic for them."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ARITHMETIC = {f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow")} | {
    "add", "sub", "mul", "div", "pow", "__rdiv__"}  # as they are written, and as torch calls them
DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64}
SMALL = 1 << 16  # elements: what is computed to learn a shape


def quick_arithmetic() -> contextlib.AbstractContextManager[object]:
    """A block in which a model may be made on the meta device, in this thread, without torch's compiler.

    torch's arithmetic for such tensors is written in Python, and imports the compiler, torch._dynamo, when it is first
    used: .8 s. transformers makes every model so before it reads the weights, and uses of it what computes the
    frequencies of a rotary embedding. Where the compiler has been imported anyhow, nothing is changed.
    """
    return contextlib.nullcontext() if "torch._dynamo" in sys.modules else _Quick()


class _Quick(TorchFunctionMode):
    """The same shapes and types by torch's operations on a CPU, for plain tensors; all else goes torch's way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.init.normal_ and kwargs["tensor"].is_meta:
            return kwargs["tensor"]  # no values to draw
        if (func is torch.arange and torch.device(kwargs.get("device") or "cpu").type == "meta"
                and not kwargs.get("requires_grad")):
            return func(*args, **kwargs | {"device": "cpu"}).to("meta")
        if func is torch.empty_like and len(args) == 1 and _plain(args[0]) and set(kwargs) <= {"device"}:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=kwargs.get("device") or "meta")
        if (getattr(func, "__name__", "") in ARITHMETIC and not kwargs and any(map(_plain, args))
                and all(type(value) in (int, float) or _plain(value) for value in args)):
            return func(*(torch.ones(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
                          for value in args)).to("meta")
        return func(*args, **kwargs)


def _plain(value: object) -> bool:
    """Whether it is a tensor without values that torch's operations on a CPU stand in for."""
    return (type(value) is torch.Tensor and value.is_meta and value.dtype in DTYPES and value.is_contiguous()
            and value.numel() <= SMALL and not value.requires_grad)
