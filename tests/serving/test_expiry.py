"""Sessions that nobody named go after a while; those with names stay."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from locret_stream.errors import ConfigError
from locret_stream.serving import expiry
from locret_stream.serving.expiry import expire
from locret_stream.serving.limits import Limits
from locret_stream.serving.names import response_id
from tests.langchain.support import Script
from tests.serving.support import Served, serving
from tests.serving.test_left import wait_until

KEYS = {"s3cret": "acme"}


def test_only_unnamed_sessions_expire(served: Served):
    first = served.http.post("/v1/responses", json={"input": "one"}).json()
    served.http.post("/v1/responses", json={"input": "one", "session_id": "mine"})
    served.http.post("/v1/responses", json={"input": "one", "session_id": "responses/mine"})
    conversation = served.http.post("/v1/conversations", json={}).json()["id"]
    assert served.do(expire(served.service.threads, 60)) == []
    (gone,) = served.do(expire(served.service.threads, 0))
    assert gone.startswith("responses/") and gone != "responses/mine"
    kept = {row["id"] for row in served.http.get("/v1/sessions").json()["data"]}
    assert kept == {"mine", "responses/mine", conversation}
    answer = served.http.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "previous_response_not_found"


def test_a_session_that_is_gone_on_from_meanwhile_stays(served: Served):
    first = served.http.post("/v1/responses", json={"input": "one"}).json()
    (name,) = [row["id"] for row in served.http.get("/v1/sessions").json()["data"]]
    time.sleep(0.6)
    thread = served.service.threads.named(name)
    served.do(thread.lock.acquire())
    with ThreadPoolExecutor(2) as pool:
        turn = pool.submit(lambda: served.http.post("/v1/responses", json={
            "input": "two", "previous_response_id": first["id"]}))
        wait_until(lambda: thread.users == 1)
        gone = pool.submit(served.do, expire(served.service.threads, 0.5))
        wait_until(lambda: thread.users == 2)
        served.loop.call_soon_threadsafe(thread.lock.release)
        assert turn.result(30).status_code == 200 and gone.result(30) == []
    assert served.http.post("/v1/responses", json={"input": "three", "previous_response_id": turn.result().json()["id"]}
                            ).status_code == 200


def test_one_that_is_in_use_keeps_no_other_from_expiring(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expiry, "WAIT_S", 0.2)
    for _ in range(2):
        served.http.post("/v1/responses", json={"input": "one"})
    used, other = sorted(row["id"] for row in served.http.get("/v1/sessions").json()["data"])
    thread = served.service.threads.named(used)
    served.do(thread.lock.acquire())
    try:
        assert served.do(expire(served.service.threads, 0)) == [other]
    finally:
        served.loop.call_soon_threadsafe(thread.lock.release)
    assert served.do(expire(served.service.threads, 0)) == [used]


def test_a_server_looks_when_it_starts(script: Script, tmp_path: Path):
    with serving(tmp_path, keys=KEYS, key="s3cret") as served:
        first = served.http.post("/v1/responses", json={"input": "one"}).json()
    with serving(tmp_path, keys=KEYS, key="s3cret") as served:
        assert served.http.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]}
                                ).status_code == 200
    with serving(tmp_path, keys=KEYS, key="s3cret", limits=Limits(unnamed_days=1e-9)) as served:
        for _ in range(200):
            if served.http.get("/v1/sessions").json()["data"] == []:
                break
        else:
            pytest.fail("the session is still there")


def test_what_a_session_takes_on_disk_is_bounded(served: Served):
    runtime = served.service.runtime
    assert runtime.store is not None and runtime.store.max_bytes == max(256 << 20, 4 * runtime.memory.slot_bytes)


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ConfigError, match="unnamed_days is 0"):
        Limits(unnamed_days=0)


def test_a_fork_with_a_name_keeps_the_session_that_it_came_from(served: Served):
    """What is forked is deleted with its session, and what a caller named is the caller's to delete."""
    first = served.http.post("/v1/responses", json={"input": "one"}).json()
    second = served.http.post("/v1/responses", json={"input": "two"}).json()
    unnamed = [row["id"] for row in served.http.get("/v1/sessions").json()["data"]]
    (parent,) = [name for name in unnamed if response_id(name, b"")[:40] == first["id"][:40]]
    assert served.http.post(f"/v1/sessions/{parent}/fork", json={"to": "mine"}).status_code == 200
    assert served.do(expire(served.service.threads, 0)) == [name for name in unnamed if name != parent]
    assert {row["id"] for row in served.http.get("/v1/sessions").json()["data"]} == {"mine", parent}
    assert served.http.post("/v1/responses", json={"input": "more", "conversation": "mine"}).status_code == 200
    assert served.http.post("/v1/responses", json={"input": "more", "previous_response_id": second["id"]}
                            ).status_code == 404
    assert served.http.delete("/v1/sessions/mine").status_code == 200
    assert served.do(expire(served.service.threads, 0)) == [parent]


def test_no_caller_takes_a_name_that_expires(served: Served):
    name = "responses/" + "a" * 24
    for path, body in (("/v1/responses", {"input": "one", "session_id": name}),
                       ("/v1/sessions/x/fork", {"to": name})):
        refused = served.http.post(path, json=body)
        assert refused.status_code == 400 and "deleted after a while" in refused.json()["error"]["message"]
