"""How many threads the command line computes with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from locret_stream.cli import cores
from locret_stream.cli.loading import bound_threads


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 8), ({"cpu.max": "max 100000"}, 8), ({"cpu.max": "250000 100000"}, 3), ({"cpu.max": "50000 100000"}, 1),
    ({"cpu.max": "9900000 100000"}, 8), ({"cpu.max": "nonsense"}, 8), ({"cpu.max": "100 0"}, 8),
    ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8)])
def test_a_quota_counts(group: Path, files: dict[str, str], expected: int):
    for name, text in files.items():
        (group / name).parent.mkdir(exist_ok=True)
        (group / name).write_text(text)
    assert cores.usable_cores() == expected


def test_threads_are_only_ever_lowered_and_a_user_decides(group: Path, monkeypatch):
    before, chosen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    bound_threads()
    assert chosen == [8]
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    bound_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    bound_threads()
    assert chosen == [8] and before
