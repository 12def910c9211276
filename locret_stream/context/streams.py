"""Feed and Generation: the two operations that keep a session busy while they run, and the values they give.

Both are async iterators. They end when they are exhausted, fail, are closed or are simply dropped, so that a `break`
leaves the context ready for the next call. One token is awaited at a time; to stop an operation that another task waits
for, cancel that task.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from locret_stream.config import Sampling
from locret_stream.constraints import Constraint
from locret_stream.context import swapping
from locret_stream.context.recalling import NOTHING, REPLY, ReadAgain
from locret_stream.context.session import Session
from locret_stream.context.session_index import Recalled
from locret_stream.context.sources import Puller, Source, as_piece
from locret_stream.context.values import FinishReason
from locret_stream.errors import (
    BudgetExceeded,
    ConfigError,
    ContextBusy,
    EmptySource,
    InputError,
    NoSlot,
    SnapshotError,
)
from locret_stream.sampling import processors, sample
from locret_stream.text import Detokenizer, Segmenter

if TYPE_CHECKING:
    from torch import Tensor


class Token(msgspec.Struct, frozen=True):
    """One token, with its position. `text` is what it adds to the text so far: "" while a character is incomplete.

    The memory has it, but for an end marker that the template does not write (`ChatFrame.unheld_ends`): what follows
    stands in its position.
    """

    id: int
    text: str
    position: int


class FeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a feed did.

    Args:
        tokens: accepted by it. pieces: pulled by it. position: of the next token in the stream.
        buffered: token ids and characters that were pulled and not accepted yet.
    """

    tokens: int
    pieces: int
    position: int
    buffered: int
    seconds: float


class _Operation(AsyncIterator[Token]):
    """One token is awaited at a time, by whichever task; `_end` runs however it ends."""

    _state = "ended"  # until a constructor succeeded
    _awaited = _begun = False  # whether a task awaits a token now; whether one ever did
    _session: Session

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._state == "ended":
            raise StopAsyncIteration
        self._expect_alone()
        self._awaited = self._begun = True
        try:
            return await self._advance()
        finally:
            self._awaited = False

    async def aclose(self) -> None:
        """End it here, as a `break` does. Idempotent.

        Raises:
            ContextBusy: another task awaits its next token; cancel that task instead.
        """
        self._expect_alone()
        self._end()

    def __del__(self) -> None:
        if self._state == "new" and not self._begun and not self._session.closed:
            name = type(self).__name__.lower()
            warnings.warn(f"a {name} was dropped before it began, so it did nothing; expected `await` or `async for`",
                          RuntimeWarning, stacklevel=2, source=self)
        self._end()

    def _expect_alone(self) -> None:
        if self._awaited:
            raise ContextBusy(f"another task awaits the next token of this {type(self).__name__.lower()}; expected one "
                              "at a time: cancel that task, or let it finish")

    @abstractmethod
    async def _advance(self) -> Token:
        """The next token. Raises StopAsyncIteration at the end."""

    @abstractmethod
    def _end(self) -> None:
        """Release the session. Idempotent; it takes no step, so that a finaliser may call it."""


