"""StreamingContext, the public API of one memory: it is fed, asked, forked, saved and closed. Its session works."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from locret_stream.config import Recall, Sampling, check_recall
from locret_stream.constraints import Constraint
from locret_stream.context import recalling, restoring, saving, swapping
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.restoring import Opening
from locret_stream.context.services import Services
from locret_stream.context.session import Session
from locret_stream.context.session_index import Recalled
from locret_stream.context.session_state import CLOSED
from locret_stream.context.sources import Source, as_piece
from locret_stream.context.streams import Feed, Generation, Token
from locret_stream.context.turns import Turn
from locret_stream.context.values import Answer, Memory, sampling_of
from locret_stream.engine import Occupancy, Receipts, occupancy
from locret_stream.errors import ConfigError, ContextBusy, ContextClosed, InputError, StaleOwner
from locret_stream.snapshot import NOTE_LIMIT, Branch, Restored, Snapshot, check_name
from locret_stream.snapshot.identity import digest_text


class StreamingContext:
    """One endless memory of fixed size. Made by `Runtime.open`; use it in `async with`.

        async with runtime.open("alice") as ctx:
            await ctx.feed(stream)
            print(await ctx.ask("What broke the build?"))

    One feed or generation runs at a time (ContextBusy); `ask`, `fork` and `memory` may be used between the tokens of
    either. Cancelling any call waits for the running step, so that the memory rests at a token.

    Attributes:
        name: of the session, or the name of the context in messages.
        resumed: it goes on from a stored session; False for one that begins.
        rebuilt: why it was fed again from its log (`on_mismatch="rebuild"`); "": it was not.
        disposable: whether it may be closed, while nothing runs in it, when its slot is needed and it cannot be swapped
            out: there is no store, or another owner has saved the session since.
        keep: numbers of its snapshots that stay beside the newest `keep_last`, as long as it is open here; True: also
            where the store's `max_bytes` is exceeded.
    """

    def __init__(self, services: Services, name: str, opening: Opening, *, fork_of: StreamingContext | None = None):
        self.name, self.resumed, self.rebuilt = name, False, ""
        self._services, self._opening, self._origin = services, opening, fork_of
        self.disposable = False
        self._keep: dict[int, bool] = {}
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- opening and closing ----------------------------------------------------------------------------------

    async def __aenter__(self) -> StreamingContext:
        if self._session is not None:
            self._session.check_open()
            raise ContextBusy(f"context {self.name!r} is open already; expected one `async with` per context")
        self._services.check_open()
        self._expect_kept(self.name if self.stored else None)
        slots = self._services.slots
        with contextlib.ExitStack() as undoing:
            slots.adopt(self)
            undoing.callback(slots.drop, self)
            slot = await slots.acquire(scratch=False)
            undoing.callback(slots.release, slot, scratch=False)
            if self._origin is None:
                session, self.resumed = await restoring.open_session(self._services, self.name, self._opening, slot)
            else:
                session = await restoring.fork(self._origin._live, slot, self.name if self.stored else None)
            undoing.callback(session.close_branch)
            self._services.check_open()  # a runtime that began to close meanwhile does not close this context
            self._expect_kept(session.branch.session if session.branch is not None else None)
            undoing.pop_all()
        self._session, self._loop, self.rebuilt = session, asyncio.get_running_loop(), session.rebuilt
        session.own(self._keep)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self, *, save: bool = True) -> None:
        """Give the slot back. A stored context is saved first (`autosave`). Idempotent. Waits for no slot.

        Running operations end as if cancelled, and so does an open `turn()`: it is undone, and what was accepted before
        it is saved. What would be accepted while it is saved is refused. With save=False what was not saved is dropped:
        the session then rests at its newest snapshot.

        Raises:
            StaleOwner, StoreError: it could not be saved; it is closed all the same.
        """
        while (session := self._session) is not None and not session.closed:  # a rewind may put another in its place
            session.check_open()  # a fork of its process must neither close nor save it
            session.begin_closing()
            saved = save and session.branch is not None and self._services.autosave
            if saved and session.turn is not None:
                await session.turn.undo()
                continue
            try:
                while saved and saving.unsaved(session):  # again, if a step that ran already has accepted more
                    await self._save(session)
            except ContextClosed:  # another task closed it meanwhile
                if not session.closed:
                    raise
            finally:
                await self._end(session)

    async def _end(self, session: Session) -> None:
        if session.closed:
            return
        session.end(CLOSED)
        self._services.slots.drop(self)
        try:
            with contextlib.suppress(ContextClosed):
                await to_the_end(asyncio.wrap_future(session.barrier()))  # until every step of it is done
        finally:
            try:
                await to_the_end(session.until_free())  # a running save reads what closing deletes
            finally:
                if not session.swapped_out:
                    self._services.slots.release(session.state.store.slot, scratch=False)
                session.close_branch()
                session.close_index()

    @property
    def stored(self) -> bool:
        """Whether it is a session of the store."""
        return self._opening.stored

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

        So it does when the feed is cancelled. `memory.buffered` says how much it is, `discard()` drops it.

        Raises (while it runs; accepted tokens stay):
            SourceError: the source raised. InvalidText, InvalidTokens, InputError: a piece that cannot be read; it
            is dropped and the feed ends. EmptySource: it gave nothing at all. ContextBusy, ContextClosed.
            BudgetExceeded: a policy that never evicts is full.
        """
        return Feed(self._live, source)

    async def push(self, piece: str | bytes | list[int]) -> int:
        """Take in one piece from a producer that cannot be pulled; returns how many tokens were accepted.

        It returns when the memory has taken the piece in: awaiting it is the back-pressure. Text whose cut is not known
        yet (a line without its newline) stays buffered until more text, `flush()`, or a question comes.
        """
        with self._claimed("push") as session:
            session.buffer(as_piece(piece))
            await session.tokenize()
            session.buffered.take_up()
            return await session.drain(paced=True)

    async def flush(self) -> int:
        """End the text here and accept all that is buffered. Returns how many tokens were accepted."""
        with self._claimed("flush") as session:
            session.buffered.cut()
            await session.tokenize()
            session.buffered.take_up()
            count = await session.drain(paced=True)
            await session.commit(paced=True)  # a reply that was left may have completed a chunk
            return count

    async def discard(self) -> int:
        """Drop what was pulled and not accepted: the rest of a feed that was left or cancelled, a line without its
        newline. Returns how many token ids and characters were dropped.

        Raises:
            ContextBusy: a feed or a generation is running.
        """
        with self._claimed("discard") as session:
            return session.buffered.discard()

    @contextlib.contextmanager
    def _claimed(self, operation: str) -> Iterator[Session]:
        """The session, busy with that operation for the length of a block. Raises ContextBusy, ContextClosed."""
        session, owner = self._live, object()
        session.claim(operation, owner)
        try:
            yield session
        finally:
            session.release(owner)

    # -- giving out -------------------------------------------------------------------------------------------

    def generate(self, prompt: str | list[int] | None = None, *, sampling: Sampling | None = None,
                 skip_special: bool | Collection[int] = True, recall: bool | Recall | None = None,
                 aside: Sequence[int] = (), constraint: Constraint | None = None,
                 unheld: Collection[int] | None = None, **options: Any) -> Generation:
        """Reply to what was fed, and to `prompt` if there is one; prompt and reply are accepted into the memory.

        With a template the open user turn is closed, and the reply gets a turn of its own, which is closed however
        the generation ends. Options are those of `Sampling` (max_new_tokens, temperature, top_p, stop, seed, schema,
        ...).
        `skip_special=False` shows special tokens in the text too, ids leave out those; the end marker never shows.

        Args:
            recall: whether the reply is written by a scratch copy that reads again, before the prompt, what has the
                prompt's words (see `recall`); by default as the runtime was told. Without a prompt nothing is recalled,
                though a question was fed. The memory takes in the prompt and the reply alone. The generation's
                `recalled` says what it was.
            aside: ids that such a copy reads before the prompt, in place of what would be recalled.
            constraint: of the schema or grammar, where it was begun (`Constraints.begin`); by default at its beginning.
            unheld: end markers that the memory does not take in; by default, where there are turns, those that the
                template closes no reply with (`ChatFrame.unheld_ends`).

        Raises:
            ContextBusy, ContextClosed, InvalidText, BudgetExceeded; ConfigError where there is nothing to reply to, or
            for a schema that cannot be held, before anything is read.
            NoSlot: with recall, no scratch slot came free. Otherwise as `recall`.
        """
        check_recall(recall)
        session, ids = self._live, tuple(self._services.codec.validate_ids(aside))

        async def before() -> recalling.ReadAgain:
            if ids:
                return recalling.ReadAgain((), ids, recalling.settings_of(self._services, recall).memory)
            return await recalling.read_again(session, prompt, recall)

        return Generation(session, prompt, sampling_of(sampling, options), name="generate", skip_special=skip_special,
                          before=before, constraint=constraint, unheld=unheld)

    async def focus(self, text: str | None) -> None:
        """Tell the memory what it will be asked about. From the next chunk boundary on, the text stands in front of the
        stream, inside the budget, and all tokens read after that attend to it (Locret-Q, arXiv:2410.01805). It replaces
        the focus before it; None: no focus. It is no part of the conversation, and units keep the scores that they
        have. A focus that is replaced before the next chunk boundary has no effect, whatever the chunk size of a
        rebuild.

        Retaining heads that were trained for it (`train-heads --query-aware`) keep units that matter for the query.
        Other policies gain as far as the model's attention follows the text.

        Raises:
            ConfigError: it is longer than the budget allows. BudgetExceeded, ContextClosed, InputError.
        """
        session = self._live
        await session.focus(await restoring.focus_ids(self._services, text))

    async def ask(self, question: str | list[int] | None, *, sampling: Sampling | None = None,
                  recall: bool | Recall | None = None, aside: Sequence[int] = (),
                  skip_special: bool | Collection[int] = True,
                  on_token: Callable[[Token], object] | None = None, **options: Any) -> Answer:
        """The reply to `question`, computed on a scratch copy at the last accepted token: the memory stays as it is.

        It is text whose `finish_reason` says whether `max_new_tokens` cut it off ("length"); of a reply held to a
        `schema` that is then no whole JSON. Waits in order for a scratch slot, and for no live one.

        Args:
            recall: whether the copy reads again, before the question, what has the question's words: what `recall`
                returns. It keeps less of its memory beside that (see `Recall`). By default as the runtime was told.
            aside: token ids that the copy reads before the question, in place of what would be recalled.
            skip_special: as of `generate`.
            on_token: a plain function, called with each token of the reply as it comes; their texts make up the reply.
                What it raises ends the answer.

        Raises:
            NoSlot: none came free before the runtime's deadline, or at once if this context's own `turn()` holds the
                only one. Otherwise as `generate` and `recall`.
        """
        check_recall(recall)
        session, settings = self._live, sampling_of(sampling, options)
        if on_token is not None and (not callable(on_token) or inspect.iscoroutinefunction(on_token)):
            raise ConfigError(f"on_token is {on_token!r}; expected a plain function, which is called and not awaited")
        if isinstance(question, (str, bytes, list)) and not question:
            raise InputError(f"ask() was called with {question!r}; expected a question")
        ids = tuple(self._services.codec.validate_ids(aside))
        constraint = await session.constraint(settings)  # a schema that cannot be held waits for no slot
        swapping.expect_scratch(session, "the question after it, `generate` inside a turn")
        if session.swapped_out and self._services.slots.has_room:  # otherwise it is copied from the store
            await session.resident()
        again = (recalling.ReadAgain((), ids, recalling.settings_of(self._services, recall).memory) if ids
                 else await recalling.read_again(session, question, recall))
        async with self._services.slots.scratch_slot() as slot:
            copy = await session.fork(slot)
            with session.answering_on(copy):
                reply = Generation(copy, question, settings, name="ask", before=again, constraint=constraint,
                                   skip_special=skip_special)
                async for token in reply:
                    if on_token is not None:
                        on_token(token)
                assert reply.finish_reason is not None, "it ended"
                return Answer(reply.text, reply.finish_reason, reply.recalled)

    async def recall(self, question: str | list[int], recall: Recall | None = None) -> tuple[Recalled, ...]:
        """The passages of all that was read that have the words of a question, in the order in which they were read.

        They are found by their words (BM25), whether their units were evicted or not. Of what is not committed yet
        nothing is found: it stands before a question anyway.

        Args:
            recall: how much, whether the budget has room for it or not; by default as much as `ask` would read.

        Raises:
            ConfigError: the runtime keeps nothing for recall, or the store no log. SnapshotCorrupt, StoreError: the log
            of a stored session cannot be read. ContextClosed.
        """
        if recall is not None and not isinstance(recall, Recall):
            raise ConfigError(f"recall is {recall!r}; expected Recall(tokens=...)")
        return tuple(await recalling.recalled(self._live, question, recall or True, to_read=recall is None))

    async def occupancy(self, start: int = 0, end: int | None = None, columns: int = 400) -> Occupancy:
        """How many units of the tokens start .. end-1 the memory keeps, counted in at most that many columns of equally
        many tokens. It takes as long as the memory is large, however long the stream was.

        Raises:
            InputError: there are no such tokens, or columns is not 1 to 4,096. ContextClosed, NoSlot.
        """
        session = self._live
        return await session.step(lambda: occupancy(session.state, start, end, columns))

    # -- copies and blocks ------------------------------------------------------------------------------------

    def fork(self, name: str | None = None) -> StreamingContext:
        """A context that begins as a copy of this one, in a slot of its own; use it in `async with`.

        With a name of its own, the fork of a stored session is stored too, as a branch of that session.
        """
        session = self._live
        stored = name is not None and session.branch is not None
        opening = Opening(raw=self._opening.raw, trusted=self._opening.trusted, stored=stored)
        return StreamingContext(self._services, name or f"{self.name}/fork", opening, fork_of=self)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[StreamingContext]:
        """A block that is undone when it raises or is cancelled: the memory is then bit for bit what it was before.

        The block uses a scratch slot from its first commit on.

        Raises:
            ContextBusy: a feed or generation is running, or another turn is open.
            ContextClosed (at the end of the block): the context was closed meanwhile, so the block was undone.
        """
        turn = Turn(self._live, self._go_on_in)
        await turn.begin()
        try:
            yield self
            turn.session.check_open()
        except BaseException:
            await turn.undo()
            raise
        finally:
            turn.end()

    def _go_on_in(self, session: Session) -> None:
        self._session = session

    # -- on disk ----------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        """Save everything accepted so far, the frame and buffered text; durable when it returns.

        Meanwhile this context may read and answer, and its commits wait; other contexts go on. A save that is cancelled
        runs to its end first. Inside a feed, the snapshot is of the last accepted token.

        Raises:
            ConfigError: the context has no name, or the runtime no store.
            ContextBusy: inside a `turn()`, which may still be undone.
            StaleOwner: another owner saved this session meanwhile. StoreError. Nothing was saved then.
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
                await saving.storing(self._services, session.stored_branch.expect_recorded)
            except StaleOwner:
                return True
        return False

    @property
    def note(self) -> bytes:
        """Up to 64 KiB of the caller's, about the place in the stream where the context is. A save stores it
        (`Snapshot.note`), and opening or rewinding to that snapshot restores it. It is b"" as soon as anything is
        accepted, so that it never speaks of another place."""
        return self._live.note

    @note.setter
    def note(self, note: bytes) -> None:
        if not isinstance(note, bytes) or len(note) > NOTE_LIMIT:
            given = f"{len(note):,} bytes" if isinstance(note, bytes) else type(note).__name__
            raise ConfigError(f"note is {given}; expected at most {NOTE_LIMIT:,} bytes")
        self._live.set_note(note)

    async def save_as(self, name: str) -> Snapshot:
        """Save under a new name, and go on under it as a fork of that name would. When it is cancelled, it runs to its
        end first.

        A stale owner, which cannot save under the old name any more, keeps its memory this way.

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
        snapshot = await saving.save(session)
        await saving.prune(session)
        return snapshot

    async def rewind(self, generation: int | Snapshot) -> None:
        """Go to another snapshot of this session, by its number. Operations that have not ended raise ContextClosed;
        those that come meanwhile are refused. When it is cancelled, it is done as a whole or not at all.

        0 is the beginning, before anything was fed; a system text given to `open` is read again there.

        The next save goes on from there under a new number, and the snapshots in between stay (see `keep_last`).

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotMismatch, StoreError, ConfigError: memory is as it was.
            StaleOwner: another owner saved this session meanwhile.
            ContextBusy: a feed, a generation or a turn is running, or `save_as` was.
        """
        session = self._stored_session("rewind")
        number = restoring.generation_of(generation, self.name)
        if number == 0 and session.system and digest_text(self._opening.system or "") != session.system:
            raise ConfigError(f"{self.name!r} was begun with a system text, which is not known here; expected "
                              "open(name, system=...) before rewind(0), or a new session")
        if session.busy is not None or session.turn is not None:
            raise ContextBusy(f"rewind() was called while {session.busy or 'a turn'} is running in this context; "
                              "expected it to be finished first")
        with self._claimed("rewind"):
            async with restoring.snapshot_of(session, self.name, number) as (branch, restored):
                await to_the_end(self._replace(session, branch, restored))

    async def _replace(self, session: Session, branch: Branch, restored: Restored | None) -> None:
        self._session = past = await restoring.overwrite(session, branch, restored, self._opening)
        past.own(self._keep)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is not open yet."""
        return self._session is None or bool(self._session.closed)

    @property
    def swap_generations(self) -> frozenset[int]:
        """Numbers of the snapshots that swap-outs wrote and that are still stored. The next save deletes them; if the
        context is closed without saving, the caller deletes them."""
        return self._session.swap_generations if self._session is not None else frozenset()

    @property
    def swapped_out(self) -> bool:
        """Whether its units are in the store, so that it has no slot."""
        return self._session is not None and self._session.swapped_out

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which it was opened; None before that."""
        return self._loop

    @property
    def idle_since(self) -> float | None:
        """When it was used last (`time.monotonic`), if it is idle and can be swapped out; None otherwise. Any thread
        may ask; `swap_out` looks once more."""
        session = self._session
        if session is None or not session.idle:
            return None
        if session.branch is None and not self.disposable:
            return None
        return session.used_at

    @property
    def resting_since(self) -> float | None:
        """As `idle_since`, for a context in the middle of an operation that waits for its source or its caller."""
        session = self._session
        if session is None or not session.between_steps or session.busy is None or session.branch is None:
            return None
        return max(session.came_at, session.used_at)

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
        """Whether this context, which is open or being opened, is that stored session or a fork of it."""
        if self._session is None:
            return self.stored and self.name == session
        branch = self._session.branch
        return branch is not None and branch.session == session

    def _expect_kept(self, session: str | None) -> None:
        """Raises ContextBusy while that session is being removed."""
        if session in self._services.forgetting:
            raise ContextBusy(f"session {session!r} is being forgotten; expected to open it when forget() has ended")

    def _stored_session(self, what: str) -> Session:
        session = self._live
        if session.branch is None:
            raise ConfigError(f"{what}() needs a stored session; expected a name in `open` or `fork`, and a Runtime "
                              "with store=<folder or URL>")
        return session

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def raw(self) -> bool:
        """Whether text has no chat frame around it."""
        return self._live.raw

    @property
    def memory(self) -> Memory:
        """What the memory keeps now; cheap, and valid at any time."""
        session, engine = self._live, self._services.engine
        shape, state, index = engine.shape, session.state, session.index
        return Memory(tokens=state.position, pending=len(state.pending), buffered=session.buffered.size,
                      units=tuple(map(state.store.held, range(shape.layers))),
                      capacity=tuple(units + engine.chunk_size for units in engine.budgets),
                      peak=tuple(state.peaks),
                      bytes_resident=0 if session.swapped_out else engine.pool.slot_bytes,
                      bytes_full_cache=state.position * shape.token_bytes, focus=len(state.focus),
                      bytes_recall=0 if index is None else index.bytes, rounded=state.rounded)

    async def receipts(self, start: int = 0, end: int | None = None) -> Receipts:
        """Which of the tokens start .. end-1, at most 1,048,576, are kept, per layer and KV head, and with which score.
        """
        session, engine = self._live, self._services.engine
        return await session.step(lambda: engine.receipts(session.state, start, end))
