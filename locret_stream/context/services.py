"""What a context needs of the runtime it lives in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio_throttle import Throttler

    from locret_stream.engine import Engine
    from locret_stream.snapshot import Geometry, Identity, Store
    from locret_stream.text import ChatFrame, TextCodec
    from locret_stream.worker import Worker


class OpenContext(Protocol):
    """A context as its runtime counts it."""

    name: str
    stored: bool


class Services(Protocol):
    """The parts of a Runtime that its contexts use."""

    engine: Engine
    worker: Worker
    codec: TextCodec
    frames: ChatFrame
    tokenizing: ThreadPoolExecutor
    throttle: Throttler | None
    scratch: int  # how many scratch slots there are
    store: Store | None
    storing: ThreadPoolExecutor
    identity: Identity  # of everything but the tokens; only with a store
    geometry: Geometry
    library: str  # version
    autosave: bool

    async def acquire_slot(self, *, scratch: bool) -> int:
        """A slot, waiting in order; NoSlot after the deadline."""
        ...

    def release_slot(self, slot: int, *, scratch: bool) -> None:
        """Give a slot back and wake the first that waits."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a slot is free, and nobody waits for it."""
        ...

    def scratch_slot(self) -> AbstractAsyncContextManager[int]:
        """A scratch slot for the length of a block."""
        ...

    def session_idle(self) -> None:
        """A session came to rest: who waits for a slot may have its."""
        ...

    def yield_slot(self, since: float) -> AbstractContextManager[bool]:
        """For the length of a block: whether who has had a slot since then is to give it to somebody who waits."""
        ...

    def check_open(self) -> None:
        """Raises ContextClosed while the runtime closes, and after."""
        ...

    def adopt(self, context: OpenContext) -> None:
        """Count an open context, so that closing the runtime closes it."""
        ...

    def drop(self, context: OpenContext) -> None:
        """Forget a closed one."""
        ...

