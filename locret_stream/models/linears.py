"""Linear layers of few rows, as decoding has them: quicker products where MKL is slow. Knows no attention.

On AMD's processors MKL, by which torch multiplies fp32 matrices on CPUs, takes two to three times as long as the memory
needs where one of the two has few rows. Two other products of torch are nearer to it (docs/benchmarks.md has the
figures): the weights as four matrices of one batch, and oneDNN's. All are exact to rounding. Which one it is depends on
the processor, the layer's size and the number of rows alone, never on what a clock said, so that the same tokens give
the same bits.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = 4  # of the weights, in a batched product: what MKL does with one matrix of a batch is what is quick
SPLIT_ROWS, SPLIT_INPUTS, SPLIT_LEAST = 2, 4096, 1 << 16  # most rows and inputs, and fewest weights
ONEDNN_ROWS, ONEDNN_LEAST = 64, 1 << 17


def quicken(tree: nn.Module) -> int:
    """Give the fp32 linear layers of a module tree on CPUs the quicker products; returns how many have them.

    Layers of other types, such as those of quantisers and adapters, stay as they are, and so do those whose forward is
    wrapped, as that of offloaded ones is.
    """
    if not slow_blas():
        return 0
    layers = [module for module in tree.modules() if type(module) is nn.Linear and "forward" not in vars(module)
              and type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"
              and module.weight.dtype == torch.float32 and module.weight.numel() >= SPLIT_LEAST]
    for module in layers:
        module.forward = functools.partial(linear, module)  # type: ignore[method-assign]
    return len(layers)


@functools.cache
def slow_blas() -> bool:
    """Whether torch multiplies by MKL, and the processor is one of AMD."""
    if not torch.backends.mkl.is_available():
        return False
    found = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (found.read_text() if found.exists() else platform.processor())


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """x [..., inputs] -> [..., outputs], as the layer itself gives it, to rounding. With gradients, or of other dtypes,
    it is the layer's own product."""
    weight, bias = module.weight, module.bias
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    if not 0 < rows <= ONEDNN_ROWS or torch.is_grad_enabled() or not weight.dtype == x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if rows <= SPLIT_ROWS and inputs <= SPLIT_INPUTS and outputs % PARTS == 0:
        columns = x.reshape(1, rows, inputs).transpose(1, 2).expand(PARTS, inputs, rows)
        out = torch.bmm(weight.view(PARTS, -1, inputs), columns).view(outputs, rows).t().reshape(*x.shape[:-1], outputs)
        return out if bias is None else out + bias
    if weight.numel() >= ONEDNN_LEAST:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
