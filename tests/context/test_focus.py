"""`ctx.focus`: the text that the memory will be asked about is logged, saved, undone and rebuilt with the stream."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locret_stream import (
    BudgetExceeded,
    ConfigError,
    ContextClosed,
    InputError,
    Runtime,
    SnapshotCorrupt,
    SnapshotMismatch,
)
from locret_stream.config import Budget
from locret_stream.engine import Engine
from tests.context.support import (
    CHUNK,
    SINKS,
    STABILIZERS,
    TEXT,
    UNITS,
    expect_same,
    model,
    replies,
    settled,
    snap,
    tiny,
)
from tests.context.test_snapshots import LONG, damage
from tests.kit import assert_same

QUERY, OTHER = "pass key?", "Naïve café"


def units(ctx, layer: int = 0) -> list[int]:
    state = ctx._session.state
    return state.store.positions(layer)[0].tolist()


async def test_it_is_no_part_of_the_conversation():
    async with tiny() as runtime, runtime.open("a", focus=QUERY) as ctx, runtime.open("b") as plain:
        count = runtime.count_tokens(QUERY)
        assert ctx.memory.tokens == plain.memory.tokens and ctx.memory.focus == count and plain.memory.focus == 0
        for one in (ctx, plain):
            await one.feed(LONG)
        assert ctx.memory.tokens == plain.memory.tokens
        assert ctx._session.state.history == plain._session.state.history and ctx._session.frame == plain._session.frame
        assert units(ctx)[:count] == list(range(-count, 0)) and ctx.memory.units == (UNITS, UNITS)
        receipts = await ctx.receipts()
        assert (receipts.kept[:, :, :ctx.memory.tokens - ctx.memory.pending].sum(-1) == UNITS - count).all()
        await ctx.ask("And?", max_new_tokens=3)
        assert ctx.memory.focus == count
        await ctx.focus(None)
        await ctx.feed(LONG)
        assert ctx.memory.focus == 0 and min(units(ctx)) == 0


async def test_inside_a_feed_it_counts_from_the_last_accepted_token():
    async with tiny() as runtime, runtime.open(raw=True) as ctx, runtime.open(raw=True) as other:
        given = None
        async for token in ctx.feed(LONG):
            if token.position >= 3 * CHUNK + 2 and given is None:
                await ctx.focus(QUERY)
                given = ctx.memory.tokens
        ids = ctx._session.state.history
        await other.feed(ids[:given])
        await other.focus(QUERY)
        await other.feed(ids[given:])
        expect_same(settled(await snap(ctx)), settled(await snap(other)))


async def test_the_same_again_changes_nothing(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", focus=QUERY) as ctx:
            await ctx.feed(LONG)
            saved = await ctx.snapshot()
            await ctx.focus(QUERY)
            assert not ctx.unsaved and not ctx._session.branch.focuses
        async with runtime.open("a", focus=QUERY) as ctx:
            assert not ctx.unsaved
        assert [one.generation for one in runtime.store.list()] == [saved.generation]
        async with runtime.open("a", focus=OTHER) as ctx:
            assert ctx.unsaved
            await ctx.feed(LONG[:90])
            assert ctx.memory.focus == runtime.count_tokens(OTHER)


async def test_one_that_was_only_opened_leaves_nothing(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", focus=QUERY):
            pass
        assert not runtime.store.list()


@pytest.mark.parametrize("before", [QUERY, None])
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.thorough(but=2)
async def test_an_undone_turn_takes_it_back(committed: bool, before: str | None, tmp_path: Path):
    async with tiny(store=tmp_path, policy="sirllm") as runtime, runtime.open("a", focus=before) as ctx:
        await ctx.feed(LONG)
        await ctx.focus(OTHER)
        while ctx.memory.pending:  # to a grid point, where it takes effect at once
            await ctx.push([5])
        for at_grid in (True, False):
            if not at_grid:
                await ctx.push([5, 6])
            whole, events = await snap(ctx), [*ctx._session.branch.focuses]
            with pytest.raises(ZeroDivisionError):
                async with ctx.turn():
                    await ctx.focus("door")
                    if committed:
                        await ctx.feed(LONG)
                    1 / 0  # noqa: B018
            expect_same(await snap(ctx), whole)
            assert ctx._session.branch.focuses == events
            fork = ctx.fork()
            async with fork:
                await fork.push([7] * CHUNK)
                assert fork.memory.focus == runtime.count_tokens(OTHER)


async def test_rewind_goes_back_to_the_one_there_was(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a", focus=QUERY) as ctx:
        await ctx.feed(LONG)
        first, then = await ctx.snapshot(), await snap(ctx)
        await ctx.focus(OTHER)
        await ctx.feed(LONG)
        await ctx.snapshot()
        await ctx.rewind(first)
        expect_same(settled(await snap(ctx)), settled(then))
        await ctx.feed(LONG)
        assert ctx.memory.focus == runtime.count_tokens(QUERY)
        await ctx.rewind(0)
        assert ctx.memory.focus == runtime.count_tokens(QUERY) and not ctx._session.branch.focuses[:-1]


async def test_a_beginning_that_cannot_be_read_again_loses_the_memory_and_says_so(tmp_path: Path, monkeypatch):
    """There is one slot: its units are overwritten before the focus fails. The store still has them."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", focus=QUERY) as ctx:
            await ctx.feed(LONG)
            await ctx.snapshot()
            then = await snap(ctx)
            with monkeypatch.context() as patched:
                patched.setattr(type(runtime.engine.attachment), "hidden", failing)
                with pytest.raises(OSError, match="no more"):
                    await ctx.rewind(0)
            with pytest.raises(ContextClosed, match="opened anew"):
                await ctx.ask("what?")
        async with runtime.open("a") as again:
            expect_same(settled(await snap(again)), settled(then))


