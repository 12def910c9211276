"""feed, push and flush: what is accepted, what is held, and what is pulled when."""

from __future__ import annotations

import asyncio
import gc
import io
import time

import numpy as np
import pytest
import torch

from locret_stream import ContextBusy, EmptySource, FeedReport, SourceError
from tests.context.support import (
    CHUNK,
    TEXT,
    USER,
    Counted,
    CountedAsync,
    cut_at_every_await,
    cuts,
    data,
    expect_pure,
    expect_same,
    expect_within_cap,
    ids_in,
    literals,
    snap,
    tiny,
)

PIECES = cuts(TEXT, [3, 17, 40, 41, 66, 90, 120])


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


async def test_a_break_stops_pulling_and_the_next_feed_takes_what_is_held_first():
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


async def test_held_text_joins_the_text_of_the_next_feed():
    """A source that dies is no end of the text: the rest of a word, or of a character, may come with the next feed."""
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as whole:
        place = TEXT.encode().index("日".encode()) + 1
        with pytest.raises(SourceError):
            await ctx.feed(Counted([TEXT.encode()[:place]], fails=ConnectionResetError("gone")))
        assert ctx._session.buffered > 0
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
async def test_every_kind_of_source_gives_the_same_tokens(name: str):
    kind, make = _sources()[name]
    ids = [5, 400, 7, 7, 480, 11, 3, 250, 17, 18, 19, 20]
    async with tiny() as runtime, runtime.open() as ctx:
        expected = {"ids": ids, "text": data(runtime, TEXT), "mixed": ids + data(runtime, TEXT)}[kind]
        assert [token.id async for token in ctx.feed(make())] == expected
        assert ids_in(ctx) == literals(runtime, USER) + expected
        assert all(type(i) is int for i in ids_in(ctx))


@pytest.mark.parametrize("kind", [Counted, CountedAsync])
async def test_the_source_is_pulled_only_as_fast_as_it_is_taken_in(kind: type):
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
async def test_a_source_is_never_closed_by_us(kind: type, how: str):
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
async def test_a_source_that_has_ended_is_asked_for_no_more(drained: bool):
    """As a file that somebody writes to: what comes behind its end belongs to the next feed."""
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


async def test_a_generator_that_was_left_goes_on():
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
                    assert ids_in(fork)[len(so_far):][:len(said)] == said, "what the feed holds waits behind it"
                assert ids_in(ctx) == so_far
        assert given == data(runtime, TEXT)
        await expect_pure(ctx)


async def test_a_fork_made_while_another_task_feeds_is_a_clean_cut():
    """Between the call and the copy the feed may go on; frame, held text and tokens belong together all the same."""
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
                held = runtime.codec.decode(session.ids) + "".join(session.segments) + session.segmenter.state.text
                shown = runtime.codec.decode(found[len(before) + len(literals(runtime, USER)):]) + held
                assert "".join(lines).startswith(shown), "what is held follows what was accepted"
                if len(places) % 4 == 0:
                    await expect_pure(fork)
        await feeding
        assert ids_in(ctx) == expected and len(places) > 2
        await expect_pure(ctx)


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


async def test_a_cancelled_feed_rests_at_a_token_and_the_next_one_goes_on():
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


# -- push and flush -------------------------------------------------------------------------------------------------


async def test_push_and_flush_are_a_feed_from_the_other_side():
    async with tiny() as runtime, runtime.open() as pushed, runtime.open() as fed:
        counts = [await pushed.push(piece) for piece in cuts(TEXT.encode(), range(0, 400, 7))]
        assert 0 in counts, "the text of an unfinished line is held"
        assert ids_in(pushed) == literals(runtime, USER) + data(runtime, TEXT)[:sum(counts)]
        counts.append(await pushed.flush())
        assert sum(counts) == len(data(runtime, TEXT)) and await pushed.flush() == 0
        await fed.feed(TEXT)
        expect_same(await snap(pushed), await snap(fed))
        assert await pushed.push([7, 8, 9]) == 3 and await pushed.push(11) == 1
        assert ids_in(pushed)[-4:] == [7, 8, 9, 11]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("call", ["push", "flush", "feed"])
