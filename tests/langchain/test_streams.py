"""A thread absorbs a stream as one message."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_locret import LocretChatModel, StateLost
from locret_stream import ContextClosed, EmptySource, InputError, InvalidText, SourceError, Store
from locret_stream.conversation.threads import Threads
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread


def test_callers_who_do_not_await_absorb_too_also_inside_a_loop(chat: LocretChatModel, tmp_path: Path):
    async def inside() -> HumanMessage:
        with pytest.raises(InputError, match="only `aingest` can read"):
            chat.ingest(stops("ends"), thread_id="a")
        return chat.ingest(lines(20), thread_id="a")

    with pytest.raises(InputError, match="thread_id is None"):
        chat.ingest("some text", thread_id=None)
    path = tmp_path / "log.txt"
    path.write_text("from a file")
    assert "11 characters" in chat.ingest(path, thread_id="file").content and "from a file" in held(chat, "file")
    stubs = [chat.ingest("some text", thread_id="a"), asyncio.run(inside())]
    answer = chat.invoke([*stubs, HumanMessage("what?")], thread("a"))
    assert receipt(answer)["source"] == "live" and "line 19" in held(chat, "a")
    assert chat.thread_memory("a").tokens == asyncio.run(chat.athread_memory("a")).tokens
    assert chat.thread_memory("elsewhere") is None


def lines(count: int, start: int = 0) -> Iterator[str]:
    for number in range(start, start + count):
        yield f"line {number} of the log\n"


async def test_a_stream_is_absorbed_as_one_message_and_its_stand_in_brings_it_back(chat: LocretChatModel):
    system = SystemMessage("You watch.")
    stub = await chat.aingest(lines(300), thread_id="a", label="log", history=[system])
    whole = "".join(lines(300))
    assert len(stub.content) < 160 and f"{len(whole)} characters" in stub.content
    assert held(chat, "a") == rendered([system, HumanMessage(whole)])
    question = HumanMessage("what?")
    answer = await chat.ainvoke([system, stub, question], thread("a"))
    assert receipt(answer)["source"] == "live" and receipt(answer)["fed"] < 20
    assert held(chat, "a") == rendered([system, HumanMessage(whole), question, answer])
    more = await chat.aingest(lines(50, 300), thread_id="a", label="log")
    last = await chat.ainvoke([system, stub, question, answer, more, HumanMessage("and now?")], thread("a"))
    assert receipt(last)["source"] == "live"
    assert "line 349" in held(chat, "a") and "line 0 of" in held(chat, "a")
    assert last.usage_metadata["input_tokens"] > 2500


async def test_a_stream_is_read_only_as_fast_as_memory_takes_it_in(chat: LocretChatModel):
    pulled: list[int] = []

    async def source() -> Any:
        for number in range(40):
            ctx = chat.shared._loop.threads.named("a").ctx
            pulled.append(number * 20 - ctx.memory.tokens - ctx.memory.buffered if ctx else 0)
            yield "word " * 20
    await chat.aingest(source(), thread_id="a")
    assert max(pulled) < 100


async def test_the_memory_of_a_stream_survives_a_restart_and_is_never_silently_lost(script: Script, tmp_path: Path):
    with model(tmp_path) as chat:
        stub = await chat.aingest(lines(100), thread_id="a")
    with model(tmp_path) as chat:
        answer = await chat.ainvoke([stub, HumanMessage("what?")], thread("a"))
        assert receipt(answer)["source"] == "snapshot" and "line 99" in held(chat, "a")
        reread = chat.model_copy(update={"on_change": "reread"})  # else it becomes a late message: test_late
        for messages, config in (([SystemMessage("other"), stub, HumanMessage("?")], thread("a")),
                                 ([HumanMessage("before"), stub, HumanMessage("?")], thread("a")),
                                 ([stub, HumanMessage("?")], thread("b")), ([stub, HumanMessage("?")], {})):
            with pytest.raises(StateLost, match=r"stands for an absorbed stream.*Absorb it again") as lost:
                await reread.ainvoke(messages, config)
            here = config == thread("a")
            assert ("holds it, but not behind these messages: " if here else "does not hold it") in str(lost.value)
        trimmed = await chat.ainvoke([answer, HumanMessage("still?")], thread("a"))
        assert receipt(trimmed)["source"] in ("live", "snapshot") and "line 99" in held(chat, "a")
        assert await chat.aforget_thread("a")
        with pytest.raises(StateLost):
            await chat.ainvoke([stub, HumanMessage("what?")], thread("a"))
    with model(tmp_path, budget=1024) as chat:
        with pytest.raises(StateLost):
            await chat.ainvoke([stub, HumanMessage("what?")], thread("a"))


class Boom(Exception):
    pass


async def stops(kind: str) -> Any:
    yield "some text " * 100
    if kind == "raises":
        raise Boom
    if kind == "bytes":
        yield b"caf\xe9 \xff"
    if kind == "ids":
        yield [1, 2, 3]
    if kind == "surrogate":
        yield "\ud800"
    if kind == "cut":
        yield "é".encode()[:1]
    if kind == "hangs":
        await asyncio.sleep(60)


@pytest.mark.parametrize(("kind", "error"), [
    ("raises", SourceError), ("bytes", InvalidText), ("ids", InputError), ("surrogate", InvalidText),
    ("cut", InvalidText), ("hangs", TimeoutError)])
@pytest.mark.thorough(but=2)
async def test_a_stream_that_ends_badly_leaves_the_thread_as_it_was(chat: LocretChatModel, kind: str, error: type):
    history: list[Any] = [HumanMessage("one")]
    history += [await chat.ainvoke(history, thread("a"))]
    before = held(chat, "a")
    with pytest.raises(error):
        async with asyncio.timeout(1 if kind == "hangs" else 20):
            await chat.aingest(stops(kind), thread_id="a")
    answer = await chat.ainvoke([*history, HumanMessage("two")], thread("a"))
    assert receipt(answer)["source"] == "snapshot"
    assert held(chat, "a") == rendered([*history, HumanMessage("two"), answer]) and held(chat, "a").startswith(before)


async def test_a_stream_without_text_is_none(chat: LocretChatModel):
    for nothing in ("", [], iter(["", ""])):
        with pytest.raises(EmptySource):
            await chat.aingest(nothing, thread_id="a")
    for label in ("", "a\nb", "x" * 81, 5):
        with pytest.raises(InputError, match="label is"):
            await chat.aingest("text", thread_id="a", label=label)
    assert (await chat.ainvoke("hello", thread("a"))).text == "You said: hello"


async def test_others_go_on_while_a_stream_waits_and_the_thread_itself_waits(script: Script, tmp_path: Path):
    gate = asyncio.Event()

    async def slow() -> Any:
        yield "first " * 50
        await gate.wait()
        yield "second"

    with model(tmp_path, max_live=1) as chat:
        absorbing = asyncio.create_task(chat.aingest(slow(), thread_id="a"))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(10):
            assert (await chat.ainvoke("hello", thread("b"))).text == "You said: hello"
        with pytest.raises(TimeoutError):
            await chat.ainvoke("hello", thread("a"), timeout=0.2)
        gate.set()
        stub = await absorbing
        answer = await chat.ainvoke([stub, HumanMessage("what?")], thread("a"))
        assert "first" in held(chat, "a") and "second" in held(chat, "a") and answer.text


async def test_a_stream_that_fails_after_waiting_often_costs_no_boundary(script: Script, tmp_path: Path):
    """With fewer slots than threads the stream's context is swapped out and in between its pieces."""
    with model(Store(tmp_path, keep_last=6), max_live=1) as chat:
        stub = await chat.aingest("an earlier stream", thread_id="a")
        history: list[Any] = [stub, HumanMessage("one")]
        history += [await chat.ainvoke(history, thread("a"))]

        async def source() -> Any:
            for number in range(12):
                yield f"piece {number} " * 20
                await chat.ainvoke("hello", thread("b"))
            raise Boom

        with pytest.raises(SourceError):
            await chat.aingest(source(), thread_id="a")
        answer = await chat.ainvoke([*history, HumanMessage("two")], thread("a"))
        assert receipt(answer)["source"] == "snapshot" and "piece" not in held(chat, "a")
        assert "an earlier stream" in held(chat, "a")


