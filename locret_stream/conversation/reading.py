"""What reads the replies of a runtime: made for what the template writes ahead of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locret_stream.conversation.render import Rendered
from locret_stream.conversation.replies import Reply, marks_among, response_template
from locret_stream.conversation.threads import Threads


def reader_of(threads: Threads, rendered: Rendered, *, begun: str = "", tools: Sequence[dict[str, Any]] = (),
              stops: Sequence[str] = (), whole: bool = False) -> tuple[Reply, list[int]]:
    """The reader of a reply to a conversation, and the special tokens that its text comes without.

    Args:
        begun: what the prompt wrote of the reply. stops: end the content. whole: all of it is content, whatever marks
            it may hold.

    Raises:
        ConfigError: the response template cannot be used.
    """
    pieces = rendered.pieces(max(rendered.ends, default=0))
    texts = max((at for at, piece in enumerate(pieces, 1) if piece.data), default=0)
    shown = "".join(piece.text for piece in pieces[texts:])  # what the template writes ahead of a reply
    template = response_template(threads.runtime.tokenizer, threads.replies, shown, threads.template.frames.template,
                                 in_words=threads.template.in_words)
    if whole:
        template = {"start_anchor_pattern": r"\A[\s\S]*", "fields": {"content": template["fields"]["content"]}}
    codec = threads.template.codec
    special = {token: codec.decode([token], skip_special=False) for token in codec.special_ids}
    marks = marks_among(template, special.values())
    return Reply(template, shown + begun, tools, stops), [
        token for token, text in special.items() if text not in marks]
