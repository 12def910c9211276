"""Sources of a feed: which kinds there are, when they are pulled, and that they are never closed."""

from __future__ import annotations

import asyncio
import gc
import io

import numpy as np
import pytest
import torch

from tests.context.support import (
    PIECES,
    TEXT,
    USER,
    Counted,
    CountedAsync,
    cuts,
    data,
    ids_in,
    literals,
    tiny,
)


def _sources() -> dict:
    ids = [5, 400, 7, 7, 480, 11, 3, 250, 17, 18, 19, 20]

    async def later(items):
        for item in items:
            await asyncio.sleep(0)
            yield item

    text = {
        "str": lambda: TEXT,
        "bytes": lambda: TEXT.encode(),
        "bytearray": lambda: bytearray(TEXT.encode()),
        "memoryview": lambda: memoryview(TEXT.encode()),
        "list of str": lambda: PIECES,
        "iterator of str": lambda: iter(PIECES),
        "characters": lambda: iter(TEXT),
        "iterator of bytes": lambda: iter(cuts(TEXT.encode(), range(0, 400, 3))),
        "async iterator of str": lambda: later(PIECES),
        "async iterator of bytes": lambda: later(cuts(TEXT.encode(), range(0, 400, 5))),
        "str and bytes": lambda: iter([PIECES[0], *[piece.encode() for piece in PIECES[1:]]]),
        "a file of lines": lambda: io.StringIO(TEXT),
        "a file of bytes": lambda: io.BytesIO(TEXT.encode()),
    }
    tokens = {
        "list of ids": lambda: ids,
        "tuple of ids": lambda: tuple(ids),
        "iterator of ids": lambda: iter(ids),
        "generator of lists": lambda: (ids[i:i + 5] for i in range(0, len(ids), 5)),
        "list of lists": lambda: [ids[:3], [], ids[3:]],
        "async iterator of ids": lambda: later(ids),
        "async iterator of lists": lambda: later([ids[:7], ids[7:]]),
        "numpy": lambda: np.array(ids),
        "numpy int32, two rows": lambda: np.array(ids, dtype=np.int32).reshape(2, -1),
        "torch": lambda: torch.tensor(ids),
        "iterator of numpy": lambda: iter([np.array(ids[:4]), np.int64(ids[4]), torch.tensor(ids[5:])]),
        "async iterator of torch": lambda: later(torch.tensor(ids)),
    }
    return {name: (kind, make) for kind, group in (("text", text), ("ids", tokens)) for name, make in group.items()} | {
        "ids then text": ("mixed", lambda: iter([ids, TEXT]))}


@pytest.mark.parametrize("name", _sources())
@pytest.mark.thorough(but=5)
async def test_every_kind_of_source_gives_the_same_tokens(name: str):
    kind, make = _sources()[name]
    ids = [5, 400, 7, 7, 480, 11, 3, 250, 17, 18, 19, 20]
    async with tiny() as runtime, runtime.open() as ctx:
        expected = {"ids": ids, "text": data(runtime, TEXT), "mixed": ids + data(runtime, TEXT)}[kind]
        assert [token.id async for token in ctx.feed(make())] == expected
        assert ids_in(ctx) == literals(runtime, USER) + expected
        assert all(type(i) is int for i in ids_in(ctx))


@pytest.mark.parametrize("kind", [Counted, CountedAsync])
async def test_a_source_is_pulled_only_as_fast_as_its_tokens_are_accepted(kind: type):
    lines = [f"line {n} of the stream\n" for n in range(30)]
    async with tiny() as runtime, runtime.open() as ctx:
        lengths = [len(data(runtime, line)) for line in lines]
        source, given = kind(lines), 0
        feed = ctx.feed(source)
        assert source.pulled == 0, "nothing before the first token is wanted"
        async for _ in feed:
            given += 1
            begun = next(n for n in range(len(lines) + 1) if sum(lengths[:n]) >= given)
            # a line's end is known with the next line's first character, so one piece more was pulled, never two
            assert source.pulled <= begun + 1
            assert feed.report.buffered <= len(lines[0]) + max(lengths) + 2
        assert source.pulled == len(lines) and not source.closed


@pytest.mark.parametrize("how", ["break", "end", "drain", "fails", "dropped", "aclose", "cancelled"])
@pytest.mark.parametrize("kind", [Counted, CountedAsync])
@pytest.mark.thorough(but=3)
async def test_no_feed_closes_its_source(kind: type, how: str):
    async with tiny() as runtime, runtime.open() as ctx:
        source = kind(PIECES, fails=OSError("gone") if how == "fails" else None)
        feed = ctx.feed(source)
        if how in ("break", "aclose", "dropped"):
            await anext(feed)
            if how == "aclose":
                await feed.aclose()
        elif how == "cancelled":
            task = asyncio.ensure_future(feed._drain())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        else:
            try:
                await feed
            except ValueError:
                assert how == "fails"
        del feed
        gc.collect()
        assert not source.closed
        if how in ("break", "dropped", "aclose", "cancelled"):  # the rest is still there for the next feed
            await ctx.feed(source)
            assert ids_in(ctx) == literals(runtime, USER) + data(runtime, TEXT)


@pytest.mark.parametrize("drained", [False, True])
async def test_a_source_that_has_ended_is_not_pulled_again_by_the_same_feed(drained: bool):
    """An example is a file that grows: what is written after its end belongs to the next feed."""
    class Growing:
        def __init__(self) -> None:
            self.left = ["first\n", None, "second\n"]

        def __iter__(self) -> Growing:
            return self

        def __next__(self) -> str:
            if not self.left or (piece := self.left.pop(0)) is None:
                raise StopIteration
            return piece

    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        source = Growing()
        feed = ctx.feed(source)
        if drained:
            await feed
        else:
            async for _ in feed:
                pass
        assert ids_in(ctx) == data(runtime, "first\n") and source.left == ["second\n"]
        await ctx.feed(source)
        assert ids_in(ctx) == data(runtime, "first\n") + data(runtime, "second\n")


async def test_the_next_feed_goes_on_with_a_generator_that_was_left():
    async def lines():
        for n in range(6):
            yield f"line {n}\n"

    async with tiny() as runtime, runtime.open() as ctx:
        source = lines()
        async for token in ctx.feed(source):
            if token.text.endswith("2"):
                break
        await ctx.feed(source)
        assert ids_in(ctx) == literals(runtime, USER) + data(runtime, "".join(f"line {n}\n" for n in range(6)))


async def test_an_endless_source_of_nothing_can_be_cancelled():
    def nothing():
        while True:
            yield ""

    async with tiny() as runtime, runtime.open() as ctx:
        for run in (lambda: ctx.feed(nothing())._drain(), lambda: anext(ctx.feed(nothing()))):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await run()
        await ctx.feed("next")
