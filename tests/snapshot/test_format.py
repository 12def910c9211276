"""The container format: what was written comes back, and whatever is not exactly as specified is refused by type."""

from __future__ import annotations

import random
import struct
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

from locret_stream.errors import SnapshotCorrupt, SnapshotError
from locret_stream.snapshot.format import (
    DTYPES,
    HEADER_LIMIT,
    Frame,
    LogPart,
    LogRef,
    Manifest,
    Page,
    pack,
    tensors,
    unpack,
)
from tests.snapshot.forge import (
    IDENTITY,
    NUMBERS,
    PAGE,
    SOUND,
    all_bits,
    build,
    entry,
    page_ref,
    parts_of,
    rebuilt,
    refusal,
    safetensors,
    xxh,
)

KINDS = list(SOUND)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


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
    unpacked, sections, own = unpack(data, type(body), "it")
    assert unpacked == body and list(sections) == list(contents)
    assert own == data[32:48].hex() and len(data) % 64 == 0
    assert all_bits({name: tensors(section, "it") for name, section in sections.items()}) == all_bits(contents)
    # A section is a safetensors file to anybody else too.
    assert all_bits({name: load(bytes(section)) for name, section in sections.items()}) == all_bits(contents)


@given(BODIES, CONTENTS)
@settings(max_examples=30)
def test_the_same_content_gives_the_same_bytes_in_whatever_order_its_tensors_come(body, contents):
    turned = {section: dict(reversed([(name, t.clone()) for name, t in content.items()]))
              for section, content in contents.items()}
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
    read_back = tensors(unpack(data, Page, "it")[1]["s"], "it")
    assert all_bits({"s": read_back}) == all_bits({"s": {name: tensor.detach() for name, tensor in given.items()}})


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
