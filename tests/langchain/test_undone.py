"""A call that was cancelled, timed out or failed leaves everything as it was: memory, snapshots, the log."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langchain_locret import LocretChatModel, RebuildWarning, StateLost
from locret_stream import SnapshotNotFound, SourceError, Store
from locret_stream.conversation.thread import Thread
from tests.langchain.support import Script, held, model, receipt, rendered, thread, tokenizer

SECRET = "kumquat 48213 "
A = thread("a")


def traces(folder: Path, text: str) -> list[str]:
    """Files that hold the text, as it is or as token ids of four or eight bytes."""
    ids = tokenizer().encode(text, add_special_tokens=False)[1:4]
    forms = [text.strip().encode(), *(np.array(ids, dtype=kind).tobytes() for kind in ("<i4", "<i8"))]
    return [str(path) for path in folder.rglob("*") if path.is_file() and any(
        form in path.read_bytes() for form in forms)]


def state(folder: Path) -> dict[str, bytes]:
    """Every file but those that record which generations were used: marks of deleted ones, and the name's record."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".gone" and not path.name.startswith("n-")}


async def cut(chat: LocretChatModel, script: Script, said: list[Any], how: str) -> None:
    script.delay = 0.02
    try:
        if how == "timeout":
            with pytest.raises(TimeoutError, match="Nothing of this call stays"):
                await chat.ainvoke(said, A, timeout=0.3)
        elif how == "left":
            stream = chat.astream(said, A)
            await anext(stream)
            await stream.aclose()
        else:
            begun, loop = asyncio.Event(), asyncio.get_running_loop()
            script.on_token = lambda: loop.call_soon_threadsafe(begun.set)
            turn = asyncio.create_task(chat.ainvoke(said, A))
            await begun.wait()
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
    finally:
        script.delay, script.on_token = 0.0, lambda: None


@pytest.mark.parametrize("how", ["cancel", "timeout", "left"])
@pytest.mark.parametrize("thread_is", ["new", "old"])
@pytest.mark.thorough(but=2)
async def test_a_call_that_was_cut_short_leaves_no_byte(script: Script, tmp_path: Path, thread_is: str, how: str):
    with model(Store(tmp_path, keep_last=4)) as chat:
        history: list[Any] = [SystemMessage("Be brief.")]
        for turn in range(4 if thread_is == "old" else 0):
            history += [HumanMessage(f"turn {turn}")]
            history += [await chat.ainvoke(history, A)]
        await cut(chat, script, [*history, HumanMessage(SECRET * 40)], how)
        async with asyncio.timeout(20):
            answer = await chat.ainvoke([*history, HumanMessage("next")], A)
        assert receipt(answer)["source"] == ("snapshot" if history[1:] else "new") and "why" not in receipt(answer)
        assert held(chat, "a") == rendered([*history, HumanMessage("next"), answer])
        assert not traces(tmp_path, SECRET)
        if how == "cancel":
            await cut(chat, script, [*history, HumanMessage(SECRET * 40)], how)
            await chat.asave_thread("a")  # waits until the cancelled call has cleaned up
        assert not traces(tmp_path, SECRET)
        # the text of a whole call is found, so the search looks in the right places
        await chat.ainvoke([*history, HumanMessage(SECRET * 40)], A)
        assert traces(tmp_path, SECRET)
        assert await chat.aforget_thread("a") and not traces(tmp_path, SECRET)


async def test_a_call_that_was_cut_short_costs_no_older_snapshot(script: Script, tmp_path: Path):
    with model(Store(tmp_path, keep_last=4)) as chat:
        history: list[Any] = []
        for turn in range(5):
            history += [HumanMessage(f"turn {turn}")]
            history += [await chat.ainvoke(history, A)]
        rows = [row.generation for row in chat.shared.runtime.store.info("langchain/a")]
        before = state(tmp_path)
        await cut(chat, script, [*history, HumanMessage(SECRET * 40)], "cancel")
        await chat.asave_thread("a")  # waits until the cancelled call has cleaned up
        assert [row.generation for row in chat.shared.runtime.store.info("langchain/a")] == rows[-4:]
        assert state(tmp_path).items() <= before.items()


@pytest.mark.parametrize("max_live", [1, 8])
async def test_a_stream_that_fails_leaves_no_byte(script: Script, tmp_path: Path, max_live: int):
    with model(Store(tmp_path, keep_last=4), max_live=max_live) as chat:
        async def source() -> Any:
            for number in range(6):
                yield SECRET * 40
                await chat.ainvoke(f"hello {number}", thread("b"))  # with one slot, the stream waits in the store
            raise RuntimeError("the source failed")

        with pytest.raises(SourceError):
            await chat.aingest(source(), thread_id="a")
        assert not traces(tmp_path, SECRET)
        assert receipt(await chat.ainvoke("hello", A))["source"] == "new"


