"""Shared by peers.py, prefill.py, decode.py, gpu.py: the tiny Llama, one process per case, medians and their spread.

A peer's interpreter reads this file too, so at import it needs torch and numpy alone.

A case is run by `python SCRIPT --case NAME` with its settings on stdin, and answers with one line of JSON. Cases take
turns over the repeats, so that what disturbs the machine for a while disturbs them all. Both sides get the number
of threads, read the same ids with the same weights, and run a few chunks and a few tokens before the clock starts.
What a case measures:

  chunk_s, resident   seconds of every chunk, and bytes resident after it (not on the clock)
  decode_s            seconds of every greedy token behind the prefill
  yard_s              with `yardstick`: seconds of a fixed product of matrices after every chunk, on the same thread
  units               cache length per KV head after the prefill (the longest layer)
  kv_final_bytes      K and V that are kept then
  kv_peak_bytes       stock and peers: the most K and V that lived at any cache update. Ours: all of one slot, allocated
                      once: room for the chunk, keys rotated and not, values, scores, positions
  rss_prefill_bytes   high water of the process during the prefill over what was resident before it
  rss_total_bytes     the same over what was resident when the weights were loaded, so with warm-up, pool and all
  others_cores        cores that other processes kept busy meanwhile. Distrust a case where it is not about 0: two
                      threads that wait for each other on a shared core are slowed many times over
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 256, 8, 2, 64, 4096
SMOLLM2 = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
           "num_attention_heads": 9, "num_key_value_heads": 3, "width": 128}
WARM_UP = 3  # chunks, and tokens
SINKS, STABILIZERS = 4, 32
MIB = 2**20

# -- the process that starts the cases ---------------------------------------------------------------------------------


def surrogate_width(hidden: int) -> int:
    """Hidden units per layer of KVzap's surrogate by its published recipe, for a model of that hidden size."""
    return max(64, hidden // 8)


def heads_width() -> int:
    """Width at which retaining heads have about as many parameters as KVzap's surrogate (which has biases)."""
    surrogate = surrogate_width(HIDDEN)
    wanted = (HIDDEN + 1) * surrogate + (surrogate + 1) * KV_HEADS
    return round(wanted / ((HEADS + 2 * KV_HEADS) * HEAD_DIM + KV_HEADS))


@contextlib.contextmanager
def tiny_llama(tokens: int, dtype: str = "float32", **sizes: int) -> Iterator[str]:
    """A temporary folder with a random Llama, its tokenizer, random retaining heads for it, and `tokens` random ids;
    `sizes` take the place of the usual ones, by their names in LlamaConfig, and `width` of that of the heads."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from locret_stream.heads import HeadsConfig, RetainingHeads
    disable_progress_bar()
    torch.manual_seed(0)
    width = sizes.pop("width", heads_width())
    config = LlamaConfig(**{**dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=1 << 20,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None), **sizes})
    model = LlamaForCausalLM(config)
    heads = RetainingHeads(HeadsConfig(layers=config.num_hidden_layers, query_heads=config.num_attention_heads,
                                       kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
                                       width=width))
    with tempfile.TemporaryDirectory(prefix="locret-timing-") as folder:
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        words().save_pretrained(folder)
        heads.save(Path(folder) / "heads")
        np.save(Path(folder) / "ids.npy", np.random.default_rng(1).integers(3, VOCAB, tokens))
        yield folder


def random_llama(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of random weights, made on its device: the same ones wherever torch draws the same numbers there."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["dim"], max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=False)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


def in_turn(cases: Iterable[str], repeats: int, run: Callable[[str], dict]) -> dict[str, list[dict]]:
    """Every case once, then every case again: the runs of each."""
    runs: dict[str, list[dict]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for case in runs:
            print(f"repeat {repeat + 1} of {repeats}: {case}", file=sys.stderr, flush=True)
            runs[case].append(run(case))
    return runs


def run_case(python: str, script: Path, case: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What one case answers, in a fresh process of that interpreter."""
    own = {key: value for key, value in os.environ.items() if python == sys.executable or key != "PYTHONPATH"}
    began, before = time.perf_counter(), others_seconds()
    done = subprocess.run([python, str(script), "--case", case], input=json.dumps(settings), stdout=subprocess.PIPE,
                          text=True, env=own | _quiet(settings), check=False)
    if done.returncode:
        sys.exit(f"case {case} ended with status {done.returncode}; why stands above")
    others = (others_seconds() - before) / (time.perf_counter() - began)
    return json.loads(done.stdout) | {"others_cores": max(0.0, others)}


def take_turns(script: Path, cases: Iterable[str], settings: dict[str, Any],
               turns: int) -> dict[str, list[list[float]]]:
    """What `serve`d cases measure in that many turns each, one at a time, all of them ready beforehand."""
    spent: dict[str, list[list[float]]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        running = {}

        def ask(case: str, line: str) -> list[float]:
            running[case].stdin.write(line + "\n")
            running[case].stdin.flush()
            reply = running[case].stdout.readline()
            if not reply:
                sys.exit(f"case {case} ended; why stands above")
            return json.loads(reply)

        for case in spent:
            running[case] = stack.enter_context(subprocess.Popen(
                [sys.executable, str(script), "--case", case], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | _quiet(settings)))
            stack.callback(running[case].kill)
            ask(case, json.dumps(settings))
        for _ in range(turns):
            for case in spent:
                spent[case].append(ask(case, ""))
    return spent


def _quiet(settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a case: no network, nothing printed, the number of threads."""
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": str(settings["threads"])}


def others_seconds() -> float:
    """CPU seconds that anything but this process and its children took since the machine began."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    own = sum(used.ru_utime + used.ru_stime for used in map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - own


def figures(run: dict[str, Any], steady: int = 0) -> dict[str, float]:
    """One number for each figure; with `steady`, also those of the prefill: from that chunk on the memory is full."""
    measured = {"units": run["units"], "decode_ms": 1e3 * statistics.mean(run["decode_s"]),
                "others_cores": run["others_cores"]}
    if steady:
        chunks = run["chunk_s"]
        measured |= {"tok_per_s": run["tokens"] / sum(chunks),
                     **({"chunk_ms": 1e3 * statistics.median(chunks[steady:])} if len(chunks) > steady else {}),
                     **{name.replace("_bytes", "_mib"): run[name] / MIB for name in
                        ("kv_peak_bytes", "kv_final_bytes", "rss_prefill_bytes", "rss_total_bytes")}}
    return measured


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spreads(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of every figure over the repeats."""
    return {name: spread(row[name] for row in rows) for name in rows[0]}


def ratio(over: list[dict[str, float]], under: list[dict[str, float]], name: str) -> dict[str, float]:
    """Ratio of the medians of a figure, with the smallest and largest ratio of one repeat."""
    pairs = [a[name] / b[name] for a, b in zip(over, under, strict=True)]
    of_medians = statistics.median(row[name] for row in over) / statistics.median(row[name] for row in under)
    return {"of_medians": of_medians, "min": min(pairs), "max": max(pairs)}


def show(cases: dict[str, dict[str, dict[str, float]]], ratios: dict[str, dict[str, float]], out: Any) -> None:
    """Figures down, cases across, then the ratios."""
    from rich.console import Console
    from rich.table import Table
    table = Table("median (min to max)")
    for case in cases:
        table.add_column(case, justify="right")

    def cell(one: dict[str, float] | None) -> str:
        if one is None:
            return ""
        digits = ".0f" if one["median"] >= 1000 else ".4g"
        middle, low, high = (format(one[key], digits) for key in ("median", "min", "max"))
        return middle if low == high else f"{middle} ({low} to {high})"

    for name in dict.fromkeys(name for case in cases.values() for name in case):
        table.add_row(name, *(cell(case.get(name)) for case in cases.values()))
    Console(file=out, width=150).print(table)
    for name, one in ratios.items():
        print(f"{name}: {one['of_medians']:.3f}, ratio of medians; of single repeats {one['min']:.3f} to "
              f"{one['max']:.3f}", file=out)


def finish(options: argparse.Namespace, name: str, cases: dict[str, dict[str, dict[str, float]]],
           ratios: dict[str, dict[str, float]], notes: Iterable[str], result: dict[str, Any]) -> None:
    """Show the figures and, with --json or --keep, record them."""
    out = sys.stderr if options.json else sys.stdout
    show(cases, ratios, out)
    for note in notes:
        print(note, file=out)
    if options.json or options.keep:
        from record import record
        record(options.keep or name, result | {"repeats": options.repeats, "cases": cases, "ratios": ratios},
               keep=options.keep is not None)


def pool_note(memory: dict[str, int]) -> str:
    """Our pool beside its formula, in words."""
    return (f"ours: {memory['slots']} slots of {memory['slot_bytes']:,} bytes; the pool holds "
            f"{memory['bytes_pool']:,}, its formula says {memory['formula_bytes']:,}; with RoPE tables and masks "
            f"{memory['bytes_resident']:,}")


def add_options(parser: argparse.ArgumentParser, *, tokens: int, repeats: int) -> None:
    """The options of all three scripts."""
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of the prefill (default {tokens:,})")
    parser.add_argument("--budget", type=int, default=1024, help="units per KV head (default 1,024)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk (default 1,024)")
    parser.add_argument("--decode", type=int, default=64, metavar="STEPS", help="greedy tokens timed (default 64)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what the processes are started with


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for another random Llama than the tiny one in fp32."""
    parser.add_argument("--smollm2", action="store_true", help="a random Llama of SmolLM2-135M's shape")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the random Llama")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what would compare unlike things."""
    least = -(-options.budget // options.chunk) + WARM_UP
    if options.tokens % options.chunk or options.tokens < least * options.chunk:
        parser.error(f"--tokens is {options.tokens}; expected a multiple of --chunk ({options.chunk}), at least "
                     f"{least} chunks")
    if not 0 < options.decode < options.chunk:
        parser.error(f"--decode is {options.decode}; expected at least 1 and fewer than --chunk ({options.chunk}): a "
                     "commit in between would shorten the cache")
    if options.repeats < 1 or options.threads < 1:
        parser.error("expected at least 1 of --repeats and --threads")


def settings_of(options: argparse.Namespace, folder: str, **others: Any) -> dict[str, Any]:
    """The settings of a case, which it reads from stdin."""
    torch.set_num_threads(options.threads)  # so that the record says what the cases ran with
    return {name: getattr(options, name) for name in ("tokens", "budget", "chunk", "decode", "threads")} | {
        "folder": folder, "yardstick": False} | others


# -- the cases --------------------------------------------------------------------------------------------------------


def answer(case: Callable[[SimpleNamespace], dict[str, Any]]) -> None:
    """In a process of its own: run the case that stdin describes, and print what it measured."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is no answer
        settings = SimpleNamespace(**json.load(sys.stdin))
        torch.set_num_threads(settings.threads)
        measured = case(settings)
    print(json.dumps(measured), file=out, flush=True)


def serve(case: Callable[[SimpleNamespace], Iterator[list[float]] | AsyncIterator[list[float]]]) -> None:
    """In a process of its own: take the case that the first line of stdin describes one step further for every line."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), asyncio.Runner() as loop:
        steps: Any = None
        for line in sys.stdin:
            if steps is None:
                settings = SimpleNamespace(**json.loads(line))
                torch.set_num_threads(settings.threads)
                steps = case(settings)
            spent = loop.run(_next(steps)) if hasattr(steps, "__anext__") else next(steps)
            print(json.dumps(spent), file=out, flush=True)


async def _next(steps: AsyncIterator[list[float]]) -> list[float]:
    return await anext(steps)


def status_bytes(*names: str) -> int:
    """Sum of these lines of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(names))


def resident_bytes() -> int:
    """RssAnon + RssFile of this process."""
    return status_bytes("RssAnon:", "RssFile:")


class HighWater:
    """The most that was resident, over what was when this was made."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's own mark starts again from here
        self.base = resident_bytes()

    def growth(self) -> int:
        return status_bytes("VmHWM:") - self.base


def load(settings: SimpleNamespace) -> Any:
    """The model of the folder."""
    from transformers import AutoModelForCausalLM
    dtype = getattr(torch, getattr(settings, "dtype", "float32"))
    return AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype, attn_implementation="sdpa").eval()


def load_ids(settings: SimpleNamespace) -> torch.Tensor:
    """The ids of the folder."""
    return torch.from_numpy(np.load(Path(settings.folder) / "ids.npy")[:settings.tokens])


def words() -> Any:
    """A tokenizer of as many words as the model has ids; the benchmarks feed ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def runtime_of(settings: SimpleNamespace, model: Any = None, store_bits: int = 16, decode_copy: bool = False) -> Any:
    """Our runtime over the tiny Llama's folder (or the model, or a function that loads it in the runtime's thread) and
    its random heads."""
    from locret_stream import Runtime
    from locret_stream.config import Budget
    options: dict[str, Any] = dict(
        heads=Path(settings.folder) / "heads", policy="locret", max_live=1, chunk_size=settings.chunk,
        store_bits=store_bits, decode_copy=decode_copy,
        budget=Budget(units=settings.budget, sinks=SINKS, stabilizers=STABILIZERS))
    if model is not None:
        return Runtime(model, words(), **options)
    dtype = getattr(settings, "dtype", "float32")
    return Runtime.from_pretrained(settings.folder, dtype=dtype, device="cpu", **options)


async def ours(settings: SimpleNamespace) -> dict[str, Any]:
    """Our side through the public async API: chunks are fed one after the other, then tokens generated."""
    ids, marks = load_ids(settings), []

    def loaded() -> Any:
        model = load(settings)
        marks.append(HighWater())
        return model

    async with runtime_of(settings, loaded) as runtime:
        engine, [whole] = runtime.engine, marks

        async def decode(context: Any, steps: int) -> list[float]:
            at = [time.perf_counter() async for _ in context.generate(max_new_tokens=steps + 1, ignore_eos=True)]
            return np.diff(at).tolist()  # the first one needs no forward

        async with runtime.open("warm-up", raw=True) as context:
            await context.feed(ids[:WARM_UP * settings.chunk].tolist())
            await decode(context, WARM_UP)
        before, prefill = whole.growth(), HighWater()
        async with runtime.open("timed", raw=True) as context:
            chunk_s, resident, yard_s = [], [], []
            for piece in ids.split(settings.chunk):
                given = piece.tolist()
                began = time.perf_counter()
                await context.feed(given)
                chunk_s.append(time.perf_counter() - began)
                resident.append(resident_bytes())
                if settings.yardstick:
                    yard_s.append(await asyncio.wrap_future(runtime.worker.submit("yardstick", yardstick)))
            after, units = prefill.growth(), context.memory.units
            decode_s = await decode(context, settings.decode)
        memory, shape = runtime.memory, engine.shape
        pair = shape.token_bytes // shape.layers
        return {"tokens": len(ids), "chunk_s": chunk_s, "resident": resident, "decode_s": decode_s, "units": max(units),
                "yard_s": yard_s,
                "kv_peak_bytes": memory.slot_bytes, "kv_final_bytes": sum(units) * pair,
                "rss_prefill_bytes": after, "rss_total_bytes": max(before, prefill.base - whole.base + after),
                "parameters": sum(p.numel() for p in engine.policy.heads.parameters()),
                "memory": {name: getattr(memory, name) for name in memory.__struct_fields__}
                | {"formula_bytes": engine.pool.formula_bytes()}}


def yardstick() -> float:
    """Seconds of a fixed piece of work, on the thread that it is called on: how fast the machine is just now."""
    a = torch.ones(1024, 1024)
    began = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    return time.perf_counter() - began


@contextlib.contextmanager
def live_kv(cache: Any) -> Iterator[Callable[[], int]]:
    """The most bytes of K and V that lived in a DynamicCache after any of its updates."""
    from transformers.cache_utils import DynamicLayer
    real, most = DynamicLayer.update, 0

    def update(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        out = real(layer, *args, **kwargs)
        most = max(most, kv_bytes(cache))
        return out

    DynamicLayer.update = update
    try:
        yield lambda: most
    finally:
        DynamicLayer.update = real


def kv_bytes(cache: Any) -> int:
    """Bytes of K and V in a DynamicCache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


def keep_sinks_and_recent(cache: Any, budget: int) -> None:
    """StreamingLLM's memory (Xiao et al., arXiv:2309.17453) in a DynamicCache; positions go on growing."""
    for layer in cache.layers:
        if layer.keys.shape[2] > budget:
            layer.keys, layer.values = (torch.cat([part[:, :, :SINKS], part[:, :, SINKS - budget:]], dim=2)
                                        for part in (layer.keys, layer.values))


@torch.inference_mode()
def stock(settings: SimpleNamespace, press: Any = contextlib.nullcontext) -> dict[str, Any]:
    """transformers' side with a DynamicCache, chunk by chunk without the LM head, then greedy steps.

    `press` gives a context manager for a model, in which the prefill runs. With `recent` among the settings the cache
    is cut after every chunk to as many units as our budget has: the first ones, and the most recent. With `at_once`
    the whole prefill is one pass, as `generate` reads a prompt unless it is told otherwise.
    """
    from transformers import DynamicCache
    model, ids = load(settings), load_ids(settings)
    ids = ids[None]
    positions = torch.arange(ids.shape[1] + max(settings.decode, WARM_UP))[None]

    def prefill(cache: Any, count: int) -> tuple[list[float], list[int]]:
        spent, resident = [], []
        chunk = count if getattr(settings, "at_once", False) else settings.chunk
        with press(model):
            for at in range(0, count, chunk):
                stop = min(count, at + chunk)
                began = time.perf_counter()
                model.model(input_ids=ids[:, at:stop], position_ids=positions[:, at:stop], past_key_values=cache)
                if getattr(settings, "recent", False):
                    keep_sinks_and_recent(cache, settings.budget)
                spent.append(time.perf_counter() - began)
                resident.append(resident_bytes())
        return spent, resident

    def decode(cache: Any, at: int, steps: int) -> list[float]:
        token, spent = ids[:, at - 1:at], []
        for step in range(at, at + steps):
            began = time.perf_counter()
            out = model(input_ids=token, position_ids=positions[:, step:step + 1], past_key_values=cache)
            token = out.logits[:, -1:].argmax(-1)
            spent.append(time.perf_counter() - began)
        return spent

    whole, cache, first = HighWater(), DynamicCache(), min(ids.shape[1], WARM_UP * settings.chunk)
    prefill(cache, first)
    decode(cache, first, WARM_UP)
    del cache
    before, high, cache = whole.growth(), HighWater(), DynamicCache()
    with live_kv(cache) as peak:
        chunk_s, resident = prefill(cache, ids.shape[1])
        after = high.growth()
    units, final = max(layer.get_seq_length() for layer in cache.layers), kv_bytes(cache)
    decode_s = decode(cache, ids.shape[1], settings.decode)
    return {"tokens": ids.shape[1], "chunk_s": chunk_s, "resident": resident, "decode_s": decode_s, "units": units,
            "kv_peak_bytes": peak(), "kv_final_bytes": final, "rss_prefill_bytes": after,
            "rss_total_bytes": max(before, high.base - whole.base + after)}
