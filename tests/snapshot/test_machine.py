"""Any order of opening, saving, forking, rewinding, deleting, collecting and forgetting, against a model."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from locret_stream.errors import ConfigError, SnapshotNotFound, StaleOwner
from locret_stream.snapshot import Branch, Store
from locret_stream.snapshot.names import folder_of
from tests.snapshot.object_store import SCHEME
from tests.snapshot.support import (
    BUDGETS,
    GEOMETRY,
    IDENTITY,
    KEY,
    Record,
    Toy,
    begin,
    closed_spools,
    empty_memory,
    everything,
    load,
    loaded,
    local_store,
    problems,
    same,
    save,
)

pytestmark = pytest.mark.usefixtures("spools")


NAMES = ("alice", "bob", "carol")


class Owner:
    """An open branch and its context, and what the model knows of it: session folder, name, newest number known."""

    def __init__(self, branch: Branch, toy: Toy, folder: str, head: int, base: tuple[int, Record] | None = None):
        self.branch, self.toy, self.folder, self.head = branch, toy, folder, head
        self.name, self.base = branch.name, base

    @property
    def place(self) -> tuple[str, str]:
        return self.folder, self.name


class Machine(RuleBasedStateMachine):
    """Owners of three names open, feed, save, fork, rewind, delete, collect and forget in any order.

    The model: `snaps[folder, name]` numbers to records, `highest[folder, name]` the highest number ever used, where
    `folder` is the name of the session whose folder it is. A name means a fork as long as some other session's folder
    holds snapshots of it, else its own session.
    """

    owners = Bundle("owners")
    key: str | None = None
    remote = False

    @initialize(target=owners, forked=st.booleans())
    def start(self, forked: bool) -> object:
        """An empty store tells little: alice has two snapshots, and perhaps a fork, bob."""
        self.root = tempfile.mkdtemp(prefix="store_machine_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.snaps: dict[tuple[str, str], dict[int, Record]] = {}
        self.highest: dict[tuple[str, str], int] = {}
        self.forks: list[Owner] = []
        self.seeds = 0
        self.spools = closed_spools(threads=False)
        self.spools.__enter__()
        alice = self.open("alice")
        for _ in range(2):
            self.save(alice, 13, False)
        if not forked:
            return alice
        bob = self.fork(alice, "bob")
        self.save(bob, 5, False)
        return multiple(alice, bob)

    def teardown(self) -> None:
        self.spools.__exit__(None, None, None)
        empty_memory()
        shutil.rmtree(getattr(self, "root", "/nonexistent"), ignore_errors=True)

    @property
    def store(self) -> Store:
        if self.remote:
            return Store(f"{SCHEME if self.key else 'memory'}://{self.root}", key=self.key, keep_last=2)
        return local_store(self.root, key=self.key, keep_last=2)

    def home(self, name: str) -> str:
        """The session whose folder the name leads to."""
        elsewhere = [folder for (folder, branch), snaps in self.snaps.items() if branch == name != folder and snaps]
        assert len(elsewhere) <= 1
        return elsewhere[0] if elsewhere else name

    def snapshots_of(self, name: str) -> dict[int, Record]:
        return self.snaps.get((self.home(name), name), {})

    @rule(target=owners, name=st.sampled_from(NAMES))
    def open(self, name: str) -> object:
        folder, snapshots = self.home(name), self.snapshots_of(name)
        head = self.highest.get((folder, name), 0)
        if snapshots:
            branch, record = load(self.store, name)
            assert same(record, snapshots[max(snapshots)])
            return Owner(branch, Toy.of(record), folder, head, (max(snapshots), snapshots[max(snapshots)]))
        self.seeds += 1
        branch, toy = begin(self.store, name, self.seeds)
        return Owner(branch, toy, folder, head)

    @rule(owner=owners, tokens=st.sampled_from([0, 1, 4, 13, 40]), prune=st.booleans())
    def save(self, owner: Owner, tokens: int, prune: bool) -> None:
        owner.toy.feed(tokens, owner.branch)
        highest = self.highest.get(owner.place, 0)
        own = self.snaps.get((owner.name, owner.name))
        lost = self.home(owner.name) != owner.folder and (self.home(owner.name) != owner.name or own)
        anew = owner.base is not None and owner.base[1] is not self.snaps.get(owner.place, {}).get(
            owner.base[0], owner.base[1])
        if owner.head != highest or lost or anew:
            with pytest.raises(StaleOwner):
                save(owner.branch, owner.toy)
            return
        done = save(owner.branch, owner.toy)
        assert done.generation == highest + 1
        if not done.log:
            owner.toy.ids = None
        else:
            assert owner.toy.ids is not None
        owner.head = self.highest[owner.place] = done.generation
        snaps = self.snaps.setdefault(owner.place, {})
        snaps[done.generation] = owner.toy.record()
        owner.base = done.generation, snaps[done.generation]
        if prune:
            self.store.prune(owner.branch)
            for generation in sorted(snaps)[:-2]:
                del snaps[generation]

    @rule(target=owners, owner=owners, name=st.sampled_from(NAMES))
    def fork(self, owner: Owner, name: str) -> object:
        if name == owner.folder or self.snapshots_of(name) or self.snaps.get((owner.folder, name)):
            with pytest.raises(ConfigError):
                owner.branch.fork(name, owner.toy.seen)
            return multiple()
        self.seeds += 1
        fork = owner.branch.fork(name, owner.toy.seen)
        self.forks.append(Owner(fork, owner.toy.diverged(self.seeds), owner.folder,
                                self.highest.get((owner.folder, name), 0)))
        return self.forks[-1]

    @rule(owner=owners, tokens=st.sampled_from([5, 60]))
    def save_and_retire(self, owner: Owner, tokens: int) -> None:
        self.save(owner, tokens, True)

    @rule(owner=owners, data=st.data())
    def rewind(self, owner: Owner, data: st.DataObject) -> None:
        snapshots = self.snaps.get(owner.place, {})
        if not snapshots:
            with pytest.raises(SnapshotNotFound):
                owner.branch.load(IDENTITY, GEOMETRY, BUDGETS)
            return
        generation = data.draw(st.sampled_from(sorted(snapshots)))
        owner.branch.load(IDENTITY, GEOMETRY, BUDGETS, generation)
        owner.toy, owner.head = Toy.of(snapshots[generation]), self.highest[owner.place]
        owner.base = generation, snapshots[generation]
        self.seeds += 1
        owner.toy.seed = self.seeds

    @precondition(lambda self: any(self.snapshots_of(name) for name in NAMES))
    @rule(data=st.data(), which=st.sampled_from(["newest", "oldest", "all"]))
    def delete(self, data: st.DataObject, which: str) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.snapshots_of(name)]))
        snapshots = self.snapshots_of(name)
        generation = {"newest": max(snapshots), "oldest": min(snapshots), "all": None}[which]
        assert self.store.delete(name, generation) == (sorted(snapshots) if generation is None else [generation])
        if generation is None:
            snapshots.clear()
        else:
            del snapshots[generation]

    @rule()
    def gc(self) -> None:
        """What is left is what some snapshot names, and the log of forks that were never saved and go on from it."""
        self.store.gc()
        if not self.remote:
            for folder in {folder for folder, _ in self.snaps}:
                stored = type(self.store.branch("x").session_folder)(self.store.files, folder_of(folder),
                                                                     self.store._key)
                named = {ref.name for path, _ in stored.manifests() for manifest in [stored.manifest_at(path)[0]]
                         for ref in (*manifest.pages, *(manifest.log or ()))}
                there = {file for kind in ("pages", "log")
                         for file in self.store.files.sizes(f"{stored.folder}/{kind}")}
                unsaved = {ref.name for fork in self.forks if fork.folder == folder and fork.base is None
                           for ref in fork.branch.log}
                assert named <= there <= named | unsaved

    @precondition(lambda self: self.highest)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({name for place in self.highest for name in place})))
        places = [place for place in self.highest if place[0] == name]
        if self.home(name) != name:
            with pytest.raises(ConfigError):
                self.store.forget(name)
            return
        try:
            self.store.forget(name)
        except SnapshotNotFound:
            assert not places
        for place in places:
            self.snaps.pop(place, None)
            del self.highest[place]
        left = [path for path, content in everything(self.root).items() if path.startswith(folder_of(name))]
        assert left == [] and self.store.files.sizes(folder_of(name)) == {}
        aliases = [folder for folder in self.store.files.folders("") if "branch" in self.store.files.sizes(folder)
                   and bytes(self.store.files.read(f"{folder}/branch", 64)).decode() == folder_of(name)]
        assert aliases == []

    @precondition(lambda self: hasattr(self, "root"))
    @invariant()
    def all_that_was_acknowledged_is_there(self) -> None:
        store = self.store
        expected = {(name, max(snaps)): snaps for (_, name), snaps in self.snaps.items() if snaps}
        assert {(snapshot.name, snapshot.generation) for snapshot in store.list()} == set(expected)
        assert problems(store) == []
        for name in NAMES:
            snapshots = self.snapshots_of(name)
            assert store.has(name) is bool(snapshots)
            if snapshots:
                assert [snapshot.generation for snapshot in store.info(name)] == sorted(snapshots)
                for generation, record in snapshots.items():
                    assert same(loaded(store, name, generation), record), (name, generation)


class Longer(Machine):
    pass


class Encrypted(Machine):
    key = KEY


class Remote(Machine):
    remote = True


class RemoteEncrypted(Machine):
    remote, key = True, KEY


# Shrinking what thirty steps of files broke takes longer than a test may; `run_state_machine_as_test` below shrinks.
UNSHRUNK = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]


def _case(machine: type[Machine], examples: int, steps: int) -> type:
    case = machine.TestCase
    case.settings = settings(settings.get_profile("suite"), max_examples=examples, stateful_step_count=steps,
                             phases=UNSHRUNK)
    return case


TestMachine = _case(Machine, 15, 30)
TestLonger = _case(Longer, 40, 30)
TestEncrypted = _case(Encrypted, 12, 30)
TestRemote = _case(Remote, 25, 30)
TestRemoteEncrypted = _case(RemoteEncrypted, 8, 30)
for _each in (TestLonger, TestEncrypted, TestRemote, TestRemoteEncrypted):
    _each.pytestmark = [pytest.mark.thorough]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Machine, Encrypted, Remote, RemoteEncrypted])
def test_any_order_of_everything_keeps_what_was_acknowledged(machine):
    """The machines above, for long."""
    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(machine, settings=settings(settings.get_profile("suite"), max_examples=600,
                                                         stateful_step_count=60))
