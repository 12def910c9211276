"""The store: many sessions at one place. Opens branches; lists, verifies, deletes, forgets, collects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotNotFound, StoreError
from locret_stream.snapshot.branch import Branch, Snapshot, describe
from locret_stream.snapshot.files import Files, open_files
from locret_stream.snapshot.format import Manifest
from locret_stream.snapshot.log import read_part
from locret_stream.snapshot.pages import PageRef
from locret_stream.snapshot.seal import user_key
from locret_stream.snapshot.vault import MANIFEST_LIMIT, Vault, check_name, hashed

GRACE_S = 3600.0  # where a place has no lock, what is younger is never collected: a save may be about to name it


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection removed: paths inside the store, and their bytes."""

    removed: tuple[str, ...]
    bytes: int


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was read whole: what is wrong with it, or "" for nothing."""

    name: str
    generation: int
    problem: str = ""


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
        self.files = files or open_files(url)
        self.url, self._key = self.files.url, user_key(key)
        self.keep_last, self.max_bytes, self._log = keep_last, max_bytes, log

    # -- opening ----------------------------------------------------------------------------------------------

    def branch(self, name: str) -> Branch:
        """The branch of that name for a new owner: what is stored, or the beginning of a new session."""
        vault = Vault.locate(self.files, name, self._key)
        branch = Branch(vault, name, name, log=self._log)
        found, branch.head = vault.generations(name)
        if found and vault.folder != "s-" + hashed(name):
            branch.session = vault.session_name()
        return branch

    def has(self, name: str) -> bool:
        """Whether there is a snapshot of that name."""
        return bool(Vault.locate(self.files, name, self._key).generations(name)[0])

    # -- looking ----------------------------------------------------------------------------------------------

    def list(self) -> list[Snapshot]:
        """The newest snapshot of every session and fork, by name.

        Raises:
            SnapshotCorrupt, SnapshotTooNew, StoreError: one that cannot be read, by its file.
        """
        out = []
        for vault in self._vaults():
            newest: dict[str, str] = {}
            for path, _ in vault.manifests():
                newest[path.rpartition("/")[0]] = path
            out += [self._describe(vault, path) for path in newest.values()]
        return sorted(out, key=lambda snapshot: snapshot.name)

    def info(self, name: str) -> list[Snapshot]:
        """All snapshots of a session or fork, oldest first.

        Raises:
            SnapshotNotFound, SnapshotCorrupt, SnapshotTooNew, StoreError.
        """
        vault, found = self._found(name)
        return [self._describe(vault, vault.manifest_path(name, number)) for number in found]

    def verify(self, name: str | None = None) -> list[Verified]:
        """Read every byte that the snapshots of a name (None: of all) need."""
        vaults = list(self._vaults()) if name is None else [self._found(name)[0]]
        out = []
        for vault in vaults:
            own = None if name is None else f"m/{hashed(name)}/"
            good: set[str] = set()
            out += [self._verify(vault, path, number, good) for path, number in vault.manifests()
                    if own is None or path.startswith(own)]
        return out

    def _verify(self, vault: Vault, path: str, number: int, good: set[str]) -> Verified:
        branch = path
        try:
            manifest = self._manifest(vault, path)[0]
            branch = manifest.branch
            for ref in (*manifest.pages, *(manifest.log or ())):
                if ref.name not in good:
                    folder = "pages" if isinstance(ref, PageRef) else "log"
                    body, sections = vault.read_named(folder, ref, f"{folder} file {ref.name}")
                    if folder == "log":
                        read_part(body, sections, f"log part {ref.name}")
                    good.add(ref.name)
        except SnapshotError as error:
            return Verified(name=branch, generation=number, problem=str(error))
        return Verified(name=branch, generation=number)

    def _vaults(self) -> Iterator[Vault]:
        for folder in self.files.folders(""):
            if folder.startswith("s-") and (vault := Vault(self.files, folder, self._key)).exists:
                yield vault

    def _found(self, name: str) -> tuple[Vault, list[int]]:
        vault = Vault.locate(self.files, name, self._key)
        found, _ = vault.generations(name)
        if not found:
            raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
        return vault, found

    def _manifest(self, vault: Vault, path: str) -> tuple[Manifest, int]:
        what = f"{vault.folder}/{path}"
        body, sections, _ = vault.read(path, Manifest, MANIFEST_LIMIT, what)
        return body, sum(map(len, sections.values()))

    def _describe(self, vault: Vault, path: str) -> Snapshot:
        manifest, size = self._manifest(vault, path)
        return describe(manifest, size, vault.encrypted)

    # -- removing ---------------------------------------------------------------------------------------------

    def delete(self, name: str, generation: int | None = None) -> list[int]:
        """Delete one snapshot, or with None all of a name; returns their numbers. Forks keep theirs.

        Raises:
            SnapshotNotFound, StoreError.
        """
        vault, found = self._found(name)
        with self._alone(vault):
            found, highest = vault.generations(name)
            gone = found if generation is None else [number for number in found if number == generation]
            if not gone:
                raise SnapshotNotFound(f"{name!r} has no snapshot {generation}; expected one of {found}")
            self._remove(vault, name, gone, highest)
            self._collect(vault, GRACE_S)
        return gone

    def _remove(self, vault: Vault, name: str, numbers: list[int], highest: int) -> None:
        for number in numbers:
            path = f"{vault.folder}/{vault.manifest_path(name, number)}"
            if number == highest:  # else a stale owner could take the number for its own
                self.files.write(path.removesuffix(".snap") + ".gone", [])
            self.files.delete(path)

    def forget(self, name: str) -> list[str]:
        """Remove a session with all its forks: key first, then manifests, pages, log and temporary files.

        Returns:
            Paths of everything that was removed.

        Raises:
            SnapshotNotFound: nothing of that name. ConfigError: it is a fork: forget its session, or delete it.
        """
        vault = Vault.locate(self.files, name, self._key)
        if vault.folder != "s-" + hashed(check_name(name)):
            raise ConfigError(f"{name!r} is a fork; expected the name of its session (its forks go with it), or "
                              "`delete` for this one alone")
        if not self.files.sizes(vault.folder) and not self.files.folders(vault.folder):
            raise SnapshotNotFound(f"there is no session {name!r} in {self.url}")
        removed = []
        with self._alone(vault):
            aliases = [folder for folder in self.files.folders("") if folder != vault.folder
                       and "branch" in self.files.sizes(folder)
                       and bytes(self.files.read(f"{folder}/branch", 64)) == vault.folder.encode()]
            if vault.encrypted:
                self.files.delete(f"{vault.folder}/key")
                removed.append(f"{vault.folder}/key")
            removed += [f"{vault.folder}/{path}" for path in self._everything(vault)]
            self.files.remove_folder(vault.folder)
            for folder in aliases:
                self.files.remove_folder(folder)
                removed.append(f"{folder}/branch")
        return removed

    def _everything(self, vault: Vault) -> list[str]:
        folders = ["pages", "log", *(f"m/{branch}" for branch in self.files.folders(f"{vault.folder}/m"))]
        return [f"{folder}/{name}" for folder in folders for name in self.files.sizes(f"{vault.folder}/{folder}")]

    def prune(self, branch: Branch) -> Collected:
        """After a save: delete what `keep_last` and `max_bytes` leave over, and collect.

        Raises:
            SnapshotCorrupt, SnapshotTooNew: a snapshot whose needs cannot be read; nothing was collected.
        """
        vault = branch.vault
        with self._alone(vault):
            found, highest = vault.generations(branch.name)
            self._remove(vault, branch.name, found[:-self.keep_last], highest)
            kept = found[-self.keep_last:]
            while self.max_bytes is not None and len(kept) > 1 and self._bytes(vault) > self.max_bytes:
                self._remove(vault, branch.name, [kept.pop(0)], highest)
            return self._collect(vault, GRACE_S)

    def gc(self, name: str | None = None, *, grace_s: float = GRACE_S) -> Collected:
        """Remove pages and log parts that no snapshot names, and temporary files of saves that died.

        Args:
            grace_s: where the place has no lock (object stores), younger files stay.

        Raises:
            SnapshotCorrupt, SnapshotTooNew: a snapshot whose needs cannot be read; its session was left alone.
        """
        vaults = list(self._vaults()) if name is None else [self._found(name)[0]]
        done = []
        for vault in vaults:
            with self._alone(vault):
                done.append(self._collect(vault, grace_s))
        return Collected(removed=tuple(path for one in done for path in one.removed), bytes=sum(d.bytes for d in done))

    @contextlib.contextmanager
    def _alone(self, vault: Vault) -> Iterator[None]:
        """No save runs in the session meanwhile, where the place can tell."""
        with self.files.lock(vault.folder, shared=False) as locked:
            vault.locked = locked
            yield

    def _named(self, vault: Vault) -> dict[str, int]:
        """Paths inside the session that its manifests name, with sizes."""
        named = {}
        for path, _ in vault.manifests():
            try:
                manifest = self._manifest(vault, path)[0]
            except SnapshotCorrupt as error:
                raise SnapshotCorrupt(f"{error}. What it needs is not known, so nothing was removed; delete it first"
                                      ) from error
            named |= {f"pages/{ref.name}": ref.size for ref in manifest.pages}
            named |= {f"log/{ref.name}": ref.size for ref in manifest.log or ()}
        return named

    def _bytes(self, vault: Vault) -> int:
        named = self._named(vault)
        return sum(named.values()) + sum(
            self.files.sizes(f"{vault.folder}/{path.rpartition('/')[0]}")[path.rpartition("/")[2]]
            for path, _ in vault.manifests())

    def _collect(self, vault: Vault, grace_s: float) -> Collected:
        if not vault.manifests() and not vault.locked:
            raise StoreError(f"{vault.folder} has no snapshot left and the place has no lock; expected `forget`")
        named, removed, size = self._named(vault), [], 0
        for folder in ("pages", "log"):
            for name, count in self.files.sizes(f"{vault.folder}/{folder}").items():
                path = f"{vault.folder}/{folder}/{name}"
                if f"{folder}/{name}" not in named and (vault.locked or self.files.age_s(path) >= grace_s):
                    self.files.delete(path)
                    removed.append(path)
                    size += count
        for folder in ("", "/pages", "/log", *(f"/m/{branch}" for branch in self.files.folders(f"{vault.folder}/m"))):
            removed += self.files.sweep(vault.folder + folder, 0.0 if vault.locked else grace_s)
        return Collected(removed=tuple(removed), bytes=size)
