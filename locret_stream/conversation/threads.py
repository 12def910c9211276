"""The threads of one runtime: which this process has at hand, and who may use one when.

A turn has its thread alone (`Threads.exclusive`), and a place at the gate while it uses the runtime.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeVar

from locret_stream.context.cancelling import to_the_end
from locret_stream.context.tokenizing import tokenized
from locret_stream.conversation.boundaries import full_name, session_name
from locret_stream.conversation.histories import Keys
from locret_stream.conversation.messages import canonical, digest
from locret_stream.conversation.probes import Piece
from locret_stream.conversation.render import ChatTemplate
from locret_stream.conversation.request import Request, within
from locret_stream.conversation.thinking import options_for
from locret_stream.conversation.thread import Thread
from locret_stream.errors import ConfigError, SnapshotNotFound
from locret_stream.runtime import Runtime

T = TypeVar("T")
LEAST_BYTES = 256 << 20  # that a thread may take in the store; of a large memory, four snapshots
MOST_OPTIONS = 8  # of requests, that stay at hand
THREADS = 64  # threads that stay at hand; others are looked up in the store again


def bound_threads(runtime: Runtime) -> None:
    """Limit what a thread takes in the store of a running runtime, unless the store has a limit already."""
    store = runtime.store
    if store is not None and store.max_bytes is None:
        store.max_bytes = max(LEAST_BYTES, 4 * runtime.memory.slot_bytes)


def _digest_of(template: ChatTemplate) -> bytes:
    held = template.held_options
    return digest(canonical(held))[:16] if held else b""


class Absorbing(Protocol):
    """A stream that is being absorbed (`absorbing.Absorption`)."""

    async def abort(self) -> None:
        """Undo it and release its thread."""


class Threads:
    """All threads of one runtime. Every method runs on one event loop.

    Args:
        template: of the runtime's tokenizer.
        replies: the response template, None for the tokenizer's own.
        salt: what else the digests of messages depend on, as JSON.

    Attributes:
        gate: lets as many turns through as there are slots; more wait in order.
        absorbing: streams under way; each has a thread, also while none of its calls runs.
    """

    def __init__(self, runtime: Runtime, template: ChatTemplate, replies: dict[str, Any] | None, *, salt: Any = None):
        self.runtime, self.template, self.replies = runtime, template, replies
        source = template.frames.template or runtime.tokenizer.chat_template
        if isinstance(source, Mapping):  # by name, read from files in whatever order a folder lists them
            source = dict(sorted(source.items(), key=lambda named: (named[0] != "default", named[0])))
        self._salt = canonical([salt, str(source)])
        self.gate = asyncio.Semaphore(runtime.max_live)
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._nameless: list[Thread] = []  # oldest first
        self.absorbing: set[Absorbing] = set()
        self._with_options: OrderedDict[bytes, ChatTemplate] = OrderedDict()
        self._making = threading.Lock()  # guards it: conversations are rendered on other threads, too

    def template_of(self, request: Request) -> ChatTemplate:
        """The template with the options of a request. Raises ConfigError: they are none."""
        return self._optional(request)

    def held_options(self, request: Request) -> bytes:
        """[16], the digest of those options, of the process and of a request, that change what a memory holds, and not
        just the generation prompt; b"" without any. A memory begins with them, and goes on with no others."""
        return _digest_of(self._optional(request))

    @functools.cached_property
    def own_options(self) -> bytes:
        """As `held_options`, of a request without any."""
        return _digest_of(self.template)

    def without_effect(self, request: Request) -> list[str]:
        """What a request asks for that the template has no option for, as `thinking.options_for`."""
        return self._options(request)[1]

    def _options(self, request: Request) -> tuple[dict[str, Any], list[str]]:
        return options_for(request.options, request.think, self.template.variables, request.think_field)

    def _optional(self, request: Request) -> ChatTemplate:
        options, _ = self._options(request)
        if not options:
            return self.template
        key = canonical(options)
        with self._making:
            if key not in self._with_options:
                self._with_options[key] = self.template.with_options(options)
                while len(self._with_options) > MOST_OPTIONS:
                    self._with_options.popitem(last=False)
            self._with_options.move_to_end(key)
            return self._with_options[key]

    @asynccontextmanager
    async def exclusive(self, request: Request) -> AsyncIterator[Thread]:
        """The request's thread, for this turn alone. After the turn it rests at a boundary; failed, cancelled, or left
        before the end of its answer was taken, it is as it was."""
        thread = self.named(request.thread) if request.thread is not None else self._nameless_for(request)
        async with thread.in_use(), thread.lock:
            try:
                async with self.gate:
                    thread.keep_slot()
                    await thread.look_up()
                    yield thread
                    await to_the_end(self.rest(thread))
                if request.delivery is not None:
                    await request.delivery.wait(lambda: thread.users > 1)
            except BaseException:
                await to_the_end(self.undo(thread))
                raise
            thread.settle()

    async def tokenized(self, pieces: Sequence[Piece], work: Callable[[], T]) -> T:
        """The result of `work`, which tokenises pieces of a rendering, as `context.tokenizing.tokenized`."""
        return await tokenized(self.runtime, sum(len(piece.text) for piece in pieces), work)

    async def undo(self, thread: Thread) -> None:
        """Remove what this turn fed to the thread, which then rests at a boundary that it had before."""
        await thread.undo()
        await self.rest(thread)

    async def rest(self, thread: Thread) -> None:
        """After a turn: let the thread rest, and close threads that were not used for long."""
        await thread.rest()
        await self._retire()

    def named(self, name: str) -> Thread:
        """The thread of that name, whether anything of it is at hand or stored, or nothing."""
        session = session_name(name)
        thread = self._threads.get(session)
        if thread is None:
            self._drop_empty()
            thread = self._threads[session] = Thread(
                self.runtime, session if self.runtime.store is not None else None, name=full_name(name))
        self._threads.move_to_end(session)
        return thread

    def _drop_empty(self) -> None:
        """Drop threads of which nothing is at hand: whoever looks for names that nobody has leaves one behind each."""
        for session, thread in list(self._threads.items())[:-2 * THREADS]:
            if not thread.users and not thread.open and thread.lost is None:
                del self._threads[session]

    def _nameless_for(self, request: Request) -> Thread:
        """A memory without a name that holds the beginning of the request's messages, or a new one."""
        free = {live.key: thread for thread in reversed(self._nameless)
                if not thread.users and (live := thread.live) is not None}
        keys = Keys(self.start(request, None), request.said) if free else ()
        held = next((key for count in range(len(keys) - 1, 0, -1) if (key := keys[count]) in free), None)
        thread = Thread(self.runtime, None) if held is None else free[held]
        self._nameless = [other for other in self._nameless if other is not thread] + [thread]
        return thread

    async def _retire(self) -> None:
        """Close what was not used for long; stored threads are looked up again. One that cannot be saved stays."""
        for thread in [thread for thread in self._nameless if not thread.users][:-self.runtime.max_live]:
            if thread.users or thread not in self._nameless:  # another call uses it, or retired it
                continue
            self._nameless.remove(thread)
            await thread.close()
        for session, thread in list(self._threads.items())[:-THREADS]:
            if thread.users or self._threads.get(session) is not thread:  # another call retires it, or did
                continue
            async with thread.in_use(), thread.lock:  # calls that want the thread meanwhile wait
                await thread.keep()
                if thread.unsaved is not None:  # it cannot be saved, and is tried again when it is the oldest again
                    self._threads.move_to_end(session)
                    continue
                await thread.close()
            if not thread.users and self._threads.get(session) is thread and thread.lost is None:
                del self._threads[session]

    def start(self, request: Request, thread: Thread | None, options: bytes | None = None) -> bytes:
        """Key of the boundary before the first message: the thread, the tools, and how the template is used.

        Args:
            options: as `held_options` gives them, in place of the request's.
        """
        salt = self._salt + (self.held_options(request) if options is None else options)
        owner = thread.owner if thread is not None else ""
        if not owner and request.thread is not None:
            owner = session_name(request.thread)
        whose = b"t" + owner.encode() if owner else b"r" + request.realm.encode() if request.realm else b""
        return digest(b"locret-langchain 1", whose, canonical(list(request.tools)), salt)

    async def make_durable(self, name: str) -> bool:
        """Save the boundary where a thread rests; False if the thread is not at hand, or cannot be saved."""
        thread = self._threads.get(session_name(name))
        if thread is None:
            return False
        async with thread.in_use(), thread.lock, self.gate:
            try:
                return await thread.keep()
            finally:
                await to_the_end(self.rest(thread))

    def is_of(self, name: str, other: str) -> bool:
        """Whether a thread is the other one, or a fork of it that is at hand."""
        thread = self._threads.get(session_name(name))
        return name == other or (thread is not None and thread.owner == session_name(other))

    async def forget(self, name: str, *, only_if: Callable[[], Awaitable[bool]] | None = None,
                     timeout_s: float | None = None) -> bool:
        """Delete a thread's memory and that of its forks, from this process and from the store; whether there was any.

        Args:
            only_if: is asked once nobody here can tell it or its forks anything any more; False leaves all as it is.
            timeout_s: how long it waits for other calls on them; None for no limit.

        Raises:
            TimeoutError: one of them was in use all the time; nothing was deleted. SnapshotError: the store refused.
        """
        thread = self.named(name)
        async with AsyncExitStack() as stack:
            # The wait alone: a deletion that has begun is not to be told as one that did nothing.
            async with within(timeout_s, f"the session, or a fork of it, was in use for {timeout_s} s, so nothing was "
                              "deleted; expected another try once it is free"):
                locked = await self._lock_with_forks(thread, stack)
            if only_if is not None and not await only_if():
                return False
            was_open = thread.open
            for each in locked:
                await each.reset()
            if thread.session is None:
                return was_open
            try:
                await self.runtime.forget(thread.session)
            except SnapshotNotFound:
                return was_open
            except ConfigError:  # a fork: the rest of the session belongs to other threads
                await thread.delete()
            return True

    async def _lock_with_forks(self, thread: Thread, stack: AsyncExitStack) -> list[Thread]:
        """The thread and all its forks that are at hand, which nobody else has until the stack ends."""
        await stack.enter_async_context(thread.in_use())
        await stack.enter_async_context(thread.lock)
        locked = [thread]
        while forks := [fork for fork in self._threads.values() if thread.session is not None
                        and fork.owner == thread.session and fork not in locked]:
            for fork in forks:  # nobody opens one again before all are deleted
                await stack.enter_async_context(fork.in_use())
                await stack.enter_async_context(fork.lock)
            locked += forks
        return locked

    async def close(self) -> None:
        """Close all contexts. Threads that rest at a boundary are saved; streams that are being absorbed are undone.

        Raises:
            Exception: the first that occurred; everything else was saved and closed all the same.
        """
        errors: list[Exception] = []
        for absorption in list(self.absorbing):
            try:
                await absorption.abort()
            except Exception as error:
                errors.append(error)
        for thread in [*self._threads.values(), *self._nameless]:
            async with thread.lock, self.gate:
                try:
                    await thread.keep()
                except Exception as error:
                    errors.append(error)
                await thread.close()
        self._threads.clear()
        self._nameless.clear()
        if errors:
            raise errors[0]
