"""What a front knows of those that hold memories: how to reach them, and that they die. Nothing here knows Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from locret_stream.serving.errors import ApiError

DIED = "replica_died"


class ReplicaDied(Exception):
    """The replica that had a request is gone. Whether it did the work is not known."""


class Replicas(Protocol):
    """The replicas of `memory.Memory`, by the sessions that they hold.

    `key` is the thread that a request names: those of one key go to one replica, as long as it lives. None: to any.
    A refusal comes as a value, an `ApiError`, so that it crosses processes as it is.
    """

    def stream(self, key: str | None, verb: str, *arguments: Any) -> AsyncGenerator[Any]:
        """What a streaming method of a replica yields. Closing it cancels the method. Raises ReplicaDied."""

    async def call(self, key: str | None, verb: str, *arguments: Any) -> Any:
        """What a method of a replica returns. Cancelling it cancels the method. Raises ReplicaDied."""

    async def everywhere(self, verb: str) -> list[Any]:
        """What a method of every replica returns."""


def died(message: str) -> ApiError:
    """The refusal of a request whose replica died, and that cannot be gone on with."""
    return ApiError(503, message, kind="server_error", code=DIED, retry_s=1)
