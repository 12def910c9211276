"""turn() is undone bit for bit; fork is a context of its own."""

from __future__ import annotations

import asyncio

import pytest

from locret_stream import ContextBusy, ContextClosed, NoSlot
from tests.context.support import (
    CHUNK,
    TEXT,
    Counted,
    cut_at_every_await,
    data,
    expect_free,
    expect_pure,
    expect_same,
    ids_in,
    snap,
    tiny,
)


class Undo(Exception):
    pass


async def prepared(ctx, *, reply: bool = True, half: bool = True) -> None:
    """Some history, an open frame, buffered text and `half` a character."""
    await ctx.feed(TEXT)
    if reply:
        async for _ in ctx.generate("q", max_new_tokens=3, ignore_eos=True):
            pass
        await ctx.ask("warm", max_new_tokens=2)  # and provisional units
    await ctx.push("held te")
    await ctx.push("xt é".encode()[:-1] if half else "xt")


SHORT, LONG = [5], list(range(5, 5 + 4 * CHUNK))


@pytest.mark.parametrize("size", ["nothing", "short", "long"])
@pytest.mark.parametrize("reply", [False, True])
@pytest.mark.thorough(but=2)
async def test_a_failed_turn_leaves_no_trace(size: str, reply: bool):
    """With and without a commit inside: units, pending ids, frame and buffered text, and what comes next."""
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as untouched:
        await prepared(ctx, reply=reply)
        await prepared(untouched, reply=reply)
        before = await snap(ctx)
        with pytest.raises(Undo):
            async with ctx.turn() as same:
                assert same is ctx
                if size != "nothing":
                    await ctx.push("é".encode()[-1:])
                if size == "short":
                    await ctx.feed(SHORT)
                elif size == "long":
                    await ctx.feed(LONG)
                    async for _ in ctx.generate("why?", max_new_tokens=2 * CHUNK, ignore_eos=True):
                        pass
                    await ctx.feed("more")
                raise Undo
        expect_same(await snap(ctx, settle=False), before)
        expect_free(runtime, taken=2)
        for one in (ctx, untouched):  # and it goes on as if nothing had been
            await one.push("é".encode()[-1:])
            await one.feed(LONG)
            assert await one.ask("who?", max_new_tokens=5) is not None
        expect_same(await snap(ctx), await snap(untouched))
        await expect_pure(ctx)


async def test_a_turn_that_succeeds_is_kept():
    async with tiny() as runtime, runtime.open() as ctx, runtime.open() as plain:
        async with ctx.turn():
            await ctx.feed(LONG)
            assert runtime.slots.scratch.free == 0, "taken from the first commit on"
        await plain.feed(LONG)
        expect_same(await snap(ctx), await snap(plain))
        expect_free(runtime, taken=2)


async def test_a_scratch_slot_is_taken_from_the_first_commit_on():
    async with tiny(slot_timeout_s=0.1) as runtime, runtime.open(raw=True) as ctx, runtime.open(raw=True) as other:
        async with ctx.turn():
            await ctx.feed([5] * (CHUNK - 1))
            assert runtime.slots.scratch.free == 1
            await ctx.ask([7], max_new_tokens=1)
            await ctx.feed([5])
            assert runtime.slots.scratch.free == 0
            before = await snap(other)
            with pytest.raises(NoSlot, match="scratch"):
                async with other.turn():
                    await other.feed([6] * CHUNK)
            expect_same(await snap(other), before)
            with pytest.raises(NoSlot):
                await other.ask([7])
        assert ctx.memory.tokens == CHUNK


async def test_a_block_that_ends_while_its_copy_waits_for_a_slot_gives_the_slot_back():
    async with tiny() as runtime, runtime.open() as ctx:
        async with runtime.slots.scratch_slot():
            async with ctx.turn():
                feeding = asyncio.create_task(ctx.feed(LONG)._drain())
                for _ in range(1000):
                    await asyncio.sleep(0)
                    if runtime.slots.scratch._waiting:
                        break
        await feeding
        expect_free(runtime, taken=1)
        assert await ctx.ask("q", max_new_tokens=1) is not None
        await expect_pure(ctx)


@pytest.mark.parametrize("crossing", [False, True])
async def test_iterators_from_inside_an_undone_turn_are_dead(crossing: bool):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("before")
        before = await snap(ctx)
        kept = {}
        for make in (lambda: ctx.feed(Counted([[n] for n in LONG])), lambda: ctx.generate("q", ignore_eos=True)):
            with pytest.raises(Undo):
                async with ctx.turn():
                    if crossing:
                        await ctx.feed(LONG)
                    kept = make()
                    await anext(kept)
                    await anext(kept)
                    raise Undo
            expect_same(await snap(ctx), before)
            with pytest.raises(ContextClosed, match="undone together with the turn"):
                await anext(kept)
            assert [token async for token in kept] == []
            await kept.aclose()
            del kept
            expect_same(await snap(ctx), before)
        await ctx.feed("after")
        assert ids_in(ctx)[-len(data(runtime, "after")):] == data(runtime, "after")


