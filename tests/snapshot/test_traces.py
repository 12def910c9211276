"""Forgetting leaves no byte of the session: not in the store's folder, and not in that of temporary files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from locret_stream.errors import StoreError
from locret_stream.snapshot.local import LocalFiles
from tests.context.support import tiny
from tests.snapshot.support import KEY, everything

SECRET = "The pass key of falcon is 48213, and nobody else may know.\n"


def traces(where: Path, ids: list[int]) -> list[str]:
    """Files that hold the text, the session's name, or four of its token ids in a row, in any width, anywhere."""
    needles = [SECRET.encode()[:12], b"falcon", b"private name"]
    needles += [np.array(ids[at:at + 4], dtype=width).tobytes() for at in range(0, len(ids) - 4)
                for width in ("<i4", "<i8")]
    return [path for path, content in everything(where).items() if content and any(one in content for one in needles)]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
async def test_nothing_of_a_forgotten_session_is_found_in_any_file(tmp_path: Path, monkeypatch, key):
    """Of snapshots that were retired, forks, undone turns, focuses, notes, a save that failed, and text still held."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    async with tiny(store=tmp_path / "store", key=key) as runtime:
        ids = runtime.codec.encode_text(SECRET)
        async with runtime.open("private name", raw=True) as ctx:
            for _ in range(6):  # more than stay
                await ctx.push(SECRET)
                await ctx.snapshot()
            with pytest.raises(KeyError):
                async with ctx.turn():
                    await ctx.push(SECRET * 3)
                    raise KeyError
            async with ctx.fork("private name, too") as fork:
                await fork.push(SECRET)
                fork.note = b"falcon"
            real = LocalFiles.write

            def full(self: LocalFiles, path: str, *arguments: object, **options: object) -> None:
                if "/m/" in path:
                    raise StoreError("full")
                real(self, path, *arguments, **options)

            await ctx.push(SECRET)
            with monkeypatch.context() as patch:
                patch.setattr(LocalFiles, "write", full)
                with pytest.raises(StoreError, match="full"):
                    await ctx.snapshot()
            await ctx.push("falcon, still held")
        assert bool(traces(tmp_path, ids)) is (key is None)  # what is looked for is there, and what looks finds it
        await runtime.forget("private name")
        assert traces(tmp_path, ids) == [] and everything(tmp_path) == {"store": None, "temporary": None}


async def test_nothing_of_a_deleted_fork_or_of_deleted_snapshots_is_found_in_any_file(tmp_path: Path):
    async with tiny(store=tmp_path) as runtime:
        ids = runtime.codec.encode_text(SECRET)
        async with runtime.open("alice", raw=True) as ctx:
            await ctx.push("nothing to hide\n" * 20)
            await ctx.snapshot()
            async with ctx.fork("private name") as fork:
                await fork.push(SECRET * 3)
        assert traces(tmp_path, ids)
        runtime.store.delete("private name")
        assert traces(tmp_path, ids) == []
        async with runtime.open("alice", raw=True) as ctx:
            await ctx.push(SECRET * 3)
        assert traces(tmp_path, ids)
        runtime.store.delete("alice")
        assert traces(tmp_path, ids) == []
