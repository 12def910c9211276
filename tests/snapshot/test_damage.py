"""Whatever happens to the files of a store, it is reported or harmless: never silent, never untyped, never for ever.

A store with two sessions and a fork is damaged in one way, and then asked for everything: a name gives just what was
saved last under it, or a typed error; whatever a name cannot give, `verify` tells of, and a collection makes nothing
worse. What no store can see is listed in `snapshot.names`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotNotFound, SnapshotTooNew
from locret_stream.snapshot import Store
from locret_stream.snapshot.format import VERSION
from locret_stream.snapshot.names import folder_of, hashed, read_alias, read_record
from tests.snapshot.support import (
    IDENTITY,
    KEY,
    Record,
    begin,
    closed_spools,
    everything,
    ids_of,
    load,
    loaded,
    local_store,
    of_version,
    resume,
    same,
    save,
)

NAMES = ("alice", "bob", "carol")


@pytest.fixture(autouse=True)
def spools() -> Iterator[None]:
    with closed_spools(threads=False):
        yield


@dataclass
class Master:
    """A sound store, as it was before its last saves and as it is, and what it holds."""

    now: Path
    before: Path
    key: str | None
    newest: dict[str, Record]
    older: list[Record]

    @property
    def files(self) -> list[str]:
        return sorted(path for path, content in everything(self.now).items() if content is not None)

    @property
    def folders(self) -> list[str]:
        return sorted(path for path, content in everything(self.now).items() if content is None)


@pytest.fixture(params=["plain", "encrypted"])
def master(request: pytest.FixtureRequest, tmp_path: Path) -> Master:
    key = KEY if request.param == "encrypted" else None
    store = local_store(tmp_path / "now", key=key)
    branch, toy = begin(store, "alice", tokens=23)
    save(branch, toy)
    older = [toy.record()]
    fork, other = branch.fork("bob", toy.seen), toy.diverged(7)
    save(fork, other.feed(9, fork))
    older.append(other.record())
    carol, third = begin(store, "carol", 3, 41)
    save(carol, third)
    shutil.copytree(tmp_path / "now", tmp_path / "before")
    for tokens in (30, 60):
        save(branch, toy.feed(tokens, branch))
        older.append(toy.record())
    save(fork, other.feed(33, fork))
    newest = {"alice": toy.record(), "bob": other.record(), "carol": third.record()}
    return Master(tmp_path / "now", tmp_path / "before", key, newest, older)


# -- ways to do damage ------------------------------------------------------------------------------------------------


def _flip(path: Path, rnd: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
    path.write_bytes(data)


def _zero(path: Path, rnd: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at, count = rnd.randrange(len(data) or 1), rnd.randrange(1, 400)
    data[at:at + count] = bytes(len(data[at:at + count]))
    path.write_bytes(data)


def _link(path: Path) -> None:
    shutil.copy(path, path.with_name("x"))
    path.unlink()
    path.symlink_to(path.with_name("x"))


def _roll_back(path: Path, now: Path, before: Path) -> None:
    """Put a file, or a folder with all in it, back to what it was."""
    old = before / path.relative_to(now)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if old.is_dir():
        shutil.copytree(old, path)
    elif old.exists():
        shutil.copy(old, path)


ON_A_FILE: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": _flip, "zeros": _zero,
    "cut": lambda path, rnd: os.truncate(path, rnd.randrange(max(1, path.stat().st_size))),
    "grown": lambda path, rnd: path.write_bytes(path.read_bytes() + rnd.randbytes(rnd.choice([1, 64, 1000]))),
    "empty": lambda path, rnd: path.write_bytes(b""), "missing": lambda path, rnd: path.unlink(),
    "another name": lambda path, rnd: path.rename(path.with_name(rnd.choice(["x", rnd.randbytes(16).hex()]))),
    "another number": lambda path, rnd: path.rename(path.with_name("000000000009.snap")),
    "folder": lambda path, rnd: (path.unlink(), path.mkdir()), "link": lambda path, rnd: _link(path),
    "pipe": lambda path, rnd: (path.unlink(), os.mkfifo(path))}


def _swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


# -- what must hold after it ------------------------------------------------------------------------------------------


@contextmanager
def in_time() -> Iterator[None]:
    """Whatever hangs fails."""
    def late(*_: object) -> None:
        raise AssertionError("this hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def asked(store: Store, name: str, record: Record) -> str:
    """"" if the name gives its newest snapshot; else the error."""
    try:
        branch, restored = load(store, name)
    except SnapshotNotFound as error:
        raise AssertionError(f"{name!r} counts as never saved") from error
    except SnapshotError as error:
        return str(error) or type(error).__name__
    branch.close()
    assert same(restored, record), f"{name!r} gives something else"
    assert store.has(name)
    return ""


def check(master: Master, root: Path, must_report: bool | None = None) -> bool:
    """Whether reading any name raised an error. must_report: whether `verify` must report one; None: if a name did."""
    store = local_store(root, key=master.key)
    with in_time():
        reported = {name: asked(store, name, master.newest[name]) for name in NAMES}
        problems = [result for result in store.verify() if result.problem]
        if must_report if must_report is not None else any(reported.values()):
            assert problems, reported
        store.list()
        for name in NAMES:
            try:
                fresh = local_store(root, key=master.key).branch(name)
                ids = ids_of(part for part, _ in fresh.read_stored_log(IDENTITY).pieces())
            except SnapshotError:
                continue
            assert tuple(ids[:master.newest[name].seen]) == master.newest[name].ids
            assert len(ids) == master.newest[name].tokens
        try:
            store.gc()
        except SnapshotError:
            assert problems
        again = {name: asked(store, name, master.newest[name]) for name in NAMES}
        assert all(reported[name] or not again[name] for name in NAMES), (reported, again)
        if not problems:
            assert not [result for result in store.verify() if result.problem]
    return bool(problems)


def tried(master: Master, work: Path, what: str, damage: Callable[[Path], object],
          must_report: bool | None = None) -> bool:
    """Damage a copy and check it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(master.now, work)
    damage(work)
    try:
        return check(master, work, must_report)
    except BaseException as error:
        error.add_note(what)
        raise


