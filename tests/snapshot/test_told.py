"""What a session was told is read from disk: the text of any place, of words, and of what memory keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locret_stream import Runtime, SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound, Store
from locret_stream.snapshot.told import told
from tests.langchain.support import tiny_model, tokenizer

TEXT = "".join(f"line {number} of the log, worker {number * 37 % 100} is well\n" for number in range(200))
FACT = "Note that the door code of falcon is 48213.\n"


def damage(folder: Path) -> None:
    for path in folder.rglob("log/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def decode(ids: list[int]) -> str:
    return tokenizer().decode(ids, clean_up_tokenization_spaces=False)


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    """A session of a few thousand tokens, of which 96 units a head are kept; saved in pieces."""
    store = Store(tmp_path)
    async with Runtime(tiny_model(), tokenizer(), store=store, policy="streaming_llm", budget=96, sinks=4,
                       chunk_size=64) as runtime, runtime.open("a", raw=True) as ctx:
        for piece in (TEXT[:3000], FACT, TEXT[3000:]):
            await ctx.feed(piece)
            await ctx.snapshot()
    return store


async def test_any_place_is_read_back(store: Store):
    found = told(store, "a")
    whole = found.between(0, found.tokens, decode)
    assert whole.text == TEXT[:3000] + FACT + TEXT[3000:] and (whole.start, whole.end) == (0, found.tokens)
    half = found.tokens // 2
    assert found.between(0, half, decode).text + found.between(half, 10**9, decode).text == whole.text
    assert found.between(10**9, 10**9, decode).text == ""
    older = told(store, "a", 1)
    assert older.between(0, older.tokens, decode).text == TEXT[:3000]


async def test_words_are_found_wherever_they_lie(store: Store):
    found = told(store, "a").find(["Falcon", "door code"], decode, 2)
    assert any("door code of falcon is 48213" in passage.text for passage in found)
    assert all(passage.share == 0 for passage in found), "it was evicted"
    best = told(store, "a").find(["line 150 of", "worker"], decode, 1)
    assert len(best) == 1 and "line 150 of the log" in best[0].text
    assert not told(store, "a").find(["heron"], decode, 3)
    many = told(store, "a").find(["worker"], decode, 4)
    assert len(many) == 4 and [one.start for one in many] == sorted(one.start for one in many)


async def test_what_is_kept_is_what_the_policy_keeps(store: Store):
    """The first four tokens, and the last: in these no gap."""
    found = told(store, "a")
    first, *rest = found.kept(decode)
    assert (first.start, first.end, first.share) == (0, 4, 1.0)
    assert [one.share for one in rest] == [1.0] * len(rest) and rest[-1].end == found.tokens
    assert sum(one.end - one.start for one in [first, *rest]) == 96 + len(found.pending)
    assert "".join(one.text for one in rest) == TEXT[-len("".join(one.text for one in rest)):]


async def test_damage_and_other_tokenizers_are_told(store: Store, tmp_path: Path):
    with pytest.raises(SnapshotMismatch, match="another tokenizer"):
        told(store, "a", tokenizer="0" * 64)
    with pytest.raises(SnapshotNotFound):
        told(store, "b")
    with pytest.raises(SnapshotNotFound):
        told(store, "a", 9)
    damage(tmp_path)
    with pytest.raises(SnapshotCorrupt):
        told(store, "a").find(["falcon"], decode, 2)