async def test_a_call_that_fails_at_its_last_step_is_undone_too(script: Script, tmp_path: Path, monkeypatch):
    """The call is cancelled while the answer is being saved: the save runs to its end, and is undone."""
    from locret_stream.context import StreamingContext

    saved, snapshot, loop = [], StreamingContext.snapshot, asyncio.get_running_loop()

    async def slow(ctx: StreamingContext) -> Any:
        done = await snapshot(ctx)
        saved.append(done)
        if len(saved) == 2:
            loop.call_soon_threadsafe(turn.cancel)
            await asyncio.sleep(0.3)
        return done

    with model(Store(tmp_path, keep_last=4)) as chat:
        with monkeypatch.context() as patch:
            patch.setattr(StreamingContext, "snapshot", slow)
            turn = asyncio.create_task(chat.ainvoke([HumanMessage(SECRET * 40)], A))
            with pytest.raises(asyncio.CancelledError):
                await turn
        answer = await chat.ainvoke([HumanMessage("hello")], A)
        assert len(saved) == 2 and not traces(tmp_path, SECRET)
        assert isinstance(answer, AIMessage) and receipt(answer)["source"] == "new"


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize("to", ["an earlier message", "nothing"])
@pytest.mark.thorough(but=2)
async def test_a_call_cut_short_while_it_goes_back_leaves_the_thread_where_it_was(script: Script, tmp_path: Path,
                                                                                  monkeypatch, to: str, how: str):
    """The context is at the earlier boundary by then, and must not be used or saved as if it were at the later one."""
    from locret_stream.context import StreamingContext

    replace, loop = StreamingContext._replace, asyncio.get_running_loop()

    async def slow(ctx: StreamingContext, *arguments: Any) -> None:
        await replace(ctx, *arguments)
        if how == "cancel":
            loop.call_soon_threadsafe(turn.cancel)
        await asyncio.sleep(0.4)

    with model(Store(tmp_path, keep_last=8)) as chat:
        history: list[Any] = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A), HumanMessage("two")]
        history += [await chat.ainvoke(history, A)]
        with monkeypatch.context() as patch:
            patch.setattr(StreamingContext, "_replace", slow)
            other = [*history[:2], HumanMessage("edited")] if to == "an earlier message" else [HumanMessage("another")]
            turn = asyncio.create_task(chat.ainvoke(other, A, timeout=0.2 if how == "timeout" else None))
            with pytest.raises(asyncio.CancelledError if how == "cancel" else TimeoutError):
                await turn
        history += [HumanMessage("three")]
        history += [await chat.ainvoke(history, A)]
        assert receipt(history[-1])["source"] == "snapshot" and held(chat, "a") == rendered(history)
    with model(Store(tmp_path, keep_last=8)) as chat:
        history += [HumanMessage("four")]
        answer = await chat.ainvoke(history, A)
        assert receipt(answer)["source"] == "snapshot" and held(chat, "a") == rendered([*history, answer])


async def test_a_turn_cut_short_when_its_context_was_closed_leaves_no_byte(script: Script, tmp_path: Path, monkeypatch):
    """Another owner saved meanwhile, so that the context is closed; the call is cancelled before its answer is out."""
    from locret_stream import StaleOwner
    from locret_stream.context import StreamingContext
    from locret_stream.conversation.threads import Threads

    snapshot, rest, loop, saves = StreamingContext.snapshot, Threads.rest, asyncio.get_running_loop(), []

    async def stale(ctx: StreamingContext) -> Any:
        saves.append(1)
        if len(saves) == 2:
            raise StaleOwner("injected: another owner saved")
        return await snapshot(ctx)

    async def slow(threads: Threads, one: Any) -> None:
        await rest(threads, one)
        if len(saves) == 2:
            saves.append(1)
            loop.call_soon_threadsafe(turn.cancel)
            await asyncio.sleep(0.3)

    with model(Store(tmp_path, keep_last=4)) as chat:
        history: list[Any] = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A)]
        with monkeypatch.context() as patch:
            patch.setattr(StreamingContext, "snapshot", stale)
            patch.setattr(Threads, "rest", slow)
            turn = asyncio.create_task(chat.ainvoke([*history, HumanMessage(SECRET * 40)], A))
            with pytest.raises(asyncio.CancelledError):
                await turn
        answer = await chat.ainvoke([*history, HumanMessage("next")], A)
        assert receipt(answer)["source"] == "snapshot" and held(chat, "a") == rendered(
            [*history, HumanMessage("next"), answer])
        assert not traces(tmp_path, SECRET)


async def unsaved_then_cut(chat: LocretChatModel, script: Script) -> list[Any]:
    """A thread whose first turn is saved; the second is not, and goes with the third, which is cancelled."""
    history: list[Any] = [HumanMessage("one")]
    history += [await chat.ainvoke(history, A)]
    assert await chat.asave_thread("a")
    history += [HumanMessage("two")]
    history += [await chat.ainvoke(history, A)]
    await cut(chat, script, [*history, HumanMessage(SECRET * 40)], "cancel")
    return history


