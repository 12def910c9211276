"""What a chat model can remember a long stream with, for `long_memory.py`: a memory that evicts, and what people do
without one. Each is a function of (runtime, stream, size) that asks every fact of the stream at its end.

All of them ask in one form: what they hand over, "OK.", and the question in a turn of its own. `size` is the number of
tokens of text that one forward may attend to, the same for all; frames and questions are not counted, nor is the
instruction of a summary.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import torch
from book import Planted, Stream
from torch import Tensor

from locret_stream import Runtime
from locret_stream.context import StreamingContext
from locret_stream.errors import ConfigError
from locret_stream.evaluation import published
from locret_stream.evaluation.chat import ANSWER_TOKENS
from locret_stream.policies import Chunk, Policy
from locret_stream.policies.locret import Locret
from locret_stream.policies.streaming_llm import StreamingLLM

ROOM = 256  # units beside the text: frame, question, answer; instruction and summary
CHUNK_TOKENS = 128  # of what BM25 searches
AROUND_TOKENS = 100  # of the book, beside the fact that the oracle is told
SUMMARY_TOKENS = 200
SUMMARY = "Summary of what came before:\n"
NEXT = "\n\nThe next part of the text:\n"
UPDATE = "Summarize the text so far in a few sentences. Keep every number and code."
PENALTY = 1.2  # on repetitions: a small model repeats a sentence until its tokens are spent, at 1.1 too


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A question and what was answered.

    Args:
        position: where the fact stands in the stream, from 0 to 1.
        seconds: from the question to its answer; searching and reading what was found count, reading a stream or a
            text that serves all questions does not.
        handed: tokens (of a memory, units) that stood before the question.
        kept_by_layer: [L], the share of the units of the fact's sentence that a memory still had before the question,
            mean over KV heads. kept: their mean. kept_value: of the tokens of the value alone, mean over all.
    """

    question: str
    expected: str
    found: str
    right: bool
    position: float
    seconds: float
    handed: float
    kept: float | None = None
    kept_value: float | None = None
    kept_by_layer: list[float] = []


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one stream.

    Args:
        read_s: seconds before the first question. tokens_read: of them all, those of the answers aside.
        tokens_written: by the model, those of the answers aside.
        bytes_kept: of what has to stay between two questions, the model aside: for a memory all tensors of its slot;
            for a text that was handed over its K and V, as any cache holds them; for BM25 the text and its index.
        note: the last summary.
    """

    answers: list[Answer]
    read_s: float
    tokens_read: int
    tokens_written: int = 0
    bytes_kept: int
    note: str = ""


System = Callable[[Runtime, Stream, int], Awaitable[Outcome]]


async def memory(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The stream is fed as a whole, and the runtime's policy decides what stays. The budget is the runtime's."""
    (outcome,) = await memories(runtime, stream, (None,))
    return outcome


async def memories(runtime: Runtime, stream: Stream, recalls: Sequence[bool | None]) -> list[Outcome]:
    """As `memory`, once with each `recall` of `ask`: the stream is read once for all of them, as what is committed does
    not depend on it."""
    async with runtime.open() as ctx:
        begun, first = time.perf_counter(), ctx.memory.tokens  # behind the tokens that the template begins with
        if isinstance(policy := runtime.engine.policy, Pinning):
            policy.facts = torch.tensor([first + at for fact in stream.facts for at in range(fact.start, fact.end)])
        await ctx.feed(stream.tokens)
        read_s = time.perf_counter() - begun
        handed = statistics.mean(ctx.memory.units) + ctx.memory.pending
        answers: list[list[Answer]] = [[] for _ in recalls]
        for fact in stream.facts:
            kept = (await ctx.receipts(first + fact.start, first + fact.end)).kept.float()
            shares = [round(share, 4) for share in kept.mean((1, 2)).tolist()]
            value = kept[..., fact.value].mean().item()
            for recall, own in zip(recalls, answers, strict=True):
                answer = await asked(ctx, stream, fact, handed, recall)
                own.append(msgspec.structs.replace(answer, kept=round(kept.mean().item(), 4),
                                                   kept_value=round(value, 4), kept_by_layer=shares))
        return [Outcome(answers=own, read_s=read_s, tokens_read=ctx.memory.tokens + questions(runtime, stream),
                        bytes_kept=ctx.memory.bytes_resident) for own in answers]


