"""Names -> folders: the hash that stands for a name in a path, and the two files that say where its snapshots lie.

    s-<hash of a fork's name>/branch    its *alias*: the folder of the session that the fork is a branch of
    n-<hash of a name>                  its *record*: that folder once more, and the newest generation, after every save

Both are containers (`format.Place`), bound to the hash of their name. The alias is written before the first snapshot
of a fork, and a record after its snapshot, so a crash may leave a record one save behind and never ahead. Hence a
record with a newer generation than the store has proves that a snapshot was lost; a record without its alias, that an
alias was lost; a record without its folder, that the whole session was lost. A record that is lost or old does no harm
itself: the next save writes it.

Three losses cannot be noticed: a session that was put back to an older copy together with its records, as a whole store
may be; an older snapshot than the newest that was removed; a name that was removed with its folder, alias and record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping
from contextlib import suppress

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotNotFound, SnapshotTooNew
from locret_stream.snapshot.files import Files
from locret_stream.snapshot.format import Place, pack, unpack

FOLDER = re.compile(r"s-[0-9a-f]{32}")
RECORD = re.compile(r"n-([0-9a-f]{32})")
_VERSION_1_BYTES = 34  # of an alias of format version 1: the folder and nothing else
_LIMIT = 8192  # bytes
_REWRITTEN_BY = "Saving the fork where it is open writes this file anew, and so does `snapshots gc`"


def hashed(name: str) -> str:
    """What stands for a session's or branch's name in a path."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"locret-name").hexdigest()


def check_name(name: object) -> str:
    """The name, if it is one for a session: any text of 1 to 256 characters. Else raises ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise ConfigError(f"session name {name!r}; expected a text of 1 to 256 characters")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"session name {name!r} holds a lone surrogate; expected text that UTF-8 can carry") from None
    return name


def folder_of(name: str) -> str:
    """The folder that belongs to a name: that of its session, or that of a fork's alias."""
    return "s-" + hashed(check_name(name))


def read_alias(files: Files, folder: str) -> str | None:
    """The session folder that the alias in a folder names; None if there is no alias. Raises SnapshotTooNew, and
    SnapshotCorrupt: it is damaged, or names no session folder but this one."""
    path = f"{folder}/branch"
    try:
        data = files.read(path, _LIMIT)
    except SnapshotNotFound:
        return None
    try:
        if len(data) == _VERSION_1_BYTES:
            target = bytes(data).decode("ascii", "replace")
        else:
            place = unpack(data, Place, path)[0]
            target = place.folder if place.name == folder[2:] and not place.newest else ""
    except SnapshotCorrupt as error:
        raise SnapshotCorrupt(f"{error}. {_REWRITTEN_BY}") from None
    if not FOLDER.fullmatch(target) or target == folder:
        raise SnapshotCorrupt(f"{path} names no session; expected the folder that the fork belongs to. {_REWRITTEN_BY}")
    return target


def is_version_1(files: Files, folder: str) -> bool:
    """Whether the alias in a folder has format version 1, which no digest covers."""
    return files.sizes(folder).get("branch") == _VERSION_1_BYTES


def write_alias(files: Files, folder: str, target: str, *, exclusive: bool = False) -> None:
    """Write the alias in a folder; it is durable on return. Raises Exists, StoreError."""
    files.write(f"{folder}/branch", pack(Place(name=folder[2:], folder=target), {}), exclusive=exclusive)


def read_record(files: Files, name_hash: str) -> Place | None:
    """The record of a name; None if there is none. Raises SnapshotTooNew, and SnapshotCorrupt: damaged, or moved."""
    path = f"n-{name_hash}"
    try:
        place = unpack(files.read(path, _LIMIT), Place, path)[0]
    except SnapshotNotFound:
        return None
    if place.name != name_hash or not place.newest:
        raise SnapshotCorrupt(f"{path} is not the record of this name: it was moved")
    return place


def readable_record(files: Files, name_hash: str) -> Place | None:
    """The record of a name; None also if it cannot be read, which proves nothing (`Store.verify` reports that)."""
    with suppress(SnapshotCorrupt, SnapshotTooNew):
        return read_record(files, name_hash)
    return None


def write_record(files: Files, place: Place) -> None:
    """Write the record of a name; it is durable on return. Raises StoreError."""
    files.write(f"n-{place.name}", pack(place, {}))


def delete_record(files: Files, name_hash: str) -> None:
    """Delete the record of a name, durably, if there is one. Raises StoreError."""
    files.delete(f"n-{name_hash}")


def sweep_records(files: Files, name_hashes: Container[str], unfinished: Mapping[str, str]) -> list[str]:
    """Delete the temporary files that saves left of the records of these names when they died; returns their paths.

    Only a caller whose lock excludes saves of these names may call this. `unfinished` is what `files.unfinished("")`
    gave.
    """
    paths = [path for path, target in unfinished.items()
             if (match := RECORD.fullmatch(target)) and match[1] in name_hashes]
    for path in paths:
        files.delete(path)
    return paths


def recorded_names(files: Files) -> list[str]:
    """Hashes of all names that have a record, or something in the place of one, in order."""
    return sorted(match[1] for entry in (*files.sizes(""), *files.folders("")) if (match := RECORD.fullmatch(entry)))
