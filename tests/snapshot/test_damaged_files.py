"""Damaged, swapped and missing files are found and refused; nothing is collected around them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotTooNew, StoreError
from locret_stream.snapshot import Store
from locret_stream.snapshot.branch import check_manifest
from locret_stream.snapshot.format import VERSION, Manifest, unpack
from locret_stream.snapshot.log import read_log
from locret_stream.snapshot.names import folder_of, hashed
from tests.snapshot.forge import page_ref, sound_manifest
from tests.snapshot.support import (
    BUDGETS,
    GEOMETRY,
    IDENTITY,
    Record,
    Toy,
    again,
    begin,
    everything,
    holds,
    load,
    loaded,
    local_store,
    needed,
    of_version,
    problems,
    resume,
    same,
    save,
    stored,
)

pytestmark = pytest.mark.usefixtures("spools")


# -- pages and log parts ----------------------------------------------------------------------------------------------


def files_of(store: Store, kind: str, name: str = "alice") -> list[Path]:
    own = Path(store.url) / folder_of("alice")
    return sorted((own / (f"m/{hashed(name)}" if kind == "m" else kind)).iterdir())


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(64))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip, "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0), "grown": grow,
    "missing": Path.unlink, "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "folder": lambda path: (path.unlink(), path.mkdir()), "link": lambda path: (
        shutil.copy(path, path.parents[3] / "copy"), path.unlink(), path.symlink_to(path.parents[3] / "copy"))}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["pages", "log"])
@pytest.mark.thorough(but=6)
def test_a_damaged_file_is_found_refused_and_never_collected_around(local, kind, damage):
    """`load` reads pages, `read_log` the log, `verify` both; other snapshots are as good as before."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other, another = begin(local, "dave", tokens=30)
    save(other, another)
    for path in files_of(local, kind):
        DAMAGE[damage](path)
    with pytest.raises(SnapshotCorrupt):
        load(again(local), "alice")
    assert [result.name for result in local.verify() if result.problem] == ["alice"]
    assert len(problems(local, "alice")) == 1 and holds(local, "dave", another.record())
    before = everything(local.url)
    assert local.gc().removed == () and everything(local.url) == before
    local.delete("alice")
    assert problems(local) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "grown"])
