"""Where a turn begins: the deepest boundary that the given messages go on from. The thread's context is brought there.

A turn feeds what follows that boundary; if there is none, it begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from locret_stream.conversation import late_messages
from locret_stream.conversation.boundaries import (
    LEDGER,
    OTHER_MESSAGES,
    OTHER_OPTIONS,
    OTHER_SYSTEM,
    OTHER_TOOLS,
    Boundary,
    fitting,
    heading,
    split,
    what_differs,
)
from locret_stream.conversation.histories import Keys
from locret_stream.conversation.messages import Message, chain
from locret_stream.conversation.places import Placing, packed
from locret_stream.conversation.render import Rendered
from locret_stream.conversation.request import Request
from locret_stream.conversation.thread import Source, Thread
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError, SnapshotError, StaleOwner, StateLost, StoreError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FEW, _SHORT = 8, 8192  # messages and their characters that are rendered and hashed within a millisecond
UNUSABLE = "its snapshot cannot be used"
STAND_INS = {  # conversations that end with a message of each role
    "user": [Message("user", "before")],
    "system": [Message("system", "before")],
    "assistant": [Message("user", "before"), Message("assistant", "before")],
    "tool": [Message("user", "before"), Message("assistant", "", calls=(("before", {"before": "before"}, "1"),)),
             Message("tool", "before", call_id="1", answers=0)]}


@dataclass(frozen=True)
class Reached:
    """Where a turn begins.

    Attributes:
        rendered: the messages `shown`.
        count: how many of the request's messages the memory holds.
        at: the character of the rendering from which on it is fed.
        keys: of all boundaries, from before the first message to behind the last one.
        base: the boundary that is gone on from; None for the beginning.
        source, why: as the receipt says them.
        shown: the messages that were rendered; those from `first` on are new.
        late: what is read as a late message, in words; "" for nothing.
        warning: what the caller ought to know; "" for nothing.
        placing: places of what was encoded so far, counted from `base`.
        options, process: of the template, without a base: as `Threads.held_options` and `own_options` give them.
    """

    rendered: Rendered
    count: int
    at: int
    keys: Sequence[bytes]
    base: Boundary | None
    source: Source
    why: str
    shown: Sequence[Message]
    first: int
    late: str = ""
    warning: str = ""
    placing: Placing = field(default_factory=Placing)
    options: bytes = b""
    process: bytes = b""

    def boundary_behind(self, new: Sequence[Message], key: bytes, thread: Thread, request: Request) -> Boundary:
        """The boundary where the thread's context rests now.

        Args:
            new: the messages that were fed behind the first `count`: the request's, or all but its last, or with the
                answer.
            key: behind the last of them.
        """
        rest = new
        if self.base is None:
            system, rest = split(new)
            start, top, ledger, tools = self.keys[0], heading(system), b"", bool(request.tools)
            lineage = (self.keys[len(system) + 1] if len(system) + 1 < len(new) else key)[:16]
            options, process = self.options, self.process
        else:
            start, top, ledger, tools = self.base.start, self.base.system, self.base.ledger, self.base.tools
            lineage, options, process = self.base.lineage, self.base.options, self.base.process
        ledger += b"".join(message.digest for message in rest)
        tokens, before = thread.context.memory.tokens, self.base.tokens if self.base is not None else 0
        places = packed(self.base.places if self.base is not None else b"", before, [
            place for place in self.placing.places if before + place.end <= tokens])
        role, stream = (self._role(new), new[-1].stream) if new or self.base is None else (
            self.base.role, self.base.stream)
        return Boundary(key, start, top, ledger[-16 * LEDGER:], tokens, role, lineage=lineage,
                        stream=stream, owner=thread.owner, tools=tools, places=places, options=options,
                        process=process)

    def _role(self, new: Sequence[Message]) -> str:
        """Under which role the last of these new messages is shown: as that is how the memory ends."""
        roles = self.rendered.roles[len(self.rendered.roles) - (len(self.keys) - 1 - self.count):]
        return roles[len(new) - 1] if len(new) <= len(roles) else new[-1].role


async def reach(threads: Threads, thread: Thread, request: Request, *, answers: bool = False) -> Reached:
    """Bring the thread's context to the deepest boundary that the request's messages go on from.

    Args:
        answers: as of `reach_behind`.

    Raises:
        ConfigError: it answers, and the thread began with other options of the template that change what is held.
        StateLost: a stream that was absorbed cannot be reached. StoreError: the store cannot be read just now.
    """
    return await _looking_again(thread, lambda: _Search(threads, thread, request, answers).run())


async def _looking_again(thread: Thread, search: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The search's result; it runs a second time if another owner saved the thread in between. Raises StaleOwner if
    that happens in the second one, too."""
    try:
        return await search()
    except StaleOwner:
        await thread.look_up()
        return await search()