async def test_unsaved_turns_that_went_with_a_cancelled_call_are_read_again_and_never_missed_silently(
        script: Script, tmp_path: Path):
    async def expect_lost(chat: LocretChatModel) -> None:
        for goes_on in (lambda: chat.ainvoke("three", thread("a", append=True)), lambda: chat.afork_thread("a", "b"),
                        lambda: chat.aingest(iter(["a line"]), thread_id="a"), lambda: chat.amemory_text("a")):
            with pytest.raises(StateLost, match=r"thread 'a' holds no more .* Expected the whole history once"):
                await goes_on()

    with model(Store(tmp_path), save="run") as chat:
        history = await unsaved_then_cut(chat, script)
        await expect_lost(chat)
        await chat.ainvoke([SystemMessage("Name this."), HumanMessage("two")], A)  # its answer has the same words
        await expect_lost(chat)
        await cut(chat, script, [*history, HumanMessage(SECRET * 40)], "cancel")
        await expect_lost(chat)
        side = [SystemMessage("Guard."), HumanMessage("fine?")]
        side += [await chat.ainvoke(side, A)]
        await cut(chat, script, [*side, HumanMessage(SECRET * 40)], "cancel")
        await expect_lost(chat)
        for number in range(70):  # so many that the thread is not at hand any more
            chat.shared._loop.threads.named(f"other {number}")
        await chat.ainvoke("hello", thread("another"))
        await expect_lost(chat)
        history += [HumanMessage("three")]
        history += [await chat.ainvoke(history, A)]
        assert held(chat, "a") == rendered(history) and receipt(history[-1])["source"] == "snapshot"
        last = await chat.ainvoke("four", thread("a", append=True))
        assert held(chat, "a") == rendered([*history, HumanMessage("four"), last])


@pytest.mark.parametrize("on_change", ["late", "reread"])
async def test_the_whole_history_brings_lost_turns_back_under_another_system_text_too(script: Script, tmp_path: Path,
                                                                                      on_change: str):
    with model(Store(tmp_path), save="run", on_change=on_change) as chat:
        history = await unsaved_then_cut(chat, script)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = await chat.ainvoke([SystemMessage("Be loud."), *history, HumanMessage("three")], A)
        assert "two" in held(chat, "a")
        assert receipt(await chat.ainvoke("four", thread("a", append=True)))["appended"] == 1
        assert held(chat, "a").count("You said: two") == 1 and answer.text in held(chat, "a")


async def test_a_sub_agent_s_call_that_is_undone_costs_the_thread_nothing(script: Script, tmp_path: Path):
    with model(Store(tmp_path), save="run") as chat:
        history: list[Any] = []
        for said in ("one", "two"):
            history += [HumanMessage(said)]
            history += [await chat.ainvoke(history, A)]
        agent: list[Any] = [SystemMessage("You help."), HumanMessage("look it up")]
        agent += [await chat.ainvoke(agent, A)]
        await cut(chat, script, [*agent, HumanMessage(SECRET * 40)], "cancel")
        answer = await chat.ainvoke("three", thread("a", append=True))
        assert held(chat, "a") == rendered([*history, HumanMessage("three"), answer])


async def test_without_a_store_a_thread_that_lost_its_memory_says_so(script: Script):
    with model(None) as chat:
        history = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A)]
        await cut(chat, script, [*history, HumanMessage(SECRET * 40)], "cancel")
        with pytest.raises(StateLost):
            await chat.aingest(iter(["a line"]), thread_id="a")
        history += [HumanMessage("two")]
        history += [await chat.ainvoke(history, A)]
        assert receipt(await chat.ainvoke("three", thread("a", append=True)))["appended"] == 1


async def test_a_history_without_its_beginning_says_that_unsaved_turns_are_gone(script: Script, tmp_path: Path):
    with model(Store(tmp_path), save="run") as chat:
        history = await unsaved_then_cut(chat, script)
        with pytest.warns(RebuildWarning, match="undone with the call after that"):
            answer = await chat.ainvoke([history[-1], HumanMessage("three")], A)
        last = await chat.ainvoke("four", thread("a", append=True))  # it was told, and begins where the caller said
        assert held(chat, "a") == rendered([history[-1], HumanMessage("three"), answer, HumanMessage("four"), last])


async def test_a_stream_that_could_not_be_saved_is_saved_before_a_call_goes_on_from_it(
        script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def full(thread: Thread) -> bool:
        return False

    with model(Store(tmp_path)) as chat:
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "keep", full)
            stub = await chat.aingest(iter(["a line of the log\n"] * 30), thread_id="a")
        await cut(chat, script, [stub, HumanMessage(SECRET * 40)], "cancel")
        answer = await chat.ainvoke([stub, HumanMessage("what?")], A)
        assert receipt(answer)["source"] == "snapshot" and held(chat, "a").count("a line of the log") == 30


async def test_a_boundary_that_is_kept_no_more_is_an_error_of_its_own(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        await chat.ainvoke("one", A)
        found = chat.shared._loop.threads.named("a")
        gone = msgspec.structs.replace(found.boundary, key=b"gone" * 8)
        with pytest.raises(SnapshotNotFound, match="is kept no more"):
            await found.move_to(gone)
        assert receipt(await chat.ainvoke("two", thread("a", append=True)))["appended"] == 1
