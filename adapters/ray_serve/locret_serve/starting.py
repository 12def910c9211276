"""`locret-stream serve --ray`: the application on a cluster of this machine, or one that is up, until a signal ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from locret_stream.errors import ConfigError

LOOK_S = 0.5


def run(cluster: dict[str, Any], *, host: str, port: int, address: str | None, check: Callable[[], None],
        listening: Callable[[int], None]) -> None:
    """Start it, say so, and wait until this is interrupted; then answers under way are completed, and it ends.

    Args:
        cluster: fields of `cluster.Cluster`. port: 0 for any that is free. address: of a cluster that is up; None
            starts one on this machine, which ends with it. check: raises what no replica could serve; it is called
            before anything is started.

    Raises:
        ConfigError: Ray is not installed, the cluster is not there, or it serves already. KeyboardInterrupt: it was
            interrupted.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own, 15, lets every other program of the machine go first
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")  # Ray's own, 5, is short on a busy machine
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ConfigError("ray is not installed; expected: pip install 'locret-stream[ray]'") from None
    check()
    from locret_serve.cluster import NAME, application

    if address is None:  # all of the machine for the replicas, but what the front is given
        count = max(cluster.get(name) or 1 for name in ("replicas", "max_replicas"))
        cluster = {"cpus": round(((os.cpu_count() or 1) - 0.2) / count, 3), **cluster}
    built, port, stdout = application(cluster), port or free_port(host), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # where Ray tells of workers that died
        try:
            if address is None:  # Ray's own None would join one that is up
                ray.init("local", include_dashboard=False, logging_level="WARNING", log_to_driver=False)
            else:
                ray.init(address, logging_level="WARNING", log_to_driver=False)
        except ConnectionError as error:
            raise ConfigError(f"there is no cluster at {address!r}, or it asks for a token (RAY_AUTH_MODE=token, and "
                              f"RAY_AUTH_TOKEN as it is there): {error}") from None
        own = False
        try:
            serve.start(proxy_location="HeadOnly" if address is None else "EveryNode",
                        http_options={"host": host, "port": port})
            if NAME in serve.status().applications:
                raise ConfigError(f"an application {NAME!r} runs on the cluster at {address!r} already; expected it to "
                                  "be deployed anew (`serve deploy`), or ended first (`serve shutdown`)")
            _expect_proxy(host, port)
            own = True
            serve.run(built, name=NAME, route_prefix="/")
            with contextlib.redirect_stdout(stdout):
                listening(port)
            while True:
                time.sleep(LOOK_S)
        finally:
            with contextlib.suppress(KeyboardInterrupt):  # a second one ends it at once
                if own:
                    serve.delete(NAME)
            if address is None or not serve.status().applications:  # else it is others', too
                serve.shutdown()
            ray.shutdown()


def _expect_proxy(host: str, port: int) -> None:
    """Raises ConfigError: requests to this port do not reach Ray Serve, which runs on the cluster with another one."""
    at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((at, port), timeout=5):
            pass
    except OSError as error:
        raise ConfigError(f"Ray Serve does not listen on {host}:{port} ({error}), as it runs on this cluster already, "
                          "with options of its own; expected its --host and --port, or `serve shutdown` before"
                          ) from None


def free_port(host: str) -> int:
    """A port of this host that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
