"""Encryption at rest: one data key per session, wrapped by a key of the user; without it the session is unreadable.

An encrypted file is a container, encrypted as a whole (AES-256-GCM in segments, each file under a key of its own):

    0    8   magic: 89 4C 4F 43 53 45 41 0A
    8    2   u16 version: 1
    10   32  salt; file key = HKDF-SHA256(data key, salt, info = where the file lies)
    42       segments of 1 MiB of plaintext (the last may be shorter, even empty), each followed by its tag of 16 bytes;
             nonce = u64 number of the segment, little-endian, then u32: 1 for the last segment, else 0

A file that was moved to another place, cut at a segment, or put together from two cannot be decrypted.

    wrapped key    nonce (12), AES-256-GCM of the 32 bytes of the data key under the user's key, bound to the session
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

from locret_stream.errors import ConfigError, SnapshotCorrupt, SnapshotTooNew, StoreError
from locret_stream.snapshot.files import Exists, Files
from locret_stream.snapshot.format import Buffer

MAGIC = b"\x89LOCSEA\n"
VERSION = 1
HEAD = len(MAGIC) + 2  # magic and version; then the salt
SALT, TAG, SEGMENT = 32, 16, 1 << 20
KEY_BYTES = 32


class MissingKey(StoreError):
    """The store was given no key for an encrypted session, or another one; outside `snapshot` it is a StoreError."""


def user_key(key: bytes | str | None) -> bytes | None:
    """The key that a user gave: 32 bytes, or 64 hexadecimal digits. Raises ConfigError for anything else, and where the
    `cryptography` package is not installed."""
    if key is None:
        return None
    try:
        raw = bytes.fromhex(key) if isinstance(key, str) else bytes(memoryview(key))
    except (TypeError, ValueError):  # `bytes` of an int would be that many zeros
        raw = b""
    if len(raw) != KEY_BYTES:
        raise ConfigError("the store's key is not 32 bytes or 64 hexadecimal digits; `python -c \"import secrets; "
                          "print(secrets.token_hex(32))\"` makes one")
    _cipher()
    return raw


def new_data_key() -> bytes:
    """A key for one session."""
    return secrets.token_bytes(KEY_BYTES)


def wrap(data_key: bytes, key: bytes, folder: str) -> bytes:
    """The data key as it is stored in a session's folder; `unwrap` opens it only there."""
    nonce = os.urandom(12)
    return nonce + _cipher().AESGCM(key).encrypt(nonce, data_key, folder.encode())


def unwrap(wrapped: bytes, key: bytes, folder: str) -> bytes:
    """The data key again. Raises MissingKey if `key` is another one, or the file is damaged."""
    cipher = _cipher()
    try:
        return cipher.AESGCM(key).decrypt(bytes(wrapped[:12]), bytes(wrapped[12:]), folder.encode())
    except (cipher.InvalidTag, ValueError):
        raise MissingKey(f"{folder} is encrypted, and its key does not open with the one given; expected the one it "
                         "was made with") from None


class SessionKey:
    """Whether and how the session in a folder is encrypted. Several threads may ask at a time.

    What it read from the folder stays valid until `refresh`. `user_key` is the store's key, None for a store without.
    """

    def __init__(self, files: Files, folder: str, user_key: bytes | None, has_snapshots: Callable[[], bool]):
        self.files, self._folder = files, folder
        self.user_key, self._has_snapshots = user_key, has_snapshots
        self._data_key: bytes | None = None
        self._wrapped = self._durable = b""  # the stored form of the data key, and the last one that is surely durable
        self._read = "", b""  # the file of the key as it was read, and its version
        self._plain = False  # whether the session is surely stored without encryption
        self._lock = threading.RLock()

    @property
    def encrypted(self) -> bool:
        """Whether the session has a data key."""
        return not self._plain and (self._data_key is not None or "key" in self.files.sizes(self._folder))

    @property
    def will_encrypt(self) -> bool:
        """Whether the next save of the session is encrypted."""
        return self.encrypted or (self.user_key is not None and not self._has_snapshots())

    @property
    def unchanged(self) -> bool:
        """Whether the folder still has the key that was used here, or still has none."""
        if "key" not in self.files.sizes(self._folder):
            return self._data_key is None
        return self._stored_form() == self._wrapped

    def _stored_form(self) -> bytes:
        """The key's file, which is read again only where it may have changed."""
        path = f"{self._folder}/key"
        version = self.files.version(path)
        if not version or self._read[0] != version:
            self._read = version, bytes(self.files.read(path, 1024))
        return self._read[1]

    def refresh(self) -> None:
        """Forget what was read: the session may have been forgotten and begun anew, with another key or none."""
        with self._lock:
            self._data_key, self._plain = None, False

    def for_reading(self) -> bytes | None:
        """The data key; None in a session without one. Raises MissingKey."""
        return self._get(make=False)

    def for_writing(self) -> bytes | None:
        """The data key, durable and made if there is none yet; None in a store without a key. Raises MissingKey, and as
        `expect_no_plaintext`."""
        return self._get(make=True)

    def expect_no_plaintext(self) -> None:
        """Raises StoreError if the store has a key, and the session was stored without encryption."""
        if self.user_key is not None and self._has_snapshots() and not self.encrypted:
            raise StoreError("this session was stored without encryption and the store was given a key; expected no "
                             "key, or a new session")

    def _get(self, make: bool) -> bytes | None:
        with self._lock:
            if self._data_key is None and (self.user_key is not None or not self._plain):
                self._find(make)
            if make and self._data_key is not None and self._wrapped != self._durable:
                self.files.sync_folder(self._folder)  # the process that wrote the key may have died before its sync
                self._durable = self._wrapped
            return self._data_key

    def _find(self, make: bool) -> None:
        if self.encrypted:
            if self.user_key is None:
                raise MissingKey(f"{self._folder} is encrypted; expected the store's key (`key=...`, or LOCRET_KEY)")
            wrapped = self._stored_form()
            self._data_key, self._wrapped = unwrap(wrapped, self.user_key, self._folder), wrapped
        elif self.user_key is not None and make:
            self.expect_no_plaintext()
            data_key = new_data_key()
            wrapped = wrap(data_key, self.user_key, self._folder)
            try:
                self.files.write(f"{self._folder}/key", [wrapped], exclusive=True)
            except Exists:  # another process began the same session at this moment
                self._find(make)
            else:
                self._data_key, self._wrapped, self._durable = data_key, wrapped, wrapped
        else:
            self._plain = make or self._has_snapshots()


