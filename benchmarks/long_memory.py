"""A real book goes by with six facts in it, and at its end a chat model is asked for them: a memory that evicts against
what people do without one.

    python benchmarks/long_memory.py --text books/*.txt --tokens 32000 --out cells --keep long_memory_32k
    python benchmarks/long_memory.py --plot long_memory.svg --of long_memory_16k long_memory_32k

Systems, all with the same model, the same form of question and room for the same number of tokens (`--budget` and
`--chunk-size` together):

    locret             the memory of the library; `--heads` for other heads
    pinned             the same, where units of facts go last: what it answers wrongly was there, and not found.
                       `pinned:streaming_llm` with the first and the most recent tokens beside them
    recall             the same, where a question first reads again what has its words (`Runtime(recall=True)`);
                       `recall:POLICY` with another policy. It reads a stream for the system without recall too
    streaming_llm      the first and the most recent tokens in the same space; `policy:NAME` for any other policy
    truncation         the last tokens, all of them; `truncation:N` for N tokens, at most what the window holds
    summary            a summary that the model itself brings up to date every so often, and the last tokens
    bm25               a search through the whole text by the words of the question (`pip install bm25s`); `bm25:N`
    oracle             the fact among a hundred tokens of the book: how well the model answers at all
    gathered           all facts at once, each among its hundred tokens: how well the model tells them apart
    gathered_recent    the same with the last tokens behind them, as many as fit: the best choice that a memory can make
    sentences_recent   the facts' sentences alone, then the last tokens: what `pinned:streaming_llm` holds, read at once

An answer is right if it contains the value. Every stream of every system is a file in `--out`; what is there is not
measured again, so that the same command goes on where it stopped, and parts (`--systems`, `--streams`,
`--first-stream`) come together in one result. Streams are numbered 0, 1, 2, ...: none is chosen.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import alternatives
import msgspec
from alternatives import Answer, Outcome
from book import FACTS, Book, Stream, make_stream
from record import record

from locret_stream import Runtime
from locret_stream.config import Budget, Recall
from locret_stream.errors import ConfigError, LocretError
from locret_stream.evaluation import metrics
from locret_stream.evaluation.cells import Origin
from locret_stream.evaluation.metrics import Pair
from locret_stream.evaluation.runner import Bench
from locret_stream.files import replace
from locret_stream.heads import RetainingHeads
from locret_stream.named_models import named_model
from locret_stream.policies import Policy, make_policy

VERSION = 1  # of streams and systems: counted up when one changes, so that results before and after are never mixed
MEMORIES = "locret", "streaming_llm"
DEFAULT = (*MEMORIES, *alternatives.SYSTEMS)
PINNED, RECALL = "pinned", "recall"
WHERE_RECALLED = "in the turn that was read, of sentences cut between their parts, common words a quarter"  # names anew
KNOWN = (*DEFAULT, PINNED, RECALL)
SIZED = "truncation", "bm25"  # those that may be given a number of tokens
LEAST = 3 * alternatives.SUMMARY_TOKENS  # what a summary needs: its old and its new form, and text


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured in one file: a system on a stream. origin: the model, its tokenizer and template, and heads."""

    system: str
    stream: int
    tokens: int
    facts: str
    asked: int
    texts: tuple[str, ...]
    budget: int
    chunk_size: int
    origin: Origin
    prompts: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def file_name(self) -> str:
        """Readable, and another one for any other cell."""
        digest = hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=6).hexdigest()
        return f"{self.system.replace(':', '_')}-{self.tokens}-{self.stream:03}-{digest}.json"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A file: a cell and what came of it."""

    cell: Cell
    outcome: Outcome


class Workplace:
    """The model, which is loaded once, and the books."""

    def __init__(self, options: argparse.Namespace):
        named = named_model(options.model)
        self.heads = options.heads or (named.heads if named else None)
        self.acknowledge = named.acknowledge if named else "OK."
        self.recall = named.recall if named else Recall()
        self.model, self.tokenizer = Runtime.from_pretrained(options.model).load()
        self.books = [Book(path) for path in options.text]
        self.options, self._bench = options, Bench(self.model, self.tokenizer, acknowledge=self.acknowledge)
        self._streams: dict[int, Stream] = {}

    def cell(self, system: str, stream: int) -> Cell:
        kind, options = system.partition(":")[0], self.options
        origin = self._bench.origin(str(self.heads) if self.heads and kind not in alternatives.SYSTEMS else "")
        prompts = (alternatives.SUMMARY, alternatives.NEXT, alternatives.UPDATE, str(alternatives.SUMMARY_TOKENS),
                   str(alternatives.PENALTY)) if kind == "summary" else ()
        prompts = (str(self.recall), WHERE_RECALLED) if kind == RECALL else prompts
        return Cell(system=system, stream=stream, tokens=options.tokens, facts=options.facts, asked=options.asked,
                    texts=tuple(book.name for book in self.books), budget=options.budget,
                    chunk_size=options.chunk_size, origin=msgspec.structs.replace(origin, text=""),
                    prompts=prompts)

    def size(self, system: str) -> int:
        """How many tokens of text a system may hand over."""
        given, fits = system.partition(":")[2], self._bench.shape[0].window - self.options.chunk_size
        size = int(given) if given.isdigit() else self.options.budget + self.options.chunk_size
        return min(size, fits - alternatives.ROOM)

    def runtime(self, system: str) -> Runtime:
        """Not running yet."""
        kind, _, name = system.partition(":")
        budget: int | Budget = self.options.budget
        policy: str | Policy = name if kind == "policy" else name or "locret" if kind == RECALL else kind
        if kind == PINNED:
            if not self.heads and not name:
                raise ConfigError(f"the system {PINNED} needs retaining heads, and {self.options.model} has none; "
                                  "expected --heads")
            policy = alternatives.PinnedRecent() if name else alternatives.Pinned(RetainingHeads.load(self.heads))
        if kind in alternatives.SYSTEMS:
            policy, budget = "full", Budget(units=self.size(system) + alternatives.ROOM, allocation="uniform")
        return Runtime(self.model, self.tokenizer, heads=self.heads, policy=policy, budget=budget,
                       chunk_size=self.options.chunk_size, max_live=1, acknowledge=self.acknowledge,
                       recall=self.recall if kind == RECALL else False)

    def stream(self, number: int, runtime: Runtime) -> Stream:
        """Made once, because cutting a long one takes a while."""
        if number not in self._streams:
            options, encode = self.options, functools.lru_cache(1 << 16)(runtime.codec.encode_text)
            self._streams[number] = make_stream(number, self.books, options.tokens, options.facts, options.asked,
                                                encode)
        return self._streams[number]


async def measure(place: Workplace, cells: Sequence[Cell], out: Path) -> list[Measured]:
    """All cells, read from their files or measured; those of one system share a runtime, and those with recall and
    without the reading of their streams."""
    results = {cell.file_name: read(out / cell.file_name) for cell in cells if (out / cell.file_name).is_file()}
    systems = list(dict.fromkeys(cell.system for cell in cells))
    for system in sorted(systems, key=lambda system: not system.startswith(RECALL)):
        missing = [cell for cell in cells if cell.system == system and cell.file_name not in results]
        if not missing:
            continue
        async with place.runtime(system) as runtime:
            for cell in missing:
                twins = [other for other in cells if other.system == without_recall(system) and
                         other.stream == cell.stream and other.file_name not in results]
                stream = place.stream(cell.stream, runtime)
                if twins:
                    outcomes = await alternatives.memories(runtime, stream, (None, False))
                else:
                    run = alternatives.SYSTEMS.get(system.partition(":")[0], alternatives.memory)
                    outcomes = [await run(runtime, stream, place.size(system))]
                for one, outcome in zip([cell, *twins], outcomes, strict=True):
                    results[one.file_name] = measured = Measured(cell=one, outcome=outcome)
                    write(measured, out / one.file_name)
                    told(measured)
    return sorted(results.values(), key=lambda result: result.cell.stream)


def without_recall(system: str) -> str | None:
    """The system that has the same memory and recalls nothing; None where `system` recalls nothing itself."""
    kind, _, policy = system.partition(":")
    if kind != RECALL:
        return None
    return "locret" if not policy else policy if policy in MEMORIES else f"policy:{policy}"


def read(path: Path) -> Measured:
    """Raises ConfigError: it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}; expected what this benchmark wrote: remove it to measure it again"
                          ) from error


