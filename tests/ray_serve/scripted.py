"""The scripted engine on a cluster of this machine, of two replicas: `python -m tests.ray_serve.scripted`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests import processes
from tests.langchain.support import runtime
from tests.serving.far import KEYS, follow
from tests.serving.support import MODEL

SMALL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_object_store_memory": str(120 << 20)}


def main(store: str, folder: str) -> None:
    """Deploy the application anew, with the options of each line that is read."""
    import ray
    from ray import serve

    from locret_serve.cluster import NAME, Replica, build
    from locret_serve.settings import Cluster
    from locret_serve.starting import free_port

    class Scripted(Replica):
        def runtime_of(self, asked: Any, store: Any) -> Any:
            follow(Path(asked.runtime["script"]))
            return runtime(store, max_live=asked.max_live, **asked.runtime["options"])

    told, sys.stdout = sys.stdout, sys.stderr  # where Ray tells of workers that died
    ray.init("local", include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    port = free_port("127.0.0.1")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    for line in sys.stdin:
        cluster = Cluster(runtime={"script": folder, "options": json.loads(line)}, store=store, name=MODEL, keys=KEYS,
                          max_live=8, cpus=0.5)
        serve.run(build(cluster, Scripted), name=NAME, route_prefix="/")
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True, file=told)
    serve.shutdown()
    ray.shutdown()


def names(url: str, key: str = "none") -> set[str]:
    """Of the replicas that answer; each ends in the number of its process."""
    text = httpx.get(f"{url}/metrics", timeout=60, headers={"authorization": f"Bearer {key}"}).text
    return {name for name in re.findall(r'replica="([^"]+)"', text) if not name.startswith("front")}


class RayCluster:
    """A cluster over a store, as `tests.serving.far.Place`; it is restarted by SIGKILL of its replicas."""

    def __init__(self, store: Path, folder: Path):
        self._options: dict[str, Any] | None = None
        self._process = processes.start_python("-m", "tests.ray_serve.scripted", store, folder, stderr=None,
                                               stdin=processes.PIPE, env=os.environ | SMALL)
        self._url = ""

    def start(self, options: dict[str, Any]) -> str:
        if options != self._options:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            stdin.write(json.dumps(options) + "\n")
            stdin.flush()
            line = stdout.readline()
            assert line, "the cluster did not start"
            self._url, self._options = json.loads(line)["url"], options
        return self._url

    def restart(self) -> str:
        killed, began = names(self._url, "key0"), time.monotonic()
        for name in killed:
            os.kill(int(name.rpartition(".")[2]), signal.SIGKILL)
        while len(names(self._url, "key0") - killed) < 2:
            assert time.monotonic() - began < 180
            time.sleep(0.2)
        return self._url

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


if __name__ == "__main__":
    main(*sys.argv[1:])
