"""turn() beside other calls of the context: saves, forks, feeds and focuses of other tasks, before, in and after it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from locret_stream import ContextBusy, ContextClosed
from tests.context.support import (
    CHUNK,
    TEXT,
    expect_free,
    expect_replay,
    expect_same,
    ids_in,
    ids_of,
    settled,
    snap,
    tiny,
)


async def test_saves_and_forks_while_a_turn_is_undone_have_nothing_of_it(tmp_path: Path):
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
                while not turn.done() and not ctx._session.is_frozen:  # noqa: ASYNC110 (no event says it)
                    await asyncio.sleep(0)
                saved.append(await ctx.snapshot())
                async with ctx.fork() as fork:
                    assert ids_in(fork) == before
                    await expect_replay(fork, plain)
                await asyncio.gather(turn, *blocked, return_exceptions=True)
            assert {snapshot.tokens for snapshot in saved} == {len(before)}
            assert ids_in(ctx) == before


async def test_a_turn_that_waited_is_refused_if_a_feed_began_meanwhile(tmp_path: Path, monkeypatch):
    """The commits of that feed would have no copy to go back to."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 2))
        async with ctx._session.frozen():
            turn = ctx.turn()
            opening = asyncio.create_task(turn.__aenter__())
            await asyncio.sleep(0)
            feeding = asyncio.create_task(ctx.push(ids_of(2, 2 * CHUNK)))
            await asyncio.sleep(0.01)
        with pytest.raises(ContextBusy, match="push"):
            await opening
        await feeding
        assert ids_in(ctx) == ids_of(1, CHUNK + 2) + ids_of(2, 2 * CHUNK)


async def test_two_first_commits_of_one_turn_make_one_copy(tmp_path: Path):
    """A feed and a focus at once. There is one scratch slot, and it is free afterwards."""
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


async def test_a_session_stays_frozen_when_a_turn_of_it_is_undone(tmp_path: Path):
    """A named fork copies the log of a session; meanwhile a turn of it is undone, and a feed begins."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 2))
        with pytest.raises(KeyError):
            async with ctx.turn():
                copying = ctx._session.frozen()
                await copying.__aenter__()
                raise KeyError
        feeding = asyncio.create_task(ctx.push(ids_of(2, 2 * CHUNK)))
        await asyncio.sleep(0.05)
        assert not feeding.done() and ctx._session.state.seen == CHUNK
        await copying.__aexit__(None, None, None)
        await feeding
        assert ids_in(ctx) == ids_of(1, CHUNK + 2) + ids_of(2, 2 * CHUNK)


async def test_a_focus_that_waited_while_a_turn_opened_is_undone_with_it(tmp_path: Path):
    """It moves units, so the turn makes its copy before, although the focus came first."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx, tiny() as plain:
        await ctx.push(ids_of(1, 2 * CHUNK))
        before = settled(await snap(ctx))
        turn = ctx.turn()
        async with ctx._session.frozen():
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


async def test_a_turn_undone_while_its_session_is_swapped_in_gives_the_slot_back(tmp_path: Path, monkeypatch):
    """They are swapped in for a session that has ended; the session in its place is still swapped out."""
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            before = ids_in(ctx)
            assert await ctx.swap_out()
            copying, go_on, real = threading.Event(), threading.Event(), runtime.engine.swap_in

            def waits(*arguments):
                copying.set()
                assert go_on.wait(20)
                real(*arguments)

            monkeypatch.setattr(runtime.engine, "swap_in", waits)

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
            assert ctx.swapped_out and ids_in(ctx) == before
            expect_free(runtime)
            assert (await ctx.snapshot()).tokens == len(before), "saved from the store"
            monkeypatch.undo()
            await expect_replay(ctx, plain)
        expect_free(runtime)


async def test_a_save_that_waited_is_refused_if_a_turn_began_meanwhile(tmp_path: Path):
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
            if ctx._session.is_frozen:
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


async def test_save_as_is_refused_inside_a_turn(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(TEXT)
        async with ctx.turn():
            with pytest.raises(ContextBusy, match="save_as"):
                await ctx.save_as("b")
        assert ctx.name == "a" and ctx._session.branch.name == "a"
