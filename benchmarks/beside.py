"""What a save costs the other contexts: `python benchmarks/beside.py`.

A random Llama with a large cache (8 layers, 8 KV heads, 6,000 units: 188 MiB of K and V in fp32). While context A is
saved again and again, context B decodes; in between B decodes alone. Reported: the time of B's steps, and how long a
save took. A save that blocked the engine would show as a step of its length.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time

import torch
from record import record
from transformers import LlamaConfig, LlamaForCausalLM

from locret_stream import Runtime
from locret_stream.named_models import BUNDLED
from locret_stream.runtime.loading import load_tokenizer

UNITS, CHUNK, STEPS = 6000, 1024, 60


def model(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=16_384, bos_token_id=None, eos_token_id=None)).eval()


async def steps(context, count: int | None = None, until: asyncio.Task | None = None) -> list[float]:
    """Seconds between one token and the next, of so many, or until a task is done."""
    spent, at = [], time.perf_counter()
    async for _ in context.generate("Go on." if context.memory.tokens else None, max_new_tokens=count or 100_000,
                                    ignore_eos=True):
        now = time.perf_counter()
        spent.append(now - at)
        at = now
        if until is not None and until.done():
            break
    return spent[1:]  # the first one reads the prompt


async def measure(repeats: int, folder: str) -> dict:
    tokenizer = load_tokenizer(BUNDLED)
    runtime = Runtime(model(len(tokenizer)), tokenizer, policy="random", budget=UNITS, chunk_size=CHUNK, max_live=2,
                      store=folder, autosave=False)
    alone, beside, saves, worst = [], [], [], []
    async with runtime, runtime.open("a") as large, runtime.open("b") as other:
        ids = torch.randint(10, 1000, (UNITS + 3 * CHUNK,), generator=torch.Generator().manual_seed(1)).tolist()
        await large.feed(ids)
        await other.feed(ids[:2000])
        await large.snapshot()  # hashes the weights, once
        for _ in range(repeats):
            alone += await steps(other, STEPS)
            await large.feed(ids[:CHUNK])
            large._session.branch.pages = ()  # so that every save writes all of it
            began = time.perf_counter()
            saving = asyncio.create_task(large.snapshot())
            taken = await steps(other, until=saving)
            await saving
            saves.append(time.perf_counter() - began)
            beside += taken
            worst.append(max(taken, default=0.0))
    return {"units": UNITS, "cache_mib": 2 * 8 * 8 * 64 * 4 * UNITS / 2**20, "saves_s": saves,
            "alone_median_ms": 1e3 * statistics.median(alone), "alone_max_ms": 1e3 * max(alone),
            "beside_median_ms": 1e3 * statistics.median(beside), "beside_max_ms": 1e3 * max(beside),
            "steps_beside": len(beside), "longest_step_of_a_save": max(
                step / save for step, save in zip(worst, saves, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="locret-beside-") as folder:
        result = asyncio.run(measure(options.repeats, folder))
    record(options.keep or "beside", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
