"""URLs, and what object stores do differently: order, cached listings, errors, ages."""

from __future__ import annotations

import errno
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from locret_stream.errors import StoreError
from locret_stream.snapshot import Store
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.store import open_files
from tests.snapshot.support import KEY, MOST, begin, holds, save, sound


@pytest.mark.parametrize("scheme", ["file://", "local://", ""])
def test_a_folder_is_a_folder_by_any_name(tmp_path, scheme):
    files = open_files(f"{scheme}{tmp_path}/store")
    assert isinstance(files, LocalFiles) and files.root == f"{tmp_path}/store"


@pytest.mark.parametrize("url", ["nosuchscheme://x", "s3"])
def test_a_url_that_nobody_knows_is_reported(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "://" in url:
        with pytest.raises(StoreError, match="expected a folder, or a URL that fsspec knows"):
            open_files(url)
    else:
        assert isinstance(open_files(url), LocalFiles)  # a relative path


@pytest.mark.parametrize("url", ["local://{}", "dir::local://{}"])
def test_a_place_that_cannot_create_in_one_step_is_refused(tmp_path, url):
    """fsspec looks whether a file is there and writes it then: two owners would both win."""
    with pytest.raises(StoreError, match="two owners"):
        RemoteFiles(url.format(tmp_path))


class Backwards(MemoryFileSystem):
    """Lists in no useful order, with the folder's own marker, as some object stores do."""

    protocol = "backwards"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("backwards://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        entries = super().ls(path, detail, **options)[::-1]
        return [*entries, {"name": self._strip_protocol(path) + "/", "size": 0, "type": "file"}] if detail else entries


def test_a_place_that_lists_in_any_order_is_sorted(tmp_path):
    fsspec.register_implementation("backwards", Backwards, clobber=True)
    files = RemoteFiles(f"backwards://{tmp_path}")
    for name in ("1", "3", "2"):
        files.write(f"s/{name}", [b"1"])
    assert list(files.sizes("s")) == ["1", "2", "3"]
    assert files.folders("") == ["s"]


class Remembering(Backwards):
    """Answers from listings it has seen, as s3fs does, until it is told to forget them."""

    protocol = "remembering"
    seen: dict[str, list[Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("remembering://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        if path not in self.seen:
            self.seen[path] = super().ls(path, True)
        return self.seen[path]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        above = path.rpartition("/")[0]
        if above in self.seen:
            for entry in self.seen[above]:
                if entry["name"] == path:
                    return entry
            raise FileNotFoundError(path)
        return super().info(path, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


def test_a_listing_that_a_place_keeps_hides_nothing(tmp_path):
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    files = RemoteFiles(f"remembering://{tmp_path}")
    files.write("s/one", [b"1"])
    for name, content in (("two", b"22"), ("one", b"longer")):
        assert files.sizes("s")["one"] == 1
        files.fs.pipe_file(f"{files.root}/s/{name}", content)  # as another owner would: nobody tells this one
        assert files.read(f"s/{name}", MOST) == content
        assert files.sizes("s")[name] == len(content)


class Odd(Exception):
    """As botocore's and aiohttp's errors: no OSError."""


@pytest.mark.parametrize(("call", "use"), [
    ("pipe_file", lambda files: files.write("s/one", [b"2"])), ("find", lambda files: files.looking("s")),
    ("cat_file", lambda files: files.read("s/one", MOST)), ("ls", lambda files: files.sizes("s")),
    ("rm_file", lambda files: files.delete("s/one")), ("rm", lambda files: files.remove_folder("s"))])
@pytest.mark.parametrize("error", [Odd("no credentials"), TimeoutError(), OSError(errno.EIO, "broken"),
                                   PermissionError(errno.EACCES, "denied"), NotImplementedError()])
def test_whatever_a_place_raises_is_a_store_error(tmp_path, monkeypatch, call, use, error):
    files = RemoteFiles(f"memory://{tmp_path}")
    files.write("s/one", [b"1"])

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files.fs, call, fail)
        with pytest.raises(StoreError) as caught:
            use(files)
    assert caught.value.__cause__ is error and str(caught.value).count("memory://") == 1
    assert files.read("s/one", MOST) == b"1"


def test_a_place_that_cannot_tell_ages_calls_everything_young(tmp_path, monkeypatch):
    files = RemoteFiles(f"memory://{tmp_path}")
    files.write("s/one", [b"1"])

    def fail(path: str) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(files.fs, "modified", fail)
    assert files.age_s("s/one") == 0.0


class Careless(MemoryFileSystem):
    """Is told to create a file only if there is none, and does not heed it, as some servers do not."""

    protocol = "careless"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("careless://"))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        super().pipe_file(path, value)


@pytest.mark.usefixtures("spools")
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_place_that_creates_what_exists_is_refused_by_the_first_save(tmp_path, key):
    fsspec.register_implementation("careless", Careless, clobber=True)
    store = Store(f"careless://{tmp_path}", key=key)
    branch, toy = begin(store, "alice", tokens=9)
    for _ in range(2):
        with pytest.raises(StoreError, match="two owners could overwrite each other"):
            save(branch, toy)
    assert store.list() == [] and store.files.sizes("") == {}
    with pytest.raises(StoreError, match="two owners could overwrite each other"):
        store.probe()


@pytest.mark.usefixtures("spools")
def test_what_a_crash_leaves_of_that_trial_is_no_session(remote):
    branch, toy = begin(remote, "alice", tokens=9)
    save(branch, toy)
    files = remote.files
    assert not [name for name in files.sizes("") if name.startswith("probe-")], "it is deleted"
    files.fs.pipe_file(f"{files.root}/probe-{'0' * 16}", b"")
    assert [info.name for info in remote.list()] == ["alice"] and sound(remote) and remote.gc().removed == ()
    assert holds(remote, "alice", toy.record())
    remote.forget("alice")
    assert remote.list() == [] == remote.verify()
