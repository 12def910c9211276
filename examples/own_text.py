"""Your own text, read as it comes: python examples/own_text.py FILE "A question?" ["Another?" ...]

Shows what a program that watches a stream needs: an async source, a reply as it is written, a fork, typed errors.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from locret_stream import LocretError, Runtime


async def lines(path: str) -> AsyncIterator[str]:
    """Stands for a socket, a queue or a log that grows: an async iterator is pulled only as fast as it is read."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line
            await asyncio.sleep(0)


async def main(path: str, questions: list[str]) -> None:
    async with Runtime.from_pretrained("bundled", max_live=2) as runtime:
        async with runtime.open("own text") as ctx:
            report = await ctx.feed(lines(path))
            print(f"{report.tokens:,} tokens read in {report.seconds:.1f} s, {report.tokens / report.seconds:,.0f} a second")
            async with ctx.fork() as twin:  # a conversation of its own; ctx goes on without it
                for question in questions:
                    print(f"\n{question}\n  ", end="")
                    async for token in twin.generate(question, max_new_tokens=48):
                        print(token.text, end="", flush=True)
                print(f"\n\nafter the talk: {twin.memory.tokens:,} tokens; before it: {ctx.memory.tokens:,}")


if len(sys.argv) < 3:
    sys.exit(__doc__)
try:
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
except LocretError as error:
    sys.exit(f"{type(error).__name__}: {error}")
