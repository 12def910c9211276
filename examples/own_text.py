"""Your own text, read as it arrives: python examples/own_text.py FILE "A question?" ["Another?" ...]

Shows what a program that watches a stream needs: an async source, a reply as it is written, a fork, typed errors.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TextIO

from locret_stream import LocretError, Runtime


async def lines(file: TextIO) -> AsyncIterator[str]:
    """Stands for a socket, a queue or a log that grows; the runtime pulls it only as fast as it can read."""
    for line in file:
        yield line
        await asyncio.sleep(0)


async def main(file: TextIO, questions: list[str]) -> None:
    async with Runtime.from_pretrained("bundled", max_live=2) as runtime:
        async with runtime.open("own text") as ctx:
            report = await ctx.feed(lines(file))
            print(f"{report.tokens:,} tokens read in {report.seconds:.1f} s")
            async with ctx.fork() as fork:  # a copy that talks, while ctx stays as it is
                for question in questions:
                    print(f"\n{question}\n  ", end="")
                    async for token in fork.generate(question, max_new_tokens=48):
                        print(token.text, end="", flush=True)
                print(f"\n\nafter the talk: {fork.memory.tokens:,} tokens; before it: {ctx.memory.tokens:,}")


if len(sys.argv) < 3:
    sys.exit(__doc__)
try:
    with open(sys.argv[1], encoding="utf-8") as text:
        asyncio.run(main(text, sys.argv[2:]))
except LocretError as error:  # every message says what was found, what was expected and what to do
    sys.exit(f"{type(error).__name__}: {error}")