async def test_a_stream_that_fails_costs_an_unsaved_thread_nothing(script: Script, tmp_path: Path):
    with model(tmp_path, save="run") as chat:
        history: list[Any] = [HumanMessage("one")]
        history += [await chat.ainvoke(history, thread("a"))]
        with pytest.raises(SourceError):
            await chat.aingest(stops("raises"), thread_id="a")
        answer = await chat.ainvoke([history[-1], HumanMessage("two")], thread("a"))
        assert held(chat, "a") == rendered([*history, HumanMessage("two"), answer])


async def test_streams_cancelled_at_random_leave_no_thread_locked(chat: LocretChatModel):
    import random
    draw = random.Random(3)

    async def source() -> Any:
        for _ in range(6):
            yield "text " * 20
            await asyncio.sleep(0)

    async def one(number: int) -> None:
        task = asyncio.create_task(chat.aingest(source(), thread_id=str(number % 5)))
        await asyncio.sleep(draw.random() * 0.05)
        task.cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() * 0.01)
            task.cancel()
        await asyncio.wait([task])

    async with asyncio.timeout(100):
        for first in range(0, 60, 6):
            await asyncio.gather(*map(one, range(first, first + 6)))
        for number in range(5):
            assert (await chat.ainvoke("hello", thread(str(number)))).text == "You said: hello"


