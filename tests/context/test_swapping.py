"""Many contexts on few slots. Two promises: no interleaving of calls stalls, and whatever a context went through, was
refused or failed in midway, it holds what a replay of its tokens gives."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from locret_stream import NoSlot, Runtime, Store, StoreError, StreamingContext
from locret_stream.context import saving
from locret_stream.context.session_state import SessionState
from locret_stream.runtime import sharing, slots
from locret_stream.runtime.slots import Slots
from tests.context.support import (
    CHUNK,
    TEXT,
    cut_at_every_await,
    expect_free,
    expect_replay,
    expect_same,
    ids_in,
    ids_of,
    replies,
    settled,
    snap,
    tiny,
)
from tests.processes import run_python


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 (no event says it)
            await asyncio.sleep(0.001)


# -- nothing stalls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [1, 2])
@pytest.mark.thorough(but=1)
async def test_forks_asks_and_turns_of_many_contexts_on_few_slots_never_stall(tmp_path: Path, live: int):
    """All at once, each with a fork whose origin has to leave its slot for it."""
    async with tiny(store=tmp_path, max_live=live) as runtime, tiny(max_live=2) as plain, AsyncExitStack() as stack:
        contexts = [await stack.enter_async_context(runtime.open(f"c{n}", raw=True)) for n in range(8)]

        async def use(number: int, ctx: StreamingContext) -> None:
            given: list[int] = []
            for step in range(3):
                new = ids_of(number, 11, 40 * step)
                await ctx.push(new)
                given += new
                async with ctx.fork() as fork:
                    await fork.push(ids_of(number, 9, 7))
                    assert ids_in(fork) == given + ids_of(number, 9, 7)
                await ctx.ask([6, 7], max_new_tokens=2)
                with pytest.raises(KeyError):
                    async with ctx.turn():
                        await ctx.push(ids_of(number, 2 * CHUNK + 3, 90))
                        raise KeyError
                assert ids_in(ctx) == given

        async with asyncio.timeout(40):
            await asyncio.gather(*(use(number, ctx) for number, ctx in enumerate(contexts)))
        for ctx in contexts:
            await expect_replay(ctx, plain)


async def test_a_call_that_waits_gets_the_slot_of_a_context_that_becomes_idle(tmp_path: Path, monkeypatch):
    """Not only of a context that is idle when the wait begins; and at once, not after `LOOK_AGAIN_S`."""
    monkeypatch.setattr(slots, "LOOK_AGAIN_S", 30.0)
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=20) as runtime, runtime.open("a", raw=True) as ctx:
        feed = ctx.feed(iter([[7]] * 50))
        await anext(feed)
        opening = asyncio.create_task(runtime.open("b").__aenter__())
        await until(lambda: runtime.slots.live.waiting == 1)
        await asyncio.sleep(0.01)
        assert not opening.done(), "the feed is at work"
        await feed.aclose()
        async with asyncio.timeout(5):
            other = await opening
        assert ctx.swapped_out
        await other.aclose()


async def test_a_context_that_is_used_all_the_time_gives_others_a_turn(tmp_path: Path, monkeypatch):
    """Endless feeds, more than there are slots: each of them goes on, and holds what a replay gives."""
    monkeypatch.setattr(sharing, "TURN_S", 0.02)
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny(max_live=1) as plain:
        moved = [0, 0, 0]

        async def endless(number: int) -> None:
            async with runtime.open(f"c{number}", raw=True) as ctx:
                async for _ in ctx.feed(iter([[token] for token in ids_of(number, 900)])):
                    moved[number] += 1
                    if min(moved) >= 40:
                        break
                await expect_replay(ctx, plain)

        async with asyncio.timeout(40):
            await asyncio.gather(*(endless(number) for number in range(3)))


@pytest.mark.thorough
async def test_a_reply_goes_on_where_it_was_when_others_had_a_turn_in_between(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sharing, "TURN_S", 0.0)
    async with tiny(store=tmp_path, max_live=1, scratch=1) as runtime, tiny(max_live=1) as plain:
        async def said(of: Runtime, number: int, name: str | None) -> list[int]:
            async with of.open(name) as ctx:
                await ctx.feed(f"number {number}. {TEXT}")
                return [token.id async for token in ctx.generate("So?", max_new_tokens=12, ignore_eos=True, seed=3,
                                                                 temperature=0.8)]

        expected = [await said(plain, number, None) for number in range(3)]
        async with asyncio.timeout(40):
            found = await asyncio.gather(*(said(runtime, number, f"c{number}") for number in range(3)))
        assert found == expected


async def test_a_fault_in_one_context_is_not_that_of_another(tmp_path: Path, monkeypatch):
    async def faulty(session: object) -> None:
        raise AssertionError("injected: a fault of no documented kind")

    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.5, autosave=False) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            with monkeypatch.context() as patch:
                patch.setattr(saving, "save", faulty)
                with pytest.raises(NoSlot):
                    await runtime.open("b").__aenter__()
            async with runtime.open("b", raw=True) as other:
                await other.push(ids_of(2, CHUNK))
            assert ctx.memory.tokens == CHUNK + 2


async def test_a_context_that_cannot_be_saved_keeps_its_slot_and_is_rarely_tried(tmp_path: Path, monkeypatch):
    """One try each time that its turn is over, whatever it is used for meanwhile."""
    monkeypatch.setattr(sharing, "TURN_S", 0.2)
    tries, loop = [], asyncio.get_running_loop()

    async def full(session: object) -> None:
        tries.append(loop.time())
        raise StoreError("injected: the disk is full")

    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=1, autosave=False) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 2))
            monkeypatch.setattr(saving, "save", full)
            opening = asyncio.create_task(runtime.open("b").__aenter__())
            steps = 0
            while not opening.done():
                await ctx.receipts()
                steps += 1
            with pytest.raises(NoSlot):
                await opening
            assert not ctx.swapped_out and 1 <= len(tries) <= 1 / 0.2 + 3 < steps


async def test_asking_saving_undoing_and_closing_wait_for_no_live_slot(tmp_path: Path):
    """Each of a context that waits in the store, while another is at work in the only slot."""
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.1) as runtime, tiny() as other, other.open() as plain:
        ctx = await runtime.open("a").__aenter__()
        for one in (ctx, plain):
            await one.feed(TEXT)
        async with runtime.open("b", raw=True) as busy:
            feed = busy.feed(iter([[7]] * 50))
            await anext(feed)
            assert ctx.swapped_out
            assert await ctx.ask("?", max_new_tokens=4) == await plain.ask("?", max_new_tokens=4)
            with pytest.raises(KeyError):
                async with ctx.turn():
                    await ctx.push([9, 10])
                    raise KeyError
            before = ctx.memory.tokens
            await ctx.push([9])  # fits the chunk, so that it is only accepted
            assert before + 1 == ctx.memory.tokens and ctx.swapped_out
            await ctx.snapshot()
            await ctx.push([10])
            await plain.push([9, 10])
            assert ctx.unsaved and ctx.swapped_out
            await ctx.aclose()
            await feed.aclose()
        async with runtime.open("a") as ctx:
            expect_same(settled(await snap(ctx)), settled(await snap(plain)))


async def test_turns_never_wait_for_each_others_slots(tmp_path: Path):
    """One is in the only live slot and comes to its first commit; so does the other, which is swapped out. A turn that
    had the only scratch slot and no live one would wait for ever."""
    async with tiny(store=tmp_path, max_live=1, scratch=1, slot_timeout_s=20) as runtime:
        async with runtime.open("a", raw=True) as one, runtime.open("b", raw=True) as other:
            for ctx in (one, other):
                await ctx.push(ids_of(1, CHUNK))
            assert one.swapped_out
            one._session.accept(ids_of(5, CHUNK))  # as a reply's end does: the chunk waits for the next call
            async with asyncio.timeout(10):
                async def turn(ctx: StreamingContext) -> None:
                    async with ctx.turn():
                        await ctx.push(ids_of(2, 2 * CHUNK))

                late = other.turn()
                await late.__aenter__()  # it stays in its slot from here on
                first = asyncio.create_task(turn(one))
                await until(lambda: runtime.slots.live.waiting == 1 or runtime.slots.scratch.free == 0)
                await other.push(ids_of(3, 2 * CHUNK))
                await late.__aexit__(None, None, None)
                await first


async def test_a_turn_is_undone_where_every_slot_is_refused(tmp_path: Path):
    """Its own commit was refused one; undoing it asks for none."""
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.1) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 3))
        before = await snap(ctx)
        async with runtime.open("b", raw=True) as busy:
            feed = busy.feed(iter([[7]] * 50))
            await anext(feed)
            with pytest.raises(NoSlot):
                async with ctx.turn():
                    await ctx.push(ids_of(2, 3 * CHUNK))
            assert ids_in(ctx) == ids_of(1, CHUNK + 3)
            await feed.aclose()
        expect_same(await snap(ctx), before)
        await ctx.push([9])


async def test_a_refused_slot_leaves_the_rest_buffered_and_no_chunk_half_accepted(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=0.1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, CHUNK + 3))
            async with runtime.open("b", raw=True) as busy:
                feed = busy.feed(iter([[7]] * 50))
                await anext(feed)
                with pytest.raises(NoSlot):
                    await ctx.push(ids_of(2, 3 * CHUNK))
                assert ids_in(ctx) + [*ctx._session.buffered.ids] == ids_of(1, CHUNK + 3) + ids_of(2, 3 * CHUNK)
                assert ctx.memory.pending < CHUNK
                await feed.aclose()
            assert await ctx.flush() == 3 * CHUNK
            await expect_replay(ctx, plain)


# -- the same tokens, the same memory -----------------------------------------------------------------------------


async def test_a_chunk_that_was_pending_when_it_was_saved_and_committed_since_is_saved_again(tmp_path: Path):
    """As many tokens, other units: swapped out without saving, it would be swapped in as something else."""
    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 2 * CHUNK))
            ctx._session.accept(ids_of(2, CHUNK))  # as a reply's last literals, which complete a chunk
            await ctx.snapshot()
            await ctx.flush()
            async with runtime.open("b"):
                assert ctx.swapped_out
            await expect_replay(ctx, plain)
            async with runtime.open("b"):
                await ctx.snapshot()
        async with runtime.open("a", raw=True) as ctx:
            await expect_replay(ctx, plain)


async def test_what_is_accepted_while_a_swap_out_clears_older_snapshots_away_is_kept(tmp_path: Path, monkeypatch):
    """Its snapshot is written and has none of it."""
    real = saving.prune

    async def prune(session: SessionState) -> None:
        monkeypatch.setattr(saving, "prune", real)
        await ctx.push(ids_of(2, 2 * CHUNK))
        await real(session)

    async with tiny(store=tmp_path, max_live=1) as runtime, tiny() as plain, runtime.open("a", raw=True) as ctx:
        await ctx.push(ids_of(1, CHUNK + 3))
        monkeypatch.setattr(saving, "prune", prune)
        async with runtime.open("b"):
            assert ctx.swapped_out and saving.prune is real
        await ctx.push(ids_of(3, CHUNK))
        assert ids_in(ctx) == ids_of(1, CHUNK + 3) + ids_of(2, 2 * CHUNK) + ids_of(3, CHUNK)
        await expect_replay(ctx, plain)


async def test_an_opened_session_has_no_whole_chunk_pending(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 2 * CHUNK))
            ctx._session.accept(ids_of(2, CHUNK))
        async with runtime.open("a", raw=True) as ctx:
            assert (ctx.memory.tokens, ctx.memory.pending) == (3 * CHUNK, 0)
            await expect_replay(ctx, plain)


@pytest.mark.thorough
async def test_a_copy_of_a_context_that_is_swapped_meanwhile_is_of_one_moment(tmp_path: Path):
    """It is swapped out; while it is copied another task feeds it, so that it is swapped in."""
    async with tiny(store=tmp_path, max_live=2) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(ids_of(1, 3 * CHUNK + 2))
            for round in range(12):
                assert await ctx.swap_out()
                more = ids_of(2 + round, 2 * CHUNK + 1)
                before = ids_in(ctx)
                async with ctx.fork() if round % 2 else ctx.fork(f"fork {round}") as fork:
                    feeding = asyncio.create_task(ctx.push(more))
                    found = ids_in(fork)
                    assert found == before
                    await expect_replay(fork, plain)
                    await feeding

                async def copied() -> None:
                    async with ctx.fork() as fork:
                        await expect_replay(fork, plain)

                await ctx.swap_out()
                async with asyncio.TaskGroup() as group:
                    for work in (copied(), ctx.push([5, 6]), ctx.ask([7], max_new_tokens=2), ctx.snapshot(), copied()):
                        group.create_task(work)
                await expect_replay(ctx, plain)


# -- faults at every place ----------------------------------------------------------------------------------------


class Walk:
    """Contexts that go through every operation, and what each must hold."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.failed: list[str] = []

    async def one(self, what: str, work: Awaitable) -> bool:
        try:
            await work
            return True
        except (NoSlot, StoreError) as error:
            assert "injected" in str(error), f"{what}: {error}"
            self.failed.append(what)
            return False

    async def go(self) -> dict[str, list[int]]:
        """What each session holds at the end, after every one of them was closed."""
        given: dict[str, list[int]] = {}
        async with AsyncExitStack() as stack:
            contexts: dict[str, StreamingContext] = {}
            for name in "ab":
                ctx = self.runtime.open(name, raw=True)
                for _ in range(3):
                    if await self.one(f"open {name}", ctx.__aenter__()):
                        break
                contexts[name], given[name] = ctx, []
                stack.push_async_callback(self.close, ctx, name)
            for turn in range(2):
                for number, ctx in enumerate(contexts.values()):
                    await self.use(ctx, number + 10 * turn, given)
        return given

    async def close(self, ctx: StreamingContext, name: str) -> None:
        await self.one(f"close {name}", ctx.aclose())

    async def push(self, ctx: StreamingContext, ids: list[int], given: list[int]) -> None:
        await self.one(f"push {ctx.name}", ctx.push(ids))
        given += ids
        self.check(ctx, given)

    def check(self, ctx: StreamingContext, given: list[int]) -> None:
        buffered = ctx._session.buffered
        rest = [*buffered.ids, *(token for part in buffered.segments for token in part)]
        assert ids_in(ctx) + rest == given, "nothing is lost, nothing is accepted twice"

    async def use(self, ctx: StreamingContext, number: int, everything: dict[str, list[int]]) -> None:
        given = everything[ctx.name]
        await self.push(ctx, ids_of(number, 2 * CHUNK + 5), given)
        if await self.one(f"snapshot {ctx.name}", ctx.snapshot()):
            assert not ctx.unsaved
        saved, at = ctx._session.branch.head, [*given]
        complete = not ctx._session.buffered.size and not ctx.unsaved

        async def undone(fails: bool) -> None:
            async with ctx.turn():
                await ctx.push(ids_of(number, 2 * CHUNK, 50))
                if fails:
                    raise OnPurpose

        before = ids_in(ctx), [*ctx._session.buffered.ids]
        await self.one(f"turn {ctx.name}", on_purpose(undone(fails=True)))
        assert (ids_in(ctx), [*ctx._session.buffered.ids]) == before, "a failed turn is undone"
        if await self.one(f"turn kept {ctx.name}", undone(fails=False)):
            given += ids_of(number, 2 * CHUNK, 50)
        self.check(ctx, given)
        await self.one(f"ask {ctx.name}", ctx.ask([7, 8], max_new_tokens=2))
        self.check(ctx, given)

        async def forked(name: str | None) -> None:
            async with ctx.fork(name) as fork:
                self.check(fork, given)
                await fork.push(ids_of(number, CHUNK, 200))

        await self.one(f"fork {ctx.name}", forked(None))
        await self.one(f"named fork {ctx.name}", forked(f"{ctx.name} {number}"))
        self.check(ctx, given)

        async def reply() -> None:
            async for _ in ctx.generate([9], max_new_tokens=CHUNK, ignore_eos=True):
                pass

        await self.one(f"reply {ctx.name}", reply())
        now = ids_in(ctx) + [*ctx._session.buffered.ids]
        assert now[:len(given)] == given
        given[:] = now
        if complete and await self.one(f"rewind {ctx.name}", ctx.rewind(saved)):
            given[:] = at
        self.check(ctx, given)


