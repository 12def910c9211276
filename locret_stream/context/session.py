"""One conversation between the async face and the engine: text on its way in, and the steps that commit it.
Where its slot comes from is told in `context.swapping`.

A stream goes through four places, in order, and is in exactly one of them:
    segmenter (text whose cut is not known yet) -> segments (cut, not tokenised) -> ids (tokenised) -> the engine.
The first three are *buffered*: bounded, and taken first by the next feed. What the engine has is *accepted*.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeVar

from locret_stream.context import saving, swapping
from locret_stream.context.session_state import Segment, SessionState
from locret_stream.context.sources import Piece
from locret_stream.engine import NextToken
from locret_stream.errors import InvalidText

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_INLINE_CHARS = 512  # a hop to a thread costs more than tokenising this much


class Session(SessionState):
    """A session that takes steps, and has its slot for them."""

    # -- steps on the engine's thread, in the slot ------------------------------------------------------------

    async def step(self, work: Callable[[], T]) -> T:
        """Run one bounded step on the engine's thread, in the slot, which is waited for if it is another's.

        Cancelling takes a queued step back; a running one is waited for, so that the engine rests on a boundary.

        Raises:
            NoSlot: none came free; nothing was done.
        """
        await self.resident()
        return await self.submitted(lambda: self.services.worker.submit(id(self.state), work))

    async def next_token(self, choose: Callable[[Tensor], int]) -> int:
        """One token: `choose` gives it from logits [vocab] on the engine's thread, and it is accepted. A step that all
        contexts which are generating take together; cancelled as any step is."""
        engine = self.services.engine
        await self.resident()
        return await self.submitted(lambda: self.services.worker.submit_joint(
            id(self.state), id(engine), NextToken(self.state, choose), engine.decode, engine.run_ahead))

    async def exclusively(self, work: Callable[[], T]) -> T:
        """A step that moves units: not while somebody is in `frozen`. Raises and is cancelled as `step`."""
        await self.resident()
        while self.swapped_out or self.is_frozen:
            await self.until_free()
            await self.resident()
        return await self.submitted(lambda: self.services.worker.submit(id(self.state), work))

    async def resident(self) -> None:
        """Have a slot: wait for one if the units are in the store, or give others a turn if this one had its own.

        What follows without an `await` finds the session in its slot. Raises NoSlot.
        """
        self.check_open()
        await swapping.make_resident(self)

    def accept(self, ids: list[int]) -> None:
        """Take ids over as pending; all or none."""
        self.check_open()
        self.services.engine.accept(self.state, ids)
        if ids:
            self.note = b""

    async def commit(self, paced: bool = False) -> None:
        """Commit whole pending chunks, one step each."""
        while self.services.engine.ready(self.state):
            if self.turn is not None:
                await self.turn.keep_copy()
            if paced and self.services.throttle is not None:
                await self.services.throttle.acquire()
            await self.exclusively(self._commit_chunk)

    def _commit_chunk(self) -> None:
        engine, state = self.services.engine, self.state
        if engine.ready(state):
            if self.branch is not None:
                self.branch.note(state.seen, state.pending[:engine.chunk_size])
            engine.commit(state)

    async def room(self, wanted: int, paced: bool) -> int:
        """How many ids can be accepted now, of so many: what completes the chunk at most, and is committed next.

        A chunk is completed with the slot at hand, so that a refused one (NoSlot) leaves nothing accepted by halves.
        """
        await self.commit(paced)
        engine, state = self.services.engine, self.state
        if len(state.pending) + wanted >= engine.chunk_size:
            await self.resident()
        most, free = engine.chunk_size - len(state.pending), engine.room(state)
        if free is not None:  # up to the very last that fits, as token by token
            most = min(most, max(free, 1))
        return min(most, wanted)

    async def focus(self, ids: list[int]) -> None:
        """Give the memory that focus, as of this call. Raises ConfigError, BudgetExceeded: there is no room for it."""
        engine, state = self.services.engine, self.state

        def give() -> None:
            while ids != (state.focus if state.next_focus is None else state.next_focus):
                while engine.ready(state):
                    self._commit_chunk()
                seen, position = state.seen, engine.focus(state, ids)
                if position is not None and self.branch is not None:
                    self.branch.note_focus(position, ids, seen)

        done = False
        while not done:
            turn = self.turn
            if turn is not None:  # the commit moves units: the turn needs its copy before
                await turn.keep_copy()
            async with self.frozen_in_slot():
                if self.turn in (None, turn):  # else a turn was opened while this waited
                    await self.submitted(lambda: self.services.worker.submit(id(state), give))
                    done = True

    @contextlib.asynccontextmanager
    async def frozen_in_slot(self) -> AsyncIterator[None]:
        """`frozen`, in the slot, which is waited for first and kept for that long.

        Raises:
            NoSlot, ContextClosed.
        """
        await self.until_free()
        while self.swapped_out:
            await self.resident()
            await self.until_free()
        async with self.frozen():
            yield

    async def take(self, ids: list[int], paced: bool = False) -> None:
        """Accept all ids, committing chunk by chunk. Cancelled midway, those accepted so far stay.

        Raises:
            BudgetExceeded: there is no room for all of them; none was taken.
        """
        start = 0
        self.services.engine.expect_room(self.state, len(ids))
        await self.commit(paced)
        while start < len(ids):
            stop = start + await self.room(len(ids) - start, paced)
            self.accept(ids[start:stop])
            start = stop
            await self.commit(paced)

    # -- buffered text ----------------------------------------------------------------------------------------

    async def encode(self, segments: list[Segment]) -> list[int]:
        """Token ids of whole segments; off the event loop unless they are short."""
        self.check_open()
        codec, trusted = self.services.codec, self.trusted

        def run() -> list[int]:
            return [token for segment in segments for token in
                    (segment if isinstance(segment, list) else codec.encode(segment, trusted=trusted))]

        if sum(len(segment) for segment in segments if isinstance(segment, str)) <= _INLINE_CHARS:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self.services.tokenizing, run)

    def buffer(self, piece: Piece) -> None:
        """Take a pulled piece over as held.

        Raises:
            InvalidTokens: nothing of the piece was taken; what was held before is as it was.
            InvalidText: the same, but that the bytes of an unfinished character before it are dropped too: what
                would have finished it is gone. Ids behind such bytes are taken.
        """
        self.check_open()
        if isinstance(piece, list):
            ids = self.services.codec.validate_ids(piece)
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
        frames = self.services.frames
        self.close_reply()  # only if a policy that never evicts had no room for it when the reply ended
        if self.frame.turn != "user":
            ids, frame = frames.open_user(self.frame)
            self.accept(ids)
            self.frame = frame
        if not self.frame.has_content:
            self.frame = self.frame.with_content()

    def frame_room(self) -> int:
        """How many ids the template itself adds from here until a reply can begin."""
        frames, frame = self.services.frames, self.frame
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
            ids, frame = self.services.frames.close_reply(self.frame, last)
            self.accept(ids)
            self.frame = frame

    # -- copies -----------------------------------------------------------------------------------------------

    async def fork(self, slot: int) -> Session:
        """A copy in another slot, as of this call: at the last accepted token. Buffered text is copied too.

        Inside a feed, buffered text was not accepted yet, so in the copy it comes after a question, as after a `break`.

        Needs no slot of this session: one that is swapped out is copied from the store.
        """
        if self.swapped_out or self.being_undone:
            async with self.frozen():
                return await self.copy(slot, await saving.stored_units(self) if self.swapped_out else None)
        return await self.copy(slot, None)
