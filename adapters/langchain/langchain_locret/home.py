"""Where models live: one runtime for all model objects of the same settings, on an event loop of its own.

`bind`, `with_config`, `configurable_fields` and copies make new model objects all the time, so nothing that is loaded
or remembered belongs to one. Weights are loaded when something is asked of them for the first time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from langchain_locret.render import ChatTemplate
from langchain_locret.threads import Threads
from locret_stream import Runtime, Store

T = TypeVar("T")
BOUNDARIES = 32  # snapshots of a thread that stay: how far back time travel is cheap
LEAST_BYTES = 256 << 20
_HOMES: weakref.WeakValueDictionary[Any, Home] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is made of: models of equal settings share one.

    runtime: one that the user made; then only the template's settings matter beside it.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()  # of Runtime.from_pretrained
    store: Any = None
    key: str | None = None
    boundaries: int = BOUNDARIES
    runtime: Any = None
    replies: dict[str, Any] | None = None
    template_options: dict[str, Any] | None = None

    def identity(self) -> Any:
        """Equal for settings that may share a runtime."""
        parts = [self.model, *((name, id(value) if _is_object(value) else repr(value)) for name, value in self.options),
                 id(self.store) if isinstance(self.store, Store) else str(self.store), self.key, self.boundaries,
                 id(self.runtime), repr(self.replies), repr(self.template_options)]
        return tuple(parts)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (str, int, float, Path, type(None)))


class Open:
    """What a home has opened; kept apart from it, so that it can be closed when nobody holds the home any more."""

    def __init__(self) -> None:
        self.threads: Threads | None = None
        self.runtime: Runtime | None = None
        self.owned = False  # the runtime was started here
        self.folder: str | None = None  # of the temporary store
        self.running: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """End what runs as if cancelled, save what rests at a boundary, free everything."""
        for task in self.running:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)
        threads, self.threads = self.threads, None
        try:
            if threads is not None:
                try:
                    await threads.close()
                finally:
                    if self.owned:
                        await self.runtime.aclose()
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


class Home:
    """A runtime, its threads and its event loop; `Home.of` gives the one for some settings."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = Open()

    @classmethod
    def of(cls, settings: Settings) -> Home:
        with _LOCK:
            home = _HOMES.get(settings.identity())
            if home is None:
                home = _HOMES[settings.identity()] = cls(settings)
            return home

    def __deepcopy__(self, memo: dict[int, Any]) -> Home:
        return self

    def __reduce__(self) -> Any:
        return Home.of, (self.settings,)

    # -- running things ---------------------------------------------------------------------------------------

    def submit(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run on the loop; what is given is called there with the threads. Cancelling the future cancels it."""
        with self._starting:
            if self._loop is None:
                self._start()

            return asyncio.run_coroutine_threadsafe(self._run(work, self._open), self._loop)

    async def _run(self, work: Callable[[Threads], Coroutine[Any, Any, T]], found: Open) -> T:
        task = asyncio.current_task()
        found.running.add(task)
        try:
            return await work(await self._ready())
        finally:
            found.running.discard(task)

    def call(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """The same, waiting for it; Ctrl-C stops the work."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """The same for async callers on any loop."""
        return await asyncio.wrap_future(self.submit(work))

    @property
    def runtime(self) -> Runtime:
        """The runtime, loaded."""
        if not self.loaded:
            self.call(_nothing)
        return self._open.runtime

    @property
    def loaded(self) -> bool:
        return self._open.threads is not None

    def _start(self) -> None:
        self._loop, self._opening, self._open = asyncio.new_event_loop(), asyncio.Lock(), Open()
        threading.Thread(target=_serve, args=(self._loop,), name="locret-langchain", daemon=True).start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._open)
        self._finalizer.atexit = False  # `_end` has closed it by then

    async def _ready(self) -> Threads:
        async with self._opening:
            if self._open.threads is None:
                await self._load()
            return self._open.threads

    async def _load(self) -> None:
        settings, runtime, found = self.settings, self.settings.runtime, self._open
        found.owned = runtime is None or not runtime.running
        if runtime is None:
            runtime = await asyncio.to_thread(self._make)
        if found.owned:
            await runtime.__aenter__()
        try:
            if settings.runtime is None and not isinstance(settings.store, Store):
                runtime.store.max_bytes = max(LEAST_BYTES, 4 * runtime.memory.slot_bytes)
            template = ChatTemplate(runtime.tokenizer, runtime.codec, runtime.frames, options=settings.template_options)
            found.runtime = runtime
            found.threads = Threads(runtime, template, settings.replies, salt=settings.template_options)
        except BaseException:
            if found.owned:
                await runtime.aclose()
            raise

    def _make(self) -> Runtime:
        settings = self.settings
        store, key = settings.store, settings.key
        if store is None:
            if self._open.folder is None:
                self._open.folder = tempfile.mkdtemp(prefix="locret-")
            store, key = self._open.folder, _own_key()  # nobody can read what a crash leaves behind
        if not isinstance(store, Store):
            store = Store(Path(store).expanduser() if "://" not in str(store) else store, key=key,
                          keep_last=settings.boundaries)
        return Runtime.from_pretrained(settings.model, store=store, **dict(settings.options))

    def close(self) -> None:
        """End what runs as if cancelled, save what rests at a boundary, close the runtime if it was started here, free
        the memory. It starts again when it is used again. Idempotent."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            self._finalizer.detach()
            try:
                asyncio.run_coroutine_threadsafe(self._open.close(), loop).result()
            finally:
                loop.call_soon_threadsafe(loop.stop)


async def _nothing(threads: Threads) -> None:
    pass


def _own_key() -> bytes | None:
    return secrets.token_bytes(32) if importlib.util.find_spec("cryptography") else None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, found: Open) -> None:
    """Of a home that nobody holds any more."""
    async def close() -> None:
        try:
            await found.close()
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)


def _end() -> None:
    """At the end of the process: an engine thread must not be inside the model when the interpreter goes."""
    for home in list(_HOMES.values()):
        with contextlib.suppress(Exception):  # the process ends; what was acknowledged is durable
            home.close()


# Runs before the interpreter's thread pools stop, with which `atexit` would come too late to save anything.
getattr(threading, "_register_atexit", atexit.register)(_end)