@pytest.mark.parametrize("kind", ["pages", "log"])
def test_the_owner_who_is_open_writes_anew_what_went_missing(local, kind, damage):
    """Memory is sound, so the next snapshot must be; only ids that are nowhere else are lost, and that is said."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for path in files_of(local, kind):
        DAMAGE[damage](path)
    done = save(branch, toy.feed(3, branch))
    assert done.log is (kind == "pages")
    if kind == "log":
        toy.ids = None
    assert holds(local, "alice", toy.record())


def test_a_save_does_not_fail_over_an_old_log_part_that_is_damaged(local):
    branch, toy = begin(local, "alice", tokens=8)
    save(branch, toy)
    flip(files_of(local, "log")[0])
    done = save(branch, toy.feed(40, branch))  # would take the old part in
    reopened = again(local).branch("alice")
    assert same(Record(reopened.load(IDENTITY, GEOMETRY, BUDGETS).tensors, toy.frame, 48, 48, None),
                Record(toy.record().tensors, toy.frame, 48, 48, None))
    with pytest.raises(SnapshotCorrupt):
        list(read_log(reopened.session_folder, reopened.name, reopened.log))
    assert done.log and len(problems(local)) == 2


def test_swapped_files_are_found(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    local2 = again(local)
    other, another = resume(local2, "alice")
    save(other, another.feed(200, other))
    for kind in ("pages", "log"):
        one, two = files_of(local, kind)[:2]
        content = one.read_bytes(), two.read_bytes()
        one.write_bytes(content[1])
        two.write_bytes(content[0])
        for generation in (1, 2):
            with pytest.raises(SnapshotCorrupt):
                load(again(local), "alice", generation)
        assert len(problems(local)) == 2
        one.write_bytes(content[0])
        two.write_bytes(content[1])
        assert problems(local) == []


def test_two_sound_pages_or_log_parts_of_one_range_that_change_places_are_found(local):
    """Each is a file that this store wrote, of the right positions and size."""
    branch, toy = begin(local, "alice", seed=1, tokens=28)
    fork, other = branch.fork("bob", 0), Toy(2)
    save(branch, toy)
    save(fork, other.feed(28, fork))
    for kind in ("pages", "log"):
        one, two = files_of(local, kind)
        content = one.read_bytes(), two.read_bytes()
        assert len(content[0]) == len(content[1])
        one.write_bytes(content[1])
        two.write_bytes(content[0])
        for name in ("alice", "bob"):
            with pytest.raises(SnapshotCorrupt, match=r"another file than the one of that name|does not open"):
                load(again(local), name)
        assert len(problems(local)) == 2
        one.write_bytes(content[0])
        two.write_bytes(content[1])
    assert problems(local) == [] and holds(local, "alice", toy.record()) and holds(local, "bob", other.record())


# -- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["number", "branch", "session"])
def test_a_manifest_that_was_moved_is_refused_by_all(local, target):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(9, branch))
    save(branch.fork("bob", toy.seen), toy)
    other, another = begin(local, "dave", tokens=9)
    save(other, another)
    source = files_of(local, "m")[0]
    place = {"number": source.with_name("000000000009.snap"),
             "branch": files_of(local, "m", "bob")[0].with_name("000000000002.snap"),
             "session": Path(local.url) / folder_of("dave") / "m" / hashed("dave") / "000000000002.snap"}[target]
    if target == "session" and local._key is None:
        place = place.parent.parent / hashed("alice") / "000000000001.snap"  # complete with its branch: still not there
        place.parent.mkdir()
    shutil.copy(source, place)
    name = {"number": "alice", "branch": "bob", "session": "dave"}[target]
    assert len(problems(local)) == 1
    strange = [snapshot for snapshot in local.list() if snapshot.problem]
    assert len(strange) <= 1 and all("moved" in info.problem or "does not open" in info.problem for info in strange)
    with pytest.raises(SnapshotCorrupt):
        local.gc()
    if place.parent.name == hashed(name):
        with pytest.raises(SnapshotCorrupt):
            load(again(local), name)
        *sound, last = local.info(name)
        assert last.problem and last.generation == int(place.name[:12]) and not any(info.problem for info in sound)
        assert local.delete(name, int(place.name[:12])) == [int(place.name[:12])]
        local.gc()
        assert problems(local) == [] and store_loads(local, name)


def store_loads(store: Store, name: str) -> bool:
    """Whether the newest snapshot can be read."""
    return loaded(again(store), name).seen > 0


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in ("missing", "folder")])
def test_nothing_is_collected_where_a_manifest_cannot_be_read(local, damage):
    branch, toy = begin(local, "alice", tokens=30)
    for _ in range(3):
        save(branch, toy.feed(40, branch))
    own = Path(local.url) / folder_of("alice")
    (own / "pages" / ("0" * 32)).write_bytes(b"rubbish")
    DAMAGE[damage](files_of(local, "m")[1])
    pages = stored(local, "alice")
    for use in (local.gc, lambda: local.gc("alice"), lambda: local.prune(branch)):
        with pytest.raises(SnapshotCorrupt):
            use()
        assert stored(local, "alice") == pages
    assert holds(local, "alice", toy.record())  # the newest one is sound
    assert local.delete("alice", 2) == [2]
    assert stored(local, "alice") == needed(local, "alice") and holds(local, "alice", toy.record())


def test_a_manifest_that_cannot_be_read_does_not_keep_the_older_ones_from_being_loaded(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    record = toy.record()
    save(branch, toy.diverged(1).feed(9, branch))
    save(fork, toy.diverged(1).feed(9, fork))
    for name in ("alice", "bob"):
        flip(files_of(local, "m", name)[1])
        with pytest.raises(SnapshotCorrupt):
            load(again(local), name)
        assert holds(local, name, record, 1)
        other, back = resume(again(local), name, 1)
        assert other.session == "alice" and save(other, back.feed(5, other)).generation == 3
        assert holds(local, name, back.record())


def test_a_snapshot_of_a_later_format_is_reported_as_such_and_nothing_is_collected(tmp_path):
    store = local_store(tmp_path / "store")
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    path = files_of(store, "m")[0]
    path.write_bytes(of_version(path.read_bytes(), VERSION + 1))
    (Path(store.url) / folder_of("alice") / "pages" / ("0" * 32)).write_bytes(b"rubbish")
    before = everything(store.url)
    assert [f"version {VERSION + 1}" in info.problem for info in (*store.list(), *store.info("alice"))] == [True, True]
    for use in (lambda: load(store, "alice"), store.gc):
        with pytest.raises(SnapshotTooNew):
            use()
    assert len(problems(store)) == 1 and everything(store.url) == before


@pytest.mark.parametrize("lie", [
    {"seen": 29}, {"counts": (5,)}, {"counts": (12, 5)}, {"tokens": 29}, {"pages": (page_ref("c" * 32, 5, 5, 0, 0),)},
    {"pages": (page_ref("c" * 32, 6, 5, 4, 4),)}, {"pages": (page_ref("c" * 32, 0, 10, 4, 5),)},
    {"pages": (page_ref("c" * 32, 0, 10, 4, 4), page_ref("d" * 32, 9, 30, 4, 4))},
    {"pages": (page_ref("d" * 32, 10, 30, 4, 4), page_ref("c" * 32, 0, 10, 4, 4))}], ids=str)
def test_a_manifest_whose_numbers_cannot_be_true_is_refused_before_anything_is_read_by_them(lie: dict):
    manifest, sections, _ = unpack(sound_manifest(), Manifest, "it")
    check_manifest(manifest, sections, (11, 7), "it")
    with pytest.raises(SnapshotCorrupt, match=r"^it: "):
        check_manifest(msgspec.structs.replace(manifest, **lie), sections, (11, 7), "it")
    with pytest.raises(SnapshotCorrupt, match="expected state and masks"):
        check_manifest(manifest, {"state": sections["state"]}, (11, 7), "it")


def test_a_folder_where_the_next_manifest_goes_is_a_store_error(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000002.snap").mkdir()
    with pytest.raises(StoreError, match="is no snapshot"):
        save(branch, toy.feed(9, branch))
    assert holds(again(local), "alice", toy.diverged(1).record()) is False
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    assert holds(local, "bob", toy.record())
