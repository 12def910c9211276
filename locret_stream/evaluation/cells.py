"""What is measured and its results, as files: one policy with one budget on one task is a cell. Runs nothing."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from locret_stream.config import Budget
from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import metrics
from locret_stream.files import replace
from locret_stream.host_tier import HostTier


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Args:
        task: one of `suite.TASKS`, or that of a `file`, "benchmark/task".
        length: tokens of each of its `streams`, whose numbers begin at first_seed; 0 for a file, whose documents have
            lengths of their own.
        policy: one of `POLICIES`, or "oracle" or "oracle_per_head"; with `knobs`.
        units: the budget, None for everything. sinks, stabilizers, allocation, by_head: see `Budget`.
        heads: folder of retaining heads, "" for none.
        store_bits: of a channel of the K and V that are kept; 16 keeps them as the model has them.
        exact: how exact units in the host's memory serve those in fewer bits.
        focus: the first question of each stream is announced before it begins (Locret-Q), and no other one is asked.
    """

    task: str
    policy: str
    length: int
    units: int | None = None
    chunk_size: int = 128
    sinks: int = 4
    stabilizers: int = 16
    allocation: str | tuple[float, ...] = "uniform"
    knobs: dict[str, float | int | str | bool] = {}
    heads: str = ""
    focus: bool = False
    streams: int = 16
    first_seed: int = 0
    file: str = ""
    store_bits: int = 16
    exact: HostTier | None = None
    by_head: bool = False

    @property
    def seeds(self) -> range:
        """The numbers of its streams."""
        return range(self.first_seed, self.first_seed + self.streams)

    @property
    def budget(self) -> Budget | None:
        """None for everything."""
        return None if self.units is None else Budget(
            units=self.units, sinks=self.sinks, stabilizers=self.stabilizers, allocation=self.allocation,
            by_head=self.by_head)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a result is valid for, by content.

    Args:
        weights, architecture, tokenizer, template, heads: digests.
        text: name of the text that facts lie in, "" for a file. file: digest of a file.
        tasks: version of the tasks.
        knobs: all of the policy's, defaults included, as JSON. The code of a policy is no part of an origin: remove by
            hand what was measured before it changed.
    """

    weights: str
    tokenizer: str
    heads: str
    text: str
    tasks: int
    file: str = ""
    architecture: str = ""
    template: str = ""
    knobs: str = ""


class StreamResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one stream.

    Args:
        unit_tokens: committed units (mean over the layers), summed over the tokens fed: the KV footprint.
        answers: (question, expected, found) of each question.
        bits, bytes: of the text, where that is what is scored.
        scores: of each question of a document, by the metric of its benchmark.
    """

    seed: int
    tokens: int
    seconds: float
    unit_tokens: float
    answers: list[tuple[str, str, str]] = []
    bits: float = 0.0
    bytes: int = 0
    scores: list[float] = []


def values(stream: StreamResult) -> list[float]:
    """What a score is the mean of: 1 or 0 for each question, what its benchmark's metric gives, or bits per byte."""
    if stream.bytes:
        return [stream.bits / stream.bytes]
    return stream.scores or [metrics.exact(found, expected) for _, expected, found in stream.answers]


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cell.

    Args:
        score: the mean of the `values` of all streams; [low, high] is its 95 % bootstrap interval over streams.
        tok_per_s: of feeding, without the questions.
        budgets: units of each layer. peak_bytes: allocated for one context.
    """

    cell: Cell
    origin: Origin
    score: float
    low: float
    high: float
    questions: int
    tok_per_s: float
    budgets: tuple[int, ...]
    peak_bytes: int
    streams: list[StreamResult]


_FILE_NAME = re.compile(r".+-\w+-(\d+|all)-\d+-[0-9a-f]{12}\.json")  # what `file_name` gives


def file_name(cell: Cell, origin: Origin) -> str:
    """The name of a result's file: readable, and another one for any other cell or origin. Shares of an allocation
    count as floats, as they are when they are read from a file."""
    shares = cell.allocation if isinstance(cell.allocation, str) else tuple(map(float, cell.allocation))
    content = msgspec.to_builtins(msgspec.structs.replace(cell, heads="", file="", allocation=shares))
    if cell.store_bits == 16:
        del content["store_bits"]  # results that were measured before there was another number keep their names
    if cell.exact is None:
        del content["exact"]
    if not cell.by_head:
        del content["by_head"]
    digest = _digest((content, origin), 6)
    task = re.sub(r"[^\w.-]+", "_", cell.task).strip("_")
    return f"{task}-{cell.policy}-{cell.units or 'all'}-{cell.length}-{digest}.json"


def tag_of(origin: Origin) -> str:
    """Eight hexadecimal digits, others for any other origin; heads and knobs do not count."""
    return _digest(msgspec.structs.replace(origin, heads="", knobs=""), 4)


def _digest(content: Origin | tuple[dict[str, Any], Origin], size: int) -> str:
    """`size` bytes in hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode(content, order="sorted"), digest_size=size).hexdigest()


