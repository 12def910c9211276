"""What a thread was told, and what of that its memory holds, as text. It is read from the log on disk, and verified."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from locret_stream.context import Memory
from locret_stream.context.cancelling import to_the_end
from locret_stream.conversation.boundaries import PREFIX, Boundary, thread_name
from locret_stream.conversation.boundary_pruning import tip_of, untold
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError, InputError, StoreError
from locret_stream.snapshot.transcript import Passage, Transcript, read_transcript
from locret_stream.text import Detokenizer

T = TypeVar("T")
MOST = 4096  # tokens that one call reads by position
WORDS = 64  # that one call searches for
CHARACTER = 4  # tokens that may spell one character: one for each of its bytes


async def memory_text(threads: Threads, name: str) -> list[Passage]:
    """The runs of tokens that a thread's memory holds; [] for a thread that was told nothing.

    Raises:
        SnapshotError: the thread cannot be saved or read, or there is no log. ConfigError: there is no store.
    """
    return await _read(threads, name, lambda transcript, decode: transcript.kept(decode)) or []


async def memory(threads: Threads, name: str) -> Memory | None:
    """Figures of a thread's memory where it rests, or was told something last; None if it was told nothing."""
    thread = threads.named(name)
    if thread.open and thread.lock.locked():  # a turn runs: as it is at this moment
        return thread.context.memory
    async with thread.in_use(), thread.lock, threads.gate:
        try:
            await thread.look_up()
            tip = thread.live or tip_of(thread.snapshots, None) or untold(thread.snapshots)
            if tip is None:
                return None
            await thread.move_to(tip)
            return thread.context.memory
        finally:
            await to_the_end(threads.rest(thread))


async def stored_threads(threads: Threads) -> list[str]:
    """Names of the threads in the store. One whose name is so long, or so odd, that its session has a digest for a
    name is left out where no snapshot of it tells the name: it cannot be named."""
    store = threads.runtime.store
    rows = [] if store is None else await asyncio.to_thread(store.list)
    return [name for row in rows if row.name.startswith(PREFIX)
            and (name := thread_name(row.name, row.note)) is not None]


async def recall(threads: Threads, name: str, words: str, start: int | None, end: int | None,
                 limit: int) -> list[Passage]:
    """Passages of the log with these words, or the one of tokens start .. end-1.

    Raises:
        InputError: neither words nor positions were given, or more than 64 words, or limit < 1. Otherwise as
            `memory_text`.
    """
    if start is None and end is None and not words.strip():
        raise InputError("recall() was given neither words nor positions; expected words that stand in the passage, or "
                         "start= and end=, as a passage that was found tells them")
    wanted = words.split(maxsplit=WORDS)
    if len(wanted) > WORDS:
        raise InputError(f"recall() was given more than {WORDS} words; expected those that are rare")
    if limit < 1:
        raise InputError(f"limit is {limit}; expected at least 1")

    def search(transcript: Transcript, decode: Callable[[list[int]], str]) -> list[Passage]:
        if start is not None:
            first = max(start, 0)
        elif end is not None:
            first = max(end - MOST, 0)
        else:
            return transcript.find(wanted, decode, limit)
        last = first + MOST if end is None else min(end, first + MOST)
        passage = transcript.between(first, last, decode)
        if last != end:  # the cut is chosen here: not inside of a character that several tokens spell
            whole = (transcript.between(first, passage.end - fewer, decode) for fewer in range(CHARACTER))
            passage = next((one for one in whole if not one.text.endswith("\ufffd")), passage)
        return [passage] if passage.end > passage.start else []

    return await _read(threads, name, search) or []


async def text_in_columns(threads: Threads, name: str, start: int, end: int | None, column: int
                          ) -> tuple[Passage, list[str]] | None:
    """The text of tokens start .. end-1, at most 4,096, and the same cut every `column` tokens, as `occupancy` counts
    them. A character that several tokens spell belongs to the last of them. None for a thread that was told nothing,
    or nothing there.

    Raises:
        InputError: column < 1. Otherwise as `memory_text`.
    """
    if column < 1:
        raise InputError(f"column is {column}; expected at least 1 token")
    codec, first, pieces = threads.runtime.codec, max(start, 0), list[str]()
    last = min(first + MOST if end is None else end, first + MOST)

    def cut(ids: list[int]) -> str:
        detokenizer = Detokenizer(codec, skip_special=False, start=first == 0)
        pieces.extend("".join(map(detokenizer.push, ids[at:at + column])) for at in range(0, len(ids), column))
        if pieces:
            pieces[-1] += detokenizer.flush()
        return "".join(pieces)

    passage = await _read(threads, name, lambda transcript, _: transcript.between(first, last, cut))
    return (passage, pieces) if passage is not None and passage.end > passage.start else None


async def tokens_told(threads: Threads, name: str) -> int | None:
    """How many tokens the log has; None for a thread that was told nothing. Raises as `memory_text`."""
    return await _read(threads, name, lambda transcript, _: transcript.tokens)


async def _read(threads: Threads, name: str, work: Callable[[Transcript, Callable[[list[int]], str]], T]) -> T | None:
    """The result of `work` on the log up to where the thread rests, or was told something last; None if it was told
    nothing. `work` runs on a thread of its own."""
    return await read_log_of(threads, name, lambda transcript, decode, _: work(transcript, decode))


async def read_log_of(threads: Threads, name: str,
                      work: Callable[[Transcript, Callable[[list[int]], str], Boundary], T]) -> T | None:
    """The same for work that is also given the boundary there. Raises as `memory_text`."""
    thread = threads.named(name)
    async with thread.in_use(), thread.lock:  # what is read stays; other threads have their turns meanwhile
        async with threads.gate:
            try:
                await thread.look_up()
                await thread.keep()
                tip = thread.tip(name)
                generation = thread.snapshots[tip.key][0] if tip is not None and tip.key in thread.snapshots else None
            finally:
                await to_the_end(threads.rest(thread))
        if tip is None:
            return None
        if thread.session is None:
            raise ConfigError(f"thread {name!r} has no log, as there is no store; expected store=<a folder or URL>")
        if generation is None:
            raise StoreError(f"thread {name!r} cannot be saved, so its log cannot be read; expected a store that can "
                             "be written: the warning before this one tells why it cannot")
        return await read_log_at(threads, thread.session, generation,
                                 lambda transcript, decode: work(transcript, decode, tip))


async def read_log_at(threads: Threads, session: str, generation: int,
                      work: Callable[[Transcript, Callable[[list[int]], str]], T]) -> T:
    """The result of `work` on the log as a snapshot of a session has it, for a caller who has the thread alone. It runs
    on a thread of its own; cancelled, it ends at the next text that it decodes. Raises SnapshotError."""
    store, codec, left = threads.runtime.store, threads.runtime.codec, threading.Event()
    assert store is not None

    def decode(ids: list[int]) -> str:
        if left.is_set():
            raise _Left
        return codec.decode(ids, skip_special=False)

    reading = asyncio.ensure_future(asyncio.to_thread(lambda: work(read_transcript(
        store, session, generation, tokenizer=codec.fingerprints), decode)))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        left.set()
        try:
            await to_the_end(asyncio.wait([reading]))
        finally:
            reading.exception()  # retrieved, so that asyncio does not log it
        raise


class _Left(Exception):
    """Nobody waits for what is read."""


def shown(passages: list[Passage]) -> str:
    """Passages as a model or a person reads them."""
    return "\n\n".join(f"[tokens {passage.start} to {passage.end}, {passage.share:.0%} in memory]\n{passage.text}"
                       for passage in passages) or "Nothing of that was ever told."
