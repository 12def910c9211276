"""Answers that get lost and reads that fail fence no owner off, and let nobody in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from locret_stream.errors import StaleOwner, StoreError
from locret_stream.snapshot import Store
from tests.snapshot.support import again, begin, failing_once, loaded, resume, same, save, sound

pytestmark = pytest.mark.usefixtures("spools")


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
            for call in ("read", "delete", "sizes", "everything_in"):  # the last one is an object store's alone
                monkeypatch.setattr(store.files, call, fail, raising=False)

    monkeypatch.setattr(store.files, "write", write)
    with pytest.raises(StoreError, match="down"):
        save(branch, toy.feed(8, branch))
    monkeypatch.undo()
    first = toy.record()
    assert save(branch, toy.feed(9, branch)).generation == 3
    assert same(loaded(again(store), "alice"), toy.record()) and same(loaded(again(store), "alice", 2), first)
    assert sound(store)


@contextmanager
def repeated(remote: Store, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None
             ) -> Iterator[None]:
    """A layer below makes the request that creates a manifest twice."""
    real = remote.files.fs.pipe_file

    def twice(path: str, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        if path.endswith(".snap"):
            meanwhile()
            real(path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(remote.files.fs, "pipe_file", twice)
        yield


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
    with repeated(remote, monkeypatch, lambda: failing_once(remote, "2.snap")):
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
    with repeated(remote, monkeypatch):
        assert save(branch, toy.feed(3, branch)).generation == 2
    assert save(branch, toy.feed(3, branch)).generation == 3
    assert same(loaded(again(remote), "alice"), toy.record()) and sound(remote)
