"""What a user holds: one context that is fed, asked, forked and closed. Delegates to the session and the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

import msgspec

from locret_stream.config import Sampling
from locret_stream.context.host import Host
from locret_stream.context.session import CLOSED, Mark, Session, to_the_end
from locret_stream.context.sources import Source, as_piece
from locret_stream.context.streams import Feed, Generation
from locret_stream.engine import Receipts
from locret_stream.errors import ConfigError, ContextBusy, ContextClosed, NoSlot
from locret_stream.text import FrameState


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a context holds. Units are per KV head and layer.

    tokens: accepted since the beginning. pending: of these, not committed yet. units: committed, per layer.
    capacity: the most that units and the tail may take, per layer. peak: the most they ever took.
    bytes_resident: of this context's slot, as its tensors are. bytes_full_cache: K and V of all accepted tokens, what
    a cache that never evicts would need.
    """

    tokens: int
    pending: int
    units: tuple[int, ...]
    capacity: tuple[int, ...]
    peak: tuple[int, ...]
    bytes_resident: int
    bytes_full_cache: int


def _sampling(base: Sampling | None, options: dict[str, object]) -> Sampling:
    """Settings of one generation; `stop` may be a single string."""
    if base is not None and not isinstance(base, Sampling):
        raise ConfigError(f"sampling is a {type(base).__name__}; expected a Sampling, or its fields as options")
    stop = options.get("stop", ())
    if isinstance(stop, (str, list)) or stop is None:
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    unknown = sorted(set(options) - set(Sampling.__struct_fields__))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; expected some of {', '.join(Sampling.__struct_fields__)}")
    return msgspec.structs.replace(base, **options) if base is not None else Sampling(**options)


