"""Reads numbered ids into a stored session, a few at a time, and says after each save how many: `python -m
tests.context.killed KIND FOLDER`. Whoever started it kills it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

AT_ONCE = 5


def ids(count: int, start: int = 0) -> list[int]:
    """Ids start .. start+count-1 of the stream."""
    return [(place * 7919 + 11) % 300 + 20 for place in range(start, start + count)]


async def main(name: str, folder: str) -> None:
    from tests.context.support import tiny
    from tests.context.test_kinds import options

    async with (tiny(**options(name, store=Path(folder))) as runtime, runtime.open("talk", raw=True) as ctx):
        print(ctx.memory.tokens, flush=True)
        while True:
            await ctx.feed(ids(AT_ONCE, ctx.memory.tokens))
            await ctx.snapshot()
            print(ctx.memory.tokens, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
