"""A runtime whose exact units are in the host's memory: sessions, swaps, what they take, and the faces that set it."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from langchain_locret import LocretChatModel
from locret_stream import ConfigError, HostTier, SnapshotMismatch
from locret_stream.cli.options import RuntimeOptions, exact_of
from locret_stream.evaluation.cells import Cell, Origin, file_name, in_words
from locret_stream.evaluation.plan import Axes, planned
from locret_stream.runtime.as_saved import settings_of
from tests.cli.command import invoke
from tests.context.support import TEXT, expect_same, replies, settled, snap, tiny

TOLD = TEXT * 6
TIERS = [HostTier(units=4, residual=3), HostTier(units=4, residual=2, prefill="codes", chosen_by="guess"),
         HostTier(units=3, residual=0, chosen_by="last")]
CODES = HostTier(units=4, residual=3, prefill="codes", saves="codes")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.thorough(but=2)
def test_a_session_is_resumed_as_it_was(tmp_path: Path, tier: HostTier, bits: int):
    """In a new process, too: exact units are stored, and codes are made of them again."""
    async def main() -> None:
        async with tiny(store=tmp_path, store_bits=bits, exact=tier) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
            said, held = await replies(ctx), await snap(ctx)
        async with tiny(store=tmp_path, store_bits=bits, exact=tier) as runtime:
            found = settings_of(runtime.store.identity("a"))
            assert found["store_bits"] == (bits, bits) and found["exact"].prefill == tier.prefill
            async with runtime.open("a") as ctx:
                expect_same(settled(await snap(ctx)), settled(held))
                more = await replies(ctx)
            assert not (await runtime.replay("a")).differs
        async with tiny(store_bits=bits, exact=tier) as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            assert (await replies(ctx), await replies(ctx)) == (said, more)

    asyncio.run(main())


@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.thorough(but=1)
def test_a_session_that_is_saved_as_codes_takes_less_and_says_so(tmp_path: Path, bits: int):
    """What it commits is what it would commit if it had stayed open, over swaps, a fork and a restart."""
    told, sizes = [TOLD, TEXT, TOLD[:90]], {}

    async def saved(tier: HostTier, folder: Path) -> None:
        async with tiny(store_bits=bits, exact=tier) as alone, alone.open() as never:
            for number, part in enumerate(told):
                await never.feed(part)
                async with tiny(store=folder, store_bits=bits, exact=tier, autosave=False, max_live=1,
                                scratch=1) as runtime, runtime.open("a") as ctx:
                    rounded = ctx.memory.rounded
                    assert (rounded > 0) == (tier == CODES and number > 0)
                    await ctx.feed(part)
                    async with runtime.open("b") as other:  # which takes its slot meanwhile
                        await other.feed(TEXT)
                    expect_same(settled(await snap(ctx)), settled(await snap(never)))
                    assert (ctx.memory.rounded > rounded) == (tier == CODES)
                    done = await ctx.snapshot()
                    assert done.rounded == (tier == CODES)
                    sizes[tier] = done.bytes
            assert never.memory.rounded == 0
        async with tiny(store=folder, store_bits=bits, exact=tier) as runtime:
            assert settings_of(runtime.store.identity("a"))["exact"].saves == tier.saves
            assert {one.rounded for one in runtime.store.list()} == {tier == CODES}
            code, out, _ = invoke("snapshots", "list", "--store", folder)
            assert code == 0 and ("are rounded where it is opened" in out) == (tier == CODES)
            assert not (await runtime.replay("a")).differs
            async with runtime.open("a") as ctx, ctx.fork("c") as fork:
                assert fork.memory.rounded == ctx.memory.rounded
            assert await runtime.forget("a")

    asyncio.run(saved(CODES, tmp_path / "codes"))
    asyncio.run(saved(msgspec.structs.replace(CODES, saves="exact"), tmp_path / "exact"))
    assert sizes[CODES] < sizes[msgspec.structs.replace(CODES, saves="exact")]


@pytest.mark.parametrize(("first", "second"), [(None, "host"), ("host", None),
                                               ("host", HostTier(prefill="codes")),
                                               (HostTier(residual=4, prefill="codes"),
                                                HostTier(residual=4, prefill="codes", saves="codes"))])
def test_a_session_of_another_tier_is_refused_and_can_be_read_again(tmp_path: Path, first: Any, second: Any):
    async def main() -> None:
        async with tiny(store=tmp_path, store_bits=2, exact=first) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
        async with tiny(store=tmp_path, store_bits=2, exact=second) as runtime:
            with pytest.raises(SnapshotMismatch, match=r"other dtype: found float32, stored in 2 and 2 bits"):
                async with runtime.open("a"):
                    pass
            async with runtime.open("a", on_mismatch="rebuild") as ctx:
                again = await snap(ctx)
        async with tiny(store_bits=2, exact=second) as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            expect_same(settled(again), settled(await snap(ctx)))

    asyncio.run(main())


def test_sessions_that_share_a_slot_answer_as_if_alone(tmp_path: Path):
    """Swapped out between and inside their replies, which are read again from where they began."""
    async def alone(number: int) -> list[str]:
        async with tiny(store_bits=2, exact=TIERS[0]) as runtime, runtime.open() as ctx:
            return [await turn(ctx, number, step) for step in range(3)]

    async def turn(ctx: Any, number: int, step: int) -> str:
        await ctx.feed(TEXT * (number + 1))
        return "".join([token.text async for token in ctx.generate(max_new_tokens=9 + step)])

    async def together() -> list[list[str]]:
        async with tiny(store=tmp_path, store_bits=2, exact=TIERS[0], max_live=1, scratch=1) as runtime:
            contexts = [await runtime.open(str(number)).__aenter__() for number in range(3)]
            said = [[await turn(ctx, number, step) for number, ctx in enumerate(contexts)] for step in range(3)]
            for ctx in contexts:
                await ctx.__aexit__(None, None, None)
            return [[said[step][number] for step in range(3)] for number in range(3)]

    assert asyncio.run(together()) == [asyncio.run(alone(number)) for number in range(3)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.thorough(but=1)
def test_what_is_deleted_or_forgotten_leaves_no_file(tmp_path: Path, tier: HostTier):
    """Of a session with a fork: a snapshot that is deleted takes its pages with it, but for those that others need."""
    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    async def main() -> None:
        async with tiny(store=tmp_path, store_bits=2, exact=tier, autosave=False) as runtime:
            async with runtime.open("a") as ctx:
                await ctx.feed(TOLD)
                first = await ctx.snapshot()
                async with ctx.fork("b") as fork:
                    await fork.feed(TEXT)
                    await fork.snapshot()
                    forked = await snap(fork)
                await ctx.feed(TOLD)
                await replies(ctx)
                await ctx.snapshot()
                held = await snap(ctx)
            before = files()
            runtime.store.delete("a", first.generation)
            assert len(files()) < len(before)
            for name, expected in (("a", held), ("b", forked)):
                async with runtime.open(name) as ctx:
                    expect_same(settled(await snap(ctx)), settled(expected))
            runtime.store.delete("b")
            async with runtime.open("a") as ctx:
                expect_same(settled(await snap(ctx)), settled(held))
            assert await runtime.forget("a") and not files()

    asyncio.run(main())


def test_what_it_takes_is_told():
    """On the device less than exact units take, in the host's memory as much; and a budget in bytes is the device's."""
    async def taken(**options: Any) -> tuple[int, int, int]:
        async with tiny(budget="150KB", chunk_size=8, **options) as runtime:
            return sum(runtime.engine.budgets), runtime.memory.slot_bytes, runtime.memory.bytes_host

    exact, two = asyncio.run(taken()), asyncio.run(taken(store_bits=2, exact="host"))
    assert two[0] > 1.5 * exact[0] and exact[2] == 0 < two[2]
    assert 0.97 * 150_000 < two[1] <= 150_000


def test_faces_that_set_it():
    with pytest.raises(ConfigError, match="found --exact and no --store-bits below 16"):
        RuntimeOptions(exact="host")
    with pytest.raises(ConfigError, match="found --exact-units 8 without --exact host"):
        RuntimeOptions(store_bits="2", exact_units=8)
    assert exact_of("host", 8) == HostTier(units=8) and exact_of("host", None) == HostTier() and exact_of(
        None, None) is None
    with pytest.raises(ValueError, match="store_bits is 16"):
        LocretChatModel(exact="host")
    with pytest.raises(ConfigError, match=r"found --exact disk; expected host .*--exact-units"):
        RuntimeOptions(store_bits="2", exact="disk")
    for wrong, said in ("disk", "exact is 'disk'"), ({"unit": 3}, "exact has no setting 'unit'; expected of units, "):
        with pytest.raises(ValueError, match=said):
            LocretChatModel(store_bits=2, exact=wrong)
    given = ("host", HostTier(), None, HostTier(units=8))
    one, same, none, other = (LocretChatModel(store_bits=2, exact=tier) for tier in given)
    assert dict(one.shared.settings.options)["exact"] == HostTier() and one.shared is same.shared
    assert len({id(each.shared) for each in (one, none, other)}) == 3
    again = pickle.loads(pickle.dumps(other))
    assert again.exact == HostTier(units=8)


def test_cells_have_names_of_their_own():
    """Those without keep the names that they had; 16 bits beside fewer have no tier."""
    plain = Cell(task="recall", policy="h2o", length=512, units=48, store_bits=2)
    tiered = Cell(task="recall", policy="h2o", length=512, units=48, store_bits=2, exact=HostTier(units=8))
    origin = Origin(**dict.fromkeys(Origin.__struct_fields__, ""))
    assert file_name(plain, origin) != file_name(tiered, origin)
    assert "2 bits, with 8 of the host" in in_words(tiered) and "host" not in in_words(plain)
    cells = planned(Axes(tasks=("recall",), policies=("h2o",), budgets=(48,), lengths=(512,), store_bits=(16, 2),
                         exact=HostTier()))
    assert [(cell.store_bits, cell.exact) for cell in cells] == [(16, None), (2, HostTier())]
    with pytest.raises(ConfigError, match="store_bits is 16"):
        planned(Axes(tasks=("recall",), policies=("h2o",), budgets=(48,), lengths=(512,), exact=HostTier()))