async def test_text_is_lost_at_no_await_where_it_is_cancelled(call: str, twice: bool):
    """Of so much text at once that it is tokenised on a thread of its own."""
    text = "".join(f"line {n} of some more text\n" for n in range(25))
    async with tiny() as runtime:
        async def run(guard) -> None:
            async with runtime.open() as ctx:
                if call == "flush":
                    ctx._session.buffer(text)
                await guard({"push": lambda: ctx.push(text), "flush": ctx.flush,
                             "feed": lambda: ctx.feed(text)._drain()}[call]())
                if call == "feed" and not ctx.memory.buffered + ctx.memory.tokens:  # nothing was pulled yet
                    return
                await ctx.flush()
                assert ids_in(ctx) == literals(runtime, USER) + data(runtime, text)

        assert await cut_at_every_await(run, twice=twice) > 5


async def test_push_after_an_unfinished_line_cuts_where_ids_begin():
    async with tiny() as runtime, runtime.open() as ctx:
        assert await ctx.push("no newline") == 0
        assert await ctx.push([7]) == len(data(runtime, "no newline")) + 1
        assert ids_in(ctx) == literals(runtime, USER) + data(runtime, "no newline") + [7]


async def test_a_question_ends_the_pushed_text_and_a_feed_goes_on_with_it():
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.push("half a li")
        before = await snap(ctx)
        await ctx.ask("what?", max_new_tokens=2)
        expect_same(await snap(ctx), before)
        await ctx.feed("ne")
        assert ids_in(ctx) == literals(runtime, USER) + data(runtime, "half a line")
        await ctx.push("and more")
        await anext(ctx.generate("what?"))
        assert runtime.codec.decode(ids_in(ctx)).count("half a lineand more\n\nwhat?") == 1


# -- pacing ---------------------------------------------------------------------------------------------------------


async def test_ingest_rate_paces_what_is_taken_in_chunk_by_chunk():
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
        assert ctx._session.buffered == 5 * CHUNK + len(literals(runtime, USER)) - 2 * CHUNK
        runtime.throttle = None
        await expect_pure(ctx)


async def test_the_report_of_an_awaited_feed_moves_while_it_runs():
    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        feed = ctx.feed(list(range(5, 5 + 6 * CHUNK)))
        seen = set()

        async def drain():
            return await feed

        task = asyncio.ensure_future(drain())
        while not task.done():
            assert feed.report.tokens == feed.report.position
            seen.add(feed.report.tokens)
            await asyncio.sleep(0)
        assert task.result().tokens == 6 * CHUNK and len(seen) > 3


async def test_a_feed_is_a_coroutine_for_a_task():
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


async def test_what_is_buffered_is_shown_and_can_be_dropped():
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as plain:
        assert ctx.memory.buffered == 0 and await ctx.discard() == 0
        async for _ in ctx.feed([TEXT]):
            break
        assert ctx.memory.buffered > 0
        feed = ctx.feed(TEXT)
        async for _ in feed:
            with pytest.raises(ContextBusy):
                await ctx.discard()
            break
        await feed.aclose()
        assert await ctx.discard() > 0 and ctx.memory.buffered == 0
        first = ctx.memory.tokens
        await ctx.feed("A new text.\n")
        ids = ctx._session.state.history
        await plain.feed([*ids[-(ctx.memory.tokens - first):]])
        assert plain._session.state.history[-5:] == ids[-5:]
        await ctx.push("half a li")
        assert await ctx.discard() == 9 and ctx.memory.buffered == 0
        with pytest.warns(DeprecationWarning, match="Memory.buffered"):
            assert ctx.memory.held == 0


@pytest.mark.parametrize("name", ["feed", "generate"])
async def test_what_is_dropped_before_it_began_says_that_it_did_nothing(name: str):
    async with tiny() as runtime, runtime.open() as ctx:
        with pytest.warns(RuntimeWarning, match="did nothing; expected `await` or `async for`"):
            getattr(ctx, name)("a line\n")
            gc.collect()
        await ctx.feed("a line\n")
        assert await ctx.ask("So?", max_new_tokens=2) is not None
