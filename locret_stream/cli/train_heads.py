"""`locret-stream train-heads`: retaining heads for a model, out of prompts and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from locret_stream.cli.common import (
    Held,
    Json,
    Model,
    check_readable,
    err,
    interruptible,
    load,
    out,
    print_json,
)

HELP = """Train retaining heads for a model.

The data is JSONL, one {"prompt", "answer"} or ShareGPT {"conversations": …} or {"messages": …} per line; it is \
rendered with the model's own chat template. The same command on the same --out goes on where an interrupted run \
stopped. What it writes is what --heads of the other verbs reads.

Examples:

\b
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads
  # a short run for a small model
  locret-stream train-heads --model bundled --data pairs.jsonl --out ./heads --steps 200 --width 128
  # the paper's label
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --label logit
  # heads for the policies kvzap and trimkv
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./zap --features hidden
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./trim --output retention"""


def train_heads(
    model: Model,
    data: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSONL of prompts and answers.")],
    to: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the heads and the state of the run.")],
    label: Annotated[str, typer.Option(help="What the heads learn: logprob, zscore or logit.")] = "logprob",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3000,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 1,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4,
    width: Annotated[int, typer.Option(help="Of the heads' hidden layer.")] = 1024,
    features: Annotated[str, typer.Option(help="What the heads read: qkv (Locret) or hidden (KVzap).")] = "qkv",
    output: Annotated[str, typer.Option(help="What they give: score, or retention (TRIM-KV).")] = "score",
    horizon: Annotated[int, typer.Option(help="Tokens after which a unit is worth its label (retention).")] = 4096,
    input_norm: Annotated[bool, typer.Option("--input-norm", help="LayerNorm before the heads.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="Biases in the heads.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longer examples are cut.")] = 10_240,
    held_out: Annotated[float, typer.Option(help="Share of the examples kept for evaluation.")] = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the examples.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an earlier run in --out.")] = False,
    as_json: Json = False,
) -> None:
    check_readable(data)
    with interruptible(Held(f"the state of the run is in {to}; the same command goes on from there")):
        from locret_stream import training

        config = training.TrainConfig(
            label=label, steps=steps, batch=batch, lr=lr, width=width, features=features, output=output,
            horizon=horizon, input_norm=input_norm, bias=bias, max_tokens=max_tokens, held_out=held_out,
            eval_every=eval_every, seed=seed)
        loaded, tokenizer = load(model)
        with training.progress_bar(err) as progress:
            result = training.train_heads(loaded, data, to, config, tokenizer=tokenizer, progress=progress,
                                          restart=restart)
    if as_json:
        print_json(msgspec.to_builtins(result))
        return
    out.print(f"{result.out}: {result.steps:,} steps on {result.examples:,} examples, top-10 % overlap "
              f"{result.overlap_before:.1%} before and {result.overlap:.1%} after on {result.held_out} held out",
              soft_wrap=True)
    policy = "trimkv" if output == "retention" else "kvzap" if features == "hidden" else "locret"
    out.print(f"use them: locret-stream run TEXT --model {model} --heads {result.out}"
              + (f" --policy {policy}" if policy != "locret" else ""), soft_wrap=True)
