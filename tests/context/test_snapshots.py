"""A context saved and opened again goes on as if it had never stopped; what fails leaves it as it was."""

from __future__ import annotations

import asyncio
import copy
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from locret_stream import (
    ConfigError,
    ContextBusy,
    ContextClosed,
    Snapshot,
    SnapshotCorrupt,
    SnapshotMismatch,
    StaleOwner,
    Store,
    StoreError,
    StreamingContext,
)
from locret_stream.config import Budget
from locret_stream.heads import RetainingHeads
from locret_stream.models import attach, detach
from locret_stream.snapshot import Save
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.log import StoredLog
from tests import tiny_tokenizers
from tests.context.support import (
    CHUNK,
    TEXT,
    cut_at_every_await,
    expect_same,
    ids_in,
    ids_of,
    model,
    replies,
    settled,
    snap,
    tiny,
)
from tests.kit import POLICIES, WITH_HEADS, assert_same, random_heads

LONG = TEXT * 3


def heads_of(seed: int = 3, policy: str = "locret") -> RetainingHeads:
    """Random heads for the tiny model; no use of it is left behind."""
    try:
        return random_heads(attach(model()), seed=seed, policy=policy)
    finally:
        detach(model())


def options(policy: str) -> dict:
    """A tiny runtime of that policy; the one that never evicts gets room."""
    more = {"policy": policy, "on": model()}
    if policy in WITH_HEADS:
        more["heads"] = heads_of(policy=policy)
    if policy == "full":
        more["units"] = 1500
    return more


STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 90), st.integers(0, 60)),
    st.tuples(st.just("push"), st.integers(1, 30), st.integers(0, 60)),
    st.tuples(st.just("bytes"), st.integers(1, 5), st.integers(0, 8)),
    st.tuples(st.just("break"), st.integers(1, 12), st.integers(0, 60)),
    st.tuples(st.just("reply"), st.integers(1, 2 * CHUNK), st.just(0)),
    st.tuples(st.just("leave"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("focus"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("save"), st.booleans(), st.just(0)),
)


async def act(ctx: StreamingContext, step: tuple) -> None:
    kind, size, at = step
    if kind == "feed":
        await ctx.feed(LONG[at:at + size])
    elif kind == "push":
        if ctx._session.buffered.segmenter.state.tail:
            return
        await ctx.push(LONG[at:at + size])
    elif kind == "bytes" and not ctx._session.buffered.segmenter.state.tail:
        await ctx.push("日é🙂".encode()[:size])  # often ends inside a character
        if size in (3, 5):
            await ctx.flush()
    elif kind == "focus":
        await ctx.focus(LONG[:size])  # none at 0
    elif kind == "break":
        left = size
        async for _ in ctx.feed([LONG[at:at + 40]]):
            left -= 1
            if not left:
                break
    elif kind in ("reply", "leave") and not ctx._session.buffered.segmenter.state.tail:
        async for _ in ctx.generate("So?", max_new_tokens=size, ignore_eos=True):
            if kind == "leave":
                break


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=3, max_size=9))
@pytest.mark.thorough(but=1)
def test_resume_equals_never_stopped(tmp_path_factory, policy: str, steps: list):
    """Units, logits and the evictions of 20 more chunks, wherever it was saved and however often."""
    resume_and_compare(policy, steps, tmp_path_factory.mktemp("store"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=3, max_size=20))
def test_resume_equals_never_stopped_at_length(tmp_path_factory, policy: str, steps: list):
    resume_and_compare(policy, steps, tmp_path_factory.mktemp("store"))