def needless(path: str) -> bool:
    """A file whose loss alone does no harm, so that nobody has to tell of it: the next save writes it, or nobody asked
    for it."""
    return path.startswith("n-") or path.endswith(f"m/{hashed('alice')}/000000000002.snap") or (path.endswith(
        "000000000001.snap") and hashed("carol") not in path)


Trial = tuple[str, Callable[[Path], object], bool | None]  # what, how, whether `verify` must tell of it


def trials(master: Master, rnd: random.Random, flips: int) -> Iterator[Trial]:
    """Every file and folder, damaged in every way."""
    for path in master.files:
        for kind, damage in ON_A_FILE.items():
            removed = kind in ("missing", "another name", "folder", "pipe") and needless(path)
            changed = kind in ("flip", "cut", "grown", "empty")
            for _ in range(flips if kind == "flip" else 1):
                yield (f"{kind}: {path}", lambda root, path=path, damage=damage: damage(root / path, rnd),
                       True if changed and not removed else None)
        if path.endswith(".snap"):
            yield f"deleted: {path}", lambda root, path=path: (root / path).unlink(), None if needless(path) else True
        yield (f"rolled back: {path}", lambda root, path=path: _roll_back(root / path, root, master.before), None)
    for path in master.folders:
        yield f"removed: {path}", lambda root, path=path: shutil.rmtree(root / path), True
        yield f"rolled back: {path}", lambda root, path=path: _roll_back(root / path, root, master.before), None


def pairs(master: Master) -> Iterator[Trial]:
    """Any two files swapped, or one in the place of another."""
    for one in master.files:
        for two in master.files:
            if one < two:
                yield f"swapped: {one} {two}", lambda root, one=one, two=two: _swap(root / one, root / two), True
            if one != two:
                yield (f"copied: {one} over {two}",
                       lambda root, one=one, two=two: shutil.copy(root / one, root / two), None)


def test_a_sound_store_has_nothing_to_tell(master: Master, tmp_path: Path):
    assert not tried(master, tmp_path / "work", "nothing", lambda root: None)


