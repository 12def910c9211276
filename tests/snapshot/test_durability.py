"""A folder does what a power cut asks of it, and a call that fails leaves the old file or the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from locret_stream.errors import StoreError
from locret_stream.snapshot import Store
from locret_stream.snapshot.local import LocalFiles, Posix
from tests.snapshot.support import MOST, Unsynced, everything

# -- failures ---------------------------------------------------------------------------------------------------------

CALLS = ("mkdir", "create", "write", "fsync", "close", "link", "rename", "unlink", "sync_folder")


class Failing(Unsynced):
    """The n-th call of a kind fails, before it does anything or after; counts all calls."""

    def __init__(self, kind: str, number: int, code: int, after: bool = False):
        self.kind, self.number, self.code, self.after = kind, number, code, after
        self.calls: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name not in CALLS:
            return real

        def call(*arguments: Any) -> Any:
            count = self.calls[name] = self.calls.get(name, 0) + 1
            if name == self.kind and count == self.number:
                if self.after or name == "close":  # a handle is closed whatever close() says
                    real(*arguments)
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments)

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["create", "write", "fsync", "close", "rename"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, kind, code):
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/one", [b"old"])
    before = everything(tmp_path)
    files.posix = Failing(kind, 1, code)
    with pytest.raises(StoreError, match=os.strerror(code)) as caught:
        files.write("s/one", [b"new", b"more"])
    assert isinstance(caught.value.__cause__, OSError)
    assert everything(tmp_path) == before
    files.write("s/one", [b"new"])  # and the next one works
    assert files.read("s/one", MOST) == b"new"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("kind", ["mkdir", "create", "write", "fsync", "close", "link"])
def test_an_exclusive_write_that_fails_leaves_nothing(tmp_path, kind, code):
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/zero", [b"0"])
    before = everything(tmp_path)
    files.posix = Failing(kind, 1, code)
    with pytest.raises(StoreError, match=os.strerror(code)):
        files.write("s/m/one", [b"new"], exclusive=True)
    after = everything(tmp_path)
    assert {path for path, content in after.items() if content is not None} == {"store/s/zero"}
    assert {path: content for path, content in after.items() if path != "store/s/m"} == before
    files.write("s/m/one", [b"new"], exclusive=True)
    assert files.read("s/m/one", MOST) == b"new"


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_folder_that_cannot_be_synced_fails_the_write_and_leaves_old_or_new(tmp_path, exclusive):
    """The file is whole either way, but nobody may rely on it."""
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/zero", [b"0"])
    files.posix = Failing("sync_folder", 1, errno.EIO)
    with pytest.raises(StoreError, match="nothing was acknowledged"):
        files.write("s/one", [b"new"], exclusive=exclusive)
    assert {name: files.read(f"s/{name}", MOST) for name in files.sizes("s")} in (
        {"zero": b"0"}, {"zero": b"0", "one": b"new"})
    assert not any(name.startswith(".tmp-") for name in os.listdir(tmp_path / "store" / "s"))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_fsync_is_never_tried_again(tmp_path, after, parts):
    """After an error the kernel may have dropped the pages and call the next one good (the fsync of 2018)."""
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/one", [b"old"])
    files.posix = Failing("fsync", 1, errno.EIO, after)
    with pytest.raises(StoreError):
        files.write("s/one", [b"new"] * parts)
    assert files.posix.calls["fsync"] == 1
    assert "rename" not in files.posix.calls
    assert files.read("s/one", MOST) == b"old"


def test_a_short_write_goes_on_where_it_stopped(tmp_path):
    class Short(Unsynced):
        def write(self, handle: int, data: bytes | memoryview) -> int:
            return super().write(handle, data[:7])

    files = LocalFiles(tmp_path / "store", Short())
    content = bytes(range(256)) * 3
    files.write("s/one", [content[:100], content[100:]])
    assert files.read("s/one", MOST) == content


def test_an_error_of_the_parts_leaves_nothing(folder):
    def parts() -> Iterator[bytes]:
        yield b"1"
        raise KeyError("source")

    folder.write("s/one", [b"old"])
    before = everything(folder.root)
    with pytest.raises(KeyError):
        folder.write("s/one", parts())
    assert everything(folder.root) == before


@pytest.mark.parametrize("kind", ["unlink", "sync_folder"])
def test_a_delete_that_fails_is_reported(tmp_path, kind):
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/one", [b"old"])
    files.posix = Failing(kind, 1, errno.EIO)
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        files.delete("s/one")
    calls = files.posix.calls
    files.delete("s/one")
    assert files.sizes("s") == {}
    assert calls["sync_folder"] == (1 if kind == "unlink" else 2)  # the file may come back until a sync


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_folder_without_access_is_reported(folder):
    folder.write("s/one", [b"1"])
    os.chmod(Path(folder.root) / "s", 0)
    try:
        for use in (lambda: folder.read("s/one", MOST), lambda: folder.write("s/one", [b"2"]),
                    lambda: folder.sizes("s"), lambda: folder.delete("s/one")):
            with pytest.raises(StoreError, match="Permission denied"):
                use()
    finally:
        os.chmod(Path(folder.root) / "s", 0o700)


@pytest.mark.parametrize(("call", "use"), [
    ("open", lambda files: files.read("s/one", MOST)), ("readv", lambda files: files.read("s/one", MOST)),
    ("scandir", lambda files: files.sizes("s")), ("scandir", lambda files: files.folders("")),
    ("open", lambda files: files.lock("s", shared=True).__enter__())])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_system_error_while_reading_is_reported(folder, monkeypatch, call, use, code):
    folder.write("s/one", [b"1"])

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=os.strerror(code)):
            use(folder)
    assert folder.read("s/one", MOST) == b"1"


# -- durability, call by call (test_crash replays them) ------------------------------------------------------------


class Trace(Posix):
    """Writes every call down, and does it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name not in CALLS:
            return real

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return real(*arguments)

        return call


