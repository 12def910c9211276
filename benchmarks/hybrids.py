"""A committed chunk of hybrids beside stock transformers' own chunk: `python benchmarks/hybrids.py`.

Random models of six layers, hidden size 512, one of each kind of recurrent layer. Both read chunks of the same size, in
turn, with as many units in attention layers: ours commits a chunk over a full budget, with its scores and its eviction;
stock runs its own forward, without the LM head, over a cache of that many tokens. The cache of stock is copied for each
repeat, off the clock; ours evicts to the same size by itself. `ratio` is the median of ours over the median of stock.
Jamba's mixers forget their state in stock's chunk (`forgets`), so that it computes less than ours, and another text.
RecurrentGemma, which keeps its state in its modules, and reads no second chunk in transformers, is not here.

    python benchmarks/hybrids.py --kinds lfm2 qwen3.5 --chunk 256 --units 1024 --repeats 15 --keep
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from record import record
from transformers import AutoModelForCausalLM

from locret_stream.config import Budget, StreamConfig
from locret_stream.engine import Engine
from locret_stream.models import attach
from locret_stream.policies import make_policy

SIZES: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=32_768, pad_token_id=0, bos_token_id=1, eos_token_id=2)
DELTA: dict[str, Any] = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
                             linear_value_head_dim=64)
MAMBA: dict[str, Any] = dict(mamba_n_heads=16, mamba_d_state=64, mamba_d_head=64, mamba_expand=2, mamba_n_groups=1,
                             mamba_chunk_size=128)


def every_third(kind: str) -> list[str]:
    """Of six layers the third and the last attend."""
    return [kind, kind, "full_attention"] * 2


KINDS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "lfm2": lambda: tf.Lfm2Config(**SIZES, layer_types=every_third("conv")),
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=64, layer_types=every_third("linear_attention")),
    "granite4-h": lambda: tf.GraniteMoeHybridConfig(
        **SIZES, **MAMBA, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=1408,
        layer_types=every_third("linear_attention")),
    "falcon-h1": lambda: tf.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=1024, head_dim=64),
    "minimax": lambda: tf.MiniMaxConfig(**SIZES, head_dim=64, num_local_experts=2, num_experts_per_tok=1,
                                        layer_types=every_third("linear_attention")),
    "jamba": lambda: tf.JambaConfig(**SIZES, attn_layer_period=3, attn_layer_offset=2, num_experts=2,
                                    num_experts_per_tok=1, mamba_d_state=16, mamba_dt_rank=32, use_mamba_kernels=False),
}


@torch.no_grad()
def compare(kind: str, chunk: int, units: int, repeats: int) -> dict[str, Any]:
    """Seconds of a chunk, ours and stock's, in turn."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    attachment = attach(model)
    config = StreamConfig(budget=Budget(units=units, sinks=4, stabilizers=32), chunk_size=chunk, policy="keydiff")
    engine = Engine(attachment, config, make_policy("keydiff", {}, None), slots=1)
    state, ids = engine.open(0), torch.randint(3, 2048, (units + (repeats + 4) * chunk,)).tolist()
    engine.accept(state, ids)
    while state.seen < units + chunk:
        engine.commit(state)
    read = model(torch.tensor([ids[:units]]), use_cache=True, logits_to_keep=1)
    part, before = torch.tensor([ids[units:units + chunk]]), getattr(read, "past_key_values", None)
    spent: dict[str, list[float]] = {"ours": [], "stock": []}
    for repeat in range(repeats + 2):
        cache = copy.deepcopy(before)
        began = time.perf_counter()
        engine.commit(state)
        between = time.perf_counter()
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if repeat >= 2:  # the first ones warm up
            spent["ours"].append(between - began)
            spent["stock"].append(time.perf_counter() - between)
    ours, stock = (statistics.median(spent[who]) for who in ("ours", "stock"))
    pairs = sorted(one / other for one, other in zip(spent["ours"], spent["stock"], strict=True))
    return {"ours_ms": round(1000 * ours, 1), "stock_ms": round(1000 * stock, 1), "ratio": round(ours / stock, 3),
            "quartiles": [round(pairs[len(pairs) // 4], 3), round(pairs[-1 - len(pairs) // 4], 3)],
            "forgets": attachment.stepwise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--chunk", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--units", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write results/hybrids.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {kind: {f"chunk of {chunk}": compare(kind, chunk, options.units, options.repeats)
                    for chunk in options.chunk} for kind in options.kinds}
    record("hybrids", {"units": options.units, "threads": options.threads, **found}, keep=options.keep)


if __name__ == "__main__":
    main()
