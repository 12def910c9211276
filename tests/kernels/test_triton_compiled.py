"""What the attention kernels take of an H100 or H200, at the sizes of models whose units are wide: Triton's compiler
says it without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import run_python

pytest.importorskip("triton", reason="triton is not installed")

MOST = 227 << 10  # bytes of shared memory that a block may have
SHAPES = {  # KV heads, query heads of each, numbers of K, of V (0: V is K)
    "DeepSeek-V3": (1, 128, 576, 0), "MiMo-V2-Flash": (4, 16, 192, 128), "GLM-4.7-Flash": (1, 20, 576, 0),
    "MiniCPM3": (1, 40, 288, 0), "Gemma 4, its keys rotated before": (4, 4, 512, 512),
}
LAUNCHED = [("decode", 1), ("prefill", 4096), ("prefill", 5), ("reduced", 4096)]


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.thorough
def test_kernels_of_wide_units_fit_a_hopper(model: str, tmp_path: Path):
    """Its shared memory, and its registers, without a spill; from 64 rows on they use Hopper's own products."""
    shapes = [",".join(map(str, (name, *SHAPES[model], new))) for name, new in LAUNCHED]
    done = run_python("-m", "tests.kernels.without_a_card", *shapes,
                      env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout)
    assert [one["kernel"] for one in kernels] == ["_partial", "_combine", "_prefill", "_prefill", "_row_lse",
                                                  "_columns"]
    for one in kernels:
        assert one["shared"] <= MOST and not one["spilled"], one
        assert one["products"] == {0: "", 16: "mma", 32: "mma", 64: "wgmma", 128: "wgmma"}[one["rows"]], one


@pytest.mark.thorough
def test_the_kernel_of_heads_that_share_a_budget_fits_a_hopper(tmp_path: Path):
    done = run_python("-m", "tests.kernels.without_a_card", "headwise,8,4,128,128,1",
                      env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout)
    assert [one["kernel"] for one in kernels] == ["_partial", "_combine"]
    assert all(one["shared"] <= MOST and not one["spilled"] for one in kernels)
