"""A thread goes on with another system text, or other tools: these become a late message, behind what the memory holds.

A memory cannot be given another beginning, and reading all messages again would lose what they do not contain any more:
trimmed messages, and streams. So the new beginning is written behind the messages held, ahead of the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from locret_stream.conversation.boundaries import MOST_ANSWERS, Boundary, heading, split
from locret_stream.conversation.messages import Message, digest
from locret_stream.conversation.render import ChatTemplate, Rendered
from locret_stream.conversation.tool_prompt import NO_TOOLS, tool_text
from locret_stream.errors import ConfigError


class Written(NamedTuple):
    """How new messages are written: they are the characters of `rendered` from `at` on. Of the messages `shown`, those
    from `first` on are new."""

    rendered: Rendered
    at: int
    shown: list[Message]
    first: int


def goes_on_from(reachable: Mapping[bytes, Boundary], said: Sequence[Message],
                 differs: Callable[[Boundary], bool] = lambda boundary: True) -> list[tuple[int, Boundary]]:
    """Boundaries behind an answer or a stream that these messages provably go on from, whatever their system text and
    tools: (messages held, boundary), deepest first.

    An answer's receipt names its boundary; without a receipt the messages must be all that the boundary holds, or end
    with a stream that it holds.

    Args:
        differs: of the boundaries that count.
    """
    system, _ = split(said)
    first, matches = len(system), list[tuple[int, Boundary]]()
    ends: dict[bytes, list[Boundary]] = {}
    for boundary in filter(differs, reachable.values()):
        ends.setdefault(boundary.ledger[-16:], []).insert(0, boundary)
    for count in range(len(said), first, -1):
        last = said[count - 1]
        if last.role == "assistant" or last.stream:
            named = reachable.get(last.state_key)
            if named is not None and not differs(named):
                continue
            ledger = b"".join(message.digest for message in said[first:count] if not message.summary)
            held = next((boundary for boundary in (ends.get(last.digest, ()) if named is None else (named,))
                         if boundary.ledger.endswith(ledger) and (
                             boundary is named or boundary.stream or boundary.ledger == ledger)), None)
            if held is not None:
                matches.append((count, held))
                if len(matches) == MOST_ANSWERS:
                    break
    return matches


def as_base(boundary: Boundary, start: bytes, said: Sequence[Message], *, tools: bool) -> Boundary:
    """The boundary with another system text and other tools: the first one of that agent's lineage."""
    top = heading(split(said)[0]) or boundary.system  # a system text that was trimmed is still held
    return msgspec.structs.replace(boundary, start=start, system=top, tools=tools,
                                   lineage=digest(b"late", start, top)[:16],
                                   key=digest(b"late", boundary.key, start, top))


def what_is_new(boundary: Boundary, start: bytes, said: Sequence[Message], *, tools: bool) -> str:
    """What the late message changes, in words."""
    system = "the system prompt" if heading(split(said)[0]) not in (b"", boundary.system) else ""
    other = "the tools" if tools or boundary.tools else "how the template is used"
    return " and ".join(filter(None, (system, other if boundary.start != start else "")))


def write(template: ChatTemplate, said: Sequence[Message], count: int, tools: Sequence[dict[str, Any]], *,
          no_tools: bool, system: Sequence[Message] | None = None) -> Written | None:
    """The messages from `count` on, behind the new system text and tools; None if the template has no place for these.

    If a user speaks next, the template writes them as it begins a conversation. Behind results of tools they are a
    message of text.

    Args:
        no_tools: the memory may have been told of tools, so that it must be told that there are none now.
        system: the new system text, where others stand behind it; by default all that the messages begin with.
    """
    system, new = split(said)[0] if system is None else system, list(said[count:])
    words = [message.content for message in system] + ([NO_TOOLS] if no_tools and not tools else [])
    top = [Message("system", "\n\n".join(words))] if words else []
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
        shown = [*said[:behind], Message(role, text), *said[behind:]]
        try:
            rendered = template.render(shown, tools)
        except ConfigError:
            continue
        at = template.after(shown, count, tools, rendered)
        if at is not None and behind not in rendered.left_out:
            return Written(rendered, at, shown, count)
    return None
