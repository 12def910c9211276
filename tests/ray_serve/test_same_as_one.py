"""What the official client finds at one server it finds at a front over several replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_serve.support import Many, cluster
from tests.serving import test_openai_client as one
from tests.serving.test_openai_client import *  # noqa: F403  # its tests run here, over the fixtures of this folder

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def many_in_place_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one, "serving", cluster)


@pytest.fixture
def free(tmp_path: Path) -> Iterator[Many]:
    """Of a tiny model that says what its random weights make of it."""
    with cluster(tmp_path) as many:
        yield many
