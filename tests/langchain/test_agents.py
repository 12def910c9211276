"""A graph as in applications: guardrail, title, router, a supervisor of two agents that summarise, on one thread."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_locret import LocretChatModel
from langchain_locret.middleware import LocretMiddleware
from locret_stream.evaluation.facts import make_facts
from locret_stream.evaluation.haystack import held_out_modules, stdlib_lines
from tests.langchain.support import receipt, thread

T = thread("long")
SUMMARISE_AT, KEEP = 12, 4


class Sources(BaseCallbackHandler):
    """The `source` in the receipt of every call of the model, from any node."""

    def __init__(self) -> None:
        self.sources: Counter[str] = Counter()

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.sources[receipt(response.generations[0][0].message)["source"]] += 1


def lookup(key: str) -> str:
    """Look up a thing."""
    return f"nothing is known of {key}"


def graph(model: LocretChatModel) -> Any:
    """In every turn four calls: the guardrail, the title, the router, and the agent that answers."""
    def guardrail(state: MessagesState) -> None:
        model.invoke([SystemMessage("Is this harmful? Say yes or no."), state["messages"][-1]])

    def title(state: MessagesState) -> None:
        model.invoke([HumanMessage(f"A title for: {state['messages'][-1].text[:200]}")])

    def router(state: MessagesState) -> None:
        model.invoke([SystemMessage("Which agent answers, one or two?"), *state["messages"][-3:]])

    def agent(name: str) -> Any:
        return create_agent(model, tools=[lookup], name=name, system_prompt=f"You are agent {name}.", middleware=[
            SummarizationMiddleware(model, trigger=("messages", SUMMARISE_AT), keep=("messages", KEEP)),
            LocretMiddleware(model)])

    def supervisor(state: MessagesState) -> str:
        return "one" if sum(message.type == "human" for message in state["messages"]) % 3 else "two"

    built = StateGraph(MessagesState)
    for name, node in (("guardrail", guardrail), ("title", title), ("router", router), ("one", agent("one")),
                       ("two", agent("two"))):
        built.add_node(name, node)
    for before, after in ((START, "guardrail"), ("guardrail", "title"), ("title", "router")):
        built.add_edge(before, after)
    built.add_conditional_edges("router", supervisor, ["one", "two"])
    return built.compile(checkpointer=InMemorySaver())


def converse(folder: Path, turns: int) -> tuple[float, list[BaseMessage], dict[str, Any]]:
    """A stream states facts at the start, questions ask for them at the end: the number of right answers; the answers
    of all turns; figures."""
    facts = make_facts(random.Random(7), 6)
    model = LocretChatModel(model="bundled", store=str(folder), max_tokens=8)
    stub = model.ingest("\n".join(fact.sentence for fact in facts) + "\n", thread_id="long", label="facts",
                        history=[])
    app, answers, every = graph(model), [], Sources()
    config = {**T, "callbacks": [every]}
    text = islice(stdlib_lines(0, held_out_modules()), None)
    said: list[BaseMessage] = [stub]
    for _ in range(turns):
        said.append(HumanMessage("".join(islice(text, 10))))
        state = app.invoke({"messages": said}, config)
        answers.append(state["messages"][-1])
        said = []
    right = 0
    for fact in facts:
        state = app.invoke({"messages": [HumanMessage(fact.question)]}, config)
        answers.append(state["messages"][-1])
        right += state["messages"][-1].text == fact.answer
    rows = model.shared.runtime.store.info("langchain/long")
    figures = {"tokens": model.thread_memory("long").tokens, "rows": len(rows), "messages": len(state["messages"]),
               "first": rows[0].generation, "sources": every.sources}
    model.close()
    return right / len(facts), answers, figures


def expect_kept(answers: list[BaseMessage], figures: dict[str, Any]) -> None:
    assert all(isinstance(answer, AIMessage) for answer in answers)
    sources = {receipt(answer)["source"] for answer in answers}
    assert sources <= {"live", "snapshot"}, sources
    assert figures["sources"].keys() <= {"live", "snapshot", "new"}, figures["sources"]
    assert figures["sources"].total() > 4 * len(answers)
    assert figures["first"] == 1, "the stream's own snapshot"
    assert figures["rows"] <= 5 * 32 + 1


@pytest.mark.filterwarnings("ignore::langchain_locret.LateWarning")
@pytest.mark.thorough
def test_a_graph_of_many_nodes_answers_from_its_stream(tmp_path: Path):
    share, answers, figures = converse(tmp_path, turns=9)
    expect_kept(answers, figures)
    assert share >= 5 / 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::langchain_locret.LateWarning")
def test_a_graph_of_many_nodes_answers_from_its_stream_after_200_turns(tmp_path: Path):
    share, answers, figures = converse(tmp_path, turns=200)
    print(f"\n{share:.2f} of the facts right; {figures}")
    expect_kept(answers, figures)
    assert share >= 5 / 6
