"""Of several owners of one branch one saves; the others get StaleOwner, keep what they have, and may save it elsewhere.

Roles: the *winner* saves first; a *stale* owner opened the same snapshot and comes after it; a *successor* begins a
session of the same name after it was forgotten; a *rewound* owner went back to an older snapshot; a *fork* has a name
of its own. A *toy* is the live context of an owner.
"""

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


def test_the_second_to_save_is_refused_and_keeps_what_it_has(store):
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    save(winner, winner_toy)
    before = stale_toy.record()
    for _ in range(3):
        with pytest.raises(StaleOwner, match=r"its newest snapshot is 2, this owner knows 1"):
            save(stale, stale_toy)
    assert same(stale_toy.record(), before) and same(loaded(again(store), "alice"), winner_toy.record())
    fork = stale.fork("bob", stale_toy.seen)
    save(fork, stale_toy)
    assert same(loaded(again(store), "bob"), stale_toy.record())
    assert same(loaded(again(store), "alice"), winner_toy.record())
    save(winner, winner_toy.feed(9, winner))
    assert same(loaded(again(store), "alice"), winner_toy.record()) and sound(store)


def test_of_two_saves_at_once_the_one_whose_manifest_is_first_wins(store):
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    with pytest.raises(StaleOwner):
        save(stale, stale_toy, lambda: save(winner, winner_toy))
    assert same(loaded(again(store), "alice"), winner_toy.record()) and sound(store)
    assert [info.generation for info in store.info("alice")] == [1, 2]
    save(stale.fork("bob", stale_toy.seen), stale_toy)
    assert same(loaded(again(store), "bob"), stale_toy.record()) and sound(store)


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_save_that_waited_for_its_lock_looks_again_whether_it_is_stale_and_writes_nothing(store, begun_anew,
                                                                                           monkeypatch):
    """Another owner saved, or forgot the session and began it anew, between the first look and the lock."""
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    real, before = stale.session_folder.files.lock, []

    def lock(folder: str, **options: object) -> object:
        if not before and options["shared"]:
            before.append(True)
            if begun_anew:
                again(store).forget("alice")
                save(*begin(again(store), "alice", 3, 9))
            else:
                save(winner, winner_toy)
            before.append(stored(store, "alice"))
        return real(folder, **options)

    monkeypatch.setattr(stale.session_folder.files, "lock", lock)
    with pytest.raises(StaleOwner), Save(stale, stale_toy.moment(), IDENTITY, GEOMETRY):
        raise AssertionError("it was let in")
    assert before[1] == stored(store, "alice") and sound(store)
    with pytest.raises(StaleOwner):  # now before the lock, or by the digest of the snapshot that has its number
        save(stale, stale_toy)


def test_what_a_stale_owner_wrote_is_rubbish(local):
    (winner, winner_toy), (stale, stale_toy) = two_owners(local)
    with pytest.raises(StaleOwner):
        save(stale, stale_toy, lambda: save(winner, winner_toy))
    assert stored(local, "alice") > needed(local, "alice")
    local.gc()
    assert stored(local, "alice") == needed(local, "alice")
    assert same(loaded(again(local), "alice"), winner_toy.record())


def test_two_first_saves_of_one_name_do_not_both_win(store):
    (winner, winner_toy), (stale, stale_toy) = begin(store, "alice", 1, 9), begin(again(store), "alice", 2, 13)
    save(winner, winner_toy)
    with pytest.raises(StaleOwner):
        save(stale, stale_toy)
    assert same(loaded(again(store), "alice"), winner_toy.record()) and sound(store)


def test_a_stale_owner_who_opens_again_saves_again(store):
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    save(winner, winner_toy)
    with pytest.raises(StaleOwner):
        save(stale, stale_toy)
    reopened, reopened_toy = resume(again(store), "alice")
    assert save(reopened, reopened_toy.feed(5, reopened)).generation == 3
    with pytest.raises(StaleOwner):
        save(winner, winner_toy)
    assert same(loaded(again(store), "alice"), reopened_toy.record())


@pytest.mark.parametrize("which", [None, 2])
def test_a_deleted_newest_snapshot_does_not_give_its_number_to_a_stale_owner(store, which):
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    save(winner, winner_toy)
    again(store).delete("alice", which)
    with pytest.raises(StaleOwner):
        save(stale, stale_toy)
    done = save(winner, winner_toy)  # whoever saved it last may go on
    assert done.generation == 3
    with pytest.raises(StaleOwner):
        save(stale, stale_toy)
    assert done.log is not store.files.locks  # where there are locks, the ids of the deleted snapshot are gone at once
    if not done.log:
        winner_toy.ids = None
    assert same(loaded(again(store), "alice"), winner_toy.record()) and sound(store)


