"""JSON by prompt: the schema goes into the system text, and the reply is read back as what the schema describes."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.json import parse_json_markdown
from langchain_core.utils.pydantic import is_basemodel_subclass

_ASKED = "Reply with one JSON object and nothing else. Its JSON schema is:\n"


def with_json(messages: list[BaseMessage], schema: dict[str, Any]) -> list[BaseMessage]:
    """The messages with the schema at the end of the system text."""
    told = _ASKED + json.dumps(schema, ensure_ascii=False)
    if messages and isinstance(messages[0], SystemMessage):
        return [SystemMessage(f"{messages[0].text}\n\n{told}"), *messages[1:]]
    return [SystemMessage(told), *messages]


def parsed(reply: AIMessage, schema: dict[str, Any], kind: Any) -> Any:
    """The JSON object of a reply, alone or in a fenced block; of a pydantic class one of it.

    Raises:
        OutputParserException: it is no whole JSON object, lacks what the schema requires, or is none of that class.
    """
    text, why = reply.text, ""
    try:
        found = parse_json_markdown(text, parser=json.loads)  # its own parser would complete what was cut off
    except (ValueError, RecursionError) as error:
        found, why = None, f"it is no JSON: {error}"
    if not why and not isinstance(found, dict):
        why = f"it is a {type(found).__name__}"
    if not why and (missing := [name for name in schema.get("required", ()) if name not in found]):
        why = f"it lacks {missing[0]!r}"
    if not why and isinstance(kind, type) and is_basemodel_subclass(kind):
        try:
            found = kind.model_validate(found) if hasattr(kind, "model_validate") else kind.parse_obj(found)
        except ValueError as error:
            why = f"it is no {kind.__name__}: {error}"
    if why:
        cut = reply.response_metadata.get("finish_reason") == "length"
        raise OutputParserException(
            f"the reply is not the JSON object that was asked for: {why}. Expected one that fits the schema"
            + (", and the reply was cut off: a larger max_tokens" if cut else ""), llm_output=text)
    return found


def structured(model: BaseChatModel, kind: Any, *, include_raw: bool) -> Runnable[LanguageModelInput, Any]:
    """A chat model that replies with what a schema describes: a pydantic class, a TypedDict or a JSON schema."""
    schema = convert_to_json_schema(kind)
    tell = RunnableLambda(lambda given: with_json(model._convert_input(given).to_messages(), schema))
    asked = tell | model
    read = RunnableLambda(lambda reply: parsed(reply, schema, kind))
    if not include_raw:
        return asked | read
    kept = RunnablePassthrough.assign(parsed=itemgetter("raw") | read, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asked) | kept.with_fallbacks([failed], exception_key="parsing_error")
