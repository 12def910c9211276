"""Which options of a chat template change what a memory holds, and which change the generation prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from locret_stream.errors import ConfigError
from locret_stream.text.template import Template
from locret_stream.text.traits import TOOL

_CALL = {"type": "function", "id": "probe1234", "function": {"name": "probe", "arguments": {"probe": "x"}}}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "Be kind."}
_ASKED: dict[str, Any] = {"role": "user", "content": "Hi."}
_CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THOUGHT = {"reasoning_content": "A user."}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "probe1234", "name": "probe", "content": "1"}
_TALKS: tuple[list[dict[str, Any]], ...] = (
    [_SYSTEM, _ASKED, {"role": "assistant", "content": "Yes?", **_THOUGHT}, _ASKED],
    [_ASKED, {"role": "assistant", "content": "Yes?", **_THOUGHT}, _ASKED],
    [_SYSTEM, _ASKED, {**_CALLED, **_THOUGHT}, _RESULT, _ASKED],
    [_ASKED, _CALLED, _RESULT], [_ASKED, _CALLED, _RESULT, {"role": "assistant", "content": "Yes."}, _ASKED])
_SOME_TIME = datetime(2026, 1, 2, 3, 4, 5)


def what_is_held(template: Template) -> list[str | None]:
    """What a template writes of a few conversations ahead of its generation prompt, with tools and without; None for
    one that it refuses."""
    return [_written(template, talk, tools) for talk in _TALKS for tools in ((), (TOOL,))]


def _written(template: Template, talk: list[dict[str, Any]], tools: tuple[dict[str, Any], ...]) -> str | None:
    try:
        return template.write(talk, tools, prompt=False, now=_SOME_TIME)
    except ConfigError:
        return None


def held_options(tokenizer: Any, given: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options without which the template would write other conversations; {} if all of them change the
    generation prompt alone. Two of which each would do are both among them.

    Args:
        tokenizer, given: as of `Template`.

    Raises:
        ConfigError: an option that the template does not have.
    """
    if not options:
        return {}

    def held(some: Mapping[str, Any]) -> list[str | None]:
        return what_is_held(Template(tokenizer, given, some))

    whole = held(options)
    if whole == held({}):
        return {}
    needed = {name: value for name, value in options.items()
              if held({other: each for other, each in options.items() if other != name}) != whole}
    return needed if held(needed) == whole else dict(options)
