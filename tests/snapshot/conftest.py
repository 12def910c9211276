"""Empty stores of every kind; owners that a test leaves open are closed behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from locret_stream.snapshot import Store
from locret_stream.snapshot.local import LocalFiles
from tests.processes import leaving_none
from tests.snapshot.kill import Hands
from tests.snapshot.object_store import SCHEME
from tests.snapshot.support import KEY, closed_spools, empty_memory, local_store


@pytest.fixture
def spools() -> Iterator[None]:
    """Owners are left open all over, and fsspec's memory is one for all."""
    with closed_spools():
        yield
    empty_memory()


@pytest.fixture(params=["plain", "encrypted", "memory", "memory, encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    key = KEY if "encrypted" in request.param else None
    if "memory" in request.param:
        return _without_locks(tmp_path, key)
    return local_store(tmp_path / "store", key=key)


@pytest.fixture(params=["plain", "encrypted"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store in a folder, where a test may do damage."""
    return local_store(tmp_path / "store", key=KEY if request.param == "encrypted" else None)


@pytest.fixture(params=["plain", "encrypted"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store where nothing can hold others off."""
    return _without_locks(tmp_path, KEY if request.param == "encrypted" else None)


def _without_locks(root: Path, key: str | None) -> Store:
    """One kind says no versions of what it holds, the other does: what holds for both holds without a key as with."""
    return Store(f"{SCHEME if key else 'memory'}://{root}", key=key)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFiles:
    """A folder on a disk."""
    return LocalFiles(tmp_path / "store")


@pytest.fixture(scope="module")
def hands() -> Iterator[Hands]:
    """A process that forks others."""
    with leaving_none():
        hands = Hands()
        yield hands
        hands.close()
