"""What a request says of thinking, in the words of several APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from locret_stream.serving.errors import ApiError


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


FIELDS = Thinking.__struct_fields__


def read_thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, `think` and `think_field` of a `Request`. Raises ApiError 400: a field is none of this kind."""
    fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
    try:
        given = msgspec.convert(fields, Thinking)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ApiError(400, f"{name or 'the body'}: {text}", param=name or None, code="invalid_value") from None
    switch = given.thinking if not isinstance(given.thinking, dict) else given.thinking.get("type") != "disabled"
    effort = None if given.reasoning is None else given.reasoning.get("effort")
    asked = {"enable_thinking": given.enable_thinking, "think": given.think, "thinking": switch,
             "reasoning": None if effort is None else str(effort), "reasoning_effort": given.reasoning_effort}
    field, think = next(((name, value) for name, value in asked.items() if value is not None),
                        ("reasoning_effort", None))
    return {"options": given.chat_template_kwargs or {}, "think": think, "think_field": field}
