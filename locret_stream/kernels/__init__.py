"""Dispatch: the only place that decides which implementation of an operation runs.

Every operation has one name and one signature; `kernels.reference` is its numeric specification. Tensors on CUDA go to
`kernels.triton`, all others to `kernels.torch_ops`; `LOCRET_KERNELS=torch` or `=triton` forces one of them.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locret_stream.errors import ConfigError
from locret_stream.kernels import reference, torch_ops
from locret_stream.kernels.reference import order_keys, quantise_units, select_by_threshold, slot_units

__all__ = ["compact_units", "decode_attention", "dequantise_units", "order_keys", "prefill_attention",
           "quantise_units", "reduced_attention", "rotate_halves", "score_units", "select_by_threshold",
           "select_units", "slot_units", "uses_triton", "write_units"]
WIDEST = 576  # numbers of a key or a value that Triton's attention has room for: the latents of DeepSeek-V3


def uses_triton(x: Tensor) -> bool:
    """Whether operations on this tensor run in Triton.

    Raises:
        ConfigError: LOCRET_KERNELS has no such value, or forces Triton where it cannot run.
    """
    forced = os.environ.get("LOCRET_KERNELS", "")
    if forced not in ("", "torch", "triton"):
        raise ConfigError(f"LOCRET_KERNELS is {forced!r}; expected 'torch', 'triton', or nothing: Triton on CUDA, "
                          "torch elsewhere")
    if forced == "triton" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"LOCRET_KERNELS is 'triton' and the tensors are on {x.device}; expected CUDA, or "
                          "TRITON_INTERPRET=1 for Triton's interpreter (slow, for tests)")
    return forced == "triton" or (forced == "" and x.is_cuda)


@functools.cache
def _triton(name: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module(f"locret_stream.kernels.triton.{name}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError("the kernels for CUDA need triton, which is not installed; expected `pip install triton`, "
                          "or LOCRET_KERNELS=torch for the slower ones in torch") from error


def _dispatched(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which runs in torch or, where `uses_triton` says so of its first tensor, in Triton."""
    name = operation.__name__

    @functools.wraps(operation)
    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0]
        if not uses_triton(tensor):
            return operation(first, *args, **kwargs)
        with torch.cuda.device_of(tensor):  # Triton launches on the current device
            return _triton(name)(first, *args, **kwargs)

    return run


compact_units = _dispatched(torch_ops.compact_units)
_decode_attention = _dispatched(torch_ops.decode_attention)
dequantise_units = _dispatched(torch_ops.dequantise_units)
_prefill_attention = _dispatched(torch_ops.prefill_attention)
_reduced_attention = _dispatched(reference.reduced_attention)
score_units = _dispatched(torch_ops.score_units)
select_units = _dispatched(torch_ops.select_units)
write_units = _dispatched(reference.write_units)
_rotate_halves = _dispatched(reference.rotate_halves)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`reference.prefill_attention`, which runs itself where Triton meets units wider than `WIDEST`, and torch K and V
    of different widths."""
    return (_prefill_attention if _has_kernel(k, v) else reference.prefill_attention)(q, k, v, scale, **options)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float,
                     **options: Any) -> Tensor:
    """`reference.decode_attention`, with the same exceptions."""
    return (_decode_attention if _has_kernel(keys, values) else reference.decode_attention)(
        q, keys, values, slots, lengths, scale, **options)


def reduced_attention(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Tensor:
    """`reference.reduced_attention`: as that has it where logits have a bias."""
    return (reference.reduced_attention if "bias" in options else _reduced_attention)(q, k, *args, **options)


def _has_kernel(keys: Tensor, values: Tensor) -> bool:
    width, other = keys.shape[-1], values.shape[-1]
    if width == other <= WIDEST:
        return True
    return max(width, other) <= WIDEST if uses_triton(keys) else width == other


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """`reference.rotate_halves`: in torch where x needs a gradient, as Triton's kernel has none."""
    return (reference.rotate_halves if x.requires_grad else _rotate_halves)(x, cos, sin, out)
