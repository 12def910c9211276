"""Beside turns: where a thread stands, questions that leave it as it is, and the way back to an earlier boundary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from locret_stream.context import Answer, Token
from locret_stream.context.cancelling import to_the_end
from locret_stream.conversation.boundaries import Boundary
from locret_stream.conversation.boundary_pruning import untold
from locret_stream.conversation.matching import STAND_INS, expect_options
from locret_stream.conversation.parts import Part
from locret_stream.conversation.reading import reader_of, with_calls
from locret_stream.conversation.recalling import recollect
from locret_stream.conversation.request import Request, ThreadNotFound
from locret_stream.conversation.thread import Thread
from locret_stream.conversation.threads import Threads
from locret_stream.engine import Occupancy
from locret_stream.errors import ConfigError, InputError, SnapshotNotFound, StaleOwner, StoreError


class Asked(NamedTuple):
    """An answer that the thread does not know of, what was thought ahead of it, and the passages that were read again
    for it."""

    text: Answer
    reasoning: str
    recalled: list[dict[str, Any]]


class _Stopped(Exception):
    """A stop string came in the answer."""


@asynccontextmanager
async def at_rest(threads: Threads, name: str, *, told: bool = True) -> AsyncIterator[Thread]:
    """The thread, alone, with its context where it was told something last.

    Args:
        told: whether a thread that was created, and told nothing yet, counts as none.

    Raises:
        ThreadNotFound: it was told nothing. SnapshotError: it cannot be loaded, or a call that was undone took what it
            was told last (StateLost).
    """
    async with alone(threads, name) as thread:
        tip = thread.tip(name) or (None if told else untold(thread.snapshots))
        if tip is None:
            raise ThreadNotFound(f"there is no thread {name!r}, or it was told nothing; expected one that was")
        await thread.move_to(tip)
        yield thread


@asynccontextmanager
async def alone(threads: Threads, name: str) -> AsyncIterator[Thread]:
    """The thread, alone, wherever its context is. Raises SnapshotError: the store cannot be read."""
    thread = threads.named(name)
    async with thread.in_use(), thread.lock, threads.gate:
        try:
            await thread.look_up()
            thread.keep_slot()
            yield thread
        finally:
            await to_the_end(threads.rest(thread))


async def ask(threads: Threads, request: Request) -> Asked:
    """The answer to a request with one message, a user's, on a copy of its thread's memory: the thread is as it was.

    Raises:
        ConfigError: the template has no place for a question there, or options of the request change what the memory
            holds, and it began with others. Otherwise as `at_rest` and `StreamingContext.ask`.
    """
    (question,), recall, sampling = request.said, request.recall, {**request.sampling}
    template, runtime = threads.template_of(request), threads.runtime
    async with at_rest(threads, request.thread or "") as thread:
        assert thread.boundary is not None
        if threads.held_options(request) != threads.own_options:  # one without any is asked of what is held as it is
            expect_options(threads, request, [thread.boundary])
        earlier = STAND_INS.get(thread.boundary.role, [])
        said = [*earlier, question]
        rendered = await asyncio.to_thread(template.render, said, apart=len(earlier))
        at = template.after(said, len(earlier), (), rendered)
        if at is None or not earlier:
            raise ConfigError(f"the chat template has no place for a question behind a message of role "
                              f"{thread.boundary.role!r}")
        pieces = rendered.pieces(at)
        ids = await threads.tokenized(pieces, lambda: template.encode(pieces, start=False))
        passages: list[dict[str, Any]] = []
        aside: list[int] = []
        if runtime.recall is not None if recall is None else recall:
            found = await recollect(threads, thread.context, question.content)
            passages, aside = found.receipt, found.ids
        reply, skip_special = reader_of(threads, rendered, stops=sampling.pop("stop", ()))
        text = reasoning = ""

        def take(parts: Iterable[Part]) -> None:
            nonlocal text, reasoning
            for part in parts:
                text, reasoning = text + with_calls(part), reasoning + part.reasoning

        def read(token: Token) -> None:
            take(reply.feed(token.text))
            if reply.stop_at is not None:
                raise _Stopped

        try:
            answer = await thread.context.ask(ids, recall=False, aside=aside, skip_special=skip_special, on_token=read,
                                              **sampling)
            reason, recalled = answer.finish_reason, answer.recalled
        except _Stopped:
            reason, recalled = "stop", ()
        take(reply.finish())
        return Asked(Answer(text, reason, recalled), reasoning, passages)


async def occupancy(threads: Threads, name: str, start: int, end: int | None, columns: int) -> Occupancy:
    """Units that the thread keeps of each part of what it was told. Raises as `at_rest`; InputError."""
    async with at_rest(threads, name, told=False) as thread:
        return await thread.context.occupancy(start, end, columns)


async def refocus(threads: Threads, name: str, text: str | None) -> int:
    """Tell the thread's memory what it will be asked about, from where it was told something last; None: about
    anything. Returns the number of tokens that it was told before. It is stored; if that fails or is cancelled, the
    thread is as it was.

    Raises:
        StoreError: it cannot be stored. StaleOwner: another owner saved the thread meanwhile. Otherwise as `at_rest`
            and `StreamingContext.focus`.
    """
    async with threads.exclusive(Request([], thread=name)) as thread:
        tip = thread.tip(name)
        if tip is None:
            raise ThreadNotFound(f"there is no thread {name!r}, or it was told nothing; expected one that was, or a "
                                   "focus with the first call that tells it something")
        await thread.move_to(tip)
        await thread.keep()  # no messages are given by which it could be read again
        await thread.feed([], text or "")
        thread.rest_at(tip)
        if not await thread.save_again():
            if thread.stale:
                raise StaleOwner(f"another owner, such as another process, told thread {name!r} something meanwhile; "
                                 "the thread is as the other one left it. Expected the focus again")
            raise StoreError(f"thread {name!r} cannot be saved; expected a store that can be written")
        return tip.tokens


async def rewind(threads: Threads, name: str, *, mark: bytes = b"", generation: int = 0) -> Boundary:
    """Go back to the boundary of that mark, or of the snapshot of that number: later ones are deleted.

    Raises:
        SnapshotNotFound: there is no such boundary. SnapshotError: it cannot be loaded; the thread is as it was.
        InputError: it branches off, in a thread with answers that were appended.
    """
    async with alone(threads, name) as thread:  # not at rest: the newest snapshot may be what is damaged
        chosen = [(number, boundary) for number, boundary in thread.snapshots.values()
                  if (boundary.mark == mark if mark else number == generation)]
        if not chosen:
            what = f"mark {mark.hex()}" if mark else f"number {generation}"
            raise SnapshotNotFound(f"thread {name!r} keeps no boundary of {what}; expected one of the numbers "
                                   f"{sorted(number for number, _ in thread.snapshots.values())}")
        number, boundary = chosen[0]
        if not boundary.appended and not boundary.stream and any(
                other.appended and earlier < number for earlier, other in thread.snapshots.values()):
            raise InputError(f"number {number} of thread {name!r} branches off, and what is appended would go on from "
                             "elsewhere; expected the end of an answer that was appended, or a stream")
        await thread.move_to(boundary)
        await to_the_end(thread.delete_after(number))
        thread.lost = None  # what is gone is not asked for
        return boundary


async def take_back(threads: Threads, name: str, mark: bytes) -> bool:
    """Delete the boundary of that mark, so that the thread goes on from the one before; False if there is none. For an
    answer that became durable, and that nobody was given.

    Raises:
        InputError: something was appended behind it. SnapshotError: it cannot be deleted.
    """
    thread = threads.named(name)
    async with thread.in_use(), thread.lock:
        await thread.look_up()
        rows = thread.snapshots
        marked = [number for number, boundary in rows.values() if boundary.mark == mark]
        if not marked:
            return False
        number = marked[0]
        if any(other > number and (each.appended or each.stream) for other, each in rows.values()):
            raise InputError(f"thread {name!r} was told more behind the answer that is to be taken back; expected it "
                             "to be the last one")
        await thread.reset()
        await to_the_end(thread.delete(number))
        return True


async def boundaries(threads: Threads, name: str) -> list[tuple[int, Boundary]]:
    """The stored boundaries of a thread with the numbers of their snapshots, oldest first; [] for an unknown one."""
    thread = threads.named(name)
    async with thread.in_use(), thread.lock:
        await thread.look_up()
        return sorted(thread.snapshots.values(), key=lambda row: row[0])


async def create(threads: Threads, name: str) -> bool:
    """Store a thread that was told nothing yet; False if there is something of that name.

    Raises:
        ConfigError: there is no store. SnapshotError: it cannot be saved.
    """
    thread = threads.named(name)
    async with thread.in_use(), thread.lock, threads.gate:
        try:
            await thread.look_up()
            if thread.session is None:
                raise ConfigError("threads without a store cannot be created; expected store=<a folder or URL>")
            if thread.snapshots:
                return False
            await thread.begin_anew()
            start = threads.start(Request(said=[], thread=name), None)
            thread.rest_at(Boundary(start, start, b"", b"", 0, "", lineage=start[:16], options=threads.own_options,
                                    process=threads.own_options))
            if not await thread.keep():
                raise StoreError(f"thread {name!r} cannot be saved; the log tells why")
            return True
        finally:
            await to_the_end(threads.rest(thread))
