"""Quicker products for the linear layers of a shadow on CPUs. Knows no attention.

In fp32, of few rows, as decoding has them. MKL, by which torch multiplies fp32 matrices on CPUs, takes two to three
times as long on AMD's processors as the memory needs, where one of the two matrices has few rows. Two other products of
torch are nearer to it: the weights as four matrices of one batch, and oneDNN's. All are exact to rounding. Which one it
is depends on the processor, the layer's size and the number of rows alone, never on what a clock said, so that the same
tokens give the same bits.

In bf16, of any rows. oneDNN, which multiplies these, puts the weights into an order of its own at every call; `pack`
does it once, and the results are the same bit for bit. The packed copy takes memory, and only it is read from then on:
where the weights are a file that is mapped into memory, the system takes back the pages of the file when it needs them.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

PARTS = 4  # of the weights, in a batched product: what MKL does with one matrix of a batch is what is quick
SPLIT_ROWS, SPLIT_INPUTS, SPLIT_LEAST = 2, 4096, 1 << 16  # most rows and inputs, and fewest weights
ONEDNN_ROWS, ONEDNN_LEAST = 64, 1 << 17
PACKED_SHARE = 0.25
_packed = WeakTensorKeyDictionary()


def quicken(tree: nn.Module) -> int:
    """Give the fp32 linear layers of a module tree on CPUs the quicker products; returns how many have them.

    Layers of other types, such as those of quantisers and adapters, stay as they are, and so do those whose forward is
    wrapped, as that of offloaded ones is. The same holds for `pack`.
    """
    layers = _plain_layers(tree, torch.float32) if slow_blas() else []
    for module in layers:
        module.forward = functools.partial(linear, module)  # type: ignore[method-assign]
    return len(layers)


def _plain_layers(tree: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    return [module for module in tree.modules() if type(module) is nn.Linear and "forward" not in vars(module)
            and type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"
            and module.weight.dtype == dtype and module.weight.numel() >= SPLIT_LEAST]


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


def pack(trees: Sequence[nn.Module]) -> int:
    """Pack the bf16 linear layers of module trees on CPUs, unless their weights are more than `PACKED_SHARE` of this
    machine's memory. Nothing may change the weights from then on. Returns the bytes that the packed copies take."""
    layers = [module for tree in trees for module in _plain_layers(tree, torch.bfloat16)]
    size = sum(2 * module.weight.numel() for module in layers)
    if not layers or platform.machine() not in ("x86_64", "AMD64") or size > PACKED_SHARE * memory_bytes():
        return 0
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    for module in layers:
        if module.weight not in _packed:  # another shadow of the model may have packed it
            _packed[module.weight] = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), None)
        packed = _packed[module.weight]
        module.forward = functools.partial(packed_linear, module, packed)  # type: ignore[method-assign]
    return size


def packed_linear(module: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    """`module(x)` by its packed weights, bit for bit; with gradients and of other dtypes it is the layer's own."""
    if torch.is_grad_enabled() or x.dtype != torch.bfloat16 or not x.numel():
        return F.linear(x, module.weight, module.bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, module.bias, "none", [], "")


def memory_bytes() -> int:
    """This machine's memory; 0 where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
