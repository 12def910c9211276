"""RMS norms of a shadow on CUDA by torch's own kernel, in place of several operations of transformers' modules. On
CPUs torch has no such kernel."""

from __future__ import annotations

import functools
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def fuse(tree: nn.Module) -> int:
    """Give the RMS norms of a module tree on CUDA that kernel; returns how many have it.

    A norm has it if the kernel gives what the module gives, to rounding. So those that multiply by 1 + weight, as
    Gemma's do, stay as they are, and so do those whose forward is wrapped, as that of offloaded ones is.
    """
    count = 0
    for module in tree.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = module._parameters.get("weight")
        if (not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module) or eps is None or weight is None
                or len(module._parameters) > 1 or not _has_kernel(weight) or not _agrees(module, weight, eps)):
            continue
        # A reference to the module itself would be a cycle, which keeps the weights until it is found.
        module.forward = functools.partial(_fused, weakref.ref(module), eps)
        count += 1
    return count


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda


def _agrees(module: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether the kernel gives what the module gives, but for two roundings: also where `eps` counts."""
    x = torch.linspace(-40, 40, 4 * weight.numel(), dtype=torch.float32, device=weight.device).sin_().view(4, -1)
    x[2:] *= eps**0.5
    x = x.to(weight.dtype)
    try:
        own, fused = module(x), F.rms_norm(x, weight.shape, weight, eps)
    except Exception:  # it needs more than x, or its weight is no plain tensor
        return False
    close = 2 * torch.finfo(weight.dtype).eps if weight.dtype.itemsize < 4 else 1e-5
    return own.dtype == fused.dtype and torch.allclose(own, fused, rtol=close, atol=1e-6)


def _fused(norm: weakref.ref[nn.Module], eps: float, x: Tensor) -> Tensor:
    """The norm of x; where a graph of gradients is built, or of another dtype, by the module's own operations."""
    module = norm()
    assert module is not None, "it is running"
    weight = module._parameters["weight"]
    assert weight is not None, "`fuse` has seen it"
    if torch.is_grad_enabled() or x.dtype != weight.dtype:
        own: Tensor = type(module).forward(module, x)
        return own
    return F.rms_norm(x, weight.shape, weight, eps)
