"""What a session is asked for beside turns: it ends in time, and says where the memory stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from locret_stream.serving.limits import Limits
from tests.langchain.support import Script
from tests.serving.support import Served, serving
from tests.serving.test_attacked import converse, respond
from tests.serving.test_left import state_of, wait_until
from tests.serving.test_sessions import LOG, ingest

BUSY = [("sessions/s/ask", {"question": "?"}), ("sessions/s/fork", {"to": "t"}), ("sessions/s/rewind", {"to": 1}),
        ("sessions/s/focus", {"focus": "doors"}), ("conversations/s/items", {"items": [
            {"role": "user", "content": "late"}]}), ("sessions/s/snapshot", {}), ("sessions/s", None),
        ("sessions/s/text", None), ("sessions/s/search?words=one", None)]
DELETED = ["sessions/s", "conversations/s"]


@pytest.mark.parametrize("number", range(len(BUSY)))
@pytest.mark.thorough(but=2)
def test_what_waits_for_a_session_ends_in_time(served: Served, monkeypatch: pytest.MonkeyPatch, number: int):
    path, body = BUSY[number]
    respond(served, input="one", session_id="s")
    before = state_of(served, "s")
    thread = served.service.threads.named("s")
    with monkeypatch.context() as patch:
        patch.setattr(served.service, "limits", Limits(timeout_s=0.3))
        served.do(thread.lock.acquire())
        answer = served.http.post(f"/v1/{path}", json=body) if body is not None else served.http.get(f"/v1/{path}")
        served.loop.call_soon_threadsafe(thread.lock.release)
    assert answer.status_code == 504 and "0.3 s" in answer.json()["error"]["message"], answer.text
    wait_until(lambda: served.service._running == 0)
    assert state_of(served, "s") == before and served.http.get("/v1/sessions/t").status_code == 404


@pytest.mark.parametrize("path", DELETED)
@pytest.mark.parametrize("busy", ["s", "t"])
def test_a_deletion_that_waits_for_a_session_or_its_fork_ends_in_time(
        served: Served, monkeypatch: pytest.MonkeyPatch, path: str, busy: str):
    respond(served, input="one", session_id="s")
    assert served.http.post("/v1/sessions/s/fork", json={"to": "t"}).status_code == 200
    before = state_of(served, "s")
    thread = served.service.threads.named(busy)
    with monkeypatch.context() as patch:
        patch.setattr(served.service, "limits", Limits(timeout_s=0.3))
        served.do(thread.lock.acquire())
        try:
            answer = served.http.delete(f"/v1/{path}", timeout=10)
        finally:
            served.loop.call_soon_threadsafe(thread.lock.release)
    error = answer.json()["error"]
    assert answer.status_code == 504 and error["code"] == "timeout" and answer.headers["retry-after"] == "1", error
    assert all(part in error["message"] for part in ("0.3 s", "nothing was deleted", "another try")), error
    assert state_of(served, "s") == before
    assert served.http.delete(f"/v1/{path}").status_code == 200
    assert [served.http.get(f"/v1/sessions/{name}").status_code for name in "st"] == [404, 404]


def test_a_deletion_that_has_begun_is_not_cut(served: Served, monkeypatch: pytest.MonkeyPatch):
    respond(served, input="one", session_id="s")
    store = served.service.runtime.store
    assert store is not None
    forget = store.forget

    def slowly(name: str) -> list[str]:
        time.sleep(0.6)
        return forget(name)

    monkeypatch.setattr(store, "forget", slowly)
    monkeypatch.setattr(served.service, "limits", Limits(timeout_s=0.3))
    assert served.http.delete("/v1/sessions/s").status_code == 200


def test_a_question_has_a_time_and_a_model_of_its_own(served: Served, script: Script):
    respond(served, input="one", session_id="s")

    def ask(**body: Any) -> Any:
        return served.http.post("/v1/sessions/s/ask", json={"question": "?", **body})

    script.say, script.delay = lambda shown: "word " * 400, 0.01
    slow = ask(timeout=0.3)
    assert slow.status_code == 504 and slow.json()["error"]["code"] == "timeout", slow.text
    assert ask(timeout=0).status_code == 400 and ask(timeout=1e9).json()["error"]["param"] == "timeout"
    other = ask(model="gpt-5")
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    script.say, script.delay = lambda shown: "ok", 0.0
    assert ask(model="scripted", timeout=30).json()["answer"] == "ok"


def test_a_focus_is_in_force_after_a_restart_and_moves_nothing(script: Script, tmp_path: Path):
    with serving(tmp_path, budget=512) as served:
        ingest(served, "builds", LOG)
        before = served.http.get("/v1/sessions/builds").json()["boundaries"]
        assert served.http.get("/v1/sessions/builds/memory").json()["focus"] == 0
        answer = served.http.post("/v1/sessions/builds/focus", json={"focus": "Which door is shut?"})
        assert answer.json() == {"object": "session", "id": "builds", "focus": "Which door is shut?",
                                 "tokens": before[-1]["tokens"]}, answer.text
        after = served.http.get("/v1/sessions/builds").json()["boundaries"]
        assert [row["tokens"] for row in after] == [row["tokens"] for row in before]
    with serving(tmp_path, budget=512) as served:
        ingest(served, "builds", LOG)  # a focus begins at the next chunk
        assert served.http.get("/v1/sessions/builds/memory").json()["focus"] > 3
        assert "Which door" not in served.http.get("/v1/sessions/builds/text").json()["text"]
        served.http.post("/v1/sessions/builds/focus", json={"focus": None})
        ingest(served, "builds", LOG)
        assert served.http.get("/v1/sessions/builds/memory").json()["focus"] == 0


@pytest.mark.parametrize("session, body, status", [
    ("s", {}, 400), ("s", {"focus": 1}, 400), ("s", {"focus": "word " * 9000}, 400), ("none", {"focus": "x"}, 404)])
@pytest.mark.thorough(but=2)
def test_a_focus_that_cannot_be_leaves_the_session(served: Served, session: str, body: dict[str, Any], status: int):
    respond(served, input="one", session_id="s")
    before = state_of(served, "s")
    answer = served.http.post(f"/v1/sessions/{session}/focus", json=body)
    assert answer.status_code == status, answer.text
    assert state_of(served, "s") == before
    respond(served, input="two", session_id="s")


def test_a_conversation_that_was_told_nothing_has_a_memory_and_a_map(script: Script, tmp_path: Path):
    with serving(tmp_path) as served:
        made = converse(served)
    with serving(tmp_path) as served:  # nothing of it is at hand
        for _ in range(2):
            found = served.http.get(f"/v1/sessions/{made}/map")
            assert found.status_code == 200 and found.json()["tokens"] == 0, found.text
            assert served.http.get(f"/v1/sessions/{made}/memory").json()["tokens"] == 0
        assert served.http.get("/v1/sessions/none/map").status_code == 404
        assert served.http.post(f"/v1/sessions/{made}/ask", json={"question": "?"}).status_code == 404
        respond(served, input="one", conversation=made)


def test_a_session_whose_newest_snapshot_is_damaged_goes_back_to_an_older_one(script: Script, tmp_path: Path):
    with serving(tmp_path) as served:
        first = respond(served, input="one", session_id="s")
        before = set(tmp_path.rglob("pages/**/*"))
        respond(served, input="word " * 300, previous_response_id=first["id"])
    fresh = [path for path in tmp_path.rglob("pages/**/*") if path.is_file() and path not in before]
    assert fresh
    for path in fresh:
        path.write_bytes(b"x" * path.stat().st_size)
    with serving(tmp_path) as served:
        damaged = served.http.post("/v1/sessions/s/ask", json={"question": "?"})
        assert damaged.status_code == 409 and damaged.json()["error"]["code"] == "snapshot_corrupt", damaged.text
        back = served.http.post("/v1/sessions/s/rewind", json={"to": first["id"]})
        assert back.status_code == 200, back.text
        respond(served, input="two", previous_response_id=first["id"])
        assert "one" in script.seen
