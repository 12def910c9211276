"""Deleting snapshots, and then the files that no snapshot needs. Knows nothing of names and their aliases.

A manifest is deleted before any file that it names, so no manifest ever names a file that was deleted: a crash in
between leaves only files that nothing names, which the next collection deletes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from locret_stream.errors import SnapshotCorrupt, SnapshotNotFound
from locret_stream.snapshot.branch import log_of_owners
from locret_stream.snapshot.session_folder import SessionFolder

HEAD_BYTES = 64  # no two manifests share their first bytes: the digest of the header, or the salt of its encryption
GRACE_S = 3600.0  # where a place has no locks, younger files are never collected: a save may be about to name them


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection removed: paths inside the store, and their bytes."""

    removed: tuple[str, ...]
    bytes: int


@contextmanager
def exclusive(session_folder: SessionFolder, *, wait: bool = True) -> Iterator[None]:
    """Exclude saves and other collections in the session for the length of the block, where the place has locks.

    Raises:
        Busy: `wait` is false, and one is running.
    """
    with session_folder.files.lock(session_folder.folder, shared=False, wait=wait) as locked:
        session_folder.locked = locked
        try:
            yield
        finally:
            session_folder.locked = False


def delete_snapshots(session_folder: SessionFolder, name: str, generations: Sequence[int], highest: int) -> None:
    """Delete the manifests of a branch with these generations; `highest` is the highest one ever used.

    Before the manifest of the highest generation is deleted, an empty file `.gone` says that this generation was used.
    Without it, a crash right after the deletion would make the generation look free: a stale owner could save under it,
    and the record of the name would report a lost snapshot. After a crash between the two steps both files exist: the
    snapshot is still listed, and can be deleted again.
    """
    for generation in generations:
        path = f"{session_folder.folder}/{session_folder.manifest_path(name, generation)}"
        if generation == highest:
            session_folder.files.write(path.removesuffix(".snap") + ".gone", [])
        session_folder.files.delete(path)


def collect(session_folder: SessionFolder, grace_s: float, *, after_a_save: bool = False) -> Collected:
    """Delete the pages and log parts that no manifest of the session names, `.gone` files that a later generation makes
    needless, and temporary files of saves that died. A crash anywhere leaves the rest for the next collection.

    Args:
        grace_s: without a lock, younger files stay.
        after_a_save: also keep the log parts of owners in this process that went back to an older snapshot.

    Raises:
        SnapshotCorrupt, SnapshotTooNew: a manifest cannot be read; nothing was deleted.
    """
    named = named_files(session_folder) | log_of_owners(session_folder, all_of_them=after_a_save)
    files, folder = session_folder.files, session_folder.folder
    removed, size = [], 0
    for path, count in (session_folder.sizes("pages") | session_folder.sizes("log")).items():
        whole = f"{folder}/{path}"
        if path not in named and (session_folder.locked or files.age_s(whole) >= grace_s):
            files.delete(whole)
            removed.append(whole)
            size += count
    branches = session_folder.branches()
    for branch in branches:
        highest = session_folder.generations_of(branch)[1]
        for path in session_folder.sizes(f"m/{branch}"):
            if path.endswith(".gone") and path != f"m/{branch}/{highest:012d}.gone":
                files.delete(f"{folder}/{path}")
                removed.append(f"{folder}/{path}")
    for inside in ("", "/pages", "/log", *(f"/m/{branch}" for branch in branches)):
        swept = files.sweep(folder + inside, 0.0 if session_folder.locked else grace_s)
        removed += [f"{folder}{inside}/{name}" for name in swept]
    return Collected(removed=tuple(removed), bytes=size)


def stored_bytes(session_folder: SessionFolder) -> int:
    """Bytes of the session's manifests and of all files that they name, as they are stored."""
    needed = named_files(session_folder) | {path for path, _ in session_folder.manifests()}
    return sum(size for folder in ("pages", "log", *(f"m/{branch}" for branch in session_folder.branches()))
               for path, size in session_folder.sizes(folder).items() if path in needed)


def named_files(session_folder: SessionFolder) -> set[str]:
    """Paths inside the session of the pages and log parts that its manifests name.

    A manifest is read once and then recognised by its first bytes. Its path does not identify it: where no lock
    excludes collectors, a save that fails gives its generation back, and another manifest gets its path.

    Raises:
        SnapshotCorrupt, SnapshotTooNew: a manifest cannot be read.
    """
    needs = {}
    for path, _ in session_folder.manifests():
        key = path, b""
        try:
            with suppress(SnapshotNotFound):  # reading it below says whether it was deleted or lost
                key = path, session_folder.files.head(f"{session_folder.folder}/{path}", HEAD_BYTES)
            needs[key] = session_folder.needs.get(key) or files_named_by(session_folder, path)
        except SnapshotNotFound:  # it was deleted at this moment
            continue
        except SnapshotCorrupt as error:
            raise SnapshotCorrupt(f"{error}. What it needs is not known, so nothing was removed; delete it first"
                                  ) from error
    session_folder.needs = needs
    return set().union(*needs.values())


def files_named_by(session_folder: SessionFolder, path: str) -> frozenset[str]:
    """Paths inside the session of the pages and log parts that one manifest names. Raises as `manifest_at`."""
    manifest = session_folder.manifest_at(path)[0]
    return frozenset([*(f"pages/{ref.name}" for ref in manifest.pages),
                      *(f"log/{ref.name}" for ref in manifest.log or ())])
