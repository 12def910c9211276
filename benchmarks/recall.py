"""Recall of planted facts after a long stream, over many seeds: `python benchmarks/recall.py --seeds 20`.

Every seed is a stream of its own: the standard library's held-out sources, 12 facts and 110 decoys, all entities held
out of training. An answer counts if it is exactly the value. Seeds are 0, 1, 2, ...: none is chosen.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from record import record

from locret_stream import Runtime
from locret_stream.evaluation import tasks

FORMS = {"all": tasks.FORMS + tasks.HELD_OUT_FORMS, "trained": tasks.FORMS, "held-out": tasks.HELD_OUT_FORMS}


async def one_stream(runtime: Runtime, seed: int, tokens: int, forms: str, decoys: int) -> dict:
    """Feed stream number `seed` and ask its facts."""
    measure = tasks.line_measure(runtime.count_tokens)
    planted = tasks.planted_stream(seed, tokens, decoys=decoys, forms=FORMS[forms], measure=measure)
    started = time.perf_counter()
    async with runtime.open(f"seed {seed}") as ctx:
        report = await ctx.feed(iter(planted))
        fed_s = time.perf_counter() - started
        answers = [(fact.question, fact.answer, await ctx.ask(fact.question, max_new_tokens=16))
                   for fact in planted.facts]
    right = sum(answer.strip() == expected for _, expected, answer in answers)
    return {"seed": seed, "recall": right / len(answers), "tokens": report.tokens, "tok_per_s": report.tokens / fed_s,
            "wrong": [row for row in answers if row[2].strip() != row[1]]}


async def run(options: argparse.Namespace) -> dict:
    async with Runtime.from_pretrained(options.model, policy=options.policy, max_live=1) as runtime:
        rows = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rows.append(await one_stream(runtime, seed, options.tokens, options.forms, options.decoys))
            mean = statistics.mean(row["recall"] for row in rows)
            print(f"seed {seed}: recall {rows[-1]['recall']:.3f}, mean {mean:.3f}, {rows[-1]['tok_per_s']:,.0f} tok/s",
                  file=sys.stderr, flush=True)
        budgets = runtime.engine.budgets
        return {"policy": options.policy, "forms": options.forms, "tokens": options.tokens, "decoys": options.decoys,
                "budgets": budgets, "mean_units_with_chunk": statistics.mean(budgets) + runtime.engine.chunk_size,
                "recall_mean": statistics.mean(r["recall"] for r in rows),
                "recall_min": min(r["recall"] for r in rows), "seeds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many streams")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--forms", choices=FORMS, default="all", help="which sentence forms the facts have")
    parser.add_argument("--decoys", type=int, default=110)
    parser.add_argument("--policy", default="locret")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    record(options.keep or "recall", asyncio.run(run(options)), keep=options.keep is not None)


if __name__ == "__main__":
    main()
