"""Where a turn begins: the deepest boundary of the messages given, by which a thread's context is brought there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from langchain_locret import late_messages
from langchain_locret.boundaries import OTHER_MESSAGES, OTHER_SYSTEM, OTHER_TOOLS, Boundary, fitting, what_differs
from langchain_locret.boundary_pruning import tip_of
from langchain_locret.messages import Said, chain
from langchain_locret.thread import Reached, Request, Source, StateLost, Thread
from langchain_locret.threads import Threads
from locret_stream import ConfigError, SnapshotError, StaleOwner, StoreError

_log = logging.getLogger(__name__)
T = TypeVar("T")
UNUSABLE = "its snapshot cannot be used"
_HELD = {"user": [Said("user", "before")],
         "system": [Said("system", "before")],
         "assistant": [Said("user", "before"), Said("assistant", "before")],
         "tool": [Said("user", "before"), Said("assistant", "", calls=(("before", {"before": "before"}, "1"),)),
                  Said("tool", "before", call_id="1", answers=0)]}


async def reach(threads: Threads, thread: Thread, request: Request) -> Reached:
    """Bring the thread's context to the deepest boundary of these messages.

    Raises:
        StateLost: a stream that was absorbed cannot be reached. StoreError: the store cannot be read just now.
    """
    return await _looking_again(threads, thread, lambda: _Search(threads, thread, request).run())


async def _looking_again(threads: Threads, thread: Thread, search: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Search once more where another owner saved the thread in between. Raises StaleOwner: and once more."""
    try:
        return await search()
    except StaleOwner:
        await threads.look_up(thread)
        return await search()


async def reach_tip(threads: Threads, thread: Thread, request: Request) -> tuple[Request, Reached] | None:
    """Bring the thread's context to where it was told something last, ahead of these messages; None if it never was.

    Of what it holds only digests are known, so the template is shown stand-ins, in the request that comes back.

    Raises:
        SnapshotError: it cannot be brought there. ConfigError: the template has no fixed place there, or the tools are
            others than the thread was told of.
    """
    async def to_the_tip() -> tuple[Boundary, Source] | None:
        tip = tip_of(thread.stored or {}, thread.live)
        return tip and (tip, await threads.bring(thread, tip, rebuild=request.on_mismatch == "rebuild"))

    found = await _looking_again(threads, thread, to_the_tip)
    if found is None:
        return None
    tip, source = found
    await threads.keep(thread)  # no messages are given that could bring it back
    start = threads.start(request, thread)
    if request.append and tip.start != start:
        raise ConfigError(f"thread {request.thread!r} was told of other tools, or how the template is used changed; "
                          "expected those tools, or the whole history and no append=True")
    held = _HELD.get(tip.role, [])
    request = replace(request, said=[*held, *request.said])
    rendered = await asyncio.to_thread(threads.template.render, request.said, request.tools)
    at = await asyncio.to_thread(threads.template.after, request.said, len(held), request.tools, rendered)
    if at is None or not held:
        raise ConfigError(f"the chat template has no fixed place for a message behind one of role {tip.role!r}; "
                          "expected the whole history")
    keys = [*[b""] * len(held), *chain(tip.key, request.said[len(held):])]
    return request, Reached(rendered, len(held), at, keys, tip, source, "", request.said, len(held))


