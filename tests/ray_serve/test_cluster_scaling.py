"""A cluster whose replicas follow the requests."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import processes

pytestmark = pytest.mark.real
pytest.importorskip("ray", reason="needs the extra [ray]")


def test_another_replica_comes_when_the_slots_are_in_use(tmp_path: Path):
    from tests.ray_serve.test_cluster import SMALL, names, user
    with processes.leaving_none():
        process = processes.start_python(
            "-m", "locret_stream", "serve", "--ray", "--replicas", "1", "--max-replicas", "2", "--max-live", "2",
            "--port", "0", "--json", "--store", tmp_path, env=os.environ | SMALL, stderr=None)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert len(names(url)) == 1

        def ask(number: int) -> int:
            status = 200
            while status == 200 and not done:
                status = httpx.post(f"{url}/chat/completions", timeout=300, json={
                    "messages": [user("Hello.")], "session_id": f"s{number}", "max_tokens": 200, "ignore_eos": True}
                    ).status_code
            return status

        done = list[bool]()
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(6)]
            began = time.perf_counter()
            while len(names(url)) < 2:
                assert time.perf_counter() - began < 150
                time.sleep(0.5)
            took = time.perf_counter() - began
            done.append(True)
            assert [each.result() for each in asked] == [200] * 6
        print(f"\nsix requests over two slots: a second replica after {took:.1f} s; load {os.getloadavg()}")
        process.send_signal(2)
        process.wait(120)
