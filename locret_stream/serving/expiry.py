"""Sessions that nobody named: those of responses that began without a session go, once nobody went on from them for a
while. What a caller named is the caller's to delete."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from locret_stream.errors import LocretError
from locret_stream.serving.names import UNNAMED

if TYPE_CHECKING:  # loads torch
    from locret_stream.conversation.threads import Threads

LOOK_EVERY_S = 3600.0
DAY_S = 86400.0
WAIT_S = 10.0  # for one that is in use: then it is not old any more, or is looked at again with the next round
_UNNAMED = re.compile(rf"([\w-]+/)?{UNNAMED}[0-9a-f]{{24}}")
_log = logging.getLogger(__name__)


async def expire(threads: Threads, older_than_s: float) -> list[str]:
    """Forget the unnamed sessions whose newest snapshot is older than that; their threads.

    Forks are forgotten with their session, so it stays as long as one of them is younger, or has a name. One that
    cannot be read stays, as its age is not known; so does one that cannot be deleted just now, or is in use.
    """
    from locret_stream.conversation.boundaries import PREFIX, from_note

    store = threads.runtime.store
    if store is None:
        return []
    gone, stays, found, lines = [], set[str](), set[str](), defaultdict[str, list[str]](list)

    async def still_old(session: str) -> bool:
        """Whether nobody went on from it or its forks since the store was looked through."""
        rows = [row for name in lines[session] for row in await asyncio.to_thread(store.info, name)]
        return all(time.time() - row.created >= older_than_s for row in rows)

    for row in await asyncio.to_thread(store.list):
        boundary = from_note(row.note)
        session = boundary.owner if boundary is not None and boundary.owner else row.name
        old = not row.problem and time.time() - row.created >= older_than_s
        lines[session].append(row.name)
        (found if old and _UNNAMED.fullmatch(row.name.removeprefix(PREFIX)) else stays).add(session)
    for session in sorted(found - stays):
        thread = session.removeprefix(PREFIX)
        try:
            if await threads.forget(thread, only_if=partial(still_old, session), timeout_s=WAIT_S):
                gone.append(thread)
        except TimeoutError:
            continue
        except LocretError as error:
            _log.warning("session %r has expired and cannot be deleted yet: %s", thread, error)
    return gone


async def keep_expiring(threads: Threads, older_than_s: float) -> None:
    """Do so now, and every hour until it is cancelled."""
    while True:
        try:
            if gone := await expire(threads, older_than_s):
                _log.info("%d sessions without a name have expired", len(gone))
        except LocretError as error:
            _log.warning("the store cannot be looked through for expired sessions: %s", error)
        await asyncio.sleep(LOOK_EVERY_S)
