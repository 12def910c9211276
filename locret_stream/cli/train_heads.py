"""`locret-stream train-heads`: retaining heads for a model, out of prompts and answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from locret_stream.cli.common import (
    Held,
    Json,
    Model,
    check_readable,
    err,
    file_text,
    interruptible,
    load,
    out,
    print_json,
)
from locret_stream.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from locret_stream.models import Attachment
    from locret_stream.training import (
        Allocation,
        AllocationConfig,
        Example,
        TrainConfig,
        TrainResult,
        TuneConfig,
        TuneResult,
    )

HELP = """Train retaining heads for a model.

The data is JSONL, one {"prompt", "answer"} or ShareGPT {"conversations": …} or {"messages": …} per line; it is \
rendered with the model's own chat template. The same command on the same --out goes on where an interrupted run \
stopped. What it writes is what --heads of the other verbs reads.

--allocate then measures, on held-out examples, what it costs the answers when one layer alone keeps few units, and \
divides the budget by it: layers that need more get more, and --heads brings that along. It is kept if it is better \
than the same for each layer, of examples that had no say in it. It is measured for the budget and the chunk size that \
you will use.

--tune then trains the heads on with eviction going on, so that answers with that budget come near those of the full \
cache, and keeps what comes out only if held-out answers are better for it; the first heads stay beside them as \
heads.first.safetensors. With --allocate, too, the budget is divided before, and after if the heads changed. \
--background adds to both what an example is too short to show: a long text whose units the heads like, wrongly, and \
which has filled the memory by the time a fact arrives. Some 100,000 tokens of it are read every 25 steps: a file \
of 4 MB is of use.

Examples:

