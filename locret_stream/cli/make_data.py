"""`locret-stream make-data`: conversations about texts, for `train-heads`."""

from __future__ import annotations

import functools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from locret_stream.cli.loading import load
from locret_stream.cli.options import Device, Dtype, Json, Model, TextOptions, grouped
from locret_stream.cli.output import err, out, print_json, say_of_bytes
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.cli.text_input import check_readable
from locret_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from locret_stream.making import Texts

PATIENCE = 100  # conversations in a row of which the model answers nothing
BACKGROUND_TOKENS = 500_000  # as many as train-heads reads for --label attention
HELP = """Make conversations for train-heads: texts with facts in them, and questions about the facts.

The texts are parts of your --text files, source code, logs, JSON of tools, and talk; the facts are numbers, names, \
places, dates, times, sums, reasons, decisions, preferences, versions, commands, settings and error codes, told as \
sentences, notes, rows of tables or lines of dialogue. Nothing is downloaded. The model reads every conversation once \
with its full cache, and only the questions that it answers right are kept: what it cannot answer teaches no head what \
to keep. Facts that only other questions ask for are taken out, so that nothing is told that no answer needs.

The same options and seed make the same conversations. Ctrl-C leaves those that are made in --out.

--background writes texts and talk of the same kinds in which no fact is told, some 500,000 tokens, for the option of \
train-heads that has this name: heads learn from it what need not stay.

Examples:

\b
  locret-stream make-data --model ./llama --text books/emma.txt --out pairs.jsonl
  # longer texts, as they will be read; each doubling of the length has the same share
  locret-stream make-data --model ./llama --text emma.txt --text moby.txt --tokens 500 --tokens 8000 --out pairs.jsonl
  # then
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads
  # or, for heads that hold their order over a long stream
  locret-stream make-data --model ./llama --text emma.txt --out pairs.jsonl --background plain.jsonl
  locret-stream train-heads --model ./llama --data pairs.jsonl --out ./heads --label attention --kernel 9 --bias \
--background plain.jsonl"""
app = typer.Typer(rich_markup_mode="rich")


class Made:
    """What was made so far; as text the summary that Ctrl-C prints."""

    def __init__(self, to: Path):
        self.to, self.tried, self.kept, self.tokens, self.since = to, 0, 0, 0, time.monotonic()
        self.right: Counter[bool] = Counter()

    def __str__(self) -> str:
        return (f"{self.kept:,} conversations are in {self.to}; the model answered {self.right[True]:,} of "
                f"{self.right.total():,} questions right")


@app.command(help=HELP)
@grouped
def make_data(
    *,
    model: Model,
    text: Annotated[list[Path], typer.Option(exists=True, dir_okay=False, help=(
        "A text of prose, such as a book; may be given more than once."))],
    to: Annotated[Path, typer.Option("--out", dir_okay=False, help="JSONL to write; a file that is there is kept.")],
    conversations: Annotated[int, typer.Option(min=1, help="How many to make.")] = 500,
    tokens: Annotated[list[int] | None, typer.Option(min=50, show_default="400 4000", help=(
        "Given twice: the fewest and the most tokens of a text."))] = None,
    seed: Annotated[int, typer.Option(help="Chooses texts, facts and places.")] = 0,
    background: Annotated[Path | None, typer.Option(dir_okay=False, help=(
        "Also write texts and talk that tell nothing, as JSONL, to this file."))] = None,
    bytes_as: TextOptions,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    for path in text:
        check_readable(path)
    lengths = (400, 4000) if tokens is None else tuple(tokens)
    if len(lengths) != 2 or lengths[0] > lengths[1]:
        raise ConfigError(f"--tokens is given as {' '.join(map(str, lengths))}; expected it twice, the fewest and the "
                          "most")
    for path in filter(None, (to, background)):
        if path.exists():
            raise ConfigError(f"{path} exists; expected the name of a new file")
    if background == to:
        raise ConfigError(f"--out and --background are both {to}; expected two files")
    made = Made(to)
    with interruptible(Summary(made)):
        from locret_stream.making import Texts

        decoders = [bytes_as.decoder(str(path)) for path in text]
        texts = Texts(text, decoders)
        say_of_bytes(decoders)
        loaded, tokenizer = load(model, device=device, dtype=dtype)

        @functools.lru_cache(1 << 16)
        def measure(piece: str) -> int:
            return len(tokenizer(piece, add_special_tokens=False)["input_ids"])

        if background is not None:
            with background.open("x", encoding="utf-8") as file:
                _make_background(texts, measure, (lengths[0], lengths[1]), seed, file)
        with to.open("x", encoding="utf-8") as file:
            _make(loaded, tokenizer, texts, measure, (lengths[0], lengths[1]), conversations, seed, file, made)
    if as_json:
        print_json({"out": str(to), "conversations": made.kept, "tried": made.tried, "tokens": made.tokens,
                    "questions": made.right.total(), "answered": made.right[True],
                    "seconds": round(time.monotonic() - made.since, 1)})
    else:
        out.print(f"{made}\nuse them: locret-stream train-heads --model {model} --data {to} --out ./heads",
                  soft_wrap=True)


def _make_background(texts: Texts, measure: Callable[[str], int], lengths: tuple[int, int], seed: int,
                     file: TextIO) -> None:
    """Write conversations in which nothing is told."""
    from locret_stream.making import Making, conversation

    tokens, number = 0, 0
    while tokens < BACKGROUND_TOKENS:
        r = random.Random(f"{seed}/background/{number}")
        messages = conversation(texts, r, measure, Making(tokens=lengths, facts=(0, 0))).messages
        file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        tokens += sum(measure(message["content"]) for message in messages)
        number += 1


def _make(model: Any, tokenizer: Any, texts: Texts, measure: Callable[[str], int], lengths: tuple[int, int],
          wanted: int, seed: int, file: TextIO, made: Made) -> None:
    """Make conversations and write those of which the model answers a question."""
    from locret_stream.making import Making, answered, conversation

    columns = (TextColumn("making conversations"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
    in_vain = 0
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("make", total=wanted, figures="")
        while made.kept < wanted:
            r = random.Random(f"{seed}/{made.tried}")
            result = answered(model, tokenizer, conversation(texts, r, measure, Making(tokens=lengths)))
            made.tried += 1
            made.tokens += result.tokens
            made.right.update({True: result.right, False: result.wrong})
            in_vain = 0 if result.conversation else in_vain + 1
            if result.conversation:
                file.write(json.dumps({"messages": result.conversation.messages}, ensure_ascii=False) + "\n")
                made.kept += 1
            elif in_vain == PATIENCE:
                raise ConfigError(f"the model answered none of the questions of {PATIENCE} conversations in a row "
                                  f"with its full cache, so there is nothing to learn; {made}; expected shorter "
                                  "--tokens or a model that follows a chat")
            figures = f"{made.right[True] / made.right.total():.0%} answered right"
            bar.update(task, completed=made.kept, figures=figures)
            if not err.is_terminal and made.kept % max(1, wanted // 10) == 0 and result.conversation:
                err.print(f"making conversations: {made.kept:,} of {wanted:,}, {figures}", soft_wrap=True)
