"""The folder of one session: its containers by kind and name, sealed if the store has a key.

    s-<hash of the session's name>/
        key                       wrapped data key, if encrypted
        lock                      held shared while saving, exclusive while collecting (local stores)
        pages/<name>              immutable
        log/<name>                immutable
        m/<hash of the branch>/<generation>.snap     manifests; creating the next one is the compare-and-swap
        m/<hash of the branch>/<generation>.gone     a deleted newest one, so that its number never comes again
    s-<hash of a fork's name>/branch                 the folder of the session that the fork is a branch of

A page or log part is named by the digest of its header; in an encrypted store by a random number, and its place is
sealed in.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew, StoreError
from locret_stream.snapshot import seal
from locret_stream.snapshot.files import Exists, Files
from locret_stream.snapshot.format import PREAMBLE, LogPart, LogRef, Manifest, Page, PageRef, unpack

MANIFEST_LIMIT = 1 << 30  # bytes that a manifest may have
_GENERATION = re.compile(r"(\d{12})\.(snap|gone)")
T = TypeVar("T")


def hashed(name: str) -> str:
    """What stands for a session's or branch's name in a path."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"locret-name").hexdigest()


def check_name(name: object) -> str:
    """A name for a session: any text of 1 to 256 characters.

    Raises:
        ConfigError: something else.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise ConfigError(f"session name {name!r}; expected a text of 1 to 256 characters")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"session name {name!r} holds a lone surrogate; expected text that UTF-8 can carry") from None
    return name


class Vault:
    """Reads and writes the containers of one session. Holds no state but the key."""

    def __init__(self, files: Files, folder: str, key: bytes | None):
        self.files, self.folder = files, folder
        self._user_key, self._data_key = key, None
        self._plain = False  # known to be stored without encryption
        self.locked = False  # whether a collector holds savers off

    @classmethod
    def locate(cls, files: Files, name: str, key: bytes | None) -> Vault:
        """The folder that holds this name: a session's own, or the one that a fork is a branch of."""
        folder = "s-" + hashed(check_name(name))
        if "branch" in files.sizes(folder):
            target = bytes(files.read(f"{folder}/branch", 64)).decode("ascii", "replace")
            if not re.fullmatch(r"s-[0-9a-f]{32}", target):
                raise SnapshotCorrupt(f"{folder}/branch names no session; expected the folder that the fork belongs to")
            folder = target
        return cls(files, folder, key)

    @property
    def exists(self) -> bool:
        """Whether anything was ever saved here."""
        return bool(self.files.folders(f"{self.folder}/m"))

    @property
    def encrypted(self) -> bool:
        """Whether the session has a key of its own."""
        return not self._plain and (self._data_key is not None or "key" in self.files.sizes(self.folder))

    # -- containers -------------------------------------------------------------------------------------------

    def read(self, path: str, kind: type[T], most: int, what: str) -> tuple[T, dict[str, memoryview], str]:
        """A verified container: body, sections, digest of its header.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        key = self._key()
        room = most + (most // seal.SEGMENT + 1) * seal.TAG + 64 if key else most
        data = self.files.read(f"{self.folder}/{path}", room)
        if key:
            data = seal.unseal(data, key, f"{self.folder}/{path}")
        return unpack(data, kind, what)

    def write(self, path: str, parts: Sequence[bytes], *, exclusive: bool = False) -> None:
        """Durable on return.

        Raises:
            Exists, StoreError.
        """
        key = self._key(make=True)
        whole = f"{self.folder}/{path}"
        self.files.write(whole, seal.seal(parts, key, whole) if key else parts, exclusive=exclusive)

    def write_named(self, folder: str, parts: Sequence[bytes]) -> str:
        """Write a page or log part under a name of its own, and return that.

        A file that is there already is written all the same: it may be damaged.
        """
        if self._key(make=True) is not None:
            name = secrets.token_hex(16)
        else:
            name = PREAMBLE.unpack_from(parts[0])[-1].hex()
        self.write(f"{folder}/{name}", parts)
        return name

    def read_named(self, folder: str, ref: PageRef | LogRef, what: str) -> tuple[Page | LogPart, dict[str, memoryview]]:
        """The page or log part that a manifest names.

        Raises:
            SnapshotCorrupt: missing, damaged, or not the one of that name.
        """
        try:
            body, sections, own = self.read(f"{folder}/{ref.name}", Page if isinstance(ref, PageRef) else LogPart,
                                            ref.size, what)
        except SnapshotNotFound:
            raise SnapshotCorrupt(f"{what} is missing from the store") from None
        if not self.encrypted and own != ref.name:
            raise SnapshotCorrupt(f"{what} is another file than the one of that name")
        return body, sections

    def stored(self, folder: str) -> set[str]:
        """Names of the pages or log parts there are."""
        return set(self.files.sizes(f"{self.folder}/{folder}"))

    # -- generations ------------------------------------------------------------------------------------------

    def generations(self, branch: str) -> tuple[list[int], int]:
        """Snapshots there are, ascending, and the highest number ever used (0: none)."""
        found, highest = [], 0
        for name in self.files.sizes(f"{self.folder}/m/{hashed(branch)}"):
            if match := _GENERATION.fullmatch(name):
                highest = max(highest, int(match[1]))
                if match[2] == "snap":
                    found.append(int(match[1]))
        return sorted(found), highest

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
            raise SnapshotNotFound(f"there is no {what} in {self.files.url}") from None
        if body.branch != branch or body.generation != generation:
            raise SnapshotCorrupt(f"{what} says that it is number {body.generation} of {body.branch!r}")
        return body, sections, own

    def taken(self, branch: str) -> bool:
        """Whether the store has a session of that name, or a fork of it somewhere."""
        folder = "s-" + hashed(check_name(branch))
        return folder == self.folder or bool(self.files.sizes(folder) or self.files.folders(folder))

    def write_alias(self, branch: str) -> None:
        """Let the branch's own name lead here."""
        self.files.write(f"s-{hashed(branch)}/branch", [self.folder.encode()])

    def session_name(self) -> str:
        """The name of the session that this folder is of, as its manifests say.

        Raises:
            SnapshotCorrupt: none of them can be read.
        """
        for path, _ in self.manifests():
            with suppress(SnapshotCorrupt, SnapshotTooNew):
                body, _, _ = self.read(path, Manifest, MANIFEST_LIMIT, path)
                if "s-" + hashed(body.session) == self.folder:
                    return body.session
        raise SnapshotCorrupt(f"no manifest in {self.folder} can be read")

    def manifests(self) -> list[tuple[str, int]]:
        """(path inside the session, generation) of every manifest of every branch."""
        out = []
        for branch in self.files.folders(f"{self.folder}/m"):
            for name in self.files.sizes(f"{self.folder}/m/{branch}"):
                if (match := _GENERATION.fullmatch(name)) and match[2] == "snap":
                    out.append((f"m/{branch}/{name}", int(match[1])))
        return out

    # -- the key ----------------------------------------------------------------------------------------------

    def _key(self, make: bool = False) -> bytes | None:
        """The session's data key; None in a store without one.

        Raises:
            StoreError: the session is encrypted and the store was given no key, or the other way round.
        """
        if self._data_key is not None:
            return self._data_key
        if self.encrypted:
            if self._user_key is None:
                raise StoreError("this session is encrypted; expected the store's key (`key=...`, or LOCRET_KEY)")
            wrapped = self.files.read(f"{self.folder}/key", 1024)
            self._data_key = seal.unwrap(wrapped, self._user_key, self.folder)
        elif self._user_key is not None and make:
            if self.exists:
                raise StoreError("this session was stored without encryption and the store was given a key; expected "
                                 "no key, or a new session")
            fresh = seal.new_data_key()
            try:
                self.files.write(f"{self.folder}/key", [seal.wrap(fresh, self._user_key, self.folder)], exclusive=True)
            except Exists:  # another process began the same session in this moment
                return self._key()
            self._data_key = fresh
        else:
            self._plain = make or self.exists
        return self._data_key