def resume_and_compare(policy: str, steps: list, folder: Path) -> None:
    async def tail(step: tuple, ctx: StreamingContext) -> None:
        if ctx._session.buffered.segmenter.state.tail and step[0] != "save":
            ctx._session.buffered.segmenter.drop_partial()
        await act(ctx, step)

    async def main() -> None:
        async with tiny(**options(policy)) as runtime, runtime.open() as never:
            async with asyncio.timeout(60):
                stopping = tiny(**options(policy), store=folder)
                other = await stopping.__aenter__()
                ctx = await other.open("session").__aenter__()
                for step in steps:
                    if step[0] != "save":
                        await tail(step, never)
                        await tail(step, ctx)
                        continue
                    if step[1]:  # saved twice, the second time on top of the first
                        await ctx.snapshot()
                    await ctx.aclose()
                    await stopping.__aexit__(None, None, None)
                    stopping = tiny(**options(policy), store=folder)
                    other = await stopping.__aenter__()
                    ctx = await other.open("session").__aenter__()
                    expect_same(settled(await snap(ctx, settle=False)), settled(await snap(never)))
                for one in (never, ctx):
                    one._session.buffered.segmenter.drop_partial()
                assert await replies(never) == await replies(ctx)
                for start in range(0, 20 * CHUNK, 50):
                    ids = [5 + (7 * i) % 90 for i in range(start, start + 50)]
                    await never.feed(ids)
                    await ctx.feed(ids)
                expect_same(await snap(ctx), await snap(never))
                await ctx.aclose()
                await stopping.__aexit__(None, None, None)
                assert not [one.problem for one in Store(folder).verify() if one.problem]

    asyncio.run(main())


