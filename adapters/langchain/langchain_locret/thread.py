"""One thread, one call of the model, and where a turn of it begins: what `Threads` and its turns hand to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from langchain_locret.messages import Said
from locret_stream import SnapshotError

if TYPE_CHECKING:  # these load torch
    from langchain_locret.boundaries import Boundary
    from langchain_locret.render import Rendered
    from locret_stream.context import StreamingContext

Save = Literal["turn", "run"]
OnChange = Literal["late", "reread"]
OnMismatch = Literal["reread", "rebuild"]
Source = Literal["live", "snapshot", "log", "new", "rebuild"]


class Before(NamedTuple):
    """What a failed turn goes back to, beside the boundary: whether the thread was told anything, and the numbers of
    snapshots that held its place in the store."""

    told: bool
    swap_generations: frozenset[int]


@dataclass
class Thread:
    """One thread's memory as this process has it.

    Attributes:
        session: its name in the store; None for what is nobody's, or without a store: that leaves nothing behind.
        at: the boundary where the open context rests; None while a turn moves it, or without a context.
        stored: boundaries with a snapshot, by key; None: not looked up yet.
        unusable: keys of stored boundaries whose snapshots could not be brought back in this turn; they stay stored,
            as another turn, or a runtime of another budget, may bring them back.
        stale: another owner saved the session meanwhile.
        before: how it stood before this turn told it anything; None: it was told nothing yet. saved: numbers of the
            snapshots made since then.
        owner: of a fork, the session of the thread whose keys it goes on with; "" for its own.
        users: calls that have it or wait for it. told: it was told something since it is at hand. hinted: that every
            call is to be given the whole history was said.
    """

    session: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ctx: StreamingContext | None = None
    at: Boundary | None = None
    stored: dict[bytes, tuple[int, Boundary]] | None = None
    unusable: set[bytes] = field(default_factory=set)
    stale: bool = False
    owner: str = ""
    users: int = 0
    told: bool = False
    hinted: bool = False
    before: Before | None = None
    saved: list[int] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.ctx is not None and not self.ctx.closed

    @property
    def live(self) -> Boundary | None:
        return self.at if self.open else None

    def known(self) -> dict[bytes, Boundary]:
        """Boundaries that it can be brought to, by key."""
        found = {key: boundary for key, (_, boundary) in (self.stored or {}).items() if key not in self.unusable}
        if self.live is not None:
            found[self.live.key] = self.live
        return found


class StateLost(SnapshotError):
    """The messages name a stream that memory absorbed, and the memory that holds it is gone. The stream cannot be fed
    again from the messages: absorb it anew, or take its stand-in out of the history."""


class RebuildWarning(UserWarning):
    """A thread was read again from the messages given: what memory held beyond them is lost."""


class ToolsWarning(UserWarning):
    """Tools were bound to a model whose chat template tells of none."""


TOOLS_LEFT_OUT = ("the chat template tells the model of no tools, so it does not know of those that were bound; "
                  "expected a chat template that does, or LocretChatModel(tool_prompt='auto'), which tells of them in "
                  "a system text")


class LateWarning(UserWarning):
    """Another system text, or other tools, were read behind what a thread's memory holds."""


class Delivery:
    """Whether whoever called took the end of the answer. Until then the call may be left, and is undone.

    `take` and `leave` may be called from any thread; the first of them counts.
    """

    PATIENCE_S = 5.0  # how long others who want the thread wait for one who does not take the end of an answer
    LOOK_S = 0.1

    def __init__(self, caller: object = None) -> None:
        self.caller = caller  # the model whose `ainvoke` takes it, as it knows later than its stream
        self._taken: Future[bool] = Future()
        self.turn: Future[None] | None = None  # the call itself
        self.offer: Callable[[], None] = lambda: None  # gives the end of the answer to whoever called

    @property
    def taken(self) -> bool:
        """Whether the call is over: what it told the thread stays."""
        return self._taken.done() and self._taken.result()

    def take(self) -> bool:
        """Take it; False if the call was left, or the model closed, before."""
        with suppress(InvalidStateError):
            self._taken.set_result(True)
        return self.taken

    def leave(self) -> None:
        """Leave the call, if the end of the answer was not taken before."""
        with suppress(InvalidStateError):
            self._taken.set_result(False)

    async def over(self) -> None:
        """Once it was taken: until the thread is free again. That takes a moment, and it is too late to cancel."""
        while self.turn is not None and not self.turn.done():
            try:
                await asyncio.wait([asyncio.wrap_future(self.turn)])
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()

    async def wait(self, wanted: Callable[[], bool]) -> None:
        """Offer the end of the answer, and wait until it is taken: only for a while once others want the thread, as
        they may be what the caller waits for.

        Raises:
            asyncio.CancelledError: the call was left, or this was cancelled, before it was taken.
        """
        self.offer()
        waited = 0.0
        try:
            while not self._taken.done():
                await asyncio.wait([asyncio.wrap_future(self._taken)], timeout=self.LOOK_S)
                waited += self.LOOK_S * wanted()
                if waited >= self.PATIENCE_S:
                    self.take()
        except asyncio.CancelledError:
            self.leave()
            if not self.taken:
                raise
            asyncio.current_task().uncancel()
        if not self.taken:
            raise asyncio.CancelledError


@dataclass(frozen=True)
class Request:
    """One call of the model.

    Attributes:
        thread: whose memory it is, None for nobody's. choice: a tool's name, "any", or "" for the model's choice.
        sampling: of `locret_stream.Sampling`. save: when boundaries become snapshots.
        on_change: whether other tools or another system text go in late, or all messages are read again. on_mismatch:
            whether a snapshot of another model or budget is read again from the messages, or from its log.
        focus: what memory is told that it will be asked about; "" for nothing any more, None: that stays as it is.
        append: the messages come behind whatever the thread was told last.
        delivery: whether the answer was taken; None: it counts as taken.
    """

    said: list[Said]
    thread: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    save: Save = "turn"
    on_change: OnChange = "late"
    on_mismatch: OnMismatch = "reread"
    timeout_s: float | None = None
    focus: str | None = None
    append: bool = False
    delivery: Delivery | None = None


@dataclass(frozen=True)
class Reached:
    """Where a turn begins: `count` messages are held, the rendering goes on at `at`; keys of all boundaries.

    base: as what it is gone on from, None for nothing. shown: the messages that were rendered; those from `first` on
    are new. late: what went in late, in words. warning: what the caller ought to know.
    """

    rendered: Rendered
    count: int
    at: int
    keys: list[bytes]
    base: Boundary | None
    source: Source
    why: str
    shown: Sequence[Said]
    first: int
    late: str = ""
    warning: str = ""
