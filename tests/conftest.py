"""For every test: a home of its own (`isolation`), a time limit (`limits`), no skip but those that are known (`skips`),
no process left behind (`processes`), no wait for a disk, one thread (models this small only lose time to a second), one
hypothesis profile, and, where there is no GPU, Triton's interpreter. Under `pytest -n` the processes that tests start
have one thread as well."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import pytest

from tests import isolation, processes

isolation.begin()  # before what looks for caches is imported
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # compiles grammars of URIs for jsonschema: 4 s

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # teams of threads on too few cores wait for each other for ever

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

pytest_plugins = ["tests.limits", "tests.skips"]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which transformers does too

torch.set_num_threads(1)


def _in_memory(file: int | IO[Any]) -> None:
    """As `os.fsync` for a file system in memory. Disks take milliseconds for it, and none loses its power while tests
    run; those of durability record the calls, and the processes that are killed make them."""
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = _in_memory
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


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and is left out of all garbage collections: else a full one, which some
    tests ask for and others come upon, takes more than half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever a test starts is gone when it ends, also when it fails."""
    with processes.leaving_none():
        yield


@pytest.fixture(autouse=True)
def nothing_outside() -> Iterator[None]:
    """A test neither writes outside of its own places nor reads what the user keeps."""
    with isolation.watched() as complaints:
        yield
    assert not complaints, "\n".join(complaints)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        isolation.end()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in this test, whatever pytest's own process makes of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
