"""Answers over HTTP in the forms of other families: thoughts, calls, how an answer ended, what the next turn finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from locret_stream.serving.service import Service
from tests.held_tools import tool
from tests.langchain.support import PROMPT, Script, tokenizer
from tests.serving.support import MODEL, Served, serving

LOOK = tool("look", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the shed"}}\n</tool_call>'
SHOWS = str(tokenizer().chat_template) + "{# <think> </think> #}"
OPENS = SHOWS.replace("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def streamed(client: OpenAI, **body: Any) -> dict[str, Any]:
    """The parts of a streamed answer, added up."""
    out: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in client.chat.completions.create(model=MODEL, stream=True, **body):
        for choice in chunk.choices:
            out["text"] += choice.delta.content or ""
            out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            out["calls"] += [(call.index, call.function.arguments) for call in choice.delta.tool_calls or ()]
            out["finish"] = choice.finish_reason or out["finish"]
    return out


def tokens(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False))


def test_the_prompt_opens_with_a_thought(script: Script, tmp_path: Path):
    assert OPENS != SHOWS
    script._begin = lambda recent: "Because.\n</think>\n\nAnswer."  # type: ignore[method-assign]
    with serving(tmp_path, template=OPENS) as served, served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user("one")])
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Because.", "Answer.")
        thought = answer.usage.completion_tokens_details.reasoning_tokens
        assert 0 < thought < answer.usage.completion_tokens
        whole = streamed(client, messages=[user("one")])
        assert (whole["reasoning"], whole["text"], whole["finish"]) == ("Because.", "Answer.", "stop")


def test_an_answer_that_fits_a_schema_is_not_held_inside_a_thought(script: Script, tmp_path: Path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}
    script._begin = lambda recent: '{"n": 3}'  # type: ignore[method-assign]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with serving(tmp_path, template=OPENS) as served, served.openai() as client:
        message = client.chat.completions.create(model=MODEL, messages=[user("one")], response_format=form,
                                                 extra_headers={"X-Session-Id": "a"}).choices[0].message
        assert message.content == '{"n": 3}' and not hasattr(message, "reasoning_content")
        assert served.held("a").endswith('<think>\n\n</think>\n\n{"n": 3}<|im_end|>\n')


@pytest.mark.parametrize("over", ["a call", "two calls", "inside the second", "all"])
def test_a_limit_is_told_though_calls_came_before_it(script: Script, tmp_path: Path, over: str):
    """An agent would run the first call, and never learn of the second."""
    two = f"{CALL}\n{CALL.replace('shed', 'pond')}"
    script.say = lambda _: two
    most, calls, finish = {
        "a call": (tokens(CALL), 1, "length"), "inside the second": (tokens(CALL) + 8, 1, "length"),
        "two calls": (tokens(two), 2, "length"), "all": (tokens(two) + 1, 2, "tool_calls")}[over]
    with serving(tmp_path) as served, served.openai() as client:
        body: dict[str, Any] = {"messages": [user("?")], "tools": [LOOK], "max_tokens": most}
        answer = client.chat.completions.create(model=MODEL, **body).choices[0]
        assert (answer.finish_reason, len(answer.message.tool_calls)) == (finish, calls)
        whole = streamed(client, **body)
        assert (whole["finish"], len(whole["calls"])) == (finish, calls)
        flat = {"type": "function", **LOOK["function"]}
        response = client.responses.create(model=MODEL, input="?", tools=[flat], max_output_tokens=most)
        assert response.status == ("incomplete" if finish == "length" else "completed")
        assert sum(item.type == "function_call" for item in response.output) == calls


def test_a_stop_string_is_looked_for_in_the_answer_and_nowhere_else(script: Script, tmp_path: Path):
    script.say = lambda _: "<think>\nOne END.\n\nTwo.\n</think>\n\nAnswer one.\n\nAnswer END two."
    with serving(tmp_path, template=SHOWS) as served, served.openai() as client:
        for stop, text in ((["END"], "Answer one.\n\nAnswer "), (["\n\n"], "Answer one."), (["zz"], None)):
            name = {"X-Session-Id": f"s{stop[0].strip()}"}
            answer = client.chat.completions.create(model=MODEL, messages=[user("?")], stop=stop, extra_headers=name)
            message = answer.choices[0].message
            assert message.reasoning_content == "One END.\n\nTwo." and answer.choices[0].finish_reason == "stop"
            assert message.content == text or (text is None and message.content.endswith("two."))
            assert streamed(client, messages=[user("?")], stop=stop)["text"] == message.content
            said = [user("?"), {"role": "assistant", "content": message.content}, user("And?")]
            more = client.chat.completions.create(model=MODEL, messages=said, extra_headers=name, max_tokens=2)
            assert more.locret["source"] in ("live", "snapshot") and more.locret["fed"] < 20
            held = script.seen
            assert held.count("Answer one") == 1 and held.endswith("And?<|im_end|>\n")
            assert ("END two" in held) == (text is None) and "One END.\n\nTwo.\n</think>\n\nAnswer one." in held


def test_a_stop_string_inside_a_call_leaves_it_whole(script: Script, tmp_path: Path):
    script.say = lambda _: CALL
    with serving(tmp_path) as served, served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user("?")], tools=[LOOK], stop=["shed", "\n"])
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"at": "the shed"}
        assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.thorough
def test_a_character_that_is_cut_off_is_held_back_and_the_next_turn_goes_on(script: Script, tmp_path: Path):
    text = "I like 👩‍👩‍👧‍👦 and 日本語."
    script.say = lambda _: text
    with serving(tmp_path) as served, served.openai() as client:
        shorter = set()
        for most in range(1, tokens(text) + 1):
            name = {"X-Session-Id": f"cut{most}"}
            answer = client.chat.completions.create(model=MODEL, messages=[user("?")], max_tokens=most,
                                                    extra_headers=name)
            content = answer.choices[0].message.content
            assert text.startswith(content) and "\ufffd" not in content, content
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == most
            assert streamed(client, messages=[user("?")], max_tokens=most)["text"] == content
            if tokens(content) != most:
                shorter.add(most)
                said = [user("?"), {"role": "assistant", "content": content}, user("And?")]
                more = client.chat.completions.create(model=MODEL, messages=said, extra_headers=name, max_tokens=1)
                assert more.locret["source"] == "live" and more.locret["fed"] < 20
        assert shorter


def test_an_answer_that_ended_inside_its_thought_says_so(script: Script, tmp_path: Path):
    script.say = lambda _: "<think>\nIt may be the shed, or not.\n</think>\n\nThe shed."
    with serving(tmp_path, template=SHOWS) as served, served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user("?")], max_tokens=9)
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content == ""
        assert answer.choices[0].message.reasoning_content.startswith("It")
        assert "cut off by max_tokens" in answer.locret["empty"]
        assert answer.usage.completion_tokens_details.reasoning_tokens == 9
        script.say = lambda _: "<think>\nIt may be the shed."
        open_ended = client.chat.completions.create(model=MODEL, messages=[user("?")])
        assert "not closed" in open_ended.locret["empty"] and open_ended.choices[0].finish_reason == "stop"
        script.say = lambda _: "Fine."
        assert not hasattr(client.chat.completions.create(model=MODEL, messages=[user("?")]), "empty")


def test_thoughts_are_items_of_a_response_ahead_of_its_message(script: Script, tmp_path: Path):
    script.say = lambda _: f"<think>\nIt is cold.\n</think>\n\nI look.\n{CALL}"
    flat = {"type": "function", **LOOK["function"]}
    with serving(tmp_path, template=SHOWS) as served, served.openai() as client:
        response = client.responses.create(model=MODEL, input="?", tools=[flat])
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        thought = response.output[0]
        assert thought.summary == [] and [(part.type, part.text) for part in thought.content] == [
            ("reasoning_text", "It is cold.")]
        assert response.output_text == "I look."
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        events = [*client.responses.create(model=MODEL, input="?", tools=[flat], stream=True)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        kinds = [event.type for event in events]
        for kind in ("response.reasoning_text.delta", "response.reasoning_text.done", "response.output_text.delta"):
            assert kind in kinds
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert deltas == "It is cold."
        added = [(event.output_index, event.item.type) for event in events
                 if event.type == "response.output_item.added"]
        done = [(event.output_index, event.item.type) for event in events if event.type == "response.output_item.done"]
        assert added == done == [(0, "reasoning"), (1, "message"), (2, "function_call")]
        last = events[-1].response
        assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
        more = client.responses.create(model=MODEL, previous_response_id=response.id, input=[{
            "type": "function_call_output", "call_id": response.output[2].call_id, "output": "cold"}], tools=[flat],
            max_output_tokens=2)
        assert more.locret["fed"] < 40


def test_a_response_template_that_is_given_tells_calls_apart(script: Script, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch):
    form = {"start_anchor": PROMPT, "fields": {"content": {}, "tool_calls": {
        "open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "json", "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}}}
    init = Service.__init__
    monkeypatch.setattr(Service, "__init__", lambda self, *args, **more: init(
        self, *args, response_template=form, **more))
    script.say = lambda _: 'So.<call look>{"at": "x"}</call>'
    with serving(tmp_path) as served, served.openai() as client:
        message = client.chat.completions.create(model=MODEL, messages=[user("?")], tools=[LOOK]).choices[0].message
        assert message.content == "So." and message.tool_calls[0].function.name == "look"
        assert isinstance(served, Served)
