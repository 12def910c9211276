"""Senders who die without a word, or send hardly anything: their session is free after a while, and what was read of an
upload with an id can be gone on from."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from locret_stream.errors import ConfigError
from locret_stream.serving import ingest as ingesting
from locret_stream.serving import streams
from locret_stream.serving.limits import Limits
from tests.langchain.support import Script
from tests.serving.support import Served, serving
from tests.serving.test_attacked import respond
from tests.serving.test_left import wait_until

IDLE = Limits(upload_idle_s=0.5, upload_resume_s=2)
PIECE = b"the door is shut\n" * 100


@pytest.fixture
def hasty(script: Script, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, limits=IDLE) as served:
        yield served


def send(served: Served, line: socket.socket, query: str = "", accept: str = "") -> None:
    """The beginning of an upload: its head and one piece."""
    head = (f"POST /v1/sessions/log/ingest{query} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            f"{accept}\r\n")
    line.settimeout(20)
    line.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(PIECE), PIECE))


def all_of(line: socket.socket) -> bytes:
    out = b""
    while piece := line.recv(65536):
        out += piece
    return out


def test_a_sender_that_dies_without_a_word_frees_its_session(hasty: Served):
    with socket.create_connection(("127.0.0.1", hasty.port)) as line:
        send(hasty, line)
        answer = all_of(line)  # and the connection is closed
    assert b" 408 " in answer and b"upload_stalled" in answer and b"1700" not in answer, answer
    began = time.perf_counter()
    assert respond(hasty, input="one", session_id="log")["locret"]["source"] == "new"
    assert time.perf_counter() - began < 5


def test_one_with_an_id_goes_on_where_it_was_read(hasty: Served):
    with socket.create_connection(("127.0.0.1", hasty.port)) as line:
        send(hasty, line, "?upload=u")
        assert b" 408 " in all_of(line)
    path = "/v1/sessions/log/ingest"
    at = hasty.http.get(path, params={"upload": "u"}).json()["offset"]
    assert at == len(PIECE)
    done = hasty.http.post(path, content=b"and open", params={"upload": "u", "offset": at}).json()
    assert done["characters"] == len(PIECE) + 8 and done["message"], done


def test_another_upload_to_the_session_waits_no_longer_than_that(hasty: Served):
    with socket.create_connection(("127.0.0.1", hasty.port)) as line:
        send(hasty, line, "?upload=u")
        wait_until(lambda: (hasty.service.uploads.state("log", "u") or {}).get("offset") == len(PIECE))
        began = time.perf_counter()
        other = hasty.http.post("/v1/sessions/log/ingest", content=b"another")
        assert other.json()["characters"] == 7 and 2 < time.perf_counter() - began < 10


def test_a_sender_that_trickles_is_ended_and_one_that_is_only_slow_is_not(hasty: Served):
    with socket.create_connection(("127.0.0.1", hasty.port)) as line:
        send(hasty, line)
        began = time.perf_counter()
        with pytest.raises(OSError):
            while time.perf_counter() - began < 10:
                line.sendall(b"1\r\nx\r\n")
                time.sleep(0.05)
        assert time.perf_counter() - began < 5
    wait_until(lambda: hasty.service._running == 0)

    def slow() -> Iterator[bytes]:
        for _ in range(8):
            yield PIECE  # more than the least bytes of each half second
            time.sleep(0.2)

    done = hasty.http.post("/v1/sessions/log/ingest", content=slow()).json()
    assert done["characters"] == 8 * len(PIECE)


def test_the_time_that_a_memory_takes_is_not_the_sender_s(hasty: Served, monkeypatch: pytest.MonkeyPatch):
    real = ingesting.take_in

    async def slowly(*given: object) -> None:
        import asyncio
        await asyncio.sleep(0.4)
        await real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(ingesting, "take_in", slowly)
    done = hasty.http.post("/v1/sessions/log/ingest", content=iter([b"one ", b"two ", b"three "])).json()
    assert done["characters"] == 14


def test_progress_shows_life_and_tells_that_the_sender_stalled(hasty: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "PING_S", 0.1)
    with socket.create_connection(("127.0.0.1", hasty.port)) as line:
        send(hasty, line, accept="Accept: text/event-stream\r\n")
        answer = all_of(line)
    assert answer.count(b": waiting\n\n") >= 2, answer
    last = [part for part in answer.split(b"\n\n") if b"data: {" in part][-1]
    assert json.loads(last[last.index(b"{"):])["code"] == "upload_stalled", answer


@pytest.mark.parametrize("given", [
    {"upload_idle_s": 0}, {"upload_least_bytes": 0}, {"upload_resume_s": 0}, {"upload_resume_s": float("inf")}])
def test_limits_that_let_nothing_in(given: dict[str, float]):
    with pytest.raises(ConfigError):
        Limits(**given)  # type: ignore[arg-type]


def test_a_sender_that_waits_for_its_session_is_not_waited_for(hasty: Served):
    """While another call has the session nothing of the body is read: that is no fault of the sender."""
    thread = hasty.service.threads.named("log")
    hasty.do(thread.lock.acquire())
    hasty.loop.call_soon_threadsafe(hasty.loop.call_later, 1.0, thread.lock.release)
    done = httpx.post(f"{hasty.url}/v1/sessions/log/ingest", content=b"hello", timeout=20)
    assert done.status_code == 200
