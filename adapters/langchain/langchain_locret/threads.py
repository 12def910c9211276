"""Which memory belongs to which messages: threads, the boundaries between their messages, and turns.

A compressed memory cannot be cut back to an earlier message, so each message boundary that may be needed again is a
snapshot of the thread's session, and bears the chained digest of the messages that it holds (`messages.chain`). A turn
goes on from the deepest boundary that belongs to the messages given, and feeds what follows it. If there is none it
begins anew. Whatever happens to a turn, boundaries that were there before it are there after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from langchain_core.messages import AIMessageChunk
from msgspec import Meta

from langchain_locret.messages import RECEIPT, Said, canonical, chain, digest, read
from langchain_locret.render import ChatTemplate, Rendered
from langchain_locret.replies import Reply, response_template, shows_special
from locret_stream import (
    ConfigError,
    LocretError,
    Runtime,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
)
from locret_stream.context import Memory, StreamingContext
from locret_stream.context.session import to_the_end
from locret_stream.snapshot import check_name
from locret_stream.text import FrameState

_log = logging.getLogger(__name__)
LEDGER = 2048  # messages by which a trimmed history can be proven to be the end of what was absorbed
THREADS = 256  # that are kept at hand; others are found again in the store
RECEIPTS = 8  # answers of a trimmed history whose receipts are tried

OTHER_SYSTEM = "the system prompt changed"

Save = Literal["turn", "run"]
Source = Literal["live", "snapshot", "new", "rebuild"]


class StateLost(SnapshotError):
    """The messages name a stream that memory absorbed, and the memory that holds it is gone. The stream cannot be fed
    again from the messages: absorb it anew, or take its stand-in out of the history."""


class RebuildWarning(UserWarning):
    """A thread's system prompt changed, so that its whole history had to be read again."""


class Boundary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a memory holds that ends between two messages; written beside its snapshot.

    Args:
        key: chained digest of tools and messages. start: the one it begins with, before any message.
        system: digest of the leading system messages, b"" without. ledger: digests of the other messages, 16 bytes
            each, the last 2,048. tokens: accepted. role: of the last message.
    """

    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    start: Annotated[bytes, Meta(min_length=32, max_length=32)]
    system: Annotated[bytes, Meta(max_length=16)]
    ledger: Annotated[bytes, Meta(max_length=16 * LEDGER)]
    tokens: Annotated[int, Meta(ge=0, le=2**53)]
    role: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=1, le=1)] = 1

    def proves(self, start: bytes, said: Sequence[Said]) -> bool:
        """Whether these messages are the end of what is held, its own system messages or none ahead of them, and what
        is held began as they do: in the same thread, with the same tools.

        A summary in place of older messages says nothing that is not held, and is passed over.
        """
        system, rest = split(said)
        left = b"".join(one.digest for one in rest if not one.summary)
        whose = start == self.start and (not system or heading(system) == self.system)
        return whose and bool(left) and self.ledger.endswith(left)


_NOTE = msgspec.msgpack.Decoder(Boundary)


def split(said: Sequence[Said]) -> tuple[Sequence[Said], Sequence[Said]]:
    """The leading system messages, and the others."""
    count = next((at for at, one in enumerate(said) if one.role != "system"), len(said))
    return said[:count], said[count:]


def heading(system: Sequence[Said]) -> bytes:
    return digest(*(one.digest for one in system))[:16] if system else b""


@dataclass(frozen=True)
class Request:
    """One call of the model.

    Attributes:
        thread: whose memory it is, None for nobody's. choice: a tool's name, "any", or "" for the model's choice.
        sampling: of `locret_stream.Sampling`. save: when boundaries become snapshots.
    """

    said: list[Said]
    thread: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    save: Save = "turn"
    timeout_s: float | None = None


@dataclass
class Thread:
    """One thread's memory as this process has it.

    Attributes:
        session: its name in the store, None for what is nobody's and leaves nothing behind.
        at: the boundary where the open context rests; None while a turn moves it, or without a context.
        stored: boundaries with a snapshot, by key; None: not looked up yet.
        system: heading of the newest turn. stale: another owner saved the session meanwhile.
    """

    session: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ctx: StreamingContext | None = None
    at: Boundary | None = None
    stored: dict[bytes, tuple[int, Boundary]] | None = None
    system: bytes | None = None
    stale: bool = False

    @property
    def open(self) -> bool:
        return self.ctx is not None and not self.ctx.closed

    @property
    def live(self) -> Boundary | None:
        return self.at if self.open else None

    def known(self) -> dict[bytes, Boundary]:
        found = {key: boundary for key, (_, boundary) in (self.stored or {}).items()}
        if self.live is not None:
            found[self.live.key] = self.live
        return found


@dataclass(frozen=True)
class Reached:
    """Where a turn begins: `count` messages are held, the rendering goes on at `at`; keys of all boundaries."""

    rendered: Rendered
    count: int
    at: int
    keys: list[bytes]
    base: Boundary | None
    source: Source
    why: str


def session_name(thread: str) -> str:
    """The name under which a thread is stored: its own where that can be, else a digest; never another thread's."""
    name = f"langchain/{thread}"
    if not thread.startswith("sha256:"):
        try:
            check_name(name)
            return name
        except LocretError:
            pass
    return f"langchain/sha256:{hashlib.sha256(thread.encode('utf-8', 'surrogatepass')).hexdigest()}"


