"""The threads of one runtime: where the memory of each is, how it comes to a boundary, and how it is kept.

A compressed memory cannot be cut back to an earlier message, so each message boundary that may be needed again is a
snapshot of the thread's session, and bears the chained digest of the messages that it holds (`messages.chain`). A turn
goes on from the deepest boundary that belongs to the messages given, and feeds what follows it. If there is none it
begins anew. Whatever happens to a turn, boundaries that were there before it are there after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from langchain_locret.boundaries import (
    LEDGER,
    Boundary,
    from_note,
    heading,
    session_name,
    split,
)
from langchain_locret.boundary_pruning import kept
from langchain_locret.messages import Said, canonical, chain, digest
from langchain_locret.render import ChatTemplate
from langchain_locret.thread import Before, Reached, Request, Save, Source, Thread
from locret_stream import (
    ConfigError,
    Runtime,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
    StoreError,
)
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.saving import storing

_log = logging.getLogger(__name__)
THREADS = 64  # that are kept at hand; others are found again in the store


class Threads:
    """All threads of one runtime. Every method runs on one event loop.

    Args:
        template: of the runtime's tokenizer. replies: the response template, None for the tokenizer's own.
        salt: what else the digests of messages depend on.

    Attributes:
        gate: as many turns as there are slots; more wait in order.
    """

    def __init__(self, runtime: Runtime, template: ChatTemplate, replies: dict[str, Any] | None, *, salt: Any = None):
        self.runtime, self.template, self.replies = runtime, template, replies
        self._salt = canonical([salt, str(template.frames.template or runtime.tokenizer.chat_template)])
        self.gate = asyncio.Semaphore(runtime.max_live)
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._loose: list[Thread] = []  # nobody's, oldest first
        self.absorbing: set[Any] = set()  # streams under way: they have a thread while no call of theirs runs

    @asynccontextmanager
    async def mine(self, request: Request) -> AsyncIterator[Thread]:
        """The thread, for this turn alone. After it, it rests at a boundary; failed, cancelled, or left before the end
        of its answer was taken, it is as it was."""
        thread = self.named(request.thread) if request.thread is not None else self._one_of_nobody(request)
        async with self.using(thread), thread.lock:
            try:
                async with self.gate:
                    self.at_work(thread)
                    await self.look_up(thread)
                    yield thread
                    await to_the_end(self.rest(thread))
                if request.delivery is not None:
                    await request.delivery.wait(lambda: thread.users > 1)
            except BaseException:
                await to_the_end(self.undo(thread))
                raise
            self.settle(thread)

    @asynccontextmanager
    async def using(self, thread: Thread) -> AsyncIterator[None]:
        """While it is used or waited for, a thread stays at hand."""
        thread.users += 1
        try:
            yield
        finally:
            thread.users -= 1

    @staticmethod
    def at_work(thread: Thread) -> None:
        """Until it rests, nobody closes its context for the slot: a turn prepares for a while before it feeds."""
        if thread.open:
            thread.ctx.disposable = False

    def settle(self, thread: Thread) -> None:
        """What this turn told the thread stays."""
        thread.before = None
        thread.saved.clear()
        if thread.stored is not None:
            self.choose(thread)

    async def undo(self, thread: Thread) -> None:
        """Leave nothing of what this turn told the thread: neither in memory nor in snapshots nor in the log. It then
        rests at a boundary that it had before."""
        if thread.before is not None:
            await self._close_unsaved(thread)
            before, thread.before = thread.before, None
            saved, thread.saved = thread.saved, []
            thread.at, thread.told = None, before.told
            if thread.stored is not None:
                thread.stored = {key: one for key, one in thread.stored.items() if one[0] not in saved}
            for number in reversed(saved):
                await self.delete(thread, number)
        await self.rest(thread)

    async def delete(self, thread: Thread, number: int | None = None) -> None:
        """Remove a snapshot of what failed from the store, or, without a number, all of the thread's."""
        try:  # on a thread of its own: it may wait for others who save in the session
            await asyncio.to_thread(self.runtime.store.delete, thread.session, number)
        except SnapshotNotFound:
            pass
        except SnapshotError as error:
            _log.warning("%r: what failed left %s, which cannot be removed: %s", thread.session,
                         "snapshots" if number is None else f"snapshot {number}", error)

    async def rest(self, thread: Thread) -> None:
        """After a turn: at a boundary, or closed without saving, so that the next one begins at a snapshot."""
        if thread.open and (thread.at is None or thread.stale):
            await self._close_unsaved(thread)
        if not thread.open:  # others may save in the session from here on: its boundaries are looked up again
            thread.ctx = thread.at = thread.stored = None
            thread.stale = False
        else:
            thread.ctx.disposable = True
        await self._retire()

    async def _close_unsaved(self, thread: Thread) -> None:
        """Close its context without saving. What a turn that may still be undone left in the store is remembered."""
        if thread.ctx is None:
            return
        if thread.before is not None:
            thread.saved += sorted(thread.ctx.swap_generations - thread.before.swap_generations)
        await thread.ctx.aclose(save=False)

    def named(self, name: str) -> Thread:
        """The thread of that name, wherever its memory is."""
        session = session_name(name)
        thread = self._threads.setdefault(session, Thread(session if self.runtime.store is not None else None))
        self._threads.move_to_end(session)
        return thread

    def _one_of_nobody(self, request: Request) -> Thread:
        """A memory without a name that holds the beginning of these messages, or a new one."""
        keys = set(chain(self.start(request, None), request.said)[1:])
        fitting = [one for one in self._loose if not one.users and one.live and one.live.key in keys]
        thread = max(fitting, key=lambda one: len(one.live.ledger), default=Thread(None))
        self._loose = [one for one in self._loose if one is not thread] + [thread]
        return thread

    async def _retire(self) -> None:
        """Close what was not used for long; stored threads are found again."""
        for thread in [one for one in self._loose if not one.users][:-self.runtime.max_live]:
            self._loose.remove(thread)
            if thread.open:
                await thread.ctx.aclose()
        for session, thread in list(self._threads.items())[:-THREADS]:
            if thread.users or self._threads.get(session) is not thread:  # another call retires it, or did
                continue
            async with self.using(thread), thread.lock:  # who asks for it meanwhile waits
                await self.keep(thread)
                if thread.open:
                    await thread.ctx.aclose(save=False)
                thread.ctx = thread.at = None
            if not thread.users and self._threads.get(session) is thread:
                del self._threads[session]

    async def look_up(self, thread: Thread) -> None:
        """Which boundaries of it are stored, where that may not be known; what another owner saved counts."""
        if not thread.open:  # as its slot was needed
            thread.ctx = thread.at = thread.stored = None
        elif thread.session is not None and await thread.ctx.fenced():
            await thread.ctx.aclose(save=False)
            thread.ctx = thread.at = thread.stored = None
        thread.unusable &= {thread.live.key} if thread.live is not None else set()  # others may be usable by now
        if thread.session is None or thread.stored is not None:
            return
        rows, thread.owner = [], ""
        try:
            rows = await self._storing(self.runtime.store.info, thread.session)
        except SnapshotNotFound:
            pass
        if rows and rows[-1].locked:
            raise StoreError(rows[-1].problem)
        thread.stored = {}
        for row in rows:
            if (boundary := from_note(row.note)) is not None and boundary.tokens == row.tokens:
                thread.stored[boundary.key] = (row.generation, boundary)
                thread.owner = boundary.owner

    async def _storing(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await storing(self.runtime, work, *arguments)

    def start(self, request: Request, thread: Thread | None) -> bytes:
        """Key of the boundary before the first message: the thread, the tools, and how the template is used."""
        whose = thread.owner if thread is not None and thread.owner else None
        whose = session_name(request.thread) if whose is None and request.thread is not None else whose
        owner = b"" if whose is None else b"t" + whose.encode()
        return digest(b"locret-langchain 1", owner, canonical(list(request.tools)), self._salt)

    # -- moving to a boundary ---------------------------------------------------------------------------------

    async def begin_anew(self, thread: Thread) -> None:
        """Bring the thread's context to where nothing was told yet."""
        await self._move(thread, 0)
        thread.at = None

    async def bring(self, thread: Thread, boundary: Boundary, *, rebuild: bool) -> Source:
        """Bring the thread's context to a boundary, or, with `rebuild`, read it again from the session's log where its
        snapshot is of another model, policy or budget, or damaged.

        Raises:
            SnapshotError: it cannot be; in this turn it is not tried again. It stays stored, unless it is not there.
        """
        number = (thread.stored or {}).get(boundary.key, (0, None))[0]  # now: going there may save, and give it up
        try:
            return await self.go(thread, boundary)
        except SnapshotNotFound:
            thread.stored.pop(boundary.key, None)
            raise
        except StaleOwner:  # nothing is wrong with it: others saved meanwhile
            raise
        except SnapshotError as error:
            thread.unusable.add(boundary.key)
            if not rebuild or not isinstance(error, (SnapshotMismatch, SnapshotCorrupt)):
                raise
        if thread.open:
            await thread.ctx.aclose(save=False)
        ctx = self.runtime.open(thread.session, raw=True, at=number, on_mismatch="rebuild")
        await ctx.__aenter__()
        thread.ctx, thread.at = ctx, None
        self.choose(thread)
        if ctx.memory.tokens != boundary.tokens:
            raise SnapshotCorrupt(f"snapshot {number} of {thread.session!r}: its log gives {ctx.memory.tokens} tokens; "
                                  f"expected {boundary.tokens}")
        ctx.note, thread.at = msgspec.msgpack.encode(boundary), boundary
        await self.keep(thread)
        return "log"

    async def go(self, thread: Thread, boundary: Boundary) -> Source:
        """Bring the thread's context to a boundary. Raises SnapshotError."""
        if thread.live is not None and thread.live.key == boundary.key:
            return "live"
        number = thread.stored[boundary.key][0]
        await self._move(thread, number)
        thread.at = boundary
        return "snapshot"

    async def _move(self, thread: Thread, number: int) -> None:
        """Put the thread's context where a snapshot of that number is; 0 is the beginning."""
        await self.keep(thread)
        if thread.open and thread.session is not None and not thread.stale:
            at, thread.at = thread.at, None  # cancelled, it may rest here or there
            try:
                await thread.ctx.rewind(number)
            except Exception:
                thread.at = at
                raise
            return
        if thread.open:
            await thread.ctx.aclose(save=False)
        thread.stale = False
        ctx = self.runtime.open(thread.session, raw=True, at=None if thread.session is None else number)
        await ctx.__aenter__()
        thread.ctx = ctx
        if thread.session is not None:
            self.choose(thread)

    async def take(self, thread: Thread, ids: list[int], focus: str | None = None) -> None:
        """Feed ids, under that focus unless it is None; from here on the thread rests at no boundary."""
        thread.before = thread.before or Before(thread.told, thread.ctx.swap_generations)
        thread.at, thread.ctx.disposable, thread.told = None, False, True
        if focus is not None:
            await thread.ctx.focus(focus)
        if ids:
            await thread.ctx.push(ids)

    def boundary(self, thread: Thread, reached: Reached, request: Request, said: Sequence[Said]) -> Boundary:
        """Where the context rests now, all of `said` being held: the request's messages, or these and the answer."""
        if reached.base is None:
            system, rest = split(said)
            start, top, ledger, tools = reached.keys[0], heading(system), b"", bool(request.tools)
            lineage = reached.keys[min(len(system) + 1, len(said))][:16]
        else:
            base = reached.base
            start, top, ledger, rest = base.start, base.system, base.ledger, said[reached.count:]
            lineage, tools = base.lineage, base.tools
        ledger += b"".join(one.digest for one in rest)
        boundary = Boundary(reached.keys[-1], start, top, ledger[-16 * LEDGER:], thread.ctx.memory.tokens,
                            said[-1].role, lineage=lineage, stream=said[-1].stream,
                            owner=thread.owner, tools=tools)
        thread.ctx.note = msgspec.msgpack.encode(boundary)
        return boundary

    # -- saving -----------------------------------------------------------------------------------------------

    async def save(self, thread: Thread, when: Save) -> bool:
        """After a turn's prompt or answer: `keep`, unless that is for the end of the run; whether it is durable."""
        return thread.session is not None and when == "turn" and await self.keep(thread)

    async def keep(self, thread: Thread) -> bool:
        """A snapshot of the boundary where the thread rests, if there is none yet; whether there is one now.

        What cannot be saved costs reading it again, and is told; the memory at hand is right all the same.
        """
        return await to_the_end(self._keep(thread))

    async def _keep(self, thread: Thread) -> bool:
        if thread.session is None or thread.live is None or thread.stale:
            return False
        if thread.at.key in thread.stored and thread.at.key not in thread.unusable:
            return True
        try:
            done = await thread.ctx.snapshot()
        except SnapshotError as error:
            _log.warning("%r was not saved: %s", thread.session, error)
            thread.stale = isinstance(error, StaleOwner)  # then its boundaries are to be looked up again
            return False
        thread.stored[thread.at.key] = (done.generation, thread.at)
        thread.unusable.discard(thread.at.key)
        if thread.before is not None:  # nothing is given up for a turn that may fail
            thread.saved.append(done.generation)
        else:
            self.choose(thread)
        return True

    def choose(self, thread: Thread) -> None:
        """Leave those boundaries that stay; the store clears the others away after its next save."""
        stay = kept(thread.stored, self.runtime.store.keep_last)
        thread.stored = {key: thread.stored[key] for key in stay}
        if thread.open:
            thread.ctx.keep = {thread.stored[key][0]: pinned for key, pinned in stay.items()}

    async def seal(self, name: str) -> bool:
        """Make the boundary where a thread rests durable; False if it is not at hand."""
        thread = self._threads.get(session_name(name))
        if thread is None:
            return False
        async with self.using(thread), thread.lock, self.gate:
            try:
                return await self.keep(thread)
            finally:
                await to_the_end(self.rest(thread))

    async def forget(self, name: str) -> bool:
        """Remove a thread's memory, from here and from the store, and its forks with it; whether there was any."""
        thread = self.named(name)
        async with self.using(thread), thread.lock:
            had = thread.open
            await self.let_go(thread)
            if thread.session is None:
                return had
            async with AsyncExitStack() as stack:
                held: list[Thread] = []
                while forks := [one for one in self._threads.values()
                                if one.owner == thread.session and one not in held]:
                    for fork in forks:  # nobody opens one again before all is gone
                        await stack.enter_async_context(self.using(fork))
                        await stack.enter_async_context(fork.lock)
                    held += forks
                for fork in held:
                    await self.let_go(fork)
                try:
                    await self.runtime.forget(thread.session)
                except SnapshotNotFound:
                    return had
                except ConfigError:  # a fork, of which the rest belongs to others
                    await asyncio.to_thread(self.runtime.store.delete, thread.session)  # which may wait for a save
                return True

    async def let_go(self, thread: Thread) -> None:
        """It is told nothing any more; what is stored of it is looked up again."""
        if thread.open:
            await thread.ctx.aclose(save=False)
        thread.ctx = thread.at = thread.stored = None
        thread.owner, thread.told = "", False

    async def close(self) -> None:
        """Close all contexts; what rests at a boundary is saved, what is being absorbed is left.

        Raises:
            Whatever failed first; the others were closed, and saved, all the same.
        """
        failed: list[Exception] = []
        for absorption in list(self.absorbing):
            try:
                await absorption.abort()
            except Exception as error:
                failed.append(error)
        for thread in [*self._threads.values(), *self._loose]:
            async with thread.lock, self.gate:
                try:
                    await self.keep(thread)
                except Exception as error:
                    failed.append(error)
                if thread.open:
                    await thread.ctx.aclose(save=False)
        self._threads.clear()
        self._loose.clear()
        if failed:
            raise failed[0]
