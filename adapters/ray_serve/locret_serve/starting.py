"""`locret-stream serve --ray`: the application on a cluster of this machine, or one that is up, until a signal ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from locret_stream.errors import ConfigError

LOOK_S = 0.5


def run(cluster: dict[str, Any], *, host: str, port: int, address: str | None, listening: Callable[[int], None]
        ) -> None:
    """Start it, say so, and wait until this is interrupted; then answers under way are completed, and it ends.

    Args:
        cluster: fields of `cluster.Cluster`. port: 0 for any that is free. address: of a cluster that is up; None
            starts one on this machine, which ends with it.

    Raises:
        ConfigError: Ray is not installed, or the cluster is not there. KeyboardInterrupt: it was interrupted.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own, 15, lets every other program of the machine go first
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ConfigError("ray is not installed; expected: pip install 'locret-stream[ray]'") from None
    from locret_serve.cluster import NAME, application

    if address is None:  # all of the machine for the replicas, but what the front is given
        count = max(cluster.get(name) or 1 for name in ("replicas", "max_replicas"))
        cluster = {"cpus": round(((os.cpu_count() or 1) - 0.2) / count, 3), **cluster}
    built, port = application(cluster), port or _free_port(host)
    try:
        if address is None:
            ray.init(include_dashboard=False, logging_level="WARNING", log_to_driver=False)
        else:
            ray.init(address=address, logging_level="WARNING", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"there is no cluster at {address!r}: {error}") from None
    try:
        serve.start(proxy_location="HeadOnly" if address is None else "EveryNode",
                    http_options={"host": host, "port": port})
        serve.run(built, name=NAME, route_prefix="/")
        listening(port)
        while True:
            time.sleep(LOOK_S)
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends it at once
            serve.delete(NAME)
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
