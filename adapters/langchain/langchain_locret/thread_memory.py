"""What a thread was told and what of it memory holds, as text: from its log on disk, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from langchain_locret.boundaries import PREFIX, session_name
from langchain_locret.boundary_pruning import tip_of
from langchain_locret.threads import Threads
from locret_stream import ConfigError, InputError, StoreError
from locret_stream.context import Memory
from locret_stream.context.cancelling import to_the_end
from locret_stream.snapshot.transcript import Passage, Transcript, read_transcript

T = TypeVar("T")
MOST = 4096  # tokens that are read back by position at once


async def memory_text(threads: Threads, name: str) -> list[Passage]:
    """What memory holds, run by run; [] for a thread that was told nothing.

    Raises:
        SnapshotError: it cannot be saved or read, or there is no log. ConfigError: there is no store.
    """
    return await _look(threads, name, lambda found, decode: found.kept(decode)) or []


async def memory(threads: Threads, name: str) -> Memory | None:
    """What a thread holds where it rests, or was told something last; None if it was told nothing."""
    thread = threads.named(name)
    if thread.open and thread.lock.locked():  # busy: as it is in this moment
        return thread.ctx.memory
    async with threads.using(thread), thread.lock, threads.gate:
        try:
            await threads.look_up(thread)
            tip = thread.live or tip_of(thread.stored or {}, None)
            if tip is None:
                return None
            await threads.go(thread, tip)
            return thread.ctx.memory
        finally:
            await to_the_end(threads.rest(thread))


async def stored_threads(threads: Threads) -> list[str]:
    """Names of the threads in the store."""
    store = threads.runtime.store
    found = [] if store is None else await asyncio.to_thread(store.list)
    return [one.name.removeprefix(PREFIX) for one in found if one.name.startswith(PREFIX)]


async def recall(threads: Threads, name: str, words: str, start: int | None, end: int | None,
                 limit: int) -> list[Passage]:
    """Passages of the log by words, or one by position. Raises as `memory_text`; InputError for neither."""
    if start is None and end is None and not words.strip():
        raise InputError("recall() was given neither words nor positions; expected words that stand in the passage, or "
                         "start= and end=, as a passage that was found tells them")
    if limit < 1:
        raise InputError(f"limit is {limit}; expected at least 1")

    def search(found: Transcript, decode: Callable[[list[int]], str]) -> list[Passage]:
        if start is None and end is None:
            return found.find(words.split(), decode, limit)
        first = max(start if start is not None else end - MOST, 0)
        passage = found.between(first, min(end if end is not None else first + MOST, first + MOST), decode)
        return [passage] if passage.end > passage.start else []

    return await _look(threads, name, search) or []


async def _look(threads: Threads, name: str, work: Callable[[Transcript, Callable[[list[int]], str]], T]) -> T | None:
    """Of where the thread rests, or was told something last; None if it was told nothing."""
    thread, codec = threads.named(name), threads.runtime.codec

    def decode(ids: list[int]) -> str:
        return codec.decode(ids, skip_special=False)

    async with threads.using(thread), thread.lock, threads.gate:
        await threads.look_up(thread)
        await threads.keep(thread)
        tip = tip_of(thread.stored or {}, thread.live)
        number = thread.stored[tip.key][0] if tip is not None and tip.key in (thread.stored or {}) else None
        await to_the_end(threads.rest(thread))
        if tip is None:
            return None
        if thread.session is None:
            raise ConfigError(f"thread {name!r} has no log, as there is no store; expected LocretChatModel(store=...), "
                              "or a Runtime with one")
        if number is None:
            raise StoreError(f"thread {name!r} cannot be saved, so its log cannot be read; expected a store that can "
                             "be written: the warning before this one tells why it cannot")
        return await to_the_end(asyncio.to_thread(lambda: work(read_transcript(
            threads.runtime.store, session_name(name), number, tokenizer=codec.fingerprint), decode)))


def shown(passages: list[Passage]) -> str:
    """Passages as a model or a person reads them."""
    return "\n\n".join(f"[tokens {one.start} to {one.end}, {one.share:.0%} in memory]\n{one.text}"
                       for one in passages) or "Nothing of that was ever told."
