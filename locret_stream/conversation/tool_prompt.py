"""Tools for chat templates that show none: a system text describes them, in a form that most models know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from locret_stream.conversation.messages import Message

ToolPrompt = Literal["template", "auto"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_TOOLS = "There are no tools now."


def tool_text(tools: Sequence[dict[str, Any]]) -> str:
    """The text that describes a model's tools, and how it calls one."""
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return ("You can call functions. Their signatures, as JSON schemas, are:\n<tools>\n" + schemas + "\n</tools>\n"
            f'To call one, write its name and arguments as JSON between these marks:\n{OPEN}\n'
            f'{{"name": ..., "arguments": {{...}}}}\n{CLOSE}\nResults come back between <tool_response> and '
            "</tool_response>.")


def written_out(said: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The same messages for a template that knows no tools: the system text describes them, calls and results are text.
    """
    out = [_plain(message) for message in said]
    if tools and out and out[0].role == "system":
        out[0] = replace(out[0], content=f"{out[0].content}\n\n{tool_text(tools)}")
    elif tools:
        out.insert(0, Message("system", tool_text(tools)))
    return out


def ahead_of_the_first(said: Sequence[Message]) -> list[Message]:
    """The same without a system message: its text begins the user's first message."""
    at = next((at for at, message in enumerate(said) if message.role == "user"), None)
    if at is None:
        return list(said)
    first = replace(said[at], content=f"{said[0].content}\n\n{said[at].content}")
    return [*said[1:at], first, *said[at + 1:]]


def opening(name: str) -> str:
    """The beginning of a call of that tool, up to its arguments; "": of any tool, up to its name."""
    return f'{OPEN}\n{{"name": "' + (f'{json.dumps(name, ensure_ascii=False)[1:-1]}", "arguments": ' if name else "")


def _plain(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>", name=message.name)
    if message.calls:
        calls = "\n".join(f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"
                          for name, arguments, _ in message.calls)
        return replace(message, content="\n".join(filter(None, (message.content, calls))), calls=())
    return message
