"""What a turn costs by the length of the history that comes with it: `python benchmarks/langchain_growth.py`.

LangChain gives a chat model the whole history in every call. Here LocretChatModel (bundled model, one thread of its own
for each length, kept in a store) is given histories of 10, 100, 1,000 and 5,000 short messages, and then, in turns with
the other lengths, the same history with one more question each time. Every call gets new message objects, as from a
checkpointer. What a call feeds and decodes is the same at every length: a question and one token. What grows is what is
done with the history: LangChain looks at every message, and the messages are compared with those given before by one
digest, so that only new ones are read; and, up to some 100 messages, the memory, which is full from then on. With
`OMP_NUM_THREADS=1` no thread of torch's waits for another one, which counts as CPU time.

  cpu_ms, s    CPU time of all threads, and the wall clock's seconds, of a call: medians of `--repeats`
  fed          tokens that a call read, by its receipt
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, messages_from_dict, messages_to_dict
from record import record

from langchain_locret import LocretChatModel

LENGTHS = [10, 100, 1_000, 5_000]


def history(count: int) -> list[BaseMessage]:
    """So many messages: statements, each with a short answer, and a question at the end of an odd number."""
    return [AIMessage("Noted.") if number % 2 else HumanMessage(f"The port of gateway {number} is {40_000 + number}.")
            for number in range(count)]


def afresh(messages: list[BaseMessage]) -> list[BaseMessage]:
    return messages_from_dict(messages_to_dict(messages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="MESSAGES")
    parser.add_argument("--repeats", type=int, default=10, metavar="N")
    parser.add_argument("--keep", metavar="NAME", help="also write benchmarks/results/NAME.json")
    options = parser.parse_args()
    rows: dict[int, dict[str, list[float]]] = {length: {"cpu_ms": [], "s": [], "fed": []} for length in options.lengths}
    with tempfile.TemporaryDirectory(prefix="locret-growth-") as folder, LocretChatModel(
            model=options.model, store=str(Path(folder) / "store"), max_live=len(options.lengths) + 1,
            max_tokens=1) as model:
        said = {length: history(length // 2 * 2) for length in options.lengths}
        for round_ in range(-1, options.repeats):  # the first one reads all
            for length, messages in said.items():
                messages.append(HumanMessage(f"What is the port of gateway {round_ + 2}?"))
                given = afresh(messages)
                began, cpu = time.perf_counter(), time.process_time()
                reply = model.invoke(given, thread_id=f"of {length}")
                spent: dict[str, Any] = {"cpu_ms": 1e3 * (time.process_time() - cpu), "s": time.perf_counter() - began,
                                         "fed": reply.response_metadata["locret"]["fed"]}
                messages.append(reply)
                if round_ >= 0:
                    for name, value in spent.items():
                        rows[length][name].append(value)
                print(f"{round_ + 1}: {length} messages, {spent}", file=sys.stderr, flush=True)
    result = {"model": options.model, "repeats": options.repeats, "by_length": {
        length: {name: statistics.median(values) for name, values in row.items()} for length, row in rows.items()}}
    record(options.keep or "langchain_growth", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
