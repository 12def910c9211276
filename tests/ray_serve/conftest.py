"""The scripted engine behind a front and two replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.langchain.support import Script, scripted
from tests.ray_serve.support import Many, cluster


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture
def served(script: Script, tmp_path: Path) -> Iterator[Many]:
    with cluster(tmp_path) as many:
        yield many
