"""A thread that goes on with another system text, or other tools: these go in late, behind what memory holds.

Memory cannot be told another beginning, and to read all of it again would lose what the messages do not hold any more:
what was trimmed, and streams. So the new beginning is written behind the held messages, ahead of the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from langchain_locret.boundaries import RECEIPTS, Boundary, heading, split
from langchain_locret.messages import Said, digest
from langchain_locret.render import ChatTemplate, Rendered
from langchain_locret.tool_prompt import NO_TOOLS, tool_text
from locret_stream import ConfigError


class Written(NamedTuple):
    """How new messages are written: the rendering goes on at `at`; of the messages `shown` those from `first` on are
    new."""

    rendered: Rendered
    at: int
    shown: list[Said]
    first: int


def goes_on_from(known: Mapping[bytes, Boundary], said: Sequence[Said]) -> list[tuple[int, Boundary]]:
    """Boundaries behind an answer or a stream that these messages provably go on from, whatever their system text and
    tools: (messages held, boundary), deepest first.

    An answer's receipt names it; without one the messages must be all that is held, or end with a stream that it holds.
    """
    system, _ = split(said)
    first, found = len(system), []
    ends = {boundary.ledger[-16:]: boundary for boundary in known.values()}
    for count in range(len(said), first, -1):
        one = said[count - 1]
        if one.role == "assistant" or one.stream:
            boundary = known.get(one.receipt) or ends.get(one.digest)
            left = b"".join(message.digest for message in said[first:count] if not message.summary)
            if boundary is not None and boundary.ledger.endswith(left) and (
                    one.receipt == boundary.key or boundary.stream or boundary.ledger == left):
                found.append((count, boundary))
                if len(found) == RECEIPTS:
                    break
    return found


def as_base(boundary: Boundary, start: bytes, said: Sequence[Said], *, tools: bool) -> Boundary:
    """That boundary as the one that another system text and other tools go on from: the lineage of that agent."""
    top = heading(split(said)[0]) or boundary.system  # trimmed away, it still is the one that is held
    return msgspec.structs.replace(boundary, start=start, system=top, tools=tools,
                                   lineage=digest(b"late", start, top)[:16],
                                   key=digest(b"late", boundary.key, start, top))


def what_is_new(boundary: Boundary, start: bytes, said: Sequence[Said], *, tools: bool) -> str:
    """In words."""
    system = "the system prompt" if heading(split(said)[0]) not in (b"", boundary.system) else ""
    other = "the tools" if tools or boundary.tools else "how the template is used"
    return " and ".join(filter(None, (system, other if boundary.start != start else "")))


def write(template: ChatTemplate, said: Sequence[Said], count: int, tools: Sequence[dict[str, Any]], *,
          no_tools: bool) -> Written | None:
    """The messages from `count` on, the new system text and tools ahead of them; None if the template has no place.

    Where a user speaks next, as the template begins a conversation; behind results of tools in words of our own.

    Args:
        no_tools: there may have been some until now.
    """
    system, new = split(said)[0], list(said[count:])
    words = [one.content for one in system] + ([NO_TOOLS] if no_tools and not tools else [])
    top = [Said("system", "\n\n".join(words))] if words else []
    if new and new[0].role == "user":
        shown = [*top, *new]
        try:
            rendered = template.render(shown, tools)
        except ConfigError:
            pass
        else:
            if rendered.body and not (top and 0 in rendered.left_out):
                return Written(rendered, template.behind_start(rendered), shown, 0)
    behind = next((at for at in range(count, len(said)) if said[at].role != "tool"), len(said))
    text = "\n\n".join([*words, *([tool_text(tools)] if tools else [])])
    for role in ("system", "user") if text else ():
        shown = [*said[:behind], Said(role, text), *said[behind:]]
        try:
            rendered = template.render(shown, tools)
        except ConfigError:
            continue
        at = template.after(shown, count, tools, rendered)
        if at is not None and behind not in rendered.left_out:
            return Written(rendered, at, shown, count)
    return None