async def test_inside_a_feed_it_is_of_the_last_accepted_token(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx, runtime.open() as plain:
        count = 0
        async for token in ctx.feed(LONG):
            count += 1
            if count == 2 * CHUNK + 3:
                saved = await ctx.snapshot()
                assert saved.tokens == token.position + 1 == ctx.memory.tokens
        async for _ in plain.feed(LONG):
            count -= 1
            if ctx.memory.tokens and plain.memory.tokens == saved.tokens:
                break
        await ctx.rewind(saved.generation)
        expect_same(settled(await snap(ctx)), settled(await snap(plain)))


async def test_an_unchanged_session_is_not_saved_again_and_one_that_was_rewound_is(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
        for _ in range(2):
            async with runtime.open("a") as ctx:
                await ctx.ask("?", max_new_tokens=2)
        assert [one.generation for one in runtime.store.info("a")] == [1]
        async with runtime.open("b") as ctx:
            assert not ctx.resumed
        async with runtime.open("a") as ctx:
            assert ctx.resumed
            await ctx.feed("more\n")
            await ctx.snapshot()
            await ctx.rewind(1)
            before = await snap(ctx)
        assert [one.generation for one in runtime.store.info("a")] == [1, 2, 3]
        async with runtime.open("a") as ctx:
            expect_same(await snap(ctx), before)


async def test_without_autosave_or_a_name_nothing_is_left(tmp_path: Path):
    async with tiny(store=tmp_path, autosave=False) as runtime:
        async with runtime.open("a") as ctx, runtime.open() as nameless, ctx.fork() as fork:
            await ctx.feed(LONG)
            for one in (nameless, fork):
                with pytest.raises(ConfigError, match="needs a stored session"):
                    await one.snapshot()
        assert runtime.store.list() == []
    async with tiny() as runtime, runtime.open("a") as ctx:
        with pytest.raises(ConfigError, match="store="):
            await ctx.snapshot()


async def test_a_turn_is_never_saved_half(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        async with ctx.turn():
            with pytest.raises(ContextBusy, match=r"inside a turn"):
                await ctx.snapshot()
            with pytest.raises(ContextBusy, match="rewind"):
                await ctx.rewind(1)


async def test_an_undone_turn_leaves_no_trace_in_what_is_saved(tmp_path: Path):
    """Commits of an undone turn were in the log's spool: the next ones replace them."""
    async with tiny(store=tmp_path) as runtime, runtime.open() as plain:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG[:60])
            with pytest.raises(ZeroDivisionError):
                async with ctx.turn():
                    await ctx.feed(list(range(5, 5 + 5 * CHUNK)))
                    raise ZeroDivisionError
            await ctx.feed(LONG[60:])
        await plain.feed(LONG[:60])
        await plain.feed(LONG[60:])
        async with runtime.open("a") as ctx:
            expect_same(settled(await snap(ctx)), settled(await snap(plain)))
        ids = plain._session.state.history
    async with tiny(store=tmp_path, chunk_size=5) as runtime, runtime.open("a", on_mismatch="rebuild") as ctx:
        assert ctx._session.state.history == ids


@pytest.mark.parametrize("what", ["snapshot", "open"])
async def test_cancelled_anywhere_it_is_saved_or_not_and_the_memory_is_intact(tmp_path: Path, what: str):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            before = await snap(ctx)

        async def run(guard) -> None:
            ctx = runtime.open("a")
            if what == "open":
                await guard(ctx.__aenter__())
                await ctx.aclose()
                return
            async with ctx:
                newest = runtime.store.info("a")[-1].generation
                cancelled = await guard(ctx.snapshot())
                expect_same(settled(await snap(ctx)), settled(before))
                assert runtime.store.info("a")[-1].generation - newest in ((0, 1) if cancelled else (1,))

        assert await cut_at_every_await(run) >= 2
        async with runtime.open("a") as ctx:
            expect_same(settled(await snap(ctx)), settled(before))
        assert not [one.problem for one in runtime.store.verify() if one.problem]


class Failing(LocalFiles):
    """Fails the write number `at`, once."""

    at = 0

    def write(self, path, parts, *, exclusive=False):
        self.at -= 1
        if self.at == 0:
            raise StoreError("the disk is full; nothing was acknowledged")
        super().write(path, parts, exclusive=exclusive)


async def test_a_save_that_fails_anywhere_leaves_memory_and_store_as_they_were(tmp_path: Path):
    files = Failing(tmp_path)
    async with tiny(store=Store(tmp_path, files=files)) as runtime, runtime.open("a") as ctx:
        await ctx.feed(LONG)
        first = await ctx.snapshot()
        for at in range(1, 4):
            await ctx.feed(LONG[:40])
            before = await snap(ctx)
            files.at = at
            with pytest.raises(StoreError, match="disk is full"):
                await ctx.snapshot()
            expect_same(await snap(ctx), before)
            assert [one.generation for one in runtime.store.info("a")] == [first.generation]
        files.at = 0
        await ctx.snapshot()
        await ctx.rewind(2)
        expect_same(settled(await snap(ctx)), settled(before))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def damage(folder: Path, part: str) -> None:
    """Flip a bit in the middle of the newest file of that kind."""
    file = max(folder.glob(f"s-*/{part}/**/*"), key=lambda path: (path.is_file(), path.name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["pages", "m"])
@pytest.mark.thorough(but=1)
async def test_a_damaged_snapshot_is_refused_and_rebuilt_only_when_asked(tmp_path: Path, part: str):
    async with tiny(store=tmp_path) as runtime, runtime.open() as live:
        await live.feed(LONG)
        before = await snap(live)
        async with runtime.open("a", system="Note all.") as ctx:
            await ctx.feed(LONG * 2)
            await replies(ctx)
            await ctx.push("held tex")
            whole = await snap(ctx)
        damage(tmp_path, part)
        with pytest.raises(SnapshotCorrupt):
            await runtime.open("a").__aenter__()
        expect_same(await snap(live), before)
        async with runtime.open("a", on_mismatch="rebuild") as ctx:
            rebuilt = await snap(ctx)
            assert_same(rebuilt.tensors, whole.tensors)
            assert rebuilt.frame == whole.frame and rebuilt.buffered[0] == whole.buffered[0]
        async with runtime.open("a", system="Note all.") as ctx:  # it was saved, sound again
            assert_same((await snap(ctx)).tensors, whole.tensors)


@pytest.mark.parametrize("more", ["", "x", "one more line\n"], ids=["nothing", "buffered", "pending"])
@pytest.mark.thorough(but=1)
async def test_what_came_after_the_last_commit_is_rebuilt_too(tmp_path: Path, more: str):
    """Each save has a log part of its own, even if nothing was committed since the one before."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG * 2)
            for _ in range(3):
                await ctx.push(more or " ")
                await ctx.snapshot()
            feed = ctx.feed(["and pulled, but not taken\n" * 2])
            async for _ in feed:
                break
            await feed.aclose()
            whole = await snap(ctx)
        damage(tmp_path, "m")
        async with runtime.open("a", on_mismatch="rebuild") as ctx:
            assert ctx._session.buffered.size > 0
            expect_same(settled(await snap(ctx)), settled(whole))


async def test_where_the_log_part_is_damaged_too_nothing_is_lost_unsaid(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            await ctx.snapshot()
            before = files_in(tmp_path)
            await ctx.push("a few more words\n")
        damage(tmp_path, "m")
        for file in files_in(tmp_path):
            if file not in before and file.parent.name == "log":
                file.unlink()
        with pytest.raises(SnapshotCorrupt) as caught:
            await runtime.open("a", on_mismatch="rebuild").__aenter__()
        assert "delete --generation 2" in str(caught.value.__cause__)
        runtime.store.delete("a", 2)
        async with runtime.open("a") as ctx:
            assert ctx.resumed


async def test_a_session_that_was_told_nothing_leaves_nothing(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", system="Note all."):
            pass
        assert runtime.store.list() == []
        async with runtime.open("a", system="Note all.") as ctx:
            await ctx.push("he")  # the rest of the line is buffered, and saved too
        assert [one.name for one in runtime.store.list()] == ["a"]
        async with runtime.open("b") as ctx:
            await ctx.snapshot()
        assert [one.name for one in runtime.store.list()] == ["a", "b"]


async def test_a_stale_owner_goes_on_under_a_new_name_with_all_it_has(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as stale:
            await stale.feed(LONG)
            await stale.snapshot()
            async with tiny(store=tmp_path) as other, other.open("a") as owner:
                await owner.feed("what the other one says\n")
            await stale.feed(LONG)
            before = settled(await snap(stale))
            with pytest.raises(StaleOwner):
                await stale.snapshot()
            assert stale.unsaved
            with pytest.raises(ConfigError, match="has a session of that name"):
                await stale.save_as("a")
            saved = await stale.save_as("a, too")
            assert (saved.name, stale.name, stale.unsaved) == ("a, too", "a, too", False)
            await stale.feed(LONG)
        async with runtime.open("a, too") as again:
            await again.rewind(1)
            expect_same(settled(await snap(again)), before)
        assert {one.name for one in runtime.store.list()} == {"a", "a, too"}


async def test_a_new_name_is_given_behind_a_commit_that_runs(tmp_path: Path):
    """Else what it commits would be in the log of the old name alone, and nothing could be saved any more."""
    async with tiny(store=tmp_path) as runtime:
        commit, started, go_on = runtime.engine.commit, threading.Event(), threading.Event()

        def slow(state):
            started.set()
            go_on.wait(10)
            return commit(state)

        async with runtime.open("a", raw=True) as ctx:
            runtime.engine.commit = slow
            feeding = asyncio.create_task(ctx.feed(ids_of(1, 6 * CHUNK)))
            await asyncio.to_thread(started.wait, 10)
            moving = asyncio.create_task(ctx.save_as("b"))
            await asyncio.sleep(0.05)
            go_on.set()
            saved, _ = await asyncio.gather(moving, feeding)
            assert saved.name == "b" and ctx.memory.tokens == 6 * CHUNK
            await ctx.snapshot()
            before = settled(await snap(ctx))
        async with runtime.open("b") as again:
            expect_same(settled(await snap(again)), before)
            assert ids_in(again) == ids_of(1, 6 * CHUNK)


async def test_a_key_for_a_session_without_one_is_refused_at_once(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(LONG)
    async with tiny(store=tmp_path, key="5a" * 32) as runtime:
        with pytest.raises(StoreError, match="without encryption"):
            await runtime.open("a").__aenter__()


async def test_rewind_takes_a_number_or_a_snapshot_of_this_session(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx, runtime.open("b") as other:
        await ctx.feed(LONG)
        first = await ctx.snapshot()
        foreign = await other.snapshot()
        before = await snap(ctx)
        await ctx.feed(LONG)
        for wrong in ("1", 1.0, True, None, foreign):
            with pytest.raises(ConfigError, match="number of a snapshot of 'a'"):
                await ctx.rewind(wrong)
        await ctx.rewind(first)
        expect_same(settled(await snap(ctx)), settled(before))


async def test_a_log_with_ids_that_the_model_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
        damage(tmp_path, "pages")
        read = StoredLog.pieces
        monkeypatch.setattr(StoredLog, "pieces", lambda chain: ((ids + 2**20, focuses) for ids, focuses in read(chain)))
        with pytest.raises(SnapshotCorrupt, match=r"damaged.* its log holds ids that the model does not have"):
            await runtime.open("a", on_mismatch="rebuild").__aenter__()


async def test_without_a_log_or_with_another_tokenizer_nothing_is_rebuilt(tmp_path: Path):
    async with tiny(store=Store(tmp_path, log=False)) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
        damage(tmp_path, "pages")
        with pytest.raises(SnapshotCorrupt, match="damaged"):
            await runtime.open("a", on_mismatch="rebuild").__aenter__()
    async with tiny(store=tmp_path) as runtime, runtime.open("b") as ctx:
        await ctx.feed(LONG)
    async with tiny(store=tmp_path, reads=other_tokenizer()) as runtime:
        with pytest.raises(SnapshotMismatch) as caught:
            await runtime.open("b", on_mismatch="rebuild").__aenter__()
        assert caught.value.field == "tokenizer"


def other_tokenizer():
    trained = tiny_tokenizers.train("byte_level", tiny_tokenizers.corpus()[20_000:50_000], size=480)
    return tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML)


def other_weights():
    """The same in name, shape and size, but for one number."""
    changed = copy.deepcopy(model())
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 4] += 0.001
    return changed


def other_rope():
    changed = copy.deepcopy(model())
    changed.config.rms_norm_eps *= 2
    return changed


MISMATCHES = {
    "weights": lambda: {"on": other_weights()},
    "architecture": lambda: {"on": other_rope()},
    "tokenizer": lambda: {"reads": other_tokenizer()},
    "template": lambda: {"template": tiny_tokenizers.CHATML.replace("assistant", "helper")},
    "heads": lambda: {"heads": heads_of(4)},
    "policy": lambda: {"policy": "random"},
    "knobs": lambda: {"policy": "h2o", "knobs": {"recent": 0.25}},
    "budgets": lambda: {"budget": Budget(units=21, sinks=2, stabilizers=3)},
    "chunk_size": lambda: {"chunk_size": CHUNK + 1},
}


@pytest.mark.parametrize("field", MISMATCHES)
@pytest.mark.thorough(but=2)
async def test_a_session_made_by_something_else_is_refused_by_name(tmp_path: Path, field: str):
    base = options("locret") if field in ("heads", "policy") else {"policy": "h2o"}
    async with tiny(**base, store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(LONG)
        kept = runtime.identity
    change = {**base, **MISMATCHES[field]()}
    if field == "policy":
        change.pop("heads")
    async with tiny(**change, store=tmp_path) as runtime:
        with pytest.raises(SnapshotMismatch, match=f"other {'heads' if field == 'policy' else field}") as caught:
            await runtime.open("a").__aenter__()
        assert caught.value.field == ("heads" if field == "policy" else field)
        assert caught.value.found == getattr(kept, caught.value.field) != caught.value.expected
        assert len(runtime.store.info("a")) == 1


def test_every_field_of_an_identity_has_its_test():
    assert {*MISMATCHES, "dtype"} == set(Identity.__struct_fields__)


async def test_what_another_model_rebuilds_is_what_it_would_have_made(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, runtime.open("a") as ctx:
        await ctx.feed(LONG * 2)
        await replies(ctx)
        ids = ctx._session.state.history
        assert ctx.memory.tokens == len(ids)
    more = {"on": other_weights(), "policy": "keydiff", "chunk_size": 12}
    async with tiny(**more, store=tmp_path) as runtime:
        async with runtime.open("a", on_mismatch="rebuild") as ctx, runtime.open(raw=True) as fresh:
            await fresh.feed(ids)
            assert_same((await snap(ctx)).tensors, (await snap(fresh)).tensors)
            expected = await replies(ctx)
        async with runtime.open("a") as ctx:  # saved as its own now
            assert ctx._session.state.history[-len(expected) - 2:][:len(expected)] == expected


async def test_forks_are_branches_of_their_session(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            await ctx.snapshot()
            await ctx.feed(LONG[:50])
            async with ctx.fork("a/two") as two:
                await two.feed("another future\n" * 9)
                expected = await snap(two)
            with pytest.raises(ConfigError, match="has a session of that name"):
                await ctx.fork("a/two").__aenter__()
            await ctx.feed(LONG[50:] * 4)
            own = await snap(ctx)
        async with runtime.open("a/two") as two, runtime.open("a") as ctx:
            expect_same(settled(await snap(two)), settled(expected))
            expect_same(settled(await snap(ctx)), settled(own))
            with pytest.raises(ContextBusy, match="open as"):
                await runtime.forget("a")
        assert {one.name: one.session for one in runtime.store.list()} == {"a": "a", "a/two": "a"}
        assert not [one.problem for one in runtime.store.verify() if one.problem]
        async with tiny(store=tmp_path, chunk_size=5) as other, other.open("a/two", on_mismatch="rebuild") as two:
            assert two._session.state.history == [*expected.tensors["history"].tolist(),
                                                  *expected.tensors["pending"].tolist()]
        assert await runtime.forget("a") and not files_in(tmp_path)


async def test_one_owner_at_a_time_in_a_runtime_and_the_stale_one_is_fenced(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime, tiny(store=tmp_path, on=model(seed=0)) as other:
        async with runtime.open("a") as ctx:
            await ctx.feed(LONG)
            with pytest.raises(ContextBusy, match="open already"):
                await runtime.open("a").__aenter__()
        one, two = runtime.open("a"), other.open("a")
        await one.__aenter__()
        await two.__aenter__()
        await one.feed("mine\n")
        await two.feed("theirs\n")
        await two.snapshot()
        before = await snap(one)
        with pytest.raises(StaleOwner, match="saved elsewhere"):
            await one.snapshot()
        expect_same(await snap(one), before)
        async with one.fork("rescued") as rescued:
            await rescued.snapshot()
        with pytest.raises(StaleOwner):
            await one.aclose()
        await two.aclose()
        async with runtime.open("rescued") as rescued:
            expect_same(settled(await snap(rescued)), settled(before))


async def test_a_session_goes_on_with_the_system_text_it_began_with(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", system="You watch.") as ctx:
            await ctx.feed(LONG)
        for wrong in ({"system": "You sleep."}, {"raw": True}):
            with pytest.raises(ConfigError, match="was begun with"):
                await runtime.open("a", **wrong).__aenter__()
        async with runtime.open("a", system="You watch."):
            pass


class Slow(LocalFiles):
    """Writes wait until they may."""

    def __init__(self, root):
        super().__init__(root)
        self.begun, self.may = threading.Event(), threading.Event()

    def write(self, path, parts, *, exclusive=False):
        self.begun.set()
        assert self.may.wait(30)
        super().write(path, parts, exclusive=exclusive)


async def test_while_a_save_writes_others_go_on_and_its_own_context_answers(tmp_path: Path):
    files = Slow(tmp_path)
    async with tiny(store=Store(tmp_path, files=files)) as runtime:
        async with runtime.open("a") as ctx, runtime.open() as other:
            await ctx.feed(LONG)
            saving = asyncio.create_task(ctx.snapshot())
            assert await asyncio.to_thread(files.begun.wait, 30)
            await other.feed(LONG)
            await replies(other, 3 * CHUNK)
            await ctx.ask("still there?", max_new_tokens=3)
            tokens = ctx.memory.tokens
            feeding = asyncio.create_task(drain(ctx, LONG))
            await asyncio.sleep(0.05)
            assert not saving.done() and not feeding.done() and ctx.memory.tokens < tokens + CHUNK + 2
            files.may.set()
            assert (await saving).tokens == tokens
            await feeding


async def drain(ctx: StreamingContext, text: str) -> None:
    await ctx.feed(text)


@asynccontextmanager
async def encrypted(folder: Path, key: str | None):
    async with tiny(store=folder, **({"key": key} if key else {})) as runtime:
        yield runtime


async def test_an_encrypted_session_shows_nothing_and_opens_with_its_key_alone(tmp_path: Path):
    secret = "the zebra crossing is at noon\n"
    async with encrypted(tmp_path, "ab" * 32) as runtime, runtime.open("private name") as ctx:
        await ctx.feed(secret * 5)
        ids = ctx._session.state.history[4:12]
        before = await snap(ctx)
    stored = b"".join(path.read_bytes() for path in files_in(tmp_path))
    for trace in (b"zebra", b"private", torch.tensor(ids, dtype=torch.int32).numpy().tobytes()):
        assert trace not in stored
    for wrong in (None, "cd" * 32):
        async with encrypted(tmp_path, wrong) as runtime:
            with pytest.raises(StoreError, match="key"):
                await runtime.open("private name").__aenter__()
    async with encrypted(tmp_path, "ab" * 32) as runtime, runtime.open("private name") as ctx:
        expect_same(settled(await snap(ctx)), settled(before))


@pytest.mark.parametrize("at", ["finish", "page"])
async def test_a_context_closed_while_it_is_saved_lets_the_save_end(at: str, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch):
    """An example is a swap-out to make room. The save is complete, or it raises; it never leaves a torn snapshot."""
    inside, go_on, real = threading.Event(), threading.Event(), getattr(Save, at)

    def slow(self: Save, *arguments: object) -> object:
        inside.set()
        assert go_on.wait(20)
        return real(self, *arguments)

    async with tiny(store=tmp_path) as runtime:
        ctx = await runtime.open("a").__aenter__()
        await ctx.feed(LONG)
        monkeypatch.setattr(Save, at, slow)
        saving = asyncio.create_task(ctx.snapshot())
        await asyncio.to_thread(inside.wait, 20)
        closing = asyncio.create_task(ctx.aclose(save=False))
        await asyncio.sleep(0.05)
        go_on.set()
        done, _ = await asyncio.gather(saving, closing, return_exceptions=True)
        assert isinstance(done, Snapshot | ContextClosed), done
        assert isinstance(done, ContextClosed) or done.log, "its log is there as well"
        assert len(runtime.store.list()) == isinstance(done, Snapshot)
        assert not [one.problem for one in runtime.store.verify() if one.problem]


async def test_the_most_that_was_ever_held_is_known_again(tmp_path: Path):
    """The peak of a session, a reply's tail included, is more than it keeps when it is opened anew."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.feed([5] * 5 * CHUNK)
            peak = ctx.memory.peak
            assert all(most > units for most, units in zip(peak, ctx.memory.units, strict=True))
        async with runtime.open("a", raw=True) as again:
            assert again.memory.peak == peak


async def test_what_is_being_opened_is_not_forgotten_and_what_is_being_forgotten_is_not_opened(tmp_path, monkeypatch):
    async with tiny(store=tmp_path, max_live=2) as runtime:
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
            async with ctx.fork("a/two") as fork:
                await fork.feed(TEXT)
        ctx = runtime.open("a")
        opening = asyncio.create_task(ctx.__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(ContextBusy, match="'a' is open as 'a'"):
            await runtime.forget("a")
        await opening
        await ctx.aclose()
        forget, begun, go_on = Store.forget, threading.Event(), threading.Event()

        def late(store, name):
            begun.set()
            go_on.wait(20)
            return forget(store, name)

        monkeypatch.setattr(Store, "forget", late)
        forgetting = asyncio.create_task(runtime.forget("a"))
        await asyncio.to_thread(begun.wait, 20)
        for name in ("a", "a/two"):  # a fork is known as one once it was read
            with pytest.raises(ContextBusy, match=r"'a' is being forgotten; expected .* when forget\(\) has ended"):
                await runtime.open(name).__aenter__()
        go_on.set()
        assert await forgetting and not files_in(tmp_path)
        async with runtime.open("a") as ctx:
            assert not ctx.resumed


async def test_buffered_bytes_that_are_no_text_are_refused_in_a_manifest_and_in_a_log_part(tmp_path: Path, monkeypatch):
    """Their checksums hold: whoever wrote them meant it."""
    strange = torch.tensor([0x91, 0xa1, 0xff], dtype=torch.uint8)  # msgpack: a list of one text, of one byte
    async with tiny(store=tmp_path) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr("locret_stream.context.saving.buffered_of", lambda session: strange)
            async with runtime.open("a") as ctx:
                await ctx.feed(LONG)
        refused = "no session can have its frame or buffered text"
        with pytest.raises(SnapshotCorrupt, match=f"snapshot 1 of 'a': {refused}"):
            await runtime.open("a").__aenter__()
        damage(tmp_path, "m")
        with pytest.raises(SnapshotCorrupt, match=f"it cannot be rebuilt: the log of 'a': {refused}"):
            await runtime.open("a", on_mismatch="rebuild").__aenter__()


async def test_under_a_new_name_no_snapshot_is_taken_for_one_of_a_swap_out_under_the_old_name(tmp_path: Path):
    """A damaged manifest kept the first save under the new name from clearing away."""
    async with tiny(store=Store(tmp_path, keep_last=9)) as runtime, runtime.open("a", raw=True) as ctx:
        for number in range(2):
            await ctx.push(ids_of(number, 10))
            await ctx.snapshot()
        await ctx.push([7])
        assert await ctx.swap_out() and ctx.swap_generations == {3}
        min(path for path in files_in(tmp_path) if path.suffix == ".snap").write_bytes(b"damaged")
        await ctx.save_as("b")
        for _ in range(4):
            await ctx.push([7])
            await ctx.snapshot()
        assert [one.generation for one in runtime.store.info("b")] == [1, 2, 3, 4, 5]
