"""Who may call, how much a server takes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from locret_stream.cli.serve import read_keys
from locret_stream.errors import ConfigError
from locret_stream.serving import app, server
from locret_stream.serving.limits import Limits
from tests.langchain.support import Script
from tests.processes import start_python
from tests.serving.support import MODEL, Served, serving
from tests.serving.test_left import wait_until

CHAT = {"messages": [{"role": "user", "content": "one"}]}
POST = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
KEYS = {"s3cret": "acme", "0ther": "blue"}


def test_without_a_key_or_with_a_wrong_one_nothing_is_told(script: Script, tmp_path: Path):
    with serving(tmp_path, keys=KEYS, key="s3cret") as served:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "s3cret"},
                        {"authorization": "Basic s3cret"}, {"authorization": "Bearer"}):
            with httpx.Client(base_url=served.url, headers=headers) as stranger:
                for path in ("/v1/models", "/v1/sessions", "/v1/sessions/a", "/metrics"):
                    assert stranger.get(path).status_code == 401, (headers, path)
                answer = stranger.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert stranger.get("/health").status_code == 200
        with served.openai() as client:
            assert client.chat.completions.create(model=MODEL, messages=CHAT["messages"]).choices
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="no", max_retries=0) as client, pytest.raises(
                openai.AuthenticationError):
            client.models.list()


def test_tenants_do_not_see_each_other(script: Script, tmp_path: Path):
    with serving(tmp_path, keys=KEYS, key="s3cret") as served, httpx.Client(
            base_url=served.url, headers={"authorization": "Bearer 0ther"}, timeout=60) as blue:
        made = served.http.post("/v1/responses", json={"input": "acme's secret", "session_id": "a"}).json()
        conversation = served.http.post("/v1/conversations", json={}).json()["id"]
        assert blue.get("/v1/sessions").json()["data"] == []
        for name in ("a", "acme/a", "../acme/a", f"{conversation}", "langchain/acme/a"):
            path, refused = name.replace("/", "%2F"), 400 if ".." in name else 404
            assert blue.get(f"/v1/sessions/{path}").status_code == refused, name
            assert blue.delete(f"/v1/sessions/{path}").status_code == refused, name
        for body in ({"previous_response_id": made["id"]}, {"conversation": conversation}):
            assert blue.post("/v1/responses", json={"input": "x", **body}).status_code == 404
        own = blue.post("/v1/chat/completions", json={**CHAT, "session_id": "a"}).json()
        assert own["locret"]["source"] == "new" and "secret" not in script.seen
        assert served.http.get("/v1/sessions/a").json()["boundaries"][-1]["response"] == made["id"]


@pytest.mark.parametrize("given, expected", [
    ([], {}), (["a"], {"a": ""}), (["x:a", "y:b,x:c"], {"a": "x", "b": "y", "c": "x"})])
def test_keys(given: list[str], expected: dict[str, str]):
    assert read_keys(given) == expected


@pytest.mark.parametrize("given", [["x:"], ["a", "x:b"], ["x:a", "y:a"], ["x/y:a"]])
def test_keys_that_cannot_be_told_apart(given: list[str]):
    with pytest.raises(ConfigError, match="API key"):
        read_keys(given)


@pytest.mark.parametrize("headers", [
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"}, {"origin": "http://evil.example"},
    {"origin": "null"}])
def test_no_page_of_a_browser_reaches_a_server_without_keys(served: Served, headers: dict[str, str]):
    answer = served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"
    assert served.http.get("/v1/models", headers={"origin": served.url}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_are_json(served: Served, kind: str):
    answer = served.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": kind})
    assert answer.status_code == 415


def test_too_many_are_told_to_come_back_and_all_others_answered(script: Script, tmp_path: Path):
    script.say, script.delay = lambda shown: "word " * 10, 0.01

    async def at_once(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(12)))

    with serving(tmp_path, max_live=2, limits=Limits(max_waiting=2)) as served:
        answers = asyncio.run(at_once(served.url))
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200] * 4 + [429] * 8
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        metrics = served.http.get("/metrics").text
        assert 'locret_refused_total{code="429"} 8.0' in metrics and "locret_running 0.0" in metrics


def refused(served: Served) -> dict[str, float]:
    """How many requests were refused, by their status."""
    found = re.findall(r'locret_refused_total\{code="(\d+)"\} (\S+)', served.http.get("/metrics").text)
    return {code: float(count) for code, count in found}


@pytest.mark.parametrize("path, body", [
    ("chat/completions", CHAT), ("responses", {"input": "one"}), ("responses", {"input": "one", "store": False})])
@pytest.mark.thorough(but=1)
def test_an_answer_that_is_out_of_time_in_mid_stream_is_counted(
        served: Served, script: Script, path: str, body: dict[str, Any]):
    script.say, script.delay = lambda shown: "word " * 400, 0.01
    for count in (1, 2):
        with served.http.stream("POST", f"/v1/{path}", json={**body, "stream": True, "timeout": 0.5}) as answer:
            assert answer.status_code == 200 and '"timeout"' in "".join(answer.iter_text())
        assert refused(served) == {"504": count}


def test_an_upload_that_fails_in_mid_stream_and_a_path_that_is_none_are_counted(served: Served):
    answer = served.http.post("/v1/sessions/s/ingest", content=b"\xff", headers={"accept": "text/event-stream"})
    assert answer.status_code == 200 and '"type":"error"' in answer.text, answer.text
    assert refused(served) == {"400": 1}
    assert served.http.get("/v1/nothing").status_code == 404 and served.http.get("/v1/responses").status_code == 405
    assert refused(served) == {"400": 1, "404": 1, "405": 1}


BOMBS = [(b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
         (b'{"input": "x", "metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", 400),
         (b"[]", 400), (b"{", 400), (b'"x"', 400), (b"\xff\xfe", 400), (b"nul", 400), (b"1e999", 400),
         (b'{"messages": "' + b"x" * (17 << 20) + b'"}', 413)]


@pytest.mark.parametrize("number", range(len(BOMBS)))
@pytest.mark.thorough(but=2)
def test_json_bombs_are_refused_and_the_server_lives(served: Served, number: int):
    body, status = BOMBS[number]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/sessions/a/ask"):
        answer = served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text[:300]
    assert served.http.get("/v1/models").status_code == 200


def raw(served: Served, request: bytes, wait_s: float = 5) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), timeout=wait_s) as line:
        line.sendall(request)
        out = b""
        while piece := line.recv(65536):
            out += piece
        return out


@pytest.mark.parametrize("request_", [
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n",
    b"GET / HTTP/1.1\nHost localhost\n\n", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", b"GET /" + b"a" * 100_000])
@pytest.mark.thorough(but=2)
def test_smuggled_and_broken_requests_are_refused(served: Served, request_: bytes):
    answer = raw(served, request_ + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 2") <= 1 and b"HTTP/1.1 500" not in answer
    assert served.http.get("/v1/models").status_code == 200
    assert served.http.get("/v1/sessions").json()["data"] == []


def test_a_slow_sender_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_S", 0.3)
    monkeypatch.setattr(server, "HEADERS_S", 0.3)
    assert b" 408 " in raw(served, POST + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
    began = time.perf_counter()
    assert raw(served, b"GET /v1/mod") == b"" and time.perf_counter() - began < 4


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("GET", "/../../etc/passwd", 404),
    ("GET", "/v1/sessions/..%2f..%2fetc%2fpasswd", 400), ("GET", "/v1/sessions/%00", 400),
    ("GET", "/v1/sessions/" + "a" * 300, 400), ("GET", "/docs", 404), ("DELETE", "/v1/sessions/", 400)])
@pytest.mark.thorough(but=2)
def test_paths_that_are_none(served: Served, method: str, path: str, status: int):
    answer = served.http.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text


@pytest.mark.thorough
def test_sigterm_lets_an_answer_end_while_an_upload_hangs(tmp_path: Path):
    """As a process of its own: the stream is whole, the upload undone, `/ready` says so, and the process ends."""
    process = start_python("-m", "locret_stream", "serve", "--port", "0", "--json", "--store", tmp_path / "store")
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"].removesuffix("/v1")
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as hanging, httpx.Client(timeout=60) as client:
            hanging.sendall(b"POST /v1/sessions/log/ingest HTTP/1.1\r\nHost: localhost\r\n"
                            b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            body: dict[str, Any] = {**CHAT, "stream": True, "max_tokens": 400, "ignore_eos": True}
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                seen = [next(lines) for _ in range(6)]
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: client.get(f"{url}/ready").status_code == 503)  # fails once the server is gone
                ready = client.get(f"{url}/ready")
                seen += list(lines)
            assert seen[-2 if not seen[-1] else -1] == "data: [DONE]" or "data: [DONE]" in seen
            assert any('"finish_reason":"length"' in line for line in seen)
            assert ready.status_code == 503 and ready.text == "draining"
            assert b" 503 " in hanging.recv(65536)
        assert process.wait(30) in (-signal.SIGTERM, 143)
    finally:
        process.kill()
        process.communicate()


def test_while_it_drains_nothing_new_is_taken_in(served: Served, script: Script):
    script.say, script.delay = lambda shown: "word " * 100, 0.01
    with httpx.Client(base_url=served.url, timeout=60) as client, client.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.loop.call_soon_threadsafe(served.server._drain, 0)
        wait_until(lambda: served.service.draining)
        refused = served.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert served.http.get("/health").status_code == 200 and served.http.get("/ready").status_code == 503
        assert "data: [DONE]" in list(lines)
    threading.Event().wait(0.05)
