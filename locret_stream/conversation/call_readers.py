"""What stands between the marks of a call, in the forms in which models write calls. Knows no marks of the whole, no
templates and no streams.

A reader gives the calls that it is sure of, and what follows them. Whatever is unclear, to the last character, is no
call: then it gives None, or Python's own errors of reading.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.content_parsers import parse_content

from locret_stream.constraints import type_of, types_of

Tools = Mapping[str, Mapping[str, Any]]  # schemas of the arguments, by the names of the tools
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError)
_NAMES, _ARGUMENTS, _IDS = ("name", "tool_name"), ("arguments", "parameters", "args"), ("id", "tool_call_id")
_NAME = r"[\w.-]+"
_BETWEEN = re.compile(r"[\s,;]*")
_FENCED = re.compile(r"\A\s*```\w*\n?(.*?)\n?```\s*\Z", re.DOTALL)


class Called(NamedTuple):
    """A call as it was written; `id` is "" without one."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


Found = tuple[list[Called], str] | None  # calls, and the text behind them
Reader = Callable[[str, Tools, bool], Found]  # of a text, the tools, and whether the closing mark came


def tools_by_name(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """The schemas of OpenAI's function schemas."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def as_call(value: Any) -> Called | None:
    """A call written as JSON: a name with an object of arguments, as it is or as text, perhaps inside `function`."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    if isinstance(inner, str) and isinstance(value, dict):
        inner = {**value, "name": inner}  # {"type": "function", "function": "name", "parameters": {...}}
    if not isinstance(inner, dict):
        return None
    name, arguments = _first(inner, _NAMES), _first(inner, _ARGUMENTS)
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not _whole([name, arguments]):
        return None
    written_id = _first(inner, _IDS) or _first(value, _IDS)
    return Called(name, arguments, written_id if isinstance(written_id, str) else "")


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value that was written without quotation marks, by its schema: a text stays one wherever it may be one."""
    types = types_of(schema, root)
    if not types or "string" in types:
        return text
    plain = text.strip()
    try:
        value = {"True": True, "False": False, "None": None}[plain] if plain in ("True", "False", "None") else _loads(
            plain)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    kind = type_of(value)
    return value if _whole(value) and (kind in types or (kind == "integer" and "number" in types)) else text


def fitted(called: Called, tools: Tools) -> Called:
    """The same with texts read as what the tool takes where it takes no text."""
    root = tools.get(called.name, {})
    properties = root.get("properties")
    if not isinstance(properties, Mapping):
        return called
    return called._replace(arguments={
        key: typed(value, properties[key], root) if isinstance(value, str) and key in properties else value
        for key, value in called.arguments.items()})


# What marks off the parts of a call; where these are special tokens a reader must see them.
INNER = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁call▁begin｜>",
         "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[CALL_ID]", "[ARGS]", '<|"|>', "｜DSML｜", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>")


# -- forms -------------------------------------------------------------------------------------------------------------


def inside(text: str, tools: Tools, closed: bool) -> Found:
    """Calls between two marks, in the form that stands there."""
    fenced = _FENCED.match(text)
    text = fenced[1] if fenced else text
    for tell, reader in _INSIDES:
        if tell.match(text):
            return reader(text, tools, closed)
    return None


def as_json(text: str, tools: Tools, closed: bool = True) -> Found:
    """Objects and lists of them, one after the other: nearly everybody; one that is whole needs no closing mark."""
    out, at = list[Called](), 0
    while text[at:].lstrip()[:1] in ("{", "["):
        at = len(text) - len(text[at:].lstrip())
        value, at = _JSON.raw_decode(text, at)
        each = [as_call(item) for item in (value if isinstance(value, list) else [value])]
        if not each or None in each:
            return None
        out += [call for call in each if call is not None]
        between = _BETWEEN.match(text, at)
        following = between.end() if between else at
        at = following if text[following:following + 1] in ("{", "[") else at
    return out, text[at:]


def as_python(text: str, tools: Tools, closed: bool = True) -> Found:
    """`[f(a="b"), g()]`, or lines of such calls, with literals alone: LFM2, MiniCPM, Llama 3.2 and 4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        tree = ast.parse(text.strip())
    nodes = list[ast.expr]()
    for line in tree.body:
        if not isinstance(line, ast.Expr):
            return None
        nodes += line.value.elts if isinstance(line.value, (ast.List, ast.Tuple)) else [line.value]
    out = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            return None
        if not isinstance(node.func, (ast.Name, ast.Attribute)):
            return None
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        if len(arguments) < len(node.keywords) or not _whole(arguments):
            return None
        out.append(Called(ast.unparse(node.func), arguments))
    return (out, "") if out else None


def as_function_tags(text: str, tools: Tools, closed: bool = True) -> Found:
    """`<function=f><parameter=p>` ... (Qwen3-Coder, Qwen3.5, Seed-OSS), or JSON inside `<function=f>` (Llama 3.1)."""
    return _tags(text, tools, re.compile(rf"\s*<function=({_NAME})>(.*?)</function>", re.DOTALL),
                 re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL))


