"""Benchmarks measure nothing here: at toy sizes they run to their end and say all that they promise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]


def gpu_small(**env: str) -> dict[str, Any]:
    done = run_python("benchmarks/gpu.py", "--small", "--only", "card,prefill,parts,decode,full,choices",
                      env=os.environ | {"PYTHONPATH": str(ROOT)} | env)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["command"].startswith("python benchmarks/gpu.py --small ")
    return told["result"]


def expect_whole(found: dict[str, Any]) -> None:
    assert found["small"] is True
    for tokens in ("128", "256"):
        assert found["prefill"][tokens]["units"] == 40 and found["prefill"][tokens]["peak_units"] == 56
        assert 0 < found["prefill"][tokens]["share_of_matmul"]
    assert found["prefill"]["pool_bytes"] == found["prefill"]["formula_bytes"]
    assert found["parts"]["parts_ms"].keys() >= {"attention", "heads", "selection", "compaction", "projections"}
    assert found["decode"]["1"]["ms_per_step"] > 0 and found["decode"]["3"]["share_of_bandwidth"] > 0
    assert found["full"].keys() == {"64", "96"}


def test_the_script_for_a_gpu_runs_at_toy_sizes():
    found = gpu_small(LOCRET_KERNELS="torch")
    expect_whole(found)
    assert found["choices"].keys() == {"prefill_attention torch", "score_units torch"}


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_in_triton_s_interpreter():
    pytest.importorskip("triton", reason="triton is published for Linux only")
    found = gpu_small(LOCRET_KERNELS="triton", TRITON_INTERPRET="1")
    expect_whole(found)
    assert len(found["choices"]) == 5
