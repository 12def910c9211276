"""Demanded calls and JSON beside tools, over HTTP: what comes out fits, streamed or not, in either API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.held_tools import FEW, SCHEMAS, SHORT, closed, expect_call, flat, tool
from tests.langchain.support import Script
from tests.serving.support import MODEL, Served, serving

ALL = list(SCHEMAS)
ANSWER = closed(word=SHORT, count=FEW)
FACES = ("chat", "chat, streamed", "responses", "responses, streamed")


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose tiny model says what its random weights make of it."""
    with serving(tmp_path_factory.mktemp("free")) as served:
        yield served


def asked(served: Served, face: str, names: list[str], choice: Any, **body: Any) -> tuple[str, list[Any], str]:
    """The text, the calls as (name, arguments), and how the answer ended."""
    body = {"model": MODEL, "temperature": 1.0, "seed": 0, "stream": "streamed" in face, **body}
    if face.startswith("chat"):
        named = choice if choice in ("required", "auto") else {"type": "function", "function": {"name": choice}}
        body |= {"messages": [{"role": "user", "content": "Go on."}], "tools": [*map(tool, names)],
                 "tool_choice": named}
        answer = served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if "streamed" in face:
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [each["choices"][0] for each in chunks if each["choices"]]
            text = "".join(each["delta"].get("content") or "" for each in choices)
            calls = [call for each in choices for call in each["delta"].get("tool_calls") or ()]
            ended = choices[-1]["finish_reason"]
        else:
            [one] = answer.json()["choices"]
            text, calls, ended = one["message"]["content"] or "", one["message"].get("tool_calls") or (), one[
                "finish_reason"]
        return text, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls], ended
    named = choice if choice in ("required", "auto") else {"type": "function", "name": choice}
    if "response_format" in body:
        body["text"] = {"format": {"type": "json_schema", **body.pop("response_format")["json_schema"]}}
    body |= {"input": "Go on.", "tools": [*map(flat, names)], "tool_choice": named}
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json() if "streamed" not in face else [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]["response"]
    text = "".join(part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"])
    return text, [(item["name"], json.loads(item["arguments"])) for item in whole["output"]
                  if item["type"] == "function_call"], whole["status"]


@pytest.mark.parametrize("choice", ["required", "nested"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.thorough(but=2)
def test_a_demanded_call_fits(free: Served, face: str, choice: str):
    for seed in range(5):
        text, calls, ended = asked(free, face, ALL, choice, seed=seed)
        [(name, arguments)] = calls
        expect_call(name, arguments, ALL if choice == "required" else [choice])
        assert not text and ended == ("tool_calls" if face.startswith("chat") else "completed")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.thorough(but=2)
def test_beside_a_schema_the_answer_is_a_call_or_fits(free: Served, face: str):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    kinds = set()
    for seed in range(40):
        text, calls, ended = asked(free, face, ALL, "auto", seed=seed, response_format=form)
        kinds.add(bool(calls))
        if calls:
            [(name, arguments)] = calls
            expect_call(name, arguments, ALL)
            assert not text
        else:
            jsonschema.validate(json.loads(text), ANSWER)
        assert ended == ("completed" if face.startswith("responses") else "tool_calls" if calls else "stop")
        if len(kinds) == 2:
            break
    assert kinds == {False, True}
    text, calls, _ = asked(free, face, ALL, "required", seed=1, response_format=form)
    assert len(calls) == 1 and not text, "a call is demanded, and there is no answer yet"


@pytest.mark.parametrize("face", FACES)
def test_a_call_that_is_cut_off_is_text_and_says_so(free: Served, face: str):
    limit = {"max_tokens": 3} if face.startswith("chat") else {"max_output_tokens": 3}
    text, calls, ended = asked(free, face, ["nested"], "nested", **limit)
    assert not calls and text.startswith('<tool_call>\n{"name": "nested", "arguments":')
    assert ended == ("length" if face.startswith("chat") else "incomplete")


@pytest.mark.parametrize(("bad", "why"), [
    (closed(a={"not": {}}), "not"), (closed(a={"type": "string", "pattern": "^(?!a)b$"}), "look-around"),
    (closed(a={"type": "string", "format": "colour"}), "colour")])
def test_a_tool_that_cannot_be_held_is_named(free: Served, bad: dict[str, Any], why: str):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool("nested"), tool("bad", bad)]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}}
    for more, otherwise in (({"tool_choice": "required"}, "tool_choice='auto'"), (form, "no schema of the answer")):
        answer = free.http.post("/v1/chat/completions", json=body | more)
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "the tool 'bad'" in said and why in said and said.endswith(otherwise)
    assert free.http.post("/v1/chat/completions", json=body | {"max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("pattern", ["^-{2,}-{70000}$", "^(.{0,100}){0,100}$", "^(?!a)b$", r"(a)\1", "[", r"\bword\b"])
def test_a_pattern_that_cannot_be_held_is_the_callers_mistake(free: Served, pattern: str):
    """Also where that shows only when the answer has begun."""
    schema = closed(a={"type": "string", "pattern": pattern})
    answer = free.http.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "x"}], "temperature": 1.0, "seed": 0, "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
    said = answer.json()
    assert answer.status_code == 400 and "; expected" in said["error"]["message"], said
    assert said["error"]["message"].startswith("schema cannot be ")


def test_without_the_library_one_command_is_named(served: Served, script: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool("optional")]}
    answer = served.http.post("/v1/chat/completions", json=body | {"tool_choice": "required"})
    assert answer.status_code == 400 and "pip install 'locret-stream[constrained]'" in answer.text
    assert not script.sampled
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200


def test_calls_that_begin_as_json_does_stand_beside_no_schema(tmp_path: Path):
    """As Llama 3.1 writes them: nothing would tell a call from the answer."""
    from tests.langchain.templates import LLAMA
    with serving(tmp_path, template=LLAMA.replace("<|eot_id|>", "<|im_end|>")) as served:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool("numbers")], "temperature": 1.0,
                "seed": 0}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
        refused = served.http.post("/v1/chat/completions", json=body | {"response_format": form})
        assert refused.status_code == 400 and "cannot be told from JSON" in refused.text
        called = served.http.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).json()
        [call] = called["choices"][0]["message"]["tool_calls"]
        expect_call("numbers", json.loads(call["function"]["arguments"]), ["numbers"])
