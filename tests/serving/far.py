"""The scripted engine of `tests.langchain.support` in other processes: what it says, and what it saw, lie in a folder.

One such server is enough for many tests: each has a tenant of its own. `python -m tests.serving.far` runs one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from locret_stream import Store
from locret_stream.context import streams
from locret_stream.engine import state
from locret_stream.serving.app import make_app
from locret_stream.serving.keys import read_keys
from locret_stream.serving.server import Server
from locret_stream.serving.service import Service
from tests import processes
from tests.langchain.support import Script, answer, runtime
from tests.serving.support import MODEL, Reached

KEYS = [f"tenant{number}:key{number}" for number in range(200)]


def follow(folder: Path) -> None:
    """Every generation of this process follows the script that lies in a folder; while there is a file "free", none."""
    sampled, script = streams.sample, Script()

    def say(shown: str) -> str:
        _write(folder / "seen", script.seen)
        said = folder / "say"
        return said.read_text() if said.exists() else answer(shown)

    def sample(*arguments: Any) -> int:
        return (sampled if (folder / "free").exists() else script.sample)(*arguments)

    script.say, state.HISTORY, streams.sample = say, 65536, sample


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


class FarScript:
    """The script that other processes follow, as tests use a `Script`; what they say depends on nothing."""

    def __init__(self, folder: Path):
        self._folder = folder
        for name in ("say", "seen", "free"):
            (folder / name).unlink(missing_ok=True)

    @property
    def seen(self) -> str:
        return (self._folder / "seen").read_text()

    @property
    def say(self) -> Callable[[str], str]:
        raise NotImplementedError

    @say.setter
    def say(self, say: Callable[[str], str]) -> None:
        _write(self._folder / "say", say(""))

    def free(self) -> None:
        (self._folder / "free").touch()


class Place(Protocol):
    """Where a server runs."""

    def start(self, options: dict[str, Any]) -> str:
        """Its URL, once it is up, with these options of the runtime."""

    def restart(self) -> str:
        """Its URL, once it was ended and is up again."""


@dataclass
class Far:
    """A server elsewhere, in place of `tests.serving.support.serving`.

    Attributes:
        folder: of the script.
    """

    place: Place
    folder: Path
    _tenants: list[Path] = field(default_factory=list)

    @contextmanager
    def serving(self, store: Path, **options: Any) -> Iterator[Reached]:
        """The server, as the tenant of that folder; where there is one already, it was ended and started again."""
        if store in self._tenants:
            url = self.place.restart()
        else:
            self._tenants.append(store)
            url = self.place.start(options)
        reached = Reached(url, f"key{self._tenants.index(store)}")
        with closing(reached.http):
            yield reached


class OneProcess:
    """A server process over a store. It begins anew as another program in the same process, so that it outlives the
    tests in which it does."""

    def __init__(self, store: Path, folder: Path):
        self._process = processes.start_python("-m", "tests.serving.far", store, folder, "{}", stderr=None,
                                               stdin=processes.PIPE)
        self._options: dict[str, Any] = {}
        self._url = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server did not start"
        return json.loads(line)["url"]

    def start(self, options: dict[str, Any]) -> str:
        if options != self._options:
            self._options = options
            return self.restart()
        return self._url

    def restart(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._options) + "\n")
        self._process.stdin.flush()
        self._url = self._read()
        return self._url


async def main(store: str, folder: str, options: str) -> None:
    """Serve until a line is read; then begin anew with the options that it gives."""
    follow(Path(folder))
    service = Service(runtime(Store(store, keep_last=32), **json.loads(options)), model=MODEL)

    def listening(port: int) -> None:
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)

    server = Server(make_app(service, read_keys(KEYS)), service, host="127.0.0.1", port=0, grace_s=30,
                    listening=listening)
    serving = asyncio.create_task(server.serve())
    line = await asyncio.to_thread(sys.stdin.readline)
    server._drain(0)
    await serving
    if line:
        os.execv(sys.executable, [sys.executable, "-m", "tests.serving.far", store, folder, line])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
