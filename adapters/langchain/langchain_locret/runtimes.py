"""One runtime for all model objects of the same settings, on an event loop of its own.

`bind`, `with_config`, `configurable_fields` and copies make new model objects all the time, so a model object owns
nothing that is loaded or remembered. Weights are loaded at the first call that needs them.
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
from langchain_locret.seen import Seen
from locret_stream import ContextClosed
from locret_stream.conversation.request import current_task
from locret_stream.conversation.tool_prompt import ToolPrompt

if TYPE_CHECKING:  # these load torch, and are imported where they are first used
    from locret_stream import Runtime
    from locret_stream.conversation.threads import Threads

T = TypeVar("T")
BOUNDARIES = 32  # snapshots that a thread keeps: how far back a history may go without being read again
CLOSED = "the model was closed meanwhile; the thread is as it was before. Expected calls to end before `close()`"
_SHARED: weakref.WeakValueDictionary[Any, SharedRuntime] = weakref.WeakValueDictionary()  # by identity of settings
_LOOPS: set[RuntimeLoop] = set()  # that have not ended: the end of the process waits for them
_LOCK = threading.RLock()  # reentrant, as the garbage collector may call `retire` anywhere


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is made of: models of equal settings share one.

    Args:
        options: of `Runtime.from_pretrained`.
        runtime: one that the user made; only the settings of the template matter beside it.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()
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
    """Whether it is a `locret_stream.Store`; torch is not loaded to see that a folder is none."""
    return _is_object(value) and isinstance(value, locret_stream.Store)


def is_recall(value: Any) -> bool:
    """Whether it is a `locret_stream.Recall`."""
    return isinstance(value, locret_stream.Recall)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (str, int, float, tuple, Path, type(None), msgspec.Struct))


class RuntimeLoop:
    """An event loop on an OS thread of its own, and the runtime and the threads that are opened on it, from first use
    until it is closed.

    Attributes:
        threads, runtime: None until the weights are loaded, and after closing.
        closing: it takes no more calls.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.threads: Threads | None = None
        self.runtime: Runtime | None = None
        self.closing = False
        self._loop, self._opening, self._ended = asyncio.new_event_loop(), asyncio.Lock(), threading.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._owned = False  # the runtime was started here
        self._folder: str | None = None  # of the temporary store
        self._failed: BaseException | None = None
        self._process = os.getpid()
        with _LOCK:
            before = [loop for loop in _LOOPS if loop.closing and loop.settings.identity() == settings.identity()]
            _LOOPS.add(self)
        for loop in before:  # its threads are not saved yet
            loop.wait()
        threading.Thread(target=self._serve, name="locret-langchain", daemon=True).start()

    # -- running things ---------------------------------------------------------------------------------------

    def submit(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> Future[T]:
        """Call `work` on the loop with the threads, and run what it returns. Cancelling the future cancels that.

        Raises:
            ContextClosed: the loop is being closed, or this is a fork of its process.
        """
        _expect_own(self._process)
        with _LOCK:
            if self.closing:
                raise ContextClosed(CLOSED)
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def call(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """As `submit`, waiting for the result; Ctrl-C cancels the work."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise ContextClosed(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    async def acall(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        """As `call`, for async callers on any event loop."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError:
            if current_task().cancelling():
                raise
            raise ContextClosed(CLOSED) from None

    async def _run(self, work: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
        task = current_task()
        self._running.add(task)
        try:
            async with self._opening:
                if self.threads is None:
                    self.threads = await self._load()
                threads = self.threads
            return await work(threads)
        finally:
            self._running.discard(task)

    async def _load(self) -> Threads:
        """The runtime, loaded and started unless the user did; its threads."""
        settings, runtime = self.settings, self.settings.runtime
        self._owned = runtime is None or not runtime.running
        if runtime is None:
            runtime = await asyncio.to_thread(self._make)
        if self._owned:
            await runtime.__aenter__()
        try:
            from locret_stream.conversation.render import ChatTemplate
            from locret_stream.conversation.threads import Threads, bound_threads
            if settings.runtime is None and not is_store(settings.store):
                bound_threads(runtime)
            template = ChatTemplate(runtime.tokenizer, runtime.codec, runtime.frames, options=settings.template_options,
                                    tool_prompt=settings.tool_prompt)
            self.runtime = runtime
            return Threads(runtime, template, settings.replies, salt=[None, template.key])
        except BaseException:
            if self._owned:
                await runtime.aclose()
            raise

    def _make(self) -> Runtime:
        settings = self.settings
        store = settings.store
        key: bytes | str | None = settings.key
        if store is None:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="locret-")
            store = self._folder
            if importlib.util.find_spec("cryptography"):  # so that nobody can read what a crash leaves behind
                key = secrets.token_bytes(32)
        if not is_store(store):
            store = locret_stream.Store(store, key=key, keep_last=settings.boundaries)
        options = {"acknowledge": None, **dict(settings.options)}  # messages have turns of their own
        return locret_stream.Runtime.from_pretrained(settings.model, store=store, **options)

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the calls that run, save the threads that rest at a boundary, free everything. Idempotent.

        Raises:
            ContextClosed: this is a fork of its process; nothing was touched.
            Exception: closing failed.
        """
        _expect_own(self._process)
        self.retire()
        self.wait()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def retire(self) -> None:
        """Begin to close, without waiting: the garbage collector may call this anywhere, also in a fork of the process.
        """
        with _LOCK:
            if not self.closing and os.getpid() == self._process:
                self.closing = True
                asyncio.run_coroutine_threadsafe(self._close(), self._loop)

    def wait(self) -> None:
        """Wait until it is closed."""
        self._ended.wait()

    async def _close(self) -> None:
        try:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            if self.threads is not None and self.runtime is not None:
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
                _LOOPS.discard(self)
            self._ended.set()


class SharedRuntime:
    """The runtime that models of equal settings share, loaded or not; `SharedRuntime.of` gives it. It closes when no
    model is left that has it."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._guard = threading.RLock()  # of `_loop`
        self._loop: RuntimeLoop | None = None
        self.seen = Seen()

    @classmethod
    def of(cls, settings: Settings) -> SharedRuntime:
        with _LOCK:
            shared = _SHARED.get(settings.identity())
            if shared is None:
                shared = _SHARED[settings.identity()] = cls(settings)
            return shared

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRuntime:
        return self

    def __reduce__(self) -> Any:
        return SharedRuntime.of, (self.settings,)

    @property
    def loop(self) -> RuntimeLoop:
        """The loop that runs, started if there is none."""
        with self._guard:
            if self._loop is None or self._loop.closing:
                self._loop = RuntimeLoop(self.settings)
                weakref.finalize(self, self._loop.retire).atexit = False  # `_close_all` waits for it
            return self._loop

    @property
    def runtime(self) -> Runtime:
        """The runtime, loaded."""
        loop = self.loop
        if loop.threads is None:
            loop.call(load)
        assert loop.runtime is not None
        return loop.runtime

    @property
    def loaded(self) -> bool:
        return self._loop is not None and not self._loop.closing and self._loop.threads is not None

    def close(self) -> None:
        """Cancel the calls that run, save the threads that rest at a boundary, close the runtime if it was started
        here, free the memory. Used again, it loads again. Idempotent."""
        with self._guard:
            loop, self._loop, self.seen = self._loop, None, Seen()
            if loop is not None:
                loop.retire()  # a loop that starts meanwhile then waits until this one's threads are saved
        if loop is not None:
            loop.close()


def _expect_own(process: int) -> None:
    """Raises ContextClosed in a fork of that process."""
    if os.getpid() != process:
        from locret_stream.worker import expect_own
        expect_own(process)


async def load(threads: Threads) -> None:
    """Does nothing: to `call` it loads the runtime."""


def _close_all() -> None:
    """At the end of the process: an engine thread must not be inside the model when the interpreter ends."""
    with _LOCK:
        loops = list(_LOOPS)
    for loop in loops:
        with contextlib.suppress(Exception):  # the process ends; what was acknowledged is durable
            loop.close()


def _in_a_fork() -> None:
    """A fork of the process has no loop to wait for at its end, and no thread that would release the lock."""
    global _LOCK
    _LOCK = threading.RLock()
    _LOOPS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)

# Runs before the interpreter's thread pools stop, with which `atexit` would come too late to save anything.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
