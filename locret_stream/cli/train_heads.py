"""`locret-stream train-heads`: retaining heads for a model, made from prompts and answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from locret_stream.cli.loading import load
from locret_stream.cli.options import (
    USUAL_BUDGET,
    USUAL_CHUNK,
    Device,
    Dtype,
    Json,
    Model,
    TextOptions,
    grouped,
    on_command_line,
)
from locret_stream.cli.output import err, out, print_json, say_of_bytes
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.cli.text_input import check_readable, file_text
from locret_stream.errors import ConfigError
from locret_stream.named_models import named_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from locret_stream.charsets import Decoder
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

PLAIN_TOKENS = 500_000  # of a background, at most so many are read for --label attention
HELP = """Train retaining heads for a model.

The data is JSONL, one {"prompt", "answer"} or ShareGPT {"conversations": …} or {"messages": …} per line; it is \
rendered with the model's own chat template. The same command on the same --out goes on where an interrupted run \
stopped. The other verbs read the result with --heads. \
The means of the model's keys are measured as well, for --store-bits.

--allocate then measures, on held-out examples, what it costs the answers when one layer alone keeps few units, and \
divides the budget by it: layers that need more get more. The division is stored with the heads, and used only if it \
is better than the same for each layer, as judged by examples that did not make it. It is measured for one budget and \
chunk size: give those that you will use.

--tune then trains the heads further while eviction goes on, so that answers with that budget come near those of the \
full cache, and keeps the tuned heads only if held-out answers are better; the first heads stay beside them as \
heads.first.safetensors. With --allocate, the budget is divided before tuning, and again after it if the heads changed.

--background is for all of these: a long text about which nothing is asked, but whose units the heads score well by \
mistake. With --label attention the heads learn to score such text lower. For --allocate and --tune examples begin in \
a memory that it has filled, as a stream's memory is when a fact arrives. Tuning reads some 100,000 tokens of it every \
25 steps, so a file of 4 MB is of use.

Examples:

\b
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads
  # a short run for a small model
  locret-stream train-heads --model bundled --data pairs.jsonl --out ./heads --steps 200 --width 128
  # heads that learn to rank tokens, those of plain text too, below what answers attend to
  locret-stream train-heads --model smollm2 --data pairs.jsonl --out ./heads --label attention --kernel 9 --bias \
