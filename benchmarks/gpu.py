"""One GPU, under nine minutes: `python benchmarks/gpu.py --keep gpu`. `--small` runs all of it at toy sizes anywhere.

First every Triton kernel against its reference (tests/kernels, on the device). Then, beside the bf16 matmul rate and
the copy bandwidth that this card reaches, Llama-3.1-8B's shape with random bf16 weights and retaining heads of the
paper's width: the operations for which there are two ways, attention to latents and to units of other widths, prefill
of 8k to 1M tokens (budget 6,000, chunk 4,096), where its time goes, decoding of 1, 8 and 32 contexts at once, with
`--peer-python` kvpress' recipe beside ours, and stock transformers with full attention at 32k and 128k.

`--small` on a CPU takes the torch operations; with LOCRET_KERNELS=triton TRITON_INTERPRET=1 Triton's interpreter. What
it prints then are no figures of anything.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from breakdown import profile
from record import record
from timing import random_llama, ratio, spreads
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine, EngineState, NextToken
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.kernels import (
    decode_attention,
    prefill_attention,
    reduced_attention,
    reference,
    torch_ops,
    uses_triton,
)
from locret_stream.models import attach
from locret_stream.policies import make_policy

LARGE = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 128_256,
         "width": 1024, "budget": 6000, "chunk": 4096, "prefill": (8192, 32_768, 131_072, 1_048_576),
         "full": (32_768, 131_072), "batches": (1, 8, 32), "steps": 64, "beside": 131_072, "repeats": 3,
         "matmul": 8192, "copy": 2**31,
         # KV heads, query heads of each, numbers of K and of V (0: V is K).
         "widths": {"DeepSeek-V3": (1, 128, 576, 0), "GLM-4.7-Flash": (1, 20, 576, 0), "MiniCPM3": (1, 40, 288, 0),
                    "MiMo-V2-Flash": (4, 16, 192, 128), "Gemma 4": (4, 8, 512, 512), "Llama 3.1": (8, 4, 128, 128)}}
SMALL = {"layers": 2, "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "dim": 16, "vocab": 320,
         "width": 24, "budget": 90, "chunk": 80, "prefill": (320, 640), "full": (160, 240),
         "batches": (1, 3), "steps": 4, "beside": 400, "repeats": 2, "matmul": 64, "copy": 2**16,
         "widths": {"latents": (1, 2, 40, 0), "MiMo": (1, 2, 24, 16)}}
ROOT = Path(__file__).resolve().parents[1]


class Bench:
    """The card, the model and the results so far."""

    def __init__(self, sizes: dict[str, Any], device: torch.device, peer: str | None):
        self.sizes, self.device, self.peer = sizes, device, peer
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.wait = torch.cuda.synchronize if self.cuda else (lambda: None)
        self.results: dict[str, Any] = {}

    def seconds(self, work: Callable[[], Any], repeats: int = 20) -> float:
        """Median seconds of one call, after two that warm up."""
        for _ in range(2):
            work()
        times = []
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def seconds_of_each(self, works: list[Callable[[], Any]]) -> float:
        """Mean seconds of several calls on different data, which no cache holds; on a GPU as a graph replays them, so
        without their start in Python."""
        def all_of_them() -> None:
            for work in works:
                work()

        if not self.cuda:
            return self.seconds(works[0], 1)
        all_of_them()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        return self.seconds(graph.replay) / len(works)

    @functools.cached_property
    def model(self) -> LlamaForCausalLM:
        return random_llama(self.sizes, self.device, self.dtype)

    def engine(self, slots: int, budget: int = 0) -> Engine:
        sizes, attachment = self.sizes, attach(self.model)
        heads = RetainingHeads(HeadsConfig(layers=sizes["layers"], query_heads=sizes["heads"],
                                           kv_heads=sizes["kv_heads"], head_dim=sizes["dim"], width=sizes["width"]))
        heads = heads.to(self.device, self.dtype).eval().requires_grad_(False)
        units = Budget(units=budget or sizes["budget"], sinks=4, stabilizers=8)
        config = StreamConfig(budget=units, chunk_size=sizes["chunk"])
        return Engine(attachment, config, make_policy("locret", heads=heads), slots)

    def ids(self, chunks: int) -> torch.Tensor:
        return torch.randint(3, self.sizes["vocab"], (chunks, self.sizes["chunk"]),
                             generator=torch.Generator().manual_seed(1))


def kernels(bench: Bench) -> dict[str, Any]:
    """The parity tests of every kernel, on this device; on a GPU also those that need one."""
    env = dict(os.environ) if bench.cuda else os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o",
                           "filterwarnings=default", "-n", str(min(12, os.cpu_count() or 1)), "-m",
                           "not slow" if bench.cuda else "not slow and not gpu", "tests/kernels"], cwd=ROOT,
                          capture_output=True, text=True, env=env | {"PYTHONPATH": str(ROOT)}, check=False)
    tail = done.stdout.strip().splitlines()[-12:]
    if done.returncode:
        raise RuntimeError("kernels disagree with their references:\n" + "\n".join(tail) + done.stderr[-2000:])
    return {"tests": tail[-1]}


def card(bench: Bench) -> dict[str, float]:
    """What this card reaches: bf16 matmul on random data, and a copy counted both ways."""
    n = bench.sizes["matmul"]
    a, b = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    source = torch.empty(bench.sizes["copy"], dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return {"matmul_tflops": 2 * n**3 / bench.seconds(lambda: torch.mm(a, b)) / 1e12,
            "copy_gb_per_s": 2 * len(source) / bench.seconds(lambda: target.copy_(source)) / 1e9}


def read(bench: Bench, engine: Engine, tokens: int) -> tuple[float, EngineState]:
    """Tokens per second, alone with its slot, and the state that it comes to."""
    ids, chunk = bench.ids(16), bench.sizes["chunk"]
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    state = engine.open(0)
    bench.wait()
    started = time.perf_counter()
    for n in range(tokens // chunk):
        engine.accept(state, ids[n % len(ids)].tolist())
        engine.commit(state)
    bench.wait()
    return tokens // chunk * chunk / (time.perf_counter() - started), state


def prefill(bench: Bench) -> dict[str, Any]:
    """Tokens per second of the engine, and the share of the measured matmul rate."""
    engine = bench.engine(1)
    parameters = sum(p.numel() for p in bench.model.parameters()) - bench.model.lm_head.weight.numel()
    rows: dict[str, Any] = {"parameters_without_lm_head": parameters}
    read(bench, engine, 4 * bench.sizes["chunk"])
    for tokens in bench.sizes["prefill"]:
        speed, state = read(bench, engine, tokens)
        rows[str(tokens)] = {"tok_per_s": speed, "units": state.store.counts[0], "peak_units": max(state.peaks)}
        if bench.cuda:
            rows[str(tokens)]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if "card" in bench.results:
            limit = bench.results["card"]["matmul_tflops"] * 1e12
            rows[str(tokens)]["share_of_matmul"] = 2 * parameters * speed / limit
    *_, before, last = (rows[str(tokens)]["tok_per_s"] for tokens in bench.sizes["prefill"])
    rows |= {"last_over_one_before": last / before, "pool_bytes": engine.pool.bytes_resident,
             "formula_bytes": engine.pool.formula_bytes()}
    return rows


def beside(bench: Bench) -> dict[str, Any]:
    """kvpress' bounded recipe (see `peers.py`) and ours, in turn, at a budget of one chunk, which is KVzap's most."""
    if bench.peer is None:
        return {"skipped": "no --peer-python"}
    sizes, names = bench.sizes, ("kvzap", "knorm", "snapkv")
    budget, steps, rows = sizes["chunk"], sizes["steps"], {name: [] for name in ("ours", *names)}
    engine = bench.engine(1, budget)
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen([bench.peer, str(ROOT / "benchmarks" / "peer_gpu.py")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=own) as process:

        def ask(line: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
            if not reply:
                raise RuntimeError("kvpress' side ended; why stands above")
            return json.loads(reply)

        try:
            versions = ask(json.dumps({
                "sizes": sizes, "device": bench.device.type, "dtype": str(bench.dtype).removeprefix("torch."),
                "ids": bench.ids(16).tolist(), "budget": budget, "chunks": sizes["beside"] // sizes["chunk"],
                "steps": steps, "threads": torch.get_num_threads()}))
            read(bench, engine, 4 * sizes["chunk"])
            for _ in range(sizes["repeats"]):
                rows["ours"].append(_ours(bench, engine, steps))
                for name in names:
                    rows[name].append(ask(""))
        finally:
            process.kill()
    return {"tokens": sizes["beside"], "budget": budget, "repeats": sizes["repeats"], "peer_versions": versions,
            "cases": {name: spreads(of) for name, of in rows.items()},
            "ratios": {f"{figure} ours/{name}": ratio(rows["ours"], rows[name], figure)
                       for figure in ("tok_per_s", "decode_ms") for name in names}}


def _ours(bench: Bench, engine: Engine, steps: int) -> dict[str, float]:
    """What peer_gpu.py measures, of ours."""
    speed, state = read(bench, engine, bench.sizes["beside"])
    engine.accept(state, [5])
    engine.logits(state)
    asked = [NextToken(state, lambda logits: int(logits.argmax()))]
    row = {"tok_per_s": speed, "units": state.store.counts[0]}
    for count in (3, steps):
        bench.wait()
        started = time.perf_counter()
        for _ in range(count):
            engine.decode(asked)
    row["decode_ms"] = 1e3 * (time.perf_counter() - started) / steps
    return row | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if bench.cuda else {})


def parts(bench: Bench) -> dict[str, Any]:
    """Where the time of a steady commit goes."""
    return profile(bench.engine(1), 5, bench.ids(4))


def decode(bench: Bench) -> dict[str, Any]:
    """Greedy steps of contexts whose memory is full, beside the bandwidth limit: weights and units read once."""
    sizes = bench.sizes
    engine = bench.engine(max(sizes["batches"]))
    states = [engine.open(0)]
    for ids in bench.ids(-(-sizes["budget"] // sizes["chunk"]) + 1):
        engine.accept(states[0], ids.tolist())
        engine.commit(states[0])
    engine.accept(states[0], [5])
    engine.logits(states[0])
    states += [engine.fork(states[0], slot) for slot in range(1, max(sizes["batches"]))]
    weights = sum(p.numel() * p.element_size() for p in bench.model.parameters()) - (
        bench.model.get_input_embeddings().weight.nbytes)
    slot = 2 * sum(states[0].store.counts) * sizes["kv_heads"] * sizes["dim"] * bench.dtype.itemsize

    def steps(members: list[EngineState], count: int) -> None:
        asked = [NextToken(state, lambda logits: int(logits.argmax())) for state in members]
        for _ in range(count):
            wrong = [one for one in engine.decode(asked) if isinstance(one, Exception)]
            if wrong:
                raise wrong[0]

    rows: dict[str, Any] = {"units": states[0].store.counts[0]}
    for size in sizes["batches"]:
        steps(states[:size], 3)
        bench.wait()
        started = time.perf_counter()
        steps(states[:size], sizes["steps"])
        bench.wait()
        step = (time.perf_counter() - started) / sizes["steps"]
        rows[str(size)] = {"ms_per_step": 1e3 * step, "tok_per_s": size / step}
        if "card" in bench.results:
            limit = (weights + size * slot) / bench.results["card"]["copy_gb_per_s"] / 1e9
            rows[str(size)]["share_of_bandwidth"] = limit / step
    first, *_, last = (rows[str(size)]["tok_per_s"] for size in sizes["batches"])
    return rows | {"last_over_first": last / first}


@torch.no_grad()
def full(bench: Bench) -> dict[str, Any]:
    """Stock transformers, everything kept, the same chunks."""
    rows, chunk = {}, bench.sizes["chunk"]
    ids = bench.ids(16).to(bench.device)
    for tokens in bench.sizes["full"]:
        cache = DynamicCache(config=bench.model.config)
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        bench.wait()
        started = time.perf_counter()
        for n in range(tokens // chunk):
            bench.model.model(ids[n % len(ids)][None], past_key_values=cache, use_cache=True)
        bench.wait()
        rows[str(tokens)] = {"tok_per_s": tokens // chunk * chunk / (time.perf_counter() - started)}
        token = ids[:1, :1]
        step = bench.seconds(lambda cache=cache, token=token: bench.model(token, past_key_values=cache), 10)
        rows[str(tokens)]["decode_ms"] = 1e3 * step
        if bench.cuda:
            rows[str(tokens)]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        del cache
    return rows


@torch.no_grad()
def choices(bench: Bench) -> dict[str, float]:
    """Milliseconds of one layer's operation, each way of doing it."""
    sizes = bench.sizes
    heads, groups, dim, new = sizes["kv_heads"], sizes["heads"] // sizes["kv_heads"], sizes["dim"], sizes["chunk"]
    count = sizes["budget"] + new

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, dtype=bench.dtype)

    q = random(new, heads * groups, dim).transpose(0, 1)
    k, v = random(heads, count, dim), random(heads, count, dim)
    own_k, own_v = (random(new, heads, dim).transpose(0, 1) for _ in range(2))
    fc1, fc2 = random(sizes["width"], (groups + 2) * heads * dim), random(heads, sizes["width"])
    ways: dict[str, Callable[[], Any]] = {
        "prefill_attention torch": lambda: torch_ops.prefill_attention(q, k, v, dim**-0.5),
        "score_units torch": lambda: torch_ops.score_units(q, own_k, own_v, fc1, fc2, nn.functional.silu)}
    if uses_triton(q):
        from locret_stream.kernels.triton import prefill_attention, score_units
        ways["prefill_attention triton"] = lambda: prefill_attention.prefill_attention(q, k, v, dim**-0.5)

        def score(variant: str) -> torch.Tensor:
            score_units.VARIANT = variant
            return score_units.score_units(q, own_k, own_v, fc1, fc2, nn.functional.silu)

        ways |= {f"score_units triton {variant}": functools.partial(score, variant) for variant in ("fused", "cublas")}
    return {name: 1e3 * bench.seconds(way, 10) for name, way in ways.items()}


