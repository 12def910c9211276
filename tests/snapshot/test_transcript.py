"""The text of a session is read from disk: the text of any place, of words, and of what memory keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from locret_stream import Runtime, SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound, Store
from locret_stream.snapshot.log import read_stored_log
from locret_stream.snapshot.transcript import read_transcript
from tests.langchain.support import tiny_model, tokenizer
from tests.snapshot.forge import build, parts_of, resaved
from tests.snapshot.support import IDENTITY, begin, closed_spools, local_store, save

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
    transcript = read_transcript(store, "a")
    whole = transcript.between(0, transcript.tokens, decode)
    assert whole.text == TEXT[:3000] + FACT + TEXT[3000:] and (whole.start, whole.end) == (0, transcript.tokens)
    half = transcript.tokens // 2
    assert transcript.between(0, half, decode).text + transcript.between(half, 10**9, decode).text == whole.text
    assert transcript.between(10**9, 10**9, decode).text == ""
    older = read_transcript(store, "a", 1)
    assert older.between(0, older.tokens, decode).text == TEXT[:3000]


async def test_words_are_found_wherever_they_lie(store: Store):
    passages = read_transcript(store, "a").find(["Falcon", "door code"], decode, 2)
    assert any("door code of falcon is 48213" in passage.text for passage in passages)
    assert all(passage.share == 0 for passage in passages), "it was evicted"
    best = read_transcript(store, "a").find(["line 150 of", "worker"], decode, 1)
    assert len(best) == 1 and "line 150 of the log" in best[0].text
    assert not read_transcript(store, "a").find(["heron"], decode, 3)
    many = read_transcript(store, "a").find(["worker"], decode, 4)
    assert len(many) == 4 and [passage.start for passage in many] == sorted(passage.start for passage in many)


async def test_what_is_kept_is_what_the_policy_keeps(store: Store):
    """The first four tokens, and the last: in these no gap."""
    transcript = read_transcript(store, "a")
    first, *rest = transcript.kept(decode)
    assert (first.start, first.end, first.share) == (0, 4, 1.0)
    assert [passage.share for passage in rest] == [1.0] * len(rest) and rest[-1].end == transcript.tokens
    assert sum(passage.end - passage.start for passage in [first, *rest]) == 96 + len(transcript.pending)
    assert "".join(passage.text for passage in rest) == TEXT[-len("".join(passage.text for passage in rest)):]


async def test_damage_and_other_tokenizers_are_reported(store: Store, tmp_path: Path):
    with pytest.raises(SnapshotMismatch, match="another tokenizer"):
        read_transcript(store, "a", tokenizer="0" * 64)
    with pytest.raises(SnapshotNotFound):
        read_transcript(store, "b")
    with pytest.raises(SnapshotNotFound):
        read_transcript(store, "a", 9)
    damage(tmp_path)
    with pytest.raises(SnapshotCorrupt):
        read_transcript(store, "a").find(["falcon"], decode, 2)


@pytest.fixture
def forged(tmp_path: Path) -> Any:
    """Writes the manifest of a session, or its page, anew, with checksums that hold."""
    store = local_store(tmp_path)
    with closed_spools():
        branch, toy = begin(store, "a", tokens=22)
        save(branch, toy)
        manifest, page = next(tmp_path.glob("s-*/m/*/*.snap")), next(tmp_path.glob("s-*/pages/*"))

        def forge(section: str, **changed: torch.Tensor | None) -> Store:
            header, sections = parts_of(manifest.read_bytes())
            if section == "index":
                body, parts = parts_of(page.read_bytes())
                data = build(2, body["body"], [(name, resaved(content, **changed) if name == section else content)
                                               for name, content in parts.items()])
                (page.parent / data[32:48].hex()).write_bytes(data)
                header["body"]["pages"][0][0], header["body"]["pages"][0][3] = data[32:48].hex(), len(data)
            elif changed:
                sections[section] = resaved(sections[section], **changed)
            else:
                del sections[section]
            manifest.write_bytes(build(1, header["body"], list(sections.items())))
            return store

        yield forge


@pytest.mark.parametrize("pending", [
    None, torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2, dtype=torch.uint8),
    torch.zeros(2, 2, dtype=torch.int64), torch.tensor(7), torch.tensor([2**40]), torch.tensor([2**31]),
    torch.tensor([3, -1])], ids=str)
def test_pending_ids_that_cannot_be_are_damage(forged, pending: torch.Tensor | None):
    store = forged("state", pending=pending)
    with pytest.raises(SnapshotCorrupt, match="pending ids"):
        read_transcript(store, "a")
    with pytest.raises(SnapshotCorrupt, match="pending ids"):
        read_stored_log(store.branch("a").session_folder, "a", IDENTITY)


@pytest.mark.parametrize("section", ["state", "masks"])
def test_a_manifest_without_one_of_its_sections_is_damage(forged, section: str):
    with pytest.raises(SnapshotCorrupt, match="expected state and masks"):
        read_transcript(forged(section), "a")


@pytest.mark.parametrize("changed", [
    {"1.positions": None}, {"0.positions": torch.zeros(22, dtype=torch.bfloat16)},
    {"0.positions": torch.zeros(2, 11, dtype=torch.int32)}, {"0.positions": torch.full((22,), 99, dtype=torch.int32)},
    {"0.positions": torch.full((22,), -1, dtype=torch.int32)}, {"counts": torch.zeros(2, 0, dtype=torch.int32)},
    {"counts": torch.zeros(0, 2, dtype=torch.int32)}, {"counts": torch.zeros(2, 2)}], ids=str)
def test_a_page_whose_positions_cannot_be_is_damage(forged, changed: dict[str, torch.Tensor | None]):
    with pytest.raises(SnapshotCorrupt):
        read_transcript(forged("index", **changed), "a")


def test_ids_of_any_width_are_reported(forged):
    store = forged("state", pending=torch.tensor([2**31 - 1, 0]))
    assert read_transcript(store, "a").pending.tolist() == [2**31 - 1, 0]
    assert read_transcript(forged("index", more=None), "a").log
