"""Calls of one context beside each other: whoever waited looks again, so that no slot has two owners and what is
saved is never of two moments."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from locret_stream import ContextBusy, ContextClosed, Store
from locret_stream.context import saving
from locret_stream.runtime.slots import Slots
from tests.context.support import CHUNK, expect_free, expect_same, ids_in, snap, tiny
from tests.context.test_snapshots import settled
from tests.context.test_swapping import expect_replay, ids_of


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """The next call of that function of `saving` says that it began, and waits."""
    began, go_on, real = asyncio.Event(), asyncio.Event(), getattr(saving, name)

    async def waits(*arguments, **options):
        monkeypatch.setattr(saving, name, real)
        began.set()
        await go_on.wait()
        return await real(*arguments, **options)

    monkeypatch.setattr(saving, name, waits)
    return began, go_on


async def test_a_second_rewind_and_a_generation_beside_a_rewind_are_refused(tmp_path: Path, monkeypatch):
    """Both would write into the slot that the first one restores into."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 5 * CHUNK))
            first = await ctx.snapshot()
            await ctx.push(ids_of(2, 2 * CHUNK))
            began, go_on = slow(monkeypatch, "revive")
            rewinding = asyncio.create_task(ctx.rewind(first))
            await began.wait()
            with pytest.raises(ContextBusy, match="rewind"):
                await ctx.rewind(first)
            with pytest.raises(ContextBusy, match="rewind"):
                await anext(ctx.generate([7], max_new_tokens=3))
            with pytest.raises(ContextBusy, match="rewind"):
                async with ctx.turn():
                    pass
            go_on.set()
            await rewinding
            assert ids_in(ctx) == ids_of(1, 5 * CHUNK)
            await expect_replay(ctx, plain)
        expect_free(runtime)


async def test_closing_beside_a_rewind_closes_whatever_is_there(tmp_path: Path, monkeypatch):
    """Its slot is given back once, and the name can be opened again."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=1) as runtime:
        for unsaved in (False, True):
            ctx = await runtime.open("a", raw=True).__aenter__()
            await ctx.push(ids_of(1, 3 * CHUNK))
            first = await ctx.snapshot()
            if unsaved:
                await ctx.push([7])
            began, go_on = slow(monkeypatch, "revive")
            rewinding = asyncio.create_task(ctx.rewind(first))
            await began.wait()
            closing = asyncio.create_task(ctx.aclose())
            await asyncio.sleep(0.02)
            go_on.set()
            await closing
            await asyncio.wait([rewinding])
            assert rewinding.exception() is None or isinstance(rewinding.exception(), ContextClosed)
            assert ctx.closed
            expect_free(runtime)


async def test_what_is_saved_or_copied_while_a_turn_is_undone_knows_nothing_of_it(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=2, scratch=2) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            before, saved = ids_in(ctx), []

            async def undone() -> None:
                with pytest.raises(KeyError):
                    async with ctx.turn():
                        await ctx.push(ids_of(2, 3))
                        inside.set()
                        await leave.wait()
                        raise KeyError

            for _ in range(5):
                inside, leave = asyncio.Event(), asyncio.Event()
                turn = asyncio.create_task(undone())
                await inside.wait()
                blocked = [asyncio.create_task(ctx.receipts()) for _ in range(3)]  # steps that the undoing waits for
                leave.set()
                while not turn.done() and not ctx._session.still_now:  # noqa: ASYNC110 (nothing there to wait for)
                    await asyncio.sleep(0)
                saved.append(await ctx.snapshot())
                async with ctx.fork() as fork:
                    assert ids_in(fork) == before
                    await expect_replay(fork, plain)
                await asyncio.gather(turn, *blocked, return_exceptions=True)
            assert {one.tokens for one in saved} == {len(before)}
            assert ids_in(ctx) == before


async def test_a_turn_that_waited_looks_again_before_it_begins(tmp_path: Path, monkeypatch):
    """A feed began meanwhile: its commits would be without a backup."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 2))
        async with ctx._session.still():
            turn = ctx.turn()
            opening = asyncio.create_task(turn.__aenter__())
            await asyncio.sleep(0)
            feeding = asyncio.create_task(ctx.push(ids_of(2, 2 * CHUNK)))
            await asyncio.sleep(0.01)
        with pytest.raises(ContextBusy, match="push"):
            await opening
        await feeding
        assert ids_in(ctx) == ids_of(1, CHUNK + 2) + ids_of(2, 2 * CHUNK)


