"""The container format: what was written comes back, and whatever is not exactly as specified is refused by type."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.format import (
    DTYPES,
    HEADER_LIMIT,
    Frame,
    LogPart,
    LogRef,
    Manifest,
    Page,
    expect,
    pack,
    tensors,
    unpack,
)
from tests.snapshot import fuzz_format
from tests.snapshot.forge import (
    IDENTITY,
    NUMBERS,
    SOUND,
    build,
    entry,
    page_ref,
    parts_of,
    read_all,
    rebuilt,
    safetensors,
    xxh,
)
from tests.snapshot.hostile.make_hostile import FOLDER, HOSTILE
from tests.snapshot.hostile.make_hostile import KINDS as HOSTILE_KINDS

KINDS = list(SOUND)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
PAGE = {"start": 0, "end": 1}


def refusal(data: bytes | bytearray, kind: type = Page, what: str = "it") -> SnapshotError:
    """The error that `unpack` and `tensors` give; it says which file."""
    with pytest.raises(SnapshotError) as caught:
        for section in unpack(data, kind, what)[1].values():
            tensors(section, what)
    assert str(caught.value).startswith(what)
    return caught.value


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything a tensor is, NaN included."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(contents: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, tuple]]:
    return {section: {name: raw(t) for name, t in found.items()} for section, found in contents.items()}


# -- round trip ---------------------------------------------------------------------------------------------------


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=8).filter(lambda s: np.prod(s) <= 256))
    data = draw(st.randoms(use_true_random=False)).randbytes(int(np.prod(shape)) * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


CONTENTS = st.dictionaries(st.text(max_size=20), st.dictionaries(st.text(max_size=20), some_tensors(), max_size=4),
                           max_size=4)
COUNT = st.integers(0, 2**53)
BODIES = st.one_of(
    st.builds(Page, start=COUNT, end=COUNT),
    st.builds(LogPart, branch=st.text(min_size=1, max_size=9), generation=st.integers(1, 2**53),
              tokenizer=st.text(max_size=9), start=COUNT, end=COUNT,
              frame=st.builds(Frame, has_content=st.booleans(), text=st.text(), tail=st.binary(max_size=4))),
    st.builds(Manifest, session=st.text(min_size=1, max_size=256), branch=st.text(max_size=256),
              generation=st.integers(1, 2**53), parent=st.sampled_from(["", "0" * 32]), created=st.floats(0, 1e11),
              library=st.text(max_size=64), identity=st.just(IDENTITY), tokens=COUNT, seen=COUNT,
              counts=st.lists(COUNT, max_size=3).map(tuple),
              pages=st.lists(st.builds(page_ref, st.just("a" * 32), *[COUNT] * 5), max_size=3).map(tuple),
              log=st.none() | st.lists(st.builds(LogRef, st.just("b" * 32), *[COUNT] * 3), max_size=3).map(tuple)))


@given(BODIES, CONTENTS, st.booleans())
@settings(max_examples=150)
def test_what_was_packed_is_unpacked_bit_for_bit(body, contents: dict[str, dict[str, Tensor]], writable: bool):
    parts = pack(body, contents)
    data = (bytearray if writable else bytes)(b"".join(parts))
    found, sections, own = unpack(data, type(body), "it")
    assert found == body and list(sections) == list(contents)
    assert own == data[32:48].hex() and len(data) % 64 == 0
    assert bits({name: tensors(section, "it") for name, section in sections.items()}) == bits(contents)
    # A section is a safetensors file to anybody else too.
    assert bits({name: load(bytes(section)) for name, section in sections.items()}) == bits(contents)


@given(BODIES, CONTENTS)
@settings(max_examples=30)
def test_the_same_content_gives_the_same_bytes_in_whatever_order_its_tensors_come(body, contents):
    turned = {section: dict(reversed([(name, t.clone()) for name, t in found.items()]))
              for section, found in contents.items()}
    assert b"".join(pack(body, contents)) == b"".join(pack(body, turned))


@every_kind
def test_a_file_is_laid_out_as_the_specification_says(kind: type):
    data = SOUND[kind]()
    length = int.from_bytes(data[12:16], "little")
    assert data[:16] == b"\x89LOCRET\n" + struct.pack("<HHI", 2, {Manifest: 1, Page: 2, LogPart: 3}[kind], length)
    assert data[16:32] == struct.pack("<Q8x", len(data))
    assert data[32:48] == xxhash.xxh3_128(data[:32] + data[48:48 + length]).digest()
    header, at = msgspec.msgpack.decode(data[48:48 + length]), 48 + length
    assert set(header) == {"body", "sections"} and len(header["sections"]) >= 1
    for _, size, digest in header["sections"]:
        start = -(-at // 64) * 64
        assert not any(data[at:start])
        assert digest == xxhash.xxh3_128(data[start:start + size]).hexdigest()
        assert load(data[start:start + size]).keys()
        at = start + size
    assert -(-at // 64) * 64 == len(data) and not any(data[at:])
    assert rebuilt(kind) == data  # by code that shares nothing with the writer


def test_tensors_are_views_of_a_writable_file_and_copies_of_any_other():
    packed = b"".join(pack(Page(start=0, end=1), {"s": {"x": torch.arange(3)}}))
    data = bytearray(packed)
    view, copy = (tensors(unpack(d, Page, "it")[1]["s"], "it")["x"] for d in (data, packed))
    data[-64:] = bytes(64)  # where the tensor lies
    assert view.tolist() == [0, 0, 0] and copy.tolist() == [0, 1, 2]
    copy += 1
    assert tensors(unpack(packed, Page, "it")[1]["s"], "it")["x"].tolist() == [0, 1, 2]


def test_tensors_that_overlap_or_are_not_contiguous_or_carry_gradients_are_stored_by_value():
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    given = {"all": base, "again": base, "row": base[1], "turned": base.T, "wide": base[:1].expand(5, 4),
             "nothing": base[:0], "nothing too": base[:, :0]}
    data = b"".join(pack(Page(start=0, end=1), {"s": given}))
    found = tensors(unpack(data, Page, "it")[1]["s"], "it")
    assert bits({"s": found}) == bits({"s": {name: tensor.detach() for name, tensor in given.items()}})


@pytest.mark.parametrize("body, sections", [
    (Page(start=-1, end=1), {}),
    (Page(start=0, end=2**53 + 1), {}),
    (msgspec.structs.replace(msgspec.convert({"branch": "b", "generation": 1, "tokenizer": "", "start": 0, "end": 1},
                                             LogPart), frame=Frame(text="x" * 8193)), {}),
    (Page(start=0, end=1), {"s": {"x": torch.zeros(2, dtype=torch.bool)}}),
    (Page(start=0, end=1), {"s": {"x": torch.zeros(2, dtype=torch.complex64)}}),
    (Page(start=0, end=1), {"s": {"x": torch.zeros([1] * 9)}}),
    (Page(start=0, end=1), {"s": {"x" * 257: torch.zeros(1)}}),
    (Page(start=0, end=1), {"s" * 65: {}}),
    (Page(start=0, end=1), {str(number): {} for number in range(17)}),
])
def test_nothing_is_written_that_could_not_be_read(body, sections):
    with pytest.raises(SnapshotError, match="cannot be stored") as caught:
        pack(body, sections)
    assert not isinstance(caught.value, SnapshotCorrupt)  # nothing is damaged


def test_a_manifest_whose_header_outgrows_its_limit_is_not_written():
    refs = (page_ref("e" * 32, 0, 2**53, 2**53, 2**53, 2**53),) * 65_536
    body = msgspec.structs.replace(unpack(SOUND[Manifest](), Manifest, "it")[0], pages=refs)
    with pytest.raises(SnapshotError, match=f"expected at most {HEADER_LIMIT}"):
        pack(body, {})


# -- damage -------------------------------------------------------------------------------------------------------


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def refuse_flip(kind: type, data: bytes, bit: int) -> None:
    assert type(refusal(flipped(data, bit), kind)) is SnapshotCorrupt, bit  # in the version too: that is no later one


@every_kind
def test_a_flipped_bit_is_refused_sampled(kind: type):
    data = SOUND[kind]()
    for bit in [*range(0, 48 * 8), *random.Random(1).sample(range(48 * 8, 8 * len(data)), 1000)]:
        refuse_flip(kind, data, bit)


@pytest.mark.slow
@every_kind
def test_every_flipped_bit_is_refused(kind: type):
    data = SOUND[kind]()
    for bit in range(8 * len(data)):
        refuse_flip(kind, data, bit)


@pytest.mark.slow
@every_kind
def test_every_byte_set_to_any_value_is_refused(kind: type):
    data = SOUND[kind]()
    for at, old in enumerate(data):
        for new in {0, 1, 0x20, 0x7F, 0x80, 0xC0, 0xFF, old ^ 0x55} - {old}:
            refusal(data[:at] + bytes([new]) + data[at + 1:], kind)


@every_kind
def test_a_file_cut_at_any_length_is_refused(kind: type):
    data = SOUND[kind]()
    for length in range(len(data)):
        assert type(refusal(data[:length], kind)) is SnapshotCorrupt


@every_kind
def test_a_file_cut_at_any_length_is_refused_even_if_its_header_agrees(kind: type):
    header, sections = parts_of(SOUND[kind]())
    whole = len(SOUND[kind]())
    for length in range(48 + 1, whole):
        data = build(NUMBERS[kind], header["body"], list(sections.items()), size=length)[:length]
        assert type(refusal(data, kind)) is SnapshotCorrupt


@every_kind
@pytest.mark.parametrize("more", [b"\0", b"\1", bytes(63), bytes(64), bytes(65), b"\xff" * 64])
def test_appended_bytes_are_refused_whatever_the_header_says(kind: type, more: bytes):
    data = SOUND[kind]()
    refusal(data + more, kind)
    assert "sections fill" in str(refusal(rebuilt(kind, behind=more, size=len(data) + len(more)), kind))


@pytest.mark.parametrize("kind", [Manifest, Page])
def test_swapped_sections_are_refused(kind: type):
    header, sections = parts_of(SOUND[kind]())
    swapped = list(zip(sections, reversed(sections.values()), strict=True))
    data = build(NUMBERS[kind], header["body"], swapped, entries=header["sections"])
    assert type(refusal(data, kind)) is SnapshotCorrupt


def test_sections_of_one_size_that_changed_places_are_refused():
    a, b = (safetensors({"x": entry("U8", [8], 0, 8)}, bytes([byte]) * 8) for byte in (1, 2))
    sound = build(2, PAGE, [("a", a), ("b", b)])
    assert [t["x"][0].item() for t in map(lambda s: tensors(s, "it"), unpack(sound, Page, "it")[1].values())] == [1, 2]
    lying = build(2, PAGE, [("a", b), ("b", a)], entries=[["a", len(a), xxh(a).hex()], ["b", len(b), xxh(b).hex()]])
    assert "'a' is damaged" in str(refusal(lying))


def test_what_lies_between_the_sections_must_be_zero():
    section = safetensors({})
    data = bytearray(build(2, PAGE, [("s", section), ("t", section)]))
    gaps = [(48 + int.from_bytes(data[12:16], "little"), len(data) - 128),
            (len(data) - 128 + len(section), len(data) - 64), (len(data) - 64 + len(section), len(data))]
    for at in [place for start, end in gaps for place in range(start, end)]:
        for bit in (1, 128):
            data[at] = bit
            assert "not zero" in str(refusal(data))
        data[at] = 0
    assert list(unpack(data, Page, "it")[1]) == ["s", "t"]


@every_kind
def test_a_file_is_not_taken_for_one_of_another_kind(kind: type):
    for other in KINDS:
        if other is not kind:
            assert "kind" in str(refusal(SOUND[kind](), other))
            refusal(build(NUMBERS[other], *_content(kind)), other)  # even with a checksum that holds
    for number in (0, 4, 255, 65535):
        refusal(build(number, *_content(kind)), kind)


def _content(kind: type) -> tuple[Any, list[tuple[str, bytes]]]:
    header, sections = parts_of(SOUND[kind]())
    return header["body"], list(sections.items())


# -- lies with checksums that hold --------------------------------------------------------------------------------


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


def msgpack_map(**fields: bytes) -> bytes:
    """A msgpack map whose values are spelled out."""
    pairs = (msgspec.msgpack.encode(name) + value for name, value in fields.items())
    return bytes([0x80 | len(fields)]) + b"".join(pairs)


NUMBER, NONE, BOMB = b"\0", b"\x90", 200_000


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


# -- tensors ------------------------------------------------------------------------------------------------------

B = 2**53
SECTIONS: dict[str, tuple[Any, bytes]] = {
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)),
    "the same bytes twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, bytes(4)),
    "gap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5)),
    "gap in front": ({"a": entry("U8", [2], 1, 3)}, bytes(3)),
    "bytes behind": ({"a": entry("U8", [2], 0, 2)}, bytes(3)),
    "bytes of nobody": ({}, bytes(8)),
    "out of range": ({"a": entry("U8", [9], 0, 9)}, bytes(8)),
    "far out of range": ({"a": entry("U8", [B], 0, B)}, bytes(8)),
    "past 2^53": ({"a": entry("U8", [2**60], 0, 2**60)}, bytes(8)),
    "backwards": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 4, 2)}, bytes(4)),
    "negative size": ({"a": entry("U8", [-4], 0, 4)}, bytes(4)),
    "two negative sizes": ({"a": entry("U8", [-2, -2], 0, 4)}, bytes(4)),
    "negative offset": ({"a": entry("U8", [4], -4, 0)}, bytes(4)),
    "too small a shape": ({"a": entry("F32", [1], 0, 8)}, bytes(8)),
    "too large a shape": ({"a": entry("F32", [3], 0, 8)}, bytes(8)),
    "no bytes for a scalar": ({"a": entry("F32", [], 0, 0)}, b""),
    "bytes for nothing": ({"a": entry("U8", [0], 0, 1)}, bytes(1)),
    "huge beside nothing": ({"a": entry("U8", [0, B, B], 0, 0)}, b""),
    "huge before nothing": ({"a": entry("U8", [B, 2, 0], 0, 0)}, b""),
    "a product of 2^64": ({"a": entry("U8", [2**32, 2**32], 0, 0)}, b""),
    "a product of 2^64 and one": ({"a": entry("U8", [2**32 + 1, 2**32 - 1], 0, 2**53)}, b""),
    "unaligned": ({"a": entry("U8", [1], 0, 1), "b": entry("F64", [1], 1, 9)}, bytes(9)),
    "nine dimensions": ({"a": entry("U8", [1] * 9, 0, 1)}, bytes(1)),
    "unknown dtype": ({"a": entry("BOOL", [4], 0, 4)}, bytes(4)),
    "dtype of torch": ({"a": entry("float32", [1], 0, 4)}, bytes(4)),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, bytes(1)),
    "no offsets": ({"a": {"dtype": "U8", "shape": [1]}}, bytes(1)),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, bytes(1)),
    "fractions": ({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1.0]}}, bytes(1)),
    "metadata": ({"__metadata__": {"format": "pt"}}, b""),
    "unknown field": ({"a": {**entry("U8", [1], 0, 1), "later": 1}}, bytes(1)),
    "a long name": ({"a" * 257: entry("U8", [1], 0, 1)}, bytes(1)),
    "a list": ([], b""),
    "null": (b"null", b""),
    "nothing": (b"", b""),
    "no JSON": (b"{'a': 1}", b""),
    "two values": (b"{}{}", b""),
    "NUL behind": (b"{}\0\0\0\0\0\0", b""),
    "no UTF-8": (b'{"\xff\xfe": {}}', b""),
    "no UTF-8 in a dtype": (b'{"a": {"dtype": "\xff"}}', b""),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}', bytes(1)),
    "UTF-16": ("{}".encode("utf-16"), b""),
    "a number of many digits": (b'{"a":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,1]}}', bytes(1)),
    "a number of many digits behind a point": (b'{"a":{"dtype":"U8","shape":[1.' + b"0" * 5000 + b']}}', bytes(1)),
    "a huge exponent": (b'{"a":{"dtype":"U8","shape":[1e400],"data_offsets":[0,1]}}', bytes(1)),
    "bomb": (b"[" * BOMB, b""),
    "bomb of objects": (b'{"a":' * (BOMB // 5), b""),
    "bomb in an unknown field": (b'{"a":{"later":' + b"[" * BOMB, b""),
    "bomb in a shape": (b'{"a":{"shape":' + b"[" * BOMB, b""),
    "bomb that ends": (b'{"a":{"dtype":' + b"[" * 5000 + b"]" * 5000 + b"}}", b""),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_that_is_no_safetensors_file_of_this_format_is_refused(name: str):
    entries, data = SECTIONS[name]
    section = safetensors(entries, data)
    error = refusal(build(2, PAGE, [("s", section)]))
    assert type(error) is SnapshotCorrupt
    with pytest.raises(SnapshotCorrupt):
        tensors(memoryview(bytearray(section)), "it")


@pytest.mark.parametrize("length", [1, 3, 2**32, 2**60, 2**63, 2**64 - 1, HEADER_LIMIT + 1])
def test_a_tensor_header_of_another_length_is_refused(length: int):
    sound = safetensors({"a": entry("U8", [8], 0, 8)}, bytes(8))
    assert tensors(memoryview(sound), "it")["a"].shape == (8,)
    with pytest.raises(SnapshotCorrupt, match="tensor header"):
        tensors(memoryview(length.to_bytes(8, "little") + sound[8:]), "it")


@pytest.mark.parametrize("count", range(8))
def test_a_section_shorter_than_its_first_number_is_refused(count: int):
    with pytest.raises(SnapshotCorrupt, match=f"section of {count} bytes"):
        tensors(memoryview(bytes(count)), "it")


def test_a_tensor_header_may_fill_its_limit_and_no_more():
    fill = b"{}" + b" " * (HEADER_LIMIT - 2)
    assert tensors(memoryview(safetensors(fill)), "it") == {}
    with pytest.raises(SnapshotCorrupt, match="tensor header of"):
        tensors(memoryview(safetensors(fill + b" ")), "it")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_lies_where_its_items_are_aligned(dtype: str):
    size = DTYPES[dtype].itemsize
    for lead in range(1, 9):
        section = safetensors({"a": entry("U8", [lead], 0, lead), "b": entry(dtype, [1], lead, lead + size)},
                              bytes(lead + size))
        if lead % size:
            with pytest.raises(SnapshotCorrupt, match="'b'"):
                tensors(memoryview(section), "it")
        else:
            assert tensors(memoryview(bytearray(section)), "it")["b"].data_ptr() % size == 0


def test_an_unaligned_tensor_header_moves_what_follows():
    text = b'{"a":' + msgspec.json.encode(entry("I32", [1], 0, 4)) + b"}"
    text += b" " * (-len(text) % 8)
    for spaces in range(8):
        section = (len(text) + spaces).to_bytes(8, "little") + text + b" " * spaces + bytes(4)
        if spaces % 4:
            with pytest.raises(SnapshotCorrupt, match="'a'"):
                tensors(memoryview(section), "it")
        else:
            assert tensors(memoryview(section), "it")["a"].tolist() == [0]


@pytest.mark.parametrize("shape", [[0, B], [B, 0], [0, 2**26, 2**27], [0], [0, 0, 0, 0, 0, 0, 0, 0], [1] * 8, []])
def test_any_shape_that_is_taken_can_be_used(shape: list[int]):
    size = 0 if 0 in shape else 1
    found = tensors(memoryview(safetensors({"a": entry("U8", shape, 0, size)}, bytes(size))), "it")["a"]
    assert list(found.shape) == shape and found.numpy().size == size and found.clone().numel() == size


@st.composite
def nearly_sound(draw: st.DrawFn) -> bytes:
    """A section in which at most one number is not what it should be."""
    dtypes = {"U8": 1, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1}
    tensor = st.tuples(st.sampled_from("abc"), st.sampled_from(list(dtypes)), st.lists(st.integers(0, 3), max_size=3))
    entries, at = {}, 0
    for name, dtype, shape in draw(st.lists(tensor, max_size=3)):
        size = int(np.prod(shape, dtype=int)) * dtypes[dtype]
        entries[name], at = entry(dtype, shape, at, at + size), at + size
    if entries and draw(st.booleans()):
        one = draw(st.sampled_from([*entries.values()]))
        numbers = draw(st.sampled_from([one["data_offsets"], one["shape"] or one["data_offsets"]]))
        numbers[draw(st.integers(0, len(numbers) - 1))] += draw(st.sampled_from([-2, -1, 1, 2]))
    return safetensors(entries, bytes(range(at + draw(st.sampled_from([0, 0, 0, 1])))))


@given(nearly_sound())
@settings(max_examples=300)
def test_what_is_taken_for_a_safetensors_file_is_one_to_the_reference_too(section: bytes):
    try:
        found = tensors(memoryview(section), "it")
    except SnapshotCorrupt:
        return
    assert bits({"s": found}) == bits({"s": load(section)})


SHAPES = {"a": (torch.float32, (2, 3)), "b": (torch.int32, ())}


@pytest.mark.parametrize("change, name", [
    ({"a": None}, "'a' is missing"), ({"b": None}, "'b' is missing"), ({"c": torch.zeros(1)}, "'c'.*expected none"),
    ({"a": torch.zeros(3, 2)}, "'a'.*(3, 2)"), ({"a": torch.zeros(2, 3, 1)}, "'a'"), ({"b": torch.tensor(1.0)}, "'b'"),
    ({"a": torch.zeros(2, 3, dtype=torch.float16)}, "'a'.*float16"), ({"a": torch.zeros(6)}, "'a'"),
])
def test_expect_takes_just_the_tensors_it_names(change: dict, name: str):
    sound = {"a": torch.zeros(2, 3), "b": torch.tensor(1, dtype=torch.int32)}
    expect(sound, SHAPES, "it")
    with pytest.raises(SnapshotCorrupt, match=f"^it: tensor {name.replace('(', '.').replace(')', '.')}"):
        expect({key: tensor for key, tensor in {**sound, **change}.items() if tensor is not None}, SHAPES, "it")


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
    (Page, build(2, PAGE, [("s", safetensors({"a": entry("U8", [B], 0, B)}))])),
    (Page, build(2, PAGE, [("s", safetensors({"a": entry("F64", [0, B], 0, 0)}))])),
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
    found = fuzz_format.run(inputs=3000, seed=7)
    assert found["untyped"] == [] and found["undetected"] == 0
    assert sum(found["refused"].values()) + found["accepted"] == 3000
    # It reaches past the checksums: readers behind them refused many, and took some.
    assert found["refused_behind_checksums"] > 300 and found["accepted"] > 30