@pytest.mark.parametrize("crossing", [False, True])
async def test_an_operation_of_another_task_dies_with_the_turn_it_began_in(crossing: bool):
    """It is in the middle of a step, or of its source, while the block is undone; nothing of it arrives later."""
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("before")
        before = await snap(ctx)
        go_on = asyncio.Event()

        async def source():
            yield LONG if crossing else SHORT
            await go_on.wait()
            yield LONG

        async def drain(feed):
            return await feed

        tasks = []
        with pytest.raises(Undo):
            async with ctx.turn():
                tasks.append(asyncio.create_task(drain(ctx.feed(source()))))
                for _ in range(4):
                    await asyncio.sleep(0.003)
                raise Undo
        expect_same(await snap(ctx), before)
        await ctx.push("new")  # the context is free at once
        go_on.set()
        with pytest.raises(ContextClosed, match="undone"):
            await tasks[0]
        await ctx.flush()
        assert runtime.codec.decode(ids_in(ctx)).endswith("beforenew")
        with pytest.raises(Undo):
            async with ctx.turn():
                tasks.append(asyncio.create_task(drain(ctx.feed(LONG * 8))))
                await asyncio.sleep(0)
                raise Undo
        with pytest.raises(ContextClosed):
            await tasks[1]
        expect_free(runtime, taken=1)
        await expect_pure(ctx)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", [1, CHUNK])
@pytest.mark.thorough(but=2)
async def test_a_turn_cancelled_anywhere_is_undone_or_kept_whole(size: int, twice: bool):
    async with tiny(scratch=2) as runtime, runtime.open() as ctx:  # one for the turn, one for the question in it
        await prepared(ctx, half=False)
        before = await snap(ctx)

        async def block(after) -> None:
            async with after.turn():
                await after.feed([9] * size)
                async for _ in after.generate([7], max_new_tokens=2, ignore_eos=True):
                    pass
                await after.ask([7], max_new_tokens=1)

        async def run(guard) -> None:
            async with ctx.fork() as fork:
                expect_same(await snap(fork), before)
                if await guard(block(fork)):
                    expect_same(await snap(fork, settle=False), before)
                await fork.feed("next")
                await expect_pure(fork)
            expect_free(runtime, taken=1)

        assert await cut_at_every_await(run, twice=twice) >= 4


async def test_a_question_that_could_only_wait_for_its_own_turn_is_refused_at_once():
    async with tiny(scratch=1) as runtime, runtime.open() as ctx:
        async with ctx.turn():
            await ctx.feed(SHORT)
            await ctx.ask("before any commit", max_new_tokens=2)
            await ctx.feed(LONG)
            async with asyncio.timeout(5):
                with pytest.raises(NoSlot, match=r"holds the only scratch slot .* scratch=2"):
                    await ctx.ask("after one", max_new_tokens=2)
        await ctx.ask("after the turn", max_new_tokens=2)
    async with tiny(scratch=2) as runtime, runtime.open() as ctx, ctx.turn():
        await ctx.feed(LONG)
        await ctx.ask("with a slot to spare", max_new_tokens=2)


async def test_one_turn_at_a_time():
    async with tiny() as runtime, runtime.open() as ctx:
        async with ctx.turn():
            await ctx.feed("in")
            with pytest.raises(ContextBusy, match="another turn"):
                async with ctx.turn():
                    pass
            feed = ctx.feed("a b c d")
            await anext(feed)
        assert [t async for t in feed], "begun in a turn that was kept: it goes on"
        feed = ctx.feed("a b c d")
        await anext(feed)
        with pytest.raises(ContextBusy, match="while feed"):
            async with ctx.turn():
                pass
        await feed.aclose()
        await ctx.flush()
        with pytest.raises(Undo):
            async with ctx.turn():
                await ctx.feed("gone")
                raise Undo
        async with ctx.turn():
            await ctx.feed("kept")
        assert runtime.codec.decode(ids_in(ctx)).endswith("ina b c da b c dkept")


@pytest.mark.parametrize("size", [1, 2 * CHUNK])
@pytest.mark.parametrize("how", ["context", "runtime"])
async def test_closing_inside_a_turn_is_clean(size: int, how: str):
    async with tiny() as runtime:
        async with runtime.open() as ctx:
            with pytest.raises(ContextClosed):
                async with ctx.turn():
                    await ctx.feed([7] * size)
                    await (ctx if how == "context" else runtime).aclose()
                    await ctx.feed("no more")
        if how == "context":
            expect_free(runtime)


# -- forks ----------------------------------------------------------------------------------------------------------


async def test_a_fork_is_independent_in_both_directions():
    async with tiny(max_live=5) as runtime, runtime.open("a") as ctx, runtime.open() as alone:
        await prepared(ctx)
        before = await snap(ctx)
        async with ctx.fork() as fork, ctx.fork("named") as second:
            assert (fork.name, second.name) == ("a/fork", "named")
            expect_same(await snap(fork), before)
            await fork.push("é".encode()[-1:])
            await fork.feed(LONG)
            async for _ in fork.generate("q", max_new_tokens=3):
                pass
            expect_same(await snap(ctx), before)
            expect_same(await snap(second), before)
            kept = await snap(fork)
            await ctx.push("é".encode()[-1:])
            await ctx.feed(LONG[::-1])
            expect_same(await snap(fork), kept)
            async with fork.fork() as grandchild:
                expect_same(await snap(grandchild), kept)
        await prepared(alone)
        await alone.push("é".encode()[-1:])
        await alone.feed(LONG[::-1])
        expect_same(await snap(ctx), await snap(alone))


async def test_a_fork_outlives_its_origin_and_is_made_on_entering():
    async with tiny() as runtime:
        async with runtime.open() as ctx:
            await ctx.feed("one ")
            fork, late = ctx.fork(), ctx.fork()
            await ctx.feed("two")
            await fork.__aenter__()
        await fork.feed(" three")
        assert runtime.codec.decode(ids_in(fork)).endswith("one two three")
        with pytest.raises(ContextClosed):
            async with late:
                pass
        with pytest.raises(ContextClosed):
            ctx.fork()
        await fork.aclose()
        expect_free(runtime)
