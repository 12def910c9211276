"""More contexts than slots: idle ones wait in the store and come back as they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from locret_stream import ContextBusy, NoSlot, Runtime, SnapshotError, StaleOwner, Store, StreamingContext
from tests.context.support import (
    CHUNK,
    TEXT,
    Counted,
    cut_at_every_await,
    expect_free,
    expect_same,
    snap,
    tiny,
    unstarted,
)
from tests.context.test_snapshots import damage, replies, settled

NAMES = [f"context {n}" for n in range(5)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["feed", "push", "reply", "ask", "look", "fork"]),
                                st.integers(1, 3 * CHUNK)), min_size=5, max_size=25))
def test_five_contexts_in_two_slots_are_each_as_if_alone(tmp_path_factory, steps: list):
    """Any order of use; units, frames and replies are those of contexts that never left their slot."""
    folder = tmp_path_factory.mktemp("store")

    async def main() -> None:
        async with tiny(store=folder, max_live=2) as few, tiny(max_live=6) as many, AsyncExitStack() as stack:
            pairs = [(await stack.enter_async_context(few.open(name)), await stack.enter_async_context(many.open(name)))
                     for name in NAMES]
            for number, step, size in steps:
                said = []
                for context in pairs[number]:
                    if step == "feed":
                        await context.feed(TEXT[size:size * 5])
                    elif step == "push":
                        await context.push("x" * size)
                    elif step == "reply":
                        said.append(await replies(context, size))
                    elif step == "ask":
                        said.append(await context.ask("?", max_new_tokens=3))
                    elif step == "fork":
                        async with context.fork() as copy:
                            said.append(await replies(copy, 3))
                    else:
                        said.append((context.memory.tokens, context.memory.units, context.memory.pending))
                assert not said or said[0] == said[1]
                assert sum(context.memory.bytes_resident > 0 for context, _ in pairs) <= 2
            for context, alone in pairs:
                expect_same(settled(await snap(context)), settled(await snap(alone)))

    asyncio.run(main())
    assert not [one.problem for one in Store(folder).verify() if one.problem]


async def test_a_context_at_work_never_loses_its_slot(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.1) as runtime, runtime.open("a") as ctx:
        feed = ctx.feed(Counted([TEXT]))
        await anext(feed)
        with pytest.raises(NoSlot, match="live slot of 1"):
            await runtime.open("b").__aenter__()
        assert ctx.memory.bytes_resident > 0
        await feed.aclose()
        async with ctx.turn():
            await ctx.feed(TEXT)
            with pytest.raises(NoSlot):
                await runtime.open("b").__aenter__()
        async with runtime.open("b"):
            assert ctx.memory.bytes_resident == 0


async def test_without_a_store_or_a_name_slots_are_kept(tmp_path: Path):
    for options, name in (({}, "a"), ({"store": tmp_path}, None)):
        async with tiny(max_live=1, slot_timeout_s=0.1, **options) as runtime, runtime.open(name) as ctx:
            await ctx.feed(TEXT)
            with pytest.raises(NoSlot):
                await runtime.open("b").__aenter__()


@pytest.mark.parametrize("use", ["feed", "ask", "generate", "snapshot"])
async def test_the_one_that_was_idle_longest_waits_first(tmp_path: Path, use: str):
    """Whatever order they were opened and used in; a question is a use as well as a feed."""
    async def used(context: StreamingContext) -> None:
        if use == "feed":
            await context.feed(TEXT)
        elif use == "ask":
            await context.ask("?", max_new_tokens=1)
        elif use == "generate":
            await replies(context, 2)
        else:
            await context.snapshot()

    async with tiny(store=tmp_path, max_live=3) as runtime:
        for round, order in enumerate(permutations(range(3))):
            async with AsyncExitStack() as stack:
                three = [await stack.enter_async_context(runtime.open(f"{round}{n}")) for n in range(3)]
                for context in three:
                    await context.feed(TEXT)
                for number in order:
                    await used(three[number])
                for count in range(3):
                    late = await stack.enter_async_context(runtime.open(f"{round} late {count}"))
                    await late.feed(TEXT)
                    waiting = {context.name for context in three if not context.memory.bytes_resident}
                    assert waiting == {f"{round}{n}" for n in order[:count + 1]}


async def test_who_cannot_come_back_says_why_and_leaves_no_slot_behind(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1, autosave=False) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT * 2)
            async with runtime.open("b"):
                damage(tmp_path, "pages")
            with pytest.raises(SnapshotError, match="damaged"):
                await ctx.feed(TEXT)
            expect_free(runtime)
            async with runtime.open("c") as other:
                await other.feed(TEXT)


@pytest.mark.parametrize("twice", [False, True])
async def test_cancelled_on_the_way_out_or_back_nothing_is_lost(tmp_path: Path, twice: bool):
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as other, other.open() as plain:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            await plain.feed(TEXT)
            expected = await snap(plain)

            async def run(guard) -> None:
                async def there_and_back() -> None:
                    async with runtime.open("b"):
                        pass
                    await ctx.receipts()

                await guard(there_and_back())
                expect_same(settled(await snap(ctx)), settled(expected))
                expect_free(runtime, taken=1)

            assert await cut_at_every_await(run, twice=twice) > 5


async def test_closing_a_context_that_is_away_keeps_what_it_accepted_since(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            async with runtime.open("b"):
                await ctx.push("one more line\n")  # may need no slot: it is only accepted
                tokens = ctx.memory.tokens
        async with runtime.open("a") as ctx:
            assert ctx.memory.tokens == tokens


# -- what is away is nobody's slot ------------------------------------------------------------------------------------


@asynccontextmanager
async def one_away(folder: Path) -> AsyncIterator[tuple[Runtime, StreamingContext, StreamingContext]]:
    """Two contexts in one slot; the first waits in the store, with a snapshot of its own under number 1."""
    async with tiny(store=folder, max_live=1) as runtime, runtime.open("a") as away:
        await away.feed(TEXT)
        await away.snapshot()
        async with runtime.open("b") as here:
            await here.feed(TEXT[::-1])
            assert away._session.swapped_out and not here._session.swapped_out
            yield runtime, away, here


async def test_one_that_is_away_is_rewound_in_a_slot_of_its_own(tmp_path: Path):
    async with tiny() as plain, plain.open() as twin:
        await twin.feed(TEXT)
        expected = await snap(twin)
    async with one_away(tmp_path) as (_, away, here):
        before = await snap(here)
        assert here._session.swapped_out is False
        await away.rewind(1)
        expect_same(settled(await snap(away)), settled(expected))
        expect_same(await snap(here), before)


async def test_a_turn_that_is_undone_while_it_is_away_touches_nobody(tmp_path: Path):
    async with one_away(tmp_path) as (_, away, here):
        before, tokens = await snap(here), away.memory.tokens
        assert away._session.swapped_out
        with pytest.raises(KeyError):
            async with away.turn():
                raise KeyError
        assert away.memory.tokens == tokens
        expect_same(await snap(here), before)
        await away.feed(TEXT)
        assert (await away.snapshot()).tokens == away.memory.tokens
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as again, tiny() as plain, plain.open() as twin:
        await twin.feed(TEXT)
        await twin.feed(TEXT)
        expect_same(settled(await snap(again)), settled(await snap(twin)))


async def test_one_that_is_away_comes_back_from_what_it_was_opened_from(tmp_path: Path):
    """Its number is not the highest ever used: that one was deleted."""
    async with tiny(store=tmp_path, max_live=1) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            await ctx.snapshot()
            await ctx.feed(TEXT)
        runtime.store.delete("a", 2)
        async with runtime.open("a") as ctx:
            before = settled(await snap(ctx))
            async with runtime.open("b"):
                assert ctx._session.swapped_out
            expect_same(settled(await snap(ctx)), before)
            await ctx.feed(TEXT)


async def test_a_context_that_is_lost_keeps_nobody_from_opening_another(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=2, autosave=False) as runtime:
        async with runtime.open("a") as lost, runtime.open("b") as idle:
            await lost.feed(TEXT)
            lost._session.state.broken = True  # what a commit leaves that failed while units were moved
            await idle.feed(TEXT)
            lost._session.used_at = 0.0  # the one that was idle longest
            async with runtime.open("c") as third:
                await third.feed(TEXT)
                assert idle._session.swapped_out and not lost._session.swapped_out


async def test_one_that_is_away_can_be_saved_under_a_new_name(tmp_path: Path):
    async with one_away(tmp_path) as (runtime, away, _):
        tokens = away.memory.tokens
        saved = await away.save_as("a, too")
        assert (saved.name, saved.tokens) == ("a, too", tokens)
        await away.feed(TEXT)
    async with tiny(store=tmp_path) as runtime, runtime.open("a, too") as again, tiny() as plain, plain.open() as twin:
        await twin.feed(TEXT)
        await twin.feed(TEXT)
        expect_same(settled(await snap(again)), settled(await snap(twin)))


async def test_a_turn_that_may_be_undone_keeps_its_session_where_it_is(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(TEXT)
        async with ctx.turn():
            with pytest.raises(ContextBusy, match="save_as"):
                await ctx.save_as("b")
        assert ctx.name == "a" and ctx._session.branch.name == "a"


# -- closing a runtime ------------------------------------------------------------------------------------------------


async def test_closing_a_runtime_saves_every_context_also_those_that_wait(tmp_path: Path):
    runtime = await unstarted(store=tmp_path, max_live=2).__aenter__()
    contexts = [await runtime.open(name).__aenter__() for name in "abcd"]
    tokens = {}
    for context in contexts:
        await context.feed(TEXT)
    for context in contexts:
        if context._session.swapped_out:
            await context.push("x\n")  # accepted, and not yet in any snapshot
    for context in contexts:
        tokens[context.name] = context.memory.tokens
    assert sum(context._session.swapped_out for context in contexts) == 2
    await runtime.aclose()
    assert {one.name: one.tokens for one in Store(tmp_path).list()} == tokens
    assert not runtime._open and "worker" not in runtime.__dict__


async def test_one_that_cannot_be_saved_keeps_no_other_from_it(tmp_path: Path):
    runtime = await unstarted(store=tmp_path, max_live=3).__aenter__()
    contexts = [await runtime.open(name).__aenter__() for name in "abc"]
    for context in contexts:
        await context.feed(TEXT)
        await context.snapshot()
        await context.feed(TEXT)
    Store(tmp_path).forget("b")
    with pytest.raises(StaleOwner):
        await runtime.aclose()
    assert {one.name: one.tokens for one in Store(tmp_path).list()} == dict.fromkeys(
        "ac", len(contexts[0]._session.state.pending) + contexts[0]._session.state.seen)
    assert "worker" not in runtime.__dict__ and all(context._session.closed for context in contexts)
    await runtime.aclose()


# -- snapshots beside turns and cancellations -------------------------------------------------------------------------


async def test_a_save_that_waited_does_not_save_a_turn_that_began_meanwhile(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(TEXT)
        tokens, done = ctx.memory.tokens, asyncio.Event()

        async def turn() -> None:
            async with ctx.turn():
                await ctx.push("xy\n")
                await done.wait()
                raise KeyError

        first = asyncio.create_task(ctx.snapshot())
        for _ in range(100):
            await asyncio.sleep(0)
            if ctx._session.freeze is not None:
                break
        undone = asyncio.create_task(turn())
        await asyncio.sleep(0)
        second = asyncio.create_task(ctx.snapshot())
        with pytest.raises(ContextBusy, match="may still be undone"):
            await second
        done.set()
        with pytest.raises(KeyError):
            await undone
        assert (await first).tokens == ctx.memory.tokens == tokens


async def test_a_rewind_cancelled_anywhere_leaves_a_context_that_goes_on(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:

        async def run(cut) -> None:
            async with runtime.open("a") as ctx:
                await ctx.feed(TEXT)
                await ctx.snapshot()
                await ctx.feed(TEXT)
                try:
                    await cut(ctx.rewind(1))
                finally:
                    await ctx.feed(TEXT)  # it is where it was, or where it was to go
            runtime.store.forget("a")

        assert await cut_at_every_await(run) > 3


@pytest.mark.parametrize("where", ["the beginning", "a snapshot"])
async def test_a_session_that_is_put_away_while_it_is_rewound_stays_its_own_owner(tmp_path: Path, monkeypatch,
                                                                                  where: str):
    async with tiny(store=tmp_path, max_live=1) as runtime, runtime.open("a") as ctx, runtime.open("b") as other:
        await ctx.feed(TEXT)
        number = 0 if where == "the beginning" else (await ctx.snapshot()).generation
        await ctx.feed(TEXT)
        made, go_on, make = threading.Event(), threading.Event(), runtime.store.branch

        def slowly(name: str):
            branch = make(name)
            made.set()
            assert go_on.wait(20)
            return branch

        monkeypatch.setattr(runtime.store, "branch", slowly)
        rewinding = asyncio.create_task(ctx.rewind(number))
        await asyncio.to_thread(made.wait, 20)
        feeding = asyncio.create_task(other.feed(TEXT)._drain())
        await asyncio.sleep(0.3)  # time enough to put the first one away, if it may be now
        go_on.set()
        await rewinding
        await feeding
        await ctx.feed(TEXT)
        await ctx.snapshot()


async def test_a_rewind_does_not_bring_a_stale_owner_to_the_front(tmp_path: Path):
    async with tiny(store=tmp_path, autosave=False) as runtime, runtime.open("a") as stale:
        await stale.feed(TEXT)
        await stale.snapshot()
        async with tiny(store=tmp_path) as other, other.open("a") as owner:
            await owner.feed(TEXT)
        with pytest.raises(StaleOwner):
            await stale.rewind(1)
        assert (await snap(stale)).tensors
