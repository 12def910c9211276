"""Sessions over HTTP: streams go in, questions leave them as they are, they fork, rewind, tell what they hold, go."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from locret_stream import NoSlot
from tests.langchain.support import Script
from tests.serving.support import MODEL, Served, serving
from tests.serving.test_left import wait_until

LOG = "".join(f"{number} the door is shut, and the window is open\n" for number in range(300))


def ingest(served: Served, session: str, text: str, **query: Any) -> dict[str, Any]:
    answer = served.http.post(f"/v1/sessions/{session}/ingest", content=text.encode(), params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_stream_is_one_message_of_a_chat(script: Script, tmp_path: Path):
    with serving(tmp_path) as served:
        done = ingest(served, "builds", LOG, label="build log")
        assert done["characters"] == len(LOG) and done["offset"] == len(LOG.encode())
        assert done["message"]["content"] == (f"[absorbed stream build log: {len(LOG)} characters, sha256 "
                                              f"{hashlib.sha256(LOG.encode()).hexdigest()}]")
    with serving(tmp_path) as served, served.openai() as client:  # it was durable
        talk = [done["message"], {"role": "user", "content": "what?"}]
        answer = client.chat.completions.create(model=MODEL, messages=talk, extra_body={"session_id": "builds"})
        assert answer.locret["source"] == "snapshot" and answer.locret["fed"] < 20 and "299 the door" in script.seen
        # One that no memory holds is never answered as if it were.
        lost = served.http.post("/v1/chat/completions", json={"session_id": "other", "messages": talk})
        assert lost.status_code == 409 and lost.json()["error"]["code"] == "state_lost"
        # Responses go on behind it, too.
        behind = served.http.post("/v1/responses", json={"input": "and?", "session_id": "builds"})
        assert behind.status_code == 200


def test_questions_leave_a_session_as_it_is(served: Served, script: Script):
    ingest(served, "builds", LOG)
    before = served.http.get("/v1/sessions/builds/map").json()
    script.say = lambda shown: "It is shut."
    answer = served.http.post("/v1/sessions/builds/ask", json={"question": "Is the door shut?", "max_tokens": 20})
    assert answer.json()["answer"] == "It is shut." and "Is the door shut?" in script.seen
    assert answer.json()["finish_reason"] == "stop"
    cut = served.http.post("/v1/sessions/builds/ask", json={"question": "Is the door shut?", "max_tokens": 2}).json()
    assert cut["finish_reason"] == "length" and "It is shut.".startswith(cut["answer"])
    assert served.http.get("/v1/sessions/builds/map").json() == before
    assert served.http.post("/v1/sessions/builds/ask", json={"question": " "}).status_code == 400
    assert served.http.post("/v1/sessions/nothing/ask", json={"question": "?"}).status_code == 404


def test_maps_and_texts_show_what_is_held(script: Script, tmp_path: Path):
    with serving(tmp_path, budget=512) as served:
        ingest(served, "builds", LOG)
        memory = served.http.get("/v1/sessions/builds/memory").json()
        whole = served.http.get("/v1/sessions/builds/map", params={"columns": 50}).json()
        assert whole["tokens"] == memory["tokens"] and len(whole["kept"]) == 1 and len(whole["kept"][0]) == 1
        assert sum(whole["kept"][0][0]) == memory["units"][0] + memory["pending"] <= 512 + 64
        assert len(whole["kept"][0][0]) <= 50 and whole["kept"][0][0][0] == 4  # the sinks
        part = served.http.get("/v1/sessions/builds/map", params={"start": 0, "end": 10, "columns": 10}).json()
        assert part["column"] == 1 and part["kept"][0][0] == [1] * 4 + [0] * 6
        text = served.http.get("/v1/sessions/builds/text", params={"start": 0, "end": 40}).json()
        assert "0 the door is shut" in text["text"] and text["end"] == 40
        found = served.http.get("/v1/sessions/builds/search", params={"words": "137 door"}).json()
        assert any("137 the door" in passage["text"] for passage in found["data"])
        for query in ({"start": -1}, {"columns": 0}, {"start": 10, "end": 5}, {"end": 10**9}, {"columns": "x"}):
            assert served.http.get("/v1/sessions/builds/map", params=query).status_code == 400, query


def test_a_fork_goes_on_alone_and_a_rewind_takes_back(served: Served, script: Script):
    first = served.http.post("/v1/responses", json={"input": "one", "session_id": "a"}).json()
    second = served.http.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]}).json()
    assert served.http.post("/v1/sessions/a/fork", json={"to": "b"}).json()["id"] == "b"
    assert served.http.post("/v1/sessions/a/fork", json={"to": "b"}).status_code == 400  # it holds something
    rows = served.http.get("/v1/sessions/a").json()["boundaries"]
    assert [row["response"] for row in rows if row["response"]] == [first["id"], second["id"]]
    back = served.http.post("/v1/sessions/a/rewind", json={"to": first["id"]}).json()
    assert back["tokens"] < rows[-1]["tokens"]
    gone = served.http.post("/v1/responses", json={"input": "x", "previous_response_id": second["id"]})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "previous_response_not_found"
    assert served.http.post("/v1/responses", json={"input": "x", "previous_response_id": first["id"]}
                            ).status_code == 200
    assert served.http.post("/v1/sessions/a/rewind", json={"to": 999}).status_code == 404
    assert served.http.post("/v1/sessions/a/rewind", json={}).status_code == 400
    assert "two" in served.http.get("/v1/sessions/b/text").json()["text"]
    assert served.http.delete("/v1/sessions/a").json()["deleted"]
    assert served.http.get("/v1/sessions").json()["data"] == []  # its forks went with it
    assert served.http.delete("/v1/sessions/a").status_code == 404


def test_a_stream_that_breaks_off_goes_on_or_leaves_nothing(served: Served, monkeypatch: pytest.MonkeyPatch):
    def broken() -> Iterator[bytes]:
        yield LOG[:5000].encode()
        time.sleep(0.5)  # else it is gone before a byte of it was read
        raise RuntimeError("the sender died")

    for query in ({}, {"upload": "u1"}):
        with httpx.Client(base_url=served.url) as sender, pytest.raises(RuntimeError):
            sender.post("/v1/sessions/builds/ingest", content=broken(), params=query)
        wait_until(lambda: served.service._running == 0)
        state = served.http.get("/v1/sessions/builds/ingest", params={"upload": "u1"})
        if not query:
            assert state.status_code == 404 and served.http.get("/v1/sessions/builds").status_code == 404
    at = state.json()["offset"]
    assert 0 < at <= 5000
    wrong = served.http.post("/v1/sessions/builds/ingest", content=b"x", params={"upload": "u1", "offset": at + 1})
    assert wrong.status_code == 409 and wrong.json()["error"]["code"] == "wrong_offset"
    rest = {"upload": "u1", "offset": at}
    done = ingest(served, "builds", LOG[at:], **rest)
    assert hashlib.sha256(LOG.encode()).hexdigest() in done["message"]["content"]
    again = served.http.post("/v1/sessions/builds/ingest", content=b"", params={"upload": "u1",
                                                                               "offset": len(LOG)})
    assert again.json()["message"] == done["message"]  # who missed the answer asks again
    unknown = served.http.post("/v1/sessions/builds/ingest", content=b"x", params={"upload": "u2", "offset": 7})
    assert unknown.status_code == 409 and unknown.json()["error"]["code"] == "upload_lost"


def test_a_stream_that_is_cut_off_inside_a_piece_does_not_go_on(served: Served, monkeypatch: pytest.MonkeyPatch):
    """The memory has read a part of it, and nobody knows how much: it is undone, and begins again."""
    from locret_stream.conversation.absorbing import Absorption
    real = Absorption.push

    async def push(self: Absorption, text: str) -> None:
        await real(self, text[:len(text) // 2])
        raise NoSlot("no live slot came free")

    with monkeypatch.context() as patch:
        patch.setattr(Absorption, "push", push)
        cut = served.http.post("/v1/sessions/builds/ingest", content=LOG[:500].encode(), params={"upload": "u1"})
    assert cut.status_code == 503
    assert served.http.get("/v1/sessions/builds/ingest", params={"upload": "u1"}).status_code == 404
    ingest(served, "builds", LOG[:500], upload="u1")
    assert served.http.get("/v1/sessions/builds/text").json()["text"].count("3 the door is shut") == 1


def test_a_sender_that_never_comes_back_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.service.uploads, "resume_s", 0.2)

    def broken() -> Iterator[bytes]:
        yield LOG.encode()
        raise RuntimeError("the sender died")

    with httpx.Client(base_url=served.url) as sender, pytest.raises(RuntimeError):
        sender.post("/v1/sessions/builds/ingest", content=broken(), params={"upload": "u1"})
    answer = served.http.post("/v1/responses", json={"input": "one", "session_id": "builds"})  # waits for the session
    assert answer.status_code == 200 and answer.json()["locret"]["source"] == "new"


def test_progress_is_told_while_it_is_read(served: Served, monkeypatch: pytest.MonkeyPatch):
    from locret_stream.serving import ingest as ingesting
    monkeypatch.setattr(ingesting, "TELL_EVERY_S", 0.0)
    with served.http.stream("POST", "/v1/sessions/builds/ingest", content=LOG.encode(),
                            headers={"accept": "text/event-stream"}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["ingest.started", "ingest.completed"]
    assert events[-1]["characters"] == len(LOG) and any(event["type"] == "ingest.progress" for event in events)
    with served.http.stream("POST", "/v1/sessions/builds/ingest", content=b"\xff\xfe",
                            headers={"accept": "text/event-stream"}) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")][-1]
    assert last["type"] == "error" and "UTF-8" in last["message"]


@pytest.mark.parametrize("content, query, status", [
    (b"", {}, 400), (b"\xff", {}, 400), ("ä".encode()[:1], {}, 400), (b"x", {"label": "a\nb"}, 400),
    (b"x", {"offset": "-1"}, 400), (b"x", {"upload": ""}, 400), (b"x", {"upload": "u" * 200}, 400)])
@pytest.mark.thorough(but=2)
def test_streams_that_cannot_be_read_leave_nothing(served: Served, content: bytes, query: dict, status: int):
    answer = served.http.post("/v1/sessions/builds/ingest", content=content, params=query)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert served.http.get("/v1/sessions/builds").status_code == 404


@pytest.mark.thorough
def test_a_sender_is_read_only_as_fast_as_the_memory_takes_it_in(served: Served):
    """A producer without end: what is on its way stays bounded while the session is busy with another turn."""
    thread = served.service.threads.named("builds")
    served.do(thread.lock.acquire())
    sent = 0
    with socket.socket() as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # all that is on its way is read in the end
        sender.connect(("127.0.0.1", served.port))
        sender.sendall(b"POST /v1/sessions/builds/ingest HTTP/1.1\r\nHost: localhost\r\n"
                       b"Transfer-Encoding: chunked\r\n\r\n")
        sender.settimeout(1.0)
        piece = LOG.encode()
        frame = b"%x\r\n%s\r\n" % (len(piece), piece)
        with pytest.raises(TimeoutError):
            while sent < 1 << 26:
                sent += sender.send(frame[sent % len(frame):])
        assert sent < 4 << 20, sent
    threading.Event().wait(0.1)
    served.loop.call_soon_threadsafe(thread.lock.release)
    wait_until(lambda: served.service._running == 0, within_s=60)
    assert served.http.get("/v1/sessions/builds").status_code == 404
