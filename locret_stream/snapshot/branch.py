"""One stored branch as one owner sees it: reading its snapshots and log, and what the next save (`snapshot.save`)
builds on."""

from __future__ import annotations

import builtins
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotNotFound, StaleOwner, StoreError
from locret_stream.snapshot.claims import is_taken
from locret_stream.snapshot.encryption import MissingKey
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import LogRef, Manifest, PageRef, tensors
from locret_stream.snapshot.identity import AS_CODES, Expected, Identity, expect_same
from locret_stream.snapshot.log import Part, Refocus, Spool, StoredLog, read_log, read_stored_log
from locret_stream.snapshot.names import hashed, readable_record
from locret_stream.snapshot.pages import Assembly, Geometry, PageIndex, read_page, unpack_masks
from locret_stream.snapshot.session_folder import SessionFolder

RECORD_S = 60.0  # where reading is a request, a record that this owner saw or wrote is not read again for so long


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One stored snapshot.

    Args:
        name: of the session or the fork. session: the session it belongs to.
        generation: its number; `rewind` and `delete` take it. parent: digest of the snapshot it grew out of.
        created: seconds since 1970. tokens: accepted tokens. units: kept units, over all layers and KV heads.
        library: the version that wrote it. encrypted: whether its session is.
        log: whether its token ids are stored too, so that it can be rebuilt.
        bytes: of all files that it needs. bytes_written: of these, the bytes that this save wrote; 0 if it was only
            listed.
        rounded: whether exact units in the host's memory were saved as codes, which they are rounded to where it is
            opened.
        note: what the caller stored beside it (`StreamingContext.note`).
        problem: why it cannot be read, "" if it can; otherwise the other fields say only what its path says.
        locked: whether it cannot be read because the store was not given its key.
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
    rounded: bool = False
    note: builtins.bytes = b""
    problem: str = ""
    locked: bool = False


@dataclass(frozen=True)
class Restored:
    """A verified snapshot. tensors: for every layer l the units `l.keys`, `l.values` [H, n, D] and `l.positions`
    [H, n], and the state beside them (`Moment.state`)."""

    manifest: Manifest
    tensors: dict[str, Tensor]


_branches: weakref.WeakSet[Branch] = weakref.WeakSet()
_registering = threading.Lock()


