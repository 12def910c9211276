"""StreamingContext, the public face of one memory: it is fed, asked, forked and closed. Delegates to its session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from types import TracebackType

from locret_stream.config import Sampling
from locret_stream.context import restoring, saving, swapping
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.services import Services
from locret_stream.context.session import Session
from locret_stream.context.session_state import CLOSED, REWOUND
from locret_stream.context.sources import Source, as_piece
from locret_stream.context.streams import Feed, Generation
from locret_stream.context.turns import Turn
from locret_stream.context.values import Memory, generation_of, sampling_of
from locret_stream.engine import Receipts
from locret_stream.errors import (
    ConfigError,
    ContextBusy,
    ContextClosed,
    InputError,
    NoSlot,
    StaleOwner,
)
from locret_stream.snapshot import NOTE_LIMIT, Branch, Restored, Snapshot, check_name
from locret_stream.snapshot.identity import digest_text

_log = logging.getLogger(__name__)


class StreamingContext:
    """One endless memory of fixed size. Made by `Runtime.open`; use it in `async with`.

        async with runtime.open("alice") as ctx:
            await ctx.feed(stream)
            print(await ctx.ask("What broke the build?"))

    One feed or generation runs at a time (ContextBusy); `ask`, `fork` and `memory` may be used between the tokens of
    either. Cancelling any call waits for the step in flight, so the memory rests at a token.

    Attributes:
        name: of the session, or how it is called in messages.
        resumed: it goes on from a stored session; False for one that begins.
        rebuilt: why it was fed again from its log (`on_mismatch="rebuild"`), "" if it was not.
        disposable: whether it may be closed, while nothing runs in it, when its slot is needed and it cannot be swapped
            out: there is no store, or another owner has saved the session since.
        keep: numbers of its snapshots that stay beside the newest `keep_last`, as long as it is open here; True: also
            where the store's `max_bytes` is exceeded.
    """

    def __init__(self, services: Services, name: str, *, system: str | None, raw: bool | None, trusted: bool,
                 stored: bool = False, on_mismatch: str = "raise", at: int | None = None, focus: str | None = None,
                 _fork_of: StreamingContext | None = None):
        self.name, self.resumed, self.rebuilt = name, False, ""
        self._services, self._system, self._raw, self._trusted, self._origin = services, system, raw, trusted, _fork_of
        self.stored, self._on_mismatch, self._at, self._focus = stored, on_mismatch, at, focus
        self.disposable = False
        self._keep: dict[int, bool] = {}
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- opening and closing ----------------------------------------------------------------------------------

    async def __aenter__(self) -> StreamingContext:
        if self._session is not None:
            self._session.check_open()
            raise ContextBusy(f"context {self.name!r} is open already; expected one `async with` per context")
        self._services.adopt(self)
        try:
            slot = await self._services.acquire_slot(scratch=False)
            try:
                session = await self._enter(slot)
                try:
                    self._services.check_open()  # a runtime that closes meanwhile has passed this context over
                except BaseException:
                    session.close_branch()
                    raise
            except BaseException:
                self._services.release_slot(slot, scratch=False)
                raise
        except BaseException:
            self._services.drop(self)
            raise
        self._session, self._loop = session, asyncio.get_running_loop()
        session.own(self._keep)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self, *, save: bool = True) -> None:
        """Give the slot back; a stored context is saved first (`autosave`). Idempotent. Waits for no slot.

        Running operations end as if cancelled, and so does an open `turn()`: it is undone, and what was accepted before
        it is saved. With save=False what was not saved is dropped: the session then rests at its newest snapshot.

        Raises:
            StaleOwner, StoreError: it could not be saved; it is closed all the same.
        """
        while (session := self._session) is not None and not session.closed:  # a rewind may put another in its place
            session.check_open()  # in a fork of its process it is not ours to close, or to save
            saved = save and session.branch is not None and self._services.autosave
            if saved and session.turn is not None:
                await self._undo(session.turn)
                continue
            try:
                if saved and saving.unsaved(session):
                    await self._save(session)
            except ContextClosed:  # meanwhile, by somebody else
                if not session.closed:
                    raise
            finally:
                await self._end(session)

    async def _end(self, session: Session) -> None:
        if session.closed:
            return
        session.end(CLOSED)
        self._services.drop(self)
        try:
            await to_the_end(asyncio.wrap_future(session.barrier()))  # whatever runs for it has finished then
        except ContextClosed:
            pass
        finally:
            try:
                await to_the_end(session.until_free())  # a save under way reads what closing deletes
            finally:
                if not session.swapped_out:
                    self._services.release_slot(session.state.store.slot, scratch=False)
                session.close_branch()

    async def _enter(self, slot: int) -> Session:
        """The session that this context is of, in that slot."""
        if self._origin is not None:
            return await restoring.fork(self._origin._live, slot, self.name if self.stored else None)
        branch = None
        if self.stored:
            branch = await saving.storing(self._services, self._services.store.branch, self.name)
            store = self._services.store
            if self._at != 0 and (self._at or await saving.storing(self._services, store.has, self.name)):
                try:
                    session = await restoring.resume(self._services, branch, slot, self._at,
                                                     rebuild=self._on_mismatch == "rebuild")
                    restoring.check_system(session, self.name, self._system, self._raw)
                    if self._focus is not None:
                        await session.focus(restoring.focus_ids(self._services, self._focus))
                except BaseException:
                    branch.close()
                    raise
                self.resumed, self.rebuilt = True, session.rebuilt
                return session
        return await restoring.begin(self._services, branch, slot, self._system, raw=self._raw, trusted=self._trusted,
                                     focus=self._focus)

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
        what was pulled and not accepted stays buffered for the next feed.

        Cancelled, the same; `memory.buffered` tells how much, `discard()` drops it.

        Raises (while it runs; accepted tokens stay):
            SourceError: the source raised. InvalidText, InvalidTokens, InputError: a piece that cannot be read; it
            is dropped and the feed ends. EmptySource: it gave nothing at all. ContextBusy, ContextClosed.
            BudgetExceeded: a policy that never evicts is full.
        """
        return Feed(self._live, source)

    async def push(self, piece: str | bytes | list[int]) -> int:
        """Take in one piece from a producer that cannot be pulled; returns how many tokens were accepted.

        Returns when the memory has taken it in: awaiting it is the back-pressure. Text whose cut is not known yet
        (a line without its newline) stays buffered until more comes, `flush()`, or a question.
        """
        session = self._live
        owner = object()
        session.claim("push", owner)
        try:
            session.buffer(as_piece(piece))
            await session.tokenize()
            session.left_by_break = False
            return await session.drain(paced=True)
        finally:
            session.release(owner)

    async def flush(self) -> int:
        """Accept all buffered text; the text ends here. Returns how many tokens were accepted."""
        session = self._live
        owner = object()
        session.claim("flush", owner)
        try:
            session.cut()
            await session.tokenize()
            session.left_by_break = False
            count = await session.drain(paced=True)
            await session.commit(paced=True)  # a reply that was left may have completed a chunk
            return count
        finally:
            session.release(owner)

    async def discard(self) -> int:
        """Drop what was pulled and not accepted: the rest of a feed that was left or cancelled, a line without its
        newline. Returns how many token ids and characters that were.

        Raises:
            ContextBusy: a feed or a generation is running.
        """
        session = self._live
        owner = object()
        session.claim("discard", owner)
        try:
            return session.discard()
        finally:
            session.release(owner)

    # -- giving out -------------------------------------------------------------------------------------------

    def generate(self, prompt: str | list[int] | None = None, *, sampling: Sampling | None = None,
                 skip_special: bool = True, **options: object) -> Generation:
        """Reply to what was fed, and to `prompt` if there is one; memory then holds prompt and reply.

        With a template the open user turn is closed, the reply gets a turn of its own, and that is closed however
        the generation ends. Options are those of `Sampling` (max_new_tokens, temperature, top_p, stop, seed, ...).
        `skip_special=False` shows special tokens in the text too; the end marker never.

        Raises:
            ContextBusy, ContextClosed, InvalidText, BudgetExceeded; ConfigError where there is nothing to reply to.
        """
        return Generation(self._live, prompt, sampling_of(sampling, options), name="generate",
                          skip_special=skip_special)

    async def focus(self, text: str | None) -> None:
        """Tell the memory what it will be asked about: the text stands in front of the stream from the next grid point
        on, inside the budget, seen by all that is read behind it (Locret-Q, arXiv:2410.01805). It takes the place of
        the one before; None: no focus. It is no part of the conversation, and what was scored before keeps its score.
        A focus that is replaced before the next chunk boundary has no effect, whatever the chunk size of a rebuild.

        With heads that were trained for it (`train-heads --query-aware`) units stay that matter for the query; other
        policies gain as far as the model's attention reads what it was told to look for.

        Raises:
            ConfigError: it is longer than the budget allows. BudgetExceeded, ContextClosed, InputError.
        """
        session = self._live
        await session.focus(restoring.focus_ids(self._services, text))

    async def ask(self, question: str | list[int] | None, *, sampling: Sampling | None = None,
                  **options: object) -> str:
        """The reply to `question`, computed on a scratch copy at the last accepted token: memory is left as it was.

        Waits for a scratch slot, in order, and for no other.

        Raises:
            NoSlot: none came free before the runtime's deadline, or at once if this context's own `turn()` holds the
                only one. Otherwise as `generate`.
        """
        session, settings = self._live, sampling_of(sampling, options)
        if isinstance(question, (str, bytes, list)) and not question:
            raise InputError(f"ask() was called with {question!r}; expected a question")
        if session.holds_scratch and self._services.scratch == 1:
            raise NoSlot("the open turn() of this context holds the only scratch slot since its first commit; expected "
                         "the question after the turn, `generate` inside it, or Runtime(..., scratch=2)")
        if session.swapped_out and self._services.has_room:  # else it is copied out of the store, and waits there
            await session.resident()
        async with self._services.scratch_slot() as slot:
            twin = await session.fork(slot)
            session.check_open()  # closed meanwhile, it could not end the copy that it did not know yet
            session.asks.add(twin)
            try:
                reply = Generation(twin, question, settings, name="ask")
                async for _ in reply:
                    pass
                return reply.text
            finally:
                session.asks.discard(twin)
                twin.end(CLOSED)  # a reply that failed may live on in its error's traceback, longer than the runtime

    # -- copies and blocks ------------------------------------------------------------------------------------

    def fork(self, name: str | None = None) -> StreamingContext:
        """A context that begins as a copy of this one, in a slot of its own; use it in `async with`.

        With a name of its own, the fork of a stored session is stored too, as a branch of that session.
        """
        session = self._live
        stored = name is not None and session.branch is not None
        return StreamingContext(self._services, name or f"{self.name}/fork", system=None, raw=self._raw,
                                trusted=self._trusted, stored=stored, _fork_of=self)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[StreamingContext]:
        """A block that is undone when it raises or is cancelled: memory is then bit for bit what it was before.

        The block uses a scratch slot from its first commit on.

        Raises:
            ContextBusy: a feed or generation is running, or another turn is open.
            ContextClosed (at the end of the block): it was undone, as the context was closed meanwhile.
        """
        turn = Turn(self._live)
        await turn.begin()
        try:
            yield self
            turn.session.check_open()
        except BaseException:
            if turn.undoable:
                await self._undo(turn)
            raise
        finally:
            turn.end()

    async def _undo(self, turn: Turn) -> None:
        settled, self._session = turn.session.barrier(), turn.back()
        await to_the_end(turn.settle(settled))

    # -- on disk ----------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        """Save everything accepted so far, the frame and buffered text; durable when it returns.

        Meanwhile this context may read and answer, and commits wait; other contexts go on. Cancelled, it runs to its
        end first. Inside a feed it is of the last accepted token.

        Raises:
            ConfigError: the context has no name, or the runtime no store.
            ContextBusy: inside a `turn()`, which may still be undone.
            StaleOwner: another owner saved this session meanwhile. StoreError. Nothing was acknowledged then.
        """
        return await self._save(self._stored_session("snapshot"))

    @property
    def keep(self) -> Mapping[int, bool]:
        return self._keep

    @keep.setter
    def keep(self, numbers: Mapping[int, bool]) -> None:
        self._keep.clear()
        self._keep.update(numbers)

    @property
    def unsaved(self) -> bool:
        """Whether anything was accepted or buffered since the last save; False for a context that is not stored."""
        session = self._live
        return session.branch is not None and saving.unsaved(session)

    async def fenced(self) -> bool:
        """Whether another owner has saved this session since it was opened here: then it cannot be saved any more.

        Raises:
            StoreError: the store cannot be read. ConfigError: the context is not stored.
        """
        session = self._stored_session("fenced")
        async with session.frozen():
            try:
                await saving.storing(self._services, session.branch.expect_newest)
            except StaleOwner:
                return True
        return False

    @property
    def note(self) -> bytes:
        """The caller's own, up to 64 KiB, about where the context rests: a save writes it beside the rest
        (`Snapshot.note`), and opening or rewinding to that snapshot brings it back. Whatever is accepted ends it: it is
        b"" then, so that it never speaks of another place."""
        return self._live.note

    @note.setter
    def note(self, note: bytes) -> None:
        if not isinstance(note, bytes) or len(note) > NOTE_LIMIT:
            found = f"{len(note):,} bytes" if isinstance(note, bytes) else type(note).__name__
            raise ConfigError(f"note is {found}; expected at most {NOTE_LIMIT:,} bytes")
        self._live.note = note

    async def save_as(self, name: str) -> Snapshot:
        """Save under a new name, and go on under it: as a fork of that name would, in this context's place. Cancelled,
        it runs to its end first.

        What is left for a stale owner, who cannot save under the old name any more and has all it knows.

        Raises:
            ConfigError: the store has something of that name. Otherwise as `snapshot`.
        """
        session = self._stored_session("save_as")
        check_name(name)

        async def move() -> Snapshot:
            await restoring.move(session, name)
            self.name = name
            return await self._save(session)

        return await to_the_end(move())

    async def _save(self, session: Session) -> Snapshot:
        done = await saving.save(session)
        await saving.prune(session)
        return done

    async def rewind(self, generation: int | Snapshot) -> None:
        """Go to another snapshot of this session, by its number; operations that are still around are dead, and those
        that come meanwhile are refused. Cancelled, it is either not done, or done whole.

        0 is the beginning, before anything was told; a system text given to `open` is there again.

        The next save goes on from there under a new number, and the snapshots in between stay (see `keep_last`).

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotMismatch, StoreError, ConfigError: memory is as it was.
            StaleOwner: another owner saved this session meanwhile.
            ContextBusy: a feed, a generation or a turn is running.
        """
        session = self._stored_session("rewind")
        number = generation_of(generation, self.name)
        if number == 0 and session.system and digest_text(self._system or "") != session.system:
            raise ConfigError(f"{self.name!r} was begun with a system text, which is not known here; expected "
                              "open(name, system=...) before rewind(0), or a new session")
        if session.busy is not None or session.turn is not None:
            raise ContextBusy(f"rewind() was called while {session.busy or 'a turn'} is running in this context; "
                              "expected it to be finished first")
        owner = object()
        session.claim("rewind", owner)
        try:
            await self._rewind(session, number)
        finally:
            session.release(owner)

    async def _rewind(self, session: Session, number: int) -> None:
        async with session.frozen_in_slot():  # nor is it saved: the new branch knows the newest snapshot
            branch = await saving.storing(self._services, self._services.store.branch, self.name)
            # Manifests never change: reading all of them again takes long.
            branch.session_folder.needs = session.branch.session_folder.needs
            try:
                await saving.storing(self._services, session.branch.expect_newest)
                restored = None if number == 0 else await saving.storing(self._services, lambda: branch.load(
                    self._services.identity, self._services.geometry, self._services.engine.budgets, number))
                await to_the_end(self._replace(session, branch, restored))
            finally:
                if self._session is session:
                    branch.close()

    async def _replace(self, session: Session, branch: Branch, restored: Restored | None) -> None:
        """The restored session, None for one from nothing, in the slot of this one, which ends once nothing can fail
        any more."""
        slot = session.state.store.slot
        session.replacing = gate = Future()  # asks, forks and receipts would read a mixture
        try:
            await asyncio.wrap_future(session.barrier())
            if restored is None:
                past = await restoring.begin(self._services, branch, slot, self._system if session.system else None,
                                          raw=session.raw, trusted=session.trusted, focus=self._focus, over=session)
            else:
                past = await restoring.revive(self._services, branch, restored, slot)
            session.check_open()  # it may have been closed while this one was read
            session.end(REWOUND)
        finally:
            gate.set_result(None)
        session.close_branch()
        past.saved_at = None  # so that closing saves it: the newest snapshot is another one
        past.swap_generations = session.swap_generations
        self._session = past  # here, as a cancellation comes after this has run
        past.own(self._keep)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or not opened yet."""
        return self._session is None or bool(self._session.closed)

    @property
    def swap_generations(self) -> frozenset[int]:
        """Numbers of the snapshots that swap-outs wrote and that are still stored. The next save deletes them; if the
        context is closed without saving, the caller deletes them."""
        return self._session.swap_generations if self._session is not None else frozenset()

    @property
    def swapped_out(self) -> bool:
        """Whether it has no slot: its units are in the store."""
        return self._session is not None and self._session.swapped_out

    @property
    def idle_since(self) -> float | None:
        """When it was used last, if it is idle and could be swapped out; None otherwise, and for other event loops."""
        session = self._session
        if session is None or not session.idle:
            return None
        if session.branch is None and not self.disposable:
            return None
        return session.used_at if self._loop is asyncio.get_running_loop() else None

    @property
    def resting_since(self) -> float | None:
        """As `idle_since`, of a context in the middle of an operation that waits for its source or its caller."""
        session = self._session
        if session is None or not session.between_steps or session.busy is None or session.branch is None:
            return None
        return max(session.came_at, session.used_at) if self._loop is asyncio.get_running_loop() else None

    async def swap_out(self, *, midway: bool = False) -> bool:
        """Save, and release the slot until the next use. False: it was used meanwhile, and keeps its slot.

        `midway`: also between two steps of an operation.

        A disposable context that cannot be swapped out is closed.
        """
        if self._session is None or not self._session.between_steps:
            return False
        if self._live.branch is None:
            if self._live.busy is not None:
                return False
            await self.aclose()
            return True
        try:
            return await swapping.swap_out(self._live, midway=midway)
        except StaleOwner:
            if not self.disposable or self._live.busy is not None:
                raise
            await self.aclose(save=False)
            return True

    def stored_in(self, session: str) -> bool:
        """Whether this open context is that stored session or a fork of it."""
        branch = self._session.branch if self._session is not None else None
        return branch is not None and branch.session == session

    def _stored_session(self, what: str) -> Session:
        session = self._live
        if session.branch is None:
            raise ConfigError(f"{what}() needs a stored session; expected a name in `open` or `fork`, and a Runtime "
                              "with store=<folder or URL>")
        return session

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """What is held now; cheap, valid at any time."""
        session, engine = self._live, self._services.engine
        shape, state = engine.shape, session.state
        per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.item_bytes
        return Memory(tokens=state.position, pending=len(state.pending), buffered=session.buffered,
                      units=tuple(state.store.counts),
                      capacity=tuple(units + engine.chunk_size for units in engine.budgets),
                      peak=tuple(state.peaks),
                      bytes_resident=0 if session.swapped_out else engine.pool.slot_bytes,
                      bytes_full_cache=state.position * per_token, focus=len(state.focus))

    async def receipts(self, start: int = 0, end: int | None = None) -> Receipts:
        """Which of the tokens start .. end-1 are kept, per layer and KV head, and with which score."""
        session, engine = self._live, self._services.engine
        return await session.step(lambda: engine.receipts(session.state, start, end))
