"""Snapshot files, format version 2: bytes <-> header + tensors. This docstring is the specification.

A file is one *container*, written once and never changed. Integers are little-endian; digests are xxh3-128, big-endian
as `xxhash` gives them.

    offset  size  preamble
    0       8     magic: 89 4C 4F 43 52 45 54 0A
    8       2     u16 format version: 1 or 2
    10      2     u16 kind: 1 manifest, 2 page, 3 log part, 4 place (from version 2 on)
    12      4     u32 length of the header, at most 4 MiB
    16      8     u64 length of the whole file
    24      8     zeros
    32      16    digest of bytes 0 to 31, then the header
    48            header: msgpack of {"body": a Struct of this module, by kind, "sections": [[name, size, digest], ...]}

then, each beginning at the next multiple of 64, with zeros in between and behind the last one, the sections in the
order of the header. A section is a safetensors file: u64 length of a JSON header (at most 4 MiB), that header, the
tensors' bytes without a gap, each at a multiple of its item size. Its digest covers all its bytes.

So every byte is either covered by a digest or must be zero. A reader checks, in this order: magic, version (a higher
one is `SnapshotTooNew`), kind, sizes, the digest of the header, the header itself (unknown fields are refused), the
place of every section, zeros, and digests; only then does it look at a tensor. No number in the file makes a reader
allocate memory: it reads the file, whose size it checks first. Digests reveal damage, not forgery: against that, and
for secrecy, containers are encrypted as a whole (`snapshot.encryption`).

`snapshot.pages` specifies what a manifest and its pages mean together, `snapshot.names` what places are for. Version 1
had an alias of 34 bytes without a digest instead of places; it is read and replaced. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import torch
import xxhash
from msgspec import Meta, Struct
from torch import Tensor

from locret_stream.errors import SnapshotCorrupt, SnapshotError, SnapshotTooNew
from locret_stream.snapshot.identity import Identity

MAGIC = b"\x89LOCRET\n"
VERSION = 2
PREAMBLE = struct.Struct("<8sHHIQ8x16s")
HEADER_LIMIT = 4 << 20  # bytes
ALIGN = 64
NOTE_LIMIT = 64 << 10  # bytes
MOST_ITEMS = 2**53  # of a tensor, with dimensions of 0 left out of the product
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
MaybeDigest = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
T = TypeVar("T", bound=Struct)
Buffer = bytes | memoryview


class Section(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One section of a container, in order."""

    name: Annotated[str, Meta(max_length=64)]
    size: Count
    digest: Digest


