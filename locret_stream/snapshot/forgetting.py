"""Removing a session whole, and names that lead nowhere any more, in orders that a crash cannot harm."""

from __future__ import annotations

from contextlib import suppress

from locret_stream.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotTooNew,
    StoreError,
)
from locret_stream.snapshot.claims import fork_target
from locret_stream.snapshot.collecting import exclusive
from locret_stream.snapshot.files import Busy, Files
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
from locret_stream.snapshot.session_folder import SessionFolder


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
            _delete_alias(files, other)
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
    sweep_records(files, branches | deleted)
    return [f"n-{other}" for other in sorted(deleted)]


def _readable_alias(files: Files, folder: str) -> str | None:
    """The session folder that an alias leads to; None if there is no alias, or none that can be read."""
    with suppress(SnapshotCorrupt, SnapshotTooNew):
        return read_alias(files, folder)
    return None


def _delete_alias(files: Files, folder: str) -> None:
    files.delete(f"{folder}/branch")
    files.remove_empty_folder(folder)


def free_name(files: Files, folder: str, target: str) -> None:
    """Make the name of a fork without snapshots free: delete its alias in `folder`, and its record if that says that
    the snapshots lie in `target`."""
    _delete_alias(files, folder)
    if (record := readable_record(files, folder[2:])) is not None and record.folder == target:
        delete_record(files, folder[2:])


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
                        not session_folder.locked and files.age_s(path) < grace_s):
                    return []
                free_name(files, folder, target)  # under the lock: the fork may be about to be saved again
        except Busy:  # a save is running there, perhaps of just this fork
            return []
    else:
        free_name(files, folder, target)
    return [path]


def rewrite_aliases(session_folder: SessionFolder) -> None:
    """Write the aliases of forks with readable snapshots here that are missing or damaged.

    Raises:
        SnapshotTooNew: an alias was written in a later format. StoreError.
    """
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