class Branch:
    """One owner's view of a branch, used by one thread at a time.

    Attributes:
        keeps_log: whether the session has a log.
        head: the highest generation that this owner has seen; its next save is number head + 1, or `StaleOwner`.
        newest: digest of the snapshot of that number, "" if there was none or it could not be read.
        version: of that snapshot's manifest, where this owner wrote it and the place says (`Files.version`).
        parent: digest of the manifest that the live context grew out of.
        base: branch, generation and digest of the snapshot that names `pages` and `log`, None if there is none.
        tried: digest of a manifest whose writing failed, "" for none. It may be stored all the same: the answer of the
            store got lost, or the folder could not be synced.
        pages, log: what the next save takes over from that snapshot.
        spool: ids that were committed since the last save, None for a session without a log.
        focuses: the focuses that were given since the last save.
        recorded_at: when this owner last saw or wrote the record of the name, by `time.monotonic`.
        recent: small parts of `log` that this owner wrote, by name, which later saves put together with their own.
        looked: the folder as it was after the last save, for the pruning that follows; None where looks cost nothing.
    """

    def __init__(self, session_folder: SessionFolder, session: str, name: str, *, log: bool):
        self.session_folder, self.session, self.name, self.keeps_log = session_folder, session, name, log
        self.head, self.newest, self.version, self.parent = 0, "", "", ""
        self.base: tuple[str, int, str] | None = None
        self.tried = ""
        self.pages: tuple[PageIndex, ...] = ()
        self.log: tuple[LogRef, ...] = ()
        self.spool: Spool | None = None
        self.focuses: list[Refocus] = []
        self.recorded_at = -math.inf
        self.recent: dict[str, Part] = {}
        self.looked: Files | None = None
        with _registering:
            _branches.add(self)

    @property
    def encrypts(self) -> bool:
        """Whether what is written of this session is encrypted."""
        return self.session_folder.key.will_encrypt

    # -- reading ----------------------------------------------------------------------------------------------

    def load(self, identity: Identity | Expected, geometry: Geometry, capacity: Sequence[int],
             generation: int | None = None) -> Restored:
        """Read the newest snapshot, or that of a generation; the next save of this owner builds on it.

        Args:
            identity: what the snapshot must have been made with.
            capacity: the most units that each layer may hold; more are refused before anything is allocated.

        Raises:
            SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: nothing changed, except
                that this owner is closed if the snapshot was deleted while it was read.
        """
        while True:
            self.session_folder.key.refresh()
            number = generation
            try:
                with self.session_folder.looking():
                    generations, highest = self.session_folder.generations(self.name)
                    if not generations:
                        raise SnapshotNotFound(f"{self.name!r} has no snapshot in {self.session_folder.files.url}")
                    self.session_folder.key.expect_no_plaintext()  # now, rather than at a save after a day of reading
                    number = generations[-1] if generation is None else generation
                    if number not in generations:
                        raise SnapshotNotFound(f"there is no snapshot {number} of {self.name!r}; expected one of "
                                               f"{generations}: `Store(keep_last=...)` says how many stay")
                    restored, pages, digest = self._read(self.name, number, identity, geometry, capacity)
                    break
            except SnapshotError:
                # No lock excludes collectors while this reads. If one deleted the snapshot, there is a newer one.
                if number is None or generation is not None or number in self.session_folder.generations(self.name)[0]:
                    raise
        log, next_focus = restored.manifest.log, restored.tensors.get("next_focus")
        if next_focus is not None and (next_focus.dtype != torch.int64 or next_focus.dim() != 1 or not len(next_focus)):
            raise SnapshotCorrupt(f"snapshot {number} of {self.name!r}: its state holds a strange focus")
        newest = digest
        if number != highest:
            newest = ""
            with suppress(StoreError):  # a newest snapshot on a bad sector is no reason to refuse the one before
                newest = self.digest(highest) or ""
        spool = self._open_spool(log[-1].end if log else 0) if log is not None else None
        self.close()
        self.head, self.newest = highest, newest
        self.parent, self.base, self.tried = digest, (self.name, number, digest), ""
        self.pages, self.log, self.spool, self.keeps_log = pages, log or (), spool, log is not None
        self.focuses = []
        if next_focus is not None and spool is not None:  # it belongs to the next part of the log
            position, *ids = next_focus.tolist()
            self.focuses.append(Refocus(position, tuple(ids)))
        # From here on collectors in this process keep the log that this owner goes on from (`log_of_owners`). One that
        # ran before has deleted the manifest first, which shows here.
        if generation is not None and number not in self.session_folder.generations(self.name)[0]:
            self.close()
            raise SnapshotNotFound(f"snapshot {number} of {self.name!r} was deleted while it was read; expected one "
                                   "that stays: `Store(keep_last=...)` says how many do")
        return restored

    def load_swapped_out(self, identity: Identity | Expected, geometry: Geometry, capacity: Sequence[int]) -> Restored:
        """Read once more what this owner saved or loaded last; nothing of the branch changes.

        Raises:
            StaleOwner: that snapshot does not exist any more, or another one has its number. SnapshotCorrupt,
                StoreError.
        """
        self.session_folder.key.refresh()
        assert self.base is not None, "nothing was saved or loaded"
        name, number, digest = self.base
        with suppress(SnapshotNotFound), self.session_folder.looking():
            restored, _, stored_digest = self._read(name, number, identity, geometry, capacity)
            if stored_digest == digest:
                return restored
        raise StaleOwner(f"snapshot {number} of {name!r}, to which this context was swapped out, does not exist any "
                         "more, or another one has its number; expected nobody to delete it while the context is open")

    def _read(self, name: str, number: int, identity: Identity | Expected, geometry: Geometry,
              capacity: Sequence[int]) -> tuple[Restored, tuple[PageIndex, ...], str]:
        manifest, sections, digest = self.session_folder.read_manifest(name, number)
        what = f"snapshot {number} of {name!r}"
        expect_same(manifest.identity, identity, what, manifest.created)
        check_manifest(manifest, sections, capacity, what)
        assembly = Assembly(manifest.counts, geometry, what)
        masks = unpack_masks(tensors(sections["masks"], what), manifest.pages, what)
        pages = []
        with ThreadPoolExecutor(1, thread_name_prefix="locret-read") as reader:  # one page ahead of the assembly
            reading = deque(reader.submit(self._read_page, ref, geometry, what) for ref in manifest.pages[:1])
            for at, mask in enumerate(masks):
                index, units = reading.popleft().result()
                reading.extend(reader.submit(self._read_page, ref, geometry, what)
                               for ref in manifest.pages[at + 1:at + 2])
                assembly.add(index, units, mask)
                pages.append(index)
        state = tensors(sections["state"], what)
        units = assembly.finish()
        clash = sorted(state.keys() & units.keys())
        if clash:
            raise SnapshotCorrupt(f"{what}: its state holds a tensor {clash[0]!r}, which belongs to its pages")
        return Restored(manifest, {**units, **state}), tuple(pages), digest

    def _open_spool(self, start: int) -> Spool:
        with self.keeping_log():
            return Spool(start, hidden=self.encrypts)

    @contextmanager
    def keeping_log(self) -> Iterator[None]:
        """Turn system errors of the spool into StoreError, which says what the log needs."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"the log of {self.name!r} cannot be kept: {error}; expected room for temporary files, or "
                             "a store with log=False") from error

    def _read_page(self, ref: PageRef, geometry: Geometry, what: str) -> tuple[PageIndex, dict[str, Tensor]]:
        page = f"{what}, page {ref.name}"
        body, sections = self.session_folder.read_named("pages", ref, page)
        return read_page(ref, body, sections, geometry, page)

    def read_stored_log(self, identity: Identity | Expected, generation: int | None = None) -> StoredLog:
        """The whole verified log up to a snapshot, the newest unless a generation is given, to be fed again.

        The next save of this owner succeeds only if the snapshot that is newest now still is.

        Raises:
            SnapshotCorrupt: there is no whole log. SnapshotMismatch: its ids are of another tokenizer. StoreError.
        """
        stored_log = read_stored_log(self.session_folder, self.name, identity, generation)
        self.head, self.newest, self.keeps_log = stored_log.highest, stored_log.digest, True
        return stored_log

    def begin_anew(self) -> None:
        """Go on from a log that `read_stored_log` gave and that is fed again: pages and log are written anew."""
        spool = self._open_spool(0)
        self.close()
        self.base, self.tried = None, ""
        self.pages, self.log, self.spool, self.focuses = (), (), spool, []

    # -- fencing ----------------------------------------------------------------------------------------------

    def expect_newest(self) -> list[int]:
        """The generations of the branch, if no other owner has saved since this one read or saved.

        Raises:
            StaleOwner: another owner has. StoreError: the store cannot be read, so that this is unknown.
        """
        look = self.session_folder.present_generations if self.knows_record else self.session_folder.generations_of
        generations, highest = look(hashed(self.name))
        if self.tried and highest == self.head + 1 and self.digest(highest) == self.tried:
            self.head, self.newest, self.parent, self.tried = highest, self.tried, self.tried, ""
        if self.head and not highest:
            raise StaleOwner(f"{self.name!r} was forgotten since it was opened here, so it is not written again. "
                             "Nothing was acknowledged; expected to let it go, or to save under a new name")
        if highest != self.head:
            raise StaleOwner(f"{self.name!r} was saved elsewhere since it was opened here: its newest snapshot is "
                             f"{highest}, this owner knows {self.head}. Nothing was acknowledged; expected one owner:"
                             " save under a new name, or open it again")
        return generations

    def expect_recorded(self) -> None:
        """As `expect_newest`, by the record of the name alone where that says enough: every save that was acknowledged
        wrote it, unless the place failed just then, and forgetting a session begins with it."""
        record = readable_record(self.session_folder.files, hashed(self.name))
        if record is None or (record.folder, record.newest) != (self.session_folder.folder, self.head):
            self.expect_newest()
        else:
            self.recorded_at = time.monotonic()

    @property
    def knows_record(self) -> bool:
        """Whether the record of the name need not be read, inside a look at the folder: the newest snapshot in it is as
        this owner wrote it, and so was the record a moment ago. A record says more than the folder only where another
        owner's snapshot got lost since."""
        version = self.session_folder.version(self.name, self.head) if self.head else ""
        return bool(version) and version == self.version and time.monotonic() - self.recorded_at < RECORD_S

    def expect_same_session(self, generations: Sequence[int]) -> None:
        """Raises StaleOwner if the session was forgotten and begun anew: its generations count from 1 again, so that
        `expect_newest` may let this owner pass."""
        if self.head not in generations or not self.newest:
            return
        version = self.session_folder.version(self.name, self.head)
        if (not version or version != self.version) and self.digest(self.head) not in (self.newest, None):
            raise StaleOwner(f"{self.name!r} was forgotten since it was opened here, and begun anew by another. "
                             "Nothing was written; expected one owner: save under a new name, or open it again")

    def digest(self, number: int) -> str | None:
        """The digest of a snapshot; None if it is damaged, locked or missing, which proves nothing. Raises StoreError
        if the store cannot be read now."""
        try:
            return self.session_folder.read_manifest(self.name, number)[2]
        except SnapshotError as error:
            if isinstance(error, StoreError) and not isinstance(error, MissingKey):
                raise
        return None

    # -- writing ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a session that has no snapshot yet."""
        if self.keeps_log:
            self.spool = self._open_spool(0)

    def note(self, position: int, ids: Sequence[int]) -> None:
        """Write ids that are about to be committed from `position` on into the spool. They replace what the spool has
        from there on: the same ids after a step that failed, or other ids after an undone turn."""
        if self.spool is not None:
            with self.keeping_log():
                self.spool.append(ids, position)

    def note_focus(self, position: int, ids: Sequence[int], seen: int) -> None:
        """Note a focus that was given when `position` tokens were accepted, of them `seen` committed. It replaces one
        that is not in force yet; one that is stays in the log, because it decided which units were evicted."""
        if self.spool is not None:
            self.focuses = [event for event in self.focuses if event.position <= seen]
            self.focuses.append(Refocus(position, tuple(ids)))

    def fork(self, name: str, seen: int) -> Branch:
        """A branch by another name that begins at the committed position `seen` of this one; unsaved ids are copied.

        Raises:
            ConfigError: the store has snapshots of that name. StoreError.
        """
        if is_taken(self.session_folder, name):
            raise ConfigError(f"fork {name!r}: the store has a session of that name; expected a new one, or `delete` "
                              "that first")
        own = self.session_folder
        fork = Branch(SessionFolder(own.files, own.folder, own.key.user_key), self.session, name, log=self.keeps_log)
        fork.parent, fork.base = self.parent, self.base
        fork.head = self.session_folder.generations(name)[1]
        fork.pages = tuple(page for page in self.pages if page.ref.end <= seen)
        fork.log, fork.focuses = self.log, [*self.focuses]
        if self.spool is not None:
            fork.spool = fork._open_spool(self.spool.start)
            try:
                with self.keeping_log():
                    fork.spool.append(self.spool.read(seen))
            except BaseException:
                fork.close()
                raise
        return fork

    def committed_ids(self, seen: int) -> np.ndarray:
        """All committed ids, [seen] int32, those of the stored log and of the spool. Raises SnapshotCorrupt,
        SnapshotTooNew, StoreError."""
        assert self.spool is not None, "a session without a log"
        parts = [ids for ids, _ in read_log(self.session_folder, self.name, self.log)]
        with self.keeping_log():
            return np.concatenate([*parts, self.spool.read(seen)])

    def close(self) -> None:
        """Delete the spool, and with it the ids that were not saved."""
        if self.spool is not None:
            self.spool.close()
            self.spool = None


