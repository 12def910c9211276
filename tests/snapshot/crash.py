"""What a disk may hold after a power cut: a shim that records system calls, and a pessimist's model of a file system.

The model: data of a file is safe once the file was synced; until then it may be missing, cut, zeros or whole. An entry
of a folder (made, linked, renamed, removed) is safe once that folder was synced; until then each may have happened or
not, whatever became of those before and after it. Nothing else orders anything: a sync of one file or folder says
nothing about another.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from tests.snapshot.support import Unsynced

ALL_SUBSETS = 6  # so many open folder entries are combined in every way; of more, a sample
SAMPLE = 40


@dataclass(frozen=True)
class Call:
    """One system call that changes a disk. Paths are relative to where the recording began."""

    kind: str
    path: str = ""
    other: str = ""
    handle: int = -1
    data: bytes = b""


class Recorder(Unsynced):
    """Does every call but the syncs, and writes it down once it was done; `mark` writes down what was acknowledged."""

    def __init__(self, base: str, calls: list[Call] | None = None):
        self.base, self.calls = base, [] if calls is None else calls
        self._files: dict[int, int] = {}
        self._count = sum(call.kind == "create" for call in self.calls)
        self._lock = threading.RLock()  # a save writes two pages at a time: what was done first stands first

    def mark(self, label: str) -> None:
        self.calls.append(Call("mark", label))

    def _add(self, kind: str, path: str = "", other: str = "", handle: int = -1, data: bytes = b"") -> None:
        self.calls.append(Call(kind, self._inside(path), self._inside(other), handle, data))

    def _inside(self, path: str) -> str:
        return os.path.relpath(path, self.base) if path else ""

    def mkdir(self, path: str) -> None:
        with self._lock:
            super().mkdir(path)
            self._add("mkdir", path)

    def create(self, path: str) -> int:
        with self._lock:
            handle = super().create(path)
            self._files[handle] = self._count
            self._add("create", path, handle=self._count)
            self._count += 1
            return handle

    def write(self, handle: int, data: bytes | memoryview) -> int:
        with self._lock:
            count = super().write(handle, data)
            self._add("write", handle=self._files[handle], data=bytes(data[:count]))
            return count

    def fsync(self, handle: int) -> None:
        with self._lock:
            self._add("fsync", handle=self._files[handle])

    def link(self, source: str, target: str) -> None:
        with self._lock:
            super().link(source, target)
            self._add("link", source, target)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            super().rename(source, target)
            self._add("rename", source, target)

    def unlink(self, path: str) -> None:
        with self._lock:
            super().unlink(path)
            self._add("unlink", path)

    def rmdir(self, path: str) -> None:
        with self._lock:
            super().rmdir(path)
            self._add("rmdir", path)

    def sync_folder(self, path: str) -> None:
        with self._lock:
            self._add("sync_folder", path)


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    safe: dict[str, _File | _Folder] = field(default_factory=dict)
    open: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)

    def now(self) -> dict[str, _File | _Folder]:
        return _applied(self.safe, self.open)


def _applied(safe: dict[str, _File | _Folder], changes: list[tuple[str, _File | _Folder | None]]
             ) -> dict[str, _File | _Folder]:
    entries = dict(safe)
    for name, entry in changes:
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry
    return entries


Tree = dict[str, bytes | None]  # paths to contents, None for a folder


class Disk:
    """Replays recorded calls; at any point it says what would be seen, and what may be left after a power cut."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.root = _Folder()
        self.files: dict[int, _File] = {}
        self.marks: list[str] = []
        for path in sorted(tree or {}):  # all of it safe
            above, name = self._above(path)
            content = tree[path]
            above.safe[name] = _Folder() if content is None else _File(content, content)

    def play(self, call: Call) -> None:
        """One more call."""
        if call.kind == "mark":
            self.marks.append(call.path)
        elif call.kind in ("write", "fsync"):
            file = self.files[call.handle]
            if call.kind == "write":
                file.data += call.data
            else:
                file.synced = file.data
        elif call.kind == "sync_folder":
            if (folder := self._folder(call.path)) is not None:
                folder.safe, folder.open = folder.now(), []
        else:
            self._change(call)

    def _change(self, call: Call) -> None:
        above, name = self._above(call.path)
        if call.kind == "mkdir":
            above.open.append((name, _Folder()))
        elif call.kind == "create":
            self.files[call.handle] = _File()
            above.open.append((name, self.files[call.handle]))
        elif call.kind in ("unlink", "rmdir"):
            if name in above.now():  # locks are made by no recorded call
                above.open.append((name, None))
        else:
            source, (target, new) = above.now()[name], self._above(call.other)
            target.open.append((new, source))
            if call.kind == "rename":
                above.open.append((name, None))

    def _folder(self, path: str) -> _Folder | None:
        at: _File | _Folder | None = self.root
        for name in () if path in ("", ".") else path.split("/"):
            at = at.now().get(name) if isinstance(at, _Folder) else None
        return at if isinstance(at, _Folder) else None

    def _above(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        inner = self._folder(folder)
        assert inner is not None, path
        return inner, name

    def seen(self) -> Tree:
        """What other processes see while the power is on."""
        return self._tree(lambda folder: folder.now(), lambda file: file.data)

    def _tree(self, entries, content) -> Tree:
        out: Tree = {}

        def walk(folder: _Folder, path: str) -> None:
            for name, entry in entries(folder).items():
                out[path + name] = None if isinstance(entry, _Folder) else content(entry)
                if isinstance(entry, _Folder):
                    walk(entry, path + name + "/")

        walk(self.root, "")
        return out

    def after_power_cut(self) -> Iterator[Tree]:
        """Everything that may be found, or a sample where that is too much; a tree may come more than once."""
        folders = self._all_folders()
        changes = [(number, index) for number, folder in enumerate(folders) for index in range(len(folder.open))]
        for chosen in _subsets(changes):
            kept = {number: _applied(folder.safe, [change for index, change in enumerate(folder.open)
                                                   if (number, index) in chosen])
                    for number, folder in enumerate(folders)}
            entries = {id(folder): kept[number] for number, folder in enumerate(folders)}
            loose = self._loose(entries)
            for variants in product(*(_variants(file) for file in loose)):
                contents = {id(file): data for file, data in zip(loose, variants, strict=True)}
                yield self._tree(lambda folder, entries=entries: entries[id(folder)],
                                 lambda file, contents=contents: contents.get(id(file), file.data))

    def _all_folders(self) -> list[_Folder]:
        folders, todo = [], [self.root]
        while todo:
            folder = todo.pop()
            if all(folder is not other for other in folders):
                folders.append(folder)
                entries = [*folder.safe.values(), *(entry for _, entry in folder.open)]
                todo += [entry for entry in entries if isinstance(entry, _Folder)]
        return folders

    def _loose(self, entries: dict[int, dict[str, _File | _Folder]]) -> list[_File]:
        """Files that can be reached and whose data is not safe."""
        unsynced, todo = [], [self.root]
        while todo:
            for entry in entries[id(todo.pop())].values():
                if isinstance(entry, _Folder):
                    todo.append(entry)
                elif entry.data != entry.synced and all(entry is not other for other in unsynced):
                    unsynced.append(entry)
        return unsynced


def _variants(file: _File) -> list[bytes]:
    whole = file.data
    return list(dict.fromkeys([file.synced, whole[:len(whole) // 2], bytes(len(whole)), whole]))


def _subsets(changes: list[tuple[int, int]]) -> Iterator[set[tuple[int, int]]]:
    if len(changes) <= ALL_SUBSETS:
        for bits in product((False, True), repeat=len(changes)):
            yield {change for change, bit in zip(changes, bits, strict=True) if bit}
        return
    noise = random.Random(len(changes))
    yield set()
    yield set(changes)
    for change in changes:
        yield {change}
        yield set(changes) - {change}
    for _ in range(SAMPLE):
        yield {change for change in changes if noise.random() < 0.5}


def materialise(tree: Tree, root: str) -> None:
    """Put a tree into an empty folder."""
    for path in sorted(tree):  # a folder sorts before what is in it
        whole, data = os.path.join(root, path), tree[path]
        if data is None:
            os.mkdir(whole, 0o700)
        else:
            with open(whole, "wb") as file:
                file.write(data)