def as_invocations(text: str, tools: Tools, closed: bool = True) -> Found:
    """`<invoke name="f"><parameter name="p">` ...: MiniMax, and DeepSeek V3.2 with a mark of its own in the tags."""
    mark = "(?:｜DSML｜)?"
    return _tags(text, tools, re.compile(rf'\s*<{mark}invoke name="({_NAME})">(.*?)</{mark}invoke>', re.DOTALL),
                 re.compile(rf'\s*<{mark}parameter name="([^"<>]+)"[^<>]*>(.*?)</{mark}parameter>', re.DOTALL))


def as_keys_and_values(text: str, tools: Tools, closed: bool) -> Found:
    """`f<arg_key>k</arg_key><arg_value>v</arg_value>`: GLM. Only a closing mark tells that no more follow."""
    head = re.match(rf"\s*({_NAME})\s*", text)
    if not closed or head is None:
        return None
    pairs, at = _pairs(text, head.end(), re.compile(
        r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL))
    if not pairs and head[1] not in tools:
        return None
    return _with_texts(head[1], pairs, tools), text[at:]


def as_section(text: str, tools: Tools, closed: bool = True) -> Found:
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` ...: Kimi K2, whose ids
    these are."""
    return _marked(text, re.compile(
        rf"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>{_NAME}):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*"), re.compile(r"\s*<\|tool_call_end\|>"))


def as_separated(text: str, tools: Tools, closed: bool = True) -> Found:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and JSON between fences: DeepSeek V3 and R1; without these and
    without the word: V3.1."""
    return _marked(text, re.compile(
        rf"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>{_NAME})\s*```json\s*|(?P<name2>{_NAME})<｜tool▁sep｜>\s*)"),
        re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>"))


def as_named(text: str, tools: Tools, closed: bool = True) -> Found:
    """What follows `[TOOL_CALLS]`: a list of JSON, or `f[CALL_ID]id[ARGS]{...}` once or more: Mistral."""
    if text.lstrip()[:1] in ("[", "{") and not text.lstrip().startswith("[TOOL_CALLS]"):
        return as_json(text, tools)
    return _marked(text, re.compile(
        rf"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>{_NAME})(?:\[CALL_ID\](?P<id>[\w-]+))?(?:\[ARGS\]\s*|(?=\{{))"), None)


def as_header(text: str, tools: Tools, closed: bool = True) -> Found:
    """Arguments behind a header that names the tool: gpt-oss (` to=functions.f`), functionary (`<|recipient|>f`)."""
    name = re.search(rf"(?:to=(?:functions\.)?|<\|recipient\|>\s*)({_NAME})", text)
    begins = re.search(r"<\|(?:message|content)\|>\s*", text)
    if name is None or begins is None:
        return None
    arguments, end = _JSON.raw_decode(text, begins.end())
    return ([Called(name[1], arguments)], text[end:]) if isinstance(arguments, dict) and _whole(arguments) else None


def as_colon(text: str, tools: Tools, closed: bool = True) -> Found:
    """`call:f{k:<|"|>v<|"|>,n:1}`: Gemma 4."""
    whole = re.fullmatch(rf"\s*call:({_NAME})(\{{.*\}})\s*", text, re.DOTALL)
    if whole is None:
        return None
    arguments = parse_content(whole[2], "json", {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True})
    return ([Called(whole[1], arguments)], "") if isinstance(arguments, dict) and _whole(arguments) else None


