"""The store: many sessions at one place. Opens branches; lists, verifies, deletes, forgets, collects."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotTooNew,
    StoreError,
)
from locret_stream.snapshot import removing
from locret_stream.snapshot.branch import Branch, Snapshot, describe
from locret_stream.snapshot.claims import fork_target, locate
from locret_stream.snapshot.encryption import MissingKey, user_key
from locret_stream.snapshot.files import Busy, Files
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.names import FOLDER, folder_of, sweep_records
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.removing import GRACE_S, Collected
from locret_stream.snapshot.seen import Said, Seen
from locret_stream.snapshot.session_folder import SessionFolder, named_by
from locret_stream.snapshot.verifying import Verified, lost_snapshots, name_of, unlisted_path, verify

READERS = 8  # manifests that are read at a time where reading is a request
List = list  # for annotations in `Store`, where `list` is the method


class Store:
    """Sessions at one place. Methods block; each session is used by one thread at a time.

    Args:
        url: a folder, or a URL that fsspec knows (`s3://…`, `memory://`).
        key: 32 bytes (or 64 hexadecimal digits) under which new sessions are encrypted.
        keep_last: how many snapshots of a branch stay, at least 1; older ones are deleted after a save.
        max_bytes: of one session; its oldest snapshots are deleted until it fits. The newest of a branch always stays.
        log: whether new sessions keep a log of their token ids.

    Raises:
        ConfigError: a value that cannot work. StoreError: there is no such place.
    """

    def __init__(self, url: str | Path, *, key: bytes | str | None = None, keep_last: int = 4,
                 max_bytes: int | None = None, log: bool = True, files: Files | None = None):
        for name, value in (("keep_last", keep_last), ("max_bytes", max_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
        if not isinstance(url, (str, Path)) or not str(url).strip():
            raise ConfigError(f"store is {url!r}; expected a folder or a URL such as s3://bucket/memories")
        self.files = files or open_files(url)
        self.url, self._key = self.files.url, user_key(key)
        self.keep_last, self.max_bytes, self._log = keep_last, max_bytes, log
        self._seen = Seen()

    # -- opening ----------------------------------------------------------------------------------------------

    @property
    def encrypts(self) -> bool:
        """Whether new sessions are encrypted."""
        return self._key is not None

    def branch(self, name: str) -> Branch:
        """The branch of that name for a new owner: one that is stored, or the beginning of a new session."""
        folder = folder_of(name)
        looked = self.files.looking(folder)
        removing.remove_dead_alias(looked, folder, GRACE_S)
        session_folder = SessionFolder(self.files, fork_target(looked, folder) or folder, self._key)
        session_folder.needs = self._seen.needs(session_folder.folder)  # the first pruning need not read them
        branch = Branch(session_folder, name, name, log=self._log)
        with session_folder.looking(looked if session_folder.folder == folder else None):
            generations, branch.head = session_folder.generations(name)
            if generations and session_folder.folder != folder:
                branch.session = session_folder.session_name()
        return branch

    def has(self, name: str) -> bool:
        """Whether there is a snapshot of that name."""
        return bool(locate(self.files, name, self._key).generations(name)[0])

    def probe(self) -> None:
        """Lock a folder, create a small file in it as a save creates a manifest, and remove both: to know before long
        work whether its result can be saved.

        Raises:
            StoreError: nothing can be saved.
        """
        folder = f"probe-{secrets.token_hex(8)}"
        with self.files.lock(folder, shared=False):
            try:
                self.files.write(f"{folder}/file", [b""], exclusive=True)
            finally:
                self.files.remove_folder(folder)

    # -- looking ----------------------------------------------------------------------------------------------

    def list(self) -> List[Snapshot]:
        """The newest snapshot of every session and fork, by name; one that cannot be read has a `problem`.

        Raises:
            StoreError: the place cannot be read.
        """
        snapshots, listed_branches = list[Snapshot](), set[str]()
        links, reported_folders = list[SessionFolder](), set[str]()
        for session_folder in self._session_folders():
            try:
                manifests = session_folder.manifests()
            except SnapshotCorrupt:
                links.append(session_folder)
                continue
            newest: dict[str, Snapshot] = {}
            for path, _ in reversed(manifests):
                if (branch := path.split("/")[1]) not in newest:
                    with suppress(SnapshotNotFound):  # deleted at this moment: the one before is the newest
                        newest[branch] = self._describe(session_folder, path)
            snapshots += newest.values()
            listed_branches |= newest.keys()
        for session_folder, path, _ in lost_snapshots(self.files, self._key, listed_branches):
            with suppress(SnapshotNotFound):
                snapshots.append(self._describe(session_folder, path))
                reported_folders.add(session_folder.folder)
        for session_folder in links:
            if session_folder.folder not in reported_folders:
                with suppress(SnapshotNotFound):
                    snapshots.append(self._describe(session_folder, unlisted_path(session_folder)))
        return sorted(snapshots, key=lambda snapshot: snapshot.name)

    def info(self, name: str) -> List[Snapshot]:
        """All snapshots of a session or fork, oldest first; one that is damaged or locked has a `problem`.

        Raises:
            SnapshotNotFound: there is none. StoreError: one of them cannot be read now, which does not mean damage.
        """
        folder = folder_of(name)
        looked = self.files.looking(folder)
        session_folder = SessionFolder(self.files, fork_target(looked, folder) or folder, self._key)
        with session_folder.looking(looked if session_folder.folder == folder else None) as looked:
            generations, _ = session_folder.generations(name)
            if not generations:
                raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
            paths = [session_folder.manifest_path(name, number) for number in generations]
            readable = False
            with suppress(SnapshotError):  # without its key nobody is told what is known of a session
                session_folder.key.for_reading()
                readable = True
            return self._look_at(session_folder.folder, looked, paths, readable)

    def _look_at(self, folder: str, looked: Files, paths: List[str], readable: bool) -> List[Snapshot]:
        """What users see of the snapshots of these manifests, but of one that was deleted at this moment. Where reading
        is a request, several are read at a time, and none that was read before.

        Args:
            looked: the folder as it is now. readable: whether what is known of it may be told.

        Raises:
            StoreError.
        """
        known = self._seen.of(folder) if readable else {}
        new: dict[tuple[str, bytes], Said] = {}

        def look(path: str) -> Snapshot | None:
            key = path, looked.version(f"{folder}/{path}").encode()
            if key in known:
                return known[key].snapshot
            session_folder = SessionFolder(self.files, folder, self._key)  # of this thread alone
            with suppress(SnapshotNotFound), session_folder.looking(looked):
                snapshot, needs = self._described(session_folder, path, many_names=False)
                if key[1] and not snapshot.problem:
                    new[key] = Said(snapshot, needs)
                return snapshot
            return None

        if self.files.locks:
            found = [look(path) for path in paths]
        else:
            with ThreadPoolExecutor(READERS, thread_name_prefix="locret-look") as readers:
                found = [*readers.map(look, paths)]
            self._seen.add(looked, folder, new)
        return [snapshot for snapshot in found if snapshot is not None]

    def identity(self, name: str) -> Identity:
        """What the newest snapshot of a name was made with. Raises SnapshotNotFound, SnapshotCorrupt, StoreError."""
        session_folder, generations = self._stored(name)
        return session_folder.read_manifest(name, generations[-1])[0].identity

    def verify(self, name: str | None = None) -> List[Verified]:
        """Read every byte that the snapshots of a name need (None: of all names), and check that none of them got lost
        and that every name leads to its snapshots. A problem of the name itself is reported with its newest snapshot,
        or with number 0.

        Raises:
            SnapshotNotFound: there is no session of that name.
        """
        session_folders = list(self._session_folders()) if name is None else [self._stored(name)[0]]
        return verify(self.files, self._key, session_folders, name)

    def _session_folders(self) -> Iterator[SessionFolder]:
        """Folders of sessions with snapshots, and those where a link hides whether there are any."""
        for folder in self.files.folders(""):
            if FOLDER.fullmatch(folder):
                session_folder, has_snapshots = SessionFolder(self.files, folder, self._key), True
                with suppress(SnapshotCorrupt):
                    has_snapshots = session_folder.has_snapshots
                if has_snapshots:
                    yield session_folder

    def _stored(self, name: str) -> tuple[SessionFolder, List[int]]:
        """The folder with the snapshots of a name, and their generations. Raises SnapshotNotFound."""
        session_folder = locate(self.files, name, self._key)
        generations, _ = session_folder.generations(name)
        if not generations:
            raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
        return session_folder, generations

    def _describe(self, session_folder: SessionFolder, path: str) -> Snapshot:
        """As `_described`, what users see alone, while many names are listed."""
        return self._described(session_folder, path, many_names=True)[0]

    def _described(self, session_folder: SessionFolder, path: str, *, many_names: bool
                   ) -> tuple[Snapshot, frozenset[str]]:
        """What users see of the snapshot whose manifest is at `path`, and the files that it names.

        Raises:
            SnapshotNotFound: it was deleted meanwhile. StoreError: it cannot be read; while `many_names` are listed,
                this becomes its `problem` instead.
        """
        try:
            manifest, size = session_folder.manifest_at(path)
        except SnapshotNotFound:
            raise
        except SnapshotError as error:
            if isinstance(error, StoreError) and not isinstance(error, MissingKey) and not many_names:
                raise
            number, encrypted = int(path.rpartition("/")[2].removesuffix(".snap")), False
            with suppress(SnapshotCorrupt):  # the folder is a link
                encrypted = session_folder.key.encrypted
            return Snapshot(name=name_of(session_folder, path), session="", generation=number, parent="", created=0.0,
                            tokens=0, units=0, bytes=0, library="", encrypted=encrypted, log=False,
                            problem=str(error), locked=isinstance(error, MissingKey)), frozenset()
        return describe(manifest, size, session_folder.key.encrypted), named_by(manifest)

    # -- removing ---------------------------------------------------------------------------------------------

    def delete(self, name: str, generation: int | None = None) -> List[int]:
        """Delete one snapshot of a name, or with None all of them; returns their generations. Forks keep theirs.

        Raises:
            SnapshotNotFound: there is none. StoreError: not everything could be deleted.
        """
        session_folder, _ = self._stored(name)
        with removing.exclusive(session_folder):
            session_folder.key.for_reading()  # whoever has no key of an encrypted session deletes nothing of it
            generations, highest = session_folder.generations(name)
            chosen = generations if generation is None else [number for number in generations if number == generation]
            if not chosen:
                raise SnapshotNotFound(f"{name!r} has no snapshot {generation}; expected one of {generations}")
            removing.delete_snapshots(session_folder, name, chosen, highest)
            if len(chosen) == len(generations) and session_folder.folder != folder_of(name):
                removing.free_name(self.files, folder_of(name), session_folder.folder)
            with suppress(SnapshotCorrupt, SnapshotTooNew):  # of another snapshot, which `gc` reports
                removing.collect(session_folder, GRACE_S)
        return chosen

    def forget(self, name: str) -> List[str]:
        """Remove a session with all its forks. A crash meanwhile leaves whole snapshots or none; call it again then.

        Returns:
            Paths of everything that was removed.

        Raises:
            SnapshotNotFound: there is nothing of that name. ConfigError: it is a fork: forget its session, or `delete`
                the fork. StoreError: something could not be removed; what could be removed before it was.
        """
        return removing.forget(self.files, name)

    def prune(self, branch: Branch, swap_generations: frozenset[int] = frozenset(),
              keep: Mapping[int, bool] | None = None) -> frozenset[int]:
        """After a save: delete the snapshots beyond `keep_last` and `max_bytes`, and collect.

        While others save in the session nothing is deleted: this does not wait for them, and the next save deletes.

        Args:
            swap_generations: snapshots that swap-outs wrote. All but the newest are deleted, so that frequent swapping
                never costs a snapshot that the user asked for.
            keep: generations that stay beside the newest `keep_last`; True: even if `max_bytes` is exceeded.

        Returns:
            Those of `swap_generations` that are still stored.

        Raises:
            SnapshotCorrupt, SnapshotTooNew: a manifest cannot be read, so what it needs is unknown and nothing was
                collected. StoreError.
        """
        session_folder, keep = branch.session_folder, keep or {}
        looked, branch.looked = branch.looked, None
        try:
            with removing.exclusive(session_folder, wait=False):
                with session_folder.looking(None if session_folder.locked else looked):
                    generations, highest = session_folder.generations(branch.name)
                    swapped = [number for number in generations if number in swap_generations and number != highest]
                    asked_for = [number for number in generations if number not in swap_generations]
                    surplus = [number for number in asked_for[:-self.keep_last] if number not in keep]
                    removing.delete_snapshots(session_folder, branch.name, [*swapped, *surplus], highest)
                    spare = [number for number in asked_for if number not in (*surplus, generations[-1])
                             and not keep.get(number)]
                    while self.max_bytes is not None and spare and (
                            removing.stored_bytes(session_folder) > self.max_bytes):
                        removing.delete_snapshots(session_folder, branch.name, [spare.pop(0)], highest)
                    if session_folder.generations(branch.name)[0] == generations:
                        removing.collect(session_folder, GRACE_S, after_a_save=True)
                        return swap_generations & {highest}
                # What other manifests name is looked up anew after one was deleted: see `Save._expect_undisturbed`.
                removing.collect(session_folder, GRACE_S, after_a_save=True)
                return swap_generations & {highest}
        except Busy:
            return swap_generations

    def gc(self, name: str | None = None, *, grace_s: float = GRACE_S) -> Collected:
        """Delete what no snapshot needs: pages and log parts that no manifest names, temporary files of saves that
        died, names of forks that have no snapshots. Write aliases of forks anew that are missing or damaged.

        The order makes a crash harmless at any point: files that no manifest names come first, then the aliases that
        lead nowhere, and empty folders last, because an alias to a folder that does not exist counts as damage. What a
        crash leaves, the next collection deletes.

        Args:
            name: of the one session to collect, None for all.
            grace_s: where the place has no locks (object stores), younger files stay.

        Raises:
            SnapshotNotFound: there is no session of that name. SnapshotCorrupt, SnapshotTooNew, StoreError: of a
                session whose manifests cannot be read nothing was collected; the others were collected.
        """
        removed, size, errors = [], 0, []
        folders = ([folder for folder in self.files.folders("") if FOLDER.fullmatch(folder)] if name is None
                   else [self._stored(name)[0].folder])
        unfinished = self.files.unfinished("")
        lost = {session_folder.folder: path for session_folder, path, _ in
                lost_snapshots(self.files, self._key, set()) if session_folder.folder in folders}
        for folder in folders:
            try:
                if self.files.folders(folder):
                    session_folder = SessionFolder(self.files, folder, self._key)
                    with removing.exclusive(session_folder):
                        if folder in lost:  # what the lost manifest names is unknown, so reading it raises
                            removing.files_named_by(session_folder, lost[folder])
                        collected = removing.collect(session_folder, grace_s)
                        removing.rewrite_aliases(session_folder)
                        if session_folder.locked:
                            removed += sweep_records(self.files, session_folder.branches(), unfinished)
                    removed += collected.removed
                    size += collected.bytes
            except SnapshotError as error:
                errors.append(error)
        for folder in folders:
            try:
                removed += removing.remove_dead_alias(self.files, folder, grace_s)
                removed += [f"{folder}/{file}" for file in self.files.sweep(folder, GRACE_S)]
            except SnapshotError as error:
                errors.append(error)
        for folder in folders:
            self.files.remove_empty_folder(folder)
        removed += self.files.sweep("", GRACE_S)
        if errors:
            raise errors[0]
        return Collected(removed=tuple(removed), bytes=size)


def open_files(url: str | Path) -> Files:
    """The folder or place that a user named: a path, `file://…`, or the URL of an object store that fsspec knows."""
    text = str(url)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return LocalFiles(text.removeprefix(scheme))
    return RemoteFiles(text) if "://" in text else LocalFiles(text)
