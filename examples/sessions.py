"""A memory that outlives the process; run it at least twice: python examples/sessions.py [FOLDER]"""

from __future__ import annotations

import asyncio
import sys

from locret_stream import Runtime


async def main(folder: str) -> None:
    async with Runtime.from_pretrained("bundled", store=folder) as runtime:
        async with runtime.open("diary") as ctx:
            if not ctx.resumed:
                print("A new session. It reads two facts, and is saved when the block ends.")
                await ctx.feed("The door code of falcon is 48213.\nThe pass key of heron is 7755.\n")
                return
            print(f"The session goes on, with {ctx.memory.tokens} tokens read so far.")
            print("The door code of falcon:", await ctx.ask("What is the door code of falcon?"))

            before = await ctx.snapshot()
            await ctx.feed("The locker number of otter is 3390.\n")
            print("The locker number of otter:", await ctx.ask("What is the locker number of otter?"))
            await ctx.rewind(before.generation)
            print(f"Rewound: {ctx.memory.tokens} tokens.")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "diary-store"))
