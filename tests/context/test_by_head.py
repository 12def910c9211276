"""A runtime whose KV heads share the units of their layer: sessions, forks, swaps, and the faces that set it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from langchain_locret import LocretChatModel
from locret_stream import Budget, ConfigError, Runtime, SnapshotCorrupt, SnapshotMismatch, UnknownPolicy
from locret_stream.cache import NOWHERE
from locret_stream.cli.loading import runtime_options
from locret_stream.cli.options import RuntimeOptions
from locret_stream.evaluation.cells import Cell, Origin, file_name, in_words
from locret_stream.evaluation.plan import Axes, planned
from locret_stream.heads import RetainingHeads
from locret_stream.host_tier import HostTier
from locret_stream.models import attach
from locret_stream.runtime.as_saved import settings_of
from tests.context import support
from tests.context.support import TEXT, expect_same, replies, settled, snap, tiny
from tests.kit import random_heads

TOLD = TEXT * 6
SHARED = Budget(units=support.UNITS, sinks=support.SINKS, stabilizers=support.STABILIZERS, by_head=True)


def leaning() -> RetainingHeads:
    """Heads of which the first has the highest scores, and the lowest."""
    heads = random_heads(attach(support.model()))
    for weights in heads.fc2.parameters():
        weights.data[0] *= 4
    return heads


def shared(**options: Any) -> Any:
    return tiny(policy="locret", heads=leaning(), **{"budget": SHARED} | options)


@pytest.mark.parametrize("how", [{}, {"store_bits": 4}, {
    "store_bits": 2, "exact": HostTier(units=8, residual=4)}])
def test_a_session_is_resumed_forked_and_swapped_as_it_was(tmp_path: Path, how: dict[str, Any]):
    def by_head(**options: Any) -> Any:
        return shared(**how, **options)

    async def main() -> None:
        async with by_head(store=tmp_path) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
            said, held = await replies(ctx), await snap(ctx)
            memory = ctx.memory
            assert max(memory.units) <= support.UNITS and max(memory.peak) <= support.UNITS + support.CHUNK
            assert (held.tensors["0.positions"] == NOWHERE).any(), "the heads have different numbers"
        async with by_head(store=tmp_path, max_live=2) as runtime:
            assert settings_of(runtime.store.identity("a"))["budget"].by_head
            async with runtime.open("a") as ctx:
                expect_same(settled(await snap(ctx)), settled(held))
                async with ctx.fork("b") as fork:
                    async with runtime.open("c") as other:  # takes the slot of one of the two
                        await other.feed(TEXT)
                        await replies(other)
                    more = await replies(ctx)
                    assert await replies(fork) == more
            assert not (await runtime.replay("a")).differs
        async with by_head() as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            assert (await replies(ctx), await replies(ctx)) == (said, more)

    asyncio.run(main())


def test_another_division_is_refused_and_can_be_read_again(tmp_path: Path):
    async def main() -> None:
        equal = Budget(units=support.UNITS, sinks=support.SINKS, stabilizers=support.STABILIZERS)
        async with shared(store=tmp_path, budget=equal) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
        async with shared(store=tmp_path) as runtime:
            with pytest.raises(SnapshotMismatch, match=r"other budgets: .*shared by heads"):
                async with runtime.open("a"):
                    pass
            async with runtime.open("a", on_mismatch="rebuild") as ctx:
                again = await snap(ctx)
        async with shared() as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            expect_same(settled(again), settled(await snap(ctx)))

    asyncio.run(main())


def test_a_changed_byte_is_noticed(tmp_path: Path):
    async def told() -> None:
        async with shared(store=tmp_path) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)

    async def refused() -> None:
        async with shared(store=tmp_path) as runtime:
            with pytest.raises(SnapshotCorrupt):
                async with runtime.open("a"):
                    pass

    asyncio.run(told())
    pages = [path for path in tmp_path.rglob("*") if path.is_file() and "page" in str(path)]
    assert pages
    for path in pages:
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        asyncio.run(refused())
        path.write_bytes(whole)


def test_a_runtime_beside_shares_where_its_policy_can():
    async def main() -> None:
        async with shared() as runtime:
            for policy, shares in (("h2o", True), ("tova", False), ("locret", True)):
                async with runtime.beside(policy) as other:
                    assert other.engine.config.budget.by_head == shares
                    async with other.open() as ctx:
                        await ctx.feed(TEXT)

    asyncio.run(main())


def test_a_runtime_beside_of_an_unknown_policy_says_so():
    async def main() -> None:
        async with shared() as runtime:
            with pytest.raises(UnknownPolicy, match="locrat"):
                runtime.beside("locrat")

    asyncio.run(main())


def loads() -> Any:
    raise AssertionError("what cannot work is refused before anything is loaded")


def test_the_faces_set_it():
    assert runtime_options(RuntimeOptions(by_head=True))["by_head"]
    assert LocretChatModel(by_head=True).shared.settings.options
    with pytest.raises(ConfigError, match="beside a Budget"):
        Runtime(loads, loads, budget=SHARED, by_head=True)
    for policy in ("tova", "full"):
        with pytest.raises(ConfigError, match=f"policy '{policy}'"):
            Runtime(loads, loads, policy=policy, by_head=True)
    guessing: dict[str, Any] = {"store_bits": 2, "exact": HostTier(chosen_by="guess")}
    for refused in (lambda: Runtime(loads, loads, by_head=True, **guessing), lambda: Runtime(
            loads, loads, budget=SHARED, **guessing), lambda: LocretChatModel(by_head=True, **guessing)):
        with pytest.raises(ValueError, match=r"chosen_by is 'guess'.*expected chosen_by='query'"):
            refused()
    for of in (lambda: Budget(units=8, by_head="yes"), lambda: LocretChatModel(by_head="host")):
        with pytest.raises(ValueError, match="by_head"):
            of()
    with pytest.raises(ConfigError, match="by_head is 'yes'"):
        Runtime(support.model(), support.tokenizer(), by_head="yes")


def test_a_cell_of_it_has_a_name_of_its_own():
    cells = planned(Axes(tasks=("recall",), policies=("locret", "tova"), budgets=(64,), lengths=(512,), questions=8,
                         heads={"locret": ("somewhere",)}, store_bits=(16, 4), by_head=True))
    assert [(cell.policy, cell.store_bits, cell.by_head) for cell in cells] == [
        ("locret", 16, True), ("locret", 4, True), ("tova", 16, False), ("tova", 4, False)]
    origin = Origin(weights="", tokenizer="", heads="", text="", tasks=1)
    shared, equal = (Cell(task="recall", policy="locret", length=1024, units=64, by_head=by) for by in (True, False))
    assert file_name(shared, origin) != file_name(equal, origin)
    assert "by head" in in_words(shared) and "by head" not in in_words(equal)


def test_a_session_whose_focus_was_taken_back_is_replayed_as_it_was(tmp_path: Path):
    async def main() -> None:
        async with shared(store=tmp_path) as runtime:
            async with runtime.open("a", raw=True) as ctx:
                await ctx.feed(TOLD)
                while ctx.memory.tokens % support.CHUNK in (0, support.CHUNK - 1):
                    await ctx.feed("x")
                await ctx.focus("falcon")
                await ctx.focus(None)
            assert not (await runtime.replay("a")).differs

    asyncio.run(main())
