"""The plain models before and after: this tree beside another commit of it: `python benchmarks/against.py 9bc5262`.

The other commit is checked out beside this tree. A process of either tree makes the same models (random ones: Llama,
Qwen3, Gemma 3 of six layers, hidden size 512; the bundled one, and those of `--model`, in fp32 and bf16), reads
the same tokens, and answers with

  equal      whether every tensor of the committed state (K, V, scores, positions, the policy's state) is bit-equal
             behind several evictions: then no figure of quality can have changed
  operators  how many operators of torch a committed chunk and a decoded token call, which is what Python costs: it does
             not depend on what else the machine does
  ratio      of a chunk's and of a token's time, this tree over the other. The two processes take turns step by step,
             so that what else the machine does meets both alike: the median of the pairs' ratios, its 95 % interval,
             and how many pairs there were

    python benchmarks/against.py 9bc5262 --keep
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from record import record
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=32_768, pad_token_id=None, bos_token_id=1, eos_token_id=2)
KINDS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=64),
    "gemma3": lambda: tf.Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=512,
                                          layer_types=["sliding_attention", "full_attention"] * 3),
}
POLICIES = "locret", "h2o", "snapkv"
BUNDLED = ROOT / "locret_stream/assets/bundled"
CHUNK, WARM_UP = 128, 2


# -- in a process of either tree: nothing but what both have -----------------------------------------------------------


def digest(engine: Any, state: Any) -> str:
    """Of every tensor of the committed state."""
    whole = hashlib.sha256()
    for name, tensor in sorted(engine.export(state).items()):
        whole.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def operators(step: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))


@torch.no_grad()
def prepared(model: Any, policy: str, heads: Path | None, units: int, chunks: int) -> Iterator[Any]:
    """One model under one policy: operators of a chunk, then seconds of `chunks` chunks, each when it is asked for, the
    digest, operators of a token, and seconds of tokens without end."""
    from locret_stream.config import Budget, StreamConfig
    from locret_stream.engine import Engine
    from locret_stream.engine.decoding import NextToken
    from locret_stream.heads import RetainingHeads
    from locret_stream.models import attach
    from locret_stream.policies import make_policy

    attachment, retaining = attach(model), None
    if heads is not None:
        retaining = RetainingHeads.load(heads)
        retaining = attachment.put_beside(retaining, attachment.dtype if attachment.dtype.itemsize < 4 else None)
    config = StreamConfig(budget=Budget(units=units, sinks=4, stabilizers=32), chunk_size=CHUNK, policy=policy)
    engine = Engine(attachment, config, make_policy(policy, {}, retaining), slots=1)
    state, vocab = engine.open(0), min(2000, attachment.shape.vocab)
    ids = torch.randint(3, vocab, (units + (chunks + 3) * CHUNK,), generator=torch.Generator().manual_seed(1)).tolist()
    engine.accept(state, ids)
    while state.seen < units + 2 * CHUNK:
        engine.commit(state)
    yield operators(lambda: engine.commit(state))
    for _ in range(chunks):
        yield seconds(lambda: engine.commit(state))
    yield digest(engine, state)
    engine.accept(state, [5])
    engine.logits(state)

    def token() -> None:
        answer, = engine.decode([NextToken(state, lambda logits: int(logits.argmax()))])
        assert isinstance(answer, int), answer

    token()
    yield operators(token)
    while True:
        while engine.ready(state):
            engine.commit(state)
        yield seconds(token)


def answer(name: str, units: int, chunks: int) -> None:
    """Answer each line of the standard input with the next thing that `prepared` yields."""
    kind, policy, dtype = name.split(", ")
    if kind in KINDS:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(KINDS[kind]())
    else:
        kind = str(BUNDLED) if kind == "bundled" else kind
        model = tf.AutoModelForCausalLM.from_pretrained(kind, dtype=getattr(torch, dtype))
    heads = BUNDLED if kind == str(BUNDLED) and policy == "locret" else None
    steps = prepared(model.eval(), policy, heads, units, chunks)
    for _ in sys.stdin:
        print(json.dumps(next(steps)), flush=True)


# -- the process that starts them --------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of that commit, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, check=True, capture_output=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


@contextlib.contextmanager
def child(tree: Path, name: str, options: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    """A process of that tree, which takes one step for each call."""
    units = options.units if name.split(", ")[0] != "bundled" else 256
    command = [sys.executable, str(Path(__file__).resolve()), options.commit, "--child", name, "--units", str(units),
               "--chunks", str(options.chunks), "--threads", str(options.threads)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout

        def step() -> Any:
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield step
        finally:
            process.kill()


def ratio(now: Callable[[], float], other: Callable[[], float], limit: float, count: float = math.inf) -> list[float]:
    """Median of the ratios of pairs taken in turn for `limit` seconds, `count` at most, its 95 % interval, and how
    many pairs there were."""
    pairs: list[float] = []
    until = time.monotonic() + limit
    while len(pairs) < count and (time.monotonic() < until or len(pairs) < 20):
        first, second = (now, other) if len(pairs) % 2 else (other, now)
        spent = {first: first(), second: second()}
        pairs.append(spent[now] / spent[other])
    pairs = sorted(pairs[WARM_UP:])
    reach = 0.98 * math.sqrt(len(pairs))  # of the interval of a median, in ranks: binomial
    low, high = (pairs[min(len(pairs) - 1, max(0, round(len(pairs) / 2 + side * reach)))] for side in (-1, 1))
    return [*(round(x, 4) for x in (statistics.median(pairs), low, high)), len(pairs)]


def compared(name: str, tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    with child(ROOT, name, options) as now, child(tree, name, options) as other:
        chunk_operators = [now(), other()]
        chunk = ratio(now, other, math.inf, options.chunks)
        equal = now() == other()
        token_operators = [now(), other()]
        return {"equal": equal, "operators of a chunk": chunk_operators, "of a token": token_operators,
                "ratio of a chunk": chunk, "ratio of a token": ratio(now, other, options.seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the other commit")
    parser.add_argument("--model", action="append", default=[],
                        help="one more model, in fp32 and bf16: a name, as smollm2, or a folder")
    parser.add_argument("--only", metavar="TEXT", default="", help="only what has this in its name")
    parser.add_argument("--units", type=int, default=1024, help="budget (the bundled model: 256)")
    parser.add_argument("--chunks", type=int, default=32, help="pairs of chunks")
    parser.add_argument("--seconds", type=float, default=20, help="how long pairs of tokens are taken")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write results/against.json")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        answer(options.child, options.units, options.chunks)
        return
    from locret_stream.named_models import model_path

    dtypes = "float32", "bfloat16"
    names = [f"{kind}, keydiff, float32" for kind in KINDS]
    names += [f"bundled, {policy}, {dtype}" for dtype in dtypes for policy in POLICIES]
    folders = {model: str(Path(model_path(model)).resolve()) for model in options.model}
    names += [f"{folder}, keydiff, {dtype}" for folder in folders.values() for dtype in dtypes]
    found: dict[str, Any] = {}
    with checked_out(options.commit) as tree:
        for name in (name for name in names if options.only in name):
            label = name
            for model, folder in folders.items():
                label = label.replace(folder, model)
            found[label] = compared(name, tree, options)
            print(label, json.dumps(found[label]), file=sys.stderr, flush=True)
    record("against", {"other": options.commit, "units": options.units, "threads": options.threads, **found},
           keep=options.keep)


if __name__ == "__main__":
    main()
