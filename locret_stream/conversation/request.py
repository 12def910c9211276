"""One call of the model: what it asks for, and whether its caller took the answer.

Nothing here loads torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from locret_stream.conversation.messages import Message
from locret_stream.errors import SnapshotNotFound

Save = Literal["turn", "run"]
OnChange = Literal["late", "reread"]
OnMismatch = Literal["reread", "rebuild"]


TOOLS_LEFT_OUT = ("the chat template tells the model of no tools, so it does not know of those that were bound; "
                  "expected a chat template that does, or tool_prompt='auto', which tells of them in a system text")
NOT_HELD = "the call that was demanded was begun for the model, and nothing held it to the tool's schema"


@asynccontextmanager
async def within(seconds: float | None, failed: str) -> AsyncIterator[asyncio.Timeout]:
    """A block that ends in time. Raises TimeoutError, in the words `failed`, when it does not; one that was raised
    inside stays as it is."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(failed) from None


class ThreadNotFound(SnapshotNotFound):
    """There is no thread of that name, or it was told nothing."""


class Delivery:
    """Whether the caller took the end of the answer. Until then the caller may leave the call, which is then undone.

    `take` and `leave` may be called from any OS thread; the first of them counts.

    Args:
        caller: the model whose `ainvoke` takes the answer: it does so later than its own stream ends.

    Attributes:
        turn: the call as it runs on the runtime's event loop; None before it began.
        offer: gives the end of the answer to the caller.
    """

    PATIENCE_S = 5.0  # how long other calls on the thread wait for a caller who does not take the end of an answer
    POLL_S = 0.1

    def __init__(self, caller: object = None) -> None:
        self.caller = caller
        self._taken: Future[bool] = Future()
        self.turn: Future[None] | None = None
        self.offer: Callable[[], None] = lambda: None

    @property
    def taken(self) -> bool:
        """Whether the caller took the answer: the turn then stays in the thread's memory."""
        return self._taken.done() and self._taken.result()

    def take(self) -> bool:
        """Take the answer; False if the call was left, or the model closed, before."""
        with suppress(InvalidStateError):
            self._taken.set_result(True)
        return self.taken

    def leave(self) -> None:
        """Leave the call, unless the end of the answer was taken before."""
        with suppress(InvalidStateError):
            self._taken.set_result(False)

    async def wait_until_free(self) -> None:
        """After `take`: wait until the call has released its thread. A cancellation has no effect: it comes too late.
        """
        while self.turn is not None and not self.turn.done():
            try:
                await asyncio.wait([asyncio.wrap_future(self.turn)])
            except asyncio.CancelledError:
                current_task().uncancel()

    async def wait(self, wanted: Callable[[], bool]) -> None:
        """Offer the end of the answer and wait until the caller takes it.

        Args:
            wanted: whether other calls wait for the thread. After `PATIENCE_S` of that the answer counts as taken, as
                the caller may be waiting for one of them.

        Raises:
            asyncio.CancelledError: the call was left, or this was cancelled, before the answer was taken.
        """
        self.offer()
        waited_s, taken = 0.0, asyncio.wrap_future(self._taken)
        try:
            while not self._taken.done():
                await asyncio.wait([taken], timeout=self.POLL_S)
                waited_s += self.POLL_S * wanted()
                if waited_s >= self.PATIENCE_S:
                    self.take()
        except asyncio.CancelledError:
            self.leave()
            if not self.taken:
                raise
            current_task().uncancel()
        if not self.taken:
            raise asyncio.CancelledError


def current_task() -> asyncio.Task[Any]:
    """The task that runs this."""
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(frozen=True)
class Request:
    """One call of the model.

    Attributes:
        said: the messages given.
        thread: the id of the thread; None for a conversation without one. realm: whose conversations without a thread
            may go on from each other; "": those of all without a realm.
        tools: as OpenAI's function schemas.
        choice: a tool's name, "any", or "" for the model's choice.
        sampling: fields of `locret_stream.Sampling`.
        save: when boundaries become snapshots.
        on_change: whether other tools or another system text are read as a late message, or all messages again.
        on_mismatch: whether a snapshot of another model or budget is replaced by reading the messages again, or the
            session's log.
        timeout_s: for the whole call, waiting included; None for no limit.
        focus: what the memory is told that it will be asked about; "" ends a focus, None leaves it as it is.
        recall: whether what has the words of the last message is read again for the answer; None: as the runtime does.
        append: the messages come behind whatever the thread was told last. behind: behind the boundary of that mark.
            In both cases the messages held are not among them, and a system text that is held may be among them again.
        unthinking: histories of this caller hold answers without their reasoning, so that boundaries are bound to
            answers without it, too; the memory keeps what was thought.
        mark: of the boundary at the end of the answer, which is then no boundary of the same messages without a mark.
        options: variables of the template for this answer (`enable_thinking`, ...). think: whether to think, or how
            hard, as far as the template has an option for it; None: as usual. think_field: what the caller calls that.
        delivery: whether the answer was taken; None: it counts as taken.
    """

    said: Sequence[Message]
    thread: str | None = None
    realm: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    save: Save = "turn"
    on_change: OnChange = "late"
    on_mismatch: OnMismatch = "reread"
    timeout_s: float | None = None
    focus: str | None = None
    recall: bool | None = None
    append: bool = False
    behind: bytes = b""
    mark: bytes = b""
    unthinking: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    think: bool | str | None = None
    think_field: str = "reasoning_effort"
    delivery: Delivery | None = None
