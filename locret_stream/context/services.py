"""What a context needs of the runtime in which it is open, and what the runtime needs of a context."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncio_throttle import Throttler

    from locret_stream.config import Recall
    from locret_stream.constraints import Constraints
    from locret_stream.engine import Engine
    from locret_stream.snapshot import Expected, Geometry, Identity, Store
    from locret_stream.text import ChatFrame, TextCodec
    from locret_stream.worker import Worker


class OpenContext(Protocol):
    """A context as its runtime sees it; `StreamingContext` says what each of these is."""

    name: str

    @property
    def stored(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def loop(self) -> AbstractEventLoop | None: ...

    @property
    def idle_since(self) -> float | None: ...

    @property
    def resting_since(self) -> float | None: ...

    def swap_out(self, *, midway: bool = False) -> Coroutine[Any, Any, bool]: ...

    async def aclose(self, *, save: bool = True) -> None: ...

    def stored_in(self, session: str) -> bool: ...


class SharedSlots(Protocol):
    """The slots of a runtime, for which its contexts compete; `runtime.sharing.SlotSharing` says what each of these
    does."""

    @property
    def has_room(self) -> bool: ...

    async def acquire(self, *, scratch: bool) -> int: ...

    def release(self, slot: int, *, scratch: bool) -> None: ...

    def scratch_slot(self) -> AbstractAsyncContextManager[int]: ...

    def session_idle(self) -> None: ...

    def yield_slot(self, since: float) -> AbstractContextManager[bool]: ...

    def adopt(self, context: OpenContext) -> None: ...

    def drop(self, context: OpenContext) -> None: ...


class Services(Protocol):
    """The parts of a runtime that its contexts use."""

    engine: Engine
    worker: Worker
    codec: TextCodec
    frames: ChatFrame
    constraints: Constraints
    tokenizing: ThreadPoolExecutor
    throttle: Throttler | None
    scratch: int  # how many scratch slots there are
    store: Store | None
    storing: ThreadPoolExecutor
    recalling: ThreadPoolExecutor  # a log of weeks is read there, and nobody who opens or saves waits for it
    forgetting: list[str]  # sessions that are being removed
    geometry: Geometry
    library: str  # version
    autosave: bool
    recall: Recall | None  # for questions that do not say; None: nothing is kept for it

    @property
    def slots(self) -> SharedSlots: ...

    @property
    def identity(self) -> Identity:
        """Of everything but the tokens; only with a store."""
        ...

    @property
    def accepted(self) -> Expected:
        """What snapshots may have been made with, to be opened."""
        ...

    def check_open(self) -> None:
        """Raises ContextClosed while the runtime closes, and after."""
        ...
