"""Whose a name is: which session folder holds its snapshots, and how a save makes sure that it stays so.

The name of a session is its folder's. The name of a fork has a folder of its own, and in it an alias that leads to the
session's folder. An alias counts only as long as the folder it names holds snapshots of the fork.
"""

from __future__ import annotations

from locret_stream.errors import SnapshotCorrupt, StaleOwner
from locret_stream.snapshot.files import Exists, Files
from locret_stream.snapshot.names import folder_of, is_version_1, read_alias, readable_record, write_alias
from locret_stream.snapshot.session_folder import SessionFolder


def locate(files: Files, name: str, key: bytes | None) -> SessionFolder:
    """The folder of the session that a name belongs to, as the session itself or as a fork. Raises as `fork_target`."""
    folder = folder_of(name)
    return SessionFolder(files, fork_target(files, folder) or folder, key)


def fork_target(files: Files, folder: str) -> str | None:
    """The session folder that holds the snapshots of the fork whose alias lies in `folder`; None if no folder does, as
    for a session, or for a fork that was never saved or was deleted.

    Raises:
        SnapshotCorrupt: the alias is damaged, names a folder that does not exist, or is missing itself.
    """
    name_hash, alias = folder[2:], read_alias(files, folder)
    target = alias
    if alias is None and (record := readable_record(files, name_hash)) is not None and record.folder != folder:
        target = record.folder
    holds_snapshots = target is not None and has_snapshots(files, target, name_hash)
    if holds_snapshots and alias is not None:
        return alias
    if not holds_snapshots and (alias is None or files.sizes(alias) or files.folders(alias)):
        return None
    if read_alias(files, folder) != alias:  # another process wrote or removed it at this moment
        return fork_target(files, folder)
    if alias is None:
        raise SnapshotCorrupt(f"{folder}/branch does not exist, which leads to {target}, where snapshots of this name "
                              "are; expected nobody to remove it. `snapshots gc` writes it anew")
    raise SnapshotCorrupt(f"{folder}/branch leads to {alias}, which does not exist; expected the session that this "
                          "fork belongs to. `snapshots forget` frees the name")


def has_snapshots(files: Files, folder: str, name_hash: str) -> bool:
    """Whether a session folder holds snapshots of the name of that hash."""
    return bool(SessionFolder(files, folder, None).generations_of(name_hash)[0])


def is_taken(session_folder: SessionFolder, branch: str) -> bool:
    """Whether a new fork cannot have that name, because the store has snapshots of it or it is its session's name."""
    files, folder = session_folder.files, folder_of(branch)
    return folder == session_folder.folder or bool(session_folder.generations(branch)[0]) or (
        fork_target(files, folder) is not None or has_snapshots(files, folder, folder[2:]))


def claim(session_folder: SessionFolder, branch: str, *, recorded: bool = False) -> None:
    """Before a save: make the branch's name lead to this folder, durably, and make sure that it leads nowhere else.

    A session and a fork of the same name may begin at the same moment, in folders that share no lock. So a fork writes
    its alias first and looks for the session then, and the session saves first and looks for the alias then
    (`expect_claim`). At least one of them sees the other.

    Args:
        recorded: whether the record of the name is known to lead to this folder.

    Raises:
        StaleOwner: the name belongs to another session or fork by now. StoreError.
    """
    files, own_folder, folder = session_folder.files, session_folder.folder, folder_of(branch)
    if folder == own_folder:
        if (not recorded or read_alias(files, folder) is not None) and fork_target(files, folder) is not None:
            raise _name_lost(branch)
        return
    written = False
    try:
        target = read_alias(files, folder)
        if target is None:
            write_alias(files, folder, own_folder, exclusive=True)
            target, written = own_folder, True
        elif target == own_folder and is_version_1(files, folder):
            write_alias(files, folder, own_folder)
        else:
            files.sync_folder(folder)  # the process that wrote the alias may have died before its sync
    except Exists:  # another process wrote it at this moment
        target = read_alias(files, folder)
    except SnapshotCorrupt:  # it is damaged, and this owner knows where its name leads
        write_alias(files, folder, own_folder)
        target = own_folder
    if target != own_folder:
        raise _name_lost(branch)
    if has_snapshots(files, folder, folder[2:]):
        if written:
            files.delete(f"{folder}/branch")
        raise _name_lost(branch)


def expect_claim(session_folder: SessionFolder, branch: str) -> None:
    """After a save: raises StaleOwner if the name belongs to another session or fork by now."""
    folder = folder_of(branch)
    expected = None if folder == session_folder.folder else session_folder.folder
    if read_alias(session_folder.files, folder) != expected:
        raise _name_lost(branch)


def _name_lost(branch: str) -> StaleOwner:
    return StaleOwner(f"{branch!r} is meanwhile the name of another session or fork, or of one that somebody begins. "
                      "Nothing was acknowledged; expected another name, or to open it again")
