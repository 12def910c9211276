"""What this machine's processor and the libraries that torch multiplies by do well together."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def slow_blas() -> bool:
    """Whether torch multiplies by MKL on a processor of AMD, where several of MKL's products are slow, and has oneDNN
    to turn to."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    found = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (found.read_text() if found.exists() else platform.processor())


@functools.cache
def bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 matrices on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