--background book.txt
  # the paper's label
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --label logit
  # heads for the policies kvzap and trimkv
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./zap --features hidden
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./trim --output retention --tune 200
  # heads that know the question beforehand (run --focus)
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./asked --query-aware
  # the same heads, and the share of each layer in a budget of 2000 units
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --allocate --allocate-units 2000
  # and 200 steps of tuning for that budget
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --tune 200 --tune-units 2000
  # in a memory that logs like this one have filled
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --tune 200 --tune-units 2000 \
--background service.log"""
app = typer.Typer(rich_markup_mode="rich")


class HeadsOptions(msgspec.Struct, frozen=True):
    """What the heads are and how they are trained; the fields are those of `TrainConfig`, but for --query-aware."""

    label: Annotated[str | None, typer.Option(
        show_default="zscore, or logprob for retention", help=(
            "What the heads learn: attention logits, standardised (zscore) or as they are (logit), log-probabilities "
            "(logprob), or to rank by the attention itself (attention), also against --background."))] = None
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3000
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 1
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4
    warmup: Annotated[float, typer.Option(show_default="0.667", help=(
        "Share of the steps in which the learning rate rises; then it falls to 0."))] = 2 / 3
    width: Annotated[int, typer.Option(help="Width of the heads' hidden layer.")] = 1024
    features: Annotated[str, typer.Option(help=(
        "What the heads read: qkv (Locret) or hidden (KVzap); trimkv takes both."))] = "qkv"
    output: Annotated[str, typer.Option(help="What the heads give: score, or retention (TRIM-KV).")] = "score"
    horizon: Annotated[int | None, typer.Option(show_default="4096", help=(
        "Tokens after which a unit is worth its label (retention)."))] = None
    layers: Annotated[str | None, typer.Option(metavar="N,N,…", show_default="all", help=(
        "Layers that get a head; in the others the newest units stay."))] = None
    query_aware: Annotated[bool, typer.Option("--query-aware", help=(
        "Locret-Q: for a memory that learns with --focus what it will be asked about."))] = False
    query_tokens: Annotated[int | None, typer.Option(show_default="64", help=(
        "The most tokens of a question, with --query-aware."))] = None
    input_norm: Annotated[bool, typer.Option("--input-norm", help="LayerNorm before the heads.")] = False
    bias: Annotated[bool, typer.Option("--bias", help="Biases in the heads.")] = False
    kernel: Annotated[int, typer.Option(metavar="ODD", min=1, help=(
        "Tokens over which policy locret averages scores, so that the words of a sentence stay together."))] = 1
    max_tokens: Annotated[int, typer.Option(help="Longer examples are cut.")] = 10_240
    held_out: Annotated[float, typer.Option(help="Share of the examples kept for evaluation, at least one.")] = 0.05
    held_out_max: Annotated[int, typer.Option(help="Evaluate on at most so many of them.")] = 32
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 100
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the examples.")] = 0

    def config(self) -> TrainConfig:
        from locret_stream.training import TrainConfig

        values = msgspec.structs.asdict(self)
        del values["query_aware"]
        values["layers"] = None if self.layers is None else _layers(self.layers)
        values["query_tokens"] = (self.query_tokens or 64) if self.query_aware else 0
        if self.horizon is None:
            del values["horizon"]
        return TrainConfig(**values)


def _layers(text: str) -> tuple[int, ...]:
    """Numbers of layers, with commas between them. Raises ConfigError."""
    names = text.split(",")
    if not all(name.strip().isdecimal() and len(name) < 9 for name in names):
        raise ConfigError(f"--layers is {text!r}; expected numbers of layers with commas between them, such as 7,8,14")
    return tuple(sorted(int(name) for name in names))


class AllocationOptions(msgspec.Struct, frozen=True):
    """Whether and for what the budget is divided among the layers, see `AllocationConfig`."""

    allocate: Annotated[bool, typer.Option("--allocate", help="Also divide the budget among the layers.")] = False
    allocate_units: Annotated[int | None, typer.Option(show_default=USUAL_BUDGET, help=(
        "Units per KV head (mean over the layers) to divide."))] = None
    allocate_chunk: Annotated[int | None, typer.Option(show_default=USUAL_CHUNK, help=(
        "Tokens read between two evictions."))] = None
    allocate_examples: Annotated[int | None, typer.Option(show_default="32", help=(
        "The most held-out examples to measure on."))] = None

    def config(self, model: str, window: int) -> AllocationConfig:
        """The division to make, and the budget to tune for unless another is given; `window` is the model's."""
        from locret_stream.budgets import usual_memory
        from locret_stream.training import AllocationConfig

        named = named_model(model)
        units, chunk = (named.budget, named.chunk_size) if named else usual_memory(window)
        return AllocationConfig(units=units if self.allocate_units is None else self.allocate_units,
                                chunk_size=chunk if self.allocate_chunk is None else self.allocate_chunk,
                                examples=32 if self.allocate_examples is None else self.allocate_examples)


class TuningOptions(msgspec.Struct, frozen=True):
    """Whether and for what the heads are tuned, see `TuneConfig`."""

    tune: Annotated[int, typer.Option(metavar="STEPS", min=0, show_default=False, help=(
        "Also tune the heads while eviction goes on, for so many steps; kept only if it helps."))] = 0
    tune_units: Annotated[int | None, typer.Option(show_default="as --allocate-units", help=(
        "Units per KV head (mean over the layers) to tune for."))] = None
    tune_chunk: Annotated[int | None, typer.Option(show_default="as --allocate-chunk", help=(
        "Tokens read between two evictions."))] = None

    def config(self, heads: TrainConfig, division: AllocationConfig) -> TuneConfig | None:
        """None without --tune; `heads` and `division` give what is not said here."""
        from locret_stream.training import TuneConfig

        if not self.tune:
            return None
        return TuneConfig(units=division.units if self.tune_units is None else self.tune_units,
                          chunk_size=division.chunk_size if self.tune_chunk is None else self.tune_chunk,
                          steps=self.tune, batch=heads.batch, max_tokens=heads.max_tokens, held_out=heads.held_out,
                          seed=heads.seed)


