"""Names -> folders: what stands for a name in a path, and the two files that say where its snapshots lie.

    s-<hash of a fork's name>/branch    its *alias*: the folder of the session that the fork is a branch of
    n-<hash of a name>                  its *record*: that folder once more, and the newest number, after every save

Both are containers (`format.Place`), bound to the hash of their name. The alias is there before the first snapshot of
a fork, and a record follows its snapshot, so a crash may leave a record one save behind and never ahead. Hence a record
that knows a newer number than there is tells that a snapshot was lost, one without its alias that an alias was, one
without its folder that all of it was. A record that is lost or old itself does no harm: the next save writes it.

What cannot be told: that a session was put back to an older copy together with its records, as a whole store may be;
that an older snapshot than the newest was removed; that a name was removed with all three of these.
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
_OLD = 34  # bytes of an alias of format version 1: the folder and nothing else
_LIMIT = 8192  # bytes


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


def folder_of(name: str) -> str:
    """The folder that belongs to a name, whether it holds a session or leads to another."""
    return "s-" + hashed(check_name(name))


def alias(files: Files, folder: str) -> str | None:
    """The session folder that a fork's folder points at; None if it points at none.

    Raises:
        SnapshotCorrupt: it points at nothing that can be. SnapshotTooNew.
    """
    path = f"{folder}/branch"
    try:
        data = files.read(path, _LIMIT)
    except SnapshotNotFound:
        return None
    try:
        if len(data) == _OLD:
            target = bytes(data).decode("ascii", "replace")
        else:
            place = unpack(data, Place, path)[0]
            target = place.folder if place.name == folder[2:] and not place.newest else ""
    except SnapshotCorrupt as error:
        raise SnapshotCorrupt(f"{error}. {_ANEW}") from None
    if not FOLDER.fullmatch(target) or target == folder:
        raise SnapshotCorrupt(f"{path} names no session; expected the folder that the fork belongs to. {_ANEW}")
    return target


_ANEW = "Saving the fork where it is open writes this file anew, and so does `snapshots gc`"


def is_old(files: Files, folder: str) -> bool:
    """Whether the alias there is one of format version 1, which no digest covers."""
    return files.sizes(folder).get("branch") == _OLD


def write_alias(files: Files, folder: str, target: str, *, exclusive: bool = False) -> None:
    """Durable on return. Raises Exists, StoreError."""
    files.write(f"{folder}/branch", pack(Place(name=folder[2:], folder=target), {}), exclusive=exclusive)


def record(files: Files, name: str) -> Place | None:
    """What is known of the name of that hash; None if nothing.

    Raises:
        SnapshotCorrupt: it is damaged, or another's. SnapshotTooNew, StoreError.
    """
    path = f"n-{name}"
    try:
        place = unpack(files.read(path, _LIMIT), Place, path)[0]
    except SnapshotNotFound:
        return None
    if place.name != name or not place.newest:
        raise SnapshotCorrupt(f"{path} is not the record of this name: it was moved")
    return place


def known(files: Files, name: str) -> Place | None:
    """The same; None for one that cannot be read, which is evidence of nothing (`Store.verify` tells of it)."""
    with suppress(SnapshotCorrupt, SnapshotTooNew):
        return record(files, name)
    return None


def write_record(files: Files, place: Place) -> None:
    """Durable on return. Raises StoreError."""
    files.write(f"n-{place.name}", pack(place, {}))


def drop_record(files: Files, name: str) -> None:
    """Durable on return; nothing if there is none. Raises StoreError."""
    files.delete(f"n-{name}")


def sweep_records(files: Files, names: Container[str], found: Mapping[str, str] | None = None) -> list[str]:
    """Remove what saves that died left of the records of those names; returns the paths. For whoever holds off saves.

    Args:
        found: what `files.unfinished("")` gave, if that was asked already.
    """
    out = [path for path, target in (files.unfinished("") if found is None else found).items()
           if (match := RECORD.fullmatch(target)) and match[1] in names]
    for path in out:
        files.delete(path)
    return out


def records(files: Files) -> list[str]:
    """Hashes of all names that have a record, or something in its place, in order."""
    return sorted(match[1] for entry in (*files.sizes(""), *files.folders("")) if (match := RECORD.fullmatch(entry)))
