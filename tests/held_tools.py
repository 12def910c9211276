"""Tools whose calls are held to their schemas, for every face that demands calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonschema


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


FEW = {"type": "integer", "minimum": 0, "maximum": 99}
SHORT = {"type": "string", "maxLength": 5}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enums": closed(colour={"enum": ["red", "grün", "<tool_call>", "</tool_call>", "<|im_end|>", None, 3]}),
    "nested": closed(order=closed(state={"enum": ["open", "paid"]}, lines={
        "type": "array", "maxItems": 3, "items": closed(count=FEW, label=SHORT)})),
    "numbers": closed(heat={"type": "number", "minimum": -5, "maximum": 5}, count=FEW, sure={"type": "boolean"},
                      nothing={"type": ["null", "boolean"]}),
    "ünïcode 🙂": closed(**{"näme": {"type": "string", "pattern": "^[α-ω]{1,4}$"}, "日": {"const": 'né\n"so"\\'}}),
    "optional": {"type": "object", "properties": {"must": SHORT, "may": FEW}, "required": ["must"]},
    "without a type": {"properties": {"may": FEW}},
    "no arguments": {},
    "references": {"type": "object", "$defs": {"place": closed(x=FEW)}, "properties": {
        "here": {"$ref": "#/$defs/place"}, "there": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}},
        "required": ["here"]},
    "either": {"type": "object", "anyOf": [closed(a=FEW), closed(b=SHORT)]},
}


def tool(name: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as chats take it."""
    parameters = SCHEMAS[name] if schema is None else schema
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": parameters}}


def flat(name: str) -> dict[str, Any]:
    """The same as responses take it."""
    return {"type": "function", **tool(name)["function"]}


def expect_call(name: str, arguments: Any, among: Sequence[str]) -> None:
    """A call of one of these tools, whose arguments fit its schema and have no names that it does not list."""
    assert name in among and isinstance(arguments, dict)
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)
    assert name in ("references", "either") or set(arguments) <= set(SCHEMAS[name].get("properties", ()))
