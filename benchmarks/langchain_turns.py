"""A conversation of 100 turns over LocretChatModel and over langchain-huggingface's ChatHuggingFace, on one model.

    pip install -c constraints.txt -e ".[langchain,plots]"
    python -m venv ../peer                                          # the other wrapper in an environment of its own
    ../peer/bin/pip install -c constraints.txt torch==2.13.0        # first, so that a CPU build stays one
    ../peer/bin/pip install -c constraints.txt transformers langchain-huggingface==1.2.3
    python benchmarks/langchain_turns.py --peer-python ../peer/bin/python --plot turns.png

Every odd turn tells a plain fact, every even one asks for one of those told so far. Each wrapper runs in a process of
its own over the bundled model (fp32, CPU, greedy, at most 8 tokens), is given the whole history every time, as
LangChain does, and finds its own answers in it; so their prompts differ a little. Messages are so short that 100 turns
of ChatHuggingFace fit the model's 4,096 positions; a history that would not is refused. One question of no thread is
asked before the clock starts. Per turn and wrapper:

  prompt   tokens of the whole conversation as the chat template writes it, generation prompt included
  new      those behind the last answer: the new message, and what the template writes around it
  fed      what was read of the prompt: for LocretChatModel by its receipt (`response_metadata["locret"]["fed"]`);
           ChatHuggingFace tells nothing, so for it the same as `run`
  run      ids that an embedding of the process (shadows of the model included) was given in passes of more than one.
           For LocretChatModel that is more than was fed: what waits for its chunk to be full is run once to answer
           and again when the chunk is committed, and what closes an answer is run with the next turn
  s, mib   seconds of the call, for LocretChatModel with two durable saves (`--save run`: none); MiB resident after it

The laws that are checked: LocretChatModel feeds what is new, give or take what the template writes around a message;
what ChatHuggingFace runs grows linearly. How many answers are right says nothing of ChatHuggingFace: all layers of the
bundled model but one were trained with their newest units alone, and plain transformers, which keeps everything, loses
the thread after some 400 tokens in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "locret_stream" / "assets" / "bundled"
NAMES = {"locret": "LocretChatModel", "peer": "ChatHuggingFace"}
MAX_TOKENS, SHOWN = 8, 10
COLUMNS = ("prompt", "new", "fed", "run", "s", "mib")


def script(turns: int) -> list[tuple[str, str]]:
    """What is said, and the answer that is right ("" to a statement)."""
    from locret_stream.evaluation.facts import make_facts
    rng = random.Random("turns")
    facts = make_facts(rng, (turns + 1) // 2)
    said = []
    for turn in range(turns):
        fact = rng.choice(facts[:turn // 2 + 1]) if turn % 2 else facts[turn // 2]
        said.append((fact.question, fact.answer) if turn % 2 else (fact.sentence, ""))
    return said


def locret(save: str, stack: contextlib.ExitStack) -> Callable[[list, str | None], Any]:
    from langchain_locret import LocretChatModel
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="locret-turns-"))
    model = LocretChatModel(model="bundled", store=folder, max_tokens=MAX_TOKENS, save=save, device="cpu",
                            dtype="float32")
    stack.callback(model.close)
    return lambda history, thread: model.invoke(history, {"configurable": {"thread_id": thread}})


def peer() -> Callable[[list, str | None], Any]:
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    llm = HuggingFacePipeline.from_model_id(
        str(MODEL), "text-generation", device=-1, model_kwargs={"dtype": "float32"},
        # Without return_full_text=False an answer would begin with the whole prompt.
        pipeline_kwargs={"max_new_tokens": MAX_TOKENS, "do_sample": False, "return_full_text": False})
    llm.pipeline.tokenizer.response_template = None  # with one, the pipeline leaves end markers in the answer
    model = ChatHuggingFace(llm=llm)
    return lambda history, thread: model.invoke(history)


def side(name: str, save: str, said: list[tuple[str, str]]) -> Iterable[dict[str, Any]]:
    """One row a turn, then the versions."""
    import torch
    from langchain_core.messages import HumanMessage, convert_to_openai_messages
    from timing import MIB, resident_bytes
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    window = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    passes: list[int] = []

    def count(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            passes.append(given[0].numel())

    def length(history: list, *, prompt: bool) -> int:
        text = tokenizer.apply_chat_template(convert_to_openai_messages(history), tokenize=False,
                                             add_generation_prompt=prompt) if history else ""
        return len(tokenizer.encode(text, add_special_tokens=False))

    template = length([HumanMessage("x")], prompt=True) - 1
    torch.nn.modules.module.register_module_forward_pre_hook(count)
    history: list = []
    with contextlib.ExitStack() as stack:
        call = locret(save, stack) if name == "locret" else peer()
        call([HumanMessage("What is the pin of nobody?")], None)
        for turn, (text, right) in enumerate(said, 1):
            before = length(history, prompt=False)
            history.append(HumanMessage(text))
            prompt = length(history, prompt=True)
            if prompt + MAX_TOKENS > window:
                sys.exit(f"turn {turn} has {prompt} tokens; expected at most {window - MAX_TOKENS}: give fewer --turns")
            passes.clear()
            began = time.perf_counter()
            answer = call(history, "talk")
            seconds = time.perf_counter() - began
            run = sum(many for many in passes if many > 1)
            receipt = answer.response_metadata.get("locret", {})
            history.append(answer)
            yield {"turn": turn, "prompt": prompt, "new": prompt - before, "fed": receipt.get("fed", run), "run": run,
                   "s": round(seconds, 4), "mib": round(resident_bytes() / MIB, 1), "template": template,
                   "usage": (answer.usage_metadata or {}).get("input_tokens"),
                   "right": answer.content.strip() == right if right else None}
    packages = ("torch", "transformers", "langchain-core", *(["langchain-huggingface"] if name == "peer" else []))
    yield {"versions": {package: importlib.metadata.version(package) for package in packages}}


def run(python: str, name: str, save: str, said: list[tuple[str, str]]) -> tuple[list[dict], dict[str, str]]:
    """Rows and versions of one wrapper."""
    rows: list[dict] = []
    own = {key: value for key, value in os.environ.items() if name == "locret" or key != "PYTHONPATH"}
    with subprocess.Popen([python, __file__, "--side", name, "--save", save], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=own) as process:
        process.stdin.write(json.dumps(said))
        process.stdin.close()
        for line in process.stdout:
            rows.append(json.loads(line))
            if len(rows) % SHOWN == 0:
                print(f"{NAMES[name]}: turn {len(rows)}, {rows[-1]['s']:.2f} s", file=sys.stderr, flush=True)
    if process.returncode:
        sys.exit(f"{NAMES[name]} ended with status {process.returncode}; why stands above")
    return rows[:-1], rows[-1]["versions"]


def summary(rows: list[dict]) -> dict[str, Any]:
    turns, fed, seconds = ([row[key] for row in rows] for key in ("turn", "fed", "s"))
    asked = [row["right"] for row in rows if row["right"] is not None]
    misses = [abs(row["usage"] - row["prompt"]) for row in rows if row["usage"] is not None]
    tenth = max(1, len(rows) // 10)
    return {
        "fed": sum(fed), "new": sum(row["new"] for row in rows), "run": sum(row["run"] for row in rows),
        "run_max": max(row["run"] for row in rows), "last_prompt": rows[-1]["prompt"],
        "fed_minus_new_max": max(abs(row["fed"] - row["new"]) for row in rows), "template": rows[0]["template"],
        "fed_slope": statistics.linear_regression(turns, fed).slope, "fed_r2": statistics.correlation(turns, fed) ** 2,
        "seconds": sum(seconds), "seconds_slope": statistics.linear_regression(turns, seconds).slope,
        "median_s_first_tenth": statistics.median(seconds[:tenth]),
        "median_s_last_tenth": statistics.median(seconds[-tenth:]),
        "mib_first": rows[0]["mib"], "mib_last": rows[-1]["mib"], "right": sum(asked), "asked": len(asked),
        "turns_with_usage": len(misses), "usage_minus_prompt_max": max(misses, default=None)}


def show(shown: dict[str, dict[str, list]], sums: dict[str, dict], out: Any) -> None:
    """Every tenth turn, and the laws."""
    from rich.console import Console
    from rich.table import Table
    table = Table()
    columns = {("turn", ""): shown["locret"]["turn"]} | {
        (name, key): shown[name][key] for name in shown for key in COLUMNS}
    for header in columns:
        table.add_column("\n".join(header), justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(format(value, ".2f" if key == "s" else ".0f")
                        for (_, key), value in zip(columns, row, strict=True)))
    Console(file=out, width=120).print(table)
    for name, one in sums.items():
        print(f"{NAMES[name]}: {one['new']} tokens new, {one['fed']} fed, {one['run']} run, {one['seconds']:.1f} s; "
              f"fed grows by {one['fed_slope']:.2f} tokens a turn (r² {one['fed_r2']:.4f})", file=out)
    ours = sums["locret"]
    print(f"LocretChatModel feeds what is new: |fed - new| is at most {ours['fed_minus_new_max']}, the template writes "
          f"{ours['template']} around a message: {'OK' if ours['fed_minus_new_max'] <= ours['template'] else 'BROKEN'}",
          file=out)


def plot(sides: dict[str, list[dict]], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (tokens, seconds) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, rows in sides.items():
        for panel, key, label in ((tokens, "fed", NAMES[name]), (seconds, "s", NAMES[name]),
                                  (tokens, "run", "LocretChatModel, chunk commits too")):
            if key != "run" or name == "locret":
                panel.plot([row["turn"] for row in rows], [row[key] for row in rows], label=label, zorder=key != "run",
                           color={"locret": "tab:blue", "peer": "tab:orange"}[name], alpha=0.4 if key == "run" else 1)
    for panel, label in ((tokens, "prompt tokens fed"), (seconds, "seconds")):
        panel.set(xlabel="turn", ylabel=f"{label} per turn", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has langchain-huggingface; without it LocretChatModel "
                        "is measured alone")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--save", choices=("turn", "run"), default="turn", help="of LocretChatModel")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw tokens and seconds per turn")
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("--side", choices=NAMES, help=argparse.SUPPRESS)  # what the two processes are started with
    options = parser.parse_args()
    if options.side:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is not a row
            for row in side(options.side, options.save, json.load(sys.stdin)):
                print(json.dumps(row), file=out, flush=True)
        return
    if options.turns < 2:
        parser.error(f"--turns is {options.turns}; expected at least 2")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib, which is not installed; expected: pip install -e '.[plots]'")
    if options.peer_python and not shutil.which(options.peer_python):
        parser.error(f"--peer-python is {options.peer_python!r}; expected a Python interpreter")
    said = script(options.turns)
    pythons = {"locret": sys.executable} | ({"peer": options.peer_python} if options.peer_python else {})
    ran = {name: run(python, name, options.save, said) for name, python in pythons.items()}
    sides, versions = ({name: both[part] for name, both in ran.items()} for part in (0, 1))
    sums = {name: summary(rows) for name, rows in sides.items()}
    shown = {name: {key: [rows[at][key] for at in (0, *range(SHOWN - 1, len(rows), SHOWN))]
                    for key in ("turn", *COLUMNS)} for name, rows in sides.items()}
    show(shown, sums, sys.stderr if options.json else sys.stdout)
    if options.plot:
        plot(sides, options.plot)
    if options.json or options.keep:
        from record import record
        record(options.keep or "langchain_turns", {
            "turns": options.turns, "max_tokens": MAX_TOKENS, "versions": versions, **sums, "every_tenth": shown},
            keep=options.keep is not None)


if __name__ == "__main__":
    main()
