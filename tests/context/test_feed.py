"""feed: which tokens are accepted and which are buffered when it ends, is left, cancelled, forked or paced."""

from __future__ import annotations

import asyncio
import time

import pytest

from locret_stream import FeedReport, SourceError
from tests.context.support import (
    CHUNK,
    PIECES,
    TEXT,
    USER,
    Counted,
    CountedAsync,
    data,
    expect_pure,
    expect_same,
    expect_within_cap,
    ids_in,
    literals,
    snap,
    tiny,
)


async def test_each_token_is_yielded_once_it_is_accepted():
    async with tiny() as runtime, runtime.open() as ctx:
        before, given = ctx.memory.tokens, []
        async for token in ctx.feed(iter(PIECES)):
            given.append(token)
            assert ctx.memory.tokens == token.position + 1 == before + len(given)
            assert ids_in(ctx)[-1] == token.id, "the last one yielded is the last one accepted"
            assert ctx.memory.pending < CHUNK
            expect_within_cap(ctx)
        assert [token.id for token in given] == data(runtime, TEXT)
        assert "".join(token.text for token in given) == TEXT
        await expect_pure(ctx)


async def test_after_a_break_the_next_feed_takes_what_is_buffered_first():
    async with tiny() as runtime, runtime.open() as ctx:
        source, taken = Counted(PIECES), []
        feed = ctx.feed(source)
        async for token in feed:
            taken.append(token.id)
            if len(taken) == 21:
                break
        pulled = source.pulled
        assert 0 < pulled < len(PIECES)
        report = feed.report
        assert (report.tokens, report.pieces, report.position) == (21, pulled, ctx.memory.tokens)
        assert report.buffered > 0
        assert ids_in(ctx) == literals(runtime, USER) + taken
        await feed.aclose()

        rest = [token.id async for token in ctx.feed(source)]
        assert taken + rest == data(runtime, TEXT), "nothing lost, nothing twice, and no cut where the break was"
        assert not source.closed and feed.report.buffered == 0
        await expect_pure(ctx)


async def test_buffered_text_joins_the_text_of_the_next_feed():
    """A source that dies is no end of the text: the rest of a word, or of a character, may come with the next feed."""
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as whole:
        place = TEXT.encode().index("日".encode()) + 1
        with pytest.raises(SourceError):
            await ctx.feed(Counted([TEXT.encode()[:place]], fails=ConnectionResetError("gone")))
        assert ctx._session.buffered.size > 0
        await ctx.feed(TEXT.encode()[place:])
        await whole.feed(TEXT)
        expect_same(await snap(ctx), await snap(whole))


async def test_a_drained_feed_equals_an_iterated_one():
    async with tiny() as runtime, runtime.open() as one, runtime.open() as other:
        feed = one.feed(iter(PIECES))
        async for _ in feed:
            pass
        drained = await other.feed(iter(PIECES))
        iterated = await feed  # of an ended feed: its report
        assert isinstance(drained, FeedReport)
        assert (drained.tokens, drained.pieces, drained.position, drained.buffered) == (
            iterated.tokens, iterated.pieces, iterated.position, iterated.buffered) == (
            len(data(runtime, TEXT)), len(PIECES), one.memory.tokens, 0)
        expect_same(await snap(one), await snap(other))
        half = other.feed(iter(PIECES))
        for _ in range(5):
            await anext(half)
        assert (await half).tokens == drained.tokens, "drained from the middle on"


async def test_ask_and_fork_inside_a_feed_act_at_the_last_accepted_token():
    async with tiny() as runtime, runtime.open() as ctx:
        given: list[int] = []
        async for token in ctx.feed(iter(PIECES)):
            given.append(token.id)
            if len(given) in (1, 7, 8, 9, 33):
                so_far = literals(runtime, USER) + given
                asked = await ctx.ask("who?", max_new_tokens=3)
                async with ctx.fork() as fork:
                    assert ids_in(fork) == ids_in(ctx) == so_far
                    await expect_pure(fork)
                    assert "".join([t.text async for t in fork.generate("who?", max_new_tokens=3)]) == asked
                    said = data(runtime, "\n\n") + data(runtime, "who?")
                    assert ids_in(fork)[len(so_far):][:len(said)] == said, "what is buffered comes behind it"
                assert ids_in(ctx) == so_far
        assert given == data(runtime, TEXT)
        await expect_pure(ctx)


