"""Eight sessions in two slots, used at once in any order: nothing stalls, and each is what its tokens alone give."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from locret_stream import Runtime, Store, StreamingContext
from tests.context.support import CHUNK, expect_free, model, snap, unstarted
from tests.kit import assert_same

SESSIONS, SLOTS = 8, 2
STALLED_S = 15  # all that one rule does takes a second or two
ACTIONS = ("feed", "hurry", "ask", "reply", "fork", "branch", "kept", "undone", "save", "rewind", "close")


class Undo(Exception):
    pass


@dataclass
class Agent:
    """One session, and what it must hold. Its actions follow each other; those of others run at the same time."""

    number: int
    ctx: StreamingContext | None = None
    ids: list[int] = field(default_factory=list)
    saved: dict[int, list[int]] = field(default_factory=dict)  # ids by snapshot
    made: int = 0  # how many ids it ever made

    def __post_init__(self) -> None:
        self.name, self.forks, self.doing = f"session {self.number}", 0, ""

    def more(self, count: int) -> list[int]:
        """Ids that no agent had before, as far as the vocabulary goes."""
        self.made += count
        return [3 + (self.number * 7919 + n * 31 + n * n) % (model().config.vocab_size - 3)
                for n in range(self.made - count, self.made)]

    async def do(self, runtime: Runtime, action: str, size: int) -> None:
        self.doing = action
        await self._do(runtime, action, size)
        self.doing = ""

    async def _do(self, runtime: Runtime, action: str, size: int) -> None:
        if self.ctx is None:
            ctx = runtime.open(self.name, raw=True)
            self.ctx = await ctx.__aenter__()
        ctx, ids = self.ctx, self.more(size)
        assert ctx.memory.tokens == len(self.ids), f"{self.name} before {action}"
        if action == "feed":
            await ctx.feed(ids)
            self.ids += ids
        elif action == "hurry":
            await cancelled(ctx.push(ids), after=size)
            await ctx.discard()
            assert ctx.memory.tokens >= len(self.ids)
            self.ids = (self.ids + ids)[:ctx.memory.tokens]
        elif action == "ask":
            await ctx.ask(ids[:CHUNK], max_new_tokens=3, ignore_eos=True)
        elif action == "reply":
            self.ids += ids + [token.id async for token in ctx.generate(ids, max_new_tokens=5, ignore_eos=True)]
        elif action in ("fork", "branch"):
            self.forks += 1
            async with ctx.fork(f"{self.name}, {self.forks}" if action == "branch" else None) as copy:
                await copy.feed(ids)
                await expect_replay(copy, self.ids + ids)
        elif action in ("kept", "undone"):
            with contextlib.suppress(Undo):
                async with ctx.turn():
                    await ctx.feed(ids)
                    if action == "undone":
                        raise Undo
                self.ids += ids
        elif action == "save":
            self.saved[(await ctx.snapshot()).generation] = list(self.ids)
        elif action == "rewind":
            number = [0, *self.saved][size % (1 + len(self.saved))]
            await ctx.rewind(number)
            self.ids = list(self.saved.get(number, []))
        else:
            await ctx.aclose()
            self.ctx = None


async def cancelled(work: Awaitable, *, after: int) -> None:
    """Cancel it once the loop has turned so many times."""
    async def main() -> None:
        await work

    task = asyncio.create_task(main())
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def expect_replay(ctx: StreamingContext, ids: list[int]) -> None:
    """Bit for bit what a context holds that these ids were fed to at once, in a runtime of its own."""
    async with unstarted(max_live=1) as alone, alone.open(raw=True) as fresh:
        if ids:
            await fresh.feed(ids)
        expected = (await snap(fresh)).tensors
    assert_same((await snap(ctx)).tensors, expected)


class Agents(RuleBasedStateMachine):
    """All of them at once, so that most wait for a slot; every slot belongs to a session that will be idle."""

    at_once = SESSIONS
    actions = ACTIONS
    recall = False
    failed: tuple[int, BaseException] | None = None  # in which call, and how: the machine is not run again to see it

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.folder, self.calls = asyncio.Runner(), tempfile.TemporaryDirectory(), 0
        self.store = Store(self.folder.name, keep_last=10_000)
        self.runtime = unstarted(store=self.store, max_live=SLOTS, scratch=1, slot_timeout_s=2 * STALLED_S,
                                 recall=self.recall)
        self.agents = [Agent(number) for number in range(SESSIONS)]
        self.run(self.runtime.__aenter__())

    def run(self, *works: Coroutine) -> None:
        """All of it at once; whatever fails or stalls ends the machine."""
        async def main() -> None:
            async with asyncio.timeout(STALLED_S), asyncio.TaskGroup() as group:
                for work in works:
                    group.create_task(work)

        self.calls += 1
        if self.failed is None:
            try:
                self.runner.run(main())
            except BaseException as error:
                if isinstance(error, TimeoutError):
                    error = AssertionError("stalled: " + ", ".join(
                        f"{agent.name} in {agent.doing!r}" for agent in self.agents if agent.doing))
                type(self).failed = self.calls, error
                raise error from None
            return
        for work in works:
            work.close()
        if self.calls == self.failed[0]:
            raise self.failed[1]

    @initialize(sizes=st.lists(st.integers(1, 3 * CHUNK), min_size=SESSIONS, max_size=SESSIONS))
    def one_after_another(self, sizes: list[int]) -> None:
        """All but the last two wait in the store then."""
        for agent, size in zip(self.agents, sizes, strict=True):
            self.run(agent.do(self.runtime, "feed", size))

    @rule(data=st.data(), agents=st.permutations(range(SESSIONS)))
    def at_the_same_time(self, data: st.DataObject, agents: list[int]) -> None:
        async def in_turn(agent: Agent, steps: list[tuple[str, int]]) -> None:
            for action, size in steps:
                await agent.do(self.runtime, action, size)

        several = st.lists(st.tuples(st.sampled_from(self.actions), st.integers(1, 3 * CHUNK)), min_size=1, max_size=3)
        steps = {number: data.draw(several, label=f"session {number}") for number in agents[:self.at_once]}
        self.run(*(in_turn(self.agents[number], some) for number, some in steps.items()))

    @rule(data=st.data(), size=st.integers(1, 3 * CHUNK))
    def all_alike(self, data: st.DataObject, size: int) -> None:
        action = data.draw(st.sampled_from(self.actions), label="action")
        for first in range(0, SESSIONS, self.at_once):
            self.run(*(agent.do(self.runtime, action, size) for agent in self.agents[first:first + self.at_once]))

    async def end(self) -> None:
        for agent in self.agents:
            if agent.ctx is not None:
                assert agent.ctx.memory.tokens == len(agent.ids)
                if self.recall:
                    await agent.ctx.recall("whatever")  # then its index is complete
                    seen = agent.ctx._session.state.seen
                    assert agent.ctx._session.index._index._ids_from(0) == agent.ids[:seen], agent.name
                await expect_replay(agent.ctx, agent.ids)
                await agent.ctx.aclose()
        expect_free(self.runtime)
        await self.runtime.aclose()

    def teardown(self) -> None:
        try:
            self.run(self.end())
            if self.failed is None:
                assert not [one.problem for one in self.store.verify() if one.problem]
        finally:
            if self.runtime.running:  # it failed, and may never close
                with contextlib.suppress(BaseException):
                    self.runner.run(asyncio.wait_for(self.runtime.aclose(), STALLED_S))
            self.runner.close()
            self.folder.cleanup()


class Pairs(Agents):
    """No more at once than there are slots: only those that need two have to wait."""

    at_once = SLOTS


class Recalling(Agents):
    """Questions and replies read again what has their words, and every index holds what its session was told."""

    recall = True


def run(machine: type[Agents], examples: int, steps: int) -> None:
    # Not made smaller: a stall takes its time, and threads make no two runs alike.
    run_state_machine_as_test(type(machine.__name__, (machine,), {}), settings=settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate], derandomize=True))


@pytest.mark.parametrize("machine", [Pairs, Agents, Recalling])
@pytest.mark.thorough(but=1)
def test_sessions_far_above_the_slots_never_stall_and_are_each_what_their_tokens_give(machine: type[Agents]):
    run(machine, examples=4, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Pairs, Agents, Recalling])
def test_sessions_far_above_the_slots_never_stall_in_long_runs(machine: type[Agents]):
    run(machine, examples=150, steps=12)
