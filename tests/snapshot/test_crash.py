"""A power cut or a kill at any moment: what was acknowledged is there, whole, and the store goes on.

Every prefix of the system calls of a scenario is replayed on the model of a disk in `crash`, every state that the disk
may be in then is put into a folder, and the store is opened on it. Up to 6 folder entries that are not safe are
combined in all 64 ways, of more a fixed sample; a file whose data is not safe is empty, half, zeros and whole.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from locret_stream.errors import SnapshotNotFound, StoreError
from locret_stream.snapshot import Branch, Store
from locret_stream.snapshot.names import folder_of
from locret_stream.snapshot.pages import PAGE_BYTES
from tests.snapshot.crash import Call, Disk, Recorder, Tree, materialise
from tests.snapshot.kill import STEP, Hands, expected
from tests.snapshot.support import (
    GEOMETRY,
    KEY,
    Record,
    Toy,
    begin,
    closed_spools,
    everything,
    loaded,
    local_store,
    needed,
    resume,
    same,
    save,
    stored,
)

Options = dict[str, list[Record | None]]  # for every name what may be found, None for nothing


@pytest.fixture(autouse=True)
def spools() -> Iterator[Callable[[], None]]:
    """Owners are left open all over."""
    with closed_spools(threads=False) as close:
        yield close


@dataclass
class Story:
    """A recorded run: its calls, where the interesting part begins, and what may be found after each mark.

    A mark says that something was acknowledged; `allowed[k]` is what may be found once k marks were passed.
    """

    base: Path
    key: str | None
    posix: Recorder
    allowed: list[Options] = field(default_factory=list)
    begins: int = 0
    attempted: dict[tuple[str, int], list[Record]] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return local_store(self.base / "store", self.posix, key=self.key, keep_last=2)

    def save(self, branch: Branch, toy: Toy, page_bytes: int = PAGE_BYTES) -> int:
        """Save, and remember the record of the generation, whether it is acknowledged or not."""
        self.attempted.setdefault((branch.name, branch.head + 1), []).append(toy.record())
        return save(branch, toy, page_bytes=page_bytes).generation

    def now(self, options: Options) -> None:
        """From here on just this may be found."""
        if self.allowed:
            self.posix.mark("")
        else:
            self.begins = len(self.posix.calls)
        self.allowed.append(options)

    def until(self, options: Options) -> None:
        """Until the next acknowledgement this may be found too."""
        for name, more in options.items():
            self.allowed[-1].setdefault(name, [None]).extend(more)


# -- scenarios --------------------------------------------------------------------------------------------------------


def first_save(story: Story) -> None:
    """A session begins: folders, key, page, log part and manifest are all new."""
    branch, toy = begin(story.store, "alice", tokens=9)
    story.now({"alice": [None]})
    story.until({"alice": [toy.record()]})
    story.save(branch, toy)
    story.now({"alice": [toy.record()]})


def next_save(story: Story) -> None:
    """A snapshot grows out of another, and shares its pages."""
    branch, toy = begin(story.store, "alice", tokens=30)
    story.save(branch, toy)
    before = toy.record()
    toy.feed(30, branch)
    story.now({"alice": [before]})
    story.until({"alice": [toy.record()]})
    story.save(branch, toy)
    story.now({"alice": [toy.record()]})


def in_pages(story: Story) -> None:
    """A snapshot of several pages, which are written two at a time."""
    branch, toy = begin(story.store, "alice", tokens=5)
    story.save(branch, toy)
    before = toy.record()
    toy.feed(40, branch)
    story.now({"alice": [before]})
    story.until({"alice": [toy.record()]})
    story.save(branch, toy, page_bytes=GEOMETRY.unit_bytes * 4)
    assert sum(call.kind == "create" for call in story.posix.calls[story.begins:]) >= 5
    story.now({"alice": [toy.record()]})


def retired(story: Story) -> None:
    """Retention deletes two snapshots and collects."""
    branch, toy = begin(story.store, "alice")
    for _ in range(4):
        story.save(branch, toy.feed(17, branch))
    story.now({"alice": [toy.record()]})
    story.store.prune(branch)
    story.now({"alice": [toy.record()]})


def deleted_head(story: Story) -> None:
    """The newest snapshot is deleted, then another is saved by somebody else."""
    branch, toy = begin(story.store, "alice", tokens=9)
    story.save(branch, toy)
    before = toy.record()
    story.save(branch, toy.feed(33, branch))
    story.now({"alice": [toy.record()]})
    story.until({"alice": [before]})
    story.store.delete("alice", 2)
    story.now({"alice": [before]})
    branch, toy = resume(story.store, "alice")
    toy.seed = 7
    toy.feed(5, branch)
    story.until({"alice": [toy.record()]})
    assert story.save(branch, toy) == 3
    story.now({"alice": [toy.record()]})


def deleted_all(story: Story) -> None:
    """A session is deleted, all of it; then one of its name begins."""
    branch, toy = begin(story.store, "alice", tokens=9)
    records = []
    for _ in range(2):
        story.save(branch, toy.feed(20, branch))
        records.append(toy.record())
    story.now({"alice": [records[1]]})
    story.until({"alice": [None]})
    story.store.delete("alice")
    story.now({"alice": [None]})
    branch, toy = begin(story.store, "alice", seed=5, tokens=11)
    story.until({"alice": [toy.record()]})
    assert story.save(branch, toy) == 3
    story.now({"alice": [toy.record()]})


def forked(story: Story) -> None:
    """A fork is saved for the first time, deleted, and its name becomes a session."""
    branch, toy = begin(story.store, "alice", tokens=30)
    story.save(branch, toy)
    record, other = toy.record(), toy.diverged(2)
    fork = branch.fork("bob", toy.seen)
    other.feed(13, fork)
    story.now({"alice": [record], "bob": [None]})
    story.until({"bob": [other.record()]})
    story.save(fork, other)
    story.now({"alice": [record], "bob": [other.record()]})
    story.until({"bob": [None]})
    story.store.delete("bob")
    story.now({"alice": [record], "bob": [None]})
    branch, toy = begin(story.store, "bob", seed=5, tokens=11)
    story.until({"bob": [toy.record()]})
    story.save(branch, toy)
    story.now({"alice": [record], "bob": [toy.record()]})


def collected(story: Story) -> None:
    """The collector takes what a save left that died, and a deleted snapshot's files."""
    branch, toy = begin(story.store, "alice", tokens=9)
    story.save(branch, toy)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(branch, toy.diverged(3).feed(40, branch), die)
    branch, toy = resume(story.store, "alice")
    story.save(branch, toy.feed(50, branch))
    story.now({"alice": [toy.record()]})
    story.store.gc()
    story.now({"alice": [toy.record()]})


