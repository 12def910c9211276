"""push, flush and discard: a feed from the side of the producer, and what is buffered between two calls."""

from __future__ import annotations

import pytest

from locret_stream import ContextBusy
from tests.context.support import (
    TEXT,
    USER,
    cut_at_every_await,
    cuts,
    data,
    expect_same,
    ids_in,
    literals,
    snap,
    tiny,
)


async def test_push_and_flush_give_what_a_feed_gives():
    async with tiny() as runtime, runtime.open() as pushed, runtime.open() as fed:
        counts = [await pushed.push(piece) for piece in cuts(TEXT.encode(), range(0, 400, 7))]
        assert 0 in counts, "the text of an unfinished line is buffered"
        assert ids_in(pushed) == literals(runtime, USER) + data(runtime, TEXT)[:sum(counts)]
        counts.append(await pushed.flush())
        assert sum(counts) == len(data(runtime, TEXT)) and await pushed.flush() == 0
        await fed.feed(TEXT)
        expect_same(await snap(pushed), await snap(fed))
        assert await pushed.push([7, 8, 9]) == 3 and await pushed.push(11) == 1
        assert ids_in(pushed)[-4:] == [7, 8, 9, 11]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("call", ["push", "flush", "feed"])
@pytest.mark.thorough(but=2)
async def test_no_text_is_lost_wherever_a_call_is_cancelled(call: str, twice: bool, monkeypatch: pytest.MonkeyPatch):
    """Of so much text at once that it is tokenised on a thread of its own."""
    monkeypatch.setattr("locret_stream.context.tokenizing.INLINE_CHARS", 64)
    text = "".join(f"line {n} of some more text\n" for n in range(6))
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


async def test_pushed_ids_end_the_text_before_them():
    async with tiny() as runtime, runtime.open() as ctx:
        assert await ctx.push("no newline") == 0
        assert await ctx.push([7]) == len(data(runtime, "no newline")) + 1
        assert ids_in(ctx) == literals(runtime, USER) + data(runtime, "no newline") + [7]


async def test_a_question_reads_pushed_text_and_a_feed_goes_on_with_it():
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


async def test_discard_drops_what_is_buffered():
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


async def test_a_question_between_the_bytes_of_a_character_leaves_them_behind_it():
    whole = "one café two\n".encode()
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.push(whole[:8])
        before = await snap(ctx)
        await ctx.ask("so?", max_new_tokens=1)
        expect_same(await snap(ctx), before)
        await anext(ctx.generate("so?", max_new_tokens=1, ignore_eos=True))
        await ctx.push(whole[8:])
        await ctx.flush()
        text = runtime.codec.decode(ids_in(ctx))
        assert text.index("one caf\n\nso?") < text.index("é two")
