"""What is read again for a question of a thread: passages of what it has read, in a turn that only the answer sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locret_stream.context import Recalled, StreamingContext
from locret_stream.conversation.messages import Message
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError


class Recollection:
    """Passages, and the ids that are read for them before the question.

    Attributes:
        receipt: of the passages, for `response_metadata`. why_not: why nothing was looked for; "": it was, or nobody
            wanted it.
    """

    def __init__(self, passages: Sequence[Recalled] = (), ids: Sequence[int] = (), why_not: str = ""):
        self.ids, self.why_not = list(ids), why_not
        self.receipt: list[dict[str, Any]] = [
            {"start": one.start, "end": one.end, "text": one.text} for one in passages]


async def recollect(threads: Threads, context: StreamingContext, question: str) -> Recollection:
    """What the words of a user's message find. It is read in a turn of its own, which a short reply closes, right
    before that message: what stands last is answered best.

    Raises:
        ConfigError: the runtime keeps nothing for recall, or the template has no place for a turn more.
        SnapshotCorrupt, StoreError: the log of the thread cannot be read.
    """
    passages = await context.recall(question)
    if not passages:
        return Recollection()
    template = threads.template
    user, reply = Message("user", "?"), Message("assistant", threads.runtime.acknowledge or "OK.")
    talk = [user, reply, Message("user", "\n".join(one.text for one in passages)), reply, user]
    rendered = template.render(talk)
    start, end = template.after(talk, 2, (), rendered), template.after(talk, 4, (), rendered)
    if start is None or end is None or rendered.left_out:
        raise ConfigError("the chat template has no place before a question for what is recalled; expected one that "
                          "shows further turns, or recall=False")
    pieces = rendered.pieces(start, end)
    return Recollection(passages, await threads.tokenized(pieces, lambda: template.encode(pieces, start=False)))