class _Header(Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    body: T
    sections: Annotated[tuple[Section, ...], Meta(max_length=16)]


class PageRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page that a manifest needs, with units of stream positions start .. end-1.

    Args:
        name: of its file. size: of its container in bytes. units: in the page. live: of these, units that are kept.
    """

    name: Digest
    start: Count
    end: Count
    size: Count
    units: Count
    live: Count


class LogRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A log part that a manifest needs, with the token ids start .. end-1 of the session; `size` in bytes."""

    name: Digest
    start: Count
    end: Count
    size: Count


class Frame(Struct, frozen=True, forbid_unknown_fields=True):
    """The conversation's frame as `context.session` has it: whose turn is open (`turn`), the text that is not tokenized
    yet (`text`, and in `tail` the bytes of an unfinished character), and the digest of the system text (`system`)."""

    turn: Annotated[str, Meta(max_length=16)] = "none"
    has_content: bool = False
    first: bool = True
    raw: bool = False
    trusted: bool = False
    left_by_break: bool = False
    text: Annotated[str, Meta(max_length=8192)] = ""
    tail: Annotated[bytes, Meta(max_length=4)] = b""
    system: MaybeDigest = ""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot. Sections: "state" (tensors of the engine and the policy), "masks" (of pages with dead units).

    Args:
        session, branch: the names it belongs to; a fork is a branch of the session it came from.
        generation: its number in the branch, which counts up and is never used twice.
        parent: digest of the manifest it grew out of, "" for the first one.
        created: seconds since 1970. library: the version that wrote it.
        identity: what it was made with.
        tokens: accepted tokens. seen: of these, the committed ones. counts: units per layer, without those of a focus.
            Of a focus the state has the ids, `focus` [n] i64; of one that is not in force yet its position and its ids,
            `next_focus` [1 + n] i64.
        log: None if the session has none. frame: of the conversation.
        note: the caller's own bytes, which the library never interprets.
    """

    session: Name
    branch: Annotated[str, Meta(max_length=256)]
    generation: Annotated[int, Meta(ge=1, le=2**53)]
    parent: MaybeDigest
    created: Annotated[float, Meta(ge=0, lt=2**37)]
    library: Annotated[str, Meta(max_length=64)]
    identity: Identity
    tokens: Count
    seen: Count
    counts: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    pages: Annotated[tuple[PageRef, ...], Meta(max_length=65_536)]
    log: Annotated[tuple[LogRef, ...], Meta(max_length=65_536)] | None = None
    frame: Frame = Frame()
    note: Annotated[bytes, Meta(max_length=NOTE_LIMIT)] = b""


class Page(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units of stream positions start .. end-1. Sections: "index" and "units", as `snapshot.pages` writes them."""

    start: Count
    end: Count


class LogPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Committed token ids start .. end-1 of a branch.

    Section "ids": ids [end - start] i32; pending [n] i32, the accepted ids behind them; held [n] u8, what was buffered;
    focuses [n] i64, if there are any: for each its position, how many ids it has, and these.

    Args:
        branch, generation, tokenizer, frame: of the save that wrote the part.
        before: name of the part that ends at `start`, "" at 0.
    """

    branch: Name
    generation: Annotated[int, Meta(ge=1, le=2**53)]
    tokenizer: Annotated[str, Meta(max_length=256)]
    start: Count
    end: Count
    before: MaybeDigest = ""
    frame: Frame = Frame()


class Place(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the snapshots of a name lie (`snapshot.names`). It has no sections, and is never encrypted.

    Args:
        name: the hash that stands for the name in a path. folder: of its session.
        newest: the highest generation that was saved under the name, 0 in an alias.
        title: the name itself, "" in an encrypted session.
    """

    name: Digest
    folder: Annotated[str, Meta(pattern=r"^s-[0-9a-f]{32}\Z")]
    newest: Count = 0
    title: Annotated[str, Meta(max_length=256)] = ""


KINDS: dict[int, type[Struct]] = {1: Manifest, 2: Page, 3: LogPart, 4: Place}
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_DECODERS: dict[type[Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(_Header[kind]) for kind in KINDS.values()}  # type: ignore[valid-type]


def digest(*parts: Buffer) -> str:
    """xxh3-128 of the parts one after another, hexadecimal."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def pack(body: Struct, sections: Mapping[str, Mapping[str, Tensor]]) -> list[Buffer]:
    """A container as buffers to be written one after another; the first one has preamble and header.

    The buffers share the memory of the tensors, which must not change until they are written.

    Raises:
        SnapshotError: `unpack` or `tensors` would refuse it, for values outside their limits or tensors of other
            dtypes.
    """
    try:
        contents = {name: _section(tensors, f"section {name!r}") for name, tensors in sections.items()}
        header = msgspec.msgpack.encode(_Header(body, tuple(
            Section(name, total(parts), digest(*parts)) for name, parts in contents.items())))
        _DECODERS[type(body)].decode(header)
        if len(header) > HEADER_LIMIT:
            raise SnapshotCorrupt(f"a header of {len(header)} bytes; expected at most {HEADER_LIMIT}")
    except (msgspec.MsgspecError, SnapshotCorrupt) as error:
        raise SnapshotError(f"this {type(body).__name__} cannot be stored, no reader would take it: {error}") from None
    size = _end_of(PREAMBLE.size + len(header)) + sum(_end_of(total(parts)) for parts in contents.values())
    fixed = PREAMBLE.pack(MAGIC, VERSION, _NUMBERS[type(body)], len(header), size, b"")
    fixed = fixed[:32] + bytes.fromhex(digest(fixed[:32], header))
    beginning = fixed + header
    buffers: list[Buffer] = [beginning + bytes(-len(beginning) % ALIGN)]
    for parts in contents.values():
        buffers += [*parts, bytes(-total(parts) % ALIGN)]
    return buffers


def _section(tensors: Mapping[str, Tensor], what: str) -> list[Buffer]:
    """A safetensors file of these tensors: its header, then the bytes of each tensor; wide items first, so that all are
    aligned.

    The `safetensors` package would copy every tensor twice, which takes longer than writing them.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries, buffers, at = dict[str, _TensorEntry](), list[memoryview](), 0
    for name in order:
        tensor = tensors[name].detach().contiguous()
        end = at + tensor.nbytes
        if tensor.dtype not in DTYPE_NAMES:
            raise SnapshotCorrupt(f"{what}: tensor {name!r} is {tensor.dtype}; expected one of {sorted(DTYPES)}")
        entries[name] = _TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), (at, end))
        flat = tensor.as_strided((tensor.numel(),), (1,))  # one item counts as contiguous with any stride
        buffers.append(flat.view(torch.uint8).numpy().data)
        at = end
    head = msgspec.json.encode(entries)
    head += b" " * (-len(head) % 8)
    parts: list[Buffer] = [len(head).to_bytes(8, "little") + head, *buffers]
    _entries(memoryview(parts[0]), total(parts), what)
    return parts