def forgotten(story: Story) -> None:
    """A session with a fork is forgotten; another one stays; one of the same name begins."""
    other, another = begin(story.store, "dave", seed=4, tokens=9)
    story.save(other, another)
    branch, toy = begin(story.store, "alice", tokens=9)
    story.save(branch, toy)
    story.save(branch, toy.feed(20, branch))
    fork = branch.fork("bob", toy.seen)
    story.save(fork, toy)
    kept, record = another.record(), toy.record()
    story.now({"alice": [record], "bob": [record], "dave": [kept]})
    story.until({"alice": [None], "bob": [None]})
    story.store.forget("alice")
    story.now({"alice": [None], "bob": [None], "dave": [kept]})
    branch, toy = begin(story.store, "alice", seed=5, tokens=11)
    story.until({"alice": [toy.record()]})
    story.save(branch, toy)
    story.now({"alice": [toy.record()], "bob": [None], "dave": [kept]})


SCENARIOS = [first_save, next_save, in_pages, retired, deleted_head, deleted_all, forked, collected, forgotten]


def record(scenario: Callable[[Story], None], base: Path, key: str | None) -> Story:
    """Run a scenario and write its calls down."""
    base.mkdir(parents=True)
    story = Story(base, key, Recorder(str(base)))
    scenario(story)
    return story


# -- states and what must hold in each --------------------------------------------------------------------------------


