"""An answer counts once the caller took its end: a call that is left before that, however late, leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import HumanMessage

from langchain_locret import LocretChatModel, runtimes
from locret_stream import ContextClosed, SourceError, Store, StoreError
from locret_stream.conversation import forking
from locret_stream.conversation.absorbing import Absorption
from locret_stream.conversation.request import Delivery
from locret_stream.conversation.thread import Thread
from locret_stream.conversation.threads import Threads
from locret_stream.snapshot.local import LocalFiles, Posix
from locret_stream.snapshot.names import folder_of
from tests.langchain.support import Script, held, model, receipt, runtime, thread
from tests.langchain.test_undone import SECRET, traces

A, B = thread("a"), thread("b")


ANSWERED_S = 0.5  # by then the model wrote all of its answer


@pytest.mark.parametrize("save", ["turn", "run"])
async def test_a_stream_that_is_left_after_the_model_ended_is_undone(script: Script, tmp_path: Path, save: str):
    with model(Store(tmp_path, keep_last=32)) as chat:
        history = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A)]
        stream = chat.astream([*history, HumanMessage(SECRET * 9)], A, save=save)
        await anext(stream)
        await asyncio.sleep(ANSWERED_S)
        await stream.aclose()
        appended = await chat.ainvoke([HumanMessage("next")], A, append=True)
        assert receipt(appended)["appended"] == 1 and SECRET not in held(chat, "a") and not traces(tmp_path, SECRET)


def test_so_is_one_of_a_caller_who_does_not_await(script: Script, tmp_path: Path):
    with model(Store(tmp_path, keep_last=32)) as chat:
        stream = chat.stream([HumanMessage(SECRET * 9)], A)
        next(stream)
        time.sleep(ANSWERED_S)
        stream.close()
        assert receipt(chat.invoke("hello", A))["source"] == "new" and not traces(tmp_path, SECRET)


async def test_whoever_takes_the_last_chunk_and_comes_back_no_more_has_the_answer(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        said = [HumanMessage("one")]
        async for chunk in chat.astream(said, A):
            if chunk.response_metadata:
                break
        for chunk in chat.stream(said, B):
            if chunk.response_metadata:
                break
        assert "one" in held(chat, "a") and "one" in held(chat, "b")


async def test_one_who_never_comes_back_keeps_nobody_waiting_for_long(script: Script, tmp_path: Path, monkeypatch):
    """The caller's task may wait for another call on the thread; the answer then stays, and can still be read."""
    monkeypatch.setattr(Delivery, "PATIENCE_S", 0.3)
    with model(Store(tmp_path), max_live=1) as chat:
        stream = chat.astream([HumanMessage("one")], A)
        first = await anext(stream)
        async with asyncio.timeout(20):
            assert receipt(await chat.ainvoke("elsewhere", B))["source"] == "new"  # the open stream has no slot
            appended = await chat.ainvoke([HumanMessage("two")], A, append=True)
        assert "You said: one" in held(chat, "a") and receipt(appended)["appended"] == 1
        rest = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in [first, *rest]) == "You said: one" and receipt_of(rest)["saved"]


def receipt_of(chunks: list[Any]) -> dict[str, Any]:
    return next(chunk.response_metadata["locret"] for chunk in chunks if "locret" in chunk.response_metadata)


async def test_a_timeout_is_no_limit_for_reading_the_answer(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        stream = chat.astream([HumanMessage("one")], A, timeout=2.0)
        chunks = [await anext(stream)]
        await asyncio.sleep(2.5)
        chunks += [chunk async for chunk in stream]
        assert receipt_of(chunks)["saved"]


@pytest.mark.parametrize("what", ["aingest", "ainvoke", "astream"])
async def test_a_cancellation_that_comes_before_the_result_did_is_in_time(script: Script, tmp_path: Path, monkeypatch,
                                                                         what: str):
    """The caller's event loop is busy while the call ends on the runtime's."""
    ended = threading.Event()
    finish, rest = Absorption.finish, Threads.rest

    async def finished(self: Absorption) -> Any:
        message = await finish(self)
        ended.set()
        return message

    async def rested(self: Threads, found: Any) -> None:
        await rest(self, found)
        ended.set()

    async def source() -> Any:
        yield SECRET * 20

    async def streamed(said: list[Any]) -> None:
        async for _ in chat.astream(said, A):
            pass

    with model(Store(tmp_path, keep_last=32)) as chat:
        history = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A)]
        monkeypatch.setattr(Absorption, "finish", finished)
        if what != "aingest":
            monkeypatch.setattr(Threads, "rest", rested)
        said = [*history, HumanMessage(SECRET * 20)]
        begin = {"aingest": lambda: chat.aingest(source(), thread_id="a", history=history),
                 "ainvoke": lambda: chat.ainvoke(said, A), "astream": lambda: streamed(said)}[what]
        task = asyncio.create_task(begin())
        while not ended.is_set():
            await asyncio.sleep(0)
            ended.wait(0.02)
        time.sleep(0.1)  # noqa: ASYNC251  the loop is busy
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await chat.ainvoke([HumanMessage("next")], A, append=True)
        assert SECRET not in held(chat, "a") and not traces(tmp_path, SECRET)


