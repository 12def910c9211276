"""What a model offers for its threads beside calls: streams into them, saving and forgetting, and what they hold."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_locret.calls import run_alone, with_thread
from langchain_locret.messages import check_label, read
from langchain_locret.thread import Request
from locret_stream import InputError, LocretError

if TYPE_CHECKING:  # these load torch
    from langchain_locret.threads import Threads
    from locret_stream.context import Memory
    from locret_stream.snapshot.transcript import Passage


class ThreadMethods:
    """Methods of LocretChatModel, which has `home` and the settings of a `Request`."""

    async def aingest(self, source: Any, *, thread_id: str, label: str = "text",
                      history: Sequence[BaseMessage] = (), tools: Sequence[Any] = (),
                      progress: Callable[[int], None] | None = None, focus: str | None = None) -> HumanMessage:
        """Absorb a stream of text into a thread as one message; returns a small stand-in to keep in the history.

        The source is read only as fast as memory takes it in; other threads go on meanwhile, calls on this one wait.
        Cancelled or failed, the thread is as it was before. Once it returned, the stream is as durable as a turn.

        Args:
            source: text, the Path of a file, or an (async) iterator of str or UTF-8 bytes: an open file, a socket, a
                growing log.
            label: what the stand-in calls it, one line of at most 80 characters.
            history: the messages it comes behind; of none, it comes behind what the thread was told last.
            tools: those that the thread is used with, where the history is its beginning.
            progress: called after each piece with the characters that memory has taken in.
            focus: what memory will be asked about; None: the model's.

        Raises:
            EmptySource, SourceError, InvalidText, InputError; otherwise as a call of the model.
        """
        if thread_id is None:
            raise InputError("thread_id is None; expected the thread that absorbs the stream")
        check_label(label)
        request = Request(said=read(history), thread=str(thread_id), on_change=self.on_change,
                          on_mismatch=self.on_mismatch, tools=tuple(convert_to_openai_tool(tool) for tool in tools),
                          focus=self.focus if focus is None else focus)
        life = self.home.life
        await life.acall(_loaded)  # so that torch is not loaded on the caller's event loop
        from langchain_locret.ingesting import absorb
        return await absorb(life, source, request, label, progress)

    def ingest(self, source: Any, **options: Any) -> HumanMessage:
        """`aingest` for callers who do not await, of a source that is not async either."""
        if isinstance(source, AsyncIterable):
            raise InputError(f"source is a {type(source).__name__}, which only `aingest` can read; expected text or an "
                             "iterator of it")
        return run_alone(self.aingest(source, **options))

    def save_thread(self, thread_id: str) -> bool:
        """Make a thread durable where it rests; False if it is not at hand (it is stored, or never was)."""
        return self.home.loaded and self.home.life.call(lambda threads: threads.seal(str(thread_id)))

    async def asave_thread(self, thread_id: str) -> bool:
        """As `save_thread`."""
        return self.home.loaded and await self.home.life.acall(lambda threads: threads.seal(str(thread_id)))

    def fork_thread(self, thread_id: str, new_thread_id: str) -> None:
        """Let a new thread go on from where a thread is now: for another user, or to try something.

        Both are durable then, and go on alone; messages of the old one are the new one's, too. Turns further back are
        read again by the new one. Forgetting the old thread forgets its forks.

        Raises:
            InputError: the thread was told nothing, or the new one something. ContextBusy: the new one is in use.
            ConfigError: a runtime without a store. SnapshotError, StoreError: not forked; the thread is as it was.
        """
        self.home.life.call(lambda threads: _fork(threads, str(thread_id), str(new_thread_id)))

    async def afork_thread(self, thread_id: str, new_thread_id: str) -> None:
        """As `fork_thread`."""
        await self.home.life.acall(lambda threads: _fork(threads, str(thread_id), str(new_thread_id)))

    def forget_thread(self, thread_id: str) -> bool:
        """Remove a thread's memory, every file of it, and its forks; whether there was any."""
        return self.home.life.call(lambda threads: threads.forget(str(thread_id)))

    async def aforget_thread(self, thread_id: str) -> bool:
        """As `forget_thread`."""
        return await self.home.life.acall(lambda threads: threads.forget(str(thread_id)))

    def thread_memory(self, thread_id: str) -> Memory | None:
        """What a thread holds: tokens accepted, units per layer, bytes; None if it was told nothing. One that is not at
        hand is brought back from the store."""
        return self.home.life.call(lambda threads: _thread_memory().memory(threads, str(thread_id)))

    async def athread_memory(self, thread_id: str) -> Memory | None:
        """As `thread_memory`."""
        return await self.home.life.acall(lambda threads: _thread_memory().memory(threads, str(thread_id)))

    def list_threads(self) -> list[str]:
        """Threads that are stored, by name; one whose name does not fit a session's goes by "sha256:" and its digest.

        Raises:
            StoreError: the store cannot be read.
        """
        return self.home.life.call(lambda threads: _thread_memory().stored_threads(threads))

    async def alist_threads(self) -> list[str]:
        """As `list_threads`."""
        return await self.home.life.acall(lambda threads: _thread_memory().stored_threads(threads))

    def memory_text(self, thread_id: str) -> list[Passage]:
        """What stands in a thread's memory, as text: runs of tokens in order, each with the share of it that memory
        keeps. The thread is made durable first, and read from the store.

        Raises:
            SnapshotError: it cannot be saved or read, or the store keeps no log. ConfigError: there is no store.
        """
        return self.home.life.call(lambda threads: _thread_memory().memory_text(threads, str(thread_id)))

    async def amemory_text(self, thread_id: str) -> list[Passage]:
        """As `memory_text`."""
        return await self.home.life.acall(lambda threads: _thread_memory().memory_text(threads, str(thread_id)))

    def recall(self, thread_id: str, words: str = "", *, start: int | None = None, end: int | None = None,
               limit: int = 4) -> list[Passage]:
        """What a thread was told, whether memory keeps it or not: passages of its log with most of these words, or the
        text of positions start .. end-1 (at most 4,096 tokens).

        Raises:
            InputError: neither words nor positions. Otherwise as `memory_text`.
        """
        return self.home.life.call(
            lambda threads: _thread_memory().recall(threads, str(thread_id), words, start, end, limit))

    async def arecall(self, thread_id: str, words: str = "", *, start: int | None = None, end: int | None = None,
                      limit: int = 4) -> list[Passage]:
        """As `recall`."""
        return await self.home.life.acall(
            lambda threads: _thread_memory().recall(threads, str(thread_id), words, start, end, limit))

    def recall_tool(self) -> BaseTool:
        """A tool for agents: `recall` of the thread that the agent runs in."""
        def find(words: str = "", start: int | None = None, end: int | None = None) -> str:
            with _told_to_the_model():
                return _thread_memory().shown(self.recall(_own_thread(), words, start=start, end=end))

        async def afind(words: str = "", start: int | None = None, end: int | None = None) -> str:
            with _told_to_the_model():
                return _thread_memory().shown(await self.arecall(_own_thread(), words, start=start, end=end))

        return StructuredTool.from_function(find, afind, name="recall", handle_tool_error=True, description=(
            "Look up what was said or read earlier in this conversation, word for word. Give words that stand in it, "
            "or the positions start and end of tokens that an earlier result named."))


@contextmanager
def _told_to_the_model() -> Iterator[None]:
    """What a call asks for wrongly, or what cannot be read, is the tool's answer: the agent's run goes on."""
    try:
        yield
    except LocretError as error:
        raise ToolException(str(error)) from error


def _own_thread() -> str:
    """The thread that the caller's graph runs in."""
    found = with_thread(None, {}).get("thread_id")
    if found is None:
        raise ToolException("this conversation has no thread_id, so nothing of it is kept; expected one in the config")
    return found


def _thread_memory() -> Any:
    """The module, which loads torch."""
    from langchain_locret import thread_memory
    return thread_memory


async def _fork(threads: Threads, name: str, new: str) -> None:
    from langchain_locret.forking import fork
    await fork(threads, name, new)


async def _loaded(threads: Threads) -> None:
    pass
