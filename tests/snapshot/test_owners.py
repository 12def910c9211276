"""Of many owners of one branch one saves; the others are told, keep what they have, and may save it elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotMismatch,
    SnapshotNotFound,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot import Save, Store
from locret_stream.snapshot.branch import Branch
from locret_stream.snapshot.format import VERSION
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.log import Refocus
from locret_stream.snapshot.names import write_alias
from locret_stream.snapshot.vault import Vault, folder_of, hashed
from tests.processes import leaving_none
from tests.snapshot.kill import STEP, Hands, expected
from tests.snapshot.support import (
    GEOMETRY,
    IDENTITY,
    KEY,
    Toy,
    Unsynced,
    begin,
    closed_spools,
    empty_memory,
    everything,
    ids_of,
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
    """An empty store in a folder."""
    return local_store(tmp_path / "store", key=KEY if request.param == "encrypted" else None)


@pytest.fixture(params=["plain", "encrypted"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store where nothing can hold others off."""
    return Store(f"memory://{tmp_path}", key=KEY if request.param == "encrypted" else None)


def again(store: Store) -> Store:
    """Another process's view of the same store."""
    if isinstance(store.files, LocalFiles):
        return local_store(store.url, key=store._key)
    return Store(store.url, key=store._key)


def two(store: Store) -> tuple[tuple[Branch, Toy], tuple[Branch, Toy]]:
    """Two owners of one saved session, who have each gone another way since."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    other, another = resume(again(store), "alice")
    another.seed = 2
    toy.feed(13, branch)
    another.feed(21, other)
    return (branch, toy), (other, another)


def sound(store: Store) -> bool:
    """Whether nothing is wrong with anything listed, and nothing is missing or too many once it was collected."""
    fresh = again(store)
    return not [found for found in fresh.verify() if found.problem]


# -- two owners in one process ----------------------------------------------------------------------------------------


def test_the_second_to_save_is_told_and_keeps_what_it_has(store):
    (one, toy), (other, another) = two(store)
    save(one, toy)
    before = another.record()
    for _ in range(3):
        with pytest.raises(StaleOwner, match=r"its newest snapshot is 2, this owner knows 1"):
            save(other, another)
    assert same(another.record(), before) and same(loaded(again(store), "alice"), toy.record())
    twin = other.fork("bob", another.seen)
    save(twin, another)
    assert same(loaded(again(store), "bob"), another.record()) and same(loaded(again(store), "alice"), toy.record())
    save(one, toy.feed(9, one))
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_of_two_saves_at_once_the_one_whose_manifest_is_first_wins(store):
    (one, toy), (other, another) = two(store)
    with pytest.raises(StaleOwner):
        save(other, another, lambda: save(one, toy))
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)
    assert [info.generation for info in store.info("alice")] == [1, 2]
    save(other.fork("bob", another.seen), another)
    assert same(loaded(again(store), "bob"), another.record()) and sound(store)


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_save_that_waited_for_its_lock_looks_again_whether_it_is_stale_and_writes_nothing(store, begun_anew,
                                                                                           monkeypatch):
    """Another owner saved, or forgot the session and began it anew, between the first look and the lock."""
    (one, toy), (other, another) = two(store)
    real, before = other.vault.files.lock, []

    def lock(folder: str, **options: object) -> object:
        if not before and options["shared"]:
            before.append(True)
            if begun_anew:
                again(store).forget("alice")
                fresh, third = begin(again(store), "alice", 3, 9)
                save(fresh, third)
            else:
                save(one, toy)
            before.append(stored(store, "alice"))
        return real(folder, **options)

    monkeypatch.setattr(other.vault.files, "lock", lock)
    with pytest.raises(StaleOwner), Save(other, another.moment(), IDENTITY, GEOMETRY):
        raise AssertionError("it was let in")
    assert before[1] == stored(store, "alice") and sound(store)
    with pytest.raises(StaleOwner):  # now at the first look, or by what its number stands for now
        save(other, another)


def test_what_a_stale_owner_wrote_is_rubbish(local):
    (one, toy), (other, another) = two(local)
    with pytest.raises(StaleOwner):
        save(other, another, lambda: save(one, toy))
    assert stored(local, "alice") > needed(local, "alice")
    local.gc()
    assert stored(local, "alice") == needed(local, "alice")
    assert same(loaded(again(local), "alice"), toy.record())


def test_two_first_saves_of_one_name_do_not_both_win(store):
    (one, toy), (other, another) = begin(store, "alice", 1, 9), begin(again(store), "alice", 2, 13)
    save(one, toy)
    with pytest.raises(StaleOwner):
        save(other, another)
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_a_stale_owner_who_opens_again_saves_again(store):
    (one, toy), (other, another) = two(store)
    save(one, toy)
    with pytest.raises(StaleOwner):
        save(other, another)
    other, another = resume(again(store), "alice")
    assert save(other, another.feed(5, other)).generation == 3
    with pytest.raises(StaleOwner):
        save(one, toy)
    assert same(loaded(again(store), "alice"), another.record())


@pytest.mark.parametrize("which", [None, 2])
def test_a_deleted_newest_snapshot_does_not_give_its_number_to_a_stale_owner(store, which):
    (one, toy), (other, another) = two(store)
    save(one, toy)
    again(store).delete("alice", which)
    with pytest.raises(StaleOwner):
        save(other, another)
    assert save(one, toy).generation == 3  # whoever saved it last may go on
    with pytest.raises(StaleOwner):
        save(other, another)
    toy.ids = None  # those of the deleted snapshot are gone, and that is told
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_a_collected_number_does_not_come_again(store):
    (one, toy), (other, another) = two(store)
    for _ in range(3):
        save(one, toy.feed(1, one))
        again(store).delete("alice", one.head)
        again(store).gc()
    for _ in range(2):
        with pytest.raises(StaleOwner):
            save(other, another)
    assert save(one, toy).generation == 5


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_a_session_that_was_forgotten_and_begun_anew_is_another_one(store, saves):
    """Its numbers are the same again."""
    branch, toy = begin(store, "alice", tokens=30)
    for _ in range(saves):
        save(branch, toy)
    again(store).forget("alice")
    other, another = begin(again(store), "alice", 2, 9)
    for _ in range(saves):
        save(other, another)
    with pytest.raises(StaleOwner):
        save(branch, toy.feed(5, branch))
    assert save(other, another.feed(5, other)).generation == saves + 1
    assert same(loaded(again(store), "alice"), another.record()) and sound(store)


@pytest.mark.parametrize("fork", [False, True])
def test_pages_that_others_collected_are_written_again(store, fork, monkeypatch):
    branch, toy = begin(store, "alice", tokens=60)
    save(branch, toy)
    if fork:
        branch = branch.fork("bob", toy.seen)
    other = again(store)
    other.delete("alice")
    monkeypatch.setattr("locret_stream.snapshot.remote.RemoteFiles.age_s", lambda self, path: 1e6)
    monkeypatch.setattr("locret_stream.snapshot.store.log_of_owners", lambda vault, **_: set())  # by another process
    other.gc()
    assert stored(other, "alice") == set()
    monkeypatch.undo()
    assert not save(branch, toy.feed(3, branch)).log  # ids that were only there are gone, and that is told
    toy.ids = None
    assert same(loaded(again(store), branch.name), toy.record()) and sound(store)


def test_an_owner_who_went_back_keeps_its_log_while_older_snapshots_are_cleared_away(local):
    """The save before it was durable, and clearing away came only then: after the owner had gone back."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    back, old = resume(local, "alice", 1)
    local.keep_last = 1
    local.prune(branch)
    assert [one.generation for one in local.info("alice")] == [2]
    old.seed = 3
    assert save(back, old.feed(9, back)).log
    assert same(loaded(again(local), "alice"), old.record()) and sound(local)


