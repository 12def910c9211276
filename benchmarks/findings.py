"""What the papers found about eviction, tried on a small model:

    python benchmarks/findings.py --model recall-model --text books/*.txt --out findings --keep findings

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
from record import record
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_stream.config import Budget, ModelShape
from locret_stream.evaluation import markers, metrics, suite
from locret_stream.evaluation.cells import Cell, CellResult, values
from locret_stream.evaluation.runner import Bench
from locret_stream.evaluation.suite import Item, Lines, Measure, Task
from locret_stream.heads import RetainingHeads
from locret_stream.models import LayerCall, attached
from locret_stream.training import Example, TrainConfig, TuneConfig, is_tuned, train_heads, tune
from locret_stream.training.labels import visit_layers
from locret_stream.training.tuning import forget_tuning

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from recall_model.data import Writer
from tokenizers import Tokenizer
from train_recall_model import split_text, with_figures

UNITS, LENGTH, CHUNK, SINKS, STABILIZERS, FOCUS = 48, 4096, 128, 4, 4, 6  # FOCUS: at least what a question takes
TUNED_FOR = 64  # units, by the recipe
TRAINED = {  # heads by folder: what differs from the others, and which text they read
    "heads": ({}, "all"),
    "heads-zscore": ({"label": "zscore"}, "all"),
    "heads-logit": ({"label": "logit"}, "all"),
    "heads-logit-plain": ({"label": "logit", "input_norm": False, "bias": False}, "all"),
    **{f"heads{label}-{seed}": ({"seed": seed} | more, "all") for seed in (1, 2) for label, more in (
        ("", {}), ("-zscore", {"label": "zscore"}), ("-logit", {"label": "logit"}))},  # how far heads differ by chance
    "heads-rough": ({"alpha": 0.0}, "all"),
    "heads-smooth": ({"alpha": 2.5e-2}, "all"),
    "heads-32": ({"width": 32}, "all"),
    "heads-512": ({"width": 512}, "all"),
    "heads-books": ({}, "books"),
    "heads-code": ({}, "code"),
    "heads-plain-text": ({}, "books and code"),
    "heads-query": ({"query_tokens": 4}, "all"),
}


RECIPE, FADING = "recipe", "recipe-retention"  # the recipe's own heads, of locret and of trimkv
OWN = {RECIPE: "heads", FADING: "heads-retention"}
UNTUNED, ALONE, MORE, UNFADED = "recipe-untuned", "recipe-alone", "recipe-more", "recipe-retention-untuned"
COPIES = {UNTUNED: RECIPE, ALONE: RECIPE, MORE: RECIPE, UNFADED: FADING}
"""As they were before their second stage; alone: tuned on examples that begin in an empty memory; more: given as many
steps behind a text, in which what eviction does to answers counts for nothing."""


class Finding(msgspec.Struct, frozen=True):
    """What a paper says, and the variants that show it: label -> settings of a `Cell`."""

    name: str
    claim: str
    variants: dict[str, dict]


def locret(heads: str = "heads", **more: object) -> dict:
    return {"policy": "locret", "heads": heads, "allocation": "main", **more}


SHORT = {"length": 896, "units": 256}  # that fits the window in one chunk
ROOMY = SHORT | {"units": 512}  # with fewer nothing is left to compare where nobody is told a question
LAST = SHORT | {"task": "recall_question_last"}


def nacl(where: dict, **knobs: float | str) -> dict:
    """Proxies that leave room for others in 128 units."""
    return {"policy": "nacl", "knobs": {"proxies": 0.05} | knobs, **where}


def question_last(seed: int, length: int, measure: Measure, lines: Lines) -> Iterator[Item]:
    """Exactly `length` tokens: 48 facts among lines of text, and then a question but for its last token, which is asked
    once all that is evicted. Empty lines in front make up for what lines are too long."""
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


FINDINGS = (
    Finding("label scaling", "Locret regresses unscaled attention logits (arXiv:2410.01805, section 3.2); each "
            "with three seeds of the heads", {
                **{f"{words}{f', seed {seed[1:]}' * bool(seed)}": locret(f"heads{label}{seed}")
                   for label, words in (("", "log-probabilities"), ("-zscore", "standardised logits"),
                                        ("-logit", "raw logits")) for seed in ("", "-1", "-2")},
                "raw logits, heads without LayerNorm and biases (the paper's)": locret("heads-logit-plain")}),
    Finding("smoothing", "without the smoothing loss R.Number falls from 97.46 to 79.15 (Locret, revision)", {
        "none": locret("heads-rough"), "2.5e-3 (the paper's)": locret(), "2.5e-2": locret("heads-smooth")}),
    Finding("stabilizers", "the last n_s units of a chunk must stay; with n_s = 0 the released code protects, and so "
            "ties, every unit, so that whatever sorting puts first stays; 96 units in every layer", {
                **{f"n_s = {n}": locret(stabilizers=n, units=96, allocation="uniform") for n in (0, 4, 16, 32, 64)},
                **{f"n_s = 0 as released, if of all that tie {words} stay": {
                    "policy": policy, "stabilizers": 0, "units": 96}
                   for policy, words in (("streaming_llm", "the newest"), ("random", "any"))}}),
    Finding("stabilizers and text", "recent units keep the text itself predictable: bits per byte, lower is better; "
            "96 units in every layer", {
                f"n_s = {n}": locret(task="text", stabilizers=n, units=96, allocation="uniform")
                for n in (0, 4, 16, 32, 64)}),
    Finding("head width", "the width of the heads hardly matters (Locret, appendix)", {
        "32": locret("heads-32"), "128": locret(), "512": locret("heads-512")}),
    Finding("training data", "the training data of the heads hardly matters (Locret, appendix); here the text "
            "around facts whose form is the same", {
        "books, code and figures": locret(), "books and code": locret("heads-plain-text"),
        "books": locret("heads-books"), "code": locret("heads-code")}),
    Finding("chunked prefill", "H2O and SnapKV fail under chunked prefill, whose scores see no later tokens (Locret, "
            "Figure 1); streams of 896 tokens that end with the question, evicted once behind it or every 64 tokens; "
            "256 units", {
                f"{policy}, {words}": {"policy": policy, "chunk_size": chunk, **LAST, **more}
                for policy, more in (("h2o", {}), ("snapkv", {}), ("locret", {"heads": "heads"}))
                for words, chunk in (("once", 896), ("every 64", 64))}),
    Finding("chunked prefill, not told", "the same, and no question in what is read", {
                f"{policy}, {words}": {"policy": policy, "chunk_size": chunk, **SHORT}
                for policy in ("h2o", "snapkv") for words, chunk in (("once", 896), ("every 64", 64))}),
    Finding("pyramid", "PyramidKV's budgets on top of Locret gain (47.57 to 48.38, Locret, revision)", {
        "uniform": locret(allocation="uniform"), "pyramid": locret(allocation="pyramid"),
        "learned with the recipe's heads": locret()}),
    Finding("eviction in the loop", "heads that decide what is evicted while they learn from the full cache's answers "
            "keep more in the same memory (TRIM-KV, arXiv:2512.03324, section 4); here also where a text has filled "
            "it; 40 units", {
                f"{words}, {length:,} tokens": locret(heads, units=40, length=length)
                for length in (4096, 65_536) for heads, words in (
                    (UNTUNED, "first stage"), (MORE, "as many more steps of it behind a text"),
                    (ALONE, "tuned on examples"), (RECIPE, "tuned behind a text"))}),
    Finding("retention learnt end to end", "gates learn what is to last from attention that fades and a capacity loss "
            "(TRIM-KV, section 4)", {
                words: {"policy": "trimkv", "heads": heads, "allocation": "main"} for heads, words in (
                    (UNFADED, "what labels leave after 4,096 tokens"), (FADING, "end to end, 150 steps from there"))}),
    Finding("random share of NaCl", "a random share of the budget helps (arXiv:2408.03675, table 3); streams of 896 "
            "tokens that end with the question, evicted once behind it; 128 units", {
                f"{share:.0%}": nacl(LAST | {"chunk_size": 896, "units": 128}, random=share)
                for share in (0.0, 0.1, 0.37, 0.7, 1.0)}),
    Finding("random share of NaCl in a stream", "the same where every 128 tokens are evicted and no question is told; "
            "streams of 896 tokens, 512 units", {
                f"{share:.0%}, {words}": nacl(ROOMY, random=share, draw=draw)
                for share in (0.0, 0.37, 0.7, 1.0) for draw, words in (
                    ("fresh", "drawn anew"), ("reservoir", "one lot per unit")) if share or draw == "fresh"}),
    Finding("head-wise draws of NaCl", "drawing for every head loses no token in all of them (arXiv:2408.03675, 6.3); "
            "streams of 896 tokens that end with the question, evicted once behind it; 128 units", {
                f"{words}, {share:.0%} random": nacl(LAST | {"chunk_size": 896, "units": 128}, lots=lots, random=share)
                for lots, words in (("head", "every head"), ("layer", "one lot a layer"))
                for share in (0.37, 0.7, 1.0)}),
    Finding("chunk size", "Locret is stable over chunk sizes (Locret, appendix)", {
        str(chunk): locret(chunk_size=chunk) for chunk in (32, 64, 128, 256, 512)}),
    Finding("Locret-Q", "a query in front makes query-driven tasks survive budgets that fail without (RULER: 34.33 to "
            "75.54); one question a stream where it is told, 16 where it is not", {
                "not told": locret(),
                "told, heads that never saw a query": locret(focus=True),
                "told, heads trained with it": locret("heads-query", focus=True)}),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/train_recall_model.py wrote")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="the books that it was trained on")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results of the cells")
    parser.add_argument("--finding", action="append", choices=[one.name for one in FINDINGS], help="only these")
    parser.add_argument("--questions", type=int, default=256, help="of a cell (default 256)")
    parser.add_argument("--steps", type=int, default=300, help="of each set of heads that is missing (default 300)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    return parser.parse_args()


def text_for(which: str, books: list[Path]) -> str:
    """What the recipe's heads read, or parts of it."""
    if which == "all":
        return with_figures(split_text(books)[0], "findings")
    return split_text(books if "books" in which else [], code="code" in which)[0]


