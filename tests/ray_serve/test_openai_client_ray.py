"""What the official client finds at a server in this process it finds at a cluster of Ray Serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import processes
from tests.ray_serve.scripted import RayCluster
from tests.serving.far import Far
from tests.serving.test_openai_client_process import *  # noqa: F403  # its tests run here, over this fixture

pytestmark = pytest.mark.real
pytest.importorskip("ray", reason="needs the extra [ray]")


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("script")
    with processes.leaving_none():
        place = RayCluster(tmp_path_factory.mktemp("store"), folder)
        place.start({})  # here, as what a test starts ends with it
        yield Far(place, folder)
        place.end()