class Pinning(Policy):
    """Above another policy in the order of classes: units of the facts go last of all, in every layer and head. What it
    still answers wrongly was not lost.

    Attributes:
        facts: [N], the absolute positions of the facts' tokens; set before the stream is read.
    """

    facts: Tensor = torch.zeros(0, dtype=torch.int64)

    def score(self, chunk: Chunk) -> Tensor:
        scores = super().score(chunk)
        positions = torch.arange(chunk.start, chunk.start + scores.shape[1], device=scores.device)
        return scores.masked_fill(torch.isin(positions, self.facts.to(scores.device)), torch.finfo(scores.dtype).max)


class Pinned(Pinning, Locret):
    """As `locret`, but for the facts."""


class PinnedRecent(Pinning, StreamingLLM):
    """As `streaming_llm`, but for the facts: no unit of any other sentence stands beside them but of the last ones."""


async def truncation(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The model is handed the last tokens."""
    return await ask_of(runtime, stream, stream.tokens[-size:])


async def summary(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The model reads the stream piece by piece, each behind its summary of what came before, and writes a new one when
    it is asked for it (`UPDATE`). At the end it is handed the last one and the last tokens that fit beside it."""
    begun, last, read, written, at = time.perf_counter(), "nothing yet.", 0, 0, 0
    before = len(encode(runtime, SUMMARY + NEXT))
    most = max(1, size - 2 * SUMMARY_TOKENS - before)
    left = len(stream.tokens)
    while left > size - SUMMARY_TOKENS - before:
        group = next(stream.groups(most, at))
        at, left = group.stop, left - len(stream.part(group))
        async with runtime.open() as ctx:
            await ctx.feed(encode(runtime, SUMMARY + last + NEXT) + stream.part(group)[:size])
            last = (await ctx.ask(UPDATE, max_new_tokens=SUMMARY_TOKENS, repetition_penalty=PENALTY)).strip()
            read += ctx.memory.tokens + len(encode(runtime, UPDATE))
            written += len(encode(runtime, last))
    head = encode(runtime, SUMMARY + last + NEXT)
    read_s = time.perf_counter() - begun
    outcome = await ask_of(runtime, stream, head + stream.tokens[-(size - len(head)):])
    return msgspec.structs.replace(outcome, read_s=outcome.read_s + read_s, tokens_read=outcome.tokens_read + read,
                                   tokens_written=written, note=last)


async def bm25(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The whole text is kept, and searched by the words of a question (BM25, by the library bm25s). The best parts that
    fill `size` tokens are handed over, in the order of the text."""
    import bm25s

    begun = time.perf_counter()
    parts = list(stream.groups(CHUNK_TOKENS))
    texts = ["".join(stream.pieces[number] for number in part) for part in parts]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    kept = sum(len(text.encode()) for text in texts) + sum(map(len, map(str.encode, index.vocab_dict)))
    kept += sum(array.nbytes for array in index.scores.values() if hasattr(array, "nbytes"))
    read_s, read, answers = time.perf_counter() - begun, 0, []
    for fact in stream.facts:
        begun = time.perf_counter()
        words = bm25s.tokenize(fact.told.question, stopwords="en", show_progress=False)
        found, _ = index.retrieve(words, k=len(parts), show_progress=False, sorted=True)
        chosen, held = list[int](), 0
        for number in map(int, found[0]):
            more = len(stream.part(parts[number]))
            if held + more <= size:
                chosen.append(number)
                held += more
        ids = [token for number in sorted(chosen) for token in stream.part(parts[number])]
        answer, tokens = await told(runtime, stream, fact, ids)
        read += tokens
        answers.append(msgspec.structs.replace(answer, seconds=time.perf_counter() - begun))
    return Outcome(answers=answers, read_s=read_s, tokens_read=read, bytes_kept=kept)


async def oracle(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The model is handed the fact among some sentences of its surroundings: how well it can answer at all."""
    read, answers = 0, []
    for fact in stream.facts:
        begun, around = time.perf_counter(), surroundings(stream, fact)
        answer, tokens = await told(runtime, stream, fact, around[:size])
        read += tokens
        answers.append(msgspec.structs.replace(answer, seconds=time.perf_counter() - begun))
    return Outcome(answers=answers, read_s=0.0, tokens_read=read, bytes_kept=0)


async def gathered(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """The model is handed all facts at once, each among the surroundings that the oracle is handed: how well it tells
    them apart where nothing is lost and little stands between them."""
    ids = [token for fact in sorted(stream.facts, key=lambda fact: fact.start) for token in surroundings(stream, fact)]
    return await ask_of(runtime, stream, ids[-size:])


async def gathered_recent(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """As `gathered`, and behind that the last tokens that fit: what the model answers of the very best choice where as
    many tokens stand before the question as a memory holds, all read as one text. A fact that is told among those last
    tokens is told twice."""
    ids = [token for fact in sorted(stream.facts, key=lambda fact: fact.start) for token in surroundings(stream, fact)]
    return await ask_of(runtime, stream, [*ids, *stream.tokens[-max(1, size - len(ids)):]][-size:])


async def sentences_recent(runtime: Runtime, stream: Stream, size: int) -> Outcome:
    """As `gathered_recent`, but of the facts nothing but their sentences: the text of which `PinnedRecent` holds the
    units, read as one."""
    ids = [token for fact in sorted(stream.facts, key=lambda fact: fact.start) for token in stream.ids[fact.piece]]
    return await ask_of(runtime, stream, [*ids, *stream.tokens[-max(1, size - len(ids)):]][-size:])


def surroundings(stream: Stream, fact: Planted) -> list[int]:
    """A fact, and about `AROUND_TOKENS` of the sentences beside it."""
    low, high, around = fact.piece, fact.piece + 1, 0
    while around < AROUND_TOKENS and (low > 0 or high < len(stream.ids)):
        if low > 0:
            low -= 1
            around += len(stream.ids[low])
        if high < len(stream.ids) and around < AROUND_TOKENS:
            around += len(stream.ids[high])
            high += 1
    start = sum(map(len, stream.ids[low:fact.piece]))
    return stream.part(range(low, high))[max(0, start - AROUND_TOKENS):]  # a sentence may be very long


SYSTEMS: dict[str, System] = {
    "truncation": truncation, "summary": summary, "bm25": bm25, "oracle": oracle, "gathered": gathered,
    "gathered_recent": gathered_recent, "sentences_recent": sentences_recent,
}
"""Those that hand text to a full cache. `memory` is the others'."""


def expect_bm25s() -> None:
    """Raises ConfigError where the library is not installed."""
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError("the system bm25 needs bm25s, which is not installed; expected: pip install bm25s")


def encode(runtime: Runtime, text: str) -> list[int]:
    """The ids of a text by itself, without a frame."""
    return runtime.codec.encode_text(text)


def questions(runtime: Runtime, stream: Stream) -> int:
    """How many tokens the questions of a stream have, without a frame."""
    return sum(len(encode(runtime, fact.told.question)) for fact in stream.facts)


async def ask_of(runtime: Runtime, stream: Stream, ids: list[int]) -> Outcome:
    """All questions, of one text that is read once."""
    async with runtime.open() as ctx:
        begun = time.perf_counter()
        await ctx.feed(ids)
        read_s = time.perf_counter() - begun
        answers = [await asked(ctx, stream, fact, len(ids)) for fact in stream.facts]
        return Outcome(answers=answers, read_s=read_s, tokens_read=ctx.memory.tokens + questions(runtime, stream),
                       bytes_kept=ctx.memory.bytes_full_cache)


async def told(runtime: Runtime, stream: Stream, fact: Planted, ids: list[int]) -> tuple[Answer, int]:
    """One question, of a text that is read for it alone; and how many tokens were read."""
    async with runtime.open() as ctx:
        await ctx.feed(ids)
        answer = await asked(ctx, stream, fact, len(ids))
        return answer, ctx.memory.tokens + len(encode(runtime, fact.told.question))


async def asked(ctx: StreamingContext, stream: Stream, fact: Planted, handed: float,
                recall: bool | None = None) -> Answer:
    """The free answer to one question; it is right if it contains the value."""
    begun = time.perf_counter()
    found = str(await ctx.ask(fact.told.question, max_new_tokens=ANSWER_TOKENS, recall=recall))
    return Answer(question=fact.told.question, expected=fact.told.value, found=found,
                  right=bool(published.score(fact.told.asked(), found)), handed=handed,
                  position=round(fact.start / len(stream.tokens), 4), seconds=time.perf_counter() - begun)
