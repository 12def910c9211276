"""Many agents on few slots for a while: they feed, ask, reply, fork, undo, rewind, save, close and come back, are
cancelled in the middle, are refused slots and meet full disks. At the end every one of them holds what a replay of its
tokens gives, and nothing ever stalled.

    LOCRET_SOAK_S=900 LOCRET_SOAK_SEED=3 make test ARGS="-m slow -n 0 -s tests/context/test_soak.py"
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import random
import time
from pathlib import Path

import pytest

from locret_stream import LocretError, NoSlot, Runtime, SnapshotNotFound, Store, StoreError, StreamingContext
from locret_stream.context import saving
from locret_stream.runtime import sharing
from locret_stream.runtime.slots import Slots
from tests.context.support import CHUNK, expect_free, snap, unstarted
from tests.kit import assert_same

SECONDS, SEED = float(os.environ.get("LOCRET_SOAK_S", "60")), int(os.environ.get("LOCRET_SOAK_SEED", "1"))
STALLED_S = 30.0  # no call goes that long without a token; the slots' own deadline lies below


class Agent:
    """One session: what it did to it, and so what it must hold."""

    def __init__(self, runtime: Runtime, number: int, done: collections.Counter):
        self.runtime, self.name, self.done = runtime, f"agent {number}", done
        self.random = random.Random(1000 * SEED + number)
        self.ids: list[int] = []
        self.moves: collections.deque[str] = collections.deque(maxlen=8)  # the last ones
        self.past: list[list[int]] = [[]]  # what any of its snapshots may hold

    def fresh(self, most: int) -> list[int]:
        return [self.random.randrange(5, 470) for _ in range(self.random.randrange(1, most))]

    async def live(self, until: float) -> None:
        """Open, use, close, again and again."""
        while time.monotonic() < until:
            try:
                async with self.runtime.open(self.name, raw=True) as ctx:
                    self.find(ctx)
                    for _ in range(self.random.randrange(3, 25)):
                        if time.monotonic() < until:
                            await self.act(ctx)
                            self.check(ctx)
            except (NoSlot, StoreError) as error:
                assert "injected" in str(error), error
                self.done[f"raised: {error}"] += 1

    def find(self, ctx: StreamingContext) -> None:
        """After a close that failed, it rests where it was saved last: perhaps when it lost its slot amid a call."""
        at, history = ctx.memory.tokens, ctx._session.state.history
        if at != len(self.ids) or history != self.ids[-1024:]:
            [self.ids] = [past[:at] for past in self.past if past[:at][-1024:] == history and len(past) >= at][-1:]
        self.drop_held(ctx)
        self.past = [[*self.ids]]
        self.moves.append("open")

    def drop_held(self, ctx: StreamingContext) -> None:
        for queue in (ctx._session.buffered.ids, ctx._session.buffered.segments):
            queue.clear()

    def check(self, ctx: StreamingContext) -> None:
        assert ctx.memory.tokens == len(self.ids) and ctx._session.state.history == self.ids[-1024:], (
            f"{self.name} after {[*self.moves]}")
        self.past.append([*self.ids])
        self.past = self.past[-400:]

    async def act(self, ctx: StreamingContext) -> None:
        what = self.random.choice(list(self.MOVES))
        self.moves.append(what)
        before = len(self.ids)
        try:
            async with asyncio.timeout(STALLED_S) as limit:
                watching = asyncio.create_task(self.watch(ctx, limit))
                try:
                    await self.MOVES[what](self, ctx)
                finally:
                    watching.cancel()
            self.done[what] += 1
        except TimeoutError:
            raise AssertionError(f"{what} of {self.name} stalled at {ctx.memory.tokens} tokens, {before} before "
                                 f"it; swapped out: {ctx.swapped_out}") from None
        except (NoSlot, StoreError) as error:
            assert "injected" in str(error), error
            self.done[f"raised: {error}"] += 1
            self.moves.append("raised")
            if what in ("push", "cancelled feed", "reply", "kept turn"):
                self.learn(ctx, before)

    async def watch(self, ctx: StreamingContext, limit: asyncio.Timeout) -> None:
        """Long ones, with slots that are given up between two tokens, may take as long as they must on a busy machine,
        but each token is to come."""
        loop, seen = asyncio.get_running_loop(), ctx.memory.tokens
        while True:
            await asyncio.sleep(0.5)
            if not ctx.closed and ctx.memory.tokens != seen:
                seen = ctx.memory.tokens
                limit.reschedule(loop.time() + STALLED_S)

    def learn(self, ctx: StreamingContext, before: int) -> None:
        """What was accepted of a call that did not end; the rest is buffered, and dropped."""
        new = ctx.memory.tokens - before
        assert 0 <= new < 1000
        self.ids = self.ids[:before] + ctx._session.state.history[-new:] if new else self.ids[:before]
        self.drop_held(ctx)

    async def push(self, ctx: StreamingContext) -> None:
        new = self.fresh(6 * CHUNK)
        await ctx.push(new)
        self.ids += new

    async def cancelled_feed(self, ctx: StreamingContext) -> None:
        new, before = self.fresh(20 * CHUNK), len(self.ids)
        task = asyncio.create_task(ctx.feed(iter([new[at:at + 7] for at in range(0, len(new), 7)]))._drain())
        await self.cut(task)
        taken = ctx.memory.tokens - before
        self.ids += new[:taken]
        self.drop_held(ctx)

    async def cut(self, task: asyncio.Task) -> None:
        await asyncio.wait([task], timeout=self.random.random() * 0.05)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()

    async def reply(self, ctx: StreamingContext) -> None:
        before = len(self.ids)
        async for _ in ctx.generate([6, 7], max_new_tokens=self.random.randrange(1, 2 * CHUNK), ignore_eos=True,
                                    temperature=0.9, seed=self.random.randrange(100)):
            if self.random.random() < 0.05:
                break
        self.learn(ctx, before)

    async def ask(self, ctx: StreamingContext) -> None:
        task = asyncio.create_task(ctx.ask([8, 9], max_new_tokens=self.random.randrange(1, 9)))
        await (self.cut(task) if self.random.random() < 0.5 else task)

    async def side_calls(self, ctx: StreamingContext) -> None:
        """Several at once beside a push, as agents with guards and titles do."""
        new = self.fresh(3 * CHUNK)
        calls = [ctx.ask([8], max_new_tokens=2), ctx.ask([9], max_new_tokens=3), ctx.receipts(), ctx.push(new),
                 ctx.snapshot()]
        before = len(self.ids)
        done = await asyncio.gather(*calls, return_exceptions=True)
        self.learn(ctx, before)
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def snapshot(self, ctx: StreamingContext) -> None:
        self.saved = (await ctx.snapshot()).generation, [*self.ids]

    saved: tuple[int, list[int]] | None = None

    async def rewind(self, ctx: StreamingContext) -> None:
        if self.saved is not None:
            try:
                await ctx.rewind(self.saved[0])
                self.ids = [*self.saved[1]]
                self.drop_held(ctx)
            except SnapshotNotFound:  # newer ones took its place
                self.saved = None

    async def undone_turn(self, ctx: StreamingContext) -> None:
        try:
            async with ctx.turn():
                await ctx.push(self.fresh(4 * CHUNK))
                raise KeyError
        except KeyError:
            pass

    async def kept_turn(self, ctx: StreamingContext) -> None:
        new, before = self.fresh(4 * CHUNK), len(self.ids)
        try:
            async with ctx.turn():
                await ctx.push(new)
        except LocretError:
            assert ctx.memory.tokens == before, "a failed turn is undone"
            raise
        self.ids += new

    async def fork(self, ctx: StreamingContext) -> None:
        async with ctx.fork() as fork:
            new = self.fresh(2 * CHUNK)
            assert fork._session.state.history == self.ids[-1024:]
            await fork.push(new)
            assert fork._session.state.history == (self.ids + new)[-1024:]

    async def named_fork(self, ctx: StreamingContext) -> None:
        if self.random.random() < 0.2:
            async with ctx.fork(f"{self.name} {time.monotonic()}") as fork:
                await fork.push(self.fresh(CHUNK))

    async def rest(self, ctx: StreamingContext) -> None:
        await asyncio.sleep(self.random.random() * 0.1)

    MOVES = {"push": push, "cancelled feed": cancelled_feed, "reply": reply, "ask": ask, "side calls": side_calls,
             "snapshot": snapshot, "rewind": rewind, "undone turn": undone_turn, "kept turn": kept_turn, "fork": fork,
             "named fork": named_fork, "rest": rest}


def inject(monkeypatch: pytest.MonkeyPatch, chance: float) -> dict[str, float]:
    """Slots are refused and the store fails now and then; the chance may be changed."""
    at, dice = {"chance": chance}, random.Random(SEED)
    acquire, on = Slots.acquire, saving.storing_on

    async def refused(self: Slots, *arguments) -> int:
        if dice.random() < at["chance"]:
            raise NoSlot("injected: no slot")
        return await acquire(self, *arguments)

    async def failing(threads, work, *arguments):
        if getattr(work, "__name__", "") not in ("__exit__", "prune") and dice.random() < at["chance"] / 3:
            raise StoreError("injected: the disk is full")
        return await on(threads, work, *arguments)

    monkeypatch.setattr(Slots, "acquire", refused)
    monkeypatch.setattr(saving, "storing_on", failing)
    return at


@pytest.mark.slow
@pytest.mark.parametrize("agents, slots, chance, turn_s", [(24, 4, 0.0, 2.0), (24, 4, 0.02, 0.05), (100, 4, 0.01, 0.2)])
def test_many_agents_on_few_slots_hold_what_a_replay_gives(tmp_path: Path, monkeypatch, caplog, agents: int, slots: int,
                                                           chance: float, turn_s: float):
    """Every final memory, and every one that is stored, bit for bit; every slot is free again."""
    caplog.set_level(logging.ERROR)
    faults = inject(monkeypatch, chance)
    monkeypatch.setattr(sharing, "TURN_S", turn_s)
    done: collections.Counter = collections.Counter()

    async def main() -> None:
        store = Store(tmp_path, keep_last=3)
        async with unstarted(store=store, max_live=slots, scratch=2, slot_timeout_s=STALLED_S - 5) as runtime:
            everyone = [Agent(runtime, number, done) for number in range(agents)]
            until = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as group:
                for agent in everyone:
                    group.create_task(agent.live(until))
            expect_free(runtime)
            faults["chance"] = 0.0
            async with unstarted(max_live=1) as plain:
                for agent in everyone:
                    async with runtime.open(agent.name, raw=True) as ctx:
                        agent.find(ctx)
                        found = await snap(ctx, settle=False)
                    async with plain.open(raw=True) as fresh:
                        if agent.ids:
                            await fresh.feed(agent.ids)
                        assert_same(found.tensors, (await snap(fresh)).tensors)
            for one in store.list():
                assert (await runtime.replay(one.name)).differs == (), one.name
        assert not [one.problem for one in store.verify() if one.problem]

    asyncio.run(main())
    print(f"\n{agents} agents on {slots} slots, {SECONDS:g} s: {sum(done.values()):,} operations; {dict(done)}")
    assert all(done[what] for what in Agent.MOVES)
