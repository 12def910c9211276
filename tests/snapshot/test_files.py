"""Every place that can hold a store keeps one contract; a folder also does what a power cut asks of it.

The contract runs on S3 too where s3fs and moto[server] are installed: they are not among the requirements.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound, StoreError
from locret_stream.snapshot.files import Busy, Exists, Files
from locret_stream.snapshot.local import LocalFiles, Posix
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.store import open_files
from tests.processes import run_python
from tests.snapshot.support import Unsynced, everything

MOST = 1 << 20


MAKES = ["folder", "file URL", "memory", *(["s3"] if find_spec("s3fs") and find_spec("moto") else [])]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Where a server listens that plays S3."""
    import boto3
    from moto.server import ThreadedMotoServer
    running = ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", aws_access_key_id="k",
                 aws_secret_access_key="s").create_bucket(Bucket="bucket")
    yield f"http://{host}:{port}"
    running.stop()


def _s3_files(endpoint: str, name: str) -> RemoteFiles:
    return RemoteFiles(f"s3://bucket/{name}", key="k", secret="s", endpoint_url=endpoint,
                       client_kwargs={"region_name": "us-east-1"})


@pytest.fixture(params=MAKES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """One empty place of each make."""
    if request.param == "folder":
        return open_files(tmp_path / "store")
    if request.param == "file URL":
        return open_files(f"file://{tmp_path}/store")
    if request.param == "memory":
        return open_files(f"memory://{tmp_path}")
    return _s3_files(request.getfixturevalue("s3"), tmp_path.name)


# -- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[], [b""], [b"abc"], [b"a", b"", b"bc"], [bytes(range(256)) * 5000, b"end"]])
def test_what_was_written_is_read(files, parts):
    files.write("s/pages/one", parts)
    assert files.read("s/pages/one", 2 * MOST) == b"".join(parts)
    assert files.sizes("s/pages") == {"one": sum(map(len, parts))}


def test_parts_may_come_from_a_generator(files):
    files.write("s/one", (bytes([number]) * 1000 for number in range(50)))
    assert files.read("s/one", MOST) == b"".join(bytes([number]) * 1000 for number in range(50))


def test_what_is_read_can_be_written_to(files):
    """Tensors are views of it."""
    files.write("s/one", [b"abc"])
    found = files.read("s/one", MOST)
    found[0] = 7
    assert files.read("s/one", MOST) == b"abc"


def test_another_write_replaces_a_file_whole(files):
    files.write("s/one", [b"old and long"])
    files.write("s/one", [b"new"])
    assert files.read("s/one", MOST) == b"new"
    assert list(files.sizes("s")) == ["one"]


def test_an_exclusive_write_never_replaces(files):
    files.write("s/one", [b"first"], exclusive=True)
    with pytest.raises(Exists):
        files.write("s/one", [b"second"], exclusive=True)
    assert files.read("s/one", MOST) == b"first"
    assert files.sizes("s") == {"one": 5}


def test_an_exclusive_write_never_replaces_what_a_plain_one_wrote(files):
    files.write("s/one", [b""])
    with pytest.raises(Exists):
        files.write("s/one", [b"second"], exclusive=True)
    assert files.read("s/one", MOST) == b""


def test_what_was_deleted_can_be_created_exclusively(files):
    files.write("s/one", [b"first"], exclusive=True)
    files.delete("s/one")
    files.write("s/one", [b"second"], exclusive=True)
    assert files.read("s/one", MOST) == b"second"


def test_one_of_many_exclusive_writes_wins(files):
    if isinstance(files, RemoteFiles) and isinstance(files.fs, MemoryFileSystem):
        pytest.skip("fsspec's memory file system looks first and writes then; it lives inside one process")
    files.write("s/zero", [b""])
    won, start = [], threading.Barrier(8)

    def write(number: int) -> None:
        start.wait(10)
        with contextlib.suppress(Exists):
            files.write("s/one", [bytes([number]) * 100], exclusive=True)
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert files.read("s/one", MOST) == bytes(won) * 100


def test_a_reader_sees_old_or_new_and_never_between(files):
    if isinstance(files, RemoteFiles) and not isinstance(files.fs, MemoryFileSystem):
        pytest.skip("many requests; the server promises it")
    both, stop, strange = {b"a" * 50_000, b"b" * 70_000}, threading.Event(), []
    files.write("s/one", [b"a" * 50_000])

    def read() -> None:
        while not stop.is_set():
            found = bytes(files.read("s/one", MOST))
            if found not in both:
                strange.append(len(found))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        for content in both:
            files.write("s/one", [content[:30_000], content[30_000:]])
    stop.set()
    thread.join(30)
    assert not strange


def test_a_file_of_just_the_limit_is_read_and_one_byte_more_is_refused(files):
    files.write("s/one", [b"12345"])
    assert files.read("s/one", 5) == b"12345"
    with pytest.raises(SnapshotCorrupt, match=r"has 5 bytes; expected at most 4"):
        files.read("s/one", 4)


def test_the_beginning_of_a_file_is_read_alone(files):
    files.write("s/one", [b"12345"])
    files.write("s/empty", [b""])
    assert [files.head("s/one", count) for count in (2, 5, 9)] == [b"12", b"12345", b"12345"]
    assert files.head("s/empty", 9) == b""
    with pytest.raises(SnapshotNotFound, match="no s/two in"):
        files.head("s/two", 9)


def test_a_missing_file_is_not_found(files):
    with pytest.raises(SnapshotNotFound, match="no s/one in"):
        files.read("s/one", MOST)
    files.write("s/two", [b""])
    with pytest.raises(SnapshotNotFound):
        files.read("s/one", MOST)
    with pytest.raises(SnapshotError):
        files.read("s/two/three", MOST)


def test_a_folder_is_not_read(files):
    files.write("s/pages/one", [b"abc"])
    with pytest.raises(SnapshotCorrupt):  # not a place that failed: it can be rebuilt
        files.read("s/pages", MOST)


def test_files_and_folders_of_a_folder_are_told_apart(files):
    assert files.sizes("s") == {} and files.folders("s") == [] and files.folders("") == []
    for path, content in (("s/a", b"1"), ("s/b", b"22"), ("s/m/x/1.snap", b"333"), ("s/pages/p", b"4"), ("t/a", b"")):
        files.write(path, [content])
    assert files.sizes("s") == {"a": 1, "b": 2}
    assert files.folders("s") == ["m", "pages"]
    assert files.sizes("s/m") == {} and files.folders("s/m") == ["x"]
    assert files.sizes("s/m/x") == {"1.snap": 3}
    assert files.folders("") == ["s", "t"] and files.sizes("") == {}
    assert files.sizes("s/a") == {} and files.folders("s/a") == []  # a file is no folder


def test_names_come_sorted(files):
    for name in ("b", "c", "a", "10", "9"):
        files.write(f"s/{name}", [b""])
        files.write(f"s/{name}-folder/x", [b""])
    assert list(files.sizes("s")) == ["10", "9", "a", "b", "c"]
    assert files.folders("s") == ["10-folder", "9-folder", "a-folder", "b-folder", "c-folder"]


def test_a_deleted_file_is_gone_and_deleting_nothing_is_nothing(files):
    files.write("s/one", [b"1"])
    files.write("s/two", [b"2"])
    files.delete("s/one")
    files.delete("s/one")
    files.delete("nowhere/one")
    assert files.sizes("s") == {"two": 1}


def test_what_one_owner_writes_and_deletes_the_other_sees(files, tmp_path, request):
    """Listings that were kept must not hide it."""
    if isinstance(files, LocalFiles):
        other = LocalFiles(files.root)
    elif isinstance(files.fs, MemoryFileSystem):
        other = RemoteFiles(files.url)
    else:
        fsspec.filesystem("s3").clear_instance_cache()
        other = _s3_files(request.getfixturevalue("s3"), tmp_path.name)
        assert other.fs is not files.fs
    assert other.sizes("s") == {}
    files.write("s/one", [b"1"])
    assert other.sizes("s") == {"one": 1} and other.read("s/one", MOST) == b"1"
    files.write("s/two", [b"22"])
    assert other.read("s/two", MOST) == b"22"
    files.delete("s/one")
    with pytest.raises(SnapshotNotFound):
        other.read("s/one", MOST)
    assert other.sizes("s") == {"two": 2}


def test_a_removed_folder_is_gone_with_all_in_it_and_others_stay(files):
    for path in ("s/one", "s/m/x/1", "s/m/y/2", "t/one"):
        files.write(path, [b"1"])
    files.remove_folder("s")
    files.remove_folder("s")
    files.remove_folder("nowhere")
    assert files.folders("") == ["t"] and files.sizes("s") == {} and files.sizes("s/m/x") == {}
    files.write("s/one", [b"anew"])
    assert files.read("s/one", MOST) == b"anew"


def test_a_folder_is_dropped_only_when_nothing_is_in_it(files):
    files.write("s/one", [b"1"])
    files.drop_folder("s")
    files.drop_folder("nowhere")
    assert files.sizes("s") == {"one": 1} and files.folders("nowhere") == []
    files.delete("s/one")
    files.drop_folder("s")
    if isinstance(files, LocalFiles):
        assert files.folders("") == []
    with files.lock("s", shared=True):
        files.drop_folder("s")
        files.write("s/one", [b"1"])
    assert files.read("s/one", MOST) == b"1"


def test_a_new_file_is_young_and_ages(files):
    files.write("s/one", [b"1"])
    age = files.age_s("s/one")
    assert -1 < age < 60
    time.sleep(1.1 if isinstance(files, RemoteFiles) and not isinstance(files.fs, MemoryFileSystem) else 0.02)
    assert files.age_s("s/one") > age


def test_the_age_of_nothing_is_young(files):
    assert files.age_s("s/one") == 0.0


def test_files_that_are_there_can_be_settled(files):
    files.write("s/pages/one", [b"1"])
    files.settle("s/pages")
    assert files.read("s/pages/one", MOST) == b"1"


@pytest.mark.parametrize("path", ["../one", "s/../../one", "/etc/passwd", "", "s/.."])
def test_a_path_that_leaves_the_place_is_an_error_of_the_library(files, path):
    for use in (lambda: files.write(path, [b"1"]), lambda: files.read(path, MOST), lambda: files.delete(path)):
        with pytest.raises(AssertionError):
            use()


def test_a_lock_tells_whether_there_is_one(files):
    with files.lock("s", shared=True) as one, files.lock("s", shared=True) as two:
        assert one is two is isinstance(files, LocalFiles)
    with files.lock("s", shared=False, wait=False) as alone:
        assert alone is isinstance(files, LocalFiles)


# -- locks of a folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> LocalFiles:
    """A folder on a disk."""
    return LocalFiles(tmp_path / "store")


@pytest.mark.parametrize(("held", "wanted"), [(True, False), (False, True), (False, False)])
def test_an_exclusive_lock_excludes_and_a_shared_one_does_not(folder, held, wanted):
    other = LocalFiles(folder.root)
    before = len(os.listdir("/proc/self/fd"))
    with folder.lock("s", shared=held), pytest.raises(Busy), other.lock("s", shared=wanted, wait=False):
        pytest.fail("two have it")
    assert len(os.listdir("/proc/self/fd")) == before
    with folder.lock("s", shared=True), other.lock("s", shared=True, wait=False), other.lock("t", shared=False):
        pass
    with other.lock("s", shared=wanted, wait=False) as free:
        assert free


def test_a_lock_is_waited_for(folder):
    order = []

    def take() -> None:
        with LocalFiles(folder.root).lock("s", shared=False):
            order.append("second")

    with folder.lock("s", shared=True):
        thread = threading.Thread(target=take)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_a_lock_is_given_back_after_an_error(folder):
    with pytest.raises(KeyError), folder.lock("s", shared=False):
        raise KeyError
    with folder.lock("s", shared=False, wait=False) as free:
        assert free


FORKED = """
import os, signal, sys
from locret_stream.snapshot.files import Busy
from locret_stream.snapshot.local import LocalFiles

def free():
    try:
        with LocalFiles(sys.argv[1]).lock("s", shared=False, wait=False):
            return True
    except Busy:
        return False

left, ending = os.pipe(), os.pipe()
lock = LocalFiles(sys.argv[1]).lock("s", shared=True)
lock.__enter__()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.close(ending[1])
    if sys.argv[2] == "leaves":
        lock.__exit__(None, None, None)
    os.write(left[1], b"1")
    os.read(ending[0], 1)
    os._exit(0)
os.read(left[0], 1)
held = free()
lock.__exit__(None, None, None)
print(held, free())
os.close(ending[1])
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("child", ["stays", "leaves"])
def test_a_process_forked_under_a_lock_neither_keeps_it_nor_gives_it_back(tmp_path, child):
    assert run_python("-c", FORKED, tmp_path / "store", child, timeout_s=60).stdout == "False True\n"


def test_whoever_waited_for_a_lock_that_was_removed_takes_the_new_one(folder):
    """Else two would be alone in one folder: one with the file that is there, one with a file that nobody sees."""
    waiting, done = threading.Event(), []

    def take() -> None:
        waiting.set()
        with LocalFiles(folder.root).lock("s", shared=False):
            with pytest.raises(Busy), LocalFiles(folder.root).lock("s", shared=False, wait=False):
                pytest.fail("two are alone")
            done.append(True)

    with folder.lock("s", shared=False):
        thread = threading.Thread(target=take)
        thread.start()
        waiting.wait(10)
        time.sleep(0.1)
        folder.remove_folder("s")
    thread.join(30)
    assert done == [True]


def test_a_folder_that_is_removed_loses_its_lock_last(tmp_path):
    calls = []

    class Watch(Unsynced):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            calls.append(os.path.basename(path))

    files = LocalFiles(tmp_path / "store", Watch())
    files.write("s/zz", [b"1"])
    files.write("s/aa/one", [b"1"])
    with files.lock("s", shared=False):
        files.remove_folder("s")
    assert sorted(calls) == ["lock", "one", "zz"] and calls[-1] == "lock"


def test_a_folder_in_which_somebody_begins_anew_is_not_removed(tmp_path):
    class Late(Unsynced):
        def rmdir(self, path: str) -> None:
            LocalFiles(tmp_path / "store", Unsynced()).write("s/new", [b"new"])
            super().rmdir(path)

    LocalFiles(tmp_path / "store").write("s/one", [b"1"])
    LocalFiles(tmp_path / "store", Late()).remove_folder("s")
    assert LocalFiles(tmp_path / "store").read("s/new", MOST) == b"new"


# -- what may lie in a folder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_what_is_stored(tmp_path, mask):
    before = os.umask(mask)
    try:
        files = LocalFiles(tmp_path / "a" / "store")
        files.write("s/m/one", [b"1"])
        files.write("s/m/two", [b"1"], exclusive=True)
        with files.lock("s", shared=True):
            pass
    finally:
        os.umask(before)
    for path in ("a", "a/store", "a/store/s", "a/store/s/m"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700, path
    for path in ("s/m/one", "s/m/two", "s/lock"):
        assert stat.S_IMODE((tmp_path / "a" / "store" / path).stat().st_mode) == 0o600, path


def _strange(kind: str, path: Path) -> None:
    """Put something that is no plain file at a path."""
    if kind == "link":
        (path.parent.parent / "elsewhere").write_bytes(b"secret")
        path.symlink_to(path.parent.parent / "elsewhere")
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nothing")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket may have some 100 characters
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)
            server.close()
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: endless
        except PermissionError:
            pytest.skip("only root makes devices")


KINDS = ["link", "dangling link", "folder", "fifo", "socket", "device"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_not_read_and_does_not_hang(folder, kind):
    folder.write("s/one", [b"1"])
    _strange(kind, Path(folder.root) / "s" / "strange")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for use in (folder.read, folder.head):
            with pytest.raises(SnapshotCorrupt, match="strange"):
                use("s/strange", MOST)
    assert len(os.listdir("/proc/self/fd")) == before  # no handle stays open


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_counts_as_there_for_an_exclusive_write(folder, kind):
    folder.write("s/one", [b"1"])
    _strange(kind, Path(folder.root) / "s" / "strange")
    with pytest.raises(Exists):
        folder.write("s/strange", [b"2"], exclusive=True)
    assert ("strange" in folder.sizes("s")) is (kind != "folder")
    assert not any(name.startswith(".tmp-") for name in os.listdir(Path(folder.root) / "s"))


def test_a_write_replaces_a_link_and_not_what_it_points_at(folder, tmp_path):
    folder.write("s/one", [b"1"])
    _strange("link", Path(folder.root) / "s" / "two")
    folder.write("s/two", [b"2"])
    assert folder.read("s/two", MOST) == b"2"
    assert (Path(folder.root) / "elsewhere").read_bytes() == b"secret"


@pytest.mark.parametrize("level", ["s", "s/pages"])
def test_a_link_on_the_way_is_not_followed(folder, tmp_path, level):
    outside = tmp_path / "outside"
    (outside / "pages").mkdir(parents=True)
    (outside / "pages" / "one").write_bytes(b"secret")
    (outside / "one").write_bytes(b"secret")
    place = Path(folder.root) / level
    place.parent.mkdir(parents=True)
    place.symlink_to(outside if level == "s" else outside / "pages")
    before = everything(outside)
    for use in (lambda: folder.read("s/pages/one", MOST), lambda: folder.write("s/pages/one", [b"1"]),
                lambda: folder.write("s/pages/two", [b"1"], exclusive=True), lambda: folder.delete("s/pages/one"),
                lambda: folder.sizes("s/pages"), lambda: folder.folders("s/pages"),
                lambda: folder.settle("s/pages"), lambda: folder.sweep("s/pages", 0)):
        with pytest.raises((SnapshotCorrupt, StoreError), match=r"is a link|not a folder"):
            use()
    with pytest.raises((SnapshotCorrupt, StoreError)), folder.lock(level, shared=False):
        pytest.fail("locked through a link")
    with contextlib.suppress(SnapshotError):
        folder.remove_folder("s")
    assert everything(outside) == before


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    files = LocalFiles(tmp_path / "store")
    files.write("s/one", [b"1"])
    assert files.read("s/one", MOST) == b"1" and (tmp_path / "real" / "s" / "one").exists()


def test_a_link_that_leads_nowhere_is_no_store(tmp_path):
    (tmp_path / "store").symlink_to(tmp_path / "nothing")
    with pytest.raises(StoreError):
        LocalFiles(tmp_path / "store").write("s/one", [b"1"])
    assert not (tmp_path / "nothing").exists()


def test_a_file_in_the_way_of_a_folder_is_told(tmp_path):
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(StoreError):
        LocalFiles(tmp_path / "store").write("s/one", [b"1"])
    files = LocalFiles(tmp_path / "other")
    files.write("s", [b"a file"])
    with pytest.raises(StoreError, match="not a folder"):
        files.write("s/one", [b"1"])


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(folder, monkeypatch):
    folder.write("s/one", [b"12345"])
    monkeypatch.setattr(os, "readv", lambda handle, buffers: 0)
    with pytest.raises(SnapshotCorrupt, match="became shorter"):
        folder.read("s/one", MOST)


def test_nothing_is_allocated_for_a_file_over_the_limit(folder):
    folder.write("s/one", [b"1"])
    os.truncate(Path(folder.root) / "s" / "one", 1 << 43)  # a hole: 8 TiB that need no room
    with pytest.raises(SnapshotCorrupt, match="expected at most"):
        folder.read("s/one", MOST)


def test_a_file_deleted_while_a_folder_is_read_is_left_out(folder, monkeypatch):
    folder.write("s/one", [b"1"])
    folder.write("s/two", [b"2"])
    entries = folder._entries

    def late(name: str) -> list[os.DirEntry[str]]:
        found = entries(name)
        (Path(folder.root) / "s" / "one").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(folder, "_entries", late)
    assert folder.sizes("s") == {"two": 1}


# -- temporary files --------------------------------------------------------------------------------------------------


def test_temporary_files_are_not_listed_and_old_ones_are_swept(folder):
    folder.write("s/one", [b"1"])
    young, old = Path(folder.root) / "s" / ".tmp-young", Path(folder.root) / "s" / ".tmp-old"
    young.write_bytes(b"x")
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    assert folder.sizes("s") == {"one": 1}
    assert folder.sweep("s", 500) == [".tmp-old"]
    assert young.exists() and not old.exists()
    os.utime(young, (time.time() + 1000, time.time() + 1000))  # of a clock that went back
    assert folder.sweep("s", 0) == [".tmp-young"]
    assert folder.sweep("s", 0) == folder.sweep("nowhere", 0) == []
    assert os.listdir(Path(folder.root) / "s") == ["one"]


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
def test_a_delete_that_fails_is_told(tmp_path, kind):
    files = LocalFiles(tmp_path / "store", Unsynced())
    files.write("s/one", [b"old"])
    files.posix = Failing(kind, 1, errno.EIO)
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        files.delete("s/one")
    calls = files.posix.calls
    files.delete("s/one")
    assert files.sizes("s") == {}
    assert calls["sync_folder"] == (1 if kind == "unlink" else 2)  # gone already is not durable already


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_folder_without_access_is_told(folder):
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
def test_a_system_error_while_reading_is_told(folder, monkeypatch, call, use, code):
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
        found = list(real(path))
        found[1] = 7
        return os.stat_result(found)

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


# -- other places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file://", "local://", ""])
def test_a_folder_is_a_folder_by_any_name(tmp_path, scheme):
    files = open_files(f"{scheme}{tmp_path}/store")
    assert isinstance(files, LocalFiles) and files.root == f"{tmp_path}/store"


@pytest.mark.parametrize("url", ["nosuchscheme://x", "s3"])
def test_a_url_that_nobody_knows_is_told(url, tmp_path, monkeypatch):
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
        found = super().ls(path, detail, **options)[::-1]
        return [*found, {"name": self._strip_protocol(path) + "/", "size": 0, "type": "file"}] if detail else found


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
    ("pipe_file", lambda files: files.write("s/one", [b"2"])), ("info", lambda files: files.read("s/one", MOST)),
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
