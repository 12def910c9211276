"""Guardrails, titles, routers and other agents inherit the thread: none of them costs another one its memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda

from langchain_locret import LocretChatModel, StateLost
from locret_stream import SnapshotMismatch, StaleOwner, Store, StoreError
from locret_stream.conversation.boundaries import Boundary
from locret_stream.conversation.boundary_pruning import LINEAGES, SHARE, kept, tip_of
from locret_stream.conversation.thread import Thread
from locret_stream.snapshot import Branch
from locret_stream.snapshot.session_folder import SessionFolder
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread
from tests.langchain.test_undone import SECRET, traces

A = thread("a")
LOG = "".join(f"line {number} of the log\n" for number in range(60))


def guard(chat: LocretChatModel, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        chat.invoke([SystemMessage("Harmful?"), HumanMessage(str(number))], A)


def numbers(chat: LocretChatModel) -> list[int]:
    return [row.generation for row in chat.shared.runtime.store.info("langchain/a")]


@pytest.mark.parametrize("save", ["turn", "run"])
@pytest.mark.parametrize("max_live", [1, 8])
@pytest.mark.thorough(but=1)
def test_side_calls_never_cost_a_thread_the_stream_that_it_absorbed(script: Script, tmp_path: Path, save: str,
                                                                    max_live: int):
    with model(Store(tmp_path, keep_last=6), save=save, max_live=max_live) as chat:
        stub = chat.ingest(LOG, thread_id="a", label="log")
        guard(chat, 20)
        chat.invoke("elsewhere", thread("b"))
        answer = chat.invoke([stub, HumanMessage("what?")], A)
        assert receipt(answer)["source"] == "snapshot" and receipt(answer)["fed"] < 20
        assert held(chat, "a") == rendered([HumanMessage(LOG), HumanMessage("what?"), answer])
    with model(Store(tmp_path, keep_last=6), save=save) as chat:  # and in another process
        guard(chat, 20, start=20)
        answer = chat.invoke([stub, HumanMessage("what else?")], A)
        assert receipt(answer)["source"] == "snapshot" and "line 0 of the log" in held(chat, "a")


@pytest.mark.thorough
def test_two_agents_of_one_thread_keep_a_memory_each(script: Script, tmp_path: Path):
    """However long one agent talks, the other goes on from its own messages, trimmed or not."""
    with model(Store(tmp_path, keep_last=8)) as chat:
        first: list[BaseMessage] = [SystemMessage("You are A."), HumanMessage("the first thing")]
        first += [chat.invoke(first, A)]
        first += [HumanMessage("the second thing")]
        first += [chat.invoke(first, A)]
        second: list[BaseMessage] = [SystemMessage("You are B.")]
        for turn in range(40):
            second += [HumanMessage(f"turn {turn}")]
            second += [chat.invoke(second, A)]
            assert not turn or receipt(second[-1])["source"] == "live"
        left = [first[0], first[-1], HumanMessage("the third thing")]
        answer = chat.invoke(left, A)
        assert receipt(answer)["source"] == "snapshot"
        assert held(chat, "a") == rendered([*first, left[-1], answer])


@pytest.mark.parametrize("foreign", [False, True], ids=["its own answer", "an answer that is another's"])
@pytest.mark.thorough(but=1)
def test_many_questions_about_one_state_do_not_displace_it(script: Script, tmp_path: Path, foreign: bool):
    """Each goes on from there, as does the talk behind them: not even one makes the thread read its history again."""
    with model(Store(tmp_path)) as chat:
        said: list[BaseMessage] = []
        for turn in range(3):
            said += [HumanMessage(f"turn {turn}")]
            answer = chat.invoke(said, A)
            said += [AIMessage(f"as the application has it, {turn}") if foreign else answer]
        for number in range(12):
            asked = chat.invoke([*said, HumanMessage(f"question {number}")], A)
            assert receipt(asked)["source"] in ("live", "snapshot"), number
    with model(Store(tmp_path)) as chat:  # and in another process
        for number in range(12, 18):
            asked = chat.invoke([*said, HumanMessage(f"question {number}")], A)
            assert receipt(asked)["source"] in ("live", "snapshot"), number
        last = [*said, HumanMessage("and now?")]
        answer = chat.invoke(last, A)
        assert receipt(answer)["source"] == "snapshot" and held(chat, "a") == rendered([*last, answer])
        assert len(numbers(chat)) <= 4 + 2, "four of the thread, and those of its last save"


@pytest.mark.thorough
def test_what_a_thread_keeps_is_bounded(script: Script, tmp_path: Path):
    """A thread keeps four times what one lineage may have, its streams, and the newest boundary of each lineage."""
    most = 4
    with model(Store(tmp_path, keep_last=most)) as chat:
        chat.ingest(LOG, thread_id="a")
        for agent in range(5):
            said: list[BaseMessage] = [SystemMessage(f"You are {agent}.")]
            for turn in range(4):
                said += [HumanMessage(f"turn {turn}")]
                said += [chat.invoke(said, A)]
        guard(chat, 2 * LINEAGES)
        assert len(numbers(chat)) <= max(SHARE * most, LINEAGES) + 1 + most
        assert numbers(chat)[0] == 1, "the stream"
        size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        guard(chat, 2 * LINEAGES, start=2 * LINEAGES)
        grown = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert grown < 1.25 * size


def test_a_store_that_grows_too_large_gives_up_what_no_stream_and_no_agent_rests_on(script: Script, tmp_path: Path):
    store = Store(tmp_path, keep_last=8, max_bytes=1)
    with model(store) as chat:
        stub = chat.ingest(LOG, thread_id="a")
        said: list[BaseMessage] = [SystemMessage("You are A.")]
        for turn in range(4):
            said += [HumanMessage(f"turn {turn}")]
            said += [chat.invoke(said, A)]
        guard(chat, 3)
        assert len(numbers(chat)) <= 6  # the stream, the newest of each lineage, and the one before the newest
        more = chat.invoke([said[0], said[-1], HumanMessage("more")], A)
        assert receipt(more)["source"] == "snapshot" and "turn 0" in held(chat, "a")
        assert receipt(chat.invoke([stub, HumanMessage("what?")], A))["source"] == "snapshot"


def test_forgetting_the_thread_forgets_its_streams(script: Script, tmp_path: Path):
    with model(Store(tmp_path, keep_last=6)) as chat:
        chat.ingest("a secret kumquat. " * 20, thread_id="a")
        guard(chat, 10)
        assert chat.forget_thread("a")
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_side_call_of_nobody_leaves_the_thread_alone(script: Script, tmp_path: Path):
    with model(tmp_path) as chat:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [chat.with_config(configurable={"thread_id": "a"}).invoke(history), HumanMessage("two")]
        before = numbers(chat)
        chat.invoke("Harmful?", thread(None))
        assert numbers(chat) == before and receipt(chat.invoke(history, A))["source"] == "live"


@pytest.mark.parametrize("way", ["config", "with_config", "argument"])
async def test_a_node_of_a_graph_can_call_for_nobody(script: Script, tmp_path: Path, way: str):
    """The graph's config names the thread in a context variable, and an explicit None overrides it."""
    with model(tmp_path) as chat:
        nobody = thread(None)

        def node(_: Any) -> None:
            if way == "with_config":
                chat.with_config(**nobody).invoke("Harmful?")
            else:
                chat.invoke("Harmful?", **({"config": nobody} if way == "config" else {"thread_id": None}))

        await RunnableLambda(node).ainvoke(None, A)
        assert chat.shared.runtime.store.list() == []
        await RunnableLambda(lambda _: chat.invoke("Harmful?")).ainvoke(None, A)
        assert [row.name for row in chat.shared.runtime.store.list()] == ["langchain/a"]


