"""Encryption: an encrypted file opens with its key at its place, whole, or not at all."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotTooNew, StoreError
from locret_stream.snapshot import encryption
from locret_stream.snapshot.encryption import decrypt, encrypt, new_data_key, unwrap, user_key, wrap

SALT, TAG, SEGMENT = 32, 16, 1 << 20  # as the specification says
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
PLACE = "s-1/pages/a"
HEAD = 10 + SALT


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of 16 bytes: the laws are the same and files stay small."""
    monkeypatch.setattr(encryption, "SEGMENT", 16)


def encrypted(data: bytes, key: bytes = KEY, place: str = PLACE, parts: int = 1) -> bytearray:
    cuts = [len(data) * number // parts for number in range(parts + 1)]
    return bytearray(b"".join(encrypt([data[a:b] for a, b in pairwise(cuts)], key, place)))


def refuse(data: bytes | bytearray, key: bytes = KEY, place: str = PLACE) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        decrypt(bytearray(data), key, place)
    assert str(caught.value).startswith(place)
    return caught.value


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT])
def test_what_was_encrypted_is_decrypted_at_the_bounds_of_segments(size: int):
    data = random.Random(size).randbytes(size)
    file = encrypted(data)
    assert len(file) == HEAD + size + TAG * max(1, -(-size // SEGMENT))
    assert decrypt(file, KEY, PLACE) == data


@given(st.lists(st.binary(max_size=50), max_size=8))
@settings(max_examples=100)
def test_what_was_encrypted_is_decrypted_however_it_came(parts: list[bytes]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "SEGMENT", 16)
        data = b"".join(parts)
        assert decrypt(bytearray(b"".join(encrypt(parts, KEY, PLACE))), KEY, PLACE) == data


def test_an_encrypted_file_is_laid_out_as_the_specification_says(small_segments):
    """Opened here by the primitives alone."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    data = bytes(range(40))
    file = bytes(encrypted(data))
    assert file[:10] == b"\x89LOCSEA\n\1\0"
    aead = AESGCM(HKDF(SHA256(), 32, file[10:42], PLACE.encode()).derive(KEY))
    assert aead.decrypt(bytes(12), file[42:74], None) == data[:16]
    assert aead.decrypt(b"\1" + bytes(11), file[74:106], None) == data[16:32]
    assert aead.decrypt(b"\2" + bytes(7) + b"\1\0\0\0", file[106:], None) == data[32:]


def test_two_files_of_the_same_content_have_nothing_in_common_but_their_kind():
    a, b = encrypted(bytes(1000)), encrypted(bytes(1000))
    assert a[:10] == b[:10] and a[10:42] != b[10:42]
    assert sum(x == y for x, y in zip(a[42:], b[42:], strict=True)) < 50  # about 4 by chance
    assert bytes(32) not in a


def test_sealing_holds_no_more_than_a_segment_and_the_part_at_hand():
    """A part is encrypted before the next is asked for."""
    asked = []

    def parts():
        for number in range(4):
            asked.append(number)
            yield bytes(SEGMENT)

    pieces = encrypt(parts(), KEY, PLACE)
    assert len(next(pieces)) == HEAD and asked == []
    assert len(next(pieces)) == SEGMENT + TAG and asked == [0, 1]
    assert len(next(pieces)) == SEGMENT + TAG and asked == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 40])
def test_every_flipped_bit_is_refused(small_segments, size: int):
    file = encrypted(random.Random(size).randbytes(size))
    for bit in range(8 * len(file)):
        bad = bytearray(file)
        bad[bit // 8] ^= 1 << bit % 8
        later = bit // 8 in (8, 9) and bit != 64  # the version, 1
        assert type(refuse(bad)) is (SnapshotTooNew if later else SnapshotCorrupt), bit


def test_a_flipped_bit_in_a_file_of_segments_of_full_size_is_refused_sampled():
    file, rng = encrypted(random.Random(0).randbytes(2 * SEGMENT + 5)), random.Random(1)
    bounds = [0, 7, 10, HEAD - 1, HEAD, HEAD + SEGMENT - 1, HEAD + SEGMENT, HEAD + SEGMENT + TAG, len(file) - 1]
    for at in bounds + [rng.randrange(HEAD, len(file)) for _ in range(12)]:
        file[at] ^= (bit := 1 << rng.randrange(8))
        assert type(refuse(file)) is SnapshotCorrupt
        file[at] ^= bit


@pytest.mark.parametrize("size", [0, 1, 16, 17, 32, 48, 50])
def test_a_file_cut_at_any_length_is_refused(small_segments, size: int):
    file = encrypted(bytes(size))
    for length in range(len(file)):
        assert type(refuse(file[:length])) is SnapshotCorrupt


@pytest.mark.parametrize("size", [0, 16, 17, 50])
@pytest.mark.parametrize("more", [1, 15, 16, 17, 32, 33])
def test_appended_bytes_are_refused(small_segments, size: int, more: int):
    file = encrypted(bytes(size))
    refuse(file + bytes(more))
    refuse(file + file[-more:])


def segments(data: bytes | bytearray) -> tuple[bytes, list[bytes]]:
    return bytes(data[:HEAD]), [bytes(data[at:at + 16 + TAG]) for at in range(HEAD, len(data), 16 + TAG)]


@pytest.mark.parametrize("change", [
    lambda parts: [parts[1], parts[0], *parts[2:]], lambda parts: [parts[0], *parts[2:]], lambda parts: parts[1:],
    lambda parts: parts[:-1], lambda parts: [parts[0], parts[0], *parts[1:]], lambda parts: [*parts, parts[-1]],
    lambda parts: [parts[-1]], lambda parts: [], lambda parts: [parts[2], parts[1], parts[0], *parts[3:]],
    lambda parts: [*parts[:-2], parts[-1]],
], ids=["swapped", "one left out", "first left out", "last left out", "first twice", "last twice", "last alone", "none",
        "turned", "last but one left out"])
def test_segments_that_are_not_just_those_of_the_file_in_order_are_refused(small_segments, change: Callable):
    head, parts = segments(encrypted(bytes(range(64))))
    assert len(parts) == 4 and decrypt(bytearray(head + b"".join(parts)), KEY, PLACE) == bytes(range(64))
    assert type(refuse(head + b"".join(change(parts)))) is SnapshotCorrupt


def test_a_file_put_together_from_two_is_refused(small_segments):
    (head, a), (other, b) = segments(encrypted(bytes(48))), segments(encrypted(bytes(48)))
    for at in range(3):
        refuse(head + b"".join([*a[:at], b[at], *a[at + 1:]]))
        refuse(other + b"".join([*a[:at], b[at], *a[at + 1:]]))
    refuse(other + b"".join(a))


@pytest.mark.parametrize("place", ["s-2/pages/a", "s-1/pages/b", "s-1/log/a", "", "s-1/pages/a ", "s-1/pages/á"])
def test_a_file_moved_to_another_place_is_refused(place: str):
    refuse(encrypted(b"x"), place=place)


def test_a_file_of_another_session_is_refused():
    error = refuse(encrypted(b"x"), key=OTHER)
    assert type(error) is SnapshotCorrupt and "segment 0" in str(error)


def test_a_file_encrypted_by_a_later_version_is_too_new():
    for version in (2, 255, 256, 65535):
        file = encrypted(b"x")
        file[8:10] = version.to_bytes(2, "little")
        error = refuse(file)
        assert type(error) is SnapshotTooNew and f"version {version}" in str(error)
    file[8:10] = bytes(2)
    assert type(refuse(file)) is SnapshotCorrupt


@pytest.mark.parametrize("data", [
    b"", b"\x89LOCSEA\n", b"\x89LOCSEA\n\1\0" + bytes(32), b"\x89LOCRET\n\1\0" + bytes(100), bytes(1000),
    b"\x89LOCSEA\n\1\0" + bytes(47)])
def test_what_was_never_encrypted_is_refused(data: bytes):
    assert type(refuse(data)) is SnapshotCorrupt


# -- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [KEY, bytearray(KEY), memoryview(KEY), KEY.hex(), KEY.hex().upper()], ids=type)
def test_a_key_is_32_bytes_or_64_hexadecimal_digits(given):
    key = user_key(given)
    assert key == KEY and type(key) is bytes


def test_no_key_is_none():
    assert user_key(None) is None


@pytest.mark.parametrize("given", [
    b"", KEY[:-1], KEY + b"\0", "", "00" * 31, "00" * 33, "0" * 63, "0x" + "00" * 31, "g" * 64, "é" * 64, "０" * 64, 32,
    0, 10**15, True, 3.5, [0] * 32, (0,) * 32], ids=repr)
def test_anything_else_is_no_key(given):
    """An int above all: `bytes(32)` is a key of zeros."""
    with pytest.raises(ConfigError, match="not 32 bytes or 64 hexadecimal digits") as caught:
        user_key(given)
    assert not isinstance(given, str) or not given or given not in str(caught.value)  # what may be a secret is not told


def test_data_keys_are_32_random_bytes():
    assert len({new_data_key() for _ in range(50)}) == 50 and len(new_data_key()) == 32


def test_a_wrapped_key_opens_with_the_key_and_for_the_session_it_was_wrapped_for():
    wrapped = wrap(OTHER, KEY, "s-1")
    assert unwrap(wrapped, KEY, "s-1") == OTHER == unwrap(bytearray(wrapped), KEY, "s-1")
    assert OTHER not in wrapped and len(wrapped) == 12 + 32 + 16
    assert wrap(OTHER, KEY, "s-1") != wrapped  # a nonce is never used twice
    for key, session in ((OTHER, "s-1"), (KEY, "s-2"), (KEY, "")):
        with pytest.raises(StoreError, match="does not open with the one given"):
            unwrap(wrapped, key, session)


def test_a_damaged_wrapped_key_is_refused():
    wrapped = wrap(OTHER, KEY, "s-1")
    bad = [wrapped[:length] for length in range(len(wrapped))] + [wrapped + b"\0", b"\0" + wrapped, bytes(1024)]
    for bit in range(8 * len(wrapped)):
        flipped = bytearray(wrapped)
        flipped[bit // 8] ^= 1 << bit % 8
        bad.append(bytes(flipped))
    for data in bad:
        with pytest.raises(StoreError, match="does not open"):
            unwrap(data, KEY, "s-1")


@pytest.mark.parametrize("module", ["cryptography", "cryptography.exceptions",
                                    "cryptography.hazmat.primitives.ciphers.aead"])
def test_without_the_cryptography_package_every_use_of_a_key_says_what_to_install(monkeypatch, module: str):
    wrapped, data = wrap(OTHER, KEY, "s-1"), encrypted(b"x")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    for use in (lambda: user_key(KEY), lambda: wrap(OTHER, KEY, "s-1"), lambda: unwrap(wrapped, KEY, "s-1"),
                lambda: list(encrypt([b"x"], KEY, PLACE)), lambda: decrypt(data, KEY, PLACE)):
        with pytest.raises(ConfigError, match=r"pip install 'locret-stream\[encryption\]'"):
            use()
    assert user_key(None) is None  # a store without a key needs nothing
