"""JSON by prompt: the system text holds the schema, and the reply is parsed as what the schema describes."""

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
    text = _ASKED + json.dumps(schema, ensure_ascii=False)
    if messages and isinstance(messages[0], SystemMessage):
        return [SystemMessage(f"{messages[0].text}\n\n{text}"), *messages[1:]]
    return [SystemMessage(text), *messages]


def parsed(reply: AIMessage, schema: dict[str, Any], kind: Any) -> Any:
    """The JSON object of a reply, alone or in a fenced block; for a pydantic class an instance of it.

    Raises:
        OutputParserException: the reply is no whole JSON object, lacks a required field, or does not fit the class.
    """
    text, why = reply.text, ""
    try:
        value = parse_json_markdown(text, parser=json.loads)  # the default parser would complete a reply that was cut
    except (ValueError, RecursionError) as error:
        value, why = None, f"it is no JSON: {error}"
    if not why and not isinstance(value, dict):
        why = f"it is a {type(value).__name__}"
    if not why and (missing := [name for name in schema.get("required", ()) if name not in value]):
        why = f"it lacks {missing[0]!r}"
    if not why and isinstance(kind, type) and is_basemodel_subclass(kind):
        validate = getattr(kind, "model_validate" if hasattr(kind, "model_validate") else "parse_obj")  # pydantic 1
        try:
            value = validate(value)
        except ValueError as error:
            why = f"it is no {kind.__name__}: {error}"
    if why:
        cut = reply.response_metadata.get("finish_reason") == "length"
        raise OutputParserException(
            f"the reply is not the JSON object that was asked for: {why}. Expected one that fits the schema"
            + (", and the reply was cut off: a larger max_tokens" if cut else ""), llm_output=text)
    return value


def structured(model: BaseChatModel, kind: Any, *, include_raw: bool) -> Runnable[LanguageModelInput, Any]:
    """A chat model that replies with what a schema describes: a pydantic class, a TypedDict or a JSON schema."""
    schema = convert_to_json_schema(kind)
    prompt: RunnableLambda[LanguageModelInput, list[BaseMessage]] = RunnableLambda(
        lambda given: with_json(model._convert_input(given).to_messages(), schema))
    asked = prompt | model
    read: RunnableLambda[AIMessage, Any] = RunnableLambda(lambda reply: parsed(reply, schema, kind))
    if not include_raw:
        return asked | read
    succeeded = RunnablePassthrough.assign(parsed=itemgetter("raw") | read, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asked) | succeeded.with_fallbacks([failed], exception_key="parsing_error")
