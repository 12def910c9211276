"""Work that runs to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of `work`. It runs to its end even when the caller is cancelled; CancelledError is raised then."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it: the caller sees the cancellation
        raise cancelled
    return task.result()
