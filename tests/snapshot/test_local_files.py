"""A folder as a place: its locks, and whatever may lie in it beside the plain files of the store."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotError, StoreError
from locret_stream.snapshot.files import Busy, Exists
from locret_stream.snapshot.local import LocalFiles
from tests.processes import run_python
from tests.snapshot.support import MOST, Unsynced, everything

# -- locks of a folder ------------------------------------------------------------------------------------------------


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
@pytest.mark.thorough(but=1)
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
                lambda: folder.sync_folder("s/pages"), lambda: folder.sweep("s/pages", 0)):
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


def test_a_file_in_the_way_of_a_folder_is_reported(tmp_path):
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
        listed = entries(name)
        (Path(folder.root) / "s" / "one").unlink(missing_ok=True)
        return listed

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
