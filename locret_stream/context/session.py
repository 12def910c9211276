"""A session that takes steps: text on its way into the engine, and the steps that commit it. `context.sources` states
the places that a stream goes through, `context.swapping` where the slot comes from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from locret_stream.context import saving, swapping
from locret_stream.context.session_state import SessionState
from locret_stream.context.sources import Piece, Segment
from locret_stream.context.tokenizing import tokenized
from locret_stream.engine import NextToken

if TYPE_CHECKING:
    from torch import Tensor

    from locret_stream.config import Sampling
    from locret_stream.constraints import Constraint

T = TypeVar("T")


class Session(SessionState):
    """A session that takes steps, and has its slot for them."""

    # -- steps on the engine's thread, in the slot ------------------------------------------------------------

    async def step(self, work: Callable[[], T]) -> T:
        """Run one bounded step on the engine's thread, once the session is in a slot; cancelled as `submitted`. Raises
        NoSlot if none came free; nothing was done then."""
        await self.resident()
        return await self.submitted(lambda: self.services.worker.submit(id(self.state), work))

    async def next_token(self, choose: Callable[[Tensor], int], unheld: Collection[int] = ()) -> int:
        """One token: `choose` gives it from logits [vocab] on the engine's thread, and it is accepted unless it is one
        of `unheld`. All contexts that are generating take this step together; it is cancelled as any step is."""
        engine = self.services.engine
        await self.resident()
        self.expect_not_closing()
        before = self.state.position
        try:
            return await self.submitted(lambda: self.services.worker.submit_joint(
                id(self.state), id(engine), NextToken(self.state, choose, unheld), engine.decode, engine.run_ahead))
        finally:
            if self.state.position != before:  # also cancelled, when the step ran already
                self.set_note(b"")

    async def exclusively(self, work: Callable[[], T]) -> T:
        """A step that moves units: it waits while a task is inside `frozen`. Raises and is cancelled as `step`."""
        await self.resident()
        while self.swapped_out or self.is_frozen:
            await self.until_free()
            await self.resident()
        return await self.submitted(lambda: self.services.worker.submit(id(self.state), work))

    async def resident(self) -> None:
        """Have a slot: wait for one if the units are in the store, or give others a turn if this one had its own.

        What follows without an `await` runs while the session is in its slot. Raises NoSlot.
        """
        self.check_open()
        await swapping.make_resident(self)

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
            ids = state.pending[:engine.chunk_size]
            engine.commit(state)
            index = self.index  # it may be handed on meanwhile
            if index is not None:
                index.add(self, ids, state.seen - len(ids))

    async def room(self, wanted: int, paced: bool) -> int:
        """How many of `wanted` ids can be accepted now: at most as many as complete the chunk, which is committed next.

        A chunk is completed only while the session is in its slot, so that NoSlot leaves no half of the ids accepted.
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
        """Set the focus, as of this call. Raises ConfigError, BudgetExceeded: there is no room for it."""
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
        """`frozen`, in a slot: it is waited for first, and kept for the length of the block. Raises NoSlot."""
        await self.until_free()
        while self.swapped_out:
            await self.resident()
            await self.until_free()
        async with self.frozen():
            yield

    async def take(self, ids: list[int], paced: bool = False) -> None:
        """Accept all ids, committing chunk by chunk. Cancelled midway, those accepted so far stay. Raises
        BudgetExceeded if there is no room for all of them; none was taken then."""
        start = 0
        self.services.engine.expect_room(self.state, len(ids))
        await self.commit(paced)
        while start < len(ids):
            stop = start + await self.room(len(ids) - start, paced)
            self.accept(ids[start:stop])
            start = stop
            await self.commit(paced)

    async def constraint(self, sampling: Sampling) -> Constraint | None:
        """What holds a reply to its schema or grammar, at its beginning, made off the event loop; None: it has neither.
        Raises ConfigError."""
        if not sampling.constrained:
            return None
        return await asyncio.to_thread(self.services.constraints.begin, sampling)

    # -- buffered text ----------------------------------------------------------------------------------------

    async def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Token ids of whole segments; off the event loop unless they are short."""
        self.check_open()
        codec, trusted = self.services.codec, self.trusted

        def run() -> list[int]:
            return [token for segment in segments for token in
                    (segment if isinstance(segment, list) else codec.encode(segment, trusted=trusted))]

        return await tokenized(self.services, sum(
            len(segment) for segment in segments if isinstance(segment, str)), run)

    def buffer(self, piece: Piece) -> None:
        """Buffer a pulled piece. Raises InvalidTokens: nothing of it was taken; InvalidText as `BufferedText`."""
        self.check_open()
        if isinstance(piece, list):
            self.buffered.push_ids(self.services.codec.validate_ids(piece))
        else:
            self.buffered.push_text(piece)

    async def tokenize(self) -> None:
        """Move all cut segments on to `ids`. Cancelled while it waits, they are still segments."""
        if self.buffered.segments:
            segments = list(self.buffered.segments)
            self.buffered.tokenized(len(segments), await self.encode(segments))

    async def drain(self, paced: bool = False, most: int | None = None) -> int:
        """Accept all tokenised ids, at most `most` of them, into an open user turn; returns how many."""
        taken = 0
        while self.buffered.ids and taken != most:
            self.open_turn()
            count = await self.room(len(self.buffered.ids) if most is None else most - taken, paced)
            self.accept([self.buffered.ids[i] for i in range(count)])
            self.buffered.accepted(count)
            taken += count
            await self.commit(paced)
        return taken

    # -- the frame --------------------------------------------------------------------------------------------

    def open_turn(self) -> None:
        """Make sure that a user turn is open and count it as having content. Accepts the template's literal ids."""
        self.check_open()  # it closes no reply any more
        if self.raw:
            return
        self.close_reply()  # only if a policy that never evicts had no room for it when the reply ended
        if self.frame.turn != "user":
            self.accept(*self.services.frames.open_user(self.frame))
        if not self.frame.has_content:
            self.accept([], self.frame.with_content())

    async def begin_reply(self) -> None:
        """Close the user turn and open the assistant's."""
        ids, frame = self.services.frames.close_user_and_prompt(self.frame)
        await self.commit()
        self.accept(ids, frame)
        await self.commit()

    def frame_room(self) -> int:
        """How many ids the template itself adds from here until a reply can begin."""
        frames, frame = self.services.frames, self.frame
        count = 0
        if frame.turn == "assistant":
            ids, frame = frames.close_reply(frame, self._end_of_reply())
            count += len(ids)
        ids, frame = frames.open_user(frame)
        return count + len(ids) + len(frames.close_user_and_prompt(frame)[0])

    def close_reply(self) -> None:
        """End the assistant's turn; queues literals only, so it may run anywhere, even in a finaliser."""
        if not self.raw and self.frame.turn == "assistant" and not (self.closed or self.closing):
            self.accept(*self.services.frames.close_reply(self.frame, self._end_of_reply()))

    def _end_of_reply(self) -> list[int]:
        """The last ids of the open reply, which may end with an end marker that the model sampled itself."""
        length = 16 if self.reply_at is None else min(16, self.state.position - self.reply_at)
        return self.state.history[-length:] if length else []

    # -- copies -----------------------------------------------------------------------------------------------

    async def thin(self, share: float, reading: int) -> None:
        """Keep that share of the budget, of a copy that answers and reads so many tokens before (see `Engine.thin`)."""
        engine, state = self.services.engine, self.state
        await self.step(lambda: engine.thin(state, share, reading))

    async def fork(self, slot: int) -> Session:
        """A copy in another slot, as of this call: at the last accepted token. Buffered text is copied too.

        Inside a feed, buffered text was not accepted yet, so in the copy it comes after a question, as after a `break`.

        Needs no slot of this session: one that is swapped out is copied from the store.
        """
        if self.swapped_out or self._undoing.is_closed:
            async with self.frozen():
                return await self.copy(slot, await saving.stored_units(self) if self.swapped_out else None)
        return await self.copy(slot, None)