class Feed(_Operation, Coroutine[object, object, "FeedReport"]):
    """A running feed. `async for` gives each token once it is accepted; `await` drains it and gives a FeedReport.

    It is a coroutine too, so that `asyncio.create_task(ctx.feed(source))` drains it beside what the caller does.
    """

    def __init__(self, session: Session, source: Source):
        self._session, self._key = session, object()  # the key, not this object: a dropped iterator must be collected
        self._puller = Puller(source)
        self._detokenizer = Detokenizer(session.services.codec, start=False)
        self._started = time.perf_counter()
        self._tokens = 0
        self._draining = 0  # how many ids were tokenised when the running drain began
        self._state: Literal["new", "running", "ended"] = "new"

    @property
    def report(self) -> FeedReport:
        """What was done so far; valid at any time."""
        drained = self._draining - len(self._session.buffered.ids) if self._draining else 0
        return FeedReport(tokens=self._tokens + drained, pieces=self._puller.pulled,
                          position=self._session.state.position, buffered=self._session.buffered.size,
                          seconds=time.perf_counter() - self._started)

    async def _advance(self) -> Token:
        self._begin()
        session = self._session
        try:
            ids = session.buffered.ids
            if not ids and not await self._refill():
                self._end(left=False)
                raise StopAsyncIteration
            token = ids[0]
            await self._accept(most=1)
            return Token(token, self._detokenizer.push(token), session.state.position - 1)
        except BaseException:
            self._end()
            raise

    def __await__(self) -> Generator[object, None, FeedReport]:
        return self._drain().__await__()

    def send(self, value: object) -> object:
        """Of the coroutine protocol, for tasks."""
        return self._running.send(value)

    def throw(self, *error: Any) -> object:
        """Of the coroutine protocol, for tasks."""
        return self._running.throw(*error)

    def close(self) -> None:
        """Of the coroutine protocol, for tasks; end a feed with `aclose`."""
        self._running.close()

    @functools.cached_property
    def _running(self) -> Coroutine[object, object, FeedReport]:
        return self._drain()

    async def _drain(self) -> FeedReport:
        if self._state == "ended":
            return self.report
        self._begun = True
        self._expect_alone()
        self._begin()
        self._awaited = True
        try:
            while self._session.buffered.ids or await self._refill():
                await self._accept()
            self._end(left=False)
            return self.report
        finally:
            self._awaited = False
            self._end()

    async def _accept(self, most: int | None = None) -> None:
        self._draining = len(self._session.buffered.ids)
        try:
            await self._session.drain(paced=True, most=most)
        finally:
            self._tokens, self._draining = self.report.tokens, 0

    def _begin(self) -> None:
        if self._state == "new":
            self._session.claim("feed", self._key)
            self._state = "running"
            self._session.buffered.take_up()

    def _end(self, left: bool = True) -> None:
        if self._state == "running" and self._session.owner is self._key:
            if left:
                self._session.buffered.leave()
            else:
                self._session.buffered.take_up()
            self._session.release(self._key)
        self._state = "ended"

    async def _refill(self) -> bool:
        """Pull until there are ids to accept; False at the end of the source."""
        session = self._session
        while True:
            await session.tokenize()
            if session.buffered.ids:
                return True
            if self._puller.pulled % 64 == 63:  # a source of tiny pieces that never waits must not block the event loop
                await asyncio.sleep(0)
            piece = await self._puller.next()
            if piece is not None:
                session.buffer(piece)
                continue
            session.buffered.cut()
            await session.tokenize()
            if session.buffered.ids:
                return True
            if not self._tokens:
                raise EmptySource(f"the source ended after {self._puller.pulled} pieces without a single token; "
                                  "expected text or token ids (check where the stream comes from)")
            return False




