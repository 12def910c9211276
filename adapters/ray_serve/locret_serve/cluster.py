"""The application that Ray Serve runs: replicas of memories behind fronts. A config file names `application`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from locret_serve.front import Front
from locret_serve.memory import Memory
from locret_serve.router import sticky
from locret_serve.scaling import by_slots
from locret_serve.settings import Cluster, read_cluster
from locret_stream.errors import ConfigError
from locret_stream.serving.keys import read_keys
from locret_stream.serving.server import leave_loaded_alone
from locret_stream.serving.service import Service

if TYPE_CHECKING:  # these load torch
    from locret_stream.runtime import Runtime
    from locret_stream.snapshot import Store

NAME = "locret"  # of the application
LATER = 5  # niceness of a replica that loads
READS = 64  # requests of a replica that need no slot, beside those that have or wait for one


class Replica(Memory):
    """A `Memory` that Ray Serve starts, asks how it is, and ends."""

    async def __init__(self, cluster: bytes):  # type: ignore[misc]  # Ray awaits it
        await asyncio.to_thread(_import_quietly)
        import torch

        from locret_stream.snapshot import Store

        asked, context = msgspec.json.decode(cluster, type=Cluster), serve.get_replica_context()
        torch.set_num_threads(max(1, int(asked.cpus)))
        store = Store(asked.store, key=asked.key or os.environ.get("LOCRET_KEY"), keep_last=asked.boundaries)
        runtime = self.runtime_of(asked, store)
        service = Service(runtime, model=asked.model, limits=asked.limits, response_template=asked.response_template)
        service.expires = context.rank.rank == 0
        await service.start()
        leave_loaded_alone()
        super().__init__(service, f"{context.replica_id.unique_id}.{os.getpid()}")

    def runtime_of(self, asked: Cluster, store: Store) -> Runtime:
        """The runtime of this replica, not started."""
        from locret_stream.runtime import Runtime
        return Runtime.from_pretrained(**{"model": "bundled", **asked.runtime}, store=store, max_live=asked.max_live)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.by_slots` reads."""
        return await self.load()

    async def check_health(self) -> None:
        """Raises RuntimeError: the engine's thread has ended, so that nothing can be answered here any more."""
        if not self.service.runtime.worker.alive:
            raise RuntimeError("the engine's thread has ended; expected another replica in its place")

    async def __del__(self) -> None:
        """Awaited by Ray Serve when the replica ends: memories that rest are saved, streams undone."""
        if hasattr(self, "service"):
            await self.service.aclose()


def _import_quietly() -> None:
    """Import what a replica needs, which takes seconds of a core, behind the replicas that answer on this machine."""
    if sys.platform == "linux":  # there a thread has a priority of its own, which ends with it
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LATER)
    import locret_stream.conversation.threads
    import locret_stream.runtime  # noqa: F401


def application(args: Mapping[str, Any]) -> Application:
    """The application of a Serve config file, whose `args` are the fields of `Cluster`.

    Raises:
        ConfigError: as `read_cluster` and `build`.
    """
    return build(read_cluster(args))


def build(cluster: Cluster, replica: type[Replica] = Replica) -> Application:
    """The application, of such replicas. Raises ConfigError: there is no key, and keyless is not set."""
    keys = read_keys(list(cluster.keys) or [os.environ.get("LOCRET_API_KEY", "")])
    if not keys and not cluster.keyless:
        raise ConfigError("there is no API key, and other machines may call; expected keys, the variable "
                          "LOCRET_API_KEY, or keyless=True")
    count: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        count = {"autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.replicas, max_replicas=cluster.max_replicas, metrics_interval_s=2,
            look_back_period_s=10, upscale_delay_s=5, downscale_delay_s=300,
            policy=AutoscalingPolicy(policy_function=by_slots))}
    memory = serve.deployment(
        replica, name="Memory", ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        max_ongoing_requests=cluster.max_live + cluster.limits.max_waiting + READS,
        health_check_period_s=2, health_check_timeout_s=20, graceful_shutdown_timeout_s=cluster.limits.timeout_s,
        graceful_shutdown_wait_loop_s=0.5, request_router_config=sticky(), **count)
    front = serve.deployment(
        Front, name="Front", num_replicas=cluster.fronts, ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=10_000, graceful_shutdown_timeout_s=cluster.limits.timeout_s)
    return front.bind(memory.bind(msgspec.json.encode(cluster)), cluster.model, msgspec.to_builtins(cluster.limits),
                      keys, list(cluster.hosts))
