"""The HTTP server of a cluster: the routes of `serving.app` over the replicas. It holds no memory and loads no model;
any number of them is the same as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from locret_serve.remote import RemoteService
from locret_serve.replicas import ReplicaDied
from locret_stream.serving.app import make_app
from locret_stream.serving.errors import ApiError
from locret_stream.serving.limits import Limits

GONE = (RayActorError, ReplicaUnavailableError, WorkerCrashedError, ObjectLostError)


class RayReplicas:
    """The replicas behind a handle of Ray Serve, as `replicas.Replicas`."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle

    async def stream(self, key: str | None, verb: str, *arguments: Any) -> AsyncGenerator[Any]:
        with self._asked({"stream": True}, key, verb, arguments) as answers:
            async for each in answers:
                yield each

    async def call(self, key: str | None, verb: str, *arguments: Any) -> Any:
        with self._asked({}, key, verb, arguments) as answer:
            return await answer

    @contextmanager
    def _asked(self, options: dict[str, Any], key: str | None, verb: str, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Ray's own handle of an answer, while it is read: with its errors as those of `replicas.Replicas`, and
        cancelled by whatever else ends the reading early."""
        handle = self._handle.options(**options, **({} if key is None else {"session_id": key}))
        answer = getattr(handle, verb).remote(*arguments)
        try:
            yield answer
        except GONE as error:
            raise ReplicaDied(str(error)) from error
        except BackPressureError as error:
            raise ApiError(429, f"{error}: try again after Retry-After", kind="rate_limit_error", code="queue_full",
                           retry_s=1) from None
        except BaseException:
            answer.cancel()
            raise

    async def everywhere(self, verb: str) -> list[Any]:
        found = await self._handle.broadcast(verb).results_async()
        return [each for each in found if not isinstance(each, BaseException)]


@serve.ingress()
class Front:
    """One HTTP server.

    Args:
        memory: handle of the replicas. model: the name that requests may give.
        limits: fields of `Limits`. keys: tenants by their keys. hosts: as of `make_app`.
    """

    def __init__(self, memory: DeploymentHandle, model: str, limits: dict[str, Any], keys: dict[str, str],
                 hosts: list[str]):
        self._service = RemoteService(RayReplicas(memory), model=model, limits=msgspec.convert(limits, Limits),
                                      name=f"front-{serve.get_replica_context().replica_id.unique_id}")
        self._keys, self._hosts = keys, tuple(hosts)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve when the replica begins."""
        return make_app(self._service, self._keys, self._hosts)
