"""The plain models before and after: this tree beside another commit of it: `python benchmarks/against.py 9bc5262`.

The other commit is checked out beside this tree, and processes of the two take turns; each makes the same random models
(Llama, Qwen3, Gemma 3: six layers, hidden size 512) and the bundled one, in fp32 and bf16, reads the same tokens, and
answers with

  equal      whether every tensor of the committed state (K, V, scores, positions, the policy's state) is bit-equal
             behind several evictions: then no figure of quality can have changed
  operators  how many operators of torch a committed chunk and a decoded token call, which is what Python costs: it does
             not depend on what else the machine does
  ratio      of the fastest chunk and of the 20th percentile of tokens, this tree's time over the other's, with the
             quartiles of the rounds

    python benchmarks/against.py 9bc5262 --rounds 5 --keep
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
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
CHUNK, WARM_UP = 128, 2


# -- in a process of either tree: nothing but what both have -----------------------------------------------------------


def digest(engine: Any, state: Any) -> str:
    """Of every tensor of the committed state."""
    whole = hashlib.sha256()
    for name, tensor in sorted(engine.export(state).items()):
        whole.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def operators(step: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))


def seconds(step: Callable[[], Any], repeats: int) -> list[float]:
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)
    return spent[WARM_UP:]


@torch.no_grad()
def one(model: Any, policy: str, heads: Path | None, units: int, repeats: int) -> dict[str, Any]:
    """Digest, operators, and seconds of chunks and of tokens, of one model under one policy."""
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
    ids = torch.randint(3, vocab, (units + (repeats + 3) * CHUNK,), generator=torch.Generator().manual_seed(1)).tolist()
    engine.accept(state, ids)
    while state.seen < units + 2 * CHUNK:
        engine.commit(state)
    chunk_operators = operators(lambda: engine.commit(state))
    chunks = seconds(lambda: engine.commit(state), repeats)
    equal = digest(engine, state)
    engine.accept(state, [5])
    engine.logits(state)

    def token() -> None:
        engine.decode([NextToken(state, lambda logits: int(logits.argmax()))])

    token()
    token_operators = operators(token)
    tokens = seconds(token, CHUNK - 8)
    return {"digest": equal, "operators": [chunk_operators, token_operators], "chunk_s": min(chunks),
            "token_s": sorted(tokens)[len(tokens) // 5]}


def answer(units: int, repeats: int) -> dict[str, Any]:
    bundled = ROOT / "locret_stream/assets/bundled"
    found = {}
    for name, config in KINDS.items():
        torch.manual_seed(0)
        found[name] = one(tf.AutoModelForCausalLM.from_config(config()).eval(), "keydiff", None, units, repeats)
    for dtype in (torch.float32, torch.bfloat16):
        model = tf.AutoModelForCausalLM.from_pretrained(bundled, dtype=dtype).eval()
        for policy in POLICIES:
            name = f"bundled, {policy}, {str(dtype).removeprefix('torch.')}"
            found[name] = one(model, policy, bundled if policy == "locret" else None, 256, repeats)
    return found


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


def asked(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), options.commit, "--child", "--units", str(options.units),
               "--repeats", str(options.repeats), "--threads", str(options.threads)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, check=True,
                          stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def ratios(now: list[float], before: list[float]) -> list[float]:
    """Of the two least, and the quartiles of the rounds."""
    rounds = [one / other for one, other in zip(now, before, strict=True)]
    quartiles = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
    return [round(x, 3) for x in (min(now) / min(before), quartiles[0], quartiles[2])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the other commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", type=int, default=1024, help="budget of the random models")
    parser.add_argument("--repeats", type=int, default=12, help="chunks timed in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write results/against.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(answer(options.units, options.repeats)))
        return
    with checked_out(options.commit) as tree:
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            rounds.append((asked(ROOT, options), asked(tree, options)))
    found: dict[str, Any] = {}
    for name in rounds[0][0]:
        now, before = ([one[side][name] for one in rounds] for side in (0, 1))
        found[name] = {
            "equal": all(one["digest"] == other["digest"] for one, other in zip(now, before, strict=True)),
            "operators of a chunk, a token": [now[0]["operators"], before[0]["operators"]],
            **{f"ratio of a {what}": ratios(*([one[f"{what}_s"] for one in side] for side in (now, before)))
               for what in ("chunk", "token")}}
    record("against", {"other": options.commit, "units": options.units, "threads": options.threads, **found},
           keep=options.keep)


if __name__ == "__main__":
    main()