\b
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads
  # a short run for a small model
  locret-stream train-heads --model bundled --data pairs.jsonl --out ./heads --steps 200 --width 128
  # the paper's label
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --label logit
  # heads for the policies kvzap and trimkv
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./zap --features hidden
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./trim --output retention --tune 200
  # heads that heed a question told beforehand (run --focus)
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./asked --query-aware
  # the same heads, and what each layer is to get of a budget of 2000 units
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --allocate --allocate-units 2000
  # and 200 steps of tuning for that budget
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --tune 200 --tune-units 2000
  # in a memory that such logs have filled
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --tune 200 --tune-units 2000 \
--background service.log"""


def train_heads(
    model: Model,
    data: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSONL of prompts and answers.")],
    to: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the heads and the state of the run.")],
    label: Annotated[str | None, typer.Option(
        show_default="zscore, or logprob for retention", help=(
            "What the heads learn: attention logits, standardised (zscore) or as they are (logit), or "
            "log-probabilities (logprob)."))] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3000,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 1,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4,
    width: Annotated[int, typer.Option(help="Of the heads' hidden layer.")] = 1024,
    features: Annotated[str, typer.Option(help="What the heads read: qkv (Locret) or hidden (KVzap).")] = "qkv",
    output: Annotated[str, typer.Option(help="What they give: score, or retention (TRIM-KV).")] = "score",
    horizon: Annotated[int | None, typer.Option(show_default="4096", help=(
        "Tokens after which a unit is worth its label (retention)."))] = None,
    query_aware: Annotated[bool, typer.Option("--query-aware", help=(
        "Locret-Q: for a memory that is told with --focus what it will be asked about."))] = False,
    query_tokens: Annotated[int | None, typer.Option(show_default="64", help=(
        "The most tokens of a question, with --query-aware."))] = None,
    input_norm: Annotated[bool, typer.Option("--input-norm", help="LayerNorm before the heads.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="Biases in the heads.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longer examples are cut.")] = 10_240,
    held_out: Annotated[float, typer.Option(help="Share of the examples kept for evaluation, at least one.")] = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the examples.")] = 0,
    allocate: Annotated[bool, typer.Option("--allocate", help="Also divide the budget among the layers.")] = False,
    allocate_units: Annotated[int | None, typer.Option(show_default="768 for the bundled model, else 6000", help=(
        "Units per KV head (mean over the layers) to divide."))] = None,
    allocate_chunk: Annotated[int | None, typer.Option(show_default="256 for the bundled model, else 1024", help=(
        "Tokens read between two evictions."))] = None,
    allocate_examples: Annotated[int | None, typer.Option(show_default="32", help=(
        "The most held-out examples to measure on."))] = None,
    allocate_by: Annotated[str | None, typer.Option(show_default="loss", help=(
        "By loss (of the answers when a layer evicts) or scores (the best of all layers; quick, and for --label "
        "logprob alone, with which heads keep less)."))] = None,
    tune: Annotated[int, typer.Option(metavar="STEPS", min=0, show_default=False, help=(
        "Also tune the heads with eviction going on, for so many steps; kept only if it helps."))] = 0,
    tune_units: Annotated[int | None, typer.Option(show_default="as --allocate-units", help=(
        "Units per KV head (mean over the layers) to tune for."))] = None,
    tune_chunk: Annotated[int | None, typer.Option(show_default="as --allocate-chunk", help=(
        "Tokens read between two evictions."))] = None,
    background: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        "Text like most of what will stream by, about which nothing is asked: --allocate and --tune let examples begin "
        "behind it."))] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an earlier run in --out, heads and all.")] = False,
    restart_tuning: Annotated[bool, typer.Option("--restart-tuning", help=(
        "Tune the first heads anew; what was tuned before is forgotten."))] = False,
    as_json: Json = False,
) -> None:
    check_readable(data)
    if background is not None:
        check_readable(background)
    _expect_together(background is not None, query_aware, tune, output, {
        "--allocate": (allocate, {"--allocate-units": allocate_units, "--allocate-chunk": allocate_chunk,
                                  "--allocate-examples": allocate_examples, "--allocate-by": allocate_by}),
        "--tune STEPS": (tune > 0, {"--tune-units": tune_units, "--tune-chunk": tune_chunk,
                                    "--restart-tuning": restart_tuning or None}),
        "--query-aware": (query_aware, {"--query-tokens": query_tokens}),
        "--output retention": (output == "retention", {"--horizon": horizon}),
        "--tune or --allocate": (tune > 0 or allocate, {"--background": background})})
    if query_aware and query_tokens is not None and query_tokens < 1:
        raise ConfigError(f"--query-tokens is {query_tokens}; expected at least 1 with --query-aware")
    divided = tuned = None
    begun_anew = " and ".join(f"--{name}" for name, given in (("restart", restart), ("restart-tuning", restart_tuning))
                              if given)
    with interruptible(Held(f"the state of the run is in {to}; the same command"
                            + (f", without {begun_anew}," if begun_anew else "") + " goes on from there")):
        from locret_stream import models, training

        config = training.TrainConfig(
            label=label, steps=steps, batch=batch, lr=lr, width=width, features=features, output=output,
            horizon=4096 if horizon is None else horizon, input_norm=input_norm, bias=bias,
            query_tokens=(query_tokens or 64) if query_aware else 0,
            max_tokens=max_tokens, held_out=held_out, eval_every=eval_every, seed=seed)
        division = _allocation(model, allocate_units, allocate_chunk,
                               32 if allocate_examples is None else allocate_examples,
                               "loss" if allocate_by is None else allocate_by)
        tuning = _tuning(config, tune, division.units if tune_units is None else tune_units,
                         division.chunk_size if tune_chunk is None else tune_chunk)
        loaded, tokenizer = load(model)
        attachment = models.attach(loaded)
        examples = training.load_examples(data, tokenizer)  # here alone: a pipe can be read but once
        held_out_ones = training.held_out_examples(attachment, examples, config) if allocate or tune else []
        read = None if background is None else _ids_of(background, attachment, tokenizer, division, tuning)
        _expect_enough(attachment, held_out_ones, config, division if allocate else None, tuning, read)
        with training.progress_bar(err) as progress:
            result = training.train_heads(attachment, examples, to, config, progress=progress, restart=restart)
        if allocate and not (tune and training.is_tuned(to)):
            divided = _divide(attachment, to, held_out_ones, division, read)
        if tuning:
            with training.progress_bar(err, "tuning heads") as progress:
                tuned = training.tune(attachment, to, examples, tuning, background=read, progress=progress,
                                      restart=restart_tuning)
        if allocate:  # at once, unless tuning changed the heads
            divided = _divide(attachment, to, held_out_ones, division, read)
    _tell(result, divided, tuned, as_json)
    if not as_json:
        policy = training.policy_for(config)
        out.print(f"use them: locret-stream run TEXT --model {model} --heads {result.out}"
                  + (f" --policy {policy}" if policy != "locret" else "")
                  + (f" --budget {division.units} --chunk-size {division.chunk_size}" if divided else
                     f" --budget {tuning.units} --chunk-size {tuning.chunk_size}" if tuned else ""),
                  soft_wrap=True)


def _expect_together(background: bool, query_aware: bool, tune: int, output: str,
                     given: dict[str, tuple[bool, dict[str, object]]]) -> None:
    """Raises ConfigError: options without the ones that they are about, or with others that they cannot go with.

    given: an option, whether it was given, and what those that need it were given, None for nothing.
    """
    for needed, (there, others) in given.items():
        for name, value in others.items():
            if value is not None and not there:
                raise ConfigError(f"found {name} and no {needed}; expected {needed} with it")
    if background and query_aware:
        raise ConfigError("found --background and --query-aware, whose question stands in front of all that is read; "
                          "expected one of them")
    if background and tune and output != "score":
        raise ConfigError(f"found --background and --tune with --output {output}, whose heads learn without eviction; "
                          "expected one of them")


def _allocation(model: str, units: int | None, chunk_size: int | None, examples: int, rule: str) -> AllocationConfig:
    from locret_stream.runtime.core import BUNDLED_BUDGET, BUNDLED_CHUNK, DEFAULT_BUDGET, DEFAULT_CHUNK
    from locret_stream.training import AllocationConfig

    usual = (BUNDLED_BUDGET, BUNDLED_CHUNK) if model == "bundled" else (DEFAULT_BUDGET, DEFAULT_CHUNK)
    return AllocationConfig(units=usual[0] if units is None else units, examples=examples, rule=rule,
                            chunk_size=usual[1] if chunk_size is None else chunk_size)


def _tuning(config: TrainConfig, steps: int, units: int, chunk_size: int) -> TuneConfig | None:
    from locret_stream.training import TuneConfig

    if not steps:
        return None
    return TuneConfig(units=units, chunk_size=chunk_size, steps=steps, batch=config.batch, max_tokens=config.max_tokens,
                      held_out=config.held_out, seed=config.seed)


def _ids_of(path: Path, attachment: Attachment, tokenizer: PreTrainedTokenizerBase, division: AllocationConfig,
            tuning: TuneConfig | None) -> list[int]:
    """Token ids of a text, as many as will be read at most. Raises InvalidText."""
    from locret_stream.text import TextCodec

    codec, ids = TextCodec(tokenizer, vocab=attachment.shape.vocab), list[int]()
    most = 2 * division.background_tokens  # of which one half is for tuning
    if tuning:
        most = max(most, tuning.background_tokens * (1 + math.ceil(tuning.steps / tuning.renew_every)))
    for piece in file_text(path):  # each by itself: a word cut in two every 64 KiB is nothing in what only fills
        ids += codec.encode_text(piece)
        if len(ids) >= most:
            break
    return ids[:most]


def _expect_enough(attachment: Attachment, held_out: list[Example], config: TrainConfig,
                   division: AllocationConfig | None, tuning: TuneConfig | None, background: list[int] | None) -> None:
    """Raises, before anything is trained, what `allocate` and `tune` would raise behind it of heads, units, examples
    and, as far as even layers tell, the background."""
    from locret_stream.training.allocation import expect_divisible
    from locret_stream.training.background import Background
    from locret_stream.training.layer_shares import halves
    from locret_stream.training.tuning import expect_tunable
    from locret_stream.training.validation import held_units, usable

    shape, behind = attachment.shape, background is not None
    if division is not None:
        expect_divisible(shape, config, division.rule, behind)
    if tuning is not None:
        expect_tunable(shape, config, behind)
    for one, verb in (division, "allocate"), (tuning, "tune"):
        if one is None:
            continue
        found = usable(shape, held_out, one.units, one.chunk_size, one.examples, verb=verb, full=behind)
        least = one.units
        if one is division:
            halves([example.digest() for example in found])
            least = held_units(max(len(example.ids) for example in found), one.chunk_size)
        if behind:
            Background(background, one.background_tokens, one.chunk_size, least, shape.vocab)


def _divide(attachment: Attachment, to: Path, held_out: list[Example], division: AllocationConfig,
            background: list[int] | None) -> Allocation:
    from locret_stream import training

    with training.progress_bar(err, "dividing the budget") as progress:
        return training.allocate(attachment, to, held_out, division, background=background, progress=progress)


def _tell(result: TrainResult, divided: Allocation | None, tuned: TuneResult | None, as_json: bool) -> None:
    if as_json:
        found = msgspec.to_builtins(result)
        if divided is not None:
            found |= {"budget_shares": list(divided.shares), "allocation": {
                "better": divided.better, "units": list(divided.units), "rule": divided.config.rule,
                "seconds": divided.seconds,
                "loss": {name: divided.measured[name].loss for name in ("full", "even", "divided")}}}
        if tuned is not None:
            found["tuning"] = {"better": tuned.better, "units": tuned.config.units, "budgets": list(tuned.budgets),
                               "behind": tuned.behind, "steps": tuned.config.steps, "seconds": tuned.seconds,
                               "loss": {"before": tuned.before.loss, "after": tuned.after.loss}}
        print_json(found)
        return
    out.print(f"{result.out}: {result.steps:,} steps on {result.examples:,} examples, top-10 % overlap "
              f"{result.overlap_before:.1%} before and {result.overlap:.1%} after on {result.held_out} held out"
              + (f"; {result.skipped:,} more did not fit, as a reply alone takes too much" if result.skipped else "")
              + (f"; {result.cut:,} were cut" if result.cut else ""), soft_wrap=True)
    if tuned is not None:
        behind = f", behind {tuned.behind:,} tokens of text" if tuned.behind else ""
        there = (Path(result.out) / "heads.first.safetensors").is_file()
        kept = ("; the first heads are " + ("in heads.first.safetensors" if there else "gone") if tuned.better else
                "; no gain beyond noise, so the heads stay as they were")
        out.print(f"tuned for {tuned.config.units} units on average{behind}: answer loss {tuned.after.loss:.4f}, "
                  f"before {tuned.before.loss:.4f}{kept}", soft_wrap=True)
    if divided is not None:
        full, even, own = (divided.measured[name].loss for name in ("full", "even", "divided"))
        by_layer = " ".join(map(str, divided.units))
        room = "room for an example in every layer" if divided.behind else "everything"
        out.print((f"budget by layer: {by_layer} of {divided.config.units} units on average; answer loss {own:.4f} "
                   f"where other examples divide it, with the same for each {even:.4f}" if divided.better else
                   f"budget by layer: the same for each, answer loss {even:.4f}; {by_layer} was tried, {own:.4f} where "
                   f"other examples divide it, no gain beyond noise") + f"; with {room} {full:.4f}", soft_wrap=True)