async def reach_behind(threads: Threads, thread: Thread, request: Request, *, answers: bool = False
                       ) -> tuple[Request, Reached] | None:
    """Bring the thread's context to the boundary that the request's messages come behind: that of the request's mark,
    or where the thread was told something last. None if there is none.

    Only digests of the messages that it holds are known. The template is shown stand-ins for them, which the request
    that comes back contains.

    Args:
        answers: the model answers to them; else they are told with the options with which the thread began.

    Raises:
        SnapshotError: it cannot be brought there, or a call that was undone took what the thread was told last
            (StateLost). ConfigError: the template has no fixed place there, or the tools are not those that the thread
            was told of and `on_change` is not "late".
    """
    async def to_the_boundary() -> tuple[Boundary, Source] | None:
        if request.behind:
            base = next((each for each in thread.reachable().values() if each.mark == request.behind), None)
        else:
            base = thread.tip(request.thread or "")
        return None if base is None else (base, await thread.reach(base, rebuild=request.on_mismatch == "rebuild"))

    brought = await _looking_again(thread, to_the_boundary)
    if brought is None:
        return None
    base, source = brought
    await thread.keep()  # no messages are given by which it could be read again
    if answers:
        expect_options(threads, request, [base])
    return await asyncio.to_thread(_behind, threads, thread, request, base, source)


def _behind(threads: Threads, thread: Thread, request: Request, base: Boundary, source: Source
            ) -> tuple[Request, Reached]:
    system, new = split(request.said)
    template = threads.template_of(request)
    start, tools = threads.start(request, thread, base.options), request.tools
    earlier = STAND_INS.get(base.role, [])
    other_tools = bool(request.append or request.behind) and base.start != start  # a stream ends with no call of one
    if other_tools and request.on_change != "late":
        raise ConfigError(f"thread {request.thread!r} was told of other tools, or how the template is used changed; "
                          'expected those tools, or on_change="late", or the whole history')
    changed = late_messages.what_is_new(base, start if other_tools else base.start, system, tools=bool(tools))
    said = [*earlier, *(system if changed else ()), *new]
    at: int | None
    if changed:
        written = late_messages.write(template, [*system, *earlier, *new], len(system) + len(earlier), tools,
                                      no_tools=base.tools and other_tools, system=system)
        if written is None:
            raise ConfigError(f"the chat template has no place for {changed} behind what the memory holds; expected "
                              "those that it was told before")
        late = late_messages.as_base(base, start, system, tools=bool(tools))
        base = msgspec.structs.replace(late, lineage=base.lineage)  # no agent of its own: the thread goes on
        rendered, at, shown, first = written
        said = [*earlier, *new]
    else:
        rendered = template.render(said, tools, apart=len(earlier))
        at, shown, first = template.after(said, len(earlier), tools, rendered), said, len(earlier)
    if at is None or not earlier:
        raise ConfigError(f"the chat template has no fixed place for a message behind one of role {base.role!r}; "
                          "expected the whole history")
    keys = [*[b""] * len(earlier), *chain(base.key, said[len(earlier):])]
    warning = (f"{changed} of thread {request.thread!r} changed: what is new was read behind what its memory holds, "
               "which stays") if changed else ""
    return replace(request, said=said), Reached(rendered, len(earlier), at, keys, base, source, "", shown, first,
                                                late=changed, warning=warning)