@pytest.mark.thorough(but=1)
def test_damage_of_any_kind_is_reported_or_does_no_harm_sampled(master: Master, tmp_path: Path):
    rnd = random.Random(1)
    every = [*trials(master, rnd, 1)]
    reported = sum(tried(master, tmp_path / "work", *trial) for trial in rnd.sample(every, 40))
    reported += sum(tried(master, tmp_path / "work", *trial) for trial in rnd.sample([*pairs(master)], 10))
    assert reported > 25


def test_manifests_put_back_together_with_their_record_are_reported_by_the_log(master: Master, tmp_path: Path):
    """Opening cannot know; `verify` reads the log."""
    shutil.copytree(master.now, tmp_path / "work")
    for path in (f"{folder_of('alice')}/m/{hashed('alice')}", f"n-{hashed('alice')}"):
        _roll_back(tmp_path / "work" / path, tmp_path / "work", master.before)
    store = local_store(tmp_path / "work", key=master.key)
    assert same(loaded(store, "alice"), master.older[0])
    assert [(result.name, result.generation) for result in store.verify() if result.problem] == [("alice", 2)]
    assert [result.name for result in store.verify("alice") if result.problem] == ["alice"]
    assert not [result for result in store.verify("carol") if result.problem]


def test_a_session_put_back_with_its_record_is_what_no_store_can_see(master: Master, tmp_path: Path):
    """The documented limit, so that it stays true."""
    shutil.copytree(master.now, tmp_path / "work")
    for path in (folder_of("alice"), f"n-{hashed('alice')}", f"n-{hashed('bob')}"):
        _roll_back(tmp_path / "work" / path, tmp_path / "work", master.before)
    store = local_store(tmp_path / "work", key=master.key)
    assert same(loaded(store, "alice"), master.older[0]) and not [result for result in store.verify() if result.problem]


@pytest.mark.parametrize("how", ["generation", "rebuilt", "forgotten"])
def test_a_snapshot_that_got_lost_is_reported_and_there_is_a_way_on(master: Master, how: str):
    store = local_store(master.now, key=master.key)
    (master.now / folder_of("alice") / "m" / hashed("alice") / "000000000003.snap").unlink()
    with pytest.raises(SnapshotCorrupt, match="snapshot 3 of 'alice' was saved and does not exist any more"):
        load(store, "alice")
    assert store.has("alice") and [(info.generation, bool(info.problem)) for info in store.info("alice")] == [
        (1, False), (2, False), (3, True)]
    with pytest.raises(SnapshotCorrupt, match="nothing was removed"):
        store.gc()
    if how == "forgotten":
        store.forget("alice")
        assert set(everything(master.now)) == {path for path in everything(master.now) if hashed("carol") in path}
        return
    if how == "rebuilt":
        branch = store.branch("alice")
        ids = ids_of(part for part, _ in branch.read_stored_log(IDENTITY).pieces())
        assert tuple(ids[:-1]) == master.newest["alice"].ids
        return
    assert store.delete("alice", 3) == [3]
    branch, toy = resume(store, "alice")
    assert same(toy.record(), master.older[2]) and save(branch, toy.feed(5, branch)).generation == 4
    assert not [result for result in store.verify() if result.problem] and same(loaded(store, "alice"), toy.record())


def test_a_fork_without_its_alias_is_reported_and_a_collection_or_its_next_save_names_it_anew(master: Master):
    alias = master.now / folder_of("bob") / "branch"
    store = local_store(master.now, key=master.key)
    branch, toy = resume(store, "bob")
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])):
        for heal in (store.gc, lambda: save(branch, toy.feed(5, branch))):
            damage(alias)
            for use in (lambda: store.branch("bob"), lambda: store.has("bob"), lambda: store.delete("bob")):
                with pytest.raises(SnapshotCorrupt, match="snapshots gc"):
                    use()
            assert [(result.name, bool(result.problem)) for result in store.verify()].count(("bob", True)) == 1
            with pytest.raises(ConfigError, match="is a fork"):
                store.forget("bob")
            heal()
            assert not [result for result in store.verify() if result.problem] and store.has("bob")
    assert same(loaded(store, "bob"), toy.record())


