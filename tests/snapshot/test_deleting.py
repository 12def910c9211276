"""Deleting, retention and collecting take what nobody needs any more, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound
from locret_stream.snapshot import Store
from locret_stream.snapshot.names import folder_of, hashed
from tests.snapshot.support import (
    BUDGETS,
    GEOMETRY,
    IDENTITY,
    again,
    begin,
    everything,
    holds,
    load,
    needed,
    problems,
    resume,
    save,
    stored,
)

pytestmark = pytest.mark.usefixtures("spools")


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_what_was_deleted_is_gone_and_the_rest_stays(store):
    branch, toy = begin(store, "alice")
    records = {save(branch, toy.feed(11, branch)).generation: toy.record() for _ in range(4)}
    assert store.delete("alice", 2) == [2]
    with pytest.raises(SnapshotNotFound):
        load(store, "alice", 2)
    with pytest.raises(SnapshotNotFound, match=r"has no snapshot 2; expected one of \[1, 3, 4\]"):
        store.delete("alice", 2)
    assert store.delete("alice", 4) == [4]
    for generation in (1, 3):
        assert holds(store, "alice", records[generation], generation)
    assert holds(store, "alice", records[3]) and problems(store) == []
    assert store.delete("alice") == [1, 3] and not store.has("alice")


def test_a_number_is_never_used_twice(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    save(branch, toy)
    store.delete("alice", 2)
    other, another = resume(store, "alice")
    assert save(other, another).generation == 3
    store.delete("alice")
    store.gc("alice") if store.has("alice") else store.gc()
    other, another = begin(store, "alice", tokens=9)
    assert save(other, another).generation == 4


def test_deleting_takes_files_that_nobody_else_needs(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    kept = needed(local, "alice")
    toy.feed(100, branch)
    save(branch, toy)
    assert len(stored(local, "alice") - kept) == 2  # a page and a log part
    local.delete("alice")
    assert stored(local, "alice") == kept == needed(local, "bob") and problems(local) == []
    local.delete("bob")
    assert stored(local, "alice") == set()


def test_a_deleted_fork_leaves_its_session_alone_and_its_name_free(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    store.delete("bob")
    assert not store.has("bob") and holds(store, "alice", toy.record())
    other, another = begin(again(store), "bob", seed=3, tokens=30)
    done = save(other, another)
    assert (done.session, done.generation) == ("bob", 1)  # a session of its own: no part of alice's
    store.forget("alice")
    assert holds(store, "bob", another.record()) and problems(store) == []
    store.forget("bob")
    assert store.list() == []


# -- retention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_retention_keeps_the_newest_and_all_they_need(local, keep_last):
    store = again(local, keep_last=keep_last)
    branch, toy = begin(store, "alice")
    records = {}
    for _ in range(8):
        done = save(branch, toy.feed(7, branch))
        records[done.generation] = toy.record()
        store.prune(branch)
        assert [snapshot.generation for snapshot in store.info("alice")] == sorted(records)[-keep_last:]
        assert stored(store, "alice") == needed(store, "alice")
    for generation in sorted(records)[-keep_last:]:
        assert holds(local, "alice", records[generation], generation)


def test_retention_keeps_to_the_bytes_and_always_keeps_the_newest(local):
    free = again(local, keep_last=100)
    branch, toy = begin(free, "alice")
    for _ in range(6):
        save(branch, toy.feed(7, branch))
    whole = sum(map(len, filter(None, everything(local.url).values())))
    tight = again(local, keep_last=100, max_bytes=whole * 2 // 3)
    tight.prune(branch)
    generations = [snapshot.generation for snapshot in tight.info("alice")]
    assert generations == list(range(generations[0], 7)) and 1 < len(generations) < 6
    assert sum(map(len, filter(None, everything(local.url).values()))) <= whole * 2 // 3 + 60  # the key
    again(local, max_bytes=1).prune(branch)
    assert [snapshot.generation for snapshot in tight.info("alice")] == [6] and holds(local, "alice", toy.record())


def test_retention_of_one_branch_leaves_the_others_alone(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    record = toy.record()
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    tight = again(store, keep_last=1)
    for _ in range(4):
        save(fork, other.feed(50, fork))
        tight.prune(fork)
    assert len(store.info("bob")) == 1 and holds(store, "alice", record) and holds(store, "bob", other.record())


def test_retention_does_not_wait_for_a_save_that_runs(local):
    """One thread may do both: for a fork's owner and for the session's. Waiting for itself it would wait for ever."""
    store = again(local, keep_last=1)
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    save(fork, other)
    save(fork, other)
    remaining = []
    save(branch, toy.feed(9, branch), lambda: remaining.append(store.prune(fork, frozenset({1}))))
    assert remaining == [{1}] and len(store.info("bob")) == 2
    assert store.prune(fork, frozenset({1, 2, 9})) == {2}, "the newest of all stays"
    assert len(store.info("bob")) == 1


def test_a_snapshot_of_a_swap_out_costs_none_that_was_asked_for(local):
    store = again(local, keep_last=2)
    branch, toy = begin(store, "alice")
    for _ in range(4):
        save(branch, toy.feed(7, branch))
    assert store.prune(branch, frozenset({3, 4})) == {4}
    assert [snapshot.generation for snapshot in store.info("alice")] == [1, 2, 4]
    again(local, max_bytes=1).prune(branch, frozenset({4}))
    assert [snapshot.generation for snapshot in store.info("alice")] == [4], "the newest stays, whoever wrote it"


# -- collecting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "alice"])
def test_the_collector_takes_all_that_nothing_names_and_nothing_else(local, name):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(30, branch))
    before = everything(local.url)
    own = Path(local.url) / folder_of("alice")
    rubbish = ["pages/" + "0" * 32, "log/" + "f" * 32, ".tmp-1", "pages/.tmp-2", "log/.tmp-3",
               f"m/{hashed('alice')}/.tmp-4"]
    for path in rubbish:
        (own / path).write_bytes(b"rubbish")
    done = local.gc(name)
    assert set(done.removed) == {f"{folder_of('alice')}/{path}" for path in rubbish} and done.bytes == 14
    assert everything(local.url) == before
    assert local.gc(name).removed == ()


def test_the_collector_takes_what_is_left_of_a_first_save_that_died(local):
    branch, toy = begin(local, "alice", tokens=30)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(branch, toy, die)
    before = stored(local, "alice")
    assert len(before) == 1 and local.list() == []
    assert set(local.gc().removed) == before
    assert stored(local, "alice") == set()
    assert save(branch, toy).generation == 1 and holds(local, "alice", toy.record())


def test_where_there_is_no_lock_only_what_is_old_is_collected(tmp_path, monkeypatch):
    store = Store(f"memory://{tmp_path}")
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    session_folder = branch.session_folder
    store.files.write(f"{session_folder.folder}/pages/{'0' * 32}", [b"rubbish"])
    assert store.gc().removed == () and store.gc(grace_s=3600).removed == ()
    assert store.gc(grace_s=0).removed == (f"{session_folder.folder}/pages/{'0' * 32}",)
    assert holds(store, "alice", toy.record())
    assert store.delete("alice") == [1] and not store.has("alice")  # its pages are young, and stay
    assert len(stored(store, "alice")) == 2
    monkeypatch.setattr(store.files, "age_s", lambda path: 3601.0)
    store.gc()
    assert stored(store, "alice") == set()


def test_a_collector_that_cannot_read_one_session_collects_the_others(local):
    for name in ("alice", "bob", "carol"):
        branch, toy = begin(local, name, tokens=9)
        save(branch, toy)
        (Path(local.url) / folder_of(name) / "pages" / ("0" * 32)).write_bytes(b"rubbish")
    manifest = Path(local.url) / folder_of("bob") / "m" / hashed("bob") / "000000000001.snap"
    manifest.write_bytes(b"")
    with pytest.raises(SnapshotCorrupt, match="nothing was removed; delete it first"):
        local.gc()
    left = {name for name in ("alice", "bob", "carol")
            if (Path(local.url) / folder_of(name) / "pages" / ("0" * 32)).exists()}
    assert left == {"bob"}


# -- deleting while others read ---------------------------------------------------------------------------------------


def test_a_reader_whose_snapshot_is_retired_meanwhile_gets_the_newer_one(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    reader, done = again(local, keep_last=1).branch("alice"), []
    real = reader.session_folder.read_named

    def late(*arguments: object) -> object:
        if not done:
            done.append(save(branch, toy.feed(200, branch)))
            again(local, keep_last=1).prune(branch)
        return real(*arguments)

    monkeypatch.setattr(reader.session_folder, "read_named", late)
    restored = reader.load(IDENTITY, GEOMETRY, BUDGETS)
    assert restored.manifest.generation == 2 and restored.manifest.seen == toy.seen
    assert save(reader, toy).generation == 3


def test_a_reader_of_a_number_that_is_deleted_meanwhile_is_reported(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    reader = again(local).branch("alice")
    real = reader.session_folder.read_named

    def late(*arguments: object) -> object:
        if local.info("alice")[0].generation == 1:
            again(local).delete("alice", 1)
        return real(*arguments)

    monkeypatch.setattr(reader.session_folder, "read_named", late)
    with pytest.raises(SnapshotError):
        reader.load(IDENTITY, GEOMETRY, BUDGETS, 1)
    assert holds(local, "alice", toy.record())


def test_looking_while_others_delete_tells_what_is_left(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    for _ in range(3):
        save(branch, toy.feed(100, branch))
    real = local.files.read

    def late(path: str, most: int) -> bytearray:
        if path.endswith("3.snap"):
            again(local).delete("alice", 3)
        if path.endswith("1.snap"):
            again(local).delete("alice", 1)
        return real(path, most)

    with monkeypatch.context() as patch:
        patch.setattr(local.files, "read", late)
        assert [snapshot.generation for snapshot in local.list()] == [2]
        assert [snapshot.generation for snapshot in local.info("alice")] == [2]
        assert [(result.generation, result.problem) for result in local.verify()] == [(2, "")]
