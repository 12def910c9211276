"""What the papers found about eviction, tried on a small model:

    python -m research.findings --model recall-model --text books/*.txt --out findings --keep findings

One table of variants for each finding: 48 facts in marker form (task "recall", 256 questions a cell) in streams of
4,096 tokens, 48 units on the mean over the layers, unless it says otherwise. Where a paper has the question at the end
of its prompt, what is read ends with it, too (task "recall_question_last", one question a stream), at the end of a
chunk, so that its tokens are among those that score.

Heads that a finding needs are trained into --out, all of them alike but for what the finding is about, and every cell
is a file there: the same command goes on where it stopped. Budgets are small on purpose: where all is remembered
nothing can differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.record import record
from locret_stream.config import Budget, ModelShape
from locret_stream.errors import LocretError
from locret_stream.evaluation import markers, metrics, suite
from locret_stream.evaluation.cells import Cell, CellResult, file_name, values
from locret_stream.evaluation.runner import Bench
from locret_stream.evaluation.suite import Item, Lines, Measure, Task
from locret_stream.heads import RetainingHeads
from locret_stream.models import LayerCall, attached
from locret_stream.training import Example, TrainConfig, TuneConfig, is_tuned, train_heads, tune
from locret_stream.training.first_heads import forget_tuning
from locret_stream.training.labels import visit_layers
from research import RESULTS
from research.keep_report import pack
from research.papers import (
    ALONE,
    CHUNK,
    COPIES,
    FINDINGS,
    FIRST,
    FOCUS,
    HEEDING,
    LAST,
    LENGTH,
    MORE,
    OWN,
    RECIPE,
    SHORT,
    SINKS,
    STABILIZERS,
    STANDARDISED,
    TRAINED,
    TUNED_FOR,
    UNITS,
)
from research.recall_model.data import Writer
from research.train_recall_model import LABEL, split_text, with_figures


def question_last(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
    """Exactly `length` tokens: 48 facts among lines of text, and then a question without its last token, which is asked
    once all the others were committed. Empty lines in front fill up to the length."""
    case = markers.recall(random.Random(f"recall_question_last {seed}"), 48, asked=1)
    [question] = case.questions
    ask, end = question.ask[:-1], question.ask[-1]
    room = size = length - measure(ask)
    while sum(map(measure, text := list(markers.planted(case, lines(seed), size, measure)))) > room:
        size -= 1
    for _ in range(room - sum(map(measure, text))):
        yield Item("\n")
    for line in text:
        yield Item(line)
    yield Item(ask)
    yield Item(end, question.answer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that research.train_recall_model wrote")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="the books that it was trained on")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results of the cells")
    parser.add_argument("--finding", action="append", choices=[finding.name for finding in FINDINGS], help="only these")
    parser.add_argument("--questions", type=int, default=256, help="of a cell (default 256)")
    parser.add_argument("--steps", type=int, default=300, help="of each set of heads that is missing (default 300)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help=(
        "write the result to research/results/NAME.json, its cells beside it; not with --finding, as all findings "
        "are kept together"))
    options = parser.parse_args()
    if options.keep and options.finding:
        parser.error("--keep keeps all findings together; expected it without --finding")
    for path in [options.model / "config.json", *options.text]:
        if not path.is_file():
            parser.error(f"there is no {path}; expected the recall model's folder and the books it was trained on, see "
                         "research/models/README.md")
    return options


def text_for(which: str, books: list[Path]) -> str:
    """The text that the recipe's heads are trained on, or parts of it."""
    if which == "all":
        return with_figures(split_text(books)[0], "findings")
    return split_text(books if "books" in which else [], code="code" in which)[0]


TUNED_HERE = {ALONE: {}, STANDARDISED: {},
              MORE: {"weight": 1e4, "clip": 0.5e4}}  # so much that nothing but the first stage's loss counts