def widths(bench: Bench) -> dict[str, Any]:
    """Attention of one layer of models whose K and V have other widths, and of Llama beside them."""
    return {name: one_layer(bench, *shape) for name, shape in bench.sizes["widths"].items()}


@torch.no_grad()
def one_layer(bench: Bench, heads: int, groups: int, key: int, value: int) -> dict[str, float]:
    """Milliseconds of a chunk, of the newest token of some contexts, and of the sums that policies ask for; `spec`: as
    the numeric specification has it, in torch. Then the shares of this card's rate of products and of its bandwidth."""
    sizes = bench.sizes
    new, most, count, scale = sizes["chunk"], max(sizes["batches"]), sizes["budget"] + sizes["chunk"], key**-0.5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, dtype=bench.dtype)

    keys, q = random(most, heads, count, key), random(new, heads * groups, key).transpose(0, 1)
    values, tokens = random(most, heads, count, value) if value else keys, random(most, heads * groups, 1, key)
    ranks, lengths = torch.arange(sizes["budget"], count, device=bench.device), torch.full((most,), count)
    lengths, slots = lengths.to(bench.device), torch.arange(most, device=bench.device)

    def chunk(attend: Callable[..., Any]) -> Any:
        return attend(q, keys[0], values[0], scale)

    def token(attend: Callable[..., Any], own: torch.Tensor) -> Any:
        return attend(tokens[:len(own)], keys, values, own, lengths[:len(own)], scale)

    row = {"prefill": bench.seconds(lambda: chunk(prefill_attention), 5 if bench.cuda else 1),
           "prefill spec": bench.seconds(lambda: chunk(reference.prefill_attention), 2),
           "reduced": bench.seconds(lambda: reduced_attention(q, keys[0], scale, ranks), 3 if bench.cuda else 1),
           "decode 1 spec": bench.seconds(lambda: token(reference.decode_attention, slots[:1]), 3)}
    for size in sizes["batches"]:
        row[f"decode {size}"] = bench.seconds_of_each([
            functools.partial(token, decode_attention, slots.roll(-size * turn)[:size]) for turn in range(8)])
    row = {name: 1e3 * seconds for name, seconds in row.items()}
    if "card" in bench.results:
        best, width = bench.results["card"], key + (value or key)
        operations = 2 * heads * groups * width * new * (sizes["budget"] + (new + 1) / 2)
        row["share_of_matmul"] = operations / row["prefill"] / 1e9 / best["matmul_tflops"]
        row["share_of_bandwidth"] = (most * heads * count * (key + value) * keys.element_size() / row[f"decode {most}"]
                                     / 1e6 / best["copy_gb_per_s"])
    return row


