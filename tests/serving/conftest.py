"""The scripted engine behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.langchain.support import Script, scripted
from tests.serving.support import Served, serving


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture
def served(script: Script, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served
