"""What a model offers for its threads beside calls: absorb streams, save, fork and forget them, read what they hold."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_locret.calls import run_alone, with_thread
from langchain_locret.messages import read
from langchain_locret.runtimes import SharedRuntime, load
from locret_stream import InputError, LocretError
from locret_stream.charsets import Charset
from locret_stream.conversation.messages import check_label
from locret_stream.conversation.request import OnChange, OnMismatch, Request

if TYPE_CHECKING:  # these load torch
    from locret_stream.context import Memory
    from locret_stream.conversation.threads import Threads
    from locret_stream.snapshot.transcript import Passage


class ThreadMethods:
    """Methods of LocretChatModel, which has these attributes as fields."""

    if TYPE_CHECKING:  # pydantic would take them for fields of its own
        shared: SharedRuntime
        on_change: OnChange
        on_mismatch: OnMismatch
        focus: str | None

    async def aingest(self, source: Any, *, thread_id: str, label: str = "text",
                      history: Sequence[BaseMessage] = (), tools: Sequence[Any] = (),
                      progress: Callable[[int], None] | None = None, focus: str | None = None,
                      errors: str = "strict", encoding: str = "utf-8") -> HumanMessage:
        """Absorb a stream of text into a thread as one message; returns a small stand-in to keep in the history.

        The source is read only as fast as the memory reads it; other threads go on meanwhile, calls on this one wait.
        Cancelled or failed, the thread is as it was before. On return the stream is as durable as a turn.

        Args:
            source: text, the Path of a file, or an (async) iterator of str or bytes: an open file, a socket, a
                growing log.
            label: how the stand-in names the stream, in one line of at most 80 characters.
            history: the messages that the stream comes behind; without any, it comes behind what the thread was told
                last.
            tools: those that the thread is used with, if the history is its beginning.
            progress: called after each piece with the number of characters that the memory has read.
            focus: what the memory will be asked about; None: the model's.
            errors: bytes that are no text: "strict" refuses them, "replace" reads them as U+FFFD, as Python does;
                `response_metadata["locret"]` of the stand-in says how many (`replaced`, `bytes_replaced`).
            encoding: of bytes, also "utf-16" (what PowerShell's > writes), "latin-1", ...: `charsets.ENCODINGS`. A
                byte-order mark at their beginning is left out.

        Raises:
            EmptySource, SourceError, InvalidText, InputError, ConfigError; otherwise as a call of the model.
        """
        if thread_id is None:
            raise InputError("thread_id is None; expected the thread that absorbs the stream")
        check_label(label)
        charset = Charset(encoding, errors)
        request = Request(said=read([*history]), thread=str(thread_id), on_change=self.on_change,
                          on_mismatch=self.on_mismatch, tools=tuple(convert_to_openai_tool(tool) for tool in tools),
                          focus=self.focus if focus is None else focus)
        loop = self.shared.loop
        await loop.acall(load)  # so that the caller's event loop does not import torch
        from langchain_locret.ingesting import absorb
        return await absorb(loop, source, request, label, charset, progress)

    def ingest(self, source: Any, **options: Any) -> HumanMessage:
        """As `aingest`, for sync callers; the source is not async either."""
        if isinstance(source, AsyncIterable):
            raise InputError(f"source is a {type(source).__name__}, which only `aingest` can read; expected text or an "
                             "iterator of it")
        return run_alone(self.aingest(source, **options))

    def save_thread(self, thread_id: str) -> bool:
        """Make a thread durable where it rests; False if this process has nothing of it that it could save."""
        return self.shared.loaded and self.shared.loop.call(lambda threads: threads.make_durable(str(thread_id)))

    async def asave_thread(self, thread_id: str) -> bool:
        """As `save_thread`."""
        return self.shared.loaded and await self.shared.loop.acall(
            lambda threads: threads.make_durable(str(thread_id)))

    def fork_thread(self, thread_id: str, new_thread_id: str) -> None:
        """Let a new thread go on from where a thread is now: for another user, or to try something.

        Both are durable then, and each goes on alone. The new thread has the messages of the old one; it reads turns
        further back again. Forgetting the old thread forgets its forks.

        Raises:
            InputError: the thread was told nothing, or the new one something. ContextBusy: the new thread is in use.
            ConfigError: the runtime has no store. SnapshotError, StoreError: not forked; the thread is as it was.
        """
        self.shared.loop.call(lambda threads: _fork(threads, str(thread_id), str(new_thread_id)))

    async def afork_thread(self, thread_id: str, new_thread_id: str) -> None:
        """As `fork_thread`."""
        await self.shared.loop.acall(lambda threads: _fork(threads, str(thread_id), str(new_thread_id)))

    def forget_thread(self, thread_id: str) -> bool:
        """Delete a thread's memory, every file of it, and its forks; whether there was any."""
        self.shared.seen.forget(str(thread_id))
        return self.shared.loop.call(lambda threads: threads.forget(str(thread_id)))

    async def aforget_thread(self, thread_id: str) -> bool:
        """As `forget_thread`."""
        self.shared.seen.forget(str(thread_id))
        return await self.shared.loop.acall(lambda threads: threads.forget(str(thread_id)))

    def thread_memory(self, thread_id: str) -> Memory | None:
        """What a thread holds: tokens accepted, units per layer, bytes; None if it was told nothing. A thread that is
        not open is loaded from the store."""
        return self.shared.loop.call(lambda threads: _thread_memory().memory(threads, str(thread_id)))

    async def athread_memory(self, thread_id: str) -> Memory | None:
        """As `thread_memory`."""
        return await self.shared.loop.acall(lambda threads: _thread_memory().memory(threads, str(thread_id)))

    def list_threads(self) -> list[str]:
        """Names of the stored threads; "sha256:" and a digest stand for a name that no session can have.

        Raises:
            StoreError: the store cannot be read.
        """
        return self.shared.loop.call(lambda threads: _thread_memory().stored_threads(threads))

    async def alist_threads(self) -> list[str]:
        """As `list_threads`."""
        return await self.shared.loop.acall(lambda threads: _thread_memory().stored_threads(threads))

    def memory_text(self, thread_id: str) -> list[Passage]:
        """What a thread's memory holds, as text: runs of tokens in order, each with the share of its units that the
        memory keeps. The thread is made durable first, and read from the store.

        Raises:
            SnapshotError: it cannot be saved or read, or the store has no log of it. ConfigError: there is no store.
        """
        return self.shared.loop.call(lambda threads: _thread_memory().memory_text(threads, str(thread_id)))

    async def amemory_text(self, thread_id: str) -> list[Passage]:
        """As `memory_text`."""
        return await self.shared.loop.acall(lambda threads: _thread_memory().memory_text(threads, str(thread_id)))

    def recall(self, thread_id: str, words: str = "", *, start: int | None = None, end: int | None = None,
               limit: int = 4) -> list[Passage]:
        """What a thread was told, whether its memory keeps it or not: passages of its log with most of these words, or
        the text of positions start .. end-1 (at most 4,096 tokens).

        Args:
            limit: the most passages.

        Raises:
            InputError: neither words nor positions were given. Otherwise as `memory_text`.
        """
        return self.shared.loop.call(
            lambda threads: _thread_memory().recall(threads, str(thread_id), words, start, end, limit))

    async def arecall(self, thread_id: str, words: str = "", *, start: int | None = None, end: int | None = None,
                      limit: int = 4) -> list[Passage]:
        """As `recall`."""
        return await self.shared.loop.acall(
            lambda threads: _thread_memory().recall(threads, str(thread_id), words, start, end, limit))

    def recall_tool(self) -> BaseTool:
        """A tool for agents: `recall` from the thread in which the agent runs."""
        def find(words: str = "", start: int | None = None, end: int | None = None) -> str:
            with _errors_for_the_model():
                return _thread_memory().shown(self.recall(_current_thread(), words, start=start, end=end))

        async def afind(words: str = "", start: int | None = None, end: int | None = None) -> str:
            with _errors_for_the_model():
                return _thread_memory().shown(await self.arecall(_current_thread(), words, start=start, end=end))

        return StructuredTool.from_function(find, afind, name="recall", handle_tool_error=True, description=(
            "Look up what was said or read earlier in this conversation, word for word. Give words that stand in it, "
            "or the positions start and end of tokens that an earlier result named."))


@contextmanager
def _errors_for_the_model() -> Iterator[None]:
    """A wrong call, or a log that cannot be read, becomes the tool's answer: the agent's run goes on."""
    try:
        yield
    except LocretError as error:
        raise ToolException(str(error)) from error


def _current_thread() -> str:
    """The id of the thread in which the caller's graph runs."""
    thread_id: str | None = with_thread(None, {}).get("thread_id")
    if thread_id is None:
        raise ToolException("this conversation has no thread_id, so nothing of it is kept; expected one in the config")
    return thread_id


def _thread_memory() -> ModuleType:
    """The module, imported where it is first used: it loads torch."""
    from locret_stream.conversation import thread_memory
    return thread_memory


async def _fork(threads: Threads, name: str, new: str) -> None:
    from locret_stream.conversation.forking import fork
    await fork(threads, name, new)
