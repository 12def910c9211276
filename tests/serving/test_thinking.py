"""Thinking is switched on and off with a request, in the words of several APIs, as far as the template has a switch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from locret_stream.errors import ConfigError
from tests.langchain.support import Script, runtime, tokenizer
from tests.serving.support import Served, serving

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
PROMPT = ("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not "
          "enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")
SWITCH = TURNS + PROMPT  # as Qwen 3: a part of the generation prompt
EFFORT = ("{% set effort = reasoning_effort or 'medium' %}{{ '<|im_start|>system\nReasoning: ' + effort }}"
          "{{ '<|im_end|>\n' }}" + TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# as gpt-oss: in the system text
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {}}}}


@pytest.fixture
def script(script: Script) -> Script:
    """It says the same, whatever the prompt has of the reply."""
    script._begin = lambda recent: "Because."  # type: ignore[method-assign]
    return script


@pytest.fixture
def switched(script: Script, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, template=SWITCH) as served:
        yield served


def asked(served: Served, text: str = "Why?", session: str | None = "s", history: list[Any] | None = None,
          **fields: Any) -> dict[str, Any]:
    messages = [*(history or []), {"role": "user", "content": text}]
    body = {"messages": messages, **({"session_id": session} if session else {}), **fields}
    found = served.http.post("/v1/chat/completions", json=body)
    return {"status": found.status_code, **found.json()}


OFF = [{"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, {"reasoning_effort": "none"},
       {"think": False}, {"thinking": {"type": "disabled"}}, {"thinking": False}]


@pytest.mark.parametrize("fields", OFF, ids=lambda fields: next(iter(fields)))
def test_thinking_is_switched_off_in_any_api_s_words(switched: Served, fields: dict[str, Any]):
    found = asked(switched, **fields)
    assert found["status"] == 200 and "ignored" not in found["locret"]
    assert "<think>\n\n</think>" in switched.held("s")
    assert found["choices"][0]["message"].get("reasoning_content") is None


def test_it_is_on_again_in_the_next_request_and_nothing_is_read_again(switched: Served):
    first = asked(switched, enable_thinking=False)
    history = [{"role": "user", "content": "Why?"}, first["choices"][0]["message"]]
    second = asked(switched, "And then?", history=history)
    assert second["locret"]["source"] == "live" and second["locret"]["fed"] < 30
    assert switched.held("s").count("<think>") == 1
    third = asked(switched, "So?", history=[*history, {"role": "user", "content": "And then?"},
                                            second["choices"][0]["message"]], think=False)
    assert third["locret"]["source"] == "live" and switched.held("s").count("<think>") == 2


def test_a_response_takes_it_too(switched: Served):
    found = switched.http.post("/v1/responses", json={"input": "Why?", "reasoning": {"effort": "none"},
                                                      "session_id": "r"}).json()
    assert "ignored" not in found["locret"]
    assert "<think>\n\n</think>" in switched.held("r")


def test_what_the_template_has_no_option_for_is_named(served: Served):
    found = asked(served, reasoning_effort="high", chat_template_kwargs={"no_such": 1})
    assert found["status"] == 200 and found["locret"]["ignored"] == ["no_such", "reasoning_effort"]
    assert "ignored" not in asked(served, "Again?", session="other")["locret"]


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": "x"}, {"think": 3}, {"reasoning": "high"}],
                         ids=lambda fields: next(iter(fields)))
def test_what_is_no_such_field_is_refused_by_name(switched: Served, fields: dict[str, Any]):
    found = asked(switched, **fields)
    assert found["status"] == 400 and found["error"]["param"] == next(iter(fields))


def test_an_option_that_changes_what_is_held_is_refused_by_name_unless_the_session_began_with_it(
        script: Script, tmp_path: Path):
    with serving(tmp_path, template=EFFORT) as served:
        first = asked(served, reasoning_effort="high")
        assert first["status"] == 200 and served.held("s").startswith("<|im_start|>system\nReasoning: high")
        history = [{"role": "user", "content": "Why?"}, first["choices"][0]["message"]]
        second = asked(served, "And then?", history=history, reasoning_effort="high")
        assert second["locret"]["source"] == "live"
        held = served.held("s")
        other = asked(served, "And then?", history=history, reasoning_effort="low")
        assert other["status"] == 400 and "change what the memory" in other["error"]["message"]
        left_out = asked(served, "And then?", history=history, tools=[LOOK])
        assert left_out["status"] == 400 and "it began with some, and found none" in left_out["error"]["message"]
        assert served.held("s") == held
        assert asked(served, session="t", reasoning_effort="medium")["status"] == 200  # as it is without
        usual = asked(served, "More?", session="t", history=[
            {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}])
        assert usual["locret"]["source"] == "live"
    with serving(tmp_path, template=EFFORT) as served:  # after a restart
        again = asked(served, "And then?", history=history, reasoning_effort="high")
        assert again["locret"]["source"] == "snapshot"


def test_other_tools_are_told_late_beside_the_options_with_which_a_session_began(script: Script, tmp_path: Path):
    with serving(tmp_path, template=EFFORT) as served:
        first = asked(served, reasoning_effort="high", tools=[LOOK])
        history = [{"role": "user", "content": "Why?"}, first["choices"][0]["message"]]
        found = asked(served, "And then?", history=history, reasoning_effort="high")
        assert found["status"] == 200 and found["locret"]["late"] == "the tools"
        other = asked(served, "And then?", history=history, reasoning_effort="low")
        assert other["status"] == 400 and "how hard to think" in other["error"]["message"]


def test_a_conversation_that_was_only_created_begins_with_the_options_of_its_first_request(
        script: Script, tmp_path: Path):
    with serving(tmp_path, template=EFFORT) as served:
        made = served.http.post("/v1/conversations", json={}).json()["id"]
        for effort, status in (("high", 200), ("high", 200), (None, 400), ("low", 400)):
            found = served.http.post("/v1/responses", json={"conversation": made, "input": "Why?"} | (
                {"reasoning": {"effort": effort}} if effort else {}))
            assert found.status_code == status, found.text
        assert served.held(made).count("Reasoning: high") == 1


def test_a_question_beside_tells_thoughts_apart(served: Served, script: Script):
    asked(served)
    script._begin = lambda recent: "<think>\nIt is 5.\n</think>\n\nFive."  # type: ignore[method-assign]
    found = served.http.post("/v1/sessions/s/ask", json={"question": "Is it?"}).json()
    assert (found["answer"], found["reasoning_content"]) == ("Five.", "It is 5.")


def test_a_question_beside_takes_it_too(switched: Served, script: Script, tmp_path: Path):
    asked(switched)
    held, seen = switched.held("s"), list[str]()
    script._begin = lambda recent: seen.append(  # type: ignore[method-assign, func-returns-value]
        tokenizer().decode(recent, skip_special_tokens=False)) or "Because."
    for fields in ({}, *OFF):
        found = switched.http.post("/v1/sessions/s/ask", json={"question": "Is it?", **fields}).json()
        assert found["answer"] == "Because." and not found["locret"]
    assert ["<think>\n\n</think>" in each.rpartition("Is it?")[2] for each in seen] == [False] + [True] * len(OFF)
    assert switched.held("s") == held
    with serving(tmp_path / "effort", template=EFFORT) as served:
        asked(served, reasoning_effort="high")
        for effort, status in (("high", 200), ("low", 400), (None, 200)):
            found = served.http.post("/v1/sessions/s/ask", json={"question": "Is it?", "reasoning_effort": effort})
            assert found.status_code == status, found.text


def test_no_option_can_hold_a_control_token_or_a_name_of_the_template_s_own(switched: Served):
    for kwargs in ({"enable_thinking": "<|im_end|>"}, {"messages": []}):
        found = asked(switched, session=None, chat_template_kwargs=kwargs)
        assert found["status"] == (400 if "enable_thinking" in kwargs else 200)


def test_what_is_told_goes_on_with_the_options_with_which_a_session_began(script: Script, tmp_path: Path):
    with serving(tmp_path, template=EFFORT) as served:
        asked(served, reasoning_effort="high")
        assert served.http.post("/v1/sessions/s/ingest", content=b"The code is 5.\n").status_code == 200
        made = served.http.post("/v1/conversations", json={}).json()["id"]
        effort = {"reasoning": {"effort": "high"}}
        served.http.post("/v1/responses", json={"conversation": made, "input": "Why?", **effort})
        told = served.http.post(f"/v1/conversations/{made}/items", json={"items": [
            {"type": "message", "role": "user", "content": "The bolt is 6."}]})
        assert told.status_code == 200, told.text
        for session in ("s", made):
            held = served.held(session)
            found = served.http.post("/v1/responses", json={"conversation": session, "input": "What is it?", **effort})
            assert found.status_code == 200 and "late" not in found.json()["locret"], found.text
            assert served.held(session).startswith(held) and served.held(session).count("Reasoning:") == 1


def test_a_switch_is_free_beside_an_effort_that_is_not(script: Script, tmp_path: Path):
    both = EFFORT.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", PROMPT)
    with serving(tmp_path, template=both) as served:
        history: list[Any] = []
        for thinks in (True, False, True):
            found = asked(served, history=history, chat_template_kwargs={
                "reasoning_effort": "high", "enable_thinking": thinks})
            assert found["status"] == 200 and found["locret"]["source"] == ("live" if history else "new")
            history += [{"role": "user", "content": "Why?"}, found["choices"][0]["message"]]
        other = asked(served, history=history, chat_template_kwargs={"reasoning_effort": "low"})
        assert other["status"] == 400


async def test_a_wrong_name_of_an_option_is_refused_where_a_runtime_is_made():
    for template, name, expected in ((SWITCH, "enable_thinkin", "expected enable_thinking"),
                                     (TURNS + "{{ eos_token }}", "enable_thinking", "it has no options"),
                                     ("raw", "enable_thinking", "there is no chat template")):
        with pytest.raises(ConfigError, match=expected):
            async with runtime(template=template, template_options={name: False}) as found:
                found.frames  # noqa: B018


def test_a_server_may_have_options_of_its_own(script: Script, tmp_path: Path):
    with serving(tmp_path, template=SWITCH, template_options={"enable_thinking": False}) as served:
        asked(served)
        assert "<think>\n\n</think>" in served.held("s")
        assert served.http.post("/v1/sessions/log/ingest", content=b"The code is 5.\n").status_code == 200
        assert served.http.post("/v1/sessions/log/ask", json={"question": "What is it?"}).status_code == 200
