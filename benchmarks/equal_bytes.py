"""What bits buy: facts that are remembered in the same bytes, by exact units and by units in few bits.

    python benchmarks/equal_bytes.py --keep equal_bytes

The model of the marker tasks with its heads (`research/models/recall`), in bf16: 96 facts in a stream of 16,384 tokens,
64 of them asked in each of four streams. Exact units are counted as a GPU holds them: without rotated keys beside them.
Beside them as many units in 8 and in 4 bits as take the same bytes: K, V, score and position of every unit, the first
one exact as well; the means of keys come with the heads. The room for a chunk is the same for all, and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from pathlib import Path

from record import record

from locret_stream import Runtime
from locret_stream.config import Budget, ModelShape, check_store_bits, unit_bytes
from locret_stream.evaluation import markers, metrics
from locret_stream.evaluation.haystack import stdlib_lines

MODEL = Path(__file__).resolve().parents[1] / "research" / "models" / "recall"
TOKENS, FACTS, ASKED, CHUNK, SINKS = 16_384, 96, 64, 128, 1


async def remembered(bits: int, exact: int, streams: int) -> dict[str, object]:
    """What is answered from the bytes of `exact` exact units per KV head, on the mean over the layers."""
    async with made(bits, exact) as runtime:
        units = fitting(bits, exact, runtime.engine.shape)
    rows: list[list[float]] = []
    async with made(bits, units) as runtime:
        for seed in range(streams):
            case = markers.recall(random.Random(f"equal bytes {seed}"), FACTS, asked=ASKED)
            async with runtime.open(f"stream {seed}", raw=True) as ctx:
                await ctx.feed(markers.planted(case, stdlib_lines(seed), TOKENS, runtime.count_tokens))
                found = [await ctx.ask(question.ask, max_new_tokens=6, stop="\n") for question in case.questions]
            rows.append([float(text.strip() == question.answer)
                         for text, question in zip(found, case.questions, strict=True)])
        budgets = list(runtime.engine.budgets)
    score = statistics.mean(value for row in rows for value in row)
    print(f"{exact} exact units' bytes, {bits} bits: {units} units, {score:.3f}", file=sys.stderr, flush=True)
    return {"units": units, "budgets": budgets, "score": score, "interval": list(metrics.interval(rows))}


def made(bits: int, units: int) -> Runtime:
    return Runtime.from_pretrained(MODEL, dtype="bfloat16", device="cpu", heads=MODEL / "heads", chunk_size=CHUNK,
                                   budget=Budget(units=units, sinks=SINKS, stabilizers=0), max_live=1, store_bits=bits)


def fitting(bits: int, exact: int, shape: ModelShape) -> int:
    """Units of so many bits in the bytes of `exact` exact ones."""
    unit = shape.one_unit("equal bytes")
    room = exact * unit_bytes(unit, shape.item_bytes, key_copies=1).kept
    of = unit_bytes(unit, shape.item_bytes, key_copies=1, store_bits=check_store_bits(bits), own_means=False)
    return (room - of.of(0, 0, SINKS)) // of.kept


async def run(options: argparse.Namespace) -> dict[str, object]:
    rows = {str(exact): {str(bits): await remembered(bits, exact, options.streams) for bits in (16, 8, 4)}
            for exact in options.units}
    return {"tokens": TOKENS, "facts": FACTS, "questions": ASKED * options.streams, "in the bytes of exact units": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[20, 25], help="exact ones, per KV head")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    record(options.keep or "equal_bytes", asyncio.run(run(options)), keep=options.keep is not None)


if __name__ == "__main__":
    main()
