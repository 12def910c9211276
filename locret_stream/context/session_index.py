"""The index of all that one session has committed, for recall. It follows the session, and nothing follows it: what is
committed is the same with it and without."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from locret_stream.errors import ConfigError, StoreError
from locret_stream.recall import Cutter, Index, headers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from locret_stream.context.services import Services

_log = logging.getLogger(__name__)
SLICE = 1 << 14  # ids of a log that are taken in at once: an undo waits for so many on the event loop


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """A passage that was read again: the tokens start .. end-1 of the stream, and their text."""

    start: int
    end: int
    text: str


class SessionIndex:
    """The index of one session, which is handed on when another session takes its place.

    Args:
        owner: the session; what others add is ignored. private: the index is kept in memory.
        complete: whether nothing was committed yet; otherwise the log says what was, once it is asked for.
    """

    def __init__(self, services: Services, owner: object, *, private: bool, complete: bool):
        frames = services.frames
        runs = headers(frames.literal_runs, services.codec.control_ids, frames.runs_at_other_times)
        self._make = lambda: Index(lambda start: Cutter(services.codec, runs, start), private=private)
        self._index, self._owner, self.complete = self._make(), owner, complete
        self._lock = threading.Lock()  # ids come on the engine's thread, all else on others
        self._waiting: deque[tuple[object, Sequence[int], int]] = deque()

    @property
    def bytes(self) -> int:
        """What it takes, in the temporary file or in memory."""
        return self._index.bytes

    def add(self, owner: object, ids: Sequence[int], position: int) -> None:
        """Ids that were committed from that position on. It waits for nobody: while the index is searched they wait to
        be taken in. Nothing fails here: what cannot be kept is read from the log later."""
        self._waiting.append((owner, ids, position))
        while self._waiting and self._lock.acquire(blocking=False):  # again, if some came while it was let go
            try:
                self._take_in()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """A block that has the index for itself, with all that was committed before."""
        with self._lock:
            self._take_in()
            yield

    def _take_in(self) -> None:
        while self._waiting:
            owner, ids, position = self._waiting.popleft()
            if owner is not self._owner or not self.complete:
                continue
            with self._failing_alone():
                self._index.truncate(position)  # it has more after a step that failed
                self.complete = self._index.end == position
                self._index.add(ids if self.complete else ())

    def hand_over(self, owner: object, end: int | None) -> None:
        """Go on for another session, in which the first `end` ids are the same; None: that has to be compared with the
        log."""
        with self._up_to_date():
            self._owner, self.complete = owner, self.complete and end is not None
            if self.complete and end is not None:
                with self._failing_alone():
                    self._index.truncate(end)
                    self.complete = self._index.end == end

    def copy(self, owner: object, end: int) -> SessionIndex:
        """Those of a fork, which has the first `end` ids."""
        twin = object.__new__(SessionIndex)
        with self._up_to_date():
            twin._make, twin._owner, twin.complete = self._make, owner, self.complete
            try:
                twin._index = self._index.copy()
            except sqlite3.Error as error:
                _log.warning("a fork has no index for recall: %s", error)
                twin._index, twin.complete = self._make(), False
        twin._lock, twin._waiting = threading.Lock(), deque()
        twin.hand_over(owner, end)
        return twin

    def close(self) -> None:
        """Drop the index."""
        with self._lock:
            self._owner, self.complete = None, False
            self._index.close()

    def follow(self, owner: object, ids: NDArray[np.int32]) -> None:
        """Hold all committed ids [n] of a session, which its log has; nothing if another one took its place meanwhile.
        Raises StoreError."""
        at = None
        while at is None or at < len(ids):
            with self._lock, self._reporting():
                if owner is not self._owner:
                    return
                if at is None:
                    self._waiting.clear()  # the log has them
                    at = self._index.keep_shared(ids)
                end = min(len(ids), at + SLICE)
                self._index.add(ids[at:end].tolist())
                at, self.complete = end, end == len(ids)

    def search(self, question: str, most: int, measure: Callable[[str], int]) -> list[Recalled] | None:
        """As `Index.search`; None: it does not hold all, and has to `follow` first. Raises StoreError."""
        with self._up_to_date(), self._reporting():
            return None if not self.complete else [Recalled(start=start, end=start + len(ids), text=text)
                    for start, ids, text in self._index.search(question, most, measure)]

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Errors of the temporary file as StoreError; it is made again the next time."""
        try:
            yield
        except sqlite3.Error as error:
            self._begin_anew()
            raise StoreError(f"the index for recall cannot be used: {error}; expected room for temporary files, or "
                             "recall=False") from error

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """A block whose failure costs the index, and nothing that the session does."""
        try:
            yield
        except sqlite3.Error as error:
            _log.warning("the index for recall will be made again from the log: %s", error)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.complete = False
        with contextlib.suppress(sqlite3.Error, ConfigError):
            self._index.close()
            self._index = self._make()