TUNED_HERE = {ALONE: {}, MORE: {"weight": 1e4, "clip": 0.5e4}}  # so much that nothing but the first stage's loss counts


def tune_here(name: str, model: torch.nn.Module, folder: Path, tokenizer: Tokenizer, books: list[Path]) -> None:
    """As the recipe tunes, but for what the name says. Kept are the first where there is no gain beyond noise."""
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


def train_missing(options: argparse.Namespace, model: torch.nn.Module, wanted: set[str]) -> None:
    """Heads that are not in --out yet."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for name in sorted(wanted & set(COPIES)):
        if not (options.out / name / "heads.json").is_file():
            copy = options.out / f"{name}.part"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(options.model / OWN[COPIES[name]], copy)
            forget_tuning(copy)
            if name in TUNED_HERE:
                print(f"tuning {name}", file=sys.stderr, flush=True)
                tune_here(name, model, copy, tokenizer, options.text)
            copy.rename(options.out / name)
    for name in sorted(wanted & set(TRAINED)):
        more, which = TRAINED[name]
        if (options.out / name / "heads.json").is_file():
            continue
        config = TrainConfig(**{"steps": options.steps, "width": 128, "input_norm": True, "bias": True, "batch": 4,
                                "lr": 2e-3, "warmup": 0.1, "max_tokens": 1025} | more)
        print(f"training {name} on {which}", file=sys.stderr, flush=True)
        examples = Writer(tokenizer, text_for(which, options.text), "findings").examples(1024)
        train_heads(model, examples, options.out / name, config)


def dropped(name: str, out: Path) -> dict[str, float]:
    """What held-out answers cost before and after a tuning that was not kept, so that heads are as their first stage
    left them; empty for all others."""
    path = out / name / "tuning.json"
    made = json.loads(path.read_bytes()) if name in TUNED_HERE and path.is_file() else {"better": True}
    return {} if made["better"] else {when: round(made[when]["loss"], 4) for when in ("before", "after")}


def tuned_as_promised(folder: Path, behind: bool) -> bool:
    """Whether tuning made those heads better, `behind` a text."""
    if not is_tuned(folder):
        return False
    made = json.loads((folder / "tuning.json").read_bytes())
    return made["better"] and (made["behind"] > 0 or not behind)


def cell_of(variant: dict, options: argparse.Namespace, shape: ModelShape) -> Cell:
    """Its settings over those of all. "main": the shares that were learned with the recipe's heads, for every variant
    the same, so that a variant differs in one thing; with room for a focus, told or not."""
    given = {"task": "recall", "units": UNITS, "length": LENGTH, "chunk_size": CHUNK,
             "sinks": SINKS, "stabilizers": STABILIZERS} | variant
    if given.get("allocation") == "main":
        shares = RetainingHeads.load(options.model / "heads").config.budget_shares
        divided = Budget(units=given["units"], sinks=SINKS, stabilizers=STABILIZERS + FOCUS, allocation="adaptive")
        given["allocation"] = divided.per_layer(shape, shares, most=shape.window - given["chunk_size"])
    if given.get("heads"):
        name = UNTUNED if dropped(given["heads"], options.out) else given["heads"]
        given["heads"] = str(options.model / OWN[name] if name in OWN else options.out / name)
    streams = suite.task_named(given["task"]).streams(options.questions, given.get("focus", False))
    return Cell(streams=streams, **given)


def best(results: dict[str, CellResult]) -> set[str]:
    """Of those that read the same streams the best, and all that are not worse beyond the 95 % interval of their
    differences on these; of none that has nothing beside it."""
    alike: dict[tuple, dict[str, np.ndarray]] = {}
    streams = {}
    for label, result in results.items():
        sign = -1 if result.cell.task == "text" else 1  # bits: less is better
        place = (result.cell.task, result.cell.length, result.cell.streams, result.cell.focus)
        groups = [values(stream) for stream in result.streams]
        alike.setdefault(place, {})[label], streams[place] = sign * metrics.mean_draws(groups), len(groups)
    found = set()
    for place, draws in alike.items():
        first = max(draws, key=lambda label: draws[label][0])  # the first draw is the streams as they are
        if len(draws) > 1:
            found |= {label for label in draws if metrics.reaches(draws[label], draws[first], streams[place])}
    return found


def scored_above(bench: Bench, heads: Path, streams: int = 32) -> dict[str, list[float]]:
    """What share of a stream's units, layer by layer, scores higher than the value of the fact that is asked about: by
    heads where the question stands in front and where it does not, and by the attention that its answer pays. Median
    over streams and KV heads of 896 tokens; about a half where nothing is known, 0 where it is found."""
    loaded, found = RetainingHeads.load(heads), {}
    with attached(bench.model) as attachment:
        for seed, told in itertools.product(range(streams), (True, False)):
            *lines, question, end = question_last(seed, SHORT["length"], bench.count_tokens, bench.text.lines)
            ask, mark = question.text + end.text, f"{(question.text + end.text)[1:]}{end.answer}>\n"
            pieces = [bench.tokenizer.encode(text, add_special_tokens=False) for text in (
                *[ask] * told, *(item.text for item in lines), ask, end.answer + "\n")]
            before = list(itertools.accumulate(map(len, pieces), initial=0))
            at = before[told + [item.text for item in lines].index(mark)] + bench.count_tokens(ask) - 1
            ids, text, reply = torch.tensor(list(itertools.chain(*pieces))), before[-3], before[-2]

            def visit(call: LayerCall, labels: Tensor, valid: Tensor, told: bool = told, at: int = at,
                      text: int = text) -> None:
                scores = loaded.score(call.layer, call.q[:, :, :text], call.k[:, :, :text], call.v[:, :, :text],
                                      call.hidden[:, :text])
                for words, these in (("told" if told else "not told", scores), *[("attention", labels)] * (not told)):
                    above = these[0, :, :text] > these[0, :, at:at + 1]
                    found.setdefault(words, {}).setdefault(call.layer, []).append(above.float().mean(1))

            visit_layers(attachment, attachment.tables(len(ids)), [Example(ids, ((reply, len(ids)),))], visit,
                         kind="logprob")
    return {words: [round(torch.cat(ranks).median().item(), 3) for _, ranks in sorted(layers.items())]
            for words, layers in found.items()}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in FINDINGS if not options.finding or one.name in options.finding]
    if not (options.model / "heads" / "allocation.json").is_file():
        sys.exit(f"{options.model}/heads has no shares of the budget; expected the folder as the recipe leaves it")
    wanted = {variant["heads"] for one in chosen for variant in one.variants.values() if variant.get("heads")}
    for name, folder in OWN.items():
        needed = wanted & {name, *(copy for copy, of in COPIES.items() if of == name)}
        if needed and not tuned_as_promised(options.model / folder, behind=name == RECIPE):
            sys.exit(f"{options.model}/{folder} are not tuned, or not behind a text; expected the folder as the recipe "
                     "leaves it, with tuned heads that are better")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    train_missing(options, model, wanted)
    suite.TASKS[LAST["task"]] = Task(LAST["task"], "48 facts, and then one question", 1, question_last)
    bench = Bench(model, AutoTokenizer.from_pretrained(options.model))
    rows = []
    for one in chosen:
        found, results = {}, {}
        for label, variant in one.variants.items():
            [result] = bench.run([cell_of(variant, options, bench.shape[0])], options.out)
            found[label] = {"score": round(result.score, 4), "low": round(result.low, 4), "high": round(result.high, 4),
                            "questions": result.questions, "units": result.budgets}
            loss = dropped(variant.get("heads", ""), options.out)
            if loss:
                found[label]["dropped"] = loss
            print(f"{one.name}: {label}: {result.score:.3f} [{result.low:.3f}, {result.high:.3f}]"
                  + (", as the first stage: loss {before} before and {after} after, not kept".format(**loss) if loss
                     else ""), file=sys.stderr, flush=True)
            results[label] = result
        for label in best(results):
            found[label]["best"] = True
        rows.append({"finding": one.name, "claim": one.claim, "variants": found})
        if one.name == "Locret-Q":
            rows[-1]["scored_above"] = scored_above(bench, options.out / "heads-query")
    origin = msgspec.to_builtins(bench.origin(""))
    record(options.keep or "findings", {"origin": origin, "findings": rows}, keep=options.keep is not None)


if __name__ == "__main__":
    main()