@app.command(help=HELP)
@grouped
def train_heads(
    command: typer.Context,
    model: Model,
    data: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSONL of prompts and answers.")],
    to: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the heads and the state of the run.")],
    *,
    heads: HeadsOptions,
    allocation: AllocationOptions,
    tuning: TuningOptions,
    background: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=(
        "Text like most of what will be streamed, about which nothing is asked, or conversations of that kind (.jsonl, "
        "make-data --background): heads of --label attention learn to score it lower, and --allocate and --tune let "
        "examples begin behind it."))] = None,
    text: TextOptions,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an earlier run in --out, heads and all.")] = False,
    restart_tuning: Annotated[bool, typer.Option("--restart-tuning", help=(
        "Tune the first heads anew and forget the earlier tuning."))] = False,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    check_readable(data)
    if background is not None:
        check_readable(background)
    given = on_command_line(command, ("errors", "encoding"))
    if given and (background is None or background.suffix == ".jsonl"):
        raise ConfigError(f"found {given[0]} and no text as --background; expected one with it (JSON is UTF-8)")
    _expect_together(heads, allocation, tuning, background, restart_tuning)
    divided = tuned = None
    restarts = " and ".join(f"--{name}" for name, given in (("restart", restart), ("restart-tuning", restart_tuning))
                            if given)
    with interruptible(Summary(f"the state of the run is in {to}; the same command"
                            + (f", without {restarts}," if restarts else "") + " goes on from there")):
        from locret_stream import models, training
        from locret_stream.heads.module import MEANS

        config = heads.config()
        loaded, tokenizer = load(model, device=device, dtype=dtype)
        attachment = models.attach(loaded)
        division = allocation.config(model, attachment.shape.window)
        tune_config = tuning.config(config, division)
        examples = training.load_examples(data, tokenizer)  # here alone: a pipe can be read only once
        measured = allocation.allocate or tune_config
        held_out = training.held_out_examples(attachment, examples, config) if measured else []
        ids = plain = None
        if background is not None:
            ranked = config.label == "attention"
            decoder = text.decoder(str(background))
            ids = _ids_of(background, decoder, attachment, tokenizer, division, tune_config,
                          PLAIN_TOKENS if ranked else 0)
            say_of_bytes([decoder])
            plain = ids[:PLAIN_TOKENS] if ranked else None  # the same whatever is tuned afterwards
        _expect_enough(attachment, held_out, config, division if allocation.allocate else None, tune_config, ids)
        with training.progress_bar(err) as progress:
            result = training.train_heads(attachment, examples, to, config, progress=progress, restart=restart,
                                          background=plain)
        if allocation.allocate and not (tune_config and training.is_tuned(to)):
            divided = _divide(attachment, to, held_out, division, ids)
        if tune_config:
            with training.progress_bar(err, "tuning heads") as progress:
                tuned = training.tune(attachment, to, examples, tune_config, background=ids, progress=progress,
                                      restart=restart_tuning)
        if allocation.allocate:  # returns at once unless tuning changed the heads
            divided = _divide(attachment, to, held_out, division, ids)
        if not (to / MEANS).is_file():
            training.store_key_means(attachment, to, examples)
    _report(result, divided, tuned, as_json)
    if not as_json:
        from locret_stream.policies import usual_policy
        policy = training.policy_for(config)
        out.print(f"use them: locret-stream run TEXT --model {model} --heads {result.out}"
                  + (f" --policy {policy}" if policy != usual_policy(with_heads=True) else "")
                  + (f" --budget {division.units} --chunk-size {division.chunk_size}" if divided else
                     f" --budget {tune_config.units} --chunk-size {tune_config.chunk_size}" if tune_config else ""),
                  soft_wrap=True)


def _expect_together(heads: HeadsOptions, allocation: AllocationOptions, tuning: TuningOptions,
                     background: Path | None, restart_tuning: bool) -> None:
    """Raises ConfigError: options without those that they need, or with others that exclude them."""
    for needed, given, others in (
            ("--allocate", allocation.allocate, {
                "--allocate-units": allocation.allocate_units, "--allocate-chunk": allocation.allocate_chunk,
                "--allocate-examples": allocation.allocate_examples}),
            ("--tune STEPS", tuning.tune > 0, {
                "--tune-units": tuning.tune_units, "--tune-chunk": tuning.tune_chunk,
                "--restart-tuning": restart_tuning or None}),
            ("--query-aware", heads.query_aware, {"--query-tokens": heads.query_tokens}),
            ("--output retention", heads.output == "retention", {"--horizon": heads.horizon}),
            ("--label attention, --tune or --allocate",
             heads.label == "attention" or tuning.tune > 0 or allocation.allocate, {"--background": background})):
        for name, value in others.items():
            if value is not None and not given:
                raise ConfigError(f"found {name} and no {needed}; expected {needed} with it")
    if background is not None and heads.query_aware:
        raise ConfigError("found --background and --query-aware, whose question stands in front of all that is read; "
                          "expected one of them")
    if background is not None and tuning.tune and heads.output != "score":
        raise ConfigError(f"found --background and --tune with --output {heads.output}, whose heads learn without "
                          "eviction; expected one of them")
    if heads.query_tokens is not None and heads.query_tokens < 1:
        raise ConfigError(f"--query-tokens is {heads.query_tokens}; expected at least 1 with --query-aware")