def write(measured: Measured, path: Path) -> None:
    replace(path, lambda part: part.write_bytes(msgspec.json.encode(measured)))


def told(measured: Measured) -> None:
    """A line of progress."""
    answers, outcome = measured.outcome.answers, measured.outcome
    asking = statistics.mean(answer.seconds for answer in answers)
    kept = [answer.kept for answer in answers if answer.kept is not None]
    print(f"{measured.cell.system}, stream {measured.cell.stream}: {sum(one.right for one in answers)} of "
          f"{len(answers)} right, {outcome.read_s:,.1f} s of reading, {asking:.1f} s a question"
          + (f", {statistics.mean(kept):.2f} of the facts' units kept" if kept else ""), file=sys.stderr, flush=True)


# -- the result ---------------------------------------------------------------------------------------------------


def report(place: Workplace, results: Sequence[Measured]) -> dict[str, Any]:
    """What is kept: the settings, and of each system its figures and all answers."""
    options = place.options
    by_system = {system: [one for one in results if one.cell.system == system] for system in options.systems}
    best = by_system.get("oracle", [])
    return {
        "tokens": options.tokens, "facts": options.facts, "asked": options.asked, "model": options.model,
        "texts": [book.name for book in place.books], "streams": sorted({one.cell.stream for one in results}),
        "budget": options.budget, "chunk_size": options.chunk_size,
        "heads": digest if (digest := place.cell(MEMORIES[0], 0).origin.heads) else None,
        "settings": {"answer_tokens": alternatives.ANSWER_TOKENS, "chunk_tokens": alternatives.CHUNK_TOKENS,
                     "around_tokens": alternatives.AROUND_TOKENS, "summary_tokens": alternatives.SUMMARY_TOKENS,
                     "summary_repetition_penalty": alternatives.PENALTY,
                     "prompts": [alternatives.SUMMARY, alternatives.NEXT, alternatives.UPDATE]},
        "systems": {system: figures(own, best) for system, own in by_system.items()},
    }


