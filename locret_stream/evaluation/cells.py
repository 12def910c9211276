"""What is measured and what came out, as files: one policy with one budget on one task is a cell. Runs nothing."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import metrics
from locret_stream.files import replace


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Args:
        task: one of `suite.TASKS`, or that of a `file`, "benchmark/task".
        length: tokens of each of its `streams`, which are number first_seed and on; 0 of a file, whose documents are as
            long as they are.
        policy: one of `POLICIES`, or "oracle" or "oracle_per_head"; with `knobs`.
        units: the budget, None for everything. sinks, stabilizers, allocation: see `Budget`.
        heads: folder of retaining heads, "" for none.
        focus: the first question of each stream is told before it begins (Locret-Q), and no other one is asked.
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


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a result holds for, by content: digests of weights, architecture, tokenizer, chat template and heads, the
    text's name, the version of the tasks; of a file its digest, and no text; knobs: all of the policy's, defaults
    included, as JSON. The code of a policy is not among them: what was measured before it changed is to be removed."""

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
    """One stream: (question, expected, found) for each question, or bits and bytes of its text.

    scores: of each question of a document, by its benchmark's own metric.
    unit_tokens: committed units held, mean over the layers, summed over the tokens fed: the KV footprint.
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
    """What its score is the mean of: 1 or 0 for each question, what its benchmark gives it, or its bits per byte."""
    if stream.bytes:
        return [stream.bits / stream.bytes]
    return stream.scores or [metrics.exact(found, expected) for _, expected, found in stream.answers]


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is the mean of `values`: the share of right answers, bits per byte, or what a benchmark's metric gives;
    [low, high] its 95 % bootstrap interval over streams.

    tok_per_s: of feeding, questions aside. budgets: units per layer. peak_bytes: what one context held, all the time.
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


_NAME = re.compile(r".+-\w+-(\d+|all)-\d+-[0-9a-f]{12}\.json")  # what `name_of` gives


def name_of(cell: Cell, origin: Origin) -> str:
    """Its file's name: readable, and another one for any other cell or origin. Shares are taken as they come back from
    a file, whole numbers as floats."""
    shares = cell.allocation if isinstance(cell.allocation, str) else tuple(map(float, cell.allocation))
    digest = _digest((msgspec.structs.replace(cell, heads="", file="", allocation=shares), origin), 6)
    task = re.sub(r"[^\w.-]+", "_", cell.task).strip("_")
    return f"{task}-{cell.policy}-{cell.units or 'all'}-{cell.length}-{digest}.json"


def tag_of(origin: Origin) -> str:
    """Eight hexadecimal digits, others for any other origin; heads and knobs count for nothing."""
    return _digest(msgspec.structs.replace(origin, heads="", knobs=""), 4)


def _digest(what: Any, size: int) -> str:
    """Of cells and origins: `size` bytes in hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode(what, order="sorted"), digest_size=size).hexdigest()


def read(path: Path) -> CellResult:
    """Raises InputError: not a cell's file, or that of another cell, or its score is not that of its streams."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=CellResult)
        if result.origin.knobs:
            msgspec.json.decode(result.origin.knobs, type=dict[str, float | int | str | bool])
        _expect_whole(result, path.name)
        return result
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InputError(f"{path} is no result of an evaluation: {error}; expected a file as `locret-stream eval` "
                         "wrote it; remove it to run that cell again") from error


def _expect_whole(result: CellResult, name: str) -> None:
    """Raises ValueError: a copy under another cell's name, or what does not add up."""
    known, seeds = name_of(result.cell, result.origin), [stream.seed for stream in result.streams]
    if name != known:
        raise ValueError(f"what it holds belongs in {known}")
    first = result.cell.first_seed
    if not seeds or seeds != list(range(first, first + result.cell.streams)):
        raise ValueError(f"its cell has {result.cell.streams} streams from {first} on, and it holds {len(seeds)}: "
                         f"{seeds[:4]}")
    found = [value for stream in result.streams for value in values(stream)]
    if len(found) != result.questions or not math.isclose(result.score, sum(found) / max(1, len(found)), abs_tol=1e-9):
        raise ValueError(f"its score is {result.score:g} of {result.questions} questions, and its streams have "
                         f"{sum(found) / max(1, len(found)):g} of {len(found)}")


def paths(folder: Path) -> list[Path]:
    """The files of results in the folder, in the order of their names."""
    return [path for path in sorted(folder.glob("*-*-*-*-*.json")) if _NAME.fullmatch(path.name)]


def read_all(folder: Path) -> list[CellResult]:
    """Every result in the folder, in the order of their names. Raises InputError as `read`."""
    return [read(path) for path in paths(folder)]


def write(result: CellResult, path: Path) -> None:
    """Whole or not at all, whoever else writes it. Raises OSError, which names it."""
    replace(path, lambda part: part.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1)))


def by_origin(results: Iterable[CellResult]) -> Iterator[tuple[Origin, list[CellResult]]]:
    """Results that may stand in one report: of the same model, tokenizer, text and tasks. Those of files hold for any
    text: they stand with every one there is, or alone."""
    groups: dict[Origin, list[CellResult]] = {}
    of_files: dict[Origin, list[CellResult]] = {}
    for result in results:
        origin = msgspec.structs.replace(result.origin, heads="", file="", knobs="")
        (of_files if result.origin.file else groups).setdefault(origin, []).append(result)
    for origin, found in of_files.items():
        beside = [one for one in groups if msgspec.structs.replace(one, text=origin.text) == origin]
        for one in beside or [origin]:
            groups.setdefault(one, []).extend(found)
    yield from groups.items()


def expect_streams(cell: Cell) -> None:
    """Raises ConfigError: no streams, or no length where it is not that of a file's documents."""
    for name in ("streams",) if cell.file else ("streams", "length"):
        if getattr(cell, name) < 1:
            raise ConfigError(f"evaluation: {name} is {getattr(cell, name)}; expected at least 1")
