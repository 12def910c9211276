"""The folder of one session: its containers by kind and name, sealed if the store has a key.

    s-<hash of the session's name>/
        key                       wrapped data key, if encrypted
        lock                      held shared while saving, exclusive while collecting (local stores)
        pages/<name>              immutable
        log/<name>                immutable
        m/<hash of the branch>/<generation>.snap     manifests; creating the next one is the compare-and-swap
        m/<hash of the branch>/<generation>.gone     a deleted newest one, so that its number never comes again
    s-<hash of a fork's name>/branch                 the folder of the session that the fork is a branch of
    n-<hash of a name>                               that folder too, and the newest number (both: `snapshot.names`)

A page or log part is named by the digest of its header; in an encrypted store by a random number, and its place is
sealed in. A name leads to another session's folder only as long as that holds snapshots of it.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar, overload

from msgspec import Struct

from locret_stream.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotTooNew,
    StaleOwner,
    StoreError,
)
from locret_stream.snapshot import encryption
from locret_stream.snapshot.files import Exists, Files
from locret_stream.snapshot.format import PREAMBLE, Buffer, LogPart, LogRef, Manifest, Page, PageRef, Place, unpack
from locret_stream.snapshot.names import (
    alias,
    drop_record,
    folder_of,
    hashed,
    is_old,
    known,
    write_alias,
    write_record,
)

MANIFEST_LIMIT = 1 << 30  # bytes that a manifest may have
_log = logging.getLogger(__name__)
_GENERATION = re.compile(r"(\d{12})\.(snap|gone)")
T = TypeVar("T", bound=Struct)


def leads(files: Files, folder: str) -> str | None:
    """The session folder that holds a fork's snapshots; None if there are none: never saved, or deleted.

    Raises:
        SnapshotCorrupt: the alias is damaged, leads to a folder that is not there, or is missing itself.
    """
    name, target = folder[2:], alias(files, folder)
    away = target
    if target is None and (told := known(files, name)) is not None and told.folder != folder:
        away = told.folder
    found = away is not None and bool(SessionFolder(files, away, None).numbers(name)[0])
    if found and target is not None:
        return target
    if not found and (target is None or files.sizes(target) or files.folders(target)):
        return None
    if alias(files, folder) != target:  # written or dropped in this moment
        return leads(files, folder)
    if target is None:
        raise SnapshotCorrupt(f"{folder}/branch is not there, which leads to {away}, where snapshots of this name are; "
                              "expected nobody to remove it. `snapshots gc` writes it anew")
    raise SnapshotCorrupt(f"{folder}/branch leads to {target}, which is not there; expected the session that this fork "
                          "belongs to. `snapshots forget` frees the name")


class SessionFolder:
    """Reads and writes the containers of one session. Several threads may write at a time.

    A snapshot that was saved and is missing counts as there: whoever reads it is told (`SnapshotCorrupt`).

    Holds no state but what it knows of the key, until `refresh`, and `locked`.
    """

    def __init__(self, files: Files, folder: str, key: bytes | None):
        self.files, self.folder = files, folder
        self._user_key = key
        self._data_key: bytes | None = None
        self._wrapped = self._durable = b""  # the stored form of the data key, and the one last known to be durable
        self._plain = False  # known to be stored without encryption
        self.locked = False  # whether nobody else saves or collects here
        self.needs: dict[tuple[str, bytes], frozenset[str]] = {}  # what manifests name, by path and beginning
        self._looking = threading.RLock()

    def twin(self) -> SessionFolder:
        """Another one of the same session, for another owner."""
        return SessionFolder(self.files, self.folder, self._user_key)

    def same_as(self, other: SessionFolder) -> bool:
        """Whether both are the same folder of the same store."""
        return (self.files.url, self.folder) == (other.files.url, other.folder)

    @classmethod
    def locate(cls, files: Files, name: str, key: bytes | None) -> SessionFolder:
        """The folder that holds this name: a session's own, or the one that a fork is a branch of."""
        folder = folder_of(name)
        return cls(files, leads(files, folder) or folder, key)

    @property
    def exists(self) -> bool:
        """Whether there is any snapshot here, missing ones left out."""
        return any(self.there(branch)[0] for branch in self.files.folders(f"{self.folder}/m"))

    @property
    def encrypted(self) -> bool:
        """Whether the session has a key of its own."""
        return not self._plain and (self._data_key is not None or "key" in self.files.sizes(self.folder))

    @property
    def hides(self) -> bool:
        """Whether what is saved here is, or will be, encrypted."""
        return self.encrypted or (self._user_key is not None and not self.exists)

    # -- containers -------------------------------------------------------------------------------------------

    def read(self, path: str, kind: type[T], most: int, what: str) -> tuple[T, dict[str, memoryview], str]:
        """A verified container: body, sections, digest of its header.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        return unpack(self._container(path, most), kind, what)

    def _container(self, path: str, most: int) -> memoryview:
        key = self._key()
        data = self.files.read(f"{self.folder}/{path}", encryption.encrypted_size(most) if key else most)
        return encryption.decrypt(data, key, f"{self.folder}/{path}") if key else data

    def write(self, path: str, parts: Sequence[Buffer], *, exclusive: bool = False) -> None:
        """Durable on return.

        Raises:
            Exists, StoreError.
        """
        key = self.ready()
        whole = f"{self.folder}/{path}"
        self.files.write(whole, encryption.encrypt(parts, key, whole) if key else parts, exclusive=exclusive)

    def write_named(self, folder: str, parts: Sequence[Buffer]) -> str:
        """Write a page or log part under a name of its own, and return that.

        A file that is there already is written all the same: it may be damaged.
        """
        if self.ready() is not None:
            name = secrets.token_hex(16)
        else:
            name = PREAMBLE.unpack_from(parts[0])[-1].hex()
        self.write(f"{folder}/{name}", parts)
        return name

    @overload
    def read_named(self, folder: str, ref: PageRef, what: str) -> tuple[Page, dict[str, memoryview]]: ...

    @overload
    def read_named(self, folder: str, ref: LogRef, what: str) -> tuple[LogPart, dict[str, memoryview]]: ...

    def read_named(self, folder: str, ref: PageRef | LogRef, what: str) -> tuple[Page | LogPart, dict[str, memoryview]]:
        """The page or log part that a manifest names.

        Raises:
            SnapshotCorrupt: missing, damaged, or not the one of that name.
        """
        kind: type[Page | LogPart] = Page if isinstance(ref, PageRef) else LogPart
        try:
            body, sections, own = self.read(f"{folder}/{ref.name}", kind, ref.size, what)
        except SnapshotNotFound:
            raise SnapshotCorrupt(f"{what} is missing from the store") from None
        if not self.encrypted and own != ref.name:
            raise SnapshotCorrupt(f"{what} is another file than the one of that name")
        return body, sections

    def stored(self, folder: str, refs: Iterable[PageRef | LogRef]) -> set[str]:
        """Names of those pages or log parts that are there, in their full length."""
        sizes, encrypted = self.files.sizes(f"{self.folder}/{folder}"), self.encrypted
        return {ref.name for ref in refs
                if sizes.get(ref.name) == (encryption.encrypted_size(ref.size) if encrypted else ref.size)}

    # -- generations ------------------------------------------------------------------------------------------

    def generations(self, branch: str) -> tuple[list[int], int]:
        """Snapshots there are, ascending, and the highest number ever used (0: none)."""
        return self.numbers(hashed(branch))

    def numbers(self, branch: str) -> tuple[list[int], int]:
        """The same for the hash of a branch's name."""
        while True:
            told = known(self.files, branch)  # before the folder is read: a save may come in between
            found, highest = self.there(branch)
            if told is None or told.folder != self.folder or told.newest <= highest:
                return found, highest
            if known(self.files, branch) == told:  # else forgotten in this moment
                return [*found, told.newest], told.newest

    def there(self, branch: str) -> tuple[list[int], int]:
        """The same of those that are there."""
        found, highest = [], 0
        for name in self.files.sizes(f"{self.folder}/m/{branch}"):
            if match := _GENERATION.fullmatch(name):
                highest = max(highest, int(match[1]))
                if match[2] == "snap":
                    found.append(int(match[1]))
        return sorted(found), highest

    def gone(self, branch: str, generation: int) -> bool:
        """Whether that number was deleted, of the hash of a branch's name."""
        return f"{generation:012d}.gone" in self.files.sizes(f"{self.folder}/m/{branch}")

    def manifest_path(self, branch: str, generation: int) -> str:
        return f"m/{hashed(branch)}/{generation:012d}.snap"

    def read_manifest(self, branch: str, generation: int) -> tuple[Manifest, dict[str, memoryview], str]:
        """A verified manifest, and that it is the one of this branch and number.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        what = f"snapshot {generation} of {branch!r}"
        try:
            body, sections, own = self.read(self.manifest_path(branch, generation), Manifest, MANIFEST_LIMIT, what)
        except SnapshotNotFound:
            self._expect_not_lost(hashed(branch), generation, what)
            raise SnapshotNotFound(f"there is no {what} in {self.files.url}") from None
        self._expect_place(body, self.manifest_path(branch, generation), what)
        return body, sections, own

    def manifest_at(self, path: str) -> tuple[Manifest, int]:
        """A verified manifest by its path, and its bytes.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        what = f"{self.folder}/{path}"
        try:
            data = self._container(path, MANIFEST_LIMIT)
        except SnapshotNotFound:
            _, branch, file = path.split("/")
            self._expect_not_lost(branch, int(file.removesuffix(".snap")), what)
            raise
        body = unpack(data, Manifest, what)[0]
        self._expect_place(body, path, what)
        return body, len(data)

    def _expect_not_lost(self, branch: str, generation: int, what: str) -> None:
        if generation in self.numbers(branch)[0]:
            raise SnapshotCorrupt(f"{what} was saved and is not there any more, though nobody deleted it: a file was "
                                  f"lost, or an older copy put back. `snapshots delete --generation {generation}` goes "
                                  "on without it")

    def remember(self, branch: str, generation: int, watched: bool) -> None:
        """After a save: the record of the branch's name says so. If it cannot, the snapshot is durable all the same.

        Args:
            watched: whether nobody can have forgotten the session meanwhile.
        """
        place = Place(name=hashed(branch), folder=self.folder, newest=generation, title="" if self.hides else branch)
        try:
            write_record(self.files, place)
            if not watched and generation not in self.there(place.name)[0]:
                drop_record(self.files, place.name)
        except SnapshotError as error:
            _log.warning("%r was saved; should this snapshot get lost, that would go unnoticed: %s", branch, error)

    def _expect_place(self, body: Manifest, path: str, what: str) -> None:
        """A sound manifest that somebody moved to another branch, number or session is none of this place."""
        if path != self.manifest_path(body.branch, body.generation) or "s-" + hashed(body.session) != self.folder:
            raise SnapshotCorrupt(f"{what} says that it is number {body.generation} of {body.branch!r}, session "
                                  f"{body.session!r}: it was moved")

    def session_name(self) -> str:
        """The name of the session that this folder is of, as its manifests say.

        Raises:
            SnapshotCorrupt: none of them can be read.
        """
        for path, _ in self.manifests():
            with suppress(SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew):
                return self.manifest_at(path)[0].session
        raise SnapshotCorrupt(f"no manifest in {self.folder} can be read")

    def manifests(self) -> list[tuple[str, int]]:
        """(path inside the session, generation) of every manifest, branch by branch, ascending."""
        return [(f"m/{branch}/{number:012d}.snap", number) for branch in self.files.folders(f"{self.folder}/m")
                for number in self.numbers(branch)[0]]

    # -- names ------------------------------------------------------------------------------------------------

    def taken(self, branch: str) -> bool:
        """Whether the store has snapshots of that name, or it is this session's own."""
        folder = folder_of(branch)
        return folder == self.folder or bool(self.numbers(folder[2:])[0]) or leads(self.files, folder) is not None or (
            bool(SessionFolder(self.files, folder, None).numbers(folder[2:])[0]))

    def claim(self, branch: str) -> None:
        """Before a save: the branch's name leads here, durably, and to nothing else.

        A session and a fork of one name may begin in the same moment, in folders that share no lock. So a fork points
        its name here first and looks for the session then; the session saves first and looks for the fork then
        (`expect_claim`). At least one of them sees the other.

        Raises:
            StaleOwner: the name is somebody else's by now. StoreError.
        """
        folder = folder_of(branch)
        if folder == self.folder:
            if leads(self.files, folder) is not None:
                raise self._lost(branch)
            return
        path, made = f"{folder}/branch", False
        try:
            there = alias(self.files, folder)
            if there is None:
                write_alias(self.files, folder, self.folder, exclusive=True)
                there, made = self.folder, True
            elif there == self.folder and is_old(self.files, folder):
                write_alias(self.files, folder, there)
            else:
                self.files.settle(folder)  # whoever wrote it may have died before it was durable
        except Exists:  # in this moment
            there = alias(self.files, folder)
        except SnapshotCorrupt:  # damaged: this owner knows where its name leads
            write_alias(self.files, folder, self.folder)
            there = self.folder
        if there != self.folder:
            raise self._lost(branch)
        if SessionFolder(self.files, folder, None).numbers(folder[2:])[0]:
            if made:
                self.files.delete(path)
            raise self._lost(branch)

    def expect_claim(self, branch: str) -> None:
        """After a save: the name still is this branch's.

        Raises:
            StaleOwner.
        """
        folder = folder_of(branch)
        if alias(self.files, folder) != (None if folder == self.folder else self.folder):
            raise self._lost(branch)

    @staticmethod
    def _lost(branch: str) -> StaleOwner:
        return StaleOwner(f"{branch!r} is meanwhile the name of another session or fork, or of one that somebody "
                          "begins. Nothing was acknowledged; expected another name, or to open it again")

    # -- the key ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look again whether and how the session is encrypted: it may have been forgotten, and begun anew."""
        with self._looking:
            self._data_key, self._plain = None, False

    def ready(self) -> bytes | None:
        """Before something is stored: the data key, durable; None in a store without one.

        Raises:
            StoreError: as `_key`.
        """
        return self._key(make=True)

    def readable(self) -> None:
        """Raises:
            StoreError: the session is encrypted with another key than the store's, or the store has none.
        """
        self._key()

    def expect_one_way(self) -> None:
        """Raises:
            StoreError: the store was given a key, and what is here was stored without one.
        """
        if self._user_key is not None and self.exists and not self.encrypted:
            raise StoreError("this session was stored without encryption and the store was given a key; expected no "
                             "key, or a new session")

    @property
    def key_stands(self) -> bool:
        """Whether the session still is encrypted as what was written: with this key, or not at all."""
        if "key" not in self.files.sizes(self.folder):
            return self._data_key is None
        return bytes(self.files.read(f"{self.folder}/key", 1024)) == self._wrapped

    def _key(self, make: bool = False) -> bytes | None:
        """The session's data key; None in a store without one.

        Raises:
            StoreError: the session is encrypted and the store was given no key, or the other way round.
        """
        with self._looking:
            if self._data_key is None:
                self._find_key(make)
            if make and self._data_key is not None and self._wrapped != self._durable:
                self.files.settle(self.folder)  # whoever wrote it may have died before it was durable
                self._durable = self._wrapped
            return self._data_key

    def _find_key(self, make: bool) -> None:
        if self.encrypted:
            if self._user_key is None:
                raise encryption.MissingKey(f"{self.folder} is encrypted; expected the store's key (`key=...`, or "
                                            "LOCRET_KEY)")
            wrapped = bytes(self.files.read(f"{self.folder}/key", 1024))
            self._data_key, self._wrapped = encryption.unwrap(wrapped, self._user_key, self.folder), wrapped
        elif self._user_key is not None and make:
            self.expect_one_way()
            fresh = encryption.new_data_key()
            wrapped = encryption.wrap(fresh, self._user_key, self.folder)
            try:
                self.files.write(f"{self.folder}/key", [wrapped], exclusive=True)
            except Exists:  # another process began the same session in this moment
                self._find_key(make)
            else:
                self._data_key, self._wrapped, self._durable = fresh, wrapped, wrapped
        else:
            self._plain = make or self.exists
