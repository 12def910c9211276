"""A server on a free port of this machine, in a thread, over the scripted engine of `tests.langchain.support`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import uvicorn.server
from openai import DefaultHttpxClient, OpenAI

from locret_stream import Store
from locret_stream.serving.app import make_app
from locret_stream.serving.limits import Limits
from locret_stream.serving.server import Server
from locret_stream.serving.service import Service
from tests.langchain.support import runtime, tokenizer

MODEL = "scripted"
S = TypeVar("S", bound="Served")

# Servers here speak plain HTTP, but each client reads all certificates when it is made: 60 ms.
ssl.create_default_context = cache(ssl.create_default_context)
# uvicorn looks ten times a second whether it shall end, and waits a tenth of one for connections that close.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda delay_s: asyncio.sleep(delay_s / 10)})


@dataclass
class Reached:
    """A server that runs somewhere, and how to reach it."""

    url: str
    key: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60,
                      http_client=DefaultHttpxClient(verify=False), **options)

    @cached_property
    def http(self) -> httpx.Client:
        """A client that gives the key; closed with the server."""
        headers = {} if self.key == "none" else {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)


@dataclass
class Served(Reached):
    """One that runs in this process, and what is behind it."""

    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop

    def held(self, thread: str) -> str:
        """All tokens of an open session's memory, as text."""
        context = self.service.threads.named(thread).ctx
        assert context is not None
        return tokenizer().decode(context._session.state.history, skip_special_tokens=False,
                                  clean_up_tokenization_spaces=False)

    def do(self, work: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@contextmanager
def running(make: Callable[[], AbstractAsyncContextManager[Any]], kind: type[S], *,
            keys: dict[str, str] | None = None, key: str = "none") -> Iterator[S]:
    """A server of such a service, in a thread; ended as SIGTERM ends one."""
    up, failed, found = threading.Event(), list[BaseException](), list[S]()

    async def run() -> None:
        async with make() as service:
            def listening(port: int) -> None:
                found.append(kind(f"http://127.0.0.1:{port}", key, service, server, asyncio.get_running_loop()))
                up.set()

            server = Server(make_app(service, keys), service, host="127.0.0.1", port=0, grace_s=30, listening=listening)
            await server.serve()

    def in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
        up.set()

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    assert up.wait(60) and not failed and found, failed
    (served,) = found
    try:
        with contextlib.closing(served.http):
            yield served
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed: the test has ended it
            served.loop.call_soon_threadsafe(served.server._drain, 0)
        thread.join(60)
        assert not thread.is_alive() and not failed, failed


@contextmanager
def serving(store: Path, *, limits: Limits | None = None, keys: dict[str, str] | None = None, key: str = "none",
            **options: Any) -> Iterator[Served]:
    """A server whose sessions are in that folder."""
    @asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        yield Service(runtime(Store(store, keep_last=32), **options), model=MODEL, limits=limits)

    with running(make, Served, keys=keys, key=key) as served:
        yield served
