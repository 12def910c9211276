"""Histories that grow: what a turn needs of messages that were read before is kept in a few bytes, not as messages.

The key behind a chain of messages follows from the messages and from nothing else. So whoever recognises the first
messages of a history, as the same that were given before, need not read them again: `Known` tells what they led to.
How they are recognised is the caller's affair; nothing here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from locret_stream.conversation.messages import Message, chain, digest

MOST_RECEIPTS, MOST_STREAMS = 1024, 64  # that lead elsewhere; with more a beginning is not kept
_PART = 8  # bytes of a key that tell that two are different


@dataclass(frozen=True, slots=True)
class Known:
    """What the first messages of a history are for a turn that begins behind them.

    Attributes:
        count: of these messages.
        start, key: the keys before the first of them and behind the last.
        last_stream: the number of messages up to the last absorbed stream, it included; 0 without.
        receipts: 8 bytes of each key that the receipt of an answer names and that is not the one behind it.
        streams: of each absorbed stream the digest of its message and the key behind it.
    """

    count: int
    start: bytes
    key: bytes
    last_stream: int = 0
    receipts: bytes = b""
    streams: tuple[tuple[bytes, bytes], ...] = ()

    def may_name(self, key: bytes) -> bool:
        """False: no receipt in these messages names that key, unless it is the key behind the answer that has the
        receipt. True may be a false alarm, as 8 bytes are compared."""
        return bool(self.receipts) and key[:_PART] in self.receipts


class History(Sequence[Message]):
    """The messages of a call. Those that were recognised are read only where somebody asks for them.

    Args:
        count: of all messages.
        tail: the last ones, read.
        read: reads the messages from one number up to the one before another.
        known: what the beginnings are that were recognised, the longest ones first.
        remember: takes what all of the messages are, for the next call.
    """

    def __init__(self, count: int, tail: Sequence[Message], read: Callable[[int, int], Sequence[Message]],
                 known: Sequence[Known], remember: Callable[[Known], None]):
        self._head = count - len(tail)
        self._said: list[Message | None] = [*[None] * self._head, *tail]
        self._read, self._known, self._remember = read, [*known], remember

    def known(self, start: bytes) -> Known | None:
        """The longest recognised beginning that starts behind that key, if possible not the whole history: of that only
        the last key is known, and a turn usually needs earlier ones."""
        found = [known for known in self._known if known.start == start]
        return next((known for known in found if known.count < len(self)), found[0] if found else None)

    def remember(self, known: Known) -> None:
        """For the next call, and for whoever asks this one again."""
        self._known.insert(0, known)
        self._remember(known)

    def __len__(self) -> int:
        return len(self._said)

    @overload
    def __getitem__(self, at: int) -> Message: ...

    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...

    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        if isinstance(at, slice):
            numbers = range(len(self._said))[at]
            first = min(numbers, default=0)
            part = self._between(first, max(numbers, default=-1) + 1)
            return [part[number - first] for number in numbers]
        number = range(len(self._said))[at]
        return self._between(number, number + 1)[0]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._between(0, len(self._said)))

    def _between(self, first: int, stop: int) -> list[Message]:
        """Messages first .. stop-1; from the first of the head that was not read yet on, the head is read up to there.
        """
        unread = [number for number in range(first, min(stop, self._head)) if self._said[number] is None]
        if unread:
            self._said[unread[0]:unread[-1] + 1] = self._read(unread[0], unread[-1] + 1)
        return [message for message in self._said[first:stop] if message is not None]


class Keys(Sequence[bytes]):
    """Keys of all boundaries of a chain, as `chain` gives them; those behind messages that were recognised are worked
    out when somebody asks for one.

    Attributes:
        known: the recognised beginning; None once somebody asked for a key inside it.
        last_stream: of all messages, as `Known` has it.
    """

    def __init__(self, start: bytes, said: Sequence[Message]):
        self._said, self._start = said, start
        self.known = known = said.known(start) if isinstance(said, History) else None
        before = known or Known(0, start, start)
        self._keys, self.last_stream = [before.key], before.last_stream
        receipts, streams = bytearray(before.receipts), list(before.streams)
        for number, message in enumerate(said[before.count:], before.count):
            key = digest(self._keys[-1], message.digest)
            self._keys.append(key)
            if message.stream:
                streams.append((message.digest, key))
                self.last_stream = number + 1
            elif message.state_key not in (b"", key):
                receipts += message.state_key[:_PART]
        few = len(receipts) <= MOST_RECEIPTS * _PART and len(streams) <= MOST_STREAMS
        if isinstance(said, History) and few and before.count < len(said):
            said.remember(Known(len(said), start, self._keys[-1], self.last_stream, bytes(receipts), tuple(streams)))

    def __len__(self) -> int:
        return len(self._said) + 1

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        first = len(self) - len(self._keys)
        if isinstance(at, slice):
            return self._whole()[at]
        number = range(len(self))[at]
        return self._keys[number - first] if number >= first else self._whole()[number]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole())

    def _whole(self) -> list[bytes]:
        if self.known is not None:
            self._keys, self.known = chain(self._start, self._said), None
        return self._keys