@pytest.mark.parametrize(("exclusive", "last"), [(False, ["rename"]), (True, ["link", "unlink"])])
def test_a_write_syncs_the_file_before_it_bears_the_name_and_the_folder_after(tmp_path, exclusive, last):
    files = LocalFiles(tmp_path, Trace())
    files.write("s/one", [b"old"])
    files.posix.calls.clear()
    files.write("s/two", [b"1", b"2"], exclusive=exclusive)
    assert files.posix.calls == ["create", "write", "write", "fsync", "close", *last, "sync_folder"]


def test_a_folder_that_another_process_made_is_made_durable_before_it_is_used(tmp_path):
    """It may have died, or not got that far, before it synced the folder above."""
    (tmp_path / "store" / "s" / "m").mkdir(parents=True)
    files = LocalFiles(tmp_path / "store", Trace())
    files.write("s/m/one", [b"1"])
    assert files.posix.calls[:4] == ["sync_folder", "sync_folder", "sync_folder", "create"]
    files.posix.calls.clear()
    files.write("s/m/two", [b"1"])  # once is enough
    assert files.posix.calls == ["create", "write", "fsync", "close", "rename", "sync_folder"]


def test_a_folder_that_was_removed_and_made_again_is_made_durable_again(tmp_path, monkeypatch):
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        """A disk that gives every folder the number of the one before."""
        status = list(real(path))
        status[1] = 7
        return os.stat_result(status)

    monkeypatch.setattr(os, "lstat", lstat)
    files = LocalFiles(tmp_path / "store", Trace())
    for _ in range(3):
        files.posix.calls.clear()
        files.write("s/one", [b"1"])
        made = files.posix.calls.index("mkdir")
        assert "sync_folder" in files.posix.calls[made:files.posix.calls.index("create")]
        files.remove_folder("s")


def test_a_root_above_which_nothing_may_be_read_works(tmp_path, monkeypatch):
    class Closed(Posix):
        def sync_folder(self, path: str) -> None:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "closed")
            super().sync_folder(path)

    (tmp_path / "store").mkdir()
    files = LocalFiles(tmp_path / "store", Closed())
    files.write("s/one", [b"1"])
    assert files.read("s/one", MOST) == b"1"


# -- what a place must be able to do --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_place_without_hard_links_is_named_before_anything_is_worth_saving(tmp_path, code):
    """As exFAT and some network file systems are: pages could be written there, and no manifest ever."""
    class Flat(Unsynced):
        def link(self, source: str, target: str) -> None:
            raise OSError(code, os.strerror(code))

    store = Store(tmp_path / "store", files=LocalFiles(tmp_path / "store", Flat()))
    with pytest.raises(StoreError, match="there are no hard links there") as caught:
        store.probe()
    assert "disk has room" not in str(caught.value)
    assert os.listdir(tmp_path / "store") == []


def test_a_place_without_locks_is_no_place_for_a_save(tmp_path, monkeypatch):
    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", unknown)
        with pytest.raises(StoreError, match=os.strerror(errno.ENOLCK)):
            Store(tmp_path / "store").probe()


def test_a_probe_leaves_nothing(store):
    store.probe()
    assert store.files.folders("") == [] and store.files.sizes("") == {} and store.list() == []


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Every call that flushes, and whether it is of a folder; on a system that has both kinds, as macOS."""
    calls: list[tuple[str, bool]] = []

    def note(what: str, handle: int) -> None:
        calls.append((what, stat.S_ISDIR(os.fstat(handle).st_mode)))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda handle, call: note(f"full {call}", handle))
    monkeypatch.setattr(os, "fsync", lambda handle: note("plain", handle))
    return calls


def test_where_a_drive_is_told_to_empty_its_cache_by_another_call_that_is_made(tmp_path, flushes):
    LocalFiles(tmp_path / "store").write("s/one", [b"1"])
    assert flushes[-2:] == [("full 51", False), ("full 51", True)]
    assert {what for what, _ in flushes} == {"full 51"}


def test_where_the_file_system_does_not_know_that_call_the_usual_one_is_made(tmp_path, flushes, monkeypatch):
    def refused(handle: int, call: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    LocalFiles(tmp_path / "store").write("s/one", [b"1"])
    assert set(flushes) == {("plain", False), ("plain", True)}


def test_a_failure_of_that_call_is_not_made_good_by_the_usual_one(tmp_path, flushes, monkeypatch):
    files = LocalFiles(tmp_path / "store")
    files.write("s/one", [b"old"])
    flushes.clear()

    def broken(handle: int, call: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "fcntl", broken)
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        files.write("s/one", [b"new"])
    assert not flushes and files.read("s/one", MOST) == b"old"
