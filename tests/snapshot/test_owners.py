"""Of many owners of one branch one saves; the others are told, keep what they have, and may save it elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from locret_stream.errors import SnapshotNotFound, StaleOwner
from locret_stream.snapshot import Branch, Save
from tests.snapshot.support import (
    GEOMETRY,
    IDENTITY,
    again,
    begin,
    everything,
    loaded,
    needed,
    resume,
    same,
    save,
    sound,
    stored,
    two_owners,
)

pytestmark = pytest.mark.usefixtures("spools")


def test_the_second_to_save_is_told_and_keeps_what_it_has(store):
    (early, early_toy), (late, late_toy) = two_owners(store)
    save(early, early_toy)
    before = late_toy.record()
    for _ in range(3):
        with pytest.raises(StaleOwner, match=r"its newest snapshot is 2, this owner knows 1"):
            save(late, late_toy)
    assert same(late_toy.record(), before) and same(loaded(again(store), "alice"), early_toy.record())
    twin = late.fork("bob", late_toy.seen)
    save(twin, late_toy)
    assert same(loaded(again(store), "bob"), late_toy.record())
    assert same(loaded(again(store), "alice"), early_toy.record())
    save(early, early_toy.feed(9, early))
    assert same(loaded(again(store), "alice"), early_toy.record()) and sound(store)


def test_of_two_saves_at_once_the_one_whose_manifest_is_first_wins(store):
    (early, early_toy), (late, late_toy) = two_owners(store)
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: save(early, early_toy))
    assert same(loaded(again(store), "alice"), early_toy.record()) and sound(store)
    assert [info.generation for info in store.info("alice")] == [1, 2]
    save(late.fork("bob", late_toy.seen), late_toy)
    assert same(loaded(again(store), "bob"), late_toy.record()) and sound(store)


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_save_that_waited_for_its_lock_looks_again_whether_it_is_stale_and_writes_nothing(store, begun_anew,
                                                                                           monkeypatch):
    """Another owner saved, or forgot the session and began it anew, between the first look and the lock."""
    (early, early_toy), (late, late_toy) = two_owners(store)
    real, before = late.session_folder.files.lock, []

    def lock(folder: str, **options: object) -> object:
        if not before and options["shared"]:
            before.append(True)
            if begun_anew:
                again(store).forget("alice")
                fresh, third = begin(again(store), "alice", 3, 9)
                save(fresh, third)
            else:
                save(early, early_toy)
            before.append(stored(store, "alice"))
        return real(folder, **options)

    monkeypatch.setattr(late.session_folder.files, "lock", lock)
    with pytest.raises(StaleOwner), Save(late, late_toy.moment(), IDENTITY, GEOMETRY):
        raise AssertionError("it was let in")
    assert before[1] == stored(store, "alice") and sound(store)
    with pytest.raises(StaleOwner):  # now at the first look, or by what its number stands for now
        save(late, late_toy)


def test_what_a_stale_owner_wrote_is_rubbish(local):
    (early, early_toy), (late, late_toy) = two_owners(local)
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: save(early, early_toy))
    assert stored(local, "alice") > needed(local, "alice")
    local.gc()
    assert stored(local, "alice") == needed(local, "alice")
    assert same(loaded(again(local), "alice"), early_toy.record())


def test_two_first_saves_of_one_name_do_not_both_win(store):
    (early, early_toy), (late, late_toy) = begin(store, "alice", 1, 9), begin(again(store), "alice", 2, 13)
    save(early, early_toy)
    with pytest.raises(StaleOwner):
        save(late, late_toy)
    assert same(loaded(again(store), "alice"), early_toy.record()) and sound(store)


def test_a_stale_owner_who_opens_again_saves_again(store):
    (early, early_toy), (late, late_toy) = two_owners(store)
    save(early, early_toy)
    with pytest.raises(StaleOwner):
        save(late, late_toy)
    late, late_toy = resume(again(store), "alice")
    assert save(late, late_toy.feed(5, late)).generation == 3
    with pytest.raises(StaleOwner):
        save(early, early_toy)
    assert same(loaded(again(store), "alice"), late_toy.record())


@pytest.mark.parametrize("which", [None, 2])
def test_a_deleted_newest_snapshot_does_not_give_its_number_to_a_stale_owner(store, which):
    (early, early_toy), (late, late_toy) = two_owners(store)
    save(early, early_toy)
    again(store).delete("alice", which)
    with pytest.raises(StaleOwner):
        save(late, late_toy)
    assert save(early, early_toy).generation == 3  # whoever saved it last may go on
    with pytest.raises(StaleOwner):
        save(late, late_toy)
    early_toy.ids = None  # those of the deleted snapshot are gone, and that is told
    assert same(loaded(again(store), "alice"), early_toy.record()) and sound(store)


def test_a_collected_number_does_not_come_again(store):
    (early, early_toy), (late, late_toy) = two_owners(store)
    for _ in range(3):
        save(early, early_toy.feed(1, early))
        again(store).delete("alice", early.head)
        again(store).gc()
    for _ in range(2):
        with pytest.raises(StaleOwner):
            save(late, late_toy)
    assert save(early, early_toy).generation == 5


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
    monkeypatch.setattr("locret_stream.snapshot.store.log_of_owners", lambda _, **__: set())  # by another process
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
