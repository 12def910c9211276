"""Recall of planted facts after a long stream, over many seeds: `python benchmarks/recall.py --seeds 20`.

Every seed is a stream of its own: the standard library's held-out sources, 12 facts and 110 decoys, all entities held
out of training. An answer counts if it is exactly the value. Seeds are 0, 1, 2, ...: none is chosen. The growth of the
process is counted from token 100,000 on, before the questions.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from record import record
from timing import resident_bytes

from locret_stream import Runtime
from locret_stream.evaluation import facts, haystack

RESIDENT_FROM, EVERY = 100_000, 1_000_000  # tokens
FORMS = {"all": facts.FORMS + facts.HELD_OUT_FORMS, "trained": facts.FORMS, "held-out": facts.HELD_OUT_FORMS}


async def one_stream(runtime: Runtime, seed: int, options: argparse.Namespace) -> dict:
    """Feed stream number `seed` and ask its facts."""
    measure = haystack.line_measure(runtime.count_tokens)
    planted = haystack.planted_stream(seed, options.tokens, facts=options.facts, decoys=options.decoys,
                                      forms=FORMS[options.forms], measure=measure)
    answers, seconds = [], []
    async with runtime.open(f"seed {seed}") as ctx:
        started, resident = time.perf_counter(), list[int]()

        def watched() -> Iterator[str]:
            for piece in planted:
                yield piece
                if ctx.memory.tokens >= RESIDENT_FROM + len(resident) * EVERY:
                    resident.append(resident_bytes())
                    print(f"seed {seed}: {ctx.memory.tokens:,} tokens in {time.perf_counter() - started:,.0f} s, "
                          f"{resident[-1] / 2**20:,.0f} MiB resident", file=sys.stderr, flush=True)

        await ctx.feed(watched())
        fed_s = time.perf_counter() - started
        grown = max(resident_bytes(), *resident) - resident[0] if resident else None
        for fact in planted.facts:
            started = time.perf_counter()
            answers.append((fact.question, fact.answer, await ctx.ask(fact.question, max_new_tokens=16)))
            seconds.append(time.perf_counter() - started)
        memory = ctx.memory
    right = sum(answer.strip() == expected for _, expected, answer in answers)
    return {"seed": seed, "recall": right / len(answers), "tokens": memory.tokens, "tok_per_s": memory.tokens / fed_s,
            "question_s": statistics.median(seconds), "bytes_recall": memory.bytes_recall, "grown_bytes": grown,
            "wrong": [row for row in answers if row[2].strip() != row[1]]}


def one_seed(seed: int, options: argparse.Namespace) -> dict:
    """One stream with a runtime of its own, on this process's share of the cores."""
    torch.set_num_threads(max(1, torch.get_num_threads() // options.jobs))

    async def whole() -> dict:
        async with Runtime.from_pretrained(options.model, policy=options.policy, max_live=1, budget=options.budget,
                                           recall=options.recall, store_bits=options.store_bits) as runtime:
            row = await one_stream(runtime, seed, options)
            return {**row, "budgets": runtime.engine.budgets, "chunk_size": runtime.engine.chunk_size,
                    "slot_bytes": runtime.memory.slot_bytes}

    return asyncio.run(whole())


def run(options: argparse.Namespace) -> dict:
    rows = []
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    # One process a seed: what a seed gives depends on nothing that ran before it.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for done in as_completed([processes.submit(one_seed, seed, options) for seed in seeds]):
            rows.append(done.result())
            mean = statistics.mean(row["recall"] for row in rows)
            print(f"seed {rows[-1]['seed']}: recall {rows[-1]['recall']:.3f}, mean of {len(rows)} {mean:.3f}, "
                  f"{rows[-1]['tok_per_s']:,.0f} tok/s", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row["seed"])
    alike = {name: rows[0][name] for name in ("budgets", "chunk_size", "slot_bytes")}
    rows = [{name: value for name, value in row.items() if name not in alike} for row in rows]
    return {"policy": options.policy, "forms": options.forms, "tokens": options.tokens, "facts": options.facts,
            "decoys": options.decoys,
            "recall": options.recall, "store_bits": options.store_bits, "slot_bytes": alike["slot_bytes"],
            "budgets": alike["budgets"],
            "mean_units_with_chunk": statistics.mean(alike["budgets"]) + alike["chunk_size"], "jobs": options.jobs,
            "recall_mean": statistics.mean(r["recall"] for r in rows),
            "recall_min": min(r["recall"] for r in rows), "seeds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many streams")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--forms", choices=FORMS, default="all", help="which sentence forms the facts have")
    parser.add_argument("--facts", type=int, default=12, help="of each stream; all are asked")
    parser.add_argument("--decoys", type=int, default=110)
    parser.add_argument("--policy", default="locret")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--budget", type=int, help="units per KV head; by default those of the model")
    parser.add_argument("--store-bits", type=int, default=16, help="bits of a channel of the units that are kept")
    parser.add_argument("--recall", action="store_true", help="read again, before each question, what has its words")
    parser.add_argument("--jobs", type=int, default=2, help="streams at a time; they share the cores evenly")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    record(options.keep or "recall", run(options), keep=options.keep is not None)


if __name__ == "__main__":
    main()
