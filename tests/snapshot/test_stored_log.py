"""A log gives everything that was accepted when nothing else can be read, and a session goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotFound, StaleOwner, StoreError
from locret_stream.snapshot import Store
from locret_stream.snapshot.format import VERSION
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.log import Refocus
from locret_stream.snapshot.names import folder_of, hashed
from tests.snapshot.support import (
    IDENTITY,
    Toy,
    Unsynced,
    again,
    begin,
    failing_once,
    ids_of,
    loaded,
    local_store,
    of_version,
    resume,
    same,
    save,
    sound,
    two_owners,
)

pytestmark = pytest.mark.usefixtures("spools")


def logged_ids(store: Store, name: str, identity: Any = IDENTITY) -> list[int]:
    """All that was accepted, the pending ids last."""
    return ids_of(ids for ids, _ in again(store).branch(name).read_stored_log(identity).pieces())


@pytest.mark.parametrize("damage", ["nothing", "manifest", "page"])
def test_a_log_gives_everything_that_was_accepted(local, damage):
    branch, toy = begin(local, "alice", tokens=30)
    for tokens in (1, 9, 50, 3):
        save(branch, toy.feed(tokens, branch))
    accepted = [*toy.ids, *toy.pending]
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    save(fork, other.feed(6, fork))
    own = Path(local.url) / folder_of("alice")
    for path in {"nothing": [], "manifest": [own / "m" / hashed("alice") / "000000000004.snap"],
                 "page": sorted((own / "pages").iterdir())}[damage]:
        path.write_bytes(b"rubbish")
    assert logged_ids(local, "alice") == accepted and logged_ids(local, "bob") == [*other.ids, *other.pending]


def test_the_log_of_a_session_that_was_forgotten_and_begun_anew_is_read_with_its_own_key(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    again(local).forget("alice")
    other, another = begin(again(local), "alice", 2, 41)
    save(other, another)
    assert ids_of(ids for ids, _ in branch.read_stored_log(IDENTITY).pieces()) == [*another.ids, *another.pending]


def test_a_log_with_a_part_missing_is_none(local):
    branch, toy = begin(local, "alice", tokens=200)
    save(branch, toy)
    save(branch, toy.feed(20, branch))
    own = Path(local.url) / folder_of("alice")
    parts = sorted((own / "log").iterdir(), key=lambda path: -path.stat().st_size)
    assert len(parts) == 2
    parts[0].unlink()
    with pytest.raises(SnapshotCorrupt):
        logged_ids(local, "alice")
    (own / "m" / hashed("alice") / "000000000002.snap").write_bytes(b"rubbish")
    with pytest.raises(SnapshotCorrupt, match="gap"):
        logged_ids(local, "alice")


def test_a_log_of_another_tokenizer_is_refused(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other = msgspec.structs.replace(IDENTITY, tokenizer="other")
    with pytest.raises(SnapshotMismatch):
        logged_ids(local, "alice", other)
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000001.snap").write_bytes(b"rubbish")
    with pytest.raises(SnapshotMismatch):
        logged_ids(local, "alice", other)


def test_there_is_no_log_of_nothing(local):
    with pytest.raises((SnapshotCorrupt, SnapshotNotFound)):
        logged_ids(local, "alice")
    quiet = Store(local.url, key=local._key, log=False, files=LocalFiles(local.url, Unsynced()))
    branch, toy = begin(quiet, "alice", tokens=30)
    save(branch, toy)
    with pytest.raises(SnapshotCorrupt, match="without a log"):
        logged_ids(local, "alice")


def test_the_log_of_a_save_that_lost_is_not_taken_for_the_session(local):
    """It may lie there, with a number that another owner's snapshot bears."""
    (early, early_toy), (late, late_toy) = two_owners(local)
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: save(early, early_toy))
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000002.snap").write_bytes(b"rubbish")
    try:
        ids = logged_ids(local, "alice")
    except SnapshotCorrupt as error:
        assert "tells which" in str(error)
    else:
        assert ids == [*early_toy.ids, *early_toy.pending]


