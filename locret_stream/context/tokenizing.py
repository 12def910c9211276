"""Where text is tokenised: on a thread of its own, so that a long one keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from locret_stream.text import TextCodec

T = TypeVar("T")
INLINE_CHARS = 512  # a hop to a thread costs more than tokenising this much


class Tokenizing(Protocol):
    """What has that thread, and the codec: a runtime, or the services that its contexts know."""

    codec: TextCodec

    @property
    def tokenizing(self) -> Executor: ...


async def tokenized(services: Tokenizing, characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, which tokenises that many characters: off the event loop unless they are few."""
    if characters <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(services.tokenizing, work)


async def encode_text(services: Tokenizing, text: str) -> list[int]:
    """The ids of a whole text. Raises InvalidText."""
    return await tokenized(services, len(text), lambda: services.codec.encode_text(text))
