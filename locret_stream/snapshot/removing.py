"""Removing snapshots, and then the files that no snapshot needs; whole sessions; and names that lead nowhere any more:
all in orders that a crash cannot harm.

A manifest is deleted before any file that it names, so no manifest ever names a file that was deleted: a crash in
between leaves only files that nothing names, which the next collection deletes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotTooNew,
    StoreError,
)
from locret_stream.snapshot.branch import log_of_owners
from locret_stream.snapshot.claims import fork_target
from locret_stream.snapshot.files import Busy, Exists, Files
from locret_stream.snapshot.names import (
    FOLDER,
    delete_record,
    folder_of,
    read_alias,
    readable_record,
    recorded_names,
    sweep_records,
    write_alias,
)
from locret_stream.snapshot.session_folder import SessionFolder, named_by

HEAD_BYTES = 64  # no two manifests share their first bytes: the digest of the header, or the salt of its encryption
GRACE_S = 3600.0  # where a place has no locks, younger files are never collected: a save may be about to name them


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection removed: paths inside the store, and their bytes."""

    removed: tuple[str, ...]
    bytes: int


@contextmanager
def exclusive(session_folder: SessionFolder, *, wait: bool = True) -> Iterator[None]:
    """Exclude saves and other collections in the session for the length of the block, where the place has locks. Raises
    Busy if one is running and `wait` is false."""
    with session_folder.files.lock(session_folder.folder, shared=False, wait=wait) as locked:
        session_folder.locked = locked
        try:
            yield
        finally:
            session_folder.locked = False


def delete_snapshots(session_folder: SessionFolder, name: str, generations: Sequence[int], highest: int) -> None:
    """Delete the manifests of a branch with these generations.

    Before the manifest of the highest generation ever used is deleted, an empty file `.gone` says that it was used.
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
        after_a_save: as `all_of_them` of `log_of_owners`.

    Raises:
        SnapshotCorrupt, SnapshotTooNew: a manifest cannot be read; nothing was deleted.
    """
    with session_folder.looking():
        return _collect(session_folder, grace_s, after_a_save)


def _collect(session_folder: SessionFolder, grace_s: float, after_a_save: bool) -> Collected:
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

    A manifest is read once and then recognised by its version, or its first bytes. Its path does not identify it: where
    no lock excludes collectors, a save that fails gives its generation back, and another manifest gets its path.
    """
    needs = {}
    for path, _ in session_folder.manifests():
        whole = f"{session_folder.folder}/{path}"
        key = path, session_folder.files.version(whole).encode()
        try:
            with suppress(SnapshotNotFound):  # reading it below says whether it was deleted or lost
                key = key if key[1] else (path, session_folder.files.head(whole, HEAD_BYTES))
            needs[key] = session_folder.needs.get(key) or files_named_by(session_folder, path)
        except SnapshotNotFound:  # it was deleted at this moment
            continue
        except SnapshotCorrupt as error:
            raise SnapshotCorrupt(f"{error}. What it needs is not known, so nothing was removed; delete it first"
                                  ) from error
    session_folder.needs = needs
    return set().union(*needs.values())


def files_named_by(session_folder: SessionFolder, path: str) -> frozenset[str]:
    """As `named_files`, for one manifest. Raises as `manifest_at`."""
    return named_by(session_folder.manifest_at(path)[0])


def forget(files: Files, name: str) -> list[str]:
    """Remove a session with all its forks. Returns and raises as `Store.forget`.

    The order makes a crash harmless at any point:
    1. The records, which would report every snapshot that is deleted now as lost. After a crash here the session is
       whole; the next save of each name writes its record again.
    2. The manifests, before any file that they name. After a crash here the snapshots that are left are whole.
    3. The key, without which nothing that is left of an encrypted session can be read. It comes after the manifests, so
       that no manifest is left that nobody can decrypt.
    4. The aliases, before the folder that they lead to: an alias to a folder that does not exist counts as damage.
    5. The folder with the rest, which no manifest names any more.
    """
    folder = folder_of(name)
    session_folder = SessionFolder(files, folder, None)
    if _is_fork(files, folder):
        raise ConfigError(f"{name!r} is a fork; expected the name of its session (its forks go with it), or "
                          "`delete` for this one alone")
    empty = not files.sizes(folder) and not files.folders(folder)
    if empty and folder[2:] not in recorded_names(files):
        raise SnapshotNotFound(f"there is no session {name!r} in {files.url}")
    with exclusive(session_folder):
        manifests = [path for path, _ in session_folder.manifests()]
        keys = ["key"] if "key" in files.sizes(folder) else []
        rest = [path for inside in ("pages", "log", *(f"m/{branch}" for branch in session_folder.branches()))
                for path in session_folder.sizes(inside) if path not in manifests]
        records = _delete_records(session_folder)
        errors = []
        for path in (*manifests, *keys):
            try:
                files.delete(f"{folder}/{path}")
            except StoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        aliases = [other for other in files.folders("")
                   if FOLDER.fullmatch(other) and _readable_alias(files, other) == folder]
        for other in aliases:
            _drop_alias(files, other, forgotten=folder)
        files.remove_folder(folder)
        if not session_folder.locked:  # a save that ended meanwhile may have written its record again
            _delete_records(session_folder)
    return [*(f"{folder}/{path}" for path in (*manifests, *keys, *rest)), *(f"{other}/branch" for other in aliases),
            *records]


def _is_fork(files: Files, folder: str) -> bool:
    """Whether the name of that folder is a fork's, whose snapshots are elsewhere."""
    try:
        return fork_target(files, folder) is not None
    except (SnapshotCorrupt, SnapshotTooNew):  # a damaged alias is no reason to keep a session of that name
        record = readable_record(files, folder[2:])
        return record is not None and record.folder != folder and bool(
            SessionFolder(files, record.folder, None).present_generations(folder[2:])[0])


