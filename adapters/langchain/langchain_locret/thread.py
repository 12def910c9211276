"""One thread, one call of the model, and where a turn of it begins: what `Threads` and its turns hand to each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from langchain_locret.boundaries import Boundary
from langchain_locret.messages import Said
from langchain_locret.render import Rendered
from locret_stream import SnapshotError
from locret_stream.context import StreamingContext

Save = Literal["turn", "run"]
Source = Literal["live", "snapshot", "new", "rebuild"]


class Before(NamedTuple):
    """What a failed turn goes back to, beside the boundary: whether the thread was told anything, and the snapshot that
    held its place in the store (0: none)."""

    told: bool
    parked: int


@dataclass
class Thread:
    """One thread's memory as this process has it.

    Attributes:
        session: its name in the store; None for what is nobody's, or without a store: that leaves nothing behind.
        at: the boundary where the open context rests; None while a turn moves it, or without a context.
        stored: boundaries with a snapshot, by key; None: not looked up yet.
        stale: another owner saved the session meanwhile.
        before: how it stood before this turn told it anything; None: it was told nothing yet. saved: numbers of the
            snapshots made since then.
        users: calls that have it or wait for it. told: it was told something since it is at hand.
    """

    session: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ctx: StreamingContext | None = None
    at: Boundary | None = None
    stored: dict[bytes, tuple[int, Boundary]] | None = None
    stale: bool = False
    users: int = 0
    told: bool = False
    before: Before | None = None
    saved: list[int] = field(default_factory=list)

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


class StateLost(SnapshotError):
    """The messages name a stream that memory absorbed, and the memory that holds it is gone. The stream cannot be fed
    again from the messages: absorb it anew, or take its stand-in out of the history."""


class RebuildWarning(UserWarning):
    """A thread's system prompt changed, so that its whole history had to be read again."""


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


@dataclass(frozen=True)
class Reached:
    """Where a turn begins: `count` messages are held, the rendering goes on at `at`; keys of all boundaries.

    changing: all is read again because the system prompt of a conversation that goes on is another.
    """

    rendered: Rendered
    count: int
    at: int
    keys: list[bytes]
    base: Boundary | None
    source: Source
    why: str
    changing: bool = False