class Generation(_Operation):
    """A running reply. `async for` gives its tokens, the end marker included (with text "").

    Args:
        before: what is read right before the prompt, in the open user's turn or one of its own where there are turns,
            by a session that keeps less of its memory for it: a scratch copy. Given as a function, it is found when the
            reply begins, and a copy is made here, which then speaks; the session takes in the prompt and the reply.
        constraint: what holds the reply to the schema or grammar of `sampling`; None: it is made when the reply begins.
        unheld: as of `StreamingContext.generate`.

    Attributes:
        recalled: the passages that were read again before the prompt.
        text: the reply so far.
        finish_reason: None while it runs. "eos": it ended by itself, with the model's end marker or because its schema
            lets nothing follow. "stop": with a stop string. "length": cut off by `max_new_tokens`. "closed": it was
            left before its end. "failed": with an error.
    """

    def __init__(self, session: Session, prompt: str | list[int] | None, sampling: Sampling, *, name: str,
                 skip_special: bool | Collection[int] = True,
                 before: ReadAgain | Callable[[], Awaitable[ReadAgain]] = NOTHING,
                 constraint: Constraint | None = None, unheld: Collection[int] | None = None):
        self._session, self._prompt, self._sampling, self._name = session, prompt, sampling, name
        self._before, self._speaker = before, session
        self._leaving = contextlib.ExitStack()
        self.recalled: tuple[Recalled, ...] = ()
        if unheld is None:
            unheld = () if session.raw else session.services.frames.unheld_ends
        # Others than end markers go on with the reply, so that the next token has to follow them.
        self._unheld = frozenset() if sampling.ignore_eos else session.services.frames.eos_ids.intersection(unheld)
        self._key = object()
        self._processors, self._constraint = processors(sampling), constraint
        # A constraint counts every byte of the reply, so that its text keeps a space at the start.
        self._detokenizer = Detokenizer(session.services.codec, skip_special=skip_special,
                                        start=not sampling.constrained)
        self._state: Literal["new", "prompt", "reply", "ended"] = "new"
        self._kept_back = ""  # text that may turn out to begin a stop string
        self._count = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None

    async def _advance(self) -> Token:
        begins = self._state == "new"
        if begins:
            self._session.claim(self._name, self._key)
            self._state = "prompt"
        try:
            if begins:
                await self._take_prompt()
                self._state = "reply"
            return await self._next_token()
        except BaseException:
            self._end("failed")
            raise

    async def _take_prompt(self) -> None:
        session = self._session
        ids = await self._prompt_ids()  # a prompt that cannot be read changes nothing, nor a schema that cannot be held
        if self._constraint is None:
            self._constraint = await session.constraint(self._sampling)
        if not session.buffered.left_by_break:  # pushed text belongs before the question, the rest of a feed does not
            session.buffered.cut_whole()
            await session.tokenize()
            await session.drain()
        await session.commit()  # what a reply of a copy left pending; whoever has a scratch slot waits for no live one
        aside = not isinstance(self._before, ReadAgain)
        before = self._before if isinstance(self._before, ReadAgain) else await self._before()
        self.recalled, again = before.passages, before.ids
        if not again:
            await self._read(session, (), ids)
            return
        if aside:
            self._speaker = await self._copy()
        await self._speaker.thin(before.memory, len(again) + len(ids) + session.frame_room() + REPLY)
        await self._read(self._speaker, again, ids)
        if aside:  # it commits when the copy has given its slot back (see `context.swapping`)
            await self._read(session, (), ids, commits=False)

    async def _copy(self) -> Session:
        """A scratch copy of the session; it ends and gives its slot back with this generation."""
        session, slots = self._session, self._session.services.slots
        swapping.expect_scratch(session, "a reply with recall after it")
        slot = await slots.acquire(scratch=True)
        self._leaving.callback(slots.release, slot, scratch=True)
        copy = await session.fork(slot)
        this = weakref.ref(self)  # a dropped reply must be collected

        def give_back() -> None:
            reply = this()
            if reply is not None and not reply._awaited:  # else the task that awaits it ends it
                reply._leaving.close()

        self._leaving.enter_context(session.answering_on(copy, give_back))
        return copy

    async def _read(self, session: Session, again: Sequence[int], ids: list[int], *, commits: bool = True) -> None:
        """Read what stands before the prompt, and the prompt's `ids`, and begin the reply. Where there is no room for
        either nothing of it is read. `commits`: also commit whole chunks, for which the session needs a slot."""
        frames, engine = session.services.frames, session.services.engine

        async def take(ids: list[int]) -> None:
            if commits:
                await session.take(ids)
            else:
                session.accept(ids)

        if session.raw:
            await take([*again, *ids])
        else:
            if again:
                before = list(again)
                if session.frame.turn == "user":
                    before[:0] = frames.blank_line(session.frame)
                engine.expect_room(session.state, len(before) + session.frame_room())
                session.open_turn()
                await take(before)
            fed = session.frame.turn == "user" and session.frame.has_content  # something, since the last reply
            if self._prompt is not None:
                if fed:
                    ids = frames.question_separator(session.frame)[0] + ids
                engine.expect_room(session.state, len(ids) + session.frame_room())
                session.open_turn()
                await take(ids)
            elif not fed:
                raise ConfigError("generate() was called without a prompt and nothing was fed since the last reply; "
                                  "expected a prompt, or a feed before it")
            if commits:
                await session.begin_reply()
            else:
                session.accept(*frames.close_user_and_prompt(session.frame))
        if session.state.position == 0:
            raise ConfigError("nothing was fed and the prompt is empty; expected something to continue")

    async def _prompt_ids(self) -> list[int]:
        prompt, session = self._prompt, self._session
        if prompt is None:
            return []
        if isinstance(prompt, int):  # one id of a stream, but no question
            raise InputError(f"found {prompt!r} as a question or prompt; expected text or a list of token ids")
        piece = as_piece(prompt)
        if isinstance(piece, list):
            return session.services.codec.validate_ids(piece)
        segmenter = Segmenter()
        return await session.encode([*segmenter.push(piece), *segmenter.flush()])

    async def _next_token(self) -> Token:
        session, state, speaker = self._session, self._session.state, self._speaker
        session.check_open()
        await speaker.commit()
        position, constraint = state.position, self._constraint

        def choose(logits: Tensor) -> int:
            if constraint is None:
                return sample(logits, state.history, position, self._sampling, self._processors)
            allowed = constraint.allowed(logits.shape[-1])
            token = sample(logits, state.history, position, self._sampling, self._processors, allowed)
            constraint.take(token)
            return token

        token = await speaker.next_token(choose, self._unheld)
        if speaker is not session and token not in self._unheld:
            session.accept([token])
        self._count += 1
        ended: FinishReason | None = None
        text = ""
        if token in session.services.frames.eos_ids and not self._sampling.ignore_eos:
            ended = "eos"
        else:
            text, stopped = self._up_to_stop(self._detokenizer.push(token))
            ended = ("stop" if stopped else "eos" if constraint is not None and constraint.complete else
                     "length" if self._count >= self._sampling.max_new_tokens else None)
        if ended is not None:
            if ended != "stop":
                # A character that a limit cut off is held back; the memory has the tokens of its first bytes.
                rest, stopped = self._up_to_stop("" if ended == "length" else self._detokenizer.flush())
                text += rest if stopped else rest + self._kept_back
            if speaker is not session:
                self._leaving.close()
                with contextlib.suppress(NoSlot, SnapshotError):  # then the next operation commits it, or says why not
                    await session.commit()
            self._end(ended)
        self.text += text
        return Token(token, text, position)

    def _up_to_stop(self, new: str) -> tuple[str, bool]:
        """Text that can be given out: (text before a stop string, True), or (all but what may begin one, False)."""
        text, stops = self._kept_back + new, self._sampling.stop
        places = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if places:
            self._kept_back = ""
            return text[:min(places)], True
        longest = max((n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if
                       text.endswith(stop[:n])), default=0)
        self._kept_back = text[len(text) - longest:]
        return text[:len(text) - longest], False

    def _end(self, reason: FinishReason = "closed") -> None:
        if self._state in ("prompt", "reply") and self._session.owner is self._key:
            try:
                self._session.close_reply()
            except BudgetExceeded:  # no room for the literals: the reply stays open, and the caller has its own error
                pass
            self._session.release(self._key)
        if self._state == "reply" and not self._speaker.closed:
            self._speaker.services.worker.leave(id(self._speaker.state))
        if self._state != "ended":
            self._state, self.finish_reason, self._constraint = "ended", reason, None
            self._leaving.close()
