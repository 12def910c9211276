"""A runtime whose committed units are codes: sessions, swaps and forks, budgets in bytes, and the faces that set it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_locret import LocretChatModel
from locret_stream import ConfigError, HeadsMismatch, Runtime, SnapshotMismatch
from locret_stream.evaluation.cells import Cell, Origin, file_name, in_words
from locret_stream.evaluation.variants import labels
from locret_stream.heads import RetainingHeads
from locret_stream.models import attached
from tests.context.support import TEXT, expect_same, model, replies, settled, snap, tiny, tokenizer
from tests.kit import random_heads

TOLD = TEXT * 6


@pytest.mark.parametrize("bits", [8, 4, (8, 4), (16, 4)])
@pytest.mark.thorough(but=1)
def test_a_session_is_resumed_as_it_was(tmp_path: Path, bits: Any):
    async def main() -> None:
        async with tiny(store=tmp_path, store_bits=bits) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
            said, held = await replies(ctx), await snap(ctx)
        async with tiny(store=tmp_path, store_bits=bits) as runtime:
            async with runtime.open("a") as ctx:
                expect_same(settled(await snap(ctx)), settled(held))
                more = await replies(ctx)
            assert not (await runtime.replay("a")).differs
        async with tiny(store_bits=bits) as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            assert (await replies(ctx), await replies(ctx)) == (said, more)

    asyncio.run(main())


@pytest.mark.parametrize(("first", "second"), [(4, 8), (4, 16), (16, 8), ((8, 4), (4, 8))])
@pytest.mark.thorough(but=1)
def test_a_session_of_other_bits_is_refused_and_can_be_read_again(tmp_path: Path, first: Any, second: Any):
    async def main() -> None:
        async with tiny(store=tmp_path, store_bits=first) as runtime, runtime.open("a") as ctx:
            await ctx.feed(TOLD)
        async with tiny(store=tmp_path, store_bits=second) as runtime:
            with pytest.raises(SnapshotMismatch, match=r"other dtype: found float32.*expected float32") as caught:
                async with runtime.open("a"):
                    pass
            assert caught.value.field == "dtype"
            async with runtime.open("a", on_mismatch="rebuild") as ctx:
                again = await snap(ctx)
        async with tiny(store_bits=second) as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD)
            expect_same(settled(again), settled(await snap(ctx)))

    asyncio.run(main())


def heads_with(means: torch.Tensor | None, hidden: int = 32) -> RetainingHeads:
    with attached(model(hidden=hidden)) as attachment:
        heads = random_heads(attachment)
    heads.key_means = means
    return heads


@pytest.mark.thorough
def test_a_session_is_resumed_with_the_means_of_its_heads(tmp_path: Path):
    """Exact units know of no means."""
    means = [torch.full((2, 2, 8), value) for value in (0.5, 0.25)]

    async def resumes(bits: int, before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
        name = f"{bits}{before is None}{after is None}"
        async with tiny(policy="locret", heads=heads_with(before), store=tmp_path, store_bits=bits) as runtime:
            async with runtime.open(name) as ctx:
                await ctx.feed(TOLD)
                held = await snap(ctx)
        async with tiny(policy="locret", heads=heads_with(after), store=tmp_path, store_bits=bits) as runtime:
            try:
                async with runtime.open(name) as ctx:
                    expect_same(settled(await snap(ctx)), settled(held))
            except SnapshotMismatch as mismatch:
                assert mismatch.field == "dtype" and "keys without the means" in str(mismatch)
                return False
            return not (await runtime.replay(name)).differs

    async def main() -> None:
        assert await resumes(4, means[0], means[0]) and await resumes(16, None, means[0])
        for before, after in ((None, means[0]), (means[0], None), (means[0], means[1])):
            assert not await resumes(4, before, after)

    asyncio.run(main())


@pytest.mark.thorough
def test_contexts_that_share_a_slot_are_each_as_if_alone(tmp_path: Path):
    async def main() -> None:
        async with (tiny(store=tmp_path, max_live=1, store_bits=4) as few, tiny(max_live=3, store_bits=4) as many,
                    few.open("a") as a, few.open("b") as b, many.open("a") as plain_a, many.open("b") as plain_b):
            for at in range(0, len(TOLD), 200):
                for one, plain in ((a, plain_a), (b, plain_b)):
                    await one.feed(TOLD[at:at + 200])
                    await plain.feed(TOLD[at:at + 200])
                    assert await one.ask("?", max_new_tokens=3) == await plain.ask("?", max_new_tokens=3)
            async with a.fork() as copy:
                assert await replies(copy) == await replies(plain_a)
            for one, plain in ((b, plain_b),):
                expect_same(settled(await snap(one)), settled(await snap(plain)))

    asyncio.run(main())


def test_as_many_bytes_hold_more_units():
    async def units(bits: int) -> tuple[int, int, int]:
        async with tiny(on=model(hidden=128), budget="300KB", store_bits=bits, policy="streaming_llm") as runtime:
            assert runtime.engine.pool.bytes_resident == runtime.engine.pool.formula_bytes()
            async with runtime.open() as ctx:
                return sum(runtime.engine.budgets), runtime.memory.slot_bytes, ctx.memory.bytes_resident

    (exact, *sizes), (eight, *sizes8), (four, *sizes4) = (asyncio.run(units(bits)) for bits in (16, 8, 4))
    assert four > 1.4 * eight and eight > 2 * exact
    for size in (*sizes, *sizes8, *sizes4):
        assert 0.97 * 300_000 < size <= 300_000


@pytest.mark.parametrize("wrong", [torch.zeros(2, 1, 8), torch.zeros(3, 2, 8), torch.zeros(2, 2, 4), [0.0],
                                   torch.full((2, 2, 8), torch.nan), torch.zeros(2, 2, 8, dtype=torch.int64)])
def test_means_of_heads_in_memory_are_checked_as_those_of_a_file(wrong: Any):
    heads = heads_with(None)
    heads.key_means = wrong
    with pytest.raises(HeadsMismatch, match=r"key_means of these heads: found .*expected \(2, 2, 8\)"):
        asyncio.run(started(heads))


async def started(heads: RetainingHeads) -> torch.Tensor | None:
    """What a runtime has of their means after the caller changed them in place."""
    async with tiny(policy="locret", heads=heads, store_bits=4) as runtime:
        if heads.key_means is not None:
            heads.key_means += 1
        return runtime.engine.key_means


def test_a_callers_means_stay_theirs():
    assert torch.equal(asyncio.run(started(heads_with(torch.zeros(2, 2, 8)))), torch.zeros(2, 2, 8))


def test_bytes_that_means_of_the_heads_spare_hold_units():
    async def units(means: torch.Tensor | None) -> int:
        async with tiny(on=model(hidden=128), heads=heads_with(means, 128), policy="locret", budget="100KB",
                        chunk_size=8, store_bits=4) as runtime:
            assert 98_000 < runtime.memory.slot_bytes <= 100_000
            return sum(runtime.engine.budgets)

    row, spared = 2 * (16 + 4) + 12, 8 * 32
    gained = asyncio.run(units(torch.zeros(2, 2, 32))) - asyncio.run(units(None))
    assert abs(gained - 2 * spared / row) <= 2, "in two layers"


def test_the_recalled_is_read_exactly_as_in_a_memory_of_its_own():
    """What answers read is provisional, and what is committed does not depend on it."""
    async def main() -> None:
        async with tiny(store_bits=4, recall=True, units=150, chunk_size=32) as runtime, runtime.open() as ctx:
            await ctx.feed(TOLD * 3)
            before = await snap(ctx)
            await ctx.ask("What is the pass key of falcon?", max_new_tokens=3)
            expect_same(settled(await snap(ctx)), settled(before))

    asyncio.run(main())


@pytest.mark.parametrize("bits", [5, "4", (8, 4, 2), True])
def test_other_numbers_are_refused_before_anything_is_loaded(bits: Any):
    with pytest.raises(ConfigError, match="store_bits is "):
        Runtime(model(), tokenizer(), policy="keydiff", store_bits=bits)
    with pytest.raises(ValueError, match="store_bits is "):
        LocretChatModel(model="bundled", store_bits=bits)


def test_a_second_runtime_beside_has_the_same_bits():
    async def main() -> None:
        async with tiny(store_bits=(8, 4)) as runtime, runtime.beside("streaming_llm") as other:
            assert other.engine.config.store_bits == (8, 4)

    asyncio.run(main())


def test_models_of_other_bits_share_no_runtime():
    given = (None, 16, 4, (4, 4), [8, 4])
    plain, exact, two, three, four = (LocretChatModel(model="bundled", store_bits=bits) for bits in given)
    assert plain.shared is exact.shared and two.shared is three.shared
    assert len({id(one.shared) for one in (plain, two, four)}) == 3


def test_results_of_an_evaluation_name_bits_only_where_there_are_few():
    cell = Cell(task="sentences", policy="keydiff", length=99, units=20)
    few = Cell(task="sentences", policy="keydiff", length=99, units=20, store_bits=4)
    origin = Origin(weights="w", tokenizer="t", heads="", text="x", tasks=1)
    assert file_name(cell, origin) == "sentences-keydiff-20-99-33c8a1eda201.json", "as before there were bits"
    assert file_name(few, origin) != file_name(cell, origin)
    assert "4 bits" in in_words(few) and "bits" not in in_words(cell)
    assert sorted(labels([(cell, origin), (few, origin)]).values()) == ["keydiff", "keydiff, 4 bits"]