async def test_a_fork_made_while_another_task_feeds_is_of_one_moment():
    """The feed may go on before the copy is made. Frame, buffered text and tokens are of one moment all the same."""
    lines = [f"line {n}\n" for n in range(24)]
    async with tiny(max_live=3) as runtime, runtime.open() as ctx:
        await ctx.feed("first")
        async for _ in ctx.generate("a", max_new_tokens=2, ignore_eos=True):  # the frame is between turns now
            pass
        before = ids_in(ctx)
        expected = before + literals(runtime, USER) + data(runtime, "".join(lines))
        places = set()

        async def slow():
            for line in lines:
                await asyncio.sleep(0.002)
                yield line

        feeding = asyncio.create_task(ctx.feed(slow())._drain())
        while not feeding.done():
            async with ctx.fork() as fork:
                found, session = ids_in(fork), fork._session
                places.add(len(found))
                assert found == expected[:len(found)]
                assert (session.frame.turn == "user") == (len(found) > len(before))
                buffered = session.buffered
                rest = "".join((runtime.codec.decode(buffered.ids), *buffered.segments, buffered.segmenter.state.text))
                text = runtime.codec.decode(found[len(before) + len(literals(runtime, USER)):]) + rest
                assert "".join(lines).startswith(text), "what is buffered follows what was accepted"
                if len(places) % 4 == 0:
                    await expect_pure(fork)
        await feeding
        assert ids_in(ctx) == expected and len(places) > 2
        await expect_pure(ctx)


async def test_a_cancelled_feed_ends_at_a_token_and_the_next_one_goes_on():
    async with tiny() as runtime, runtime.open() as ctx:
        source = CountedAsync([line + "\n" for line in TEXT.splitlines()] * 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await ctx.feed(source)
        source_was_at = source.pulled
        await expect_pure(ctx)
        assert not source.closed
        await ctx.feed(source)
        assert source.pulled >= source_was_at
        joined = "".join([line + "\n" for line in TEXT.splitlines()] * 3)
        assert ids_in(ctx) == literals(runtime, USER) + data(runtime, joined)


async def test_ingest_rate_paces_feeds_and_pushes_chunk_by_chunk():
    async with tiny(ingest_rate=8.5) as runtime, runtime.open() as ctx:
        started, at = time.perf_counter(), []
        async for _ in ctx.feed(list(range(3, 3 + 4 * CHUNK))):
            if ctx.memory.pending == 0:
                at.append(time.perf_counter() - started)
        assert len(at) == 4 and at[-1] >= 3 / 8.5, at

    async with tiny(ingest_rate=1000) as runtime, runtime.open() as ctx:
        asked = []
        runtime.throttle.acquire = lambda real=runtime.throttle.acquire: asked.append(1) or real()
        await ctx.feed(iter([[5] * 3, [6] * (4 * CHUNK)]))
        commits = ctx._session.state.seen // CHUNK
        assert len(asked) == commits == 4
        await ctx.push([7] * CHUNK)
        assert len(asked) == 5
        async for _ in ctx.generate("q", max_new_tokens=2 * CHUNK, ignore_eos=True):
            pass
        await ctx.ask("q" * 40, max_new_tokens=2)
        assert len(asked) == 5, "only feeds are paced"


async def test_a_paced_feed_can_be_cancelled_while_it_waits():
    async with tiny(ingest_rate=0.2) as runtime, runtime.open() as ctx:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ctx.feed([9] * (5 * CHUNK))
        assert ctx.memory.tokens == 2 * CHUNK and ctx.memory.pending == CHUNK
        await ctx.ask("still there?", max_new_tokens=1)
        assert ctx._session.buffered.size == 5 * CHUNK + len(literals(runtime, USER)) - 2 * CHUNK
        runtime.throttle = None
        await expect_pure(ctx)


async def test_the_report_of_an_awaited_feed_counts_while_it_runs():
    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        feed = ctx.feed([7] * (40 * CHUNK))
        seen = set()

        async def drain():
            return await feed

        task = asyncio.ensure_future(drain())
        while not task.done():
            assert feed.report.tokens == feed.report.position
            seen.add(feed.report.tokens)
            await asyncio.sleep(0.001)
        assert task.result().tokens == 40 * CHUNK and len(seen) > 3
