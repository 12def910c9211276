"""More contexts than slots: idle ones wait in the store and come back as they were."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from locret_stream import NoSlot, SnapshotError, Store
from tests.context.support import CHUNK, TEXT, Counted, cut_at_every_await, expect_free, expect_same, snap, tiny
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
