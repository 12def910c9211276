"""Boundaries between messages: what a memory holds that rests at one, and which of them fit a list of messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from langchain_locret.messages import Said, chain, digest
from locret_stream import LocretError
from locret_stream.snapshot import check_name

PREFIX = "langchain/"  # of the sessions in which threads are stored
LEDGER = 512  # messages by which a trimmed history can be proven to be the end of what was absorbed
RECEIPTS = 8  # answers of a trimmed history whose receipts are tried


class Boundary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a memory holds that ends between two messages; written beside its snapshot.

    Args:
        key: chained digest of tools and messages. start: the one it begins with, before any message.
        system: digest of the leading system messages, b"" without. ledger: digests of the other messages, 16 bytes
            each, the last 512. tokens: accepted. role: of the last message.
        lineage: names the chain of messages that it is of, by how that began. stream: it ends an absorbed stream.
        owner: of a thread that was forked, the session of the thread whose keys it goes on with; "" for its own.
        tools: whether it may have been told of tools.
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

    def proves(self, start: bytes, said: Sequence[Said]) -> bool:
        """Whether these messages are the end of what is held, its own system messages or none ahead of them, and what
        is held began as they do: in the same thread, with the same tools.

        A summary in place of older messages says nothing that is not held, and is passed over.
        """
        system, rest = split(said)
        left = b"".join(one.digest for one in rest if not one.summary)
        whose = start == self.start and (not system or heading(system) == self.system)
        return whose and bool(left) and self.ledger.endswith(left)

    def holds(self, one: Said) -> bool:
        """Whether a message is among the last 512 that are held."""
        return any(self.ledger[at:at + 16] == one.digest for at in range(0, len(self.ledger), 16))


_NOTE = msgspec.msgpack.Decoder(Boundary)


def from_note(note: bytes) -> Boundary | None:
    """The boundary that a snapshot's note tells; notes are untrusted, and one that cannot be read is none."""
    try:
        found = _NOTE.decode(note) if note else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if found is not None and len(found.ledger) % 16 == 0 else None


def split(said: Sequence[Said]) -> tuple[Sequence[Said], Sequence[Said]]:
    """The leading system messages, and the others."""
    count = next((at for at, one in enumerate(said) if one.role != "system"), len(said))
    return said[:count], said[count:]


def heading(system: Sequence[Said]) -> bytes:
    return digest(*(one.digest for one in system))[:16] if system else b""


def fitting(known: Mapping[bytes, Boundary], start: bytes, said: Sequence[Said]
            ) -> list[tuple[int, Boundary, list[bytes]]]:
    """Known boundaries of which these messages go on: (messages held, boundary, keys of all boundaries), deepest first.

    Either of just these messages, or, by the receipt of an answer among them, or by an absorbed stream, of a longer
    history whose end they provably are.

    Args:
        start: key of the boundary before any message.
    """
    keys = chain(start, said)
    found = [(count, known[keys[count]], keys) for count in range(1, len(said) + 1) if keys[count] in known]
    streams: dict[bytes, list[bytes]] = {}
    for key, boundary in known.items():
        if boundary.stream:
            streams.setdefault(boundary.ledger[-16:], []).append(key)
    named = [(at, key) for at, one in enumerate(said)
             for key in (streams.get(one.digest, ()) if one.stream else (one.receipt,))]
    trimmed = [(at, key) for at, key in named if key != keys[at + 1] and key in known]
    for at, key in trimmed[-RECEIPTS:]:
        if known[key].proves(start, said[:at + 1]):
            longer = [*keys[:at + 1], *chain(key, said[at + 1:])]
            found += [(count, known[longer[count]], longer) for count in range(at + 1, len(said) + 1)
                      if longer[count] in known]
    return sorted(found, key=lambda one: -one[0])


OTHER_TOOLS = "the tools, or how the template is used, are others"
OTHER_SYSTEM = "the system prompt is another"
OTHER_MESSAGES = "older messages are others"
NO_PLACE = "no snapshot is kept where these messages end"


def what_differs(known: Iterable[Boundary], start: bytes, said: Sequence[Said]) -> str:
    """Why none of these boundaries fits the messages: the first difference from the one that is nearest."""
    system = heading(split(said)[0])
    same = [boundary for boundary in known if boundary.start == start]
    if not same:
        return OTHER_TOOLS
    if not any(boundary.system == system for boundary in same):
        return OTHER_SYSTEM
    return NO_PLACE if any(boundary.holds(said[-1]) for boundary in same) else OTHER_MESSAGES


def session_name(thread: str) -> str:
    """The name under which a thread is stored: its own where that can be, else a digest; never another thread's."""
    name = f"{PREFIX}{thread}"
    if not thread.startswith("sha256:"):
        try:
            check_name(name)
            return name
        except LocretError:
            pass
    return f"{PREFIX}sha256:{hashlib.sha256(thread.encode('utf-8', 'surrogatepass')).hexdigest()}"
