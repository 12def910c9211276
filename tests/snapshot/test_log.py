"""The log: ids wait in a spool, parts take them over and stay few, and a part that lies is refused."""

from __future__ import annotations

import errno
import math
import os
import random
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.errors import SnapshotCorrupt, StoreError
from locret_stream.snapshot import log
from locret_stream.snapshot.format import Frame, LogPart, LogRef, unpack
from locret_stream.snapshot.log import PART_IDS, TAKEN_SHARE, Part, Spool, absorbed, read_part, write_part
from tests.context.support import expect_same, snap, tiny
from tests.context.test_snapshots import settled
from tests.snapshot.forge import parts_of, rebuilt, resaved, sound_log
from tests.snapshot.support import KEY

BODY = LogPart(branch="alice", generation=1, tokenizer="t", start=0, end=3)
IDS = st.integers(-2**31, 2**31 - 1)


@pytest.fixture
def spool():
    made = Spool(100)
    yield made
    made.close()


# -- spool --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["append", "replace", "drop", "read"]), st.lists(IDS, max_size=9),
                          st.floats(0, 1)), max_size=20), st.integers(0, 2**53))
@settings(max_examples=60)
def test_a_spool_holds_just_the_ids_appended_and_not_dropped(steps, start: int):
    spool, held = Spool(start), []
    try:
        for step, ids, where in steps:
            at = round(where * len(held))
            if step == "append":
                spool.append(ids)
                held += ids
            elif step == "replace":
                spool.append(iter(ids), start + at)
                held[at:] = ids
            elif step == "drop":
                spool.drop(start + at)
                start += at
                del held[:at]
            assert (spool.start, spool.end) == (start, start + len(held))
            some = at if step == "read" else len(held)
            assert spool.read(start + some).tolist() == held[:some]
        assert spool.read(spool.start).tolist() == []
    finally:
        spool.close()


def test_appended_ids_are_on_the_disk_and_not_in_memory(spool: Spool):
    spool.append([1, 2, 3])
    assert os.fstat(spool._file.fileno()).st_size == 12


def test_ids_come_out_of_a_spool_as_int32_that_may_be_kept(spool: Spool):
    spool.append([5, 6])
    ids = spool.read(102)
    spool.append([7, 8], 100)
    assert ids.dtype == np.int32 and ids.tolist() == [5, 6]


def test_an_emptied_spool_gives_its_room_back(spool: Spool):
    for _ in range(5):
        spool.append(range(1000))
        spool.drop(spool.end)
        assert spool._file.seek(0, 2) == 0
    spool.append([1])
    assert spool.read(spool.end).tolist() == [1] and spool._file.seek(0, 2) == 4


@pytest.mark.parametrize("at", [99, 104, 0, -1])
def test_a_gap_in_a_spool_is_a_mistake_of_ours(spool: Spool, at: int):
    spool.append([1, 2, 3])
    for use in (lambda: spool.append([4], at), lambda: spool.read(at), lambda: spool.drop(at)):
        with pytest.raises(AssertionError):
            use()
    assert spool.read(103).tolist() == [1, 2, 3]


class Full:
    """A file on a disk that is full after so many bytes, or takes a few at a time."""

    def __init__(self, file: Any, room: int, most: int = 10**9):
        self.file, self.room, self.most = file, room, most

    def write(self, data: bytes) -> int:
        count = min(len(data), self.room, self.most)
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= count
        return self.file.write(data[:count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 4, 7])
def test_a_write_that_fails_leaves_what_came_before_and_the_next_takes_its_place(spool: Spool, room: int):
    spool.append([1, 2, 3])
    sound = spool._file
    spool._file = Full(sound, room)
    with pytest.raises(OSError, match="No space"):
        spool.append([4, 5, 6])
    assert spool.read(spool.end).tolist() == [1, 2, 3]
    with pytest.raises(OSError, match="No space"):
        spool.append(range(9), 101)  # in place of 2 and 3, which are forgotten whatever comes of it
    assert spool.read(spool.end).tolist() == [1]
    spool._file = sound
    spool.append([7])
    assert spool.read(spool.end).tolist() == [1, 7] and spool.end == 102


class Disk:
    """Makes temporary files that share the room of one disk."""

    def __init__(self) -> None:
        self.room = 10**9
        self.files: list[Any] = []

    def __call__(self, **options: Any) -> Any:
        disk, file = self, REAL_FILE(**options)
        if not disk.room:
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")

        class OnDisk:
            def write(self, data: bytes) -> int:
                count = min(len(data), disk.room)
                if not count:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= count
                return file.write(data[:count])

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        self.files.append(file)
        return OnDisk()


