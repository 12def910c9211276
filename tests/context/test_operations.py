"""Feeds and replies as operations: one at a time in a context, one token awaited at a time, and dropped unused."""

from __future__ import annotations

import asyncio
import gc

import pytest

from locret_stream import ContextBusy, EmptySource
from tests.context.support import PIECES, TEXT, data, expect_pure, expect_same, ids_in, snap, tiny


async def test_one_operation_at_a_time():
    async with tiny() as runtime, runtime.open() as ctx:
        feed = ctx.feed(iter(PIECES))
        first = await anext(feed)
        for other in (ctx.feed("other"), ctx.generate("other")):
            for _ in range(2):
                with pytest.raises(ContextBusy, match="while feed is running"):
                    await anext(other)
        for refused in (ctx.feed("other"), ctx.push("other"), ctx.flush()):
            with pytest.raises(ContextBusy, match="while feed is running"):
                await refused
        with pytest.raises(ContextBusy):
            async with ctx.turn():
                pass
        rest = [token.id async for token in feed]
        assert [first.id, *rest] == data(runtime, TEXT), "the feed went on undisturbed"

        reply = ctx.generate("hello", max_new_tokens=3, ignore_eos=True)
        await anext(reply)
        with pytest.raises(ContextBusy, match="while generate is running"):
            await ctx.feed("other")
        assert len([token async for token in reply]) == 2
        await ctx.feed("other")


async def test_a_feed_claims_the_context_only_when_it_begins():
    async with tiny() as runtime, runtime.open() as ctx:
        late, early = ctx.feed("late"), ctx.feed("early")
        await early
        await late
        assert runtime.codec.decode(ids_in(ctx)).endswith("earlylate")
        assert [token async for token in late] == [] and (await late).tokens == len(data(runtime, "late"))


async def test_one_token_of_an_operation_is_awaited_at_a_time():
    """Two tasks on one iterator, or closing it while a token is awaited: refused, and nothing is lost or doubled."""
    arrived = asyncio.Event()

    async def slow():
        yield "one\n"
        await arrived.wait()
        yield "two\n"

    async with tiny() as runtime, runtime.open() as ctx:
        feed = ctx.feed(slow())
        waiting = asyncio.create_task(anext(feed))
        await asyncio.sleep(0)
        for refused in (lambda: anext(feed), feed.aclose, feed._drain):
            with pytest.raises(ContextBusy, match="one at a time"):
                await refused()
        with pytest.raises(ContextBusy):
            await ctx.feed("other")
        arrived.set()
        first = await waiting
        assert [first.id] + [t.id async for t in feed] == data(runtime, "one\ntwo\n")

        reply = ctx.generate("go", max_new_tokens=4, ignore_eos=True)
        tokens = await asyncio.gather(anext(reply), anext(reply), reply.aclose(), return_exceptions=True)
        assert [type(t).__name__ for t in tokens] == ["Token", "ContextBusy", "ContextBusy"]
        assert len([t async for t in reply]) == 3
        await expect_pure(ctx)


async def test_a_feed_can_be_run_by_create_task():
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as other:
        task = asyncio.create_task(ctx.feed(TEXT))
        report = await other.feed(TEXT)
        done = await asyncio.wait_for(task, 30)
        assert (done.tokens, done.position) == (report.tokens, report.position)
        expect_same(await snap(ctx), await snap(other))
        failing = asyncio.create_task(ctx.feed([]))
        with pytest.raises(EmptySource):
            await failing

        async def endless():
            while True:
                yield "more and more\n"

        task = asyncio.create_task(ctx.feed(endless()))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ctx.feed("it goes on\n")


@pytest.mark.parametrize("name", ["feed", "generate"])
async def test_an_operation_dropped_before_it_began_warns_that_it_did_nothing(name: str):
    async with tiny() as runtime, runtime.open() as ctx:
        with pytest.warns(RuntimeWarning, match="did nothing; expected `await` or `async for`"):
            getattr(ctx, name)("a line\n")
            gc.collect()
        await ctx.feed("a line\n")
        assert await ctx.ask("So?", max_new_tokens=2) is not None
