"""Runs cells. The result of every cell is a file; cells that have their file are not run again.

Streams go through the public API: they are fed as token ids, every line tokenised by itself, and questions are asked on
scratch copies, several at once; an answer ends with a newline and counts only if it is exactly right. Documents of
files are fed and asked the same way, but their answers end where the model or the benchmark ends them, and count what
the metric of the benchmark gives.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from locret_stream.config import Budget, ModelShape
from locret_stream.context import StreamingContext
from locret_stream.errors import ConfigError
from locret_stream.evaluation import metrics, published, suite
from locret_stream.evaluation.cells import (
    Cell,
    CellResult,
    Origin,
    StreamResult,
    expect_streams,
    file_name,
    read,
    values,
    write,
)
from locret_stream.evaluation.documents import FileTask
from locret_stream.evaluation.oracles import Attention, LogprobRecorder, Oracle, PerHeadOracle
from locret_stream.evaluation.suite import Item, Task, Text
from locret_stream.heads import RetainingHeads
from locret_stream.models import architecture, attach, detach, named_weights
from locret_stream.policies import Listening, all_knobs
from locret_stream.runtime import Runtime
from locret_stream.runtime.loading import in_passing
from locret_stream.snapshot.identity import canonical, digest_tensors, digest_text
from locret_stream.text import ChatFrame, TextCodec

AT_ONCE = 8  # questions that are answered together
ORACLES = {kind.name: kind for kind in (Oracle, PerHeadOracle)}


class Bench:
    """A model, its tokenizer, a text, and files of documents, with which cells are run.

    Args:
        acknowledge: as of `Runtime`, for all tasks but files, which are asked as published: in the turn of their text.
    """

    def __init__(self, model: Any, tokenizer: Any, text: Text = suite.STDLIB, documents: Iterable[FileTask] = (), *,
                 acknowledge: str | None = None):
        self.model, self.tokenizer, self.text, self.acknowledge = model, tokenizer, text, acknowledge
        self._documents = {(task.name, task.path): task for task in documents}
        self._origins: dict[str, Origin] = {}
        self._rooms: dict[tuple[str, str, int, bool], int] = {}
        self._measure = functools.lru_cache(1 << 16)(self.count_tokens)

    @functools.cached_property
    def base(self) -> Origin:
        """The origin that all cells of this bench share: without heads, file and knobs."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        definition = backend.to_str() if backend is not None else str(sorted(self.tokenizer.get_vocab().items()))
        return Origin(weights=digest_tensors(named_weights(self.model)), tokenizer=digest_text(definition), heads="",
                      text=self.text.name, tasks=suite.VERSION, architecture=digest_text(self._attached[4]),
                      template=self._template(self.acknowledge))

    @property
    def shape(self) -> tuple[ModelShape, str, str, str]:
        """The model's shape, and its fingerprint, sketch and form, which heads must fit. Raises UnsupportedModel."""
        return self._attached[:4]

    @functools.cached_property
    def _attached(self) -> tuple[ModelShape, str, str, str, str]:
        attachment = in_passing(lambda: attach(self.model))
        detach(self.model)
        return (attachment.shape, attachment.fingerprint, attachment.sketch, attachment.form,
                architecture.architecture(attachment.config))

    def task(self, cell: Cell) -> Task:
        """What a cell is measured on. Raises ConfigError: an unknown task, or a file that was not given."""
        if not cell.file:
            return suite.task_named(cell.task)
        if (cell.task, cell.file) not in self._documents:
            given = ", ".join(f"{task} of {path}" for task, path in self._documents) or "none"
            raise ConfigError(f"a cell is of {cell.task} of the file {cell.file}; expected one of those that were "
                              f"given: {given}")
        return self._documents[cell.task, cell.file]

    def origin_of(self, cell: Cell) -> Origin:
        """What the result of a cell is valid for. Raises ConfigError and HeadsMismatch as `task` and `origin` do."""
        origin, task = self.origin(cell.heads), self.task(cell)
        if cell.policy not in ORACLES:
            origin = msgspec.structs.replace(origin, knobs=canonical(all_knobs(cell.policy, cell.knobs)))
        if isinstance(task, FileTask):
            return msgspec.structs.replace(origin, text="", file=task.digest, template=self._template(None))
        return origin

    def origin(self, heads: str) -> Origin:
        """What results with those heads are valid for, on tasks that are no files, whatever the policy. Raises
        HeadsMismatch as loading the heads does."""
        if heads not in self._origins:
            digest = ""
            if heads:
                loaded = RetainingHeads.load(heads)
                digest = digest_text(digest_tensors(loaded.state_dict().items()),
                                     msgspec.json.encode(loaded.config, order="sorted").decode())
            self._origins[heads] = msgspec.structs.replace(self.base, heads=digest)
        return self._origins[heads]

    def path_of(self, cell: Cell, out: Path) -> Path:
        """The file of a cell's result in the folder `out`. Raises as `origin_of` does."""
        return out / file_name(cell, self.origin_of(cell))

    def run(self, cells: Iterable[Cell], out: Path,
            progress: Callable[[CellResult, bool], None] = lambda result, was_read: None) -> list[CellResult]:
        """The result of every cell: read where its file is in `out`, else measured and written there.

        After an interruption, Ctrl-C included, all finished cells are in `out`, and the same call goes on from there.

        Args:
            progress: is called after each cell with its result, and whether it was read.

        Raises:
            ConfigError, HeadsMismatch, WindowExceeded: a cell cannot be run; those before it are done.
            InputError: a file in `out` is damaged.
        """
        out.mkdir(parents=True, exist_ok=True)
        return asyncio.run(self._run(cells, out, progress))  # one loop: Ctrl-C never meets a loop that is half made

    async def _run(self, cells: Iterable[Cell], out: Path,
                   progress: Callable[[CellResult, bool], None]) -> list[CellResult]:
        results = []
        for cell in cells:
            expect_streams(cell)
            path = self.path_of(cell, out)
            was_read = path.is_file()
            if was_read:
                result = read(path)
            else:
                result = await self.measure(cell)
                write(result, path)
            results.append(result)
            progress(result, was_read)
        return results

    async def measure(self, cell: Cell) -> CellResult:
        """Run one cell, with a runtime of its own. Cancelled, it leaves nothing behind. Raises as `run` does."""
        task, origin = self.task(cell), self.origin_of(cell)
        oracle = ORACLES[cell.policy]() if cell.policy in ORACLES else None
        runtime = Runtime(self.model, self.tokenizer, policy=oracle or cell.policy,
                          knobs=None if oracle else cell.knobs, heads=cell.heads or None,
                          budget=self.budget(cell), chunk_size=cell.chunk_size, max_live=1,
                          acknowledge=None if isinstance(task, FileTask) else self.acknowledge,
                          scratch=max(1, min(AT_ONCE, task.asked)), store_bits=cell.store_bits, exact=cell.exact)
        async with runtime:
            recorder = None
            if task.kind == "bits":
                recorder = LogprobRecorder(runtime.engine.shape)
                runtime.engine.replace_policy(Listening(runtime.engine.policy, recorder))
            streams = []
            for seed in cell.seeds:
                items = self.items(cell, seed)
                if oracle is not None and not any(item.needed for item in items):
                    raise ConfigError(f"the oracle has nothing to know: no line of task {task.name!r} is asked about")
                if isinstance(oracle, PerHeadOracle):
                    oracle.worth = await self.worth(items)
                streams.append(await run_stream(seed, items, cell, task, runtime, oracle, recorder))
            groups = [values(stream) for stream in streams]
            scored = [value for group in groups for value in group]
            low, high = metrics.interval(groups)
            return CellResult(
                cell=cell, origin=origin, score=sum(scored) / len(scored), low=low, high=high, questions=len(scored),
                tok_per_s=sum(s.tokens for s in streams) / max(1e-9, sum(s.seconds for s in streams)),
                budgets=runtime.engine.budgets, peak_bytes=runtime.memory.slot_bytes, streams=streams)

    def items(self, cell: Cell, seed: int) -> list[Item]:
        """One stream of a cell; with a focus only the first of its questions, at its usual place."""
        items = list(self.task(cell).items(seed, cell.length, self._measure, self.text.lines))
        if not cell.focus:
            return items
        questions = [at for at, item in enumerate(items) if item.answer is not None]
        return [item for at, item in enumerate(items) if at not in questions[1:]]

    def expect_whole_lines(self, cell: Cell) -> None:
        """Raises ConfigError: whole chunks of a stream hold no whole line, so that there would be no bits to count."""
        for seed in cell.seeds:
            items = self.items(cell, seed)
            first, tokens = self.count_tokens(items[0].text), sum(self.count_tokens(item.text) for item in items)
            if first > tokens // cell.chunk_size * cell.chunk_size:
                raise ConfigError(f"{cell.task}: a stream of {tokens} tokens begins with a line of {first}, and whole "
                                  f"chunks of {cell.chunk_size} hold no whole line; expected longer streams or smaller "
                                  "chunks")

    def longest_focus(self, cell: Cell) -> int:
        """Tokens of the longest question that is announced as a focus. What a built-in task asks does not depend on how
        long its streams are, so short streams are made here."""
        short = cell if cell.file else msgspec.structs.replace(cell, length=1)
        return max(self.count_tokens(next(item.text for item in self.items(short, seed) if item.answer is not None))
                   for seed in cell.seeds)

    def budget(self, cell: Cell) -> Budget:
        """The budget of the cell; where it has none, units for the longest of its streams and an answer.

        The runtime raises WindowExceeded if the model's window does not hold it.
        """
        return cell.budget or _evict_nothing(max(self.room(cell, seed) for seed in cell.seeds))

    def room(self, cell: Cell, seed: int) -> int:
        """Tokens of one stream with its longest question and answer, the focus, and what the chat frame adds. Documents
        are counted only once, because counting a long one takes its time."""
        key = cell.file, cell.task, seed, cell.focus
        if key in self._rooms:
            return self._rooms[key]
        task, items = self.task(cell), self.items(cell, seed)
        count = (lambda text: len(self._codec.encode_text(text))) if cell.file else self.count_tokens
        room = 0 if task.raw else self._around(None if cell.file else self.acknowledge)
        room += sum(count(item.text) for item in items if item.answer is None)
        asked = [(count(item.text), item.answer_tokens) for item in items if item.answer is not None]
        room += max(map(sum, asked), default=suite.ANSWER_TOKENS) + (asked[0][0] if cell.focus else 0)
        if cell.file:
            self._rooms[key] = room
        return room

    @functools.cached_property
    def _codec(self) -> TextCodec:
        return TextCodec(self.tokenizer, vocab=self.shape[0].vocab)

    def _frame(self, acknowledge: str | None) -> ChatFrame:
        return ChatFrame(self._codec, self.tokenizer, acknowledge=acknowledge)

    def _template(self, acknowledge: str | None) -> str:
        """The digest of what the template writes, or of what it is made by where it writes something else every day: a
        result is as good tomorrow."""
        frame = self._frame(acknowledge)
        return frame.written(digest_text).always or digest_text(frame.settings)

    def _around(self, acknowledge: str | None) -> int:
        """How many tokens the chat frame puts around a text with a question."""
        frame = self._frame(acknowledge)
        begun, state = frame.begin()
        return len(begun) + sum(len(step(state.with_content())[0]) for step in (
            frame.question_separator, frame.close_user_and_prompt))

    def count_tokens(self, text: str) -> int:
        """As a runtime counts them, without a chat frame."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def worth(self, items: list[Item]) -> Tensor:
        """[L, H, N]: the attention that answers pay to each of the N tokens of the needed lines, when nothing is read
        but those lines, the questions and the answers."""
        ids: list[int] = []
        for item in items:
            if item.needed:
                ids += self.tokenizer.encode(item.text, add_special_tokens=False)
        count = len(ids)
        rows: list[int] = []
        for item in items:
            if item.answer is not None:
                ids += self.tokenizer.encode(item.text, add_special_tokens=False)
                answer = self.tokenizer.encode(item.answer + "\n", add_special_tokens=False)
                rows += range(len(ids) - 1, len(ids) + len(answer) - 1)  # each row predicts the next token
                ids += answer
        probe = Attention()
        probe.rows = torch.tensor(rows)
        async with (Runtime(self.model, self.tokenizer, policy=probe, budget=_evict_nothing(len(ids)),
                            chunk_size=len(ids), max_live=1) as runtime, runtime.open(raw=True) as ctx):
            await ctx.feed(ids)
        return probe.received[:, :, :count]


def _evict_nothing(units: int) -> Budget:
    return Budget(units=units, sinks=0, stabilizers=0, allocation="uniform")


async def run_stream(seed: int, items: list[Item], cell: Cell, task: Task, runtime: Runtime,
                     oracle: Oracle | None = None, recorder: LogprobRecorder | None = None) -> StreamResult:
    """Feed one stream, and ask each question at its place.

    Args:
        oracle: the runtime's policy, if it is to be given the positions of the needed tokens.
        recorder: of the log-probabilities, if bits are counted.

    Raises:
        ConfigError: a recorder and no whole line in whole chunks.
    """
    answers: list[tuple[str, str, str]] = []
    scores: list[float] = []
    wanted: list[int] = []
    ends: list[tuple[int, int]] = []  # (tokens, bytes) after each line
    seconds, unit_tokens, size = 0.0, 0.0, 0
    if oracle is not None:
        oracle.wanted = torch.zeros(0, dtype=torch.int64)
    if recorder is not None:
        recorder.logprobs = []
    focus = next((item.text for item in items if item.answer is not None), None) if cell.focus else None
    async with runtime.open(raw=True if task.raw else None, focus=focus) as ctx:
        for are_questions, group in itertools.groupby(items, key=lambda item: item.answer is not None):
            if are_questions:
                questions = list(group)
                replies = await ask_all(ctx, questions)
                answers += replies
                scores += [published.score(item.question, found)
                           for item, (*_, found) in zip(questions, replies, strict=True) if item.question is not None]
                continue
            fed, start = list[int](), 0
            for item in group:  # each tokenised by itself, so that its tokens are the same wherever a question stands
                line, at = runtime.codec.encode_text(item.text), ctx.memory.tokens + len(fed)
                wanted += range(at, at + len(line)) if item.needed else ()
                fed += line
                size += len(item.text.encode())
                ends.append((at + len(line), size))
            if oracle is not None:
                oracle.wanted = torch.tensor(wanted, dtype=torch.int64)
            while start < len(fed):  # in parts that end where a chunk does: units are evicted only there
                stop = start + cell.chunk_size - ctx.memory.tokens % cell.chunk_size
                ids, units, start = fed[start:stop], ctx.memory.units, stop
                begun = time.perf_counter()
                await ctx.feed(ids)
                seconds += time.perf_counter() - begun
                unit_tokens += len(ids) * sum(units) / len(units)
        tokens = ctx.memory.tokens
    bits, text_bytes = bits_of(recorder, ends) if recorder is not None else (0.0, 0)
    return StreamResult(seed=seed, tokens=tokens, seconds=seconds, unit_tokens=unit_tokens, answers=answers, bits=bits,
                        bytes=text_bytes, scores=scores)


def bits_of(recorder: LogprobRecorder, ends: list[tuple[int, int]]) -> tuple[float, int]:
    """Bits and bytes of the whole lines that were committed; `ends` are (tokens, bytes) after each line. Raises
    ConfigError: no whole line was committed."""
    committed = sum(map(len, recorder.logprobs))
    tokens, size = max((end for end in ends if end[0] <= committed), default=(0, 0))
    if not size:
        raise ConfigError(f"the {committed} tokens of whole chunks hold no whole line, so there are no bits to count; "
                          "expected a longer stream or smaller chunks")
    return recorder.bits(tokens), size


async def ask_all(ctx: StreamingContext, questions: list[Item]) -> list[tuple[str, str, str]]:
    """(question, expected, found) for each of `questions`, all asked of the same state on scratch copies.

    At most `AT_ONCE` wait for a copy: a runtime refuses those that wait too long, and hundreds of questions may be
    asked of a book. Where only the first line of an answer counts, `published.score` cuts it: an answer may begin with
    empty lines.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(item: Item) -> tuple[str, str, str]:
        assert item.answer is not None  # it is a question
        async with turn:
            found = await ctx.ask(item.text, max_new_tokens=item.answer_tokens,
                                  stop=() if item.question is not None else ("\n",))
        return item.text, item.answer, str(found)

    return await asyncio.gather(*map(ask, questions))
