"""Many threads at once: slots, waiting, other processes, and threads that are looked up in the store again."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langchain_locret import LocretChatModel
from locret_stream import NoSlot, Store, StoreError
from locret_stream.context import saving
from locret_stream.context.session_state import SessionState
from locret_stream.conversation import matching, threads
from locret_stream.snapshot import Snapshot
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread


@pytest.mark.thorough
async def test_thirty_two_threads_in_eight_slots_know_only_their_own(script: Script, tmp_path: Path):
    """Each memory holds its own conversation, no thread waits for ever, and all take turns."""
    ended: list[int] = []
    with model(tmp_path, max_live=8) as chat:
        async def converse(number: int) -> None:
            history: list[Any] = [SystemMessage(f"You are number {number}.")]
            for turn in range(4):
                history.append(HumanMessage(f"secret-{number}-{turn} " + "filler " * 30))
                history.append(await chat.ainvoke(history, thread(number)))
                ended.append(number)
            assert held(chat, number) == rendered(history)
            for other in range(32):
                assert (f"secret-{other}-" in held(chat, number)) == (other == number)
            assert [receipt(one)["source"] for one in history if isinstance(one, AIMessage)] == ["new"] + ["live"] * 3

        async with asyncio.timeout(120):
            await asyncio.gather(*map(converse, range(32)))
    rounds = [ended.index(number) for number in range(32)]
    assert max(rounds) < 32 * 2, "a thread's first turn came after others' second ones"
    assert max(len(ended) - 1 - ended[::-1].index(number) for number in range(32)) == 127


async def test_a_turn_that_prepares_keeps_its_slot_from_the_turns_of_other_threads(script: Script, monkeypatch):
    """Without a store an idle thread is closed to free its slot; the thread of a turn that prepares is not idle."""
    with model(None, max_live=2) as chat:
        said: dict[str, list[Any]] = {}
        for name in ("a", "b"):
            said[name] = [HumanMessage(f"{name} begins")]
            said[name] += [await chat.ainvoke(said[name], thread(name)), HumanMessage(f"{name} goes on")]
        template, preparing, go_on = chat.shared._loop.threads.template, threading.Event(), threading.Event()
        real = template.render

        def waits(messages: Any, *tools: Any, **options: Any) -> Any:
            if any("a goes on" in one.content for one in messages):
                preparing.set()
                assert go_on.wait(20)
            return real(messages, *tools, **options)

        monkeypatch.setattr(template, "render", waits)
        monkeypatch.setattr(matching, "_FEW", 0)  # as a long conversation is prepared: in a thread
        going_on = asyncio.create_task(chat.ainvoke(said["a"], thread("a")))
        await asyncio.to_thread(preparing.wait, 20)
        await chat.ainvoke([HumanMessage("c begins")], thread("c"))
        go_on.set()
        assert receipt(await going_on)["source"] == "live"
        assert receipt(await chat.ainvoke(said["b"], thread("b")))["source"] == "rebuild"


async def test_more_threads_at_once_than_are_kept_at_hand_are_all_answered(script: Script, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 2)
    with model(tmp_path) as chat:
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(chat.ainvoke(f"hello {number}", thread(number)) for number in range(40)))
        assert [answer.text for answer in answers] == [f"You said: hello {number}" for number in range(40)]
        await chat.ainvoke("once more", thread("last"))  # the threads that were still in use may be closed now
        assert len(chat.shared._loop.threads._threads) == 2


async def test_nobodys_calls_beyond_the_slots_take_their_turns(script: Script, tmp_path: Path):
    with model(tmp_path, max_live=2) as chat:
        async with asyncio.timeout(60):
            answers = await chat.abatch([[HumanMessage(f"question {number}")] for number in range(12)])
        assert [answer.text for answer in answers] == [f"You said: question {number}" for number in range(12)]
        assert chat.shared.runtime.store.list() == []


async def test_that_every_call_is_to_be_given_the_whole_history_is_said_once(chat: LocretChatModel, caplog):
    """Calls on the side, for a title or a guardrail, look like a caller that gives the newest message alone."""
    history: list[Any] = [HumanMessage("begins")]
    history += [await chat.ainvoke(history, thread("a"))]
    for number in range(4):
        await chat.ainvoke([HumanMessage(f"on the side {number}")], thread("a"))
    assert caplog.text.count("Give every call the whole history") == 1


async def test_calls_on_one_thread_wait_for_each_other_and_each_uses_its_own_messages(chat: LocretChatModel):
    base: list[Any] = [HumanMessage("base")]
    base += [await chat.ainvoke(base, thread("a"))]
    asked = [[*base, HumanMessage(f"branch {number}")] for number in range(5)]
    answers = await asyncio.gather(*(chat.ainvoke(one, thread("a")) for one in asked))
    assert [answer.text for answer in answers] == [f"You said: branch {number}" for number in range(5)]
    for one, answer in zip(asked, answers, strict=True):
        more = await chat.ainvoke([*one, answer, HumanMessage("more")], thread("a"))
        assert receipt(more)["source"] == "snapshot"
        assert held(chat, "a") == rendered([*one, answer, HumanMessage("more"), more])


def test_several_event_loops_and_plain_threads_use_one_model(chat: LocretChatModel):
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            said: list[Any] = [HumanMessage(f"worker {number}")]
            said += [asyncio.run(chat.ainvoke(said, thread(number))), HumanMessage("again")]
            assert receipt(chat.invoke(said, thread(number)))["source"] == "live"
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


def test_threads_are_listed_and_looked_at_after_a_restart(script: Script, tmp_path: Path):
    seen: list[int] = []
    with model(tmp_path, save="run") as chat:
        chat.ingest(iter(["one ", "two ", "three"]), thread_id="a", progress=seen.append)
        before = chat.thread_memory("a")
        chat.invoke("hello", thread("b" * 500))
        assert seen == [4, 8, 13] and "a" in chat.list_threads()
    with model(tmp_path) as chat:
        after = chat.thread_memory("a")
        assert (after.tokens, after.units) == (before.tokens, before.units)
        first, second = sorted(chat.list_threads())
        assert (first, second) == ("a", "b" * 500) and asyncio.run(chat.alist_threads()) == [first, second]
        assert chat.thread_memory("elsewhere") is None and len(chat.list_threads()) == 2


def test_a_thread_that_another_process_forgot_does_not_come_back_at_the_end_of_a_run(
        script: Script, tmp_path: Path, caplog):
    """What was told since the last save is not written; the next turn begins anew from its messages."""
    with model(tmp_path, save="run") as one, model(tmp_path) as two:
        history: list[Any] = [HumanMessage("one")]
        history.append(one.invoke(history, thread("a")))
        assert one.save_thread("a")
        history.append(HumanMessage("two"))
        history.append(one.invoke(history, thread("a")))
        assert two.forget_thread("a")
        assert not one.save_thread("a") and "was forgotten since it was opened here" in caplog.text
        assert two.list_threads() == []
        new = [HumanMessage("three")]
        new.append(one.invoke(new, thread("a")))
        assert receipt(new[-1])["source"] == "new" and held(one, "a") == rendered(new)
        assert two.list_threads() == []


def _full_for(monkeypatch: pytest.MonkeyPatch, name: str) -> list[bool]:
    """While what this gives has an element, saves of that thread fail."""
    full, real = [True], saving.save

    async def save(session: SessionState) -> Snapshot:
        if full and session.stored_branch.name == name:
            raise StoreError("No space left on device")
        return await real(session)

    monkeypatch.setattr(saving, "save", save)
    return full


def test_a_thread_that_cannot_be_saved_is_not_lost_as_others_are_used(script: Script, tmp_path: Path, monkeypatch,
                                                                      caplog):
    monkeypatch.setattr(threads, "THREADS", 1)
    full = _full_for(monkeypatch, "langchain/a")
    with model(tmp_path, max_live=2) as chat:
        history: list[Any] = [HumanMessage("one")]
        history.append(chat.invoke(history, thread("a")))
        assert not receipt(history[-1])["saved"]
        for name in "bcdbcd":
            assert receipt(chat.invoke("hello", thread(name)))["saved"]
        assert "No space left on device" in caplog.text and "a" not in chat.list_threads()
        history.append(HumanMessage("two"))
        history.append(chat.invoke(history, thread("a")))
        assert receipt(history[-1])["source"] == "live"
        full.clear()
        assert chat.save_thread("a") and "a" in chat.list_threads()


def test_who_waits_for_the_slot_of_a_thread_that_cannot_be_saved_is_told_which_and_why(
        script: Script, tmp_path: Path, monkeypatch):
    full = _full_for(monkeypatch, "langchain/a")
    with model(None, on=runtime(Store(tmp_path), max_live=1, slot_timeout_s=0.3)) as chat:
        history: list[Any] = [HumanMessage("one")]
        history.append(chat.invoke(history, thread("a")))
        with pytest.raises(NoSlot, match="'langchain/a' cannot be swapped out and keeps its slot: No space left"):
            chat.invoke("hello", thread("b"))
        history.append(HumanMessage("two"))
        assert receipt(chat.invoke(history, thread("a")))["source"] == "live"
        full.clear()
        time.sleep(1.1)  # it is tried again after a second
        assert receipt(chat.invoke("hello", thread("b")))["saved"]


def test_two_processes_on_one_thread_never_mix(script: Script, tmp_path: Path, caplog):
    """Each process goes on from the messages given, whichever saved last."""
    with model(tmp_path) as one, model(tmp_path) as two:
        history: list[Any] = []
        for turn in range(6):
            history.append(HumanMessage(f"turn {turn}"))
            chat = (one, two)[turn % 2]
            history.append(chat.invoke(history, thread("a")))
            assert held(chat, "a") == rendered(history)
            said = receipt(history[-1])
            assert said["saved"] and (not turn or (said["source"], said["fed"] < 20) == ("snapshot", True))


@pytest.mark.thorough
def test_threads_beyond_those_at_hand_come_back(script: Script, tmp_path: Path, monkeypatch):
    from locret_stream.conversation import threads
    monkeypatch.setattr(threads, "THREADS", 3)
    with model(tmp_path, max_live=2, save="run") as chat:
        histories: dict[int, list[Any]] = {number: [] for number in range(8)}
        for text in ("one", "two", "three"):
            for number, history in histories.items():
                history.append(HumanMessage(f"{text} of {number}"))
                history.append(chat.invoke(history, thread(number)))
                assert held(chat, number) == rendered(history)
                assert receipt(history[-1])["source"] == ("new" if text == "one" else "snapshot")
        assert len(chat.shared._loop.threads._threads) <= 4

        async def at_once() -> None:
            await asyncio.gather(*(chat.ainvoke([*history, HumanMessage("four")], thread(number))
                                   for number, history in histories.items() for _ in range(2)))

        asyncio.run(at_once())


def test_sending_the_newest_message_alone_is_told(chat: LocretChatModel, caplog):
    history: list[Any] = [HumanMessage("one")]
    history += [chat.invoke(history, thread("a"))]
    answer = chat.invoke("two", thread("a"))
    assert receipt(answer)["why"] == "older messages are others"
    assert "holds 2 messages, and the 1 given do not go on from them" in caplog.text
    again = chat.invoke([*history, HumanMessage("three")], thread("a"))
    assert receipt(again)["source"] == "snapshot"
