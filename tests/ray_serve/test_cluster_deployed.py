"""A cluster that is up, as `ray start` makes one: the command line runs on it, the config file is deployed on it, and
its replicas become more and fewer while clients talk."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import processes
from tests.ray_serve.scripted import SMALL, names
from tests.ray_serve.test_settings import EXAMPLE

pytestmark = pytest.mark.real
pytest.importorskip("ray", reason="needs the extra [ray]")
from locret_serve.starting import free_port  # noqa: E402

BIN = Path(sys.executable).parent
FACT, QUESTION = "The door code of falcon is {}.", "What is the door code of falcon?"


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """The environment in which a cluster of this machine is reached."""
    port, dashboard = free_port("127.0.0.1"), free_port("127.0.0.1")
    env = os.environ | SMALL | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test" * 4}
    with processes.leaving_none():
        process = processes.start(
            BIN / "ray", "start", "--head", "--block", "--port", port, "--dashboard-port", dashboard, "--num-cpus", 8,
            "--disable-usage-stats", env=env | {"RAY_worker_niceness": "0", "LOCRET_API_KEY": "key0"},
            stdout=processes.DEVNULL, stderr=None)
        url, began = f"http://127.0.0.1:{dashboard}", time.monotonic()
        while True:
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.TransportError:
                assert time.monotonic() - began < 120 and process.poll() is None
                time.sleep(0.5)
        yield env | {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_DASHBOARD_ADDRESS": url}
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def serve(head: dict[str, str], *arguments: object) -> str:
    done = processes.run(BIN / "serve", *arguments, env=head, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_line_runs_on_a_cluster_that_is_up(head: dict[str, str], tmp_path: Path):
    process = processes.start_python(
        "-m", "locret_stream", "serve", "--ray", "--ray-address", head["RAY_ADDRESS"], "--replicas", "1", "--port", "0",
        "--json", "--store", tmp_path, env=head, stderr=None)
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    answer = httpx.post(f"{url}/chat/completions", timeout=120, json={"messages": [
        {"role": "user", "content": FACT.format(48213)}], "session_id": "one"})
    assert answer.status_code == 200 and answer.json()["locret"]["saved"], answer.text
    other = processes.run_python("-m", "locret_stream", "serve", "--ray", "--ray-address", head["RAY_ADDRESS"],
                                 "--store", tmp_path, env=head)
    assert other.returncode == 2 and "Traceback" not in other.stderr, other.stderr
    assert httpx.get(f"{url}/sessions", timeout=60).json()["data"] == [{"id": "one", "object": "session"}]
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130


def test_the_config_file_is_deployed_and_its_replicas_become_more_and_fewer(head: dict[str, str], tmp_path: Path):
    """One replica, three, and one, by the same file with another number, while eight clients talk."""
    port, file = free_port("127.0.0.1"), tmp_path / "cluster.yaml"

    def deploy(replicas: int) -> float:
        """Seconds until there are so many."""
        config = yaml.safe_load(EXAMPLE.read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        (app,) = config["applications"]
        app["args"] |= {"store": str(tmp_path / "store"), "replicas": replicas, "max_replicas": None, "fronts": 1,
                        "cpus": 0.5}
        file.write_text(yaml.safe_dump(config))
        began = time.monotonic()
        serve(head, "deploy", file)
        while True:
            try:
                if len(names(url, "key0")) == replicas:
                    return time.monotonic() - began
            except (httpx.HTTPError, KeyError):
                pass
            assert time.monotonic() - began < 240
            time.sleep(0.5)

    url = f"http://127.0.0.1:{port}"
    print(f"\nthe config file, deployed: answers after {deploy(1):.1f} s")
    ended, results, owners, wrong = threading.Event(), Counter[int](), [list[str]() for _ in range(8)], list[Any]()

    def talk(number: int) -> None:
        """Every answer goes on from the memory that the ones before left."""
        with httpx.Client(base_url=url, timeout=120, headers={"authorization": "Bearer key0"}) as client:
            messages: list[dict[str, str]] = []
            while not ended.is_set():
                messages.append({"role": "user", "content": QUESTION if messages else FACT.format(10000 + number)})
                answer = client.post("/v1/chat/completions", json={
                    "messages": messages, "max_tokens": 8, "session_id": f"s{number}"})
                results[answer.status_code] += 1
                if answer.status_code != 200:
                    wrong.append(answer.text)
                    return
                said = answer.json()
                owners[number].append(said["locret"]["replica"])
                if len(messages) > 1 and not said["usage"]["prompt_tokens_details"]["cached_tokens"]:
                    wrong.append((number, said))
                messages.append(said["choices"][0]["message"])
                time.sleep(0.5)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(5)
        up = deploy(3)
        time.sleep(10)
        down = deploy(1)
        time.sleep(5)
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)
    moved = sum(before != after for each in owners for before, after in pairwise(each))
    print(f"three replicas after {up:.1f} s, one after {down:.1f} s; answers {dict(results)}; sessions moved {moved} "
          f"times over {len({name for each in owners for name in each})} replicas; load {os.getloadavg()}")
    assert not wrong and results.keys() == {200} and moved >= 2
    assert len({name for each in owners for name in each}) >= 3
    with httpx.Client(base_url=url, timeout=120, headers={"authorization": "Bearer key0"}) as client:
        told = [client.post(f"/v1/sessions/s{number}/ask", json={"question": QUESTION}).json()["answer"]
                for number in range(8)]
    assert sum(str(10000 + number) in answer for number, answer in enumerate(told)) >= 7, told
    serve(head, "shutdown", "--yes")
