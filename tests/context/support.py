"""What the tests of contexts share: a runtime over a tiny random Llama, bitwise snapshots, scripted replies."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from locret_stream import Runtime, StreamingContext
from locret_stream.config import Budget
from locret_stream.context import streams
from locret_stream.models import attach
from locret_stream.text import FrameState
from tests import tiny_tokenizers
from tests.kit import assert_same

UNITS, CHUNK, SINKS, STABILIZERS = 20, 8, 2, 3
TEXT = ("The pass key of falcon is 48213.\nNaïve café — 日本語 and 🙂🙃 stay whole.\n\n"
        "def feed(stream):\n    for token in stream:\n        yield token  # <|im_end|> is data\n")
WITHIN_S = 60  # no test takes longer
SLOT_S = 8  # and none waits longer for a slot


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 500 ids, with control tokens and a ChatML template."""
    trained = tiny_tokenizers.train("byte_level", tiny_tokenizers.corpus()[:40_000], size=480)
    return tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML)


@cache
def model(layers: int = 2, seed: int = 0, hidden: int = 32) -> LlamaForCausalLM:
    """A random Llama whose weights are large enough that attention matters; tests never change it. It stays attached,
    as to attach it anew would take most of the time of a small test."""
    config = LlamaConfig(vocab_size=len(tokenizer()), hidden_size=hidden, intermediate_size=48, num_attention_heads=4,
                         num_hidden_layers=layers, num_key_value_heads=2, max_position_embeddings=2048,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2)
    made, noise = LlamaForCausalLM(config), torch.Generator().manual_seed(seed + 1)
    for parameter in made.parameters():
        draw = torch.randn(parameter.shape, generator=noise)
        parameter.data = parameter.data + 0.1 * draw if parameter.dim() == 1 else draw * parameter.shape[-1] ** -0.5
    attach(made.eval())
    return made


def unstarted(**options: Any) -> Runtime:
    """A tiny runtime; `on` and `reads` are the model and the tokenizer, the rest are Runtime's own options."""
    on, reads = options.pop("on", None) or model(), options.pop("reads", None) or tokenizer()
    if "budget" not in options:
        options["budget"] = Budget(units=options.pop("units", UNITS), sinks=SINKS, stabilizers=STABILIZERS)
    options.setdefault("policy", "h2o")  # stateful, so that the order of commits would show
    options.setdefault("chunk_size", CHUNK)
    options.setdefault("slot_timeout_s", SLOT_S)
    options.setdefault("store_bits", int(os.environ.get("LOCRET_TEST_STORE_BITS", "16")))  # as for `kit.build`
    options.setdefault("acknowledge", None)  # `test_acknowledge` has the other way
    return Runtime(on, reads, **options)


@asynccontextmanager
async def tiny(**options: Any) -> AsyncIterator[Runtime]:
    """A running tiny runtime; at its end no slot, task or thread may be left over."""
    async with asyncio.timeout(WITHIN_S):
        before = asyncio.all_tasks()
        async with unstarted(**options) as runtime:
            pools = runtime.tokenizing, runtime.storing
            yield runtime
            if runtime._open:
                expect_free(runtime)
                worker = runtime.worker
        if "worker" in locals() and not worker.users:
            assert not worker._thread.is_alive()
        assert not [thread for thread in threading.enumerate() for pool in pools if thread in pool._threads]
        assert asyncio.all_tasks() <= before, "tasks were left behind"


# For tests that read much and look at no commit: these take milliseconds each, whatever their size.
few_commits = partial(tiny, chunk_size=3 * CHUNK)


def expect_free(runtime: Runtime, taken: int = 0) -> None:
    """All slots but `taken` live ones are free, each once."""
    live, scratch = runtime.slots.live, runtime.slots.scratch
    free = [*live._free, *scratch._free]
    assert len(set(free)) == len(free) == runtime.engine.pool.slots - taken, f"{live._free} {scratch._free}"
    assert (live.free, scratch.free) == (live.size - taken, scratch.size)


# -- what a context holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snap:
    """All that a context is: the engine's tensors, the frame, and what is buffered."""

    tensors: dict[str, Tensor]
    frame: FrameState
    buffered: tuple


async def snap(ctx: StreamingContext, *, settle: bool = True) -> Snap:
    """The context now; `settle` commits whole chunks first that only wait for the next call."""
    session, engine = ctx._session, ctx._services.engine
    if settle:
        await session.commit()
    tensors = await session.step(lambda: engine.export(session.state))
    buffered = session.buffered
    return Snap(tensors, session.frame, (buffered.segmenter.state, [*buffered.segments], [*buffered.ids],
                                         buffered.left_by_break))


def expect_same(found: Snap, expected: Snap) -> None:
    """Bit for bit, frame and buffered text included."""
    assert_same(found.tensors, expected.tensors)
    assert (found.frame, found.buffered) == (expected.frame, expected.buffered)


def ids_in(ctx: StreamingContext) -> list[int]:
    """Every accepted id, for contexts of at most 1,024 tokens."""
    assert ctx.memory.tokens <= 1024
    return ctx._session.state.history


async def expect_pure(ctx: StreamingContext) -> None:
    """The committed state is what the accepted ids alone give, fed at once into a fresh context."""
    ids = ids_in(ctx)
    async with ctx._services.open(raw=True) as fresh:
        if ids:
            await fresh.feed(ids)
        expected = await snap(fresh)
    assert_same((await snap(ctx)).tensors, expected.tensors)


