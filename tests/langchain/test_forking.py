"""Forks of a thread under other names, and messages that are appended to whatever a thread was told last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from langchain_locret import LateWarning, LocretChatModel, RebuildWarning
from locret_stream import ConfigError, ContextBusy, InputError, Store
from tests.langchain.support import Script, held, memory, model, receipt, rendered, thread
from tests.langchain.test_undone import SECRET, traces

A, B, C = thread("a"), thread("b"), thread("c")


def test_a_forked_thread_goes_on_alone(chat: LocretChatModel):
    """Both threads go on from the messages and streams before the fork; after it neither has anything of the other."""
    history = [SystemMessage("Be brief."), chat.ingest("a line of the log\n" * 50, thread_id="a", label="log",
                                                       history=[SystemMessage("Be brief.")]), HumanMessage("one")]
    history += [chat.invoke(history, A)]
    chat.fork_thread("a", "b")
    hers, his = [*history, HumanMessage("of alice")], [*history, HumanMessage("of bob")]
    first, second = chat.invoke(hers, A), chat.invoke(his, B)
    assert receipt(first)["source"] == "snapshot" and receipt(second)["source"] == "live"
    assert receipt(second)["fed"] < 30
    for name, mine, other in (("a", "of alice", "of bob"), ("b", "of bob", "of alice")):
        shown = held(chat, name)
        assert shown.count("a line of the log") == 50 and mine in shown and other not in shown
    trimmed = chat.invoke([second, HumanMessage("more")], B)
    assert receipt(trimmed)["source"] == "live" and "of bob" in held(chat, "b")
    with pytest.warns(RebuildWarning):  # what alice said afterwards is not bob's
        foreign = chat.invoke([first, HumanMessage("whose?")], B)
    assert receipt(foreign)["reused"] == 0 and "of alice" not in held(chat, "b").replace(first.text, "")


def test_a_thread_that_holds_something_is_no_place_for_a_fork(script: Script, tmp_path: Path):
    """That holds for a thread that was saved, and for one that was not."""
    with model(Store(tmp_path), save="run") as chat:
        for one in (A, B):
            chat.invoke("hello", one)
        with pytest.raises(InputError, match="holds something already"):
            chat.fork_thread("a", "b")
        assert chat.save_thread("b") and "hello" in held(chat, "b")


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_fork_is_there_after_a_restart_and_can_be_forked_and_forgotten(script: Script, tmp_path: Path,
                                                                        encrypted: bool):
    key = b"k" * 32 if encrypted else None
    history = [HumanMessage("one")]
    with model(Store(tmp_path, key=key)) as chat:
        history += [chat.invoke(history, A)]
        chat.fork_thread("a", "b")
    with model(Store(tmp_path, key=key)) as chat:
        assert sorted(chat.list_threads()) == ["a", "b"]
        asyncio.run(chat.afork_thread("b", "c"))
        answer = chat.invoke([*history, HumanMessage("two")], C)
        assert receipt(answer)["source"] == "live" and receipt(answer)["fed"] < 30
        assert receipt(chat.invoke([*history, HumanMessage("two")], B))["source"] == "snapshot"
        assert chat.forget_thread("b") and not chat.forget_thread("b")
        assert sorted(chat.list_threads()) == ["a", "c"]
        assert receipt(chat.invoke([*history, HumanMessage("two")], B))["reused"] == 0
        assert receipt(chat.invoke([*history, HumanMessage("three")], A))["reused"] > 0
        assert receipt(chat.invoke([*history, HumanMessage("two"), answer, HumanMessage("three")], C))["reused"] > 0
        assert chat.forget_thread("a")
        assert sorted(chat.list_threads()) == ["b"]
        assert receipt(chat.invoke([*history, HumanMessage("two")], C))["reused"] == 0


def test_a_forgotten_fork_leaves_nothing_of_what_it_was_told(script: Script, tmp_path: Path):
    history = [HumanMessage("one")]
    with model(Store(tmp_path)) as chat:
        history += [chat.invoke(history, A)]
        chat.fork_thread("a", "b")
        chat.invoke([*history, HumanMessage(SECRET * 20)], B)
        assert traces(tmp_path, SECRET)
        assert chat.forget_thread("b")
        assert not traces(tmp_path, SECRET)


def test_only_what_was_told_something_is_forked_and_only_as_a_new_thread(chat: LocretChatModel):
    chat.invoke("one", A)
    chat.invoke("two", B)
    before = held(chat, "a")
    for old, new, why in (("a", "b", "holds something already"), ("x", "y", "was told nothing"),
                          ("a", "a", "forked as itself")):
        with pytest.raises(InputError, match=why):
            chat.fork_thread(old, new)
    assert held(chat, "a") == before and sorted(chat.list_threads()) == ["a", "b"]
    with model(None) as loose, pytest.raises(ConfigError, match="without a store"):
        loose.fork_thread("a", "b")


async def test_a_thread_in_use_is_not_forked_into(chat: LocretChatModel, script: Script):
    """A fork does not wait for a thread in use: two threads that fork each other would wait for ever."""
    await chat.ainvoke("one", A)
    loop, answering = asyncio.get_running_loop(), asyncio.Event()
    script.delay, script.on_token = 0.1, lambda: loop.call_soon_threadsafe(answering.set)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        busy = group.create_task(chat.ainvoke("two", B))
        await answering.wait()
        with pytest.raises(ContextBusy, match="thread 'b' is in use"):
            await chat.afork_thread("a", "b")
    assert busy.result().text == "You said: two" and receipt(await chat.ainvoke("two", B))["source"] == "snapshot"


def test_just_the_new_message_is_appended_to_what_the_thread_holds(chat: LocretChatModel):
    history = [SystemMessage("Be brief."), HumanMessage("one")]
    history += [chat.invoke(history, A)]
    more = [HumanMessage("two")]
    answer = chat.bind(append=True).invoke(more, A)
    assert receipt(answer) | {"state": 0} == {"state": 0, "saved": True, "source": "live", "appended": 1,
                                              "reused": receipt(answer)["reused"], "fed": receipt(answer)["fed"]}
    assert held(chat, "a") == rendered([*history, *more, answer])
    history += [*more, answer, HumanMessage("three")]
    whole = chat.invoke(history, A)  # the same boundaries as of the whole history
    assert receipt(whole)["source"] == "live" and "appended" not in receipt(whole)
    asked = chat.invoke("four", thread("a", append=True))
    assert held(chat, "a") == rendered([*history, whole, HumanMessage("four"), asked])


def test_appending_goes_on_after_a_restart_and_behind_a_stream(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        stub = chat.ingest("a line of the log\n" * 50, thread_id="a", label="log")
    with model(Store(tmp_path)) as chat:
        answer = chat.invoke("what?", thread("a", append=True))
        assert receipt(answer)["source"] == "snapshot" and receipt(answer)["fed"] < 30
        assert held(chat, "a").count("a line of the log") == 50
        assert receipt(chat.invoke([stub, HumanMessage("what?"), answer, HumanMessage("x")], A))["source"] == "live"


def test_appending_to_nothing_or_with_other_tools_is_refused_and_changes_nothing(script: Script, tmp_path: Path):
    with model(Store(tmp_path), on_change="reread") as chat:
        append = chat.bind(append=True)
        with pytest.raises(InputError, match="thread 'a' was told nothing yet"):
            append.invoke("one", A)
        with pytest.raises(InputError, match="without a thread_id"):
            append.invoke("one")
        with pytest.raises(ConfigError, match="append is 'yes'"):
            chat.bind(append="yes").invoke("one", A)
        chat.invoke("one", A)
        before = held(chat, "a")
        with pytest.raises(ConfigError, match="other tools"):
            chat.bind_tools([look], append=True).invoke("two", A)
        assert held(chat, "a") == before


def look(at: str) -> str:
    """Look a thing up."""
    return at


def test_what_is_appended_may_bring_another_system_text_and_other_tools(chat: LocretChatModel):
    told = [SystemMessage("Be brief."), HumanMessage("one")]
    told += [chat.invoke(told, A)]
    append, before = chat.bind(append=True), held(chat, "a")
    asked = [SystemMessage("Be brief."), HumanMessage("two")]  # what the thread was told is not told again
    assert "late" not in receipt(append.invoke(asked, A))
    assert held(chat, "a").count("Be brief.") == 1 and held(chat, "a").startswith(before)
    with pytest.warns(LateWarning, match="the system prompt of thread 'a' changed"):
        changed = append.invoke([SystemMessage("Be loud."), HumanMessage("three")], A)
    assert receipt(changed)["appended"] == 1
    assert receipt(changed)["late"] == "the system prompt" and held(chat, "a").count("Be loud.") == 1
    before = held(chat, "a")
    with pytest.warns(LateWarning, match="the tools of thread 'a' changed"):
        answer = chat.bind_tools([look], append=True).invoke("four", A)
    assert receipt(answer)["source"] == "live" and held(chat, "a").startswith(before)
    assert receipt(answer)["appended"] == 1
    assert "Look a thing up." in held(chat, "a").removeprefix(before)
    before = held(chat, "a")
    assert "late" not in receipt(chat.bind_tools([look], append=True).invoke("five", A))
    assert held(chat, "a").startswith(before)


@pytest.mark.parametrize("how", ["field", "bind", "ingest"])
def test_memory_is_told_what_it_will_be_asked_about(script: Script, tmp_path: Path, how: str):
    with model(Store(tmp_path), focus="the door code" if how == "field" else None) as chat:
        if how == "ingest":
            chat.ingest("a line of the log\n" * 50, thread_id="a", label="log", focus="the door code")
        else:
            (chat if how == "field" else chat.bind(focus="the door code")).invoke("word " * 100, A)
        codec = chat.shared.runtime.codec
        assert memory(chat, "a")._session.state.focus == codec.encode_text("the door code")
        assert chat.thread_memory("a").focus == len(codec.encode_text("the door code"))
        chat.bind(focus="").invoke([HumanMessage("word " * 100)], thread("a", append=True))
        assert chat.thread_memory("a").focus == 0
        assert "door code" not in held(chat, "a")


def test_a_focus_that_has_no_room_fails_the_call_and_leaves_the_thread(chat: LocretChatModel):
    history = [HumanMessage("one")]
    history += [chat.invoke(history, A)]
    with pytest.raises(ConfigError, match="the focus has"):
        chat.bind(focus="word " * 5000).invoke([*history, HumanMessage("two")], A)
    answer = chat.invoke([*history, HumanMessage("two")], A)
    assert receipt(answer)["reused"] > 0 and chat.thread_memory("a").focus == 0


async def test_a_thread_is_forgotten_with_its_forks_however_busy_these_are(script: Script, tmp_path: Path):
    """While `forget` waits for one fork, no call opens another one again."""
    with model(Store(tmp_path, keep_last=8)) as chat:
        history = [HumanMessage("one")]
        history += [await chat.ainvoke(history, A)]
        for name in ("x", "y"):
            await chat.afork_thread("a", name)
            await chat.ainvoke([*history, HumanMessage("mine")], thread(name))
        script.delay = 0.05
        busy = asyncio.create_task(chat.ainvoke([*history, HumanMessage("long " * 8)], thread("y")))
        await asyncio.sleep(0.2)
        forgetting = asyncio.create_task(chat.aforget_thread("a"))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(chat.ainvoke([*history, HumanMessage("more")], thread("x")))
        async with asyncio.timeout(30):
            await busy
            assert await forgetting
            assert receipt(await late)["reused"] == 0
        assert await chat.alist_threads() == ["x"]


@pytest.mark.parametrize("save", ["turn", "run"])
def test_what_is_appended_comes_behind_no_call_on_the_side_saved_or_not(script: Script, tmp_path: Path, save: str):
    with model(Store(tmp_path), save=save) as chat:
        history: list[BaseMessage] = [SystemMessage("Be brief.")]
        for said in ("one", "two"):
            history += [HumanMessage(said)]
            history += [chat.invoke(history, A)]
        chat.invoke([SystemMessage("Name this conversation."), HumanMessage("one, two")], A)
        answer = chat.invoke("three", thread("a", append=True))
        assert held(chat, "a") == rendered([*history, HumanMessage("three"), answer])


def test_what_is_appended_comes_behind_unsaved_turns_under_another_system_text(script: Script, tmp_path: Path):
    """They look like no call on the side, as they hold more than a question; nor does a thread that begins with one."""
    with model(Store(tmp_path), on_change="reread") as chat:
        history: list[BaseMessage] = [SystemMessage("It is Monday.")]
        for said in ("one", "two", "three"):
            history += [HumanMessage(said)]
            history += [chat.invoke(history, A)]
        history[0] = SystemMessage("It is Tuesday.")
        with pytest.warns(RebuildWarning):
            for said in ("four", "five"):
                history += [HumanMessage(said)]
                history += [chat.invoke(history, A, save="run")]
        answer = chat.invoke("six", thread("a", append=True))
        assert held(chat, "a") == rendered([*history, HumanMessage("six"), answer])
    with model(Store(tmp_path / "other"), save="run") as chat:
        chat.invoke([SystemMessage("Guard."), HumanMessage("hi")], A)
        first = chat.invoke("hi", A)
        answer = chat.invoke("and?", thread("a", append=True))
        assert held(chat, "a") == rendered([HumanMessage("hi"), first, HumanMessage("and?"), answer])


async def test_append_in_the_config_of_the_same_thread_holds(chat: LocretChatModel):
    first = await chat.ainvoke("one", A)
    answer = await chat.bind(thread_id="a").ainvoke("two", thread("a", append=True))
    assert held(chat, "a") == rendered([HumanMessage("one"), first, HumanMessage("two"), answer])