SECTIONS = (kernels, card, choices, widths, prefill, parts, decode, beside, full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, on a CPU too: measures nothing")
    parser.add_argument("--peer-python", help="interpreter that has kvpress (see peers.py), for the section `beside`")
    parser.add_argument("--only", metavar="A,B", help="of " + ", ".join(one.__name__ for one in SECTIONS))
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the result is JSON in any case")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        parser.error("no CUDA device here; expected one, or --small to try the script at toy sizes")
    wanted = set(options.only.split(",")) if options.only else {one.__name__ for one in SECTIONS}
    bench = Bench(SMALL if options.small else LARGE, torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                  options.peer_python)
    failed = []
    for section in SECTIONS:
        if section.__name__ not in wanted:
            continue
        started = time.perf_counter()
        try:
            with torch.no_grad():
                bench.results[section.__name__] = section(bench)
        except Exception as error:  # what else can be measured is worth having
            traceback.print_exc()
            bench.results[section.__name__] = {"error": re.sub(r"\s+", " ", str(error))[:500]}
            failed.append(section.__name__)
        print(f"{section.__name__}: {time.perf_counter() - started:.1f} s, {bench.results[section.__name__]}",
              file=sys.stderr, flush=True)
        if bench.cuda:
            torch.cuda.empty_cache()
    record(options.keep or "gpu", {"small": options.small, **bench.results}, keep=options.keep is not None)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
