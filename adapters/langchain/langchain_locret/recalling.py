"""What is read again for a question of a thread: passages of what it has read, in turns that only the answer sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_locret.messages import Message
from langchain_locret.render import ChatTemplate
from locret_stream import ConfigError, Recalled, StreamingContext


class Recollection:
    """Passages, and the ids that are read for them behind the question.

    Attributes:
        receipt: of the passages, for `response_metadata`.
    """

    def __init__(self, passages: Sequence[Recalled] = (), ids: Sequence[int] = ()):
        self.ids = list(ids)
        self.receipt: list[dict[str, Any]] = [
            {"start": one.start, "end": one.end, "text": one.text} for one in passages]


async def recollect(context: StreamingContext, template: ChatTemplate, acknowledge: str, message: Message
                    ) -> Recollection:
    """What the words of a user's message find. The message itself is asked again behind it, as what stands last is
    answered best.

    Raises:
        ConfigError: the runtime keeps nothing for recall, or the template has no place for further turns.
        SnapshotCorrupt, StoreError: the log of the thread cannot be read.
    """
    passages = await context.recall(message.content)
    if not passages:
        return Recollection()
    reply = Message("assistant", acknowledge)
    talk = [Message("user", message.content), reply, Message("user", "\n".join(one.text for one in passages)), reply,
            Message("user", message.content)]
    rendered = template.render(talk)
    behind = template.after(talk, 1, (), rendered)
    if behind is None or not rendered.body or rendered.left_out:
        raise ConfigError("the chat template has no place behind a question for what is recalled; expected one that "
                          "shows further turns, or recall=False")
    return Recollection(passages, template.encode(rendered.pieces(behind, rendered.body), start=False))