@pytest.mark.thorough
async def test_a_file_is_read_in_parts_of_bounded_size_whatever_its_lines(chat: LocretChatModel, tmp_path: Path):
    file, told = tmp_path / "one-line.json", []
    file.write_text("wörd " * 40_000)
    stub = await chat.aingest(file, thread_id="a", progress=told.append)
    assert told[-1] == 200_000 and len(told) >= 3
    assert hashlib.sha256(file.read_bytes()).hexdigest() in stub.text
    for wrong in (tmp_path / "missing", tmp_path):
        with pytest.raises(SourceError, match="cannot be opened"):
            await chat.aingest(wrong, thread_id="b")


@pytest.mark.parametrize("after", ["another line\n", None], ids=["in the middle", "at its end"])
async def test_a_stream_whose_runtime_is_closed_is_not_told_of_another_owner(script: Script, tmp_path: Path,
                                                                             after: str | None):
    own = runtime(tmp_path)
    await own.__aenter__()
    with model(None, on=own) as chat:
        async def source() -> Any:
            yield "a line\n"
            await own.aclose()
            if after is not None:
                yield after

        with pytest.raises(ContextClosed):
            await chat.aingest(source(), thread_id="a")


async def test_closing_while_a_stream_that_is_whole_lets_go_does_not_cancel_its_caller(script: Script, tmp_path: Path,
                                                                                       monkeypatch):
    rest, closing = Threads.rest, []

    async def slow(of: Threads, one: Any) -> None:
        if not closing:
            closing.append(threading.Thread(target=chat.close))
            closing[0].start()
            await asyncio.sleep(0.3)
        await rest(of, one)

    monkeypatch.setattr(Threads, "rest", slow)
    with model(tmp_path) as chat:
        stub = await chat.aingest("log " * 9, thread_id="a")
        closing[0].join()
        assert receipt(await chat.ainvoke([stub, HumanMessage("what?")], thread("a")))["source"] == "snapshot"


async def test_closing_while_a_stream_waits_leaves_it(chat: LocretChatModel):
    gate = asyncio.Event()

    async def slow() -> Any:
        yield "first " * 50
        await gate.wait()
        yield "second"

    absorbing = asyncio.create_task(chat.aingest(slow(), thread_id="a"))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(20):
        await chat.aclose()
    gate.set()
    with pytest.raises(ContextClosed):
        await absorbing