def _delete_records(session_folder: SessionFolder) -> list[str]:
    """Delete the records of a session and of its forks; returns their paths."""
    files, name_hash, deleted = session_folder.files, session_folder.folder[2:], set()
    branches = {name_hash, *session_folder.branches()}
    for other in recorded_names(files):
        record = readable_record(files, other)
        if other == name_hash or (other in branches if record is None else record.folder == session_folder.folder):
            delete_record(files, other)
            deleted.add(other)
    sweep_records(files, branches | deleted, files.unfinished(""))
    return [f"n-{other}" for other in sorted(deleted)]


def _readable_alias(files: Files, folder: str) -> str | None:
    """The session folder that an alias leads to; None if there is no alias, or none that can be read."""
    with suppress(SnapshotCorrupt, SnapshotTooNew):
        return read_alias(files, folder)
    return None


def free_name(files: Files, folder: str, target: str) -> bool:
    """Make the name of a fork without snapshots free: delete its alias in `folder`, and its record if that says that
    the snapshots lie in `target`. False: the name is in use again, and stays so (`_drop_alias`)."""
    now = _drop_alias(files, folder, (target,))
    if now is None:
        return False
    if (record := readable_record(now, folder[2:])) is not None and record.folder == target:
        delete_record(files, folder[2:])
    return True


def _drop_alias(files: Files, folder: str, targets: Sequence[str] = (), *, forgotten: str = "") -> Files | None:
    """Delete the alias in `folder`, unless snapshots turn out to be where it leads by now; returns the files as they
    are behind that, None if the name is in use.

    Nothing excludes a save of the name between the look that found it unused and the deletion. A save writes alias,
    manifest and record, in this order, and then expects the alias (`claims.expect_claim`). So one that was acknowledged
    before the deletion shows its manifest behind it, where it is looked for: in `targets`, where the alias led, and
    where the record says; then the alias is written again. One that ends later misses the alias and is refused.

    Args:
        forgotten: a session folder whose snapshots do not count.
    """
    files.delete(f"{folder}/branch")
    files.remove_empty_folder(folder)
    now = files.looking(folder)  # what `files` read before may be old
    record = readable_record(now, folder[2:])
    for target in dict.fromkeys((*targets, *((record.folder,) if record is not None else ()))):
        if target not in (folder, forgotten) and SessionFolder(now, target, None).present_generations(folder[2:])[0]:
            with suppress(Exists):  # the next save of the name wrote it
                write_alias(files, folder, target, exclusive=True)
            return None
    return now


def remove_dead_alias(files: Files, folder: str, grace_s: float) -> list[str]:
    """Free the name of a fork that was never saved whole, was deleted or was forgotten; returns the path of its alias.

    Args:
        folder: of the alias, if there is one. grace_s: without a lock, a younger alias stays.

    Raises:
        SnapshotCorrupt: the alias leads to a folder that should exist and does not.
    """
    target, path = _readable_alias(files, folder), f"{folder}/branch"
    if target is None or fork_target(files, folder) is not None:
        return []
    if files.sizes(target) or files.folders(target):
        session_folder = SessionFolder(files, target, None)
        try:
            with exclusive(session_folder, wait=False):
                if session_folder.generations_of(folder[2:])[0] or (
                        not session_folder.locked and files.age_s(path) < grace_s) or (
                        _readable_alias(files.looking(folder), folder) != target):  # it leads elsewhere by now
                    return []
                freed = free_name(files, folder, target)  # under the lock: the fork may be about to be saved again
        except Busy:  # a save is running there, perhaps of just this fork
            return []
    else:
        freed = free_name(files, folder, target)
    return [path] if freed else []


def rewrite_aliases(session_folder: SessionFolder) -> None:
    """Write the aliases of forks with readable snapshots here that are missing or damaged. Raises SnapshotTooNew."""
    files = session_folder.files
    for branch in session_folder.branches():
        folder, target = f"s-{branch}", None
        with suppress(SnapshotCorrupt):
            target = read_alias(files, folder)
        if folder != session_folder.folder and target is None and not SessionFolder(
                files, folder, None).has_snapshots and _has_readable_manifest(session_folder, branch):
            write_alias(files, folder, session_folder.folder)


def _has_readable_manifest(session_folder: SessionFolder, branch_hash: str) -> bool:
    for path, _ in session_folder.manifests():
        if path.split("/")[1] == branch_hash:
            with suppress(SnapshotError):
                session_folder.manifest_at(path)
                return True
    return False
