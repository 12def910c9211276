"""What reads the replies of a runtime: made for what the template writes ahead of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from locret_stream.conversation.parts import Part
from locret_stream.conversation.render import Rendered
from locret_stream.conversation.replies import Reply, marks_among, response_template
from locret_stream.conversation.reply_forms import TEXT
from locret_stream.conversation.threads import Threads
from locret_stream.conversation.tool_prompt import call_text
from locret_stream.runtime import Runtime
from locret_stream.text import FrameState, TextCodec

WHOLE = r"\A[\s\S]*"  # anchors a reply that begins behind all that there is


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
        template = {"start_anchor_pattern": WHOLE, "fields": {"content": template["fields"]["content"]}}
    return Reply(template, shown + begun, tools, stops, begun), _unshown(template, threads.template.codec)


def reader_in(runtime: Runtime, *, raw: bool = False) -> tuple[Reply, list[int]]:
    """The same for a reply in a context of the runtime; `raw`: one without turns, whose replies are all text."""
    frames, codec = runtime.frames, runtime.codec
    if raw or frames.raw:
        return Reply({"start_anchor_pattern": WHOLE, "fields": {"content": TEXT}}, "", ()), [*codec.special_ids]
    prompt = codec.decode(frames.close_user_and_prompt(FrameState(turn="user"))[0], skip_special=False)
    template = response_template(runtime.tokenizer, None, prompt, frames.template)
    return Reply(template, prompt, ()), _unshown(template, codec)


def with_calls(part: Part) -> str:
    """The text of a part where nobody is there to answer a call."""
    return part.text + "".join(call.arguments if call.name is None else call_text(call.name, call.arguments)
                               for call in part.calls)


def _unshown(template: dict[str, Any], codec: TextCodec) -> list[int]:
    """The special tokens that no parts of a reply are told apart by."""
    special = {token: codec.decode([token], skip_special=False) for token in codec.special_ids}
    marks = marks_among(template, special.values())
    return [token for token, text in special.items() if text not in marks]
