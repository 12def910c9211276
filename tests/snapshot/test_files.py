"""Every place that can hold a store keeps one contract.

The contract runs on S3 too where s3fs and moto[server] are installed: they are not among the requirements.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound
from locret_stream.snapshot.files import Exists, Files
from locret_stream.snapshot.listed import Listed
from locret_stream.snapshot.local import LocalFiles
from locret_stream.snapshot.remote import RemoteFiles
from locret_stream.snapshot.store import open_files
from tests.snapshot.object_store import SCHEME
from tests.snapshot.support import MOST

MAKES = ["folder", "file URL", "memory", "listing", *(["s3"] if find_spec("s3fs") and find_spec("moto") else [])]


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
    if request.param == "listing":
        return open_files(f"{SCHEME}://{tmp_path}").looking("s")
    return _s3_files(request.getfixturevalue("s3"), tmp_path.name)


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
    data = files.read("s/one", MOST)
    data[0] = 7
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
            data = bytes(files.read("s/one", MOST))
            if data not in both:
                strange.append(len(data))

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


def test_files_and_folders_of_a_folder_are_distinguished(files):
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
    elif isinstance(files, Listed):
        pytest.skip("a listing is of one moment")
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


def test_only_an_empty_folder_is_removed_as_empty(files):
    files.write("s/one", [b"1"])
    files.remove_empty_folder("s")
    files.remove_empty_folder("nowhere")
    assert files.sizes("s") == {"one": 1} and files.folders("nowhere") == []
    files.delete("s/one")
    files.remove_empty_folder("s")
    if isinstance(files, LocalFiles):
        assert files.folders("") == []
    with files.lock("s", shared=True):
        files.remove_empty_folder("s")
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


def test_the_files_of_a_folder_can_be_made_durable(files):
    files.write("s/pages/one", [b"1"])
    files.sync_folder("s/pages")
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
