"""Notes beside snapshots, opening and rewinding to any of them, closing without saving, and disposable contexts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from locret_stream import ConfigError, ContextClosed, NoSlot, SnapshotNotFound, Store
from locret_stream.context import streams
from tests.context.support import TEXT, expect_same, scripted, settled, snap
from tests.context.support import few_commits as tiny

LONG = TEXT * 10


async def test_a_note_is_saved_and_comes_back_with_its_snapshot(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG[:300])
            ctx.note = b"one"
            first = await ctx.snapshot()
            assert first.note == b"one" and not ctx.unsaved
            ctx.note = b"of a place that is left"
            assert ctx.unsaved
            await ctx.feed(LONG[300:900])
            assert ctx.note == b""
            ctx.note = b"two"
            await ctx.snapshot()
            await ctx.rewind(first)
            assert ctx.note == b"one"
            async with ctx.fork("b") as fork:
                assert fork.note == b"one"
            await ctx.feed("x")
        async with runtime.open("a") as ctx:
            assert ctx.note == b""
        async with runtime.open("a", at=2) as ctx:
            assert ctx.note == b"two"
    assert [row.note for row in Store(tmp_path).info("a")] == [b"one", b"two", b""]


@pytest.mark.parametrize("note", ["text", bytearray(b"x"), None, b"x" * (64 << 10 | 1)])
async def test_a_note_that_cannot_be_is_refused(note):
    async with tiny() as runtime, runtime.open() as ctx:
        ctx.note = b"x" * (64 << 10)
        with pytest.raises(ConfigError, match=r"note is .*; expected at most 65,536 bytes"):
            ctx.note = note
        assert len(ctx.note) == 64 << 10


async def test_a_reply_cancelled_in_a_step_that_accepted_a_token_ends_the_note(monkeypatch):
    """Without a chat frame nothing else is accepted when the reply ends."""
    choosing, go_on = threading.Event(), threading.Event()

    def slowly(*_) -> int:
        choosing.set()
        assert go_on.wait(20)
        return 7

    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        await ctx.push([5, 6])
        reply = ctx.generate([7], ignore_eos=True)
        await anext(reply)
        ctx.note, before = b"of this place", ctx.memory.tokens
        monkeypatch.setattr(streams, "sample", slowly)
        token = asyncio.create_task(anext(reply))
        await asyncio.to_thread(choosing.wait, 20)
        token.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await token
        assert ctx.memory.tokens == before + 1 and ctx.note == b""


async def test_a_turn_that_is_undone_brings_its_note_back():
    async with tiny() as runtime, runtime.open() as ctx:
        ctx.note = b"before"
        with pytest.raises(RuntimeError):
            async with ctx.turn():
                ctx.note = b"inside"
                await ctx.feed(TEXT)
                raise RuntimeError
        assert ctx.note == b"before"


async def test_opening_at_any_snapshot_equals_rewinding_to_it(tmp_path: Path):
    async with tiny(store=tmp_path, max_live=3) as runtime:
        was = []
        async with runtime.open("a", system="Be brief.") as ctx:
            was.append(settled(await snap(ctx)))
            for part in (LONG[:700], LONG[700:2000]):
                await ctx.feed(part)
                await ctx.snapshot()
                was.append(settled(await snap(ctx)))
            for number in (1, 0, 2, 0):
                await ctx.rewind(number)
                expect_same(settled(await snap(ctx)), was[number])
        for number in (2, 1):
            async with runtime.open("a", at=number) as ctx:
                expect_same(settled(await snap(ctx)), was[number])
        async with runtime.open("a", at=0, system="Be brief.") as ctx:
            assert not ctx.resumed
            expect_same(settled(await snap(ctx)), was[0])
            await ctx.feed(LONG[:700])
            anew = await ctx.snapshot()
            expect_same(settled(await snap(ctx)), was[1])
        assert anew.generation == 4 and anew.parent == ""  # 3 is the rewound one that was saved when it was closed
        async with runtime.open("a") as ctx:
            with pytest.raises(ConfigError, match="was begun with a system text, which is not known here"):
                await ctx.rewind(0)
        with pytest.raises(SnapshotNotFound):
            await runtime.open("a", at=9).__aenter__()
        with pytest.raises(SnapshotNotFound):
            await runtime.open("new", at=1).__aenter__()
        for options in ({"name": "a", "at": -1}, {"name": "a", "at": True}, {"name": None, "at": 1}):
            with pytest.raises(ConfigError, match="at is"):
                runtime.open(**options)
    assert not [one.problem for one in Store(tmp_path).verify() if one.problem]


async def test_closing_without_saving_leaves_the_newest_snapshot(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        ctx = runtime.open("a")
        async with ctx:
            await ctx.feed(LONG[:500])
            await ctx.snapshot()
            before = settled(await snap(ctx))
            await ctx.feed(TEXT)
            await ctx.aclose(save=False)
        async with runtime.open("a") as ctx:
            expect_same(settled(await snap(ctx)), before)


async def test_a_context_is_closed_before_it_is_opened_and_after():
    async with tiny() as runtime:
        ctx = runtime.open("a")
        assert ctx.closed and not ctx.swapped_out and not ctx.swap_generations
        async with ctx:
            assert not ctx.closed
        assert ctx.closed


async def test_an_expendable_context_makes_room_while_nothing_runs_in_it():
    async with tiny(max_live=1, slot_timeout_s=0.1) as runtime:
        async with runtime.open() as ctx:
            await ctx.feed(TEXT)
            with pytest.raises(NoSlot):
                await runtime.open().__aenter__()
            ctx.disposable = True
            feed = ctx.feed(TEXT)
            await anext(feed)
            with pytest.raises(NoSlot):
                await runtime.open().__aenter__()
            await feed.aclose()
            async with runtime.open() as other:
                await other.feed(TEXT)
                with pytest.raises(ContextClosed):
                    await ctx.feed("more")


async def test_special_tokens_can_be_shown(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        start, end = map(runtime.tokenizer.convert_tokens_to_ids, ("<|im_start|>", "<|im_end|>"))
        for skip, text in ((True, ""), (False, "<|im_start|>")):
            scripted(monkeypatch, [start, end])
            reply = ctx.generate("?", skip_special=skip, max_new_tokens=4)
            async for _ in reply:
                pass
            assert reply.text == text and reply.finish_reason == "eos"


async def test_a_context_knows_when_another_owner_has_saved_its_session(tmp_path: Path):
    async with tiny(store=tmp_path) as one, tiny(store=tmp_path) as two:
        async with one.open("a") as first:
            await first.feed(LONG)
            assert not await first.fenced()
            await first.snapshot()
            assert not await first.fenced()
            async with two.open("a") as second:
                await second.feed(LONG)
                assert not await first.fenced()
            assert await first.fenced()
            await first.aclose(save=False)
        async with one.open() as nameless:
            with pytest.raises(ConfigError, match="needs a stored session"):
                await nameless.fenced()


@pytest.mark.parametrize("how", ["feed", "push", "generate"])
async def test_whatever_is_accepted_ends_a_note(how: str):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("begin\n")
        ctx.note = b"here"
        await ctx.ask("?", max_new_tokens=2)
        assert ctx.note == b"here"
        if how == "feed":
            await ctx.feed("x\n")
        elif how == "push":
            await ctx.push("x\ny")
        else:
            generation = ctx.generate(max_new_tokens=1)
            await anext(generation)
            await generation.aclose()
        assert ctx.note == b""


async def test_waiting_in_the_store_never_costs_a_snapshot_that_was_asked_for(tmp_path: Path):
    async with tiny(store=Store(tmp_path, keep_last=4), max_live=1) as runtime, runtime.open("a") as ctx:
        asked = []
        for number in range(3):
            await ctx.feed(LONG[:200])
            ctx.note = str(number).encode()
            asked.append(await ctx.snapshot())
        for _ in range(8):  # swapped out and in, each time with something new
            async with runtime.open("b") as other:
                await other.feed("x")
            await ctx.feed(LONG[:40])
        rows = runtime.store.info("a")
        assert [row.note for row in rows if row.note] == [b"0", b"1", b"2"] and len(rows) == 4
        await ctx.snapshot()
        rows = runtime.store.info("a")
        assert [row.note for row in rows] == [b"0", b"1", b"2", b""]
        for row, one in zip(rows, asked, strict=False):
            await ctx.rewind(row)
            assert ctx.note == one.note
    assert not [one.problem for one in Store(tmp_path).verify() if one.problem]


async def test_a_note_ends_with_the_token_that_the_engine_accepts(tmp_path: Path):
    """Before the task that waits for the token hears of it: others may save meanwhile."""
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push([*range(3, 20)])
        reply = ctx.generate([20, 21], max_new_tokens=20, ignore_eos=True)
        await anext(reply)
        at, ctx.note = ctx.memory.tokens, b"here"
        assert ctx.note == b"here"
        stepping = asyncio.create_task(anext(reply))
        while not ctx._session.steps:  # noqa: ASYNC110 (no event says it)
            await asyncio.sleep(0)
        while ctx.memory.tokens == at:  # the event loop does not get on
            pass
        assert ctx.note == b"" and (await ctx.snapshot()).note == b""
        await stepping
        await reply.aclose()


async def test_an_undone_turn_brings_a_note_back(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push([*range(3, 20)])
        ctx.note = b"here"
        with pytest.raises(KeyError):
            async with ctx.turn():
                await ctx.push([*range(3, 99)])
                assert ctx.note == b""
                raise KeyError
        assert ctx.note == b"here" and (await ctx.snapshot()).note == b"here"