def log_of_owners(session_folder: SessionFolder, *, all_of_them: bool) -> set[str]:
    """Log parts, as paths inside the session, that owners in this process still need though perhaps no manifest names
    them any more: a fork that was not saved yet needs the parts that its origin has put together anew since.

    Args:
        all_of_them: also the parts of owners that went back to an older snapshot. A collection after a save keeps
            those; one after a deletion on purpose does not.
    """
    with _registering:
        branches = [*_branches]
    owners = [branch for branch in branches if branch.spool is not None and branch.base is not None
              and (all_of_them or branch.base[0] != branch.name)]
    place = session_folder.files.url, session_folder.folder
    return {f"log/{ref.name}" for branch in owners for ref in branch.log
            if (branch.session_folder.files.url, branch.session_folder.folder) == place}


def check_manifest(manifest: Manifest, sections: Mapping[str, memoryview], capacity: Sequence[int], what: str) -> None:
    """Raises SnapshotCorrupt if numbers contradict each other or `capacity`, before anything is allocated by them."""
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
    """What users see of a manifest of `size` bytes, whose save wrote `written` bytes."""
    return Snapshot(name=manifest.branch, session=manifest.session, generation=manifest.generation,
                    parent=manifest.parent, created=manifest.created, tokens=manifest.tokens,
                    units=sum(ref.live for ref in manifest.pages), library=manifest.library, encrypted=encrypted,
                    log=manifest.log is not None, bytes_written=written, note=manifest.note,
                    rounded=AS_CODES in manifest.identity.dtype,
                    bytes=size + sum(ref.size for ref in manifest.pages) + sum(ref.size for ref in manifest.log or ()))