def alone(text: str, tools: Tools, closed: bool = True) -> Found:
    """The whole of a reply, in a fence or not, as JSON (Llama 3.x, Hammer, Cogito) or as Python (Llama 4): a call only
    of tools that there are."""
    fenced = _FENCED.match(text)
    text = fenced[1] if fenced else text
    found = as_python(text, tools) if re.match(rf"\s*\[\s*{_NAME}\(", text) else as_json(text, tools)
    return found if found and not found[1].strip() and all(call.name in tools for call in found[0]) else None


def behind_tag(text: str, tools: Tools, closed: bool = True) -> Found:
    """What follows `<|python_tag|>`: JSON, or `tool.call(query="...")`: Llama 3.x."""
    if text.lstrip()[:1] == "{":
        return as_json(text, tools)
    found = as_python(text, tools)
    return found and ([call._replace(name=call.name.removesuffix(".call")) for call in found[0]], "")


_INSIDES: tuple[tuple[re.Pattern[str], Reader], ...] = (
    (re.compile(r"\s*(?:\{|\[\s*\{)"), as_json), (re.compile(r"\s*<function="), as_function_tags),
    (re.compile(r"\s*<(?:｜DSML｜)?invoke "), as_invocations), (re.compile(r"\s*<\|tool_call_begin\|>"), as_section),
    (re.compile(r"\s*<｜tool▁call▁begin｜>"), as_separated), (re.compile(rf"\s*call:{_NAME}\{{"), as_colon),
    (re.compile(rf"\s*\[?\s*{_NAME}\("), as_python),
    (re.compile(rf"\s*{_NAME}\s*(?:\Z|<arg_key>)"), as_keys_and_values))


# -- parts of them -----------------------------------------------------------------------------------------------------


def _tags(text: str, tools: Tools, function: re.Pattern[str], parameter: re.Pattern[str]) -> Found:
    out, at = list[Called](), 0
    while (match := function.match(text, at)) is not None:
        at, body = match.end(), match[2]
        if body.lstrip()[:1] == "{":
            arguments = _loads(body.strip())
            if not isinstance(arguments, dict) or not _whole(arguments):
                return None
            out.append(Called(match[1], arguments))
            continue
        pairs, end = _pairs(body, 0, parameter)
        if body[end:].strip():
            return None
        out += _with_texts(match[1], pairs, tools)
    return (out, text[at:]) if out else None


def _pairs(text: str, at: int, pair: re.Pattern[str]) -> tuple[list[tuple[str, str]], int]:
    """Names with their texts, and where they end."""
    out = []
    while (match := pair.match(text, at)) is not None:
        out.append((match[1].strip(), match[2].removeprefix("\n").removesuffix("\n")))
        at = match.end()
    return out, at


def _with_texts(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> list[Called]:
    """Raises ValueError: two of one name."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return [fitted(Called(name, dict(pairs)), tools)]


def _marked(text: str, head: re.Pattern[str], tail: re.Pattern[str] | None) -> Found:
    """JSON behind a head that names the tool, once or more."""
    out, at = list[Called](), 0
    while (match := head.match(text, at)) is not None:
        groups = match.groupdict()
        arguments, at = _JSON.raw_decode(text, match.end())
        if tail is not None:
            end = tail.match(text, at)
            if end is None:
                return None
            at = end.end()
        if not isinstance(arguments, dict) or not _whole(arguments):
            return None
        out.append(Called(groups["name"] or groups["name2"], arguments, groups.get("id") or ""))
    return (out, text[at:]) if out else None


def _literal(node: ast.expr) -> Any:
    """A literal of Python or JSON. Raises ValueError: it is none."""
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError(f"{ast.dump(node):.60} is no literal")


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Strings may hold line ends as they are: models write them so.
_JSON = json.JSONDecoder(strict=False, parse_constant=_no_number)


def _loads(text: str) -> Any:
    return _JSON.decode(text)


def _whole(value: Any) -> bool:
    """Whether a value can be written as JSON in UTF-8: JSON can spell half of a surrogate pair."""
    try:
        return bool(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (UnicodeEncodeError, ValueError):
        return False
