"""Parts of an answer that travel together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from locret_serve.memory import bundles
from locret_stream.conversation.parts import End, Part

END = End(1, 0, 1, "stop", {})


async def test_the_first_is_at_once_the_others_wait_and_the_end_is_the_last():
    after_the_end = list[str]()

    async def parts() -> AsyncGenerator[Part | End]:
        for word in "abcdefgh":
            yield Part(word)
            await asyncio.sleep(0.001)
        yield END
        after_the_end.append("asked for")

    found = list[list[Part | End]]()
    async with asyncio.timeout(60), aclosing(bundles(parts(), 30)) as each:
        async for bundle in each:
            found.append(bundle)
            assert after_the_end == []  # before this one was taken
    assert found == [[Part("a")], [*map(Part, "bcdefgh"), END]] and after_the_end == ["asked for"]


async def test_a_part_waits_no_longer_than_it_is_told():
    async def parts() -> AsyncGenerator[Part | End]:
        yield Part("a")
        yield Part("b")
        await asyncio.sleep(3600)

    async with asyncio.timeout(60), aclosing(bundles(parts(), 0.05)) as each:
        assert await anext(each) == [Part("a")]
        assert await anext(each) == [Part("b")]


async def test_without_waiting_each_travels_alone():
    async def parts() -> AsyncGenerator[Part | End]:
        for word in "abc":
            yield Part(word)
        yield END

    async with asyncio.timeout(60), aclosing(bundles(parts(), 0)) as each:
        assert [bundle async for bundle in each] == [[Part("a")], [Part("b")], [Part("c")], [END]]


async def test_what_came_before_a_failure_travels_first():
    async def parts() -> AsyncGenerator[Part | End]:
        yield Part("a")
        yield Part("b")
        raise ValueError("broken")

    async with asyncio.timeout(60), aclosing(bundles(parts(), 30)) as each:
        assert [await anext(each), await anext(each)] == [[Part("a")], [Part("b")]]
        with pytest.raises(ValueError, match="broken"):
            await anext(each)


async def test_closing_cancels_the_parts():
    undone = list[str]()

    async def parts() -> AsyncGenerator[Part | End]:
        try:
            yield Part("a")
            await asyncio.sleep(3600)
        finally:
            undone.append("undone")

    given = parts()
    async with asyncio.timeout(60), aclosing(given):
        async with aclosing(bundles(given, 0.01)) as each:
            assert await anext(each) == [Part("a")]
            waiting = asyncio.ensure_future(anext(each))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait({waiting})
    assert undone == ["undone"]