def tune_here(name: str, model: torch.nn.Module, folder: Path, tokenizer: Tokenizer, books: list[Path]) -> None:
    """Tune as the recipe does, except for what the name says. The first heads stay where there is no gain beyond noise.
    """
    config = TuneConfig(units=TUNED_FOR, chunk_size=CHUNK, steps=150, batch=2, max_tokens=1025, **TUNED_HERE[name])
    writer = Writer(tokenizer, text_for("all", books), "tuning")
    if name == ALONE:
        tune(model, folder, writer.examples(1024), config)
        return
    unseen = Writer(tokenizer, with_figures(split_text(books)[1], "findings, held out"), "tuning")
    count, times = config.background_tokens, -(-config.steps // config.renew_every)
    background = torch.cat([unseen.background(count), writer.background(times * count)])
    tune(model, folder, writer.examples(1024), config, background=background,
         held_out=list(itertools.islice(unseen.examples(1024), config.examples)))


def copy_tuned(heads: Path, to: Path, model: torch.nn.Module, tokenizer: Tokenizer, books: list[Path]) -> None:
    """Copy heads as their first stage left them, or tuned as the copy's name says, unless there is such a copy already.
    """
    if (to / "heads.json").is_file():
        return
    copy = to.with_name(f"{to.name}.part")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(heads, copy)
    forget_tuning(copy)
    if to.name in TUNED_HERE:
        print(f"tuning {to.name}", file=sys.stderr, flush=True)
        tune_here(to.name, model, copy, tokenizer, books)
    copy.rename(to)


def train_missing(options: argparse.Namespace, model: torch.nn.Module, wanted: set[str]) -> None:
    """Train the heads that are not in --out yet. Raises LocretError: others there have other settings."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for name in sorted(wanted & set(COPIES)):
        copy_tuned(options.model / OWN[COPIES[name]], options.out / name, model, tokenizer, options.text)
    for name in sorted((wanted | {"heads-zscore"} if STANDARDISED in wanted else wanted) & set(TRAINED)):
        more, which = TRAINED[name]
        more = {"steps": options.steps * more.get("times", 1)} | {key: more[key] for key in more if key != "times"}
        config = TrainConfig(**{"label": LABEL, "width": 128, "input_norm": True, "bias": True,
                                "batch": 4, "lr": 2e-3, "warmup": 0.1, "max_tokens": 1025} | more)
        if not (options.out / name / "heads.json").is_file():
            print(f"training {name} on {which}", file=sys.stderr, flush=True)
        examples = Writer(tokenizer, text_for(which, options.text), "findings").examples(1024)
        train_heads(model, examples, options.out / name, config)  # those that are there, if they were made like this
    if STANDARDISED in wanted:
        copy_tuned(options.out / "heads-zscore", options.out / STANDARDISED, model, tokenizer, options.text)


def dropped(name: str, out: Path) -> dict[str, float]:
    """The loss on held-out answers before and after a tuning that was not kept, so that heads are as their first stage
    left them; empty for all other heads."""
    path = out / name / "tuning.json"
    tuning = json.loads(path.read_bytes()) if name in TUNED_HERE and path.is_file() else {"better": True}
    return {} if tuning["better"] else {when: round(tuning[when]["loss"], 4) for when in ("before", "after")}


def tuned_as_promised(folder: Path, behind: bool) -> bool:
    """Whether tuning made those heads better, `behind` a text."""
    if not is_tuned(folder):
        return False
    tuning = json.loads((folder / "tuning.json").read_bytes())
    return tuning["better"] and (tuning["behind"] > 0 or not behind)


def cell_of(variant: dict, options: argparse.Namespace, shape: ModelShape) -> Cell:
    """The cell of a variant: its settings over those that all share. The allocation "main" stands for the shares that
    were learned with the recipe's heads, so that variants differ in one thing; it always has room for a focus."""
    given = {"task": "recall", "units": UNITS, "length": LENGTH, "chunk_size": CHUNK,
             "sinks": SINKS, "stabilizers": STABILIZERS} | variant
    if given.get("allocation") == "main":
        shares = RetainingHeads.load(options.model / "heads").config.budget_shares
        divided = Budget(units=given["units"], sinks=SINKS, stabilizers=STABILIZERS + FOCUS, allocation="adaptive")
        given["allocation"] = divided.per_layer(shape, shares, most=shape.window - given["chunk_size"])
    if given.get("heads"):
        name = FIRST[given["heads"]] if dropped(given["heads"], options.out) else given["heads"]
        given["heads"] = str(options.model / OWN[name] if name in OWN else options.out / name)
    streams = suite.task_named(given["task"]).streams(options.questions, given.get("focus", False))
    return Cell(streams=streams, **given)


def best(results: dict[str, CellResult]) -> set[str]:
    """Among results on the same streams the best, and all that are not worse beyond the 95 % interval of their
    differences on these streams; a result without any to compare it with is not among them."""
    alike: dict[tuple, dict[str, np.ndarray]] = {}
    streams = {}
    for label, result in results.items():
        sign = -1 if result.cell.task == "text" else 1  # bits: less is better
        place = (result.cell.task, result.cell.length, result.cell.streams, result.cell.focus)
        groups = [values(stream) for stream in result.streams]
        alike.setdefault(place, {})[label], streams[place] = sign * metrics.mean_draws(groups), len(groups)
    labels = set()
    for place, draws in alike.items():
        first = max(draws, key=lambda label: draws[label][0])  # the first draw is all streams once
        if len(draws) > 1:
            labels |= {label for label in draws if metrics.reaches(draws[label], draws[first], streams[place])}
    return labels


def scored_above(bench: Bench, folders: dict[str, Path], streams: int = 32) -> dict[str, list[float]]:
    """The share of a stream's units, layer by layer, that score higher than the value of the fact that is asked about:
    by each of the heads, with the question in front ("told") and without, and by the attention that its answer pays.
    Median over streams of 896 tokens and KV heads: about a half where nothing is known, 0 where the value is first."""
    loaded = {words: RetainingHeads.load(folder) for words, folder in folders.items()}
    shares: dict[str, dict[int, list[Tensor]]] = {}
    with attached(bench.model) as attachment:
        for seed, told in itertools.product(range(streams), ("told", "not told")):
            *lines, question, end = question_last(seed, SHORT["length"], bench.count_tokens, bench.text.lines)
            ask, mark = question.text + end.text, f"{(question.text + end.text)[1:]}{end.answer}>\n"
            texts = [*[ask] * (told == "told"), *(item.text for item in lines), ask, end.answer + "\n"]
            pieces = [bench.tokenizer.encode(text, add_special_tokens=False) for text in texts]
            before = list(itertools.accumulate(map(len, pieces), initial=0))
            at = before[texts.index(mark)] + bench.count_tokens(ask) - 1
            ids, text, reply = torch.tensor(list(itertools.chain(*pieces))), before[-3], before[-2]

            def visit(call: LayerCall, labels: Tensor, valid: Tensor, told: str = told, at: int = at,
                      text: int = text) -> None:
                scores = {f"{told}, {words}": heads.score(
                    call.layer, call.q[:, :, :text], call.k[:, :, :text], call.v[:, :, :text], call.hidden[:, :text])
                    for words, heads in loaded.items()}
                for words, these in (scores | {"attention": labels} if told == "not told" else scores).items():
                    above = these[0, :, :text] > these[0, :, at:at + 1]
                    shares.setdefault(words, {}).setdefault(call.layer, []).append(above.float().mean(1))

            visit_layers(attachment, attachment.tables(len(ids)), [Example(ids, ((reply, len(ids)),))], visit,
                         kind="logprob")
    return {words: [round(torch.cat(ranks).median().item(), 3) for _, ranks in sorted(layers.items())]
            for words, layers in shares.items()}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [finding for finding in FINDINGS if not options.finding or finding.name in options.finding]
    if not (options.model / "heads" / "allocation.json").is_file():
        sys.exit(f"{options.model}/heads has no shares of the budget; expected the folder as the recipe leaves it")
    wanted = {variant["heads"] for finding in chosen for variant in finding.variants.values() if variant.get("heads")}
    for name, folder in OWN.items():
        needed = wanted & {name, *(copy for copy, of in COPIES.items() if of == name)}
        if needed and not tuned_as_promised(options.model / folder, behind=name == RECIPE):
            sys.exit(f"{options.model}/{folder} are not tuned, or not behind a text; expected the folder as the recipe "
                     "leaves it, with tuned heads that are better")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    try:
        train_missing(options, model, wanted)
    except LocretError as error:
        sys.exit(f"{error}")
    suite.TASKS[LAST["task"]] = Task(LAST["task"], "48 facts, and then one question", 1, question_last)
    bench = Bench(model, AutoTokenizer.from_pretrained(options.model))
    rows, ran = [], set()
    for finding in chosen:
        variants, results = {}, {}
        for label, variant in finding.variants.items():
            [result] = bench.run([cell_of(variant, options, bench.shape[0])], options.out)
            variants[label] = {name: round(getattr(result, name), 4) for name in ("score", "low", "high")} | {
                "questions": result.questions, "units": result.budgets}
            loss = dropped(variant.get("heads", ""), options.out)
            if loss:
                variants[label]["dropped"] = loss
            print(f"{finding.name}: {label}: {result.score:.3f} [{result.low:.3f}, {result.high:.3f}]"
                  + (", as the first stage: loss {before} before and {after} after, not kept".format(**loss) if loss
                     else ""), file=sys.stderr, flush=True)
            results[label] = result
            ran.add(options.out / file_name(result.cell, result.origin))
        for label in best(results):
            variants[label]["best"] = True
        rows.append({"finding": finding.name, "claim": finding.claim, "variants": variants})
        if finding.name == "Locret-Q":
            rows[-1]["scored_above"] = scored_above(bench, {words: options.out / folder
                                                            for words, folder in HEEDING.items()})
    origin = msgspec.to_builtins(bench.origin(""))
    if options.keep:
        pack(sorted(ran), RESULTS / f"{options.keep}.tar.xz")
    record(options.keep or "findings", {"origin": origin, "findings": rows}, keep=options.keep is not None,
           results=RESULTS)


if __name__ == "__main__":
    main()
