"""What the official client finds at a server in this process it finds at one in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.serving import test_openai_client as one
from tests.serving.far import Far, FarScript, OneProcess
from tests.serving.support import Reached
from tests.serving.test_openai_client import *  # noqa: F403  # its tests run here, over these fixtures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("script")
    with processes.leaving_none():
        yield Far(OneProcess(tmp_path_factory.mktemp("store"), folder), folder)


@pytest.fixture(autouse=True)
def script(far: Far, monkeypatch: pytest.MonkeyPatch) -> FarScript:
    monkeypatch.setattr(one, "serving", far.serving)
    return FarScript(far.folder)


@pytest.fixture
def served(far: Far, tmp_path: Path) -> Iterator[Reached]:
    with far.serving(tmp_path) as served:
        yield served


@pytest.fixture
def free(far: Far, script: FarScript, tmp_path: Path) -> Iterator[Reached]:
    """Of a tiny model that says what its random weights make of it."""
    script.free()
    with far.serving(tmp_path) as served:
        yield served
