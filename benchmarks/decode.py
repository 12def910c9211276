"""A token's time in decode against stock transformers at the same cache length: `python benchmarks/decode.py`.

On one random Llama, greedy, every case in a process of its own:

  face     `ctx.generate` through the public async API: worker, sampling and text included
  engine   the engine alone, in one thread: logits, argmax, accept
  stock    transformers' own forward over a DynamicCache that holds as many units per head, argmax, in a bare loop

How fast a shared machine is changes from second to second, so the three stand ready together and take turns: each
decodes --decode tokens, then the next one, --bursts times; one runs while the others wait. All three caches grow by
what was decoded. The ratio is the median over the rounds of two neighbours' times.

    python benchmarks/decode.py --repeats 3
    python benchmarks/decode.py --store-bits --repeats 3
    python benchmarks/decode.py --batched --contexts 8 --repeats 5

With --smollm2 the random Llama has the shape of SmolLM2-135M: 30 layers, 9 query heads over 3 KV heads of 64. With
--dtype bfloat16 weights, keys and values of all three are in bf16, as SmolLM2 runs where the processor has it.
With --store-bits: the engine with units in 8 and in 4 bits, without and with `decode_copy`, against the engine with
exact ones, at equal units.
With --batched: N contexts of the bundled model generate at once (asyncio.gather), and one after the other: tokens of
all of them per second, and whether tokens and memories are the same bit for bit. Each reads other text, of a length of
its own; the memories are compared after one more chunk was fed, so that what was generated is committed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from timing import (
    SMOLLM2,
    WARM_UP,
    add_options,
    add_shape,
    answer,
    check_options,
    finish,
    in_turn,
    load,
    load_ids,
    ratio,
    run_case,
    runtime_of,
    serve,
    settings_of,
    spreads,
    take_turns,
    tiny_llama,
)

from locret_stream.named_models import NAMED_MODELS

READ = 6  # chunks that a context of the bundled model reads first; more than its budget


def pending(number: int) -> int:
    """Tokens behind the last commit with which that context of many begins."""
    return 16 + 3 * number


async def face(settings: SimpleNamespace) -> AsyncIterator[list[float]]:
    """The public API; the first item that this and the other cases yield says that they are ready."""
    async with runtime_of(settings) as runtime, runtime.open("timed", raw=True) as context:
        await context.feed(load_ids(settings).tolist())
        warm = WARM_UP
        while True:
            # The first token of a reply needs no forward: the reply before it ended behind one.
            at = [time.perf_counter() async for _ in context.generate(max_new_tokens=warm + 1, ignore_eos=True)]
            yield np.diff(at).tolist()
            warm = settings.decode


@torch.no_grad()
def engine(settings: SimpleNamespace, store_bits: int = 16, decode_copy: bool = False) -> Iterator[list[float]]:
    """The engine without worker, sampling and text."""
    ids, runtime = load_ids(settings), runtime_of(settings, None, store_bits, decode_copy)
    runtime.start()
    core = runtime.engine
    state = core.open(0)
    for piece in ids.split(settings.chunk):
        core.accept(state, piece.tolist())
        core.commit(state)

    def step() -> float:
        began = time.perf_counter()
        core.accept(state, [int(core.logits(state).argmax())])
        return time.perf_counter() - began

    step()  # needs no forward: the commit left what it needs
    yield [step() for _ in range(WARM_UP)]
    while True:
        step()  # the first token of a reply by the public API
        yield [step() for _ in range(settings.decode)]


@torch.inference_mode()
def stock(settings: SimpleNamespace) -> Iterator[list[float]]:
    """transformers over a cache that holds the budget."""
    from transformers import DynamicCache
    model, cache, at = load(settings), DynamicCache(), settings.budget
    ids = load_ids(settings)[None, :settings.budget]
    token = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    def step() -> float:
        nonlocal token, at
        began = time.perf_counter()
        out = model(input_ids=token, position_ids=torch.tensor([[at]]), past_key_values=cache)
        token = out.logits[:, -1:].argmax(-1)
        at += 1
        return time.perf_counter() - began

    yield [step() for _ in range(WARM_UP)]
    while True:
        step()
        yield [step() for _ in range(settings.decode)]


async def batched(settings: SimpleNamespace, together: bool) -> dict[str, Any]:
    """All contexts at once, or one after the other."""
    from locret_stream import Runtime
    from locret_stream.evaluation.haystack import stdlib_lines
    from locret_stream.snapshot.identity import digest_tensors

    async def each(work: Any, contexts: list[Any]) -> list[Any]:
        return await asyncio.gather(*map(work, contexts)) if together else [await work(one) for one in contexts]

    async with contextlib.AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(
            Runtime.from_pretrained("bundled", device="cpu", max_live=settings.contexts))
        core, contexts, rest = runtime.engine, [], {}
        for number in range(settings.contexts):
            context = await stack.enter_async_context(runtime.open(raw=True))
            text = "".join(itertools.islice(stdlib_lines(number), 100 * READ))
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
        then = await each(lambda context: reply(context, settings.decode), contexts)
        seconds = time.perf_counter() - began
        await each(lambda context: context.feed(rest[context]), contexts)
        states = [await context._session.step(lambda state=context._session.state: digest_tensors(
            core.export(state).items())) for context in contexts]
        return {"seconds": seconds, "tokens": [a + b for a, b in zip(first, then, strict=True)], "states": states,
                "units": [max(context.memory.units) for context in contexts]}


TURNS = {"face": face, "engine": engine, "stock": stock, "8 bits": lambda settings: engine(settings, 8),
         "4 bits": lambda settings: engine(settings, 4), "8 bits, copy": lambda settings: engine(settings, 8, True),
         "4 bits, copy": lambda settings: engine(settings, 4, True)}
CASES = {"at once": lambda settings: asyncio.run(batched(settings, together=True)),
         "in turn": lambda settings: asyncio.run(batched(settings, together=False))}


def one_stream(options: argparse.Namespace) -> None:
    """All three, in turns."""
    *others, base = ("8 bits", "4 bits", "8 bits, copy", "4 bits, copy", "engine") if options.store_bits else (
        "face", "engine", "stock")
    with tiny_llama(options.tokens, options.dtype, **(SMOLLM2 if options.smollm2 else {})) as folder:
        settings = settings_of(options, folder, dtype=options.dtype)
        rounds: dict[str, list[float]] = {case: [] for case in (*others, base)}
        for repeat in range(options.repeats):
            print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
            for case, spent in take_turns(Path(__file__).resolve(), rounds, settings, options.bursts).items():
                rounds[case] += [1e3 * statistics.mean(burst) for burst in spent]
    rows = {case: [{"decode_ms": ms} for ms in found] for case, found in rounds.items()}
    ratios = {}
    for case in others:
        pairs = [one / other for one, other in zip(rounds[case], rounds[base], strict=True)]
        quarters = statistics.quantiles(pairs, n=4)
        ratios[f"decode_ms {case}/{base}"] = {"of_medians": statistics.median(rounds[case]) / statistics.median(
            rounds[base]), "median_of_rounds": statistics.median(pairs), "quartiles": [quarters[0], quarters[2]],
            "min": min(pairs), "max": max(pairs)}
    notes = [f"{name}: {one['median_of_rounds']:.3f}, median of {len(rounds[base])} rounds; half of them "
             f"{one['quartiles'][0]:.3f} to {one['quartiles'][1]:.3f}" for name, one in ratios.items()]
    finish(options, "decode", {case: spreads(found) for case, found in rows.items()}, ratios, notes,
           {name: settings[name] for name in ("tokens", "budget", "chunk", "decode", "dtype")}
           | {"bursts": options.bursts})


def many_contexts(options: argparse.Namespace) -> None:
    if pending(options.contexts - 1) + WARM_UP + options.decode >= NAMED_MODELS["bundled"].chunk_size:
        sys.exit(f"{options.contexts} contexts with {options.decode} tokens each: some would be committed while the "
                 "clock runs; expected fewer --contexts or --decode")
    settings = settings_of(options, "", contexts=options.contexts)
    runs = in_turn(("at once", "in turn"), options.repeats,
                   lambda case: run_case(sys.executable, Path(__file__).resolve(), case, settings))
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
    add_options(parser, tokens=8192, repeats=3)
    parser.add_argument("--bursts", type=int, default=12, help="turns of each case (default 12)")
    parser.add_argument("--store-bits", action="store_true", help="units in 8 and in 4 bits against exact ones")
    add_shape(parser)
    parser.add_argument("--batched", action="store_true", help="several contexts of the bundled model")
    parser.add_argument("--contexts", type=int, default=8, metavar="N", help="with --batched (default 8)")
    options = parser.parse_args()
    if options.case in TURNS:
        serve(TURNS[options.case])
        return
    if options.case:
        answer(CASES[options.case])
        return
    check_options(parser, options)
    if not 2 <= options.bursts < (options.chunk - WARM_UP - 1) / (options.decode + 1):
        parser.error(f"--bursts is {options.bursts}; expected at least 2, and fewer tokens in all than --chunk: a "
                     "commit in between would shorten the cache")
    if options.contexts < 2:
        parser.error(f"--contexts is {options.contexts}; expected at least 2")
    (many_contexts if options.batched else one_stream)(options)


if __name__ == "__main__":
    main()
