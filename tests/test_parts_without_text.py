"""Images, sound, video and files in a message are refused by name, whichever way they come in; what was told before
stays, and goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_locret import LocretChatModel
from locret_stream import InputError
from locret_stream.training.data import parse_line
from tests.context.support import tiny
from tests.langchain.conftest import chat, script  # noqa: F401  # fixtures
from tests.langchain.support import held, receipt, thread
from tests.serving.conftest import served  # noqa: F401  # a fixture
from tests.serving.support import MODEL, Served

URL = "data:image/png;base64,AAAA"
CHAT_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URL}}, {"type": "input_audio", "input_audio": {"data": "AA", "format":
                                                                                              "wav"}},
    {"type": "file", "file": {"file_id": "f"}}, {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]
RESPONSES_PARTS: list[dict[str, Any]] = [
    {"type": "input_image", "image_url": URL}, {"type": "input_file", "file_id": "f"},
    {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, {"type": "video", "url": "x"}]
TEXT = {"type": "text", "text": "What is this?"}


def kinds(parts: list[dict[str, Any]]) -> list[Any]:
    """The first of them by default."""
    return [pytest.param(part, id=part["type"], marks=[pytest.mark.thorough] if number else [])
            for number, part in enumerate(parts)]


def expect_refused(by: Served, path: str, body: dict[str, Any], kind: str, where: str, param: str) -> None:
    answer = by.http.post(f"/v1/{path}", json={"model": MODEL, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_content", param), error
    assert error["message"].startswith(f"{where} of its content is of type {kind!r}; this library reads text alone")
    assert "send what it shows or says as text" in error["message"]


@pytest.mark.parametrize("part", kinds(CHAT_PARTS))
def test_a_chat_refuses_it_and_goes_on(served: Served, part: dict[str, Any]):  # noqa: F811
    def told(*more: dict[str, Any]) -> dict[str, Any]:
        return {"session_id": "alice", "messages": [{"role": "user", "content": "one"}, *more]}

    first = served.http.post("/v1/chat/completions", json={"model": MODEL, **told()}).json()
    said, before = first["choices"][0]["message"], served.held("alice")
    answered = {"role": "assistant", "content": said["content"]}
    for stream in (False, True):
        expect_refused(served, "chat/completions", told(answered, {"role": "user", "content": [TEXT, part]}) | {
            "stream": stream}, part["type"], "messages[2]: part 1", "messages[2].content[1]")
    expect_refused(served, "chat/completions", told(answered, {"role": "tool", "tool_call_id": "c", "content": [part]}),
                   part["type"], "messages[2]: part 0", "messages[2].content[0]")
    expect_refused(served, "chat/completions", {"session_id": "bob", "messages": [
        {"role": "system", "content": [part]}, {"role": "user", "content": "one"}]}, part["type"],
        "messages[0]: part 0", "messages[0].content[0]")
    expect_refused(served, "chat/completions", told({"role": "assistant", "content": None, "audio": {"id": "a"}}),
                   "audio", "messages[1]: part 0", "messages[1].audio")
    assert served.held("alice") == before
    assert [session["id"] for session in served.http.get("/v1/sessions").json()["data"]] == ["alice"], "none began"
    second = served.http.post("/v1/chat/completions", json={"model": MODEL, **told(answered, {
        "role": "user", "content": [TEXT]})}).json()
    assert second["locret"]["source"] == "live" and served.held("alice").startswith(before)


@pytest.mark.parametrize("part", kinds(RESPONSES_PARTS))
def test_responses_and_items_of_a_conversation_refuse_it_and_go_on(served: Served,  # noqa: F811
                                                                   part: dict[str, Any]):
    user, output = {"role": "user", "content": [part]}, {"type": "function_call_output", "call_id": "c",
                                                         "output": [part]}
    first = served.http.post("/v1/responses", json={"model": MODEL, "input": "one"}).json()
    behind = {"previous_response_id": first["id"]}
    expect_refused(served, "responses", behind | {"input": [{"role": "user", "content": "x"}, user]}, part["type"],
                   "input[1]: part 0", "input[1].content[0]")
    expect_refused(served, "responses", behind | {"input": [output]}, part["type"], "input[0]: part 0",
                   "input[0].output[0]")
    expect_refused(served, "responses", behind | {"input": [part]}, part["type"], "input[0]: part 0", "input[0]")
    made = served.http.post("/v1/conversations", json={"items": [{"role": "user", "content": "I am Ann."}]}).json()
    expect_refused(served, f"conversations/{made['id']}/items", {"items": [user]}, part["type"], "items[0]: part 0",
                   "items[0].content[0]")
    listed = served.http.get(f"/v1/conversations/{made['id']}/items").json()["data"]
    assert len(listed) == 1
    second = served.http.post("/v1/responses", json={"model": MODEL, "input": "two", **behind}).json()
    assert second["locret"]["source"] == "live" and second["status"] == "completed"


@pytest.mark.parametrize("kind", ["image_url", *(pytest.param(each, marks=pytest.mark.thorough) for each in (
    "image", "input_audio", "audio", "video", "file", "input_image", "tool"))])
def test_langchain_refuses_it_and_goes_on(chat: LocretChatModel, kind: str):  # noqa: F811
    part: dict[str, Any] = {"type": kind, kind: {"url": URL}, "url": "https://example.org/x", "mime_type": "image/png"}
    history: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage("one")]
    history += [chat.invoke(history, thread("a"))]
    before = held(chat, "a")
    wrong: list[BaseMessage] = [HumanMessage([TEXT, part])]
    if kind in ("tool", "input_image"):
        part["type"] = kind = "input_image"
        wrong = [HumanMessage("x"), AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}]),
                 ToolMessage([TEXT, part], tool_call_id="1")]
    said = rf"message {2 + len(wrong)}: part 1 of its content is of type '{kind}'; this library reads text alone"
    for call in (chat.invoke, lambda *given: [*chat.stream(*given)]):
        with pytest.raises(InputError, match=said):
            call([*history, *wrong], thread("a"))
        with pytest.raises(InputError, match=said):
            call([*history, *wrong, HumanMessage("and now?")], thread("a"))
    assert held(chat, "a") == before
    answer = chat.invoke([*history, HumanMessage([TEXT])], thread("a"))
    assert receipt(answer)["source"] == "live" and held(chat, "a").startswith(before)


async def test_python_takes_text_and_refuses_parts():
    """`feed` and `ask` take no messages; conversations for heads do."""
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("one two three")
        before = ctx.memory
        for wrong in ([TEXT, CHAT_PARTS[0]], [{"role": "user", "content": [CHAT_PARTS[0]]}], CHAT_PARTS[0]):
            for call in (ctx.feed, ctx.ask, ctx.push):
                with pytest.raises(InputError):
                    await call(wrong)  # type: ignore[operator]
            assert ctx.memory == before
        assert isinstance(await ctx.ask("What?", max_new_tokens=1), str)
    line = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [
        TEXT, CHAT_PARTS[0]]}, {"role": "assistant", "content": "y"}]}).encode()
    with pytest.raises(InputError, match=r"pairs.jsonl:1: message 1: part 1 of its content is of type 'image_url'"):
        parse_line(line, "pairs.jsonl:1")
