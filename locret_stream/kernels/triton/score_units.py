"""The retaining head without the concatenation of q, k and v.

There are two ways, of which `VARIANT` forces one. "cublas": three accumulating products in the dtype of the weights,
then activation and projection in one kernel; the hidden layer is rounded three times where the reference rounds it
once. "fused": all in one kernel, which accumulates in fp32 and rounds only the operand of the projection. Both are
deterministic, as they use no atomics. Without `VARIANT` weights of 16 bits take "fused", which is the faster one there
(0.161 ms against 0.190 for 4,096 tokens and a width of 1,024 on an H100: `benchmarks/results/gpu.json`); products of
fp32 use no tensor cores, and are left to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from locret_stream.kernels.reference import project
from locret_stream.kernels.torch_ops import hidden_layer

VARIANT: str | None = None

_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
_MODULES = {  # by name: kernels import no model code
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
}


def score_units(q: Tensor, k: Tensor, v: Tensor, fc1: Tensor, fc2: Tensor, act: Callable[[Tensor], Tensor],
                bias1: Tensor | None = None, bias2: Tensor | None = None) -> Tensor:
    """`reference.score_units`. With an activation that the kernels do not have, all of it runs in torch."""
    name = _name(act)
    variant = VARIANT or ("fused" if fc1.dtype.itemsize == 2 else "cublas")
    if variant == "fused" and name is not None:
        return _score_fused(q, k, v, fc1, fc2, name, bias1, bias2)
    hidden = hidden_layer(q, k, v, fc1, bias1)
    if name is None:
        return project(act(hidden), fc2, bias2)
    return _project(hidden, fc2, name, bias2)


def _name(act: Callable[[Tensor], Tensor]) -> str | None:
    """The name of an activation in the kernels, None for one that they do not have."""
    if type(act) is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if isinstance(act, nn.Module):
        return _MODULES.get(f"{type(act).__module__}.{type(act).__qualname__}")
    return next((name for function, name in _FUNCTIONS.items() if act is function), None)


def _project(hidden: Tensor, fc2: Tensor, name: str, bias2: Tensor | None) -> Tensor:
    tokens, width = hidden.shape
    heads = fc2.shape[0]
    out = torch.empty(heads, tokens, dtype=torch.float32, device=hidden.device)
    tile = _tile(tokens, 32)
    _activate_project[(triton.cdiv(tokens, tile),)](
        hidden, fc2, bias2, out, tokens, width, heads, *fc2.stride(), TOKENS=tile, WIDTH=_tile(width, 128),
        HEADS=_tile(heads), ACT=name, WIDEN=_widen(), num_warps=4,
        enable_fp_fusion=True)
    return out


def _score_fused(q: Tensor, k: Tensor, v: Tensor, fc1: Tensor, fc2: Tensor, name: str, bias1: Tensor | None,
                 bias2: Tensor | None) -> Tensor:
    tokens, (width, _), heads = q.shape[1], fc1.shape, fc2.shape[0]
    if fc1.dtype.itemsize == 2:  # T=4096, W=1024: 128 programs, one wave of an H100; at 255 registers a thread
        tile, columns, depth, warps = _tile(tokens, 128), _tile(width, 256), 64, 8
    else:
        tile, columns, depth, warps = _tile(tokens, 64), _tile(width, 64), 32, 4
    blocks = triton.cdiv(width, columns)
    partial = torch.empty(blocks, heads, tokens, dtype=torch.float32, device=q.device)
    _score[(triton.cdiv(tokens, tile) * blocks,)](
        *_flat(q), *_flat(k), *_flat(v), fc1, fc2, bias1, bias2, partial, tokens, width, heads, *fc1.stride(),
        *fc2.stride(), TOKENS=tile, WIDTH=columns, DEPTH=depth, HEADS=_tile(heads), ACT=name, WIDEN=_widen(),
        num_warps=warps, num_stages=3, enable_fp_fusion=True)
    return partial.sum(0)


def _flat(x: Tensor) -> tuple[Tensor, int, int, int, int, int]:
    """x [H, T, D], then H, D and the strides; as one head of H*D features where the memory allows it."""
    heads, _, dim = x.shape
    if x.stride(0) == dim * x.stride(2):
        return x, 1, heads * dim, 0, x.stride(1), x.stride(2)
    return x, heads, dim, *x.stride()


def _tile(size: int, most: int | None = None) -> int:
    """Tile of a dimension: a power of two, at least the 16 that tl.dot takes."""
    tile = max(16, triton.next_power_of_2(size))
    return tile if most is None else min(most, tile)


def _widen() -> bool:
    """Whether operands are cast to fp32, which leaves every product as it is: Triton's interpreter takes the bits of
    bf16 for integers."""
    return triton.knobs.runtime.interpret


@triton.jit
def _activate(x, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(x <= 0, 0.0, x)  # NaN stays NaN
    elif ACT == "silu":
        return x * _sigmoid(x)
    elif ACT == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(u)) / 2 is sigmoid(2u)
    else:
        tl.static_assert(ACT == "gelu")
        return 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def _dot(a, b, acc, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _activate_project(hidden, fc2, bias2, out, tokens, width, heads, fc2_stride_h, fc2_stride_w, TOKENS: tl.constexpr,
                      WIDTH: tl.constexpr, HEADS: tl.constexpr, ACT: tl.constexpr, WIDEN: tl.constexpr):
    """out[h, t] = act(hidden[t]) . fc2[h] + bias2[h] for TOKENS tokens and all heads; hidden and out are contiguous."""
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.arange(0, HEADS)
    acc = tl.zeros((TOKENS, HEADS), tl.float32)
    for start in range(0, width, WIDTH):
        column = (start + tl.arange(0, WIDTH)).to(tl.int64)
        x = tl.load(hidden + row[:, None] * width + column[None, :],
                    mask=(row < tokens)[:, None] & (column < width)[None, :], other=0.0)
        weight = tl.load(fc2 + head[None, :] * fc2_stride_h + column[:, None] * fc2_stride_w,
                         mask=(head < heads)[None, :] & (column < width)[:, None], other=0.0)
        acc = _dot(_activate(x.to(tl.float32), ACT).to(weight.dtype), weight, acc, WIDEN)
    if bias2 is not None:
        acc += tl.load(bias2 + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
    tl.store(out + head.to(tl.int64)[None, :] * tokens + row[:, None], acc,
             mask=(row < tokens)[:, None] & (head < heads)[None, :])


@triton.jit
def _accumulate(acc, x, heads, dim, stride_h, stride_t, stride_d, weight, row, column, tokens, width, stride_w,
                stride_f, DEPTH: tl.constexpr, WIDEN: tl.constexpr):
    """acc + x [heads, tokens, dim] times the features of `weight` that belong to x, head by head."""
    for _ in range(heads):
        for start in range(0, dim, DEPTH):
            feature = (start + tl.arange(0, DEPTH)).to(tl.int64)
            a = tl.load(x + row[:, None] * stride_t + feature[None, :] * stride_d,
                        mask=(row < tokens)[:, None] & (feature < dim)[None, :], other=0.0)
            b = tl.load(weight + column[None, :] * stride_w + feature[:, None] * stride_f,
                        mask=(column < width)[None, :] & (feature < dim)[:, None], other=0.0)
            acc = _dot(a.to(b.dtype), b, acc, WIDEN)
        x += stride_h
        weight += dim * stride_f
    return acc


@triton.jit
def _score(q, q_heads, q_dim, q_stride_h, q_stride_t, q_stride_d, k, k_heads, k_dim, k_stride_h, k_stride_t, k_stride_d,
           v, v_heads, v_dim, v_stride_h, v_stride_t, v_stride_d, fc1, fc2, bias1, bias2, partial, tokens, width, heads,
           stride_w, stride_f, fc2_stride_h, fc2_stride_w, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
           DEPTH: tl.constexpr, HEADS: tl.constexpr, ACT: tl.constexpr, WIDEN: tl.constexpr):
    """partial[w, h, t]: the part of the scores of TOKENS tokens that comes from block w of the hidden layer."""
    blocks = tl.cdiv(width, WIDTH)
    block = tl.program_id(0) % blocks  # neighbouring programs read the same tokens
    row = ((tl.program_id(0) // blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = (block * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    head = tl.arange(0, HEADS)

    acc = tl.zeros((TOKENS, WIDTH), tl.float32)
    acc = _accumulate(acc, q, q_heads, q_dim, q_stride_h, q_stride_t, q_stride_d, fc1, row, column, tokens, width,
                      stride_w, stride_f, DEPTH, WIDEN)
    fc1 += q_heads * q_dim * stride_f
    acc = _accumulate(acc, k, k_heads, k_dim, k_stride_h, k_stride_t, k_stride_d, fc1, row, column, tokens, width,
                      stride_w, stride_f, DEPTH, WIDEN)
    fc1 += k_heads * k_dim * stride_f
    acc = _accumulate(acc, v, v_heads, v_dim, v_stride_h, v_stride_t, v_stride_d, fc1, row, column, tokens, width,
                      stride_w, stride_f, DEPTH, WIDEN)
    if bias1 is not None:
        acc += tl.load(bias1 + column, mask=column < width, other=0.0).to(tl.float32)[None, :]

    weight = tl.load(fc2 + head[None, :] * fc2_stride_h + column[:, None] * fc2_stride_w,
                     mask=(head < heads)[None, :] & (column < width)[:, None], other=0.0)
    score = _dot(_activate(acc, ACT).to(weight.dtype), weight, tl.zeros((TOKENS, HEADS), tl.float32), WIDEN)
    if bias2 is not None:
        if block == 0:
            score += tl.load(bias2 + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
    tl.store(partial + (block * heads + head).to(tl.int64)[None, :] * tokens + row[:, None], score,
             mask=(row < tokens)[:, None] & (head < heads)[None, :])
