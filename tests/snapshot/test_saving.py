"""What was saved is loaded bit for bit, by what a store's settings say; what fails changes nothing."""

from __future__ import annotations

import errno

import msgspec
import pytest

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot import Store
from tests.snapshot.support import (
    BUDGETS,
    CHUNK,
    GEOMETRY,
    IDENTITY,
    again,
    begin,
    holds,
    load,
    problems,
    resume,
    save,
    stored,
)

pytestmark = pytest.mark.usefixtures("spools")


@pytest.mark.parametrize("tokens", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 30, 200])
def test_what_was_saved_is_loaded_bit_for_bit(store, tokens):
    branch, toy = begin(store, "alice", tokens=tokens)
    done = save(branch, toy)
    assert holds(store, "alice", toy.record())
    assert (done.name, done.session, done.generation, done.parent) == ("alice", "alice", 1, "")
    assert (done.tokens, done.units, done.log) == (tokens, int(sum(map(len, toy.moment().positions)) and sum(
        own.numel() for own in toy.moment().positions)), True)
    assert done.encrypted is (store._key is not None) and problems(store) == []


def test_every_generation_is_loaded_bit_for_bit(store):
    branch, toy = begin(store, "alice")
    records = {}
    for tokens in (3, 1, 0, 9, 25, 4, 60, 2, 2):
        toy.feed(tokens, branch)
        done = save(branch, toy)
        records[done.generation] = toy.record()
    assert sorted(records) == list(range(1, 10))
    for generation, record in records.items():
        assert holds(store, "alice", record, generation)
    assert holds(store, "alice", records[9]) and problems(store) == []


def test_a_save_writes_only_what_is_new(local):
    branch, toy = begin(local, "alice", tokens=40)
    first = save(branch, toy)
    before = stored(local, "alice")
    second = save(branch, toy)
    assert [path.split("/")[1] for path in stored(local, "alice") ^ before] == ["log"]  # every save has a part there
    assert second.bytes_written < first.bytes_written
    generations = [snapshot.generation for snapshot in local.info("alice")]
    assert generations == [1, 2] and second.bytes == local.info("alice")[1].bytes


