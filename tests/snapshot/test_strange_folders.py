"""Aliases that lie, links, and folders that are no sessions: nothing is followed, hidden or removed by them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound
from locret_stream.snapshot.names import folder_of, hashed
from tests.snapshot.support import again, begin, everything, holds, load, problems, save

pytestmark = pytest.mark.usefixtures("spools")


@pytest.mark.parametrize("content", [b"", b"s-", b"../../etc", b"s-" + b"0" * 31, b"s-" + b"g" * 32, b"\xff" * 34,
                                     b"s-" + b"0" * 32 + b"\n", b"x" * 100, b"itself"])
def test_a_damaged_alias_is_reported_and_the_next_save_heals_it(local, content):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    fork = branch.fork("bob", toy.seen)
    save(fork, toy)
    alias = Path(local.url) / folder_of("bob") / "branch"
    alias.write_bytes(folder_of("bob").encode() if content == b"itself" else content)
    for use in (lambda: again(local).branch("bob"), lambda: local.info("bob"), lambda: local.delete("bob")):
        with pytest.raises(SnapshotCorrupt):
            use()
    assert holds(local, "alice", toy.record()) and problems(local, "alice") == []
    assert {result.name: bool(result.problem) for result in local.verify()} == {"alice": False, "bob": True}
    assert [snapshot.name for snapshot in local.list()] == ["alice", "bob"]
    save(fork, toy.feed(9, fork))
    assert holds(local, "bob", toy.record())


def test_a_damaged_alias_keeps_no_session_from_being_forgotten(local):
    for name in ("alice", "dave"):
        branch, toy = begin(local, name, tokens=30)
        save(branch, toy)
    (Path(local.url) / folder_of("bob")).mkdir()
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(b"rubbish")
    local.forget("dave")
    assert holds(local, "alice", toy.record())
    local.forget("bob")
    assert set(os.listdir(local.url)) == {folder_of("alice"), f"n-{hashed('alice')}"}


def test_a_lying_alias_shows_nobody_elses_data(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    (Path(local.url) / folder_of("bob")).mkdir()
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(folder_of("alice").encode())
    assert not local.has("bob")
    with pytest.raises(SnapshotNotFound):
        load(again(local), "bob")
    other, another = begin(again(local), "bob", seed=5, tokens=30)
    assert save(other, another).session == "bob"
    local.forget("alice")
    assert holds(local, "bob", another.record()) and problems(local) == []


def test_an_alias_that_lies_about_a_session_hides_nothing_and_removes_nothing(local):
    for seed, name in enumerate(("alice", "bob")):
        branch, toy = begin(local, name, seed, tokens=30)
        save(branch, toy)
    (Path(local.url) / folder_of("bob") / "branch").write_bytes(folder_of("alice").encode())
    assert holds(local, "bob", toy.record())
    local.forget("alice")
    assert holds(local, "bob", toy.record()) and [snapshot.name for snapshot in local.list()] == ["bob"]


def test_a_session_that_is_a_link_is_not_followed(local, tmp_path):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    own = Path(local.url) / folder_of("alice")
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path / "elsewhere")
    for use in (lambda: load(again(local), "alice"), lambda: save(branch, toy.feed(9, branch)),
                lambda: local.delete("alice"), lambda: local.gc("alice"), lambda: local.info("alice"),
                lambda: local.forget("alice")):
        with pytest.raises(SnapshotError):
            use()
    for results in (local.list(), local.verify()):
        assert ["is a link" in result.problem for result in results] == [True]
    with suppress(SnapshotCorrupt):
        assert local.gc().removed == ()
    assert everything(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("inner", ["m", "m/own", "pages", "log"])
def test_a_link_inside_one_session_keeps_nobody_from_the_others(local, tmp_path, inner, recorded):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    other, another = begin(local, "bob", 2, tokens=30)
    save(other, another)
    save(other.fork("carol", another.seen), another)
    own = Path(local.url) / folder_of("bob") / inner.replace("own", hashed("bob"))
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    for name in ("bob", "carol") if not recorded else ():
        (Path(local.url) / f"n-{hashed(name)}").unlink()
    before = everything(tmp_path / "elsewhere")
    listed, verified = again(local).list(), again(local).verify()
    assert ("alice", "") in [(snapshot.name, snapshot.problem) for snapshot in listed]
    assert ("alice", "") in [(result.name, result.problem) for result in verified]
    problems = [result.problem for result in verified if result.problem]
    assert all("is a link" in problem for problem in problems) and bool(problems) is (recorded or inner != "m/own")
    bad = [snapshot.problem for snapshot in listed if snapshot.problem]
    assert all("is a link" in problem for problem in bad) and len(bad) == {
        "m": 2 if recorded else 1, "m/own": int(recorded)}.get(inner, 0)
    rubbish = Path(local.url) / folder_of("alice") / "pages" / ("0" * 32)
    rubbish.write_bytes(b"rubbish")
    with suppress(SnapshotCorrupt):
        again(local).gc()
    assert not rubbish.exists() and everything(tmp_path / "elsewhere") == before
    assert holds(local, "alice", toy.record())


def test_what_is_no_session_is_left_alone(local):
    branch, toy = begin(local, "alice", tokens=30)
    save(branch, toy)
    for strange in ("s-", "s-" + "0" * 31, "s-" + "0" * 32 + ".bak", "S-" + "0" * 32, "lost+found", "snap"):
        shutil.copytree(Path(local.url) / folder_of("alice"), Path(local.url) / strange)
    (Path(local.url) / "README").write_bytes(b"mine")
    before = everything(local.url)
    assert [result.name for result in local.list()] == ["alice"] and len(local.verify()) == 1
    local.gc()
    assert everything(local.url) == before
    local.forget("alice")
    assert (Path(local.url) / "README").read_bytes() == b"mine" and (Path(local.url) / "s-" / "pages").is_dir()