def test_what_is_cleared_away_while_an_owner_goes_back_to_it_is_not_there(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    read = Branch._read

    def slowly(self: Branch, *arguments: object) -> object:
        found = read(self, *arguments)
        local.keep_last = 1
        local.prune(branch)
        return found

    monkeypatch.setattr(Branch, "_read", slowly)
    with pytest.raises(SnapshotNotFound, match="cleared away while it was read"):
        resume(local, "alice", 1)


def test_an_owner_who_rewound_saves_though_what_it_rewound_to_was_deleted(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    back, old = resume(again(store), "alice", 1)
    again(store).delete("alice", 1)
    old.seed = 3
    save(back, old.feed(9, back))
    if stored(store, "alice") and not loaded(again(store), "alice").ids:
        old.ids = None
    assert same(loaded(again(store), "alice"), old.record()) and sound(store)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_of_many_saves_at_once_just_one_wins(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for generation in range(2, 6):
        owners = [resume(again(local), "alice") for _ in range(5)]
        start, won, lost = threading.Barrier(5), [], []

        def race(number: int, owners: list = owners, start: Any = start, won: list = won, lost: list = lost) -> None:
            own, mine = owners[number]
            mine.seed = 100 + number
            mine.feed(number + 5, own)
            try:
                save(own, mine, lambda: start.wait(30))
                won.append(mine.record())
            except StaleOwner:
                lost.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(won) == 1 and len(lost) == 4
        assert same(loaded(again(local), "alice", generation), won[0])
    assert sound(local)
    local.gc()
    assert stored(local, "alice") == needed(local, "alice")


def test_a_collection_waits_for_a_save_and_takes_nothing_of_it(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    done: list[str] = []
    threads = []

    def meanwhile() -> None:
        threads.append(threading.Thread(target=lambda: (again(local).gc(), done.append("collected"))))
        threads[0].start()
        time.sleep(0.2)
        done.append("saving")

    save(branch, toy.feed(60, branch), meanwhile)
    threads[0].join(60)
    assert done == ["saving", "collected"]
    assert same(loaded(again(local), "alice"), toy.record()) and sound(local)


@pytest.mark.parametrize("use", [lambda store: store.delete("alice", 1), lambda store: store.forget("alice")])
def test_nothing_is_deleted_while_somebody_saves(local, use):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    threads = []

    def meanwhile() -> None:
        threads.append(threading.Thread(target=lambda: use(again(local))))
        threads[0].start()
        time.sleep(0.2)
        assert [info.generation for info in local.info("alice")] == [1]

    save(branch, toy.feed(60, branch), meanwhile)
    threads[0].join(60)
    found = everything(local.url)
    assert found == {} or same(loaded(again(local), "alice"), toy.record())
    assert sound(local)


# -- where nothing holds others off -----------------------------------------------------------------------------------


def _saved_and_deleted(store: Store, owner: Branch, toy: Toy) -> None:
    save(owner, toy)
    again(store).delete("alice", 2)


def _saved_twice_and_retired(store: Store, owner: Branch, toy: Toy) -> None:
    save(owner, toy)
    save(owner, toy)
    again(store).delete("alice", 2)


@pytest.mark.parametrize("meanwhile", [_saved_and_deleted, _saved_twice_and_retired])
def test_a_number_that_was_free_again_for_a_moment_is_not_taken(remote, meanwhile):
    """Between look and write others saved that very number and deleted it: the write succeeds, the save must not."""
    (one, toy), (other, another) = two(remote)
    with pytest.raises(StaleOwner):
        save(other, another, lambda: meanwhile(remote, one, toy))
    done = save(one, toy.feed(5, one))
    assert done.generation == one.head
    if not done.log:
        toy.ids = None
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


def test_pages_that_are_collected_during_a_save_fail_it_and_the_next_one_is_whole(remote, monkeypatch):
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)

    def meanwhile() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("locret_stream.snapshot.remote.RemoteFiles.age_s", lambda self, path: 1e6)
            again(remote).delete("alice")
            again(remote).gc()

    with pytest.raises(StoreError, match="were deleted while it was saved"):
        save(branch, toy.feed(3, branch), meanwhile)
    assert sound(remote) and not remote.has("alice")
    save(branch, toy)
    toy.ids = None
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


def test_what_no_snapshot_names_is_not_relied_upon(remote):
    """It may be collected in any moment: by a collector that has looked already."""
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)
    again(remote).delete("alice")
    before = {path: remote.files.fs.modified(f"{remote.files.root}/{path}") for path in stored(remote, "alice")}
    done = save(branch, toy.feed(3, branch))
    for path in needed(remote, "alice"):
        assert path not in before or remote.files.fs.modified(f"{remote.files.root}/{path}") > before[path]
    assert done.bytes_written == done.bytes
    toy.ids = None
    assert same(loaded(again(remote), "alice"), toy.record())


def test_a_session_that_is_forgotten_during_a_save_fails_it(remote):
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)
    with pytest.raises((StaleOwner, StoreError)):
        save(branch, toy.feed(3, branch), lambda: again(remote).forget("alice"))
    assert remote.list() == [] and sound(remote)
    with pytest.raises(StaleOwner):
        save(branch, toy)


def test_a_key_that_is_destroyed_during_a_first_save_fails_it(tmp_path):
    remote = Store(f"memory://{tmp_path}", key=KEY)
    branch, toy = begin(remote, "alice", tokens=60)

    def meanwhile() -> None:
        other, another = begin(again(remote), "alice", 2, 9)
        again(remote).forget("alice")
        assert other.head == 0 and another.seen

    with pytest.raises(StoreError):
        save(branch, toy, meanwhile)
    save(branch, toy)
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


@pytest.mark.parametrize("error", [TimeoutError(), OSError(5, "broken pipe")])
def test_a_save_whose_answer_was_lost_does_not_fence_off_its_own_owner(remote, monkeypatch, error):
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)
    real = remote.files.fs.pipe_file

    def lossy(path: str, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        if path.endswith(".snap"):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(remote.files.fs, "pipe_file", lossy)
        with pytest.raises(StoreError):
            save(branch, toy.feed(3, branch))
    first = toy.record()
    assert save(branch, toy.feed(9, branch)).generation == 3
    assert same(loaded(again(remote), "alice"), toy.record()) and same(loaded(again(remote), "alice", 2), first)
    assert remote.info("alice")[2].parent != remote.info("alice")[1].parent and sound(remote)


def test_a_save_that_could_be_neither_finished_nor_undone_does_not_fence_off_its_own_owner(store, monkeypatch):
    """The store is out of reach from the moment on in which the manifest is there."""
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    real = store.files.write

    def fail(*arguments: Any) -> Any:
        raise StoreError("the network is down")

    def write(path: str, parts: Any, **options: Any) -> None:
        real(path, parts, **options)
        if path.endswith(".snap"):
            monkeypatch.setattr(store.files, "read", fail)
            monkeypatch.setattr(store.files, "delete", fail)

    monkeypatch.setattr(store.files, "write", write)
    with pytest.raises(StoreError, match="down"):
        save(branch, toy.feed(8, branch))
    monkeypatch.undo()
    first = toy.record()
    assert save(branch, toy.feed(9, branch)).generation == 3
    assert same(loaded(again(store), "alice"), toy.record()) and same(loaded(again(store), "alice", 2), first)
    assert sound(store)


def failing_once(store: Store, ending: str) -> None:
    """The next read of such a file fails; the one after it is as ever."""
    real = store.files.read

    def read(path: str, most: int) -> memoryview:
        if path.endswith(ending):
            store.files.read = real
            raise StoreError("a read that fails once")
        return real(path, most)

    store.files.read = read


def test_a_read_that_fails_is_no_evidence_that_others_saved(store, monkeypatch):
    """After a lost answer the owner asks whose the newest snapshot is, and gets no answer to that either."""
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    real = store.files.write

    def lossy(path: str, parts: Any, **options: Any) -> None:
        real(path, parts, **options)
        if path.endswith(".snap"):
            raise StoreError("the answer got lost")

    with monkeypatch.context() as patch:
        patch.setattr(store.files, "write", lossy)
        with pytest.raises(StoreError, match="got lost"):
            save(branch, toy.feed(8, branch))
    failing_once(store, "2.snap")
    with pytest.raises(StoreError, match="fails once"):
        branch.expect_newest()
    assert branch.expect_newest() == [1, 2] and save(branch, toy.feed(9, branch)).generation == 3
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_a_read_that_fails_when_a_save_finds_itself_does_not_fence_off_its_own_owner(remote, monkeypatch):
    """A layer below repeats the request that creates the manifest; whose it is cannot be read in that moment."""
    branch, toy = begin(remote, "alice", tokens=20)
    save(branch, toy)
    real = remote.files.fs.pipe_file

    def twice(path: str, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        if path.endswith(".snap"):
            failing_once(remote, "2.snap")
            real(path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(remote.files.fs, "pipe_file", twice)
        with pytest.raises(StoreError, match="fails once"):
            save(branch, toy.feed(8, branch))
    assert save(branch, toy.feed(9, branch)).generation == 3
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


def test_a_read_that_fails_lets_nobody_into_a_session_that_was_begun_anew(store):
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    store.forget("alice")
    fresh, other = begin(again(store), "alice", seed=9, tokens=20)
    save(fresh, other)
    failing_once(store, "1.snap")
    with pytest.raises(StoreError, match="fails once"):
        save(branch, toy.feed(8, branch))
    with pytest.raises(StaleOwner, match="begun anew"):
        save(branch, toy)
    assert same(loaded(again(store), "alice"), other.record()) and sound(store)


def test_a_newest_snapshot_that_cannot_be_read_keeps_nobody_from_going_back(store):
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    save(branch, toy.feed(8, branch))
    failing_once(store, "2.snap")
    older, before = resume(store, "alice", 1)
    assert older.newest == "" and save(older, before.feed(4, older)).generation == 3


def test_a_save_whose_answer_was_lost_is_stale_once_others_went_on_from_it(remote, monkeypatch):
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)
    real = remote.files.fs.pipe_file

    def lossy(path: str, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        if path.endswith(".snap"):
            raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(remote.files.fs, "pipe_file", lossy)
        with pytest.raises(StoreError):
            save(branch, toy.feed(3, branch))
    other, another = resume(again(remote), "alice")
    save(other, another.feed(9, other))
    with pytest.raises(StaleOwner):
        save(branch, toy)
    assert same(loaded(again(remote), "alice"), another.record())


def test_a_save_that_a_lower_layer_repeats_finds_itself_and_succeeds(remote, monkeypatch):
    branch, toy = begin(remote, "alice", tokens=60)
    save(branch, toy)
    real = remote.files.fs.pipe_file

    def twice(path: str, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        if path.endswith(".snap"):
            real(path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(remote.files.fs, "pipe_file", twice)
        assert save(branch, toy.feed(3, branch)).generation == 2
    assert save(branch, toy.feed(3, branch)).generation == 3
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


# -- one name, two sessions -------------------------------------------------------------------------------------------


def test_a_session_and_a_fork_of_one_name_do_not_both_win(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    own, another = begin(again(store), "bob", 3, 9)
    save(own, another)
    with pytest.raises(StaleOwner, match="is meanwhile the name of another"):
        save(twin, other)
    assert same(loaded(again(store), "bob"), another.record()) and again(store).branch("bob").session == "bob"
    assert save(own, another.feed(5, own)).generation == 2 and sound(store)


@pytest.mark.parametrize("first", ["session", "fork"])
def test_a_session_and_a_fork_that_begin_in_one_moment_do_not_both_win(store, first):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    own, another = begin(again(store), "bob", 3, 9)
    late, late_toy, early, early_toy = ((own, another, twin, other) if first == "fork" else (twin, other, own, another))
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: save(early, early_toy))
    assert same(loaded(again(store), "bob"), early_toy.record())
    assert [one.name for one in store.list()] == ["alice", "bob"] and sound(store)
    save(early, early_toy.feed(9, early))
    assert same(loaded(again(store), "bob"), early_toy.record())


@pytest.mark.parametrize("path", ["alias", "manifest"])
def test_a_session_and_a_fork_that_begin_between_each_others_steps_do_not_both_win(store, path, monkeypatch):
    """The other one does all its work between two steps of the one: before its alias, or before its manifest."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    real, won = twin.vault.files.write, []

    def write(target: str, parts: Any, *, exclusive: bool = False) -> None:
        if not won and (target.endswith("/branch") if path == "alias" else "/m/" in target):
            won.append(None)
            own, another = begin(again(store), "bob", 3, 9)
            try:
                save(own, another)
                won[0] = another.record()
            except StaleOwner:
                pass
        real(target, parts, exclusive=exclusive)

    monkeypatch.setattr(twin.vault.files, "write", write)
    try:
        save(twin, other)
        winners = [other.record()]
    except StaleOwner:
        winners = []
    winners += [record for record in won if record is not None]
    assert len(winners) <= 1
    if winners:
        assert same(loaded(again(store), "bob"), winners[0])
    assert sound(store)


def test_two_forks_of_two_sessions_under_one_name_do_not_both_win(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    other, another = begin(store, "carol", 4, 30)
    save(other, another)
    one, two = branch.fork("bob", toy.seen), other.fork("bob", another.seen)
    save(one, toy)
    with pytest.raises(StaleOwner):
        save(two, another)
    assert same(loaded(again(store), "bob"), toy.record()) and sound(store)
    with pytest.raises(ConfigError):
        other.fork("bob", another.seen)


def test_an_owner_of_a_deleted_session_is_told_when_its_name_was_taken(store):
    own, another = begin(store, "bob", 3, 9)
    save(own, another)
    again(store).delete("bob")
    branch, toy = begin(store, "alice", tokens=30)
    twin = branch.fork("bob", toy.seen)
    save(twin, toy)
    with pytest.raises(StaleOwner):
        save(own, another)
    assert same(loaded(again(store), "bob"), toy.record())
    again(store).delete("bob")
    assert save(own, another).generation == 2  # and may go on once it is free
    with pytest.raises(StaleOwner):
        save(twin, toy)
    another.ids = None
    assert same(loaded(again(store), "bob"), another.record()) and sound(store)


def test_a_name_that_a_dead_fork_left_is_free(store, monkeypatch):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    twin = branch.fork("bob", toy.seen)
    real = twin.vault.files.write

    def dies(target: str, parts: Any, *, exclusive: bool = False) -> None:
        if "/m/" in target:
            raise KeyboardInterrupt
        real(target, parts, exclusive=exclusive)

    with monkeypatch.context() as patch:
        patch.setattr(twin.vault.files, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            save(twin, toy)
    assert "branch" in store.files.sizes(folder_of("bob"))
    assert not store.has("bob")
    if not isinstance(store.files, LocalFiles):  # perhaps it still is about to write: only time tells
        own, another = begin(again(store), "bob", 3, 9)
        with pytest.raises(StaleOwner):
            save(own, another)
        monkeypatch.setattr(type(store.files), "age_s", lambda self, path: 3601.0)
    own, another = begin(again(store), "bob", 3, 9)
    assert save(own, another).session == "bob"
    assert same(loaded(again(store), "bob"), another.record()) and sound(store)


def test_a_fork_that_is_saved_while_its_name_is_freed_keeps_it(local, monkeypatch):
    """A save of it died and left the alias, which others tidy away in the moment in which it is saved again."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    twin, other = branch.fork("bob", toy.seen), toy.twin(7)
    write_alias(local.files, folder_of("bob"), branch.vault.folder)
    saved, real = [], Store._free
    saving = threading.Thread(target=lambda: saved.append(save(twin, other)))

    def free(*arguments: Any) -> None:
        saving.start()
        saving.join(0.3)  # as long as it may take, if nothing holds it off
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_free", free)
        assert again(local)._tidy(folder_of("bob")) == [f"{folder_of('bob')}/branch"]
    saving.join(30)
    assert [one.name for one in saved] == ["bob"] and again(local).has("bob")
    assert same(loaded(again(local), "bob"), other.record()) and sound(local)


# -- the log, when nothing else can be read ---------------------------------------------------------------------------


def chain(store: Store, name: str, identity: Any = IDENTITY) -> list[int]:
    """All that was accepted, the pending ids last."""
    return ids_of(ids for ids, _ in again(store).branch(name).read_chain(identity).pieces())


@pytest.mark.parametrize("damage", ["nothing", "manifest", "page"])
def test_a_log_gives_everything_that_was_accepted(local, damage):
    branch, toy = begin(local, "alice", tokens=30)
    for tokens in (1, 9, 50, 3):
        save(branch, toy.feed(tokens, branch))
    accepted = [*toy.ids, *toy.pending]
    twin, other = branch.fork("bob", toy.seen), toy.twin(2)
    save(twin, other.feed(6, twin))
    own = Path(local.url) / folder_of("alice")
    for path in {"nothing": [], "manifest": [own / "m" / hashed("alice") / "000000000004.snap"],
                 "page": sorted((own / "pages").iterdir())}[damage]:
        path.write_bytes(b"rubbish")
    assert chain(local, "alice") == accepted and chain(local, "bob") == [*other.ids, *other.pending]


def test_the_log_of_a_session_that_was_forgotten_and_begun_anew_is_read_with_its_own_key(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    again(local).forget("alice")
    other, another = begin(again(local), "alice", 2, 41)
    save(other, another)
    assert ids_of(ids for ids, _ in branch.read_chain(IDENTITY).pieces()) == [*another.ids, *another.pending]


def test_a_log_with_a_part_missing_is_none(local):
    branch, toy = begin(local, "alice", tokens=200)
    save(branch, toy)
    save(branch, toy.feed(20, branch))
    own = Path(local.url) / folder_of("alice")
    parts = sorted((own / "log").iterdir(), key=lambda path: -path.stat().st_size)
    assert len(parts) == 2
    parts[0].unlink()
    with pytest.raises(SnapshotCorrupt):
        chain(local, "alice")
    (own / "m" / hashed("alice") / "000000000002.snap").write_bytes(b"rubbish")
    with pytest.raises(SnapshotCorrupt, match="gap"):
        chain(local, "alice")


def test_a_log_of_another_tokenizer_is_refused(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other = msgspec.structs.replace(IDENTITY, tokenizer="other")
    with pytest.raises(SnapshotMismatch):
        chain(local, "alice", other)
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000001.snap").write_bytes(b"rubbish")
    with pytest.raises(SnapshotMismatch):
        chain(local, "alice", other)


def test_there_is_no_log_of_nothing(local):
    with pytest.raises((SnapshotCorrupt, SnapshotNotFound)):
        chain(local, "alice")
    quiet = Store(local.url, key=local._key, log=False, files=LocalFiles(local.url, Unsynced()))
    branch, toy = begin(quiet, "alice", tokens=30)
    save(branch, toy)
    with pytest.raises(SnapshotCorrupt, match="without a log"):
        chain(local, "alice")


def test_the_log_of_a_save_that_lost_is_not_taken_for_the_session(local):
    """It may lie there, with a number that another owner's snapshot bears."""
    (one, toy), (other, another) = two(local)
    with pytest.raises(StaleOwner):
        save(other, another, lambda: save(one, toy))
    (Path(local.url) / folder_of("alice") / "m" / hashed("alice") / "000000000002.snap").write_bytes(b"rubbish")
    try:
        found = chain(local, "alice")
    except SnapshotCorrupt as error:
        assert "tells which" in str(error)
    else:
        assert found == [*toy.ids, *toy.pending]


def test_a_session_fed_again_from_its_log_goes_on(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    fresh = again(local).branch("alice")
    ids = ids_of(ids for ids, _ in fresh.read_chain(IDENTITY).pieces())
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
    ids = ids_of(ids for ids, _ in late.read_chain(IDENTITY).pieces())
    save(branch, toy.feed(8, branch))
    late.begin_anew()
    with pytest.raises(StaleOwner):
        save(late, Toy(1).feed(len(ids), late))
    assert same(loaded(again(store), "alice"), toy.record())


@pytest.mark.parametrize("how", ["rebuilt", "rewound"])
def test_a_session_begun_anew_is_told_from_the_one_of_before_without_a_base_too(store, how: str):
    branch, toy = begin(store, "alice", tokens=4)
    save(branch, toy)
    if how == "rewound":
        save(branch, toy.feed(4, branch))
        old, before = resume(again(store), "alice", 1)
    else:
        old, before = again(store).branch("alice"), Toy(1)
        old.read_chain(IDENTITY)
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
    fresh.read_chain(IDENTITY)
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
    failing_once(store, branch.log[-1].name)
    if tokens:
        save(branch, toy.feed(8, branch))
        assert len(branch.log) == parts + 1
    else:
        with pytest.raises(StoreError, match="fails once"):
            save(branch, toy.feed(8, branch))
    save(branch, toy.feed(8, branch))
    assert len(branch.log) <= parts
    chain = again(store).branch("alice").read_chain(IDENTITY)
    assert [event for _, focuses in chain.pieces() for event in focuses] == [Refocus(tokens, (1, 2, 3))]
    assert same(loaded(again(store), "alice"), toy.record()) and sound(store)


def test_a_fork_saved_beside_its_origin_is_encrypted_whoever_looks_for_the_key(tmp_path: Path):
    """Owners have a vault each: one that looks again for the key takes it from nobody."""
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "alice", tokens=8)
    save(branch, toy)
    twin = branch.fork("bob", toy.seen)
    assert twin.vault is not branch.vault
    stop = threading.Event()

    def refresh() -> None:
        while not stop.is_set():
            branch.vault.refresh()

    looking = threading.Thread(target=refresh)
    looking.start()
    try:
        for vault in [branch.vault] * 200:
            assert vault.ready() is not None
    finally:
        stop.set()
        looking.join()
    save(twin, toy)
    assert all(path.read_bytes()[:8] == b"\x89LOCSEA\n" for path in (tmp_path / "store").glob("s-*/m/*/*.snap"))


def test_a_collection_that_deletes_what_a_save_rests_on_is_noticed(remote):
    """Nothing holds it off: the snapshot that the fork grew out of goes, then its files, while the fork is saved."""
    store = Store(remote.url, key=remote._key, keep_last=1)
    store.files.age_s = lambda path: 1e6
    branch, toy = begin(store, "alice", tokens=8)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.twin(2)
    save(branch, toy.feed(200, branch))
    moment, real, done = other.moment(), store.files.delete, []
    with Save(fork, moment, IDENTITY, GEOMETRY) as saving:
        for start, end in saving.plan.write:
            saving.page(start, end, other.between(start, end))

        def delete(path: str) -> None:
            if "/pages/" in path and not done:
                done.append(path)
                with pytest.raises(StoreError, match="expected another try"):
                    saving.finish("toy", moment.seen)
            real(path)

        store.files.delete = delete
        store.prune(branch)
    assert done and not store.has("bob")
    store.files.delete = real
    save(fork, other)
    other.ids = None  # what the log rested on is gone, and it says so
    assert same(loaded(store, "bob"), other.record())


def test_what_another_manifest_of_the_same_number_needs_is_kept(remote):
    """A save that fails gives its number back. Who read its manifest meanwhile does not take it for the next one."""
    branch, toy = begin(remote, "alice", tokens=20)
    save(branch, toy)
    store = again(remote)
    twin, other = branch.fork("bob", toy.seen), toy.twin(5)
    save(twin, other)
    with pytest.MonkeyPatch.context() as patch:
        def fail(vault: Vault, name: str) -> None:
            patch.undo()
            save(twin, other.feed(4, twin))
            store.prune(twin)
            raise StoreError("a read that fails once")

        patch.setattr(Vault, "expect_claim", fail)
        with pytest.raises(StoreError, match="fails once"):
            save(branch, toy.feed(8, branch))
    assert save(branch, toy.feed(12, branch)).generation == 2
    save(twin, other.feed(4, twin))
    store.files.age_s = lambda path: 1e6
    store.prune(twin)
    assert needed(remote, "alice") <= stored(remote, "alice")
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)


def test_a_manifest_that_was_read_is_not_read_again(remote):
    branch, toy = begin(remote, "alice", tokens=20)
    for _ in range(3):
        save(branch, toy.feed(8, branch))
    remote.prune(branch)
    read, real = [], remote.files.read
    remote.files.read = lambda path, most: read.append(path) or real(path, most)
    remote.prune(branch)
    assert not [path for path in read if path.endswith(".snap")]


def test_a_stray_file_among_the_log_parts_is_not_read(tmp_path: Path):
    store = local_store(tmp_path / "store")
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    [manifest] = (tmp_path / "store").glob("s-*/m/*/*.snap")
    manifest.write_bytes(b"damaged")
    with open(next((tmp_path / "store").glob("s-*/log")) / "core", "wb") as core:
        core.truncate(1 << 43)
    assert chain(store, "alice") == [*toy.ids, *toy.pending]
    with open(next((tmp_path / "store").glob("s-*/log")) / ("0" * 32), "wb") as part:
        part.truncate(1 << 43)
    with pytest.raises(SnapshotCorrupt, match="tells which"):
        chain(store, "alice")


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hands() -> Iterator[Hands]:
    """A process that forks others."""
    with leaving_none():
        hands = Hands()
        yield hands
        hands.close()


def _all(hands: Hands, pids: list[int], check: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Wait until all have ended; everything they told."""
    told = []
    for pid in pids:
        told.append(hands.of(pid, "ended"))
        assert hands.wait(pid) == 0
        told += hands.told(pid)
    for one in told:
        check(one)
    return told


def contended(hands: Hands, root: Path, key: str | None, owners: int, rounds: int) -> int:
    """Processes save one branch against each other; every number that was told was told to one."""
    store = local_store(root, key=key, keep_last=1000)
    branch, toy = begin(store, "alice", 1)
    save(branch, toy.feed(STEP, branch))
    at = time.time() + 0.5
    pids = [hands.start("contend", root=str(root), key=key, rounds=rounds, seed=seed, at=at)
            for seed in range(owners)]
    told = _all(hands, pids, lambda one: None)
    won = [one["won"] for one in told if "won" in one]
    assert sorted(won) == list(range(2, 2 + len(won)))
    assert len(won) + sum("stale" in one for one in told) == owners * rounds
    digests = {one["won"]: one["digest"] for one in told if "won" in one}
    for info in store.info("alice")[1:]:
        assert info.generation == 2 or info.parent == digests[info.generation - 1]
        assert same(loaded(store, "alice", info.generation), expected(info.generation))
    assert [info.generation for info in store.info("alice")] == [1, *sorted(won)] and sound(store)
    return len(won)


def churned(hands: Hands, root: Path, key: str | None, owners: int, rounds: int) -> None:
    """Processes save forks of one session, prune and delete, while others collect, list and verify."""
    store = local_store(root, key=key)
    branch, toy = begin(store, "alice", 1)
    save(branch, toy.feed(STEP, branch))
    at = time.time() + 0.5
    pids = [hands.start("churn", root=str(root), key=key, rounds=rounds, seed=seed, at=at)
            for seed in range(2, 2 + owners)]
    pids += [hands.start("collect", root=str(root), key=key, rounds=rounds, at=at) for _ in range(2)]

    def no_problem(one: dict[str, Any]) -> None:
        assert "problem" not in one, one

    told = _all(hands, pids, no_problem)
    assert sound(store) and same(loaded(store, "alice"), expected(1))
    for one in told:
        if "name" in one:
            found = loaded(store, one["name"])
            assert found.tokens == one["tokens"] == STEP * (rounds + 1)
            assert store.info(one["name"])[-1].generation == one["saved"] == rounds
    store.gc()
    assert stored(store, "alice") == needed(store, "alice")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_of_many_processes_just_one_saves_each_number(hands, tmp_path, key):
    assert contended(hands, tmp_path / "store", key, 3, 6) >= 6


def test_processes_that_save_delete_and_collect_at_once_lose_nothing(hands, tmp_path):
    churned(hands, tmp_path / "store", None, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_many_processes_for_long(hands, tmp_path, key):
    print(contended(hands, tmp_path / "one", key, 4, 60), "numbers")
    churned(hands, tmp_path / "two", key, 4, 60)
