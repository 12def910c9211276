"""Messages that are told and not answered."""

from __future__ import annotations

from functools import partial

import msgspec

from locret_stream.conversation.items import Item, shown
from locret_stream.conversation.matching import reach, reach_behind
from locret_stream.conversation.messages import digest
from locret_stream.conversation.places import unpacked
from locret_stream.conversation.request import Request, within
from locret_stream.conversation.thread_memory import read_log_at
from locret_stream.conversation.threads import Threads
from locret_stream.conversation.turns import encode
from locret_stream.errors import ConfigError, StaleOwner, StoreError


async def tell(threads: Threads, request: Request) -> list[Item]:
    """Feed messages behind what the thread was told last, without an answer; their end is a boundary, which is stored.
    If that fails or is cancelled, the thread is as it was. Returns them as the log has them.

    Raises:
        StoreError: it cannot be stored, or the log not be read. StaleOwner: another owner saved the thread meanwhile.
            TimeoutError. Otherwise as a turn.
    """
    late = (f"the messages were not read within {request.timeout_s} s, waiting for the thread included; expected a "
            "longer timeout, or fewer. Nothing of this call stays")
    async with within(request.timeout_s, late), threads.exclusive(request) as thread:
        behind = await reach_behind(threads, thread, request)
        request, reached = behind or (request, await reach(threads, thread, request))
        if reached.rendered.body <= reached.at:
            raise ConfigError("the chat template shows these messages only ahead of an answer; expected one that "
                              "shows them alone")
        ids = await encode(threads, reached, reached.at, reached.rendered.body)
        await thread.feed(ids, request.focus)
        boundary = reached.boundary_behind(request.said[reached.count:], reached.keys[-1], thread, request)
        if request.mark:  # else the end of a question of the same text, which is no end of what was told, would be it
            boundary = msgspec.structs.replace(boundary, key=digest(boundary.key, request.mark), mark=request.mark,
                                               appended=True)
        thread.rest_at(boundary)
        if not await thread.save("turn"):
            if thread.stale:
                raise StaleOwner(f"another owner, such as another process, told thread {request.thread!r} something "
                                 "meanwhile; the thread is as the other one left it. Expected the messages again")
            raise StoreError(f"thread {request.thread!r} cannot be saved; expected a store that can be written")
        before = reached.base.tokens if reached.base is not None else 0
        # By number: what was held may end with an answer without text, whose place is where these begin.
        told = sum(before + place.end <= boundary.tokens for place in reached.placing.places)
        held = unpacked(boundary.places)
        new = [place for place in held[max(0, len(held) - told):] if place.start >= before]
        assert thread.session is not None
        return await read_log_at(threads, thread.session, thread.snapshots[boundary.key][0],
                                 partial(shown, threads, new))