def expect_options(threads: Threads, request: Request, held: Iterable[Boundary]) -> None:
    """Raises ConfigError: all of the thread's memories began with other options of the template than the request has,
    and with options that change what a memory holds, and not just the generation prompt. Those that a process with
    other options of its own began do not count: no request can go on from them."""
    options = threads.held_options(request)
    began = {boundary.options for boundary in held if boundary.tokens and boundary.process == threads.own_options}
    if began and options not in began:
        asked = ", ".join([*request.options, *(["how hard to think"] if request.think is not None else [])])
        raise ConfigError(
            f"the options of the chat template change what the memory of thread {request.thread!r} holds, which cannot "
            f"be written anew: it began {'with others' if asked else 'with some'}, and found {asked or 'none'}; "
            "expected those with which it began, or another thread")


class _Search:
    def __init__(self, threads: Threads, thread: Thread, request: Request, answers: bool):
        self._template, self._thread, self._request = threads.template_of(request), thread, request
        self._threads, self._answers = threads, answers
        tip = None if answers or request.thread is None else thread.tip(request.thread)
        self._options = threads.held_options(request) if tip is None else tip.options
        self._last = 0  # the messages up to the last absorbed stream, which cannot be read again
        self._start = threads.start(request, thread, self._options)
        self._reachable, self._why = thread.reachable(), ""

    async def run(self) -> Reached:
        reached = await self._of_these_messages()
        if reached is None and self._answers and self._reachable and self._request.thread is not None:
            expect_options(self._threads, self._request, self._reachable.values())
        if reached is None and self._of_another_process():
            self._why = self._why or OTHER_OPTIONS
        elif reached is None and self._request.on_change == "late":
            reached = await self._late()
        return reached if reached is not None else await self._anew()

    def _of_another_process(self) -> bool:
        """Whether all memories began with other options, and in processes that were given other ones."""
        own, began = self._threads.own_options, [each for each in self._reachable.values() if each.tokens]
        return bool(began) and all(each.options != self._options and each.process != own for each in began)

    async def _of_these_messages(self) -> Reached | None:
        """At a boundary of just these messages, or of a longer history that provably ends with them."""
        template, said, tools = self._template, self._request.said, self._request.tools

        def written(count: int) -> tuple[Rendered, int | None, Sequence[Message], int]:
            shown = template.last_of(said, count, tools)
            first = count - (len(said) - len(shown))
            rendered = template.render(shown, tools, apart=first)
            return rendered, template.after(shown, first, tools, rendered), shown, first

        exact = await self._aside(lambda: Keys(self._start, said))
        self._last, fits = exact.last_stream, fitting(self._reachable, exact, said)
        while (fit := await self._aside(lambda: next(fits, None))) is not None:
            count, boundary, keys = fit
            if count < self._last:
                break
            rendered, at, shown, first = await self._aside(partial(written, count))
            if at is None:
                self._why = "the template writes earlier messages differently once others follow"
                continue
            if (source := await self._bring(boundary)) is None:
                continue
            if self._last or (keys is not exact and boundary.key not in exact):
                await self._thread.keep()  # reading the messages again could not restore it
            return Reached(rendered, count, at, keys, boundary, source, self._why, shown, first)
        self._rendered = await self._aside(partial(template.render, said, tools))
        return None

    async def _late(self) -> Reached | None:
        """Behind the boundary that the messages go on from, with another system text or other tools as a late message.
        """
        said, tools = self._request.said, self._request.tools

        def news(boundary: Boundary) -> str:
            return late_messages.what_is_new(boundary, self._start, said, tools=bool(tools))

        for count, boundary in await asyncio.to_thread(
                late_messages.goes_on_from, self._reachable, said, lambda boundary: bool(news(boundary))):
            new = news(boundary)
            if count < self._last:
                break
            if boundary.key in self._thread.unusable:
                continue
            written = await asyncio.to_thread(late_messages.write, self._template, said, count, tools,
                                              no_tools=boundary.tools and boundary.start != self._start)
            if written is None:
                continue
            base = late_messages.as_base(boundary, self._start, said, tools=bool(tools))
            keys = [*[b""] * count, *chain(base.key, said[count:])]
            if (earlier := await self._late_before(keys, count)) is not None:
                return earlier
            if (source := await self._bring(boundary)) is None:
                continue
            await self._thread.keep()
            warning = (f"{new} of thread {self._request.thread!r} changed: what is new was read behind what its memory "
                       "holds, which stays. Expected what stays, with what changes in a message, or "
                       'on_change="reread"')
            if base.lineage in {other.lineage for other in self._reachable.values()}:
                warning = ""  # it was given when the lineage began
            return Reached(written.rendered, count, written.at, keys, base, source, self._why, written.shown,
                           written.first, late=new, warning=warning)
        return None

    async def _late_before(self, keys: list[bytes], count: int) -> Reached | None:
        """Where an earlier call with the same late message and these messages ended."""
        said, tools = self._request.said, self._request.tools
        for deeper in range(len(said), count, -1):
            boundary = self._reachable.get(keys[deeper])
            if boundary is None or boundary.key in self._thread.unusable:
                continue
            at = await self._aside(partial(self._template.after, said, deeper, tools, self._rendered))
            if at is not None and (source := await self._bring(boundary)) is not None:
                await self._thread.keep()
                return Reached(self._rendered, deeper, at, keys, boundary, source, self._why, said, deeper)
        return None

    async def _aside(self, work: Callable[[], T]) -> T:
        """Work that takes as long as the messages are many: that of a few takes less than going to a thread and back.
        """
        said = self._request.said
        few = len(said) <= _FEW and sum(len(message.content) for message in said) <= _SHORT
        return work() if few else await asyncio.to_thread(work)

    async def _bring(self, boundary: Boundary) -> Source | None:
        """Bring the context to a boundary; None where its snapshot cannot be used.

        Raises:
            StoreError: the store cannot be read just now; reading the messages again would lose what it holds.
            StaleOwner: another owner saved the thread meanwhile.
        """
        try:
            return await self._thread.reach(boundary, rebuild=self._request.on_mismatch == "rebuild")
        except (StoreError, StaleOwner):
            raise
        except SnapshotError as error:
            self._why = f"{UNUSABLE}: {error}"
            _log.warning("thread %r: a snapshot cannot be used and is passed over: %s", self._request.thread, error)
            return None

    async def _anew(self) -> Reached:
        """From nothing: all messages are read."""
        thread, request, said = self._thread, self._request, self._request.said
        if self._reachable and not self._why:
            self._why = what_differs(self._reachable.values(), self._start, said)
        if self._last:
            raise self._lost()
        await thread.begin_anew()
        goes_on = any(message.role == "assistant" for message in said)
        held = max((len(boundary.ledger) // 16 for boundary in self._reachable.values()), default=0)
        if held and self._why == OTHER_MESSAGES and not goes_on and not thread.hinted:
            thread.hinted = True  # once: calls on the side look just like it
            _log.warning("thread %r holds %d messages, and the %d given do not go on from them, so they begin anew. "
                         "Give every call the whole history, answers included", request.thread, held, len(said))
        return Reached(self._rendered, 0, 0, chain(self._start, said), None,
                       "rebuild" if goes_on and (self._reachable or thread.fed) else "new", self._why, said, 0,
                       warning=self._what_it_costs() if goes_on else "", options=self._options,
                       process=self._threads.own_options)

    def _what_it_costs(self) -> str:
        """A warning, if all is read again because of other tools, another system text, model or budget."""
        unusable = self._why.startswith(UNUSABLE)
        lost = self._thread.lost
        if lost is not None and self._reachable and not unusable and any(
                lost.holds(message) for message in self._request.said):
            return (f"thread {self._request.thread!r} was read again from the messages given: what it was told since "
                    "its last save was undone with the call after that. If they are not the whole history, what "
                    "stood before them is gone")
        if not unusable and self._why not in (OTHER_OPTIONS, OTHER_SYSTEM, OTHER_TOOLS):
            return ""
        more = '. on_mismatch="rebuild" reads its log of tokens instead'
        return (f"thread {self._request.thread!r} was read again from the messages given, and what memory held beyond "
                f"them is lost: {self._why}{more if unusable and self._request.on_mismatch != 'rebuild' else ''}")

    def _lost(self) -> StateLost:
        said, name, why = self._request.said, self._request.thread, self._why
        held = any(boundary.holds(said[self._last - 1]) for boundary in self._reachable.values())
        return StateLost(
            f"message {self._last - 1} stands for an absorbed stream, and the memory of thread {name!r} "
            + (f"holds it, but not behind these messages: {why}. Expected the messages, system prompt and tools "
               "with which it was absorbed" if held else
               f"does not hold it{': ' + why if why else ''}. Expected the thread and the store that absorbed it")
            + ". Absorb it again, or leave its stand-in out")
