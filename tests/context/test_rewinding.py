"""rewind beside other calls of the context: refused or of one moment, done as a whole or not at all."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from locret_stream import ConfigError, ContextBusy, ContextClosed, SnapshotCorrupt, StaleOwner, Store
from locret_stream.cache import UnitStore
from locret_stream.context import restoring
from tests.context.support import (
    CHUNK,
    TEXT,
    assert_same,
    cut_at_every_await,
    expect_free,
    expect_replay,
    ids_in,
    ids_of,
    snap,
    tiny,
)


def delay_revive(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The next session that is revived from its snapshot sets the first event, and waits for the second."""
    began, go_on, real = asyncio.Event(), asyncio.Event(), restoring.revive

    async def waits(*arguments, **options):
        monkeypatch.setattr(restoring, "revive", real)
        began.set()
        await go_on.wait()
        return await real(*arguments, **options)

    monkeypatch.setattr(restoring, "revive", waits)
    return began, go_on


async def test_a_second_rewind_a_reply_and_a_turn_beside_a_rewind_are_refused(tmp_path: Path, monkeypatch):
    """Each would write into the slot that the first rewind restores into."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 5 * CHUNK))
            first = await ctx.snapshot()
            await ctx.push(ids_of(2, 2 * CHUNK))
            began, go_on = delay_revive(monkeypatch)
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


async def test_closing_beside_a_rewind_closes_the_session_that_is_in_the_slot(tmp_path: Path, monkeypatch):
    """The slot is given back once, and the name can be opened again."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=1) as runtime:
        for unsaved in (False, True):
            ctx = await runtime.open("a", raw=True).__aenter__()
            await ctx.push(ids_of(1, 3 * CHUNK))
            first = await ctx.snapshot()
            if unsaved:
                await ctx.push([7])
            began, go_on = delay_revive(monkeypatch)
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


@pytest.mark.parametrize("to", ["a snapshot", "the beginning"])
async def test_no_call_reads_two_states_while_a_rewind_writes_into_the_slot(tmp_path: Path, monkeypatch, to: str):
    """Forks, asks and receipts that were queued before it show the state before; later ones are refused."""
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


@pytest.mark.thorough
async def test_after_a_rewind_cancelled_anywhere_the_context_goes_on(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:

        async def run(cut) -> None:
            async with runtime.open("a") as ctx:
                await ctx.feed(TEXT)
                await ctx.snapshot()
                await ctx.feed(TEXT)
                try:
                    await cut(ctx.rewind(1))
                finally:
                    await ctx.feed(TEXT)  # it is where it was, or at the snapshot
            runtime.store.forget("a")

        assert await cut_at_every_await(run) > 3


@pytest.mark.parametrize("where", ["the beginning", "a snapshot"])
async def test_a_session_is_not_swapped_out_while_it_is_rewound(tmp_path: Path, monkeypatch,
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
        await asyncio.sleep(0.3)  # long enough to swap the first one out, if that were allowed now
        go_on.set()
        await rewinding
        await feeding
        await ctx.feed(TEXT)
        await ctx.snapshot()


async def test_a_rewind_of_a_stale_owner_is_refused(tmp_path: Path):
    async with tiny(store=tmp_path, autosave=False) as runtime, runtime.open("a") as stale:
        await stale.feed(TEXT)
        await stale.snapshot()
        async with tiny(store=tmp_path) as other, other.open("a") as owner:
            await owner.feed(TEXT)
        with pytest.raises(StaleOwner):
            await stale.rewind(1)
        assert (await snap(stale)).tensors


async def test_after_a_rewind_snapshots_of_swap_outs_are_still_deleted(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, 10))
        first = await ctx.snapshot()
        await ctx.push(ids_of(2, 10))
        async with runtime.open("b"):
            assert ctx.swapped_out
        swap_generations = ctx.swap_generations
        await ctx.rewind(first)
        last = await ctx.snapshot()
        left = [snapshot.generation for snapshot in runtime.store.info("a")]
        assert swap_generations and left == [first.generation, last.generation]


async def test_a_cancelled_save_as_runs_to_its_end(tmp_path: Path):
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
        assert {stored.name: stored.tokens for stored in runtime.store.list()} == {"new": 41, "old": first.tokens}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
async def test_a_rewind_beside_save_as_is_of_one_name(tmp_path: Path, steps: int):
    """The number is that of a snapshot of the name which the context had when rewind was called."""
    async with tiny(store=Store(tmp_path, keep_last=5)) as runtime:
        async with runtime.open("old", raw=True) as ctx:
            await ctx.push(ids_of(1, 2 * CHUNK))
            first = await ctx.snapshot()
            await ctx.push(ids_of(2, 2 * CHUNK))
            await ctx.snapshot()
            moving = asyncio.create_task(ctx.save_as("new"))
            for _ in range(steps):
                await asyncio.sleep(0)
            with suppress(ContextBusy, ConfigError):  # it is moving, or has moved
                await ctx.rewind(first)
            with suppress(ContextClosed):
                await moving
            assert ctx._session.stored_branch.name == ctx.name
            assert ids_in(ctx) == ids_of(1, 2 * CHUNK) + (ids_of(2, 2 * CHUNK) if ctx.name == "new" else [])
        expect_free(runtime)


@pytest.mark.parametrize("steps", range(8))
async def test_a_turn_that_ends_while_closing_undoes_it_frees_its_own_slot(tmp_path: Path, steps: int):
    """Undoing goes on in the slot of the copy; the end of the block gives back the other one, once."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            with suppress(ContextClosed):
                async with ctx.turn():
                    await ctx.push(ids_of(2, 2 * CHUNK))
                    closing = asyncio.create_task(ctx.aclose())
                    for _ in range(steps):
                        await asyncio.sleep(0)
            await closing
        expect_free(runtime)
        async with runtime.open("a", raw=True) as ctx:
            assert ids_in(ctx)[:CHUNK + 2] == ids_of(1, CHUNK + 2)


async def test_after_a_rewind_that_failed_while_it_wrote_the_context_is_lost(tmp_path: Path, monkeypatch):
    """Its slot holds units of two moments. One that was refused before, as its snapshot is damaged, goes on."""
    async with tiny(store=tmp_path, autosave=False) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, 3 * CHUNK))
        first = await ctx.snapshot()
        await ctx.push(ids_of(2, 3 * CHUNK))
        real = UnitStore.load

        def half(self: UnitStore, units, *more) -> None:
            real(self, {name: tensor for name, tensor in units.items() if not name.startswith("1.")}, *more)

        def refused(*_) -> None:
            raise SnapshotCorrupt("not of this model")

        with monkeypatch.context() as patch:
            patch.setattr(runtime.engine, "load", refused)
            with pytest.raises(SnapshotCorrupt, match="not of this model"):
                await ctx.rewind(first)
        assert await ctx.ask([7], max_new_tokens=1, ignore_eos=True) is not None
        monkeypatch.setattr(UnitStore, "load", half)
        with pytest.raises(KeyError, match=r"1\.keys"):
            await ctx.rewind(first)
        with pytest.raises(ContextClosed, match="this context is lost"):
            await ctx.ask([7], max_new_tokens=1)