def states(calls: list[Call], begins: int, disk: Disk | None = None) -> Iterator[tuple[int, int, Tree]]:
    """(prefix, marks passed, tree) for every different state after a power cut at or after a call."""
    disk, seen = disk or Disk(), set()
    for number, call in enumerate([*calls, None]):
        if number >= begins:
            for tree in disk.after_power_cut():
                digest = (len(disk.marks), _digest(tree))
                if digest not in seen:
                    seen.add(digest)
                    yield number, len(disk.marks), tree
        if call is not None:
            disk.play(call)


def _digest(tree: Tree) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        content = tree[path]
        whole.update(f"{path}\0{-1 if content is None else len(content)}\0".encode() + (content or b""))
    return whole.digest()


def check(tree: Tree, folder: Path, key: str | None, options: Options, story: Story | None = None) -> None:
    """Open the store on a tree: one of the options is there for each name, and the store goes on."""
    folder.mkdir()
    materialise(tree, str(folder))
    store = local_store(folder / "store", key=key)
    restored: dict[str, Record | None] = {}
    for name, records in options.items():
        try:
            restored[name] = loaded(store, name)
        except SnapshotNotFound:
            restored[name] = None
        assert any(same(restored[name], one) for one in records), f"{name!r} is none of what it may be"
    assert {info.name for info in store.list()} == {name for name, record in restored.items() if record is not None}
    assert [result for result in store.verify() if result.problem] == []
    for name, one in restored.items():
        numbers = [] if one is None else [info.generation for info in store.info(name)]
        for number in numbers[:-1]:
            held = loaded(store, name, number)
            assert story is None or any(same(held, one) for one in story.attempted[name, number]), (name, number)
        branch, toy = begin(store, name, 6, 5) if one is None else resume(store, name)
        toy.seed = 8
        done = save(branch, toy.feed(6, branch))
        assert done.generation > max(numbers, default=0) and same(loaded(store, name), toy.record())
        restored[name] = toy.record()
        branch.close()
    store.gc()
    assert [result for result in store.verify() if result.problem] == []
    for name, one in restored.items():
        assert same(loaded(store, name), one), name
        assert stored(store, name) == needed(store, name)
    assert not any(".tmp-" in path for path in everything(folder) if path.startswith("store/" + folder_of("alice")))
    shutil.rmtree(folder)


def run(story: Story, base: Path, close: Callable[[], None], every: int = 1) -> int:
    """Check every state, or one of `every` so many; how many were checked."""
    count = 0
    for number, marks, tree in itertools.islice(states(story.posix.calls, story.begins), 0, None, every):
        try:
            check(tree, base / "state", story.key, story.allowed[marks], story)
        except BaseException as error:
            error.add_note(f"power cut after call {number} of {len(story.posix.calls)}, {marks} acknowledged; last "
                           f"calls: {[(call.kind, call.path) for call in story.posix.calls[:number]][-4:]}")
            raise
        close()
        count += 1
    return count


# Where keys of sessions are made, shared and destroyed, both ways are quick to have; the rest with a key is `slow`. So
# is every state of the scenarios with most of them: otherwise one of three is tried.
AT_ANY_CALL = [pytest.param(scenario, key, every, id=f"{scenario.__name__}-{way}{'-every' * (every < usual)}",
                            marks=[pytest.mark.slow] if every < usual or (key and scenario not in (
                                first_save, forked, forgotten)) else [])
               for key, way in ((None, "plain"), (KEY, "encrypted")) for scenario in SCENARIOS
               for usual in [3 if scenario in (in_pages, forked, forgotten) else 1] for every in sorted({1, usual})]


