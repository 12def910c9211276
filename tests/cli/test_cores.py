"""How many threads the command line computes with."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from locret_stream import __main__
from locret_stream.cli import cores, loading
from locret_stream.cli.loading import bound_threads
from locret_stream.named_models import NAMED_MODELS, smollm2


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


@pytest.mark.parametrize(("given", "spins"), [({}, __main__.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"),
                                              ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_that_wait_leave_the_cores_to_others_unless_a_user_decides(monkeypatch, given: dict[str, str],
                                                                           spins: str | None):
    with monkeypatch.context() as patch:
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            patch.setenv(name, "")  # what `main` sets goes again
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        patch.setattr("locret_stream.cli.app", lambda **_: None)
        __main__.main()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_the_files_of_smollm2_are_compared_beside_the_imports(monkeypatch: pytest.MonkeyPatch):
    """In a thread that tells nothing of what it meets: that is said when the files are needed."""
    assert NAMED_MODELS["smollm2"].ahead is smollm2.converted_folder_is_whole
    begun: list[str] = []

    def ahead() -> None:
        begun.append(threading.current_thread().name)
        raise OSError("the disk is gone")

    threads = threading.Thread
    made: list[threading.Thread] = []
    monkeypatch.setattr(loading.threading, "Thread", lambda **options: made.append(threads(**options)) or made[-1])
    monkeypatch.setattr(loading, "named_model", lambda model: msgspec.structs.replace(NAMED_MODELS[model], ahead=ahead))
    loading._before_loading("smollm2")
    made[0].join(10)
    assert begun == ["locret-ahead"] and len(made) == 1
