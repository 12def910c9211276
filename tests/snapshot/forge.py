"""Containers for the tests of the format: small sound ones, and any other whose checksums hold although it lies.

`build` knows the layout from the specification alone and shares no code with the reader. An attacker can compute
checksums too, so what a lie meets must be the reader's own checks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from locret_stream.errors import SnapshotError
from locret_stream.snapshot.format import (
    VERSION,
    Frame,
    LogPart,
    LogRef,
    Manifest,
    Page,
    PageRef,
    pack,
    tensors,
    unpack,
)
from locret_stream.snapshot.identity import Identity
from locret_stream.snapshot.log import Part, read_part, write_part
from locret_stream.snapshot.pages import Assembly, Geometry, LayerUnits, pack_masks, read_page, unpack_masks, write_page

GEOMETRY = Geometry.even(2, 2, 2, torch.float32)
IDENTITY = Identity(**dict.fromkeys(Identity.__struct_fields__, "x"))
NUMBERS = {Manifest: 1, Page: 2, LogPart: 3}
MASK = np.array([True, False, True, True, True, False, True, True, True, True, False, True])  # of the sound page
PAGE = {"start": 0, "end": 1}  # the body of a page's header
BOMB = 200_000  # of nested values, more than any reader may follow
BLANK = "0" * 32  # the name of a file that is not written
KEPT = (5, 5)  # units per layer that the sound manifest says; a reader allocates by it


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything a tensor is, NaN included."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def layer_units(start: int, counts: Sequence[int], seed: int, geometry: Geometry = GEOMETRY) -> LayerUnits:
    """Units of one layer at positions start, start + 2, ... in each head; no two K or V are equal."""
    keys = (1000 * seed + torch.arange(sum(counts) * geometry.layers[0][1])).reshape(-1, geometry.layers[0][1])
    positions = torch.cat([start + 2 * torch.arange(count) for count in counts])
    return LayerUnits(torch.tensor(counts), positions, keys.to(geometry.dtype), -keys.to(geometry.dtype))


def sound_page() -> bytes:
    """12 units of positions 10 to 29 in two layers and two heads."""
    return b"".join(write_page(10, 30, [layer_units(10, (3, 4), 1), layer_units(12, (3, 2), 2)])[0])


def sound_log() -> bytes:
    """Ids 4 to 10 behind another part, and two pending ones."""
    body = LogPart(branch="alice", generation=2, tokenizer="x", start=4, end=11, before="a" * 32,
                   frame=Frame(turn="user", text="é"))
    return b"".join(write_part(body, Part(np.arange(100, 107), np.array([7, 8]), np.frombuffer(b"\x90", np.uint8))))


def sound_manifest() -> bytes:
    """A manifest of two pages, the second with dead units, and one log part."""
    body = Manifest(
        session="alice", branch="alice", generation=3, parent="b" * 32, created=1.5, library="0", identity=IDENTITY,
        tokens=32, seen=30, counts=KEPT, pages=(page_ref("c" * 32, 0, 10, 4, 4), page_ref("d" * 32, 10, 30, 12, 9)),
        log=(LogRef("e" * 32, 0, 30, 640),), frame=Frame(turn="user", has_content=True, text="so far", tail=b"\xc3"))
    state = {"0.scores": torch.arange(4.0), "pending": torch.tensor([3, 4])}
    return b"".join(pack(body, {"state": state, "masks": pack_masks([None, MASK])}))


SOUND = {Manifest: sound_manifest, Page: sound_page, LogPart: sound_log}


def page_ref(name: str, start: int, end: int, units: int, live: int, size: int = 1024) -> PageRef:
    return PageRef(name=name, start=start, end=end, size=size, units=units, live=live)


def read_all(kind: type, data: bytes | bytearray, ref: PageRef | None = None, mask: np.ndarray | None = MASK) -> None:
    """Send a file through every reader that it would meet.

    Args:
        ref: what a manifest says of a page; None: just what the page says itself.
    """
    body, sections, own = unpack(data, kind, "it")
    contents = {name: tensors(section, "it") for name, section in sections.items()}
    if kind is Manifest:
        unpack_masks(contents.get("masks", {}), body.pages, "it")
    elif kind is LogPart:
        read_part(body, sections, "it")
    else:
        mask = None if ref is None else mask
        counts = contents.get("index", {}).get("counts")
        units = 12 if ref or counts is None else int(counts.sum())
        ref = ref or PageRef(own, body.start, body.end, len(data), max(0, units), 0)
        index, units = read_page(ref, body, sections, GEOMETRY, "it")
        Assembly(KEPT, GEOMETRY, "it").add(index, units, mask)


def xxh(*parts: bytes) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(parts))


def parts_of(data: bytes) -> tuple[Any, dict[str, bytes]]:
    """Decoded header of a sound container and its sections, by the specification."""
    length = int.from_bytes(data[12:16], "little")
    header = msgspec.msgpack.decode(data[48:48 + length])
    at, sections = -(-(48 + length) // 64) * 64, {}
    for name, size, _ in header["sections"]:
        sections[name] = data[at:at + size]
        at = -(-(at + size) // 64) * 64
    return header, sections


def build(number: int, body: Any, sections: Sequence[tuple[str, bytes]] = (), *, header: bytes | None = None,
          version: int = VERSION, length: int | None = None, size: int | None = None, entries: Any = None,
          reserved: bytes = bytes(8), gap: bytes = b"\0", behind: bytes = b"", magic: bytes = b"\x89LOCRET\n") -> bytes:
    """A container with a checksum that holds, of whatever it is told.

    Args:
        body: msgpack-able. header: its bytes in place of body and sections. entries: in place of the section list.
        length, size: claimed in place of the true ones. gap: what fills the space between sections.
    """
    if entries is None:
        entries = [[name, len(content), xxh(content).hex()] for name, content in sections]
    if header is None:
        header = msgspec.msgpack.encode({"body": body, "sections": entries})
    rest = b"".join(_filled(content, len(content), gap) for _, content in sections) + behind
    total = -(-(48 + len(header)) // 64) * 64 + len(rest)
    fixed = magic + struct.pack("<HHIQ", version, number, len(header) if length is None else length,
                                total if size is None else size) + reserved
    return _filled(fixed + xxh(fixed, header) + header, 48 + len(header), gap) + rest


def rebuilt(kind: type, change: Any = None, **lies: Any) -> bytes:
    """The sound container of a kind changed in place by `change(body, sections)`, with checksums made anew."""
    header, sections = parts_of(SOUND[kind]())
    if change is not None:
        change(header["body"], sections)
    return build(NUMBERS[kind], header["body"], list(sections.items()), **lies)


def safetensors(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A section: the JSON header of entries (or its bytes), then data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def resaved(section: bytes, **changed: torch.Tensor | None) -> bytes:
    """A section with tensors replaced, added or (None) left out."""
    from safetensors.torch import load, save
    merged = {**load(section), **changed}
    return save({name: tensor for name, tensor in merged.items() if tensor is not None})


def _filled(data: bytes, size: int, gap: bytes) -> bytes:
    return data + gap * (-size % 64)


def refusal(data: bytes | bytearray, kind: type = Page, what: str = "it") -> SnapshotError:
    """The error that `unpack` and `tensors` give; it says which file."""
    with pytest.raises(SnapshotError) as caught:
        for section in unpack(data, kind, what)[1].values():
            tensors(section, what)
    assert str(caught.value).startswith(what)
    return caught.value


def msgpack_map(**fields: bytes) -> bytes:
    """A msgpack map whose values are spelled out."""
    pairs = (msgspec.msgpack.encode(name) + value for name, value in fields.items())
    return bytes([0x80 | len(fields)]) + b"".join(pairs)


def all_bits(contents: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, tuple]]:
    return {section: {name: bits(t) for name, t in content.items()} for section, content in contents.items()}
