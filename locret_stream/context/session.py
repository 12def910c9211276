"""One conversation between the async face and the engine: what is pulled, accepted and committed, and in which frame.
Where its slot comes from is told in `context.swapping`.

A stream goes through four places, in order, and is in exactly one of them:
    segmenter (text whose cut is not known yet) -> segments (cut, not tokenised) -> ids (tokenised) -> the engine.
The first three are *held*: bounded, and taken first by the next feed. What the engine has is *accepted*.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from locret_stream.context.sources import Piece
from locret_stream.engine import EngineState, NextToken
from locret_stream.errors import ContextBusy, ContextClosed, InvalidText
from locret_stream.text import FrameState, Segmenter
from locret_stream.worker import expect_own

if TYPE_CHECKING:
    from torch import Tensor

    from locret_stream.context.host import Host
    from locret_stream.context.turns import Turn
    from locret_stream.snapshot import Branch
    from locret_stream.snapshot.log import Refocus

T = TypeVar("T")
Segment = str | list[int]
_INLINE_CHARS = 512  # a hop to a thread costs more than tokenising this much

CLOSED = "this context is closed; expected a call inside its `async with`"
REWOUND = "the context was rewound since this began; expected a new call on the context"
UNDONE = "this was undone together with the turn it began in; expected a new call on the context"


def _pending(gate: Future[None] | None) -> bool:
    return gate is not None and not gate.done()


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of `work`, which runs to its end even when the caller is cancelled; that is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what the caller sees
        raise cancelled
    return task.result()


class Session:
    """Engine state, frame and held text of one context, and the steps that move them.

    `busy` names the operation whose `owner` has the session; one at a time. All methods belong to one event loop.
    Once `closed` says why, no step runs and no id is accepted, whoever still holds the session.
    """

    def __init__(self, host: Host, state: EngineState, frame: FrameState, *, raw: bool, trusted: bool):
        self.host, self.state, self.frame, self.raw, self.trusted = host, state, frame, raw, trusted
        self.segmenter = Segmenter()
        self.segments: deque[Segment] = deque()
        self.ids: deque[int] = deque()
        self.left_by_break = False
        self.busy: str | None = None
        self.owner: object | None = None
        self.closed: str | None = None
        self.branch: Branch | None = None  # where it is stored
        self.system = ""  # digest of the system text, "" without
        self.note = b""  # the caller's own, saved beside the rest; whatever is accepted ends it
        self.parked = 0  # number of the snapshot that only held its place in the store, the last time it waited there
        self.keep: dict[int, bool] = {}  # the context's own: numbers of snapshots that stay (`StreamingContext.keep`)
        self.saved_at: object = None  # what the newest save saw
        self.rebuilt = ""  # why it was fed again from its log
        self.owned = False  # a context goes on with it: its slot may be given to others, and is given back
        self.returning: Future[None] | None = None  # while a slot is found for it again
        self.away = False  # its units are in the store, its slot is another's
        self.steps, self.used_at = 0, time.monotonic()  # steps under way; when the last one was given
        self.came_at = self.used_at  # when it got its slot
        self.stopped: Future[None] | None = None  # pending: somebody is inside `still`
        self.replacing: Future[None] | None = None  # pending: another state is written into its slot
        self.undoing: Future[None] | None = None  # pending: what is accepted is that of a block that is being undone
        self.asks: set[Session] = set()  # scratch copies that run now; they end with this session
        self.before_commit: Callable | None = None  # an open `turn()` makes its backup here
        self.turn: Turn | None = None  # that one
        self.holds_scratch = False  # that backup's slot

    # -- who may act ------------------------------------------------------------------------------------------

    def claim(self, operation: str, owner: object) -> None:
        """Let `owner` have the session for `operation`, or raise ContextBusy / ContextClosed."""
        self.check_open()
        if self.busy is not None:
            raise ContextBusy(f"{operation} was called while {self.busy} is running in this context; expected one at a "
                              f"time: finish or `aclose()` the {self.busy} first, or fork the context")
        self.busy, self.owner = operation, owner

    def release(self, owner: object) -> None:
        """Give the session back; nothing if `owner` does not have it."""
        if self.owner is owner:
            self.busy = self.owner = None
            self.rested()

    def check_open(self) -> None:
        """Raises ContextClosed, saying why, once the session has ended, and in a fork of its process."""
        if self.closed:
            raise ContextClosed(self.closed)
        expect_own(self.host.worker.process)

    @property
    def still_now(self) -> bool:
        """Whether somebody is inside `still`, or a turn is being undone."""
        return _pending(self.stopped) or _pending(self.undoing)

    @property
    def between_steps(self) -> bool:
        """It may be put away here: no step runs, no turn is open, and nobody needs its units to stay."""
        return (self.owned and not (self.away or self.before_commit or self.still_now or self.steps or self.closed)
                and not self.state.broken)

    @property
    def idle(self) -> bool:
        """It may be put away, and nothing runs in it."""
        return self.busy is None and self.between_steps

    def rested(self) -> None:
        """Tell the host if this session came to rest, in case somebody waits for a slot."""
        if self.idle:
            self.host.rested()

    def __del__(self) -> None:
        if not getattr(self, "owned", False) or self.closed:
            return
        name = "a context" if self.branch is None else f"session {self.branch.name!r}"
        warnings.warn(f"{name} was dropped and never closed, so what was not saved is lost; expected `async with "
                      "runtime.open(...)`, or `await ctx.aclose()`", ResourceWarning, stacklevel=2, source=self)
        host, slot, branch = self.host, None if self.away else self.state.store.slot, self.branch

        def give_back() -> None:
            if branch is not None:
                branch.close()
            if slot is not None:
                host.release_slot(slot, scratch=False)

        with contextlib.suppress(ContextClosed):  # the runtime was closed before
            host.worker.submit(id(self.state), give_back)  # behind the steps that were given

    def close_branch(self) -> None:
        """Let go of what is stored; what was not saved of its log is gone."""
        if self.branch is not None:
            self.branch.close()

    def end(self, why: str) -> None:
        """No operation of this session, or of its scratch copies, does anything more."""
        for session in (self, *self.asks):
            session.closed = why

    # -- steps on the engine's thread -------------------------------------------------------------------------

    async def step(self, work: Callable[[], T]) -> T:
        """Run one bounded step on the engine's thread, in the slot, which is waited for if it is another's.

        Cancelling takes a queued step back; a running one is waited for, so that the engine rests on a boundary.

        Raises:
            NoSlot: none came free; nothing was done.
        """
        await self.resident()
        return await self.submitted(lambda: self.host.worker.submit(id(self.state), work))

    async def next_token(self, choose: Callable[[Tensor], int]) -> int:
        """One token: `choose` gives it from logits [vocab] on the engine's thread, and it is accepted. A step that all
        contexts which are generating take together; cancelled as any step is."""
        engine = self.host.engine
        await self.resident()
        return await self.submitted(lambda: self.host.worker.submit_joint(
            id(self.state), id(engine), NextToken(self.state, choose), engine.decode, engine.run_ahead))

    async def exclusively(self, work: Callable[[], T]) -> T:
        """A step that moves units: not while somebody is in `still`. Raises and is cancelled as `step`."""
        await self.resident()
        while self.away or self.still_now:
            await self.until_free()
            await self.resident()
        return await self.submitted(lambda: self.host.worker.submit(id(self.state), work))

    async def resident(self) -> None:
        """Have a slot: wait for one if the units are in the store, or give others a turn if this one had its own.

        What follows without an `await` finds the session in its slot. Raises NoSlot.
        """
        self.check_open()
        await self.host.make_resident(self)

    async def submitted(self, submit: Callable[[], Future[T]]) -> T:
        """Queue a step that needs no slot, or for which the session is known to have one; cancelled as `step` is.

        While a rewind writes another state into the slot it waits: ContextClosed is raised once that is there.
        """
        self.check_open()
        while _pending(self.replacing):
            await asyncio.shield(asyncio.wrap_future(self.replacing))
            self.check_open()
        self.used_at = time.monotonic()
        future = submit()
        self.steps += 1
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():  # it runs already
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
                while not future.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await ended.wait()
            raise
        finally:
            self.steps -= 1
            self.rested()

    def barrier(self) -> Future[None]:
        """Done when every step given so far is; also of a session that has ended."""
        return self.host.worker.submit(id(self.state), lambda: None)

    def accept(self, ids: list[int]) -> None:
        """Take ids over as pending; all or none."""
        self.check_open()
        self.host.engine.accept(self.state, ids)
        if ids:
            self.note = b""

    async def commit(self, paced: bool = False) -> None:
        """Commit whole pending chunks, one step each."""
        while self.host.engine.ready(self.state):
            if self.before_commit is not None:
                await self.before_commit()
            if paced and self.host.throttle is not None:
                await self.host.throttle.acquire()
            await self.exclusively(self._commit_chunk)

    def _commit_chunk(self) -> None:
        engine, state = self.host.engine, self.state
        if engine.ready(state):
            if self.branch is not None:
                self.branch.note(state.seen, state.pending[:engine.chunk_size])
            engine.commit(state)

    async def room(self, wanted: int, paced: bool) -> int:
        """How many ids can be accepted now, of so many: what completes the chunk at most, and is committed next.

        A chunk is completed with the slot at hand, so that a refused one (NoSlot) leaves nothing accepted by halves.
        """
        await self.commit(paced)
        engine, state = self.host.engine, self.state
        if len(state.pending) + wanted >= engine.chunk_size:
            await self.resident()
        most, free = engine.chunk_size - len(state.pending), engine.room(state)
        if free is not None:  # up to the very last that fits, as token by token
            most = min(most, max(free, 1))
        return min(most, wanted)

    async def focus(self, ids: list[int]) -> None:
        """Give the memory that focus, as of this call. Raises ConfigError, BudgetExceeded: there is no room for it."""
        engine, state = self.host.engine, self.state

        def give() -> None:
            while ids != (state.focus if state.next_focus is None else state.next_focus):
                while engine.ready(state):
                    self._commit_chunk()
                seen, position = state.seen, engine.focus(state, ids)
                if position is not None and self.branch is not None:
                    self.branch.note_focus(position, ids, seen)

        done = False
        while not done:
            hook = self.before_commit
            if hook is not None:  # units may move: an open turn needs its backup before
                await hook()
            async with self.still(in_slot=True):
                if self.before_commit in (None, hook):  # else one was opened while this waited
                    await self.submitted(lambda: self.host.worker.submit(id(state), give))
                    done = True

    async def until_free(self) -> None:
        """Wait while a save or a fork needs the committed units to stay as they are."""
        while self.still_now:
            gate = self.stopped if _pending(self.stopped) else self.undoing
            await asyncio.shield(asyncio.wrap_future(gate))

    @contextlib.asynccontextmanager
    async def still(self, in_slot: bool = False) -> AsyncIterator[None]:
        """Nothing is committed, undone, saved elsewhere, put away or given a slot for the length of a block.

        Inside it nobody waits for a slot (see `context.swapping`).

        Args:
            in_slot: have one first, and keep it for that long. Raises NoSlot.

        Raises:
            ContextClosed: it ended while this waited.
        """
        await self.until_free()
        while in_slot and self.away:
            await self.resident()
            await self.until_free()
        self.check_open()  # it may have ended, or another one taken its place, meanwhile
        self.stopped = gate = Future()
        try:
            yield
        finally:
            gate.set_result(None)
            self.rested()

    async def take(self, ids: list[int], paced: bool = False) -> None:
        """Accept all ids, committing chunk by chunk. Cancelled midway, those accepted so far stay.

        Raises:
            BudgetExceeded: there is no room for all of them; none was taken.
        """
        start = 0
        self.host.engine.expect_room(self.state, len(ids))
        await self.commit(paced)
        while start < len(ids):
            stop = start + await self.room(len(ids) - start, paced)
            self.accept(ids[start:stop])
            start = stop
            await self.commit(paced)

    # -- held text --------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Token ids plus characters pulled and not yet accepted."""
        return len(self.ids) + sum(map(len, self.segments)) + len(self.segmenter.held.text)

    def discard(self) -> int:
        """Drop all of that; returns how much it was."""
        count = self.held
        self.segments.clear()
        self.ids.clear()
        self.segmenter, self.left_by_break = Segmenter(), False
        return count

    async def encode(self, segments: list[Segment]) -> list[int]:
        """Token ids of whole segments; off the event loop unless they are short."""
        self.check_open()
        codec, trusted = self.host.codec, self.trusted

        def run() -> list[int]:
            return [token for segment in segments for token in
                    (segment if isinstance(segment, list) else codec.encode(segment, trusted=trusted))]

        if sum(len(segment) for segment in segments if isinstance(segment, str)) <= _INLINE_CHARS:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self.host.tokenizing, run)

    def hold(self, piece: Piece) -> None:
        """Take a pulled piece over as held.

        Raises:
            InvalidTokens: nothing of the piece was taken; what was held before is as it was.
            InvalidText: the same, but that the bytes of an unfinished character before it are dropped too: what
                would have finished it is gone. Ids behind such bytes are taken.
        """
        self.check_open()
        if isinstance(piece, list):
            ids = self.host.codec.validate_ids(piece)
            try:
                self.cut()
            finally:
                self.segments.append(ids)
            return
        try:
            self.segments.extend(self.segmenter.push(piece))
        except InvalidText:
            self.segmenter.drop_partial()
            raise

    def cut(self) -> None:
        """The text ends here: what the segmenter holds becomes a segment of its own.

        Raises:
            InvalidText: the bytes end inside a character; those bytes are dropped, the text before them is not.
        """
        try:
            self.segments.extend(self.segmenter.flush())
        except InvalidText:
            self.segmenter.drop_partial()
            self.segments.extend(self.segmenter.flush())
            raise

    async def tokenize(self) -> None:
        """Move all cut segments on to `ids`. Cancelled while it waits, they are still segments."""
        if self.segments:
            segments = list(self.segments)
            ids = await self.encode(segments)
            for _ in segments:
                self.segments.popleft()
            self.ids.extend(ids)

    async def drain(self, paced: bool = False, most: int | None = None) -> int:
        """Accept all tokenised ids, or so many, into an open user turn; returns how many."""
        taken = 0
        while self.ids and taken != most:
            self.open_turn()
            count = await self.room(len(self.ids) if most is None else most - taken, paced)
            self.accept([self.ids[i] for i in range(count)])
            for _ in range(count):
                self.ids.popleft()
            taken += count
            await self.commit(paced)
        return taken

    # -- the frame --------------------------------------------------------------------------------------------

    def open_turn(self) -> None:
        """Make sure that a user turn is open and count it as having content. Accepts the template's literal ids."""
        if self.raw:
            return
        frames = self.host.frames
        self.close_reply()  # only if a policy that never evicts had no room for it when the reply ended
        if self.frame.turn != "user":
            ids, frame = frames.open_user(self.frame)
            self.accept(ids)
            self.frame = frame
        if not self.frame.has_content:
            self.frame = self.frame.with_content()

    def frame_room(self) -> int:
        """How many ids the template itself adds from here until a reply can begin."""
        frames, frame = self.host.frames, self.frame
        count = 0
        if frame.turn == "assistant":
            ids, frame = frames.close_reply(frame, self.state.history[-16:])
            count += len(ids)
        ids, frame = frames.open_user(frame)
        return count + len(ids) + len(frames.close_user_and_prompt(frame)[0])

    def close_reply(self) -> None:
        """End the assistant's turn; queues literals only, so it may run anywhere, even in a finaliser."""
        if not self.raw and self.frame.turn == "assistant" and not self.closed:
            last = self.state.history[-16:]  # may end with the end marker, sampled by the model itself
            ids, frame = self.host.frames.close_reply(self.frame, last)
            self.accept(ids)
            self.frame = frame

    # -- copies -----------------------------------------------------------------------------------------------

    async def fork(self, slot: int) -> Session:
        """A copy in another slot, as of this call: at the last accepted token. What is held is copied too.

        Inside a feed what it holds was not accepted yet, so it waits behind a question, as after a `break`.

        Needs no slot of this session: one that was put away is copied out of the store.
        """
        if self.away or _pending(self.undoing):
            async with self.still():
                return await self.copy(slot)
        return await self.copy(slot)

    async def copy(self, slot: int) -> Session:
        """`fork`, for who is in `still`, or knows the session in its slot."""
        engine, state, worker = self.host.engine, self.state, self.host.worker
        stored = await self.host.stored_units(self) if self.away else None
        frame, position, coming = self.frame, state.position, (state.next_focus, state.next_focus_at)
        held = (Segmenter(self.segmenter.held), deque(self.segments), deque(self.ids),
                self.left_by_break or self.busy is not None)

        def copy() -> EngineState:
            twin = engine.fork(state, slot, stored)
            engine.truncate(twin, position - twin.seen)  # another task may have fed more since: it is pending still
            twin.next_focus, twin.next_focus_at = coming
            return twin

        twin = Session(self.host, await self.submitted(lambda: worker.submit(id(state), copy)), frame, raw=self.raw,
                       trusted=self.trusted)
        self.check_open()  # rewound meanwhile, what was copied may be of two moments
        twin.system, twin.note = self.system, self.note
        twin.segmenter, twin.segments, twin.ids, twin.left_by_break = held
        return twin

    def mark(self) -> Mark:
        """Where the session is; `back_at` goes there."""
        state = self.state
        focuses = [] if self.branch is None else [*self.branch.focuses]
        held = Segmenter(self.segmenter.held), deque(self.segments), deque(self.ids)
        return Mark(state.seen, len(state.pending), state.next_focus, state.next_focus_at, focuses, self.frame, *held,
                    self.left_by_break, self.note)

    def back_at(self, mark: Mark, backup: Session | None) -> Session:
        """A session at the mark, in place of this one, which ends: operations of it that are still around are dead.

        The engine's state is that of `backup`, which was forked before the first commit after the mark; None: there
        was no commit. It still is to be truncated.
        """
        self.end(UNDONE)
        past = Session(self.host, self.state if backup is None else backup.state, mark.frame, raw=self.raw,
                       trusted=self.trusted)
        past.branch, past.system, past.saved_at = self.branch, self.system, self.saved_at
        past.note, past.parked = mark.note, self.parked
        past.segmenter, past.segments, past.ids = mark.segmenter, mark.segments, mark.ids
        past.left_by_break = mark.left_by_break
        past.owned, past.came_at, past.keep = self.owned, self.came_at, self.keep
        past.away = self.away  # before the first commit; from then on there is a slot
        past.stopped = self.stopped  # who needs the units to stay needs them now, too
        if past.branch is not None:
            past.branch.focuses = mark.focuses
        return past


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a session to go back to: what `Session.mark` saw."""

    seen: int
    pending: int
    next_focus: list[int] | None
    next_focus_at: int
    focuses: list[Refocus]
    frame: FrameState
    segmenter: Segmenter
    segments: deque[Segment]
    ids: deque[int]
    left_by_break: bool
    note: bytes