class _Search:
    def __init__(self, threads: Threads, thread: Thread, request: Request):
        self._threads, self._thread, self._request = threads, thread, request
        self._last = max((at + 1 for at, one in enumerate(request.said) if one.stream), default=0)
        self._start, self._known, self._why = threads.start(request, thread), thread.known(), ""

    async def run(self) -> Reached:
        found = await self._of_these_messages()
        if found is None and self._request.on_change == "late":
            found = await self._late()
        return found if found is not None else await self._anew()

    async def _of_these_messages(self) -> Reached | None:
        """At a boundary of just these messages, or of a longer history whose end they provably are."""
        template, said, tools = self._threads.template, self._request.said, self._request.tools
        self._rendered = rendered = await asyncio.to_thread(template.render, said, tools)
        exact = set(await asyncio.to_thread(chain, self._start, said))
        for count, boundary, keys in await asyncio.to_thread(fitting, self._known, self._start, said):
            if count < self._last:
                break
            at = await asyncio.to_thread(template.after, said, count, tools, rendered)
            if at is None:
                self._why = "the template writes earlier messages differently once others follow"
                continue
            if (source := await self._bring(boundary)) is None:
                continue
            if boundary.key not in exact:
                await self._threads.keep(self._thread)  # messages alone could not bring it back
            return Reached(rendered, count, at, keys, boundary, source, self._why, said, count)
        return None

    async def _late(self) -> Reached | None:
        """Behind what they go on from, told of another system text or other tools."""
        said, tools = self._request.said, self._request.tools
        for count, boundary in await asyncio.to_thread(late_messages.goes_on_from, self._known, said):
            new = late_messages.what_is_new(boundary, self._start, said, tools=bool(tools))
            if count < self._last:
                break
            if not new or boundary.key in self._thread.unusable:
                continue
            written = await asyncio.to_thread(late_messages.write, self._threads.template, said, count, tools,
                                              no_tools=boundary.tools and boundary.start != self._start)
            if written is None:
                continue
            base = late_messages.as_base(boundary, self._start, said, tools=bool(tools))
            keys = [*[b""] * count, *chain(base.key, said[count:])]
            if (again := await self._again(keys, count)) is not None:
                return again
            if (source := await self._bring(boundary)) is None:
                continue
            await self._threads.keep(self._thread)
            warning = (f"{new} of thread {self._request.thread!r} changed: what is new was read behind what its memory "
                       "holds, which stays. Expected what stays, with what changes in a message, or "
                       'on_change="reread"')
            if base.lineage in {one.lineage for one in self._known.values()}:
                warning = ""  # told before
            return Reached(written.rendered, count, written.at, keys, base, source, self._why, written.shown,
                           written.first, late=new, warning=warning)
        return None

    async def _again(self, keys: list[bytes], count: int) -> Reached | None:
        """Where these messages were asked before, late: behind what went in then."""
        said, tools = self._request.said, self._request.tools
        for deeper in range(len(said), count, -1):
            boundary = self._known.get(keys[deeper]) if keys[deeper] not in self._thread.unusable else None
            at = None if boundary is None else await asyncio.to_thread(
                self._threads.template.after, said, deeper, tools, self._rendered)
            if at is not None and (source := await self._bring(boundary)) is not None:
                await self._threads.keep(self._thread)
                return Reached(self._rendered, deeper, at, keys, boundary, source, self._why, said, deeper)
        return None

    async def _bring(self, boundary: Boundary) -> Source | None:
        """Bring the context there; None where its snapshot cannot be used.

        Raises:
            StoreError: it cannot be read just now. To read the messages again instead would lose what it holds.
            StaleOwner: another owner saved the thread meanwhile.
        """
        try:
            return await self._threads.bring(self._thread, boundary, rebuild=self._request.on_mismatch == "rebuild")
        except (StoreError, StaleOwner):
            raise
        except SnapshotError as error:
            self._why = f"{UNUSABLE}: {error}"
            _log.warning("thread %r: a snapshot cannot be used and is passed over: %s", self._request.thread, error)
            return None

    async def _anew(self) -> Reached:
        """From nothing: all messages are read."""
        threads, thread, request, said = self._threads, self._thread, self._request, self._request.said
        if self._known and not self._why:
            self._why = what_differs(self._known.values(), self._start, said)
        if self._last:
            raise self._lost()
        await threads.begin_anew(thread)
        goes_on = any(one.role == "assistant" for one in said)
        if self._known and self._why == OTHER_MESSAGES and not goes_on and not thread.hinted:
            thread.hinted = True  # once: calls on the side look just like it
            _log.warning("thread %r holds %d messages, and the %d given do not go on from them, so they begin anew. "
                         "Give every call the whole history, answers included", request.thread,
                         max(len(boundary.ledger) // 16 for boundary in self._known.values()), len(said))
        return Reached(self._rendered, 0, 0, chain(self._start, said), None,
                       "rebuild" if goes_on and (self._known or thread.told) else "new", self._why, said, 0,
                       warning=self._what_it_costs() if goes_on else "")

    def _what_it_costs(self) -> str:
        """A warning, where other tools, another system text, model or budget are why all is read again."""
        unusable = self._why.startswith(UNUSABLE)
        if not unusable and self._why not in (OTHER_SYSTEM, OTHER_TOOLS):
            return ""
        more = '. LocretChatModel(on_mismatch="rebuild") reads its log of tokens instead'
        return (f"thread {self._request.thread!r} was read again from the messages given, and what memory held beyond "
                f"them is lost: {self._why}{more if unusable and self._request.on_mismatch != 'rebuild' else ''}")

    def _lost(self) -> StateLost:
        said, name, why = self._request.said, self._request.thread, self._why
        held = any(boundary.holds(said[self._last - 1]) for boundary in self._known.values())
        return StateLost(
            f"message {self._last - 1} stands for an absorbed stream, and the memory of thread {name!r} "
            + (f"holds it, but not behind these messages: {why}. Expected the messages, system prompt and tools "
               "with which it was absorbed (`aingest` takes history= and tools=)" if held else
               f"does not hold it{': ' + why if why else ''}. Expected the thread and the store that absorbed it")
            + ". Absorb it again, or leave its stand-in out")