def test_a_session_fed_again_from_its_log_goes_on(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    fresh = again(local).branch("alice")
    ids = ids_of(ids for ids, _ in fresh.read_stored_log(IDENTITY).pieces())
    fresh.begin_anew()
    rebuilt = Toy(1)
    for _ in ids:
        rebuilt.feed(1, fresh)
    assert save(fresh, rebuilt.feed(9, fresh)).generation == 2
    assert same(loaded(again(local), "alice"), rebuilt.record())
    assert np.array_equal(rebuilt.ids[:28], toy.ids)


def test_who_rebuilds_is_fenced_by_a_save_since_the_log_was_read(store):
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    late = again(store).branch("alice")
    ids = ids_of(ids for ids, _ in late.read_stored_log(IDENTITY).pieces())
    save(branch, toy.feed(8, branch))
    late.begin_anew()
    with pytest.raises(StaleOwner):
        save(late, Toy(1).feed(len(ids), late))
    assert same(loaded(again(store), "alice"), toy.record())


@pytest.mark.parametrize("how", ["rebuilt", "rewound"])
def test_a_session_begun_anew_is_distinguished_from_the_one_of_before_without_a_base_too(store, how: str):
    branch, toy = begin(store, "alice", tokens=4)
    save(branch, toy)
    if how == "rewound":
        save(branch, toy.feed(4, branch))
        old, before = resume(again(store), "alice", 1)
    else:
        old, before = again(store).branch("alice"), Toy(1)
        old.read_stored_log(IDENTITY)
        old.begin_anew()
    store.forget("alice")
    fresh, other = begin(store, "alice", seed=9, tokens=4)
    for _ in range(2 if how == "rewound" else 1):
        save(fresh, other.feed(4, fresh))
    if how == "rewound":
        store.delete("alice", 1)
    with pytest.raises(StaleOwner, match="begun anew"):
        save(old, before.feed(4, old))
    assert same(loaded(again(store), "alice"), other.record())


def test_a_rebuilt_session_keeps_its_log_in_a_store_that_begins_none(tmp_path: Path):
    branch, toy = begin(local_store(tmp_path / "store"), "alice", tokens=8)
    save(branch, toy)
    fresh = local_store(tmp_path / "store", log=False).branch("alice")
    fresh.read_stored_log(IDENTITY)
    fresh.begin_anew()
    assert save(fresh, Toy(1).feed(8, fresh)).log


def test_a_log_part_of_a_later_format_or_a_bad_sector_is_no_reason_to_refuse_what_is_new(tmp_path: Path):
    class Bad(LocalFiles):
        bad = False

        def read(self, path: str, most: int) -> memoryview:
            if self.bad and "/log/" in path:
                raise StoreError("a bad sector")
            return super().read(path, most)

    files = Bad(tmp_path / "store", Unsynced())
    store = Store(tmp_path / "store", files=files)
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    files.bad = True
    save(branch, toy.feed(20, branch))
    files.bad = False
    assert same(loaded(store, "alice"), toy.record())
    for path in (tmp_path / "store").glob("s-*/log/*"):
        path.write_bytes(of_version(path.read_bytes(), VERSION + 1))
    assert save(branch, toy.feed(20, branch)).generation == 3


@pytest.mark.parametrize("tokens", [20, 0])
def test_a_focus_in_a_log_part_that_cannot_be_read_just_now_is_not_lost(store, tokens: int):
    """A part of no ids, which the next one takes in: at the very beginning it must, behind others it may stay."""
    branch, toy = begin(store, "alice", tokens=tokens)
    save(branch, toy)
    branch.note_focus(tokens, [1, 2, 3], toy.seen)
    save(branch, toy)
    parts = len(branch.log)
    branch.recent.clear()  # as of an owner that has only just opened it
    failing_once(store, branch.log[-1].name)
    if tokens:
        save(branch, toy.feed(8, branch))
        assert len(branch.log) == parts + 1
    else:
        with pytest.raises(StoreError, match="fails once"):
            save(branch, toy.feed(8, branch))
    save(branch, toy.feed(8, branch))
    assert len(branch.log) <= parts
    chain = again(store).branch("alice").read_stored_log(IDENTITY)
    assert [event for _, focuses in chain.pieces() for event in focuses] == [Refocus(tokens, (1, 2, 3))]
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_a_stray_file_among_the_log_parts_is_not_read(tmp_path: Path):
    store = local_store(tmp_path / "store")
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    [manifest] = (tmp_path / "store").glob("s-*/m/*/*.snap")
    manifest.write_bytes(b"damaged")
    with open(next((tmp_path / "store").glob("s-*/log")) / "core", "wb") as core:
        core.truncate(1 << 43)
    assert logged_ids(store, "alice") == [*toy.ids, *toy.pending]
    with open(next((tmp_path / "store").glob("s-*/log")) / ("0" * 32), "wb") as part:
        part.truncate(1 << 43)
    with pytest.raises(SnapshotCorrupt, match="tells which"):
        logged_ids(store, "alice")