def test_a_stream_without_a_history_comes_behind_what_the_thread_is_about(script: Script, tmp_path: Path):
    """The tip is not behind the last question of a guardrail."""
    with model(tmp_path) as chat:
        history: list[BaseMessage] = [HumanMessage("one")]
        for text in ("two", "three"):
            history += [chat.invoke(history, A), HumanMessage(text)]
        history += [chat.invoke(history, A)]
        guard(chat, 3)
        history += [chat.ingest(LOG, thread_id="a"), HumanMessage("what?")]
        answer = chat.invoke(history, A)
        assert receipt(answer)["source"] == "live" and "one" in held(chat, "a") and "line 59" in held(chat, "a")


def boundary(number: int, lineage: int, *, stream: bool = False) -> Boundary:
    return Boundary(number.to_bytes(32), bytes(32), b"", b"", number, "assistant", lineage=bytes([lineage]),
                    stream=stream)


def test_a_lineage_that_was_gone_on_with_outlives_questions_that_were_asked_once():
    stored = {one.key: (one.tokens, one) for one in (
        *(boundary(number, 1) for number in range(1, 6)),
        *(boundary(number, number // 2) for number in range(10, 100)))}
    stay = {stored[key][0]: pinned for key, pinned in kept(stored, 16, {}).items()}
    assert {1, 2, 3, 4, 5} <= stay.keys() and stay[5] and not stay[1]
    assert len({stored[key][1].lineage for key in kept(stored, 16, {})}) == LINEAGES
    assert tip_of(stored, None).tokens == 5 and tip_of(stored, boundary(99, 49)).tokens == 5


def test_whatever_was_used_last_stays():
    """New lineages stay however many longer ones there are: else no new one could ever begin."""
    stored = {one.key: (one.tokens, one) for one in (
        *(boundary(number, number // 4) for number in range(80)), *(boundary(number, number) for number in (90, 91)))}
    stay = [stored[key][1].tokens for key in kept(stored, 16, {})]
    assert {90, 91} <= set(stay) and len({stored[key][1].lineage for key in kept(stored, 16, {})}) == LINEAGES


def test_of_a_lineage_those_stay_that_were_used_last():
    """Those that this process did not use go first, the oldest ahead."""
    stored = {one.key: (one.tokens, one) for one in (boundary(number, 1) for number in range(1, 11))}

    def staying(*used: int) -> list[int]:
        order = {boundary(number, 1).key: at for at, number in enumerate(used, 1)}
        return sorted(stored[key][0] for key in kept(stored, 4, order))

    assert staying() == [7, 8, 9, 10] and staying(2, 1) == [1, 2, 9, 10]
    assert staying(10, 9, 3, 8, 1, 7) == [1, 3, 7, 8]


async def test_a_boundary_that_cannot_be_loaded_does_not_count_as_used(monkeypatch: pytest.MonkeyPatch):
    good, bad = boundary(1, 1), boundary(2, 1)
    one = Thread(runtime(), "langchain/a", stored={good.key: (1, good), bad.key: (2, bad)})

    async def move(self: Thread, generation: int) -> None:
        if generation == 2:
            raise SnapshotMismatch("made with another budget", field="budget", found="512", expected="1024")

    monkeypatch.setattr(Thread, "_move", move)
    await one.reach(good, rebuild=False)
    with pytest.raises(SnapshotMismatch, match="another budget"):
        await one.reach(bad, rebuild=False)
    assert one.unusable == {bad.key} and one.used.keys() == {good.key}


def test_the_largest_lineage_gives_first():
    stored: dict[bytes, Any] = {one.key: (one.tokens, one) for one in (
        *(boundary(number, 1, stream=number == 1) for number in range(1, 41)),
        *(boundary(40 + number, 2 + number % 6) for number in range(1, 60)))}
    stay = [stored[key][1] for key in kept(stored, 8, {})]
    counts = {lineage: sum(one.lineage == bytes([lineage]) for one in stay) for lineage in range(1, 8)}
    assert sum(counts.values()) == SHARE * 8 + 1 and max(counts.values()) <= 6
    assert 1 in [one.tokens for one in stay]


def test_a_snapshot_that_cannot_be_read_just_now_is_not_given_up(script: Script, tmp_path: Path, monkeypatch):
    """One read fails: the call is refused, and once the store can be read again the stream is found."""
    with model(Store(tmp_path, keep_last=2)) as chat:
        stub = chat.ingest(LOG, thread_id="a")
        history: list[BaseMessage] = [stub, HumanMessage("what?")]
        history += [chat.invoke(history, A), HumanMessage("next")]
        guard(chat, 3)

        def fails(*_: Any) -> None:
            raise StoreError("injected: connection reset")

        for owner, name in ((Branch, "load"), (SessionFolder, "read_manifest")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                with pytest.raises(StoreError, match="connection reset"):
                    chat.invoke(history, A)
        guard(chat, 3, start=3)
        answer = chat.invoke(history, A)
        assert receipt(answer)["source"] == "snapshot" and "line 0 of the log" in held(chat, "a")
    with model(Store(tmp_path, keep_last=2)) as chat:
        assert receipt(chat.invoke(history, A))["source"] == "snapshot"


def test_a_store_that_cannot_be_read_when_a_thread_is_looked_up_costs_it_nothing(script: Script, tmp_path: Path,
                                                                                 monkeypatch):
    with model(Store(tmp_path, keep_last=2)) as chat:
        stub = chat.ingest(LOG, thread_id="a")
    with model(Store(tmp_path, keep_last=2)) as chat:
        real = SessionFolder.manifest_at

        def fails(self: SessionFolder, path: str) -> Any:
            if path.endswith("1.snap"):
                raise StoreError("injected: connection reset")
            return real(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(SessionFolder, "manifest_at", fails)
            with pytest.raises(StoreError, match="connection reset"):
                guard(chat, 1)
        guard(chat, 4)
        assert receipt(chat.invoke([stub, HumanMessage("what?")], A))["source"] == "snapshot"


def test_calls_under_another_budget_cost_a_thread_no_stream(script: Script, tmp_path: Path):
    """Boundaries that another runtime cannot load stay stored for one that can."""
    with model(Store(tmp_path, keep_last=2), budget=512) as chat:
        stub = chat.ingest(LOG, thread_id="a")
        history: list[BaseMessage] = [stub, HumanMessage("what?")]
        history += [chat.invoke(history, A), HumanMessage("next")]
    with model(Store(tmp_path, keep_last=2), budget=1024) as other:
        with pytest.raises(StateLost, match="budgets"):
            other.invoke(history, A)
        guard(other, 3)
    with model(Store(tmp_path, keep_last=2), budget=512) as chat:
        assert receipt(chat.invoke(history, A))["source"] == "snapshot" and "line 0 of the log" in held(chat, "a")


@pytest.mark.parametrize("closed_by", ["a call that timed out", "a fork"])
async def test_what_another_process_absorbed_meanwhile_is_found_and_kept(script: Script, tmp_path: Path,
                                                                         closed_by: str):
    """No context of the thread is open in this process then, which could notice that another owner saves."""
    with model(Store(tmp_path, keep_last=2)) as here, model(Store(tmp_path, keep_last=2)) as there:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [await here.ainvoke(history, A)]
        if closed_by == "a fork":
            await here.afork_thread("a", "b")
        else:
            script.delay = 0.05
            with pytest.raises(TimeoutError):
                await here.ainvoke([*history, HumanMessage("x")], A, timeout=0.2)
            script.delay = 0.0
        stub = await there.aingest(LOG, thread_id="a", history=history)
        theirs = [*history, stub, HumanMessage("what?")]
        theirs += [await there.ainvoke(theirs, A), HumanMessage("next")]
        assert receipt(await here.ainvoke(theirs, A))["source"] == "snapshot"
        for turn in range(3):  # and goes on with the messages of this process
            history += [HumanMessage(f"more {turn}")]
            history += [await here.ainvoke(history, A)]
        assert receipt(await there.ainvoke(theirs, A))["source"] == "snapshot"
        assert "line 0 of the log" in held(there, "a")


def test_a_title_asked_after_the_first_turn_is_not_where_a_thread_goes_on(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        agent = [SystemMessage("Agent."), HumanMessage("The code of falcon is 48213.")]
        chat.invoke(agent, A)
        chat.invoke([SystemMessage("Write a title."), HumanMessage("falcon")], A)
        chat.invoke([HumanMessage("What is the code?")], thread("a", append=True))
        assert "The code of falcon is 48213." in held(chat, "a") and "title" not in held(chat, "a")


async def test_a_stream_that_another_process_outran_is_not_taken_for_absorbed(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as here, model(Store(tmp_path)) as there:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [await here.ainvoke(history, A)]

        async def source() -> Any:
            yield LOG
            await there.ainvoke([*history, HumanMessage("meanwhile")], A)
            yield LOG

        with pytest.raises(StaleOwner, match="absorb the stream again"):
            await here.aingest(source(), thread_id="a", history=history)
        answer = await here.ainvoke([*history, HumanMessage("what?")], A)
        assert receipt(answer)["source"] == "snapshot" and "of the log" not in held(here, "a")


@pytest.mark.parametrize("save", ["turn", "run"])
def test_a_thread_that_another_process_went_on_with_gives_its_slot_to_others(script: Script, tmp_path: Path, save: str):
    """A context whose session another owner saved can never be saved again, so it cannot be swapped out."""
    own = runtime(Store(tmp_path), max_live=1, slot_timeout_s=2)
    with model(None, on=own, save=save) as here, model(Store(tmp_path)) as there:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [here.invoke(history, A), HumanMessage("two")]
        history += [there.invoke(history, A), HumanMessage("three")]
        assert receipt(here.invoke("other", thread("b")))["source"] == "new"
        assert receipt(here.invoke(history, A))["source"] in ("snapshot", "rebuild")
        assert held(here, "a").startswith(rendered(history))


async def test_a_stream_that_was_outrun_holds_up_no_other_thread(script: Script, tmp_path: Path):
    """The source gives nothing for a while; another thread has the only place at the gate, and waits for the slot."""
    own = runtime(Store(tmp_path), max_live=1, slot_timeout_s=5)
    with model(None, on=own) as here, model(Store(tmp_path)) as there:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [await here.ainvoke(history, A)]
        go_on = asyncio.Event()

        async def source() -> Any:
            yield LOG
            await there.ainvoke([*history, HumanMessage("meanwhile")], A)
            outrun.set()
            await go_on.wait()
            yield LOG

        outrun = asyncio.Event()
        absorbing = asyncio.create_task(here.aingest(source(), thread_id="a", history=history))
        await outrun.wait()
        async with asyncio.timeout(4):
            await here.ainvoke("other", thread("b"))
        go_on.set()
        with pytest.raises(StaleOwner):
            await absorbing
        assert receipt(await here.ainvoke([*history, HumanMessage("what?")], A))["source"] == "snapshot"


async def test_nothing_is_built_on_a_question_that_another_process_may_take_back(script: Script, tmp_path: Path):
    """Forks, appended messages and recall go on from the last answer; the failed call's secret is nowhere."""
    with model(Store(tmp_path, keep_last=5)) as here, model(Store(tmp_path, keep_last=5)) as there:
        history: list[BaseMessage] = [HumanMessage("one")]
        history += [await here.ainvoke(history, A)]
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        script.delay, script.on_token = 0.5, lambda: loop.call_soon_threadsafe(begun.set)  # long, until it is cut short
        asking = asyncio.create_task(here.ainvoke([*history, HumanMessage(SECRET * 30)], A))
        await begun.wait()
        assert await there.arecall("a", "kumquat") == []
        await there.afork_thread("a", "b")
        asking.cancel()
        script.delay = 0.0
        with pytest.raises(asyncio.CancelledError):
            await asking
        await here.asave_thread("a")
        await there.ainvoke([HumanMessage("new")], thread("b", append=True))
    assert not traces(tmp_path, SECRET)
