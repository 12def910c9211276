"""Where models live: one runtime for all model objects of the same settings, on an event loop of its own.

`bind`, `with_config`, `configurable_fields` and copies make new model objects all the time, so nothing that is loaded
or remembered belongs to one. Weights are loaded when something is asked of them for the first time.
"""

from __future__ import annotations

import asyncio
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


class Home:
    """A runtime, its threads and its event loop; `Home.of` gives the one for some settings."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: Threads | None = None
        self._runtime: Runtime | None = None

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
        self._start()

        async def run() -> T:
            return await work(await self._ready())

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

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
        if self._runtime is None or not self._runtime.running:
            self.call(_nothing)
        return self._runtime

    @property
    def loaded(self) -> bool:
        return self._threads is not None

    def _start(self) -> None:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._opening = None
                threading.Thread(target=_serve, args=(self._loop,), name="locret-langchain", daemon=True).start()
                self._finalizer = weakref.finalize(self, _stop, self._loop)

    async def _ready(self) -> Threads:
        if self._threads is None:
            if self._opening is None:
                self._opening = asyncio.Lock()
            async with self._opening:
                if self._threads is None:
                    await self._open()
        return self._threads

    async def _open(self) -> None:
        settings, runtime = self.settings, self.settings.runtime
        self._owned = runtime is None or not runtime.running
        if runtime is None:
            runtime = await asyncio.to_thread(self._make)
        if self._owned:
            await runtime.__aenter__()
        try:
            if settings.runtime is None and runtime.store.max_bytes is None:
                runtime.store.max_bytes = max(LEAST_BYTES, 4 * runtime.memory.slot_bytes)
            template = ChatTemplate(runtime.tokenizer, runtime.codec, runtime.frames, options=settings.template_options)
            self._runtime = runtime
            self._threads = Threads(runtime, template, settings.replies, salt=settings.template_options)
        except BaseException:
            if self._owned:
                await runtime.aclose()
            raise

    def _make(self) -> Runtime:
        settings = self.settings
        store, key = settings.store, settings.key
        if store is None:
            folder = tempfile.mkdtemp(prefix="locret-")
            self._folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            store, key = folder, _own_key()  # nobody can read what a crash leaves behind
        if not isinstance(store, Store):
            store = Store(Path(store).expanduser() if "://" not in str(store) else store, key=key,
                          keep_last=settings.boundaries)
        return Runtime.from_pretrained(settings.model, store=store, **dict(settings.options))

    # -- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save what rests at a boundary, close the runtime if it was made here, free the memory. It starts again when
        it is used again. Idempotent."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        finally:
            self._finalizer()

    async def _close(self) -> None:
        threads, self._threads, runtime = self._threads, None, self._runtime
        if threads is not None:
            await threads.close()
            if self._owned:
                await runtime.aclose()
        with contextlib.suppress(AttributeError):
            self._folder()


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


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
