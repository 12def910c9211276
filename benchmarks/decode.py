"""A token's time in decode against stock transformers at the same cache length: `python benchmarks/decode.py`.

On one random Llama, greedy, every case in a fresh process, in turn:

  face     `ctx.generate` through the public async face: worker, sampling and text included
  engine   the engine alone, in one thread: logits, argmax, accept
  stock    transformers' own forward over a DynamicCache that holds as many units per head, argmax, in a bare loop

    python benchmarks/decode.py --repeats 9
    python benchmarks/decode.py --batched --contexts 8 --repeats 5

With --batched: N contexts of the bundled model generate at once (asyncio.gather), and one after the other: tokens of
all of them per second, and whether tokens and memories are the same bit for bit. Each reads other text, of a length of
its own; the memories are compared after one more chunk was fed, so that what was generated is committed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from timing import (
    WARM_UP,
    add_options,
    answer,
    check_options,
    figures,
    finish,
    in_turn,
    load,
    load_ids,
    ours,
    ratio,
    run_case,
    runtime_of,
    settings_of,
    spreads,
    stock,
    tiny_llama,
)

READ = 6  # chunks that a context of the bundled model reads first; more than its budget


def pending(number: int) -> int:
    """Tokens behind the last commit with which that context of many begins."""
    return 16 + 3 * number


@torch.no_grad()
def engine(told: SimpleNamespace) -> dict[str, Any]:
    """The engine without worker, sampling and text."""
    ids, runtime = load_ids(told), runtime_of(told, lambda: load(told))
    runtime.start()
    core = runtime.engine
    state = core.open(0)
    chunk_s = []
    for piece in ids.split(told.chunk):
        began = time.perf_counter()
        core.accept(state, piece.tolist())
        core.commit(state)
        chunk_s.append(time.perf_counter() - began)
    core.accept(state, [int(core.logits(state).argmax())])  # needs no forward: the commit left what it needs

    def step() -> float:
        began = time.perf_counter()
        core.accept(state, [int(core.logits(state).argmax())])
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        step()
    core.truncate(state, 1)
    units = max(state.store.counts)
    return {"tokens": len(ids), "chunk_s": chunk_s, "decode_s": [step() for _ in range(told.decode)], "units": units}


async def batched(told: SimpleNamespace, together: bool) -> dict[str, Any]:
    """All contexts at once, or one after the other."""
    from locret_stream import Runtime
    from locret_stream.evaluation import tasks
    from locret_stream.snapshot.identity import digest_tensors

    async def each(work: Any, contexts: list[Any]) -> list[Any]:
        return await asyncio.gather(*map(work, contexts)) if together else [await work(one) for one in contexts]

    async with contextlib.AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(
            Runtime.from_pretrained("bundled", device="cpu", max_live=told.contexts))
        core, contexts, rest = runtime.engine, [], {}
        for number in range(told.contexts):
            context = await stack.enter_async_context(runtime.open(raw=True))
            text = "".join(itertools.islice(tasks.stdlib_lines(number), 100 * READ))
            ids = runtime.codec.encode_text(text)
            count = READ * core.chunk_size + pending(number)
            await context.feed(ids[:count])
            contexts.append(context)
            rest[context] = ids[count:count + core.chunk_size]
            assert len(rest[context]) == core.chunk_size, "too few lines were read"

        async def reply(context: Any, steps: int) -> list[int]:
            return [token.id async for token in context.generate(max_new_tokens=steps, ignore_eos=True)]

        first = await each(lambda context: reply(context, WARM_UP), contexts)  # the pending text is read here
        began = time.perf_counter()
        then = await each(lambda context: reply(context, told.decode), contexts)
        seconds = time.perf_counter() - began
        await each(lambda context: context.feed(rest[context]), contexts)
        states = [await context._session.step(lambda state=context._session.state: digest_tensors(
            core.export(state).items())) for context in contexts]
        return {"seconds": seconds, "tokens": [a + b for a, b in zip(first, then, strict=True)], "states": states,
                "units": [max(context.memory.units) for context in contexts]}


CASES = {"face": lambda told: asyncio.run(ours(told)), "engine": engine, "stock": stock,
         "at once": lambda told: asyncio.run(batched(told, together=True)),
         "in turn": lambda told: asyncio.run(batched(told, together=False))}


def one_stream(options: argparse.Namespace) -> None:
    with tiny_llama(options.tokens) as folder:
        told = settings_of(options, folder)
        held = {"stock": {"tokens": options.budget}}  # so that its cache is as long as ours
        runs = in_turn(("face", "engine", "stock"), options.repeats, lambda case: run_case(
            sys.executable, Path(__file__).resolve(), case, told | held.get(case, {})))
    steps = {case: [figures(run) for run in runs[case]] for case in runs}
    ratios = {f"decode_ms {case}/stock": ratio(steps[case], steps["stock"], "decode_ms") for case in ("face", "engine")}
    finish(options, "decode", {case: spreads(steps[case]) for case in steps}, ratios, [],
           {name: told[name] for name in ("tokens", "budget", "chunk", "decode")})


def many_contexts(options: argparse.Namespace) -> None:
    from locret_stream.runtime.core import BUNDLED_CHUNK
    if pending(options.contexts - 1) + WARM_UP + options.decode >= BUNDLED_CHUNK:
        sys.exit(f"{options.contexts} contexts with {options.decode} tokens each: some would be committed while the "
                 "clock runs; expected fewer --contexts or --decode")
    told = settings_of(options, "", contexts=options.contexts)
    runs = in_turn(("at once", "in turn"), options.repeats,
                   lambda case: run_case(sys.executable, Path(__file__).resolve(), case, told))
    whole = options.contexts * options.decode
    rows = {case: [{"tok_per_s": whole / run["seconds"], "seconds": run["seconds"],
                    "others_cores": run["others_cores"]} for run in runs[case]]
            for case in runs}
    every = [run for case in runs for run in runs[case]]
    same = {f"{name}_same": all(run[name] == every[0][name] for run in every) for name in ("tokens", "states")}
    finish(options, "batched", {case: spreads(rows[case]) for case in rows},
           {"tok_per_s at once/in turn": ratio(rows["at once"], rows["in turn"], "tok_per_s")},
           [f"{what.replace('_', ' are the ')}: {'OK' if yes else 'BROKEN'}" for what, yes in same.items()],
           {"contexts": options.contexts, "decode": options.decode, "units": every[0]["units"], **same})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, tokens=8192, repeats=5)
    parser.add_argument("--batched", action="store_true", help="several contexts of the bundled model")
    parser.add_argument("--contexts", type=int, default=8, metavar="N", help="with --batched (default 8)")
    options = parser.parse_args()
    if options.case:
        answer(CASES[options.case])
        return
    check_options(parser, options)
    if options.contexts < 2:
        parser.error(f"--contexts is {options.contexts}; expected at least 2")
    (many_contexts if options.batched else one_stream)(options)


if __name__ == "__main__":
    main()
