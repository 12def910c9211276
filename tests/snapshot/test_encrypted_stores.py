"""An encrypted store reveals nothing without its key, and a session has one key or none."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from locret_stream.errors import StaleOwner, StoreError
from locret_stream.snapshot import Branch
from tests.snapshot.support import KEY, Toy, again, begin, everything, holds, load, local_store, problems, resume, save

pytestmark = pytest.mark.usefixtures("spools")


def test_an_encrypted_store_holds_no_plain_text(tmp_path):
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "a name nobody may see", tokens=60)
    save(branch, toy)
    save(branch.fork("another name", toy.seen), toy)
    stored_bytes = b"".join(filter(None, everything(store.url).values()))
    plain = [path for path, content in everything(store.url).items() if content and b"LOCRET" in content]
    assert plain and all(re.fullmatch(r"n-\w{32}|s-\w{32}/branch", path) for path in plain)  # no more than paths tell
    for secret in (b"a name", b"another", b"toy", bytes.fromhex(KEY), toy.frame.text.encode(),
                   toy.layers[0]["keys"][0, 0].numpy().tobytes(), torch.tensor(toy.ids[:4]).int().numpy().tobytes()):
        assert secret not in stored_bytes


@pytest.mark.parametrize("key", [None, "00" * 32])
def test_without_its_key_an_encrypted_session_is_neither_read_nor_changed(tmp_path, key):
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "alice", tokens=30)
    save(branch, toy)
    before = everything(store.url)
    wrong = again(store, key=key and bytes.fromhex(key))
    assert [info.problem != "" and info.encrypted for info in (*wrong.list(), *wrong.info("alice"))] == [True, True]
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
    readable = [result for keyed in (store, other_store) for result in keyed.verify() if not result.problem]
    assert len(won) <= 1 and bool(readable) is bool(won)
    for record in won:
        assert any(holds(keyed, "alice", record) for keyed in (store, other_store) if not problems(keyed))


def test_a_fork_saved_beside_its_origin_is_encrypted_whoever_looks_for_the_key(tmp_path: Path):
    """Owners have a session_folder each: one that looks again for the key takes it from nobody."""
    store = local_store(tmp_path / "store", key=KEY)
    branch, toy = begin(store, "alice", tokens=8)
    save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    assert fork.session_folder is not branch.session_folder
    stop = threading.Event()

    def refresh() -> None:
        while not stop.is_set():
            branch.session_folder.key.refresh()

    looking = threading.Thread(target=refresh)
    looking.start()
    try:
        for session_folder in [branch.session_folder] * 200:
            assert session_folder.key.for_writing() is not None
    finally:
        stop.set()
        looking.join()
    save(fork, toy)
    assert all(path.read_bytes()[:8] == b"\x89LOCSEA\n" for path in (tmp_path / "store").glob("s-*/m/*/*.snap"))