async def test_two_first_commits_of_one_turn_make_one_backup(tmp_path: Path):
    """A feed and a focus at once; with the only scratch slot, and none is left taken."""
    async with tiny(store=tmp_path, slot_timeout_s=2) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            before = ids_in(ctx)
            with pytest.raises(KeyError):
                async with ctx.turn():
                    async with asyncio.TaskGroup() as group:
                        group.create_task(ctx.push(ids_of(2, 2 * CHUNK)))
                        group.create_task(ctx.focus("bird"))
                    raise KeyError
            assert ids_in(ctx) == before and not ctx.memory.focus
        expect_free(runtime)


async def test_who_needs_the_units_to_stay_needs_it_of_what_takes_the_place_of_an_undone_turn(tmp_path: Path):
    """A named fork copies the log of the session, while a turn of it is undone and it is fed on."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 2))
        with pytest.raises(KeyError):
            async with ctx.turn():
                copying = ctx._session.still()
                await copying.__aenter__()
                raise KeyError
        feeding = asyncio.create_task(ctx.push(ids_of(2, 2 * CHUNK)))
        await asyncio.sleep(0.05)
        assert not feeding.done() and ctx._session.state.seen == CHUNK
        await copying.__aexit__(None, None, None)
        await feeding
        assert ids_in(ctx) == ids_of(1, CHUNK + 2) + ids_of(2, 2 * CHUNK)


async def test_a_focus_that_waited_while_a_turn_opened_is_undone_with_it(tmp_path: Path):
    """It moves units, so the turn needs its backup before, whoever waited first."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx, tiny() as plain:
        await ctx.push(ids_of(1, 2 * CHUNK))
        before = settled(await snap(ctx))
        turn = ctx.turn()
        async with ctx._session.still():
            opening = asyncio.create_task(turn.__aenter__())
            await asyncio.sleep(0)
            focusing = asyncio.create_task(ctx.focus("bird"))
            await asyncio.sleep(0.01)
        await opening
        await focusing
        assert ctx.memory.focus
        assert not await turn.__aexit__(KeyError, KeyError(), None), "it raises, and is undone"
        assert not ctx.memory.focus
        expect_same(settled(await snap(ctx)), before)
        await expect_replay(ctx, plain)


async def test_a_turn_undone_while_its_units_come_back_gives_the_slot_back(tmp_path: Path, monkeypatch):
    """They come back for a session that has ended: the one in its place still waits in the store."""
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            before = ids_in(ctx)
            assert await ctx.put_away()
            copying, go_on, real = threading.Event(), threading.Event(), runtime.engine.bring_back

            def waits(*arguments):
                copying.set()
                assert go_on.wait(20)
                real(*arguments)

            monkeypatch.setattr(runtime.engine, "bring_back", waits)

            async def undone() -> None:
                async with ctx.turn():
                    await ctx.push(ids_of(2, 3))
                    coming.append(asyncio.create_task(ctx.receipts()))
                    await asyncio.to_thread(copying.wait, 20)
                    raise KeyError

            coming: list[asyncio.Task] = []
            turn = asyncio.create_task(undone())
            await asyncio.to_thread(copying.wait, 20)
            await asyncio.sleep(0.05)
            go_on.set()
            with pytest.raises(KeyError):
                await turn
            with pytest.raises(ContextClosed, match="undone"):
                await coming[0]
            assert ctx.away and ids_in(ctx) == before
            expect_free(runtime)
            assert (await ctx.snapshot()).tokens == len(before), "saved out of the store"
            monkeypatch.undo()
            await expect_replay(ctx, plain)
        expect_free(runtime)


async def test_what_is_expendable_is_not_closed_once_it_is_used():
    """It was idle when somebody chose it to make room, and is used by the time it would be closed."""
    async with tiny(max_live=1) as runtime, runtime.open() as ctx:
        ctx.expendable = True
        feed = ctx.feed(ids_of(1, 5))
        await anext(feed)
        for midway in (False, True):
            assert not await ctx.put_away(midway=midway)
        await feed.aclose()
        assert not ctx.closed and await ctx.put_away() and ctx.closed


async def test_who_comes_for_a_slot_of_a_runtime_that_closes_is_told_at_once():
    """Not after `slot_timeout_s`; and who left while it waited leaves no error behind that nobody heard."""
    unheard: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))
    taken = Slots([])
    waiting, leaving = (asyncio.create_task(taken.acquire(30, "live")) for _ in range(2))
    await asyncio.sleep(0.01)
    taken.dismiss()
    leaving.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(ContextClosed):
            await waiting
        with pytest.raises(ContextClosed):
            await taken.acquire(30, "live")
        with pytest.raises(asyncio.CancelledError):
            await leaving
    del waiting, leaving
    await asyncio.sleep(0.01)
    gc.collect()
    assert not unheard