class OnPurpose(Exception):
    """What a turn is undone for."""


async def on_purpose(work: Awaitable) -> None:
    try:
        await work
    except OnPurpose:
        return
    raise AssertionError("the turn went on")


async def walk(folder: Path) -> Walk:
    """A walk through everything on one slot; at its end every session holds what a replay of its tokens gives."""
    async with tiny(store=folder, max_live=1) as runtime, tiny() as plain:
        walked = Walk(runtime)
        async with asyncio.timeout(40):
            given = await walked.go()
        expect_free(runtime)
        walked.quiet()
        for name, ids in given.items():
            async with runtime.open(name, raw=True) as ctx:
                buffered = ctx._session.buffered
                found = ids_in(ctx) + [*buffered.ids, *(t for part in buffered.segments for t in part)]
                if f"close {name}" not in walked.failed:
                    assert found == ids, name
                await ctx.flush()
                await expect_replay(ctx, plain)
        assert not [one.problem for one in runtime.store.verify() if one.problem]
        return walked


async def places(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                 inject: Callable[[Callable[[], bool]], None], every: int = 1) -> int:
    """Walk once to count the places that `inject` names, and then once for every n-th of them with a fault there."""
    count, at = 0, -1

    def fails_now() -> bool:
        nonlocal count
        count += 1
        return count == at

    quiet = False

    def place() -> bool:
        return not quiet and fails_now()

    def silence(self: Walk) -> None:
        nonlocal quiet
        quiet = True

    monkeypatch.setattr(Walk, "quiet", silence, raising=False)
    inject(place)
    walked = await walk(folder / "0")
    assert not walked.failed
    total = count
    for at in range(total, 0, -every):
        count, quiet = 0, False
        caplog.clear()
        walked = await walk(folder / str(at))
        reported = walked.failed or [r for r in caplog.records if "could not be swapped out" in r.getMessage()]
        assert reported, f"the fault at place {at} was neither raised nor logged"
    return total