REAL_FILE = log.tempfile.TemporaryFile


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("room", [0, 1, 4, 8, 9, 11, 12, 15])
def test_a_full_disk_costs_no_id_that_was_taken_and_once_there_is_room_all_goes_on(monkeypatch, hidden: bool,
                                                                                  room: int):
    """Of ids in another's place, too: a hidden spool begins a new file for them and keeps the old till that stands."""
    disk = Disk()
    monkeypatch.setattr(log.tempfile, "TemporaryFile", disk)
    spool = Spool(100, hidden=hidden)
    spool.append([1, 2, 3, 4])
    for _ in range(3):
        disk.room = room
        with pytest.raises(OSError, match="No space"):
            spool.append([7, 8, 9, 10, 11], 102)
        assert spool.end in (102, 104) and spool.read(102).tolist() == [1, 2]
        assert sum(not file.closed for file in disk.files) == 1
    disk.room = 10**9
    spool.append([7, 8, 9], 102)
    assert spool.read(105).tolist() == [1, 2, 7, 8, 9]
    spool.append([5], 101)
    assert spool.read(102).tolist() == [1, 5]
    spool.close()
    assert all(file.closed for file in disk.files)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
async def test_a_session_whose_temporary_files_found_no_room_goes_on_and_lost_nothing(tmp_path, monkeypatch, key):
    disk, text = Disk(), "The pass key of falcon is 48213.\n" * 9
    monkeypatch.setattr(log.tempfile, "TemporaryFile", disk)
    async with tiny(store=tmp_path, key=key) as runtime:
        async with runtime.open("alice", raw=True) as ctx:
            await ctx.push(text)
            with pytest.raises(KeyError):
                async with ctx.turn():
                    await ctx.push(text[::-1])
                    raise KeyError
            disk.room = 8
            with pytest.raises(StoreError, match="expected room for temporary files"):
                await ctx.push(text)
            disk.room = 10**9
            await ctx.flush()  # what was not taken is held
            tokens = (await ctx.snapshot()).tokens
            expected = await snap(ctx)
        async with runtime.open("twin", raw=True) as ctx:
            await ctx.push(text)
            await ctx.push(text)
            await ctx.flush()
            assert ctx.memory.tokens == tokens
            expect_same(settled(await snap(ctx)), settled(expected))
        async with runtime.open("alice", raw=True) as ctx:
            expect_same(settled(await snap(ctx)), settled(expected))
        async with tiny(store=tmp_path, key=key, chunk_size=5) as other, \
                other.open("alice", raw=True, on_mismatch="rebuild") as ctx:
            assert ctx.memory.tokens == tokens


