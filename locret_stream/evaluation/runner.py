"""Runs cells. Every cell is a file; those that are there are not run again.

Streams go through the public face: fed as token ids, every line tokenised alone, and asked on scratch copies, several
questions at once; an answer ends with a newline and counts only if it is exactly right. Documents of files are fed and
asked the same way, but answers end where the model or the benchmark ends them, and count what its metric gives.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from locret_stream.config import Budget, ModelShape
from locret_stream.context import StreamingContext
from locret_stream.errors import ConfigError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import metrics, published, suite
from locret_stream.evaluation.cells import Cell, CellResult, Origin, StreamResult
from locret_stream.evaluation.documents import FileTask
from locret_stream.evaluation.oracles import Attention, Heard, Oracle, PerHeadOracle
from locret_stream.evaluation.suite import Item, Task, Text
from locret_stream.heads import RetainingHeads
from locret_stream.models import attach, detach, named_weights
from locret_stream.policies import Listening, all_knobs
from locret_stream.runtime import Runtime
from locret_stream.runtime.loading import in_passing
from locret_stream.snapshot.identity import canonical, digest_tensors, digest_text
from locret_stream.text import ChatFrame, TextCodec

AT_ONCE = 8  # questions that are answered together
ORACLES = {kind.name: kind for kind in (Oracle, PerHeadOracle)}


class Bench:
    """A model, its tokenizer, a text, and files of documents, on which cells are run."""

    def __init__(self, model: Any, tokenizer: Any, text: Text = suite.STDLIB, documents: Iterable[FileTask] = ()):
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self._documents = {(one.name, one.path): one for one in documents}
        self._origins: dict[str, Origin] = {}
        self._rooms: dict[tuple[str, str, int, bool], int] = {}
        self._measure = functools.lru_cache(1 << 16)(self.count_tokens)

    @functools.cached_property
    def base(self) -> Origin:
        """Of every cell of this bench: without heads, file and knobs."""
        definition = getattr(self.tokenizer, "backend_tokenizer", None)
        told = definition.to_str() if definition is not None else str(sorted(self.tokenizer.get_vocab().items()))
        frame = ChatFrame(TextCodec(self.tokenizer, vocab=self.shape[0].vocab), self.tokenizer)
        return Origin(weights=digest_tensors(named_weights(self.model)), tokenizer=digest_text(told), heads="",
                      text=self.text.name, tasks=suite.VERSION, architecture=digest_text(self._attached[4]),
                      template=digest_text(frame.literals))

    @property
    def shape(self) -> tuple[ModelShape, str, str, str]:
        """Of the model, and what else heads are checked against: fingerprint, sketch, form. Raises UnsupportedModel."""
        return self._attached[:4]

    @functools.cached_property
    def _attached(self) -> tuple[ModelShape, str, str, str, str]:
        attachment = in_passing(lambda: attach(self.model))
        detach(self.model)
        return (attachment.shape, attachment.fingerprint, attachment.sketch, attachment.form,
                attachment.architecture)

    def task(self, cell: Cell) -> Task:
        """What a cell is measured on. Raises ConfigError: a task that is not there, or a file that was not given."""
        if not cell.file:
            return suite.task_named(cell.task)
        if (cell.task, cell.file) not in self._documents:
            given = ", ".join(f"{task} of {path}" for task, path in self._documents) or "none"
            raise ConfigError(f"a cell is of {cell.task} of the file {cell.file}; expected one of those that were "
                              f"given: {given}")
        return self._documents[cell.task, cell.file]

    def origin_of(self, cell: Cell) -> Origin:
        """What its result holds for. Raises ConfigError and HeadsMismatch as `task` and `origin`."""
        origin, task = self.origin(cell.heads), self.task(cell)
        if cell.policy not in ORACLES:
            origin = msgspec.structs.replace(origin, knobs=canonical(all_knobs(cell.policy, cell.knobs)))
        if isinstance(task, FileTask):
            return msgspec.structs.replace(origin, text="", file=task.digest)
        return origin

    def origin(self, heads: str) -> Origin:
        """What results with those heads hold for, on tasks that are no files, whatever the policy. Raises HeadsMismatch
        as loading them."""
        if heads not in self._origins:
            digest = ""
            if heads:
                loaded = RetainingHeads.load(heads)
                digest = digest_text(digest_tensors(loaded.state_dict().items()),
                                     msgspec.json.encode(loaded.config, order="sorted").decode())
            self._origins[heads] = msgspec.structs.replace(self.base, heads=digest)
        return self._origins[heads]

    def run(self, cells: Iterable[Cell], out: Path,
            progress: Callable[[CellResult, bool], None] = lambda result, there: None) -> list[CellResult]:
        """Every cell's result, those in `out` read and the others run; `progress(result, was_there)` after each.

        Interrupted, what is done is in `out`, and the same call goes on.

        Raises:
            ConfigError, HeadsMismatch, WindowExceeded: a cell cannot be run; those before it are done.
            InputError: a file in `out` is damaged.
        """
        out.mkdir(parents=True, exist_ok=True)
        return asyncio.run(self._run(cells, out, progress))  # one loop: Ctrl-C meets none that is half made

    async def _run(self, cells: Iterable[Cell], out: Path,
                   progress: Callable[[CellResult, bool], None]) -> list[CellResult]:
        results = []
        for cell in cells:
            files.expect_streams(cell)
            path = out / files.name_of(cell, self.origin_of(cell))
            there = path.is_file()
            result = files.read(path) if there else await self.measure(cell)
            if not there:
                files.write(result, path)
            results.append(result)
            progress(result, there)
        return results

    async def measure(self, cell: Cell) -> CellResult:
        """One cell, with a runtime of its own."""
        task, origin = self.task(cell), self.origin_of(cell)
        seeds = range(cell.first_seed, cell.first_seed + cell.streams)
        oracle = ORACLES[cell.policy]() if cell.policy in ORACLES else None
        runtime = Runtime(self.model, self.tokenizer, policy=oracle or cell.policy,
                          knobs=None if oracle else cell.knobs, heads=cell.heads or None,
                          budget=self.budget(cell), chunk_size=cell.chunk_size, max_live=1,
                          scratch=max(1, min(AT_ONCE, task.asked)))
        async with runtime:
            heard = None
            if task.kind == "bits":
                heard = Heard(runtime.engine.shape)
                runtime.engine.replace_policy(Listening(runtime.engine.policy, heard))
            streams = []
            for seed in seeds:
                items = self.items(cell, seed)
                if isinstance(oracle, PerHeadOracle):
                    oracle.worth = await self.worth(items)
                streams.append(await run_stream(seed, items, cell, task, runtime, oracle, heard))
            groups = [files.values(one) for one in streams]
            values = [value for group in groups for value in group]
            low, high = metrics.interval(groups)
            return CellResult(
                cell=cell, origin=origin, score=sum(values) / len(values), low=low, high=high, questions=len(values),
                tok_per_s=sum(s.tokens for s in streams) / max(1e-9, sum(s.seconds for s in streams)),
                budgets=runtime.engine.budgets, peak_bytes=runtime.memory.slot_bytes, streams=streams)

    def items(self, cell: Cell, seed: int) -> list[Item]:
        """One stream of a cell; with a focus the first question alone is asked, where it would be."""
        found = list(self.task(cell).items(seed, cell.length, self._measure, self.text.lines))
        if not cell.focus:
            return found
        questions = [at for at, item in enumerate(found) if item.answer is not None]
        return [item for at, item in enumerate(found) if at not in questions[1:]]

    def expect_whole_lines(self, cell: Cell) -> None:
        """Raises ConfigError: whole chunks of a stream hold no whole line, so that there would be no bits to count."""
        for seed in range(cell.first_seed, cell.first_seed + cell.streams):
            items = self.items(cell, seed)
            first, tokens = self.count_tokens(items[0].text), sum(self.count_tokens(item.text) for item in items)
            if first > tokens // cell.chunk_size * cell.chunk_size:
                raise ConfigError(f"{cell.task}: a stream of {tokens} tokens begins with a line of {first}, and whole "
                                  f"chunks of {cell.chunk_size} hold no whole line; expected longer streams or smaller "
                                  "chunks")

    def longest_focus(self, cell: Cell) -> int:
        """Tokens of the longest question that is told beforehand. What a built-in task asks does not depend on how long
        its streams are, so they are made short."""
        short = cell if cell.file else msgspec.structs.replace(cell, length=1)
        return max(self.count_tokens(next(item.text for item in self.items(short, seed) if item.answer is not None))
                   for seed in range(cell.first_seed, cell.first_seed + cell.streams))

    def budget(self, cell: Cell) -> Budget:
        """That of the cell; without units, room for the longest of its streams and an answer.

        The model's window must hold it: the runtime says so otherwise.
        """
        if cell.units is not None:
            return Budget(units=cell.units, sinks=cell.sinks, stabilizers=cell.stabilizers, allocation=cell.allocation)
        longest = max(self.room(cell, seed) for seed in range(cell.first_seed, cell.first_seed + cell.streams))
        return Budget(units=longest, sinks=0, stabilizers=0, allocation="uniform")

    def room(self, cell: Cell, seed: int) -> int:
        """Tokens of one stream with its longest question and answer, the focus, and what the chat frame adds. Of a
        document counted once, as long ones take their time."""
        key = cell.file, cell.task, seed, cell.focus
        if key in self._rooms:
            return self._rooms[key]
        task, items = self.task(cell), self.items(cell, seed)
        count = self._as_read[0] if cell.file else self.count_tokens
        room = 0 if task.raw else self._as_read[1]
        room += sum(count(item.text) for item in items if item.answer is None)
        asked = [(count(item.text), item.answer_tokens) for item in items if item.answer is not None]
        room += max(map(sum, asked), default=suite.ANSWER_TOKENS) + (asked[0][0] if cell.focus else 0)
        if cell.file:
            self._rooms[key] = room
        return room

    @functools.cached_property
    def _as_read(self) -> tuple[Callable[[str], int], int]:
        """Counts tokens as a runtime reads a text, and how many its chat frame puts around one with a question."""
        codec = TextCodec(self.tokenizer, vocab=self.shape[0].vocab)
        frame = ChatFrame(codec, self.tokenizer)
        begun, state = frame.begin()
        around = len(begun) + sum(len(step(state.with_content())[0]) for step in (
            frame.question_separator, frame.close_user_and_prompt))
        return lambda text: len(codec.encode_text(text)), around

    def count_tokens(self, text: str) -> int:
        """As a runtime counts them, without a chat frame."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def worth(self, items: list[Item]) -> Tensor:
        """[L, H, N]: the attention that answers pay to each of the N tokens of the needed lines, when those lines,
        the questions and the answers are all there is."""
        ids: list[int] = []
        for item in items:
            if item.needed:
                ids += self.tokenizer.encode(item.text, add_special_tokens=False)
        count, rows = len(ids), []
        if not count:
            raise ConfigError("the oracle has nothing to know: no line of this task is asked about")
        for item in items:
            if item.answer is not None:
                ids += self.tokenizer.encode(item.text, add_special_tokens=False)
                answer = self.tokenizer.encode(item.answer + "\n", add_special_tokens=False)
                rows += range(len(ids) - 1, len(ids) + len(answer) - 1)  # each row predicts the next token
                ids += answer
        probe = Attention()
        probe.rows = torch.tensor(rows)
        whole = Budget(units=len(ids), sinks=0, stabilizers=0, allocation="uniform")
        async with (Runtime(self.model, self.tokenizer, policy=probe, budget=whole, chunk_size=len(ids), max_live=1)
                    as runtime, runtime.open(raw=True) as ctx):
            await ctx.feed(ids)
        return probe.received[:, :, :count]


