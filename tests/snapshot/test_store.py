"""The store keeps what it acknowledged, finds what is damaged, removes what nobody needs, and nothing else."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
    SnapshotTooNew,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot import Branch, Store
from locret_stream.snapshot.branch import check_manifest
from locret_stream.snapshot.chain import read_log
from locret_stream.snapshot.format import VERSION, Manifest, unpack
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.vault import folder_of, hashed
from tests.snapshot.forge import page_ref, sound_manifest
from tests.snapshot.support import (
    BUDGETS,
    CHUNK,
    GEOMETRY,
    HOSTILE_NAMES,
    IDENTITY,
    KEY,
    Record,
    Toy,
    Unsynced,
    begin,
    closed_spools,
    empty_memory,
    everything,
    ids_of,
    load,
    loaded,
    local_store,
    needed,
    of_version,
    resume,
    same,
    save,
    stored,
)


@pytest.fixture(autouse=True)
def spools() -> Iterator[None]:
    """Owners are left open all over, and fsspec's memory is one for all."""
    with closed_spools():
        yield
    empty_memory()


@pytest.fixture(params=["plain", "encrypted", "memory", "memory, encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    key = KEY if "encrypted" in request.param else None
    if "memory" in request.param:
        return Store(f"memory://{tmp_path}", key=key)
    return local_store(tmp_path / "store", key=key)


@pytest.fixture(params=["plain", "encrypted"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store in a folder, where a test may do damage."""
    return local_store(tmp_path / "store", key=KEY if request.param == "encrypted" else None)


def again(store: Store, **options: object) -> Store:
    """Another process's view of the same store."""
    files = LocalFiles(store.url, Unsynced()) if isinstance(store.files, LocalFiles) else RemoteFiles(store.url)
    return Store(store.url, files=files, **{"key": store._key, "keep_last": store.keep_last, **options})


def holds(store: Store, name: str, record: Record, generation: int | None = None) -> bool:
    """Whether another process finds just that."""
    return same(loaded(again(store), name, generation), record)


def without_log(toy: Toy) -> Record:
    """What a snapshot gives back of one whose ids from the beginning are not to be had any more."""
    toy.ids = None
    return toy.record()


def problems(store: Store, name: str | None = None) -> list[str]:
    """What `verify` complains about."""
    return [found.problem for found in store.verify(name) if found.problem]


# -- saving and loading -----------------------------------------------------------------------------------------------


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
    found = [one.generation for one in local.info("alice")]
    assert found == [1, 2] and second.bytes == local.info("alice")[1].bytes


def test_each_snapshot_names_the_one_it_grew_out_of(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    first = branch.parent
    assert save(branch, toy.feed(5, branch)).parent == first != branch.parent
    back, toy = resume(store, "alice", 1)
    assert save(back, toy).parent == first
    assert [one.parent for one in store.info("alice")] == ["", first, first]


def test_list_and_info_tell_what_there_is(store):
    assert store.list() == []
    for name, tokens in (("bob", 5), ("alice", 9)):
        branch, toy = begin(store, name, tokens=tokens)
        save(branch, toy)
        done = save(branch, toy.feed(1, branch))
        assert store.info(name)[-1] == msgspec.structs.replace(done, bytes_written=0)
    assert [(one.name, one.generation, one.tokens) for one in store.list()] == [("alice", 2, 10), ("bob", 2, 6)]
    assert [(one.generation, one.tokens) for one in store.info("alice")] == [(1, 9), (2, 10)]
    assert store.has("alice") and not store.has("carol")
    assert {(one.name, one.generation) for one in store.verify("bob")} == {("bob", 1), ("bob", 2)}
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
    assert branch.reload(IDENTITY, GEOMETRY, BUDGETS).manifest.generation == 2
    again(store).delete("alice", 2)
    with pytest.raises(StaleOwner):
        branch.reload(IDENTITY, GEOMETRY, BUDGETS)
    again(store).forget("alice")
    other, another = begin(again(store), "alice", 2, 9)
    for _ in range(2):
        save(other, another)
    with pytest.raises(StaleOwner):
        branch.reload(IDENTITY, GEOMETRY, BUDGETS)
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


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_any_name_is_a_session_and_never_a_path(local, tmp_path, name):
    (tmp_path / "x").write_bytes(b"not ours")
    branch, toy = begin(local, name, tokens=9)
    save(branch, toy)
    twin = branch.fork(f"{name[:250]} fork", toy.seen)
    save(twin, toy)
    assert holds(local, name, toy.record()) and {one.name for one in local.list()} == {name, twin.name}
    assert local.forget(name)
    assert everything(local.url) == {} and (tmp_path / "x").read_bytes() == b"not ours"
    assert sorted(os.listdir(tmp_path)) == ["store", "x"]


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800", None, 7, b"alice", ["alice"]])
def test_what_is_no_name_is_refused(local, name):
    branch, _ = begin(local, "alice", tokens=9)
    for use in (local.branch, local.has, local.info, local.delete, local.forget, lambda name: branch.fork(name, 8)):
        with pytest.raises(ConfigError, match="session name"):
            use(name)
    assert everything(local.url) == {}


def test_names_that_differ_are_different_sessions(local):
    names = ["e\u0301", "\u00e9", "E\u0301", "a", "A", "a ", "\uff41"]  # nothing is folded or normalised
    records = {}
    for seed, name in enumerate(names):
        branch, toy = begin(local, name, seed=seed, tokens=9)
        save(branch, toy)
        records[name] = toy.record()
    for name, record in records.items():
        assert holds(local, name, record)


def test_files_lie_where_the_layout_says(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    own = "s-" + hashed("alice")
    found = {path for path, content in everything(local.url).items() if content is not None}
    fixed = {f"{own}/m/{hashed('alice')}/000000000001.snap", f"{own}/m/{hashed('bob')}/000000000001.snap",
             f"s-{hashed('bob')}/branch", f"n-{hashed('alice')}", f"n-{hashed('bob')}"}
    fixed |= {f"{own}/key"} if local._key else set()
    assert found == fixed | needed(local, "alice")


# -- forks and rewinding ----------------------------------------------------------------------------------------------


def test_a_fork_goes_its_own_way_and_shares_pages(store):
    branch, toy = begin(store, "alice", tokens=40)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    first = save(twin, other)
    assert (first.name, first.session, first.generation, first.parent) == ("bob", "alice", 1, branch.parent)
    assert first.bytes_written < 0.7 * first.bytes  # its pages are there
    save(branch, toy.feed(20, branch))
    save(twin, other.feed(33, twin))
    assert holds(store, "alice", toy.record()) and holds(store, "bob", other.record())
    branch, toy = resume(again(store), "bob")
    assert branch.session == "alice" and save(branch, toy.feed(5, branch)).generation == 3
    assert holds(store, "bob", toy.record()) and [one.name for one in store.list()] == ["alice", "bob"]


def test_a_fork_of_a_fork_belongs_to_the_session(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    last = twin.fork("carol", toy.seen)
    assert save(last, toy).session == "alice" and holds(store, "carol", toy.record())
    with pytest.raises(ConfigError, match="is a fork"):
        store.forget("carol")
    store.forget("alice")
    assert store.list() == []


def test_a_fork_of_what_was_never_saved_is_saved(store):
    branch, toy = begin(store, "alice", tokens=9)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    save(twin, other.feed(6, twin))
    assert holds(store, "bob", other.record()) and not store.has("alice")
    save(branch, toy)
    assert holds(store, "alice", toy.record())


def test_a_fork_with_unsaved_ids_has_a_whole_log(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    twin = branch.fork("bob", toy.feed(21, branch).seen)
    save(twin, other := toy.twin(2))
    assert holds(store, "bob", other.record()) and len(other.ids) == 28


def test_a_rewound_session_goes_on_under_a_new_number(store):
    branch, toy = begin(store, "alice")
    records = []
    for _ in range(3):
        save(branch, toy.feed(11, branch))
        records.append(toy.record())
    branch, back = resume(store, "alice", 1)
    back.seed = 9
    done = save(branch, back.feed(11, branch))
    assert done.generation == 4 and holds(store, "alice", back.record())
    for generation, record in enumerate(records, 1):
        assert holds(store, "alice", record, generation)


def test_a_name_that_is_taken_is_no_name_for_a_fork(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    other, another = begin(store, "carol", tokens=9)
    save(other, another)
    for name in ("alice", "bob", "carol"):
        with pytest.raises(ConfigError, match="the store has a session of that name"):
            branch.fork(name, toy.seen)
    store.delete("bob")
    store.delete("carol")
    for name in ("bob", "carol"):
        twin = branch.fork(name, toy.seen)
        save(twin, toy)
        assert holds(store, name, toy.record()) and again(store).branch(name).session == "alice"


# -- deleting, retention, collecting ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_retention_keeps_the_newest_and_all_they_need(local, keep_last):
    store = again(local, keep_last=keep_last)
    branch, toy = begin(store, "alice")
    records = {}
    for _ in range(8):
        done = save(branch, toy.feed(7, branch))
        records[done.generation] = toy.record()
        store.prune(branch)
        assert [one.generation for one in store.info("alice")] == sorted(records)[-keep_last:]
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
    found = [one.generation for one in tight.info("alice")]
    assert found == list(range(found[0], 7)) and 1 < len(found) < 6
    assert sum(map(len, filter(None, everything(local.url).values()))) <= whole * 2 // 3 + 60  # the key
    again(local, max_bytes=1).prune(branch)
    assert [one.generation for one in tight.info("alice")] == [6] and holds(local, "alice", toy.record())


def test_retention_of_one_branch_leaves_the_others_alone(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    record = toy.record()
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    tight = again(store, keep_last=1)
    for _ in range(4):
        save(twin, other.feed(50, twin))
        tight.prune(twin)
    assert len(store.info("bob")) == 1 and holds(store, "alice", record) and holds(store, "bob", other.record())


def test_retention_does_not_wait_for_a_save_that_runs(local):
    """One thread may do both: for a fork's owner and for the session's. Waiting for itself it would wait for ever."""
    store = again(local, keep_last=1)
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    save(twin, other)
    save(twin, other)
    found = []
    save(branch, toy.feed(9, branch), lambda: found.append(store.prune(twin)))
    assert found[0].removed == () and len(store.info("bob")) == 2
    store.prune(twin)
    assert len(store.info("bob")) == 1


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
    vault = branch.vault
    store.files.write(f"{vault.folder}/pages/{'0' * 32}", [b"rubbish"])
    assert store.gc().removed == () and store.gc(grace_s=3600).removed == ()
    assert store.gc(grace_s=0).removed == (f"{vault.folder}/pages/{'0' * 32}",)
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


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_nothing_of_a_forgotten_session_is_left(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for fork in ("bob", "carol"):
        save(branch.fork(fork, toy.seen), toy)
    local.delete("carol")
    own = Path(local.url) / folder_of("alice")
    for path in (".tmp-1", "pages/.tmp-2", "strange"):
        (own / path).write_bytes(b"secret")
    other, another = begin(local, "dave", tokens=9)
    save(other, another)
    others = {path: content for path, content in everything(local.url).items()
              if path.startswith((folder_of("dave"), f"n-{hashed('dave')}"))}
    removed = local.forget("alice")
    assert everything(local.url) == others
    assert not (own).exists() and not (Path(local.url) / folder_of("bob")).exists()
    assert len(removed) == len(set(removed)) and f"{folder_of('bob')}/branch" in removed
    with pytest.raises(SnapshotNotFound):
        local.forget("alice")
    fresh, toy = begin(local, "alice", tokens=9)
    assert save(fresh, toy).generation == 1 and holds(local, "alice", toy.record())


def test_forgetting_tells_every_file_that_was_there(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    before = {path for path, content in everything(local.url).items() if content is not None}
    assert set(local.forget("alice")) == before


def test_forgetting_needs_no_key(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    again(local, key=None).forget("alice")
    assert everything(local.url) == {}


def test_a_forgetting_that_fails_halfway_destroys_the_key_and_can_be_repeated(tmp_path):
    class Stuck(Unsynced):
        stuck = ""

        def unlink(self, path: str) -> None:
            if self.stuck and path.endswith(self.stuck):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(path)

    posix = Stuck()
    store = local_store(tmp_path / "store", posix, key=KEY)
    for stuck in ("001.snap", "/key", "/branch", "lock"):
        branch, toy = begin(store, "alice", tokens=30)
        save(branch, toy)
        save(branch, toy)
        save(branch.fork("bob", toy.seen), toy)
        posix.stuck = stuck
        with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
            store.forget("alice")
        left = {os.path.basename(path) for path, content in everything(store.url).items() if content is not None}
        assert ("key" in left) is (stuck == "/key"), stuck
        posix.stuck = ""
        store.forget("alice")
        assert not any(content is not None for content in everything(store.url).values())
        store.gc()
        assert everything(store.url) == {}


def test_an_owner_of_a_forgotten_session_does_not_bring_it_back(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    again(store).forget("alice")
    with pytest.raises(StaleOwner):
        save(branch, toy.feed(9, branch))
    assert store.list() == []
    if isinstance(store.files, LocalFiles):
        assert os.listdir(store.url) == []


def test_a_fork_saved_after_its_session_was_forgotten_is_whole(store):
    """The live context is the user's; but nothing may be sealed with a key that is gone."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    again(store).forget("alice")
    save(twin, other.feed(9, twin))
    other.ids = None  # the log's beginning was forgotten
    assert holds(store, "bob", other.record()) and problems(store) == []
    fresh, toy = begin(again(store), "alice", tokens=9)
    save(fresh, toy)
    save(twin, other.feed(9, twin))
    assert holds(store, "alice", toy.record()) and holds(store, "bob", other.record())


def test_an_owner_of_a_forgotten_session_that_was_begun_anew_reads_the_new_one(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    again(store).forget("alice")
    other, another = begin(again(store), "alice", 2, 40)
    save(other, another)
    with pytest.raises(StaleOwner, match="begun anew"):  # though its number is the newest
        save(branch, toy)
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    assert same(loaded(again(store), "bob"), without_log(toy)) and holds(store, "alice", another.record())
    restored = branch.load(IDENTITY, GEOMETRY, BUDGETS)
    assert restored.manifest.seen == 40 and save(branch, another).generation == 2
    assert ids_of(ids for ids, _ in branch.read_chain(IDENTITY).pieces()) == another.ids


def test_a_save_that_failed_before_its_session_was_forgotten_is_whole_when_repeated(local):
    branch, toy = begin(local, "alice", tokens=30)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(branch, toy, die)
    again(local).forget("alice")
    save(branch, toy)
    assert holds(local, "alice", toy.record())


# -- encryption -------------------------------------------------------------------------------------------------------


def test_an_encrypted_store_holds_no_plain_text(tmp_path):
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "a name nobody may see", tokens=60)
    save(branch, toy)
    save(branch.fork("another name", toy.seen), toy)
    found = b"".join(filter(None, everything(store.url).values()))
    plain = [path for path, content in everything(store.url).items() if content and b"LOCRET" in content]
    assert plain and all(re.fullmatch(r"n-\w{32}|s-\w{32}/branch", path) for path in plain)  # no more than paths tell
    for secret in (b"a name", b"another", b"toy", bytes.fromhex(KEY), toy.frame.text.encode(),
                   toy.layers[0]["keys"][0, 0].numpy().tobytes(), torch.tensor(toy.ids[:4]).int().numpy().tobytes()):
        assert secret not in found


@pytest.mark.parametrize("key", [None, "00" * 32])
def test_without_its_key_an_encrypted_session_is_neither_read_nor_changed(tmp_path, key):
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    before = everything(store.url)
    wrong = again(store, key=key and bytes.fromhex(key))
    assert [one.problem != "" and one.encrypted for one in (*wrong.list(), *wrong.info("alice"))] == [True, True]
    for use in (lambda: load(wrong, "alice"), wrong.gc,
                lambda: wrong.delete("alice"), lambda: save(wrong.branch("alice"), toy)):
        with pytest.raises((StoreError, StaleOwner)):
            use()
    assert everything(store.url) == before and problems(wrong) != []
    assert holds(store, "alice", toy.record())


def test_a_plain_session_is_not_continued_in_an_encrypted_store(tmp_path):
    store = local_store(tmp_path / "store")
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    before = everything(store.url)
    keyed = again(store, key=KEY)
    with pytest.raises(StoreError, match="was stored without encryption"):  # before any work is done
        resume(keyed, "alice")
    late = keyed.branch("alice")
    late.begin()
    late.head = 1
    with pytest.raises(StoreError, match="was stored without encryption"):
        save(late, Toy(1).feed(9, late))
    assert everything(store.url) == before
    fresh, other = begin(keyed, "bob", tokens=30)
    assert save(fresh, other).encrypted and holds(keyed, "bob", other.record())


def test_two_first_saves_of_an_encrypted_session_use_one_key(tmp_path):
    store = local_store(tmp_path / "store", key=KEY)
    (one, toy), (two, other) = begin(store, "alice", 1, 30), begin(again(store), "alice", 2, 30)
    with pytest.raises(StaleOwner):
        save(one, toy, lambda: save(two, other))
    assert holds(store, "alice", other.record()) and problems(store) == []


@pytest.mark.parametrize("first", [None, KEY])
def test_two_first_saves_with_and_without_a_key_do_not_both_win(tmp_path, first):
    """Else one of them could not be read: a session has a key, or it has none."""
    store = local_store(tmp_path / "store", key=first)
    other_store = again(store, key=None if first else KEY)
    (one, toy), (two, other) = begin(store, "alice", 1, 30), begin(other_store, "alice", 2, 30)
    won = []

    def attempt(branch: Branch, own: Toy, meanwhile: Callable[[], None] | None = None) -> None:
        with suppress(StaleOwner, StoreError):
            save(branch, own, meanwhile)
            won.append(own.record())

    attempt(one, toy, lambda: attempt(two, other))
    readable = [found for keyed in (store, other_store) for found in keyed.verify() if not found.problem]
    assert len(won) <= 1 and bool(readable) is bool(won)
    for record in won:
        assert any(holds(keyed, "alice", record) for keyed in (store, other_store) if not problems(keyed))


# -- damage -----------------------------------------------------------------------------------------------------------


def _paths(store: Store, kind: str, name: str = "alice") -> list[Path]:
    own = Path(store.url) / folder_of("alice")
    return sorted((own / (f"m/{hashed(name)}" if kind == "m" else kind)).iterdir())


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(64))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": _flip, "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0), "grown": _grow,
    "missing": Path.unlink, "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "folder": lambda path: (path.unlink(), path.mkdir()), "link": lambda path: (
        shutil.copy(path, path.parents[3] / "copy"), path.unlink(), path.symlink_to(path.parents[3] / "copy"))}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["pages", "log"])
def test_a_damaged_file_is_found_refused_and_never_collected_around(local, kind, damage):
    """`load` reads pages, `read_log` the log, `verify` both; other snapshots are as good as before."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other, another = begin(local, "dave", tokens=30)
    save(other, another)
    for path in _paths(local, kind):
        DAMAGE[damage](path)
    with pytest.raises(SnapshotCorrupt):
        load(again(local), "alice")
    assert [found.name for found in local.verify() if found.problem] == ["alice"]
    assert len(problems(local, "alice")) == 1 and holds(local, "dave", another.record())
    before = everything(local.url)
    assert local.gc().removed == () and everything(local.url) == before
    local.delete("alice")
    assert problems(local) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "grown"])
@pytest.mark.parametrize("kind", ["pages", "log"])
def test_the_owner_who_is_open_writes_anew_what_went_missing(local, kind, damage):
    """Memory is sound, so the next snapshot must be; only ids that are nowhere else are lost, and that is told."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for path in _paths(local, kind):
        DAMAGE[damage](path)
    done = save(branch, toy.feed(3, branch))
    assert done.log is (kind == "pages")
    if kind == "log":
        toy.ids = None
    assert holds(local, "alice", toy.record())


def test_a_save_does_not_fail_over_an_old_log_part_that_is_damaged(local):
    branch, toy = begin(local, "alice", tokens=8)
    save(branch, toy)
    _flip(_paths(local, "log")[0])
    done = save(branch, toy.feed(40, branch))  # would take the old part in
    found = again(local).branch("alice")
    assert same(Record(found.load(IDENTITY, GEOMETRY, BUDGETS).tensors, toy.frame, 48, 48, None),
                Record(toy.record().tensors, toy.frame, 48, 48, None))
    with pytest.raises(SnapshotCorrupt):
        list(read_log(found.vault, found.name, found.log))
    assert done.log and len(problems(local)) == 2


def test_swapped_files_are_found(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    local2 = again(local)
    other, another = resume(local2, "alice")
    save(other, another.feed(200, other))
    for kind in ("pages", "log"):
        one, two = _paths(local, kind)[:2]
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
    twin, other = branch.fork("bob", 0), Toy(2)
    save(branch, toy)
    save(twin, other.feed(28, twin))
    for kind in ("pages", "log"):
        one, two = _paths(local, kind)
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


@pytest.mark.parametrize("target", ["number", "branch", "session"])
def test_a_manifest_that_was_moved_is_refused_by_all(local, target):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(9, branch))
    save(branch.fork("bob", toy.seen), toy)
    other, another = begin(local, "dave", tokens=9)
    save(other, another)
    source = _paths(local, "m")[0]
    place = {"number": source.with_name("000000000009.snap"),
             "branch": _paths(local, "m", "bob")[0].with_name("000000000002.snap"),
             "session": Path(local.url) / folder_of("dave") / "m" / hashed("dave") / "000000000002.snap"}[target]
    if target == "session" and local._key is None:
        place = place.parent.parent / hashed("alice") / "000000000001.snap"  # complete with its branch: still not there
        place.parent.mkdir()
    shutil.copy(source, place)
    name = {"number": "alice", "branch": "bob", "session": "dave"}[target]
    assert len(problems(local)) == 1
    strange = [one for one in local.list() if one.problem]
    assert len(strange) <= 1 and all("moved" in one.problem or "does not open" in one.problem for one in strange)
    with pytest.raises(SnapshotCorrupt):
        local.gc()
    if place.parent.name == hashed(name):
        with pytest.raises(SnapshotCorrupt):
            load(again(local), name)
        *sound, last = local.info(name)
        assert last.problem and last.generation == int(place.name[:12]) and not any(one.problem for one in sound)
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
    DAMAGE[damage](_paths(local, "m")[1])
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
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    record = toy.record()
    save(branch, toy.twin(1).feed(9, branch))
    save(twin, toy.twin(1).feed(9, twin))
    for name in ("alice", "bob"):
        _flip(_paths(local, "m", name)[1])
        with pytest.raises(SnapshotCorrupt):
            load(again(local), name)
        assert holds(local, name, record, 1)
        other, back = resume(again(local), name, 1)
        assert other.session == "alice" and save(other, back.feed(5, other)).generation == 3
        assert holds(local, name, back.record())


def test_a_snapshot_of_a_later_format_is_told_as_such_and_nothing_is_collected(tmp_path):
    store = local_store(tmp_path / "store")
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    path = _paths(store, "m")[0]
    path.write_bytes(of_version(path.read_bytes(), VERSION + 1))
    (Path(store.url) / folder_of("alice") / "pages" / ("0" * 32)).write_bytes(b"rubbish")
    before = everything(store.url)
    assert [f"version {VERSION + 1}" in one.problem for one in (*store.list(), *store.info("alice"))] == [True, True]
    for use in (lambda: load(store, "alice"), store.gc):
        with pytest.raises(SnapshotTooNew):
            use()
    assert len(problems(store)) == 1 and everything(store.url) == before


@pytest.mark.parametrize("content", [b"", b"s-", b"../../etc", b"s-" + b"0" * 31, b"s-" + b"g" * 32, b"\xff" * 34,
                                     b"s-" + b"0" * 32 + b"\n", b"x" * 100, b"itself"])
def test_a_damaged_alias_is_told_and_the_next_save_heals_it(local, content):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    alias = Path(local.url) / folder_of("bob") / "branch"
    alias.write_bytes(folder_of("bob").encode() if content == b"itself" else content)
    for use in (lambda: again(local).branch("bob"), lambda: local.info("bob"), lambda: local.delete("bob")):
        with pytest.raises(SnapshotCorrupt):
            use()
    assert holds(local, "alice", toy.record()) and problems(local, "alice") == []
    assert {one.name: bool(one.problem) for one in local.verify()} == {"alice": False, "bob": True}
    assert [one.name for one in local.list()] == ["alice", "bob"]
    save(twin, toy.feed(9, twin))
    assert holds(local, "bob", toy.record())


def test_a_damaged_alias_keeps_no_session_from_being_forgotten(local):
    for name in ("alice", "dave"):
        branch, toy = begin(local, name, tokens=30)
        save(branch, toy)
    (Path(local.url) / folder_of("bob")).mkdir()
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(b"rubbish")
    local.forget("dave")
    assert holds(local, "alice", toy.record())
    local.forget("bob")
    assert set(os.listdir(local.url)) == {folder_of("alice"), f"n-{hashed('alice')}"}


def test_a_lying_alias_shows_nobody_elses_data(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    (Path(local.url) / folder_of("bob")).mkdir()
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(folder_of("alice").encode())
    assert not local.has("bob")
    with pytest.raises(SnapshotNotFound):
        load(again(local), "bob")
    other, another = begin(again(local), "bob", seed=5, tokens=30)
    assert save(other, another).session == "bob"
    local.forget("alice")
    assert holds(local, "bob", another.record()) and problems(local) == []


def test_an_alias_that_lies_about_a_session_hides_nothing_and_removes_nothing(local):
    for seed, name in enumerate(("alice", "bob")):
        branch, toy = begin(local, name, seed, tokens=30)
        save(branch, toy)
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(folder_of("alice").encode())
    assert holds(local, "bob", toy.record())
    local.forget("alice")
    assert holds(local, "bob", toy.record()) and [one.name for one in local.list()] == ["bob"]


def test_a_session_that_is_a_link_is_not_followed(local, tmp_path):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    own = Path(local.url) / folder_of("alice")
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path / "elsewhere")
    for use in (lambda: load(again(local), "alice"), lambda: save(branch, toy.feed(9, branch)),
                lambda: local.delete("alice"), lambda: local.gc("alice"), lambda: local.info("alice"),
                lambda: local.forget("alice")):
        with pytest.raises(SnapshotError):
            use()
    for found in (local.list(), local.verify()):
        assert ["is a link" in one.problem for one in found] == [True]
    with suppress(SnapshotCorrupt):
        assert local.gc().removed == ()
    assert everything(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("inner", ["m", "m/own", "pages", "log"])
def test_a_link_inside_one_session_keeps_nobody_from_the_others(local, tmp_path, inner, recorded):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other, another = begin(local, "bob", 2, tokens=30)
    save(other, another)
    save(other.fork("carol", another.seen), another)
    own = Path(local.url) / folder_of("bob") / inner.replace("own", hashed("bob"))
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    for name in ("bob", "carol") if not recorded else ():
        (Path(local.url) / f"n-{hashed(name)}").unlink()
    before = everything(tmp_path / "elsewhere")
    listed, verified = again(local).list(), again(local).verify()
    assert ("alice", "") in [(one.name, one.problem) for one in listed]
    assert ("alice", "") in [(one.name, one.problem) for one in verified]
    told = [one.problem for one in verified if one.problem]
    assert all("is a link" in problem for problem in told) and bool(told) is (recorded or inner != "m/own")
    bad = [one.problem for one in listed if one.problem]
    assert all("is a link" in problem for problem in bad) and len(bad) == {
        "m": 2 if recorded else 1, "m/own": int(recorded)}.get(inner, 0)
    rubbish = Path(local.url) / folder_of("alice") / "pages" / ("0" * 32)
    rubbish.write_bytes(b"rubbish")
    with suppress(SnapshotCorrupt):
        again(local).gc()
    assert not rubbish.exists() and everything(tmp_path / "elsewhere") == before
    assert holds(local, "alice", toy.record())


def test_what_is_no_session_is_left_alone(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for strange in ("s-", "s-" + "0" * 31, "s-" + "0" * 32 + ".bak", "S-" + "0" * 32, "lost+found", "snap"):
        shutil.copytree(Path(local.url) / folder_of("alice"), Path(local.url) / strange)
    (Path(local.url) / "README").write_bytes(b"mine")
    before = everything(local.url)
    assert [one.name for one in local.list()] == ["alice"] and len(local.verify()) == 1
    local.gc()
    assert everything(local.url) == before
    local.forget("alice")
    assert (Path(local.url) / "README").read_bytes() == b"mine" and (Path(local.url) / "s-" / "pages").is_dir()


def test_a_folder_where_the_next_manifest_goes_is_a_store_error(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000002.snap").mkdir()
    with pytest.raises(StoreError, match="is no snapshot"):
        save(branch, toy.feed(9, branch))
    assert holds(again(local), "alice", toy.twin(1).record()) is False
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    assert holds(local, "bob", toy.record())


# -- deleting while others read ---------------------------------------------------------------------------------------


def test_a_reader_whose_snapshot_is_retired_meanwhile_gets_the_newer_one(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    reader, done = again(local, keep_last=1).branch("alice"), []
    real = reader.vault.read_named

    def late(*arguments: object) -> object:
        if not done:
            done.append(save(branch, toy.feed(200, branch)))
            again(local, keep_last=1).prune(branch)
        return real(*arguments)

    monkeypatch.setattr(reader.vault, "read_named", late)
    restored = reader.load(IDENTITY, GEOMETRY, BUDGETS)
    assert restored.manifest.generation == 2 and restored.manifest.seen == toy.seen
    assert save(reader, toy).generation == 3


def test_a_reader_of_a_number_that_is_deleted_meanwhile_is_told(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    reader = again(local).branch("alice")
    real = reader.vault.read_named

    def late(*arguments: object) -> object:
        if local.info("alice")[0].generation == 1:
            again(local).delete("alice", 1)
        return real(*arguments)

    monkeypatch.setattr(reader.vault, "read_named", late)
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
        assert [one.generation for one in local.list()] == [2]
        assert [one.generation for one in local.info("alice")] == [2]
        assert [(one.generation, one.problem) for one in local.verify()] == [(2, "")]


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


# -- any order of everything, against a model -------------------------------------------------------------------------

NAMES = ("alice", "bob", "carol")


class Owner:
    """An open branch and its context, and what the model knows of it: session folder, name, newest number known."""

    def __init__(self, branch: Branch, toy: Toy, folder: str, head: int, base: tuple[int, Record] | None = None):
        self.branch, self.toy, self.folder, self.head = branch, toy, folder, head
        self.name, self.base = branch.name, base

    @property
    def place(self) -> tuple[str, str]:
        return self.folder, self.name


class Machine(RuleBasedStateMachine):
    """Owners of three names open, feed, save, fork, rewind, delete, collect and forget in any order.

    The model: `snaps[folder, name]` numbers to records, `highest[folder, name]` the highest number ever used, where
    `folder` is the name of the session whose folder it is. A name means a fork as long as some other session's folder
    holds snapshots of it, else its own session.
    """

    owners = Bundle("owners")
    key: str | None = None
    remote = False

    @initialize(target=owners, forked=st.booleans())
    def start(self, forked: bool) -> object:
        """An empty store tells little: alice has two snapshots, and perhaps a fork, bob."""
        self.root = tempfile.mkdtemp(prefix="store_machine_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.snaps: dict[tuple[str, str], dict[int, Record]] = {}
        self.highest: dict[tuple[str, str], int] = {}
        self.seeds = 0
        self.spools = closed_spools(threads=False)
        self.spools.__enter__()
        alice = self.open("alice")
        for _ in range(2):
            self.save(alice, 13, False)
        if not forked:
            return alice
        bob = self.fork(alice, "bob")
        self.save(bob, 5, False)
        return multiple(alice, bob)

    def teardown(self) -> None:
        self.spools.__exit__(None, None, None)
        empty_memory()
        shutil.rmtree(getattr(self, "root", "/nonexistent"), ignore_errors=True)

    @property
    def store(self) -> Store:
        if self.remote:
            return Store(f"memory://{self.root}", key=self.key, keep_last=2)
        return local_store(self.root, key=self.key, keep_last=2)

    def home(self, name: str) -> str:
        """The session whose folder the name leads to."""
        away = [folder for (folder, branch), snaps in self.snaps.items() if branch == name != folder and snaps]
        assert len(away) <= 1
        return away[0] if away else name

    def found(self, name: str) -> dict[int, Record]:
        return self.snaps.get((self.home(name), name), {})

    @rule(target=owners, name=st.sampled_from(NAMES))
    def open(self, name: str) -> object:
        folder, found = self.home(name), self.found(name)
        head = self.highest.get((folder, name), 0)
        if found:
            branch, record = load(self.store, name)
            assert same(record, found[max(found)])
            return Owner(branch, Toy.of(record), folder, head, (max(found), found[max(found)]))
        self.seeds += 1
        branch, toy = begin(self.store, name, self.seeds)
        return Owner(branch, toy, folder, head)

    @rule(owner=owners, tokens=st.sampled_from([0, 1, 4, 13, 40]), prune=st.booleans())
    def save(self, owner: Owner, tokens: int, prune: bool) -> None:
        owner.toy.feed(tokens, owner.branch)
        highest = self.highest.get(owner.place, 0)
        own = self.snaps.get((owner.name, owner.name))
        lost = self.home(owner.name) != owner.folder and (self.home(owner.name) != owner.name or own)
        anew = owner.base is not None and owner.base[1] is not self.snaps.get(owner.place, {}).get(
            owner.base[0], owner.base[1])
        if owner.head != highest or lost or anew:
            with pytest.raises(StaleOwner):
                save(owner.branch, owner.toy)
            return
        done = save(owner.branch, owner.toy)
        assert done.generation == highest + 1
        if not done.log:
            owner.toy.ids = None
        else:
            assert owner.toy.ids is not None
        owner.head = self.highest[owner.place] = done.generation
        snaps = self.snaps.setdefault(owner.place, {})
        snaps[done.generation] = owner.toy.record()
        owner.base = done.generation, snaps[done.generation]
        if prune:
            self.store.prune(owner.branch)
            for generation in sorted(snaps)[:-2]:
                del snaps[generation]

    @rule(target=owners, owner=owners, name=st.sampled_from(NAMES))
    def fork(self, owner: Owner, name: str) -> object:
        if name == owner.folder or self.found(name) or self.snaps.get((owner.folder, name)):
            with pytest.raises(ConfigError):
                owner.branch.fork(name, owner.toy.seen)
            return multiple()
        self.seeds += 1
        twin = owner.branch.fork(name, owner.toy.seen)
        return Owner(twin, owner.toy.twin(self.seeds), owner.folder, self.highest.get((owner.folder, name), 0))

    @rule(owner=owners, tokens=st.sampled_from([5, 60]))
    def save_and_retire(self, owner: Owner, tokens: int) -> None:
        self.save(owner, tokens, True)

    @rule(owner=owners, data=st.data())
    def rewind(self, owner: Owner, data: st.DataObject) -> None:
        found = self.snaps.get(owner.place, {})
        if not found:
            with pytest.raises(SnapshotNotFound):
                owner.branch.load(IDENTITY, GEOMETRY, BUDGETS)
            return
        generation = data.draw(st.sampled_from(sorted(found)))
        owner.branch.load(IDENTITY, GEOMETRY, BUDGETS, generation)
        owner.toy, owner.head = Toy.of(found[generation]), self.highest[owner.place]
        owner.base = generation, found[generation]
        self.seeds += 1
        owner.toy.seed = self.seeds

    @precondition(lambda self: any(self.found(name) for name in NAMES))
    @rule(data=st.data(), which=st.sampled_from(["newest", "oldest", "all"]))
    def delete(self, data: st.DataObject, which: str) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.found(name)]))
        found = self.found(name)
        generation = {"newest": max(found), "oldest": min(found), "all": None}[which]
        assert self.store.delete(name, generation) == (sorted(found) if generation is None else [generation])
        if generation is None:
            found.clear()
        else:
            del found[generation]

    @rule()
    def gc(self) -> None:
        self.store.gc()
        if not self.remote:
            for folder in {folder for folder, _ in self.snaps}:
                vault = type(self.store.branch("x").vault)(self.store.files, folder_of(folder), self.store._key)
                named = {ref.name for path, _ in vault.manifests() for manifest in [vault.manifest_at(path)[0]]
                         for ref in (*manifest.pages, *(manifest.log or ()))}
                there = {file for kind in ("pages", "log") for file in self.store.files.sizes(f"{vault.folder}/{kind}")}
                assert there == named

    @precondition(lambda self: self.highest)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({name for place in self.highest for name in place})))
        places = [place for place in self.highest if place[0] == name]
        if self.home(name) != name:
            with pytest.raises(ConfigError):
                self.store.forget(name)
            return
        try:
            self.store.forget(name)
        except SnapshotNotFound:
            assert not places
        for place in places:
            self.snaps.pop(place, None)
            del self.highest[place]
        mine = [path for path, content in everything(self.root).items() if path.startswith(folder_of(name))]
        assert mine == [] and self.store.files.sizes(folder_of(name)) == {}
        aliases = [folder for folder in self.store.files.folders("") if "branch" in self.store.files.sizes(folder)
                   and bytes(self.store.files.read(f"{folder}/branch", 64)).decode() == folder_of(name)]
        assert aliases == []

    @precondition(lambda self: hasattr(self, "root"))
    @invariant()
    def all_that_was_acknowledged_is_there(self) -> None:
        store = self.store
        expected = {(name, max(snaps)): snaps for (_, name), snaps in self.snaps.items() if snaps}
        assert {(one.name, one.generation) for one in store.list()} == set(expected)
        assert problems(store) == []
        for name in NAMES:
            found = self.found(name)
            assert store.has(name) is bool(found)
            if found:
                assert [one.generation for one in store.info(name)] == sorted(found)
                for generation, record in found.items():
                    assert same(loaded(store, name, generation), record), (name, generation)


class Encrypted(Machine):
    key = KEY


class Remote(Machine):
    remote = True


class RemoteEncrypted(Machine):
    remote, key = True, KEY


def _case(machine: type[Machine], examples: int, steps: int) -> type:
    case = machine.TestCase
    case.settings = settings(settings.get_profile("suite"), max_examples=examples, stateful_step_count=steps)
    return case


TestMachine = _case(Machine, 40, 30)
TestEncrypted = _case(Encrypted, 12, 30)
TestRemote = _case(Remote, 25, 30)
TestRemoteEncrypted = _case(RemoteEncrypted, 8, 30)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Machine, Encrypted, Remote, RemoteEncrypted])
def test_any_order_of_everything_keeps_what_was_acknowledged(machine):
    """The machines above, for long."""
    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(machine, settings=settings(settings.get_profile("suite"), max_examples=600,
                                                         stateful_step_count=60))
