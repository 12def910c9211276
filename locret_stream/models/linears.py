"""Quicker products for the linear layers of a shadow on CPUs. Knows no attention.

In fp32, on AMD's processors. MKL, by which torch multiplies fp32 matrices on CPUs, takes two to three times as long
there as the memory needs where one of the two matrices has few rows, as in decoding, and a tenth longer than oneDNN
where both have many. So one or two rows are multiplied by the weights as four matrices of one batch, which MKL does
quickly, and others by oneDNN. All are exact to rounding. Which one it is depends on the processor, the layer's size and
the number of rows alone, never on what a clock said, so that the same tokens give the same bits.

In bf16, of any rows. oneDNN, which multiplies these, puts the weights into an order of its own at every call; `pack`
does it once, and contiguous inputs give the same bits. It does so for weights that are a file mapped into memory: from
then on only the packed copy is read, and the system can take back the pages of the file.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from locret_stream.kernels.processor import bf16_products, slow_blas

PARTS = 4  # of the weights, in a batched product: what MKL does with one matrix of a batch is what is quick
# The batched product is used for at most SPLIT_ROWS rows and SPLIT_INPUTS inputs, in layers of at least SPLIT_LEAST
# weights; oneDNN's from ONEDNN_LEAST weights on. Beyond these bounds they are no quicker than the layer's own.
SPLIT_ROWS, SPLIT_INPUTS, SPLIT_LEAST = 2, 4096, 1 << 16
ONEDNN_LEAST = 1 << 17
_packed = WeakTensorKeyDictionary()


def quicken(tree: nn.Module) -> int:
    """Give the fp32 linear layers of a module tree on CPUs the quicker products; returns how many have them.

    Layers of other types, such as those of quantisers and adapters, stay as they are, and so do those whose forward is
    wrapped, as that of offloaded ones is. The same holds for `pack`.
    """
    layers = _plain_layers(tree, torch.float32) if slow_blas() else []
    for module in layers:
        # Bound to the tensors: a reference to the module would be a cycle, which keeps the weights until it is found.
        module.forward = functools.partial(linear, module.weight, module.bias)  # type: ignore[method-assign]
    return len(layers)


def is_quicker(module: nn.Module) -> bool:
    """Whether `quicken` or `pack` gave this module its forward, which is bound to the tensors that it had then."""
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func in (linear, packed_linear)


def _plain_layers(tree: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    return [module for module in tree.modules() if type(module) is nn.Linear and "forward" not in vars(module)
            and type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"
            and module.weight.dtype == dtype and module.weight.numel() >= SPLIT_LEAST]


def linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """input [..., inputs] -> [..., outputs], as the layer itself gives it, to rounding. With gradients, or of other
    dtypes, it is the layer's own product."""
    outputs, inputs = weight.shape
    rows = input.numel() // inputs
    if not rows or torch.is_grad_enabled() or not weight.dtype == input.dtype == torch.float32:
        return F.linear(input, weight, bias)
    if rows <= SPLIT_ROWS and inputs <= SPLIT_INPUTS and outputs % PARTS == 0:
        columns = input.reshape(1, rows, inputs).transpose(1, 2).expand(PARTS, inputs, rows)
        out = torch.bmm(weight.view(PARTS, -1, inputs), columns).view(outputs, rows).t()
        out = out.reshape(*input.shape[:-1], outputs)
        return out if bias is None else out + bias
    if weight.numel() >= ONEDNN_LEAST:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return F.linear(input, weight, bias)


def pack(trees: Sequence[nn.Module]) -> int:
    """Pack the bf16 linear layers of module trees on CPUs whose weights are in a mapped file. Nothing may change these
    weights from then on. Returns the bytes that the packed copies take. Layers stay unpacked where memory ends, and
    where this processor's products by packed weights have other bits."""
    if platform.machine() not in ("x86_64", "AMD64") or not bf16_products():
        return 0
    files, size, exact = mapped_files(), 0, dict[torch.Size, bool]()
    if not files:
        return 0
    for module in (module for tree in trees for module in _plain_layers(tree, torch.bfloat16)):
        weight = module.weight
        if not any(weight.data_ptr() in pages for pages in files):
            continue
        try:
            if weight not in _packed:  # another shadow of the model may have packed it
                _packed[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        except (RuntimeError, MemoryError):
            break
        if weight.shape not in exact:
            exact[weight.shape] = _same_bits(weight, _packed[weight])
        if not exact[weight.shape]:
            del _packed[weight]
            continue
        module.forward = functools.partial(  # type: ignore[method-assign]
            packed_linear, weight, module.bias, _packed[weight])
        size += weight.nbytes
    return size


@torch.inference_mode()
def _same_bits(weight: Tensor, packed: Tensor) -> bool:
    """Whether one row and many give the same by packed weights, with a bias and without."""
    outputs, inputs = weight.shape
    x = torch.linspace(-3, 3, 64 * inputs, dtype=torch.float64).sin().bfloat16().view(64, inputs)
    bias = torch.linspace(-1, 1, outputs, dtype=torch.bfloat16)
    return all(torch.equal(F.linear(x[:rows], weight, added), packed_linear(weight, added, packed, x[:rows]))
               for rows in (1, 64) for added in (None, bias))


def packed_linear(weight: Tensor, bias: Tensor | None, packed: Tensor, input: Tensor) -> Tensor:
    """The layer's own result by its packed weights, bit for bit; with gradients, of other dtypes and of inputs that are
    not contiguous it is the layer's own product."""
    if torch.is_grad_enabled() or input.dtype != torch.bfloat16 or not input.numel() or not input.is_contiguous():
        return F.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def mapped_files() -> list[range]:
    """The addresses of this process at which files are mapped into memory; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.exists() else []
    spans = [span.split("-") for span, *_, path in (line for line in lines if len(line) == 6) if path.startswith("/")]
    return [range(int(first, 16), int(end, 16)) for first, end in spans]
