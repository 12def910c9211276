"""What a request says of thinking, in the words of several APIs, as options of the chat template.

Which options there are, the template says. What it has none for has no effect, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from locret_stream.serving.errors import ApiError

_ON, _OFF = ("enable_thinking", "thinking", "reasoning"), ("skip_thinking",)  # names that templates have for the switch
_EFFORT, _KWARGS = "reasoning_effort", "chat_template_kwargs"
_NONE = "none"  # the effort that means no thought at all


class Thinking(msgspec.Struct, kw_only=True):
    """Fields that say whether, and how hard, a model thinks.

    chat_template_kwargs: of vLLM, SGLang and llama.cpp. reasoning_effort, reasoning: of OpenAI's two APIs.
    enable_thinking: of Qwen's. thinking: of DeepSeek's, GLM's and Anthropic's ({"type": "disabled"}). think: of Ollama.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    think: bool | str | None = None


def template_options(body: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the chat template that a body asks for, and the fields of it that have no effect.

    Args:
        known: the options that the template has.

    Raises:
        ApiError 400: a field is none of this kind.
    """
    given = _read(body)
    options = {name: value for name, value in (given.chat_template_kwargs or {}).items() if name in known}
    unused = [f"{_KWARGS}.{name}" for name in given.chat_template_kwargs or {} if name not in known]
    asked: dict[str, bool | str] = {}  # what each field asks for: to think, or not, or how hard
    if given.enable_thinking is not None:
        asked["enable_thinking"] = given.enable_thinking
    if given.think is not None:
        asked["think"] = given.think
    if isinstance(given.thinking, dict):
        asked["thinking"] = given.thinking.get("type") != "disabled"
    elif given.thinking is not None:
        asked["thinking"] = given.thinking
    if given.reasoning is not None and given.reasoning.get("effort") is not None:
        asked["reasoning"] = str(given.reasoning["effort"])
    if given.reasoning_effort is not None:
        asked[_EFFORT] = given.reasoning_effort
    for field, value in asked.items():
        effort, thinks = (value, value != _NONE) if isinstance(value, str) else ("", value)
        wanted = {name: thinks for name in _ON if name in known} | {name: not thinks for name in _OFF if name in known}
        wanted |= {_EFFORT: effort} if effort and _EFFORT in known else {}
        if wanted:
            options = {**wanted, **options}
        else:
            unused.append(field)
    return options, unused


def _read(body: Mapping[str, Any]) -> Thinking:
    fields = {name: body[name] for name in Thinking.__struct_fields__ if body.get(name) is not None}
    try:
        return msgspec.convert(fields, Thinking)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`") or "the body"
        raise ApiError(400, f"{name}: {text}", param=name, code="invalid_value") from None
