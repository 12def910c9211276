"""One context in a runtime of its own: `open_context` for async code, `SyncContext` for scripts and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from locret_stream.config import Recall
from locret_stream.context import FeedReport, Generation, Memory, Recalled, StreamingContext, Token
from locret_stream.context.sources import Source
from locret_stream.context.values import Answer, FinishReason
from locret_stream.errors import ContextBusy, ContextClosed
from locret_stream.runtime import Runtime
from locret_stream.snapshot import Snapshot
from locret_stream.worker import expect_own

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_context(model: str | Path = "bundled", *, name: str | None = None, system: str | None = None,
                       raw: bool | None = None, trusted: bool = False, focus: str | None = None,
                       **options: Any) -> AsyncIterator[StreamingContext]:
    """One context in a runtime that is made for it: `async with open_context("bundled") as ctx: ...`. Options are those
    of `Runtime.from_pretrained`."""
    options.setdefault("max_live", 1)
    async with Runtime.from_pretrained(model, **options) as runtime:
        async with runtime.open(name, system=system, raw=raw, trusted=trusted, focus=focus) as ctx:
            yield ctx


class SyncContext:
    """One context for scripts and notebooks, without async: its event loop runs on a thread.

        with SyncContext("bundled") as ctx:
            ctx.feed(open("build.log"))
            print(ctx.ask("What broke the build?"))
    """

    def __init__(self, model: str | Path = "bundled", **options: Any):
        """Arguments are those of `open_context`."""
        self._opened = open_context(model, **options)
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="locret-sync", daemon=True)
        self._ctx: StreamingContext | None = None

    def _run(self, call: Callable[[StreamingContext], Awaitable[T]]) -> T:
        """The result of a call of the context, which the loop's thread runs while this one waits."""
        ctx = self._context()
        if threading.current_thread() is self._thread:
            raise ContextBusy("this call came from the source or the on_token of another call of this SyncContext, "
                              "which would wait for it for ever; expected one call after another, or `open_context`")
        return self._wait(call(ctx))

    def _wait(self, awaitable: Awaitable[T]) -> T:
        running: list[asyncio.Task[Any]] = []

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            running.append(task)
            return await awaitable

        async def rest() -> None:
            if running:
                await asyncio.wait(running)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the caller's thread: stop the work too, and wait until it has ended
            if future.cancel():
                asyncio.run_coroutine_threadsafe(rest(), self._loop).result()
            raise

    def __enter__(self) -> SyncContext:
        expect_own(self._process)
        if self._thread.ident is not None:
            raise ContextClosed("this SyncContext was entered before, and can be entered once; expected a new one: "
                                "`with SyncContext(...) as ctx`")
        self._thread.start()
        try:
            self._ctx = self._wait(self._opened.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        expect_own(self._process)  # a fork shares the loop's file descriptors with this process
        try:
            self._wait(self._opened.__aexit__(kind, error, trace))
        finally:
            self._ctx = None
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _context(self) -> StreamingContext:
        expect_own(self._process)
        if self._ctx is None:
            raise ContextClosed("this context is not open; expected a call inside `with SyncContext(...) as ctx`")
        return self._ctx

    def feed(self, source: Source) -> FeedReport:
        """Take in a whole source; as `StreamingContext.feed`."""
        return self._run(lambda ctx: ctx.feed(source))

    def push(self, piece: str | bytes | list[int]) -> int:
        """As `StreamingContext.push`."""
        return self._run(lambda ctx: ctx.push(piece))

    def flush(self) -> int:
        """As `StreamingContext.flush`."""
        return self._run(lambda ctx: ctx.flush())

    def discard(self) -> int:
        """As `StreamingContext.discard`."""
        return self._run(lambda ctx: ctx.discard())

    def focus(self, text: str | None) -> None:
        """As `StreamingContext.focus`."""
        self._run(lambda ctx: ctx.focus(text))

    def ask(self, question: str, **options: Any) -> Answer:
        """As `StreamingContext.ask`."""
        return self._run(lambda ctx: ctx.ask(question, **options))

    def recall(self, question: str, recall: Recall | None = None) -> tuple[Recalled, ...]:
        """As `StreamingContext.recall`."""
        return self._run(lambda ctx: ctx.recall(question, recall))

    def generate(self, prompt: str | None = None, **options: Any) -> SyncGeneration:
        """As `StreamingContext.generate`; an ordinary iterator of tokens."""
        reply = self._context().generate(prompt, **options)
        return SyncGeneration(self._tokens(reply), reply, lambda: self._close(reply))

    def _tokens(self, reply: Generation) -> Generator[Token, None, None]:
        try:
            while (token := self._run(lambda _: anext(reply, None))) is not None:
                yield token
        finally:
            self._leave(reply)

    def _leave(self, reply: Generation) -> None:
        """End a reply before whatever is called next. It waits for nothing: the garbage collector may call it, on any
        thread and at any moment."""
        if self._ctx is None or os.getpid() != self._process:  # the end of the block ended it; a fork has no loop
            return
        ending = reply.aclose()
        try:
            asyncio.run_coroutine_threadsafe(ending, self._loop)
        except RuntimeError:  # the block ended at this moment
            ending.close()

    def _close(self, reply: Generation) -> None:
        if self._ctx is not None:  # a reply may outlive the block, which ended it then
            self._run(lambda _: reply.aclose())

    def snapshot(self) -> Snapshot:
        """As `StreamingContext.snapshot`."""
        return self._run(lambda ctx: ctx.snapshot())

    def rewind(self, generation: int | Snapshot) -> None:
        """As `StreamingContext.rewind`."""
        self._run(lambda ctx: ctx.rewind(generation))

    def save_as(self, name: str) -> Snapshot:
        """As `StreamingContext.save_as`."""
        return self._run(lambda ctx: ctx.save_as(name))

    @property
    def memory(self) -> Memory:
        """As `StreamingContext.memory`."""
        return self._context().memory


class SyncGeneration(Iterator[Token]):
    """A running reply of a `SyncContext`: an iterator of its tokens. It ends with its last one, when it is closed, and
    when it is dropped."""

    def __init__(self, tokens: Generator[Token, None, None], reply: Generation, end: Callable[[], None]):
        self._tokens, self._reply, self._end = tokens, reply, end

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End it here, as a `break` does. Idempotent."""
        self._tokens.close()
        self._end()  # also where no token was taken yet: a generator that never began has nothing to end

    @property
    def text(self) -> str:
        """The reply so far."""
        return self._reply.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs; "closed" when it was left before its end."""
        return self._reply.finish_reason

    @property
    def recalled(self) -> tuple[Recalled, ...]:
        """The passages that were read again before the prompt."""
        return self._reply.recalled