def test_a_spool_that_cannot_give_its_room_back_goes_on(spool: Spool):
    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return getattr(sound, name)

        def truncate(self, size: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    sound = spool._file
    spool.append([1, 2, 3])
    spool._file = Stuck()
    spool.drop(103)
    spool.append([4])
    spool._file = sound
    assert spool.read(104).tolist() == [4]


def test_a_spool_that_lost_ids_says_so_and_gives_no_others(spool: Spool):
    spool.append([1, 2, 3])
    spool._file.truncate(8)
    assert spool.read(102).tolist() == [1, 2]
    with pytest.raises(OSError, match="2 of 3 ids"):
        spool.read(103)


@given(st.lists(st.tuples(st.sampled_from(["append", "replace", "drop", "drop all"]), st.integers(1, 9),
                          st.floats(0, 1)), min_size=2, max_size=12))
@settings(max_examples=60)
def test_no_place_of_a_hidden_spool_is_written_twice_under_one_key(steps):
    """Two texts under one keystream give each other away. Of ids that are all 0 the keystream is what is stored."""
    spool, seen = Spool(0, hidden=True), set()
    try:
        for step, count, where in steps:
            at = spool.start + round(where * (spool.end - spool.start))
            if step.startswith("drop"):
                spool.drop(spool.end if step == "drop all" else at)
                continue
            before = id(spool._scrambler)
            spool.append([0] * count, at if step == "replace" else None)
            at = spool.end - count if before == id(spool._scrambler) else spool.start
            spool._file.seek(4 * (at - spool._origin))
            streams = np.fromfile(spool._file, dtype="<i4", count=spool.end - at).tolist()
            places = {(number, word) for number, word in enumerate(streams, at - spool._origin)}
            assert len(places) == spool.end - at and not places & seen
            seen |= places
    finally:
        spool.close()


def test_a_spool_is_written_whole_by_a_system_that_takes_a_few_bytes_at_a_time(spool: Spool):
    sound = spool._file
    spool._file = Full(sound, 10**9, 3)
    spool.append(range(20))
    spool._file = sound
    assert spool.read(120).tolist() == list(range(20))


def test_a_spool_leaves_no_name_in_the_folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(log.tempfile, "tempdir", str(tmp_path))
    spool = Spool(0)
    spool.append([1])
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_the_spool_of_an_encrypted_session_hides_its_ids_and_never_reuses_a_stream():
    """Whatever is appended, undone, read and dropped: as the plain one, and no id is in the file."""
    plain, hidden, written = Spool(3), Spool(3, hidden=True), []
    random_ids = random.Random(0)
    try:
        for step in range(200):
            at = random_ids.randint(plain.start, plain.end) if step % 3 == 0 else plain.end
            ids = [random_ids.randrange(1 << 30) for _ in range(random_ids.randint(1, 9))]
            for spool in (plain, hidden):
                spool.append(ids, at)
            hidden._file.seek(0)
            written.append(hidden._file.read())
            assert all(number.to_bytes(4, "little") not in written[-1] for number in ids)
            end = random_ids.randint(plain.start, plain.end)
            assert hidden.read(end).tolist() == plain.read(end).tolist()
            if step % 7 == 0:
                for spool in (plain, hidden):
                    spool.drop(end)
            assert (hidden.start, hidden.end) == (plain.start, plain.end)
    finally:
        plain.close()
        hidden.close()


def test_another_stream_hides_what_takes_the_place_of_an_undone_id():
    spool = Spool(0, hidden=True)
    spool.append([7] * 8)
    first = spool._scrambler
    spool.append([9], 4)
    assert spool._scrambler is not first and spool.read(5).tolist() == [7, 7, 7, 7, 9]
    spool.close()


@pytest.mark.parametrize("room", [1, 4, 7])
def test_another_stream_hides_what_takes_the_place_of_ids_whose_write_failed_halfway(room: int):
    spool = Spool(0, hidden=True)
    spool.append([1, 2, 3])
    first, sound = spool._scrambler, spool._file
    spool._file = Full(sound, room)
    with pytest.raises(OSError, match="No space"):
        spool.append([4, 5, 6])
    spool._file = sound
    spool.append([7])
    second, ids = spool._scrambler, spool.read(4).tolist()
    spool.close()
    assert second is not first and ids == [1, 2, 3, 7]


# -- parts --------------------------------------------------------------------------------------------------------


@given(st.lists(IDS, max_size=50), st.lists(IDS, max_size=9), st.binary(max_size=9), st.integers(0, 2**53 - 50),
       st.builds(Frame, text=st.text(max_size=20), tail=st.binary(max_size=4)), st.sampled_from([np.int32, np.int64]))
@settings(max_examples=50)
def test_a_part_is_read_back_as_it_was_written(ids, pending, held: bytes, start: int, frame: Frame, dtype):
    body = LogPart(branch="é", generation=7, tokenizer="t", start=start, end=start + len(ids),
                   before="a" * 32 if start else "", frame=frame)
    given_part = Part(np.array(ids, dtype), np.array(pending, dtype), np.frombuffer(held, np.uint8))
    data = b"".join(write_part(body, given_part))
    header, sections, _ = unpack(data, LogPart, "it")
    assert header == body
    back = read_part(header, sections, "it")
    assert [back.ids.dtype, back.pending.dtype, back.buffered.dtype] == [np.int32, np.int32, np.uint8]
    assert [back.ids.tolist(), back.pending.tolist(), back.buffered.tobytes()] == [ids, pending, held]


def test_the_same_ids_give_the_same_part():
    ids, none = np.arange(3), np.zeros(0, np.int32)
    assert write_part(BODY, Part(ids, none, none)) == write_part(BODY, Part(ids.astype(np.int32), none, none))


@pytest.mark.parametrize("changes, count", [({}, 2), ({}, 4), ({"end": 0}, 1), ({"start": 1}, 2),
                                            ({"before": "a" * 32}, 3), ({"start": 3, "end": 0}, 0)])
def test_a_part_that_would_be_refused_is_a_mistake_of_ours(changes: dict, count: int):
    with pytest.raises(AssertionError):
        none = np.zeros(0, np.int32)
        write_part(msgspec.structs.replace(BODY, **changes), Part(np.arange(count), none, none))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("body, change, says", [
    ({"end": 12}, {}, "'ids'"), ({"end": 10}, {}, "'ids'"),
    ({"start": 2**53 - 7, "end": 2**53}, {"ids": i32()}, "'ids'"),
    ({"start": 1, "end": 2**53}, {}, "'ids'"), ({"start": 11, "end": 4}, {}, "ids 11 to 4"),
    ({"end": 4}, {}, "'ids'"), ({"start": 0}, {}, "ids 0 to 11 behind part a"),
    ({"before": ""}, {}, "ids 4 to 11 behind part none"), ({}, {"ids": None}, "'ids' is missing"),
    ({}, {"ids": torch.arange(7)}, "'ids'"), ({}, {"ids": i32(*range(7))[None]}, "'ids'"),
    ({}, {"pending": None}, "'pending' is missing"), ({}, {"pending": torch.arange(2)}, "'pending'"),
    ({}, {"pending": i32(1, 2)[None]}, "'pending'"), ({}, {"pending": i32(1)[0]}, "'pending'"),
    ({}, {"pending": i32()[None]}, "'pending'"), ({}, {"more": i32()}, "'more'"), ({}, {"held": i32(1)}, "'held'"),
    ({}, {"held": torch.zeros((), dtype=torch.uint8)}, "'held'"),
])
def test_a_part_that_lies_is_refused(body: dict, change: dict, says: str):
    def lie(header: dict, sections: dict) -> None:
        header.update(body)
        sections["ids"] = resaved(sections["ids"], **change)

    header, sections, _ = unpack(sound_log(), LogPart, "it")
    sound = read_part(header, sections, "it")
    assert [sound.ids.tolist(), sound.pending.tolist()] == [list(range(100, 107)), [7, 8]]
    header, sections, _ = unpack(rebuilt(LogPart, lie), LogPart, "it")
    with pytest.raises(SnapshotCorrupt) as caught:
        read_part(header, sections, "it")
    assert str(caught.value).startswith("it: ") and says in str(caught.value)


@pytest.mark.parametrize("names", [[], ["id"], ["ids", "more"], ["more"]])
def test_a_part_of_other_sections_is_refused(names: list[str]):
    content = parts_of(sound_log())[1]["ids"]

    def lie(_: dict, sections: dict) -> None:
        sections.clear()
        sections.update(dict.fromkeys(names, content))

    header, sections, _ = unpack(rebuilt(LogPart, lie), LogPart, "it")
    with pytest.raises(SnapshotCorrupt, match="expected section ids"):
        read_part(header, sections, "it")


# -- growing together ---------------------------------------------------------------------------------------------


def refs_of(*sizes: int) -> tuple[LogRef, ...]:
    out, at = [], 0
    for size in sizes:
        out.append(LogRef("a" * 32, at, at + size, 0))
        at += size
    return tuple(out)


@pytest.mark.parametrize("sizes, count, taken", [
    ((), 5, 0), ((60,), 40, 1), ((61,), 40, 0), ((151, 60), 40, 1), ((150, 60), 40, 2), ((1000, 150, 60), 40, 2),
    ((1, 1000), 4, 0), ((1, 6), 4, 2), ((PART_IDS - 1,), PART_IDS, 0), ((PART_IDS - 1,), 1, 0),
    ((PART_IDS // 2,), PART_IDS // 2, 1), ((PART_IDS // 2,), PART_IDS // 2 + 1, 0),
    ((PART_IDS // 2, 5), PART_IDS // 2, 1), ((PART_IDS,), 2 * PART_IDS, 0),
    ((0,), 0, 1), ((1, 0), 0, 1), ((1, 0), 1, 2), ((9, 0), 2 * PART_IDS, 1), ((1,), 0, 0),
])
def test_a_new_part_takes_in_the_parts_before_it_that_are_not_much_larger(sizes, count: int, taken: int):
    assert absorbed(refs_of(*sizes), count) == taken and 4 * PART_IDS == 64 << 20


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300) | st.integers(1, 300).map(
    lambda most: list(range(most, 0, -1))))
@settings(max_examples=100)
def test_parts_stay_few_and_ids_are_written_few_times_whatever_each_save_brings(counts: list[int]):
    sizes: list[int] = []
    written = 0
    for count in counts:
        taken = absorbed(refs_of(*sizes), count)
        whole = count + sum(sizes[len(sizes) - taken:])
        sizes[len(sizes) - taken:] = [whole]
        written += whole
        assert all(before > TAKEN_SHARE * after for before, after in pairwise(sizes))
    total = sum(counts)
    assert sum(sizes) == total and len(sizes) <= 1 + math.log(total, TAKEN_SHARE)
    assert written <= total * (1 + math.log(total, 1 + 1 / TAKEN_SHARE))
