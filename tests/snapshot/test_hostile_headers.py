"""A file whose checksums hold although its header lies is refused by type, in memory bounded by its size."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.format import HEADER_LIMIT, LogPart, Manifest, Page, unpack
from tests.snapshot import fuzz_format
from tests.snapshot.forge import (
    BOMB,
    NUMBERS,
    PAGE,
    SOUND,
    build,
    entry,
    msgpack_map,
    parts_of,
    read_all,
    rebuilt,
    refusal,
    safetensors,
    xxh,
)
from tests.snapshot.hostile.make_hostile import FOLDER, HOSTILE
from tests.snapshot.hostile.make_hostile import KINDS as HOSTILE_KINDS

KINDS = list(SOUND)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize("version", [3, 4, 256, 65535])
def test_a_later_version_is_too_new_whatever_else_it_changed(version: int):
    for data in (build(2, PAGE, version=version), build(77, {"anything": 1}, version=version, size=1, length=2**32 - 1),
                 build(2, PAGE, version=version)[:48], b"\x89LOCRET\n" + struct.pack("<H", version) + b"\xee" * 100):
        error = refusal(data)
        assert type(error) is SnapshotTooNew and f"version {version}" in str(error) and "up to 2" in str(error)


def test_version_zero_is_refused():
    assert type(refusal(build(2, PAGE, version=0))) is SnapshotCorrupt


@pytest.mark.parametrize("data", [b"", b"\0", b"\x89LOCRET\n", b"\x89LOCRET\n\1\0", bytes(47), bytes(48), bytes(4096),
                                  b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(100)])
def test_what_was_never_a_snapshot_is_refused(data: bytes):
    for kind in KINDS:
        assert type(refusal(data, kind)) is SnapshotCorrupt


@pytest.mark.parametrize("lie", [
    {"size": 2**60}, {"size": 2**64 - 1}, {"size": 0}, {"size": 2**53},
    {"length": 2**32 - 1}, {"length": HEADER_LIMIT}, {"length": HEADER_LIMIT + 1}, {"length": 0}, {"length": 1},
    {"reserved": b"\0\0\0\0\0\0\0\1"}, {"reserved": b"\1" * 8}, {"magic": b"\x89LOCRET\r"}, {"gap": b"\1"},
    {"entries": [["s", 2**60, "0" * 32]]}, {"entries": [["s", 2**53, "0" * 32]]}, {"entries": [["s", -1, "0" * 32]]},
    {"entries": [["s", 2**64 - 1, "0" * 32]]}, {"entries": [["s", 0]]}, {"entries": [["s"] * 3]}, {"entries": None,
                                                                                                    "header": b""},
    {"entries": [["s", 0, "0" * 31]]}, {"entries": [["s", 0, "0" * 32 + "\n"]]}, {"entries": [["s", 0, "G" * 32]]},
    {"entries": [["s", 0, "0" * 32, 0]]}, {"entries": {"s": 1}}, {"entries": [["s" * 65, 0, xxh().hex()]]},
    {"entries": [[str(number), 0, xxh().hex()] for number in range(17)]}, {"entries": [[7, 0, xxh().hex()]]},
    {"entries": [["s", 0, xxh().hex()], ["s", 0, xxh().hex()]]}, {"entries": [["s", 64, xxh(bytes(64)).hex()]]},
], ids=str)
def test_a_header_that_lies_is_refused(lie: dict):
    unpack(build(2, PAGE), Page, "it")  # the truth is taken
    assert type(refusal(build(2, PAGE, **lie))) is SnapshotCorrupt


def test_a_header_of_exactly_the_limit_is_decoded_and_one_byte_more_is_refused():
    assert "not one of this format" in str(refusal(build(2, PAGE, header=bytes(HEADER_LIMIT))))
    assert f"header of {HEADER_LIMIT + 1}" in str(refusal(build(2, PAGE, header=bytes(HEADER_LIMIT + 1))))


def test_a_section_of_nothing_is_no_safetensors_file():
    data = build(2, PAGE, [("s", b"")])
    assert len(unpack(data, Page, "it")[1]["s"]) == 0
    assert "section of 0 bytes" in str(refusal(data))


def test_two_sections_of_one_name_are_refused():
    assert "'s'" in str(refusal(build(2, PAGE, [("s", safetensors({})), ("s", safetensors({}))])))


@every_kind
@pytest.mark.parametrize("place", ["header", "body"])
def test_unknown_and_missing_fields_are_refused(kind: type, place: str):
    header, sections = parts_of(SOUND[kind]())
    def refuse(changed: dict) -> str:
        return str(refusal(build(NUMBERS[kind], None, list(sections.items()), header=msgspec.msgpack.encode(changed)),
                           kind))

    target = header if place == "header" else header["body"]
    assert "unknown field `later`" in refuse(_with(header, target, later=1))
    required = ["body", "sections"] if place == "header" else [
        f.name for f in msgspec.structs.fields(kind) if f.required]
    for name in required:
        assert f"missing required field `{name}`" in refuse(_with(header, target, drop=name))


def _with(header: dict, target: dict, drop: str = "", **more: Any) -> dict:
    changed = {name: value for name, value in target.items() if name != drop} | more
    return changed if target is header else header | {"body": changed}


@pytest.mark.parametrize("field, lie", [
    ("session", ""), ("session", "s" * 257), ("session", 7), ("branch", "s" * 257), ("generation", 0),
    ("generation", -1), ("generation", 2**53 + 1), ("generation", 1.5), ("parent", "b" * 31), ("parent", "B" * 32),
    ("parent", "b" * 32 + "\n"), ("created", float("nan")), ("created", float("inf")), ("created", -1.0),
    ("created", 1e18), ("created", "now"), ("library", "l" * 65), ("identity", {}), ("identity", None),
    ("tokens", -1), ("tokens", 2**53 + 1), ("tokens", 2**64 - 1), ("seen", -1), ("seen", True), ("counts", [-1]),
    ("counts", [2**60]), ("counts", [0] * 4097), ("counts", 7), ("pages", [["c" * 32, 0, 1, 2, 3]]),
    ("pages", [["c" * 32, 0, 1, 2, 3, 4, 5]]), ("pages", [["../../../../etc/passwd", 0, 1, 2, 3, 3]]),
    ("pages", [["c" * 32, -1, 1, 2, 3, 3]]), ("pages", [["c" * 32, 0, 1, 2, 2**60, 3]]), ("pages", None),
    ("log", [["e" * 32, 0, 1]]), ("log", [["e" * 32, 0, 1, 2, 3]]), ("log", [["E" * 32, 0, 1, 2]]), ("log", 0),
    ("frame", {"text": "t" * 8193}), ("frame", {"tail": b"12345"}), ("frame", {"turn": "t" * 17}),
    ("frame", {"turn": None}), ("frame", {"first": 1}), ("frame", {"later": 1}), ("frame", []),
], ids=lambda value: str(value)[:40])
def test_a_manifest_with_a_field_outside_its_limits_is_refused(field: str, lie: Any):
    assert type(refusal(rebuilt(Manifest, lambda body, _: body.update({field: lie})), Manifest)) is SnapshotCorrupt


@pytest.mark.parametrize("count", [65_536, 65_537])
@pytest.mark.parametrize("field, ref", [("pages", ["c" * 32, 0, 1, 2, 3, 3]), ("log", ["e" * 32, 0, 1, 2])])
def test_a_manifest_names_at_most_65536_pages_and_parts(field: str, ref: list, count: int):
    data = rebuilt(Manifest, lambda body, _: body.update({field: [ref] * count}))
    if count <= 65_536:
        assert len(getattr(unpack(data, Manifest, "it")[0], field)) == count
    else:
        assert "65536" in str(refusal(data, Manifest))


NUMBER, NONE = b"\0", b"\x90"


@pytest.mark.parametrize("header", [
    b"\x91" * BOMB, b"\x81" * BOMB, b"\xdd\0\0\0\1" * (BOMB // 5), b"\x81\xa1a" * (BOMB // 3),
    b"\x92\xc0" * (BOMB // 2),
    msgpack_map(body=b"\x91" * BOMB), msgpack_map(sections=b"\x91" * BOMB), msgpack_map(later=b"\x91" * BOMB),
    msgpack_map(body=msgpack_map(start=b"\x91" * BOMB)), msgpack_map(body=msgpack_map(later=b"\x91" * BOMB)),
    msgpack_map(body=msgpack_map(start=NUMBER, end=NUMBER), sections=b"\x91\x93\x91" + b"\x91" * BOMB),
    b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffx", b"\xc6\xff\xff\xff\xff", b"\xc1",
    b"\xc9\xff\xff\xff\xff\x01", b"\xd7\xff" + bytes(8), b"\x81" + b"\xa4body" + b"\xdf\xff\xff\xff\xff",
    msgpack_map(body=msgpack_map(start=NUMBER, end=NUMBER), sections=b"\xdd\xff\xff\xff\xff"),
    msgpack_map(body=msgpack_map(start=NUMBER, end=NUMBER), sections=b"\x91\x93\xdb\xff\xff\xff\xff"),
    msgpack_map(body=msgpack_map(start=NUMBER, end=NUMBER), sections=NONE) + b"\0",
    msgpack_map(body=msgpack_map(start=NUMBER, end=b"\xa3\xff\xff\xff"), sections=NONE),
    msgpack_map(body=msgpack_map(start=NUMBER, end=NUMBER), sections=b"\x91\x93\xa3\xff\xfe\xfd\0\xa0"),
    b"\x82\xa3\xff\xff\xff\xc0\xa4body\xc0", b"\x82\xa4body\x82\xa3\xff\xff\xff\0\xa3end\0\xa8sections\x90",
    b"\x81\xc0\xc0", b"\x81\x91\x90\xc0", b"\xc0", b"\xcb" + b"\xff" * 8,
], ids=lambda header: header[:12].hex())
def test_a_header_that_is_no_msgpack_of_this_format_is_refused(header: bytes):
    for kind in KINDS:
        assert "not one of this format" in str(refusal(build(NUMBERS[kind], None, header=header), kind))


def test_a_message_about_a_hostile_file_is_short_and_printable():
    evil = "\x1b[2J" + "y" * 100_000
    for data in (build(2, {**PAGE, evil: 1}), build(2, PAGE, [("s", safetensors({evil: entry("U8", [0], 0, 0)}))]),
                 build(2, PAGE, [("s", safetensors({"x": {evil: 1}}))]),
                 build(2, PAGE, [("s", safetensors({"x": entry(evil, [0], 0, 0)}))]),
                 build(2, PAGE, [("s", safetensors({"\x1b[2J": entry("X", [0], 0, 0)}))])):
        assert len(str(refusal(data))) < 500 and str(refusal(data)).isprintable()


# -- bounds -------------------------------------------------------------------------------------------------------


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python objects and numpy arrays took at most, beyond those there were."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def swallow(data: bytes, kind: type) -> None:
    try:
        read_all(kind, data)
    except SnapshotError:
        pass


MANY = {f"{number:x}": entry("U8", [0], 0, 0) for number in range(5000)}


@pytest.mark.parametrize("kind, data", [
    (Page, build(2, PAGE, size=2**60)), (Page, build(2, PAGE, length=2**32 - 1)),
    (Page, build(2, PAGE, entries=[["s", 2**53, "0" * 32]])),
    (Page, build(2, PAGE, header=msgpack_map(body=b"\x82\xa5start\0\xa3end\0", sections=b"\xdd\xff\xff\xff\xff"))),
    (Page, build(2, PAGE, header=b"\xdd\xff\xff\xff\xff" + b"\x90" * 1000)),
    (Page, build(2, PAGE, header=b"\xdb\xff\xff\xff\xff" + b"x" * 1000)),
    (Manifest, rebuilt(Manifest, lambda body, _: body.update(pages=[["c" * 32, 0, 9, 9, 2**53, 2**53]] * 100))),
    (Manifest, rebuilt(Manifest, lambda body, _: body.update(counts=[2**53] * 4096))),
    (Manifest, rebuilt(Manifest, lambda body, _: body.update(log=[["e" * 32, 0, 2**53, 2**53]] * 5000))),
    (LogPart, rebuilt(LogPart, lambda body, _: body.update(start=0, end=2**53, before=""))),
    (Page, rebuilt(Page, lambda body, _: body.update(start=0, end=2**53))),
    (Page, build(2, PAGE, [("s", safetensors({"a": entry("U8", [2**53], 0, 2**53)}))])),
    (Page, build(2, PAGE, [("s", safetensors({"a": entry("F64", [0, 2**53], 0, 0)}))])),
    (Page, build(2, PAGE, [("s", safetensors({}, length=2**60))])),
    (Page, build(2, PAGE, [("s", safetensors(MANY))])),
    (Page, build(2, PAGE, [("s", safetensors(b"[" * BOMB))])), (Page, build(2, PAGE, header=b"\x91" * BOMB)),
], ids=range(17))
def test_memory_taken_is_bounded_by_the_size_of_the_file(kind: type, data: bytes):
    swallow(data, kind)  # what is imported and cached on the way is no part of it
    assert peak(lambda: swallow(data, kind)) < 16 * len(data) + 64_000


@pytest.mark.parametrize("name", HOSTILE)
def test_a_committed_hostile_file_is_refused_for_its_lie(name: str):
    make, message = HOSTILE[name]
    for data in ((FOLDER / f"{name}.bin").read_bytes(), make()):
        with pytest.raises(SnapshotError, match=re.escape(message)):
            read_all(HOSTILE_KINDS[name.partition("-")[0]], data)


def test_every_committed_hostile_file_is_tried():
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(HOSTILE)


def test_hostile_files_made_by_mutation_raise_typed_errors_only():
    result = fuzz_format.run(inputs=3000, seed=7)
    assert result["untyped"] == [] and result["undetected"] == 0
    assert sum(result["refused"].values()) + result["accepted"] == 3000
    # It reaches past the checksums: readers behind them refused many, and took some.
    assert result["refused_behind_checksums"] > 300 and result["accepted"] > 30