def no_slot(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    def inject(fails: Callable[[], bool]) -> None:
        real = Slots.acquire

        async def acquire(self: Slots, timeout_s: float, what: str, *rest) -> int:
            if fails():
                raise NoSlot(f"injected: no {what} slot")
            return await real(self, timeout_s, what, *rest)

        monkeypatch.setattr(Slots, "acquire", acquire)
    return inject


def no_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    def inject(fails: Callable[[], bool]) -> None:
        real = saving.storing_on

        async def failing(threads, work, *arguments):
            if getattr(work, "__name__", "") not in ("__exit__", "prune") and fails():
                raise StoreError("injected: the disk is full")
            return await real(threads, work, *arguments)

        monkeypatch.setattr(saving, "storing_on", failing)
    return inject


EVERY = [pytest.param(9, id="some places"), pytest.param(1, id="any place", marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.thorough
async def test_a_slot_refused_anywhere_leaves_what_a_replay_gives(tmp_path: Path, monkeypatch, caplog, every: int):
    assert await places(tmp_path, monkeypatch, caplog, no_slot(monkeypatch), every) > 10


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.thorough
async def test_a_store_that_fails_anywhere_leaves_what_a_replay_gives(tmp_path: Path, monkeypatch, caplog, every: int):
    assert await places(tmp_path, monkeypatch, caplog, no_store(monkeypatch), every) > 60


async def _fork(ctx: StreamingContext, name: str | None = None) -> None:
    async with ctx.fork(name):
        pass


async def _turn(ctx: StreamingContext) -> None:
    async with ctx.turn():
        await ctx.push(ids_of(3, CHUNK))
        raise OnPurpose


MOVES: dict[str, Callable[[StreamingContext, int], Awaitable]] = {
    "push": lambda ctx, n: ctx.push(ids_of(2, CHUNK)),
    "reply": lambda ctx, n: replies(ctx, 2),
    "ask": lambda ctx, n: ctx.ask([7], max_new_tokens=1),
    "fork": lambda ctx, n: _fork(ctx),
    "named fork": lambda ctx, n: _fork(ctx, f"fork {n}"),
    "undone turn": lambda ctx, n: on_purpose(_turn(ctx)),
    "snapshot": lambda ctx, n: ctx.snapshot(),
    "rewind": lambda ctx, n: ctx.rewind(2),  # 1 is of a swap-out before anything was fed
    "swap out": lambda ctx, n: ctx.swap_out(),
    "receipts": lambda ctx, n: ctx.receipts(),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.thorough(but=2)
async def test_a_swapped_out_context_cancelled_at_any_await_is_a_replay(tmp_path: Path, move: str):
    """Two contexts on one slot; whatever is cut off midway, both hold what their tokens give and no slot is lost."""
    async with tiny(store=Store(tmp_path, keep_last=1000), max_live=1) as runtime, tiny() as plain:
        async with runtime.open("a", raw=True) as ctx, runtime.open("b", raw=True) as other:
            for number, one in enumerate((ctx, other)):
                await one.push(ids_of(number, 2 * CHUNK + 3))
                await one.snapshot()
            count = 0

            async def run(guard) -> None:
                nonlocal count
                count += 1
                await other.push([5])
                if not ctx.swapped_out:
                    await ctx.swap_out()
                await other.receipts()
                if move == "swap out":
                    await ctx.receipts()
                    await ctx.push([6])
                before = ids_in(ctx) + [*ctx._session.buffered.ids]
                cut = await guard(MOVES[move](ctx, count))
                now = ids_in(ctx) + [*ctx._session.buffered.ids]
                if move in ("push", "reply", "rewind"):
                    assert now == before or (now == ids_of(0, 2 * CHUNK + 3) if move == "rewind" else
                                             now[:len(before)] == before)
                else:
                    assert now == before
                assert cut or move != "rewind" or now == ids_of(0, 2 * CHUNK + 3)
                for one in (ctx, other):
                    assert one._session.busy is None
                    await one.flush()
                    await expect_replay(one, plain)
                expect_free(runtime, taken=1)

            assert await cut_at_every_await(run) >= 1
        async with runtime.open("a", raw=True) as ctx:
            await expect_replay(ctx, plain)


# -- what is dropped ----------------------------------------------------------------------------------------------


async def test_a_context_that_is_dropped_unclosed_gives_its_slot_back_and_warns(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=1, slot_timeout_s=5) as runtime:
        for name in (None, "a"):
            ctx = await runtime.open(name, raw=True).__aenter__()
            await ctx.push(ids_of(1, 3 * CHUNK))
            with pytest.warns(ResourceWarning, match=r"dropped and never closed.*expected `async with"):
                del ctx
                gc.collect()
            async with runtime.open(raw=True) as fresh:
                await fresh.push([7])
        async with runtime.open("a", raw=True) as ctx:
            assert ctx.memory.tokens == 0, "nothing of it was saved"


async def test_a_context_that_is_dropped_in_the_middle_of_a_feed_keeps_its_slot_to_its_end(tmp_path: Path):
    """A reference to the iterator keeps the memory that it feeds."""
    async with tiny(max_live=1, slot_timeout_s=0.1) as runtime:
        feed = (await runtime.open(raw=True).__aenter__()).feed(iter([[7]] * 50))
        gc.collect()
        for _ in range(2 * CHUNK):
            await anext(feed)
        with pytest.raises(NoSlot):
            await runtime.open().__aenter__()
        with pytest.warns(ResourceWarning):
            del feed
            gc.collect()
        async with runtime.open():
            pass


COLLECTING = """
import asyncio
from locret_stream.runtime.slots import Slots, _Request

begin, slots = _Request.__init__, Slots([])

def collect(self, loop):
    begin(self, loop)
    slots.give_back(0)

async def main():
    _Request.__init__ = collect
    print(await slots.acquire(5, "live"))
    _Request.__init__ = begin
    waiting = [asyncio.create_task(slots.acquire(5, "live")) for _ in range(4)]
    await asyncio.sleep(0)
    first, second, third, _ = slots._waiting
    first.slot.add_done_callback(lambda _: slots.give_back(2))
    slots.give_back(1)
    third.nudged.add_done_callback(lambda _: slots.give_back(3))
    slots.nudge()
    with slots._lock:
        slots.give_back(4)
    print(*await asyncio.gather(*waiting), slots.waiting, slots.free)

asyncio.run(main())
"""


@pytest.mark.thorough
def test_a_slot_that_a_finaliser_gives_back_is_given_on():
    """The garbage collector runs one at any moment: while a call asks for a slot, and while another is given one."""
    done = run_python("-c", COLLECTING, timeout_s=120)
    assert done.stdout == "0\n1 2 3 4 0 0\n", done.stderr


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("first", ["given", "cancelled"])
async def test_a_call_that_is_cancelled_just_as_it_is_given_its_slot_gives_it_back(first: str):
    slots = Slots([3])
    slot = await slots.acquire(20, "live")
    waiting = asyncio.create_task(slots.acquire(20, "live"))
    await until(lambda: slots.waiting == 1)
    for step in (first, "cancelled" if first == "given" else "given"):
        if step == "given":
            slots.give_back(slot)
        else:
            waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (slots.free, slots.waiting) == (1, 0)


async def test_a_context_that_is_dropped_gives_its_slot_back_though_warnings_are_errors(
        monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(str(raised.exc_value)))
    async with tiny(max_live=1, slot_timeout_s=5) as runtime:
        ctx = await runtime.open(raw=True).__aenter__()
        await ctx.push([5, 6, 7])
        del ctx
        gc.collect()
        assert len(told) == 1 and "dropped and never closed" in told[0]
        async with runtime.open(raw=True) as fresh:
            assert await fresh.push([7]) == 1