def _ids_of(path: Path, decoder: Decoder, attachment: Attachment, tokenizer: PreTrainedTokenizerBase,
            division: AllocationConfig, tuning: TuneConfig | None, least: int) -> list[int]:
    """Token ids of a text or of conversations (.jsonl), at most as many as will be read, `least` by the first stage.
    Raises InvalidText, and as `background_pieces`."""
    from locret_stream.text import TextCodec
    from locret_stream.training.data import background_pieces

    codec, ids = TextCodec(tokenizer, vocab=attachment.shape.vocab), list[int]()
    pieces = (background_pieces(path, tokenizer) if path.suffix == ".jsonl" else
              map(codec.encode_text, file_text(path, decoder)))  # a word cut in two every 64 KiB does not matter here
    most = max(least, 2 * division.background_tokens)  # one half of it is for tuning
    if tuning:
        most = max(most, tuning.background_tokens * (1 + math.ceil(tuning.steps / tuning.renew_every)))
    for piece in pieces:
        ids += piece
        if len(ids) >= most:
            break
    return ids[:most]


def _expect_enough(attachment: Attachment, held_out: list[Example], config: TrainConfig,
                   division: AllocationConfig | None, tuning: TuneConfig | None, background: list[int] | None) -> None:
    """Raises, before anything is trained, the errors of `allocate` and `tune` about heads, units, examples and, as far
    as even budgets show it, the background."""
    from locret_stream.training.background import Background
    from locret_stream.training.layer_shares import halves
    from locret_stream.training.validation import committed_units, expect_eviction, usable

    shape, behind = attachment.shape, background is not None
    stages = [(verb, stage) for verb, stage in (("allocate", division), ("tune", tuning)) if stage is not None]
    for verb, _ in stages:
        expect_eviction(verb, shape, config, behind)
    for verb, stage in stages:
        examples = usable(shape, held_out, stage.units, stage.chunk_size, stage.examples, verb=verb, full=behind)
        least = stage.units
        if stage is division:
            halves([example.digest() for example in examples])
            least = committed_units(max(len(example.ids) for example in examples), stage.chunk_size)
        if background is not None:
            Background(background, stage.background_tokens, stage.chunk_size, least, shape.vocab)


def _divide(attachment: Attachment, to: Path, held_out: list[Example], division: AllocationConfig,
            background: list[int] | None) -> Allocation:
    from locret_stream import training

    with training.progress_bar(err, "dividing the budget") as progress:
        return training.allocate(attachment, to, held_out, division, background=background, progress=progress)


def _report(result: TrainResult, divided: Allocation | None, tuned: TuneResult | None, as_json: bool) -> None:
    if as_json:
        report = msgspec.to_builtins(result)
        if divided is not None:
            report |= {"budget_shares": list(divided.shares or ()), "allocation": {
                "better": divided.better, "units": list(divided.units or ()), "rule": divided.config.rule,
                "seconds": divided.seconds,
                "loss": {name: divided.measured[name].loss for name in ("full", "even", "divided")}}}
        if tuned is not None:
            assert tuned.before is not None and tuned.after is not None, "tuning is finished"
            report["tuning"] = {"better": tuned.better, "units": tuned.config.units, "budgets": list(tuned.budgets),
                                "behind": tuned.behind, "steps": tuned.config.steps, "seconds": tuned.seconds,
                                "loss": {"before": tuned.before.loss, "after": tuned.after.loss}}
        print_json(report)
        return
    out.print(f"{result.out}: {result.steps:,} steps on {result.examples:,} examples, top-10 % overlap "
              f"{result.overlap_before:.1%} before and {result.overlap:.1%} after on {result.held_out} held out"
              + (f"; {result.skipped:,} more did not fit, as a reply alone takes too much" if result.skipped else "")
              + (f"; {result.cut:,} were cut" if result.cut else ""), soft_wrap=True)
    if tuned is not None:
        assert tuned.before is not None and tuned.after is not None, "tuning is finished"
        behind = f", behind {tuned.behind:,} tokens of text" if tuned.behind else ""
        stored = (Path(result.out) / "heads.first.safetensors").is_file()
        kept = ("; the first heads " + ("are in heads.first.safetensors" if stored else "were removed") if tuned.better
                else "; no gain beyond noise, so the heads stay as they were")
        out.print(f"tuned for {tuned.config.units} units on average{behind}: answer loss {tuned.after.loss:.4f}, "
                  f"before {tuned.before.loss:.4f}{kept}", soft_wrap=True)
    if divided is not None:
        assert divided.units is not None, "allocation is finished"
        full, even, crossed = (divided.measured[name].loss for name in ("full", "even", "divided"))
        by_layer = " ".join(map(str, divided.units))
        exact = "space for an example in every layer" if divided.behind else "everything kept"
        out.print((f"budget by layer: {by_layer} of {divided.config.units} units on average; answer loss {crossed:.4f} "
                   f"where other examples divide it, with the same for each {even:.4f}" if divided.better else
                   f"budget by layer: the same for each, answer loss {even:.4f}; {by_layer} was tried, {crossed:.4f} "
                   f"where other examples divide it, no gain beyond noise") + f"; with {exact} {full:.4f}",
                  soft_wrap=True)
