"""One stored branch as one owner sees it: what is read, and from where this owner goes on (`snapshot.save` writes)."""

from __future__ import annotations

import builtins
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot.encryption import MissingKey
from locret_stream.snapshot.format import LogRef, Manifest, PageRef, tensors
from locret_stream.snapshot.identity import Identity, expect_same
from locret_stream.snapshot.log import Refocus, Spool
from locret_stream.snapshot.log_reader import StoredLog, read_stored_log
from locret_stream.snapshot.pages import (
    Assembly,
    Geometry,
    PageIndex,
    read_page,
    unpack_masks,
)
from locret_stream.snapshot.session_folder import SessionFolder


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One stored snapshot.

    Args:
        name: of the session or the fork. session: the session it belongs to.
        generation: its number; `rewind` and `delete` take it. parent: digest of the snapshot it grew out of.
        created: seconds since 1970. tokens: accepted. units: held, over all layers and KV heads.
        log: whether its token ids are stored too, so that it could be rebuilt.
        bytes: all files it needs. bytes_written: of these, by this save; 0 for one that was only looked at.
        note: what the caller wrote beside it (`StreamingContext.note`).
        problem: why it cannot be read; the rest is then what its place tells. locked: for want of its key.
    """

    name: str
    session: str
    generation: int
    parent: str
    created: float
    tokens: int
    units: int
    bytes: int
    library: str
    encrypted: bool
    log: bool
    bytes_written: int = 0
    note: builtins.bytes = b""
    problem: str = ""
    locked: bool = False


@dataclass(frozen=True)
class Restored:
    """A verified snapshot: units `l.keys`, `l.values` [H, n, D], `l.positions` [H, n], and the state beside them."""

    manifest: Manifest
    tensors: dict[str, Tensor]


_branches: weakref.WeakSet[Branch] = weakref.WeakSet()
_registering = threading.Lock()


class Branch:
    """One owner's view of a branch. One thread at a time.

    Attributes:
        head: the newest number this owner knows; the next save is head + 1 or `StaleOwner`. newest: digest of that
            snapshot, "" if it was not there or could not be read.
        parent: digest of the manifest that the live context grew out of.
        base: branch, number and digest of the snapshot that names `pages` and `log`, None if there is none.
        tried: digest of a manifest whose writing failed. It may be there all the same: an answer got lost, or its
            folder could not be synced.
        spool: ids accepted since the last save, or None for a session without a log. focuses: those given since.
    """

    def __init__(self, session_folder: SessionFolder, session: str, name: str, *, log: bool):
        self.session_folder, self.session, self.name, self.keeps_log = session_folder, session, name, log
        self.head, self.newest, self.parent = 0, "", ""
        self.base: tuple[str, int, str] | None = None
        self.tried = ""
        self.pages: tuple[PageIndex, ...] = ()
        self.log: tuple[LogRef, ...] = ()
        self.spool: Spool | None = None
        self.focuses: list[Refocus] = []
        with _registering:
            _branches.add(self)

    # -- reading ----------------------------------------------------------------------------------------------

    def load(self, identity: Identity | None, geometry: Geometry, capacity: Sequence[int],
             generation: int | None = None) -> Restored:
        """The newest snapshot, or that of a number; this owner goes on from it.

        Args:
            identity: what it must have been made by; None leaves that unchecked.
            capacity: the most units that each layer may hold; more are refused before anything is allocated.

        Raises:
            SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: nothing changed. Only if
                it was cleared away while it was read, this owner is closed.
        """
        while True:
            self.session_folder.refresh()
            found, highest = self.session_folder.generations(self.name)
            if not found:
                raise SnapshotNotFound(f"{self.name!r} has no snapshot in {self.session_folder.files.url}")
            self.session_folder.expect_one_way()  # now, not after a day of reading
            number = found[-1] if generation is None else generation
            if number not in found:
                raise SnapshotNotFound(f"there is no snapshot {number} of {self.name!r}; expected one of {found}: "
                                       "`Store(keep_last=...)` says how many stay")
            try:
                restored, pages, own = self._read(self.name, number, identity, geometry, capacity)
                break
            except SnapshotError:
                # Nothing holds collectors off while this reads. Was it deleted meanwhile, a newer one is there.
                if generation is not None or number in self.session_folder.generations(self.name)[0]:
                    raise
        log, coming = restored.manifest.log, restored.tensors.get("next_focus")
        if coming is not None and (coming.dtype != torch.int64 or coming.dim() != 1 or not len(coming)):
            raise SnapshotCorrupt(f"snapshot {number} of {self.name!r}: its state holds a strange focus")
        newest = own
        if number != highest:
            newest = ""
            with suppress(StoreError):  # a newest one on a bad sector is no reason to refuse the one before
                newest = self.digest(highest) or ""
        spool = self._spool(log[-1].end if log else 0) if log is not None else None
        self.close()
        self.head, self.newest = highest, newest
        self.parent, self.base, self.tried = own, (self.name, number, own), ""
        self.pages, self.log, self.spool, self.keeps_log = pages, log or (), spool, log is not None
        self.focuses = []
        if coming is not None and spool is not None:  # it belongs to the next part of the log
            position, *ids = coming.tolist()
            self.focuses.append(Refocus(position, tuple(ids)))
        # Whoever clears away from here on sees what this owner goes on from; who did before has left nothing whole.
        if generation is not None and number not in self.session_folder.generations(self.name)[0]:
            self.close()
            raise SnapshotNotFound(f"snapshot {number} of {self.name!r} was cleared away while it was read; expected "
                                   "one that is there: `Store(keep_last=...)` says how many stay")
        return restored

    def load_swapped_out(self, identity: Identity, geometry: Geometry, capacity: Sequence[int]) -> Restored:
        """What this owner saved or loaded last, once more; nothing of the branch changes.

        Raises:
            StaleOwner: it is not there any more, or another one stands in its place. SnapshotCorrupt, StoreError.
        """
        self.session_folder.refresh()
        assert self.base is not None, "nothing was saved or loaded"
        name, number, digest = self.base
        with suppress(SnapshotNotFound):
            restored, _, own = self._read(name, number, identity, geometry, capacity)
            if own == digest:
                return restored
        raise StaleOwner(f"snapshot {number} of {name!r}, where this context waits, is not there any more, or another "
                         "one stands in its place; expected nobody to delete it while the context is open")

    def _read(self, name: str, number: int, identity: Identity | None, geometry: Geometry,
              capacity: Sequence[int]) -> tuple[Restored, tuple[PageIndex, ...], str]:
        manifest, sections, own = self.session_folder.read_manifest(name, number)
        what = f"snapshot {number} of {name!r}"
        if identity is not None:
            expect_same(manifest.identity, identity, what)
        check_manifest(manifest, sections, capacity, what)
        assembly = Assembly(manifest.counts, geometry, what)
        masks = unpack_masks(tensors(sections["masks"], what), manifest.pages, what)
        pages = []
        with ThreadPoolExecutor(1, thread_name_prefix="locret-read") as reader:  # one page ahead of the assembly
            coming = deque(reader.submit(self._read_page, ref, geometry, what) for ref in manifest.pages[:1])
            for at, mask in enumerate(masks):
                index, units = coming.popleft().result()
                coming.extend(reader.submit(self._read_page, ref, geometry, what)
                              for ref in manifest.pages[at + 1:at + 2])
                assembly.add(index, units, mask)
                pages.append(index)
        state = tensors(sections["state"], what)
        units = assembly.finish()
        clash = sorted(state.keys() & units.keys())
        if clash:
            raise SnapshotCorrupt(f"{what}: its state holds a tensor {clash[0]!r}, which belongs to its pages")
        return Restored(manifest, {**units, **state}), tuple(pages), own

    def _spool(self, start: int) -> Spool:
        with self.keeping_log():
            return Spool(start, hidden=self.session_folder.hides)

    @contextmanager
    def keeping_log(self) -> Iterator[None]:
        """System errors of the spool as StoreError, saying what is needed."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"the log of {self.name!r} cannot be kept: {error}; expected room for temporary files, or "
                             "a store with log=False") from error

    def _read_page(self, ref: PageRef, geometry: Geometry, what: str) -> tuple[PageIndex, dict[str, Tensor]]:
        page = f"{what}, page {ref.name}"
        body, sections = self.session_folder.read_named("pages", ref, page)
        return read_page(ref, body, sections, geometry, page)

    def read_stored_log(self, identity: Identity, generation: int | None = None) -> StoredLog:
        """The whole log up to a snapshot, the newest unless a number is given, sound, to be fed again; the next save of
        this owner stands against what was newest then.

        Raises:
            SnapshotCorrupt: there is none. SnapshotMismatch: its ids are of another tokenizer. StoreError.
        """
        chain = read_stored_log(self.session_folder, self.name, identity, generation)
        self.head, self.newest, self.keeps_log = chain.highest, chain.digest, True
        return chain

    def begin_anew(self) -> None:
        """Go on from a log that `read_stored_log` gave and that is fed again: pages and log are written anew."""
        spool = self._spool(0)
        self.close()
        self.base, self.tried = None, ""
        self.pages, self.log, self.spool, self.focuses = (), (), spool, []

    # -- fencing ----------------------------------------------------------------------------------------------

    def expect_newest(self) -> list[int]:
        """The snapshots there are, if this owner is the one who saves next.

        Raises:
            StaleOwner: another one has saved meanwhile. StoreError: the store cannot be read, so nobody knows.
        """
        found, highest = self.session_folder.generations(self.name)
        if self.tried and highest == self.head + 1 and self.digest(highest) == self.tried:
            self.head, self.newest, self.parent, self.tried = highest, self.tried, self.tried, ""
        if highest != self.head:
            raise StaleOwner(f"{self.name!r} was saved elsewhere since it was opened here: its newest snapshot is "
                             f"{highest}, this owner knows {self.head}. Nothing was acknowledged; expected one owner:"
                             " save under a new name, or open it again")
        return found

    def expect_not_anew(self, found: Sequence[int]) -> None:
        """A session that was forgotten and begun anew counts from 1 again: then numbers alone would let this one in.

        Raises:
            StaleOwner. StoreError: as `expect_newest`.
        """
        if self.head in found and self.newest and self.digest(self.head) not in (self.newest, None):
            raise StaleOwner(f"{self.name!r} was forgotten since it was opened here, and begun anew by another. "
                             "Nothing was written; expected one owner: save under a new name, or open it again")

    def digest(self, number: int) -> str | None:
        """Of that snapshot; None if it is damaged, locked or not there, and then it is no evidence of anything.

        Raises:
            StoreError: the store cannot be read just now.
        """
        try:
            return self.session_folder.read_manifest(self.name, number)[2]
        except SnapshotError as error:
            if isinstance(error, StoreError) and not isinstance(error, MissingKey):
                raise
        return None

    # -- writing ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This owner starts a session from nothing."""
        if self.keeps_log:
            self.spool = self._spool(0)

    def note(self, position: int, ids: Sequence[int]) -> None:
        """Ids about to be committed at `position`. The same again, or other ones after an undone turn, replace them.

        Raises:
            StoreError: the spool cannot be written.
        """
        if self.spool is not None:
            with self.keeping_log():
                self.spool.append(ids, position)

    def note_focus(self, position: int, ids: Sequence[int], seen: int) -> None:
        """A focus given when so many tokens were accepted, of them `seen` committed: one that waits takes the place of
        one that waited; what came into force stays noted, as units made room for it."""
        if self.spool is not None:
            self.focuses = [event for event in self.focuses if event.position <= seen]
            self.focuses.append(Refocus(position, tuple(ids)))

    def fork(self, name: str, seen: int) -> Branch:
        """A branch by another name that begins at the committed position `seen` of this one; unsaved ids are copied.

        Raises:
            ConfigError: the store has something of that name already.
        """
        if self.session_folder.taken(name):
            raise ConfigError(f"fork {name!r}: the store has a session of that name; expected a new one, or `delete` "
                              "that first")
        twin = Branch(self.session_folder.twin(), self.session, name, log=self.keeps_log)
        twin.parent, twin.base = self.parent, self.base
        twin.head = self.session_folder.generations(name)[1]
        twin.pages = tuple(page for page in self.pages if page.ref.end <= seen)
        twin.log, twin.focuses = self.log, [*self.focuses]
        if self.spool is not None:
            twin.spool = twin._spool(self.spool.start)
            try:
                with self.keeping_log():
                    twin.spool.append(self.spool.read(seen))
            except BaseException:
                twin.close()
                raise
        return twin

    def close(self) -> None:
        """Drop the spool; what was not saved is gone."""
        if self.spool is not None:
            self.spool.close()
            self.spool = None


