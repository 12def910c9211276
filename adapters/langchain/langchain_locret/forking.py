"""A thread that goes on as two: what is at hand of it becomes the new one's, the old is found again in the store."""

from __future__ import annotations

import asyncio

import msgspec

from langchain_locret.boundary_pruning import tip_of
from langchain_locret.thread import Thread
from langchain_locret.threads import Threads
from locret_stream import ConfigError, ContextBusy, InputError, StoreError
from locret_stream.context.cancelling import to_the_end


async def fork(threads: Threads, name: str, new: str) -> None:
    """Let a thread of a new name go on, alone, from where a thread was told something last. Failed or cancelled, there
    is nothing of the new name.

    Raises:
        InputError: the one was told nothing, or the other something. ConfigError: there is no store. ContextBusy:
            the new one is in use. SnapshotError: it cannot be brought back or saved; both are as they were.
    """
    thread, twin = threads.named(name), threads.named(new)
    if thread.session is None:
        raise ConfigError("threads without a store cannot be forked; expected LocretChatModel(store=...)")
    if twin is thread:
        raise InputError(f"thread {name!r} was to be forked as itself; expected a new name")
    async with threads.using(thread), threads.using(twin), thread.lock:
        if twin.users > 1:  # not waited for: who has it may wait for this one
            raise ContextBusy(f"thread {new!r} is in use; expected a thread that is new")
        async with twin.lock, threads.gate:
            try:
                await to_the_end(_fork(threads, thread, twin, name, new))
            except asyncio.CancelledError:  # it ran to its end all the same, and whoever called does not know of it
                if twin.told:
                    await to_the_end(_remove(threads, twin))
                raise


async def _fork(threads: Threads, thread: Thread, twin: Thread, name: str, new: str) -> None:
    """Its context goes on as the new thread; the old one is found again in the store."""
    try:
        await threads.look_up(twin)
        if twin.open or twin.stored:
            raise InputError(f"thread {new!r} holds something already; expected a thread that is new, or "
                             "`forget_thread` first")
        await threads.look_up(thread)
        await threads.keep(thread)
        tip = tip_of(thread.stored or {}, thread.live)
        if tip is None:
            raise InputError(f"thread {name!r} was told nothing, so there is nothing to fork")
        await threads.go(thread, tip)
        if not await threads.keep(thread):
            raise StoreError(f"thread {name!r} cannot be saved, so it cannot be forked; the log tells why")
        ctx, owner = thread.ctx, thread.owner or thread.session
        at = msgspec.structs.replace(tip, owner=owner)
        ctx.note, ctx.keep, thread.ctx = msgspec.msgpack.encode(at), {}, None
        try:
            done = await ctx.save_as(twin.session)
        except BaseException:
            await ctx.aclose(save=False)
            if ctx.name == twin.session:  # else the store had something of that name, which is not ours
                await threads.delete(twin)
            raise
        twin.ctx, twin.at, twin.owner, twin.told = ctx, at, owner, True
        twin.stored = {at.key: (done.generation, at)}
        threads.choose(twin)
    finally:
        await threads.rest(thread)


async def _remove(threads: Threads, twin: Thread) -> None:
    await threads.let_go(twin)
    await threads.delete(twin)
