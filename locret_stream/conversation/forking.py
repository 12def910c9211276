"""A thread goes on as two: its open context becomes the new thread's; the old thread is looked up in the store again.
"""

from __future__ import annotations

import asyncio

import msgspec

from locret_stream.context.cancelling import to_the_end
from locret_stream.conversation.thread import Thread
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError, ContextBusy, InputError, StoreError


async def fork(threads: Threads, name: str, new: str) -> None:
    """Let a thread of a new name go on, alone, from where a thread was told something last. If that fails or is
    cancelled, nothing of the new name exists.

    Raises:
        InputError: the old thread was told nothing, or the new one something. ConfigError: there is no store.
            ContextBusy: the new thread is in use. SnapshotError: the old one cannot be loaded or saved, or a call that
            was undone took what it was told last (StateLost); both are as they were.
    """
    thread, copy = threads.named(name), threads.named(new)
    if thread.session is None:
        raise ConfigError("threads without a store cannot be forked; expected store=<a folder or URL>")
    if copy is thread:
        raise InputError(f"thread {name!r} was to be forked as itself; expected a new name")
    async with thread.in_use(), copy.in_use(), thread.lock:
        if copy.users > 1:  # not waited for: a call that has it may wait for the old thread
            raise ContextBusy(f"thread {new!r} is in use; expected a thread that is new")
        async with copy.lock, threads.gate:
            made = asyncio.Event()
            try:
                await to_the_end(_fork(threads, thread, copy, name, new, made))
            except asyncio.CancelledError:  # the fork may be made all the same, and the caller does not know of it
                if made.is_set():
                    await to_the_end(_remove(copy))
                raise


async def _fork(threads: Threads, thread: Thread, copy: Thread, name: str, new: str, made: asyncio.Event) -> None:
    """`made` is set once the new thread is there: what it held before is none of the fork's."""
    try:
        await copy.look_up()
        if copy.open or copy.stored:
            raise InputError(f"thread {new!r} holds something already; expected a thread that is new, or "
                             "to forget that one first")
        await thread.look_up()
        await thread.keep()
        tip = thread.tip(name)
        if tip is None:
            raise InputError(f"thread {name!r} was told nothing, so there is nothing to fork")
        await thread.move_to(tip)
        if not await thread.keep():
            raise StoreError(f"thread {name!r} cannot be saved, so it cannot be forked; the log tells why")
        assert thread.session is not None
        await copy.take_over(thread, msgspec.structs.replace(tip, owner=thread.owner or thread.session))
        made.set()
    finally:
        await threads.rest(thread)


async def _remove(copy: Thread) -> None:
    await copy.reset()
    await copy.delete_failed()
