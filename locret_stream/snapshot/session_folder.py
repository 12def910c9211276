"""The folder of one session: its containers by kind and name, encrypted if the store has a key.

    s-<hash of the session's name>/
        key                       wrapped data key, if encrypted
        lock                      locked shared while saving, exclusively while collecting (local stores)
        pages/<name>              immutable
        log/<name>                immutable
        m/<hash of the branch>/<generation>.snap     manifests; creating the next one is the compare-and-swap
        m/<hash of the branch>/<generation>.gone     a deleted newest one, so that its number is never used again
    s-<hash of a fork's name>/branch                 the folder of the session that the fork is a branch of
    n-<hash of a name>                               that folder too, and the newest number (both: `snapshot.names`)

A page or log part is named by the digest of its header; in an encrypted store by a random number, and encryption binds
it to its path. A name leads to another session's folder only as long as that folder holds snapshots of it.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar, overload

from msgspec import Struct

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound, SnapshotTooNew
from locret_stream.snapshot import encryption
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import PREAMBLE, Buffer, LogPart, LogRef, Manifest, Page, PageRef, Place, unpack
from locret_stream.snapshot.names import delete_record, hashed, readable_record, write_record

MANIFEST_LIMIT = 1 << 30  # bytes that a manifest may have
_log = logging.getLogger(__name__)
_MANIFEST_FILE = re.compile(r"(\d{12})\.(snap|gone)")
T = TypeVar("T", bound=Struct)


class SessionFolder:
    """Reads and writes the containers of one session. Several threads may write at a time.

    A snapshot that was saved and is missing counts as stored: whoever reads it gets `SnapshotCorrupt`.

    Attributes:
        key: whether and how the session is encrypted.
        locked: whether the caller's lock excludes all other saves and collections in this folder.
        needs: what manifests name, by their path and their version or first bytes: a cache of `snapshot.removing`.
    """

    def __init__(self, files: Files, folder: str, key: bytes | None):
        self.files, self.folder = files, folder
        self._place = files  # what `files` is outside of `looking`
        self.key = encryption.SessionKey(files, folder, key, lambda: self.has_snapshots)
        self.locked = False
        self.needs: dict[tuple[str, bytes], frozenset[str]] = {}

    @contextmanager
    def looking(self, files: Files | None = None) -> Iterator[Files]:
        """A block in which everything that is asked of the folder is of one moment, so that an object store is asked
        once. What others write meanwhile does not show. A block in another one is of the same moment.

        Args:
            files: to look at in place of a new listing, as another block gave them, or `Files.looking`.
        """
        before = self.files
        if files is None:
            files = before if before is not self._place else before.looking(self.folder)
        self.files = self.key.files = files
        try:
            yield files
        finally:
            self.files = self.key.files = before

    @property
    def has_snapshots(self) -> bool:
        """Whether the folder holds any snapshot; missing ones do not count."""
        return any(self.present_generations(branch)[0] for branch in self.branches())

    def branches(self) -> list[str]:
        """Hashes of the names of the branches that have a folder for manifests."""
        return self.files.folders(f"{self.folder}/m")

    def sizes(self, inside: str) -> dict[str, int]:
        """Paths inside the session and sizes of the files in one of its folders."""
        return {f"{inside}/{name}": size for name, size in self.files.sizes(f"{self.folder}/{inside}").items()}

    # -- containers -------------------------------------------------------------------------------------------

    def read(self, path: str, kind: type[T], most: int, what: str) -> tuple[T, dict[str, memoryview], str]:
        """A verified container of at most `most` bytes: its body, its sections, the digest of its header.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        return unpack(self._container(path, most), kind, what)

    def _container(self, path: str, most: int) -> memoryview:
        key = self.key.for_reading()
        data = self.files.read(f"{self.folder}/{path}", encryption.encrypted_size(most) if key else most)
        return encryption.decrypt(data, key, f"{self.folder}/{path}") if key else data

    def write(self, path: str, parts: Sequence[Buffer], *, exclusive: bool = False) -> None:
        """Write a container, encrypted if the session is, as `Files.write` does."""
        key = self.key.for_writing()
        whole = f"{self.folder}/{path}"
        self.files.write(whole, encryption.encrypt(parts, key, whole) if key else parts, exclusive=exclusive)

    def write_named(self, folder: str, parts: Sequence[Buffer]) -> str:
        """Write a page or log part under a name of its own, and return that name.

        A file of the same content is replaced, because it may be damaged.
        """
        encrypted = self.key.for_writing() is not None
        name = secrets.token_hex(16) if encrypted else PREAMBLE.unpack_from(parts[0])[-1].hex()
        self.write(f"{folder}/{name}", parts)
        return name

    @overload
    def read_named(self, folder: str, ref: PageRef, what: str) -> tuple[Page, dict[str, memoryview]]: ...

    @overload
    def read_named(self, folder: str, ref: LogRef, what: str) -> tuple[LogPart, dict[str, memoryview]]: ...

    def read_named(self, folder: str, ref: PageRef | LogRef, what: str) -> tuple[Page | LogPart, dict[str, memoryview]]:
        """The body and the sections of the page or log part that a manifest names.

        Raises:
            SnapshotCorrupt: it is missing, damaged, or not the one of that name. SnapshotTooNew, StoreError.
        """
        kind: type[Page | LogPart] = Page if isinstance(ref, PageRef) else LogPart
        try:
            body, sections, header_digest = self.read(f"{folder}/{ref.name}", kind, ref.size, what)
        except SnapshotNotFound:
            raise SnapshotCorrupt(f"{what} is missing from the store") from None
        if not self.key.encrypted and header_digest != ref.name:
            raise SnapshotCorrupt(f"{what} is another file than the one of that name")
        return body, sections

    def stored(self, folder: str, refs: Iterable[PageRef | LogRef]) -> set[str]:
        """Names of those pages or log parts that are stored in their full length."""
        sizes, encrypted = self.files.sizes(f"{self.folder}/{folder}"), self.key.encrypted
        return {ref.name for ref in refs
                if sizes.get(ref.name) == (encryption.encrypted_size(ref.size) if encrypted else ref.size)}

    # -- generations ------------------------------------------------------------------------------------------

    def generations(self, branch: str) -> tuple[list[int], int]:
        """The generations of a branch that are stored, ascending, and the highest one ever used (0: none)."""
        return self.generations_of(hashed(branch))

    def generations_of(self, branch_hash: str) -> tuple[list[int], int]:
        """As `generations`, for the hash of a branch's name."""
        while True:
            record = readable_record(self.files, branch_hash)  # before the folder: a save may happen in between
            present, highest = self.present_generations(branch_hash)
            if record is None or record.folder != self.folder or record.newest <= highest:
                return present, highest
            if self.files is not self._place:  # the listing is older than the record
                with self.looking(self._place):
                    return self.generations_of(branch_hash)
            if readable_record(self.files, branch_hash) == record:  # else the session was forgotten at this moment
                return [*present, record.newest], record.newest

    def present_generations(self, branch_hash: str) -> tuple[list[int], int]:
        """As `generations_of`, by the files alone: a snapshot that is missing does not count."""
        present, highest = [], 0
        for name in self.files.sizes(f"{self.folder}/m/{branch_hash}"):
            if match := _MANIFEST_FILE.fullmatch(name):
                highest = max(highest, int(match[1]))
                if match[2] == "snap":
                    present.append(int(match[1]))
        return sorted(present), highest

    def was_deleted(self, branch_hash: str, generation: int) -> bool:
        """Whether the newest generation of a branch was deleted on purpose."""
        return f"{generation:012d}.gone" in self.files.sizes(f"{self.folder}/m/{branch_hash}")

    def manifest_path(self, branch: str, generation: int) -> str:
        """The path of a manifest inside the session."""
        return f"m/{hashed(branch)}/{generation:012d}.snap"

    def version(self, branch: str, generation: int) -> str:
        """What the place says of a manifest that is another text after every write, "" if nothing."""
        return self.files.version(f"{self.folder}/{self.manifest_path(branch, generation)}")

    def manifests(self) -> list[tuple[str, int]]:
        """(path inside the session, generation) of every manifest, branch by branch, ascending."""
        return [(f"m/{branch}/{generation:012d}.snap", generation) for branch in self.branches()
                for generation in self.generations_of(branch)[0]]

    def read_manifest(self, branch: str, generation: int) -> tuple[Manifest, dict[str, memoryview], str]:
        """The verified manifest of this branch and generation. Returns and raises as `read`."""
        what = f"snapshot {generation} of {branch!r}"
        try:
            body, sections, header_digest = self.read(self.manifest_path(branch, generation), Manifest, MANIFEST_LIMIT,
                                                      what)
        except SnapshotNotFound:
            self._expect_not_lost(hashed(branch), generation, what)
            raise SnapshotNotFound(f"there is no {what} in {self.files.url}") from None
        self._expect_place(body, self.manifest_path(branch, generation), what)
        return body, sections, header_digest

    def manifest_at(self, path: str) -> tuple[Manifest, int]:
        """The verified manifest at a path, and its size in bytes. Raises as `read`."""
        what = f"{self.folder}/{path}"
        try:
            data = self._container(path, MANIFEST_LIMIT)
        except SnapshotNotFound:
            _, branch_hash, file = path.split("/")
            self._expect_not_lost(branch_hash, int(file.removesuffix(".snap")), what)
            raise
        body = unpack(data, Manifest, what)[0]
        self._expect_place(body, path, what)
        return body, len(data)

    def _expect_not_lost(self, branch_hash: str, generation: int, what: str) -> None:
        if generation in self.generations_of(branch_hash)[0]:
            raise SnapshotCorrupt(f"{what} was saved and does not exist any more, though nobody deleted it: a file was "
                                  f"lost, or an older copy put back. `snapshots delete --generation {generation}` goes "
                                  "on without it")

    def _expect_place(self, body: Manifest, path: str, what: str) -> None:
        """Refuse a sound manifest that somebody moved here from another branch, number or session."""
        if path != self.manifest_path(body.branch, body.generation) or "s-" + hashed(body.session) != self.folder:
            raise SnapshotCorrupt(f"{what} says that it is number {body.generation} of {body.branch!r}, session "
                                  f"{body.session!r}: it was moved")

    def record_save(self, branch: str, generation: int) -> bool:
        """Write the record of a branch's name after a save; whether that went well. The snapshot is durable even if
        not."""
        title = "" if self.key.will_encrypt else branch
        try:
            write_record(self.files, Place(name=hashed(branch), folder=self.folder, newest=generation, title=title))
        except SnapshotError as error:
            _log.warning("%r was saved; should this snapshot get lost, that would go unnoticed: %s", branch, error)
            return False
        return True

    def withdraw_record(self, branch: str, generation: int) -> None:
        """Ahead of the withdrawal of a manifest: the record says which one is the newest without it. Raises
        StoreError."""
        present = [number for number in self.present_generations(hashed(branch))[0] if number != generation]
        if present:
            self.record_save(branch, present[-1])
        else:
            delete_record(self.files, hashed(branch))

    def session_name(self) -> str:
        """The name of the session, from its manifests. Raises SnapshotCorrupt if none of them can be read."""
        for path, _ in self.manifests():
            with suppress(SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew):
                return self.manifest_at(path)[0].session
        raise SnapshotCorrupt(f"no manifest in {self.folder} can be read")


def named_by(manifest: Manifest) -> frozenset[str]:
    """Paths inside the session of the pages and log parts that a manifest names."""
    return frozenset([*(f"pages/{ref.name}" for ref in manifest.pages),
                      *(f"log/{ref.name}" for ref in manifest.log or ())])