def figures(own: Sequence[Measured], best: Sequence[Measured]) -> dict[str, Any]:
    """The figures of a system; `best` are the oracle's results, on the same streams. The mean is of all questions."""
    groups = values(own)
    outcomes = [one.outcome for one in own]
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    score, low, high = mean(groups), *metrics.interval(groups)
    figure: dict[str, Any] = {"score": score, "interval": [low, high], "questions": len(answers)}
    if best and mean(values(best)):
        figure["of_oracle"] = score / mean(values(best))
        figure["of_oracle_interval"] = metrics.ratio_interval([Pair(groups, values(best), together=True)])
    figure |= {
        "read_s": statistics.mean(outcome.read_s for outcome in outcomes),
        "question_s": statistics.mean(answer.seconds for answer in answers),
        "tokens_read": statistics.mean(outcome.tokens_read for outcome in outcomes),
        "tokens_written": statistics.mean(outcome.tokens_written for outcome in outcomes),
        "handed": statistics.mean(answer.handed for answer in answers),
        "bytes_kept": round(statistics.mean(outcome.bytes_kept for outcome in outcomes)),
    }
    for name, right in (("right", True), ("wrong", False)):
        some = [answer for answer in answers if answer.right is right and answer.kept is not None]
        if some:
            figure[f"kept_where_{name}"] = statistics.mean(one.kept for one in some if one.kept is not None)
            figure[f"kept_value_where_{name}"] = statistics.mean(
                one.kept_value for one in some if one.kept_value is not None)
    figure["streams"] = [{"stream": one.cell.stream, "answers": [row(answer) for answer in one.outcome.answers]}
                         | ({"summary": one.outcome.note} if one.outcome.note else {}) for one in own]
    return figure


