"""For every test: a time limit (`limits`), no process left behind (`processes`), one thread (models this small only
lose time to a second), one hypothesis profile, and, where there is no GPU, Triton's interpreter. Under `pytest -n` the
processes that tests start have one thread as well."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # teams of threads on too few cores wait for each other for ever

import torch
from hypothesis import HealthCheck, settings

from tests.processes import leaving_none

pytest_plugins = ["tests.limits"]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which transformers does too

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`thorough(but=n)`: the first n cases of that test are none of the thorough ones."""
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("thorough")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] <= mark.kwargs.get("but", 0):
                item.own_markers.remove(mark)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever a test starts is gone when it ends, also when it fails."""
    with leaving_none():
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in this test, whatever pytest's own process makes of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
