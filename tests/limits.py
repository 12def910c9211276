"""A time limit for every test, as a plugin of pytest: `-p tests.limits`.

A hung test cannot be trusted to heed an exception, or to let go of the interpreter's lock. So its process ends, and the
stacks of all threads are told on stderr. Under xdist another process takes over, and the test counts as failed.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LIMIT_S, SLOW_LIMIT_S = 300, 4 * 3600
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())  # before what tests say is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


@contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    limit_s = float(os.environ.get("LOCRET_TEST_LIMIT_S", SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# Each phase is limited alone: pytest's own limit for a whole test ends when the test fails, and its fixtures may hang.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    with _limited(item):
        return (yield)
