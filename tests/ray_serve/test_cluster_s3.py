"""A cluster of two replicas whose store is an object store: a server on this machine that plays S3."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import processes
from tests.ray_serve.test_cluster import (  # noqa: F401  # two of its tests run here, over this fixture
    SMALL,
    client,
    test_a_replica_that_is_killed_between_turns,
    test_two_owners_of_one_session,
)

pytestmark = pytest.mark.real
pytest.importorskip("ray", reason="needs the extra [ray]")
pytest.importorskip("s3fs", reason="needs s3fs")
boto3 = pytest.importorskip("boto3", reason="needs boto3, which comes with moto[server]")
pytest.importorskip("moto", reason="needs moto[server]")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment in which a bucket is reached."""
    with processes.leaving_none():
        process = processes.start_python("-u", "-c", "from moto.server import ThreadedMotoServer as Server\n"
                                         "server = Server(port=0, verbose=False)\nserver.start()\n"
                                         "print(server.get_host_and_port()[1], flush=True)\ninput()",
                                         stdin=processes.PIPE, stderr=processes.DEVNULL)  # it tells of every request
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="k",
                     aws_secret_access_key="s").create_bucket(Bucket="bucket")
        yield {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
               "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def cluster(s3: dict[str, str]) -> Iterator[str]:
    with processes.leaving_none():
        process = processes.start_python(
            "-m", "locret_stream", "serve", "--ray", "--replicas", "2", "--max-live", "8", "--port", "0", "--json",
            "--store", "s3://bucket/memories", env=os.environ | SMALL | s3, stderr=None)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the cluster did not start"
        yield json.loads(line)["url"]
        process.send_signal(signal.SIGINT)
        process.wait(120)


@pytest.fixture(scope="module")
def url(s3: dict[str, str]) -> Iterator[str]:
    with cluster(s3) as url:
        yield url