async def test_an_answer_whose_last_callback_fails_is_undone(script: Script, tmp_path: Path):
    class Failing(AsyncCallbackHandler):
        raise_error = True

        async def on_llm_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("the callback failed")

    with model(Store(tmp_path)) as chat:
        with pytest.raises(KeyError):
            await chat.ainvoke(SECRET * 9, A | {"callbacks": [Failing()]})
        assert receipt(await chat.ainvoke("hello", A))["source"] == "new" and not traces(tmp_path, SECRET)


async def test_a_call_within_a_call_is_taken_by_itself(script: Script, tmp_path: Path):
    class Nested(AsyncCallbackHandler):
        async def on_chat_model_start(self, *_: Any, **__: Any) -> None:
            if not said:
                said.append("")
                said[0] = "".join([chunk.text async for chunk in chat.astream("within", B)])

    said: list[str] = []
    with model(Store(tmp_path)) as chat:
        async with asyncio.timeout(20):
            answer = await chat.ainvoke("around", A | {"callbacks": [Nested()]})
        assert said == ["You said: within"] and answer.text == "You said: around"
        assert "within" in held(chat, "b") and "around" in held(chat, "a")


# -- a runtime that is closed, or is being closed ---------------------------------------------------------------------


async def test_a_model_over_a_runtime_that_was_closed_says_so(script: Script, tmp_path: Path):
    own = runtime(Store(tmp_path))
    async with own:
        chat = LocretChatModel(model="scripted", runtime=own)
        await chat.ainvoke("one", A)
    for use in (lambda: chat.ainvoke("two", A), lambda: chat.amemory_text("a"), lambda: chat.aforget_thread("a"),
                lambda: chat.aingest("x", thread_id="a"), lambda: asyncio.to_thread(chat.thread_memory, "a")):
        with pytest.raises(ContextClosed):
            await use()
    chat.close()


def test_a_call_beside_close_begins_behind_it(script: Script, tmp_path: Path, monkeypatch):
    close, gap = runtimes.RuntimeLoop.close, threading.Event()

    def slowly(self: Any) -> None:
        gap.set()
        time.sleep(0.3)
        close(self)

    with model(Store(tmp_path), save="run") as chat:
        chat.invoke("one", A)
        with monkeypatch.context() as patch:
            patch.setattr(runtimes.RuntimeLoop, "close", slowly)
            closing = threading.Thread(target=chat.close)
            closing.start()
            gap.wait()
            assert receipt(chat.invoke([HumanMessage("two")], A, append=True))["source"] == "snapshot"
            closing.join()
        assert chat.invoke("three", B).text == "You said: three"


# -- swapped out threads, other owners, forks ---------------------------------------------------------------------


async def test_a_failed_stream_that_waited_twice_while_others_saved_leaves_no_byte(script: Script, tmp_path: Path):
    """While a fork is saved it shares the session's lock, so that swap-outs of the stream cannot be deleted."""
    with model(Store(tmp_path, keep_last=8), max_live=1) as chat:
        history = [HumanMessage("hello")]
        history += [await chat.ainvoke(history, A)]

        async def source() -> Any:
            yield (SECRET + "word " * 40 + "\n") * 3
            await chat.ainvoke("one", B)
            yield (SECRET + "word " * 40 + "\n") * 3
            with LocalFiles(tmp_path).lock(folder_of("langchain/a"), shared=True):
                await chat.ainvoke("two", B)
            yield "more\n" * 30
            raise OSError("the pipe broke")

        with pytest.raises(SourceError):
            await chat.aingest(source(), thread_id="a", history=history)
        assert not traces(tmp_path, SECRET)
        assert len(chat.shared.runtime.store.info("langchain/a")) == 2