class Threads:
    """All threads of one runtime. Every method runs on one event loop.

    Args:
        template: of the runtime's tokenizer. replies: the response template, None for the tokenizer's own.
        most: turns that run at the same time; more wait in order.
    """

    def __init__(self, runtime: Runtime, template: ChatTemplate, replies: dict[str, Any] | None, *, salt: Any = None):
        self.runtime, self.template, self._given = runtime, template, replies
        self._salt = canonical([salt, str(template.frames.template or runtime.tokenizer.chat_template)])
        self.gate = asyncio.Semaphore(runtime.max_live)
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._loose: list[Thread] = []  # nobody's, oldest first

    # -- turns ------------------------------------------------------------------------------------------------

    async def turn(self, request: Request, emit: Callable[[AIMessageChunk], None]) -> None:
        """Answer: the chunks are given to `emit`, the last of them with usage and receipt.

        Cancelled, or failing anywhere, the thread rests at a boundary that it had before.

        Raises:
            StateLost, ConfigError, InputError, BudgetExceeded, NoSlot, StoreError; TimeoutError.
        """
        async with asyncio.timeout(request.timeout_s), self._mine(request) as thread:
            reached = await self.reach(thread, request)
            await self._answer(thread, request, reached, emit)

    @asynccontextmanager
    async def _mine(self, request: Request) -> AsyncIterator[Thread]:
        """The thread, for this turn alone; after it, it rests at a boundary or is closed without saving."""
        thread = self.named(request.thread) if request.thread is not None else self._one_of_nobody(request)
        async with thread.lock, self.gate:
            try:
                await self.look_up(thread)
                yield thread
            finally:
                await to_the_end(self.rest(thread))

    async def rest(self, thread: Thread) -> None:
        """After a turn: at a boundary, or closed without saving, so that the next one begins at a snapshot."""
        if thread.open and (thread.at is None or thread.stale):
            await thread.ctx.aclose(save=False)
        if thread.stale:
            thread.stored, thread.stale = None, False
        if not thread.open:
            thread.ctx = thread.at = None
        elif thread.session is None:
            thread.ctx.expendable = True
        await self._retire()

    def named(self, name: str) -> Thread:
        """The thread of that name, wherever its memory is."""
        session = session_name(name)
        thread = self._threads.setdefault(session, Thread(session))
        self._threads.move_to_end(session)
        return thread

    def _one_of_nobody(self, request: Request) -> Thread:
        """A memory without a name that holds the beginning of these messages, or a new one."""
        keys = set(chain(self._start(request), request.said)[1:])
        fitting = [one for one in self._loose if not one.lock.locked() and one.live and one.live.key in keys]
        thread = max(fitting, key=lambda one: len(one.live.ledger), default=Thread(None))
        self._loose = [one for one in self._loose if one is not thread] + [thread]
        return thread

    async def _retire(self) -> None:
        """Close what was not used for long; stored threads are found again."""
        for thread in [one for one in self._loose if not one.lock.locked()][:-self.runtime.max_live]:
            self._loose.remove(thread)
            if thread.open:
                await thread.ctx.aclose()
        for session, thread in list(self._threads.items())[:-THREADS]:
            if not thread.lock.locked():
                async with thread.lock:
                    self._threads.pop(session, None)
                    if thread.open:
                        await thread.ctx.aclose()

    async def look_up(self, thread: Thread) -> None:
        """Which boundaries of it are stored, where that may not be known; what another owner saved counts.

        Notes are untrusted: one that cannot be read is none.
        """
        if thread.open and thread.session is not None and await thread.ctx.fenced():
            await thread.ctx.aclose(save=False)
            thread.stored = thread.at = None
        if thread.session is None or thread.stored is not None:
            return
        rows = []
        try:
            rows = await self._storing(self.runtime.store.info, thread.session)
        except SnapshotNotFound:
            pass
        thread.stored = {}
        for row in rows:
            try:
                boundary = _NOTE.decode(row.note) if row.note else None
            except msgspec.MsgspecError:
                boundary = None
            if boundary is not None and len(boundary.ledger) % 16 == 0:
                thread.stored[boundary.key] = (row.generation, boundary)

    async def _storing(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self.runtime.storing.submit(work, *arguments))

    # -- finding the boundary ---------------------------------------------------------------------------------

    def _start(self, request: Request) -> bytes:
        """Key of the boundary before the first message: the thread, the tools, and how the template is used."""
        owner = b"" if request.thread is None else b"t" + session_name(request.thread).encode()
        return digest(b"locret-langchain 1", owner, canonical(list(request.tools)), self._salt)

    def _candidates(self, thread: Thread, request: Request) -> list[tuple[int, Boundary, list[bytes]]]:
        """(messages held, boundary, keys of all boundaries), deepest first."""
        said, known = request.said, thread.known()
        keys = chain(self._start(request), said)
        found = [(count, known[keys[count]], keys) for count in range(1, len(said) + 1) if keys[count] in known]
        trimmed = [at for at, one in enumerate(said) if one.receipt and one.receipt != keys[at + 1]
                   and one.receipt in known]
        for at in trimmed[-RECEIPTS:]:
            if known[said[at].receipt].proves(keys[0], said[:at + 1]):
                longer = [*keys[:at + 1], *chain(said[at].receipt, said[at + 1:])]
                found += [(count, known[longer[count]], longer) for count in range(at + 1, len(said) + 1)
                          if longer[count] in known]
        return sorted(found, key=lambda one: -one[0])

    async def reach(self, thread: Thread, request: Request) -> Reached:
        """Bring the thread's context to the deepest boundary of these messages.

        Raises:
            StateLost: a stream that was absorbed cannot be reached.
        """
        said, system = request.said, heading(split(request.said)[0])
        rendered = await asyncio.to_thread(self.template.render, said, request.tools)
        last = max((at + 1 for at, one in enumerate(said) if one.stream), default=0)
        why, before, fresh = "", thread.system, not thread.known()
        thread.system = system
        for count, boundary, keys in self._candidates(thread, request):
            if count < last:
                break
            at = await asyncio.to_thread(self.template.after, said, count, request.tools, rendered)
            if at is None:
                why = "the template writes earlier messages differently once others follow"
                continue
            try:
                source = await self.go(thread, boundary)
            except SnapshotError as error:
                why = f"its snapshot cannot be used: {error}"
                _log.warning("thread %r: a snapshot cannot be used and is passed over: %s", request.thread, error)
                thread.stored.pop(boundary.key, None)
                if isinstance(error, SnapshotMismatch):  # then none of them can
                    break
                continue
            return Reached(rendered, count, at, keys, boundary, source, why)
        if last:
            raise StateLost(
                f"message {last - 1} stands for an absorbed stream, and the memory of thread {request.thread!r} that "
                f"holds it behind these messages is gone{': ' + why if why else ''}; expected the messages, system "
                "prompt, tools and store with which it was absorbed. Absorb it again, or leave its stand-in out")
        if not fresh:
            why = why or "no boundary of the thread belongs to these messages"
            if before and system and before != system:
                why = OTHER_SYSTEM
        await self._begin(thread)
        return Reached(rendered, 0, 0, chain(self._start(request), said), None, "new" if fresh else "rebuild", why)

    async def go(self, thread: Thread, boundary: Boundary) -> Source:
        """Bring the thread's context to a boundary. Raises SnapshotError."""
        if thread.live is not None and thread.live.key == boundary.key:
            return "live"
        number = thread.stored[boundary.key][0]
        await self._move(thread, number)
        thread.at = boundary
        return "snapshot"

    async def _begin(self, thread: Thread) -> None:
        """A memory that was told nothing yet."""
        await self._move(thread, 0)
        thread.at = None

    async def _move(self, thread: Thread, number: int) -> None:
        """Put the thread's context where a snapshot of that number is; 0 is the beginning."""
        await self.keep(thread)
        if thread.open and thread.session is not None and not thread.stale:
            await thread.ctx.rewind(number)
            return
        if thread.open:
            await thread.ctx.aclose(save=False)
        thread.stale = False
        ctx = self.runtime.open(thread.session, raw=True, at=None if thread.session is None else number)
        await ctx.__aenter__()
        thread.ctx = ctx

    # -- moving on --------------------------------------------------------------------------------------------

    async def _answer(self, thread: Thread, request: Request, reached: Reached,
                      emit: Callable[[AIMessageChunk], None]) -> None:
        rendered, before = reached.rendered, reached.base.tokens if reached.base else 0
        left_out = self._left_out(request, reached)
        body = await self._encode(reached, reached.at, rendered.body)
        opening, forced = self._opening(request)
        prompt = await self._encode(reached, max(reached.at, rendered.body), None)
        if body:
            await self.take(thread, body)
            thread.at = self.boundary(thread, reached, request.said)
            saved = await self._save(thread, request.save)
        ctx = thread.ctx
        await self.take(thread, prompt + opening)
        begun = ctx.memory.tokens
        shown = "".join(piece.text for piece in rendered.pieces(rendered.body))
        kinds = response_template(self.runtime.tokenizer, self._given, shown)
        reply = Reply(kinds, shown + forced, list(request.tools))
        generation = ctx.generate(None, skip_special=not shows_special(kinds, self._special), **request.sampling)
        sampled: list[int] = []
        async for token in generation:
            sampled.append(token.id)
            for chunk in reply.feed(token.text):
                emit(chunk)
            if request.choice not in ("", "any") and reply.merged.tool_call_chunks:
                await generation.aclose()  # the call that was asked for is whole
                break
        for chunk in reply.finish():
            emit(chunk)
        reason = "tool_calls" if reply.merged.tool_call_chunks else {
            "eos": "stop", "closed": "stop"}.get(generation.finish_reason, generation.finish_reason)
        answer, saved = read([reply.message])[0], False
        key = digest(reached.keys[-1], answer.digest)
        if generation.finish_reason == "stop":  # memory went on to the end of the stop string, the answer did not
            await ctx.aclose(save=False)
        else:
            await ctx.push(self.runtime.frames.close_reply(FrameState(turn="assistant"), sampled[-16:])[0])
            thread.at = self.boundary(thread, replace(reached, keys=[*reached.keys, key]), [*request.said, answer])
            saved = await self._save(thread, request.save)
        receipt = {"state": key.hex(), "source": reached.source, "reused": before, "fed": begun - before,
                   "saved": saved} | ({"why": reached.why} if reached.why else {}) | (
                       {"left_out": left_out} if left_out else {})
        usage = {"input_tokens": begun, "output_tokens": len(sampled), "total_tokens": begun + len(sampled),
                 "input_token_details": {"cache_read": before}}
        emit(AIMessageChunk(content="", chunk_position="last", usage_metadata=usage, response_metadata={
            RECEIPT: receipt, "finish_reason": reason}))

    def _left_out(self, request: Request, reached: Reached) -> list[int]:
        """New messages whose text the template does not show: a system text, or what an answer says beside its calls.

        Raises:
            ConfigError: any other text.
        """
        found = [number for number in reached.rendered.left_out if number >= reached.count]
        for number in found:
            message = request.said[number]
            if message.role != "system" and not message.calls:
                raise ConfigError(f"the chat template leaves out message {number} ({message.role}); expected a "
                                  "template that shows it, or a conversation without it")
        if found:
            _log.warning("thread %r: the chat template does not show the text of messages %s", request.thread, found)
        return found

    async def _encode(self, reached: Reached, start: int, end: int | None) -> list[int]:
        pieces = reached.rendered.pieces(start, end)
        return await asyncio.wrap_future(self.runtime.tokenizing.submit(
            self.template.encode, pieces, start=start == 0))

    async def take(self, thread: Thread, ids: list[int]) -> None:
        """Feed ids; from here on the thread rests at no boundary."""
        thread.at, thread.ctx.expendable = None, False
        thread.ctx.note = b""
        if ids:
            await thread.ctx.push(ids)

    def boundary(self, thread: Thread, reached: Reached, said: Sequence[Said]) -> Boundary:
        """Where the context rests now, all of `said` being held."""
        if reached.base is None:
            system, rest = split(said)
            start, top, ledger = reached.keys[0], heading(system), b""
        else:
            base = reached.base
            start, top, ledger, rest = base.start, base.system, base.ledger, said[reached.count:]
        ledger += b"".join(one.digest for one in rest)
        boundary = Boundary(reached.keys[-1], start, top, ledger[-16 * LEDGER:], thread.ctx.memory.tokens,
                            said[-1].role)
        thread.ctx.note = msgspec.msgpack.encode(boundary)
        return boundary

    def _opening(self, request: Request) -> tuple[list[int], str]:
        """What begins a call that is asked for, as ids and as text.

        Raises:
            ConfigError: the template cannot. InputError: no such tool.
        """
        if not request.choice:
            return [], ""
        before, between = self.template.call_opening(request.tools)
        literal = self.template.codec.literal
        if request.choice == "any":
            return literal(before), before
        return ([*literal(before), *self.template.codec.encode_text(request.choice), *literal(between)],
                before + request.choice + between)

    @property
    def _special(self) -> list[str]:
        codec = self.template.codec
        return [codec.decode([token], skip_special=False) for token in codec.special_ids]

    # -- saving -----------------------------------------------------------------------------------------------

    async def _save(self, thread: Thread, when: Save) -> bool:
        return thread.session is not None and when == "turn" and await self.keep(thread)

    async def keep(self, thread: Thread) -> bool:
        """A snapshot of the boundary where the thread rests, if there is none yet; whether there is one now.

        What cannot be saved costs reading it again, and is told; the memory at hand is right all the same.
        """
        if thread.session is None or thread.live is None or thread.stale:
            return False
        if thread.at.key in thread.stored:
            return True
        try:
            done = await thread.ctx.snapshot()
        except SnapshotError as error:
            _log.warning("%r was not saved: %s", thread.session, error)
            thread.stale = isinstance(error, StaleOwner)  # then its boundaries are to be looked up again
            return False
        thread.stored[thread.at.key] = (done.generation, thread.at)
        return True

    def memory(self, name: str) -> Memory | None:
        """What a thread holds that is at hand."""
        thread = self._threads.get(session_name(name))
        return thread.ctx.memory if thread is not None and thread.open else None

    async def seal(self, name: str) -> bool:
        """Make the boundary where a thread rests durable; False if it is not at hand."""
        thread = self._threads.get(session_name(name))
        if thread is None:
            return False
        async with thread.lock, self.gate:
            try:
                return await self.keep(thread)
            finally:
                await to_the_end(self.rest(thread))

    async def forget(self, name: str) -> bool:
        """Remove a thread's memory, from here and from the store; whether there was any."""
        thread = self.named(name)
        async with thread.lock:
            had = thread.open
            if thread.open:
                await thread.ctx.aclose(save=False)
            thread.ctx = thread.at = thread.system = None
            thread.stored = {}
            try:
                await self.runtime.forget(thread.session)
            except SnapshotNotFound:
                return had
            return True

    async def close(self) -> None:
        """Close all contexts; what rests at a boundary is saved."""
        for thread in [*self._threads.values(), *self._loose]:
            async with thread.lock, self.gate:
                await self.keep(thread)
                if thread.open:
                    await thread.ctx.aclose(save=False)
        self._threads.clear()
        self._loose.clear()
