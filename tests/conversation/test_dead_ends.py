"""Whatever a session was told can be asked, over the server and LangChain, with every kind of chat template; and no
more than what is new is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from tests.conversation.templates import TEMPLATES
from tests.langchain.support import Script, model, runtime, thread
from tests.serving.support import Served, serving

TOOL = {"type": "function", "function": {
    "name": "look", "description": "Look a thing up.", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}
SPARE = 64  # tokens that a template may write around what is new


@pytest.fixture(params=TEMPLATES)
def served(request: pytest.FixtureRequest, script: Script, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, template=TEMPLATES[request.param]) as served:
        served.kind = request.param  # type: ignore[attr-defined]
        yield served


def chat(served: Served, messages: list[dict[str, Any]], session: str = "s", **more: Any) -> dict[str, Any]:
    found = served.http.post("/v1/chat/completions", json={"messages": messages, "session_id": session, **more})
    assert found.status_code == 200, found.text
    return found.json()


def said(found: dict[str, Any]) -> dict[str, Any]:
    return found["choices"][0]["message"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def expect_gone_on(found: dict[str, Any]) -> None:
    assert found["locret"]["source"] == "live" and found["locret"]["fed"] <= SPARE, found["locret"]


@pytest.mark.thorough(but=2)
def test_a_chat(served: Served):
    history = [user("Hi there.")]
    for turn in range(3):
        found = chat(served, history)
        assert said(found)["content"] == "Noted." or said(found).get("reasoning_content") == "Noted."
        if turn:
            expect_gone_on(found)
        history += [said(found), user(f"And {turn}?")]


@pytest.mark.thorough(but=2)
def test_responses_by_their_ids(served: Served):
    first = served.http.post("/v1/responses", json={"input": "One.", "instructions": "Be brief."})
    second = served.http.post("/v1/responses", json={"input": "Two.", "previous_response_id": first.json().get("id")})
    assert first.status_code == second.status_code == 200, second.text
    expect_gone_on(second.json())


@pytest.mark.thorough(but=2)
def test_a_stream_that_was_taken_in_is_asked(served: Served):
    assert served.http.post("/v1/sessions/log/ingest", content=b"The code of falcon is 48213.\n").status_code == 200
    asked = served.http.post("/v1/sessions/log/ask", json={"question": "What is it?"})
    assert asked.status_code == 200, asked.text
    for question in ("What is the code?", "And now?"):
        found = served.http.post("/v1/responses", json={"conversation": "log", "input": question})
        assert found.status_code == 200, found.text
        expect_gone_on(found.json())
    assert served.http.post("/v1/sessions/log/ingest", content=b"And more.\n").status_code == 200
    assert "48213" in served.held("log") and "And more." in served.held("log")


TOLD = [[("user", "The code is 5.")], [("user", "The code is 5."), ("user", "The bolt is 6.")],
        [("system", "Be kind.")], [("system", "Be kind."), ("user", "The code is 5.")],
        [("user", "One."), ("assistant", "Yes."), ("user", "5.")]]


@pytest.mark.parametrize("items", TOLD, ids=lambda items: " ".join(role for role, _ in items))
@pytest.mark.thorough(but=3)
def test_messages_that_were_told_are_asked_about(served: Served, items: list[tuple[str, str]]):
    made = served.http.post("/v1/conversations", json={"items": [
        {"type": "message", "role": role, "content": text} for role, text in items]})
    assert made.status_code == 200, made.text
    for _ in range(2):
        found = served.http.post("/v1/responses", json={"conversation": made.json()["id"], "input": "What is it?"})
        assert found.status_code == 200, found.text
        expect_gone_on(found.json())
    held = served.held(made.json()["id"])
    assert all(held.count(text) == 1 for _, text in items), held


CALLS = [{"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{at}"}}'}}
         for n, at in enumerate(("the shed", "the barn"))]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.thorough(but=3)
def test_a_tool_loop_that_another_model_began_goes_on(served: Served, count: int):
    history = [user("Where is it?"), {"role": "assistant", "content": None, "tool_calls": CALLS[:count]},
               *({"role": "tool", "tool_call_id": f"call_{n}", "content": f"result {n}"} for n in range(count))]
    found = chat(served, history, tools=[TOOL])
    held = served.held("s")
    assert "the shed" in held and "result 0" in held and ("result 1" in held) == (count == 2)
    history += [said(found), user("Thanks.")]
    expect_gone_on(chat(served, history, tools=[TOOL]))


def test_results_that_come_one_after_the_other_are_read_once(script: Script, tmp_path: Path):
    with serving(tmp_path, template=TEMPLATES["in turn"]) as served:
        history = [user("Where is it?"), {"role": "assistant", "content": None, "tool_calls": CALLS},
                   *({"role": "tool", "tool_call_id": f"call_{n}", "content": f"result {n}"} for n in range(2))]
        chat(served, history[:3], tools=[TOOL])
        found = chat(served, history, tools=[TOOL])["locret"]
        assert found["source"] == "snapshot" and found["fed"] <= SPARE, found  # it branches off ahead of the answer
        assert served.held("s").count("result 0") == served.held("s").count("result 1") == 1


def test_what_is_told_behind_an_empty_answer_is_all_that_is_new(script: Script, tmp_path: Path):
    with serving(tmp_path, template=TEMPLATES["unclosed"]) as served:
        made = served.http.post("/v1/conversations", json={}).json()["id"]
        script.replies = [""]  # type: ignore[attr-defined]
        assert served.http.post("/v1/responses", json={"conversation": made, "input": "Hi."}).status_code == 200
        told = served.http.post(f"/v1/conversations/{made}/items", json={"items": [
            {"type": "message", "role": "user", "content": "The bolt is 6."}]}).json()
        assert [item["role"] for item in told["data"]] == ["user"], told


@pytest.mark.parametrize("name", ["in turn", "no calls", "calls"])
def test_a_result_behind_one_that_was_told_by_itself(name: str, script: Script, tmp_path: Path):
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Where are they?"}]
    for each in CALLS:
        items.append({"type": "function_call", "call_id": each["id"], **each["function"]})
    results = [{"type": "function_call_output", "call_id": each["id"], "output": f"result {at}"}
               for at, each in enumerate(CALLS)]
    with serving(tmp_path, template=TEMPLATES[name]) as served:
        made = served.http.post("/v1/conversations", json={"items": [*items, results[0]]})
        assert made.status_code == 200, made.text
        found = served.http.post("/v1/responses", json={"conversation": made.json()["id"], "input": [results[1]]})
        assert found.status_code == 200, found.text
        held = served.held(made.json()["id"])
        assert held.count("result 0") == held.count("result 1") == 1 and found.json()["locret"]["fed"] <= SPARE


@pytest.mark.parametrize("name", ["in turn", "system in turn", "system first"])
def test_a_system_text_that_was_told_alone_is_gone_on_from(name: str, script: Script, tmp_path: Path):
    with serving(tmp_path, template=TEMPLATES[name]) as served:
        made = served.http.post("/v1/conversations", json={"items": [
            {"type": "message", "role": "system", "content": "Be kind."}]}).json()
        found = served.http.post("/v1/responses", json={"conversation": made["id"], "input": "Hi."})
        assert found.status_code == 200, found.text
        assert "Be kind." in served.held(made["id"])


@pytest.mark.thorough(but=2)
def test_a_user_who_speaks_ahead_of_an_answer_is_heard(served: Served):
    """After a first try that failed; after a result; after a call that had none."""
    for session, history in {
            "twice": [user("Hi."), user("Are you there?")],
            "result": [user("Where?"), {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
                       {"role": "tool", "tool_call_id": "call_0", "content": "a rake"}, user("Never mind.")],
            "no result": [user("Where?"), {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
                          user("Never mind.")]}.items():
        found = chat(served, history, session, tools=[TOOL])
        held = served.held(session)
        assert history[-1]["content"] in held and history[0]["content"] in held
        expect_gone_on(chat(served, [*history, said(found), user("So?")], session, tools=[TOOL]))


@pytest.mark.thorough(but=2)
def test_system_texts_wherever_they_stand_are_read(served: Served):
    system = [{"role": "system", "content": f"Rule {n}."} for n in range(3)]
    for session, history in {"two": [*system[:2], user("Hi.")], "late": [user("Hi."), system[0], user("And?")],
                             "developer": [{"role": "developer", "content": "Rule 0."}, user("Hi.")],
                             "answer first": [system[0], {"role": "assistant", "content": "Welcome."}, user("Hi.")],
                             "behind": [system[0], user("Hi."), {"role": "assistant", "content": "Yes."},
                                        system[1], user("And?")]}.items():
        found = chat(served, history, session)
        held = served.held(session)
        assert all(message["content"] in held for message in history), (session, held)
        expect_gone_on(chat(served, [*history, said(found), user("So?")], session))


@pytest.mark.thorough(but=2)
def test_an_answer_without_text_is_gone_on_from(served: Served, script: Script):
    """As one whose thought was cut off."""
    script.replies += ["", "Yes."]  # type: ignore[attr-defined]
    empty = chat(served, [user("Hi.")])
    assert not said(empty)["content"]
    expect_gone_on(chat(served, [user("Hi."), {"role": "assistant", "content": ""}, user("Go on.")]))


@pytest.mark.parametrize("name", ["plain", "no prompt", "in turn", "end instead", "reminder", "first call"])
@pytest.mark.thorough(but=2)
def test_langchain_asks_what_it_took_in(name: str, script: Script, tmp_path: Path):
    with model(None, on=runtime(tmp_path, template=TEMPLATES[name], acknowledge=None)) as told:
        stand_in = told.ingest(["The code of falcon is 48213.\n"], thread_id="log")
        answer = told.invoke([stand_in, HumanMessage("What is it?")], thread("log"))
        assert answer.content == "Noted." and answer.response_metadata["locret"]["fed"] <= SPARE
        more = told.invoke([stand_in, HumanMessage("What is it?"), answer, HumanMessage("Sure?")], thread("log"))
        assert more.response_metadata["locret"]["source"] == "live"
        streamed = [*told.stream([HumanMessage("Hi.")], thread("other"))]
        assert "".join(chunk.text for chunk in streamed) == "Noted."
        twice = told.invoke([HumanMessage("Hi."), HumanMessage("Are you there?")], thread("twice"))
        assert isinstance(twice, AIMessage) and twice.content == "Noted."
