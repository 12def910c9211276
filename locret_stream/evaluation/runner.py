"""Runs cells: one policy with one budget on the streams of one task. Every cell is a file; those that are there are not
run again.

Streams go through the public face: fed, and asked on scratch copies, several questions at once; an answer ends with a
newline and counts only if it is exactly right.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from locret_stream.config import Budget
from locret_stream.context import StreamingContext
from locret_stream.errors import ConfigError
from locret_stream.evaluation import metrics, suite
from locret_stream.evaluation.suite import Item, Task
from locret_stream.policies import Chunk, Policy, make_policy
from locret_stream.runtime import Runtime

AT_ONCE = 8  # questions that are answered together
ANSWER_TOKENS = 24


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `units` None: everything is kept. `heads` is the folder of retaining heads, "" for none."""

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
    model: str = ""
    streams: int = 16
    first_seed: int = 0

    @property
    def file(self) -> str:
        """Its name: readable, and another one for any other cell."""
        digest = hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=6).hexdigest()
        return f"{self.task}-{self.policy}-{self.units or 'all'}-{self.length}-{digest}.json"


class StreamResult(msgspec.Struct, frozen=True, kw_only=True):
    """One stream: (question, expected, found) for each question, or bits and bytes of its text."""

    seed: int
    tokens: int
    seconds: float
    answers: list[tuple[str, str, str]] = []
    bits: float = 0.0
    bytes: int = 0


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is the share of right answers, or bits per byte; [low, high] its 95 % bootstrap interval over streams.

    `slot_bytes` is what one context held all the time.
    """

    cell: Cell
    score: float
    low: float
    high: float
    questions: int
    tok_per_s: float
    budgets: tuple[int, ...]
    slot_bytes: int
    streams: list[StreamResult]


class Oracle(Policy):
    """Keeps every token of every mark, in every head and layer, asked about or not. `wanted` holds absolute positions
    of the stream that is fed; set it before. No upper bound: a better choice keeps less of each."""

    name = "oracle"
    needs = frozenset({"positions"})
    stateful = True

    def __init__(self) -> None:
        self.wanted: Tensor = torch.zeros(0, dtype=torch.int64)

    def score(self, chunk: Chunk) -> Tensor:
        return torch.isin(chunk.positions, self.wanted.to(chunk.positions.device)).float()


class Listening(Policy):
    """Another policy, overheard: sums the bits of the text that passes."""

    def __init__(self, policy: Policy):
        self.inner = policy
        for name in ("name", "stateful", "bounded", "planes", "scope", "knobs", "heads"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))
        self.needs = policy.needs | {"token_logprob"}
        self.bits = 0.0

    def begin(self, shape: Any) -> dict[str, Tensor]:
        return self.inner.begin(shape)

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return self.inner.protection(budget, sinks, stabilizers)

    def score(self, chunk: Chunk) -> Tensor:
        if chunk.layer == 0:
            self.bits -= float(chunk.logprobs.nan_to_num(0.0).double().sum()) / math.log(2)
        return self.inner.score(chunk)


def run_cells(cells: Iterable[Cell], model: Any, tokenizer: Any, out: Path, *, lines: suite.Lines = suite.stdlib,
              progress: Callable[[CellResult, bool], None] = lambda result, there: None) -> list[CellResult]:
    """Every cell's result, those in `out` read and the others run; `progress(result, was_there)` after each.

    Interrupted, what is done is in `out`, and the same call goes on.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for cell in cells:
        path = out / cell.file
        there = path.is_file()
        if there:
            result = msgspec.json.decode(path.read_bytes(), type=CellResult)
        else:
            result = asyncio.run(run_cell(cell, model, tokenizer, lines))
            part = path.with_suffix(".part")
            part.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
            part.replace(path)
        results.append(result)
        progress(result, there)
    return results