def test_a_collected_number_does_not_come_again(store):
    (winner, winner_toy), (stale, stale_toy) = two_owners(store)
    for _ in range(3):
        save(winner, winner_toy.feed(1, winner))
        again(store).delete("alice", winner.head)
        again(store).gc()
    for _ in range(2):
        with pytest.raises(StaleOwner):
            save(stale, stale_toy)
    assert save(winner, winner_toy).generation == 5


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_a_session_that_was_forgotten_and_begun_anew_is_another_one(store, saves):
    """Its numbers are the same again."""
    branch, toy = begin(store, "alice", tokens=30)
    for _ in range(saves):
        save(branch, toy)
    again(store).forget("alice")
    successor, successor_toy = begin(again(store), "alice", 2, 9)
    for _ in range(saves):
        save(successor, successor_toy)
    with pytest.raises(StaleOwner):
        save(branch, toy.feed(5, branch))
    assert save(successor, successor_toy.feed(5, successor)).generation == saves + 1
    assert same(loaded(again(store), "alice"), successor_toy.record()) and sound(store)


@pytest.mark.parametrize("fork", [False, True])
def test_pages_that_others_collected_are_written_again(store, fork, monkeypatch):
    branch, toy = begin(store, "alice", tokens=60)
    save(branch, toy)
    if fork:
        branch = branch.fork("bob", toy.seen)
    collector = again(store)
    collector.delete("alice")
    monkeypatch.setattr("locret_stream.snapshot.remote.RemoteFiles.age_s", lambda self, path: 1e6)
    monkeypatch.setattr("locret_stream.snapshot.removing.log_of_owners", lambda _, **__: set())  # by another process
    collector.gc()
    assert stored(collector, "alice") == set()
    monkeypatch.undo()
    assert not save(branch, toy.feed(3, branch)).log  # its parts were deleted, and the session has no log any more
    toy.ids = None
    assert same(loaded(again(store), branch.name), toy.record()) and sound(store)


def test_an_owner_who_went_back_keeps_its_log_while_older_snapshots_are_pruned(local):
    """The other owner's save is durable before its prune begins, and in between this owner goes back."""
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    rewound, rewound_toy = resume(local, "alice", 1)
    local.keep_last = 1
    local.prune(branch)
    assert [info.generation for info in local.info("alice")] == [2]
    rewound_toy.seed = 3
    assert save(rewound, rewound_toy.feed(9, rewound)).log
    assert same(loaded(again(local), "alice"), rewound_toy.record()) and sound(local)


def test_a_snapshot_that_is_pruned_while_an_owner_goes_back_to_it_is_not_found(local, monkeypatch):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    read = Branch._read

    def slowly(self: Branch, *arguments: object) -> object:
        result = read(self, *arguments)
        local.keep_last = 1
        local.prune(branch)
        return result

    monkeypatch.setattr(Branch, "_read", slowly)
    with pytest.raises(SnapshotNotFound, match="was deleted while it was read"):
        resume(local, "alice", 1)


def test_an_owner_who_rewound_saves_though_what_it_rewound_to_was_deleted(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    save(branch, toy.feed(200, branch))
    rewound, rewound_toy = resume(again(store), "alice", 1)
    again(store).delete("alice", 1)
    rewound_toy.seed = 3
    save(rewound, rewound_toy.feed(9, rewound))
    if stored(store, "alice") and not loaded(again(store), "alice").ids:
        rewound_toy.ids = None
    assert same(loaded(again(store), "alice"), rewound_toy.record()) and sound(store)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_of_many_saves_at_once_just_one_wins(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for generation in range(2, 6):
        owners = [resume(again(local), "alice") for _ in range(5)]
        start, won, lost = threading.Barrier(5), [], []

        def race(number: int, owners: list = owners, start: Any = start, won: list = won, lost: list = lost) -> None:
            owner, owner_toy = owners[number]
            owner_toy.seed = 100 + number
            owner_toy.feed(number + 5, owner)
            try:
                save(owner, owner_toy, lambda: start.wait(30))
                won.append(owner_toy.record())
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
    assert everything(local.url) == {} or same(loaded(again(local), "alice"), toy.record())
    assert sound(local)
