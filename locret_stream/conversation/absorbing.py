"""An unbounded stream of text becomes one message of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
from dataclasses import replace

from locret_stream.context.cancelling import to_the_end
from locret_stream.conversation.matching import reach, reach_behind
from locret_stream.conversation.messages import Message, digest, stand_in
from locret_stream.conversation.request import Request
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError, ContextClosed, EmptySource, StaleOwner

_OUTRUN = ("another owner, such as another process, told the thread something while the stream was absorbed, so it "
           "cannot be kept; the thread is as the other one left it. Expected one at a time: absorb the stream again")
_STREAM = Message("user", secrets.token_hex(16))  # marks the stream's place in the rendering; nobody says this


class Absorption:
    """One stream that is being absorbed: `begin`, `push` for each piece, `finish`, `take`, and `abort` in any case.

    Until `abort` it has its thread alone; other threads go on between the pieces.

    Args:
        request: the messages that the stream comes behind; without any it comes behind what the thread was told last.
        label: of the stand-in.

    Attributes:
        ended: it has released the thread. taken: the caller has the stand-in, so the stream stays.
        characters: that the memory has read. saved: whether the end of the stream is stored.
    """

    def __init__(self, request: Request, label: str):
        self._request, self._label = request, label
        self._sha, self.characters = hashlib.sha256(), 0
        self._alone = asyncio.Lock()  # `abort` waits for whatever runs
        self._has_thread = self.taken = self.ended = self.saved = False
        self._deciding = threading.Lock()  # guards `taken` and `ended`: `take` runs on the caller's OS thread

    async def begin(self, threads: Threads) -> None:
        """Lock the thread and feed what stands ahead of the stream. Raises as a turn."""
        async with self._alone:
            self._expect_running()
            self._threads, request = threads, self._request
            assert request.thread is not None
            self._thread = thread = threads.named(request.thread)
            thread.users += 1
            try:
                await thread.lock.acquire()
            except BaseException:
                thread.users -= 1
                raise
            self._has_thread = True
            threads.absorbing.add(self)
            async with threads.gate:
                thread.keep_slot()
                await thread.look_up()
                self._request = replace(request, said=[*request.said, _STREAM])
                tip = None if request.said else await reach_behind(threads, thread, self._request)
                if tip is not None:
                    self._request, self._reached = tip
                else:
                    self._reached = await reach(threads, thread, self._request)
                pieces = self._reached.rendered.pieces(self._reached.at, self._reached.rendered.body)
                place = max((at for at, piece in enumerate(pieces) if piece.text.endswith(_STREAM.content)), default=-1)
                if place < 0:
                    raise ConfigError("the chat template does not show a message ahead of its generation prompt; "
                                      "expected a template that does")
                # Some templates write the system text and the first message as one.
                ahead = replace(pieces[place], text=pieces[place].text.removesuffix(_STREAM.content))
                told, start = [*pieces[:place], ahead], self._reached.base is None
                each = await threads.tokenized(told, lambda: threads.template.encode_each(told, start=start))
                self._reached.placing.take(self._reached.rendered, self._reached.shown, self._reached.at, told, each,
                                           threads.template)
                self._closing = threads.template.encode(pieces[place + 1:], start=False)
                await thread.feed([token for ids in each for token in ids], request.focus)
                # The runtime may close it for its slot once another owner has saved: nothing can be kept then.
                thread.context.disposable = thread.session is not None

    async def push(self, text: str) -> None:
        """Feed a piece; returns when the memory has accepted it.

        Raises:
            InvalidText, BudgetExceeded, StoreError, StaleOwner, ContextClosed.
        """
        async with self._alone:
            self._expect_running()
            context = self._thread.context
            # With a slot it waits for no turn: a turn at the gate may be waiting for just this slot.
            async with self._threads.gate if context.swapped_out else contextlib.nullcontext():
                try:
                    await context.push(text)
                except ContextClosed as error:
                    if not self._threads.runtime.running:
                        raise
                    raise StaleOwner(_OUTRUN) from error
            self._sha.update(text.encode())
            self.characters += len(text)

    async def finish(self) -> Message:
        """The stand-in for the stream, which is durable now if the store can be written.

        Raises:
            EmptySource: there was no text. StaleOwner: another owner told the thread something. ContextClosed.
        """
        async with self._alone:
            self._expect_running()
            threads, thread, reached = self._threads, self._thread, self._reached
            if not self.characters:
                raise EmptySource("the stream ended without any text; expected some")
            async with threads.gate:
                if not thread.open and threads.runtime.running:
                    raise StaleOwner(_OUTRUN)
                await thread.context.flush()
                message = Message("user", stand_in(self._label, self.characters, self._sha.hexdigest()))
                begun = reached.placing.places.pop().start  # that of `_STREAM`
                reached.placing.add(message, begun, thread.context.memory.tokens - (
                    reached.base.tokens if reached.base is not None else 0), stream=True)
                await thread.context.push(self._closing)
                new = [*self._request.said[reached.count:-1], message]
                key = digest(reached.keys[-2], message.digest)
                thread.rest_at(reached.boundary_behind(new, key, thread, self._request))
                self.saved = await thread.keep()
                if thread.stale:
                    raise StaleOwner(_OUTRUN)
            return message

    def take(self) -> None:
        """The caller has the stand-in: from here on the stream stays. May be called on any OS thread.

        Raises:
            ContextClosed: the model was closed before.
        """
        with self._deciding:
            self._expect_running()
            self.taken = True

    async def abort(self) -> None:
        """Release the thread: after `take` it rests at the end of the stream, else it is as it was before.

        To be called in any case, also if `begin` failed or was cancelled. Idempotent.
        """
        await to_the_end(self._release())

    async def _release(self) -> None:
        async with self._alone:
            with self._deciding:
                self.ended = True
            if not self._has_thread:
                return
            self._has_thread = False
            self._threads.absorbing.discard(self)
            try:
                async with self._threads.gate:
                    if self.taken:
                        await self._threads.rest(self._thread)
                        self._thread.settle()
                    else:
                        await self._threads.undo(self._thread)
            finally:
                self._thread.lock.release()
                self._thread.users -= 1

    def _expect_running(self) -> None:
        if self.ended:
            raise ContextClosed("the model was closed while a stream was absorbed; the thread is as it was before. "
                                "Expected the stream to end first")
