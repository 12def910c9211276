"""An object store in memory that says a version of every object, as S3, Azure and Google do, and counts requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

SCHEME = "objects"
_counted = threading.Lock()


class Objects(MemoryFileSystem):
    """fsspec's memory, with an ETag in every entry.

    Attributes:
        requests: what was asked, in order, as (call, path). A listing is one for a thousand objects. delay_s: of each.
    """

    protocol = SCHEME
    requests: list[tuple[str, str]] = []
    delay_s = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix(f"{SCHEME}://"))

    def _asked(self, call: str, path: str) -> None:
        with _counted:
            self.requests.append((call, path))
        time.sleep(self.delay_s)

    def _with_version(self, entry: dict[str, Any]) -> dict[str, Any]:
        file = self.store.get(entry["name"])
        return entry if file is None else entry | {"ETag": f"{file.created.timestamp():.6f}-{id(file)}"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._asked("GET", path)
        if path not in self.store:
            raise FileNotFoundError(path)
        data: bytes = self.store[path].getvalue()
        if not data and (start, end) != (None, None):
            raise OSError("InvalidRange")
        return data[start:end]

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._asked("PUT", path)
        path = self._strip_protocol(path)
        with _counted:
            if options.get("mode") == "create" and path in self.store:
                raise FileExistsError(path)
            self.store[path] = MemoryFile(self, path, bytes(value))

    def rm_file(self, path: str) -> None:
        self._asked("DELETE", path)
        super().rm_file(path)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._asked("HEAD", path)
        return self._with_version(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._asked("LIST", path)
        return [self._with_version(entry) for entry in super().ls(path, True)] if detail else super().ls(path, False)

    def find(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._asked("LIST", path)
        start = self._strip_protocol(path) + "/"
        found = {name: self._with_version({"name": name, "size": file.size, "type": "file"})
                 for name, file in sorted(self.store.items()) if name.startswith(start)}
        return found if detail else list(found)


fsspec.register_implementation(SCHEME, Objects, clobber=True)


@contextmanager
def counting() -> Iterator[list[tuple[str, str]]]:
    """The requests of the block, in order."""
    requests = Objects.requests = []
    yield requests
