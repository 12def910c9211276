"""The store: many sessions at one place. Opens branches; lists, verifies, deletes, forgets, collects."""

from __future__ import annotations

import builtins
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotTooNew,
    StoreError,
)
from locret_stream.snapshot.branch import Branch, Snapshot, describe, log_of_owners
from locret_stream.snapshot.encryption import MissingKey, user_key
from locret_stream.snapshot.files import Busy, Files
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.names import (
    FOLDER,
    alias,
    drop_record,
    folder_of,
    known,
    records,
    sweep_records,
    write_alias,
)
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.session_folder import SessionFolder, leads
from locret_stream.snapshot.verifying import Verified, lost, name_of, nowhere, verify

HEAD_BYTES = 64  # of a manifest, no two of which begin alike: the digest of its header, or the salt that seals it
GRACE_S = 3600.0  # where a place has no lock, what is younger is never collected: a save may be about to name it


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection removed: paths inside the store, and their bytes."""

    removed: tuple[str, ...]
    bytes: int


class Store:
    """Sessions at one place. Methods block; each session is used by one thread at a time.

    Args:
        url: a folder, or a URL that fsspec knows (`s3://…`, `memory://`).
        key: 32 bytes (or 64 hexadecimal digits) under which new sessions are encrypted.
        keep_last: snapshots of a branch that stay; older ones are deleted after a save. At least 1.
        max_bytes: of one session; oldest snapshots are deleted until it fits. The newest of a branch always stays.
        log: whether new sessions keep a log of their token ids.

    Raises:
        ConfigError: a value that cannot work. StoreError: no such place.
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

    # -- opening ----------------------------------------------------------------------------------------------

    def branch(self, name: str) -> Branch:
        """The branch of that name for a new owner: what is stored, or the beginning of a new session."""
        self._tidy(folder_of(name))
        session_folder = SessionFolder.locate(self.files, name, self._key)
        branch = Branch(session_folder, name, name, log=self._log)
        found, branch.head = session_folder.generations(name)
        if found and session_folder.folder != folder_of(name):
            branch.session = session_folder.session_name()
        return branch

    def has(self, name: str) -> bool:
        """Whether there is a snapshot of that name."""
        return bool(SessionFolder.locate(self.files, name, self._key).generations(name)[0])

    def probe(self) -> None:
        """Write a small file and remove it: to know before long work whether it can be saved.

        Raises:
            StoreError: nothing can be written.
        """
        path = f"probe-{secrets.token_hex(8)}"
        self.files.write(path, [b""])
        self.files.delete(path)

    # -- looking ----------------------------------------------------------------------------------------------

    def list(self) -> builtins.list[Snapshot]:
        """The newest snapshot of every session and fork, by name; one that cannot be read has a `problem`.

        Raises:
            StoreError: the place cannot be read.
        """
        found, seen, links, told = list[Snapshot](), set[str](), list[SessionFolder](), set[str]()
        for session_folder in self._vaults():
            try:
                manifests = session_folder.manifests()
            except SnapshotCorrupt:
                links.append(session_folder)
                continue
            branches: dict[str, Snapshot] = {}
            for path, _ in reversed(manifests):
                if (branch := path.rpartition("/")[0]) not in branches:
                    with suppress(SnapshotNotFound):  # deleted in this moment: then the one before
                        branches[branch] = self._describe(session_folder, path)
            found += branches.values()
            seen |= {branch.rpartition("/")[2] for branch in branches}
        for session_folder, path, _ in lost(self.files, self._key, seen):
            with suppress(SnapshotNotFound):
                found.append(self._describe(session_folder, path))
                told.add(session_folder.folder)
        for session_folder in links:
            if session_folder.folder not in told:
                with suppress(SnapshotNotFound):
                    found.append(self._describe(session_folder, nowhere(session_folder)))
        return sorted(found, key=lambda snapshot: snapshot.name)

    def info(self, name: str) -> builtins.list[Snapshot]:
        """All snapshots of a session or fork, oldest first; one that is damaged or locked has a `problem`.

        Raises:
            SnapshotNotFound. StoreError: one of them cannot be read just now, which tells nothing of it.
        """
        session_folder, found = self._found(name)
        out = []
        for number in found:
            with suppress(SnapshotNotFound):  # deleted in this moment
                out.append(self._describe(session_folder, session_folder.manifest_path(name, number), of_all=False))
        return out

    def verify(self, name: str | None = None) -> builtins.list[Verified]:
        """Read every byte that the snapshots of a name (None: of all) need, and whether none got lost and every name
        leads where it should. What is wrong with a name alone is told of its newest snapshot, or of number 0."""
        session_folders = list(self._vaults()) if name is None else [self._found(name)[0]]
        return verify(self.files, self._key, session_folders, name)

    def _vaults(self) -> Iterator[SessionFolder]:
        """Sessions with snapshots, and those of which that cannot be told, for a folder of theirs is a link."""
        for folder in self.files.folders(""):
            if FOLDER.fullmatch(folder):
                session_folder, there = SessionFolder(self.files, folder, self._key), True
                with suppress(SnapshotCorrupt):
                    there = session_folder.exists
                if there:
                    yield session_folder

    def _found(self, name: str) -> tuple[SessionFolder, builtins.list[int]]:
        session_folder = SessionFolder.locate(self.files, name, self._key)
        found, _ = session_folder.generations(name)
        if not found:
            raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
        return session_folder, found

    def _describe(self, session_folder: SessionFolder, path: str, *, of_all: bool = True) -> Snapshot:
        """Raises:
            SnapshotNotFound: it was deleted meanwhile. StoreError: it cannot be read; among those `of_all` names that
                is a `problem` of its own.
        """
        try:
            manifest, size = session_folder.manifest_at(path)
        except SnapshotNotFound:
            raise
        except SnapshotError as error:
            if isinstance(error, StoreError) and not isinstance(error, MissingKey) and not of_all:
                raise
            number, encrypted = int(path.rpartition("/")[2].removesuffix(".snap")), False
            with suppress(SnapshotCorrupt):  # a folder that is a link
                encrypted = session_folder.encrypted
            return Snapshot(name=name_of(session_folder, path), session="", generation=number, parent="", created=0.0,
                            tokens=0, units=0, bytes=0, library="", encrypted=encrypted, log=False,
                            problem=str(error), locked=isinstance(error, MissingKey))
        return describe(manifest, size, session_folder.encrypted)

    # -- removing ---------------------------------------------------------------------------------------------

    def delete(self, name: str, generation: int | None = None) -> builtins.list[int]:
        """Delete one snapshot, or with None all of a name; returns their numbers. Forks keep theirs.

        Raises:
            SnapshotNotFound, StoreError.
        """
        session_folder, found = self._found(name)
        with self._alone(session_folder):
            session_folder.readable()
            found, highest = session_folder.generations(name)
            gone = found if generation is None else [number for number in found if number == generation]
            if not gone:
                raise SnapshotNotFound(f"{name!r} has no snapshot {generation}; expected one of {found}")
            self._remove(session_folder, name, gone, highest)
            if len(gone) == len(found) and session_folder.folder != folder_of(name):
                self._free(folder_of(name), session_folder.folder)
            with suppress(SnapshotCorrupt, SnapshotTooNew):  # another one that cannot be read: `gc` tells which
                self._collect(session_folder, GRACE_S)
        return gone

    def _remove(self, session_folder: SessionFolder, name: str, numbers: builtins.list[int], highest: int) -> None:
        for number in numbers:
            path = f"{session_folder.folder}/{session_folder.manifest_path(name, number)}"
            if number == highest:  # else a stale owner could take the number for its own
                self.files.write(path.removesuffix(".snap") + ".gone", [])
            self.files.delete(path)

    def forget(self, name: str) -> builtins.list[str]:
        """Remove a session with all its forks: manifests first, so that what is left of a forgetting that was cut short
        is sound, then the key, then everything else.

        Returns:
            Paths of everything that was removed.

        Raises:
            SnapshotNotFound: nothing of that name. ConfigError: it is a fork: forget its session, or delete it.
            StoreError: something could not be removed; whatever could be, was.
        """
        session_folder = SessionFolder(self.files, folder_of(name), self._key)
        away, own = None, session_folder.folder[2:]
        try:
            away = leads(self.files, session_folder.folder)
        except (SnapshotCorrupt, SnapshotTooNew):  # a damaged alias is no reason to keep what is here
            told = known(self.files, own)
            if told is not None and told.folder != session_folder.folder and SessionFolder(
                    self.files, told.folder, None).there(own)[0]:
                away = told.folder
        if away is not None:
            raise ConfigError(f"{name!r} is a fork; expected the name of its session (its forks go with it), or "
                              "`delete` for this one alone")
        empty = not self.files.sizes(session_folder.folder) and not self.files.folders(session_folder.folder)
        if empty and own not in records(self.files):
            raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
        with self._alone(session_folder):
            manifests = [path for path, _ in session_folder.manifests()]
            keys = ["key"] if "key" in self.files.sizes(session_folder.folder) else []
            rest = [f"{folder}/{file}" for folder in
                    ("pages", "log", *(f"m/{branch}" for branch in self.files.folders(f"{session_folder.folder}/m")))
                    for file in self.files.sizes(f"{session_folder.folder}/{folder}")
                    if f"{folder}/{file}" not in manifests]
            noted = self._drop_records(session_folder)  # first: what is deleted now did not get lost
            failed = []
            for path in (*manifests, *keys):
                try:
                    self.files.delete(f"{session_folder.folder}/{path}")
                except StoreError as error:
                    failed.append(error)
            if failed:
                raise failed[0]
            aliases = [folder for folder in self.files.folders("")
                       if FOLDER.fullmatch(folder) and self._points(folder) == session_folder.folder]
            for folder in aliases:
                self._drop_alias(folder)
            self.files.remove_folder(session_folder.folder)
            if not session_folder.locked:  # a save that ended in between may have written it again
                self._drop_records(session_folder)
        return [*(f"{session_folder.folder}/{path}" for path in (*manifests, *keys, *rest)),
                *(f"{folder}/branch" for folder in aliases), *noted]

    def _drop_records(self, session_folder: SessionFolder) -> builtins.list[str]:
        """Remove the records of a session and of its forks; returns their paths."""
        own, out = session_folder.folder[2:], []
        inside = {own, *self.files.folders(f"{session_folder.folder}/m")}
        for name in records(self.files):
            told = known(self.files, name)
            if name == own or (name in inside if told is None else told.folder == session_folder.folder):
                drop_record(self.files, name)
                out.append(f"n-{name}")
        sweep_records(self.files, {*inside, *(path[2:] for path in out)})
        return out

    def _points(self, folder: str) -> str | None:
        """Where an alias points; None if it is none, or one that cannot be read, which points nowhere."""
        with suppress(SnapshotCorrupt, SnapshotTooNew):
            return alias(self.files, folder)
        return None

    def _free(self, folder: str, target: str) -> None:
        """A fork's name leads nowhere any more, and nothing is known of it."""
        self._drop_alias(folder)
        if (told := known(self.files, folder[2:])) is not None and told.folder == target:
            drop_record(self.files, folder[2:])

    def _drop_alias(self, folder: str) -> None:
        self.files.delete(f"{folder}/branch")
        self.files.drop_folder(folder)

    def _tidy(self, folder: str, grace_s: float = GRACE_S) -> builtins.list[str]:
        """Remove a name that leads nowhere: of a fork that was never saved whole, or deleted, or forgotten.

        Raises:
            SnapshotCorrupt: it should lead somewhere.
        """
        target, path = self._points(folder), f"{folder}/branch"
        if target is None or leads(self.files, folder) is not None:
            return []
        if self.files.sizes(target) or self.files.folders(target):
            session_folder = SessionFolder(self.files, target, None)
            try:
                with self._alone(session_folder, wait=False):
                    if session_folder.numbers(folder[2:])[0] or (
                            not session_folder.locked and self.files.age_s(path) < grace_s):
                        return []
                    self._free(folder, target)  # still alone: the fork may be about to be saved again
            except Busy:  # somebody saves there, perhaps just this fork
                return []
        else:
            self._free(folder, target)
        return [path]

    def prune(self, branch: Branch, swap_generations: frozenset[int] = frozenset(),
              keep: Mapping[int, bool] | None = None) -> frozenset[int]:
        """After a save: delete what `keep_last` and `max_bytes` leave over, and collect.

        Args:
            keep: numbers of those that stay beside the newest `keep_last`; True: also where `max_bytes` is exceeded.
            swap_generations: numbers of snapshots that swap-outs wrote. They go, but for the newest, so that swapping
                often never costs a snapshot that was asked for.

        Returns those of `swap_generations` that are still stored. While others save in the session nothing is deleted:
        it does not wait for them; the next save deletes.

        Raises:
            SnapshotCorrupt, SnapshotTooNew: a snapshot whose needs cannot be read; nothing was collected.
        """
        session_folder, keep = branch.session_folder, keep or {}
        try:
            with self._alone(session_folder, wait=False):
                found, highest = session_folder.generations(branch.name)
                parted = [number for number in found if number in swap_generations and number != highest]
                found = [number for number in found if number not in parted]
                left = [number for number in found[:-self.keep_last] if number not in keep]
                self._remove(session_folder, branch.name, [*parted, *left], highest)
                spare = [number for number in found[:-1] if number not in left and not keep.get(number)]
                while self.max_bytes is not None and spare and self._bytes(session_folder) > self.max_bytes:
                    self._remove(session_folder, branch.name, [spare.pop(0)], highest)
                self._collect(session_folder, GRACE_S, after_a_save=True)
                return swap_generations & {highest}
        except Busy:
            return swap_generations

    def gc(self, name: str | None = None, *, grace_s: float = GRACE_S) -> Collected:
        """Remove what no snapshot needs: pages and log parts that none names, temporary files of saves that died, names
        of forks that are gone.

        Args:
            grace_s: where the place has no lock (object stores), younger files stay.

        Raises:
            SnapshotCorrupt, SnapshotTooNew: a snapshot whose needs cannot be read; its session was left alone, the
                others were collected.
        """
        removed, size, failed = [], 0, []
        folders = ([folder for folder in self.files.folders("") if FOLDER.fullmatch(folder)] if name is None
                   else [self._found(name)[0].folder])
        strays = self.files.unfinished("")
        gone = {session_folder.folder: path for session_folder, path, _ in lost(self.files, self._key, set())
                if session_folder.folder in folders}
        for folder in folders:
            try:
                if self.files.folders(folder):
                    session_folder = SessionFolder(self.files, folder, self._key)
                    with self._alone(session_folder):
                        if folder in gone:
                            self._needs(session_folder, gone[folder])
                        done = self._collect(session_folder, grace_s)
                        self._name_anew(session_folder)
                        if session_folder.locked:
                            removed += sweep_records(self.files, self.files.folders(f"{folder}/m"), strays)
                    removed += done.removed
                    size += done.bytes
            except SnapshotError as error:
                failed.append(error)
        for folder in folders:  # names go before the folders that they lead to
            try:
                removed += self._tidy(folder, grace_s)
                removed += [f"{folder}/{file}" for file in self.files.sweep(folder, GRACE_S)]
            except SnapshotError as error:
                failed.append(error)
        for folder in folders:
            self.files.drop_folder(folder)
        removed += self.files.sweep("", GRACE_S)
        if failed:
            raise failed[0]
        return Collected(removed=tuple(removed), bytes=size)

    def _name_anew(self, session_folder: SessionFolder) -> None:
        """Write the aliases of forks with snapshots here that are missing or damaged. Raises SnapshotTooNew."""
        for branch in self.files.folders(f"{session_folder.folder}/m"):
            folder, there = f"s-{branch}", None
            with suppress(SnapshotCorrupt):
                there = alias(self.files, folder)
            if folder != session_folder.folder and there is None and not SessionFolder(
                    self.files, folder, None).exists and self._sound(session_folder, branch):
                write_alias(self.files, folder, session_folder.folder)

    def _sound(self, session_folder: SessionFolder, branch: str) -> bool:
        """Whether one of a branch's manifests there can be read."""
        for path, _ in session_folder.manifests():
            if path.split("/")[1] == branch:
                with suppress(SnapshotError):
                    session_folder.manifest_at(path)
                    return True
        return False

    @contextlib.contextmanager
    def _alone(self, session_folder: SessionFolder, wait: bool = True) -> Iterator[None]:
        """No save runs in the session meanwhile, where the place can tell.

        Raises:
            Busy: not with `wait`, and one runs.
        """
        with self.files.lock(session_folder.folder, shared=False, wait=wait) as locked:
            session_folder.locked = locked
            try:
                yield
            finally:
                session_folder.locked = False

    def _named(self, session_folder: SessionFolder) -> set[str]:
        """Paths inside the session that its manifests name. Each is read once, and then known by its beginning: where
        no lock holds collectors off, a save that fails gives its number back, and another manifest takes its path."""
        needs = {}
        for path, _ in session_folder.manifests():
            key = path, b""
            try:
                with suppress(SnapshotNotFound):  # who reads it tells whether it was lost
                    key = path, self.files.head(f"{session_folder.folder}/{path}", HEAD_BYTES)
                needs[key] = session_folder.needs.get(key) or self._needs(session_folder, path)
            except SnapshotNotFound:  # deleted in this moment
                continue
            except SnapshotCorrupt as error:
                raise SnapshotCorrupt(f"{error}. What it needs is not known, so nothing was removed; delete it first"
                                      ) from error
        session_folder.needs = needs
        return set().union(*needs.values())

    def _needs(self, session_folder: SessionFolder, path: str) -> frozenset[str]:
        manifest = session_folder.manifest_at(path)[0]
        return frozenset([*(f"pages/{ref.name}" for ref in manifest.pages),
                          *(f"log/{ref.name}" for ref in manifest.log or ())])

    def _bytes(self, session_folder: SessionFolder) -> int:
        """What the session's snapshots take, as it is stored."""
        named = self._named(session_folder) | {path for path, _ in session_folder.manifests()}
        return sum(size for folder in ("pages", "log", *(f"m/{branch}" for branch in
                                                         self.files.folders(f"{session_folder.folder}/m")))
                   for path, size in self._sizes(session_folder, folder).items() if path in named)

    def _sizes(self, session_folder: SessionFolder, folder: str) -> dict[str, int]:
        sizes = self.files.sizes(f"{session_folder.folder}/{folder}")
        return {f"{folder}/{name}": size for name, size in sizes.items()}

    def _collect(self, session_folder: SessionFolder, grace_s: float, *, after_a_save: bool = False) -> Collected:
        named = self._named(session_folder) | log_of_owners(session_folder, all_of_them=after_a_save)
        removed, size = [], 0
        for path, count in (self._sizes(session_folder, "pages") | self._sizes(session_folder, "log")).items():
            whole = f"{session_folder.folder}/{path}"
            if path not in named and (session_folder.locked or self.files.age_s(whole) >= grace_s):
                self.files.delete(whole)
                removed.append(whole)
                size += count
        branches = self.files.folders(f"{session_folder.folder}/m")
        for branch in branches:
            highest = session_folder.numbers(branch)[1]
            for path in self._sizes(session_folder, f"m/{branch}"):
                if path.endswith(".gone") and path != f"m/{branch}/{highest:012d}.gone":  # a later number stands for it
                    self.files.delete(f"{session_folder.folder}/{path}")
                    removed.append(f"{session_folder.folder}/{path}")
        for folder in (session_folder.folder, *(f"{session_folder.folder}/{inner}" for inner in
                                       ("pages", "log", *(f"m/{branch}" for branch in branches)))):
            swept = self.files.sweep(folder, 0.0 if session_folder.locked else grace_s)
            removed += [f"{folder}/{name}" for name in swept]
        return Collected(removed=tuple(removed), bytes=size)


def open_files(url: str | Path) -> Files:
    """The folder or place that a user named: a path, `file://…`, or the URL of an object store that fsspec knows."""
    text = str(url)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return LocalFiles(text.removeprefix(scheme))
    return RemoteFiles(text) if "://" in text else LocalFiles(text)
