"""The data key of one session: found in its folder, or made for the first save. Knows nothing of containers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from locret_stream.errors import StoreError
from locret_stream.snapshot import encryption
from locret_stream.snapshot.files import Exists, Files


class SessionKey:
    """Whether and how a session is encrypted. Several threads may ask at a time.

    What it read from the folder stays valid until `refresh`.

    Args:
        folder: of the session. user_key: the store's key, None for a store without one.
        has_snapshots: says whether the session has any snapshot.
    """

    def __init__(self, files: Files, folder: str, user_key: bytes | None, has_snapshots: Callable[[], bool]):
        self._files, self._folder = files, folder
        self.user_key, self._has_snapshots = user_key, has_snapshots
        self._data_key: bytes | None = None
        self._wrapped = self._durable = b""  # the stored form of the data key, and the last one that is surely durable
        self._plain = False  # whether the session is surely stored without encryption
        self._lock = threading.RLock()

    @property
    def encrypted(self) -> bool:
        """Whether the session has a data key."""
        return not self._plain and (self._data_key is not None or "key" in self._files.sizes(self._folder))

    @property
    def will_encrypt(self) -> bool:
        """Whether the next save of the session is encrypted."""
        return self.encrypted or (self.user_key is not None and not self._has_snapshots())

    @property
    def unchanged(self) -> bool:
        """Whether the folder still has the key that was used here, or still has none."""
        if "key" not in self._files.sizes(self._folder):
            return self._data_key is None
        return bytes(self._files.read(f"{self._folder}/key", 1024)) == self._wrapped

    def refresh(self) -> None:
        """Forget what was read: the session may have been forgotten and begun anew, with another key or none."""
        with self._lock:
            self._data_key, self._plain = None, False

    def for_reading(self) -> bytes | None:
        """The data key; None in a session without one.

        Raises:
            StoreError: the session is encrypted, and the store has no key or another one.
        """
        return self._get(make=False)

    def for_writing(self) -> bytes | None:
        """The data key, durable and made if there is none yet; None in a store without a key.

        Raises:
            StoreError: as `for_reading`, or the store has a key and the session was stored without one.
        """
        return self._get(make=True)

    def expect_no_plaintext(self) -> None:
        """Raises:
            StoreError: the store has a key, and the session was stored without encryption.
        """
        if self.user_key is not None and self._has_snapshots() and not self.encrypted:
            raise StoreError("this session was stored without encryption and the store was given a key; expected no "
                             "key, or a new session")

    def _get(self, make: bool) -> bytes | None:
        with self._lock:
            if self._data_key is None:
                self._find(make)
            if make and self._data_key is not None and self._wrapped != self._durable:
                self._files.sync_folder(self._folder)  # the process that wrote the key may have died before its sync
                self._durable = self._wrapped
            return self._data_key

    def _find(self, make: bool) -> None:
        if self.encrypted:
            if self.user_key is None:
                raise encryption.MissingKey(f"{self._folder} is encrypted; expected the store's key (`key=...`, or "
                                            "LOCRET_KEY)")
            wrapped = bytes(self._files.read(f"{self._folder}/key", 1024))
            self._data_key, self._wrapped = encryption.unwrap(wrapped, self.user_key, self._folder), wrapped
        elif self.user_key is not None and make:
            self.expect_no_plaintext()
            data_key = encryption.new_data_key()
            wrapped = encryption.wrap(data_key, self.user_key, self._folder)
            try:
                self._files.write(f"{self._folder}/key", [wrapped], exclusive=True)
            except Exists:  # another process began the same session at this moment
                self._find(make)
            else:
                self._data_key, self._wrapped, self._durable = data_key, wrapped, wrapped
        else:
            self._plain = make or self._has_snapshots()
