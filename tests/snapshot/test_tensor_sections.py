"""Sections of tensors: what is taken for a safetensors file is one to the reference too, and all else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from locret_stream.errors import SnapshotCorrupt
from locret_stream.snapshot.format import DTYPES, HEADER_LIMIT, expect, tensors
from tests.snapshot.forge import BOMB, PAGE, all_bits, build, entry, refusal, safetensors

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
    tensor = tensors(memoryview(safetensors({"a": entry("U8", shape, 0, size)}, bytes(size))), "it")["a"]
    assert list(tensor.shape) == shape and tensor.numpy().size == size and tensor.clone().numel() == size


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
        changed = draw(st.sampled_from([*entries.values()]))
        numbers = draw(st.sampled_from([changed["data_offsets"], changed["shape"] or changed["data_offsets"]]))
        numbers[draw(st.integers(0, len(numbers) - 1))] += draw(st.sampled_from([-2, -1, 1, 2]))
    return safetensors(entries, bytes(number % 256 for number in range(at + draw(st.sampled_from([0, 0, 0, 1])))))


@given(nearly_sound())
@settings(max_examples=300)
def test_what_is_taken_for_a_safetensors_file_is_one_to_the_reference_too(section: bytes):
    try:
        decoded = tensors(memoryview(section), "it")
    except SnapshotCorrupt:
        return
    assert all_bits({"s": decoded}) == all_bits({"s": load(section)})


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