@pytest.mark.parametrize(("scenario", "key", "every"), AT_ANY_CALL)
@pytest.mark.thorough(but=1)
def test_after_a_power_cut_at_any_call_the_store_holds_old_or_new_and_goes_on(scenario, key, every, tmp_path, spools):
    story = record(scenario, tmp_path / "run", key)
    count = run(story, tmp_path, spools, every)
    assert count >= 3
    print(f"{scenario.__name__}: {len(story.posix.calls) - story.begins} calls, {count} states")


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one is not in_pages])  # that: 50,000 states
def test_a_power_cut_while_going_on_after_one_does_no_harm_either(scenario, key, tmp_path, spools):
    """The first save and collection on each state are recorded, and cut at each of their calls."""
    story, count = record(scenario, tmp_path / "run", key), 0
    for _, marks, tree in states(story.posix.calls, story.begins):
        base = tmp_path / "again"
        base.mkdir()
        materialise(tree, str(base))
        attempted = {place: [*records] for place, records in story.attempted.items()}
        second = Story(base, key, Recorder(str(base)), attempted=attempted)
        store, options = second.store, {}
        for name in story.allowed[marks]:
            options[name] = [loaded(store, name) if store.has(name) else None]
        second.now(dict(options))
        name = next(iter(options))
        branch, toy = resume(store, name) if store.has(name) else begin(store, name, 1, 9)
        toy.feed(5, branch)
        second.until({name: [toy.record()]})
        second.save(branch, toy)
        second.now({**options, name: [toy.record()]})
        store.gc()
        for number, passed, torn in states(second.posix.calls, 0, Disk(tree)):
            try:
                check(torn, tmp_path / "state", key, second.allowed[passed], second)
            except BaseException as error:
                error.add_note(f"after call {number}: {[(call.kind, call.path) for call in second.posix.calls][-4:]}")
                raise
            count += 1
        spools()
        shutil.rmtree(base)
    print(f"{scenario.__name__}: {count} states")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_nothing_that_was_forgotten_comes_back_after_a_power_cut(tmp_path, key):
    base = tmp_path / "run"
    base.mkdir()
    posix = Recorder(str(base))
    store = local_store(base / "store", posix, key=key)
    branch, toy = begin(store, "alice", tokens=9)
    save(branch, toy)
    save(branch, toy.feed(40, branch))
    save(branch.fork("bob", toy.seen), toy)
    store.forget("alice")
    disk = Disk()
    for call in posix.calls:
        disk.play(call)
    paths = [path for tree in disk.after_power_cut() for path in tree if path != "store"]
    assert paths == []


# -- a process dies, another goes on, then the power goes -------------------------------------------------------------


def after_a_kill(scenario: Callable[[Story], None], base: Path, key: str | None, close: Callable[[], None],
                 every: int = 1) -> int:
    """Kill the scenario after each call; save as somebody else on what is seen then; cut the power once that was
    acknowledged. It must be there: it may rest on nothing that only the dead one would have made durable."""
    story, count = record(scenario, base / "run", key), 0
    for number in range(story.begins, len(story.posix.calls) + 1, every):
        disk = Disk()
        for call in story.posix.calls[:number]:
            disk.play(call)
        second = base / f"second{number}"
        second.mkdir()
        materialise(disk.seen(), str(second))
        posix = Recorder(str(second), story.posix.calls[:number])
        store = local_store(second / "store", posix, key=key)
        allowed: Options = {}
        for name in story.allowed[0]:
            branch, toy = resume(store, name) if store.has(name) else begin(store, name, 1, 9)
            save(branch, toy)
            allowed[name] = [toy.record()]
        for call in posix.calls[number:]:
            disk.play(call)
        seen = set()
        for tree in disk.after_power_cut():
            if (digest := _digest(tree)) not in seen:
                seen.add(digest)
                try:
                    check(tree, base / "state", key, allowed)
                except BaseException as error:
                    error.add_note(f"killed after call {number}: "
                                   f"{[(call.kind, call.path) for call in story.posix.calls[:number]][-4:]}")
                    raise
        count += len(seen)
        close()
        shutil.rmtree(second)
    return count


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("scenario", [first_save, forked, deleted_all])
@pytest.mark.thorough(but=1)
def test_what_is_saved_after_another_process_died_rests_on_nothing_of_it(scenario, key, tmp_path, spools):
    """Page names, keys, aliases and folders are there and may not be safe: only the dead one would have synced them."""
    assert after_a_kill(scenario, tmp_path, key, spools, 2 if scenario is first_save else 5) > 10


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_saved_after_any_death_is_safe(scenario, key, tmp_path, spools):
    print(f"{scenario.__name__}: {after_a_kill(scenario, tmp_path, key, spools)} states")


# -- a call fails, the owner tries again, then the power goes ---------------------------------------------------------

