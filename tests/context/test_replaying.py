"""`Runtime.replay`: a stored session is what its log gives, or the replay names what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from locret_stream import ConfigError, SnapshotCorrupt, SnapshotNotFound, Store
from locret_stream.context import restoring
from tests.context.support import CHUNK, TEXT, replies, tiny


async def test_what_a_session_went_through_is_what_its_log_gives(tmp_path: Path):
    """Feeds, replies, focuses, rewinds, undone turns, forks, buffered text; while it is open, too."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=2) as runtime:
        async with runtime.open("a", system="Be brief.") as ctx:
            await ctx.feed(TEXT)
            await replies(ctx, 3)
            first = await ctx.snapshot()
            await ctx.focus("bird")
            await ctx.feed(TEXT[:70])
            with pytest.raises(KeyError):
                async with ctx.turn():
                    await ctx.feed(TEXT)
                    raise KeyError
            await ctx.rewind(first)
            await ctx.focus("falcon")
            await ctx.push("and a line that is buffered")
            await ctx.snapshot()
            async with ctx.fork("b") as fork:
                await fork.feed(TEXT[20:80])
            assert (await runtime.replay("a")).tokens == ctx.memory.tokens
        for name in ("a", "b"):
            assert (await runtime.replay(name)).differs == ()
        assert [one.generation for one in runtime.store.info("a")] == [1, 2], "it changes nothing that is stored"


async def test_a_memory_that_is_not_what_its_log_gives_is_seen(tmp_path: Path):
    """Every byte is as it was written, so `verify` finds nothing: it was another one when it was written."""
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(list(range(5, 5 + 6 * CHUNK)))
            ctx._session.state.store.values(1, 1)[0, 0, 0, 0] += 1e-3
        assert [one.problem for one in runtime.store.verify()] == [""]
        assert (await runtime.replay("a")).differs == ("1.values",)


async def test_what_cannot_be_replayed_says_why(tmp_path: Path):
    async with tiny() as runtime:
        with pytest.raises(ConfigError, match="store="):
            await runtime.replay("a")
    async with tiny(store=Store(tmp_path, log=False)) as runtime:
        with pytest.raises(SnapshotNotFound):
            await runtime.replay("a")
        async with runtime.open("a") as ctx:
            await ctx.feed(TEXT)
        with pytest.raises(SnapshotCorrupt, match="without a log"):
            await runtime.replay("a")


async def test_a_fork_that_waits_long_for_its_first_save_keeps_the_whole_log(tmp_path: Path):
    """Its origin goes on, saves again and again, and gives up what only the fork still needs."""
    async with tiny(store=Store(tmp_path, keep_last=1), max_live=2) as runtime:
        async with runtime.open("a", raw=True) as ctx:
            await ctx.push(list(range(5, 5 + 3 * CHUNK)))
            await ctx.snapshot()
            async with ctx.fork("b") as fork:
                for start in range(0, 200, 20):
                    await ctx.push(list(range(5 + start, 25 + start)))
                    await ctx.snapshot()
                await fork.push(list(range(300, 320)))
        assert (await runtime.replay("b")).differs == ()
        assert all(one.log for one in runtime.store.list())


async def test_a_session_that_is_saved_while_it_is_replayed_is_not_called_another(tmp_path: Path, monkeypatch):
    """The tensors and the log are those of one snapshot."""
    async with tiny(store=Store(tmp_path, keep_last=5), max_live=2) as runtime, runtime.open("a", raw=True) as ctx:
        await ctx.push(list(range(5, 5 + 3 * CHUNK)))
        await ctx.snapshot()
        restore = restoring.restore

        async def then_saved(*arguments):
            restored = await restore(*arguments)
            await ctx.push(list(range(50, 50 + 2 * CHUNK)))
            await ctx.snapshot()
            return restored

        monkeypatch.setattr(restoring, "restore", then_saved)
        replayed = await runtime.replay("a")
        assert (replayed.tokens, replayed.differs) == (3 * CHUNK, ())
