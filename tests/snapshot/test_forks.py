"""Forks share what they grew out of and go their own way; a session goes back and on under a new number."""

from __future__ import annotations

import pytest

from locret_stream.errors import ConfigError
from tests.snapshot.support import again, begin, holds, resume, save

pytestmark = pytest.mark.usefixtures("spools")


def test_a_fork_goes_its_own_way_and_shares_pages(store):
    branch, toy = begin(store, "alice", tokens=40)
    save(branch, toy)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    first = save(fork, other)
    assert (first.name, first.session, first.generation, first.parent) == ("bob", "alice", 1, branch.parent)
    assert first.bytes_written < 0.7 * first.bytes  # its pages are there
    save(branch, toy.feed(20, branch))
    save(fork, other.feed(33, fork))
    assert holds(store, "alice", toy.record()) and holds(store, "bob", other.record())
    branch, toy = resume(again(store), "bob")
    assert branch.session == "alice" and save(branch, toy.feed(5, branch)).generation == 3
    assert holds(store, "bob", toy.record()) and [snapshot.name for snapshot in store.list()] == ["alice", "bob"]


def test_a_fork_of_a_fork_belongs_to_the_session(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    last = fork.fork("carol", toy.seen)
    assert save(last, toy).session == "alice" and holds(store, "carol", toy.record())
    with pytest.raises(ConfigError, match="is a fork"):
        store.forget("carol")
    store.forget("alice")
    assert store.list() == []


def test_a_fork_of_what_was_never_saved_is_saved(store):
    branch, toy = begin(store, "alice", tokens=9)
    fork, other = branch.fork("bob", toy.seen), toy.diverged(2)
    save(fork, other.feed(6, fork))
    assert holds(store, "bob", other.record()) and not store.has("alice")
    save(branch, toy)
    assert holds(store, "alice", toy.record())


def test_a_fork_with_unsaved_ids_has_a_whole_log(store):
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    fork = branch.fork("bob", toy.feed(21, branch).seen)
    save(fork, other := toy.diverged(2))
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
        fork = branch.fork(name, toy.seen)
        save(fork, toy)
        assert holds(store, name, toy.record()) and again(store).branch(name).session == "alice"
