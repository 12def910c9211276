"""What recall costs: `python benchmarks/recall_cost.py`, with `--keep NAME` into benchmarks/results.

    index     tokens a second that an index takes in, its bytes, and milliseconds a question, by what it holds
    reading   feeding with an index beside feeding without one, in turns: seconds with / seconds without
    asking    a question with recall beside one without, in turns: milliseconds to the first token, and for each other

The text is that of the demo: sources of the standard library with planted facts, whose questions are asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from record import record

from locret_stream import Runtime, StreamingContext
from locret_stream.evaluation import haystack
from locret_stream.recall import Cutter, Index
from locret_stream.text import TextCodec

TOKENS = [65_536, 1_048_576, 10_485_760]
ASKED, DECODED = 24, 48  # questions of an index; tokens of a reply


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def ids_of(stream: haystack.PlantedStream, codec: TextCodec) -> Iterator[list[int]]:
    """The stream in pieces of a chunk's size."""
    ids = list[int]()
    for line in stream:
        ids += codec.encode_text(line)
        while len(ids) >= 256:
            yield ids[:256]
            del ids[:256]


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Their median and their longest, in milliseconds."""
    return {"median": 1e3 * statistics.median(seconds), "longest": 1e3 * max(seconds)}


def of_index(codec: TextCodec, measure, tokens: int, most: int) -> dict:
    """One index of so many tokens, and the questions about what lies in it."""
    planted = haystack.planted_stream(0, tokens, facts=ASKED, measure=measure)
    index, spent = Index(lambda start: Cutter(codec, start=start)), 0.0
    for piece in ids_of(planted, codec):
        started = time.perf_counter()
        index.add(piece)
        spent += time.perf_counter() - started
    found, searched = 0, list[float]()
    for fact in planted.facts:
        started = time.perf_counter()
        passages = index.search(fact.question, most, lambda text: len(codec.encode_text(text)))
        searched.append(time.perf_counter() - started)
        found += any(fact.answer in passage.text for passage in passages)
    row = {"tokens": index.end, "tok_per_s": index.end / spent, "bytes_a_token": index.bytes / index.end,
           "search_ms": milliseconds(searched), "found": found, "asked": len(searched)}
    index.close()
    say(f"index of {row['tokens']:,}: {row['tok_per_s']:,.0f} tok/s, {row['bytes_a_token']:.1f} bytes a token, "
        f"{row['search_ms']['median']:.1f} ms a question, {found} of {len(searched)} found")
    return row


async def fed(ctx: StreamingContext, text: list[str]) -> float:
    started = time.perf_counter()
    await ctx.feed(iter(text))
    return time.perf_counter() - started


async def of_reading(options: argparse.Namespace) -> dict:
    """The same text fed to two runtimes in turns, of which one keeps an index."""
    ratios, rates = [], []
    async with (Runtime.from_pretrained(options.model, max_live=1, recall=True) as with_index,
                Runtime.from_pretrained(options.model, max_live=1) as without):
        measure = haystack.line_measure(without.count_tokens)
        async with with_index.open() as one, without.open() as other:
            for repeat in range(options.repeats + 1):
                text = list(haystack.planted_stream(repeat, options.read, measure=measure))
                took = {}
                for ctx in (one, other) if repeat % 2 else (other, one):
                    took[ctx] = await fed(ctx, text)
                if repeat:  # the first one warms up
                    ratios.append(took[one] / took[other])
                    rates.append(options.read / took[other])
                    say(f"reading {options.read:,}: {ratios[-1]:.3f} of the time without")
    return {"tokens": options.read, "time_of_without": statistics.median(ratios), "all": ratios,
            "tok_per_s_without": statistics.median(rates)}


async def of_asking(options: argparse.Namespace) -> dict:
    """The same questions of one context, with recall and without, in turns."""
    first, each = {True: [], False: []}, {True: [], False: []}
    async with Runtime.from_pretrained(options.model, max_live=1, recall=True) as runtime, runtime.open() as ctx:
        planted = haystack.planted_stream(0, options.read, measure=haystack.line_measure(runtime.count_tokens))
        await ctx.feed(iter(planted))
        questions = itertools.islice(itertools.cycle(planted.facts), 2 * options.repeats + 1)
        for number, fact in enumerate(questions):
            for recall in (True, False) if number % 2 else (False, True):
                took = {}
                for tokens in (1, 1 + DECODED):
                    started = time.perf_counter()
                    await ctx.ask(fact.question, recall=None if recall else False, max_new_tokens=tokens,
                                  ignore_eos=True)
                    took[tokens] = time.perf_counter() - started
                if number:
                    first[recall].append(took[1])
                    each[recall].append((took[1 + DECODED] - took[1]) / DECODED)
        ratios = [a / b for a, b in zip(each[True], each[False], strict=True)]
        result = {"tokens": ctx.memory.tokens, "pending": ctx.memory.pending,
                  "first_token_ms": {"with": milliseconds(first[True]), "without": milliseconds(first[False])},
                  "token_ms": {"with": milliseconds(each[True]), "without": milliseconds(each[False])},
                  "token_time_of_without": statistics.median(ratios)}
    with_it, without = (result["first_token_ms"][name]["median"] for name in ("with", "without"))
    say(f"asking: first token after {with_it:.0f} ms, without {without:.0f}; each other takes "
        f"{result['token_time_of_without']:.2f} of the time without")
    return result


async def run(options: argparse.Namespace) -> dict:
    result: dict = {"model": options.model}
    if "index" in options.parts:
        async with Runtime.from_pretrained(options.model, max_live=1) as runtime:
            measure = haystack.line_measure(runtime.count_tokens)
            result["index"] = [of_index(runtime.codec, measure, tokens, options.most) for tokens in options.tokens]
    if "reading" in options.parts:
        result["reading"] = await of_reading(options)
    if "asking" in options.parts:
        result["asking"] = await of_asking(options)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--parts", nargs="+", choices=["index", "reading", "asking"],
                        default=["index", "reading", "asking"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="that an index holds")
    parser.add_argument("--most", type=int, default=256, help="tokens of passages that a question may find")
    parser.add_argument("--read", type=int, default=32_768, help="tokens that are fed in one go")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    record(options.keep or "recall_cost", asyncio.run(run(options)), keep=options.keep is not None)


if __name__ == "__main__":
    main()
