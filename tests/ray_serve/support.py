"""A front over several services in one process, which share nothing but the store; each of them can be lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locret_serve.memory import Memory
from locret_serve.remote import RemoteService
from locret_serve.replicas import ReplicaDied
from locret_stream import Store
from locret_stream.serving.limits import Limits
from locret_stream.serving.service import Service
from tests.langchain.support import runtime
from tests.serving.support import MODEL, Served, running


class Lost(Exception):
    """Raised inside a call of a replica that is lost."""


@dataclass
class LocalReplicas:
    """`Replicas` in this process. A replica that is lost answers nothing more, and what it does is never seen; it goes
    on with it all the same, as one does that is cut off.

    Attributes:
        routes: the replica of a key, where it is not its hash's.
        asked: (key, number of the replica, verb) of every call.
        on_part: called with the number of the replica for every part of an answer that arrives.
    """

    memories: list[Memory]
    lost: set[int] = field(default_factory=set)
    routes: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str | None, int, str]] = field(default_factory=list)
    on_part: Callable[[int], None] = lambda number: None
    cut_off: list[Any] = field(default_factory=list)

    def number(self, key: str | None, verb: str) -> int:
        up = [number for number in range(len(self.memories)) if number not in self.lost]
        if not up:
            raise ReplicaDied("all are lost")
        number = self.routes.get(key or "", up[sum((key or "").encode()) % len(up)])
        self.asked.append((key, number, verb))
        if number in self.lost:
            raise ReplicaDied(f"replica {number} is lost")
        return number

    async def stream(self, key: str | None, verb: str, *arguments: Any) -> AsyncGenerator[Any]:
        number = self.number(key, verb)
        parts = getattr(self.memories[number], verb)(*arguments)
        try:
            async for part in parts:
                self.on_part(number)
                if number in self.lost:
                    raise ReplicaDied(f"replica {number} is lost")
                yield part
        finally:
            if number in self.lost:
                self.cut_off.append(parts)
            else:
                await parts.aclose()

    async def call(self, key: str | None, verb: str, *arguments: Any) -> Any:
        number = self.number(key, verb)
        found = await getattr(self.memories[number], verb)(*arguments)
        self.on_part(number)
        if number in self.lost:
            raise ReplicaDied(f"replica {number} is lost")
        return found

    async def everywhere(self, verb: str) -> list[Any]:
        return [await getattr(memory, verb)() for number, memory in enumerate(self.memories) if number not in self.lost]

    async def end(self) -> None:
        for parts in self.cut_off:
            async with aclosing(parts):
                pass
        for memory in self.memories:
            await memory.service.aclose()


@dataclass
class Many(Served):
    """A front, and the replicas behind it."""

    service: RemoteService  # type: ignore[assignment]  # which has nothing of what is behind it

    @property
    def replicas(self) -> LocalReplicas:
        assert isinstance(self.service.replicas, LocalReplicas)
        return self.service.replicas


@contextmanager
def cluster(store: Path, *, count: int = 2, limits: Limits | None = None, keys: dict[str, str] | None = None,
            key: str = "none", **options: Any) -> Iterator[Many]:
    """A front over that many replicas, whose sessions are in that folder."""
    @asynccontextmanager
    async def make() -> AsyncIterator[RemoteService]:
        services = [Service(runtime(Store(store, keep_last=32), **options), model=MODEL, limits=limits)
                    for _ in range(count)]
        for number, each in enumerate(services):
            each.expires = number == 0
            await each.start()
        replicas = LocalReplicas([Memory(each, f"r{number}", bundle_s=0) for number, each in enumerate(services)])
        yield RemoteService(replicas, model=MODEL, limits=limits)
        await replicas.end()

    with running(make, Many, keys=keys, key=key) as served:
        yield served
