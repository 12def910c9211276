"""What a stranger tried and was told wrongly, or not at all."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from locret_stream.conversation import thread_memory
from locret_stream.snapshot.transcript import Passage
from tests.processes import run_python
from tests.serving.support import Served

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "stop here"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def said(content: str = "Hello.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def refusal(served: Served, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    answer = served.http.request(method, path, json=body)
    return answer.status_code, answer.json()["error"]


def sessions(served: Served) -> list[str]:
    return [row["id"] for row in served.http.get("/v1/sessions").json()["data"]]


def test_a_conversation_whose_items_are_refused_is_not_made(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Nobody would know its name, nor delete it."""
    status, error = refusal(served, "POST", "/v1/conversations", {"items": [5]})
    assert (status, error["param"]) == (400, "items[0]") and sessions(served) == []

    async def fails(*_: Any) -> Any:
        raise TimeoutError("too late")

    monkeypatch.setattr(served.service, "tell", fails)
    item = {"type": "message", "role": "user", "content": "one"}
    assert refusal(served, "POST", "/v1/conversations", {"items": [item]})[0] == 504 and sessions(served) == []


def test_a_named_session_that_is_kept_all_the_same_says_so(served: Served):
    told = served.http.post("/v1/chat/completions", json=said(session_id="mine", store=False)).json()["locret"]
    assert told["saved"] and told["ignored"] == ["store"]
    assert "ignored" not in served.http.post("/v1/chat/completions", json=said(store=False)).json()["locret"]


def test_a_stop_string_does_not_cut_what_was_to_fit_a_schema(served: Served):
    status, error = refusal(served, "POST", "/v1/chat/completions", said(response_format=SCHEMA, stop=["here"]))
    assert (status, error["param"]) == (400, "stop")


def test_headers_name_sessions_in_utf_8(served: Served):
    assert served.http.post("/v1/chat/completions", json=said(), headers={"X-Session-Id": "é名".encode()}
                            ).status_code == 200
    assert sessions(served) == ["é名"]


@pytest.mark.parametrize("name", ["x/memory", "x/ingest", "a/b/text", "x/items", "x/items/5", "..", "a/./b"])
def test_names_that_no_path_could_reach_are_refused(served: Served, name: str):
    status, error = refusal(served, "POST", "/v1/chat/completions", said(session_id=name))
    assert (status, error["code"], error["param"]) == (400, "bad_session", "session_id")


def test_conversations_whose_names_have_a_slash_are_reached(served: Served):
    served.http.post("/v1/chat/completions", json=said(session_id="team/alice"))
    (first, _) = served.http.get("/v1/conversations/team%2Falice/items?order=asc").json()["data"]
    assert first["role"] == "user"
    assert served.http.get(f"/v1/conversations/team/alice/items/{first['id']}").json() == first
    assert served.http.get("/v1/conversations/team/alice").json()["id"] == "team/alice"


def test_texts_outside_of_what_was_told_are_not_a_missing_session(served: Served):
    served.http.post("/v1/chat/completions", json=said(session_id="mine"))
    for query in ("start=99999", "start=5&end=2", "start=99999&column=10"):
        status, error = refusal(served, "GET", f"/v1/sessions/mine/text?{query}")
        assert (status, error["param"]) == (400, "start") and "tokens that were told" in error["message"]
    first = served.http.post("/v1/responses", json={"input": "x" * 300, "session_id": "mine"}).json()
    served.http.post("/v1/responses", json={"input": "one " * 50, "previous_response_id": first["id"]})
    served.http.post("/v1/responses", json={"input": "a shorter branch", "previous_response_id": first["id"]})
    end = served.http.get("/v1/sessions/mine/text").json()["end"]
    rest = served.http.get("/v1/sessions/mine/text", params={"start": end}).json()
    assert (rest["start"], rest["end"], rest["text"]) == (end, end, ""), "a reader who goes on from there is at the end"