def unpack(data: bytes | bytearray | memoryview, kind: type[T], what: str) -> tuple[T, dict[str, memoryview], str]:
    """(body, sections, digest of preamble and header) of a container, every byte of it verified.

    Args:
        kind: the kind that the file must have. what: how to call the file in messages.

    Raises:
        SnapshotTooNew: it has a later format version. SnapshotCorrupt: anything else is not exactly as specified.
    """
    view = memoryview(data).cast("B")
    header, length, header_digest = _header(view, kind, what)
    sections, at = {}, _end_of(PREAMBLE.size + length)
    _expect_zeros(view[PREAMBLE.size + length:at], what)
    for section in header.sections:
        end = at + section.size
        if end > len(view) or section.name in sections:
            raise SnapshotCorrupt(f"{what}: section {section.name!r} does not lie inside the file")
        sections[section.name] = view[at:end]
        at = _end_of(end)
        _expect_zeros(view[end:at], what)
    if at != len(view):
        raise SnapshotCorrupt(f"{what}: {len(view)} bytes, of which the sections fill {at}")
    for section in header.sections:
        if digest(sections[section.name]) != section.digest:
            raise SnapshotCorrupt(f"{what}: section {section.name!r} is damaged: its checksum does not match")
    return header.body, sections, header_digest


def _header(view: memoryview, kind: type[T], what: str) -> tuple[_Header[T], int, str]:
    """The verified header of a container, its length in bytes, and its digest. Raises as `unpack`."""
    if len(view) < PREAMBLE.size:
        raise SnapshotCorrupt(f"{what}: {len(view)} bytes; expected at least {PREAMBLE.size}")
    magic, version, number, length, size, digest_bytes = PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise SnapshotCorrupt(f"{what}: not a snapshot file, it begins with {bytes(magic)!r}; expected {MAGIC!r}")
    if version > VERSION and not _is_damaged_version(view, length, digest_bytes):
        raise SnapshotTooNew(f"{what}: format version {version}; this library reads up to {VERSION}; install a newer "
                             "one")
    if version < 1 or number != _NUMBERS[kind]:
        raise SnapshotCorrupt(f"{what}: version {version}, kind {number}; expected version 1 to {VERSION}, kind "
                              f"{_NUMBERS[kind]}")
    if length > HEADER_LIMIT or PREAMBLE.size + length > len(view) or size != len(view):
        raise SnapshotCorrupt(f"{what}: it says {size} bytes with a header of {length}; found {len(view)} bytes")
    content = view[PREAMBLE.size:PREAMBLE.size + length]
    if bytes(view[24:32]) != bytes(8) or bytes.fromhex(digest(view[:32], content)) != digest_bytes:
        raise SnapshotCorrupt(f"{what}: the header is damaged: its checksum does not match")
    try:
        return _DECODERS[kind].decode(content), length, digest_bytes.hex()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SnapshotCorrupt(f"{what}: the header is not one of this format: {_brief(error)}") from None


