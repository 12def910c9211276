"""Calls of one context beside each other: whoever waited looks again, so that no slot has two owners and what is
saved is never of two moments."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from locret_stream import ContextBusy, ContextClosed, Runtime, Store
from locret_stream.context import restoring, saving
from locret_stream.runtime.slots import Slots
from tests.context.support import CHUNK, assert_same, expect_free, expect_same, ids_in, snap, tiny, unstarted
from tests.context.test_snapshots import settled
from tests.context.test_swapping import expect_replay, ids_of


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """The next call of that function of `saving` or `restoring` says that it began, and waits."""
    module = saving if hasattr(saving, name) else restoring
    began, go_on, real = asyncio.Event(), asyncio.Event(), getattr(module, name)

    async def waits(*arguments, **options):
        monkeypatch.setattr(module, name, real)
        began.set()
        await go_on.wait()
        return await real(*arguments, **options)

    monkeypatch.setattr(module, name, waits)
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
                while not turn.done() and not ctx._session.is_frozen:  # noqa: ASYNC110 (nothing there to wait for)
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
    """It moves units, so the turn needs its backup before, whoever waited first."""
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


async def test_a_turn_undone_while_its_units_come_back_gives_the_slot_back(tmp_path: Path, monkeypatch):
    """They come back for a session that has ended: the one in its place still waits in the store."""
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
            assert (await ctx.snapshot()).tokens == len(before), "saved out of the store"
            monkeypatch.undo()
            await expect_replay(ctx, plain)
        expect_free(runtime)


async def test_what_is_expendable_is_not_closed_once_it_is_used():
    """It was idle when somebody chose it to make room, and is used by the time it would be closed."""
    async with tiny(max_live=1) as runtime, runtime.open() as ctx:
        ctx.disposable = True
        feed = ctx.feed(ids_of(1, 5))
        await anext(feed)
        for midway in (False, True):
            assert not await ctx.swap_out(midway=midway)
        await feed.aclose()
        assert not ctx.closed and await ctx.swap_out() and ctx.closed


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


@pytest.mark.parametrize("to", ["a snapshot", "the beginning"])
async def test_nobody_reads_a_mixture_while_a_rewind_writes_into_the_slot(tmp_path: Path, monkeypatch, to: str):
    """Forks, asks and receipts are of before, or are refused; one that was given before is carried out before."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=3, scratch=2) as runtime:
        async with runtime.open("a", system="You watch. " * 30) as ctx:
            await ctx.push(ids_of(1, 2 * CHUNK))
            first = await ctx.snapshot()
            await ctx.push(ids_of(2, 3 * CHUNK))
            before, kept = await snap(ctx), (await ctx.receipts()).kept
            writing, go_on, real = threading.Event(), threading.Event(), getattr(
                runtime.engine, "load" if to == "a snapshot" else "commit")

            def slowly(*arguments):
                result = real(*arguments)
                if not writing.is_set():
                    writing.set()
                    assert go_on.wait(20)
                return result

            monkeypatch.setattr(runtime.engine, "load" if to == "a snapshot" else "commit", slowly)

            async def forked() -> None:
                async with ctx.fork() as fork:
                    assert_same((await snap(fork, settle=False)).tensors, before.tensors)

            async def received() -> None:
                assert ((await ctx.receipts()).kept == kept).all()

            earlier = [asyncio.create_task(look()) for look in (forked, received)]
            rewinding = asyncio.create_task(ctx.rewind(first if to == "a snapshot" else 0))
            await asyncio.to_thread(writing.wait, 20)
            later = [asyncio.create_task(look) for look in (forked(), received(), ctx.ask("So?", max_new_tokens=2))]
            await asyncio.sleep(0.05)
            go_on.set()
            await rewinding
            await asyncio.gather(*earlier)
            for error in await asyncio.gather(*later, return_exceptions=True):
                assert isinstance(error, ContextClosed) and "rewound" in str(error)
        expect_free(runtime)


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


async def test_an_error_of_any_kind_in_one_context_keeps_no_other_from_being_saved(tmp_path: Path, monkeypatch):
    """Such as no memory left on the device; the runtime is closed all the same, and can be started again."""
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


@pytest.mark.parametrize("name", ["stored", "new"])
async def test_a_context_that_opens_while_the_runtime_closes_is_refused_or_saved(tmp_path: Path, name: str):
    """Whatever moment it comes in: what it accepted is there afterwards."""
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
            assert {one.name: one.tokens for one in Store(tmp_path).list()}[name] == accepted[-1]


async def test_a_cancelled_save_as_is_done_whole(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("old", raw=True) as ctx:
        await ctx.push(ids_of(1, 20))
        first = await ctx.snapshot()
        await ctx.push(ids_of(2, 20))
        moving = asyncio.create_task(ctx.save_as("new"))
        await asyncio.sleep(0)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert ctx.name == "new" and not ctx.unsaved
        await ctx.push([7])
        assert (await ctx.snapshot()).name == "new"
        await ctx.rewind(1)
        assert ids_in(ctx) == ids_of(1, 20) + ids_of(2, 20)
        assert {one.name: one.tokens for one in runtime.store.list()} == {"new": 41, "old": first.tokens}


async def test_openings_that_are_cancelled_cost_no_snapshot_that_was_asked_for(tmp_path: Path):
    """Each had the other context saved, to take its slot."""
    async with tiny(store=Store(tmp_path, keep_last=4), max_live=1) as runtime, runtime.open("a", raw=True) as ctx:
        asked = []
        for number in range(3):
            await ctx.push(ids_of(number, 10))
            asked.append((await ctx.snapshot()).generation)
        for _ in range(5):
            await ctx.push([7])
            opening = asyncio.create_task(runtime.open("b").__aenter__())
            while not ctx._session.is_frozen:  # noqa: ASYNC110 (nothing there to wait for)
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await ctx.push([7])
        last = await ctx.snapshot()
        assert [one.generation for one in runtime.store.info("a")] == [*asked, last.generation]


async def test_a_rewind_forgets_no_snapshot_that_only_held_its_place(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, 10))
        first = await ctx.snapshot()
        await ctx.push(ids_of(2, 10))
        async with runtime.open("b"):
            assert ctx.swapped_out
        swap_generations = ctx.swap_generations
        await ctx.rewind(first)
        last = await ctx.snapshot()
        left = [one.generation for one in runtime.store.info("a")]
        assert swap_generations and left == [first.generation, last.generation]