async def run_cell(cell: Cell, model: Any, tokenizer: Any, lines: suite.Lines) -> CellResult:
    """One cell, with a runtime of its own."""
    task = suite.task_named(cell.task)
    policy = policy_of(cell, task)
    async with Runtime(model, tokenizer, policy=policy, heads=cell.heads or None, budget=budget_of(cell),
                       chunk_size=cell.chunk_size, max_live=1, scratch=AT_ONCE) as runtime:
        streams = [await run_stream(cell, task, runtime, policy, seed, lines)
                   for seed in range(cell.first_seed, cell.first_seed + cell.streams)]
        if task.kind == "bits":
            groups = [[one.bits / one.bytes] for one in streams]
        else:
            groups = [[metrics.exact(found, expected) for _, expected, found in one.answers] for one in streams]
        values = [value for group in groups for value in group]
        low, high = metrics.interval(groups)
        return CellResult(cell=cell, score=sum(values) / len(values), low=low, high=high, questions=len(values),
                          tok_per_s=sum(s.tokens for s in streams) / sum(s.seconds for s in streams),
                          budgets=runtime.engine.budgets, slot_bytes=runtime.memory.slot_bytes, streams=streams)


def policy_of(cell: Cell, task: Task) -> Policy:
    """What the cell scores with, listening where bits are counted."""
    if cell.policy == "oracle":
        policy: Policy = Oracle()
    else:
        heads = None
        if cell.heads:
            from locret_stream.heads import RetainingHeads
            heads = RetainingHeads.load(cell.heads)
        policy = make_policy(cell.policy, cell.knobs, heads)
    return Listening(policy) if task.kind == "bits" else policy


def budget_of(cell: Cell) -> Budget:
    """That of the cell; for "full" room for the whole stream."""
    if cell.units is None:
        return Budget(units=cell.length + cell.chunk_size, sinks=0, stabilizers=0, allocation="uniform")
    return Budget(units=cell.units, sinks=cell.sinks, stabilizers=cell.stabilizers, allocation=cell.allocation)


async def run_stream(cell: Cell, task: Task, runtime: Runtime, policy: Policy, seed: int,
                     lines: suite.Lines) -> StreamResult:
    """Feed one stream, and ask what is asked where it is asked."""
    items = list(task.items(seed, cell.length, runtime.count_tokens, lines))
    if isinstance(policy, Oracle):
        policy.wanted = wanted_positions(items, runtime)
    if isinstance(policy, Listening):
        policy.bits = 0.0
    answers: list[tuple[str, str, str]] = []
    seconds, waiting = 0.0, []
    async with runtime.open(raw=True) as ctx:
        for item in [*items, None]:
            if item is not None and item.answer is not None:
                waiting.append(item)
                continue
            if waiting:
                answers += await ask_all(ctx, waiting)
                waiting = []
            if item is not None:
                started = time.perf_counter()
                await ctx.feed(item.text)
                seconds += time.perf_counter() - started
        committed = cell.chunk_size * (ctx.memory.tokens // cell.chunk_size)
        size = len("".join(item.text for item in items if item.answer is None).encode())
        return StreamResult(seed=seed, tokens=ctx.memory.tokens, seconds=seconds, answers=answers,
                            bits=getattr(policy, "bits", 0.0), bytes=size * committed // max(1, ctx.memory.tokens))


async def ask_all(ctx: StreamingContext, questions: list[Item]) -> list[tuple[str, str, str]]:
    """(question, expected, found) for each, on scratch copies at the same place."""
    found = await asyncio.gather(*(ctx.ask(item.text, max_new_tokens=ANSWER_TOKENS, stop=("\n",))
                                   for item in questions))
    return [(item.text, item.answer, answer) for item, answer in zip(questions, found, strict=True)]


def wanted_positions(items: list[Item], runtime: Runtime) -> Tensor:
    """Absolute positions of the tokens of the marks; every line is a segment of its own."""
    at, wanted = 0, []
    for item in items:
        if item.answer is not None:
            continue
        count = runtime.count_tokens(item.text)
        if item.mark:
            wanted.extend(range(at, at + count))
        at += count
    if not wanted:
        raise ConfigError("the oracle has nothing to know: no line of this task is asked about")
    return torch.tensor(wanted)
