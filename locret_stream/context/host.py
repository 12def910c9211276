"""What a context needs of the runtime it lives in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio_throttle import Throttler

    from locret_stream.context.face import StreamingContext
    from locret_stream.context.session import Session
    from locret_stream.engine import Engine
    from locret_stream.snapshot import Geometry, Identity, Store
    from locret_stream.text import ChatFrame, TextCodec
    from locret_stream.worker import Worker


class Host(Protocol):
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

    async def acquire_slot(self, *, scratch: bool, again: bool = False) -> int:
        """A slot, waiting in order; NoSlot after the deadline. `again`: even while the runtime closes."""
        ...

    async def bring_back(self, session: Session) -> None:
        """A slot for a session whose units are in the store; `saving.bring_back`."""
        ...

    def release_slot(self, slot: int, *, scratch: bool) -> None:
        """Give a slot back and wake the first that waits."""
        ...

    def scratch_slot(self) -> AbstractAsyncContextManager[int]:
        """A scratch slot for the length of a block."""
        ...

    def adopt(self, context: StreamingContext) -> None:
        """Count an open context, so that closing the runtime closes it."""
        ...

    def drop(self, context: StreamingContext) -> None:
        """Forget a closed one."""
        ...