def test_each_snapshot_names_the_one_it_grew_out_of(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    first = branch.parent
    assert save(branch, toy.feed(5, branch)).parent == first != branch.parent
    back, toy = resume(store, "alice", 1)
    assert save(back, toy).parent == first
    assert [snapshot.parent for snapshot in store.info("alice")] == ["", first, first]


def test_list_and_info_tell_what_there_is(store):
    assert store.list() == []
    for name, tokens in (("bob", 5), ("alice", 9)):
        branch, toy = begin(store, name, tokens=tokens)
        save(branch, toy)
        done = save(branch, toy.feed(1, branch))
        assert store.info(name)[-1] == msgspec.structs.replace(done, bytes_written=0)
    assert [(info.name, info.generation, info.tokens) for info in store.list()] == [("alice", 2, 10), ("bob", 2, 6)]
    assert [(snapshot.generation, snapshot.tokens) for snapshot in store.info("alice")] == [(1, 9), (2, 10)]
    assert store.has("alice") and not store.has("carol")
    assert {(result.name, result.generation) for result in store.verify("bob")} == {("bob", 1), ("bob", 2)}
    for ask in (store.info, store.verify, store.delete, store.forget, store.gc):
        with pytest.raises(SnapshotNotFound, match="carol"):
            ask("carol")


def test_loading_what_is_not_there_changes_nothing(store):
    branch, toy = begin(store, "alice", tokens=9)
    with pytest.raises(SnapshotNotFound):
        branch.load(IDENTITY, GEOMETRY, BUDGETS)
    assert branch.spool is not None
    save(branch, toy)
    before = (branch.head, branch.parent, branch.pages, branch.log, branch.spool, branch.base)
    for generation in (2, 0, -1, 10**15):
        with pytest.raises(SnapshotNotFound):
            branch.load(IDENTITY, GEOMETRY, BUDGETS, generation)
    with pytest.raises(SnapshotMismatch):
        branch.load(IDENTITY.__class__(**dict.fromkeys(IDENTITY.__struct_fields__, "other")), GEOMETRY, BUDGETS)
    with pytest.raises(SnapshotCorrupt, match="expected at most"):
        branch.load(IDENTITY, GEOMETRY, (1, 1))
    assert (branch.head, branch.parent, branch.pages, branch.log, branch.spool, branch.base) == before
    assert save(branch, toy.feed(5, branch)).generation == 2 and holds(store, "alice", toy.record())


def test_what_an_owner_saved_last_is_read_once_more_and_nothing_else(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy)
    before = (branch.head, branch.parent, branch.pages, branch.log, branch.spool, branch.base)
    assert branch.load_swapped_out(IDENTITY, GEOMETRY, BUDGETS).manifest.generation == 2
    again(store).delete("alice", 2)
    with pytest.raises(StaleOwner):
        branch.load_swapped_out(IDENTITY, GEOMETRY, BUDGETS)
    again(store).forget("alice")
    other, another = begin(again(store), "alice", 2, 9)
    for _ in range(2):
        save(other, another)
    with pytest.raises(StaleOwner):
        branch.load_swapped_out(IDENTITY, GEOMETRY, BUDGETS)
    assert (branch.head, branch.parent, branch.pages, branch.log, branch.spool, branch.base) == before


def test_a_session_without_a_log_keeps_none(local):
    quiet = again(local, log=False)
    branch, toy = begin(quiet, "alice", tokens=30)
    assert not save(branch, toy).log
    toy.ids = None
    assert holds(local, "alice", toy.record())
    branch, toy = resume(local, "alice")  # also for an owner who would keep one: its beginning is not known
    assert not save(branch, toy.feed(9, branch)).log
    assert holds(local, "alice", toy.record())


def test_a_spool_that_fails_is_a_store_error_and_leaves_the_owner_as_it_was(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=9)
    save(branch, toy)
    before = (branch.head, branch.parent, branch.pages, branch.log, branch.spool)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("locret_stream.snapshot.log.tempfile.TemporaryFile", fail)
        with pytest.raises(StoreError, match="log of 'alice' cannot be kept"):
            branch.load(IDENTITY, GEOMETRY, BUDGETS)
        with pytest.raises(StoreError, match="expected room for temporary files"):
            branch.fork("bob", toy.seen)
    assert (branch.head, branch.parent, branch.pages, branch.log, branch.spool) == before
    with monkeypatch.context() as patch:  # once the manifest is there, nothing takes the acknowledgement back
        patch.setattr("locret_stream.snapshot.log.Spool.drop", fail)
        assert save(branch, toy.feed(9, branch)).generation == 2
    assert holds(local, "alice", toy.record())
    save(branch, toy.feed(9, branch))
    toy.ids = None
    assert holds(local, "alice", toy.record())


def test_a_manifest_that_no_reader_takes_is_not_acknowledged(store, monkeypatch):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    before = toy.record()
    with monkeypatch.context() as patch:
        patch.setattr("locret_stream.snapshot.save.MANIFEST_LIMIT", 100)
        with pytest.raises(SnapshotError, match="no reader takes more than 100; expected a smaller budget"):
            save(branch, toy.feed(9, branch))
    assert holds(store, "alice", before) and [info.generation for info in store.info("alice")] == [1]
    assert save(branch, toy).generation == 2 and holds(store, "alice", toy.record())


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1.5}, {"keep_last": True},
                                     {"keep_last": "4"}, {"max_bytes": 0}, {"max_bytes": True}, {"key": "short"},
                                     {"key": b"x" * 31}, {"key": 32}])
def test_settings_that_cannot_work_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        Store(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_looking_at_a_store_that_is_not_there_makes_none(tmp_path):
    store = Store(tmp_path / "store")
    assert store.list() == [] == store.verify() and store.gc().removed == () and not store.has("alice")
    assert store.branch("alice").head == 0
    with pytest.raises(SnapshotNotFound):
        load(store, "alice")
    assert not (tmp_path / "store").exists()
