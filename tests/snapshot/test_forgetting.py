"""Forgetting leaves nothing of a session, and nothing brings it back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from locret_stream.errors import SnapshotNotFound, StaleOwner, StoreError
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.names import folder_of, hashed
from tests.snapshot.support import (
    BUDGETS,
    GEOMETRY,
    IDENTITY,
    KEY,
    Unsynced,
    again,
    begin,
    everything,
    holds,
    ids_of,
    loaded,
    local_store,
    problems,
    same,
    save,
    without_log,
)

pytestmark = pytest.mark.usefixtures("spools")


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
    """The live context is the user's; but nothing may be encrypted with a deleted key."""
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    again(store).forget("alice")
    save(fork, other.feed(9, fork))
    other.ids = None  # the log's beginning was forgotten
    assert holds(store, "bob", other.record()) and problems(store) == []
    fresh, toy = begin(again(store), "alice", tokens=9)
    save(fresh, toy)
    save(fork, other.feed(9, fork))
    assert holds(store, "alice", toy.record()) and holds(store, "bob", other.record())


def test_an_owner_of_a_forgotten_session_that_was_begun_anew_reads_the_new_one(store):
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    again(store).forget("alice")
    other, another = begin(again(store), "alice", 2, 40)
    save(other, another)
    with pytest.raises(StaleOwner, match="begun anew"):  # though its number is the newest
        save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    assert same(loaded(again(store), "bob"), without_log(toy)) and holds(store, "alice", another.record())
    restored = branch.load(IDENTITY, GEOMETRY, BUDGETS)
    assert restored.manifest.seen == 40 and save(branch, another).generation == 2
    assert ids_of(ids for ids, _ in branch.read_stored_log(IDENTITY).pieces()) == another.ids


def test_a_save_that_failed_before_its_session_was_forgotten_is_whole_when_repeated(local):
    branch, toy = begin(local, "alice", tokens=30)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(branch, toy, die)
    again(local).forget("alice")
    save(branch, toy)
    assert holds(local, "alice", toy.record())