def failing(*arguments: object, **more: object) -> None:
    raise OSError("no more")


@pytest.mark.parametrize("part", ["pages", "m"])
@pytest.mark.parametrize("saves", [(), (2, 4), (1, 2, 3, 4, 5)])
@pytest.mark.thorough(but=2)
async def test_a_log_is_fed_again_with_every_focus_where_it_was(saves: tuple, part: str, tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", system="Note all.", focus=QUERY) as ctx:
            for step, text in enumerate((None, OTHER, QUERY, None, OTHER), 1):
                await ctx.feed(LONG[:37 * step])
                await ctx.focus(text)
                if step in saves:
                    await ctx.snapshot()
                    await ctx.focus(QUERY if step == 2 else text)
                while ctx.memory.pending and step % 2:
                    await ctx.push([5])
            await ctx.snapshot()
            await ctx.push([9])
            await replies(ctx, 3)
            whole = await snap(ctx)
        damage(tmp_path, part)
        async with runtime.open("a", on_mismatch="rebuild") as ctx:
            assert_same((await snap(ctx)).tensors, whole.tensors)
            await ctx.feed(LONG)
            after = await snap(ctx)
        async with runtime.open("a") as ctx:
            expect_same(settled(await snap(ctx)), settled(after))


async def test_a_fork_of_a_stored_session_has_its_focus_and_its_log(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", focus=QUERY) as ctx:
            await ctx.feed(LONG)
            await ctx.snapshot()
            await ctx.push([5])
            await ctx.focus(OTHER)
            async with ctx.fork("a/two") as two:
                await two.feed(LONG)
                expected = await snap(two)
        damage(tmp_path, "pages")
        async with runtime.open("a/two", on_mismatch="rebuild") as two:
            assert_same((await snap(two)).tensors, expected.tensors)


async def test_it_waits_in_the_store_with_the_rest(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1) as runtime, runtime.open("a", focus=QUERY) as ctx:
        await ctx.feed(LONG)
        before = await snap(ctx)
        async with runtime.open("b") as other:
            assert ctx.swapped_out
            await other.feed(TEXT)
        expect_same(await snap(ctx), before)


@pytest.mark.thorough
async def test_another_grid_and_policy_rebuild_it_too(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True, focus=QUERY) as ctx:
        await ctx.feed(LONG)
        while ctx.memory.pending:
            await ctx.push([5])
        await ctx.focus(OTHER)
        at = ctx.memory.tokens
        await ctx.feed(LONG)
        ids = ctx._session.state.history
    more = {"policy": "keydiff", "chunk_size": CHUNK // 2, "on": model()}
    async with tiny(**more, store=tmp_path) as runtime:
        async with runtime.open("a", on_mismatch="rebuild") as ctx, runtime.open(raw=True, focus=QUERY) as fresh:
            await fresh.feed(ids[:at])
            await fresh.focus(OTHER)
            await fresh.feed(ids[at:])
            assert_same((await snap(ctx)).tensors, (await snap(fresh)).tensors)
    few = Budget(units=SINKS + STABILIZERS + 2, sinks=SINKS, stabilizers=STABILIZERS)
    async with tiny(store=tmp_path, budget=few, chunk_size=4) as runtime:
        with pytest.raises(SnapshotMismatch, match="cannot be rebuilt: the focus has"):
            await runtime.open("a", on_mismatch="rebuild").__aenter__()


@pytest.mark.thorough
async def test_behind_a_reply_that_left_more_than_a_chunk_pending_it_is_not_lost(tmp_path: Path):
    """A reply's closing literals are queued, not committed: what is given behind them comes into force behind them."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            while len(ctx._session.state.pending) < CHUNK:  # the reply may end anywhere on the grid
                await ctx.feed(TEXT[:11])
                await replies(ctx, 3)
            at = ctx.memory.tokens
            await ctx.focus(QUERY)
            assert ctx._session.state.seen + CHUNK > at >= ctx._session.state.seen
            await ctx.snapshot()
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            whole = await snap(ctx)
            assert ctx.memory.focus == runtime.count_tokens(QUERY)
        damage(tmp_path, "pages")
        async with runtime.open("a", on_mismatch="rebuild") as ctx:
            assert_same((await snap(ctx)).tensors, whole.tensors)


async def test_several_on_one_grid_point_are_all_rebuilt(tmp_path: Path):
    """The longer one made room for itself, and that is not undone by the shorter one."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.feed([5] * 4 * CHUNK)
            for text in ("a longer one?", QUERY, OTHER):
                await ctx.focus(text)
            whole = await snap(ctx)
        damage(tmp_path, "pages")
        async with runtime.open("a", on_mismatch="rebuild") as ctx:
            assert_same((await snap(ctx)).tensors, whole.tensors)


@pytest.mark.parametrize("strange", [torch.tensor(3), torch.zeros(0, dtype=torch.int64), torch.ones(2)])
async def test_a_snapshot_with_a_strange_one_is_refused(strange: torch.Tensor, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch):
    moment = Engine.moment
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            with monkeypatch.context() as patched:
                patched.setattr(Engine, "moment", lambda *arguments: (found := moment(*arguments)) and replace(
                    found, state={**found.state, "next_focus": strange}))
                await ctx.snapshot()
            await ctx.aclose(save=False)
        with pytest.raises(SnapshotCorrupt, match="strange focus"):
            await runtime.open("a").__aenter__()


async def test_what_cannot_be_a_focus_is_refused_and_nothing_changes(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", focus=QUERY) as ctx:
            await ctx.feed(LONG)
            before = await snap(ctx)
            with pytest.raises(ConfigError, match=rf"{runtime.count_tokens(LONG)} tokens; .* expected at most 14 "):
                await ctx.focus(LONG)
            with pytest.raises(InputError, match="the focus is a int; expected text"):
                await ctx.focus(7)
            expect_same(await snap(ctx), before)
            for none in ("", "  \n"):
                await ctx.focus(QUERY)
                await ctx.focus(none)
                await ctx.feed(LONG)
                assert ctx.memory.focus == 0
        with pytest.raises(ContextClosed):
            await ctx.focus(QUERY)
        with pytest.raises(ConfigError, match="the focus has"):
            await runtime.open("b", focus=LONG).__aenter__()
        async with runtime.open("b") as ctx:
            assert ctx.memory.focus == 0
    async with tiny(policy="full", units=40) as runtime, runtime.open(raw=True) as ctx:
        await ctx.feed([5] * 38)
        with pytest.raises(BudgetExceeded, match="no space for a focus"):
            await ctx.focus(QUERY)


async def test_control_tokens_in_it_are_data():
    async with tiny() as runtime, runtime.open(focus="<|im_end|>") as ctx:
        special = set(runtime.tokenizer.all_special_ids)
        assert ctx._session.state.focus and not special & set(ctx._session.state.focus)


@contextmanager
def held(runtime: Runtime) -> Iterator[None]:
    """A block in which the engine is at work elsewhere: steps wait for its end."""
    go_on = threading.Event()
    runtime.worker.submit("elsewhere", lambda: go_on.wait(20))
    try:
        yield
    finally:
        go_on.set()


async def rest() -> None:
    for _ in range(50):  # until every task waits for the engine
        await asyncio.sleep(0)


async def test_a_fork_during_the_commit_that_puts_a_focus_in_force(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=3) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push([*range(3, CHUNK - 1)])
        await ctx.focus(QUERY)
        fork = ctx.fork("b")
        with held(runtime):
            pushing = asyncio.create_task(ctx.push([5] * 8))
            await rest()
            assert ctx._session.steps and ctx._session.state.next_focus
            forking = asyncio.create_task(fork.__aenter__())
            await rest()
        await asyncio.gather(pushing, forking)
        assert fork._session.state.focus and fork._session.state.next_focus is None
        await fork.push([7] * CHUNK)
        await fork.aclose()
        async with runtime.open("b", raw=True) as again:
            assert again._session.state.focus
        assert not (await runtime.replay("b")).differs


async def test_a_fork_keeps_the_focus_that_waits_for_the_next_commit(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=3) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push([*range(3, CHUNK + 9)])
        await ctx.focus(QUERY)
        async with ctx.fork("b") as fork:
            assert fork._session.state.next_focus == ctx._session.state.next_focus != None  # noqa: E711
            await fork.push([7] * CHUNK)
        assert not (await runtime.replay("b")).differs


async def test_a_focus_that_waits_for_the_engine_while_its_turn_is_undone(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push([*range(3, 40)])
        with pytest.raises(KeyError):
            async with ctx.turn():
                for _ in range(6):  # the engine is at work elsewhere, and takes turns
                    runtime.worker.submit("elsewhere", lambda: time.sleep(0.1))
                focusing = asyncio.create_task(ctx.focus(QUERY))
                while not (ctx._session.turn.holds_scratch and ctx._session.steps):
                    assert not focusing.done()
                    await asyncio.sleep(0)
                raise KeyError
        await asyncio.gather(focusing, return_exceptions=True)
        assert ctx._session.state.focus == [] and not ctx._session.branch.focuses
        await ctx.push([7] * 2 * CHUNK)
        await ctx.snapshot()
        assert not (await runtime.replay("a")).differs
