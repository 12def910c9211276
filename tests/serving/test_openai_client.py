"""The official client of OpenAI against the server: both APIs, plain and streamed, tools, branches, errors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.langchain.support import Script, call, tokenizer
from tests.serving.support import MODEL, Served, serving

LOOK = {"type": "function", "function": {"name": "look", "description": "Look a thing up.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}
LOOK_FLAT = {"type": "function", **LOOK["function"]}
ALICE = {"X-Session-Id": "alice"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_is_read_once_and_goes_on_after_a_restart(script: Script, tmp_path: Path):
    talk: list[Any] = [{"role": "system", "content": "Be brief."}, user("one")]
    with serving(tmp_path) as served, served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert answer.choices[0].message.content == "You said: one" and answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens_details.cached_tokens == 0 and answer.locret["source"] == "new"
        talk += [answer.choices[0].message.model_dump(exclude_none=True), user("two")]
        second = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert second.locret["source"] == "live" and second.locret["fed"] < 20
        assert second.usage.prompt_tokens_details.cached_tokens == answer.usage.total_tokens + 1  # the line end
        talk += [second.choices[0].message.model_dump(exclude_none=True), user("three")]
    with serving(tmp_path) as served, served.openai() as client:
        third = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert third.choices[0].message.content == "You said: three" and third.locret["source"] == "snapshot"
        # Nothing named: nobody's memory, and nothing is stored.
        nobody = client.chat.completions.create(model=MODEL, messages=talk)
        assert nobody.locret["source"] == "new" and not nobody.locret["saved"]
        assert [row["id"] for row in served.http.get("/v1/sessions").json()["data"]] == ["alice"]


def test_streamed_chunks_add_up_to_the_plain_answer(served: Served):
    with served.openai() as client:
        plain = client.chat.completions.create(model=MODEL, messages=[user("the same")])
        chunks = list(client.chat.completions.create(model=MODEL, messages=[user("the same")], stream=True,
                                                     stream_options={"include_usage": True}))
        roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
        assert roles == ["assistant"] + [None] * (len(roles) - 1), "it is said once, by the first chunk"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "You said: the same"
        assert plain.choices[0].message.content == "You said: the same"
        assert chunks[-1].usage == plain.usage.model_copy(update={"prompt_tokens_details": chunks[-1].usage.
                                                                  prompt_tokens_details})
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop" and len(chunks) > 4
        without = list(client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True))
        assert all(chunk.usage is None for chunk in without)


def test_tools_are_called_and_their_results_read(served: Served):
    with served.openai() as client:
        talk: list[Any] = [user("where is 'the shed'?")]
        asked = client.chat.completions.create(model=MODEL, messages=talk, tools=[LOOK], extra_headers=ALICE)
        (called,) = asked.choices[0].message.tool_calls
        assert asked.choices[0].finish_reason == "tool_calls" and called.function.name == "look"
        assert json.loads(called.function.arguments) == {"at": "the shed"}
        talk += [asked.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": called.id, "content": "behind the house"}]
        done = client.chat.completions.create(model=MODEL, messages=talk, tools=[LOOK], extra_headers=ALICE)
        assert done.choices[0].message.content == "Done." and done.locret["source"] == "live"
        forced = client.chat.completions.create(
            model=MODEL, messages=[user("('x')")], tools=[LOOK],
            tool_choice={"type": "function", "function": {"name": "look"}})
        assert forced.choices[0].message.tool_calls[0].function.name == "look"
        streamed = list(client.chat.completions.create(model=MODEL, messages=talk[:1], tools=[LOOK], stream=True))
        (part,) = [c.choices[0].delta.tool_calls for c in streamed if c.choices and c.choices[0].delta.tool_calls]
        assert part[0].index == 0 and part[0].function.name == "look"


def test_a_call_that_cannot_be_read_is_text_and_the_memory_goes_on(script: Script, served: Served):
    script.say = lambda shown: "Well. <tool_call>junk</tool_call> so."
    with served.openai() as client:
        talk: list[Any] = [user("one")]
        answer = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert answer.choices[0].finish_reason == "stop" and "<tool_call>junk" in answer.choices[0].message.content
        talk += [answer.choices[0].message.model_dump(exclude_none=True), user("two")]
        assert client.chat.completions.create(model=MODEL, messages=talk,
                                              extra_headers=ALICE).locret["source"] == "live"


def test_responses_go_on_branch_and_survive_a_restart(script: Script, tmp_path: Path):
    with serving(tmp_path) as served, served.openai() as client:
        first = client.responses.create(model=MODEL, input="one", instructions="Be brief.")
        assert first.output_text == "You said: one" and first.status == "completed" and first.locret["saved"]
        left = client.responses.create(model=MODEL, input="left", instructions="Be brief.",
                                       previous_response_id=first.id)
        right = client.responses.create(model=MODEL, input="right", previous_response_id=first.id)
        assert script.seen.count("left") == 0 and script.seen.count("Be brief.") == 1
        assert left.usage.input_tokens_details.cached_tokens == right.usage.input_tokens_details.cached_tokens > 0
    with serving(tmp_path) as served, served.openai() as client:
        again = client.responses.create(model=MODEL, input="more", previous_response_id=left.id)
        assert again.locret["source"] == "snapshot" and again.previous_response_id == left.id
        assert "left" in script.seen and "right" not in script.seen and "one" in script.seen
        other = client.responses.create(model=MODEL, input="more", previous_response_id=right.id)
        assert other.output_text == "You said: more" and "right" in script.seen and "left" not in script.seen


def test_the_same_answer_twice_is_two_responses(served: Served, script: Script):
    """A response that is asked for again has the text of the one before, and an id of its own; both go on."""
    with served.openai() as client:
        first = client.responses.create(model=MODEL, input="one")
        twice = [client.responses.create(model=MODEL, input="two", previous_response_id=first.id) for _ in range(2)]
        assert twice[0].id != twice[1].id and twice[0].output_text == twice[1].output_text
        for number, response in enumerate(twice):
            client.responses.create(model=MODEL, input=f"three {number}", previous_response_id=response.id)
            assert script.seen.count("two") == 2  # asked, and said by the answer


def test_events_of_a_streamed_response(served: Served):
    with served.openai() as client, client.responses.stream(model=MODEL, input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]
    assert final.output_text == "You said: hello" == "".join(
        event.delta for event in events if event.type == "response.output_text.delta")
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_tool_loop_over_responses(served: Served, script: Script):
    with served.openai() as client:
        asked = client.responses.create(model=MODEL, input="where is 'the shed'?", tools=[LOOK_FLAT])
        (called,) = asked.output
        assert called.type == "function_call" and json.loads(called.arguments) == {"at": "the shed"}
        done = client.responses.create(
            model=MODEL, tools=[LOOK_FLAT], previous_response_id=asked.id,
            input=[{"type": "function_call_output", "call_id": called.call_id, "output": "behind the house"}])
        assert done.output_text == "Done." and "behind the house" in script.seen and "late" not in done.locret
        # The whole history as items is as good.
        whole = client.responses.create(model=MODEL, tools=[LOOK_FLAT], input=[
            {"role": "user", "content": [{"type": "input_text", "text": "where is 'the shed'?"}]},
            called.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": called.call_id, "output": "behind the house"}])
        assert whole.output_text == "Done."


def test_changed_instructions_and_tools_are_told_late(served: Served, script: Script):
    with served.openai() as client:
        first = client.responses.create(model=MODEL, input="one", instructions="Be brief.")
        loud = client.responses.create(model=MODEL, input="two", instructions="Be loud.",
                                       previous_response_id=first.id)
        assert loud.locret["late"] == "the system prompt" and loud.locret["warnings"]
        assert "Be brief." in script.seen and "Be loud." in script.seen
        same = client.responses.create(model=MODEL, input="three", instructions="Be loud.",
                                       previous_response_id=loud.id)
        assert "late" not in same.locret
        script.say = lambda shown: call({"name": "look", "parameters": LOOK["function"]["parameters"]}, "'x'")
        tools = client.responses.create(model=MODEL, input="('x')", tools=[LOOK_FLAT], previous_response_id=same.id,
                                        tool_choice={"type": "function", "name": "look"})
        assert tools.output[0].name == "look" and tools.locret["late"] == "the tools"


def test_a_conversation_is_created_told_asked_and_deleted(script: Script, tmp_path: Path):
    with serving(tmp_path) as served, served.openai() as client:
        made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ann."}])
        first = client.responses.create(model=MODEL, input="one", conversation=made.id)
        assert first.conversation.id == made.id and "I am Ann." in script.seen
        branch = client.responses.create(model=MODEL, input="aside", previous_response_id=first.id)
        for number in range(3):
            branch = client.responses.create(model=MODEL, input=f"aside {number}", previous_response_id=branch.id)
        client.responses.create(model=MODEL, input="two", conversation=made.id)
        assert "aside" not in script.seen and "one" in script.seen  # branches do not move it
        empty = client.conversations.create()
    with serving(tmp_path) as served, served.openai() as client:
        client.responses.create(model=MODEL, input="three", conversation={"id": made.id})
        assert "two" in script.seen and "aside" not in script.seen
        assert client.responses.create(model=MODEL, input="hello", conversation=empty.id).locret["source"] == "new"
        assert client.conversations.retrieve(made.id).created_at == made.created_at
        assert time.time() - 600 < made.created_at <= time.time()
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="four", conversation=made.id)
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(model=MODEL, input="four", previous_response_id=first.id)
        assert error.value.code == "previous_response_not_found"


def test_what_is_not_stored_cannot_be_gone_on_from(served: Served):
    with served.openai() as client:
        first = client.responses.create(model=MODEL, input="one", store=False)
        assert first.output_text == "You said: one" and not first.locret["saved"]
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="store"):
            client.responses.create(model=MODEL, input="two", store=False, conversation="conv_x")
    assert served.http.get("/v1/sessions").json()["data"] == []


CHAT_MISTAKES: list[tuple[Any, ...]] = [
    ({"messages": []}, 400, None, "messages"), ({}, 400, "invalid_value", "messages"),
    ({"messages": [user("x")], "n": 2}, 400, "unsupported_parameter", "n"),
    ({"messages": [user("x")], "logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({"messages": [user("x")], "max_tokens": 0}, 400, None, "max_tokens"),
    ({"messages": [user("x")], "max_tokens": 10**9}, 400, None, "max_tokens"),
    ({"messages": [user("x")], "temperature": -1}, 400, None, None),
    ({"messages": [user("x")], "temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, None, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
     "unsupported_content", "messages[0].content[0]"),
    ({"messages": [user("x")], "tools": [{"type": "web_search"}]}, 400, "unsupported_tool", "tools[0]"),
    ({"messages": [user("x")], "tool_choice": "required"}, 400, None, "tool_choice"),
    ({"messages": [user("x")], "model": "gpt-9"}, 404, "model_not_found", "model"),
    ({"messages": [user("x")], "session_id": ""}, 400, "bad_session", "session_id"),
    ({"messages": [user("x")], "session_id": "a\nb"}, 400, "bad_session", "session_id"),
    ({"messages": [user("\ud800")]}, 400, None, None)]


@pytest.mark.parametrize("body, status, code, where", CHAT_MISTAKES)
@pytest.mark.thorough(but=3)
def test_mistakes_in_chat_are_told_and_change_nothing(served: Served, body: dict, status: int, code: str | None,
                                                      where: str | None):
    raw = json.dumps({"session_id": "alice", **body})
    answer = served.http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == status and error["message"], answer.text
    assert (code is None or error["code"] == code) and (where is None or error["param"] == where), error
    assert served.http.get("/v1/sessions").json()["data"] == []


RESPONSES_MISTAKES: list[tuple[Any, ...]] = [
    ({"input": ""}, 400), ({}, 400), ({"input": [{"type": "image"}]}, 400), ({"input": "x", "background": True}, 400),
    ({"input": "x", "previous_response_id": "resp_x.0", "conversation": "c"}, 400),
    ({"input": "x", "previous_response_id": "nonsense"}, 404),
    ({"input": "x", "previous_response_id": f"resp_YQ.{'0' * 32}"}, 404),
    ({"input": "x", "conversation": "conv_unknown"}, 404), ({"input": "x", "conversation": {}}, 400),
    ({"input": [{"type": "function_call", "name": "x"}]}, 400),
    ({"input": [{"role": "user", "content": 3}]}, 400), ({"input": [{"type": "reasoning"}]}, 400),
    ({"input": "x", "stop": ["q"] * 17}, 400), ({"input": "x", "stop": "q" * 257}, 400)]


@pytest.mark.parametrize("body, status", RESPONSES_MISTAKES)
@pytest.mark.thorough(but=2)
def test_mistakes_in_responses_are_told_and_change_nothing(served: Served, body: dict, status: int):
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    assert served.http.get("/v1/sessions").json()["data"] == []


def test_fields_without_effect_are_named(served: Served):
    with served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user("x")], reasoning_effort="high",
                                                user="ann", parallel_tool_calls=False)
        assert answer.locret["ignored"] == ["parallel_tool_calls", "reasoning_effort"]
        other = client.responses.create(model=MODEL, input="x", reasoning={"effort": "low"}, max_tool_calls=3)
        assert other.locret["ignored"] == ["max_tool_calls", "reasoning"]
        greedy = client.chat.completions.create(model=MODEL, messages=[user("x")], top_p=0.9, seed=7)
        assert greedy.locret["ignored"] == ["top_p", "seed"], "without a temperature there is no noise"
        noisy = client.chat.completions.create(model=MODEL, messages=[user("x")], top_p=0.9, seed=7, temperature=0.5)
        plain = client.chat.completions.create(model=MODEL, messages=[user("x")], top_p=1, extra_body={"top_k": 0})
        assert "ignored" not in noisy.locret and "ignored" not in plain.locret


def test_answers_that_are_cut_off_say_so(served: Served, script: Script):
    script.say = lambda shown: "word " * 50
    with served.openai() as client:
        assert client.chat.completions.create(model=MODEL, messages=[user("x")],
                                              max_tokens=5).choices[0].finish_reason == "length"
        cut = client.responses.create(model=MODEL, input="x", max_output_tokens=5)
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        whole = client.responses.create(model=MODEL, input="go on", previous_response_id=cut.id, max_output_tokens=200)
        assert whole.status == "completed"


def test_stop_strings_and_the_memory_of_what_was_answered(served: Served, script: Script):
    script.say = lambda shown: "one two END three"
    with served.openai() as client:
        talk: list[Any] = [user("x")]
        answer = client.chat.completions.create(model=MODEL, messages=talk, stop="END", extra_headers=ALICE)
        assert answer.choices[0].message.content == "one two "
        talk += [answer.choices[0].message.model_dump(exclude_none=True), user("y")]
        client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert "END" not in script.seen and "one two" in script.seen


def test_a_tool_prompt_is_written_as_the_model_reads_it(served: Served, script: Script):
    script.say = lambda shown: call({"name": "look", "parameters": LOOK["function"]["parameters"]}, "'x'")
    with served.openai() as client:
        client.chat.completions.create(model=MODEL, messages=[user("x")], tools=[LOOK], tool_choice="none")
        assert "Look a thing up." not in script.seen


AGE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
                                        "age": {"type": "integer", "minimum": 0, "maximum": 99}},
       "required": ["name", "age"], "additionalProperties": False}


@pytest.fixture
def free(tmp_path: Path) -> Any:
    """A server whose tiny model says what its random weights make of it."""
    with serving(tmp_path) as served:
        yield served


def test_noise_is_another_one_in_every_answer_unless_it_has_a_seed(free: Served):
    def answers(**more: Any) -> set[str | None]:
        with free.openai() as client:
            return {client.chat.completions.create(
                model=MODEL, messages=[user("who?")], max_tokens=12, temperature=1.0, **more
                ).choices[0].message.content for _ in range(4)}

    assert len(answers()) > 1 and len(answers(seed=7)) == 1


def test_answers_fit_the_schema_that_is_asked_for(free: Served):
    with free.openai() as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=[user("who?")], extra_headers=ALICE, temperature=1.0, seed=0,
            response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}})
        jsonschema.validate(json.loads(chat.choices[0].message.content), AGE)
        assert chat.choices[0].finish_reason == "stop"
        form = {"format": {"type": "json_schema", "name": "age", "schema": AGE, "strict": True}}
        response = client.responses.create(model=MODEL, input="who?", text=form)
        jsonschema.validate(json.loads(response.output_text), AGE)
        again = client.responses.create(model=MODEL, input="and who else?", text=form, temperature=1.0,
                                        previous_response_id=response.id, extra_body={"seed": 7})
        jsonschema.validate(json.loads(again.output_text), AGE)
        for bad in ({"type": "json_schema"}, {"type": "xml"}, {"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"not": {}}}}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model=MODEL, messages=[user("x")], response_format=bad)


def test_thoughts_stay_in_memory_though_clients_leave_them_out(script: Script, tmp_path: Path):
    script.say = lambda shown: "<think>It is cold.</think>\n\nok"
    shows = str(tokenizer().chat_template) + "{# <think> </think> #}"
    with serving(tmp_path, template=shows) as served, served.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user("one")], extra_headers=ALICE)
        message = answer.choices[0].message
        assert message.reasoning_content == "It is cold." and message.content == "ok"
        for thought in ({}, {"reasoning_content": "It is cold."}):
            talk = [user("one"), {"role": "assistant", "content": "ok", **thought}, user("two")]
            more = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
            assert more.locret["source"] in ("live", "snapshot") and more.locret["fed"] < 20
            assert script.seen.count("It is cold.") == 1
