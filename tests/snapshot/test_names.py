"""Any name is a session and never a path; a name means one session or one fork, whoever comes when."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from locret_stream.errors import ConfigError, SnapshotCorrupt, StaleOwner
from locret_stream.snapshot import claims, removing
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.names import folder_of, hashed, write_alias
from locret_stream.snapshot.removing import GRACE_S
from tests.snapshot.support import HOSTILE_NAMES, again, begin, everything, holds, loaded, needed, same, save, sound

pytestmark = pytest.mark.usefixtures("spools")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_any_name_is_a_session_and_never_a_path(local, tmp_path, name):
    (tmp_path / "x").write_bytes(b"not ours")
    branch, toy = begin(local, name, tokens=9)
    save(branch, toy)
    fork = branch.fork(f"{name[:250]} fork", toy.seen)
    save(fork, toy)
    assert holds(local, name, toy.record()) and {snapshot.name for snapshot in local.list()} == {name, fork.name}
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
    paths = {path for path, content in everything(local.url).items() if content is not None}
    fixed = {f"{own}/m/{hashed('alice')}/000000000001.snap", f"{own}/m/{hashed('bob')}/000000000001.snap",
             f"s-{hashed('bob')}/branch", f"n-{hashed('alice')}", f"n-{hashed('bob')}"}
    fixed |= {f"{own}/key"} if local._key else set()
    assert paths == fixed | needed(local, "alice")


# -- one name, two sessions -------------------------------------------------------------------------------------------


def test_a_session_and_a_fork_of_one_name_do_not_both_win(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    own, another = begin(again(store), "bob", 3, 9)
    save(own, another)
    with pytest.raises(StaleOwner, match="is meanwhile the name of another"):
        save(fork, other)
    assert same(loaded(again(store), "bob"), another.record()) and again(store).branch("bob").session == "bob"
    assert save(own, another.feed(5, own)).generation == 2 and sound(store)


@pytest.mark.parametrize("first", ["session", "fork"])
def test_a_session_and_a_fork_that_begin_in_one_moment_do_not_both_win(store, first):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    own, another = begin(again(store), "bob", 3, 9)
    late, late_toy, early, early_toy = ((own, another, fork, other) if first == "fork" else (fork, other, own, another))
    with pytest.raises(StaleOwner):
        save(late, late_toy, lambda: save(early, early_toy))
    assert same(loaded(again(store), "bob"), early_toy.record())
    assert [snapshot.name for snapshot in store.list()] == ["alice", "bob"] and sound(store)
    save(early, early_toy.feed(9, early))
    assert same(loaded(again(store), "bob"), early_toy.record())


@pytest.mark.parametrize("path", ["alias", "manifest"])
def test_a_session_and_a_fork_that_begin_between_each_others_steps_do_not_both_win(store, path, monkeypatch):
    """The other one does all its work between two steps of the one: before its alias, or before its manifest."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    real, won = fork.session_folder.files.write, []

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

    monkeypatch.setattr(fork.session_folder.files, "write", write)
    try:
        save(fork, other)
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


def test_an_owner_of_a_deleted_session_is_reported_when_its_name_was_taken(store):
    own, another = begin(store, "bob", 3, 9)
    save(own, another)
    again(store).delete("bob")
    branch, toy = begin(store, "alice", tokens=30)
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    with pytest.raises(StaleOwner):
        save(own, another)
    assert same(loaded(again(store), "bob"), toy.record())
    again(store).delete("bob")
    done = save(own, another)  # it may go on once the name is free
    assert done.generation == 2 and done.log is not store.files.locks
    with pytest.raises(StaleOwner):
        save(fork, toy)
    if not done.log:  # where there are locks, the parts of the deleted snapshot are gone at once
        another.ids = None
    assert same(loaded(again(store), "bob"), another.record()) and sound(store)


def test_a_name_that_a_dead_fork_left_is_free(store, monkeypatch):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    real = fork.session_folder.files.write

    def dies(target: str, parts: Any, *, exclusive: bool = False) -> None:
        if "/m/" in target:
            raise KeyboardInterrupt
        real(target, parts, exclusive=exclusive)

    with monkeypatch.context() as patch:
        patch.setattr(fork.session_folder.files, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            save(fork, toy)
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
    fork, other = branch.fork("bob", toy.seen), toy.diverged(7)
    write_alias(local.files, folder_of("bob"), branch.session_folder.folder)
    saved, real = [], removing.free_name
    saving = threading.Thread(target=lambda: saved.append(save(fork, other)))

    def free(*arguments: Any) -> bool:
        saving.start()
        saving.join(0.3)  # as long as it may take, if nothing holds it off
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(removing, "free_name", free)
        assert removing.remove_dead_alias(again(local).files, folder_of("bob"), GRACE_S) == [
            f"{folder_of('bob')}/branch"]
    saving.join(30)
    assert [snapshot.name for snapshot in saved] == ["bob"] and again(local).has("bob")
    assert same(loaded(again(local), "bob"), other.record()) and sound(local)


@pytest.mark.parametrize("meanwhile", ["written", "removed"])
def test_an_alias_that_others_write_or_remove_while_a_name_is_looked_up_is_no_damage(store, meanwhile, monkeypatch):
    """Where it is missing beside a fork, or leads nowhere, it is damaged, if it is so at the second look too."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    save(branch.fork("bob", toy.seen), toy)
    files, real, looks = store.files, claims.has_snapshots, []
    if meanwhile == "written":
        name, before, after, leads = "bob", None, "alice", folder_of("alice")
    else:
        name, before, after, leads = "carol", "nobody", None, None

    def lie(target: str | None) -> None:
        files.delete(f"{folder_of(name)}/branch")
        if target is not None:
            write_alias(files, folder_of(name), folder_of(target))

    def has_snapshots(*arguments: Any) -> bool:
        looks.append(found := real(*arguments))
        if len(looks) == 1:
            lie(after)
        return found

    lie(before)
    with pytest.raises(SnapshotCorrupt):
        claims.fork_target(files, folder_of(name))
    monkeypatch.setattr(claims, "has_snapshots", has_snapshots)
    assert claims.fork_target(files, folder_of(name)) == leads and looks