def test_a_text_that_grew_as_its_end_was_read_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Another turn ends between the look behind the last token and the count of the tokens."""
    recall = thread_memory.recall

    async def and_a_turn(*given: Any) -> list[Passage]:
        monkeypatch.setattr(thread_memory, "recall", recall)
        found = await recall(*given)
        await asyncio.to_thread(served.http.post, "/v1/responses", json={
            "input": "more", "previous_response_id": first["id"]})
        return found

    first = served.http.post("/v1/responses", json={"input": "some", "session_id": "mine"}).json()
    end = served.http.get("/v1/sessions/mine/text").json()["end"]
    monkeypatch.setattr(thread_memory, "recall", and_a_turn)
    answer = served.http.get("/v1/sessions/mine/text", params={"start": end})
    assert answer.status_code == 200 and "more" in answer.json()["text"], answer.text


def test_what_ask_does_not_heed_is_named(served: Served):
    served.http.post("/v1/chat/completions", json=said(session_id="mine"))
    answer = served.http.post("/v1/sessions/mine/ask", json={
        "question": "What?", "stream": True, "focus": "x", "tools": [], "odd": 1, "max_tokens": 5}).json()
    assert answer["locret"]["ignored"] == ["odd", "tools", "focus", "stream"]


def test_a_session_that_nobody_has_is_refused_in_one_way(served: Served):
    for method, path, body in (("GET", "", None), ("GET", "/memory", None), ("GET", "/text", None),
                               ("GET", "/map", None), ("POST", "/ask", {"question": "What?"}),
                               ("POST", "/focus", {"focus": "x"}), ("POST", "/fork", {"to": "new"})):
        status, error = refusal(served, method, f"/v1/sessions/nope{path}", body)
        assert (status, error["code"]) == (404, "session_not_found"), path
        assert "thread" not in error["message"]


def test_tools_have_names_of_their_own(served: Served):
    status, error = refusal(served, "POST", "/v1/chat/completions", said(tools=[TOOL, TOOL]))
    assert (status, error["param"]) == (400, "tools[1]")
    status, error = refusal(served, "POST", "/v1/chat/completions", said(tool_choice="required"))
    assert status == 400 and error["message"].endswith("expected tools")


@pytest.mark.parametrize("off", [{"min_p": 0}, {"top_k": 0}, {"top_k": -1}])
def test_what_other_servers_write_for_off_is_off(served: Served, off: dict[str, int]):
    assert served.http.post("/v1/chat/completions", json=said(**off)).status_code == 200


@pytest.mark.thorough
def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_python("-m", "locret_stream", "serve", "--store", tmp_path, "--port", port, "--model", tmp_path,
                          timeout_s=60)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr, done.stderr


@pytest.mark.parametrize("way", ["items", "input", "instructions"])
def test_nothing_is_told_that_nobody_said(served: Served, way: str):
    """Where a system text follows a system text, no stand-in for what is held may get into the new one."""
    made = served.http.post("/v1/conversations", json={"items": [
        {"role": "user", "content": "u1"}, {"role": "system", "content": "s1"}]}).json()["id"]
    new = {"role": "system", "content": "s2"}
    if way == "items":
        answer = served.http.post(f"/v1/conversations/{made}/items", json={"items": [new]})
    else:
        answer = served.http.post("/v1/responses", json={"conversation": made} | (
            {"input": [new, {"role": "user", "content": "u2"}]} if way == "input" else
            {"input": "u2", "instructions": "s2"}))
    assert answer.status_code == 200, answer.text
    items = served.http.get(f"/v1/conversations/{made}/items?order=asc").json()["data"]
    assert [(item["role"], item["content"][0]["text"]) for item in items][:3] == [
        ("user", "u1"), ("system", "s1"), ("system", "s2")]
    assert "before" not in served.http.get(f"/v1/sessions/{made}/text").json()["text"]


@pytest.mark.thorough
def test_pages_of_a_text_never_cut_a_character(served: Served):
    text = "".join(f"{number} 日本語🙂\\n" for number in range(700))
    for shift in range(4):
        session = f"s{shift}"
        served.http.put(f"/v1/sessions/{session}/ingest", content=("x" * shift + text).encode())
        pages, at = "", 0
        while (page := served.http.get(f"/v1/sessions/{session}/text", params={"start": at}).json())["end"] > at:
            pages, at = pages + page["text"], page["end"]
        assert at > 4096 and "\ufffd" not in pages and text in pages
