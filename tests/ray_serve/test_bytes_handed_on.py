"""A front over several replicas reads streams that are not UTF-8 as one server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.langchain.support import Script
from tests.ray_serve.support import Many, cluster
from tests.serving.test_bytes import *  # noqa: F403  # its tests run here, over the fixtures of this folder


@pytest.fixture
def served(script: Script, tmp_path: Path) -> Iterator[Many]:
    with cluster(tmp_path) as many:
        yield many
