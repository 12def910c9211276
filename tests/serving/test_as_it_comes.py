"""Requests as clients write them: numbers with a point, older forms of calls, calls that a model wrote wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from locret_stream.conversation.messages import Message
from locret_stream.serving.chat import read_messages
from locret_stream.serving.errors import ApiError
from locret_stream.serving.responses import read_items
from tests.langchain.support import Script
from tests.serving.support import Served

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PATHS = {"chat/completions": {"messages": [USER]}, "responses": {"input": "hi"}}


def post(served: Served, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = served.http.post(f"/v1/{path}", json=body)
    return answer.status_code, answer.json()


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_floats_that_are_whole_numbers_are_whole_numbers(served: Served, path: str):
    fields = {"max_tokens": 3.0, "max_completion_tokens": 3.0, "max_output_tokens": 3.0, "seed": 42.0, "top_k": 5.0}
    for name, value in fields.items():
        status, found = post(served, path, temperature=0.5, **PATHS[path], **{name: value})
        assert status == 200, found
        if name.startswith("max"):
            ended = found["choices"][0]["finish_reason"] if "choices" in found else (
                found["incomplete_details"] or {})["reason"]
            assert ended in ("length", "max_output_tokens"), "the limit was heeded"
        for wrong in (value + 0.5, str(value), True, [value]):
            status, found = post(served, path, temperature=0.5, **PATHS[path], **{name: wrong})
            assert status == 400 and found["error"]["param"] == name, wrong
            assert found["error"]["message"].startswith(f"{name}: ")
    status, found = post(served, "chat/completions", **PATHS["chat/completions"], n=1.0, top_logprobs=0.0, top_k=-1.0)
    assert status == 200 and "top_k" not in found["locret"].get("ignored", ())
    assert post(served, "chat/completions", **PATHS["chat/completions"], n=1.5)[1]["error"]["param"] == "n"
    assert post(served, "chat/completions", **PATHS["chat/completions"], max_tokens=1e18)[0] == 400
    assert type(post(served, "responses", **PATHS["responses"], max_output_tokens=9.0)[1]["max_output_tokens"]) is int


def test_same_seed_same_noise_however_it_is_written(served: Served):
    from locret_stream.serving.bodies import Sampled, as_struct
    assert as_struct({"seed": 42.0, "top_k": 5.0}, Sampled) == as_struct({"seed": 42, "top_k": 5}, Sampled)


def test_whole_numbers_of_queries_and_of_other_bodies(served: Served):
    post(served, "chat/completions", messages=[USER], session_id="s")
    get = served.http.get
    assert get("/v1/sessions/s/text?start=0.0&end=4.").json() == get("/v1/sessions/s/text?start=0&end=4").json()
    assert get("/v1/sessions/s/map?columns=2.0").status_code == 200
    assert len(get("/v1/conversations/s/items?limit=1.0").json()["data"]) == 1
    for path in ("text?start=0.5", "text?start=-1", "text?start=1e1", "text?start=.0", "text?start=", "map?columns=x",
                 "text?start=0.0%0a", "search?words=hi&limit=2.5"):
        refused = get(f"/v1/sessions/s/{path}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] in ("start", "columns", "limit"), path
    assert get("/v1/conversations/s/items?limit=1.5").status_code == 400
    number = get("/v1/sessions/s").json()["boundaries"][0]["number"]
    assert post(served, "sessions/s/ask", question="?", max_tokens=2.0)[0] == 200
    assert post(served, "sessions/s/rewind", to=number + 0.5)[0] == 400
    assert post(served, "sessions/s/rewind", to=float(number))[0] == 200


# -- messages -------------------------------------------------------------------------------------------------------


def test_the_old_form_of_calls_is_a_call_and_its_result():
    call = {"name": "look", "arguments": '{"at": "shed"}'}
    old = read_messages([USER, {"role": "assistant", "content": None, "function_call": call},
                         {"role": "function", "name": "look", "content": "a hen"}])
    assert old == [Message("user", "hi"), Message("assistant", "", calls=(("look", {"at": "shed"}, ""),)),
                   Message("tool", "a hen", answers=0, name="look")]
    both = {"role": "assistant", "function_call": call,
            "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    assert read_messages([both])[0].calls == (("look", {"at": "shed"}, "c"),), "the same call once"
    assert read_messages([{"role": "assistant", "content": "x", "function_call": None}]) == [Message("assistant", "x")]
    assert read_messages([USER, {"role": "function", "name": "other", "content": "x"}])[1].answers == -1
    with pytest.raises(ApiError) as refused:
        read_messages([{"role": "assistant", "function_call": {"arguments": "{}"}}])
    assert refused.value.param == "messages[0].function_call"


@pytest.mark.parametrize("arguments", ["null", "", " ", None, {}, "{}", " {}\n"])
def test_arguments_that_say_nothing_are_none(arguments: Any):
    function = {"name": "look", "arguments": arguments}
    (said,) = read_messages([{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}])
    assert said.calls == (("look", {}, "c"),) and said.content == ""
    (item,) = read_items([{"type": "function_call", "call_id": "c", **function}])
    assert item == said


@pytest.mark.parametrize("arguments", ['{"at": "Ro', "[1, 2]", '"Rome"', "Rome", "7", "{'at': 1}", "9" * 5000, [1, 2]])
def test_a_call_that_a_model_wrote_wrongly_is_never_lost(arguments: Any):
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    text = f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    broken = {"name": "look", "arguments": arguments}
    fine = {"name": "peek", "arguments": '{"at": 1}'}
    chat = read_messages([USER, {"role": "assistant", "content": "Well.", "tool_calls": [
        {"id": "b", "function": broken}, {"id": "f", "function": fine}]},
        {"role": "tool", "tool_call_id": "b", "content": "no JSON"},
        {"role": "tool", "tool_call_id": "f", "content": "x"}])
    answer = Message("assistant", f"Well.\n{text}", calls=(("peek", {"at": 1}, "f"),))
    results = [Message("tool", "no JSON", call_id="b"), Message("tool", "x", call_id="f", answers=0)]
    assert chat == [Message("user", "hi"), answer, *results]
    items = read_items([USER, {"role": "assistant", "content": "Well."},
                        {"type": "function_call", "call_id": "b", **broken},
                        {"type": "function_call", "call_id": "f", **fine},
                        {"type": "function_call_output", "call_id": "b", "output": "no JSON"},
                        {"type": "function_call_output", "call_id": "f", "output": "x"}])
    assert items == chat
    assert read_items([{"type": "function_call", "call_id": "b", **broken}]) == [Message("assistant", text)]
    assert read_messages([{"role": "assistant", "function_call": broken}]) == [Message("assistant", text)]


def _call(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": '{"at": 1}', **more}


def _output(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "so", **more}


_PLAIN = {"role": "assistant", "tool_calls": [
    {"id": "a", "function": {"name": "look", "arguments": '{"at": 1}'}},
    {"id": "b", "function": {"name": "look", "arguments": '{"at": 1}'}}]}


@pytest.mark.parametrize("items", [
    [_call("a"), _call("b"), _output("b"), _output("a")],
    [_call("a", id="fc_1", status="completed"), _call("b", id=None, status="incomplete"),
     _output("b", id="fco_1", status="completed"), _output("a", status=None)],
    [_call("a"), {"type": "reasoning", "id": "rs_1", "summary": []}, _call("b"), _output("b"), _output("a")],
    [_call("a"), {"type": "item_reference", "id": "rs_1"}, {"id": "rs_2"}, _call("b"), _output("b"), _output("a")],
    [_call("a"), _call("b"), _output("b", output=[{"type": "input_text", "text": "s"}, {"type": "text", "text": "o"}]),
     _output("a")],
    [_call(None, id="a"), {key: value for key, value in _call("b").items() if key != "call_id"} | {"id": "b"},
     _output("b"), _output("a")],
    [_PLAIN, {"role": "tool", "tool_call_id": "b", "content": "so"}, _output("a")],
    [_PLAIN | {"type": "message", "content": ""}, _output("b"), {"type": None, "role": "tool", "tool_call_id": "a",
                                                                 "content": [{"type": "text", "text": "so"}]}],
])
def test_items_of_calls_are_read_in_every_shape_that_has_a_plain_meaning(items: list[dict[str, Any]]):
    chat = read_messages([USER, _PLAIN, {"role": "tool", "tool_call_id": "b", "content": "so"},
                          {"role": "tool", "tool_call_id": "a", "content": "so"}])
    found = read_items([{"type": None, **USER}, *items])
    assert [message.digest for message in found] == [message.digest for message in chat]
    assert found == chat


def test_an_output_of_an_older_call_is_the_same_in_either_api():
    """An id that comes again is of the newest call; without any call the memory has it."""
    first, second = _PLAIN, {"role": "assistant", "tool_calls": [_PLAIN["tool_calls"][0] | {"id": "c"}]}
    result = {"role": "tool", "content": "so"}
    chat = read_messages([first, result | {"tool_call_id": "a"}, second, result | {"tool_call_id": "b"},
                          result | {"tool_call_id": "c"}])
    assert read_items([_call("a"), _call("b"), _output("a"), _call("c"), _output("b"), _output("c")]) == chat
    assert [message.answers for message in read_items([_output("x")])] == [0]


def test_two_calls_of_one_id_that_cannot_be_read_are_both_text():
    (message,) = read_items([_call("a", arguments="one"), _call("a", arguments="two")])
    assert "one" in message.content and "two" in message.content


@pytest.mark.parametrize(("item", "told"), [
    ({"type": "item_reference", "id": "msg_1"}, "previous_response_id"), ({"id": "fc_1"}, "item_reference"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}, "functions"),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "functions"),
    ({"type": "compaction", "encrypted_content": "x"}, "compaction"),
    ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "web_search_call"),
    ({"type": "function_call", "name": "f"}, "call_id"), ({"type": "function_call", "call_id": "c"}, "no name"),
    ({"type": "function_call_output", "output": "x"}, "call_id"), ({"role": "tool", "content": "x"}, "role is 'tool'"),
    (_output("c", output=[{"type": "input_image", "image_url": "x"}]), "input_image"),
    (_output("c", output=[{"type": "input_file", "file_id": "x"}]), "input_file"),
])
def test_an_item_that_is_not_read_is_refused_by_name(item: dict[str, Any], told: str):
    with pytest.raises(ApiError, match=told) as refused:
        read_items([USER, item])
    assert refused.value.status == 400 and str(refused.value.param).startswith("input[1]")


def test_such_a_history_is_answered_and_the_memory_has_the_call(served: Served, script: Script):
    broken = {"name": "look", "arguments": '{"at": "Ro'}
    script.say = lambda shown: "Fine."
    for path, body in (("chat/completions", {"messages": [
            USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": broken}]},
            {"role": "tool", "tool_call_id": "c", "content": "no JSON"}]}),
            ("responses", {"input": [USER, {"type": "function_call", "call_id": "c", **broken},
                                     {"type": "function_call_output", "call_id": "c", "output": "no JSON"}]}),
            ("chat/completions", {"messages": [USER, {"role": "assistant", "content": None, "function_call": {
                "name": "look", "arguments": "null"}}, {"role": "function", "name": "look", "content": "a hen"}]})):
        status, found = post(served, path, **body, tools=[LOOK if path.startswith("chat") else
                                                         {"type": "function", **LOOK["function"]}])
        assert status == 200, found
        if "a hen" in json.dumps(body):
            assert '"name": "look", "arguments": {}' in script.seen and "a hen" in script.seen
        else:
            assert '"arguments": {"at": "Ro' in script.seen and "no JSON" in script.seen


@pytest.mark.parametrize("content, text", [
    (None, ""), ("", ""), ([], ""), ("x", "x"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ([{"type": "refusal", "refusal": "No."}], "No.")])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_every_role_takes_every_form_of_content(role: str, content: Any, text: str):
    message = {"role": role, "content": content, "tool_call_id": "c", "name": "n"}
    (said,) = read_messages([message])
    assert said.content == text and said.role == {"developer": "system", "function": "tool"}.get(role, role)
    if content is None:
        assert read_messages([{key: value for key, value in message.items() if key != "content"}]) == [said]
    if role not in ("tool", "function"):
        assert read_items([message])[0].content == text


def test_what_an_answer_refused_is_its_text_and_thoughts_are_passed_over():
    assert read_messages([{"role": "assistant", "content": None, "refusal": "I will not."}])[0].content == "I will not."
    kept = {"role": "assistant", "content": "<think>hm</think>yes", "reasoning_content": "hm", "refusal": None}
    assert read_messages([kept]) == [Message("assistant", "<think>hm</think>yes")]
    assert read_items([USER, {"type": "reasoning", "summary": [], "id": "rs"}]) == [Message("user", "hi")]


def test_several_system_messages_are_read_where_they_stand():
    roles = [("system", "a"), ("system", "b"), ("user", "c"), ("developer", "d"), ("assistant", "e")]
    messages = [{"role": role, "content": content} for role, content in roles]
    expected = [Message("system" if role == "developer" else role, content) for role, content in roles]
    assert read_messages(messages) == read_items(messages) == expected


def test_roles_that_nobody_has_are_refused_by_name():
    for role in ("Function", "critic", None, 5, ["user"]):
        with pytest.raises(ApiError) as refused:
            read_messages([{"role": role, "content": "x"}])
        assert refused.value.param == "messages[0].role" and "function" in str(refused.value)
    for role in ("tool", "function", None, ["user"]):
        with pytest.raises(ApiError) as refused:
            read_items([{"role": role, "content": "x"}])
        assert refused.value.param == "input[0].role"


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_stop_string_stops_nothing(served: Served, script: Script, path: str):
    schema = {"type": "json_schema", "name": "x", "schema": {"const": "one two three"}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}} if path.startswith("chat") else {
        "text": {"format": schema}}
    for stop, cut in (([""], False), ("", False), ([], False), (["", "two"], True)):
        script.say = lambda shown: "one two three"
        status, found = post(served, path, **PATHS[path], stop=stop)
        assert status == 200 and ("three" in json.dumps(found)) is not cut, stop
        if not cut:
            script.say = lambda shown: '"one two three"'
            assert post(served, path, **PATHS[path], stop=stop, **form)[0] == 200, "none beside a schema"