def log_of_owners(session_folder: SessionFolder, *, all_of_them: bool) -> set[str]:
    """Log parts, as paths inside the session, that owners in this process go on from and no manifest may name any more:
    forks that were not saved yet, whose origin put together anew what both came from. With `all_of_them`, for clearing
    away after a save, also those that went back to an older snapshot since; what is deleted on purpose is gone."""
    with _registering:
        branches = [*_branches]
    owners = [branch for branch in branches if branch.spool is not None and branch.base is not None
              and (all_of_them or branch.base[0] != branch.name)]
    return {f"log/{ref.name}" for branch in owners if branch.session_folder.same_as(session_folder)
            for ref in branch.log}


def check_manifest(manifest: Manifest, sections: Mapping[str, memoryview], capacity: Sequence[int], what: str) -> None:
    """Refuse a manifest whose numbers cannot be true, before anything is allocated by them.

    Raises:
        SnapshotCorrupt.
    """
    if set(sections) != {"state", "masks"}:
        raise SnapshotCorrupt(f"{what}: sections {sorted(sections)}; expected state and masks")
    if len(manifest.counts) != len(capacity) or any(
            count > most for count, most in zip(manifest.counts, capacity, strict=True)):
        raise SnapshotCorrupt(f"{what}: {manifest.counts} units per layer; expected at most {tuple(capacity)}")
    at = 0
    for ref in manifest.pages:
        if not at <= ref.start < ref.end <= manifest.seen or ref.live > ref.units:
            raise SnapshotCorrupt(f"{what}: a page of positions {ref.start} to {ref.end} with {ref.live} of "
                                  f"{ref.units} units; expected ranges in order inside 0 to {manifest.seen}")
        at = ref.end
    if manifest.tokens < manifest.seen:
        raise SnapshotCorrupt(f"{what}: {manifest.tokens} tokens, of which {manifest.seen} are committed")


def describe(manifest: Manifest, size: int, encrypted: bool, written: int = 0) -> Snapshot:
    """What users see of a manifest of `size` bytes."""
    return Snapshot(name=manifest.branch, session=manifest.session, generation=manifest.generation,
                    parent=manifest.parent, created=manifest.created, tokens=manifest.tokens,
                    units=sum(ref.live for ref in manifest.pages), library=manifest.library, encrypted=encrypted,
                    log=manifest.log is not None,
                    bytes=size + sum(ref.size for ref in manifest.pages) + sum(ref.size for ref in manifest.log or ()),
                    bytes_written=written, note=manifest.note)
