"""Boundaries between messages: what a memory that rests at one holds, and which of them given messages go on from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from locret_stream.conversation.histories import Keys
from locret_stream.conversation.messages import Message, chain, digest
from locret_stream.errors import LocretError
from locret_stream.snapshot import check_name

PREFIX = "langchain/"  # of the names of the sessions in which threads are stored
LONGEST_NAME = 1024  # characters of a name that a note has; a longer one is not told
LEDGER = 512  # messages of which a boundary has digests, to prove that a trimmed history is the end of what it holds
MOST_ANSWERS = 8  # answers of a trimmed history whose receipts are tried


class Boundary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a memory that ends between two messages holds; it is the note of the memory's snapshot.

    Args:
        key: [32], the chained digest of tools and messages.
        start: [32], the key before the first message.
        system: [16], the digest of the leading system messages; b"" without any.
        ledger: digests of the other messages, 16 bytes each, the last 512.
        tokens: the number that was accepted.
        role: of the last message.
        lineage: [16], identifies the chain of messages by its beginning.
        stream: the last message is an absorbed stream.
        owner: of a fork, the session of the thread whose keys it goes on with; "" for its own.
        tools: whether the memory may have been told of tools.
        mark: by which a later call names the boundary; b"" for one that is found by its messages.
        appended: it has a mark, and lies behind what the thread was told last before it.
        places: where the last messages stand in the log (`places`).
        name: of the thread, where its session has a digest for a name; else "".
        options: [16], the digest of the template's options that change what is held; b"" without any.
        process: [16], the same of those that were not the request's, but of the process that it was made in.
    """

    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    start: Annotated[bytes, Meta(min_length=32, max_length=32)]
    system: Annotated[bytes, Meta(max_length=16)]
    ledger: Annotated[bytes, Meta(max_length=16 * LEDGER)]
    tokens: Annotated[int, Meta(ge=0, le=2**53)]
    role: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=1, le=1)] = 1
    lineage: Annotated[bytes, Meta(max_length=16)] = b""
    stream: bool = False
    owner: Annotated[str, Meta(max_length=256)] = ""
    tools: bool = True
    mark: Annotated[bytes, Meta(max_length=32)] = b""
    appended: bool = False
    places: Annotated[bytes, Meta(max_length=1 << 14)] = b""
    name: Annotated[str, Meta(max_length=LONGEST_NAME)] = ""
    options: Annotated[bytes, Meta(max_length=16)] = b""
    process: Annotated[bytes, Meta(max_length=16)] = b""

    def proves(self, start: bytes, said: Sequence[Message]) -> bool:
        """Whether the memory ends with these messages, and began in the same thread, with the same tools and, unless
        they have none, the same system messages.

        Summaries of older messages are passed over: the memory holds those messages themselves.
        """
        system, rest = split(said)
        ledger = b"".join(message.digest for message in rest if not message.summary)
        same_start = start == self.start and (not system or heading(system) == self.system)
        return same_start and bool(ledger) and self.ledger.endswith(ledger)

    def holds(self, message: Message) -> bool:
        """Whether a message is among the last 512 that the memory holds."""
        return any(self.ledger[at:at + 16] == message.digest for at in range(0, len(self.ledger), 16))


_NOTE = msgspec.msgpack.Decoder(Boundary)


def from_note(note: bytes) -> Boundary | None:
    """The boundary in a snapshot's note; notes are untrusted, and None is returned for one that cannot be decoded."""
    try:
        boundary = _NOTE.decode(note) if note else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    return boundary if boundary is not None and len(boundary.ledger) % 16 == 0 else None


