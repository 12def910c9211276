"""Cancelled at every single await, once, and again in the middle of cleaning up: the thread is as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.utils import message_chunk_to_message

from langchain_locret.messages import read
from langchain_locret.replies import chunk_of
from locret_stream.context import tokenizing
from locret_stream.conversation.absorbing import Absorption
from locret_stream.conversation.render import ChatTemplate
from locret_stream.conversation.request import Request
from locret_stream.conversation.threads import Threads
from locret_stream.conversation.turns import turn
from tests.context.support import cut_at_every_await
from tests.langchain.support import rendered, runtime, scripted, tokenizer


async def answered(threads: Threads, messages: list[BaseMessage], name: str | None) -> list[BaseMessage]:
    """The messages and the answer to them."""
    chunks: list[AIMessageChunk] = []
    await turn(threads, Request(said=read(messages), thread=name), lambda part: chunks.append(chunk_of(part)))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return [*messages, message_chunk_to_message(whole)]


def text_of(threads: Threads, name: str | None) -> str:
    thread = threads.named(name) if name is not None else threads._nameless[-1]
    return tokenizer().decode(thread.ctx._session.state.history, skip_special_tokens=False)


def expect_at_rest(threads: Threads) -> None:
    """Nothing is locked, no place at the gate is lost, and every thread rests at a boundary or is closed."""
    assert threads.gate._value == threads.runtime.max_live
    for thread in (*threads._threads.values(), *threads._nameless):
        assert not thread.lock.locked() and thread.users == 0
        # A context without a thread may be closed at any time, for another turn.
        assert thread.session is None or (thread.boundary is None) == (not thread.open)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("case", ["new", "live", "edit", "nobody", "absorb"])
@pytest.mark.thorough(but=1)
async def test_a_turn_cancelled_at_any_await_leaves_its_thread_as_it_was(tmp_path: Path, case: str, twice: bool,
                                                                         monkeypatch):
    monkeypatch.setattr(tokenizing, "INLINE_CHARS", 100)  # more is tokenised on a thread
    with scripted() as script:
        script.say = lambda _: "ok"
        async with runtime(tmp_path, max_live=1) as own:
            threads = Threads(own, ChatTemplate(own.tokenizer, own.codec, own.frames), None)
            number = 0

            async def run(guard: Any) -> None:
                nonlocal number
                number += 1
                name = None if case == "nobody" else f"thread {number}"
                history: list[BaseMessage] = [SystemMessage("Brief."), HumanMessage(f"{number} " * 40)]
                if case != "new":
                    history = await answered(threads, history, name)
                if case == "edit":
                    await answered(threads, [*history, HumanMessage("left")], name)
                if case == "absorb":
                    absorption = Absorption(Request(said=[], thread=name), "log")

                    async def absorb() -> None:
                        try:
                            await absorption.begin(threads)
                            await absorption.push("line\n" * 40)
                            await absorption.finish()
                        finally:
                            await absorption.abort()

                    await guard(absorb())
                else:
                    said = history if case == "new" else [*history, HumanMessage("cut " * 100)]
                    await guard(turn(threads, Request(said=read(said), thread=name), lambda _: None))
                expect_at_rest(threads)
                for text in ("cut " * 100, "next"):
                    history = await answered(threads, [*history, HumanMessage(text)], name)
                    assert text_of(threads, name) == rendered(history)
                expect_at_rest(threads)

            places = await cut_at_every_await(run, twice=twice)
            assert places > (10 if case not in ("nobody", "absorb") else 5)
            await threads.close()
            print(f"\n{places} places")
