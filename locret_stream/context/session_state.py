"""The state of one session, and who may act on it when. Takes no step of its own accord and waits for no slot.

A session is *open* until `end`; open, it is *busy* while one operation has it (`claim`, `release`). Beside that:

    in its slot  -> swapped out     `lose_slot`, by `swapping` alone, between two steps
    swapped out  -> in a slot       `got_slot`, by `swapping` alone
    frozen                          for a block (`frozen`): no commit, save, undo or swap begins; one block at a time
    replacing                       a rewind writes another state into the slot; no step begins until that is there
    undoing                         a turn is being undone; as frozen
    open turn                       it may still be undone: the session is neither swapped out nor saved
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from locret_stream.engine import EngineState
from locret_stream.errors import ContextBusy, ContextClosed
from locret_stream.text import FrameState, Segmenter
from locret_stream.worker import expect_own

if TYPE_CHECKING:
    from torch import Tensor

    from locret_stream.context.services import Services
    from locret_stream.snapshot import Branch
    from locret_stream.snapshot.log import Refocus

T = TypeVar("T")
S = TypeVar("S", bound="SessionState")
Segment = str | list[int]

CLOSED = "this context is closed; expected a call inside its `async with`"
REWOUND = "the context was rewound since this began; expected a new call on the context"
UNDONE = "this was undone together with the turn it began in; expected a new call on the context"


class OpenTurn(Protocol):
    """What a session knows of a turn that is open in it (`turns.Turn`)."""

    async def keep_copy(self) -> None:
        """Before the first commit inside the turn: make the copy to go back to."""
        ...


def _pending(gate: Future[None] | None) -> bool:
    return gate is not None and not gate.done()


class SessionState:
    """Engine state, frame and buffered text of one context, and what is going on with them.

    `busy` names the operation whose `owner` has the session; one at a time. All methods belong to one event loop.
    Once `closed` says why, no step runs and no id is accepted, whoever still holds the session.
    """

    def __init__(self, services: Services, state: EngineState, frame: FrameState, *, raw: bool, trusted: bool):
        self.services, self.state, self.frame, self.raw, self.trusted = services, state, frame, raw, trusted
        self.segmenter = Segmenter()
        self.segments: deque[Segment] = deque()
        self.ids: deque[int] = deque()
        self.left_by_break = False
        self.busy: str | None = None
        self.owner: object | None = None
        self.closed: str | None = None
        self.branch: Branch | None = None  # where it is stored
        self.system = ""  # digest of the system text, "" without
        self.note = b""  # the user's bytes, saved beside the rest; cleared when anything is accepted
        self.swap_generations: frozenset[int] = frozenset()  # snapshots that swap-outs wrote, not deleted yet
        self.keep: dict[int, bool] = {}  # the context's own: numbers of snapshots that stay (`StreamingContext.keep`)
        self.saved_at: object = None  # `saving.told` at the newest save
        self.rebuilt = ""  # why it was rebuilt from its log; "" if it was not
        self.owned = False  # a context uses it, so that its slot may be given to others, and is released at the end
        self.swapping_in: Future[None] | None = None  # set while it waits for a slot and is read from the store
        self.swapped_out = False  # its units are in the store, and its slot is released
        self.steps, self.used_at = 0, time.monotonic()  # steps that run or are queued; when the last one was queued
        self.came_at = self.used_at  # when it got its slot
        self.freeze: Future[None] | None = None  # pending while a caller is inside `frozen`
        self.replacing: Future[None] | None = None  # pending while a rewind writes another state into the slot
        self.undoing: Future[None] | None = None  # pending while a turn is undone
        self.asks: set[SessionState] = set()  # scratch copies that answer now; they end with this session
        self.turn: OpenTurn | None = None  # the open turn; it makes its copy before the first commit
        self.holds_scratch = False  # whether that copy has a scratch slot

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
            self.notify_idle()

    def check_open(self) -> None:
        """Raises ContextClosed, saying why, once the session has ended, and in a fork of its process."""
        if self.closed:
            raise ContextClosed(self.closed)
        expect_own(self.services.worker.process)

    @property
    def is_frozen(self) -> bool:
        """Whether somebody is inside `frozen`, or a turn is being undone."""
        return _pending(self.freeze) or _pending(self.undoing)

    @property
    def being_undone(self) -> bool:
        """Whether a turn is being undone in it."""
        return _pending(self.undoing)

    @property
    def between_steps(self) -> bool:
        """Whether it may be swapped out now, in the middle of an operation, too: no step runs, no turn is open, and it
        is not frozen."""
        return (self.owned and not (self.swapped_out or self.turn or self.is_frozen or self.steps or self.closed)
                and not self.state.broken)

    @property
    def idle(self) -> bool:
        """Whether it may be swapped out now, and no operation runs."""
        return self.busy is None and self.between_steps

    def notify_idle(self) -> None:
        """Tell the services if this session is idle now: a caller may wait for its slot."""
        if self.idle:
            self.services.session_idle()

    def __del__(self) -> None:
        if not getattr(self, "owned", False) or self.closed:
            return
        name = "a context" if self.branch is None else f"session {self.branch.name!r}"
        warnings.warn(f"{name} was dropped and never closed, so what was not saved is lost; expected `async with "
                      "runtime.open(...)`, or `await ctx.aclose()`", ResourceWarning, stacklevel=2, source=self)
        services, slot, branch = self.services, None if self.swapped_out else self.state.store.slot, self.branch

        def give_back() -> None:
            if branch is not None:
                branch.close()
            if slot is not None:
                services.release_slot(slot, scratch=False)

        with contextlib.suppress(ContextClosed):  # the runtime was closed before
            services.worker.submit(id(self.state), give_back)  # behind the steps that were given

    def close_branch(self) -> None:
        """Close the stored branch; what was not saved of its log is dropped."""
        if self.branch is not None:
            self.branch.close()

    def end(self, why: str) -> None:
        """End the session and its scratch copies: operations that still have them raise ContextClosed with `why`."""
        for session in (self, *self.asks):
            session.closed = why

    def own(self, keep: dict[int, bool]) -> None:
        """A context uses this session from now on, and owns `keep`."""
        self.owned, self.keep = True, keep
        self.notify_idle()

    def lose_slot(self) -> None:
        """Release the slot: the units are in the store."""
        slot = self.services.engine.swap_out(self.state)
        self.swapped_out = True
        self.services.release_slot(slot, scratch=False)

    def got_slot(self) -> None:
        """The units are in a slot again."""
        self.swapped_out = False
        self.came_at = self.used_at = time.monotonic()
        self.notify_idle()

    # -- steps on the engine's thread -------------------------------------------------------------------------

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
            self.notify_idle()

    def barrier(self) -> Future[None]:
        """A future that is done when every step queued so far is done; also of a session that has ended."""
        return self.services.worker.submit(id(self.state), lambda: None)

    async def until_free(self) -> None:
        """Wait while the session is frozen."""
        while self.is_frozen:
            gate = self.freeze if _pending(self.freeze) else self.undoing
            await asyncio.shield(asyncio.wrap_future(gate))

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Nothing is committed, undone, saved elsewhere or swapped for the length of a block.

        Inside it nobody waits for a slot (see `context.swapping`).

        Raises:
            ContextClosed: it ended while this waited.
        """
        await self.until_free()
        self.check_open()  # it may have ended, or another one taken its place, meanwhile
        self.freeze = gate = Future()
        try:
            yield
        finally:
            gate.set_result(None)
            self.notify_idle()

    # -- buffered text ----------------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        """Token ids plus characters pulled and not yet accepted."""
        return len(self.ids) + sum(map(len, self.segments)) + len(self.segmenter.state.text)

    def discard(self) -> int:
        """Drop all of that; returns how much it was."""
        count = self.buffered
        self.segments.clear()
        self.ids.clear()
        self.segmenter, self.left_by_break = Segmenter(), False
        return count

    # -- copies -----------------------------------------------------------------------------------------------

    async def copy(self: S, slot: int, stored: dict[str, Tensor] | None) -> S:
        """A copy in another slot, for who is in `frozen`, or knows the session in its slot.

        Args:
            stored: the units of a session that is swapped out (`saving.stored_units`), else None.
        """
        engine, state, worker = self.services.engine, self.state, self.services.worker
        frame, position, coming = self.frame, state.position, (state.next_focus, state.next_focus_at)
        held = (Segmenter(self.segmenter.state), deque(self.segments), deque(self.ids),
                self.left_by_break or self.busy is not None)

        def copy() -> EngineState:
            twin = engine.fork(state, slot, stored)
            engine.truncate(twin, position - twin.seen)  # another task may have fed more since: it is pending still
            twin.next_focus, twin.next_focus_at = coming
            return twin

        copied = await self.submitted(lambda: worker.submit(id(state), copy))
        twin = type(self)(self.services, copied, frame, raw=self.raw, trusted=self.trusted)
        self.check_open()  # rewound meanwhile, what was copied may be of two moments
        twin.system, twin.note = self.system, self.note
        twin.segmenter, twin.segments, twin.ids, twin.left_by_break = held
        return twin

    def mark(self) -> Mark:
        """Where the session is; `back_at` goes there."""
        state = self.state
        focuses = [] if self.branch is None else [*self.branch.focuses]
        held = Segmenter(self.segmenter.state), deque(self.segments), deque(self.ids)
        return Mark(state.seen, len(state.pending), state.next_focus, state.next_focus_at, focuses, self.frame, *held,
                    self.left_by_break, self.note)

    def back_at(self: S, mark: Mark, backup: S | None) -> S:
        """A session at the mark, in place of this one, which ends: operations of it that are still around are dead.

        The engine's state is that of `backup`, which was forked before the first commit after the mark; None: there
        was no commit. It still is to be truncated.
        """
        self.end(UNDONE)
        past = type(self)(self.services, self.state if backup is None else backup.state, mark.frame, raw=self.raw,
                          trusted=self.trusted)
        past.branch, past.system, past.saved_at = self.branch, self.system, self.saved_at
        past.note, past.swap_generations = mark.note, self.swap_generations
        past.segmenter, past.segments, past.ids = mark.segmenter, mark.segments, mark.ids
        past.left_by_break = mark.left_by_break
        past.owned, past.came_at, past.keep = self.owned, self.came_at, self.keep
        past.swapped_out = self.swapped_out  # before the first commit; from then on there is a slot
        past.freeze = self.freeze  # who needs the units to stay needs them now, too
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
