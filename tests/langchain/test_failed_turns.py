"""A turn that fails, is cancelled or is left leaves the thread as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_locret import LocretChatModel
from locret_stream import Store, StoreError
from tests.langchain.support import Script, memory, model, receipt, thread


class Fails(BaseCallbackHandler):
    raise_error = True

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        raise RuntimeError("the callback failed")


async def cancelled(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    script.delay = 0.02
    begun, sampled = asyncio.Event(), []
    loop = asyncio.get_running_loop()
    script.on_token = lambda: loop.call_soon_threadsafe(begun.set)
    turn = asyncio.create_task(chat.ainvoke(said, thread("a")))
    await begun.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    sampled.append(script.sampled)
    await asyncio.sleep(0.15)
    assert script.sampled <= sampled[0] + 1, "the engine went on after the cancel"


async def timed_out(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    script.delay = 0.05
    with pytest.raises(TimeoutError):
        await chat.ainvoke(said, thread("a"), timeout=0.2)


async def failed(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    script.delay = 0.005
    with pytest.raises(RuntimeError, match="the callback failed"):
        await asyncio.to_thread(lambda: list(chat.stream(said, {**thread("a"), "callbacks": [Fails()]})))


async def broken(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    def bad() -> None:
        raise RuntimeError("the model failed")

    script.on_token = bad
    with pytest.raises(RuntimeError, match="the model failed"):
        await chat.ainvoke(said, thread("a"))


async def left(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    script.delay = 0.005
    stream = chat.astream(said, thread("a"))
    await anext(stream)
    await stream.aclose()


async def left_in_a_thread(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    def read_one() -> None:
        for _ in chat.stream(said, thread("a")):
            break

    script.delay = 0.005
    await asyncio.to_thread(read_one)


async def not_read(chat: LocretChatModel, script: Script, said: list[Any]) -> None:
    """The stream stays open, and nobody takes its chunks."""
    stream = chat.astream(said, thread("a"))
    await anext(stream)
    chat.__dict__.setdefault("_left_open", []).append(stream)  # kept from being collected


@pytest.mark.parametrize("ending", [cancelled, timed_out, failed, broken, left, left_in_a_thread, not_read])
@pytest.mark.parametrize("save", ["turn", "run"])
@pytest.mark.thorough(but=3)
async def test_a_turn_that_ends_badly_leaves_the_thread_as_it_was(script: Script, tmp_path: Path, ending: Any,
                                                                  save: str):
    """The turns after it have the same texts and token ids as in a thread without the failed turn."""
    with model(Store(tmp_path / "a", keep_last=64), save=save) as chat, model(tmp_path / "b", save=save) as never:
        history: list[Any] = [SystemMessage("Be brief."), HumanMessage("one " * 90)]
        history += [await chat.ainvoke(history, thread("a"))]
        other = [*history[:-1], await never.ainvoke(history[:-1], thread("a"))]
        assert other[-1].text == history[-1].text
        await ending(chat, script, [*history, HumanMessage("fails " * 90)])
        script.delay, script.on_token = 0.0, lambda: None
        async with asyncio.timeout(20):
            for said in ("fails " * 90, "three"):  # the same message again, and another one
                history += [HumanMessage(said)]
                other += [HumanMessage(said)]
                history += [await chat.ainvoke(history, thread("a"))]
                other += [await never.ainvoke(other, thread("a"))]
                assert history[-1].text == other[-1].text
                assert memory(chat, "a")._session.state.history == memory(never, "a")._session.state.history


async def test_waiting_for_a_turn_may_time_out_too(chat: LocretChatModel, script: Script):
    script.delay = 0.05
    first = asyncio.create_task(chat.ainvoke([HumanMessage("long enough to wait for")], thread("a")))
    await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError, match=r"no whole answer within 0\.1 s"):
        await chat.ainvoke([HumanMessage("two")], thread("a"), timeout=0.1)
    assert (await first).text


def test_a_store_that_cannot_be_written_costs_durability_and_says_so(chat: LocretChatModel, monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise StoreError("no space left")

    history: list[Any] = [HumanMessage("one")]
    history += [chat.invoke(history, thread("a")), HumanMessage("two")]
    with monkeypatch.context() as patch:
        patch.setattr(type(chat.shared.runtime.store.files), "write", full)
        answer = chat.invoke(history, thread("a"))
    assert answer.text == "You said: two" and not receipt(answer)["saved"] and "no space left" in caplog.text
    history += [answer, HumanMessage("three")]
    more = chat.invoke(history, thread("a"))
    assert receipt(more)["source"] == "live" and receipt(more)["saved"]
