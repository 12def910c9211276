"""Messages that are told and not answered."""

from __future__ import annotations

import msgspec

from locret_stream.conversation.matching import reach, reach_behind
from locret_stream.conversation.messages import digest
from locret_stream.conversation.request import Request
from locret_stream.conversation.threads import Threads
from locret_stream.conversation.turns import encode
from locret_stream.errors import ConfigError, StaleOwner, StoreError


async def tell(threads: Threads, request: Request) -> None:
    """Feed messages behind what the thread was told last, without an answer; their end is a boundary, which is stored.
    If that fails or is cancelled, the thread is as it was.

    Raises:
        StoreError: it cannot be stored. StaleOwner: another owner saved the thread meanwhile. Otherwise as a turn.
    """
    async with threads.exclusive(request) as thread:
        behind = await reach_behind(threads, thread, request)
        request, reached = behind or (request, await reach(threads, thread, request))
        if reached.rendered.body <= reached.at:
            raise ConfigError("the chat template shows these messages only ahead of an answer; expected one that "
                              "shows them alone")
        ids = await encode(threads, reached, reached.at, reached.rendered.body)
        await thread.feed(ids, request.focus)
        boundary = reached.boundary_behind(request.said, thread, request)
        if request.mark:  # else the end of a question of the same text, which is no end of what was told, would be it
            boundary = msgspec.structs.replace(boundary, key=digest(boundary.key, request.mark), mark=request.mark,
                                               appended=True)
        thread.rest_at(boundary)
        if not await thread.save("turn"):
            if thread.stale:
                raise StaleOwner(f"another owner, such as another process, told thread {request.thread!r} something "
                                 "meanwhile; the thread is as the other one left it. Expected the messages again")
            raise StoreError(f"thread {request.thread!r} cannot be saved; expected a store that can be written")
