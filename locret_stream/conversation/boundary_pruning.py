"""Which boundaries of a thread stay, so that no chain of messages displaces what another one needs.

A *lineage* is one chain of messages with its branches: an agent, or a call on the side (a guardrail, a title) that
inherits the thread. Each lineage keeps the boundaries that were used last, so that many questions about one state do
not displace that state; and the ends of the streams that it absorbed, as no message contains these. A thread keeps
`SHARE` times what one lineage may keep at most, and its streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from locret_stream.conversation.boundaries import Boundary

LINEAGES, RECENT = 16, 8  # lineages without a stream that stay; the number of these that stay as they were used last
SHARE = 4
DIGEST = 16  # bytes of a message's digest in a boundary's ledger
Stored = Mapping[bytes, tuple[int, Boundary]]  # generation and boundary, by the boundary's key


def kept(stored: Stored, most: int, used: Mapping[bytes, int]) -> dict[bytes, bool]:
    """The keys of the boundaries that stay; True for those that stay even if the store grows too large.

    Where a thread with answers under a mark goes on stays, however long it was not used: nothing else leads there.
    Of the lineages without a stream the 8 used last stay, and 8 more: those with a single question go first, then those
    that were not used for the longest time. If all lineages together have more than four times `most` boundaries, the
    one with the most loses its oldest.

    Args:
        most: boundaries that one lineage keeps, and streams.
        used: by key, a number that is larger the later this process made the boundary or went on from it; those that
            are not in it count as used before, in the order in which they were made.
    """
    def last_use(key: bytes) -> tuple[int, int]:
        return used.get(key, 0), stored[key][0]

    lineages = [sorted(line, key=last_use) for line in _lineages(stored)]
    streams = {key for line in lineages for key in [key for key in line if stored[key][1].stream][-most:]}
    appended = sorted((key for key in stored if stored[key][1].appended), key=lambda key: stored[key][0])
    pinned = streams.union(appended[-1:])
    plain = [line for line in lineages if not pinned & set(line)]
    plain.sort(key=lambda line: last_use(line[-1]))
    older = sorted(plain[:-RECENT], key=lambda line: (_gone_on(stored, line), last_use(line[-1])))
    dropped = older[:max(len(plain) - LINEAGES, 0)]
    lines = [line[-most:] for line in lineages if line not in dropped]
    while sum(map(len, lines)) > max(SHARE * most, len(lines)):
        max(lines, key=len).pop(0)
    newest = {line[-1] for line in lines}
    stay = pinned.union(*lines)
    return {key: key in newest or key in pinned for key in stored if key in stay}


def tip_of(stored: Stored, live: Boundary | None) -> Boundary | None:
    """The boundary where the thread was told something last; None if there is none.

    It is the end of an answer or of a stream, as another process may still undo a question without an answer. Lineages
    with a single question are calls on the side, and passed over. If all lineages are such, the calls on the side are
    those with another system text than the first one. In a thread with answers that were appended under a mark, only
    these and streams count: answers that branch off under a mark of their own do not move it.

    Args:
        live: where the thread's open context rests.
    """
    marked = [row for row in stored.values() if row[1].appended]
    if marked:
        return max([*marked, *(row for row in stored.values() if row[1].stream)], key=lambda row: row[0])[1]

    def ends(line: list[bytes]) -> list[bytes]:
        return [key for key in line if stored[key][1].stream or stored[key][1].role == "assistant"]

    lineages = [line for line in _lineages(stored) if ends(line)]
    main = [line for line in lineages if _gone_on(stored, line)] or [
        line for line in lineages if stored[line[-1]][1].system == stored[lineages[0][-1]][1].system]
    of_side = {stored[line[-1]][1].lineage for line in lineages if line not in main}
    # One that is not stored yet has no lineage to be known by: what it holds tells a question from more.
    aside = live is not None and live.key not in stored and _is_question(live) and not all(
        _is_question(stored[key][1]) for line in lineages for key in ends(line))
    if live is not None and live.tokens and live.lineage not in of_side and not aside:  # without tokens: told nothing
        return live
    tips: list[tuple[int, Boundary | None]] = [stored[ends(line)[-1]] for line in main]
    return max(tips, key=lambda tip: tip[0], default=(0, None))[1]


def untold(stored: Stored) -> Boundary | None:
    """The boundary of a thread that was created, before it was told anything."""
    return next((boundary for _, boundary in stored.values() if not boundary.tokens), None)


def holds_again(boundary: Boundary, lost: Boundary) -> bool:
    """Whether a boundary holds the last two messages of one that is lost, or begins with the last. A question on the
    side, which may have the same words under another system text, does not count."""
    last, held = lost.ledger[-2 * DIGEST:], boundary.ledger
    return not (_is_question(boundary) and boundary.system != lost.system) and (
        held[:DIGEST] == last[-DIGEST:] or any(held[at:at + len(last)] == last for at in range(0, len(held), DIGEST)))


def _lineages(stored: Stored) -> list[list[bytes]]:
    """Keys of each lineage, oldest first."""
    lines: dict[bytes, list[bytes]] = defaultdict(list)
    for key in sorted(stored, key=lambda key: stored[key][0]):
        lines[stored[key][1].lineage].append(key)
    return list(lines.values())


def _is_question(boundary: Boundary) -> bool:
    """Whether a boundary holds no more than a question and its answer."""
    return len(boundary.ledger) <= 2 * DIGEST and not boundary.stream


def _gone_on(stored: Stored, line: list[bytes]) -> bool:
    """Whether a lineage is more than a question and its answer."""
    return len(line) > 2 or any(stored[key][1].stream for key in line)
