"""JSON that a prompt asks for, and how the reply is parsed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from pydantic import BaseModel

from langchain_locret import LateWarning, LocretChatModel
from langchain_locret.json_mode import parsed
from locret_stream import ConfigError
from tests.langchain.support import Script, held, receipt, thread

T = thread("t")


class Wanted(BaseModel):
    """Whose door code is wanted."""

    name: str
    floor: int = 0


class Asked(TypedDict):
    """Whose door code is wanted."""

    name: str


SCHEMA = {"title": "Wanted", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize("method", ["json_mode", "json_schema"])
@pytest.mark.parametrize(("schema", "expected"), [(Wanted, Wanted(name="falcon", floor=2)),
                                                  (Asked, {"name": "falcon", "floor": 2}),
                                                  (SCHEMA, {"name": "falcon", "floor": 2})])
@pytest.mark.parametrize("form", ['%s', 'Here it is:\n```json\n%s\n```\n'])
@pytest.mark.thorough(but=2)
def test_the_schema_is_told_and_the_reply_is_read(chat: LocretChatModel, script: Script, method: str, schema: Any,
                                                  expected: Any, form: str):
    script.say = lambda shown: form % '{"name": "falcon", "floor": 2}'
    model = chat.with_structured_output(schema, method=method)
    assert model.invoke([SystemMessage("Be brief."), HumanMessage("Whose?")]) == expected
    assert "Be brief." in script.seen and '"name": {' in script.seen and "Whose?" in script.seen
    assert script.seen.index('"name": {') < script.seen.index("Whose?")
    assert asyncio.run(model.ainvoke("Whose?")) == expected


@pytest.mark.parametrize(("reply", "why"), [
    ("I do not know.", "it is no JSON"), ('{"name": "fal', "it is no JSON"), ('{"floor": 1}', "it lacks 'name'"),
    ("[1]", "it is a list"), ('{"name": "a", "floor": "high"}', "it is no Wanted")])
def test_a_reply_that_does_not_fit_is_an_error_that_says_why(chat: LocretChatModel, script: Script, reply: str,
                                                             why: str):
    script.say = lambda shown: reply
    with pytest.raises(OutputParserException, match=why):
        chat.with_structured_output(Wanted, method="json_mode").invoke("Whose?")
    result = chat.with_structured_output(Wanted, method="json_mode", include_raw=True).invoke("Whose?")
    assert result["parsed"] is None and result["raw"].text == reply
    assert isinstance(result["parsing_error"], OutputParserException) and why in str(result["parsing_error"])


def test_a_reply_nested_too_deep_is_no_json():
    with pytest.raises(OutputParserException, match="it is no JSON"):
        parsed(AIMessage("[" * 100_000, response_metadata={}), {}, dict)


def test_a_reply_that_was_cut_off_is_never_completed(chat: LocretChatModel, script: Script):
    script.say = lambda shown: json.dumps({"name": "falcon", "floor": 12345})
    short = chat.model_copy(update={"max_tokens": 6})
    with pytest.raises(OutputParserException, match="a larger max_tokens"):
        short.with_structured_output(Wanted, method="json_mode").invoke("Whose?")


def test_in_a_thread_the_schema_is_a_late_message_and_memory_stays(chat: LocretChatModel, script: Script):
    history = [SystemMessage("Be brief."), HumanMessage("The code of falcon is 1234.")]
    history += [chat.invoke(history, T), HumanMessage("Whose?")]
    script.say = lambda shown: '{"name": "falcon"}'
    with pytest.warns(LateWarning, match="the system prompt of thread 't' changed"):
        result = chat.with_structured_output(Wanted, method="json_mode", include_raw=True).invoke(history, T)
    assert result["parsed"] == Wanted(name="falcon") and result["parsing_error"] is None
    assert isinstance(result["raw"], AIMessage) and receipt(result["raw"])["late"] == "the system prompt"
    assert held(chat, "t").count("user\nThe code of falcon is 1234.") == 1


def test_another_method_or_option_is_refused(chat: LocretChatModel):
    with pytest.raises(ConfigError, match="method is 'grammar'"):
        chat.with_structured_output(Wanted, method="grammar")
    with pytest.raises(ConfigError, match="unknown option 'schemas'"):
        chat.with_structured_output(Wanted, method="json_mode", schemas=1)
