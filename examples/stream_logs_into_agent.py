"""A growing log, read into a running conversation: python examples/stream_logs_into_agent.py [FOLDER]

The log is read slice by slice, each as one message, for which a short placeholder stays in the history. After each
slice the model is asked about a fact of that slice and about one from the beginning of the log.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from langchain_core.messages import BaseMessage, HumanMessage

from langchain_locret import LocretChatModel

THREAD = "operations"
FACTS = {"falcon": "48213", "heron": "7304", "otter": "3390", "badger": "91764", "lantern": "5528", "copper": "20617"}
LINES = 90  # of noise around each fact; about 40 tokens a line


def write(log: str) -> None:
    """Stands for a service: its log grows by one line every few milliseconds, most of them noise."""
    rng = random.Random(0)
    with open(log, "a") as file:
        for name, value in FACTS.items():
            for line in range(LINES):
                if line == LINES // 2:
                    file.write(f"Note that the port number of {name} is {value}.\n")
                worker, items, ms = rng.randrange(1, 40), rng.randrange(99999), rng.randrange(999)
                file.write(f"2024-05-17 04:{line % 60:02}:11 INFO worker-{worker} flushed {items} items in {ms} ms\n")
                file.flush()
                time.sleep(0.002)


async def appended(file: BinaryIO, lines: int) -> AsyncIterator[bytes]:
    """The next so many lines of a file, as they are appended."""
    while lines:
        if line := file.readline():
            lines -= line.endswith(b"\n")
            yield line
        else:
            await asyncio.sleep(0.01)


async def main(folder: Path, log: BinaryIO) -> None:
    model, config = LocretChatModel(store=folder, max_tokens=16), {"configurable": {"thread_id": THREAD}}
    await model.aforget_thread(THREAD)  # which an earlier run may have left, without its messages
    writer, history = asyncio.create_task(asyncio.to_thread(write, log.name)), list[BaseMessage]()
    for number, name in enumerate(FACTS, 1):
        new = appended(log, LINES + 1)
        history.append(await model.aingest(new, thread_id=THREAD, label=f"slice {number}", history=history))
        for asked in dict.fromkeys([name, "falcon"]):
            history.append(HumanMessage(f"What is the port number of {asked}?"))
            history.append(reply := await model.ainvoke(history, config))
            receipt = reply.response_metadata["locret"]
            print(f"{asked}: {reply.text} ({receipt['source']}, {receipt['fed']} tokens fed)")
        memory = model.thread_memory(THREAD)
        kept, full = memory.bytes_resident / 2**20, memory.bytes_full_cache / 2**20
        print(f"  slice {number}: {memory.tokens:,} tokens read, {max(memory.units):,} units kept in the largest "
              f"layer, {kept:.1f} MiB; a full cache: {full:.1f} MiB")
    await asyncio.gather(writer, model.aclose())
    characters = sum(len(message.text) for message in history)
    print(f"The history: {len(history)} messages, {characters:,} characters. It begins:")
    print(f"  {history[0].text}")


with tempfile.TemporaryDirectory() as temporary:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "service.log").open("w+b") as growing:
        asyncio.run(main(place, growing))
