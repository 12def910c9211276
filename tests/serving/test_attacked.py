"""What was acknowledged stays what is gone on from, and no caller takes a session or the server from the others."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from locret_stream.conversation.threads import THREADS, Threads
from locret_stream.serving import server, streams
from locret_stream.serving.limits import Limits
from tests.langchain.support import Script
from tests.serving.support import Served, serving
from tests.serving.test_left import wait_until

HANGING = (b"POST /v1/sessions/log/ingest HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
           b"5\r\nhello\r\n")


def respond(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def converse(served: Served) -> str:
    return served.http.post("/v1/conversations", json={}).json()["id"]


# -- conversations --------------------------------------------------------------------------------------------------


def test_what_a_conversation_is_told_counts_though_a_branch_asked_the_same(served: Served, script: Script):
    made = converse(served)
    first = respond(served, input="one", conversation=made)
    respond(served, input="the fact", previous_response_id=first["id"])
    told = {"items": [{"role": "user", "content": "the fact"}]}
    assert served.http.post(f"/v1/conversations/{made}/items", json=told).status_code == 200
    respond(served, input="what?", conversation=made)
    assert "the fact" in script.seen


@pytest.mark.thorough
def test_branches_do_not_push_out_where_a_conversation_goes_on(served: Served, script: Script):
    made = converse(served)
    ids = [respond(served, input=f"{word} said", conversation=made)["id"] for word in ("one", "two", "three")]
    for number in range(40):
        respond(served, input=f"branch {number}", previous_response_id=ids[0])
    respond(served, input="last", conversation=made)
    assert "three said" in script.seen and "branch" not in script.seen


@pytest.mark.thorough
def test_other_memories_of_its_session_do_not_push_out_a_conversation(served: Served, script: Script):
    made = converse(served)
    respond(served, input="one said", conversation=made)
    for number in range(20):
        respond(served, input=f"root {number}", session_id=made)
    respond(served, input="last", conversation=made)
    assert "one said" in script.seen and "root" not in script.seen


def test_a_conversation_is_not_taken_back_to_a_branch(served: Served, script: Script):
    made = converse(served)
    first = respond(served, input="one said", conversation=made)
    branch = respond(served, input="aside", previous_response_id=first["id"])
    respond(served, input="two said", conversation=made)
    answer = served.http.post(f"/v1/sessions/{made}/rewind", json={"to": branch["id"]})
    assert answer.status_code == 400 and "branches off" in answer.json()["error"]["message"]
    assert served.http.post(f"/v1/sessions/{made}/rewind", json={"to": first["id"]}).status_code == 200
    respond(served, input="last", conversation=made)
    assert "one said" in script.seen and "two said" not in script.seen


def test_items_that_another_server_outran_are_refused_as_an_answer_is(script: Script, tmp_path: Path):
    with serving(tmp_path) as one, serving(tmp_path) as two:
        made = converse(one)
        respond(one, input="one", conversation=made)
        thread = one.service.threads.named(made)
        keep = type(thread)._keep

        async def outrun(self: Any) -> bool:
            if self is thread and self.live is not None and self.live.appended and two_said:
                await asyncio.to_thread(respond, two, input=two_said.pop(), conversation=made)
            return await keep(self)

        two_said = ["two"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(thread), "_keep", outrun)
            answer = one.http.post(f"/v1/conversations/{made}/items", json={"items": [
                {"role": "user", "content": "late"}]})
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "stale_owner", answer.text
        respond(one, input="last", conversation=made)
        assert "two" in script.seen and "late" not in script.seen


def test_a_conversation_that_begins_warns_of_nothing(served: Served, caplog: pytest.LogCaptureFixture):
    respond(served, input="one", conversation=converse(served))
    assert not caplog.records


# -- memories without a name ----------------------------------------------------------------------------------------


def test_no_tenant_goes_on_from_the_nameless_memory_of_another(script: Script, tmp_path: Path):
    with serving(tmp_path, keys={"s3cret": "acme", "0ther": "blue"}, key="s3cret") as served:
        said = [{"role": "user", "content": "one"}]
        first = served.http.post("/v1/chat/completions", json={"messages": said}).json()
        said += [first["choices"][0]["message"], {"role": "user", "content": "two"}]
        other = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": said}, timeout=60,
                           headers={"authorization": "Bearer 0ther"}).json()
        assert other["locret"]["source"] == "new" and other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        own = served.http.post("/v1/chat/completions", json={"messages": said}).json()
        assert own["locret"]["source"] == "live"


def test_nameless_memories_that_two_turns_retire_at_once(served: Served):
    """The list of those to close is old once the first is closed: others may use or have closed the next by then."""
    threads = served.service.threads

    async def both() -> None:
        from locret_stream.conversation.thread import Thread

        class Slow(Thread):
            async def close(self) -> None:
                await asyncio.sleep(0.01)

        threads._nameless += [Slow(threads.runtime, None) for _ in range(threads.runtime.max_live + 5)]
        await asyncio.gather(Threads._retire(threads), Threads._retire(threads))
        threads._nameless.clear()

    served.do(both())


# -- uploads --------------------------------------------------------------------------------------------------------


def test_an_upload_that_cannot_begin_frees_its_session_at_once(served: Served):
    answer = served.http.post("/v1/sessions/s/ingest", content=b"x", params={"upload": "u", "focus": "word " * 9000})
    assert answer.status_code == 400
    began = time.perf_counter()
    respond(served, input="one", session_id="s")
    assert time.perf_counter() - began < 10


def test_an_upload_that_was_given_up_is_unknown_and_may_begin_again(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.service.uploads, "resume_s", 0.1)

    def broken() -> Iterator[bytes]:
        yield b"hello " * 100
        time.sleep(0.3)
        raise RuntimeError("the sender died")

    path, query = "/v1/sessions/s/ingest", {"upload": "u"}
    with httpx.Client(base_url=served.url) as sender, pytest.raises(RuntimeError):
        sender.post(path, content=broken(), params=query)
    wait_until(lambda: served.http.get(path, params=query).status_code == 404)
    on = served.http.post(path, content=b"x", params={**query, "offset": 600})
    assert on.status_code == 409 and on.json()["error"]["code"] == "upload_lost"
    assert served.http.post(path, content=b"hello", params=query).json()["characters"] == 5


def test_an_upload_that_waits_for_its_session_does_not_begin_twice(served: Served, script: Script):
    thread = served.service.threads.named("s")
    served.do(thread.lock.acquire())
    path, query = f"{served.url}/v1/sessions/s/ingest", {"upload": "u"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(path, content=b"hello", params=query, timeout=0.3)
    again = httpx.post(path, content=b"hello", params=query)
    assert again.status_code == 409 and again.json()["error"]["code"] == "upload_busy"
    served.loop.call_soon_threadsafe(thread.lock.release)
    wait_until(lambda: served.service._running == 0)
    at = served.http.get(path, params=query).json()["offset"]
    assert served.http.post(path, content=b"hello"[at:], params={**query, "offset": at}).status_code == 200
    assert served.http.get("/v1/sessions/s/text").json()["text"].count("hello") == 1


@pytest.mark.parametrize("forgotten", ["log", "parent"])
def test_a_session_that_is_forgotten_ends_its_upload_with_a_refusal(served: Served, forgotten: str):
    """Also where it goes with the one that it was forked from."""
    respond(served, input="one", session_id=forgotten)
    if forgotten != "log":
        assert served.http.post(f"/v1/sessions/{forgotten}/fork", json={"to": "log"}).status_code == 200
    with socket.create_connection(("127.0.0.1", served.port)) as sender:
        sender.sendall(HANGING)
        wait_until(lambda: served.service._running == 1)
        assert served.http.delete(f"/v1/sessions/{forgotten}").status_code == 200
        answer = sender.recv(65536)
    assert b" 409 " in answer and b"session_forgotten" in answer, answer
    assert served.http.get("/v1/sessions/log").status_code == 404


def test_the_id_of_a_finished_upload_takes_no_other_stream(served: Served):
    path, query = "/v1/sessions/s/ingest", {"upload": "nightly"}
    assert served.http.get(path, params=query).status_code == 404
    first = served.http.post(path, content=b"monday", params=query).json()
    assert served.http.get(path, params=query).json() == {"object": "ingest", "offset": 6, "done": True}
    at = {**query, "offset": 6}
    for headers in ({}, {"accept": "text/event-stream"}):
        other = served.http.post(path, content=b"tuesday", params=at, headers=headers)
        assert "upload_done" in other.text and (other.status_code == 409 or headers), other.text
    repeated = served.http.post(path, content=b"", params=at)
    assert repeated.status_code == 200 and repeated.json()["message"] == first["message"]
    assert served.http.get("/v1/sessions/s/text").json()["text"].count("day") == 1


# -- places ---------------------------------------------------------------------------------------------------------


def test_senders_who_leave_a_busy_session_give_their_places_back_in_time(script: Script, tmp_path: Path):
    with serving(tmp_path, max_live=1, limits=Limits(max_waiting=4, timeout_s=0.5)) as served, (
            socket.create_connection(("127.0.0.1", served.port))) as sender:
        sender.sendall(HANGING)
        wait_until(lambda: served.service._running == 1)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/sessions/log/ingest", content=b"x", timeout=0.1)
        late = httpx.post(f"{served.url}/v1/sessions/log/ingest", content=b"x", timeout=30)
        assert late.status_code == 504 and "not free within 0.5 s" in late.json()["error"]["message"], late.text
        wait_until(lambda: served.service._running == 1)
        respond(served, input="one")


@pytest.mark.thorough
def test_readers_who_leave_a_busy_session_take_nobodys_place(script: Script, tmp_path: Path):
    with serving(tmp_path, max_live=1, limits=Limits(max_waiting=4)) as served, socket.create_connection(
            ("127.0.0.1", served.port)) as sender:
        sender.sendall(HANGING)
        wait_until(lambda: served.service._running == 1)
        for what in ("/text", "/search?words=hello", "/text?column=5", "") * 4:
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{served.url}/v1/sessions/log{what}", timeout=0.1)
        wait_until(lambda: served.service._running == 1)
        wait_until(lambda: served.service.threads.named("log").users == 1)
        respond(served, input="one")


def test_looking_for_names_that_nobody_has_leaves_nothing(served: Served):
    for number in range(3 * THREADS):
        assert served.http.get(f"/v1/sessions/none{number}").status_code == 404
    assert len(served.service.threads._threads) <= 2 * THREADS + 1


def test_a_second_request_may_not_take_for_ever_to_come(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "HEADERS_S", 0.5)
    with socket.create_connection(("127.0.0.1", served.port)) as sender:
        sender.settimeout(10)
        sender.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"ok"):
            answer += sender.recv(4096)
        for byte in b"GET /hea":
            sender.sendall(bytes([byte]))
            time.sleep(0.02)
        assert sender.recv(10) == b""


def test_a_reader_who_takes_nothing_counts_as_having_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "SEND_S", 0.05)

    async def run() -> list[str]:
        ended = list[str]()

        async def events() -> AsyncGenerator[dict[str, Any]]:
            try:
                while True:
                    yield {"type": "x"}
            finally:
                ended.append("closed")

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        given = events()
        first = asyncio.ensure_future(anext(given))
        async with asyncio.timeout(5):
            await streams.EventStream(given, first, named=True, failed=lambda error: {})({}, receive, send)
        return ended

    assert asyncio.run(run()) == ["closed"]


# -- bodies ---------------------------------------------------------------------------------------------------------

DEEP = '{"a":' * 900 + "1" + "}" * 900
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("path, body", [
    ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": DEEP}}]}]}),
    ("chat/completions", {"messages": [USER], "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"required": [[1]], "properties": {"a": {}}}}}]}),
    ("chat/completions", {"messages": [USER], "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"required": {"a": 1}, "properties": {}}}}]}),
    ("responses", {"input": [[]] * 300_000}), ("responses", {"input": "x", "text": {"format": "json"}}),
    ("conversations", {"items": [1]}),
    ("conversations", {"items": ["x"]})])
@pytest.mark.thorough(but=2)
def test_bodies_of_a_wrong_form_are_the_callers_mistake(served: Served, path: str, body: dict[str, Any]):
    answer = served.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"] == "too_many_parts") == (len(answer.request.content) > 500_000)
