"""Where models live: one runtime for all model objects of the same settings, on an event loop of its own.

`bind`, `with_config`, `configurable_fields` and copies make new model objects all the time, so nothing that is loaded
or remembered belongs to one. Weights are loaded when something is asked of them for the first time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import locret_stream
from langchain_locret.tool_prompt import ToolPrompt
from locret_stream import ContextClosed

if TYPE_CHECKING:  # what loads torch is imported where it is used first
    from langchain_locret.threads import Threads
    from locret_stream import Runtime

T = TypeVar("T")
BOUNDARIES = 32  # snapshots of a thread that stay: how far back time travel is cheap
LEAST_BYTES = 256 << 20
CLOSED = "the model was closed meanwhile; the thread is as it was before. Expected calls to end before `close()`"
_HOMES: weakref.WeakValueDictionary[Any, Home] = weakref.WeakValueDictionary()
_LIVES: set[Life] = set()  # that are not over: at the end of the process they are waited for
_LOCK = threading.RLock()  # a garbage collector may come to `retire` from anywhere


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
    tool_prompt: ToolPrompt = "template"

    def identity(self) -> Any:
        """Equal for settings that may share a runtime."""
        parts = [self.model, *((name, id(value) if _is_object(value) else repr(value)) for name, value in self.options),
                 id(self.store) if is_store(self.store) else self.store, self.key, self.boundaries,
                 id(self.runtime), repr(self.replies), repr(self.template_options), self.tool_prompt]
        return tuple(parts)


def is_store(value: Any) -> bool:
    """Whether it is a `locret_stream.Store`; torch is not loaded to tell that a folder is none."""
    return _is_object(value) and isinstance(value, locret_stream.Store)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (str, int, float, Path, type(None)))


class Life:
    """A home from its first use until it is closed: an event loop on a thread, and what is opened there."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.threads: Threads | None = None
        self.runtime: Runtime | None = None
        self.closing = False
        self._loop, self._opening, self._over = asyncio.new_event_loop(), asyncio.Lock(), threading.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._owned = False  # the runtime was started here
        self._folder: str | None = None  # of the temporary store
        self._failed: BaseException | None = None
        self._process = os.getpid()
        with _LOCK:
            before = [life for life in _LIVES if life.closing and life.settings.identity() == settings.identity()]
            _LIVES.add(self)
        for life in before:  # its threads are not saved yet
            life.wait()
        threading.Thread(target=self._serve, name="locret-langchain", daemon=True).start()

    # -- running things ---------------------------------------------------------------------------------------

    def submit(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run on the loop; what is given is called there with the threads. Cancelling the future cancels it.

        Raises:
            ContextClosed: it is being closed, or this is a fork of its process.
        """
        _expect_own(self._process)
        with _LOCK:
            if self.closing:
                raise ContextClosed(CLOSED)
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def call(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """The same, waiting for it; Ctrl-C stops the work."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise ContextClosed(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    async def acall(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """The same for async callers on any loop."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise ContextClosed(CLOSED) from None

    async def _run(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        self._running.add(task)
        try:
            async with self._opening:
                if self.threads is None:
                    await self._load()
            return await work(self.threads)
        finally:
            self._running.discard(task)

    async def _load(self) -> None:
        settings, runtime = self.settings, self.settings.runtime
        self._owned = runtime is None or not runtime.running
        if runtime is None:
            runtime = await asyncio.to_thread(self._make)
        if self._owned:
            await runtime.__aenter__()
        try:
            from langchain_locret.render import ChatTemplate
            from langchain_locret.threads import Threads
            if settings.runtime is None and not is_store(settings.store):
                runtime.store.max_bytes = max(LEAST_BYTES, 4 * runtime.memory.slot_bytes)
            template = ChatTemplate(runtime.tokenizer, runtime.codec, runtime.frames, options=settings.template_options,
                                    tool_prompt=settings.tool_prompt)
            self.runtime = runtime
            self.threads = Threads(runtime, template, settings.replies,
                                   salt=[settings.template_options, template.in_words])
        except BaseException:
            if self._owned:
                await runtime.aclose()
            raise

    def _make(self) -> Runtime:
        settings = self.settings
        store, key = settings.store, settings.key
        if store is None:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="locret-")
            store, key = self._folder, _own_key()  # nobody can read what a crash leaves behind
        if not is_store(store):
            store = locret_stream.Store(store, key=key, keep_last=settings.boundaries)
        return locret_stream.Runtime.from_pretrained(settings.model, store=store, **dict(settings.options))

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what runs as if cancelled, save what rests at a boundary, free everything. Idempotent.

        Raises:
            ContextClosed: this is a fork of its process; nothing was touched.
        """
        _expect_own(self._process)
        self.retire()
        self.wait()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def retire(self) -> None:
        """The same without waiting: a garbage collector may call this anywhere, and in a fork of the process."""
        with _LOCK:
            if not self.closing and os.getpid() == self._process:
                self.closing = True
                asyncio.run_coroutine_threadsafe(self._close(), self._loop)

    def wait(self) -> None:
        """Until it is over."""
        self._over.wait()

    async def _close(self) -> None:
        try:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            if self.threads is not None:
                try:
                    await self.threads.close()
                finally:
                    if self._owned:
                        await self.runtime.aclose()
        except BaseException as error:
            self._failed = error
        finally:
            self.threads = self.runtime = None
            self._loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            with _LOCK:
                _LIVES.discard(self)
            self._over.set()


class Home:
    """What models of equal settings share; `Home.of` gives the one for some settings."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._living = threading.RLock()
        self._life: Life | None = None

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

    @property
    def life(self) -> Life:
        """The running one, begun if there is none."""
        with self._living:
            if self._life is None or self._life.closing:
                self._life = Life(self.settings)
                weakref.finalize(self, self._life.retire).atexit = False  # `_end` waits for it
            return self._life

    @property
    def runtime(self) -> Runtime:
        """The runtime, loaded."""
        life = self.life
        if life.threads is None:
            life.call(_nothing)
        return life.runtime

    @property
    def loaded(self) -> bool:
        return self._life is not None and not self._life.closing and self._life.threads is not None

    def close(self) -> None:
        """End what runs as if cancelled, save what rests at a boundary, close the runtime if it was started here, free
        the memory. It begins anew when it is used again. Idempotent."""
        with self._living:
            life, self._life = self._life, None
            if life is not None:
                life.retire()  # whoever begins another one sees that its threads are not saved yet
        if life is not None:
            life.close()


def _expect_own(process: int) -> None:
    """Raises ContextClosed in a fork of that process."""
    if os.getpid() != process:
        from locret_stream.worker import expect_own
        expect_own(process)


async def _nothing(threads: Threads) -> None:
    pass


def _own_key() -> bytes | None:
    return secrets.token_bytes(32) if importlib.util.find_spec("cryptography") else None


def _end() -> None:
    """At the end of the process: an engine thread must not be inside the model when the interpreter goes."""
    with _LOCK:
        lives = list(_LIVES)
    for life in lives:
        with contextlib.suppress(Exception):  # the process ends; what was acknowledged is durable
            life.close()


def _in_a_fork() -> None:
    """Nothing lives there to be waited for at its end, and the lock may be held by a thread that is not there."""
    global _LOCK
    _LOCK = threading.RLock()
    _LIVES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)

# Runs before the interpreter's thread pools stop, with which `atexit` would come too late to save anything.
getattr(threading, "_register_atexit", atexit.register)(_end)
