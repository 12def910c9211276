"""Kernels compiled for a Hopper (sm_90) where there is no GPU: `python -m tests.kernels.without_a_card SHAPE...` prints
for each kernel that a shape launches what it takes of a card, as JSON. TRITON_INTERPRET must be 0.

SHAPE: operation,H,G,K,V,T of one of `OPERATIONS`, T new tokens for each of 10,000 units in bf16; V 0: V is K.
"""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from locret_stream.kernels.triton.decode_attention import decode_attention
from locret_stream.kernels.triton.prefill_attention import prefill_attention
from locret_stream.kernels.triton.reduced_attention import reduced_attention

UNITS = 10_000


class NoCard:
    """What Triton asks its driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def units_of(H: int, K: int, V: int) -> tuple[Tensor, Tensor]:
    keys = torch.empty(1, H, UNITS, K, dtype=torch.bfloat16)
    return keys, torch.empty(1, H, UNITS, V, dtype=torch.bfloat16) if V else keys


def decode(H: int, G: int, K: int, V: int, T: int) -> None:
    keys, values = units_of(H, K, V)
    at = torch.zeros(1, dtype=torch.int64)
    decode_attention(torch.empty(1, H * G, T, K, dtype=keys.dtype), keys, values, at, at + UNITS, 0.1)


def headwise(H: int, G: int, K: int, V: int, T: int) -> None:
    keys, values = units_of(1, K, V)
    at = torch.zeros(H, dtype=torch.int64)
    decode_attention(torch.empty(H, G, T, K, dtype=keys.dtype), keys, values, at, at + UNITS, 0.1, firsts=at)


def prefill(H: int, G: int, K: int, V: int, T: int) -> None:
    keys, values = units_of(H, K, V)
    prefill_attention(torch.empty(H * G, T, K, dtype=keys.dtype), keys[0], values[0], 0.1)


def reduced(H: int, G: int, K: int, V: int, T: int) -> None:
    keys, _ = units_of(H, K, V)
    reduced_attention(torch.empty(H * G, T, K, dtype=keys.dtype), keys[0], 0.1, torch.arange(T))


OPERATIONS = {one.__name__: one for one in (decode, headwise, prefill, reduced)}


def main(shapes: list[str]) -> None:
    found: list[dict[str, Any]] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log.getvalue())]
        assert spilled, "ptxas says how much"
        found.append({"shape": shape, "kernel": self.fn.__name__, "shared": kernel.metadata.shared,
                      "spilled": sum(spilled), "rows": kwargs.get("BLOCK_M", 0),
                      "products": next((name for name in ("wgmma", "mma") if f"{name}." in kernel.asm["ptx"]), "")})

    driver.set_active(NoCard())
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    JITFunction.run = compiled
    for shape in shapes:
        name, *sizes = shape.split(",")
        OPERATIONS[name](*map(int, sizes))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
