"""One turn: what the memory does not hold yet is fed, the model answers, and both ends become boundaries of the thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import msgspec

from locret_stream.context import Generation
from locret_stream.conversation.boundaries import Boundary
from locret_stream.conversation.held_replies import Demand, HeldReply, demand_of
from locret_stream.conversation.matching import Reached, reach, reach_behind
from locret_stream.conversation.messages import digest
from locret_stream.conversation.parts import End, Part
from locret_stream.conversation.reading import reader_of
from locret_stream.conversation.recalling import Recollection, recollect
from locret_stream.conversation.replies import Reply
from locret_stream.conversation.request import NOT_HELD, TOOLS_LEFT_OUT, Request, within
from locret_stream.conversation.thread import Thread
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError, InputError, SnapshotNotFound
from locret_stream.text import FrameState

Emit = Callable[[Part | End], None]
_log = logging.getLogger(__name__)


async def turn(threads: Threads, request: Request, emit: Emit) -> None:
    """Answer: `emit` is given the parts of the answer, then its end. With a `delivery` the turn ends when the caller
    has taken that end.

    Cancelled, left or failing anywhere, the thread rests at a stored boundary that it had before, and nothing of the
    call stays; a boundary that was not stored is read again from the next history.

    Raises:
        StateLost, ConfigError, InputError, BudgetExceeded, NoSlot, StoreError; TimeoutError.
    """
    late = (f"no whole answer within {request.timeout_s} s, waiting for its turn included; expected a longer timeout "
            "or a smaller max_tokens. Nothing of this call stays")
    async with within(request.timeout_s, late) as limit, threads.exclusive(request) as thread:
        if not request.append and not request.behind:
            reached = await reach(threads, thread, request, answers=True)
        elif (behind := await reach_behind(threads, thread, request, answers=True)) is not None:
            request, reached = behind
        elif request.append and request.mark and thread.snapshots:  # it was created, and told nothing yet
            reached = await reach(threads, thread, request, answers=True)
        elif request.append and request.mark:
            raise SnapshotNotFound(f"there is no conversation {request.thread!r} (any more); expected one that was "
                                   "created")
        elif request.behind:
            raise SnapshotNotFound(f"thread {request.thread!r} keeps no boundary of mark {request.behind.hex()}: "
                                   "it is older than those that are kept, or was forgotten; expected a later one")
        else:
            raise InputError(f"thread {request.thread!r} was told nothing yet, so there is nothing to append to; "
                             "expected its first messages without append=True")
        last = await Turn(threads, thread, request, reached, emit).run()
        if not limit.expired():
            limit.reschedule(None)  # the answer is whole: how long reading it takes is up to the caller
        if request.delivery is None:
            emit(last)
        else:
            request.delivery.offer = lambda: emit(last)


class Turn:
    """A turn of a thread whose context rests where `reached` says."""

    def __init__(self, threads: Threads, thread: Thread, request: Request, reached: Reached, emit: Emit):
        self._threads, self._thread, self._request, self._reached, self._emit = threads, thread, request, reached, emit
        self._before = reached.base.tokens if reached.base else 0  # tokens that the memory held
        self._demand = Demand()
        self._sampled: list[int] = []
        self._written = list[str]()  # the texts of the sampled tokens
        self._thought = 0  # how many of these tokens were thought
        self._last: list[int] = []  # the last ids of the reply as the memory holds it

    async def run(self) -> End:
        """Emit the parts of the answer; its end is returned.

        Raises:
            ConfigError: before anything is fed, if the template cannot show the messages or the call, or what is
                demanded of the reply cannot be held.
        """
        reached, left_out = self._reached, self._left_out()
        self._demand = demand = await demand_of(self._threads, self._request)
        opening = demand.opening
        recalled, at = await self._recollect()
        body = [] if recalled.ids else await self._encode(at, reached.rendered.body)
        prompt = await self._encode(at if recalled.ids else max(at, reached.rendered.body), None)
        if body:
            await self._thread.feed(body, self._request.focus)
            self._thread.rest_at(reached.boundary_behind(
                self._request.said[reached.count:], reached.keys[-1], self._thread, self._request))
            await self._thread.save("turn" if demand.sampling.get("stop") else self._request.save)
        question = self._thread.boundary
        await self._thread.feed([] if recalled.ids else prompt + opening, self._request.focus)
        begun = self._thread.context.memory.tokens + (len(prompt + opening) if recalled.ids else 0)
        reply, ended = await self._decode(prompt + opening, recalled)
        receipt: dict[str, Any] = {"source": reached.source, "reused": self._before, "fed": begun - self._before}
        receipt |= {"appended": len(self._request.said) - reached.count} if self._request.append else {}
        receipt |= {"why": reached.why} if reached.why else {}
        receipt |= {"late": reached.late} if reached.late else {}
        tools_left_out = bool(self._request.tools) and not self._threads.template.tells_of_tools
        receipt |= {"tools": "left out"} if tools_left_out else {}
        warnings = {"late" if reached.late else "rebuild": reached.warning} if reached.warning else {}
        warnings |= {"tools": TOOLS_LEFT_OUT} if tools_left_out else {}
        receipt |= {"not_held": demand.not_held} if demand.not_held else {}
        warnings |= {"held": f"{NOT_HELD}: {demand.not_held}"} if demand.not_held else {}
        receipt |= {"left_out": left_out} if left_out else {}
        receipt |= {"no_option": unknown} if (unknown := self._threads.without_effect(self._request)) else {}
        receipt |= {"otherwise": otherwise} if (otherwise := self._otherwise()) else {}
        receipt |= {"recalled": recalled.receipt} if recalled.receipt else {}
        receipt |= {"not_recalled": recalled.why_not} if recalled.why_not else {}
        if isinstance(reply, Reply) and reply.cut_thought and not reply.message.content and not reply.calls:
            cut = "was cut off by max_tokens" if ended == "length" else "was not closed"
            receipt |= {"empty": f"the thought {cut}, so that there is no answer"}
        if ended == "stop":  # the memory holds the stop string, or a part of it; the answer does not
            stop_at = reply.stop_at if isinstance(reply, Reply) else None
            await self._reread_answer(question, prompt + opening, stop_at)
        receipt = await self._conclude(reply) | receipt
        finish: Literal["stop", "length", "tool_calls"] = (
            "length" if ended == "length" else "tool_calls" if reply.calls else "stop")
        return End(begun, self._before, len(self._sampled), finish, receipt, warnings, self._thought)

    async def _recollect(self) -> tuple[Recollection, int]:
        """What is read again for the last message, if that is a user's and new and recall is on; and the character of
        the rendering from which on nothing was fed yet: all messages before that one were."""
        threads, request, reached = self._threads, self._request, self._reached
        last = request.said[-1]
        recall = threads.runtime.recall is not None if request.recall is None else request.recall
        if not recall or last.role != "user" or last.stream or not last.content:
            return Recollection(), reached.at
        if threads.runtime.recall is None:
            raise ConfigError("found recall=True in a call of a runtime that keeps nothing for recall; expected "
                              "one made with recall on, or a call without")
        at = threads.template_of(request).after(reached.shown, len(reached.shown) - 1, request.tools, reached.rendered)
        if at is None or at < reached.at:
            return Recollection(why_not="the template has no place before the last message" if at is None else
                                "the memory holds the last message already"), reached.at
        early = await self._encode(reached.at, at)
        if early:
            await self._thread.feed(early, request.focus)
            if len(request.said) > 1:
                self._thread.rest_at(reached.boundary_behind(
                    request.said[reached.count:-1], reached.keys[-2], self._thread, request))
        if self._demand.sampling.get("stop"):  # what is kept of the answer is read again from here
            await self._thread.save("turn")
        found = await recollect(threads, self._thread.context, last.content)
        return found, at

    async def _decode(self, prompt: list[int], recalled: Recollection) -> tuple[Reply | HeldReply, str | None]:
        """The reply, and why generation ended.

        Args:
            prompt: where something was recalled it was not fed yet, the last message in it: it follows that.
        """
        demand, request = self._demand, self._request
        reply, skip_special = self._reader()
        by_reader = isinstance(reply, Reply)  # which finds stop strings in the content alone
        sampling = {name: value for name, value in demand.sampling.items() if name != "stop" or not by_reader}
        unheld = self._threads.runtime.frames.unheld_ends
        generation: Generation = self._thread.context.generate(
            prompt if recalled.ids else None, skip_special=skip_special, recall=False, aside=recalled.ids,
            constraint=demand.constraint, unheld=unheld, **sampling)
        spoken, ended = False, None
        async for token in generation:
            self._sampled.append(token.id)
            if token.id not in unheld:
                self._last = [*self._last[-15:], token.id]
            self._written.append(token.text)
            thought = False
            for part in reply.feed(token.text):
                self._emit(part)
                thought, spoken = thought or bool(part.reasoning), spoken or bool(part.text)
            if thought or (isinstance(reply, Reply) and reply.thinking):
                # All so far, where it turns out that a thought came first.
                self._thought = self._thought + 1 if self._thought or spoken else len(self._sampled)
            if isinstance(reply, Reply) and reply.stop_at is not None:
                ended = "stop"
            elif demand.form is None and request.choice not in ("", "any") and reply.calls:
                ended = "closed"  # the call that was asked for is whole
            if ended is not None:
                await generation.aclose()
                break
        for part in reply.finish():
            self._emit(part)
        if isinstance(reply, Reply) and reply.stop_at is not None:  # it may be seen only here, in what was kept back
            ended = "stop"
        return reply, ended or generation.finish_reason

    def _reader(self) -> tuple[Reply | HeldReply, Collection[int] | bool]:
        """What reads the reply, and the special tokens that its text comes without."""
        request, rendered, demand = self._request, self._reached.rendered, self._demand
        if demand.form is not None:
            return HeldReply(demand.form, request.tools, demand.begun), False
        return reader_of(self._threads, rendered, begun=demand.begun, tools=request.tools,
                         stops=demand.sampling.get("stop") or (), whole=demand.sampling.get("schema") is not None)

    async def _reread_answer(self, question: Boundary | None, prompt: list[int], length: int | None) -> None:
        """Go back to where the model was asked, and read the answer again up to that character, or all that is written;
        without a snapshot of that boundary, close the context."""
        thread = self._thread
        if question is None or question.key not in thread.snapshots:
            await thread.close()
            return
        await thread.move_to(question)
        length = len("".join(self._written)) if length is None else length
        kept = at = 0  # the tokens whose texts are whole characters of it
        for number, text in enumerate(self._written, 1):
            if at + len(text) > length:
                break
            if text:
                kept, at = number, at + len(text)
        rest = "".join(self._written)[at:length]
        written = self._sampled[:kept] + self._threads.template.codec.encode_text(rest)
        await thread.feed(prompt + written, self._request.focus)
        self._last = written[-16:]

    async def _conclude(self, reply: Reply | HeldReply) -> dict[str, Any]:
        """Close the reply and make it a boundary; the receipt's `state` and `saved`."""
        thread, reached = self._thread, self._reached
        answer = replace(reply.message, reasoning="") if self._request.unthinking else reply.message
        key, saved, mark = digest(reached.keys[-1], answer.digest), False, self._request.mark
        if mark:  # else an answer of the same text, which bears another mark or none, would be taken for it
            key = digest(key, mark)
        if thread.open:
            frames = self._threads.runtime.frames
            reached.placing.add(answer, reached.placing.at, thread.context.memory.tokens - self._before)
            await thread.context.push(frames.close_reply(
                FrameState(turn="assistant"), self._last, calls=bool(answer.calls))[0])
            behind = reached.boundary_behind(
                [*self._request.said[reached.count:], answer], key, thread, self._request)
            thread.rest_at(msgspec.structs.replace(behind, mark=mark, appended=bool(mark) and self._request.append))
            saved = await thread.save(self._request.save)
        return {"state": key.hex(), "saved": saved, **({"stale": True} if thread.stale else {})}

    def _given(self) -> dict[int, int]:
        """The number of each new message as the receipt counts them, by its number among those that are shown: a late
        message among these was not given. They count the messages given; of messages that come behind what is held,
        from the first new one."""
        reached, request = self._reached, self._request
        new = list(request.said[reached.count:])
        before = 0 if request.append or request.behind else reached.count
        numbers, at = dict[int, int](), 0
        for shown in range(reached.first, len(reached.shown)):
            if at < len(new) and reached.shown[shown] is new[at]:
                numbers[shown] = before + at
                at += 1
        return numbers

    def _otherwise(self) -> dict[str, str]:
        """How new messages are shown that the template has no place for, by their numbers."""
        given, shown = self._given(), self._reached.rendered.otherwise
        return {str(given[number]): shown[number] for number in sorted(given.keys() & shown)}

    def _left_out(self) -> list[int]:
        """Numbers of new messages whose text the template does not show: a system text, or the text of an answer with
        tool calls.

        Raises:
            ConfigError: it does not show any other text.
        """
        given, numbers = self._given(), []
        for shown in sorted(given.keys() & {*self._reached.rendered.left_out}):
            number, message = given[shown], self._reached.shown[shown]
            numbers.append(number)
            if message.role != "system" and not message.calls:
                raise ConfigError(f"the chat template leaves out message {number} ({message.role}); expected a "
                                  "template that shows it, or a conversation without it")
        if numbers:
            _log.warning("%r: the chat template does not show the text of messages %s", self._request.thread, numbers)
        return numbers

    async def _encode(self, start: int, end: int | None) -> list[int]:
        return await encode(self._threads, self._reached, start, end)


async def encode(threads: Threads, reached: Reached, start: int, end: int | None) -> list[int]:
    """Token ids of the rendering's characters start .. end-1, which are fed behind those that this gave before."""
    pieces = reached.rendered.pieces(start, end)

    def encoded() -> list[int]:
        each = threads.template.encode_each(pieces, start=start == 0 and reached.base is None)
        reached.placing.take(reached.rendered, reached.shown, start, pieces, each, threads.template)
        return [token for ids in each for token in ids]

    return await threads.tokenized(pieces, encoded)
