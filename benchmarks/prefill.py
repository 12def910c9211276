"""Prefill under a budget against stock transformers, whose cache grows: `python benchmarks/prefill.py`.

Both read the same ids with the same random Llama in the same chunks, ours through the public async API, stock with a
DynamicCache and without the LM head (with --recent one that is cut to the first units and the most recent ones after
every chunk; with --at-once all in one pass, as `generate` reads a prompt by itself, which is faster); every case in a
fresh process, in turn. `timing.py` tells what the figures are.

    python benchmarks/prefill.py --tokens 32768 --repeats 3
    python benchmarks/prefill.py --smollm2 --dtype bfloat16 --chunk 256 --recent    # stock keeps as much as ours
    python benchmarks/prefill.py --chunks 1000                  # ours alone: is it flat over 1,000 chunks?

Flat is measured by the median second per chunk of the last 50 chunks over that of chunks 20 to 5 % before the end, as
it is and against a fixed product of matrices that is timed after every chunk, on the same thread (how fast a shared
machine is changes from minute to minute); and by the growth of the process (RssAnon + RssFile) from chunk 20 on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

from timing import (
    MIB,
    SMOLLM2,
    add_options,
    add_shape,
    answer,
    check_options,
    figures,
    finish,
    in_turn,
    ours,
    pool_note,
    ratio,
    run_case,
    settings_of,
    spread,
    spreads,
    stock,
    tiny_llama,
)

CASES = {"ours": lambda settings: asyncio.run(ours(settings)), "stock": stock}
FROM, LAST, LEAST = 20, 50, 200  # chunks


def flatness(run: dict[str, Any]) -> dict[str, float]:
    """Late chunks against earlier ones, and growth."""
    chunks, resident = run["chunk_s"], run["resident"]
    middle, last = statistics.median(chunks[FROM:len(chunks) * 19 // 20]), statistics.median(chunks[-LAST:])
    paced = [chunk / yard for chunk, yard in zip(chunks, run["yard_s"], strict=True)]
    against = statistics.median(paced[-LAST:]) / statistics.median(paced[FROM:len(chunks) * 19 // 20])
    return {"chunk_ms": 1e3 * middle, "last_chunk_ms": 1e3 * last, "last_against_middle": last / middle,
            "last_against_middle_by_yardstick": against,
            "rss_growth_mib": (max(resident[FROM:]) - resident[FROM]) / MIB, "others_cores": run["others_cores"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, tokens=32_768, repeats=3)
    parser.add_argument("--chunks", type=int, help="ours alone over so many chunks, in place of --tokens")
    parser.add_argument("--recent", action="store_true",
                        help="stock's cache is cut after every chunk to the first units and the most recent ones")
    parser.add_argument("--at-once", action="store_true", help="stock reads the whole prompt in one pass")
    add_shape(parser)
    options = parser.parse_args()
    if options.case:
        answer(CASES[options.case])
        return
    if options.chunks is not None:
        if options.chunks < LEAST:
            parser.error(f"--chunks is {options.chunks}; expected at least {LEAST}")
        options.tokens = options.chunks * options.chunk
    if options.recent and options.at_once:
        parser.error("--recent cuts the cache after every chunk, and --at-once has none; expected one of them")
    check_options(parser, options)
    names = ["ours"] if options.chunks else list(CASES)
    with tiny_llama(options.tokens, options.dtype, **(SMOLLM2 if options.smollm2 else {})) as folder:
        settings = settings_of(options, folder, yardstick=options.chunks is not None, dtype=options.dtype,
                               recent=options.recent, at_once=options.at_once)
        runs = in_turn(names, options.repeats,
                       lambda case: run_case(sys.executable, Path(__file__).resolve(), case, settings))
    memory = runs["ours"][0]["memory"]
    result = {name: settings[name] for name in ("tokens", "budget", "chunk", "dtype", "recent", "at_once")} | {
        "memory": memory}
    if options.chunks:
        rows = {"ours": [flatness(run) for run in runs["ours"]]}
        ratios: dict[str, dict[str, float]] = {}
        result["every_50_chunks_ms"] = [[1e3 * statistics.median(run["chunk_s"][at:at + LAST]) for at in
                                         range(0, options.chunks, LAST)] for run in runs["ours"]]
    else:
        steady = -(-options.budget // options.chunk) + 1
        rows = {case: [figures(run, steady) for run in runs[case]] for case in runs}
        ratios = {f"{name} ours/stock": ratio(rows["ours"], rows["stock"], name) for name in ("tok_per_s", "decode_ms")}
        result["last_chunk_ms"] = {case: spread(1e3 * run["chunk_s"][-1] for run in runs[case]) for case in runs
                                   if len(runs[case][0]["chunk_s"]) > 1}
    finish(options, "flatness" if options.chunks else "prefill", {case: spreads(rows[case]) for case in rows}, ratios,
           [pool_note(memory)], result)


if __name__ == "__main__":
    main()