class Piece(NamedTuple):
    """What is fed at once: the lines between two questions. `wanted`: which of the ids are needed; `ends`: (ids,
    bytes) after each line."""

    ids: list[int]
    wanted: list[int]
    ends: list[tuple[int, int]]


def piece_of(lines: list[Item], runtime: Runtime) -> Piece:
    """Every line becomes tokens alone, so that they are the same wherever a question stands."""
    found, size = Piece([], [], []), 0
    for item in lines:
        ids = runtime.codec.encode_text(item.text)
        if item.needed:
            found.wanted.extend(range(len(found.ids), len(found.ids) + len(ids)))
        found.ids.extend(ids)
        size += len(item.text.encode())
        found.ends.append((len(found.ids), size))
    return found


async def run_stream(seed: int, items: list[Item], cell: Cell, task: Task, runtime: Runtime,
                     oracle: Oracle | None = None, heard: Heard | None = None) -> StreamResult:
    """Feed one stream, and ask what is asked where it is asked."""
    answers: list[tuple[str, str, str]] = []
    scores: list[float] = []
    wanted: list[int] = []
    ends: list[tuple[int, int]] = []  # (tokens, bytes) after each line
    seconds, unit_tokens = 0.0, 0.0
    if oracle is not None:
        oracle.wanted = torch.zeros(0, dtype=torch.int64)
        if not any(item.needed for item in items):
            raise ConfigError(f"the oracle has nothing to know: no line of task {task.name!r} is asked about")
    if heard is not None:
        heard.logprobs = []
    told = next((item.text for item in items if item.answer is not None), None) if cell.focus else None
    async with runtime.open(raw=True if task.raw else None, focus=told) as ctx:
        for asked, group in itertools.groupby(items, key=lambda item: item.answer is not None):
            if asked:
                questions = list(group)
                found = await ask_all(ctx, questions)
                answers += found
                scores += [published.score(item.question, answer)
                           for item, (*_, answer) in zip(questions, found, strict=True) if item.question is not None]
                continue
            piece, before, size = piece_of(list(group), runtime), ctx.memory.tokens, ends[-1][1] if ends else 0
            ends += [(before + tokens, size + more) for tokens, more in piece.ends]
            if oracle is not None:
                wanted += [before + at for at in piece.wanted]
                oracle.wanted = torch.tensor(wanted, dtype=torch.int64)
            start = 0
            while start < len(piece.ids):  # in parts that end where a chunk does: only there what is held changes
                stop = start + cell.chunk_size - ctx.memory.tokens % cell.chunk_size
                ids, units, start = piece.ids[start:stop], ctx.memory.units, stop
                begun = time.perf_counter()
                await ctx.feed(ids)
                seconds += time.perf_counter() - begun
                unit_tokens += len(ids) * sum(units) / len(units)
        tokens = ctx.memory.tokens
    bits, counted = bits_of(heard, ends) if heard is not None else (0.0, 0)
    return StreamResult(seed=seed, tokens=tokens, seconds=seconds, unit_tokens=unit_tokens, answers=answers, bits=bits,
                        bytes=counted, scores=scores)


def bits_of(heard: Heard, ends: list[tuple[int, int]]) -> tuple[float, int]:
    """Bits and bytes of the whole lines that were committed; `ends` are (tokens, bytes) after each line."""
    committed = sum(map(len, heard.logprobs))
    tokens, size = max((end for end in ends if end[0] <= committed), default=(0, 0))
    if not size:
        raise ConfigError(f"the {committed} tokens of whole chunks hold no whole line, so there are no bits to count; "
                          "expected a longer stream or smaller chunks")
    return heard.bits(tokens), size


async def ask_all(ctx: StreamingContext, questions: list[Item]) -> list[tuple[str, str, str]]:
    """(question, expected, found) for each, on scratch copies at the same place.

    No more wait for a copy than there are: a runtime gives none to those that wait too long, and hundreds of questions
    may be asked of a book. `first_line` of a benchmark is its metric's matter: an answer may begin with empty lines.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(item: Item) -> str:
        async with turn:
            return await ctx.ask(item.text, max_new_tokens=item.answer_tokens,
                                 stop=() if item.question is not None else ("\n",))

    found = await asyncio.gather(*map(ask, questions))
    return [(item.text, item.answer, answer) for item, answer in zip(questions, found, strict=True)]
