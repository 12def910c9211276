"""More contexts than slots: idle ones are swapped out, and swapped in as they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from locret_stream import NoSlot, Runtime, SnapshotError, Store, StoreError, StreamingContext
from locret_stream.context import saving
from locret_stream.context.session_state import SessionState
from locret_stream.runtime import sharing
from locret_stream.snapshot import Snapshot
from tests.context.support import (
    CHUNK,
    TEXT,
    Counted,
    cut_at_every_await,
    expect_free,
    expect_same,
    few_commits,
    ids_of,
    replies,
    settled,
    snap,
    tiny,
)
from tests.context.test_snapshots import damage

T = TypeVar("T")
NAMES = [f"context {n}" for n in range(5)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["feed", "push", "reply", "ask", "look", "fork"]),
                                st.integers(1, 3 * CHUNK)), min_size=5, max_size=25))
@pytest.mark.thorough
def test_five_contexts_in_two_slots_are_each_as_if_alone(tmp_path_factory, steps: list):
    """In any order of use, units, frames and replies are those of contexts that kept their slots."""
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
    assert not [checked.problem for checked in Store(folder).verify() if checked.problem]


async def test_a_context_at_work_keeps_its_slot(tmp_path: Path):
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


async def test_a_context_without_a_store_or_a_name_keeps_its_slot(tmp_path: Path):
    for options, name in (({}, "a"), ({"store": tmp_path}, None)):
        async with tiny(max_live=1, slot_timeout_s=0.1, **options) as runtime, runtime.open(name) as ctx:
            await ctx.feed(TEXT)
            with pytest.raises(NoSlot):
                await runtime.open("b").__aenter__()


@pytest.mark.parametrize("use", ["feed", "ask", "generate", "snapshot"])
@pytest.mark.thorough(but=1)
async def test_the_context_that_was_idle_longest_is_swapped_out_first(tmp_path: Path, use: str):
    """In whatever order they were opened and used. A question is a use, and so is a feed."""
    async def used(context: StreamingContext) -> None:
        if use == "feed":
            await context.feed(TEXT)
        elif use == "ask":
            await context.ask("?", max_new_tokens=1)
        elif use == "generate":
            await replies(context, 2)
        else:
            await context.snapshot()

    async with few_commits(store=tmp_path, max_live=3) as runtime:
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


async def test_a_disposable_context_is_closed_only_while_it_is_idle():
    """It was idle when it was chosen to make room, and is used by the time it would be closed."""
    async with tiny(max_live=1) as runtime, runtime.open() as ctx:
        ctx.disposable = True
        feed = ctx.feed(ids_of(1, 5))
        await anext(feed)
        for midway in (False, True):
            assert not await ctx.swap_out(midway=midway)
        await feed.aclose()
        assert not ctx.closed and await ctx.swap_out() and ctx.closed


async def test_a_failed_swap_in_says_why_and_gives_its_slot_back(tmp_path: Path):
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
async def test_nothing_is_broken_when_a_swap_is_cancelled(tmp_path: Path, twice: bool):
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as other, other.open() as plain:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            await plain.feed(TEXT)
            expected = await snap(plain)

            async def run(guard) -> None:
                async def out_and_in() -> None:
                    async with runtime.open("b"):
                        pass
                    await ctx.receipts()

                await guard(out_and_in())
                expect_same(settled(await snap(ctx)), settled(expected))
                expect_free(runtime, taken=1)

            assert await cut_at_every_await(run, twice=twice) > 5


@pytest.mark.parametrize("made", [3, 4])
async def test_snapshots_of_swap_outs_displace_none_that_the_user_made(tmp_path: Path, made: int):
    """Every cancelled opening had the other context saved, to take its slot."""
    async with tiny(store=Store(tmp_path, keep_last=4), max_live=1) as runtime, runtime.open("a", raw=True) as ctx:
        asked = []
        for number in range(made):
            await ctx.push(ids_of(number, 10))
            asked.append((await ctx.snapshot()).generation)
        for _ in range(5):
            await ctx.push([7])
            opening = asyncio.create_task(runtime.open("b").__aenter__())
            while not ctx._session.is_frozen:  # noqa: ASYNC110 (no event says it)
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        assert [snapshot.generation for snapshot in runtime.store.info("a")] == [*asked, *ctx.swap_generations]
        assert len(ctx.swap_generations) == 1
        await ctx.push([7])
        last = await ctx.snapshot()
        assert [snapshot.generation for snapshot in runtime.store.info("a")] == [*asked, last.generation][-4:]


async def test_a_broken_context_keeps_no_other_from_opening(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=2, autosave=False) as runtime:
        async with runtime.open("a") as broken, runtime.open("b") as idle:
            await broken.feed(TEXT)
            broken._session.state.broken = True  # as after a commit that failed while it moved units
            await idle.feed(TEXT)
            broken._session.used_at = 0.0  # it was idle longest
            async with runtime.open("c") as third:
                await third.feed(TEXT)
                assert idle._session.swapped_out and not broken._session.swapped_out


# -- sessions that are swapped out ------------------------------------------------------------------------------------


@asynccontextmanager
async def one_swapped_out(folder: Path) -> AsyncIterator[tuple[Runtime, StreamingContext, StreamingContext]]:
    """Two contexts on one slot; the first is swapped out, after a snapshot with number 1."""
    async with tiny(store=folder, max_live=1) as runtime, runtime.open("a") as swapped:
        await swapped.feed(TEXT)
        await swapped.snapshot()
        async with runtime.open("b") as other:
            await other.feed(TEXT[::-1])
            assert swapped._session.swapped_out and not other._session.swapped_out
            yield runtime, swapped, other


async def test_closing_a_swapped_out_context_saves_what_it_accepted_since(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            async with runtime.open("b"):
                await ctx.push("one more line\n")  # it needs no slot while it completes no chunk
                tokens = ctx.memory.tokens
        async with runtime.open("a") as ctx:
            assert ctx.memory.tokens == tokens


async def test_a_swapped_out_context_is_rewound_in_another_slot(tmp_path: Path):
    async with tiny() as plain, plain.open() as alone:
        await alone.feed(TEXT)
        expected = await snap(alone)
    async with one_swapped_out(tmp_path) as (_, swapped, other):
        before = await snap(other)
        assert other._session.swapped_out is False
        await swapped.rewind(1)
        expect_same(settled(await snap(swapped)), settled(expected))
        expect_same(await snap(other), before)


async def test_undoing_a_turn_of_a_swapped_out_context_changes_no_other(tmp_path: Path):
    async with one_swapped_out(tmp_path) as (_, swapped, other):
        before, tokens = await snap(other), swapped.memory.tokens
        assert swapped._session.swapped_out
        with pytest.raises(KeyError):
            async with swapped.turn():
                raise KeyError
        assert swapped.memory.tokens == tokens
        expect_same(await snap(other), before)
        await swapped.feed(TEXT)
        assert (await swapped.snapshot()).tokens == swapped.memory.tokens
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as again, tiny() as plain, plain.open() as alone:
        await alone.feed(TEXT)
        await alone.feed(TEXT)
        expect_same(settled(await snap(again)), settled(await snap(alone)))


async def test_a_context_is_swapped_in_from_the_snapshot_it_was_opened_from(tmp_path: Path):
    """Its number is not the highest that was ever used: that one was deleted."""
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


async def test_a_swapped_out_context_can_be_saved_under_a_new_name(tmp_path: Path):
    async with one_swapped_out(tmp_path) as (runtime, swapped, _):
        tokens = swapped.memory.tokens
        saved = await swapped.save_as("a, too")
        assert (saved.name, saved.tokens) == ("a, too", tokens)
        await swapped.feed(TEXT)
    async with tiny(store=tmp_path) as runtime, runtime.open("a, too") as again, tiny() as plain, plain.open() as alone:
        await alone.feed(TEXT)
        await alone.feed(TEXT)
        expect_same(settled(await snap(again)), settled(await snap(alone)))


class _Loop:
    """An event loop on a thread of its own, with one context open in it that was fed."""

    def __init__(self, runtime: Runtime, name: str, text: str = TEXT):
        self.loop, self._runtime, self._name, self._text = asyncio.new_event_loop(), runtime, name, text
        self._thread = threading.Thread(target=self.loop.run_forever)

    async def __aenter__(self) -> _Loop:
        self._thread.start()
        self.context = await self.there(self._opened())
        return self

    async def _opened(self) -> StreamingContext:
        context = await self._runtime.open(self._name).__aenter__()
        await context.feed(self._text)
        return context

    async def there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def __aexit__(self, *error: object) -> None:
        try:
            if not self.context.closed:
                await self.there(self.context.aclose())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(30)
            self.loop.close()


async def test_contexts_of_other_event_loops_make_room(tmp_path: Path):
    """In both directions, again and again, and each is as if alone."""
    async with asyncio.timeout(60), tiny(store=tmp_path, max_live=1, slot_timeout_s=20) as runtime:
        async with _Loop(runtime, "theirs") as other, runtime.open("ours") as ours:
            assert other.context.swapped_out
            for _ in range(3):
                await ours.feed(TEXT)
                assert other.context.swapped_out and not ours.swapped_out
                await other.there(_fed(other.context, TEXT))
                assert ours.swapped_out and not other.context.swapped_out
            async with tiny(max_live=2) as alone, alone.open("ours") as one, alone.open("theirs") as two:
                for context, times in ((one, 3), (two, 4)):
                    for _ in range(times):
                        await context.feed(TEXT)
                expect_same(settled(await snap(ours)), settled(await snap(one)))
                theirs = await other.there(snap(other.context))
                expect_same(settled(theirs), settled(await snap(two)))


async def _fed(context: StreamingContext, text: str) -> None:
    await context.feed(text)


async def test_event_loops_that_want_each_others_slots_at_once_do_not_stall(tmp_path: Path):
    async with asyncio.timeout(100), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(tiny(store=tmp_path, max_live=1, slot_timeout_s=50))
        others = [await stack.enter_async_context(_Loop(runtime, f"loop {n}")) for n in range(3)]

        async def used(other: _Loop) -> None:
            for _ in range(4):
                await other.there(_fed(other.context, TEXT))

        async with asyncio.TaskGroup() as group:
            for other in others:
                group.create_task(used(other))
    assert not [row.problem for row in Store(tmp_path).verify() if row.problem]


async def test_an_event_loop_that_does_not_get_on_keeps_its_slot_and_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharing, "LOOK_AGAIN_S", 0.0)
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.5) as runtime, _Loop(runtime, "theirs") as other:
        free = threading.Event()
        other.loop.call_soon_threadsafe(lambda: free.wait(30))
        try:
            with pytest.raises(NoSlot, match="keeps its slot: its event loop did not get to it in time"):
                await runtime.open("ours").__aenter__()
        finally:
            free.set()
        async with runtime.open("ours"):
            assert other.context.swapped_out


async def test_a_context_whose_event_loop_has_ended_is_named(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.2) as runtime:
        async def left() -> StreamingContext:
            context = await runtime.open("theirs").__aenter__()
            await context.feed(TEXT)
            return context

        theirs = await asyncio.to_thread(asyncio.run, left())
        with pytest.raises(NoSlot, match="keeps its slot: its event loop does not run"):
            await runtime.open("ours").__aenter__()
        await theirs.aclose()


async def test_a_session_that_cannot_be_saved_is_named_to_who_waits_and_others_make_room(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It keeps its memory, and is tried again last: each try may take long."""
    tried, full = [], [True]
    real = saving.save

    async def save(session: SessionState) -> Snapshot:
        tried.append(session.branch.name)
        if session.branch.name == "stuck" and full:
            raise StoreError("No space left on device")
        return await real(session)

    monkeypatch.setattr(saving, "save", save)
    monkeypatch.setattr(sharing, "LOOK_AGAIN_S", 0.0)
    async with tiny(store=tmp_path, max_live=2, slot_timeout_s=0.3) as runtime, AsyncExitStack() as stack:
        stuck = await stack.enter_async_context(runtime.open("stuck"))
        await stuck.feed(TEXT)
        before = settled(await snap(stuck))
        for n in range(5):
            other = await stack.enter_async_context(runtime.open(f"other {n}"))
            await other.feed(TEXT)
        assert not stuck.swapped_out and tried.count("stuck") == 1
        await other.aclose()
        busy = await stack.enter_async_context(runtime.open("busy"))
        async with busy.turn():
            await busy.feed(TEXT)
            with pytest.raises(NoSlot, match="'stuck' cannot be swapped out and keeps its slot: No space left"):
                await runtime.open("late").__aenter__()
            expect_same(settled(await snap(stuck)), before)
            full.clear()
            late = await stack.enter_async_context(runtime.open("late"))
            assert stuck.swapped_out
            await late.aclose()
    assert not [row.problem for row in Store(tmp_path).verify() if row.problem]