def row(answer: Answer) -> dict[str, Any]:
    """An answer for the result. Shares by layer are one text of whole percents: a list would take a line for each."""
    whole = msgspec.to_builtins(answer)
    whole["kept_by_layer"] = " ".join(f"{share:.0%}" for share in answer.kept_by_layer)
    return {name: value for name, value in whole.items() if value not in (None, "")}


def values(own: Sequence[Measured]) -> list[list[float]]:
    """1 or 0 for each question, stream by stream."""
    return [[float(answer.right) for answer in one.outcome.answers] for one in own]


def mean(groups: Sequence[Sequence[float]]) -> float:
    return statistics.mean(value for group in groups for value in group)


# -- the command --------------------------------------------------------------------------------------------------


def expect_systems(options: argparse.Namespace) -> None:
    """Raises ConfigError: one is unknown, or lacks what it needs."""
    for system in options.systems:
        kind, colon, name = system.partition(":")
        if kind in ("policy", RECALL) and name:
            make_policy(name) if name not in MEMORIES else None
        elif system == f"{PINNED}:streaming_llm":
            continue
        elif kind not in KNOWN or (colon and (kind not in SIZED or not name.isdigit() or int(name) < 1)):
            raise ConfigError(f"there is no system {system!r}; expected some of {', '.join(KNOWN)}, policy:NAME, "
                              "recall:POLICY, truncation:TOKENS or bm25:TOKENS")
        if kind == "bm25":
            alternatives.expect_bm25s()
        if kind == "summary" and options.budget + options.chunk_size < LEAST:
            raise ConfigError(f"a summary in {options.budget + options.chunk_size} tokens; expected {LEAST} or more")


def cells_of(place: Workplace) -> Iterator[Cell]:
    options = place.options
    for system in options.systems:
        for number in range(options.first_stream, options.first_stream + options.streams):
            yield place.cell(system, number)


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="books, which take turns")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the files of cells")
    parser.add_argument("--tokens", type=int, default=32_000, help="of each stream")
    parser.add_argument("--systems", nargs="+", default=DEFAULT, metavar="SYSTEM")
    parser.add_argument("--streams", type=int, default=16, help="how many")
    parser.add_argument("--first-stream", type=int, default=0)
    parser.add_argument("--facts", choices=FACTS, default="numbers", help="what is told; words: names, places, reasons")
    parser.add_argument("--asked", type=int, default=6, help="facts of each stream")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heads", type=Path, help="by default those that come with the model")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw the results of --of, and measure nothing")
    parser.add_argument("--of", nargs="+", default=[], metavar="NAME", help="results that --keep wrote, or their paths")
    options = parser.parse_args()
    if options.plot and not options.of:
        parser.error("--plot draws kept results; expected their names with --of")
    if not options.plot and not (options.text and options.out):
        parser.error("expected --text, the books, and --out, a folder for what is measured")
    return parser, options


def main() -> None:
    parser, options = parsed()
    try:
        if options.plot:
            from long_memory_plot import draw
            draw(options.plot, options.of)
            return
        expect_systems(options)
        options.out.mkdir(parents=True, exist_ok=True)
        place = Workplace(options)
        results = asyncio.run(measure(place, list(cells_of(place)), options.out))
    except (LocretError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\nstopped; what is finished is in {options.out}, and the same command goes on from there",
              file=sys.stderr)
        sys.exit(130)
    record(options.keep or "long_memory", report(place, results), keep=options.keep is not None)


if __name__ == "__main__":
    main()
