"""Closing a runtime or a context while others open, wait, fail or have an open turn: what was accepted is saved."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress
from pathlib import Path

import pytest

from locret_stream import ContextClosed, Runtime, StaleOwner, Store
from locret_stream.runtime.slots import Slots
from tests.context.support import CHUNK, TEXT, expect_replay, ids_in, ids_of, tiny, unstarted
from tests.context.test_snapshots import Slow


async def test_closing_a_runtime_saves_contexts_that_are_swapped_out_too(tmp_path: Path):
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
    assert {stored.name: stored.tokens for stored in Store(tmp_path).list()} == tokens
    assert not runtime._open and "worker" not in runtime.__dict__


async def test_a_context_that_cannot_be_saved_keeps_no_other_from_being_saved(tmp_path: Path):
    runtime = await unstarted(store=tmp_path, max_live=3).__aenter__()
    contexts = [await runtime.open(name).__aenter__() for name in "abc"]
    for context in contexts:
        await context.feed(TEXT)
        await context.snapshot()
        await context.feed(TEXT)
    Store(tmp_path).forget("b")
    with pytest.raises(StaleOwner):
        await runtime.aclose()
    assert {stored.name: stored.tokens for stored in Store(tmp_path).list()} == dict.fromkeys(
        "ac", len(contexts[0]._session.state.pending) + contexts[0]._session.state.seen)
    assert "worker" not in runtime.__dict__ and all(context._session.closed for context in contexts)
    await runtime.aclose()


async def test_an_error_of_any_kind_in_one_context_keeps_no_other_from_being_saved(tmp_path: Path, monkeypatch):
    """An example is no memory left on the device. The runtime is closed all the same, and can be started again."""
    runtime = unstarted(store=tmp_path, max_live=3)
    await runtime.__aenter__()
    contexts = [await runtime.open(name, raw=True).__aenter__() for name in "abc"]
    for ctx in contexts:
        await ctx.push(ids_of(1, CHUNK + 2))
    real, failed = runtime.engine.moment, []

    def moment(*arguments):
        if not failed:
            failed.append(1)
            raise RuntimeError("injected: out of memory")
        return real(*arguments)

    monkeypatch.setattr(runtime.engine, "moment", moment)
    with pytest.raises(RuntimeError, match="out of memory"):
        await runtime.aclose()
    assert all(ctx.closed for ctx in contexts) and not runtime.running
    assert len(runtime.store.list()) == 2
    async with runtime, runtime.open(runtime.store.list()[0].name, raw=True) as ctx:
        assert ids_in(ctx) == ids_of(1, CHUNK + 2)


async def test_closing_inside_a_turn_undoes_it_and_saves_what_was_accepted_before(tmp_path: Path):
    runtime = unstarted(store=tmp_path)
    inside = asyncio.Event()

    async def work() -> None:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 3 * CHUNK + 2))
            with pytest.raises(ContextClosed, match="undone"):
                async with ctx.turn():
                    await ctx.push(ids_of(2, 2 * CHUNK))
                    inside.set()
                    await asyncio.sleep(0.3)

    async with runtime:
        working = asyncio.create_task(work())
        await inside.wait()
    await working
    async with unstarted(store=tmp_path) as runtime, tiny() as plain, runtime.open("a", raw=True) as ctx:
        assert ids_in(ctx) == ids_of(1, 3 * CHUNK + 2)
        await expect_replay(ctx, plain)


@pytest.mark.parametrize("name", ["stored", "new"])
async def test_a_context_that_opens_while_the_runtime_closes_is_refused_or_saved(tmp_path: Path, name: str):
    """At whatever moment it opens, what it accepted is in the store afterwards."""
    async with unstarted(store=tmp_path) as runtime, runtime.open("stored", raw=True) as ctx:
        await ctx.push([7])
    for moment in range(14):
        runtime, accepted = unstarted(store=tmp_path), []
        await runtime.__aenter__()
        branch = runtime.store.branch

        def slowly(name: str, branch=branch) -> object:
            time.sleep(0.02)
            return branch(name)

        runtime.store.branch = slowly

        async def use(runtime: Runtime = runtime, accepted: list[int] = accepted) -> None:
            async with runtime.open(name, raw=True) as ctx:
                before = ctx.memory.tokens
                accepted.append(before + await ctx.push(ids_of(1, 20)))

        using = asyncio.create_task(use())
        for _ in range(moment):
            await asyncio.sleep(0)
        await runtime.aclose()
        with suppress(ContextClosed):
            async with asyncio.timeout(20):
                await using
        if accepted:
            assert {stored.name: stored.tokens for stored in Store(tmp_path).list()}[name] == accepted[-1]


async def test_calls_that_wait_for_a_slot_end_at_once_when_the_runtime_closes():
    """Not after `slot_timeout_s`. A call that was cancelled while it waited leaves no error that asyncio would log."""
    logged: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: logged.append(report))
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
    assert not logged


async def test_closing_saves_what_came_after_a_save_that_runs_though_a_turn_waits_for_it_too(tmp_path: Path):
    """The turn came first, and would begin between that save and the last one."""
    async with tiny(store=tmp_path) as runtime:
        ctx = await runtime.open("a", raw=True).__aenter__()
        await ctx.push(ids_of(1, CHUNK + 2))
        first = asyncio.create_task(ctx.snapshot())
        while not ctx._session.is_frozen:  # noqa: ASYNC110 (no event says it)
            await asyncio.sleep(0)
        assert await ctx.push([7]) == 1
        beginning = asyncio.create_task(ctx.turn().__aenter__())
        await asyncio.sleep(0)
        await ctx.aclose()
        with pytest.raises(ContextClosed):
            await beginning
        assert (await first).tokens == CHUNK + 2
        async with runtime.open("a", raw=True) as ctx:
            assert ids_in(ctx) == [*ids_of(1, CHUNK + 2), 7]


async def test_nothing_is_accepted_any_more_while_closing_saves(tmp_path: Path):
    """Neither by a new call nor by one that runs: what a token was given for is in the store."""
    files = Slow(tmp_path)
    async with tiny(store=Store(tmp_path, files=files), max_live=2) as runtime:
        told, said = [await runtime.open(name, raw=True).__aenter__() for name in "ab"]
        feed = told.feed([ids_of(1, CHUNK + 2), [7], [8]])
        for _ in range(CHUNK + 2):
            await anext(feed)
        reply = said.generate(ids_of(2, 4), max_new_tokens=100, ignore_eos=True)
        given = [(await anext(reply)).id for _ in range(2)]
        closing = [asyncio.create_task(ctx.aclose()) for ctx in (told, said)]
        await asyncio.to_thread(files.begun.wait, 30)
        for call in (anext(feed), anext(reply), told.push([9]), said.flush(), told.turn().__aenter__()):
            with pytest.raises(ContextClosed):
                await call
        files.may.set()
        await asyncio.gather(*closing)
        async with runtime.open("a", raw=True) as told, runtime.open("b", raw=True) as said:
            assert ids_in(told) == ids_of(1, CHUNK + 2) and [*told._session.buffered.segments] == [[7]]
            assert ids_in(said) == [*ids_of(2, 4), *given]
