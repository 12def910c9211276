"""Over an object store every look is a request: how many a save, a turn and an opening cost."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from locret_stream.errors import StaleOwner
from locret_stream.snapshot import Store
from locret_stream.snapshot import branch as branch_module
from tests.snapshot.object_store import SCHEME, Objects, counting
from tests.snapshot.support import KEY, Toy, again, begin, load, save, two_owners

pytestmark = pytest.mark.usefixtures("spools")


@pytest.fixture(params=["plain", "encrypted"])
def objects(request, tmp_path) -> Store:
    """An empty object store."""
    return Store(f"{SCHEME}://{tmp_path}", key=KEY if request.param == "encrypted" else None, keep_last=2)


def _kinds(requests: list[tuple[str, str]]) -> dict[str, int]:
    return dict(Counter(call for call, _ in requests))


def test_a_save_of_a_known_session_takes_five_requests_and_one_for_a_page(objects):
    """A listing, a part of the log, the manifest, the record, a listing."""
    branch, toy = begin(objects, "alice", tokens=20)
    save(branch, toy)
    for tokens in (1, 3, 2, 5):
        toy.feed(tokens, branch)
        with counting() as requests:
            save(branch, toy)
        kinds, pages = _kinds(requests), sum("/pages/" in path for _, path in requests)
        assert kinds == {"LIST": 2, "PUT": 3 + pages} and pages <= 1


def test_a_pruning_that_deletes_nothing_asks_nothing_and_another_one_looks_again(objects):
    branch, toy = begin(objects, "alice", tokens=20)
    seen = []
    for _ in range(5):
        toy.feed(3, branch)
        save(branch, toy)
        with counting() as requests:
            objects.prune(branch)
        seen.append(_kinds(requests))
    assert seen[:2] == [{}, {}]
    assert all(kinds["DELETE"] == 1 and sum(kinds.values()) <= 3 + kinds.get("HEAD", 0) for kinds in seen[2:]), seen


def test_the_number_of_snapshots_costs_no_requests(tmp_path):
    store = Store(f"{SCHEME}://{tmp_path}", keep_last=100, max_bytes=1 << 30)
    branch, toy = begin(store, "alice", tokens=20)
    counts = []
    for _ in range(12):
        toy.feed(3, branch)
        with counting() as requests:
            save(branch, toy)
            store.prune(branch)
        counts.append(len(requests))
    assert max(counts[2:]) <= min(counts[2:]) + 2, counts  # a page now and then, and a log part of many ids


def test_opening_a_session_takes_a_handful(objects):
    branch, toy = begin(objects, "alice", tokens=20)
    save(branch, toy)
    with counting() as requests:
        load(again(objects), "alice")
    pages = sum("/pages/" in path for _, path in requests)
    assert len(requests) - pages <= 8, requests


def test_looking_at_many_snapshots_reads_each_once_and_the_pruning_after_it_none(objects):
    """A chat looks at all snapshots of its thread, opens one, saves and prunes."""
    store = Store(objects.url, key=KEY if objects.encrypts else None, keep_last=100)
    branch, toy = begin(store, "alice", tokens=20)
    for _ in range(24):
        toy.feed(3, branch)
        save(branch, toy)
    other = again(store)
    with counting() as requests:
        before = other.info("alice")
    assert len(before) == 24 and sum(path.endswith(".snap") for _, path in requests) == 24
    assert len(requests) <= 24 + 2 + other.encrypts, requests  # a listing, the record, the key
    late, record = load(other, "alice")
    save(late, Toy.of(record).feed(1))
    with counting() as requests:
        other.prune(late)
    assert not any(path.endswith(".snap") for _, path in requests), requests
    with counting() as requests:
        after = other.info("alice")
    assert after[:-1] == before and sum(path.endswith(".snap") for _, path in requests) == 1


def test_several_snapshots_are_looked_at_at_a_time(objects, monkeypatch):
    branch, toy = begin(objects, "alice", tokens=20)
    for _ in range(16):
        toy.feed(3, branch)
        save(branch, toy)
    other, delay_s = again(objects), 0.1
    monkeypatch.setattr(Objects, "delay_s", delay_s)
    began = time.monotonic()
    assert len(other.info("alice")) == 16
    assert time.monotonic() - began < 12 * delay_s  # one after another they take 18 times as long or more


def test_a_snapshot_that_was_written_anew_is_looked_at_anew(objects):
    """A session that was forgotten and begun again has other snapshots under the same numbers."""
    for tokens in (20, 23):
        branch, toy = begin(objects, "alice", tokens=tokens)
        save(branch, toy)
        assert [row.tokens for row in objects.info("alice")] == [tokens]
        objects.forget("alice")


def test_what_is_known_of_a_session_is_not_told_without_its_key(objects):
    branch, toy = begin(objects, "alice", tokens=20)
    save(branch, toy)
    objects.info("alice")
    objects._key = None
    assert objects.info("alice")[0].locked == branch.encrypts


def test_a_record_that_was_seen_a_moment_ago_is_not_read_again_and_an_old_one_is(tmp_path, monkeypatch):
    """Another owner saved, and that snapshot got lost: only its record says so."""
    store = Store(f"{SCHEME}://{tmp_path}")
    now = [1000.0]
    monkeypatch.setattr(branch_module.time, "monotonic", lambda: now[0])
    (early, early_toy), (late, late_toy) = two_owners(store)
    save(early, early_toy)
    store.files.delete(f"{early.session_folder.folder}/{early.session_folder.manifest_path('alice', early.head)}")
    now[0] += branch_module.RECORD_S + 1
    with pytest.raises(StaleOwner):
        save(late, late_toy.feed(2, late))
    with pytest.raises(StaleOwner):
        late.expect_recorded()