async def test_what_another_owner_saved_in_this_moment_loses_no_stream(script: Script, tmp_path: Path, monkeypatch):
    look_up, once = Thread.look_up, []
    with model(Store(tmp_path, keep_last=32)) as one, model(Store(tmp_path, keep_last=32)) as other:
        note = await one.aingest("The port of otter is 3390.\n" * 20, thread_id="a", label="log")
        history = [note, HumanMessage("one")]
        history += [await one.ainvoke(history, A)]

        async def meanwhile(self: Thread) -> None:
            await look_up(self)
            if self.runtime is one.shared.runtime and not once:
                once.append(1)
                await other.ainvoke([*history, HumanMessage("told by the other")], A)

        monkeypatch.setattr(Thread, "look_up", meanwhile)
        edited = await one.ainvoke([note, HumanMessage("one, edited")], A)
        assert receipt(edited)["source"] == "snapshot" and receipt(edited)["reused"] > 200


class FailingOnce(Posix):
    """fsync of the folder of a manifest fails once."""

    armed, last = False, ""

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.last = target

    def sync_folder(self, path: str) -> None:
        if self.armed and self.last.endswith(".snap"):
            FailingOnce.armed = False
            raise OSError(errno.EIO, "injected")
        super().sync_folder(path)


def test_a_fork_that_failed_is_not_there(script: Script, tmp_path: Path):
    with model(Store(tmp_path, files=LocalFiles(tmp_path, FailingOnce()))) as chat:
        chat.invoke("one", A)
        FailingOnce.armed = True
        chat.shared.runtime.store.files.posix.last = ""
        with pytest.raises(StoreError):
            chat.fork_thread("a", "b")
        assert not FailingOnce.armed and [one.name for one in chat.shared.runtime.store.list()] == ["langchain/a"]
        chat.fork_thread("a", "b")
        assert "one" in held(chat, "b")


def test_a_fork_that_closing_cut_short_is_not_there(script: Script, tmp_path: Path, monkeypatch):
    fork, begun, failed = forking._fork, threading.Event(), []

    async def slow(*arguments: Any) -> None:
        begun.set()
        await asyncio.sleep(0.3)
        await fork(*arguments)

    def forked() -> None:
        try:
            chat.fork_thread("a", "b")
        except ContextClosed as error:
            failed.append(error)

    with model(Store(tmp_path)) as chat:
        chat.invoke("one", A)
        with monkeypatch.context() as patch:
            patch.setattr(forking, "_fork", slow)
            waiting = threading.Thread(target=forked)
            waiting.start()
            begun.wait()
            chat.close()
            waiting.join()
        assert failed and chat.list_threads() == ["a"]
        chat.fork_thread("a", "b")


async def test_a_fork_that_is_cancelled_leaves_a_thread_of_the_new_name_as_it_is(script: Script, tmp_path: Path,
                                                                                 monkeypatch):
    fork, begun = forking._fork, threading.Event()

    async def slow(*arguments: Any) -> None:
        begun.set()
        await asyncio.sleep(0.3)
        await fork(*arguments)

    with model(Store(tmp_path)) as chat:
        await chat.ainvoke("one", A)
        await chat.ainvoke("two", B)
        before = held(chat, "b")
        with monkeypatch.context() as patch:
            patch.setattr(forking, "_fork", slow)
            forked = asyncio.create_task(chat.afork_thread("a", "b"))
            await asyncio.to_thread(begun.wait)
            forked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forked
        answer = await chat.ainvoke("three", thread("b", append=True))
        assert receipt(answer)["source"] in ("live", "snapshot") and held(chat, "b").startswith(before)


async def test_an_end_that_nobody_takes_gathers_nothing():
    delivery = Delivery()
    waiting = asyncio.create_task(delivery.wait(lambda: False))
    await asyncio.sleep(4 * Delivery.POLL_S)
    assert len(delivery._taken._done_callbacks) == 1
    assert delivery.take()
    await waiting
