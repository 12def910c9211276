"""The memory of one thread: how its context comes to a boundary, how boundaries become snapshots, how a turn is undone.

A compressed memory cannot be cut back to an earlier message, so each message boundary that may be needed again is a
snapshot of the thread's session, and bears the chained digest of the messages that it holds (`messages.chain`).
Whatever happens to a turn, boundaries that were stored before it are stored after it. One that was not stored yet is
lost with a turn that is undone. The thread remembers that (`lost`) as long as it is in this process, and goes on only
from messages that are given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import msgspec

from locret_stream.context import StreamingContext
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.saving import storing
from locret_stream.conversation.boundaries import Boundary, from_note
from locret_stream.conversation.boundary_pruning import holds_again, kept, tip_of
from locret_stream.conversation.request import Save
from locret_stream.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
    StateLost,
    StoreError,
)
from locret_stream.runtime import Runtime
from locret_stream.snapshot import Store

if TYPE_CHECKING:
    from locret_stream.context.services import Services

_log = logging.getLogger(__name__)
Source = Literal["live", "snapshot", "log", "new", "rebuild"]


class Before(NamedTuple):
    """How a thread stood before a turn fed it anything: its `fed`, the generations by which it was swapped out, and
    what is `lost` if the turn is undone."""

    fed: bool
    swap_generations: frozenset[int]
    lost: Boundary | None


@dataclass
class Thread:
    """One thread's memory as this process has it.

    Everything but `users` and `hinted` is changed only with the `lock` held, by the methods here, on one event loop;
    a conversation without a thread that nobody uses is closed without it.

    Attributes:
        runtime: in which its context is opened.
        session: its name in the store; None for a conversation without a thread, or a runtime without a store: these
            leave nothing behind.
        ctx: its context; None or closed while it is not open.
        boundary: where the open context rests; None while a turn moves it, or without a context.
        stored: generation and boundary of each snapshot, by the boundary's key; None: not looked up yet.
        unusable: keys of stored boundaries whose snapshots could not be loaded in this turn; they stay stored, as
            another turn, or a runtime of another budget, may load them.
        used: by the boundary's key, numbers that grow with each boundary that is made or gone on from.
        stale: another owner saved the session meanwhile.
        owner: of a fork, the session of the thread whose keys it goes on with; "" for its own.
        name: as its notes have it (`boundaries.full_name`).
        users: calls that use it or wait for it.
        fed: tokens were fed to it since it is in this process.
        hinted: the log already says that every call is to be given the whole history.
        lost: a boundary where it was told something, which could not be stored before the thread left it, or was not
            stored yet as the call that went on from it was undone; None once its last messages are held again.
        before: how it stood before this turn fed it anything; None: nothing was fed yet.
        new_generations: of the snapshots made since then.
    """

    runtime: Runtime
    session: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ctx: StreamingContext | None = None
    boundary: Boundary | None = None
    stored: dict[bytes, tuple[int, Boundary]] | None = None
    unusable: set[bytes] = field(default_factory=set)
    used: dict[bytes, int] = field(default_factory=dict)
    stale: bool = False
    owner: str = ""
    name: str = ""
    users: int = 0
    fed: bool = False
    hinted: bool = False
    lost: Boundary | None = None
    before: Before | None = None
    new_generations: list[int] = field(default_factory=list)

    # -- what it has ------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.ctx is not None and not self.ctx.closed

    @property
    def context(self) -> StreamingContext:
        """Its context; a turn has brought it to a boundary before."""
        assert self.ctx is not None
        return self.ctx

    @property
    def live(self) -> Boundary | None:
        """The boundary where its open context rests."""
        return self.boundary if self.open else None

    @property
    def snapshots(self) -> dict[bytes, tuple[int, Boundary]]:
        """`stored`, after `look_up`; {} for a thread that is not stored."""
        return self.stored if self.stored is not None else {}

    @property
    def _store(self) -> Store:
        """The store; whoever has a session has one."""
        assert self.runtime.store is not None
        return self.runtime.store

    def reachable(self) -> dict[bytes, Boundary]:
        """Boundaries that it can be brought to, by key."""
        boundaries = {key: boundary for key, (_, boundary) in self.snapshots.items() if key not in self.unusable}
        if self.live is not None:
            boundaries[self.live.key] = self.live
        return boundaries

    @property
    def unsaved(self) -> Boundary | None:
        """The boundary where its open context rests, if it is not stored, and what was told last."""
        live = self.live
        last = live is not None and not self.stale and live.key not in self.snapshots and (
            tip_of(self.snapshots, live) is live)
        return live if last else None

    def tip(self, name: str) -> Boundary | None:
        """The boundary where the thread of that name was told something last, after `look_up`; None if there is none.

        Raises:
            StateLost: that boundary is gone, so that what it was told since the one before would be missing.
        """
        if self.lost is not None and self.lost.key not in self.reachable():
            raise StateLost(f"thread {name!r} holds no more what it was told since it was saved last: it could not be "
                            "saved, or the call after that was cancelled or failed, and undone. Expected the whole "
                            "history once, from which it is read again")
        return tip_of(self.snapshots, self.live)

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """For the length of a block that uses the thread or waits for it, the thread stays in this process."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def look_up(self) -> None:
        """Read which boundaries are stored, unless that is certain; what another owner saved counts.

        Raises:
            StoreError: the session is encrypted under another key, or the store cannot be read.
        """
        if not self.open:  # as its slot was needed
            self._detach()
        elif self.session is not None and await self.context.fenced():
            await self.close()
            self._detach()
        self.unusable &= {self.live.key} if self.live is not None else set()  # others may be usable by now
        if self.session is None or self.stored is not None:
            return
        rows, self.owner = [], ""
        try:
            rows = await storing(cast("Services", self.runtime), self._store.info, self.session)
        except SnapshotNotFound:
            pass
        if rows and rows[-1].locked:
            raise StoreError(rows[-1].problem)
        self.stored = {}
        for row in rows:
            if (boundary := from_note(row.note)) is not None and boundary.tokens == row.tokens:
                self.stored[boundary.key] = (row.generation, boundary)
                self.owner = boundary.owner

    # -- moving to a boundary ---------------------------------------------------------------------------------

    async def begin_anew(self) -> None:
        """Bring the context to the beginning, where nothing was fed yet. Raises SnapshotError."""
        await self._move(0)
        self.boundary = None

    async def reach(self, boundary: Boundary, *, rebuild: bool) -> Source:
        """Bring the context to a boundary.

        Args:
            rebuild: where the snapshot is damaged, or of another model, policy or budget, read the session's log again
                as far as the boundary.

        Raises:
            SnapshotError: it cannot be brought there, and this turn does not try it again. The boundary stays stored,
                unless its snapshot does not exist any more.
        """
        generation = self.snapshots[boundary.key][0] if boundary.key in self.snapshots else 0  # `move_to` may prune it
        try:
            return await self.move_to(boundary)
        except SnapshotNotFound:
            self.snapshots.pop(boundary.key, None)
            raise
        except StaleOwner:  # nothing is wrong with the snapshot: another owner saved meanwhile
            raise
        except SnapshotError as error:
            self.unusable.add(boundary.key)
            self.used.pop(boundary.key, None)  # it was not gone on from, and displaces nothing that can be
            if not rebuild or not isinstance(error, (SnapshotMismatch, SnapshotCorrupt)):
                raise
        await self.close()
        context = self.runtime.open(self.session, raw=True, at=generation, on_mismatch="rebuild")
        await context.__aenter__()
        self.ctx, self.boundary = context, None
        self.prune()
        if context.memory.tokens != boundary.tokens:
            raise SnapshotCorrupt(f"snapshot {generation} of {self.session!r}: its log gives {context.memory.tokens} "
                                  f"tokens; expected {boundary.tokens}")
        self.rest_at(boundary)
        await self.keep()
        return "log"

    async def move_to(self, boundary: Boundary) -> Source:
        """Bring the context to a boundary: it stays there, or loads the boundary's snapshot. Raises SnapshotError."""
        self._mark_used(boundary)
        if self.live is not None and self.live.key == boundary.key:
            return "live"
        if boundary.key not in self.snapshots:  # saving where the thread rested displaced it meanwhile
            raise SnapshotNotFound(f"a boundary of {self.session!r} is kept no more; expected a later one")
        await self._move(self.snapshots[boundary.key][0])
        self.boundary = boundary
        return "snapshot"

    def _mark_used(self, boundary: Boundary) -> None:
        self.used[boundary.key] = max(self.used.values(), default=0) + 1

    async def _move(self, generation: int) -> None:
        """Put the context where the snapshot of that generation is; 0 is the beginning."""
        await self.keep()
        if self.session is not None:
            self.lost = self.lost or self.unsaved
        if self.open and self.session is not None and not self.stale:
            boundary, self.boundary = self.boundary, None  # cancelled, the context may rest at either place
            try:
                await self.context.rewind(generation)
            except Exception:
                self.boundary = boundary
                raise
            return
        await self.close()
        self.stale = False
        context = self.runtime.open(self.session, raw=True, at=None if self.session is None else generation)
        await context.__aenter__()
        self.ctx = context
        if self.session is not None:
            self.prune()

    # -- a turn -----------------------------------------------------------------------------------------------

    def keep_slot(self) -> None:
        """Until the thread rests, its context is not closed to free the slot: a turn prepares for a while before it
        feeds anything."""
        if self.open:
            self.context.disposable = False

    async def feed(self, ids: list[int], focus: str | None = None) -> None:
        """Feed token ids, under that focus unless it is None; from here on the thread rests at no boundary."""
        context = self.context
        self.before = self.before or Before(self.fed, context.swap_generations, self.lost or self.unsaved)
        self.boundary, context.disposable, self.fed = None, False, True
        if focus is not None:
            await context.focus(focus)
        if ids:
            await context.push(ids)

    def rest_at(self, boundary: Boundary) -> None:
        """The context rests at that boundary now; its next snapshot says so."""
        boundary = msgspec.structs.replace(boundary, name=self.name)
        self.context.note, self.boundary = msgspec.msgpack.encode(boundary), boundary
        if self.lost is not None and holds_again(boundary, self.lost):
            self.lost = None

    def settle(self) -> None:
        """What this turn fed stays."""
        self.before = None
        self.new_generations.clear()
        if self.stored is not None:
            self.prune()

    async def undo(self) -> None:
        """Remove what this turn fed from memory, snapshots and log. The context is closed, if anything was fed, and the
        boundary where it rested before is `lost` unless it is stored."""
        if self.before is None:
            return
        await self.close()
        before, self.before = self.before, None
        self.lost = before.lost
        new, self.new_generations = self.new_generations, []
        self.boundary, self.fed = None, before.fed
        if self.stored is not None:
            self.stored = {key: row for key, row in self.stored.items() if row[0] not in new}
        for generation in reversed(new):
            await self.delete_failed(generation)

    async def rest(self) -> None:
        """After a turn: stay open at a boundary, or close without saving, so that the next turn begins at a snapshot.
        """
        if self.open and (self.boundary is None or self.stale):
            await self.close()
        if not self.open:  # others may save in the session from here on: its boundaries are looked up again
            self._detach()
            self.stale = False
        else:
            self.context.disposable = True

    async def close(self) -> None:
        """Close the context without saving. The generations by which a turn that may be undone was swapped out count as
        new. Idempotent."""
        if self.ctx is None:
            return
        if self.before is not None:
            self.new_generations += sorted(self.ctx.swap_generations - self.before.swap_generations)
        await self.ctx.aclose(save=False)

    # -- saving and forgetting --------------------------------------------------------------------------------

    async def save(self, when: Save) -> bool:
        """After a turn's prompt or answer: `keep`, unless the end of the run does it; whether the turn is durable."""
        return self.session is not None and when == "turn" and await self.keep()

    async def keep(self) -> bool:
        """Make the boundary where the thread rests a snapshot, unless it is one; whether it is one now.

        A thread that cannot be saved costs reading it again later, which the log says; the open memory is right all the
        same. A save that has begun runs to its end, cancelled or not.
        """
        return await to_the_end(self._keep())

    async def save_again(self) -> bool:
        """Make the boundary where the thread rests a snapshot in place of the one that it is: the memory there was told
        something that is no message."""
        boundary = self.live
        before = None if boundary is None else self.snapshots.pop(boundary.key, None)
        saved = await self.keep()
        if boundary is not None and before is not None and not saved:
            self.snapshots[boundary.key] = before
        return saved

    async def _keep(self) -> bool:
        boundary = self.live
        if self.session is None or boundary is None or self.stale:
            return False
        assert self.stored is not None
        if boundary.key in self.stored and boundary.key not in self.unusable:
            return True
        try:
            snapshot = await self.context.snapshot()
        except SnapshotError as error:
            _log.warning("%r was not saved: %s", self.session, error)
            self.stale = isinstance(error, StaleOwner)  # then its boundaries are to be looked up again
            return False
        self.stored[boundary.key] = (snapshot.generation, boundary)
        self._mark_used(boundary)
        self.unusable.discard(boundary.key)
        if self.before is not None:  # a turn that may fail prunes nothing
            self.new_generations.append(snapshot.generation)
        else:
            self.prune()
        return True

    def prune(self) -> None:
        """Keep those boundaries that stay; the store deletes the snapshots of the others after its next save."""
        assert self.stored is not None
        stay = kept(self.stored, self._store.keep_last, self.used)
        self.stored = stored = {key: self.stored[key] for key in stay}
        self.used = {key: at for key, at in self.used.items() if key in stored}
        if self.open:
            self.context.keep = {stored[key][0]: pinned for key, pinned in stay.items()}

    async def delete(self, generation: int | None = None) -> None:
        """Delete a snapshot from the store, or, without a generation, all of the session's. Raises SnapshotError."""
        assert self.session is not None
        await asyncio.to_thread(self._store.delete, self.session, generation)  # may wait for others who save in it

    async def delete_after(self, generation: int) -> None:
        """Delete all later boundaries, where the thread rests at that one. Raises SnapshotError."""
        assert self.stored is not None
        for key, (number, _) in sorted(self.stored.items(), key=lambda row: -row[1][0]):
            if number > generation:
                await self.delete(number)
                del self.stored[key]

    async def delete_failed(self, generation: int | None = None) -> None:
        """`delete` for what a failed turn or fork left; a failure of this, too, is logged."""
        try:
            await self.delete(generation)
        except SnapshotNotFound:
            pass
        except SnapshotError as error:
            _log.warning("%r: what failed left %s, which cannot be removed: %s", self.session,
                         "snapshots" if generation is None else f"snapshot {generation}", error)

    async def take_over(self, other: Thread, boundary: Boundary) -> None:
        """Go on with the open context of another thread, saved as this thread's session at that boundary. The other
        thread is then without a context, also if this fails. Raises SnapshotError."""
        assert self.session is not None
        context, other.ctx = other.context, None
        boundary = msgspec.structs.replace(boundary, name=self.name)
        context.note, context.keep = msgspec.msgpack.encode(boundary), {}
        try:
            snapshot = await context.save_as(self.session)
        except BaseException:
            await context.aclose(save=False)
            if context.name == self.session:  # else the store had something of that name, which stays
                await self.delete_failed()
            raise
        self.ctx, self.boundary, self.owner, self.fed, self.lost = context, boundary, boundary.owner, True, None
        self.stored = {boundary.key: (snapshot.generation, boundary)}
        self.prune()

    async def reset(self) -> None:
        """Close the context without saving and forget what is known of the thread; its boundaries are looked up again.
        """
        await self.close()
        self._detach()
        self.used, self.owner, self.fed, self.lost = {}, "", False, None

    def _detach(self) -> None:
        self.ctx = self.boundary = self.stored = None
