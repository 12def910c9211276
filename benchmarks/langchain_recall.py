"""Facts told in turn 1 and asked in turn 200, across a process restart: `python benchmarks/langchain_recall.py`.

A LocretChatModel thread over the bundled model: the first message tells 12 facts, 198 turns of other talk follow (the
standard library's held-out sources, a few hundred tokens each), a new process goes on after the first 100, and turn 200
asks one of the facts; each of them in turn, from the same 199 turns. An answer counts if it is exactly the value. Every
call is given the whole history, as LangChain does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
from itertools import islice
from pathlib import Path

from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict, messages_to_dict
from record import record

from langchain_locret import LocretChatModel
from locret_stream.evaluation.facts import make_facts
from locret_stream.evaluation.haystack import held_out_modules, stdlib_lines

HALF, LINES = 100, 30  # turns of the first process; lines of source that a turn tells
THREAD = {"configurable": {"thread_id": "recall"}}


def talk(model: LocretChatModel, history: list, turns: int, seed: int, first: int) -> tuple[int, int]:
    """Other talk for so many turns; the most and the sum of the tokens that calls fed."""
    lines = islice(stdlib_lines(seed, held_out_modules()), first * LINES, None)
    fed = []
    for _ in range(turns):
        history.append(HumanMessage("".join(islice(lines, LINES))))
        history.append(model.invoke(history, THREAD))
        fed.append(history[-1].response_metadata["locret"]["fed"])
    return max(fed), sum(fed)


def first_half(folder: str, seed: int) -> None:
    """Turns 1 to 100, in a process of its own."""
    facts = make_facts(random.Random(seed), 12, held_out=True)
    model = LocretChatModel(model="bundled", store=f"{folder}/store", max_tokens=8)
    history: list = [HumanMessage("\n".join(fact.sentence for fact in facts))]
    history.append(model.invoke(history, THREAD))
    most, fed = talk(model, history, HALF - 1, seed, 0)
    model.close()
    Path(folder, "half.json").write_text(json.dumps({"history": messages_to_dict(history), "most": most, "fed": fed}))


def one_seed(seed: int) -> dict:
    facts = make_facts(random.Random(seed), 12, held_out=True)
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=first_half, args=(folder, seed))
        process.start()
        process.join()
        half = json.loads(Path(folder, "half.json").read_text())
        history = messages_from_dict(half["history"])
        model = LocretChatModel(model="bundled", store=f"{folder}/store", max_tokens=8)
        most, fed = talk(model, history, 199 - HALF, seed, HALF)
        sources = [message.response_metadata["locret"]["source"] for message in history
                   if isinstance(message, AIMessage)]
        memory = model.thread_memory("recall")
        answers = [(fact.question, fact.answer, model.invoke([*history, HumanMessage(fact.question)], THREAD))
                   for fact in facts]
        budgets, chunk = model.shared.runtime.engine.budgets, model.shared.runtime.engine.chunk_size
        model.close()
    return {"seed": seed, "turns": len(sources) + 1, "tokens": memory.tokens,
            "fed": half["fed"] + fed, "most_fed_in_a_turn": max(half["most"], most),
            "units_mean_peak": statistics.mean(memory.peak), "budget_and_chunk": statistics.mean(budgets) + chunk,
            "sources": {source: sources.count(source) for source in sorted(set(sources))},
            "recall": sum(answer.text == value for _, value, answer in answers) / len(answers),
            "wrong": [(question, value, answer.text) for question, value, answer in answers if answer.text != value]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many conversations")
    parser.add_argument("--keep", metavar="NAME", help="also write benchmarks/results/NAME.json")
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        rows.append(one_seed(seed))
        print({name: value for name, value in rows[-1].items() if name != "wrong"}, file=sys.stderr, flush=True)
    record(options.keep or "langchain_recall", {
        "recall_mean": statistics.mean(row["recall"] for row in rows), "seeds": rows}, keep=bool(options.keep))


if __name__ == "__main__":
    main()
