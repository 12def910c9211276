"""A replica that is lost at any moment: what the client gets, and what the sessions are afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from locret_serve import remote
from locret_stream.serving.limits import Limits
from tests.langchain.support import Script
from tests.ray_serve.support import Many, cluster
from tests.serving.support import MODEL
from tests.serving.test_openai_client import ALICE, user

STORY = "Once there was a fox that lived behind the shed, and every evening it went down to the river to drink."


def lose_at(served: Many, nth: int, verb: str = "answer") -> list[int]:
    """Lose the replica that gives the nth part from now on; the list is its number, once it is lost."""
    came, gone = [0], list[int]()

    def on_part(number: int) -> None:
        if not gone and served.replicas.asked[-1][2] == verb:
            came[0] += 1
            if came[0] == nth:
                gone.append(number)
                served.replicas.lost.add(number)

    served.replicas.on_part = on_part
    return gone


@pytest.fixture
def story(script: Script) -> Script:
    script.say = lambda shown: STORY
    return script


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_a_streamed_chat_is_gone_on_with(served: Many, story: Script, nth: int):
    gone = lose_at(served, nth)
    with served.openai() as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=[user("tell")], stream=True,
                                                     extra_headers=ALICE, stream_options={"include_usage": True}))
        assert gone and "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == STORY
        assert len({chunk.id for chunk in chunks}) == 1 and [
            c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
        assert chunks[-2].locret["replica"] == f"r{1 - gone[0]}"
        talk: list[Any] = [user("tell"), {"role": "assistant", "content": STORY}, user("and then?")]
        more = client.chat.completions.create(model=MODEL, messages=talk, extra_headers=ALICE)
        assert more.usage.prompt_tokens_details.cached_tokens > 40  # whichever of both saved
        assert more.choices[0].message.content == STORY


def test_a_streamed_response_keeps_its_id_and_its_numbers(served: Many, story: Script):
    with served.openai() as client:
        first = client.responses.create(model=MODEL, input="hello")
        gone = lose_at(served, 6)
        with client.responses.stream(model=MODEL, input="tell", previous_response_id=first.id) as stream:
            events, final = list(stream), stream.get_final_response()
        assert gone and final.output_text == STORY
        assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
        assert [event.sequence_number for event in events] == list(range(len(events)))
        after = client.responses.create(model=MODEL, input="more", previous_response_id=final.id)
        assert after.output_text == STORY and story.seen.count(STORY) == 2 and story.seen.count("tell") == 1


def test_an_appended_turn_whose_end_was_lost_is_not_told_twice(served: Many, story: Script):
    """The replica is lost behind its save: the answer is durable and nobody has it."""
    with served.openai() as client:
        made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ann."}])
        client.responses.create(model=MODEL, input="hello", conversation=made.id)
        parts = list[int]()
        served.replicas.on_part = parts.append
        client.responses.create(model=MODEL, input="tell", conversation=made.id)
        gone = lose_at(served, len(parts))  # the last one is the end of the answer
        told = client.responses.create(model=MODEL, input="tell once more", conversation=made.id)
        assert gone and told.output_text == STORY
        client.responses.create(model=MODEL, input="last", conversation=made.id)
        assert story.seen.count("tell once more") == 1 and story.seen.count("I am Ann.") == 1


def test_items_that_were_told_as_the_replica_was_lost_are_told_once(served: Many, script: Script):
    with served.openai() as client:
        made = client.conversations.create()
        gone = lose_at(served, 1, "tell")
        client.conversations.items.create(made.id, items=[{"type": "message", "role": "user", "content": "I am Ann."}])
        assert gone
        client.responses.create(model=MODEL, input="hello", conversation=made.id)
        assert script.seen.count("I am Ann.") == 1


def test_sampled_answers_are_gone_on_with(tmp_path: Path):
    """Random weights and a high temperature: the noise is of the seed that the front chose."""
    with cluster(tmp_path) as served, served.openai() as client:
        asked = dict(model=MODEL, messages=[user("tell")], max_tokens=40, temperature=2.0)
        want = client.chat.completions.create(**asked, seed=7).choices[0].message.content
        gone = lose_at(served, 12)
        got = client.chat.completions.create(**asked, seed=7, extra_headers=ALICE).choices[0].message.content
        assert gone and got == want and len(got) > 40
    with cluster(tmp_path / "other") as served, served.openai() as client:
        gone = lose_at(served, 12)
        text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)
                       if c.choices)
        assert gone and len(text) > 40


def test_an_answer_that_turns_out_another_one_is_refused_and_nothing_of_it_stays(served: Many, script: Script):
    script.say = lambda shown: STORY if not served.replicas.lost else "Something else."
    gone = lose_at(served, 6)
    answer = served.http.post("/v1/chat/completions", json={"messages": [user("tell")], "session_id": "alice"})
    assert gone and answer.status_code == 503 and answer.json()["error"]["code"] == "replica_died"
    script.say = lambda shown: "Fine."
    again = served.http.post("/v1/chat/completions", json={"messages": [user("tell")], "session_id": "alice"})
    assert again.status_code == 200 and again.json()["choices"][0]["message"]["content"] == "Fine."


def test_when_all_are_lost_the_client_is_told(served: Many, script: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GIVE_UP_S", 0.2)
    served.replicas.lost |= {0, 1}
    answer = served.http.get("/v1/sessions")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_died"
    assert answer.headers["retry-after"] == "1"


def test_two_owners_never_both_save(served: Many, script: Script):
    """The same response is asked to go on at both replicas, whose turns overlap: one is kept, one is refused."""
    with served.openai() as client:
        made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ann."}])
        owner = next(number for key, number, _ in served.replicas.asked if key == made.id)
        client.responses.create(model=MODEL, input="one", conversation=made.id)
        held = served.replicas.memories[owner].service.threads.named(made.id)
        assert held.open
        served.replicas.routes[made.id] = 1 - owner
        client.responses.create(model=MODEL, input="two", conversation=made.id)
        assert held.open  # the first owner knows nothing of it yet
        overlapped = list[str]()

        def meanwhile() -> None:  # in the middle of a turn at the first owner the second one saves
            if not overlapped and "three" in script.seen:
                overlapped.append(script.seen)

        script.on_token = meanwhile
        served.replicas.routes[made.id] = owner
        client.responses.create(model=MODEL, input="three", conversation=made.id)
        assert "two" in script.seen and overlapped  # fenced: it looked again
        script.on_token = lambda: None
        script.delay, script.say = 0.02, lambda shown: STORY
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            def ask(number: int) -> Any:
                served.replicas.routes[f"{made.id}"] = number
                try:
                    return client.responses.create(model=MODEL, input=f"at {number}", conversation=made.id)
                except openai.APIStatusError as error:
                    return error

            one = pool.submit(ask, 0)
            while served.replicas.asked[-1][1] != 0 or "at 0" not in script.seen:
                pass
            two = pool.submit(ask, 1)
            results = [one.result(), two.result()]
        refused = [each for each in results if isinstance(each, openai.APIStatusError)]
        assert len(refused) == 1 and refused[0].status_code == 409 and refused[0].code == "stale_owner"
        script.delay = 0
        client.responses.create(model=MODEL, input="last", conversation=made.id)
        kept = results.index(next(each for each in results if each not in refused))
        assert f"at {kept}" in script.seen and f"at {1 - kept}" not in script.seen


@pytest.mark.thorough
def test_a_stream_goes_in_and_is_lost_with_its_replica(served: Many, script: Script):
    text = ("The door code of falcon is 48213.\n" * 400).encode()
    whole = served.http.put("/v1/sessions/log/ingest?label=a", content=iter([text[:100], text[100:]]))
    assert whole.status_code == 200 and whole.json()["offset"] == len(text), whole.text
    assert served.http.get("/v1/sessions/log").status_code == 200
    put = served.http.put("/v1/sessions/log/ingest?label=b&upload=u1&offset=0", content=b"only a beginning")
    assert put.status_code == 200
    assert served.http.get("/v1/sessions/log/ingest?upload=u1").json()["offset"] == 16
    gone = lose_at(served, 3, "piece")
    lost = served.http.put("/v1/sessions/log/ingest?label=c", content=iter([text[:70000], text[:70000]]))
    assert gone and lost.status_code == 409 and lost.json()["error"]["code"] == "upload_lost", lost.text
    again = served.http.put("/v1/sessions/log/ingest?label=c", content=text)
    assert again.status_code == 200 and again.json()["characters"] == len(text)
    asked = served.http.post("/v1/sessions/log/ask", json={"question": "What?"})
    assert asked.json()["answer"] == "You said: What?"


def test_bytes_that_are_no_text_undo_a_stream(served: Many, script: Script):
    put = served.http.put("/v1/sessions/log/ingest", content=iter([b"fine\n" * 2000, b"\xff\xfe"]))
    assert put.status_code == 400
    assert served.http.get("/v1/sessions/log").status_code == 404


@pytest.mark.thorough
def test_a_session_stays_where_it_is_and_has_its_own_replica(served: Many, script: Script):
    with served.openai() as client:
        for turn in range(3):
            for number in range(8):
                client.chat.completions.create(model=MODEL, messages=[user(f"{turn}")],
                                               extra_headers={"X-Session-Id": f"s{number}"})
    where: dict[str, set[int]] = {}
    for key, number, verb in served.replicas.asked:
        if verb == "answer":
            where.setdefault(str(key), set()).add(number)
    assert len(where) == 8 and all(len(numbers) == 1 for numbers in where.values())
    assert {number for numbers in where.values() for number in numbers} == {0, 1}


def test_forks_and_going_back_and_forgetting(served: Many, script: Script):
    with served.openai() as client:
        first = client.responses.create(model=MODEL, input="one", extra_headers=ALICE)
        second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        assert served.http.post("/v1/sessions/alice/fork", json={"to": "bob"}).status_code == 200
        kept = served.http.get("/v1/sessions/bob").json()
        assert kept["id"] == "bob" and kept["boundaries"]
        assert served.http.post("/v1/sessions/alice/rewind", json={"to": first.id}).status_code == 200
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        for path in ("memory", "map", "text?start=0&end=9", "search?words=one"):
            assert served.http.get(f"/v1/sessions/alice/{path}").status_code == 200, path
        assert served.http.get("/v1/sessions/nobody").status_code == 404
        assert served.http.delete("/v1/sessions/alice").status_code == 200
        assert served.http.get("/v1/sessions").json()["data"] == []
        assert served.http.delete("/v1/sessions/alice").status_code == 404


def test_figures_of_all(served: Many, script: Script):
    with served.openai() as client:
        for number in range(6):
            client.chat.completions.create(model=MODEL, messages=[user("x")],
                                           extra_headers={"X-Session-Id": f"s{number}"})
    assert served.http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    text = served.http.get("/metrics").text
    counted = {name: float(text.partition(f'locret_requests_total{{kind="turn",replica="{name}"}} ')[2].split()[0])
               for name in ("r0", "r1")}
    assert sum(counted.values()) == 6 and min(counted.values()) > 0, text
    assert 'locret_refused_total{code="400",replica="front"} 1.0' in text
    assert text.count("# TYPE locret_requests_total counter") == 1
    assert served.http.get("/ready").text == "ready"


def test_a_sender_that_is_slow_is_not_given_up_by_its_replica(script: Script, tmp_path: Path):
    def slow() -> Iterator[bytes]:
        yield b"one "
        time.sleep(1.5)  # more than a replica waits for a sender of whom it hears nothing
        yield b"two"

    with cluster(tmp_path, limits=Limits(upload_resume_s=0.6)) as many:
        done = many.http.post("/v1/sessions/log/ingest", content=slow())
    assert done.status_code == 200 and done.json()["characters"] == 7, done.text