def ids_of(number: int, count: int, start: int = 0) -> list[int]:
    """Ids that no two contexts share."""
    return [5 + (7 * i + 31 * number + i * i % 13) % 400 for i in range(start, start + count)]


async def expect_replay(ctx: StreamingContext, plain: Runtime) -> None:
    """It keeps what its tokens alone give, fed at once into a fresh context of another runtime."""
    found = await snap(ctx)
    async with plain.open(raw=True) as fresh:
        if ids_in(ctx):
            await fresh.feed(ids_in(ctx))
        assert_same(found.tensors, (await snap(fresh)).tensors)


def settled(found: Snap) -> Snap:
    """With buffered segments and ids as one list, as they are in a session that was restored."""
    segmenter, segments, ids, left = found.buffered
    return Snap(found.tensors, found.frame, (segmenter, [*([ids] if ids else []), *segments], left))


async def replies(ctx: StreamingContext, count: int = 5) -> list[int]:
    return [token.id async for token in ctx.generate("And?", max_new_tokens=count, ignore_eos=True)]


def expect_within_cap(ctx: StreamingContext) -> None:
    state, engine = ctx._session.state, ctx._services.engine
    for units, budget, peak in zip(state.store.counts, engine.budgets, state.peaks, strict=True):
        assert units <= budget and peak <= budget + engine.chunk_size
        assert units + state.provisional <= budget + engine.chunk_size


def literals(runtime: Runtime, text: str) -> list[int]:
    """The ids of a template's own text."""
    return runtime.codec.literal(text)


def data(runtime: Runtime, text: str) -> list[int]:
    """The ids of text that is fed."""
    return runtime.codec.encode_text(text)


USER, ASK, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"


def chat(runtime: Runtime, *turns: tuple[str, list[int]]) -> list[int]:
    """Ids of a conversation of (text of the user, ids of the reply)."""
    return [i for said, reply in turns
            for i in (literals(runtime, USER) + data(runtime, said) + literals(runtime, ASK) + reply
                      + literals(runtime, END))]


# -- sources and replies --------------------------------------------------------------------------------------------


class Counted:
    """A source that counts what is pulled from it, and notes if anybody closes it."""

    def __init__(self, pieces: Iterable[Any], fails: Exception | None = None):
        self._pieces, self._fails, self.pulled, self.closed = iter(pieces), fails, 0, False

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        try:
            piece = next(self._pieces)
        except StopIteration:
            if self._fails is not None:
                raise self._fails from None
            raise
        self.pulled += 1
        return piece

    def close(self) -> None:
        self.closed = True

    def throw(self, *error: Any) -> None:
        self.closed = True


class CountedAsync(Counted):
    """The same for `async for`; every pull lets the event loop turn."""

    __iter__ = __next__ = None  # type: ignore[assignment]

    def __aiter__(self) -> CountedAsync:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        try:
            return Counted.__next__(self)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self.closed = True


def cuts(whole: str | bytes, places: Iterable[int]) -> list[Any]:
    """`whole` cut at these places, each taken modulo its length."""
    at = sorted({place % (len(whole) + 1) for place in places} | {0, len(whole)})
    return [whole[a:b] for a, b in pairwise(at)]


PIECES = cuts(TEXT, [3, 17, 40, 41, 66, 90, 120])


def scripted(monkeypatch: Any, ids: Sequence[int]) -> Iterator[int]:
    """Make every generation sample these ids, one after another; raises StopIteration beyond."""
    queue = iter(ids)
    monkeypatch.setattr(streams, "sample", lambda *_: next(queue))
    return queue


# -- cancelling at every await --------------------------------------------------------------------------------------


class Cut:
    """Awaits a coroutine and cancels the running task at its suspensions `at` (the first is 1)."""

    def __init__(self, work: Awaitable, *at: int):
        self._work, self._at, self.count = work, at, 0

    def __await__(self) -> Iterator[Any]:
        inner = self._work.__await__()
        step: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                waited = step()
            except StopIteration as stop:
                return stop.value
            self.count += 1
            if self.count in self._at:
                asyncio.current_task().cancel()
            try:
                yield waited
                step = lambda: inner.send(None)  # noqa: E731
            except BaseException as error:
                step = lambda error=error: inner.throw(error)  # noqa: E731


async def cut_at_every_await(run: Callable[[Callable[[Awaitable], Awaitable]], Awaitable], *, twice: bool = False,
                             most: int = 400) -> int:
    """Call `run(guard)` once for every suspension of what it puts under `guard`, which is cancelled there.

    `guard(work)` returns True if it was cancelled and False once it ran through; `twice` cancels again in the very
    next suspension, so in the middle of what cleans up. Returns how many places there were.
    """
    for place in range(1, most):
        through = False

        async def guard(work: Awaitable, place: int = place) -> bool:
            nonlocal through
            cut = Cut(work, place, *([place + 1] if twice else []))

            async def main() -> None:
                await cut

            task = asyncio.create_task(main())
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()
            through |= cut.count < place
            return task.cancelled()

        await run(guard)
        if through:
            return place - 1
    raise AssertionError(f"more than {most} suspensions")
