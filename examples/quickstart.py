"""Facts in a long stream, a memory of fixed size, and questions: python examples/quickstart.py [TOKENS]"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from locret_stream import Runtime
from locret_stream.evaluation.haystack import planted_stream

TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000


async def main() -> None:
    async with (
        Runtime.from_pretrained("bundled", budget=768, chunk_size=256) as runtime,
        runtime.open("quickstart") as ctx,
    ):
        stream = planted_stream(seed=0, size=TOKENS, facts=5, measure=runtime.count_tokens)

        def pieces() -> Iterator[str]:  # or any other iterator of text, bytes or token ids, async too
            yield from stream

        async for token in ctx.feed(pieces()):
            if token.position % 10_000 == 9_999:
                print(f"{token.position + 1:,} tokens read; {max(ctx.memory.units)} units kept in the largest layer")

        kept, full = ctx.memory.bytes_resident, ctx.memory.bytes_full_cache
        print(f"kept: {kept / 2**20:.1f} MiB; a full cache would need {full / 2**20:.1f} MiB\n")
        for fact in stream.facts:
            answer = await ctx.ask(fact.question, max_new_tokens=16)  # on a copy, which leaves the memory as it was
            print(f"{fact.question}\n  {answer.strip()}   (truth: {fact.answer})")


asyncio.run(main())
