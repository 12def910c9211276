"""Maps of a memory: for how long it keeps which tokens of a stream, and whether its scores foresee what comes later.

Runs streams; the numbers are stored as JSON, and `plots` draws them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from locret_stream.config import Budget
from locret_stream.errors import ConfigError, HeadsMismatch, InputError
from locret_stream.evaluation import suite
from locret_stream.evaluation.cells import Cell, Origin, counted, in_words, tag_of
from locret_stream.evaluation.runner import ORACLES, Bench
from locret_stream.evaluation.variants import LAST, labels, variant_of
from locret_stream.files import replace
from locret_stream.runtime import Runtime

LOOKS, COLUMNS, PREFIXES = 48, 1000, 12
TOP = 0.1  # the share of a prefix's tokens that counts as its top
MAP_TOKENS = 65_536  # of longer streams a map would show nothing
COMPARED = ("h2o", "snapkv", "sirllm")  # the policies whose scores the paper's Figure 1 looks at


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """For how long each token of a stream stayed, by layer and KV head (the paper's Figures 7 and 8).

    Args:
        life: [L * H, columns], heads of a layer side by side: the share of the rest of the stream for which a token
            was kept, 1 for tokens that are kept at the end; mean over the `column` tokens of a column.
        wanted: (start, end) of the lines that are asked about, in tokens.
    """

    label: str
    cell: Cell
    tokens: int
    layers: int
    kv_heads: int
    column: int
    life: list[list[float]]
    wanted: list[tuple[int, int]]


class Consistency(msgspec.Struct, frozen=True, kw_only=True):
    """How far the scores after a prefix agree with the scores after the whole stream (the paper's Figure 1 and
    Appendix B). Nothing is evicted meanwhile.

    Args:
        overlaps: by label, for each of `prefixes` the part of its `share` top tokens that are also on top once all
            `tokens` were read; mean over layers and KV heads.
    """

    tokens: int
    chunk_size: int
    share: float
    prefixes: list[int]
    overlaps: dict[str, list[float]]


class Maps(msgspec.Struct, frozen=True, kw_only=True):
    """Both, of one origin (heads and knobs aside). cells: what they were made for; origins: of each cell, its heads
    included."""

    origin: Origin
    cells: list[Cell]
    origins: list[Origin] = []
    retention: list[Retention] = []
    consistency: Consistency | None = None


def path_of(origin: Origin, folder: Path) -> Path:
    """The file in an evaluation's folder that has the maps of an origin."""
    return folder / f"maps-{tag_of(origin)}.json"


def write(maps: Maps, path: Path) -> None:
    """By an atomic replacement. Raises OSError, which names the path."""
    replace(path, lambda part: part.write_bytes(msgspec.json.encode(maps)))


def read(path: Path) -> Maps:
    """Raises InputError: not what `write` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Maps)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path} holds no maps of an evaluation: {error}; remove it to make them again") from error


# -- the maps of an evaluation ------------------------------------------------------------------------------------


def update(bench: Bench, cells: Sequence[Cell], folder: Path, say: Callable[[str], None]) -> None:
    """Make the maps of an evaluation, unless its folder has them: retention of each variant of one task, at the longest
    stream of at most `MAP_TOKENS` and the smallest budget, and the consistency of their scores and of those of
    `COMPARED`. A further run adds its variants to the maps of the first.

    Args:
        cells: what was run. say: is given one line of progress or of what is left out.
    """
    usable = [cell for cell in cells if cell.units is not None and cell.policy not in ORACLES and not cell.focus
              and cell.length <= MAP_TOKENS and bench.task(cell).kind == "answers"]
    if not usable:
        return
    path = path_of(bench.base, folder)
    stored = read(path) if path.is_file() else Maps(origin=bench.base, cells=[])
    before = []
    for cell in stored.cells:
        try:
            bench.origin_of(cell)
            before.append(cell)
        except (ConfigError, HeadsMismatch) as error:  # its folder of heads was removed
            say(f"the map of {in_words(cell)} is left out: {error}")
    usable = before + [cell for cell in usable if cell not in before]
    length = max(cell.length for cell in usable)
    units = min(cell.units for cell in usable if cell.length == length and cell.units is not None)
    chosen = [cell for cell in usable if (cell.length, cell.units) == (length, units)]
    chosen = [cell for cell in chosen if cell.task == chosen[0].task]
    if chosen == before and len(usable) > len(before):
        say(f"maps are of {chosen[0].task}, {counted(length, 'token')} and {units} units, as before; remove {path} to "
            "have others")
    origins = [bench.origin_of(cell) for cell in chosen]
    if (stored.cells, stored.origins) == (chosen, origins):
        return
    say(f"making maps of {counted(len(chosen), 'variant')}")
    names = labels(zip(chosen, origins, strict=True))
    labelled = {names[variant_of(cell, origin)]: cell for cell, origin in zip(chosen, origins, strict=True)}
    kept = [retention(bench, cell, label) for label, cell in labelled.items()]
    labelled = {label: cell for label, cell in labelled.items() if cell.policy not in LAST}  # their scores never change
    for policy in COMPARED:
        if all(cell.policy != policy for cell in chosen):
            labelled[policy] = msgspec.structs.replace(chosen[0], policy=policy, knobs={}, heads="")
    try:
        foresight = consistency(bench, labelled)
    except ConfigError as error:  # the stream or the window is too short: no reason to lose the other map
        foresight = None
        say(f"no map of how far scores foresee: {error}")
    write(Maps(origin=bench.base, cells=chosen, origins=origins, retention=kept, consistency=foresight), path)


def _expect_a_policy(cell: Cell) -> None:
    if cell.policy in ORACLES or cell.units is None:
        raise ConfigError(f"a map of {cell.policy!r} with {cell.units or 'all'} units would show what is known "
                          "beforehand; expected a policy, not an oracle, with a budget")
    if cell.focus:
        raise ConfigError("a map of cells with a focus would show what one question keeps; expected cells without")
    if cell.file:
        raise ConfigError(f"a map of the file {cell.file}; expected one of the tasks {', '.join(suite.TASKS)}, whose "
                          "lines say which of them are asked about")


# -- retention ----------------------------------------------------------------------------------------------------


def retention(bench: Bench, cell: Cell, label: str) -> Retention:
    """The map of the first stream of a cell; questions are not asked.

    Raises:
        ConfigError: an oracle, no budget, a focus or a file; and as `Runtime` does.
    """
    _expect_a_policy(cell)
    return asyncio.run(_retention(bench, cell, label))


async def _retention(bench: Bench, cell: Cell, label: str) -> Retention:
    task = bench.task(cell)
    wanted: list[tuple[int, int]] = []
    moments: list[tuple[int, Tensor]] = []  # (tokens read, kept [L, H, tokens])
    async with Runtime(bench.model, bench.tokenizer, policy=cell.policy, knobs=cell.knobs, heads=cell.heads or None,
                       budget=cell.budget, chunk_size=cell.chunk_size, max_live=1,
                       store_bits=cell.store_bits) as runtime:
        items = list(task.items(cell.first_seed, cell.length, runtime.count_tokens, bench.text.lines))
        step = max(cell.chunk_size, cell.length // LOOKS)
        async with runtime.open(raw=True if task.raw else None) as ctx:
            for item in items:
                if item.answer is not None:
                    continue
                before = ctx.memory.tokens
                await ctx.feed(item.text)
                if item.needed:
                    wanted.append((before, ctx.memory.tokens))
                if ctx.memory.tokens // step > before // step:
                    moments.append((ctx.memory.tokens, (await ctx.receipts()).kept))
            moments.append((ctx.memory.tokens, (await ctx.receipts()).kept))
    life, column = _in_columns(lives(moments))
    layers, heads = life.shape[:2]
    return Retention(label=label, cell=cell, tokens=moments[-1][0], layers=layers, kv_heads=heads, column=column,
                     life=[[round(value, 3) for value in row] for row in life.flatten(0, 1).tolist()], wanted=wanted)


def lives(moments: Sequence[tuple[int, Tensor]]) -> Tensor:
    """[L, H, T] in [0, 1]: the share of the rest of the stream for which each token was kept.

    Args:
        moments: (tokens read, kept [L, H, tokens]) at one moment after another, the end last.
    """
    tokens, last = moments[-1]
    until = torch.zeros(last.shape)
    for read, kept in moments:
        until[:, :, :read] = torch.where(kept, float(read), until[:, :, :read])
    positions = torch.arange(tokens, dtype=until.dtype)
    return ((until - positions) / (tokens - positions)).clamp(min=0)


def _in_columns(life: Tensor) -> tuple[Tensor, int]:
    """Means over as many neighbours as leave about `COLUMNS` columns, and how many neighbours; the last column may have
    fewer."""
    column = -(-life.shape[-1] // COLUMNS)
    return torch.stack([part.mean(-1) for part in life.split(column, -1)], -1), column


# -- consistency --------------------------------------------------------------------------------------------------


def consistency(bench: Bench, cells: dict[str, Cell]) -> Consistency:
    """The consistency of the policies of `cells` (by label), on the first stream of the first cell, cut where the
    window ends. Budgets have no effect, because everything is kept.

    Raises:
        ConfigError: no cells, no room for two chunks, or cells that `retention` refuses; and as `Runtime` does.
    """
    if not cells:
        raise ConfigError("consistency of the scores of no policy; expected at least one")
    for cell in cells.values():
        _expect_a_policy(cell)
    first = next(iter(cells.values()))
    ids = _ids(bench, first)
    chunks = min(len(ids), bench.shape[0].window) // first.chunk_size - 1
    if chunks < 2:
        raise ConfigError(f"consistency needs two whole chunks and room for a third: found {len(ids)} tokens, a window "
                          f"of {bench.shape[0].window} and chunks of {first.chunk_size}; expected smaller chunks or a "
                          "longer stream")
    prefixes = sorted({max(1, chunks * n // PREFIXES) * first.chunk_size for n in range(1, PREFIXES + 1)})
    overlaps = {label: asyncio.run(_overlaps(bench, cell, ids[:prefixes[-1]], prefixes))
                for label, cell in cells.items()}
    return Consistency(tokens=prefixes[-1], chunk_size=first.chunk_size, share=TOP, prefixes=prefixes,
                       overlaps=overlaps)


def _ids(bench: Bench, cell: Cell) -> list[int]:
    items = bench.task(cell).items(cell.first_seed, cell.length, bench.count_tokens, bench.text.lines)
    return [token for item in items if item.answer is None
            for token in bench.tokenizer.encode(item.text, add_special_tokens=False)]


async def _overlaps(bench: Bench, cell: Cell, ids: list[int], prefixes: list[int]) -> list[float]:
    whole = Budget(units=len(ids), sinks=0, stabilizers=0, allocation="uniform")
    async with (Runtime(bench.model, bench.tokenizer, policy=cell.policy, knobs=cell.knobs, heads=cell.heads or None,
                        budget=whole, chunk_size=cell.chunk_size, max_live=1, store_bits=cell.store_bits) as runtime,
                runtime.open(raw=True) as ctx):
        scored = [layer for layer, window in enumerate(runtime.engine.shape.sliding) if not window]
        early = []
        for start, end in itertools.pairwise([0, *prefixes]):
            await ctx.feed(ids[start:end])
            early.append((await ctx.receipts()).scores)
    late = early[-1]
    return [round(overlap(scores[scored], late[scored, :, :scores.shape[-1]], TOP), 4) for scores in early]


def overlap(local: Tensor, last: Tensor, share: float) -> float:
    """The part of the `share` top tokens by `local` that are also top by `last`, both [L, H, T]; mean over L and H.

    Ties go to the newer token and NaN comes last, as in the memory.
    """
    count = max(1, int(local.shape[-1] * share))

    def top(scores: Tensor) -> Tensor:
        order = scores.nan_to_num(float("-inf")).flip(-1).argsort(dim=-1, descending=True, stable=True)
        return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order[..., :count], True)

    return float((top(local) & top(last)).sum(-1).double().mean() / count)
