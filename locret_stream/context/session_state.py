"""The state of one session, and who may act on it when. It takes no step of its own accord and waits for no slot.

Only this file assigns to a field of `SessionState`; every other one calls a transition. `tests/test_layout.py` checks
that. A session is *open* from its construction until `end`. While it is open, these states go on beside one another:

    state                   enters by               leaves by              moved by
    busy (one operation)    `claim`                 `release`              whoever runs the operation
    swapped out             `lose_slot`             `got_slot`             `swapping`, between two steps
    being swapped in        `swapping_in` closes    it opens               `swapping`
    frozen (a block)        `frozen`                end of the block       saving, forking, rewinding, swapping, focus
    overwritten (a block)   `overwritten`           end of the block       a rewind, which puts another state into the
                                                                           slot: steps wait until it is complete
    turn open               `begin_turn`            `end_turn`             `turns`: it may be undone, so the session is
                                                                           neither swapped out nor saved
    turn being undone       `back_at`               `end_undo`             `turns`; counts as frozen
    stored                  construction, `bind`    `bind(None)`           restoring, forking, `save_as`, replaying
    saved                   `mark_saved`            whatever is accepted   `saving`, `restoring`
                                                    or buffered after it
    owned by a context      `own`                   `end`                  the context, once it is open
    closing                 `begin_closing`         `end`                  the context: nothing begins any more, and
                                                                           nothing is accepted, as it is saved last
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from locret_stream.context.gate import Gate
from locret_stream.context.sources import BufferedText
from locret_stream.engine import EngineState
from locret_stream.errors import ContextBusy, ContextClosed
from locret_stream.text import FrameState
from locret_stream.worker import expect_own

if TYPE_CHECKING:
    from torch import Tensor

    from locret_stream.context.services import Services
    from locret_stream.context.session_index import SessionIndex
    from locret_stream.snapshot import Branch
    from locret_stream.snapshot.log import Refocus

T = TypeVar("T")

CLOSED = "this context is closed; expected a call inside its `async with`"
REWOUND = "the context was rewound since this began; expected a new call on the context"
UNDONE = "this was undone together with the turn it began in; expected a new call on the context"


class OpenTurn(Protocol):
    """What a session and its context know of a turn that is open; `turns.Turn` says what each of these is."""

    @property
    def holds_scratch(self) -> bool: ...

    async def keep_copy(self) -> None: ...

    async def undo(self) -> None: ...


class SessionState:
    """Engine state, frame and buffered text of one context, and what is going on with them.

    All methods belong to one event loop. Once `closed` says why, no step runs and no id is accepted, whoever still has
    a reference to the session.

    Args:
        raw: text has no chat frame around it. trusted: special tokens written out in fed text become control tokens.
        buffered: text and ids that were pulled and are not accepted yet.
        branch: where the session is stored; None: nowhere.
        system: digest of the system text; "": there is none.
        note: the user's bytes, saved beside the rest. Whatever is accepted clears them.
        rebuilt: why the session was rebuilt from its log; "": it was not.
        index: of what it has read, for recall; None: it keeps none.

    Attributes:
        busy, owner: the operation that runs, and the object for which it runs.
        swap_generations: numbers of the snapshots that swap-outs wrote and that are still stored.
        keep: numbers of the snapshots that stay (`StreamingContext.keep`, which owns the dict).
        steps: how many run or are queued. used_at: when the last one was queued. came_at: when the session got its
            slot, or when its time in the slot was last prolonged. Both by `time.monotonic`.
        turn: the open one.
    """

    def __init__(self, services: Services, state: EngineState, frame: FrameState, *, raw: bool, trusted: bool,
                 buffered: BufferedText | None = None, branch: Branch | None = None, system: str = "",
                 note: bytes = b"", rebuilt: str = "", index: SessionIndex | None = None):
        self.services, self.state, self.frame, self.raw, self.trusted = services, state, frame, raw, trusted
        self.buffered = BufferedText() if buffered is None else buffered
        self.branch, self.system, self.rebuilt = branch, system, rebuilt
        self._note, self._noted_at = note, state.position
        self.reply_at: int | None = None  # where the open reply begins; None: it began before this session was made
        self.index = index
        self.busy: str | None = None
        self.owner: object | None = None
        self.closed: str | None = None
        self.closing = False  # what is accepted now would be in no snapshot
        self.swap_generations: frozenset[int] = frozenset()
        self.keep: dict[int, bool] = {}
        self.saved_at: tuple[object, ...] | None = None  # `saving.fingerprint` at the newest save
        self.owned = False  # by a context: its slot may be given to others, and is released at the end
        self.swapping_in = Gate()  # closed while it waits for a slot and is read from the store
        self.swapped_out = False  # its units are in the store, and its slot is released
        self.steps, self.used_at = 0, time.monotonic()
        self.came_at = self.used_at
        self._freeze, self._overwriting, self._undoing = Gate(), Gate(), Gate()
        # Scratch copies that answer now, which end with this session, and what then gives the slot of one back.
        self._copies: dict[SessionState, Callable[[], None] | None] = {}
        self.turn: OpenTurn | None = None

    # -- who may act ------------------------------------------------------------------------------------------

    def claim(self, operation: str, owner: object) -> None:
        """Begin `operation` for `owner`, or raise ContextBusy / ContextClosed."""
        self.expect_not_closing()
        if self.busy is not None:
            raise ContextBusy(f"{operation} was called while {self.busy} is running in this context; expected one at a "
                              f"time: finish or `aclose()` the {self.busy} first, or fork the context")
        self.busy, self.owner = operation, owner

    def release(self, owner: object) -> None:
        """End the operation of `owner`. Nothing happens if another one runs, or none."""
        if self.owner is owner:
            self.busy = self.owner = None
            self.notify_idle()

    def check_open(self) -> None:
        """Raises ContextClosed, saying why, once the session has ended, and in a fork of its process."""
        if self.closed:
            raise ContextClosed(self.closed)
        expect_own(self.services.worker.process)

    def begin_closing(self) -> None:
        """Refuse whatever comes and would change the session: it is saved for the last time, and then ends."""
        self.closing = True

    def expect_not_closing(self) -> None:
        """As `check_open`, and raises ContextClosed from `begin_closing` on."""
        self.check_open()
        if self.closing:
            raise ContextClosed(CLOSED)

    def end(self, why: str) -> None:
        """End the session and its scratch copies: operations that still use them raise ContextClosed with `why`."""
        self.closed = why
        for copy, give_back in list(self._copies.items()):
            copy.closed = why
            if give_back is not None:
                give_back()

    def own(self, keep: dict[int, bool]) -> None:
        """A context uses this session from now on; `keep` is the context's."""
        self.owned, self.keep = True, keep
        self.notify_idle()

    def __del__(self) -> None:
        if not getattr(self, "owned", False) or self.closed:
            return
        services, slot, branch = self.services, None if self.swapped_out else self.state.store.slot, self.branch

        def give_back() -> None:
            if branch is not None:
                branch.close()
            if slot is not None:
                services.slots.release(slot, scratch=False)

        with contextlib.suppress(ContextClosed):  # the runtime was closed before
            services.worker.submit(id(self.state), give_back)  # behind the steps that are queued
        name = "a context" if branch is None else f"session {branch.name!r}"
        # Last, as it raises where warnings are errors.
        warnings.warn(f"{name} was dropped and never closed, so what was not saved is lost; expected `async with "
                      "runtime.open(...)`, or `await ctx.aclose()`", ResourceWarning, stacklevel=2, source=self)

    # -- frozen, and idle -------------------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether a task is inside `frozen`, or a turn is being undone."""
        return self._freeze.is_closed or self._undoing.is_closed

    async def until_free(self) -> None:
        """Wait while the session is frozen."""
        while self.is_frozen:
            await (self._freeze if self._freeze.is_closed else self._undoing).wait()

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """A block in which no other task commits, undoes, saves or swaps the session. Nobody waits for a slot inside it
        (see `context.swapping`). Raises ContextClosed if the session ended while this call waited."""
        await self.until_free()
        self.check_open()  # it may have ended, or been replaced by another session, meanwhile
        try:
            with self._freeze.closed_for():
                yield
        finally:
            self.notify_idle()

    @property
    def between_steps(self) -> bool:
        """Whether it may be swapped out now, be it in the middle of an operation: no step runs, no turn is open, and
        it is not frozen."""
        return (self.owned and not (self.swapped_out or self.turn or self.is_frozen or self.steps or self.closed)
                and not self.state.broken)

    @property
    def idle(self) -> bool:
        """Whether it may be swapped out now, and no operation runs."""
        return self.busy is None and self.between_steps

    def notify_idle(self) -> None:
        """If this session is idle now, wake who waits for a slot: it may have this one."""
        if self.idle:
            self.services.slots.session_idle()

    # -- in a slot, or swapped out ----------------------------------------------------------------------------

    def lose_slot(self) -> None:
        """Release the slot: the units are in the store."""
        slot = self.services.engine.swap_out(self.state)
        self.swapped_out = True
        self.services.slots.release(slot, scratch=False)

    def got_slot(self) -> None:
        """The units are in a slot again."""
        self.swapped_out = False
        self.came_at = self.used_at = time.monotonic()
        self.notify_idle()

    def prolong_slot(self) -> None:
        """Keep the slot as if it had just been given: the session could not be swapped out."""
        self.came_at = time.monotonic()

    # -- steps on the engine's thread -------------------------------------------------------------------------

    async def submitted(self, submit: Callable[[], Future[T]]) -> T:
        """Queue a step that needs no slot, or for which the session is known to have one. Cancelling takes a queued
        step back; a running one is waited for, so that the engine rests between two steps.

        A step that comes while a rewind overwrites the slot waits, and raises ContextClosed when the rewind is done.
        """
        self.check_open()
        while self._overwriting.is_closed:
            await self._overwriting.wait()
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
            self.notify_idle()

    def barrier(self) -> Future[None]:
        """A future that is done when every step queued so far is done; also of a session that has ended."""
        return self.services.worker.submit(id(self.state), lambda: None)

    @contextlib.asynccontextmanager
    async def overwritten(self) -> AsyncIterator[None]:
        """A block in which another state is written into the slot. It begins when the queued steps are done; steps
        that come meanwhile wait until it ends."""
        with self._overwriting.closed_for():
            await asyncio.wrap_future(self.barrier())
            yield

    # -- what was accepted ------------------------------------------------------------------------------------

    def accept(self, ids: list[int], frame: FrameState | None = None) -> None:
        """Take ids over as pending, all or none, and with them the frame in which they leave the conversation. Raises
        BudgetExceeded, ContextClosed: ids and frame are as they were."""
        self.expect_not_closing()
        self.services.engine.accept(self.state, ids)
        if ids:
            self.set_note(b"")
        if frame is not None:
            if frame.turn == "assistant" != self.frame.turn:
                self.reply_at = self.state.position
            self.frame = frame

    def end_of_log(self, frame: FrameState, buffered: BufferedText) -> None:
        """A whole log was fed: `frame` and `buffered` are those that were stored with its end."""
        self.frame, self.buffered = frame, buffered

    def set_note(self, note: bytes) -> None:
        """The user's bytes about the place where the session is now; b"" once something is accepted behind it."""
        self._note, self._noted_at = note, self.state.position

    @property
    def note(self) -> bytes:
        return self.note_at(self.state.position)

    def note_at(self, position: int) -> bytes:
        """The note, if it speaks of this place. The engine's thread accepts what it samples before the task that waits
        for it, here, is told."""
        return self._note if self._noted_at == position else b""

    # -- in the store -----------------------------------------------------------------------------------------

    @property
    def stored_branch(self) -> Branch:
        """The branch of a session that is known to be stored."""
        assert self.branch is not None
        return self.branch

    def bind(self, branch: Branch | None) -> None:
        """The session is stored in that branch from now on; None: nowhere, and what it commits is not logged."""
        self.branch = branch

    def close_branch(self) -> None:
        """Close the branch, if there is one; what was not saved of its log is dropped."""
        if self.branch is not None:
            self.branch.close()

    def keep_index(self, index: SessionIndex | None) -> None:
        """What is committed from now on goes into that index, too."""
        self.index = index

    def close_index(self) -> None:
        """Drop what is kept for recall."""
        if self.index is not None:
            self.index.close()
            self.index = None

    def mark_saved(self, fingerprint: tuple[object, ...] | None) -> None:
        """The newest snapshot is of the session at that fingerprint; None: of something else, so closing saves it."""
        self.saved_at = fingerprint

    def add_swap_generation(self, generation: int) -> None:
        """A swap-out wrote that snapshot."""
        self.swap_generations |= {generation}

    def drop_swap_generations(self, deleted: frozenset[int]) -> None:
        """Those snapshots were deleted."""
        self.swap_generations -= deleted

    def succeed(self, session: SessionState) -> None:
        """Follow `session`, which ended by a rewind to an older snapshot than the newest one."""
        self.swap_generations, self.closing = session.swap_generations, session.closing
        self.saved_at = None
        if session.index is not None:
            self.close_index()
            self.index, session.index = session.index, None
            self.index.hand_over(self, None)

    # -- turns ------------------------------------------------------------------------------------------------

    def begin_turn(self, turn: OpenTurn) -> None:
        """Whatever is accepted from now on may be undone by `turn`."""
        self.turn = turn

    def end_turn(self) -> None:
        """Nothing can be undone any more."""
        self.turn = None
        self.notify_idle()

    def mark(self) -> Mark:
        """Where the session is; `back_at` goes there."""
        state = self.state
        focuses = [] if self.branch is None else [*self.branch.focuses]
        return Mark(state.seen, len(state.pending), state.next_focus, state.next_focus_at, focuses, self.frame,
                    self.buffered.copy(), self.note)

    def back_at(self, mark: Mark, backup: EngineState | None, owner: object) -> Self:
        """A session at the mark, in place of this one, which ends, so that operations of it raise ContextClosed. The
        new session is being undone, for `owner`, until `end_undo`.

        The engine's state is `backup`, which was forked before the first commit after the mark; None: there was no
        commit. The caller has to truncate it.
        """
        self.end(UNDONE)
        self.turn = None
        past = type(self)(self.services, self.state if backup is None else backup, mark.frame, raw=self.raw,
                          trusted=self.trusted, buffered=mark.buffered, branch=self.branch, system=self.system,
                          note=mark.note)
        past._noted_at = mark.seen + mark.pending  # where the caller's truncating brings it
        past.saved_at, past.swap_generations = self.saved_at, self.swap_generations
        past.owned, past.came_at, past.keep = self.owned, self.came_at, self.keep
        past.swapped_out = self.swapped_out  # possible before the first commit; after it the session is in a slot
        past._freeze = self._freeze  # a task that needs the units to stay as they are needs it of these, too
        if past.branch is not None:
            past.branch.focuses = mark.focuses
        if self.index is not None:
            past.index, self.index = self.index, None
            past.index.hand_over(past, mark.seen)
        past._undoing.close()
        past.claim("undo", owner)
        past.closing = self.closing
        return past

    def end_undo(self, owner: object) -> None:
        """The engine's state is that of the mark again."""
        self._undoing.open()
        self.release(owner)

    # -- copies -----------------------------------------------------------------------------------------------

    async def copy(self, slot: int, stored: dict[str, Tensor] | None) -> Self:
        """A copy in another slot. The caller is inside `frozen`, or knows that the session is in its slot; of one
        that is swapped out it gives the `stored` units (`saving.stored_units`)."""
        engine, state, worker = self.services.engine, self.state, self.services.worker
        frame, position, next_focus = self.frame, state.position, (state.next_focus, state.next_focus_at)
        note = self.note_at(position)
        buffered = self.buffered.copy(left_by_break=self.busy is not None)

        def fork() -> EngineState:
            copy = engine.fork(state, slot, stored)
            engine.truncate(copy, position - copy.seen)  # another task may have fed more, which is pending still
            # As of the call, unless a commit that was queued then has put it in force since.
            given, at = next_focus
            copy.next_focus, copy.next_focus_at = (given if at > copy.seen else None), at
            return copy

        copied = await self.submitted(lambda: worker.submit(id(state), fork))
        self.check_open()  # if it was rewound meanwhile, frame and units may be of two moments
        return type(self)(self.services, copied, frame, raw=self.raw, trusted=self.trusted, buffered=buffered,
                          system=self.system, note=note)

    @property
    def replies_on_copy(self) -> bool:
        """Whether a reply goes on that is written by a scratch copy."""
        return any(give_back is not None for give_back in self._copies.values())

    @contextlib.contextmanager
    def answering_on(self, copy: SessionState, give_back: Callable[[], None] | None = None) -> Iterator[None]:
        """A block in which a scratch copy answers. The copy ends with the block, or before with this session, which
        then calls `give_back`: of a reply that nobody waits for, as nobody else would end the block."""
        self.check_open()  # closed meanwhile, it could not end a copy that it did not know yet
        self._copies[copy] = give_back
        try:
            yield
        finally:
            self._copies.pop(copy, None)
            copy.end(CLOSED)  # a reply that failed may live on in its error's traceback, longer than the runtime


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a session to go back to: what `SessionState.mark` saw."""

    seen: int
    pending: int
    next_focus: list[int] | None
    next_focus_at: int
    focuses: list[Refocus]
    frame: FrameState
    buffered: BufferedText
    note: bytes
