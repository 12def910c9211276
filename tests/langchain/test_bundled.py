"""The bundled model behind LangChain recalls each thread's own facts, across restarts and over many turns."""

from __future__ import annotations

import asyncio
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langchain_locret import LocretChatModel
from locret_stream.evaluation.facts import FORMS, make_facts
from locret_stream.evaluation.haystack import held_out_modules, stdlib_lines
from tests.langchain.support import receipt, thread


def talk(model: LocretChatModel, history: list[Any], turns: range, lines: int = 30) -> None:
    """That many turns about something else."""
    text = islice(stdlib_lines(0, held_out_modules()), turns.start * lines, None)
    for _ in turns:
        history.append(HumanMessage("".join(islice(text, lines))))
        history.append(model.invoke(history, thread("long")))


def recalled(folder: Path, turns: int, restart: int) -> tuple[float, list[Any], Any]:
    """How many facts of turn 1 are answered right in turn `turns`, with another model object from turn `restart` on."""
    facts, settings = make_facts(random.Random(7), 6), {"model": "bundled", "store": str(folder), "max_tokens": 8}
    model = LocretChatModel(**settings)
    history: list[Any] = [HumanMessage("\n".join(fact.sentence for fact in facts))]
    history.append(model.invoke(history, thread("long")))
    talk(model, history, range(restart - 2))
    model.close()
    model = LocretChatModel(**settings)
    talk(model, history, range(restart - 2, turns - 2))
    memory = model.thread_memory("long")
    right = [model.invoke([*history, HumanMessage(fact.question)], thread("long")).text == fact.answer
             for fact in facts]
    model.close()
    return sum(right) / len(right), history, memory


def expect_bounded(history: list[Any], memory: Any, restart: int) -> None:
    answers = [message for message in history if isinstance(message, AIMessage)]
    assert [receipt(answer)["source"] for answer in answers] == [
        "new", *["live"] * (restart - 2), "snapshot", *["live"] * (len(answers) - restart)]
    assert sum(receipt(answer)["fed"] for answer in answers) <= memory.tokens
    assert max(sum(memory.peak), sum(memory.units)) <= 1024 * len(memory.peak)


def test_a_fact_of_the_first_turn_is_known_after_a_restart_and_much_other_talk(tmp_path: Path):
    share, history, memory = recalled(tmp_path, turns=24, restart=12)
    assert share >= 5 / 6 and memory.tokens > 8000
    expect_bounded(history, memory, 12)


@pytest.mark.slow
def test_a_fact_of_the_first_turn_is_known_in_turn_200(tmp_path: Path):
    share, history, memory = recalled(tmp_path, turns=200, restart=100)
    units = sum(memory.peak) / len(memory.peak)
    print(f"\n{share:.2f} of the facts after {memory.tokens:,} tokens, {units:,.0f} units")
    assert share >= 5 / 6 and memory.tokens >= 50_000
    expect_bounded(history, memory, 100)


@pytest.mark.slow
async def test_thirty_two_threads_recall_their_own_secret_and_nobody_elses(tmp_path: Path):
    facts = make_facts(random.Random(11), 32, forms=FORMS[:2])
    model = LocretChatModel(model="bundled", store=str(tmp_path), max_live=8, max_tokens=8)

    async def converse(number: int) -> tuple[str, str]:
        config, lines = thread(number), islice(stdlib_lines(number, held_out_modules()), 24)
        history: list[Any] = [SystemMessage(f"Thread {number}."), HumanMessage(facts[number].sentence)]
        history.append(await model.ainvoke(history, config))
        history.append(HumanMessage("".join(lines)))
        history.append(await model.ainvoke(history, config))
        other = facts[(number + 1) % 32]
        said = await model.ainvoke([*history, HumanMessage(other.question)], config)
        own = await model.ainvoke([*history, HumanMessage(facts[number].question)], config)
        return own.text, said.text

    async with asyncio.timeout(240):
        answers = await asyncio.gather(*map(converse, range(32)))
    await model.aclose()
    right = sum(own == fact.answer for (own, _), fact in zip(answers, facts, strict=True))
    leaked = [(said, fact) for (_, said), fact in zip(answers, facts[1:] + facts[:1], strict=True)
              if fact.answer in said]
    print(f"\n{right} of 32 recalled their own, {len(leaked)} another's")
    assert right >= 30 and not leaked