def bits_in_words(store_bits: int, exact: HostTier | None) -> str:
    """2 bits, with 64 of the host."""
    return f"{store_bits} bit{'s' * (store_bits != 1)}" + ("" if exact is None else f", with {exact.units} of the host")


def counted(count: int, word: str) -> str:
    """1 cell, 2 cells."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def in_words(cell: Cell) -> str:
    """A cell, for people to read."""
    streams = (counted(cell.streams, "document") if cell.file
               else f"{counted(cell.streams, 'stream')} of {counted(cell.length, 'token')}")
    if cell.units is None:
        return f"{cell.task}, {cell.policy}, all units, {streams}"
    settings = [f"{name}={value}" for name, value in cell.knobs.items()] + [Path(cell.heads).name] * bool(cell.heads)
    settings += [bits_in_words(cell.store_bits, cell.exact)] * (cell.store_bits != 16)
    settings.append(cell.allocation if isinstance(cell.allocation, str) else ":".join(map(str, cell.allocation)))
    settings += ["by head"] * cell.by_head
    return f"{cell.task}, {cell.policy} ({', '.join(settings)}), {cell.units} units, {streams}"


def read(path: Path) -> CellResult:
    """Raises InputError: not the file of a cell, or that of another cell, or a score that its streams do not give."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=CellResult)
        if result.origin.knobs:
            msgspec.json.decode(result.origin.knobs, type=dict[str, float | int | str | bool])
        _expect_consistent(result, path.name)
        return result
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InputError(f"{path} is no result of an evaluation: {error}; expected a file as `locret-stream eval` "
                         "wrote it; remove it to run that cell again") from error


def _expect_consistent(result: CellResult, name: str) -> None:
    """Raises ValueError: the name is that of another cell, or streams, questions and score do not add up."""
    expected, seeds = file_name(result.cell, result.origin), [stream.seed for stream in result.streams]
    if name != expected:
        raise ValueError(f"its content belongs in {expected}")
    if not seeds or seeds != list(result.cell.seeds):
        raise ValueError(f"its cell has {result.cell.streams} streams from {result.cell.first_seed} on, and it has "
                         f"{len(seeds)}: {seeds[:4]}")
    scored = [value for stream in result.streams for value in values(stream)]
    mean = sum(scored) / max(1, len(scored))
    if len(scored) != result.questions or not math.isclose(result.score, mean, abs_tol=1e-9):
        raise ValueError(f"its score is {result.score:g} of {result.questions} questions, and its streams have "
                         f"{mean:g} of {len(scored)}")


def paths(folder: Path) -> list[Path]:
    """The files of results in the folder, in the order of their names."""
    return [path for path in sorted(folder.glob("*-*-*-*-*.json")) if _FILE_NAME.fullmatch(path.name)]


def read_all(folder: Path) -> list[CellResult]:
    """Every result in the folder, in the order of their names. Raises InputError as `read` does."""
    return [read(path) for path in paths(folder)]


def write(result: CellResult, path: Path) -> None:
    """By an atomic replacement. Raises OSError, which names the path."""
    replace(path, lambda part: part.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1)))


def by_origin(results: Iterable[CellResult]) -> Iterator[tuple[Origin, list[CellResult]]]:
    """The groups of results that may stand in one report: of the same model, tokenizer, template, text and tasks.
    Results of files are valid for any text, and files are asked in a template of their own (`Bench`): they stand in
    every group that differs from them in these two alone, or in one of their own."""
    groups: dict[Origin, list[CellResult]] = {}
    of_files: dict[Origin, list[CellResult]] = {}
    for result in results:
        origin = msgspec.structs.replace(result.origin, heads="", file="", knobs="")
        (of_files if result.origin.file else groups).setdefault(origin, []).append(result)
    for origin, on_files in of_files.items():
        beside = [other for other in groups
                  if msgspec.structs.replace(other, text=origin.text, template=origin.template) == origin]
        for group in beside or [origin]:
            groups.setdefault(group, []).extend(on_files)
    yield from groups.items()


def expect_streams(cell: Cell) -> None:
    """Raises ConfigError: no streams, or no length where streams have none of their own."""
    for name in ("streams",) if cell.file else ("streams", "length"):
        if getattr(cell, name) < 1:
            raise ConfigError(f"evaluation: {name} is {getattr(cell, name)}; expected at least 1")
