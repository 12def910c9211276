"""Where nothing holds others off: a save that others cut into fails whole or stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from locret_stream.errors import StaleOwner, StoreError
from locret_stream.snapshot import Branch, Save, Store, claims
from locret_stream.snapshot.names import folder_of, write_alias
from locret_stream.snapshot.session_folder import SessionFolder
from tests.snapshot.support import (
    BUDGETS,
    GEOMETRY,
    IDENTITY,
    KEY,
    Toy,
    again,
    begin,
    loaded,
    needed,
    same,
    save,
    sound,
    stored,
    two_owners,
)

pytestmark = pytest.mark.usefixtures("spools")


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
    (early, early_toy), (late, late_toy) = two_owners(remote)
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: meanwhile(remote, early, early_toy))
    done = save(early, early_toy.feed(5, early))
    assert done.generation == early.head
    if not done.log:
        early_toy.ids = None
    assert same(loaded(again(remote), "alice"), early_toy.record()) and sound(remote)


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
    assert done.bytes_written == done.bytes and done.log, "the log is read and written anew, too"
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


def test_a_collection_that_deletes_what_a_save_rests_on_is_noticed(remote):
    """Nothing holds it off: the snapshot that the fork grew out of goes, then its files, while the fork is saved."""
    store = Store(remote.url, key=remote._key, keep_last=1)
    store.files.age_s = lambda path: 1e6
    branch, toy = begin(store, "alice", tokens=8)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
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
    assert save(fork, other).log, "its parts are there, and were read and written anew"
    assert same(loaded(store, "bob"), other.record())


def test_what_another_manifest_of_the_same_number_needs_is_kept(remote):
    """A save that fails gives its number back. Who read its manifest meanwhile does not take it for the next one."""
    branch, toy = begin(remote, "alice", tokens=20)
    save(branch, toy)
    store = again(remote)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(5)
    save(fork, other)
    with pytest.MonkeyPatch.context() as patch:
        def fail(session_folder: SessionFolder, name: str) -> None:
            patch.undo()
            save(fork, other.feed(4, fork))
            store.prune(fork)
            raise StoreError("a read that fails once")

        patch.setattr(claims, "expect_claim", fail)
        with pytest.raises(StoreError, match="fails once"):
            save(branch, toy.feed(8, branch))
    assert save(branch, toy.feed(12, branch)).generation == 2
    save(fork, other.feed(4, fork))
    store.files.age_s = lambda path: 1e6
    store.prune(fork)
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


def _named_and_not_saved(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[Branch, Toy]:
    """The fork bob of alice, whose alias is old, and that was never saved whole."""
    branch, toy = begin(store, "alice", tokens=20)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    write_alias(store.files, folder_of("bob"), folder_of("alice"))
    monkeypatch.setattr("locret_stream.snapshot.remote.RemoteFiles.age_s", lambda self, path: 1e6)
    return fork, other


def _before_a_deletion(store: Store, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> list[str]:
    """Call it once, right before this store deletes an alias; returns the paths of such aliases, in time."""
    deleted, real = list[str](), store.files.delete

    def delete(path: str) -> None:
        if path.endswith("/branch"):
            deleted.append(path)
            if len(deleted) == 1:
                meanwhile()
        real(path)

    monkeypatch.setattr(store.files, "delete", delete)
    return deleted


@pytest.mark.parametrize("tidying", [lambda store: store.gc(), lambda store: store.branch("bob")])
def test_an_alias_whose_fork_is_saved_while_it_is_tidied_away_stays(remote, monkeypatch, tidying):
    fork, other = _named_and_not_saved(remote, monkeypatch)
    tidier = again(remote)
    deleted = _before_a_deletion(tidier, monkeypatch, lambda: save(fork, other))
    tidying(tidier)
    assert deleted
    assert same(loaded(again(remote), "bob"), other.record()) and sound(remote)
    save(fork, other.feed(5, fork))
    assert same(loaded(again(remote), "bob"), other.record()) and sound(remote)


def test_a_fork_that_is_saved_while_all_its_snapshots_are_deleted_keeps_its_name(remote, monkeypatch):
    fork, other = _named_and_not_saved(remote, monkeypatch)
    save(fork, other)
    deleter = again(remote)
    real = deleter.files.delete

    def delete(path: str) -> None:  # in the place of another process that begins the name again
        if path.endswith("/branch"):
            late = again(remote).branch("alice")
            late.load(IDENTITY, GEOMETRY, BUDGETS)
            late = late.fork("bob", late_toy.seen)
            save(late, late_toy)
        real(path)

    late_toy = Toy.of(loaded(remote, "alice")).diverged(3)
    monkeypatch.setattr(deleter.files, "delete", delete)
    deleter.delete("bob")
    late_toy.ids = None
    found = loaded(again(remote), "bob")
    assert sound(remote) and found is not None and int(found.tensors["seed"]) == 3


def test_an_alias_that_leads_elsewhere_by_now_is_not_tidied_away(remote, monkeypatch):
    """Right before the deletion the name is freed by another process, and becomes that of another session's fork."""
    _named_and_not_saved(remote, monkeypatch)
    carol, toy = begin(remote, "carol", 3, tokens=20)
    save(carol, toy)

    def meanwhile() -> None:
        again(remote).gc()
        save(carol.fork("bob", toy.seen), toy)

    tidier = again(remote)
    deleted = _before_a_deletion(tidier, monkeypatch, meanwhile)
    tidier.gc()
    assert deleted and sound(remote)
    assert int(loaded(again(remote), "bob").tensors["seed"]) == 3


def test_a_save_that_ends_behind_the_deletion_of_its_alias_is_refused_and_may_be_tried_again(remote, monkeypatch):
    fork, other = _named_and_not_saved(remote, monkeypatch)
    real = fork.session_folder.write

    def write(path: str, *arguments: Any, **options: Any) -> None:
        if path.startswith("m/"):
            again(remote).branch("bob")
            assert "branch" not in remote.files.sizes(folder_of("bob"))
        real(path, *arguments, **options)

    monkeypatch.setattr(fork.session_folder, "write", write)
    with pytest.raises(StaleOwner):
        save(fork, other)
    monkeypatch.setattr(fork.session_folder, "write", real)
    assert not remote.has("bob") and sound(remote)
    save(fork, other)
    assert same(loaded(again(remote), "bob"), other.record()) and sound(remote)
