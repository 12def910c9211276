"""How a chat template writes a tool call, read off a rendering: so that a call can be begun, and held to that form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, Literal

from locret_stream.constraints import CallForm
from locret_stream.conversation import tool_prompt as words
from locret_stream.conversation.messages import Message
from locret_stream.conversation.probes import PROBE, Piece
from locret_stream.conversation.render import ChatTemplate, Rendered
from locret_stream.conversation.reply_forms import held_form, opened
from locret_stream.errors import ConfigError

NO_CALLS = ("the chat template does not show tool calls behind its generation prompt, so that none can be begun for "
            "the model; expected tool_choice='auto', a chat template that shows them, or tool_prompt='auto', which "
            "tells of tools in a system text")
NO_JSON = "the chat template writes the arguments of a call neither as JSON nor each between marks"
_IN_WORDS = CallForm(words.opening(""), '", "arguments": ', f"}}\n{words.CLOSE}", data=True)
_CALL = ("name", {"key": "value"}, "call")
_TWO = ("name", {"key": "value", "other": "second"}, "call")


def call_form(template: ChatTemplate, tools: Sequence[dict[str, Any]], known: str = "") -> CallForm | None:
    """How a call of one of these tools is written behind the generation prompt; None: neither with its arguments as
    JSON nor with each of them between marks.

    Args:
        known: marks that the model knows (`reply_forms.known_marks`), by which a call is begun where the template shows
            none.

    Raises:
        ConfigError: the template shows no tool calls, and no form of them is known.
    """
    if template.in_words:
        return _IN_WORDS
    try:
        before, called, probes = _shown(template, tools)
    except ConfigError:
        form = held_form(known)
        if form is None:
            raise
        return replace(form, before=closed_thought(template, tools) + form.before)
    return _json_form(template, before, called, probes) or _argument_form(template, tools)


def _json_form(template: ChatTemplate, before: str, called: Rendered, probes: list[re.Match[str]]) -> CallForm | None:
    if [called.probes.texts[int(probe[2])] for probe in probes] != ["name", "key", "value"]:
        return None
    to_key, to_value = (called.whole[probe.end():after.start()] for probe, after in pairwise(probes))
    behind = called.whole[probes[2].end():called.body or None]
    between, closed = re.fullmatch(r'(.*)\{\s*"', to_key, re.DOTALL), re.match(r'"\s*\}', behind)
    if between is None or closed is None or not re.fullmatch(r'"\s*:\s*"', to_value):
        return None
    after = _up_to_end(template, behind[closed.end():])
    names: Literal["raw", "json", "ascii"] = (
        "raw" if probes[0][3] == '"' else "json" if probes[0][1] == "\ue000" else "ascii")
    call_id = template.short_id(_CALL[2])
    return CallForm(before, between[1], after, names, call_id if call_id in between[1] + after else "")


def _argument_form(template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> CallForm | None:
    """The form of arguments that each stand between marks, read off a call with two of them."""
    try:
        before, called, probes = _shown(template, tools, _TWO)
    except ConfigError:
        return None
    if [called.probes.texts[int(probe[2])] for probe in probes] != ["name", "key", "value", "other", "second"] or any(
            probe[1] != "\ue000" or probe[3] != '"' for probe in probes):
        return None
    to_key, to_value, to_other, to_second = (
        called.whole[probe.end():after.start()] for probe, after in pairwise(probes))
    behind = _up_to_end(template, called.whole[probes[-1].end():called.body or None])
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(to_key[::-1], to_other[::-1], strict=False)))
    opening = to_key[len(to_key) - same:]
    opening = opening[opening.find("<"):] if "<" in opening else ""
    closing = to_other.removesuffix(opening)
    if not opening or not closing.strip() or not to_value or to_value != to_second or not behind.startswith(closing):
        return None
    return CallForm(before, to_key.removesuffix(opening), behind.removeprefix(closing), "raw",
                    argument=(opening, to_value, closing))


def _up_to_end(template: ChatTemplate, text: str) -> str:
    """What stands ahead of what closes a reply."""
    codec = template.codec
    ends = [template.closing, *(codec.decode([end], skip_special=False) for end in template.frames.eos_ids)]
    return text[:min((text.find(end) for end in ends if end and end in text), default=None)]


def begun_call(template: ChatTemplate, form: CallForm, name: str) -> list[Piece]:
    """The beginning of a call in that form, up to its arguments; of any tool (name ""), up to its name. A space at its
    end is left to the model: many tokens begin with one."""
    pieces = [Piece(form.before, form.data), Piece(form.written(name), True), Piece(form.between, form.data)]
    *first, last = pieces if name else pieces[:1]
    pieces = [*first, Piece(last.text.rstrip(" "), last.data)]
    return [piece for piece in pieces if piece.text]


def call_opening(template: ChatTemplate, tools: Sequence[dict[str, Any]], name: str = "", known: str = ""
                 ) -> list[Piece]:
    """The beginning of a call that nothing will hold, behind the generation prompt, as this template writes calls.

    Args:
        name: of the tool; the opening then ends at the value of its first required argument, as far as it is certain.
            "": of any tool; the opening ends at the name.
        known: as of `call_form`.

    Raises:
        ConfigError: the template shows no tool calls, and no form of them is known.
    """
    if template.in_words:
        return _opening_in_words(tools, name)
    try:
        before, called, probes = _shown(template, tools)
    except ConfigError:
        form = held_form(known)
        if form is None:
            raise
        return begun_call(template, replace(form, before=closed_thought(template, tools) + form.before), name)
    opening = [Piece(before, False)]
    if not name:
        return opening
    opening.append(Piece(name, True))
    to_key, to_value = (called.whole[probe.end():after.start()] for probe, after in pairwise(probes[:3]))
    if not to_key.endswith('{"') or not to_value.endswith('"'):
        return opening  # arguments are not written as JSON
    key, kind = _first_argument(tool_parameters(tools, name))
    if key is None:
        no_arguments = not tool_parameters(tools, name).get("properties")
        return [*opening, Piece(to_key[:-2] + ("{}" if no_arguments else ""), False)]
    return [*opening, Piece(to_key, False), Piece(json.dumps(key, ensure_ascii=False)[1:-1], True),
            Piece(to_value if kind == "string" else to_value[:-1], False)]


def tool_parameters(tools: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return next(tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name) or {}


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that the arguments of a tool are held to: an object, and of arguments that are listed no others,
    unless the tool says so: a function has no others.

    Raises:
        ConfigError: the tool takes no object.
    """
    schema = dict(tool["function"].get("parameters") or {"properties": {}})
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ConfigError(f"the arguments of the tool {tool['function']['name']!r} are of type {kind!r}; expected an "
                          "object")
    if "properties" in schema and schema.keys().isdisjoint(_OPEN):
        schema["additionalProperties"] = False
    return {**schema, "type": "object"}


