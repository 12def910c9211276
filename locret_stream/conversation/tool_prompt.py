"""Tools for chat templates that show none: a system text describes them, in a form that most models know."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def result_text(message: Message) -> str:
    """A tool's result as text of a user."""
    return f"<tool_response>\n{message.content}\n</tool_response>"


def opening(name: str) -> str:
    """The beginning of a call of that tool, up to its arguments; "": of any tool, up to its name."""
    return f'{OPEN}\n{{"name": "' + (f'{json.dumps(name, ensure_ascii=False)[1:-1]}", "arguments": ' if name else "")


def call_text(name: str, arguments: str) -> str:
    """A call in words."""
    return f'{opening(name)}{arguments}}}\n{CLOSE}'