def test_what_a_save_that_died_left_of_a_record_goes_with_the_next_collection_or_with_the_session(master: Master):
    store = local_store(master.now, key=master.key)
    for use in (lambda: store.gc("alice"), store.gc, lambda: store.forget("alice")):
        strays = [master.now / f".tmp-n-{hashed(name)}-0123456789abcdef" for name in NAMES]
        for stray in strays:
            stray.write_bytes(b"half a record")
        use()
        assert [stray.exists() for stray in strays] == [False, False, use != store.gc]
    strays[2].unlink()
    assert not store.files.unfinished("")


def test_an_alias_is_never_tidied_away_because_its_target_is_missing(master: Master):
    """Where no record tells, either: the fork was saved before there were any."""
    for name in ("alice", "bob"):
        (master.now / f"n-{hashed(name)}").unlink()
    shutil.rmtree(master.now / folder_of("alice"))
    store = local_store(master.now, key=master.key)
    for use in (lambda: store.branch("bob"), lambda: store.info("bob"), store.gc):
        with pytest.raises(SnapshotCorrupt, match="leads to"):
            use()
    assert (master.now / folder_of("bob") / "branch").exists()
    assert [result.name for result in store.verify() if result.problem] == [folder_of("bob")]
    store.forget("bob")
    assert not (master.now / folder_of("bob")).exists() and not store.has("bob")


@pytest.mark.parametrize("file", ["alias", "record"])
def test_every_byte_of_an_alias_and_of_a_record_is_covered(master: Master, file: str):
    path = master.now / (f"n-{hashed('bob')}" if file == "record" else f"{folder_of('bob')}/branch")
    data, store = path.read_bytes(), local_store(master.now, key=master.key)
    for bit in [*range(0, 8 * 48, 3), *(8 * at + at % 8 for at in range(48, len(data)))]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(SnapshotCorrupt):
            read_alias(store.files, folder_of("bob")) if file == "alias" else read_record(store.files, hashed("bob"))
    path.write_bytes(data)
    assert not [result for result in store.verify() if result.problem]


def test_an_alias_and_a_record_hold_for_one_name_only_and_not_for_each_other(master: Master):
    store, own = local_store(master.now, key=master.key), master.now / folder_of("bob") / "branch"
    record, other = master.now / f"n-{hashed('bob')}", master.now / f"n-{hashed('carol')}"
    strange = master.now / folder_of("carol") / "branch"
    for place, content in ((own, record), (record, own), (record, other), (strange, own)):
        before = place.read_bytes() if place.exists() else None
        place.write_bytes(content.read_bytes())
        with pytest.raises(SnapshotCorrupt):
            read_record(store.files, hashed("bob")) if place == record else read_alias(store.files, place.parent.name)
        assert [result for result in store.verify() if result.problem]
        place.unlink() if before is None else place.write_bytes(before)
    assert not [result for result in store.verify() if result.problem]


def test_what_stands_in_an_alias_or_a_record_of_a_later_format_is_too_new_and_stays(master: Master):
    store = local_store(master.now, key=master.key)
    for path in (master.now / f"n-{hashed('bob')}", master.now / folder_of("bob") / "branch"):
        path.write_bytes(of_version(path.read_bytes(), VERSION + 1))
    with pytest.raises(SnapshotTooNew):
        store.branch("bob")
    assert sum(f"version {VERSION + 1}" in result.problem for result in store.verify()) == 2
    with pytest.raises(SnapshotTooNew):
        store.gc()
    assert sum(f"version {VERSION + 1}" in result.problem for result in store.verify()) == 2


@pytest.mark.slow
def test_damage_of_any_kind_is_reported_or_does_no_harm(master: Master, tmp_path: Path):
    rnd, counts = random.Random(2), [0, 0]
    for trial in (*trials(master, rnd, 20), *pairs(master)):
        counts[tried(master, tmp_path / "work", *trial)] += 1
    print(f"{counts[1]} reported, {counts[0]} harmless")
    assert sum(counts) > 1000