def first_argument(schema: Mapping[str, Any], form: CallForm) -> list[Piece]:
    """What follows the name in a call, up to the value of its first argument; empty if another one may be first: behind
    the mark of a text a weak model finds into it, where it would take a token that is that mark and more."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not properties or not isinstance(required, (list, tuple)):
        return []
    name, inner = next(iter(properties.items()))
    if name not in required or form.argument:
        return []
    quoted = isinstance(inner, dict) and inner.get("type") == "string"
    return [Piece(form.between + '{"', form.data), Piece(json.dumps(name, ensure_ascii=False)[1:-1], True),
            Piece('": "' if quoted else '":', form.data)]


_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf",
         "dependentSchemas", "if", "not", "minProperties"}


def closed_thought(template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> str:
    """What closes a thought that the generation prompt opens; "": it opens none."""
    try:
        prompt = template.render([Message("user", "?")], tools)
    except ConfigError:
        return ""
    close = opened(prompt.whole[prompt.ends[0]:])[1]
    return f"\n{close}\n\n" if close else ""


def _shown(template: ChatTemplate, tools: Sequence[dict[str, Any]], example: Any = _CALL
           ) -> tuple[str, Rendered, list[re.Match[str]]]:
    """A call as the template writes it: what stands ahead of its name, behind the generation prompt; the rendering;
    and the probes in it, at least three. Raises ConfigError: it shows no tool calls."""
    question, call = Message("user", "?"), Message("assistant", "", calls=(example,))
    try:
        prompt = template.render([question], tools)
        called = template.render([question, call], tools)
    except ConfigError as error:
        raise ConfigError(NO_CALLS) from error
    probes = [match for match in PROBE.finditer(called.whole) if match.end() > called.ends[0]]
    begun = prompt.whole[prompt.ends[0]:]
    written = called.whole[called.ends[0]:probes[0].start()] if len(probes) >= 3 else ""
    thought, close = opened(begun)
    if not written.startswith(begun) and close and written.startswith(begun.removesuffix(thought)):
        return f"\n{close}\n\n" + written[len(begun.removesuffix(thought)):], called, probes  # it shows no thoughts
    if not written.startswith(begun) or written == begun:
        raise ConfigError(NO_CALLS)
    return written[len(begun):], called, probes


def _opening_in_words(tools: Sequence[dict[str, Any]], name: str) -> list[Piece]:
    begun = words.opening(name)
    if name:
        key, kind = _first_argument(tool_parameters(tools, name))
        if key is not None:
            begun += f"{{{json.dumps(key, ensure_ascii=False)}: " + ('"' if kind == "string" else "")
        elif not tool_parameters(tools, name).get("properties"):
            begun += "{}"
    return [Piece(begun, True)]


def _first_argument(parameters: dict[str, Any]) -> tuple[str | None, Any]:
    """Name and type of the first argument that a call must have; (None, None) if there is none."""
    required = parameters.get("required") or [None]
    schema = (parameters.get("properties") or {}).get(required[0])
    return (required[0], schema.get("type")) if isinstance(schema, dict) else (None, None)
