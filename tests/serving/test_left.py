"""A client that leaves: its slot is free at once, and the memory is bit for bit as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.langchain.support import Script
from tests.serving.support import Served


def wait_until(done: Callable[[], bool], within_s: float = 10) -> float:
    """Seconds until it is so."""
    began = time.perf_counter()
    while not done():
        assert time.perf_counter() - began < within_s
        time.sleep(0.002)
    return time.perf_counter() - began


def state_of(served: Served, thread: str) -> Any:
    """What is kept of a session: its boundaries and its figures."""
    return (served.http.get(f"/v1/sessions/{thread}").json(), served.http.get(f"/v1/sessions/{thread}/map").json(),
            served.http.get(f"/v1/sessions/{thread}/text").json())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "responses", "conversation"])
@pytest.mark.thorough(but=2)
def test_a_turn_that_is_left_is_undone(served: Served, script: Script, api: str, stream: bool):
    made = served.http.post("/v1/conversations", json={}).json()["id"]
    paths = {"chat": ("/v1/chat/completions", {"session_id": made, "messages": [{"role": "user", "content": "one"}]}),
             "responses": ("/v1/responses", {"input": "one", "conversation": made}),
             "conversation": ("/v1/responses", {"input": "one", "conversation": made})}
    path, body = paths[api]
    first = served.http.post(path, json=body).json()
    before = state_of(served, made)
    if api == "chat":
        body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "two"}]
    elif api == "responses":
        body = {"input": "two", "previous_response_id": first["id"]}
    else:
        body = body | {"input": "two"}
    script.say, script.delay, sampled = lambda shown: "word " * 400, 0.01, script.sampled
    with httpx.Client(base_url=served.url, timeout=60) as leaving:
        if stream:
            with leaving.stream("POST", path, json=body | {"stream": True}) as answer:
                lines = answer.iter_lines()
                for _ in range(12):
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(path, json=body, timeout=0.4)
    took = wait_until(lambda: served.service._running == 0)
    assert took < 0.5, took  # 0.1 s on an idle machine; the suite shares its cores
    assert sampled < script.sampled < sampled + 300
    script.delay = 0.0
    assert state_of(served, made) == before
    assert served.service.runtime.slots.live.free >= served.service.runtime.max_live - 1
    script.say = lambda shown: "ok"
    assert served.http.post(path, json=body).status_code == 200  # it goes on from there
    assert script.seen.count("two") == 1 and "word word" not in script.seen


def test_one_that_leaves_while_it_waits_is_never_begun(served: Served, script: Script):
    script.say, script.delay = lambda shown: "word " * 100, 0.01
    body = {"session_id": "busy", "messages": [{"role": "user", "content": "one"}], "stream": True}
    with httpx.Client(base_url=served.url, timeout=60) as first, first.stream(
            "POST", "/v1/chat/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        with httpx.Client(base_url=served.url) as second, pytest.raises(httpx.ReadTimeout):
            second.post("/v1/chat/completions", timeout=0.3, json={
                "session_id": "busy", "messages": [{"role": "user", "content": "waits for its turn"}]})
        wait_until(lambda: served.service._running == 1)
        assert "data: [DONE]" in list(lines)
    wait_until(lambda: served.service._running == 0)
    assert "waits for its turn" not in str(served.http.get("/v1/sessions/busy/text").json())


def test_an_answer_whose_end_was_sent_stays(served: Served):
    first = served.http.post("/v1/responses", json={"input": "one"}).json()
    with served.http.stream("POST", "/v1/responses", json={
            "input": "two", "previous_response_id": first["id"], "stream": True}) as answer:
        text = answer.read().decode()
    assert "response.completed" in text
    done = text.rpartition('"id":"resp_')[2].partition('"')[0]
    assert served.http.post("/v1/responses", json={"input": "three", "previous_response_id": f"resp_{done}"}
                            ).status_code == 200
