"""Flat cost and flat memory over a long stream: `python benchmarks/stream.py --tokens 2000000`.

Reports tokens per second over the first and last tenth (after a warm-up of 20,000 tokens), resident memory of the
process at 100,000 tokens and at the end, and the bytes of the pool beside its formula.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from record import record
from timing import resident_bytes

from locret_stream import Runtime
from locret_stream.evaluation.haystack import stdlib_lines

WARM_UP, RESIDENT_FROM = 20_000, 100_000


async def run(options: argparse.Namespace) -> dict:
    async with Runtime.from_pretrained(options.model, policy=options.policy, max_live=1) as runtime:
        async with runtime.open("stream") as ctx:
            marks: list[tuple[int, float, int]] = []  # tokens, seconds, resident bytes
            lines = stdlib_lines(0)
            while ctx.memory.tokens < options.tokens:
                block = "".join(next(lines) for _ in range(200))
                started = time.perf_counter()
                await ctx.feed(block)
                spent = time.perf_counter() - started
                marks.append((ctx.memory.tokens, (marks[-1][1] if marks else 0.0) + spent, resident_bytes()))
                if len(marks) % 100 == 0:
                    print(f"{marks[-1][0]:,} tokens, {marks[-1][2] / 2**20:.1f} MiB resident", file=sys.stderr)
            memory = ctx.memory
        pool = runtime.engine.pool
        total = marks[-1][0]

        def speed(start: float, stop: float) -> float:
            inside = [m for m in marks if start <= m[0] <= stop]
            return (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1])

        first = speed(WARM_UP, WARM_UP + total / 10)
        last = speed(total * 0.9, total)
        resident = next((m[2] for m in marks if m[0] >= RESIDENT_FROM), marks[0][2])
        return {"tokens": total, "tok_per_s_first_tenth": first, "tok_per_s_last_tenth": last, "ratio": last / first,
                "resident_growth_mib": (max(m[2] for m in marks if m[0] >= RESIDENT_FROM or m is marks[-1]) - resident)
                / 2**20,
                "pool_bytes": pool.bytes_resident, "formula_bytes": pool.formula_bytes(),
                "bytes_full_cache": memory.bytes_full_cache, "peak_units": memory.peak, "capacity": memory.capacity}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--policy", default="locret")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    if options.tokens < 2 * WARM_UP:
        parser.error(f"--tokens is {options.tokens}; expected at least {2 * WARM_UP}, as {WARM_UP} warm up")
    record(options.keep or "stream", asyncio.run(run(options)), keep=options.keep is not None)


if __name__ == "__main__":
    main()
