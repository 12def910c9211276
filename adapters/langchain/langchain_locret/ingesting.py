"""An unbounded stream of text, taken into a thread as one message."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import HumanMessage

from langchain_locret.matching import reach, reach_tip
from langchain_locret.messages import Said, digest, read, stand_in
from langchain_locret.thread import Request
from langchain_locret.threads import Threads
from locret_stream import ConfigError, ContextClosed, EmptySource, InputError, InvalidText, SourceError, StaleOwner
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.sources import Puller

if TYPE_CHECKING:
    from langchain_locret.runtimes import Life

_OUTRUN = ("another owner, such as another process, told the thread something while the stream was absorbed, so it "
           "cannot be kept; the thread is as the other one left it. Expected one at a time: absorb the stream again")
_BLOCK = 1 << 16  # bytes of a file that are read at once
_STREAM = Said("user", secrets.token_hex(16))  # a place in the rendering; nobody says this


async def absorb(life: Life, source: Any, request: Request, label: str,
                 progress: Callable[[int], None] | None) -> HumanMessage:
    """All of a source into a thread of that life; for the caller's event loop, on which the source is read.

    Raises as `LocretChatModel.aingest`.
    """
    if isinstance(source, Path):
        try:
            file = source.open("rb")
        except OSError as error:
            raise SourceError(f"{source} cannot be opened: {error}; expected a file of text") from error
        with file:  # not by lines: a file may be one
            return await absorb(life, iter(lambda: file.read(_BLOCK), b""), request, label, progress)
    puller, decode, absorption = Puller(source), codecs.getincrementaldecoder("utf-8")(), Absorption(request, label)
    try:
        await life.acall(absorption.begin)
        while (piece := await puller.next()) is not None:
            if isinstance(piece, list):
                raise InputError("the source gave token ids; expected text")
            text = _as_text(decode, piece) if isinstance(piece, bytes) else piece
            if text:
                await life.acall(lambda _, text=text: absorption.push(text))
                if progress is not None:
                    progress(absorption.characters)
        _as_text(decode, b"", final=True)
        message = await life.acall(lambda _: absorption.finish())
        absorption.take()
    finally:
        with contextlib.suppress(ContextClosed):  # then it was let go of already, or is while the model closes
            try:
                await to_the_end(life.acall(lambda _: absorption.abort()))
            except asyncio.CancelledError:
                if not absorption.taken:
                    raise
                asyncio.current_task().uncancel()  # too late: the stream is in memory, and stays
    return message


class Absorption:
    """One stream on its way in: `begin`, `push` for each piece, `finish`, and `abort` in any case. The thread waits
    meanwhile, other threads go on between the pieces.

    Attributes:
        ended: it has nothing of the thread any more. taken: whoever called has the stand-in, so the stream stays.
        characters: that memory has taken in.

    Args:
        request: the messages the stream comes behind; of none it comes behind what the thread was told last.
    """

    def __init__(self, request: Request, label: str):
        self._request, self._label = request, label
        self._sha, self.characters = hashlib.sha256(), 0
        self._alone = asyncio.Lock()  # `abort` comes after whatever runs
        self._has = self.taken = self.ended = False
        self._deciding = threading.Lock()  # of those two: `take` is called on the caller's thread

    async def begin(self, threads: Threads) -> None:
        """Raises as a turn."""
        async with self._alone:
            self._expect_going()
            self._threads, request = threads, self._request
            self._thread = thread = threads.named(request.thread)
            thread.users += 1
            try:
                await thread.lock.acquire()
            except BaseException:
                thread.users -= 1
                raise
            self._has = True
            threads.absorbing.add(self)
            async with threads.gate:
                threads.at_work(thread)
                await threads.look_up(thread)
                self._request = replace(request, said=[*request.said, _STREAM])
                found = None if request.said else await reach_tip(threads, thread, self._request)
                if found is not None:
                    self._request, self._after = found
                else:
                    self._after = await reach(threads, thread, self._request)
                pieces = self._after.rendered.pieces(self._after.at, self._after.rendered.body)
                place = max((at for at, piece in enumerate(pieces) if piece.text.endswith(_STREAM.content)), default=-1)
                if place < 0:
                    raise ConfigError("the chat template does not show a message ahead of its generation prompt; "
                                      "expected a template that does")
                encode = threads.template.encode
                ahead = replace(pieces[place], text=pieces[place].text.removesuffix(_STREAM.content))  # a system text
                before = encode([*pieces[:place], ahead], start=self._after.base is None)
                self._closing = encode(pieces[place + 1:], start=False)
                await threads.take(thread, before, request.focus)
                thread.ctx.disposable = thread.session is not None  # once another owner has saved, nothing can be kept

    async def push(self, text: str) -> None:
        """Take in a piece; returns when memory has it.

        Raises:
            InvalidText, BudgetExceeded, StoreError, StaleOwner, ContextClosed.
        """
        async with self._alone:
            self._expect_going()
            ctx = self._thread.ctx
            # One that has its slot waits for no turn: that may be waiting for just this slot.
            async with self._threads.gate if ctx.swapped_out else contextlib.nullcontext():
                try:
                    await ctx.push(text)
                except ContextClosed as error:
                    if not self._threads.runtime.running:
                        raise
                    raise StaleOwner(_OUTRUN) from error
            self._sha.update(text.encode())
            self.characters += len(text)

    async def finish(self) -> HumanMessage:
        """The stand-in for all of it; what it stands for is durable, where the store can be written.

        Raises:
            EmptySource: there was no text. StaleOwner: another owner told the thread something. ContextClosed.
        """
        async with self._alone:
            self._expect_going()
            threads, thread = self._threads, self._thread
            if not self.characters:
                raise EmptySource("the stream ended without any text; expected some")
            async with threads.gate:
                if not thread.open and threads.runtime.running:
                    raise StaleOwner(_OUTRUN)
                await thread.ctx.flush()
                await thread.ctx.push(self._closing)
                message = stand_in(self._label, self.characters, self._sha.hexdigest())
                said = [*self._request.said[:-1], *read([message])]
                keys = [*self._after.keys[:-1], digest(self._after.keys[-2], said[-1].digest)]
                thread.at = threads.boundary(thread, replace(self._after, keys=keys), self._request, said)
                await threads.keep(thread)
                if thread.stale:
                    raise StaleOwner(_OUTRUN)
            return message

    def take(self) -> None:
        """The caller has the stand-in: from here on the stream stays. On any thread.

        Raises:
            ContextClosed: the model was closed before.
        """
        with self._deciding:
            self._expect_going()
            self.taken = True

    async def abort(self) -> None:
        """Let go of the thread: after `take` it rests at the end of the stream, else it is as it was before.

        To be called in any case, also where `begin` failed or was cancelled. Idempotent.
        """
        await to_the_end(self._let_go())

    async def _let_go(self) -> None:
        async with self._alone:
            with self._deciding:
                self.ended = True
            if not self._has:
                return
            self._has = False
            self._threads.absorbing.discard(self)
            try:
                async with self._threads.gate:
                    if self.taken:
                        await self._threads.rest(self._thread)
                        self._threads.settle(self._thread)
                    else:
                        await self._threads.undo(self._thread)
            finally:
                self._thread.lock.release()
                self._thread.users -= 1

    def _expect_going(self) -> None:
        if self.ended:
            raise ContextClosed("the model was closed while a stream was absorbed; the thread is as it was before. "
                                "Expected the stream to end first")


def _as_text(decoder: codecs.IncrementalDecoder, piece: bytes, *, final: bool = False) -> str:
    """Bytes of a stream as text. Raises InvalidText."""
    try:
        return decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        raise InvalidText(f"the source gave bytes that are not UTF-8: {error}; expected text") from error