def split(said: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The leading system messages, and the others."""
    count = next((at for at, message in enumerate(said) if message.role != "system"), len(said))
    return said[:count], said[count:]


def heading(system: Sequence[Message]) -> bytes:
    """[16], the digest of leading system messages; b"" without any."""
    return digest(*(message.digest for message in system))[:16] if system else b""


def fitting(reachable: Mapping[bytes, Boundary], keys: Keys, said: Sequence[Message]
            ) -> Iterator[tuple[int, Boundary, Sequence[bytes]]]:
    """Boundaries that these messages go on from: (messages held, boundary, keys of all boundaries), deepest first.

    A boundary is of just these messages; or of a longer history that provably ends with the first of them, which the
    receipt of an answer or an absorbed stream names.

    Args:
        reachable: by key.
        keys: of the boundaries of just these messages. Recognised messages are read only if one of their receipts may
            name a boundary, or if no later boundary fits.
    """
    matches = ((count, reachable[keys[count]], keys) for count in range(len(said), 0, -1) if keys[count] in reachable)
    streams: dict[bytes, list[bytes]] = {}
    for key, boundary in reachable.items():
        if boundary.stream:
            streams.setdefault(boundary.ledger[-16:], []).append(key)
    known = keys.known
    first = known.count if known is not None and not any(
        known.may_name(key) or (boundary.stream and any(
            boundary.ledger[-16:] == stream and key != behind for stream, behind in known.streams))
        for key, boundary in reachable.items()) else 0
    named = [(at, key) for at, message in enumerate(said[first:], first)
             for key in (streams.get(message.digest, ()) if message.stream else (message.state_key,))]
    trimmed = [(at, key) for at, key in named if key != keys[at + 1] and key in reachable]
    if not trimmed:
        yield from matches
        return
    all_matches: list[tuple[int, Boundary, Sequence[bytes]]] = [*matches]
    for at, key in trimmed[-MOST_ANSWERS:]:
        if reachable[key].proves(keys[0], said[:at + 1]):
            longer = [*keys[:at + 1], *chain(key, said[at + 1:])]
            all_matches += [(count, reachable[longer[count]], longer) for count in range(at + 1, len(said) + 1)
                            if longer[count] in reachable]
    yield from sorted(all_matches, key=lambda match: -match[0])


OTHER_OPTIONS = "the options of the chat template that the process was given are others"
OTHER_TOOLS = "the tools, or how the template is used, are others"
OTHER_SYSTEM = "the system prompt is another"
OTHER_MESSAGES = "older messages are others"
NO_PLACE = "no snapshot is kept where these messages end"


def what_differs(reachable: Iterable[Boundary], start: bytes, said: Sequence[Message]) -> str:
    """Why the messages go on from none of these boundaries: the first difference from the nearest one."""
    system = heading(split(said)[0])
    same = [boundary for boundary in reachable if boundary.start == start]
    if not same:
        return OTHER_TOOLS
    if not any(boundary.system == system for boundary in same):
        return OTHER_SYSTEM
    return NO_PLACE if any(boundary.holds(said[-1]) for boundary in same) else OTHER_MESSAGES


def full_name(thread: str) -> str:
    """The name of a thread as its notes have it: "" where the session's name tells it, or it is too long for them."""
    told = session_name(thread) == f"{PREFIX}{thread}" or len(thread) > LONGEST_NAME
    return "" if told or any("\ud800" <= character <= "\udfff" for character in thread) else thread


def thread_name(session: str, note: bytes) -> str | None:
    """The name of the thread whose session it is; None where nothing tells it. A note is believed only in what its
    session's name confirms."""
    name = session.removeprefix(PREFIX)
    if not name.startswith("sha256:"):
        return name
    boundary = from_note(note)
    return boundary.name if boundary is not None and boundary.name and session_name(boundary.name) == session else None


def session_name(thread: str) -> str:
    """The name of a thread's session: the thread's own if a session can have it, else a digest; never another's."""
    name = f"{PREFIX}{thread}"
    if not thread.startswith("sha256:"):
        try:
            check_name(name)
            return name
        except LocretError:
            pass
    return f"{PREFIX}sha256:{hashlib.sha256(thread.encode('utf-8', 'surrogatepass')).hexdigest()}"