class StreamingContext:
    """One endless memory of fixed size. Made by `Runtime.open`; use it in `async with`.

        async with runtime.open("alice") as ctx:
            await ctx.feed(stream)
            print(await ctx.ask("What broke the build?"))

    One feed or generation runs at a time (ContextBusy); `ask`, `fork` and `memory` may be used between the tokens of
    either. Cancelling any call waits for the step in flight, so the memory rests at a token.
    """

    def __init__(self, host: Host, name: str, *, system: str | None, raw: bool, trusted: bool,
                 _fork_of: StreamingContext | None = None):
        self.name = name
        self._host, self._system, self._raw, self._trusted, self._origin = host, system, raw, trusted, _fork_of
        self._session: Session | None = None

    # -- opening and closing ----------------------------------------------------------------------------------

    async def __aenter__(self) -> StreamingContext:
        if self._session is not None:
            self._session.check_open()
            raise ContextBusy(f"context {self.name!r} is open already; expected one `async with` per context")
        slot = await self._host.acquire_slot(scratch=False)
        try:
            session = await (self._begin(slot) if self._origin is None else self._origin._live.fork(slot))
            self._host.adopt(self)
        except BaseException:
            self._host.release_slot(slot, scratch=False)
            raise
        self._session = session
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give the slot back. Idempotent; running operations end as if cancelled."""
        session = self._session
        if session is None or session.closed:
            return
        session.end(CLOSED)
        self._host.drop(self)
        try:
            await to_the_end(asyncio.wrap_future(session.barrier()))  # whatever runs for it has finished then
        except ContextClosed:
            pass
        finally:
            self._host.release_slot(session.state.store.slot, scratch=False)

    async def _begin(self, slot: int) -> Session:
        host = self._host
        if self._raw and self._system is not None:
            raise ConfigError("a raw context has no frame, so no place for a system message; expected none: feed it")
        ids, frame = ([], FrameState()) if self._raw else host.frames.begin(self._system, trusted=self._trusted)
        session = Session(host, host.engine.open(slot), frame, raw=self._raw, trusted=self._trusted)
        await session.take(ids)
        return session

    @property
    def _live(self) -> Session:
        if self._session is None:
            raise ContextClosed(f"context {self.name!r} is not open; expected `async with runtime.open(...) as ctx`")
        self._session.check_open()
        return self._session

    # -- taking in --------------------------------------------------------------------------------------------

    def feed(self, source: Source) -> Feed:
        """Take in a stream: str, bytes, token ids, or an iterator or async iterator of these.

        `async for tok in ctx.feed(s)` gives each token once it is accepted; `await ctx.feed(s)` drains it and returns
        a FeedReport. The source is pulled only as fast as the memory takes it in, and never closed. After a `break`
        what was pulled and not accepted stays held for the next feed.

        Raises (while it runs; accepted tokens stay):
            SourceError: the source raised. InvalidText, InvalidTokens, InputError: a piece that cannot be read; it
            is dropped and the feed ends. EmptySource: it gave nothing at all. ContextBusy, ContextClosed.
            BudgetExceeded: a policy that never evicts is full.
        """
        return Feed(self._live, source)

    async def push(self, piece: str | bytes | list[int]) -> int:
        """Take in one piece from a producer that cannot be pulled; returns how many tokens were accepted.

        Returns when the memory has taken it in: awaiting it is the back-pressure. Text whose cut is not known yet
        (a line without its newline) stays held until more comes, `flush()`, or a question.
        """
        session = self._live
        owner = object()
        session.claim("push", owner)
        try:
            session.hold(as_piece(piece))
            await session.tokenize()
            session.left_by_break = False
            return await session.drain(paced=True)
        finally:
            session.release(owner)

    async def flush(self) -> int:
        """Accept everything that is held; the text ends here. Returns how many tokens were accepted."""
        session = self._live
        owner = object()
        session.claim("flush", owner)
        try:
            session.cut()
            await session.tokenize()
            session.left_by_break = False
            return await session.drain(paced=True)
        finally:
            session.release(owner)

    # -- giving out -------------------------------------------------------------------------------------------

    def generate(self, prompt: str | list[int] | None = None, *, sampling: Sampling | None = None,
                 **options: object) -> Generation:
        """Reply to what was fed, and to `prompt` if there is one; memory then holds prompt and reply.

        With a template the open user turn is closed, the reply gets a turn of its own, and that is closed however
        the generation ends. Options are those of `Sampling` (max_new_tokens, temperature, top_p, stop, seed, ...).

        Raises:
            ContextBusy, ContextClosed, InvalidText, BudgetExceeded; ConfigError where there is nothing to reply to.
        """
        return Generation(self._live, prompt, _sampling(sampling, options), name="generate")

    async def ask(self, question: str | list[int] | None, *, sampling: Sampling | None = None,
                  **options: object) -> str:
        """The reply to `question`, computed on a scratch copy at the last accepted token: memory is left as it was.

        Waits for a scratch slot, in order.

        Raises:
            NoSlot: none came free before the runtime's deadline, or at once if this context's own `turn()` holds the
                only one. Otherwise as `generate`.
        """
        session, settings = self._live, _sampling(sampling, options)
        if session.holds_scratch and self._host.scratch == 1:
            raise NoSlot("the open turn() of this context holds the only scratch slot since its first commit; expected "
                         "the question after the turn, `generate` inside it, or Runtime(..., scratch=2)")
        async with self._host.scratch_slot() as slot:
            twin = await session.fork(slot)
            session.asks.add(twin)
            try:
                reply = Generation(twin, question, settings, name="ask")
                async for _ in reply:
                    pass
                return reply.text
            finally:
                session.asks.discard(twin)

    # -- copies and blocks ------------------------------------------------------------------------------------

    def fork(self, name: str | None = None) -> StreamingContext:
        """A context that begins as a copy of this one, in a slot of its own; use it in `async with`."""
        self._live  # noqa: B018 - raises when closed
        return StreamingContext(self._host, name or f"{self.name}/fork", system=None, raw=self._raw,
                                trusted=self._trusted, _fork_of=self)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[StreamingContext]:
        """A block that is undone when it raises or is cancelled: memory is then bit for bit what it was before.

        A scratch slot is held from the first commit inside the block on.

        Raises:
            ContextBusy: a feed or generation is running, or another turn is open.
        """
        session = self._live
        if session.busy is not None or session.before_commit is not None:
            raise ContextBusy(f"turn() was called while {session.busy or 'another turn'} is running in this context; "
                              "expected it to be finished first")
        mark = session.mark()
        backup: Session | None = None

        async def keep_copy() -> None:
            nonlocal backup
            if backup is None:
                slot = await self._host.acquire_slot(scratch=True)
                try:
                    copy = await session.fork(slot)
                except BaseException:
                    self._host.release_slot(slot, scratch=True)
                    raise
                if session.before_commit is keep_copy:
                    backup, session.holds_scratch = copy, True
                else:  # the block ended meanwhile, in another task
                    self._host.release_slot(slot, scratch=True)

        session.before_commit = keep_copy
        try:
            yield self
        except BaseException:
            session.before_commit = None
            if not session.closed:
                await to_the_end(self._go_back(session, mark, backup))
            raise
        finally:
            session.before_commit, session.holds_scratch = None, False
            if backup is not None:
                self._host.release_slot(backup.state.store.slot, scratch=True)

    async def _go_back(self, session: Session, mark: Mark, backup: Session | None) -> None:
        settled, self._session = session.barrier(), session.back_at(mark, backup)
        past, engine = self._session, self._host.engine
        assert past.state.seen == mark.seen
        past.claim("undo", mark)
        if backup is not None:  # its slot is this context's now, and the other one is spare
            backup.state = session.state
        with contextlib.suppress(ContextClosed):  # closed meanwhile
            await asyncio.wrap_future(settled)
            await past.step(lambda: engine.truncate(past.state, mark.pending))
        past.release(mark)

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """What is held now; cheap, valid at any time."""
        session, engine = self._live, self._host.engine
        shape, state = engine.shape, session.state
        per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.item_bytes
        return Memory(tokens=state.position, pending=len(state.pending), units=tuple(state.store.counts),
                      capacity=tuple(units + engine.chunk_size for units in engine.budgets),
                      peak=tuple(state.peaks),
                      bytes_resident=engine.pool.slot_bytes, bytes_full_cache=state.position * per_token)

    async def receipts(self, start: int = 0, end: int | None = None) -> Receipts:
        """Which of the tokens start .. end-1 are kept, per layer and KV head, and with which score."""
        session, engine = self._live, self._host.engine
        return await session.step(lambda: engine.receipts(session.state, start, end))
