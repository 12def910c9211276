"""Whoever holds a session's lock needs no thread that may wait for it: who waits never hangs what is waited for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from locret_stream.context.saving import storing
from locret_stream.errors import SnapshotNotFound
from tests.context.support import tiny
from tests.snapshot.support import everything


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("waiting", [2, 5])
@pytest.mark.thorough(but=2)
async def test_forgets_during_a_save_wait_for_it_and_hang_nothing(tmp_path: Path, waiting: int, closing: bool,
                                                                  monkeypatch):
    """More of them than there are storing threads. Nothing refuses them: the context is closing, which ends its save,
    or they are asked of the store, and the save runs to its end."""
    async with tiny(store=tmp_path) as runtime:
        ctx = await runtime.open("alice").__aenter__()
        await ctx.feed("The pass key of falcon is 48213.\n" * 9)
        await ctx.snapshot()
        await ctx.feed("The pass key of falcon is 48213.\n" * 9)
        go, inside, real = threading.Event(), threading.Event(), runtime.engine.units_between

        def units_between(*arguments: object) -> object:
            inside.set()
            assert go.wait(20)
            return real(*arguments)

        monkeypatch.setattr(runtime.engine, "units_between", units_between)
        saving = asyncio.create_task(ctx.snapshot())
        try:
            assert await asyncio.to_thread(inside.wait, 20)
            tasks = [saving]
            if closing:
                tasks.append(asyncio.create_task(ctx.aclose(save=False)))
                await asyncio.sleep(0)
                forgetting = [asyncio.create_task(runtime.forget("alice")) for _ in range(waiting)]
            else:
                forgetting = [asyncio.ensure_future(storing(runtime, runtime.store.forget, "alice"))
                              for _ in range(waiting)]
            await asyncio.sleep(0.2)  # every storing thread has one by now
            assert not any(task.done() for task in forgetting)
        finally:
            go.set()
        tasks += forgetting
        _, hanging = await asyncio.wait(tasks, timeout=20)
        runtime.storing._max_workers += waiting  # else what hangs would keep the process from ending
        for _ in range(waiting):
            runtime.storing.submit(int)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not hanging
        if not closing:
            assert saving.result().generation == 2
            await ctx.aclose(save=False)
        results = [await task if task.exception() is None else task.exception() for task in forgetting]
        assert sum(isinstance(result, list) and len(result) > 0 for result in results) == 1
        assert sum(isinstance(result, SnapshotNotFound) or result == [] for result in results) == waiting - 1
    assert not [path for path, content in everything(tmp_path).items() if content is not None]
