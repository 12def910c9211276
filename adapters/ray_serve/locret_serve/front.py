"""The HTTP server of a cluster: the routes of `serving.app` over the replicas. It holds no memory and loads no model;
any number of them is the same as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
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
        answers = getattr(self._handle.options(stream=True, **_session(key)), verb).remote(*arguments)
        ended = False
        try:
            async for each in answers:
                yield each
            ended = True
        except GONE as error:
            ended = True
            raise ReplicaDied(str(error)) from error
        except BackPressureError as error:
            raise _full(error) from None
        finally:
            if not ended:
                answers.cancel()

    async def call(self, key: str | None, verb: str, *arguments: Any) -> Any:
        answer = getattr(self._handle.options(**_session(key)), verb).remote(*arguments)
        ended = False
        try:
            found = await answer
            ended = True
            return found
        except GONE as error:
            ended = True
            raise ReplicaDied(str(error)) from error
        except BackPressureError as error:
            raise _full(error) from None
        finally:
            if not ended:
                answer.cancel()

    async def everywhere(self, verb: str) -> list[Any]:
        found = await self._handle.broadcast(verb).results_async()
        return [each for each in found if not isinstance(each, BaseException)]


def _session(key: str | None) -> dict[str, str]:
    return {} if key is None else {"session_id": key}


def _full(error: Exception) -> ApiError:
    return ApiError(429, f"{error}: try again after Retry-After", kind="rate_limit_error", code="queue_full", retry_s=1)


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