def _is_damaged_version(view: memoryview, length: int, digest_bytes: bytes) -> bool:
    """Whether the header is intact with another version number: then the number is damaged, and no later version."""
    content = view[PREAMBLE.size:PREAMBLE.size + min(length, HEADER_LIMIT)]
    before, after = bytes(view[:8]), bytes(view[10:32])
    return any(bytes.fromhex(digest(before + version.to_bytes(2, "little") + after, content)) == digest_bytes
               for version in range(1, VERSION + 1))


class _TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data_offsets: tuple[Count, Count]


_ENTRIES = msgspec.json.Decoder(dict[Annotated[str, Meta(max_length=256)], _TensorEntry])


def tensors(section: memoryview, what: str) -> dict[str, Tensor]:
    """The tensors of a verified section, as views of its bytes if these are writable, else as copies. Raises
    SnapshotCorrupt unless it is a safetensors file of the dtypes above, without gaps and overlaps."""
    entries, at = _entries(section, len(section), what)
    data = section[at:]
    return {name: _view(data[slice(*entry.data_offsets)], DTYPES[entry.dtype]).view(entry.shape)
            for name, entry in entries}


def _entries(section: memoryview, size: int, what: str) -> tuple[list[tuple[str, _TensorEntry]], int]:
    """The names and entries of a section in the order of their bytes, and the offset of these bytes. `section` has at
    least the safetensors header of its `size` bytes."""
    if len(section) < 8:
        raise SnapshotCorrupt(f"{what}: a section of {len(section)} bytes; expected a safetensors file")
    length = int.from_bytes(section[:8], "little")
    if length > min(len(section) - 8, HEADER_LIMIT):
        raise SnapshotCorrupt(f"{what}: a tensor header of {length} bytes in a section of {size}")
    try:
        decoded = _ENTRIES.decode(section[8:8 + length])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SnapshotCorrupt(f"{what}: not a tensor header: {_brief(error)}") from None
    entries, at, data_size = sorted(decoded.items(), key=lambda item: item[1].data_offsets), 0, size - 8 - length
    for name, entry in entries:
        dtype = DTYPES.get(entry.dtype)
        start, end = entry.data_offsets
        # With a dimension of 0 the others may have any size; torch and numpy limit the product of those all the same.
        product = prod(axis or 1 for axis in entry.shape)
        count = 0 if 0 in entry.shape else product
        if (dtype is None or start != at or end > data_size or count * dtype.itemsize != end - start
                or product > MOST_ITEMS or (8 + length + start) % dtype.itemsize):
            raise SnapshotCorrupt(f"{what}: tensor {name!r} is {entry.dtype} {entry.shape} in bytes {start} to {end} "
                                  f"of {data_size}; expected a known dtype, from byte {at} on, of just its size")
        at = end
    if at != data_size:
        raise SnapshotCorrupt(f"{what}: {data_size - at} bytes belong to no tensor")
    return entries, 8 + length


def _view(data: memoryview, dtype: torch.dtype) -> Tensor:
    if not len(data):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)


def _brief(error: Exception) -> str:
    """The message of an error that may quote the file, shortened and without control characters."""
    return ascii(str(error)[:200])[1:-1]


def _end_of(size: int) -> int:
    """Where what follows `size` bytes begins."""
    return -(-size // ALIGN) * ALIGN


def _expect_zeros(gap: memoryview, what: str) -> None:
    if any(gap):
        raise SnapshotCorrupt(f"{what}: bytes between the sections are not zero")


def expect(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], what: str) -> None:
    """Raises SnapshotCorrupt, which names the first tensor that differs from these names, dtypes and shapes."""
    for name in sorted(tensors.keys() | shapes.keys()):
        found = (tensors[name].dtype, tuple(tensors[name].shape)) if name in tensors else None
        if found != shapes.get(name):
            raise SnapshotCorrupt(f"{what}: tensor {name!r} is {found or 'missing'}; expected "
                                  f"{shapes.get(name, 'none')}")


def total(parts: Iterable[Buffer]) -> int:
    """Bytes of the buffers that `pack` gave."""
    return sum(len(part) for part in parts)