def encrypted_size(size: int) -> int:
    """Bytes of the encrypted file of a container of `size` bytes."""
    return HEAD + SALT + size + TAG * max(1, -(-size // SEGMENT))


def encrypt(parts: Iterable[Buffer], data_key: bytes, where: str) -> Iterator[bytes]:
    """The encrypted file of a container, in parts; `where` is its path, to which it is bound."""
    salt = os.urandom(SALT)
    yield MAGIC + VERSION.to_bytes(2, "little") + salt
    aead, number, buffer = _cipher().AESGCM(_file_key(data_key, salt, where)), 0, bytearray()
    for part in parts:
        buffer += part
        while len(buffer) > SEGMENT:
            yield aead.encrypt(_nonce(number, False), bytes(buffer[:SEGMENT]), None)
            del buffer[:SEGMENT]
            number += 1
    yield aead.encrypt(_nonce(number, True), bytes(buffer), None)


def decrypt(data: memoryview, data_key: bytes, where: str) -> memoryview:
    """The container in an encrypted file whose path is `where`.

    Raises:
        SnapshotTooNew: a later version encrypted it. SnapshotCorrupt: it was encrypted with another key or for another
            path, or is damaged.
    """
    cipher = _cipher()
    if bytes(data[:len(MAGIC)]) != MAGIC or len(data) < HEAD + SALT + TAG:
        raise SnapshotCorrupt(f"{where}: not an encrypted file of this store")
    version = int.from_bytes(data[len(MAGIC):HEAD], "little")
    if version > VERSION:
        raise SnapshotTooNew(f"{where}: encrypted as version {version}; this library reads up to {VERSION}; install a "
                             "newer one")
    if version != VERSION:
        raise SnapshotCorrupt(f"{where}: encrypted as version {version}; expected 1 to {VERSION}")
    salt, at, number = bytes(data[HEAD:HEAD + SALT]), HEAD + SALT, 0
    aead, out = cipher.AESGCM(_file_key(data_key, salt, where)), bytearray()
    while at < len(data):
        end = min(at + SEGMENT + TAG, len(data))
        try:
            out += aead.decrypt(_nonce(number, end == len(data)), data[at:end], None)
        except cipher.InvalidTag:
            raise SnapshotCorrupt(f"{where}: segment {number} does not open: damaged, moved, or of another session"
                                  ) from None
        at, number = end, number + 1
    return memoryview(out)


class Scrambler:
    """Encrypts a temporary file (AES-256-CTR by offset) under a key that exists only in memory.

    Every offset may be encrypted once: other bytes at the same offset need a scrambler of their own.
    """

    def __init__(self):
        self._cipher, self._key, self._nonce = _cipher(), secrets.token_bytes(KEY_BYTES), secrets.token_bytes(8)

    def at(self, offset: int, data: bytes) -> bytes:
        """Encrypt the bytes at an offset, or decrypt them: CTR is its own inverse."""
        block, skip = divmod(offset, 16)
        mode = self._cipher.CTR(self._nonce + block.to_bytes(8, "big"))
        stream = self._cipher.Cipher(self._cipher.AES(self._key), mode).encryptor()
        return stream.update(bytes(skip) + data)[skip:]


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(8, "little") + int(last).to_bytes(4, "little")


def _file_key(data_key: bytes, salt: bytes, where: str) -> bytes:
    cipher = _cipher()
    return cipher.HKDF(cipher.SHA256(), KEY_BYTES, salt, where.encode()).derive(data_key)


def _cipher() -> SimpleNamespace:
    """What this module uses of the `cryptography` package, an optional requirement. Raises ConfigError without it."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise ConfigError("a store with a key needs the package cryptography: pip install 'locret-stream[encryption]'"
                          ) from None
    return SimpleNamespace(AES=AES, AESGCM=AESGCM, CTR=CTR, Cipher=Cipher, HKDF=HKDF, InvalidTag=InvalidTag,
                           SHA256=SHA256)
