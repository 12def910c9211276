"""What manifests said that were read, by their paths and versions: where reading is a request, none is read twice.

Only a place that says versions (`Files.version`) is remembered: there a file of the same path and version is the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from locret_stream.snapshot.branch import Snapshot
from locret_stream.snapshot.files import Files

FOLDERS = 64  # sessions that are remembered: as many as threads stay at hand


class Said(NamedTuple):
    """What a manifest said: what users see of it, and paths inside the session of the files that it names."""

    snapshot: Snapshot
    needs: frozenset[str]


class Seen:
    """Of one store. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, dict[tuple[str, bytes], Said]] = OrderedDict()

    def of(self, folder: str) -> Mapping[tuple[str, bytes], Said]:
        """What is known of a session, by path inside its folder and version; what the folder has now may be newer."""
        with self._lock:
            return self._folders.get(folder, {})

    def needs(self, folder: str) -> dict[tuple[str, bytes], frozenset[str]]:
        """The same as `SessionFolder.needs` has it."""
        return {key: said.needs for key, said in self.of(folder).items()}

    def add(self, files: Files, folder: str, said: Mapping[tuple[str, bytes], Said]) -> None:
        """Remember what was read just now, and of what was known what `files` still has."""
        with self._lock:
            whole = {**self._folders.pop(folder, {}), **said}
            here = {(path, version): each for (path, version), each in whole.items()
                    if version and files.version(f"{folder}/{path}").encode() == version}
            if here:
                self._folders[folder] = here
            while len(self._folders) > FOLDERS:
                self._folders.popitem(last=False)