FAILING = ("mkdir", "create", "write", "fsync", "close", "link", "rename", "unlink", "sync_folder")


class Broken(Recorder):
    """Records, and one call fails with EIO; a sync that failed has made nothing safe."""

    at = -1
    count = 0

    def __getattribute__(self, name: str) -> object:
        real = super().__getattribute__(name)
        if name not in FAILING:
            return real

        def call(*arguments: object) -> object:
            self.count += 1
            if self.count - 1 == self.at:
                if name == "close":
                    real(*arguments)
                raise OSError(5, f"Input/output error in {name}")
            return real(*arguments)

        return call


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("fork", [False, True], ids=["session", "fork"])
@pytest.mark.thorough(but=1)
def test_an_owner_whose_save_failed_saves_again_and_that_is_safe(tmp_path, key, fork, spools):
    """Whatever call failed: it is reported, the owner is not fenced off by its own remains, and nothing is lost."""
    failed = at = 0
    while True:
        base = tmp_path / f"at{at}"
        base.mkdir()
        posix = Broken(str(base))
        store = local_store(base / "store", posix, key=key)
        branch, toy = begin(store, "alice", tokens=9)
        save(branch, toy)
        before = toy.record()
        if fork:
            branch = branch.fork("bob", toy.seen)
        posix.at, posix.count = at, 0
        try:
            save(branch, toy.feed(9, branch))
            break_after = True
        except StoreError:
            failed += 1
            break_after = False
            other = local_store(base / "store", key=key)
            assert [result for result in other.verify() if result.problem] == []
            after = loaded(other, branch.name) if other.has(branch.name) else None
            assert same(after, None if fork and after is None else before) or same(after, toy.record())
        posix.at = -1
        done = save(branch, toy.feed(9, branch))
        assert done.generation <= (2 if fork else 3)
        disk = Disk()
        for call in posix.calls:
            disk.play(call)
        for tree in disk.after_power_cut():
            check(tree, base / "state", key, {"alice": [before], "bob": [toy.record()]} if fork
                  else {"alice": [toy.record()]})
        spools()
        shutil.rmtree(base)
        if break_after:
            break
        at += 1
    assert failed == at >= 15


# -- real processes, killed -------------------------------------------------------------------------------------------


def kill_again_and_again(hands: Hands, root: Path, key: str | None, times: int, wait_s: Callable[[int], float]) -> int:
    """Kill a saving process at many moments; each time what it acknowledged is there. Returns the last number."""
    import time
    acknowledged = 0
    for number in range(times):
        pid = hands.start("save_forever", root=str(root), key=key)
        began = hands.of(pid, "began")["began"]
        assert acknowledged <= began <= acknowledged + 1
        if number == 0:  # however busy the machine is, there is something to lose
            began = hands.of(pid, "saved")["saved"]
        time.sleep(wait_s(number))
        acknowledged = max([began, *(report["saved"] for report in hands.kill(pid) if "saved" in report)])
        store = local_store(root, key=key)
        assert [result for result in store.verify() if result.problem] == []
        generations = [snapshot.generation for snapshot in store.list()]
        newest = generations[0] if generations else 0
        assert newest in (acknowledged, acknowledged + 1)
        for snapshot in store.info("alice") if generations else ():
            generation = snapshot.generation
            assert same(loaded(store, "alice", generation), expected(generation)), generation
        acknowledged = newest
    return acknowledged


def _moments(number: int) -> float:
    """Spread over some saves, the same in every run."""
    return (number * 0.6180339887 % 1.0) * 0.06


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.thorough(but=1)
def test_what_a_killed_process_acknowledged_is_there(hands, tmp_path, key):
    assert kill_again_and_again(hands, tmp_path / "store", key, 6, _moments) > 0


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_process_may_be_killed_hundreds_of_times(hands, tmp_path, key):
    last = kill_again_and_again(hands, tmp_path / "store", key, 150, _moments)
    store = local_store(tmp_path / "store", key=key)
    store.gc()
    assert stored(store, "alice") == needed(store, "alice") and last * STEP == loaded(store, "alice").tokens
    print(f"150 kills, {last} generations")
