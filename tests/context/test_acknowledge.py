"""A question after a feed has a turn of its own, which a short reply separates from what was fed."""

from __future__ import annotations

import pytest

from locret_stream import ConfigError, Runtime, SnapshotMismatch
from tests.context.support import ASK, END, TEXT, USER, data, ids_in, literals, scripted, tiny

SEPARATED = ASK, "OK.", END + USER


def ids_of_talk(runtime: Runtime, fed: str, asked: str, acknowledged: tuple[str, str, str] = SEPARATED) -> list[int]:
    ask, reply, again = acknowledged
    return (literals(runtime, USER) + data(runtime, fed) + literals(runtime, ask) + data(runtime, reply)
            + literals(runtime, again) + data(runtime, asked) + literals(runtime, ASK))


async def test_what_was_fed_is_closed_by_the_acknowledgement(monkeypatch):
    async with tiny(acknowledge="OK.") as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT[:40])
        before = ids_in(ctx)
        await ctx.ask("what?", max_new_tokens=1)
        assert ids_in(ctx) == before, "a question that is asked leaves nothing behind"
        scripted(monkeypatch, [data(runtime, "y")[0]])
        async for _ in ctx.generate("what?", max_new_tokens=1):
            pass
        assert ids_in(ctx)[:-len(literals(runtime, END)) - 1] == ids_of_talk(runtime, TEXT[:40], "what?")


async def test_nothing_is_acknowledged_where_nothing_was_fed(monkeypatch):
    async with tiny(acknowledge="OK.") as runtime, runtime.open() as ctx:
        scripted(monkeypatch, data(runtime, "yy")[:2])
        async for _ in ctx.generate("one?", max_new_tokens=1):
            pass
        async for _ in ctx.generate("two?", max_new_tokens=1):
            pass
        assert data(runtime, "OK.") != [] and "OK." not in runtime.codec.decode(ids_in(ctx), skip_special=False)


async def test_raw_contexts_acknowledge_nothing(monkeypatch):
    async with tiny(acknowledge="OK.") as runtime, runtime.open(raw=True) as ctx:
        await ctx.feed("a b c")
        scripted(monkeypatch, data(runtime, "y"))
        async for _ in ctx.generate(" d", max_new_tokens=1):
            pass
        assert runtime.codec.decode(ids_in(ctx), skip_special=False).startswith("a b c d")


async def test_the_acknowledgement_is_part_of_the_identity(tmp_path):
    async with tiny(acknowledge="OK.", store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed(TEXT)
    for other in (None, "Read."):
        async with tiny(acknowledge=other, store=tmp_path) as runtime:
            with pytest.raises(SnapshotMismatch, match="template"):
                async with runtime.open("s"):
                    pass
    async with tiny(acknowledge="OK.", store=tmp_path) as runtime, runtime.open("s") as ctx:
        assert ctx.resumed


def test_a_word_is_needed():
    for none in ("", "  ", 1):
        with pytest.raises(ConfigError, match="acknowledge is"):
            Runtime(None, None, acknowledge=none)
