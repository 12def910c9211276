"""Which boundaries of a thread stay, so that no chain of messages pushes out what another one needs.

A *lineage* is one chain of messages with its branches: an agent, or a call on the side (a guardrail, a title) that
inherits the thread. Each lineage has the newest boundaries of its own, and the ends of the streams that it absorbed:
nothing else holds these. What a thread keeps is bounded: `SHARE` times what one lineage may have, and its streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from langchain_locret.boundaries import Boundary

LINEAGES, RECENT = 16, 8  # without a stream that stay; of these, those used last stay whatever they are
SHARE = 4
Stored = Mapping[bytes, tuple[int, Boundary]]  # key: number of the snapshot, and what it holds


def kept(stored: Stored, most: int) -> dict[bytes, bool]:
    """The keys of the boundaries that stay; True: also where the store grows too large.

    Args:
        most: boundaries of one lineage, and streams of one. Of the lineages without a stream the 8 used last stay, and
            8 more: those that were asked once go first, then those not used for long. All together have at most four
            times as many boundaries, and the one with most gives its oldest.
    """
    lineages = _lineages(stored)
    streams = {key for line in lineages for key in [key for key in line if stored[key][1].stream][-most:]}
    plain = [line for line in lineages if not streams & set(line)]
    plain.sort(key=lambda line: stored[line[-1]][0])
    older = sorted(plain[:-RECENT], key=lambda line: (_gone_on(stored, line), stored[line[-1]][0]))
    gone = older[:max(len(plain) - LINEAGES, 0)]
    lines = [line[-most:] for line in lineages if line not in gone]
    while sum(map(len, lines)) > max(SHARE * most, len(lines)):
        max(lines, key=len).pop(0)
    newest = {line[-1] for line in lines}
    return {key: key in newest or key in streams for key in {*streams, *(key for line in lines for key in line)}}


def tip_of(stored: Stored, live: Boundary | None) -> Boundary | None:
    """Where the thread was told something last: the end of an answer or of a stream, as a question without an answer
    may still be taken back by another process. What was asked once, on the side, is passed over. While nothing was gone
    on with, that is what was asked with another system text than the thread began with."""
    def ends(line: list[bytes]) -> list[bytes]:
        return [key for key in line if stored[key][1].stream or stored[key][1].role == "assistant"]

    lineages = [line for line in _lineages(stored) if ends(line)]
    main = [line for line in lineages if _gone_on(stored, line)] or [
        line for line in lineages if stored[line[-1]][1].system == stored[lineages[0][-1]][1].system]
    of_side = {stored[line[-1]][1].lineage for line in lineages if line not in main}
    if live is not None and live.lineage not in of_side:
        return live
    return max((stored[ends(line)[-1]] for line in main), key=lambda one: one[0], default=(0, None))[1]


def _lineages(stored: Stored) -> list[list[bytes]]:
    """Keys of each lineage, oldest first."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for key in sorted(stored, key=lambda key: stored[key][0]):
        found[stored[key][1].lineage].append(key)
    return list(found.values())


def _gone_on(stored: Stored, line: list[bytes]) -> bool:
    """Whether it is more than a question and its answer."""
    return len(line) > 2 or any(stored[key][1].stream for key in line)
